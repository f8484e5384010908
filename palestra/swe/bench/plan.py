"""What an instance asks for, read from its fields: which Python and packages, what is done before its repository is installed and
how that is installed, and how its tests are run. Nothing is run here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from palestra.errors import TaskError, Unprepared
from palestra.swe.bench import official
from palestra.swe.bench.instance import Instance

START, END = ": '>>>>> Start Test Output'", ": '>>>>> End Test Output'"

_FOR_THE_SYSTEM = ("apt-get", "wget", "tar ", "mkdir", "QHULL", "echo ", "locale-gen")
"""How lines begin that change the official image's system; natively the system is the sandbox's base."""
_CONDA_NAMES = {"matplotlib-base": "matplotlib", "msgpack-python": "msgpack", "seaborn-base": "seaborn", "dask-core": "dask"}
"""Packages that conda calls otherwise."""
_CONDA_ONLY = {"python", "python-abi", "numpy-base", "pyqt", "sip", "blas"}
_NO_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


@dataclass(frozen=True)
class Packages:
    """An environment."""

    python: str
    tools: tuple[str, ...]
    """pip, setuptools and wheel, which come first."""
    pins: tuple[str, ...]
    """What pip installed there."""
    conda: tuple[str, ...]
    """What conda installed there of Python's packages. The index may not have all of them."""


@dataclass(frozen=True)
class Script:
    before: tuple[str, ...]
    install: tuple[str, ...]
    exports: tuple[str, ...]
    test: str


def packages(instance: Instance) -> Packages:
    if not instance.environment_yml:
        raise Unprepared(
            f"{instance.id} has no environment_yml, so its packages are not known; use data with that field, "
            "or its container image (tasks.arguments.runtime = 'image')"
        )
    python, tools, pins, conda = "", [], [], []
    for line in instance.environment_yml.splitlines():
        if pinned := re.match(r"\s+- ([A-Za-z0-9_.\-\[\]]+==\S+)\s*$", line):
            pins.append(pinned[1])
        elif conda_made := re.match(r"\s*- ([A-Za-z0-9_.\-]+)=([^=\s]+)=(\S+)\s*$", line):
            name, version, build = conda_made.groups()
            name = name.replace("_", "-")  # conda has some under both spellings
            if name == "python":
                python = version
            elif name in ("pip", "setuptools", "wheel"):
                tools.append(f"{name}=={version}")
            elif build.startswith("py") and name not in _CONDA_ONLY:
                conda.append(f"{_CONDA_NAMES.get(name, name)}=={version}")
    if not python:
        raise TaskError(f"{instance.id}: environment_yml names no python")
    return Packages(python, tuple(tools), tuple(pins), tuple(dict.fromkeys(conda)))


def script(instance: Instance) -> Script:
    """From the official evaluation script where the data has it, else from the package's table."""
    known = official.specs(instance.repo, instance.version) if instance.version else {}
    before = tuple(line for line in known.get("pre_install", ()) if not line.startswith(_FOR_THE_SYSTEM))
    if instance.eval_sh:
        head, start, rest = instance.eval_sh.partition(START)
        test, end, _ = rest.partition(END)
        lines = [line.strip() for line in _without_documents(head)]
        if not start or not end or not test.strip():
            raise TaskError(f"{instance.id}: eval_sh does not show with its markers which command runs the tests")
        install = tuple(line for line in lines if re.match(r"python (-m pip install|setup\.py install)", line))
        exports = tuple(line for line in lines if line.startswith("export "))
        return Script(before, install, exports, test.strip())
    command = known.get("test_cmd", "pytest -rA")
    command = command if isinstance(command, str) else command[-1]
    return Script(
        before,
        (known.get("install", "python -m pip install -e ."),),
        tuple(line for line in known.get("eval_commands", ()) if line.startswith("export ")),
        " ".join((command, *directives(instance))),
    )


def _without_documents(text: str) -> Iterable[str]:
    """The lines of a shell script without what it feeds to commands."""
    end = ""
    for line in text.splitlines():
        if end:
            end = "" if line == end else end
            continue
        document = re.search(r"<<\s*'?(\w+)'?\s*$", line)
        end = document[1] if document else ""
        yield line


def directives(instance: Instance) -> list[str]:
    """What the tests' command is told to run: the test patch's files, as the repository's runner names them."""
    files = [path for path in changed_files(instance.test_patch) if not path.endswith(_NO_TESTS)]
    if instance.repo != "django/django":
        return files
    return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files]


def changed_files(patch: str) -> list[str]:
    return re.findall(r"^diff --git a/.* b/(.*)$", patch, re.MULTILINE)
