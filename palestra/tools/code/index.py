"""The index of a repository: a base that was read once, and over it the files that changed since.

Each question looks first at what changed, so an edit by any tool shows in the next answer, and so do new and deleted files.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from palestra.errors import ToolError
from palestra.tools.code import dependencies, names, references, text
from palestra.tools.code.base import Base, build, complete
from palestra.tools.code.files import Files, HostFiles, Listing, Signature
from palestra.tools.code.languages import language_of
from palestra.tools.code.reading import decode, read_record
from palestra.tools.code.store import Store, default_folder
from palestra.tools.code.symbols import Definition, Dependency, Import, Kind, Line, Reference, Symbol


@dataclass(frozen=True, slots=True)
class _Changed:
    """A file that is not as it is in the base."""

    signature: Signature
    definitions: tuple[Definition, ...]
    imports: tuple[Import, ...]
    words: str


class CodeIndex:
    """Search by symbol, reference, import and text below a folder. Paths in answers are relative to it."""

    def __init__(self, root: str | Path, cache: Path | None = None) -> None:
        files = HostFiles(Path(root))
        self._begin(files, build(files, str(files.root), Store(cache or default_folder())), files.root)

    def over(self, files: Files) -> "CodeIndex":
        """An index of files that were once those of this one, with changes of their own."""
        return CodeIndex._of(files, self._base, self.root)

    @staticmethod
    def without_base(files: Files, root: Path) -> "CodeIndex":
        """An index of files of which nothing is known before the first question."""
        return CodeIndex._of(files, Base({}), root)

    @staticmethod
    def _of(files: Files, base: Base, root: Path) -> "CodeIndex":
        index = CodeIndex.__new__(CodeIndex)
        index._begin(files, base, root)
        return index

    def _begin(self, files: Files, base: Base, root: Path) -> None:
        self.root = root
        self.files = files
        self._base = base
        self._listing: Listing = base.listing
        self._changed: dict[str, _Changed] = {}
        self._hidden: set[str] = set()  # paths of the base that have changed or gone
        self._lock = threading.RLock()

    def symbol(self, name: str, kind: Kind | None = None, path: str | None = None) -> list[Symbol]:
        """The definitions of a name: `aggregate`, `QuerySet.aggregate` or `django.db.models.query.QuerySet.aggregate`. `path` is
        a file or a folder. Empty when there are none."""
        wanted = names.normal(name)
        last = wanted.rpartition(".")[2]
        with self._lock:
            self._refresh()
            self._parse(path for path in list(self._base.unparsed) if f" {last} " in self._base.words[path])
            found = [each for each in self._base.names.get(last, ()) if each[0] not in self._hidden]
            for where, changed in self._changed.items():
                found += ((where, each) for each in changed.definitions if each.name.rpartition(".")[2] == last)
        return sorted(
            (
                Symbol(where, *each)
                for where, each in found
                if names.matches(where, each.name, wanted) and kind in (None, each.kind) and _is_below(where, path)
            ),
            key=lambda symbol: (symbol.path, symbol.start),
        )

    def references(self, name: str) -> list[Reference]:
        """Every place in the code where the name stands, its definitions included. Of a qualified name, its last part counts."""
        last = names.normal(name).rpartition(".")[2]
        found: list[Reference] = []
        with self._lock:
            self._refresh()
            paths = self._with_word(last)
            self._parse(paths)
            for path in sorted(paths):
                data = self.files.read(path)
                if data is not None:
                    found += references.find(path, data, last, self._definitions(path), self._imports(path))
        return found

    def subclasses(self, name: str) -> list[Symbol]:
        """The classes that name this one as a base."""
        bases = [reference for reference in self.references(name) if reference.use == "base"]
        return [symbol for each in bases for symbol in self.symbol(each.scope, "class", each.path) if symbol.name == each.scope]

    def outline(self, path: str) -> list[Symbol]:
        """All definitions of a file, in order."""
        with self._lock:
            self._refresh()
            self._require(path)
            self._parse([path])
            return [Symbol(path, *each) for each in self._definitions(path)]

    def dependencies(self, path: str) -> tuple[list[Dependency], list[Dependency]]:
        """What a file imports, and what imports it."""
        with self._lock:
            self._refresh()
            self._require(path)
            outwards = dependencies.outwards(path, self._imports(path), self._listing)
            nearby = self._with_word(dependencies.word_of(path)) | set(dependencies.beside(path, self._listing))
            inwards = (
                each
                for other in sorted(nearby)
                if other != path
                for each in dependencies.outwards(other, self._imports(other), self._listing)
                if each.target == path
            )
            return outwards, list(inwards)

    def mentions(self, word: str) -> list[Line]:
        """The lines of source files in which a word stands: in code, strings or comments, and as a part of longer words."""
        with self._lock:
            self._refresh()
            contents = ((path, self.files.read(path)) for path in sorted(self._with_words(word)))
            return [
                Line(path, number, line)
                for path, data in contents
                if data is not None
                for number, line in enumerate(decode(data, language_of(path)).split("\n"), 1)
                if word in line
            ]

    def text(self, pattern: str, path: str | None = None) -> list[Line]:
        """The lines of any text file that match a regular expression (in Rust's syntax, which takes linear time)."""
        return text.search_folder(self.root, pattern, path or "").found

    def closest(self, name: str, count: int = 8) -> list[Symbol]:
        """Definitions whose names resemble this one, best first."""
        with self._lock:
            self._refresh()
            known = {each for each, found in self._base.names.items() if any(path not in self._hidden for path, _ in found)}
            known |= {each.name.rpartition(".")[2] for changed in self._changed.values() for each in changed.definitions}
        close = names.closest(names.normal(name).rpartition(".")[2], known, count)
        return [symbol for each in close for symbol in self.symbol(each)[:1]]

    def lines(self, path: str, start: int, end: int) -> list[str]:
        data = self.files.read(path)
        return [] if data is None else decode(data, language_of(path)).split("\n")[start - 1 : end]

    def __len__(self) -> int:
        """How many source files there are."""
        with self._lock:
            self._refresh()
            return len(self._listing)

    def _refresh(self) -> None:
        listing = self.files.listing()
        if listing is self._listing:
            return
        before = self._base.listing
        for path in [path for path in self._changed if path not in listing or listing[path] == before.get(path)]:
            del self._changed[path]
        for path, signature in listing.items():
            if signature != before.get(path) and (path not in self._changed or self._changed[path].signature != signature):
                self._read(path, signature)
        self._hidden = {path for path in before if path in self._changed or path not in listing}
        self._listing = listing

    def _read(self, path: str, signature: Signature) -> None:
        language, data = language_of(path), self.files.read(path)
        if language is None or data is None:
            self._changed[path] = _Changed(signature, (), (), "")
            return
        record = read_record(data, language)
        definitions = complete(path, data) if record.definitions is None else record.definitions
        self._changed[path] = _Changed(signature, definitions, record.imports, record.words)

    def _with_word(self, word: str) -> set[str]:
        return self._with_words(f" {word} ")

    def _with_words(self, part: str) -> set[str]:
        """The files with a word of which this is a part."""
        paths = {path for path, words in self._base.words.items() if part in words and path not in self._hidden}
        paths.update(path for path, changed in self._changed.items() if part in changed.words)
        return paths

    def _parse(self, paths: Iterable[str]) -> None:
        """Ask the parser about those files whose definitions are not known yet."""
        for path in paths:
            if path in self._base.unparsed and path not in self._hidden:
                self._base.parse(path, self.files.read(path) or b"")

    def _definitions(self, path: str) -> tuple[Definition, ...]:
        return self._changed[path].definitions if path in self._changed else self._base.definitions.get(path) or ()

    def _imports(self, path: str) -> tuple[Import, ...]:
        return self._changed[path].imports if path in self._changed else self._base.imports.get(path, ())

    def _require(self, path: str) -> None:
        if path not in self._listing:
            raise ToolError(f"there is no source file {path[:200]!r}{names.nearest_paths(path, self._listing)}")


def _is_below(path: str, place: str | None) -> bool:
    return not place or path == place or path.startswith(f"{place.rstrip('/')}/")
