"""Repositories at one commit, from a folder of bare mirrors or from a git server: their files only, without history, and without
the attributes that make `git archive` leave files out or write into them.
"""

import fcntl
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from palestra.cache import cache_folder
from palestra.errors import Unprepared, UsageError

_SERVERS = ("https://", "http://", "ssh://", "git://", "file://", "git@")
_SHAPES = (
    "{owner}+{name}/repo",
    "{owner}+{name}",
    "{owner}__{name}",
    "{owner}__{name}.git",
    "{owner}/{name}.git",
    "{owner}/{name}",
)


def find(mirrors: str, repo: str) -> Path:
    """The repository's git folder. From a server it is cloned once, into the cache."""
    owner, _, name = repo.rpartition("/")
    if mirrors.startswith(_SERVERS):
        return _cloned(f"{mirrors.rstrip('/')}/{repo}.git", f"{owner}__{name}.git")
    folder = Path(mirrors).expanduser()
    for shape in _SHAPES:
        place = folder / shape.format(owner=owner, name=name)
        for git in (place, place / ".git"):
            if (git / "HEAD").is_file() and (git / "objects").is_dir():
                return git
    raise UsageError(
        f"no mirror of {repo} in {folder}: looked for {', '.join(shape.format(owner=owner, name=name) for shape in _SHAPES)}; "
        f"make one with `git clone --bare URL {folder / f'{owner}__{name}'}`, or name another folder or a git server by "
        "--mirrors (tasks.arguments.mirrors)"
    )


def archive(git: Path, commit: str) -> bytes:
    """All files of the commit, as a tar archive."""
    if _git(git, ["cat-file", "-e", f"{commit}^{{commit}}"]).returncode:
        raise UsageError(f"the mirror {git} has no commit {commit}; fetch it there with `git fetch origin {commit}`")
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        files.mkdir()
        index = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        for words in (["read-tree", commit], ["checkout-index", "--all", f"--prefix={files}/"]):
            done = _git(git, [f"--work-tree={files}", *words], index)
            if done.returncode:
                raise Unprepared(f"the mirror {git} cannot be read: {done.stderr.decode(errors='replace').strip()[:300]}")
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as made:
            made.add(files, ".")
        return data.getvalue()


def _git(git: Path, words: Sequence[str], more: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[bytes]":
    # The user may well read a mirror that belongs to somebody else.
    command = ["git", "-c", "safe.directory=*", f"--git-dir={git}", *words]
    return subprocess.run(command, capture_output=True, env={**os.environ, "LC_ALL": "C", **(more or {})})


def _cloned(url: str, name: str) -> Path:
    place = cache_folder() / "mirrors" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits, and finds it made
        if not place.is_dir():
            beside = place.with_name(f"{name}.partial")
            shutil.rmtree(beside, ignore_errors=True)
            done = subprocess.run(["git", "clone", "--quiet", "--bare", url, str(beside)], capture_output=True, text=True)
            if done.returncode:
                raise UsageError(f"{url} cannot be cloned: {done.stderr.strip()[:300]}")
            beside.rename(place)
    return place
