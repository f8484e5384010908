"""A sandbox with a supervisor inside, whoever started it. Commands and paths are checked here, before anything is sent."""

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Mapping, Sequence

from palestra.errors import InfrastructureError, ToolError
from palestra.protocols import Output, Ran
from palestra.sandbox.output import Stream
from palestra.sandbox.wire import TEXT_MOST, Answer, Ask, FailedAt, Heard, Line

GRACE = 30.0
"""Seconds after its time limit in which a command's end must be heard of."""
PATH_MOST = 4095


def encoded(word: str, what: str) -> bytes:
    if "\0" in word:
        raise ToolError(f"{what} holds a NUL byte")
    try:
        return word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ToolError(f"{what} is not valid text: it holds half a surrogate pair") from None


def checked_path(path: str) -> bytes:
    text = encoded(path, "the path")
    if not path.startswith("/"):
        raise ToolError(f"{path!r} is not an absolute path; begin it with /")
    if len(text) > PATH_MOST:
        raise ToolError(f"the path has {len(text)} bytes; {PATH_MOST} are the most")
    return text


def checked_command(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[bytes], list[bytes]]:
    if not command or not command[0]:
        raise ToolError("the command is empty")
    words = [encoded(word, "the command") for word in command]
    variables = [encoded(f"{name}={value}", "the environment") for name, value in environment.items()]
    size = sum(len(word) + 1 for word in (*words, *variables))
    if size > TEXT_MOST or len(words) + len(variables) > 8192:
        raise ToolError(f"the command has {size} bytes; {TEXT_MOST} are the most. Write what is long into a file first")
    return words, variables


class SupervisedSandbox:
    """See `protocols.Sandbox`."""

    def __init__(self, line: Line, folder: str, environment: Mapping[str, str]) -> None:
        self._line = line
        self.folder = folder
        self._environment = environment

    async def run(
        self,
        command: Sequence[str],
        *,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        seconds: float = 60.0,
        keep: int = 65_536,
    ) -> Ran:
        words, variables = checked_command(command, {**self._environment, **(environment or {})})
        where = checked_path(folder or self.folder)
        number = self._line.number()
        streams: list[Stream] = []
        given = _sealed(stdin)
        started = time.monotonic()
        try:
            streams += [Stream(keep), Stream(keep)]
            asked = await self._line.ask(
                Ask.RUN,
                [where, *words, *variables],
                number=number,
                argc=len(words),
                envc=len(variables),
                milliseconds=max(1, round(min(seconds, 4e6) * 1000)),
                fds=[given, *(stream.write_end for stream in streams)],
            )
            for stream in streams:
                stream.sent()
            answer = await self._heard(asked, seconds + GRACE)
            stdout, stderr = (stream.finish() for stream in streams)
        except asyncio.CancelledError:
            self._line.kill(number)
            raise
        finally:
            os.close(given)
            for stream in streams:
                stream.close()
        return _ran(answer, command[0], os.fsdecode(where), stdout, stderr, time.monotonic() - started)

    async def read(self, path: str, limit: int = 16_777_216) -> bytes:
        fd = await self._open(Ask.READ, path)
        try:
            size = os.fstat(fd).st_size
            if size > limit:
                raise ToolError(f"{path} has {size} bytes; {limit} are the most that can be read")
            parts, left = [], limit + 1
            while left and (part := os.read(fd, min(left, 2**20))):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror}") from None
        finally:
            os.close(fd)
        if not left:  # it grew meanwhile
            raise ToolError(f"{path} has more than {limit} bytes, the most that can be read")
        return b"".join(parts)

    async def write(self, path: str, data: bytes) -> None:
        fd = await self._open(Ask.WRITE, path)
        try:
            os.ftruncate(fd, 0)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest[: 2**20]) :]
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror}") from None
        finally:
            os.close(fd)

    async def _open(self, ask: Ask, path: str) -> int:
        """A descriptor that the supervisor opened: the path was resolved inside."""
        text = checked_path(path)
        answer = await self._heard(await self._line.ask(ask, [text], number=self._line.number()), GRACE)
        if answer.fd is None:
            reason = "not a regular file" if answer.value == errno.ENOTSUP else os.strerror(answer.value)
            raise ToolError(f"{path}: {reason}")
        return answer.fd

    async def _heard(self, asked: asyncio.Future[Answer], seconds: float) -> Answer:
        try:
            async with asyncio.timeout(seconds):
                return await asked
        except TimeoutError:
            raise InfrastructureError("the sandbox does not answer") from None


def _sealed(data: bytes) -> int:
    """The bytes as a file that nobody can change or lengthen."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if data:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _ran(answer: Answer, program: str, folder: str, stdout: Output, stderr: Output, seconds: float) -> Ran:
    if answer.heard is Heard.EXITED:
        code = os.waitstatus_to_exitcode(answer.value)
        return Ran(128 - code if code < 0 else code, stdout, stderr, bool(answer.more), seconds)
    reason = os.strerror(answer.value)
    if answer.more == FailedAt.FOLDER:
        raise ToolError(f"cannot run in {folder}: {reason}")
    if answer.more == FailedAt.FORK:
        raise ToolError(f"cannot start {program}: {reason}; the sandbox is full of processes")
    return said_instead(program, answer.value, seconds)


def said_instead(program: str, number: int, seconds: float) -> Ran:
    """What a shell would say and return when a program cannot be started."""
    text = f"{program}: {os.strerror(number)}\n".encode()
    code = 127 if number == errno.ENOENT else 126
    return Ran(code, Output(b"", b"", 0), Output(text, b"", len(text)), False, seconds)
