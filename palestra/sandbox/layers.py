"""The read-only layers under a sandbox, in a cache folder: a skeleton root for all, and one layer for each snapshot."""

import asyncio
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from pathlib import Path

from palestra.errors import InfrastructureError, UsageError
from palestra.protocols import Snapshot, Spec
from palestra.sandbox.cgroup import owner_lives, owner_name

WORK = "/work"
HOME = "/home/agent"
AGENT = 1000
"""The user inside, whoever that is outside."""

BASE = "base"
"""In a snapshot's folder: the key of the one that it was built upon."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""What is shown of the base, read-only."""
SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "ssl/openssl.cnf", "localtime")
"""What is copied of its /etc: nothing there is secret, or about this host."""
FOLDERS = {"tmp": 0o1777, "var/tmp": 0o1777, "home": 0o555, "etc": 0o555, "run": 0o555, "opt": 0o555, "mnt": 0o555}
FOLDERS |= {"proc": 0o555, "dev": 0o555}
WRITTEN = {
    "etc/passwd": f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\nagent:x:{AGENT}:{AGENT}:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\nagent:x:{AGENT}:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/resolv.conf": "",  # the host's is shown over it where its network is shared
}


def cache_folder(chosen: Path | None = None) -> Path:
    """Ours alone: its layers become the files of sandboxes."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (chosen or home / "palestra" / "sandbox").resolve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the sandbox cache {folder} cannot be made: {error.strerror}") from None
    if folder.stat().st_uid != os.geteuid():
        raise UsageError(f"the sandbox cache {folder} belongs to another user; set another sandbox.cache")
    return folder


class Layers:
    """The cache folder. `owner` is the host's uid of the files that belong to the agent."""

    def __init__(self, folder: Path, base: Path, owner: int) -> None:
        self.folder = folder
        self._base = base
        self._owner = owner

    @cached_property
    def skeleton(self) -> Path:
        """The root folder without what is mounted into it."""
        digest = hashlib.sha256(repr((WRITTEN, FOLDERS, self._owner, self._links())).encode())
        for name in SETTINGS:
            hash_tree(self._base / "etc" / name, digest)
        place = self.folder / f"skeleton-{digest.hexdigest()[:16]}"
        if not place.exists():
            with self._building() as root:
                self._fill(root)
                _move(root, place)
        return place

    @cached_property
    def binds(self) -> list[tuple[Path, str]]:
        """System folders of the base, and where they are seen inside."""
        folders = [(self._base / name, f"/{name}") for name in SYSTEM]
        return [(folder, inside) for folder, inside in folders if folder.is_dir() and not folder.is_symlink()]

    def _links(self) -> dict[str, str]:
        return {name: os.readlink(self._base / name) for name in SYSTEM if (self._base / name).is_symlink()}

    def _fill(self, root: Path) -> None:
        for name in FOLDERS:
            (root / name).mkdir(parents=True)
        for name in (WORK, HOME):
            place = root / name[1:]
            place.mkdir()
            if os.geteuid() == 0:
                os.chown(place, self._owner, self._owner)
        for _, inside in self.binds:
            (root / inside[1:]).mkdir()
        for name, target in self._links().items():
            (root / name).symlink_to(target)
        for name, text in WRITTEN.items():
            (root / name).write_text(text, encoding="utf-8")
        for name in SETTINGS:
            _copy(self._base / "etc" / name, root / "etc" / name)
        for name, mode in FOLDERS.items():
            (root / name).chmod(mode)
        root.chmod(0o555)

    def under(self, snapshot: Snapshot) -> list[Path]:
        """The layers of a sandbox, from the top."""
        layers, key = [], snapshot.key
        while key:
            layers.append(self._place(key) / "u")
            base = self._place(key) / BASE
            key = base.read_text(encoding="utf-8") if base.exists() else ""
        return [*layers, self.skeleton]

    def has(self, key: str) -> bool:
        return self._place(key).exists()

    def _place(self, key: str) -> Path:
        return self.folder / f"snapshot-{key}"

    def key(self, spec: Spec) -> str:
        """The same for the same state: of the folders' contents, not their names."""
        plain = [spec.name, [list(command) for command in spec.commands], spec.network, self._owner, self.skeleton.name]
        plain += [spec.base.key] if spec.base.key else []
        digest = hashlib.sha256(json.dumps(plain).encode())
        for inside, folder in sorted(spec.folders.items()):
            if not folder.is_dir():
                raise UsageError(f"{folder} is no folder; a sandbox's spec.folders names folders of this machine")
            digest.update(f"{inside}\0".encode())
            hash_tree(folder, digest)
        return digest.hexdigest()[:24]

    @contextmanager
    def building(self, key: str, spec: Spec) -> Iterator[Path]:
        """A folder with `u`, the writable layer, and `w`. It becomes the snapshot when the block ends well."""
        with self._building() as place:
            upper = place / "u"
            upper.mkdir()
            (place / "w").mkdir()
            if spec.base.key:
                (place / BASE).write_text(spec.base.key, encoding="utf-8")
            for inside, folder in spec.folders.items():
                self._copy_in(folder, upper, inside)
            upper.chmod(0o555)
            yield place
            remove(place / "w")
            _move(place, self._place(key))

    def _copy_in(self, folder: Path, upper: Path, inside: str) -> None:
        if ".." in Path(inside).parts:
            raise UsageError(f"{inside!r} in a sandbox's spec.folders must be a path without ..")
        place = upper.joinpath(*(Path(WORK) / inside).parts[1:])
        self._make_like_skeleton(place, upper)
        try:
            shutil.copytree(folder, place, symlinks=True, dirs_exist_ok=True)
        except (shutil.Error, OSError) as error:
            raise InfrastructureError(f"{folder} cannot be copied into a sandbox: {error}") from None
        if os.geteuid() == 0:
            for parent, _, files in os.walk(place):
                for path in (parent, *(os.path.join(parent, name) for name in files)):
                    os.chown(path, self._owner, self._owner, follow_symlinks=False)

    def _make_like_skeleton(self, place: Path, upper: Path) -> None:
        """A folder and those above it. Those that the skeleton has keep their owner and mode, as the upper layer decides."""
        for folder in (*reversed(place.relative_to(upper).parents), place.relative_to(upper)):
            made, model = upper / folder, self.skeleton / folder
            if made.exists():
                continue
            made.mkdir()
            if os.geteuid() == 0:
                owner = model.stat().st_uid if model.exists() else self._owner
                os.chown(made, owner, owner)
            if model.exists():
                made.chmod(stat.S_IMODE(model.stat().st_mode))

    @asynccontextmanager
    async def lock(self, key: str) -> AsyncIterator[None]:
        """One builder at a time, whatever process it is in. Those who wait ask again: in threads they would take up all that the
        builder needs."""
        with (self.folder / f"{key}.lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.02)
            yield

    @contextmanager
    def _building(self) -> Iterator[Path]:
        place = self.folder / f"{owner_name()}-{secrets.token_hex(4)}"
        place.mkdir()
        try:
            yield place
        finally:
            remove(place)

    def sweep(self, snapshots: bool) -> list[Path]:
        """Remove what dead owners left, here and among temporary files, and on request every layer."""
        places = (self.folder, Path(tempfile.gettempdir()))
        doomed = [path for place in places for path in place.iterdir() if _abandoned(path)]
        if snapshots:
            doomed += [path for pattern in ("snapshot-*", "skeleton-*", "*.lock") for path in self.folder.glob(pattern)]
        for path in doomed:
            remove(path)
        return doomed


def _abandoned(path: Path) -> bool:
    return not owner_lives(path.name) and path.lstat().st_uid == os.geteuid()


def remove(path: Path) -> None:
    """A file or folder, with folders in it that are closed to their owner: overlayfs makes such."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for folder, names, _ in os.walk(path):
        os.chmod(folder, 0o700)
        for name in names:
            if not os.path.islink(inner := os.path.join(folder, name)):
                os.chmod(inner, 0o700)
    shutil.rmtree(path)


def _move(made: Path, place: Path) -> None:
    try:
        made.rename(place)
    except OSError:  # another process was first; a folder cannot replace a full one
        if not place.exists():
            raise


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() or source.is_file():
        shutil.copy2(source, target)
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)


def hash_tree(root: Path, digest: "hashlib._Hash") -> None:
    """Names, modes and contents. What cannot be read is not shown to the sandbox either, and its name is enough."""
    paths = [root]
    if root.is_dir() and not root.is_symlink():
        paths += sorted(Path(folder) / name for folder, folders, files in os.walk(root) for name in folders + files)
    for path in paths:
        digest.update(f"{path.relative_to(root)}\0".encode("utf-8", "surrogateescape"))
        try:
            mode = path.lstat().st_mode
            digest.update(f"{mode}\0".encode())
            if stat.S_ISLNK(mode):
                digest.update(os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(mode):
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError:
            continue
