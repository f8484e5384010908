"""The default provider: bubblewrap over overlayfs. Read-only layers that all share, a writable one of limited size in memory,
namespaces, no capabilities, a seccomp filter, control groups where permitted; and a supervisor inside as PID 1.
"""

import asyncio
import hashlib
import itertools
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from palestra.errors import InfrastructureError, UsageError
from palestra.protocols import Sandbox, Snapshot, Spec
from palestra.sandbox import cgroup, seccomp
from palestra.sandbox.layers import AGENT, HOME, WORK, Layers, cache_folder
from palestra.sandbox.limits import ALL, Limits, Protections
from palestra.sandbox.native import Warden, warden
from palestra.sandbox.setup import run_commands
from palestra.sandbox.started import start
from palestra.sandbox.supervised import SupervisedSandbox

STAGE = "/tmp"
"""Where the warden puts the layers, in a mount namespace of its own. See warden/launch.c."""
FILTER = 5
"""The descriptor that the warden keeps the seccomp program at."""
RESOLVER = "/etc/resolv.conf"
"""Without it a shared network knows no names."""
SHM = 16 * 2**20
FIRST_UID = 0x70000000
"""Uids from here on belong to no user. The first owns the files of all layers; live sandboxes have one each of the others."""
UIDS = 0x0FF00000
MASKED = ("cmdline", "kallsyms", "kcore", "keys", "timer_list", "interrupts", "modules", "sched_debug")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}

REMOVAL_SECONDS = 20.0
NOTHING = Snapshot()
Setup = Callable[[Sandbox], Awaitable[object]]


_NAMES = itertools.count()
"""Of control groups: one count for the process, since all providers of a process share a folder of groups."""


