"""The files of a repository inside a sandbox: one command lists them, and only those that differ from the snapshot are read
through it. The rest comes from the snapshot's folder on the host."""

import asyncio
import time
from collections.abc import Iterator, Sequence

from palestra.errors import InfrastructureError, ToolError
from palestra.protocols import Output, Sandbox
from palestra.tools.code import text
from palestra.tools.code.files import LARGEST, SKIPPED, SUFFIXES, Files, Listing, Signature
from palestra.tools.code.symbols import Lines

AT_ONCE = 16
"""Files that are read at once."""
LISTED = 64_000_000
"""Bytes of a listing: several hundred thousand files."""


class SandboxFiles:
    """Files as they were at the last `refresh`. `snapshot` holds them as they were when the sandbox was made; without it, all
    are read once through the sandbox."""

    def __init__(self, sandbox: Sandbox, root: str, snapshot: Files | None) -> None:
        self._sandbox = sandbox
        self.root = root
        self._snapshot = snapshot
        self._original: Listing = {} if snapshot is None else snapshot.listing()
        self._listing: Listing = self._original
        self._opened = time.time_ns()
        self._held: dict[str, tuple[Signature, bytes]] = {}

    def listing(self) -> Listing:
        return self._listing

    def read(self, path: str) -> bytes | None:
        held = self._held.get(path)
        if held is not None:
            return held[1]
        return self._snapshot.read(path) if self._snapshot is not None and path in self._listing else None

    async def refresh(self) -> None:
        ran = await self._sandbox.run(_list_command(), folder=self.root, keep=LISTED)
        if not ran.stdout.whole:
            raise ToolError(f"there are too many files below {self.root} to search by name; use search_text with a path")
        if ran.timed_out or ran.code not in (0, 1):  # 1: a folder could not be read
            raise InfrastructureError(f"files of the sandbox cannot be listed: {_said(ran.stderr)}")
        found = dict(_parse(ran.stdout))
        same = {path for path, signature in found.items() if self._is_original(path, signature)}
        self._held = {path: held for path, held in self._held.items() if path not in same and found.get(path) == held[0]}
        missing = [path for path in found if path not in same and path not in self._held]
        for start in range(0, len(missing), AT_ONCE):
            some = missing[start : start + AT_ONCE]
            contents = await asyncio.gather(*(self._fetch(path) for path in some))
            self._held |= {path: (found[path], data) for path, data in zip(some, contents, strict=True) if data is not None}
        listing = {
            path: self._original[path] if path in same else found[path] for path in found if path in same or path in self._held
        }
        if listing != self._listing:
            self._listing = listing

    def _is_original(self, path: str, signature: Signature) -> bool:
        original = self._original.get(path)
        # A file's times can be set back, but not the time of the setting.
        return original is not None and original[:2] == signature[:2] and 0 < signature.changed <= self._opened

    async def search(self, pattern: str, path: str, fixed: bool, ignore_case: bool) -> Lines:
        command = text.sandbox_command(pattern, path, fixed, ignore_case)
        ran = await self._sandbox.run(command, folder=self.root, seconds=text.SECONDS, keep=LISTED)
        if ran.timed_out:
            raise ToolError(f"the search took longer than {text.SECONDS:.0f} s; give a narrower pattern, or a path")
        lines = text.read_hits((ran.stdout.head + ran.stdout.tail).splitlines(keepends=True))
        if ran.code > 1 and not lines.found:
            raise ToolError(f"the pattern cannot be searched for: {_said(ran.stderr)}")
        return lines

    async def _fetch(self, path: str) -> bytes | None:
        try:
            return await self._sandbox.read(f"{self.root.rstrip('/')}/{path}", LARGEST)
        except ToolError:
            return None  # it has gone or grown meanwhile


def _list_command() -> Sequence[str]:
    """GNU find: the path, size, and times of every source file, between NUL bytes."""
    names = [word for suffix in SUFFIXES for word in ("-o", "-name", f"*{suffix}")][1:]
    skipped = [word for folder in (".?*", *sorted(SKIPPED)) for word in ("-o", "-name", folder)][1:]
    fields = r"%P\0%s\0%T@\0%C@\0"
    prune = ["-type", "d", "(", *skipped, ")", "-prune"]
    return ["find", ".", *prune, "-o", "-type", "f", "-size", f"-{LARGEST}c", "(", *names, ")", "-printf", fields]


def _parse(output: Output) -> Iterator[tuple[str, Signature]]:
    fields = (output.head + output.tail).split(b"\0")
    for path, size, modified, changed in zip(fields[::4], fields[1::4], fields[2::4], fields[3::4], strict=False):
        yield path.decode("utf-8", "surrogateescape"), Signature.of(int(size), _nanoseconds(modified), _nanoseconds(changed))


def _nanoseconds(seconds: bytes) -> int:
    whole, _, part = seconds.decode("ascii").partition(".")
    return int(whole) * 1_000_000_000 + int(f"{part:0<9}"[:9])


def _said(stream: Output) -> str:
    return " ".join(stream.head.decode(errors="replace").split())[:500] or "no reason was given"
