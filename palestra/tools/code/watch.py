"""Which folders changed since the last question, as the kernel tells it (Linux's inotify): one system call instead of one for
every file. Where that cannot be had, there is no watch, and files are looked at one by one."""

import ctypes
import errno
import os
import struct
import sys
import weakref

_MASK = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""Modified, attributes, closed after writing, moved from and to, created, deleted, and the folder itself deleted or moved."""
_ONLY_FOLDERS, _NO_LINKS = 0x1000000, 0x2000000
_LOST, _GONE = 0x4000, 0x8000
_EVENT = struct.Struct("iIII")


class Watch:
    """Folders under watch, by the names that they were added with."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._folders: dict[int, str] = {}
        self._close = weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def open() -> "Watch | None":
        if not sys.platform.startswith("linux"):
            return None
        descriptor = ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        return Watch(descriptor) if descriptor >= 0 else None

    def add(self, path: str, folder: str) -> bool:
        """Watch the folder at `path`, and call it `folder`. False when the kernel watches no more."""
        number = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), _MASK | _ONLY_FOLDERS | _NO_LINKS)
        if number >= 0:
            self._folders[number] = folder
            return True
        return ctypes.get_errno() in (errno.ENOENT, errno.ENOTDIR, errno.EACCES)  # it has gone: nothing to watch

    def changed(self) -> set[str] | None:
        """The folders in which something changed since the last call; None when the kernel lost count."""
        changed: set[str] = set()
        while True:
            try:
                events = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return changed
            offset = 0
            while offset < len(events):
                number, mask, _, length = _EVENT.unpack_from(events, offset)
                offset += _EVENT.size + length
                if mask & _LOST:
                    return None
                if number in self._folders:
                    changed.add(self._folders.pop(number) if mask & _GONE else self._folders[number])

    def close(self) -> None:
        self._close()
