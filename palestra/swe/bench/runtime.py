"""Where an instance is worked on and judged. Native: its Python and packages in one snapshot, which all instances of the same
environment share, and its repository in another on top. Or its container image. All is installed before; later, no network.
"""

import asyncio
import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from palestra import sandboxes
from palestra.errors import Unprepared
from palestra.protocols import Ran, Sandbox, Snapshot, Spec
from palestra.swe import grading
from palestra.swe.bench import interpreters, mirrors, plan
from palestra.swe.bench.instance import Instance

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_ENVIRONMENT = "/home/agent/env"
_MADE = 3
"""Counts changes of what is done below, which a snapshot's key would not tell."""
_FOR_PIP = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
BUILD_SECONDS = 3600.0


class Runtime(Protocol):
    @property
    def folder(self) -> str:
        """The repository, inside."""

    @property
    def path(self) -> str:
        """Where programs are found: the instance's own Python first."""

    async def snapshot(self, instance: Instance) -> Snapshot:
        """The repository at its base commit, in one commit without history, and installed."""

    def test(self, instance: Instance) -> plan.Script:
        """How its tests are run here."""


@dataclass(frozen=True)
class Native:
    mirrors: str
    """A folder of bare repositories, or a git server's address."""
    _made: dict[str, Snapshot] = field(default_factory=dict, compare=False, repr=False)
    _building: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False, repr=False)
    """One environment at a time: each build uses what processors there are."""

    folder = "/work/repo"
    path = f"{_ENVIRONMENT}/bin:{SYSTEM_PATH}"

    async def snapshot(self, instance: Instance) -> Snapshot:
        if instance.id not in self._made:
            async with self._building:
                environment = await self._environment(plan.packages(instance))
                self._made[instance.id] = await self._repository(instance, environment)
        return self._made[instance.id]

    def test(self, instance: Instance) -> plan.Script:
        found = plan.script(instance)
        # tox would look for its own environment; it runs just this. Of locales there is one in every base.
        test = re.sub(r"^tox --current-env \S+ -v --", "python -m pytest -rA", found.test)
        exports = tuple(line.replace("en_US.UTF-8", "C.UTF-8") for line in found.exports)
        install = tuple(_with_libraries(_editable(line), instance.repo) for line in found.install)
        return plan.Script(found.before, install, exports, test)

    async def _environment(self, packages: plan.Packages) -> Snapshot:
        key = hashlib.sha256(json.dumps(asdict(packages)).encode()).hexdigest()
        if key not in self._made:
            python = interpreters.find(packages.python)
            folders = {} if python.in_system else {str(python.prefix): await asyncio.to_thread(python.bare)}
            name = f"swe-bench python {'.'.join(map(str, python.version))}"
            base = await sandboxes.snapshot(Spec(folders, name=name)) if folders else Snapshot()
            spec = Spec(name=f"swe-bench environment {_MADE} {python.version} {key}", network=True, base=base)
            lines = _environment_lines(python, packages)
            self._made[key] = await sandboxes.snapshot(spec, lambda sandbox: _run(sandbox, lines, "its environment", "/work"))
        return self._made[key]

    async def _repository(self, instance: Instance, environment: Snapshot) -> Snapshot:
        script = self.test(instance)
        name = f"swe-bench repository {_MADE} {instance.repo} {instance.base_commit} {script.before} {script.install}"

        async def fill(sandbox: Sandbox) -> None:
            git = await asyncio.to_thread(mirrors.find, self.mirrors, instance.repo)
            await sandbox.write("/tmp/repo.tar", await asyncio.to_thread(mirrors.archive, git, instance.base_commit))
            unpack = f"mkdir -p {self.folder} && tar -xf /tmp/repo.tar -C {self.folder} && rm /tmp/repo.tar"
            await _run(sandbox, [unpack], instance.id, "/work")
            await _run(sandbox, script.before, instance.id, self.folder)
            await grading.begin(sandbox, self.folder)
            lines = [f"export PATH={self.path} PYTHONDONTWRITEBYTECODE=1", *_pip_settings(instance), *script.install]
            await _run(sandbox, lines, instance.id, self.folder)
            await grading.settle(sandbox, self.folder)

        return await sandboxes.snapshot(Spec(name=name, network=True, base=environment), fill)


