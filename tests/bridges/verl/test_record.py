"""The ledger of a verl run: what is recorded is not sampled again, and what verl's checkpoints hold is committed."""

from pathlib import Path

import pytest
from bridges.verl.attempts import attempt

from palestra.bridges.verl.record import Record
from palestra.config import Training
from palestra.errors import ConfigError
from palestra.trajectory import Failure, Key, Trajectory

PLAN = Training(steps=4, groups=1, samples=2, learning_rate=1e-3)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "ledger.sqlite", PLAN)


def again(record: Record, tmp_path: Path) -> Record:
    record.close()
    return Record(tmp_path / "ledger.sqlite", PLAN)


def keep_step(record: Record, step: int, rewards: tuple[float, float] = (0.0, 1.0)) -> None:
    for index, reward in enumerate(rewards):
        record.keep(Key("train", step, "t", index), attempt(step * 10 + index, index, reward))


def failed(index: int) -> Trajectory:
    return Trajectory("t", index, failure=Failure("run", "infrastructure", "gone"))


def test_what_an_interrupted_run_recorded_is_recalled(record: Record, tmp_path: Path) -> None:
    keep_step(record, 0)
    record = again(record, tmp_path)
    known = record.recall(Key("train", 0, "t", 1))
    assert known is not None
    assert known.reward == 1.0
    assert [s.tokens for s in known.segments] == [s.tokens for s in attempt(1, 1, 1.0).segments]
    assert record.recall(Key("train", 1, "t", 0)) is None


def test_a_failed_attempt_is_tried_again_in_training_and_stays_in_an_evaluation(record: Record, tmp_path: Path) -> None:
    record.keep(Key("train", 0, "t", 0), failed(0))
    record.keep(Key("eval", 0, "t", 0), failed(0))
    record = again(record, tmp_path)
    assert record.recall(Key("train", 0, "t", 0)) is None
    assert record.recall(Key("eval", 0, "t", 0)) is not None
    record.keep(Key("train", 0, "t", 0), attempt(0, 0, 1.0))


def test_a_checkpoint_commits_its_steps(record: Record) -> None:
    keep_step(record, 0)
    keep_step(record, 1, (1.0, 1.0))
    record.commit(2, "global_step_2")
    assert record._ledger.counts()["train"] == {"consumed": 2, "filtered": 2}
    assert record._ledger.checkpoint() == "global_step_2"
    assert record._ledger.verify() == []


def test_a_crash_between_checkpoint_and_commit_is_made_good(record: Record, tmp_path: Path) -> None:
    keep_step(record, 0)
    record = again(record, tmp_path)
    record.go_on_from(1, "global_step_1")
    assert record._ledger.committed_step() == 0


def test_going_on_from_an_older_checkpoint_takes_later_steps_back(record: Record, tmp_path: Path) -> None:
    for step in range(2):
        keep_step(record, step)
        record.commit(step + 1, f"global_step_{step + 1}")
    record = again(record, tmp_path)
    record.go_on_from(1, "global_step_1")
    assert record._ledger.committed_step() == 0
    assert record.recall(Key("train", 1, "t", 0)) is not None


def test_news_are_told_once_and_a_refusal_stays(record: Record) -> None:
    keep_step(record, 0)
    news, refusal = record.news()
    assert ([key.index for key, _ in news], refusal) == ([0, 1], None)
    record.refuse(mend := ConfigError("mend this"))
    record.refuse(ConfigError("and that"))
    assert record.news() == ([], mend)
