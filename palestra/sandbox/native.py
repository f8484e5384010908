"""The warden, compiled at first use. Without a compiler a slower one in Python does the same work."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from palestra.sandbox import slow_launch

SOURCES = Path(__file__).parent / "warden"
COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True, slots=True)
class Warden:
    """How it is called, outside and inside. Inside it comes as a descriptor, so no path of the host is known there."""

    outside: tuple[str, ...]
    inside: tuple[str, ...]
    compiled: bool


INSIDE = "/proc/self/fd/4"
SLOW = Warden((sys.executable, "-ISB", slow_launch.__file__), ("/usr/bin/python3", "-ISB", INSIDE), False)


@cache
def warden(folder: Path) -> Warden:
    """The compiled warden in this folder, made now if need be; the slow one where that cannot be."""
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(platform.machine().encode())
    for source in sources:
        digest.update(source.read_bytes())
    program = folder / f"warden-{digest.hexdigest()[:16]}"
    if not program.exists() and not _compile([str(source) for source in sources if source.suffix == ".c"], program):
        return SLOW
    return Warden((str(program),), (INSIDE,), True)


def _compile(sources: list[str], program: Path) -> bool:
    partial = program.with_name(f"{program.name}.{os.getpid()}")
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        for linking in (["-static"], []):  # not every system has a static C library
            done = subprocess.run([compiler, "-O2", *linking, "-o", str(partial), *sources], capture_output=True, check=False)
            if done.returncode == 0:
                partial.rename(program)
                return True
    return False
