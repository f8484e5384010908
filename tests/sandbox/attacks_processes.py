"""Attacks by processes: too many, too large, too loud, too long, and on those who watch them."""

import asyncio
import os
import resource
import time
from pathlib import Path

import pytest
from sandbox.arena import Arena, attack, on_the_host, until

from palestra.errors import InfrastructureError, ToolError

FORKS = """
count = 0
try:
    while count < {most}:
        if not os.fork():
            time.sleep({seconds}); os._exit(0)
        count += 1
except BlockingIOError:
    pass
print(count)"""


@attack("process_limit")
async def start_too_many_processes(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        count = int(await inside.python(FORKS.format(most=arena.limits.processes + 100, seconds=3), seconds=20))
        assert count <= arena.limits.processes + 8
        assert await inside.alive()


@attack()
async def bomb_with_forks(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        await inside.run("bash", "-c", ":(){ :|:& };:; sleep 1; wait", seconds=2.0)
        await inside.run("bash", "-c", ":(){ :|:& };:", seconds=2.0)
        assert await inside.alive()


@attack("process_limit")
async def start_too_many_threads(arena: Arena) -> None:
    script = f"""
count = 0
threading.stack_size(65536)
try:
    while count < {arena.limits.processes + 100}:
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print(count); sys.stdout.flush(); os._exit(0)"""
    async with arena.sandbox() as inside:
        assert int(await inside.python(script)) <= arena.limits.processes + 8


@attack("memory_limit")
async def take_too_much_memory(arena: Arena) -> None:
    script = f"block = bytearray({arena.limits.memory * 2})\nprint('TOOK', len(block))"
    async with arena.sandbox() as inside:
        assert "TOOK" not in await inside.python(script)
        assert await inside.alive()


@attack()
async def take_too_much_memory_in_many_pieces(arena: Arena) -> None:
    if "memory" not in arena.controllers:
        pytest.skip("no memory control group here: processes are limited one by one")
    script = f"""
for _ in range(16):
    if not os.fork():
        block = bytearray({arena.limits.memory // 8}); time.sleep(3); os._exit(0)
print(sum(os.waitstatus_to_exitcode(os.wait()[1]) == 0 for _ in range(16)))"""
    async with arena.sandbox() as inside:
        said = await inside.python(script, seconds=20)
        assert said == "" or int(said) < 9
        assert await inside.alive()


@attack()
async def flood_the_output(arena: Arena) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with arena.sandbox() as inside:
        ran = await inside.run("head", "-c", str(2**30), "/dev/zero", seconds=60)
        assert (ran.stdout.size, len(ran.stdout.head + ran.stdout.tail)) == (2**30, 65_536)
        endless = await inside.run("yes", seconds=0.5)
        assert endless.timed_out
        assert len(endless.stdout.head + endless.stdout.tail) <= 65_536
        line = await inside.run("head", "-c", "50000000", "/dev/zero")
        assert not line.stdout.whole
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32_768  # kilobytes


@attack()
async def leave_a_daemon_behind(arena: Arena) -> None:
    marker = f"9{int(arena.secret[-6:], 16)}"
    async with arena.sandbox() as inside:
        await inside.sh(f"setsid sh -c 'setsid sleep {marker} & setsid sleep {marker} &' & echo begun")
        assert await until(lambda: len(on_the_host(f"sleep\0{marker}")) == 2)
    assert await until(lambda: on_the_host(f"sleep\0{marker}") == [], 2)


@attack()
async def hold_the_output_open(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        started = time.monotonic()
        assert await inside.sh("yes > /dev/stderr & sleep 30 & echo done", seconds=20) != ""
        assert time.monotonic() - started < 10
        assert await inside.alive()


@attack()
async def leave_orphans_and_zombies(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        await inside.sh("for i in $(seq 50); do (sleep 0.1 &) ; done; sleep 0.5")
        states = await inside.sh("cat /proc/[0-9]*/stat | sed 's/.*) //' | cut -c1 | sort | uniq -c")
        assert "Z" not in states


@attack()
async def see_other_processes(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        pids = (await inside.sh("ls /proc | grep -E '^[0-9]+$'")).split()
        assert len(pids) < 8
        assert max(map(int, pids)) < 50


@attack()
async def stop_or_read_the_supervisor(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        await inside.sh("for s in KILL STOP TERM HUP SEGV TRAP USR1 CHLD; do kill -$s 1; done")
        for name in ("mem", "environ", "maps", "fd/3", "cwd/x", "root/etc", "stack", "syscall", "auxv"):
            assert (await inside.run("sh", "-c", f"cat /proc/1/{name}")).code, name
        assert (await inside.run("sh", "-c", "ls /proc/1/fd")).code
        assert await inside.alive()


@attack()
async def stop_everything_again_and_again(arena: Arena) -> None:
    """Commands are stopped as they start; the one who stops them ends at its time limit, and then all is well."""
    script = (
        "while True:\n    for name in os.listdir('/proc'):\n        if name.isdigit() and int(name) not in (1, os.getpid()):\n"
    )
    script += "            tried(lambda: os.kill(int(name), 19))"
    async with arena.sandbox() as inside:
        stopping = asyncio.create_task(inside.python(script, seconds=1.5))
        others = [inside.run("true", seconds=1.0) for _ in range(20)]
        await asyncio.wait_for(asyncio.gather(*others), 20)
        await stopping
        assert await inside.alive()


@attack()
async def kill_everything(arena: Arena) -> None:
    host = await asyncio.create_subprocess_exec("sleep", "60")
    async with arena.sandbox() as inside:
        await inside.sh(f"kill -9 {host.pid}")
        await inside.sh("kill -9 -1")
        assert await inside.alive()
    assert host.returncode is None
    host.kill()
    assert await host.wait() == -9


@attack()
async def find_open_descriptors(arena: Arena) -> None:
    canary = os.open(arena.canary, os.O_RDONLY)
    os.set_inheritable(canary, True)
    try:
        async with arena.sandbox() as inside:
            listed = await inside.python(
                "print(*[fd for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')])"
            )
            assert sorted(listed.split()) == ["0", "1", "2"]
            assert arena.secret not in await inside.sh("cat /proc/*/fd/*")
    finally:
        os.close(canary)


@attack()
async def open_too_many_files(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        assert await inside.python("print(tried(lambda: [os.dup(0) for _ in range(100_000)]))") == "EMFILE"


@attack("own_uid")
async def be_the_same_user_as_a_neighbour(arena: Arena) -> None:
    marker = f"8{int(arena.secret[-6:], 16)}"
    async with arena.sandbox() as one, arena.sandbox() as other:
        for inside in (one, other):
            await inside.sh(f"sleep {marker} & echo begun")
        assert await until(lambda: len(on_the_host(f"sleep\0{marker}")) == 2)
        uids = [_host_uid(pid) for pid in on_the_host(f"sleep\0{marker}")]
        assert 0 not in uids
        if os.geteuid() == 0:
            assert len(set(uids)) == 2
        else:
            assert set(uids) == {os.geteuid()}  # as the doctor says


def _host_uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("Uid:")[2].split()[0])


@attack("cpu_limit")
async def take_too_much_of_the_processor(arena: Arena) -> None:
    if "cpu" not in arena.controllers:
        pytest.skip("no cpu control group here, as the doctor says")
    script = "end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    async with arena.sandbox() as inside:
        assert float(await inside.python(script)) < arena.limits.cpus * 1.5 * 2


@attack()
async def run_on_after_the_time_limit(arena: Arena) -> None:
    scripts = {
        "busy": "while :; do :; done",
        "deaf": "trap '' TERM HUP INT QUIT; while :; do sleep 1; done",
        "stopped": "kill -STOP $$; sleep 60",
        "elsewhere": "setsid sh -c 'setsid sleep 60 & sleep 60' & sleep 60",
    }
    async with arena.sandbox() as inside:
        for name, script in scripts.items():
            started = time.monotonic()
            ran = await inside.run("sh", "-c", f"echo kept > {name}; {script}", seconds=0.4)
            assert ran.timed_out, name
            assert time.monotonic() - started < 50, name
            assert await inside.api.read(f"/work/{name}") == b"kept\n"
            left = await inside.sh("cat /proc/[0-9]*/stat | grep -c '(sleep)'")
            assert int(left.split()[0]) == 0, name


@attack()
async def end_anothers_work_by_a_time_limit(arena: Arena) -> None:
    """What an earlier command left running goes on; so does what another one has running."""
    async with arena.sandbox() as inside:
        await inside.sh("sleep 77 & echo begun")
        await asyncio.sleep(0.1)
        other = asyncio.create_task(inside.sh("sleep 1.5; echo undisturbed"))
        await asyncio.sleep(0.1)
        assert (await inside.run("sh", "-c", "setsid sleep 78 & sleep 79", seconds=0.3)).timed_out
        assert "sleep 77" in (left := (await inside.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")))
        assert "sleep 78" not in left
        assert await other == "undisturbed\n"


@attack()
async def be_closed_at_work(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        working = asyncio.create_task(inside.run("sleep", "60"))
        await asyncio.sleep(0.2)
    with pytest.raises(InfrastructureError):
        await asyncio.wait_for(working, 5)
    with pytest.raises(InfrastructureError):
        await inside.run("true")


@attack()
async def send_huge_input(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        with pytest.raises(ToolError):
            await inside.run("echo", "x" * 10_000_000)
        with pytest.raises(ToolError):
            await inside.run(*["x"] * 100_000)
        data = os.urandom(10_000_000)
        await inside.api.write("/work/large", data)
        assert await inside.api.read("/work/large") == data
        ran = await inside.api.run(["sh", "-c", "echo x >> /proc/self/fd/0; wc -c"], stdin=data)
        assert ran.stdout.head == b"10000000\n"
