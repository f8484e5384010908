"""What was read of contents, kept outside the repositories and keyed by content, so that it is read once for all that share it.

One SQLite file in the cache folder holds plain text, no code. It may be deleted at any time; without a folder that can be
written, or with a file that is damaged, everything is read anew.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from palestra.tools.code.files import Listing, Signature
from palestra.tools.code.languages import Language
from palestra.tools.code.symbols import Definition, Import, Kind, Record

VERSION = 1
"""Raise it when the same content would be read differently."""

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS contents (digest BLOB PRIMARY KEY, definitions TEXT, imports TEXT NOT NULL, words TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trees (root BLOB PRIMARY KEY, files BLOB NOT NULL);
"""
_KINDS: dict[str, Kind] = {"c": "class", "f": "function", "m": "method", "v": "variable"}


def default_folder() -> Path:
    return Path(os.environ.get("PALESTRA_CACHE") or Path.home() / ".cache" / "palestra") / "code"


def digest_of(data: bytes, language: Language) -> bytes:
    return hashlib.blake2b(data, digest_size=16, person=language.name.encode()).digest()


class Store:
    def __init__(self, folder: Path) -> None:
        self._path = folder / f"contents-{VERSION}.sqlite"

    def tree(self, root: str) -> dict[str, tuple[Signature, bytes]]:
        """The files of a folder as they were last seen, each with the digest of its content."""
        try:
            with closing(self._connect()) as database:
                row = database.execute("SELECT files FROM trees WHERE root = ?", (os.fsencode(root),)).fetchone()
            return dict(_unpack_tree(row[0])) if row else {}
        except (OSError, sqlite3.Error, ValueError):
            return {}

    def records(self, digests: Sequence[bytes]) -> dict[bytes, Record]:
        found: dict[bytes, Record] = {}
        try:
            with closing(self._connect()) as database:
                for start in range(0, len(digests), 500):
                    some = digests[start : start + 500]
                    query = f"SELECT * FROM contents WHERE digest IN ({','.join('?' * len(some))})"
                    found.update((digest, _unpack(*columns)) for digest, *columns in database.execute(query, some))
        except (OSError, sqlite3.Error, ValueError, KeyError):
            pass  # what was found until then is good
        return found

    def keep(self, root: str, listing: Listing, digests: Mapping[str, bytes], records: Mapping[bytes, Record]) -> None:
        listed = (f"{path}\0{' '.join(map(str, listing[path]))}\0{digest.hex()}" for path, digest in digests.items())
        files = os.fsencode("\0".join(listed))  # a file's name need not be text
        rows = [(digest, *_pack(record)) for digest, record in records.items()]
        try:
            with closing(self._connect()) as database, database:
                database.executemany("INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?)", rows)
                database.execute("INSERT OR REPLACE INTO trees VALUES (?, ?)", (os.fsencode(root), files))
        except (OSError, sqlite3.Error):
            pass  # nothing is kept: the next one reads anew

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = sqlite3.connect(self._path, timeout=10)
        try:
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database


def _unpack_tree(files: bytes) -> Iterator[tuple[str, tuple[Signature, bytes]]]:
    fields = os.fsdecode(files).split("\0") if files else []
    for path, signature, digest in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        size, modified, changed = map(int, signature.split())
        yield path, (Signature(size, modified, changed), bytes.fromhex(digest))


def _pack(record: Record) -> tuple[str | None, str, str]:
    definitions = None
    if record.definitions is not None:
        definitions = "\n".join([f"{kind[0]} {start} {end} {name}" for name, kind, start, end in record.definitions])
    imports = "\n".join([f"{start} {end} {module} {' '.join(names)}" for start, end, module, names in record.imports])
    return definitions, imports, record.words


def _unpack(definitions: str | None, imports: str, words: str) -> Record:
    return Record(
        None if definitions is None else tuple(_unpack_definitions(definitions)),
        tuple(_unpack_imports(imports)),
        words,
    )


def _unpack_definitions(packed: str) -> Iterator[Definition]:
    for line in packed.split("\n") if packed else ():
        kind, start, end, name = line.split(" ", 3)
        yield Definition(name, _KINDS[kind], int(start), int(end))


def _unpack_imports(packed: str) -> Iterator[Import]:
    for line in packed.split("\n") if packed else ():
        start, end, module, *names = line.split(" ")
        yield Import(int(start), int(end), module, tuple(names if names != [""] else ()))
