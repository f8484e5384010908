"""Every attack is held by every isolating provider, for root and for an ordinary user; and when a protection is taken away,
those that it holds succeed."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from sandbox import attacks_files, attacks_kernel, attacks_network, attacks_processes
from sandbox.arena import ATTACKS, NOTICES, Arena
from sandbox.conftest import make_provider
from sandbox.ordinary import ROOT, UID, run_as_ordinary_user

from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.cgroup import CONTROLLERS
from palestra.sandbox.limits import ALL, Limits, Protections

MODULES = (attacks_files, attacks_kernel, attacks_network, attacks_processes)
"""Imported, they register their attacks."""

LIMITS = Limits(memory=160 * 2**20, disk=48 * 2**20, inodes=4096, processes=48, cpus=0.1)
UNHINDERED = replace(LIMITS, cpus=4.0)
"""Most attacks are slow enough as it is."""
SLOW_TOO = ("stop_or_read_the_supervisor", "run_on_after_the_time_limit", "make_the_file_api_hang", "find_open_descriptors")
"""What depends on the supervisor, and so is tried on the one in Python as well."""

WITHOUT_REPEATS = "bubblewrap or process_limit or disk_limit or seccomp-make"
"""What an ordinary user's run tries of all this, on this user's own share of the machine."""

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")


CONTAINERS_DO_NOT = {
    "fill_the_disk": "engines limit the disk on some file systems only",
    "fill_the_inodes": "engines do not count files",
    "be_the_same_user_as_a_neighbour": "one uid for all",
    "learn_the_hosts_folders_from_mounts": "engines name their layers in mountinfo",
    "look_for_sysfs_and_control_groups": "engines show both, read-only",
    "read_the_kernels_secrets": "engines mask fewer files",
}


async def _fight(name: str, kind: str, cache: Path, folder: Path, protections: Protections = ALL) -> None:
    limits = LIMITS if name == "take_too_much_of_the_processor" else UNHINDERED
    provider = make_provider(kind, limits, cache, protections)
    controllers = provider.controllers if isinstance(provider, Bubblewrap) else frozenset(CONTROLLERS)
    arena = Arena(provider, limits, folder, controllers)
    try:
        with arena.set():
            await ATTACKS[name](arena)
    finally:
        await provider.close()


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder of the host that anyone may read, and not below the one that the warden covers."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("kind", ["bubblewrap", "container"])
@pytest.mark.parametrize("name", list(ATTACKS))
async def test_held(name: str, kind: str, cache: Path, outside: Path) -> None:
    if kind == "container" and name in CONTAINERS_DO_NOT:
        pytest.skip(CONTAINERS_DO_NOT[name])
    await _fight(name, kind, cache, outside)


@pytest.mark.parametrize("name", SLOW_TOO)
async def test_held_without_a_compiler(name: str, cache: Path, outside: Path) -> None:
    await _fight(name, "slow", cache, outside)


NOTICED = [(protection, name) for name, protections in NOTICES.items() for protection in protections]


@pytest.mark.parametrize(("protection", "name"), NOTICED, ids=["-".join(pair) for pair in NOTICED])
async def test_noticed_when_taken_away(protection: str, name: str, cache: Path, outside: Path) -> None:
    if protection in ("own_uid", "cpu_limit") and os.geteuid() != 0:
        pytest.skip("an ordinary user has not got it")
    with pytest.raises(AssertionError):
        await _fight(name, "bubblewrap", cache, outside, replace(ALL, **{protection: False}))


def test_the_docs_say_which_attack_notices_what() -> None:
    page = (ROOT / "docs" / "sandbox.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*`) \|$", page, re.M))
    said = {protection: sorted(re.findall(r"`(\w+)`", names)) for protection, names in rows.items()}
    assert said == {protection: sorted(name for each, name in NOTICED if each == protection) for protection, _ in NOTICED}
    assert f"{len(ATTACKS)} attacks" in page


def test_every_protection_is_noticed_by_somebody() -> None:
    assert {field.name for field in fields(Protections)} == {protection for protection, _ in NOTICED}


@pytest.mark.skipif(os.geteuid() != 0, reason="these are an ordinary user's tests already")
def test_an_ordinary_user(outside: Path) -> None:
    home = outside / "home"
    home.mkdir()
    os.chown(home, UID, UID)
    tests = [str(ROOT / "tests" / "sandbox" / name) for name in ("test_escape.py", "test_conformance.py")]
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-k", WITHOUT_REPEATS]
    done = run_as_ordinary_user([*options, *tests], home, seconds=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert " passed" in done.stdout
