"""The ledger's file: its schema, its connection, the lock that keeps a second writer out, and disk errors as one clear line.

What the rows mean is said in `ledger.py`.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from palestra.errors import StorageError

VERSION = 3

SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE steps (
        step INTEGER PRIMARY KEY,
        checkpoint TEXT NOT NULL, -- the one that holds this step's weights
        trained INTEGER NOT NULL,
        filtered INTEGER NOT NULL,
        metrics BLOB NOT NULL
    )""",
    # Text that a model or a data set wrote is kept as bytes: it may hold NUL or lone surrogates, which TEXT cannot.
    """CREATE TABLE trajectories (
        id INTEGER PRIMARY KEY,
        phase TEXT NOT NULL,
        step INTEGER NOT NULL,
        task_id BLOB NOT NULL,
        idx INTEGER NOT NULL,
        state TEXT NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 1,
        settled_by INTEGER REFERENCES steps (step), -- the committed step that consumed or filtered it
        reward REAL,
        stop TEXT,
        body BLOB NOT NULL,
        UNIQUE (phase, step, task_id, idx)
    )""",
    """CREATE TABLE segments (
        trajectory INTEGER NOT NULL REFERENCES trajectories (id),
        number INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        mask BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        versions BLOB NOT NULL,
        PRIMARY KEY (trajectory, number)
    )""",
    f"INSERT INTO meta VALUES ('schema', '{VERSION}')",
)


class Store:
    """One connection to a ledger file; a writer also holds its lock."""

    def __init__(self, path: Path, read_only: bool) -> None:
        self.path = path
        if read_only and not path.is_file():
            raise StorageError(f"{path}: there is no ledger here")
        with ExitStack() as opened:
            if not read_only:
                opened.enter_context(lock(path))
                if not path.exists():
                    _create(path)
            self._connection = opened.enter_context(closing(_connect(path, read_only)))
            _check(self._connection, path)
            if not read_only:
                with self._explained("write"):
                    self._connection.execute("PRAGMA journal_mode = WAL")
                    self._connection.execute("PRAGMA foreign_keys = ON")
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._explained("read"):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads in the block see one state, whatever a writer does meanwhile."""
        with self._explained("read"):
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")

    @contextmanager
    def transaction(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """All of the block or nothing of it. A durable one has reached the disk, with all before it, when the block ends."""
        with self._explained("write"):
            # NORMAL does not sync the WAL: that survives kill -9 but not a power cut. For trajectories it is enough, as they
            # can be made again; for a committed step it is not, as older checkpoints are deleted on the strength of it.
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # some disk errors have rolled back already
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """SQLite returns whatever bytes are in its file: what cannot be unpacked was damaged there."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StorageError(f"cannot read {what} in {self.path}: its bytes are damaged: {error}") from error

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StorageError(f"cannot {doing} {self.path}: {error}; nothing recorded is lost, mend it and resume") from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # its subclasses are mistakes in our code, not on the disk
                raise
            raise StorageError(f"cannot {doing} {self.path}: the file is damaged: {error}") from error


def lock(path: Path) -> FileIO:
    """Keeps other writers of this ledger out until it is closed. The lock is flock's, not the file's existence: the system frees
    it however the process ends."""
    with ExitStack() as opened:
        try:
            # A file beside the database: opening and closing the database itself would drop the locks SQLite holds on it.
            file = opened.enter_context(path.with_name(path.name + ".lock").open("a+b", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(b"%d" % os.getpid())
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().decode()
            raise StorageError(f"{path} is being written by process {owner}; a run has one writer at a time") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be locked for writing: {error.strerror}") from error
        opened.pop_all()
        return file


def _create(path: Path) -> None:
    """The file comes into being whole: who looks at the run meanwhile finds no ledger or one that can be read."""
    partial = path.with_name(path.name + ".new")
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        for statement in SCHEMA:
            made.execute(statement)
        image = made.serialize()
    try:
        with partial.open("wb") as file:
            file.write(image)
            file.flush()
            os.fsync(file.fileno())
        path.with_name(path.name + "-wal").unlink(missing_ok=True)  # of a ledger that was deleted: it would be taken for ours
        partial.rename(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be made: {error.strerror}") from error


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    mode = "mode=rw"
    if read_only:
        # A reader makes the WAL's index where there is none, which a read-only disk forbids; without a WAL it needs none.
        sealed = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
        mode = "immutable=1" if sealed else "mode=ro"
    try:
        return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None, timeout=10)
    except sqlite3.Error as error:
        raise StorageError(f"{path} cannot be opened: {error}") from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Whatever is no ledger of this version is refused, untouched."""
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            raise StorageError(f"{path} is no ledger: it is empty")
        if not {"meta", "steps", "trajectories", "segments"} <= tables:
            raise StorageError(f"{path} is no ledger: it is another program's database")
        (version,) = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    except sqlite3.OperationalError as error:
        raise StorageError(f"{path} cannot be opened: {error}") from error
    except sqlite3.DatabaseError as error:
        raise StorageError(f"{path} is no ledger: {error}") from error
    if version != str(VERSION):
        raise StorageError(f"{path} has ledger schema {version}; this version of Palestra reads schema {VERSION}")
