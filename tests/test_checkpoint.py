"""Checkpoints are whole or not there: truncation, full disks, cancellation, and kill -9 at every boundary."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from palestra import checkpoint
from palestra.errors import StorageError


def weights(text: str) -> Callable[[Path], Awaitable[None]]:
    async def fill(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(text * 1000)
        (folder / "state.json").write_text("{}")

    return fill


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tiny disk needs root: {mounted.stderr.splitlines()[0]}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_checkpoint_is_written_and_verifies(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    folder = await checkpoint.write(parent, "step-1", weights("a"))
    assert folder == parent / "step-1"
    assert names(parent) == {"step-1"}
    assert (folder / "model" / "weights.bin").read_text() == "a" * 1000
    assert checkpoint.valid(folder)
    assert checkpoint.newest_valid(parent) == folder


def test_where_nothing_was_written_nothing_is_found(tmp_path: Path) -> None:
    assert checkpoint.newest_valid(tmp_path / "nowhere") is None
    checkpoint.sweep(tmp_path / "nowhere")
    (tmp_path / "notes").mkdir()
    assert checkpoint.newest_valid(tmp_path) is None


async def test_the_newest_is_the_last_written_whatever_its_name(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "final", "a"):
        assert checkpoint.newest_valid(tmp_path) != await checkpoint.write(tmp_path, name, weights(name))
        assert checkpoint.newest_valid(tmp_path) == tmp_path / name


def truncate(folder: Path) -> None:
    os.truncate(folder / "model" / "weights.bin", 10)


def flip(folder: Path) -> None:
    (folder / "model" / "weights.bin").write_text("z" * 1000)


def remove(folder: Path) -> None:
    (folder / "state.json").unlink()


def truncate_manifest(folder: Path) -> None:
    os.truncate(folder / checkpoint.MANIFEST, 20)


@pytest.mark.parametrize("damage", [truncate, flip, remove, truncate_manifest])
async def test_a_damaged_newest_falls_back_by_one(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    for name in ("one", "two", "three"):
        await checkpoint.write(tmp_path, name, weights(name[0]))
    damage(tmp_path / "three")
    assert not checkpoint.valid(tmp_path / "three")
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "two"
    await checkpoint.write(tmp_path, "four", weights("4"))
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "four"


async def test_a_name_can_be_written_again(tmp_path: Path) -> None:
    await checkpoint.write(tmp_path, "step-1", weights("a"))
    await checkpoint.write(tmp_path, "step-1", weights("b"))
    assert names(tmp_path) == {"step-1"}
    assert (tmp_path / "step-1" / "model" / "weights.bin").read_text() == "b" * 1000
    assert checkpoint.valid(tmp_path / "step-1")


async def test_prune_keeps_the_newest_whole_ones_and_the_named(tmp_path: Path) -> None:
    for number in range(6):
        await checkpoint.write(tmp_path, f"step-{number}", weights(str(number)))
    (tmp_path / "notes").mkdir()
    truncate(tmp_path / "step-5")
    checkpoint.prune(tmp_path, keep=2, always={"step-0"})
    assert names(tmp_path) == {"step-0", "step-3", "step-4", "notes"}
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-4"


async def test_sweep_removes_what_a_kill_left(tmp_path: Path) -> None:
    await checkpoint.write(tmp_path, "step-1", weights("a"))
    for leftover in (".partial-step-2", ".discarded-step-0"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / checkpoint.MANIFEST).write_text('{"order": 9, "files": {}}')
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-1"
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == {"step-1"}


@pytest.mark.parametrize("error", [ValueError("a bug"), ConnectionResetError("the trainer went away"), TimeoutError()])
async def test_a_failing_fill_raises_its_own_error(tmp_path: Path, error: Exception) -> None:
    async def fill(folder: Path) -> None:
        await weights("a")(folder)
        raise error

    with pytest.raises(type(error)):
        await checkpoint.write(tmp_path, "step-1", fill)
    assert names(tmp_path) == set()


async def test_a_cancelled_write_leaves_nothing(tmp_path: Path) -> None:
    began = asyncio.Event()

    async def fill(folder: Path) -> None:
        await weights("a")(folder)
        began.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(checkpoint.write(tmp_path, "step-1", fill))
    await began.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert names(tmp_path) == set()


async def fill_with_python(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(2 * 10**6))


async def fill_like_torch(folder: Path) -> None:
    try:
        await fill_with_python(folder)
    except OSError:
        raise RuntimeError("unexpected pos 576 vs 534") from None


async def fill_like_safetensors(folder: Path) -> None:
    raise ArithmeticError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("fill", [fill_with_python, fill_like_torch, fill_like_safetensors])
async def test_a_full_disk_is_one_line_and_touches_nothing_older(
    tiny_disk: Path, fill: Callable[[Path], Awaitable[None]]
) -> None:
    await checkpoint.write(tiny_disk, "step-1", weights("a"))
    with pytest.raises(StorageError, match=r"^cannot write checkpoint .*/step-2: .*nothing recorded before is lost$"):
        await checkpoint.write(tiny_disk, "step-2", fill)
    assert names(tiny_disk) == {"step-1"}
    assert checkpoint.newest_valid(tiny_disk) == tiny_disk / "step-1"
    await checkpoint.write(tiny_disk, "step-2", weights("b"))


def killed_at_call(number: int, parent: Path, name: str) -> bool:
    """Write in a child that is killed around its n-th call of fsync, rename or rmdir; whether it came so far."""
    child = os.fork()
    if not child:
        boundaries = iter(range(number))

        def boundary() -> None:
            if next(boundaries, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        def die_around(call: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*values: object, **options: object) -> object:
                boundary()
                result = call(*values, **options)
                boundary()
                return result

            return wrapped

        for function in ("fsync", "rename", "rmdir"):
            setattr(os, function, die_around(getattr(os, function)))
        try:
            asyncio.run(checkpoint.write(parent, name, weights("b")))
            checkpoint.prune(parent, keep=1, always={name})
        except BaseException:  # noqa: BLE001  # nothing of the child may run on in pytest
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


@pytest.mark.parametrize("name", ["step-1", "step-2"])
def test_kill_9_at_every_boundary_leaves_whole_checkpoints(tmp_path: Path, name: str) -> None:
    """Also when the name was written before, and never committed (step-1)."""
    for before in ("step-0", "step-1"):
        asyncio.run(checkpoint.write(tmp_path / "before", before, weights("a")))
    number = 0
    while True:
        parent = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", parent)
        if not killed_at_call(number, parent, name):
            break
        checkpoint.sweep(parent)
        assert names(parent) <= {"step-0", "step-1", name}
        assert all(checkpoint.valid(folder) for folder in parent.iterdir())
        assert checkpoint.newest_valid(parent)
        assert not killed_at_call(10_000, parent, name)
        assert (parent / name / "model" / "weights.bin").read_text() == "b" * 1000
        number += 1
    assert number > 12
