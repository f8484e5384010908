"""A package in a sandbox, with its tests and pytest: the state that agents' and graders' sandboxes start from. It is made once
for each package; what is particular to a task is put into it in a moment.
"""

import asyncio
import hashlib
import io
import tarfile
from pathlib import Path

from palestra import sandboxes
from palestra.errors import UsageError
from palestra.protocols import Sandbox, Snapshot, Spec
from palestra.swe.factory.packages import LOCK, Package, pytest_folder

REPOSITORY = "/work/repo"
OPTIONS = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "--no-header",
    "--tb=line",
    "-W",
    "ignore",
    "--continue-on-collection-errors",
)
SETTINGS = {"PYTHONHASHSEED": "0"}
"""Both the same for making tasks and for grading them."""

_MADE = 2
"""Counts changes of what is put in below, which a snapshot's key would not tell."""


async def snapshot(package: Package) -> Snapshot:
    pins = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    spec = Spec(name=f"factory {_MADE} {package.source.archive} {package.source.sha256} {package.root} {pins}")

    async def fill(sandbox: Sandbox) -> None:
        archive = await asyncio.to_thread(_archive, package)
        await sandbox.write("/tmp/factory.tar", archive)
        ran = await sandbox.run(["bash", "-c", _UNPACK, "bash", REPOSITORY, package.root])
        if ran.code:
            raise UsageError(
                f"{package.name} cannot be set up in a sandbox: {ran.stderr.head.decode(errors='replace').strip()[:400]}"
            )

    return await sandboxes.snapshot(spec, fill)


# The user's own site-packages are on Python's path by themselves, whatever Python there is.
_UNPACK = r"""
set -e
site=$(python3 -m site --user-site) || { echo "python3 is missing in the sandbox's base" >&2; exit 1; }
mkdir -p "$site" "$1"
tar -xf /tmp/factory.tar -C /tmp && rm /tmp/factory.tar
cp -a /tmp/site/. "$site" && cp -a /tmp/repo/. "$1" && rm -r /tmp/site /tmp/repo
echo "$1/$2" > "$site/repo.pth"
python3 -m compileall -q "$site"
"""


def _archive(package: Package) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(pytest_folder(), "site")
        archive.add(package.folder(), "repo")
        # What is installed has its metadata beside it; a source archive has the same text under another name.
        metadata = package.folder() / "PKG-INFO"
        if metadata.is_file():
            archive.add(metadata, f"site/{package.source.archive}.dist-info/METADATA")
    return data.getvalue()


def read_inside(name: str) -> bytes:
    """One of the files that run inside."""
    return (Path(__file__).parent / "inside" / name).read_bytes()
