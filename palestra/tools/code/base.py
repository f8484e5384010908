"""A tree of files as it was at one moment: definitions by name and files by word. It does not change, so all rollouts of a task
share one."""

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from palestra.tools.code import grammar
from palestra.tools.code.files import Files, Listing
from palestra.tools.code.languages import Language, language_of
from palestra.tools.code.reading import decode, read_record
from palestra.tools.code.store import Store, digest_of
from palestra.tools.code.symbols import Definition, Import, Record

Found = tuple[str, Definition]
BATCH = 500
"""So many files are in memory at once while a tree is read."""


@dataclass
class Base:
    listing: Listing
    definitions: dict[str, tuple[Definition, ...] | None] = field(default_factory=dict)
    """By path; None where the parser has not been asked yet."""
    imports: dict[str, tuple[Import, ...]] = field(default_factory=dict)
    names: dict[str, list[Found]] = field(default_factory=dict)
    """Definitions by the last part of their name, as far as they are known."""
    words: dict[str, str] = field(default_factory=dict)
    """By path, the words that stand in it, in code or elsewhere."""
    unparsed: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, path: str, record: Record) -> None:
        self.definitions[path] = record.definitions
        self.imports[path] = record.imports
        self.words[path] = record.words
        if record.definitions is None:
            self.unparsed.add(path)
        else:
            self._add_names(path, record.definitions)

    def parse(self, path: str, data: bytes) -> None:
        """Complete a file whose definitions are not known yet."""
        found = complete(path, data)
        with self._lock:  # the other rollouts of the task may want the same file
            if path in self.unparsed:
                self.definitions[path] = found
                self._add_names(path, found)
                self.unparsed.remove(path)

    def _add_names(self, path: str, definitions: tuple[Definition, ...]) -> None:
        names = self.names
        for definition in definitions:
            name = definition.name
            names.setdefault(name[name.rfind(".") + 1 :], []).append((path, definition))


def complete(path: str, data: bytes) -> tuple[Definition, ...]:
    """The definitions of a file in another language than Python."""
    language = _language(path)
    return grammar.definitions(language, decode(data, language))


def build(files: Files, name: str, store: Store) -> Base:
    """Read a tree. `name` says which: of a tree by this name, only files whose signature changed are opened again."""
    listing = files.listing()
    with _without_collection():
        base = Base(listing)
        seen = store.tree(name)
        digests = {path: seen[path][1] for path, signature in listing.items() if path in seen and seen[path][0] == signature}
        known = store.records(list(set(digests.values())))
        for path, digest in digests.items():
            if digest in known:
                base.add(path, known[digest])
        unknown = [path for path in listing if path not in base.definitions]
        fresh: dict[bytes, Record] = {}
        for start in range(0, len(unknown), BATCH):
            digests |= _read(base, files, unknown[start : start + BATCH], store, fresh)
        if unknown:
            store.keep(name, listing, digests, fresh)
    return base


def _read(base: Base, files: Files, paths: Sequence[str], store: Store, fresh: dict[bytes, Record]) -> dict[str, bytes]:
    """Add the files at these paths, and what was not known of their contents to `fresh`; their digests."""
    contents = {path: data for path in paths if (data := files.read(path)) is not None}
    digests = {path: digest_of(data, _language(path)) for path, data in contents.items()}
    known = store.records([digest for digest in digests.values() if digest not in fresh])
    for path, digest in digests.items():
        record = known.get(digest) or fresh.get(digest)
        if record is None:
            record = fresh[digest] = read_record(contents[path], _language(path))
        base.add(path, record)
    return digests


def _language(path: str) -> Language:
    language = language_of(path)
    assert language is not None, "only source files are listed"
    return language


@contextmanager
def _without_collection() -> Iterator[None]:
    """Many small objects that all stay: looking for garbage among them again and again takes longer than reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
