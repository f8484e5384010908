"""Attacks through sockets and other ways to talk to somebody outside."""

import asyncio
import ctypes
import os
import socket

from sandbox.arena import Arena, attack

from palestra.errors import ToolError


@attack("network_namespace")
async def find_an_interface(arena: Arena) -> None:
    async with arena.sandbox() as inside:
        names = await inside.python("print(*[name for _, name in socket.if_nameindex()])")
        assert names in ("", "lo")
        assert await inside.sh("tail -n +2 /proc/net/route") == ""


@attack()
async def connect_outside(arena: Arena) -> None:
    script = """
def reach(address):
    s = socket.socket(); s.settimeout(3)
    return tried(lambda: s.connect((address, 80)))
print(*map(reach, ("169.254.169.254", "1.1.1.1", "10.0.0.1")))"""
    async with arena.sandbox() as inside:
        assert await inside.python(script) == "ENETUNREACH ENETUNREACH ENETUNREACH"


@attack("network_namespace")
async def connect_to_the_hosts_loopback(arena: Arena) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with arena.sandbox() as inside:
            assert await inside.python(f"print(tried(lambda: socket.create_connection(('127.0.0.1', {port}))))") == "ECONNREFUSED"


@attack("network_namespace")
async def connect_to_an_abstract_socket(arena: Arena) -> None:
    name = f"\0{arena.secret}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        async with arena.sandbox() as inside:
            said = await inside.python(f"s = socket.socket(socket.AF_UNIX)\nprint(tried(lambda: s.connect({name!r})))")
            assert said == "ECONNREFUSED"


@attack()
async def connect_to_a_socket_file(arena: Arena) -> None:
    place = arena.folder / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()
        try:
            async with arena.sandbox() as inside:
                for path in (str(place), "/var/run/docker.sock", "/run/podman/podman.sock", "/run/dbus/system_bus_socket"):
                    said = await inside.python(f"s = socket.socket(socket.AF_UNIX)\nprint(tried(lambda: s.connect({path!r})))")
                    assert said in ("ENOENT", "EACCES"), path
        finally:
            place.unlink()


@attack("seccomp")
async def open_unusual_sockets(arena: Arena) -> None:
    kinds = {
        "vsock": (40, 1, 0),
        "packet": (17, 3, 0),
        "alg": (38, 5, 0),
        "uevents": (16, 3, 15),
        "audit": (16, 3, 9),
        "tipc": (30, 1, 0),
    }
    kinds |= {
        "raw": (2, 3, 1),
        "raw6": (10, 3, 58),
        "bluetooth": (31, 3, 1),
        "xdp": (44, 3, 0),
        "can": (29, 3, 1),
        "key": (15, 3, 2),
    }
    async with arena.sandbox() as inside:
        said = await inside.python(f"print({{name: tried(lambda: socket.socket(*kind)) for name, kind in {kinds}.items()}})")
        assert {name: how for name, how in eval(said).items() if how not in ("EAFNOSUPPORT", "EPERM", "EACCES")} == {}


@attack("network_namespace")
async def meet_a_neighbour_on_the_loopback(arena: Arena) -> None:
    serve = "s = socket.create_server(('127.0.0.1', 47613))\nopen('up', 'w')\nprint(s.accept()[0].recv(9))"
    connect = "s = socket.create_connection(('127.0.0.1', 47613)); s.send(b'hello')"
    async with arena.sandbox() as one, arena.sandbox() as other:
        serving = asyncio.create_task(one.python(serve, seconds=20))
        while True:
            try:
                await one.api.read("/work/up")
                break
            except ToolError:
                await asyncio.sleep(0.05)
        assert await other.python(f"print(tried(lambda: exec({connect!r})))") == "ECONNREFUSED"
        await one.python(connect)
        assert "hello" in await serving  # inside, it works


@attack("ipc_namespace")
async def share_system_v_memory(arena: Arena) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x50414C00 | os.getpid() & 0xFF
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    try:
        async with arena.sandbox() as inside:
            assert await inside.python(f"print(libc.shmget({key}, 0, 0), errno.errorcode.get(ctypes.get_errno()))") == "-1 ENOENT"
    finally:
        libc.shmctl(segment, 0, None)


@attack("ipc_namespace")
async def share_system_v_memory_with_a_neighbour(arena: Arena) -> None:
    async with arena.sandbox() as one, arena.sandbox() as other:
        assert int(await one.python("print(libc.shmget(0x50414D00, 4096, 0o1666))")) >= 0
        said = await other.python("print(libc.shmget(0x50414D00, 0, 0))")
        await one.python("libc.shmctl(libc.shmget(0x50414D00, 0, 0), 0, None)")
        assert said == "-1"
