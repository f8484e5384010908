"""Repositories at one commit, from mirrors of every shape and from a git server."""

import io
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from swe.bench.conftest import FILES, git

from palestra.errors import Unprepared, UsageError
from palestra.swe.bench import mirrors as ours


def contents(data: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {
            member.name.removeprefix("./"): (archive.extractfile(member) or io.BytesIO()).read().decode()
            for member in archive
            if member.isfile()
        }


def test_all_files_of_the_commit_and_nothing_else(mirrors: Path, row: Mapping[str, object]) -> None:
    """Also those that `git archive` would leave out."""
    assert contents(ours.archive(ours.find(str(mirrors), "maker/abacus"), str(row["base_commit"]))) == FILES


@pytest.mark.parametrize("shape", ["maker+abacus/repo", "maker__abacus", "maker/abacus.git", "maker/abacus"])
def test_mirrors_of_every_shape(tmp_path: Path, mirrors: Path, shape: str) -> None:
    (tmp_path / shape).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(mirrors / "maker__abacus", tmp_path / shape)
    assert ours.find(str(tmp_path), "maker/abacus") == tmp_path / shape


def test_a_plain_clone_will_do(tmp_path: Path, mirrors: Path) -> None:
    git(tmp_path, "clone", "-q", str(mirrors / "maker__abacus"), "maker__abacus")
    assert ours.find(str(tmp_path), "maker/abacus") == tmp_path / "maker__abacus" / ".git"


def test_a_server_is_cloned_once(tmp_path: Path, mirrors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "server" / "maker").mkdir(parents=True)
    shutil.copytree(mirrors / "maker__abacus", tmp_path / "server/maker/abacus.git")
    address = f"file://{tmp_path}/server"
    found = ours.find(address, "maker/abacus")
    shutil.rmtree(tmp_path / "server")
    assert ours.find(address, "maker/abacus") == found == tmp_path / "cache/mirrors/maker__abacus.git"
    with pytest.raises(UsageError, match=r"other\.git cannot be cloned"):
        ours.find(address, "maker/other")


def test_what_is_missing_is_named(tmp_path: Path, mirrors: Path) -> None:
    with pytest.raises(UsageError, match=r"no mirror of maker/abacus in .*maker__abacus.*--mirrors"):
        ours.find(str(tmp_path), "maker/abacus")
    with pytest.raises(UsageError, match="has no commit 0000000"):
        ours.archive(ours.find(str(mirrors), "maker/abacus"), "0" * 40)


def test_a_file_that_a_mirror_lacks_concerns_its_instance(tmp_path: Path, mirrors: Path, row: Mapping[str, object]) -> None:
    commit, copy = str(row["base_commit"]), tmp_path / "maker__abacus"
    shutil.copytree(mirrors / "maker__abacus", copy)
    blob = git(copy, "rev-parse", f"{commit}:run.sh").strip()
    (copy / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(Unprepared, match=r"cannot be read: .*run\.sh"):
        ours.archive(copy, commit)
