"""A change of one piece of one file, by the byte where it starts: the whole of what a task keeps of its bug."""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from palestra.errors import TaskError


@dataclass(frozen=True, slots=True)
class Edit:
    path: str
    start: int
    old: str
    new: str

    def to_json(self) -> dict[str, str | int]:
        return asdict(self)


def apply(edits: Iterable[Edit], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files that the edits change, as they are afterwards."""
    changed: dict[str, bytes] = {}
    for edit in sorted(edits, key=lambda edit: -edit.start):  # from the end, so that places stay what they are
        data = changed.get(edit.path, files[edit.path])
        old = edit.old.encode()
        if data[edit.start : edit.start + len(old)] != old:
            raise TaskError(f"{edit.path} does not hold {edit.old!r} at byte {edit.start}: it is not the file of this edit")
        changed[edit.path] = data[: edit.start] + edit.new.encode() + data[edit.start + len(old) :]
    return changed


class Text:
    """A source file by the places that `ast` gives: lines from 1, columns in bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._starts = [0]
        for line in data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, start: int, end: int) -> str:
        return self.data[start:end].decode()

    def code(self, node: ast.expr | ast.stmt) -> str:
        return self.of(self.start(node), self.end(node))

    def line(self, number: int) -> str:
        return self.of(self._starts[number - 1], self._starts[number]).rstrip("\n") if number < len(self._starts) else ""