class Bubblewrap:
    """Opens sandboxes. Close it when all of them are closed."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        cache: Path | None = None,
        base: Path = Path("/"),
        protections: Protections = ALL,
        engine: Warden | None = None,
    ) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise UsageError("bwrap is not installed; install the package bubblewrap, or set sandbox.kind to another provider")
        self.limits = limits or Limits()
        self._bwrap = program
        self._protections = protections
        self._root = os.geteuid() == 0
        folder = cache_folder(cache)
        self._warden = engine or warden(folder)
        self.layers = Layers(folder, base, FIRST_UID if self._root else os.geteuid())
        self._filter = _filter_file(folder)
        self._cgroups = cgroup.Cgroups()
        self._uids: set[int] = set()
        cgroup.sweep()
        self.layers.sweep(snapshots=False)

    @property
    def controllers(self) -> frozenset[str]:
        """What control groups limit here; rlimits must do for the rest."""
        return self._cgroups.controllers

    @property
    def compiled(self) -> bool:
        return self._warden.compiled

    async def snapshot(self, spec: Spec, setup: Setup | None = None) -> Snapshot:
        """The state after the spec's commands, then `setup`. It is built once, and found again by later runs."""
        key = await asyncio.to_thread(self.layers.key, spec)
        async with self.layers.lock(key):
            if not self.layers.has(key):
                await self._build(key, spec, setup)
            return Snapshot(key)

    async def _build(self, key: str, spec: Spec, setup: Setup | None) -> None:
        building = self.layers.building(key, spec)
        place = await asyncio.to_thread(building.__enter__)
        try:
            limits = replace(self.limits, network=spec.network)
            async with self._opened(spec.base, limits, place) as sandbox:
                await run_commands(sandbox, spec)
                if setup is not None:
                    await setup(sandbox)
        except BaseException as error:
            with suppress(type(error)):  # thrown back out of the block, which clears away
                building.__exit__(type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(building.__exit__, None, None, None)

    @asynccontextmanager
    async def open(self, snapshot: Snapshot = NOTHING) -> AsyncIterator[Sandbox]:
        async with self._opened(snapshot, self.limits, None) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def _opened(self, snapshot: Snapshot, limits: Limits, upper: Path | None) -> AsyncIterator[Sandbox]:
        async with self._uid(upper) as uid, self._group(limits) as group:
            started = await start([*self._warden.outside, *self._arguments(snapshot, limits, upper, uid, group)])
            try:
                yield SupervisedSandbox(started.line, WORK, self._environment())
            finally:
                await asyncio.shield(started.end())

    def _environment(self) -> dict[str, str]:
        return dict(ENVIRONMENT) if self._protections.clear_environment else {**os.environ, **ENVIRONMENT}

    @asynccontextmanager
    async def _group(self, limits: Limits) -> AsyncIterator[cgroup.Group]:
        try:
            group = self._cgroups.make(f"s{next(_NAMES)}", limits, self._protections)
        except OSError as error:
            raise InfrastructureError(f"no control group for a sandbox: {error}") from None
        try:
            yield group
        finally:
            await asyncio.shield(_removed(group))

    @asynccontextmanager
    async def _uid(self, upper: Path | None) -> AsyncIterator[int]:
        """A uid of the host that no other sandbox has; what becomes a layer belongs to the layers' own."""
        if not self._root or upper is not None or not self._protections.own_uid:
            yield FIRST_UID if self._root else 0
            return
        while (uid := FIRST_UID + 1 + secrets.randbelow(UIDS)) in self._uids:
            pass
        self._uids.add(uid)
        try:
            yield uid
        finally:
            self._uids.discard(uid)

    def _arguments(self, snapshot: Snapshot, limits: Limits, upper: Path | None, uid: int, group: cgroup.Group) -> list[str]:
        ours = self._protections
        plan = ["launch", *(f"cgroup={file}" for file in group.joins)]
        plan += [f"layer={layer}" for layer in self.layers.under(snapshot)]
        plan += [f"uid={uid}", f"from={FIRST_UID}"] if self._root else ["user=1"]
        disk = limits.disk if ours.disk_limit else 2**40
        plan += [f"size={disk}", f"inodes={limits.inodes if ours.disk_limit else 2**20}"]
        if upper is not None:
            plan.append(f"upper={upper}")
        if ours.seccomp:
            plan.append(f"filter={self._filter}")
        data = limits.memory if "memory" not in group.controllers and ours.memory_limit else 0
        processes = limits.processes if ours.process_limit else 0
        inside = ["supervise", str(processes), str(data), str(limits.open_files)]
        return [*plan, "--", self._bwrap, *self._isolation(limits), *self._view(limits), "--", *self._warden.inside, *inside]

    def _isolation(self, limits: Limits) -> list[str]:
        ours = self._protections
        words = ["--unshare-user", "--uid", str(AGENT), "--gid", str(AGENT), "--disable-userns", "--cap-drop", "ALL"]
        words += [
            "--unshare-pid",
            "--as-pid-1",
            "--unshare-uts",
            "--hostname",
            "sandbox",
            "--unshare-cgroup-try",
            "--new-session",
        ]
        if ours.ipc_namespace:
            words.append("--unshare-ipc")
        if ours.network_namespace and not limits.network:
            words.append("--unshare-net")
        if ours.clear_environment:
            words.append("--clearenv")
        if ours.seccomp:
            words += ["--seccomp", str(FILTER)]
        return words

    def _view(self, limits: Limits) -> list[str]:
        ours = self._protections
        words = ["--bind", f"{STAGE}/root", "/"]
        for source, inside in self.layers.binds:
            words += ["--ro-bind" if ours.read_only_system else "--bind", str(source), inside]
        if limits.network and os.path.exists(RESOLVER):
            words += ["--ro-bind", os.path.realpath(RESOLVER), RESOLVER]
        if not ours.hidden_host:
            words += ["--ro-bind", "/", "/mnt"]
        words += [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--perms",
            "1777",
            "--size",
            str(SHM),
            "--tmpfs",
            "/dev/shm",
            "--remount-ro",
            "/dev",
        ]
        for name in MASKED if ours.masked_proc else ():
            if os.path.exists(f"/proc/{name}"):
                words += ["--ro-bind", f"{STAGE}/empty", f"/proc/{name}"]
        return [*words, "--chdir", "/"]

    async def close(self) -> None:
        self._cgroups.close()


def _filter_file(folder: Path) -> Path:
    program = seccomp.program()
    file = folder / f"filter-{hashlib.sha256(program).hexdigest()[:16]}"
    if not file.exists():
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_bytes(program)
        partial.rename(file)
    return file


async def _removed(group: cgroup.Group) -> None:
    """The kernel may take a moment after the last process, and on a crowded machine seconds. What stays even then, the sweep
    finds once this process has ended."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + REMOVAL_SECONDS, 0.005
    while not group.remove() and loop.time() < deadline:
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.2)
