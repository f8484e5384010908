"""A plain folder, for trusted work only: commands run as this user, see the whole machine and may do anything that the
user may. It serves where nothing else runs, and to debug a task.
"""

import asyncio
import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from palestra.errors import ToolError, UsageError
from palestra.protocols import Ran, Sandbox, Snapshot, Spec
from palestra.sandbox.cgroup import owner_name
from palestra.sandbox.output import Stream
from palestra.sandbox.setup import run_commands
from palestra.sandbox.supervised import checked_command, checked_path, said_instead

NOTHING = Snapshot()


class LocalSandbox:
    """See `protocols.Sandbox`. Paths outside its folder are refused here, but not to commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

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
        checked_command(command, environment or {})
        where = os.fsdecode(checked_path(folder or self.folder))
        _check_folder(where)
        streams = [Stream(keep), Stream(keep)]
        started = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=where,
                env={**os.environ, **(environment or {})},
                stdin=asyncio.subprocess.PIPE,
                stdout=streams[0].write_end,
                stderr=streams[1].write_end,
                start_new_session=True,
            )
            for stream in streams:
                stream.sent()
            timed_out = await _ended(process, stdin, seconds)
            stdout, stderr = (stream.finish() for stream in streams)
        except OSError as error:
            return said_instead(command[0], error.errno or 0, time.monotonic() - started)
        finally:
            for stream in streams:
                stream.close()
        code = process.returncode or 0
        return Ran(128 - code if code < 0 else code, stdout, stderr, timed_out, time.monotonic() - started)

    async def read(self, path: str, limit: int = 16_777_216) -> bytes:
        place = self._inside(path)
        try:
            if not place.is_file():
                raise ToolError(f"{path}: {'not a regular file' if place.exists() else 'No such file or directory'}")
            if (size := place.stat().st_size) > limit:
                raise ToolError(f"{path} has {size} bytes; {limit} are the most that can be read")
            return place.read_bytes()
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror}") from None

    async def write(self, path: str, data: bytes) -> None:
        place = self._inside(path)
        try:
            if place.exists() and not place.is_file():
                raise ToolError(f"{path}: {'Is a directory' if place.is_dir() else 'not a regular file'}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror}") from None

    def _inside(self, path: str) -> Path:
        place = Path(os.path.realpath(os.fsdecode(checked_path(path))))
        if not place.is_relative_to(self.folder):
            raise ToolError(f"{path} is outside {self.folder}")
        return place


def _check_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise ToolError(f"cannot run in {path}: there is no such folder")


async def _ended(process: asyncio.subprocess.Process, stdin: bytes, seconds: float) -> bool:
    """Wait for the end, which comes at the latest when the time is over; whether it was."""
    feeding = asyncio.create_task(_feed(process, stdin))
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        return True
    finally:
        feeding.cancel()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    return False


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


class Local:
    """Opens folders as if they were sandboxes. A snapshot is a folder, and each sandbox a copy of it."""

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix=f"{owner_name()}-")).resolve()

    async def snapshot(self, spec: Spec, setup: Callable[[Sandbox], Awaitable[object]] | None = None) -> Snapshot:
        key = hashlib.sha256(repr(spec).encode()).hexdigest()[:24]
        place = self._root / f"snapshot-{key}"
        if not place.exists():
            partial = Path(tempfile.mkdtemp(dir=self._root))
            await self._begin(spec.base, partial)
            for inside, folder in spec.folders.items():
                if inside.startswith("/") or ".." in Path(inside).parts:
                    raise UsageError(f"{inside!r} in spec.folders: in a local folder it must be relative, without ..")
                await asyncio.to_thread(shutil.copytree, folder, partial / inside, symlinks=True, dirs_exist_ok=True)
            sandbox = LocalSandbox(partial)
            await run_commands(sandbox, spec)
            if setup is not None:
                await setup(sandbox)
            os.rename(partial, place)
        return Snapshot(key)

    @asynccontextmanager
    async def open(self, snapshot: Snapshot = NOTHING) -> AsyncIterator[Sandbox]:
        place = Path(tempfile.mkdtemp(dir=self._root))
        try:
            await self._begin(snapshot, place)
            yield LocalSandbox(place)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    async def _begin(self, snapshot: Snapshot, place: Path) -> None:
        if snapshot.key:
            start = self._root / f"snapshot-{snapshot.key}"
            await asyncio.to_thread(shutil.copytree, start, place, symlinks=True, dirs_exist_ok=True)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)
