"""Attacks on the kernel's wide surface: namespaces, mounts, keys, tracing, other ABIs."""

import platform

import pytest
from sandbox.arena import Arena, attack

from palestra.sandbox.seccomp import MACHINES, REFUSED

MACHINE = MACHINES[platform.machine()]


@attack("seccomp")
async def call_what_is_refused(arena: Arena) -> None:
    numbers = {name: both[MACHINE.column] for name, both in REFUSED.items() if both[MACHINE.column] is not None}
    async with arena.sandbox() as inside:
        said = await inside.python(f"print({{name: call(number, 0, 0, 0, 0, 0) for name, number in {numbers}.items()}})")
        wrong = {name: result for name, result in eval(said).items() if result != "EPERM"}
        assert wrong == {}


@attack("seccomp")
async def keep_a_key(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        number = REFUSED["add_key"][MACHINE.column]
        assert await inside.python(f"print(call({number}, b'user', b'name', b'secret', 6, -4))") == "EPERM"


@attack("seccomp")
async def trace_a_child(arena: Arena) -> None:
    script = f"""
pid = os.fork()
if not pid:
    time.sleep(5); os._exit(0)
print(call({REFUSED["ptrace"][MACHINE.column]}, 16, pid, 0, 0))
os.kill(pid, 9)"""
    async with arena.sandbox() as inside:
        assert await inside.python(script) == "EPERM"


@attack("seccomp")
async def make_namespaces(arena: Arena) -> None:
    flags = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
    unshare = REFUSED["unshare"][MACHINE.column]
    async with arena.sandbox() as inside:
        said = await inside.python(f"print(*[call({unshare}, flag) for flag in {(*flags, 0x80)}])")
        assert said.split() == ["EPERM"] * 8
        said = await inside.python(f"print(*[call({MACHINE.clone}, flag | 17, 0, 0, 0, 0) for flag in {flags}])")
        assert said.split() == ["EPERM"] * 7
        assert await inside.python(f"print(call({MACHINE.clone3}, 0, 0))") == "ENOSYS"


@attack()
async def nest_a_sandbox(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        for command in (
            "bwrap --ro-bind / / true",
            "unshare -Ur true",
            "unshare -m true",
            "chroot / true",
            "mount -t tmpfs none /tmp",
        ):
            assert (await inside.run("sh", "-c", command)).code, command


@attack("seccomp")
async def use_another_table_of_calls(arena: Arena) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("int 0x80 and x32 are x86_64's")
    script = """
import mmap
code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20 (getpid); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
print("pid", ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())"""
    async with arena.sandbox() as inside:
        ran = await inside.run("python3", "-c", "import ctypes\n" + script)
        assert (ran.code, ran.stdout.head) == (128 + 31, b"")
        assert await inside.python("print(call(0x40000000 | 39))") == "ENOSYS"


@attack("seccomp")
async def call_what_is_not_known_yet(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        numbers = range(MACHINE.newest + 1, MACHINE.newest + 8)
        said = await inside.python(f"print(*[call(n, -1, -1, -1, -1, -1) for n in {list(numbers)}])")
        assert set(said.split()) == {"ENOSYS"}


@attack("seccomp")
async def type_into_a_terminal(arena: Arena) -> None:
    script = "import fcntl\na, b = os.openpty()\nprint(*[tried(lambda: fcntl.ioctl(b, what, b'x')) for what in (0x5412, 0x541C)])"
    async with arena.sandbox() as inside:
        assert await inside.python(script) == "EPERM EPERM"


@attack()
async def set_the_clock(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        assert (await inside.run("date", "-s", "2001-01-01")).code
        assert await inside.python("print(tried(lambda: time.clock_settime(time.CLOCK_REALTIME, 0)))") == "EPERM"


@attack()
async def set_the_hosts_name(arena: Arena) -> None:
    name = platform.node()
    async with arena.sandbox() as inside:
        assert await inside.python("print(tried(lambda: socket.sethostname('taken')))") == "EPERM"
        assert await inside.sh("uname -n") == "sandbox\n"
    assert platform.node() == name


@attack()
async def raise_ones_own_priority(arena: Arena) -> None:
    script = """
print(*[tried(work) for work in (
    lambda: os.nice(-5),
    lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000'),
)])"""
    async with arena.sandbox() as inside:
        assert await inside.python(script) == "EPERM EPERM EACCES"


@attack()
async def raise_ones_own_limits(arena: Arena) -> None:
    script = """
import resource
for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
    hard = resource.getrlimit(kind)[1]
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
        print(kind, 'WORKED')
    except (ValueError, OSError):
        pass"""
    async with arena.sandbox() as inside:
        assert await inside.python(script) == ""