@dataclass(frozen=True)
class Image:
    """The official images have the repository in /testbed, which everybody may write to, and its environment beside it."""

    _made: dict[str, Snapshot] = field(default_factory=dict, compare=False, repr=False)

    folder = "/testbed"
    path = f"/testbed/.venv/bin:/opt/miniconda3/envs/testbed/bin:{SYSTEM_PATH}"

    async def snapshot(self, instance: Instance) -> Snapshot:
        if instance.id not in self._made:
            spec = Spec(name=f"swe-bench image {_MADE}", base=Snapshot(instance.image))
            self._made[instance.id] = await sandboxes.snapshot(spec, self._fill)
        return self._made[instance.id]

    def test(self, instance: Instance) -> plan.Script:
        return plan.script(instance)

    async def _fill(self, sandbox: Sandbox) -> None:
        """The files become the agent's own, so that their times can be set; the history goes."""
        lines = [
            "git config --global --add safe.directory /testbed",
            "find . -mindepth 1 -maxdepth 1 ! -name .git -print0 | tar --null --files-from=- -cf /work/files.tar",
            "find . -mindepth 1 -delete",
            "tar -xf /work/files.tar && rm /work/files.tar",
        ]
        await _run(sandbox, lines, "the image", self.folder)
        await grading.begin(sandbox, self.folder)


def _editable(line: str) -> str:
    """So that what the agent changes is what the tests import, without another installation."""
    line = re.sub(r"^python setup\.py install$", "python -m pip install .", line)
    return re.sub(r"^(python -m pip install) \.", r"\1 -e .", line)


def _with_libraries(line: str, repo: str) -> str:
    """Matplotlib's build fetches freetype and qhull from their own servers. Where they cannot be reached, the system's will do,
    except for tests that compare images of text."""
    if repo != "matplotlib/matplotlib":
        return line
    settings = "printf '[libs]\\nsystem_freetype = true\\nsystem_qhull = true\\n' > /tmp/mplsetup.cfg"
    return f"{line} || {{ {settings}; MPLSETUPCFG=/tmp/mplsetup.cfg {line}; }}"


def _environment_lines(python: interpreters.Interpreter, packages: plan.Packages) -> list[str]:
    pip = "python -m pip install --no-deps --no-warn-script-location"
    lines = [
        f"{shlex.quote(str(python.program))} -m venv {_ENVIRONMENT}",
        f"export PATH={_ENVIRONMENT}/bin:$PATH",
        *_pip_environment(),
    ]
    if packages.tools:
        lines.append(f"{pip} {_words(packages.tools)}")
    if packages.pins:
        lines.append(f"{pip} {_words(packages.pins)}")
    if packages.conda:
        wheels = f"{pip} --only-binary :all:"  # what conda compiled may not compile here
        near = f"{wheels} ${{each/==/~=}}"  # conda compiled releases for Pythons that only a later patch has a wheel for
        each = f"{wheels} $each || {near} || echo $each >> {_ENVIRONMENT}/left-out.txt"
        alone = f"for each in {_words(packages.conda)}; do {each}; done"
        lines.append(f"{wheels} {_words(packages.conda)} || {alone}")
    return lines


def _pip_environment() -> list[str]:
    return [f"export {name}={shlex.quote(os.environ[name])}" for name in _FOR_PIP if os.environ.get(name)]


def _pip_settings(instance: Instance) -> list[str]:
    """What the repository's build may need: its version, which it would ask its history for; and no newer setuptools than the
    environment's, since old builds fail with what came later."""
    lines = [*_pip_environment(), f"export SETUPTOOLS_SCM_PRETEND_VERSION={shlex.quote(instance.version or '1.0')}"]
    newest = next((pin.replace("==", "<=") for pin in plan.packages(instance).tools if pin.startswith("setuptools==")), None)
    if newest:
        lines += [f"echo '{newest}' > /tmp/constraints.txt", "export PIP_CONSTRAINT=/tmp/constraints.txt"]
    return lines


def _words(pins: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, pins))


async def _run(sandbox: Sandbox, lines: Sequence[str], what: str, folder: str) -> Ran:
    ran = await sandbox.run(["bash", "-c", "\n".join(["set -e", "exec 2>&1", *lines])], folder=folder, seconds=BUILD_SECONDS)
    if ran.code:
        said = (ran.stdout.head + ran.stdout.tail).decode(errors="replace")
        errors = [line.strip() for line in said.splitlines() if re.search(r"error|cannot|no such|not found", line, re.IGNORECASE)]
        how = "took too long" if ran.timed_out else f"ended with {ran.code}"
        raise Unprepared(f"{what} could not be set up: it {how}: {' | '.join((errors or said.splitlines())[-4:])[-700:]}")
    return ran
