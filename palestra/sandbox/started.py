"""A program that becomes a supervisor, from its start to its end. The owner holds its socket: when that closes, however it
came to be, the supervisor ends and everything inside with it.
"""

import asyncio
import fcntl
import os
import signal
import socket
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from palestra.errors import InfrastructureError, PalestraError
from palestra.sandbox.wire import Line

CONTROL = 3
"""The descriptor that the supervisor finds the socket at."""
START_SECONDS = 60.0
END_SECONDS = 10.0
PASSED_ON = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "CONTAINER_HOST")
"""What container engines need to know. Nothing of it comes inside."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Process:
    """What we started ourselves, outside."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        """All of its group: while bwrap is not done, its inner half waits for the outer one for ever."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """It should be ending by itself; it is killed when it does not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await _readable(self.pidfd)
        self.kill()
        await _readable(self.pidfd)
        os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended
        os.close(self.pidfd)


@dataclass(frozen=True, slots=True)
class Started:
    process: Process
    line: Line

    async def end(self) -> None:
        """Hang up: the kernel kills everything inside, and the mounts go with their last process."""
        self.line.close()
        await self.process.end()


async def start(command: Sequence[str]) -> Started:
    """Start a program that takes the socket along, and wait until the supervisor is there."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process, said = _spawn(command, theirs.fileno())
    return await _ready(process, said, _at_once(ours))


async def start_calling(command: Sequence[str], server: socket.socket) -> Started:
    """Start a program whose supervisor calls this listening socket."""
    server.setblocking(False)
    process, said = _spawn(command, None)
    return await _ready(process, said, _accepted(server))


async def _at_once(end: socket.socket) -> socket.socket:
    return end


async def _accepted(server: socket.socket) -> socket.socket:
    return (await asyncio.get_running_loop().sock_accept(server))[0]


async def _ready(process: Process, said: int, connecting: Coroutine[None, None, socket.socket]) -> Started:
    try:
        async with asyncio.timeout(START_SECONDS):
            line = Line(await _unless_ended(connecting, process))
            try:
                await _unless_ended(line.ready, process)
            except BaseException:
                line.close()
                raise
    except BaseException as error:
        process.kill()
        await asyncio.shield(process.end())
        if isinstance(error, TimeoutError | PalestraError):
            text = os.read(said, 65_536).decode(errors="replace").strip()
            raise InfrastructureError(f"a sandbox did not start: {text or 'it was killed, or took too long'}") from None
        raise
    finally:
        os.close(said)
    return Started(process, line)


async def _unless_ended(hoped: Awaitable[T], process: Process) -> T:
    """What is hoped for; an error when the process ends first."""
    waiting = asyncio.ensure_future(hoped)
    ending = asyncio.ensure_future(_readable(process.pidfd))
    try:
        await asyncio.wait({waiting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise InfrastructureError("it ended")
        return waiting.result()
    finally:
        for task in (waiting, ending):
            task.cancel()


def _spawn(command: Sequence[str], control: int | None) -> tuple[Process, int]:
    """Start a program with the control socket, if any, and nothing else of ours; and where it says what went wrong."""
    said, saying = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (saying, control) if fd is not None]  # clear of what they get
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        *((os.POSIX_SPAWN_DUP2, fd, at) for fd, at in zip(high, (2, CONTROL), strict=False)),
    ]
    try:
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        pid = os.posix_spawn(command[0], list(command), environment, file_actions=actions, setsid=True)
    except OSError as error:
        os.close(said)
        raise InfrastructureError(f"a sandbox cannot be started: {error}") from None
    finally:
        for fd in (saying, *high):
            os.close(fd)
    return Process(pid, os.pidfd_open(pid)), said


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
