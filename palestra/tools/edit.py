"""The editor's tools: view, edit, create, undo. A change is exact or does not happen, and a failed one shows what is there."""

import posixpath
from collections import deque
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from palestra.errors import ToolError
from palestra.protocols import Sandbox
from palestra.tools.lines import nearest_lines, numbered

MAX_FILE = 4_194_304
MAX_VIEW = 16_000
"""Characters that one view shows."""

_AROUND = 3
_LISTED = 8
_REMEMBERED = 64  # changes that can be undone
_Line = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class _Change:
    path: str
    before: bytes | None
    """None: there was no such file."""
    after: bytes


class Editor:
    def __init__(self, sandbox: Sandbox, folder: str) -> None:
        """Paths are in `folder`: relative ones begin there, and none leads out."""
        self._sandbox, self._folder = sandbox, posixpath.normpath(folder)
        self._changes: deque[_Change] = deque(maxlen=_REMEMBERED)

    async def view(self, path: str, start: _Line = 1, end: _Line | None = None) -> str:
        """Show the lines of a text file, with their numbers.

        Args:
            path: the file
            start: the first line
            end: the last line; left out, as many as there is room for
        """
        lines = _Text.of(path, await self._read(self._inside(path))).lines
        if not lines:
            return "[the file is empty]"
        if start > len(lines):
            raise ToolError(f"start = {start}: {path} has {len(lines):,} lines")
        if end is not None and end < start:
            raise ToolError(f"end = {end} stands before start = {start}")
        last = min(end or len(lines), len(lines))
        shown = _as_much_as_fits(lines[start - 1 : last])
        text = numbered(shown, start)
        if len(shown) < last - start + 1:
            text += f"\n[lines {start} to {start + len(shown) - 1} of {len(lines):,}; go on with start = {start + len(shown)}]"
        elif (start, last) != (1, len(lines)):
            text += f"\n[lines {start} to {last} of {len(lines):,}]"
        return text

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a piece of a text file. `old` must be in the file exactly once, to the letter, white space included.

        Args:
            path: the file
            old: the present text; take in lines around it where it would not be unique
            new: what stands there afterwards
        """
        place = self._inside(path)
        data = await self._read(place)
        text = _Text.of(path, data)
        if not old:
            raise ToolError("old is empty; give the text to replace, or use create for a new file")
        if old == new:
            raise ToolError("old and new are the same, so nothing would change")
        _encode(new)  # which refuses what is no text
        start = text.find(path, old)
        after = text.body[:start] + new + text.body[start + len(old) :]
        await self._write(_Change(place, data, text.encode(after)))
        line = after.count("\n", 0, start)
        lines = after.split("\n")
        first, last = max(0, line - _AROUND), line + new.count("\n") + 1 + _AROUND
        return f"{path} is edited. It now reads:\n{numbered(_as_much_as_fits(lines[first:last]), first + 1)}"

    async def create(self, path: str, text: str, overwrite: bool = False) -> str:
        """Write a new file; folders above it are made.

        Args:
            path: the file
            text: all that it is to hold
            overwrite: also when there is a file already
        """
        place = self._inside(path)
        before = None
        if (await self._sandbox.run(["test", "-e", place], seconds=30)).code == 0:
            if not overwrite:
                raise ToolError(f"{path} exists already; use edit, or set overwrite to replace all of it")
            before = await self._read(place)
        data = _encode(text)
        await self._write(_Change(place, before, data))
        return f"{path} is written: {len(data):,} bytes."

    async def undo(self, path: str) -> str:
        """Take back the last edit or create of a file; call it again for the one before.

        Args:
            path: the file
        """
        place = self._inside(path)
        change = next((change for change in reversed(self._changes) if change.path == place), None)
        if change is None:
            raise ToolError(f"{path}: there is no edit or create of it that could be taken back")
        if await self._read(place) != change.after:
            raise ToolError(f"{path} was changed otherwise since its last edit, so that cannot be taken back; view it")
        if change.before is None:
            removed = await self._sandbox.run(["rm", "--", place], seconds=30)
            if removed.code:
                raise ToolError(f"{path} cannot be removed: {removed.stderr.head.decode(errors='replace').strip()}")
        else:
            await self._sandbox.write(place, change.before)
        self._changes.remove(change)
        return f"{path} does not exist any more." if change.before is None else f"{path} is as it was before."

    def _inside(self, path: str) -> str:
        if not path or "\0" in path or len(path) > 4096 or any("\ud800" <= letter <= "\udfff" for letter in path):
            raise ToolError(f"{path[:80]!r} is no path of a file")
        place = posixpath.normpath(posixpath.join(self._folder, path))
        if not f"{place}/".startswith(self._folder.rstrip("/") + "/"):
            raise ToolError(f"{path[:200]} is outside {self._folder}; only files in there can be viewed and changed")
        return place

    async def _read(self, place: str) -> bytes:
        return await self._sandbox.read(place, limit=MAX_FILE)

    async def _write(self, change: _Change) -> None:
        if len(change.after) > MAX_FILE:
            raise ToolError(f"the file would have {len(change.after):,} bytes, and {MAX_FILE:,} are the most")
        await self._sandbox.write(change.path, change.after)
        self._changes.append(change)


@dataclass(frozen=True, slots=True)
class _Text:
    """A file's text with plain line ends. Where all were CRLF they become so again, and stray bytes stay what they were."""

    body: str
    crlf: bool

    @staticmethod
    def of(path: str, data: bytes) -> "_Text":
        if b"\0" in data:
            raise ToolError(f"{path} is a binary file of {len(data):,} bytes, no text; look into it with bash")
        body = data.decode("utf-8", "surrogateescape")
        crlf = "\r\n" in body and body.count("\r\n") == body.count("\n")
        return _Text(body.replace("\r\n", "\n") if crlf else body, crlf)

    @property
    def lines(self) -> list[str]:
        """As they are shown: without the stray bytes, which no message could carry."""
        shown = self.body.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return shown.removesuffix("\n").split("\n") if shown else []

    def encode(self, body: str) -> bytes:
        return (body.replace("\n", "\r\n") if self.crlf else body).encode("utf-8", "surrogateescape")

    def find(self, path: str, old: str) -> int:
        """Where the only occurrence begins. Else it is said where several are, or what is nearest."""
        starts: list[int] = []
        start = self.body.find(old)
        while start >= 0 and len(starts) < 1000:
            starts.append(start)
            start = self.body.find(old, start + 1)
        if len(starts) == 1:
            return starts[0]
        if starts:
            lines = [self.body.count("\n", 0, start) + 1 for start in starts[:_LISTED]]
            listed = ", ".join(map(str, lines)) + (", …" if len(starts) > _LISTED else "")
            raise ToolError(
                f"old is in {path} {len(starts)} times, at lines {listed}; take in more of the lines around the one you mean"
            )
        found = nearest_lines(self.lines, old.strip("\n").split("\n"))
        raise ToolError(f"old is not in {path}. {found or 'Nothing in it is like it; view the file first.'}")


def _encode(text: str) -> bytes:
    if "\0" in text:
        raise ToolError("the text holds a NUL byte, so it would be no text; write binary files with bash")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolError(f"the text holds half of a surrogate pair at character {error.start}; write whole characters") from None


def _as_much_as_fits(lines: list[str]) -> list[str]:
    room, count = MAX_VIEW, 0
    for line in lines:
        room -= min(len(line), 440) + 8
        if room < 0 and count:
            break
        count += 1
    return lines[:count]
