"""Which of verl's checkpoints a run goes on from."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

from palestra.bridges.verl.driving import LATEST, name_latest_again, steps_behind
from palestra.errors import StorageError
from palestra.runs import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    for step in (2, 10):
        (run.checkpoints / f"global_step_{step}").mkdir(parents=True)
    return run


@pytest.mark.parametrize(("named", "behind"), [("2", 2), ("", 10)])
def test_a_name_that_was_being_written_is_that_of_the_newest(run: RunFolder, named: str, behind: int) -> None:
    (run.checkpoints / LATEST).write_text(named)
    name_latest_again(run.checkpoints)
    assert steps_behind(run) == behind


def test_without_a_name_a_run_begins_anew(run: RunFolder) -> None:
    name_latest_again(run.checkpoints)
    assert steps_behind(run) == 0


def test_a_name_that_is_no_number_is_refused(run: RunFolder) -> None:
    (run.checkpoints / LATEST).write_text("ten")
    name_latest_again(run.checkpoints)
    with pytest.raises(StorageError, match="has no number; write that of a checkpoint"):
        steps_behind(run)
