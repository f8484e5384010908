"""The line to a supervisor: one datagram asks, one answers, descriptors travel beside them. See warden/supervise.c."""

import array
import asyncio
import itertools
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from palestra.errors import InfrastructureError

REQUEST = struct.Struct("<5I")
REPLY = struct.Struct("<IIiI")
TEXT_MOST = 128 * 1024
"""Bytes of a command with its environment. The kernel takes no longer argument anyway."""


class Ask(IntEnum):
    RUN = 1
    KILL = 2
    READ = 3
    WRITE = 4


class Heard(IntEnum):
    READY = 1
    FAILED = 2
    EXITED = 3
    OPENED = 4


class FailedAt(IntEnum):
    FOLDER = 1
    PROGRAM = 2
    FORK = 3


@dataclass(frozen=True, slots=True)
class Answer:
    heard: Heard
    value: int
    more: int
    fd: int | None = None


class Line:
    """The owner's end of the socket. It answers nobody twice: what comes for a caller who left is dropped."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._sending = asyncio.Lock()
        self._room = asyncio.Event()
        self._loop.add_reader(end.fileno(), self._hear)
        self._waiting[0] = self._loop.create_future()  # the first message is nobody's answer: the supervisor is there
        self.ready: asyncio.Future[Answer] = self._waiting[0]
        self.dead = False

    def number(self) -> int:
        return next(self._numbers)

    async def ask(
        self,
        ask: Ask,
        words: Sequence[bytes],
        *,
        number: int,
        argc: int = 0,
        envc: int = 0,
        milliseconds: int = 0,
        fds: Sequence[int] = (),
    ) -> asyncio.Future[Answer]:
        """Send; the future is the answer."""
        text = REQUEST.pack(ask, number, milliseconds, argc, envc) + b"".join(word + b"\0" for word in words)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if ask is not Ask.KILL:
            self._waiting[number] = answer
        async with self._sending:
            while True:
                if self.dead:
                    self._waiting.pop(number, None)
                    raise InfrastructureError("the sandbox is closed, or has died")
                try:
                    self._socket.sendmsg([text], rights)
                    return answer
                except BlockingIOError:
                    await self._writable()
                except OSError:
                    self.close()

    def forget(self, number: int) -> None:
        self._waiting.pop(number, None)

    def kill(self, number: int) -> None:
        """End a command whose caller left. When the line is full it ends at its time limit instead."""
        self.forget(number)
        if not self.dead:
            try:
                self._socket.send(REQUEST.pack(Ask.KILL, number, 0, 0, 0))
            except OSError:
                return

    async def _writable(self) -> None:
        self._room.clear()
        self._loop.add_writer(self._socket.fileno(), self._room.set)
        try:
            await self._room.wait()
        finally:
            if not self.dead:
                self._loop.remove_writer(self._socket.fileno())

    def _hear(self) -> None:
        try:
            data, beside, _, _ = self._socket.recvmsg(REPLY.size, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, beside = b"", []
        if len(data) != REPLY.size:
            self.close()
            return
        fds = array.array("i", b"".join(rights for _, _, rights in beside))
        kind, number, value, more = REPLY.unpack(data)
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(Answer(Heard(kind), value, more, fds[0] if fds else None))
        else:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Hang up. Whoever still waits for an answer hears that there will be none."""
        if self.dead:
            return
        self.dead = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._room.set()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(InfrastructureError("the sandbox ended under its command"))
                future.exception()  # a caller who left does not ask for it
