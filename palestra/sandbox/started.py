"""A program that becomes a supervisor, from its start to its end. The owner holds its socket: when that closes, however it
came to be, the supervisor ends and everything inside with it.
"""

import asyncio
import fcntl
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from palestra.errors import InfrastructureError, PalestraError
from palestra.sandbox.wire import Line

CONTROL = 3
"""The descriptor that the supervisor finds the socket at."""
START_SECONDS = 60.0
END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Started:
    pid: int
    pidfd: int
    line: Line

    async def end(self) -> None:
        """Hang up: the kernel kills everything inside, and the mounts go with their last process."""
        self.line.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await _readable(self.pidfd)
        self.kill()
        await _readable(self.pidfd)
        os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended
        os.close(self.pidfd)

    def kill(self) -> None:
        """All of its group: while bwrap is not done, its inner half waits for the outer one for ever."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


async def start(command: Sequence[str]) -> Started:
    """Start it, and wait until the supervisor is there."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said, saying = os.pipe()
    try:
        pid = _spawn(command, theirs.fileno(), saying)
    except OSError as error:
        os.close(said)
        ours.close()
        raise InfrastructureError(f"a sandbox cannot be started: {error}") from None
    finally:
        theirs.close()
        os.close(saying)
    started = Started(pid, os.pidfd_open(pid), Line(ours))
    loop = asyncio.get_running_loop()
    loop.add_reader(started.pidfd, started.line.close)  # it may end before it is ready
    try:
        async with asyncio.timeout(START_SECONDS):
            await started.line.ready
        loop.remove_reader(started.pidfd)
    except BaseException as error:
        started.kill()
        await asyncio.shield(started.end())
        if isinstance(error, TimeoutError | PalestraError):
            text = os.read(said, 65_536).decode(errors="replace").strip()
            raise InfrastructureError(f"a sandbox did not start: {text or 'it was killed, or took too long'}") from None
        raise
    finally:
        os.close(said)
    return started


def _spawn(command: Sequence[str], control: int, errors: int) -> int:
    """Start a program with the control socket, and nothing else of ours."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (control, errors)]  # clear of the numbers that they get
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, high[1], 2),
        (os.POSIX_SPAWN_DUP2, high[0], CONTROL),
    ]
    try:
        return os.posix_spawn(command[0], list(command), {"PATH": os.defpath}, file_actions=actions, setsid=True)
    finally:
        for fd in high:
            os.close(fd)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
