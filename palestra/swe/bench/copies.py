"""A repository as its snapshot has it, copied to the cache once, and the index of it that all rollouts of an instance share."""

import asyncio
import hashlib
import io
import shutil
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path

from palestra import sandboxes
from palestra.cache import cache_folder
from palestra.errors import InfrastructureError
from palestra.protocols import Snapshot
from palestra.tools.code import CodeIndex

LARGEST = 2**30
_PACK = "git ls-files -z | tar --null --no-recursion --files-from=- -cf /tmp/files.tar"


async def index(snapshot: Snapshot, folder: str) -> CodeIndex:
    place = cache_folder() / "swe-bench" / hashlib.sha256(f"{snapshot.key} {folder}".encode()).hexdigest()[:24]
    if not place.is_dir():
        await asyncio.to_thread(_unpack, await _files(snapshot, folder), place)
    return await asyncio.to_thread(_index, place)


@lru_cache(maxsize=16)
def _index(place: Path) -> CodeIndex:
    return CodeIndex(place)


async def _files(snapshot: Snapshot, folder: str) -> bytes:
    """With the times that they have there, by which an index knows what has not changed."""
    async with sandboxes.open(snapshot) as sandbox:
        ran = await sandbox.run(["bash", "-c", _PACK], folder=folder, seconds=600)
        if ran.code:
            raise InfrastructureError(f"the files in {folder} cannot be listed: {ran.stderr.head.decode(errors='replace')[:300]}")
        return await sandbox.read("/tmp/files.tar", LARGEST)


def _unpack(data: bytes, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=place.parent))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        # Links may lead anywhere, and an index follows none.
        archive.extractall(partial, [member for member in archive if member.isfile()], filter="data")
    try:
        partial.rename(place)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
