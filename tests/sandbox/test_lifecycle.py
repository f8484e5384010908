"""Whatever happens to the owner, nothing is left: no process, mount, descriptor, control group or file."""

import asyncio
import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sandbox.arena import on_the_host, until

from palestra.errors import InfrastructureError
from palestra.protocols import Sandboxes, Spec
from palestra.sandbox import cgroup
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.layers import Layers
from palestra.sandbox.pool import Pool

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")

OWNER = """
import asyncio, sys
from contextlib import AsyncExitStack
from pathlib import Path
from palestra.protocols import Spec
from palestra.sandbox.bubblewrap import Bubblewrap

async def main():
    provider = Bubblewrap(cache=Path(sys.argv[1]))
    async with AsyncExitStack() as stack:
        for _ in range(3):
            sandbox = await stack.enter_async_context(provider.open())
            await sandbox.run(["sh", "-c", f"setsid sleep {sys.argv[2]} & echo"])
        print("up", flush=True)
        await provider.snapshot(Spec(commands=[["sleep", sys.argv[2]]]))

asyncio.run(main())
"""


def _groups_of(pid: int) -> list[str]:
    mounts = {hierarchy.mount for hierarchy in cgroup.hierarchies().values()}
    return sorted(folder for mount in mounts for folder, _, _ in os.walk(mount) if f"/palestra-{pid}-" in folder)


def _traces() -> dict[str, object]:
    """All that a sandbox could leave on this host."""
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": _groups_of(os.getpid()),
        "children": Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text(),
    }


async def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    marker = f"7{secrets.randbelow(10**8)}"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), marker], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    assert await until(lambda: len(on_the_host(f"sleep\0{marker}")) == 4)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert await until(lambda: on_the_host(f"sleep\0{marker}") == [], 5)
    assert str(tmp_path) not in str(_traces()["mounts"])
    left = Layers(tmp_path, Path("/"), 0).sweep(snapshots=False)
    assert len(left) == 1  # the snapshot that was being built
    assert await until(lambda: bool(cgroup.sweep()) or not _groups_of(owner.pid))
    assert _groups_of(owner.pid) == []


async def test_many_come_and_go_and_some_crash(cache: Path) -> None:
    provider = Bubblewrap(cache=cache)
    async with provider.open() as sandbox:
        await sandbox.run(["true"])
    gc.collect()
    before = _traces()
    await asyncio.gather(*(_live(provider, number) for number in range(24)))
    gc.collect()
    assert _traces() == before
    await provider.close()
    assert _traces()["groups"] == []


async def _live(provider: Bubblewrap, number: int) -> None:
    """One in three ends badly: the body raises, or it is cancelled, or its processes are killed from the host."""

    async def body() -> None:
        async with provider.open() as sandbox:
            await sandbox.run(["sh", "-c", f"head -c 1M /dev/zero > file; setsid sleep 6{number:03} &"])
            if number % 9 == 0:
                raise InfrastructureError("on purpose")
            if number % 9 == 3:
                await asyncio.sleep(60)
            if number % 9 == 6:
                [pid, *_] = [pid for pid in on_the_host("supervise\0") if _parent(pid) == os.getpid()]
                os.kill(pid, signal.SIGKILL)

    task = asyncio.create_task(body())
    if number % 9 == 3:
        await asyncio.sleep(0.5)
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None or isinstance(task.exception(), InfrastructureError)


def test_a_sandbox_outlives_the_thread_that_opened_it(cache: Path) -> None:
    """Where a death signal would be used, it would be sent when the thread ends."""
    provider = Bubblewrap(cache=cache)
    loop = asyncio.new_event_loop()
    opening = provider.open()
    thread = threading.Thread(target=lambda: loop.run_until_complete(opening.__aenter__()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert [pid for pid in on_the_host("supervise\0") if _parent(pid) == os.getpid()]
    loop.run_until_complete(opening.__aexit__(None, None, None))
    loop.run_until_complete(provider.close())
    loop.close()


def _parent(pid: int) -> int:
    """0 when it has ended meanwhile, as those of others may."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("PPid:")[2].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return 0


async def test_a_sandbox_that_cannot_start_says_why(cache: Path, tmp_path: Path) -> None:
    provider = Bubblewrap(cache=cache, base=tmp_path)  # there is nothing to run in it
    before = _traces()
    async with provider.open() as sandbox:
        assert (await sandbox.run(["true"])).code == 127
    shutil.rmtree(provider.layers.skeleton)
    with pytest.raises(InfrastructureError, match="skeleton-"):
        async with provider.open():
            pass
    assert _traces() == before | {"groups": _traces()["groups"]}
    await provider.close()


async def test_the_pool_hands_out_what_nobody_used(cache: Path) -> None:
    pool: Sandboxes = Pool(Bubblewrap(cache=cache), 2)
    snapshot = await pool.snapshot(Spec(commands=[["touch", "here"]]))
    for _ in range(6):
        async with pool.open(snapshot) as sandbox, pool.open() as other:
            assert (await sandbox.run(["ls"])).stdout.head == b"here\n"
            assert (await other.run(["ls"])).stdout.head == b""
            await sandbox.run(["touch", "used"])
            await other.run(["touch", "used"])
    await pool.close()
    assert _traces()["groups"] == []


async def test_many_who_want_the_same_new_snapshot_do_not_keep_its_builder_from_working(cache: Path) -> None:
    """More of them than there are threads to wait in."""
    provider = Bubblewrap(cache=cache)
    spec = Spec(commands=[["sleep", "0.2"]], name=secrets.token_hex(8))
    try:
        async with asyncio.timeout(30):
            found = await asyncio.gather(*(provider.snapshot(spec) for _ in range(100)))
    finally:
        await provider.close()
    assert len(set(found)) == 1


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
async def test_a_command_tried_by_hand_can_be_stopped(stop: signal.Signals) -> None:
    """Before its standard input has come to an end, and while it runs."""
    marker = str(secrets.randbelow(10**6) + 10**6)
    command = [sys.executable, "-m", "palestra", "sandbox", "run", "--", "sh", "-c", f"sleep {marker} & wait"]
    ends = (subprocess.PIPE, subprocess.DEVNULL)
    waiting, running = (subprocess.Popen(command, stdin=stdin) for stdin in ends)  # noqa: ASYNC220
    assert await until(lambda: len(on_the_host(f"sleep\0{marker}")) == 1, 30)
    assert await until(lambda: _catches(waiting.pid, signal.SIGTERM), 30)
    for process in (waiting, running):
        process.send_signal(stop)
        assert process.wait(30) == 128 + stop
    assert await until(lambda: on_the_host(f"sleep\0{marker}") == [], 5)
    assert waiting.stdin is not None
    waiting.stdin.close()


def _catches(pid: int, number: signal.Signals) -> bool:
    [caught] = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (number - 1) & 1)
