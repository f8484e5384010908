"""Finding the Python that an instance was made with: those of pyenv and uv, whatever is on the path, and this very one."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from palestra.cache import cache_folder
from palestra.errors import Unprepared

_ASK = (
    "import sys; print('%d.%d.%d' % sys.version_info[:3]); print(getattr(sys, 'base_prefix', sys.prefix)); print(sys.executable)"
)


_LEFT_OUT = shutil.ignore_patterns("site-packages", "test", "idlelib", "__pycache__", "*.a")


@dataclass(frozen=True)
class Interpreter:
    version: tuple[int, ...]
    program: Path
    prefix: Path

    @property
    def in_system(self) -> bool:
        """Whether a sandbox shows it anyway."""
        return self.prefix.is_relative_to("/usr")

    def bare(self) -> Path:
        """A copy in the cache without its own tests and without whatever is installed in it."""
        version = ".".join(map(str, self.version))
        place = cache_folder() / "pythons" / f"{version}-{hashlib.sha256(bytes(self.prefix)).hexdigest()[:12]}"
        if not place.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=place.parent))
            for name in ("bin", "include", "lib"):
                shutil.copytree(self.prefix / name, partial / name, symlinks=True, ignore=_LEFT_OUT)
            try:
                partial.rename(place)
            except OSError:  # another process was faster
                shutil.rmtree(partial)
        return place


@cache
def find(version: str) -> Interpreter:
    """The interpreter of that version; another patch release of it will do, the nearest first."""
    wanted = tuple(int(part) for part in version.split(".")[:3])
    found = [each for each in map(_ask, _candidates(f"{wanted[0]}.{wanted[1]}")) if each and each.version[:2] == wanted[:2]]
    if not found:
        minor = f"{wanted[0]}.{wanted[1]}"
        raise Unprepared(
            f"no Python {minor} on this machine; install it with `uv python install {minor}` or `pyenv install {minor}`"
        )
    return min(found, key=lambda each: abs(each.version[2] - (wanted[2] if len(wanted) > 2 else 0)))


def _candidates(minor: str) -> list[Path]:
    home = Path.home()
    pyenv = [Path(os.environ.get("PYENV_ROOT") or home / ".pyenv"), Path("/opt/pyenv")]
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local" / "share" / "uv" / "python")
    places = [folder / "versions" for folder in pyenv] + [uv]
    pattern = re.compile(rf"(cpython-)?{re.escape(minor)}(\.\d+)?(-.*)?\Z")
    folders = [folder for place in places if place.is_dir() for folder in sorted(place.iterdir()) if pattern.match(folder.name)]
    on_path = shutil.which(f"python{minor}")
    programs = [folder / "bin" / f"python{minor}" for folder in folders] + ([Path(on_path)] if on_path else [])
    return [*(program for program in programs if program.exists()), Path(sys.executable)]


@cache
def _ask(program: Path) -> Interpreter | None:
    """What the program says of itself. One that does not answer is none: pyenv has such for versions that it lacks."""
    try:
        done = subprocess.run([str(program), "-I", "-c", _ASK], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    version, prefix, executable = done.stdout.splitlines()[:3]
    return Interpreter(tuple(map(int, version.split("."))), Path(executable), Path(prefix).resolve())
