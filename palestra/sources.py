"""What is fetched once from the package index into the cache, pinned by digests: source archives, and installed packages."""

import fcntl
import hashlib
import html
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from palestra.cache import cache_folder
from palestra.errors import UsageError

SECONDS = 120


@dataclass(frozen=True)
class Source:
    """One release, pinned by the digest of its archive."""

    project: str
    archive: str
    sha256: str


def default_folder() -> Path:
    return cache_folder() / "sources"


def fetch(source: Source, folder: Path | None = None) -> Path:
    """The folder of an unpacked release. Nothing in it is built or run."""
    folder = folder or default_folder()
    target = folder / source.archive
    if target.is_dir():
        return target
    data = _download(source)
    if hashlib.sha256(data).hexdigest() != source.sha256:
        raise UsageError(f"{source.archive}.tar.gz from the package index is not the archive that was published")
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = Path(tempfile.mkdtemp(dir=folder))
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(unpacked, filter="data")
        try:
            (unpacked / source.archive).rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return target


def installed(lock: Path, what: str) -> Path:
    """A folder with the packages of a lock file: wheels with their hashes, and nothing that the file does not name."""
    folder = cache_folder() / "installed" / f"{lock.stem}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # whoever comes second waits, and finds it made
        if not folder.is_dir():
            beside = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(beside, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps", "--no-compile"]
            pip += ["--only-binary", ":all:", "--require-hashes", "--target", str(beside), "--requirement", str(lock)]
            if subprocess.run(pip, stdout=sys.stderr).returncode:
                raise UsageError(f"{what} was not installed; what pip said above tells why")
            beside.rename(folder)
    return folder


def _download(source: Source) -> bytes:
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/{source.project}/"
    try:
        with urllib.request.urlopen(page, timeout=SECONDS) as answer:
            links = re.findall(r'href="([^"]+)"', answer.read().decode())
        name = f"{source.archive}.tar.gz"
        link = next(
            (html.unescape(each) for each in links if urllib.parse.urlsplit(html.unescape(each)).path.endswith(f"/{name}")), None
        )
        if link is None:
            raise UsageError(f"{page} has no {name}; set PIP_INDEX_URL to a package index that has it")
        with urllib.request.urlopen(urllib.parse.urljoin(page, link), timeout=SECONDS) as answer:
            data: bytes = answer.read()
            return data
    except OSError as error:
        raise UsageError(f"the package index at {page} cannot be reached: {error}") from None
