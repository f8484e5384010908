"""`palestra sandbox doctor`: what this host can and cannot protect, tried out rather than guessed."""

import os
import platform
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.errors import PalestraError
from palestra.protocols import Spec
from palestra.sandbox import cgroup, seccomp
from palestra.sandbox.bubblewrap import Bubblewrap

FALLBACK = {
    "memory": "each process alone is limited (RLIMIT_DATA), not the sandbox as a whole",
    "pids": "RLIMIT_NPROC counts the processes instead",
    "cpu": "a sandbox may use every core until its time limit",
}
DELEGATE = "run as root, or under `systemd-run --user --scope -p Delegate=yes`"


@dataclass(frozen=True, slots=True)
class Finding:
    """`weaker` works with less protection or speed, `missing` does not work."""

    state: Literal["ok", "weaker", "missing"]
    about: str
    text: str


async def examine(cache: Path | None = None) -> AsyncIterator[Finding]:
    program = shutil.which("bwrap")
    if program is None:
        yield Finding("missing", "bubblewrap", "bwrap is not installed; install the package bubblewrap")
        return
    yield Finding("ok", "bubblewrap", f"{_version(program)}, on Linux {platform.release()}")
    if platform.machine() not in seccomp.MACHINES:
        yield Finding("missing", "seccomp", f"no filter for {platform.machine()}; known: {', '.join(seccomp.MACHINES)}")
        return
    provider = Bubblewrap(cache=cache)
    try:
        yield _warden(provider)
        yield _identity()
        for controller in cgroup.CONTROLLERS:
            yield _limit(controller, provider.controllers)
        async for finding in _try_out(provider):
            yield finding
    finally:
        await provider.close()
    yield Finding(
        "weaker", "kernel", "shared with the host: a bug in it is not held back. Where that matters: gVisor, or a micro-VM"
    )


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def _warden(provider: Bubblewrap) -> Finding:
    if provider.compiled:
        return Finding("ok", "supervisor", "compiled")
    return Finding(
        "weaker", "supervisor", "no C compiler: the one in Python serves, with slower starts and 8 MB each; install gcc"
    )


def _identity() -> Finding:
    if os.geteuid() == 0:
        return Finding("ok", "user", "root outside: each live sandbox has a uid of its own, which belongs to nobody else")
    return Finding(
        "weaker", "user", "an ordinary user: to the host, processes in sandboxes are this user's, in namespaces of their own"
    )


def _limit(controller: str, there: frozenset[str]) -> Finding:
    if controller in there:
        return Finding("ok", f"{controller} limit", f"control groups version {cgroup.hierarchies()[controller].version}")
    return Finding("weaker", f"{controller} limit", f"no control group can be made: {FALLBACK[controller]}. {DELEGATE}")


async def _try_out(provider: Bubblewrap) -> AsyncIterator[Finding]:
    try:
        async with provider.open() as sandbox:
            ran = await sandbox.run(
                ["sh", "-c", "grep -E '^(NoNewPrivs|Seccomp|CapEff):' /proc/self/status | tr -s '\\t\\n' ' '"]
            )
        yield Finding("ok", "a sandbox", f"starts: namespaces, overlayfs, {ran.stdout.head.decode().strip()}")
    except PalestraError as error:
        yield Finding("missing", "a sandbox", f"{error}. Are unprivileged user namespaces and overlayfs allowed here?")
        return
    try:
        await provider.snapshot(Spec(commands=[["touch", "tried"]], name="doctor"))
        yield Finding("ok", "snapshots", f"kept in {provider.layers.folder}")
    except PalestraError as error:
        yield Finding(
            "missing", "snapshots", f"{error}. Set sandbox.cache to a folder on a plain file system such as ext4 or xfs"
        )
