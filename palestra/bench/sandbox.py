"""`palestra bench sandbox`: starts, commands, ends, memory and crowds of sandboxes, side by side with a bare process, a bare
bwrap and podman; and whether anything is left when they are gone.
"""

import asyncio
import gc
import os
import resource
import shutil
import signal
import statistics
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from palestra import interrupts
from palestra.errors import InfrastructureError
from palestra.protocols import Sandbox, Snapshot, Spec
from palestra.sandbox import cgroup
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.limits import MIB, Limits

STARTS = {1: 40, 8: 96, 32: 128}
"""How many are started in all, by how many at once."""
COMMANDS = 200
CROWD = 1000
CYCLES = 1000
CYCLES_AT_ONCE = 16
CRASHED = 7
"""With one in so many of the cycles, a sandbox is killed from outside."""


def bench_sandbox(console: Console, crowd: int = CROWD, cycles: int = CYCLES, podman: str | None = None) -> dict[str, Any]:
    """`podman` are its words up to the image, such as `run --rm --network none debian`."""
    return interrupts.run(_bench(console, crowd, cycles, podman))


async def _bench(console: Console, crowd: int, cycles: int, podman: str | None) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)  # two for each sandbox
    provider = Bubblewrap(Limits(memory=256 * MIB, disk=64 * MIB, processes=64))
    try:
        snapshot = await provider.snapshot(Spec(commands=[["sh", "-c", "seq 100000 > numbers"]], name="bench"))
        raw: dict[str, Any] = {"start": {}, "destroy": {}}
        for at_once, count in STARTS.items():
            started, ended = await _starts(provider, snapshot, at_once, count)
            raw["start"][at_once], raw["destroy"][at_once] = _summary(started), _summary(ended)
        raw["command"] = await _commands(provider, snapshot)
        raw["peers"] = await _peers(podman)
        raw["crowd"] = await _crowd(provider, snapshot, crowd)
        raw["cycles"] = await _cycles(provider, snapshot, cycles)
    finally:
        await provider.close()
    figures = {
        "start_ms": raw["start"][1]["median"],
        "start_8_ms": raw["start"][8]["median"],
        "command_overhead_ms": raw["command"]["sandbox"]["median"] - raw["command"]["bare"]["median"],
        "destroy_ms": raw["destroy"][1]["median"],
        "idle_mb": raw["crowd"]["idle_mb"],
        "alive": raw["crowd"]["alive"],
        "leaks": raw["cycles"]["leaks"],
        "raw": raw,
    }
    _show(console, figures)
    return figures


async def _timed(work: Awaitable[object]) -> float:
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) * 1000


def _summary(milliseconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    last = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"median": statistics.median(ordered), "p99": last, "least": ordered[0], "count": len(ordered)}


