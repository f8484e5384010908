"""What a search finds: symbols, references, lines of text, imports. Lines count from 1, and paths are relative to the root."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["class", "function", "method", "variable"]
Use = Literal["definition", "import", "base", "call", "use"]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A definition. `name` is qualified, as in `QuerySet.aggregate`; `start` is the line of `def` or `class`, not of a
    decorator, and `end` the last line that belongs to it."""

    path: str
    name: str
    kind: Kind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Reference:
    """A place in the code, outside strings and comments, where a name stands."""

    path: str
    line: int
    text: str
    use: Use
    scope: str
    """The qualified name of the class or function around it; empty at the top of a file."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text that was searched for."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Lines:
    """The first lines that match, and how many do."""

    found: list[Line]
    count: int


@dataclass(frozen=True, slots=True)
class Dependency:
    """An import: the file and line where it stands, the module as it is written there, and the file of the tree that is meant
    (empty when it comes from elsewhere)."""

    path: str
    line: int
    module: str
    target: str


class Definition(NamedTuple):
    """A symbol without its file: contents are read once, wherever they stand."""

    name: str
    kind: Kind
    start: int
    end: int


class Import(NamedTuple):
    """An import statement: from line to line, the module as it is written, and the names taken from it."""

    start: int
    end: int
    module: str
    names: tuple[str, ...] = ()


class Record(NamedTuple):
    """What is known of one file's content. The definitions of languages other than Python are left to the parser: None."""

    definitions: tuple[Definition, ...] | None
    imports: tuple[Import, ...]
    words: str
    """Every word in it once, each between spaces: a search in one string is quick, and takes a tenth of the memory of a set."""
