"""What a command writes to a pipe, read as it comes: its beginning and its end are kept, the rest is only counted."""

import asyncio
import os

from palestra.protocols import Output

PIPE = 65_536
LARGEST_PIPE = 2**20
"""What a pipe can still hold when its command has ended: the most that an ordinary user may set."""


class Kept:
    """The first and last bytes of a stream."""

    def __init__(self, keep: int) -> None:
        self._head_room = keep - keep // 2
        self._tail_room = keep // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_room:
            self._tail += data[-self._tail_room :]
            if len(self._tail) > 2 * self._tail_room + PIPE:
                del self._tail[: -self._tail_room]

    def output(self) -> Output:
        tail = self._tail[-self._tail_room :] if self._tail_room else b""
        return Output(bytes(self._head), bytes(tail), self._size)


class Stream:
    """A pipe whose writing end goes to a command."""

    def __init__(self, keep: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._kept = Kept(keep)
        self._read, self.write_end = os.pipe()
        os.set_blocking(self._read, False)
        self._loop.add_reader(self._read, self._readable)

    def _readable(self) -> None:
        if not self._take():
            self._loop.remove_reader(self._read)

    def _take(self) -> int:
        """Bytes taken; 0 when there are no more to come."""
        data = os.read(self._read, PIPE)
        self._kept.add(data)
        return len(data)

    def sent(self) -> None:
        """The command has its end; ours would keep the pipe open."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def finish(self) -> Output:
        """What was written until now. Whoever still holds the pipe, such as a background process, is not waited for."""
        left = LARGEST_PIPE
        try:
            while left > 0 and (taken := self._take()):
                left -= taken
        except BlockingIOError:
            pass
        return self._kept.output()

    def close(self) -> None:
        self.sent()
        self._loop.remove_reader(self._read)
        os.close(self._read)
