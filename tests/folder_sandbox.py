"""A folder as a sandbox, for the tools' tests: real processes and real files, and no walls."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.errors import ToolError
from palestra.protocols import Output, Ran


@dataclass
class FolderSandbox:
    folder: Path

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
        started = time.monotonic()
        tmp = {"TMPDIR": str(self.folder.parent)}
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder or self.folder,
            env={**os.environ, **tmp, **(environment or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(stdin)
        process.stdin.close()
        out, err = (asyncio.create_task(_kept(stream, keep)) for stream in (process.stdout, process.stderr))
        timed_out = False
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(asyncio.shield(out), asyncio.shield(err))
                await process.wait()
        except TimeoutError:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
        code = await process.wait()
        return Ran(code if code >= 0 else 128 - code, await out, await err, timed_out, time.monotonic() - started)

    async def read(self, path: str, limit: int = 16_777_216) -> bytes:
        return _read(Path(path), limit)

    async def write(self, path: str, data: bytes) -> None:
        _write(Path(path), data)


def _read(file: Path, limit: int) -> bytes:
    if not file.is_file():
        raise ToolError(f"{file} is {'a folder, no file' if file.is_dir() else 'not there'}")
    if file.stat().st_size > limit:
        raise ToolError(f"{file} has {file.stat().st_size:,} bytes, and {limit:,} are the most")
    return file.read_bytes()


def _write(file: Path, data: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    except OSError as error:
        raise ToolError(f"{file} cannot be written: {error.strerror}") from None


async def _kept(stream: asyncio.StreamReader, keep: int) -> Output:
    head, tail, size = b"", b"", 0
    while piece := await stream.read(65_536):
        size += len(piece)
        room = keep // 2 - len(head)
        head += piece[:room]
        tail = (tail + piece[room:])[-(keep // 2) :]
    return Output(head, tail, size)