async def _starts(provider: Bubblewrap, snapshot: Snapshot, at_once: int, count: int) -> tuple[list[float], list[float]]:
    """Each is ready for a command when its start is over. The next round begins when all are gone."""
    started, ended = [], []
    for _ in range(count // at_once):
        stacks = [AsyncExitStack() for _ in range(at_once)]
        started += await asyncio.gather(*(_timed(stack.enter_async_context(provider.open(snapshot))) for stack in stacks))
        ended += await asyncio.gather(*(_timed(stack.aclose()) for stack in stacks))
    return started, ended


async def _commands(provider: Bubblewrap, snapshot: Snapshot) -> dict[str, Any]:
    """`true`, in a live sandbox and as a bare process of this one, in turns."""
    inside, bare = [], []
    async with provider.open(snapshot) as sandbox:
        for _ in range(COMMANDS):
            inside.append(await _timed(sandbox.run(["/bin/true"])))
            bare.append(_bare_process("/bin/true"))
    return {"sandbox": _summary(inside), "bare": _summary(bare)}


def _bare_process(program: str) -> float:
    """The least that running a program and taking what it writes can cost."""
    began = time.perf_counter()
    read, write = os.pipe()
    pid = os.posix_spawn(program, [program], {}, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
    os.close(write)
    os.read(read, 1)
    os.close(read)
    os.waitpid(pid, 0)
    return (time.perf_counter() - began) * 1000


async def _run(command: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    await process.communicate()
    if process.returncode:
        raise InfrastructureError(f"{command[0]} ended with {process.returncode}")


async def _peers(podman: str | None) -> dict[str, Any]:
    """What others take for a start with one command, where they are installed."""
    peers: dict[str, Any] = {}
    bwrap = [
        "bwrap",
        "--unshare-all",
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/bin",
        "/bin",
        "--symlink",
        "usr/lib",
        "/lib",
    ]
    bwrap += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "/bin/true"]
    peers["bwrap"] = await _peer(bwrap, 20)
    peers["podman"] = await _peer(["podman", *podman.split(), "/bin/true"], 5) if podman else "no image was given"
    return peers


async def _peer(command: Sequence[str], count: int) -> dict[str, float] | str:
    if shutil.which(command[0]) is None:
        return "not installed"
    try:
        return _summary([await _timed(_run(command)) for _ in range(count)])
    except InfrastructureError as error:
        return str(error)


async def _crowd(provider: Bubblewrap, snapshot: Snapshot, count: int) -> dict[str, Any]:
    """So many alive at once; each then runs a command."""
    slots = asyncio.Semaphore(16)
    async with AsyncExitStack() as stack:

        async def start() -> Sandbox:
            async with slots:
                return await stack.enter_async_context(provider.open(snapshot))

        sandboxes = await asyncio.gather(*(start() for _ in range(count)))
        idle = _charged()
        answers = [await sandbox.run(["/bin/true"]) for sandbox in sandboxes]
        times = [answer.seconds * 1000 for answer in answers]
        alive = sum(answer.code == 0 for answer in answers)
    return {"alive": alive, "idle_mb": idle, "command": _summary(times)}


def _charged() -> float | None:
    """Megabytes that the kernel charges to each sandbox's control group, its own structures included; None without groups."""
    memory = cgroup.hierarchies().get("memory")
    if memory is None:
        return None
    name = ("memory.usage_in_bytes", "memory.current")[memory.version - 1]
    used = [int(file.read_text()) for file in memory.own.glob(f"{cgroup.owner_name()}/*/{name}")]
    return statistics.median(used) / 2**20 if used else None


async def _cycles(provider: Bubblewrap, snapshot: Snapshot, count: int) -> dict[str, Any]:
    """Opened, used and closed; some crashed. What is there afterwards that was not before?"""
    await _starts(provider, snapshot, 1, 1)
    before = _traces(provider)
    slots = asyncio.Semaphore(CYCLES_AT_ONCE)
    felt = killed = 0

    async def cycle(number: int) -> None:
        nonlocal felt, killed
        async with slots:
            if number % CRASHED == 0:
                killed += _kill_somebody()
            try:
                async with provider.open(snapshot) as sandbox:
                    await sandbox.run(["sh", "-c", "head -c 100000 /dev/zero > file; setsid sleep 1000 & sleep 0.05"])
            except InfrastructureError:
                felt += 1

    seconds = await _timed(asyncio.gather(*(cycle(number) for number in range(count)))) / 1000
    gc.collect()
    await asyncio.sleep(0.5)
    after = _traces(provider)
    leaks = {name: after[name] - value for name, value in before.items()}
    left = sum(max(0, more) for more in leaks.values())
    return {"count": count, "killed": killed, "felt": felt, "seconds": seconds, "leaked": leaks, "leaks": left}


def _kill_somebody() -> bool:
    """The supervisor of a live sandbox, or bwrap when there is none yet; whether there was one."""
    for outer in _children():
        for pid in _children(outer) or [outer]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
    return False


def _traces(provider: Bubblewrap) -> dict[str, int]:
    """Counts of all that a sandbox could leave on this host."""
    mounts = {hierarchy.mount for hierarchy in cgroup.hierarchies().values()}
    cache = [path for path in provider.layers.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "processes": len(_descendants()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": sum(f"palestra-{os.getpid()}-" in folder for mount in mounts for folder, _, _ in os.walk(mount)),
        "bytes": sum(path.lstat().st_size for path in cache),
    }


def _descendants() -> list[int]:
    """Processes of this host whose command line tells a sandbox, or that are children of this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"sleep\x001000\0" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found + _children()


def _children(of: int | None = None) -> list[int]:
    pid = of or os.getpid()
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _show(console: Console, figures: dict[str, Any]) -> None:
    raw = figures["raw"]
    for at_once, start in raw["start"].items():
        end = raw["destroy"][at_once]
        console.print(
            f"{at_once} at once: start {start['median']:.1f} ms (p99 {start['p99']:.1f}), "
            f"end {end['median']:.1f} ms (p99 {end['p99']:.1f})"
        )
    command = raw["command"]
    console.print(f"a command: {command['sandbox']['median']:.2f} ms, as a bare process {command['bare']['median']:.2f} ms")
    for name, peer in raw["peers"].items():
        said = peer if isinstance(peer, str) else f"{peer['median']:.1f} ms"
        console.print(f"{name}, started for one command: {said}", markup=False)
    crowd, cycles = raw["crowd"], raw["cycles"]
    each = "memory unknown" if crowd["idle_mb"] is None else f"{crowd['idle_mb']:.2f} MB each"
    console.print(f"{crowd['alive']} alive at once, {each}, a command {crowd['command']['median']:.2f} ms")
    console.print(f"{cycles['count']} cycles in {cycles['seconds']:.1f} s, {cycles['killed']} killed from outside")
    console.print(f"left behind: {cycles['leaked']}")
