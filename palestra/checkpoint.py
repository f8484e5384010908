"""Checkpoint folders that are whole or not there: written beside, synced, listed in a manifest, and renamed into place.

What a checkpoint holds is the trainer's affair, and which one a run resumes from the ledger's.
"""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TypedDict

from palestra.errors import StorageError

MANIFEST = "checkpoint-manifest.json"

_PARTIAL = ".partial-"  # still being written
_DISCARDED = ".discarded-"  # being deleted: a kill halfway must not leave half a checkpoint under its name


class Entry(TypedDict):
    size: int
    sha256: str


class Manifest(TypedDict):
    order: int
    """Counts the writes, as names need not sort and clocks can jump."""
    files: dict[str, Entry]


async def write(folder_parent: Path, name: str, fill: Callable[[Path], Awaitable[None]]) -> Path:
    """Make the checkpoint `name` of what `fill` writes into the folder it is given. When this returns it is on the disk."""
    partial = folder_parent / (_PARTIAL + name)
    try:
        _begin(partial)
        await fill(partial)
        files: dict[str, Entry] = {}
        for file in _files(partial):
            files[file.relative_to(partial).as_posix()] = await asyncio.to_thread(_seal, file)
        return _publish(partial, folder_parent / name, files)
    except BaseException as error:
        reason = _disk_error(error, folder_parent)  # before the space is free again
        shutil.rmtree(partial, ignore_errors=True)
        if reason is not None:
            place = folder_parent / name
            raise StorageError(f"cannot write checkpoint {place}: {reason}; nothing recorded before is lost") from error
        raise


def valid(folder: Path) -> bool:
    """Whether every byte that was written is still there."""
    manifest = _manifest(folder)
    return manifest is not None and _sizes_match(folder, manifest) and _hashes_match(folder, manifest)


def newest_valid(folder_parent: Path) -> Path | None:
    """The last written checkpoint that verifies."""
    return next((folder for folder in _newest_first(folder_parent) if valid(folder)), None)


def sweep(folder_parent: Path) -> None:
    """Remove what a killed process left half written or half deleted. Only for the run's one writer, at its start."""
    for prefix in (_PARTIAL, _DISCARDED):
        for folder in folder_parent.glob(prefix + "*"):
            shutil.rmtree(folder)


def prune(folder_parent: Path, keep: int, always: Collection[str]) -> None:
    """Delete all but the newest `keep` checkpoints and those named in `always`."""
    folders = _newest_first(folder_parent)
    # Sizes find a truncated one, which must not count as kept; to hash every checkpoint at every save would take too long.
    whole = [folder for folder in folders if (manifest := _manifest(folder)) and _sizes_match(folder, manifest)]
    for folder in folders:
        if folder not in whole[:keep] and folder.name not in always:
            shutil.rmtree(_set_aside(folder))


def _begin(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _seal(file: Path) -> Entry:
    _sync(file)
    return _describe(file)


def _describe(file: Path) -> Entry:
    with file.open("rb") as data:
        return {"size": os.fstat(data.fileno()).st_size, "sha256": hashlib.file_digest(data, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(partial: Path, final: Path, files: dict[str, Entry]) -> Path:
    """Nothing in here awaits: a cancelled write has published all or nothing."""
    order = 1 + max((manifest["order"] for folder in _folders(final.parent) if (manifest := _manifest(folder))), default=-1)
    (partial / MANIFEST).write_text(json.dumps(Manifest(order=order, files=files), indent=1))
    for path in (partial / MANIFEST, *(path for path in partial.rglob("*") if path.is_dir()), partial):
        _sync(path)
    # A name that exists was written just before a kill and never committed, so there may be an instant without it.
    replaced = _set_aside(final) if final.exists() else None
    os.rename(partial, final)
    _sync(final.parent)
    if replaced:
        shutil.rmtree(replaced)
    return final


def _set_aside(folder: Path) -> Path:
    discarded = folder.with_name(_DISCARDED + folder.name)
    shutil.rmtree(discarded, ignore_errors=True)
    os.rename(folder, discarded)
    return discarded


def _folders(parent: Path) -> list[Path]:
    """The checkpoints, whole or broken: without a manifest a folder is not ours to judge or delete."""
    return [file.parent for file in parent.glob(f"*/{MANIFEST}") if not file.parent.name.startswith((_PARTIAL, _DISCARDED))]


def _newest_first(parent: Path) -> list[Path]:
    def order(folder: Path) -> int:
        manifest = _manifest(folder)
        return manifest["order"] if manifest else -1

    return sorted(_folders(parent), key=order, reverse=True)


def _manifest(folder: Path) -> Manifest | None:
    try:
        manifest: Manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return manifest


def _sizes_match(folder: Path, manifest: Manifest) -> bool:
    try:
        return all((folder / name).stat().st_size == entry["size"] for name, entry in manifest["files"].items())
    except OSError:
        return False


def _hashes_match(folder: Path, manifest: Manifest) -> bool:
    try:
        return all(_describe(folder / name) == entry for name, entry in manifest["files"].items())
    except OSError:
        return False


def _disk_error(error: BaseException, folder: Path) -> str | None:
    """What the disk has to do with it, or None."""
    if isinstance(error, ConnectionError | TimeoutError):  # of a remote trainer, though Python counts them as OSError
        return None
    if "No space left" in str(error):  # safetensors has only the text
        return "the disk is full"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # torch.save reports a full disk as a RuntimeError about a file position.
    return "the disk is full" if isinstance(error, RuntimeError) and shutil.disk_usage(folder).free < 2**16 else None
