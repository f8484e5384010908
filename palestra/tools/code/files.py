"""The files of a tree, as the index sees them: a listing with a signature for each source file, and their bytes.

A signature changes when a file does. Hidden folders, caches, links, and files of more than two megabytes are left out.
"""

import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from palestra.errors import ToolError, UsageError
from palestra.tools.code.languages import BY_SUFFIX, language_of
from palestra.tools.code.watch import Watch

LARGEST = 2_000_000
SKIPPED = frozenset({"node_modules", "__pycache__"})


SETTLED = 50_000_000
"""Nanoseconds after which a further change must show in a file's times."""


class Signature(NamedTuple):
    size: int
    modified: int
    """In nanoseconds."""
    changed: int
    """When its bytes or attributes last changed, which no program can set. Below zero: so lately that it may change unseen."""

    @staticmethod
    def of(size: int, modified: int, changed: int) -> "Signature":
        now = time.time_ns()
        return Signature(size, modified, changed if now - changed > SETTLED else -now)


Listing = Mapping[str, Signature]


class Files(Protocol):
    """Where an index takes its files from."""

    def listing(self) -> Listing:
        """The source files as they are now. The same object as before when nothing changed."""

    def read(self, path: str) -> bytes | None:
        """A file's bytes; None when it has gone meanwhile."""


class HostFiles:
    """The files below a folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise UsageError(f"{root} is no folder; give the folder of a repository")
        self._prefix = f"{self.root}{os.sep}"
        self._watch = Watch.open()
        self._folders: dict[str, tuple[dict[str, Signature], set[str]]] = {}
        self._listing: dict[str, Signature] = {}
        self._scan_all()

    def listing(self) -> Listing:
        changed = self._watch.changed() if self._watch else None
        if changed is None:
            self._scan_all()
        elif changed:
            for folder in sorted(changed):
                self._scan(folder)
            self._list()
        return self._listing

    def read(self, path: str) -> bytes | None:
        try:
            # A file may have been replaced since it was listed: by a link to another place, or by a pipe without an end.
            descriptor = os.open(self._prefix + path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with open(descriptor, "rb") as file:
            return file.read(LARGEST) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None

    def _scan_all(self) -> None:
        self._folders.clear()
        self._scan("")
        self._list()

    def _list(self) -> None:
        listing = {folder + name: signature for folder, (files, _) in self._folders.items() for name, signature in files.items()}
        if listing != self._listing:
            self._listing = listing

    def _scan(self, first: str) -> None:
        """Look at a folder anew, and at the folders in it that are not known yet. `first` ends with a slash, or is empty."""
        waiting = [first]
        while waiting:
            folder = waiting.pop()
            _, known = self._folders.get(folder, ({}, set()))
            # Watched before it is read, so that no change falls between.
            if folder not in self._folders and self._watch and not self._watch.add(self._prefix + folder, folder):
                self._watch.close()
                self._watch = None
            try:
                with os.scandir(self._prefix + folder) as entries:
                    files, folders = _sort(entries)
            except OSError:
                self._forget(folder)
                continue
            self._folders[folder] = (files, folders)
            waiting.extend(f"{folder}{name}/" for name in folders - known)
            for name in known - folders:
                self._forget(f"{folder}{name}/")

    def _forget(self, folder: str) -> None:
        waiting = [folder]
        while waiting:
            each = waiting.pop()
            _, inner = self._folders.pop(each, ({}, set()))
            waiting.extend(f"{each}{name}/" for name in inner)


def _sort(entries: "Iterator[os.DirEntry[str]]") -> tuple[dict[str, Signature], set[str]]:
    """The source files and the folders of a folder."""
    files: dict[str, Signature] = {}
    folders: set[str] = set()
    for entry in entries:
        name = entry.name
        if entry.is_dir(follow_symlinks=False):
            if not is_skipped(name):
                folders.add(name)
        elif language_of(name) is not None:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST:
                files[name] = Signature.of(status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return files, folders


def is_skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in SKIPPED


def inside(path: str, root: str) -> str:
    """A path given by a model as it is written here: relative to the root, without `.` and `..`. A `ToolError` when it leads
    outside."""
    if "\0" in path:
        raise ToolError("the path holds a NUL byte; give it relative to the root of the repository, such as src/main.py")
    joined = os.path.normpath(os.path.join("/", root, path))
    if joined != os.path.normpath(root) and not joined.startswith(os.path.join(os.path.normpath(root), "")):
        raise ToolError(f"{path[:200]} is outside the repository; give a path relative to its root, such as src/main.py")
    relative = os.path.relpath(joined, root)
    return "" if relative == "." else relative


SUFFIXES = tuple(BY_SUFFIX)
