"""The ledger under use, misuse, full disks and kill -9."""

import asyncio
import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import StorageError, TaskError
from palestra.ledger import Ledger, StepRecord
from palestra.message import Image, Message, Text, ToolCall
from palestra.trajectory import Completion, Failure, Hint, Key, Segment, Span, Trajectory, Turn


def ended(task_id: str = "t", index: int = 0, reward: float = 1.0, tokens: int = 8) -> Trajectory:
    segment = Segment()
    segment.read([5, 6, 7])
    span = segment.wrote(Completion(list(range(tokens)), [-0.5] * tokens, [3] * tokens, "stop"))
    call = ToolCall("c1", "shell", {"command": "ls \x00 \udc80", "limit": 3})
    result = Message("tool", (Text("ok"), Image(b"\x00\xff")), call_id="c1", name="shell")
    return Trajectory(
        task_id,
        index,
        openings=[(Message("system", "be brief"), Message("user", "solve it"))],
        segments=[segment],
        turns=[Turn(Message("assistant", "done \ud800", (call,), thinking="hm"), "stop", 0, span, (result,))],
        hints=[Hint(0, "repeat", "do else \udc80", True), Hint(3, "ending", "end", None)],
        stop="finish",
        answer={"value": [1, None, "x"]},
        artifact="diff --git",
        reward=reward,
        metrics={"tests": 0.25},
        spans=[Span("init", 10.0, 10.1), Span("sample", 10.5, 11.0), Span("run", 10.1, 12.1)],
        retried=[Failure("init", "infrastructure", "no sandbox \udcff")],
    )


def broken(task_id: str = "t", index: int = 0) -> Trajectory:
    return Trajectory(task_id, index, failure=Failure("run", "infrastructure", "the sandbox died \udcff"))


def key(step: int = 0, index: int = 0, task_id: str = "t") -> Key:
    return Key("train", step, task_id, index)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.open(path) as opened:
        yield opened


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tiny disk needs root: {mounted.stderr.splitlines()[0]}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


# Round trips


def test_a_trajectory_is_restored_whole(ledger: Ledger) -> None:
    ledger.record(key(), ended())
    assert ledger.finished("train", 0) == {("t", 0): ended()}
    assert ledger.finished("train", 1) == {}


def test_finished_gives_failures_only_when_asked(ledger: Ledger) -> None:
    ledger.record(key(index=0), ended(index=0))
    ledger.record(key(index=1), broken(index=1))
    assert set(ledger.finished("train", 0)) == {("t", 0)}
    assert ledger.finished("train", 0, failed=True) == {("t", 0): ended(index=0), ("t", 1): broken(index=1)}


def test_a_trajectory_survives_reopening(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(key(), ended())
    with Ledger.open(path) as ledger:
        assert ledger.finished("train", 0) == {("t", 0): ended()}


def test_logprobs_come_back_as_float32(ledger: Ledger) -> None:
    trajectory = ended()
    trajectory.segments[0].logprobs[-1] = -0.1
    ledger.record(key(), trajectory)
    assert ledger.finished("train", 0)["t", 0].segments[0].logprobs[-1] == -0.10000000149011612


texts = st.text(st.characters(), max_size=8)  # surrogates and NUL included
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
ints32 = st.integers(-(2**31), 2**31 - 1)
parts = st.builds(Text, texts) | st.builds(Image, st.binary(max_size=8))
calls = st.builds(ToolCall, texts.filter(bool), texts, st.dictionaries(texts, values, max_size=3), st.none() | texts)
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    texts | st.lists(parts, min_size=1, max_size=2).map(tuple),
    st.lists(calls, max_size=2).map(tuple),
    st.none() | texts,
    st.none() | texts,
    st.none() | texts,
)
message_tuples = st.lists(messages, max_size=2).map(tuple)
turns = st.builds(
    Turn,
    messages,
    st.sampled_from(["stop", "length"]),
    st.integers(0, 9),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    message_tuples,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    rows = draw(st.lists(st.tuples(ints32, st.booleans(), st.floats(width=32, allow_nan=False), ints32), max_size=5))
    return Segment(*(list(column) for column in zip(*rows, strict=True))) if rows else Segment()


failures = st.builds(
    Failure,
    st.sampled_from(["init", "run", "reward"]),
    st.sampled_from(["infrastructure", "timeout", "bug", "abandoned"]),
    texts,
)
trajectories = st.builds(
    Trajectory,
    task_id=texts,
    index=st.integers(0, 99),
    openings=st.lists(message_tuples, max_size=2),
    segments=st.lists(segments(), max_size=2),
    turns=st.lists(turns, max_size=2),
    stop=st.none() | st.sampled_from(["finish", "answer", "turns", "context", "time"]),
    answer=values,
    artifact=values,
    reward=numbers,
    metrics=st.dictionaries(texts, numbers, max_size=2),
    spans=st.lists(st.builds(Span, st.sampled_from(["init", "run", "reward", "sample", "tool"]), numbers, numbers), max_size=3),
    retried=st.lists(failures, max_size=2),
)


def test_any_trajectory_round_trips(ledger: Ledger) -> None:
    steps = itertools.count()

    @settings(max_examples=100, deadline=None)
    @given(trajectories, st.none() | failures)
    def round_trip(trajectory: Trajectory, failure: Failure | None) -> None:
        step = next(steps)
        if failure:
            trajectory = replace(trajectory, failure=failure, reward=None)
        ledger.record(key(step, trajectory.index, trajectory.task_id), trajectory)
        assert ledger.finished("train", step, failed=True) == {(trajectory.task_id, trajectory.index): trajectory}

    round_trip()
    assert ledger.verify() == []


def test_adjacent_lone_surrogates_and_nul_round_trip(ledger: Ledger) -> None:
    odd = "\ud83d\ude00 \x00 😀"
    ledger.record(key(task_id=odd), replace(ended(odd), answer={odd: odd}))
    assert ledger.finished("train", 0)[odd, 0].answer == {odd: odd}


def test_what_is_not_json_is_the_tasks_mistake(ledger: Ledger) -> None:
    with pytest.raises(TaskError, match=r"task 't': its answer, artifact and metrics must be JSON: .*bytes"):
        ledger.record(key(), replace(ended(), artifact=b"raw"))


# States


def test_at_most_one_finished_per_slot(ledger: Ledger) -> None:
    ledger.record(key(), ended(reward=1.0))
    for late in (ended(reward=0.0), broken()):
        with pytest.raises(ValueError, match="already finished"):
            ledger.record(key(), late)
    assert ledger.finished("train", 0)["t", 0].reward == 1.0


def test_a_failure_may_be_replaced_and_attempts_are_counted(ledger: Ledger) -> None:
    ledger.record(key(), replace(ended(), failure=broken().failure, reward=None))
    ledger.record(key(), broken())
    ledger.record(key(), ended())
    [row] = ledger.trajectories()
    assert (row.state, row.attempts, row.trajectory) == ("finished", 3, ended())
    assert ledger.verify() == []


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_an_end_without_failure_needs_a_reward(ledger: Ledger, reward: float | None) -> None:
    with pytest.raises(ValueError, match="needs a finite reward"):
        ledger.record(key(), replace(ended(), reward=reward))


def test_a_failure_never_has_a_reward(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="cannot have a reward"):
        ledger.record(key(), replace(broken(), reward=0.0))


def test_a_trajectory_belongs_to_its_slot(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="not the slot"):
        ledger.record(key(index=1), ended(index=2))


def test_commit_settles_every_trajectory(ledger: Ledger) -> None:
    assert (ledger.committed_step(), ledger.checkpoint()) == (-1, None)
    for step in range(2):
        for index in range(3):
            ledger.record(key(step, index), ended(index=index))
    ledger.record(key(1, 3), broken(index=3))
    ledger.record(Key("eval", 1, "t", 0), ended())
    steps = [StepRecord(s, {"loss": 0.5 - s}, [key(s, 0), key(s, 1)], [key(s, 2)]) for s in range(2)]
    ledger.commit_steps(steps, "step-1")
    assert (ledger.committed_step(), ledger.checkpoint()) == (1, "step-1")
    assert ledger.steps() == {0: {"loss": 0.5}, 1: {"loss": -0.5}}
    assert ledger.counts() == {"train": {"consumed": 4, "filtered": 2, "failed": 1}, "eval": {"evaluated": 1}}
    assert ledger.finished("train", 1) == {}
    assert set(ledger.finished("eval", 1)) == {("t", 0)}
    assert ledger.verify() == []


def test_a_step_may_train_on_what_an_earlier_step_collected(ledger: Ledger) -> None:
    ledger.record(key(0, 0), ended())
    ledger.commit_steps([StepRecord(0, {}, []), StepRecord(1, {}, [key(0, 0)])], "step-1")
    assert ledger.verify() == []


@pytest.mark.parametrize("numbers", [[], [1], [0, 2], [0, 0], [1, 0]])
def test_steps_must_be_contiguous(ledger: Ledger, numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="do not follow the last committed step, -1"):
        ledger.commit_steps([StepRecord(number, {}, []) for number in numbers], "c")
    assert ledger.committed_step() == -1


def test_a_trajectory_is_consumed_once(ledger: Ledger) -> None:
    ledger.record(key(0, 0), ended(index=0))
    ledger.record(key(0, 1), ended(index=1))
    ledger.record(key(0, 2), broken(index=2))
    ledger.commit_steps([StepRecord(0, {}, [key(0, 0)])], "a")
    wrong = {
        "it is consumed": [StepRecord(1, {}, [key(0, 1), key(0, 0)])],
        "step 2 cannot take": [StepRecord(1, {}, [key(0, 1)]), StepRecord(2, {}, [], [key(0, 1)])],
        "it is failed": [StepRecord(1, {}, [key(0, 1)], [key(0, 2)])],
        "it is not recorded": [StepRecord(1, {}, [key(0, 1), key(9, 9)])],
    }
    for reason, steps in wrong.items():
        with pytest.raises(ValueError, match=reason):
            ledger.commit_steps(steps, "b")
        assert (ledger.committed_step(), ledger.checkpoint()) == (0, "a")
        assert set(ledger.finished("train", 0)) == {("t", 1)}
    assert ledger.verify() == []


def test_rewind_makes_later_steps_trainable_again(ledger: Ledger) -> None:
    for step in range(4):
        ledger.record(key(step), ended())
    for first in (0, 2):
        steps = [StepRecord(first, {}, [key(first)]), StepRecord(first + 1, {}, [], [key(first + 1)])]
        ledger.commit_steps(steps, f"step-{first + 1}")
    ledger.rewind("step-1")
    assert (ledger.committed_step(), ledger.checkpoint()) == (1, "step-1")
    assert ledger.counts() == {"train": {"consumed": 1, "filtered": 1, "finished": 2}}
    assert ledger.verify() == []
    ledger.commit_steps([StepRecord(2, {}, [key(2)])], "step-2")
    with pytest.raises(ValueError, match="no committed step belongs to checkpoint 'step-3'"):
        ledger.rewind("step-3")


def test_a_step_settles_its_failures_too(ledger: Ledger) -> None:
    ledger.record(key(0, 0), ended(index=0))
    ledger.record(key(0, 1), broken(index=1))
    ledger.record(key(0, 0, "all-failed"), broken("all-failed"))
    ledger.record(key(1, 0), broken(index=0))
    ledger.record(Key("eval", 0, "t", 0), ended())
    assert ledger.settled() == set()
    failed = [key(0, 1), key(0, 0, "all-failed")]
    ledger.commit_steps([StepRecord(0, {}, [key(0, 0)], failed=failed)], "a")
    assert ledger.settled() == {(0, "t"), (0, "all-failed")}, "evaluations and what no step took are not settled"
    assert ledger.counts()["train"] == {"consumed": 1, "failed": 3}
    assert ledger.verify() == []


@pytest.mark.parametrize(("wrong", "reason"), [(0, "it is finished"), (1, "it is failed"), (9, "it is not recorded")])
def test_only_a_failure_is_settled_as_one_and_only_once(ledger: Ledger, wrong: int, reason: str) -> None:
    ledger.record(key(0, 0), ended(index=0))
    ledger.record(key(0, 1), broken(index=1))
    ledger.commit_steps([StepRecord(0, {}, [], failed=[key(0, 1)])], "a")
    with pytest.raises(ValueError, match=reason):
        ledger.commit_steps([StepRecord(1, {}, [], failed=[key(0, wrong)])], "b")
    assert (ledger.committed_step(), ledger.settled()) == (0, {(0, "t")})


def test_a_failure_that_a_step_has_settled_is_not_replaced(ledger: Ledger) -> None:
    ledger.record(key(), broken())
    ledger.commit_steps([StepRecord(0, {}, [], failed=[key()])], "a")
    with pytest.raises(ValueError, match="already failed"):
        ledger.record(key(), ended())
    assert ledger.verify() == []


def test_rewind_leaves_failures_failed_and_free_to_be_tried_again(ledger: Ledger) -> None:
    ledger.record(key(0), ended())
    ledger.record(key(1), broken())
    ledger.commit_steps([StepRecord(0, {}, [key(0)])], "a")
    ledger.commit_steps([StepRecord(1, {}, [], failed=[key(1)])], "b")
    ledger.rewind("a")
    assert ledger.settled() == {(0, "t")}
    assert ledger.counts()["train"] == {"consumed": 1, "failed": 1}
    ledger.record(key(1), ended())
    ledger.commit_steps([StepRecord(1, {}, [key(1)])], "b")
    assert ledger.verify() == []


def test_tasks_with_odd_names_are_settled_under_them(ledger: Ledger) -> None:
    odd = "\ud83d\ude00 \x00 😀"
    ledger.record(key(task_id=odd), ended(odd))
    ledger.commit_steps([StepRecord(0, {}, [key(task_id=odd)])], "a")
    assert ledger.settled() == {(0, odd)}


def test_trajectories_are_filtered_and_lazy(ledger: Ledger) -> None:
    for index, reward in enumerate([0.0, 0.5, 1.0]):
        ledger.record(key(index, index), ended(index=index, reward=reward))
    ledger.record(Key("eval", 0, "t", 0), ended(reward=1.0))
    ledger.record(key(5), broken())

    def found(**wanted: object) -> list[tuple[str, int]]:
        return [(row.key.phase, row.key.step) for row in ledger.trajectories(**wanted)]  # type: ignore[arg-type]

    assert found(phase="train", min_reward=0.5) == [("train", 1), ("train", 2)]
    assert found(min_reward=1.0) == [("train", 2), ("eval", 0)]
    assert found(state="failed") == [("train", 5)]
    assert found(step=0) == [("train", 0), ("eval", 0)]
    rows = ledger.trajectories(state="finished")
    next(rows)
    ledger.commit_steps([StepRecord(0, {}, [key(0, 0), key(1, 1), key(2, 2)])], "a")  # an iterator in use blocks no write
    assert [row.state for row in rows] == ["consumed", "consumed"]


# Opening


def test_a_second_writer_is_refused_in_one_line(path: Path, ledger: Ledger) -> None:
    code = "import sys, pathlib; from palestra.ledger import Ledger; Ledger.open(pathlib.Path(sys.argv[1]))"
    second = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert second.stderr.splitlines()[-1].endswith(
        f"StorageError: {path} is being written by process {os.getpid()}; a run has one writer at a time"
    )
    with pytest.raises(StorageError, match="one writer at a time"):  # nor twice in one process
        Ledger.open(path)


def test_a_reader_sees_a_live_writers_rows(path: Path, ledger: Ledger) -> None:
    with Ledger.open(path, read_only=True) as reader, Ledger.open(path, read_only=True) as other:
        ledger.record(key(), ended())
        assert reader.finished("train", 0) == other.finished("train", 0) == {("t", 0): ended()}
        with pytest.raises(StorageError, match="readonly"):
            reader.record(key(1), ended())


def test_a_reader_never_sees_a_ledger_half_made(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.sqlite" for number in range(100)]

    def look() -> None:
        for path in paths:
            while not path.exists():
                pass
            with Ledger.open(path, read_only=True) as reader:
                assert reader.counts() == {}

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        for path in paths:
            Ledger.open(path).close()
        looking.result()


def test_what_a_deleted_ledger_leaves_behind_is_not_taken_over(path: Path, ledger: Ledger) -> None:
    ledger.record(key(), ended())
    left = path.with_name(path.name + "-wal").read_bytes()
    ledger.close()
    path.unlink()
    path.with_name(path.name + "-wal").write_bytes(left)
    with Ledger.open(path) as other:
        assert other.counts() == {}
        assert other.verify() == []


def test_a_ledger_on_a_read_only_disk_can_be_read(tiny_disk: Path) -> None:
    with Ledger.open(tiny_disk / "ledger") as ledger:
        ledger.record(key(), ended())
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with Ledger.open(tiny_disk / "ledger", read_only=True) as reader:
        assert reader.finished("train", 0) == {("t", 0): ended()}
    with pytest.raises(StorageError, match="cannot be locked for writing: Read-only file system"):
        Ledger.open(tiny_disk / "ledger")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_no_ledger_is_named(path: Path, read_only: bool) -> None:
    path.write_text("my notes\n" * 200)
    with pytest.raises(StorageError, match=rf"{path} is no ledger: file is not a database"):
        Ledger.open(path, read_only)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE songs (title)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StorageError, match=rf"{path} is no ledger: it is another program's database"):
        Ledger.open(path, read_only)
    assert path.read_bytes() == before


def test_missing_empty_or_newer_ledgers_are_refused(path: Path) -> None:
    with pytest.raises(StorageError, match="there is no ledger here"):
        Ledger.open(path, read_only=True)
    assert not list(path.parent.iterdir())
    with pytest.raises(StorageError, match="cannot be locked for writing: No such file or directory"):
        Ledger.open(path / "no" / "folder")
    path.touch()
    for read_only in (False, True):
        with pytest.raises(StorageError, match="it is empty"):
            Ledger.open(path, read_only)
    path.unlink()
    Ledger.open(path).close()
    tamper(path, "UPDATE meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(StorageError, match="has ledger schema 99; this version of Palestra reads schema 3"):
        Ledger.open(path)


async def test_it_serves_an_event_loop(ledger: Ledger) -> None:
    async def rollout(index: int) -> None:
        await asyncio.sleep(0)
        ledger.record(key(index=index), ended(index=index))

    async with asyncio.TaskGroup() as group:
        for index in range(50):
            group.create_task(rollout(index))
    assert len(ledger.finished("train", 0)) == 50


# Verification


def tamper(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE trajectories SET state = 'lost' WHERE id = 3", "unknown"),
        ("UPDATE trajectories SET state = 'evaluated' WHERE id = 3", "another phase"),
        ("UPDATE trajectories SET reward = NULL WHERE id = 3", "without a reward"),
        ("UPDATE trajectories SET reward = 0 WHERE id = 4", "failure with a reward"),
        ("UPDATE trajectories SET settled_by = 7 WHERE id = 1", "no committed step"),
        ("UPDATE trajectories SET settled_by = NULL WHERE id = 1", "no committed step"),
        ("UPDATE trajectories SET settled_by = 7 WHERE id = 4", "no committed step"),
        ("UPDATE trajectories SET settled_by = 0 WHERE id = 3", "neither consumed nor filtered"),
        ("DELETE FROM trajectories WHERE id = 1", "batch is not what it consumed"),
        ("UPDATE trajectories SET state = 'consumed' WHERE id = 2", "batch is not what it consumed"),
        ("UPDATE steps SET step = 1", "gaps"),
        ("DELETE FROM trajectories WHERE id = 3", "segments of no trajectory"),
        ("UPDATE segments SET number = 1 WHERE trajectory = 3", "not numbered"),
        ("UPDATE segments SET mask = x'00' WHERE trajectory = 3", "differ in length"),
    ],
)
def test_verify_finds_what_is_wrong(path: Path, statement: str, finding: str) -> None:
    with Ledger.open(path) as ledger:
        for index in range(3):
            ledger.record(key(0, index), ended(index=index))
        ledger.record(key(0, 3), broken(index=3))
        ledger.commit_steps([StepRecord(0, {}, [key(0, 0)], [key(0, 1)])], "a")
        assert ledger.verify() == []
    tamper(path, statement)
    with Ledger.open(path, read_only=True) as ledger:
        assert any(finding in violation for violation in ledger.verify())


def test_verify_finds_two_in_one_slot(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(key(), ended())
    columns = "id INTEGER PRIMARY KEY, phase, step, task_id, idx, state, attempts, settled_by, reward, stop, body"
    tamper(
        path,
        "ALTER TABLE trajectories RENAME TO old",
        f"CREATE TABLE trajectories ({columns})",  # without its UNIQUE
        "INSERT INTO trajectories SELECT * FROM old",
        "INSERT INTO trajectories SELECT 2, phase, step, task_id, idx, state, 1, NULL, 0, stop, body FROM old",
    )
    with Ledger.open(path, read_only=True) as ledger:
        assert any("two trajectories in one slot" in violation for violation in ledger.verify())


def test_verify_finds_a_damaged_file(path: Path) -> None:
    with Ledger.open(path) as ledger:
        for index in range(20):
            ledger.record(key(index=index), ended(index=index, tokens=500))
    with path.open("r+b") as file:
        file.seek(4096 * 6)
        file.write(b"\xa5" * 4096 * 20)
    with Ledger.open(path, read_only=True) as ledger:
        assert ledger.verify()


@pytest.mark.parametrize(
    ("table", "column", "bytes_"),
    [("trajectories", "body", b'{"openings": [['), ("trajectories", "body", b"[]"), ("segments", "tokens", b"\1\2\3")],
)
def test_a_damaged_record_is_named(path: Path, table: str, column: str, bytes_: bytes) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(key(4), ended())
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE {table} SET {column} = ?", (bytes_,))
    with Ledger.open(path, read_only=True) as ledger, pytest.raises(StorageError) as caught:
        list(ledger.trajectories())
    assert str(caught.value).startswith(f"cannot read attempt 0 at 't' in step 4 (train) in {path}: its bytes are damaged: ")


def test_damaged_metrics_of_a_step_are_named(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(key(), ended())
        ledger.commit_steps([StepRecord(0, {"reward": 1.0}, [key()])], "step-00001")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE steps SET metrics = x'ff'")
    with Ledger.open(path, read_only=True) as ledger, pytest.raises(StorageError, match="its bytes are damaged"):
        ledger.steps()


# A full disk


def fill_up(ledger: Ledger, step: int) -> int:
    """Record until the disk is full; the number that went in."""
    for index in range(10_000):
        try:
            ledger.record(key(step, index), ended(index=index, tokens=1000))
        except StorageError as error:
            assert str(error).endswith("; nothing recorded is lost, mend it and resume")  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
            return index
    pytest.fail("the disk is not full")


def test_a_full_database_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def spy(*values: object, **options: object) -> sqlite3.Connection:
        connections.append(connect(*values, **options))  # type: ignore[call-overload]
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", spy)
    with Ledger.open(path) as ledger:
        connections[-1].execute("PRAGMA max_page_count = 100")
        count = fill_up(ledger, 0)
        assert count > 5
        assert ledger.verify() == []
        assert len(ledger.finished("train", 0)) == count
        with pytest.raises(StorageError, match="database or disk is full"):
            ledger.commit_steps([StepRecord(0, {"text": "x" * 10**6}, [key(0, 0)])], "a")
        assert ledger.committed_step() == -1
        connections[-1].execute("PRAGMA max_page_count = 100000")
        ledger.record(key(0, count), ended(index=count))
        ledger.commit_steps([StepRecord(0, {}, [key(0, i) for i in range(count + 1)])], "a")
        assert ledger.verify() == []


def test_a_full_disk_loses_nothing(tiny_disk: Path) -> None:
    path, ballast = tiny_disk / "ledger", tiny_disk / "ballast"
    ballast.write_bytes(bytes(400_000))
    with Ledger.open(path) as ledger:
        count = fill_up(ledger, 0)
        assert count > 5
        assert len(ledger.finished("train", 0)) == count
        with pytest.raises(StorageError, match="nothing recorded is lost"):
            ledger.commit_steps([StepRecord(0, {"text": "x" * 10**6}, [key(0, 0)])], "a")
        assert (ledger.committed_step(), ledger.verify()) == (-1, [])
        ballast.unlink()
        ledger.record(key(0, count), ended(index=count))
        ledger.commit_steps([StepRecord(0, {}, [key(0, 0)])], "a")
    with Ledger.open(path) as ledger:
        assert ledger.counts() == {"train": {"consumed": 1, "finished": count}}
        assert ledger.verify() == []


def test_opening_on_a_full_disk_is_one_line(tiny_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (tiny_disk / "ballast").write_bytes(bytes(2 * 10**6))
    with pytest.raises(StorageError, match=r"cannot be (locked|made)"):
        Ledger.open(tiny_disk / "ledger")
    (tiny_disk / "ballast").unlink()
    Ledger.open(tiny_disk / "ledger").close()


# Kill -9


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_ledger import StepRecord, ended, key
from palestra.ledger import Ledger

with Ledger.open(Path(sys.argv[1])) as ledger:
    while True:
        first = ledger.committed_step() + 1
        records = []
        for step in (first, first + 1):
            done = ledger.finished("train", step)
            for index in range(4):
                if ("t", index) not in done:
                    ledger.record(key(step, index), ended(index=index, tokens=500))
                    print("recorded", step, index, flush=True)
            keys = [key(step, index) for index in range(4)]
            records.append(StepRecord(step, {"loss": 1.0}, keys[:3], keys[3:]))
        ledger.commit_steps(records, f"step-{first + 1}")
        print("committed", first + 1, flush=True)
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_kill_9_at_random_instants_loses_nothing_reported(path: Path) -> None:
    chance = random.Random(0)
    recorded: set[tuple[int, int]] = set()
    committed = -1
    for _ in range(8):
        writer = start_writer(path)
        assert writer.stdout
        first = writer.stdout.readline()
        time.sleep(chance.uniform(0, 0.1))
        writer.kill()
        *lines, last = [first, *writer.stdout.read().splitlines(keepends=True)]
        writer.wait()
        for line in [*lines, last] if last.endswith("\n") else lines:
            match line.split():
                case ["recorded", step, index]:
                    assert (int(step), int(index)) not in recorded, "made a second time"
                    recorded.add((int(step), int(index)))
                case ["committed", step]:
                    committed = int(step)
        with Ledger.open(path) as ledger:  # the lock is free again
            assert ledger.verify() == []
            assert committed <= ledger.committed_step() <= committed + 2
            rows = {(row.key.step, row.key.index): row for row in ledger.trajectories()}
            assert recorded <= rows.keys()
            recorded = set(rows)  # one may have been recorded and not yet reported
            assert all(row.trajectory == ended(index=row.key.index, tokens=500) for row in rows.values())
            assert all((row.state == "finished") == (step > ledger.committed_step()) for (step, _), row in rows.items())
            committed = ledger.committed_step()
    assert committed > 0


def killed_at_statement(number: int, work: Callable[[], None]) -> bool:
    """Run the work in a child that is killed just before its n-th SQL statement; whether it came so far."""
    child = os.fork()
    if not child:
        connect, seen = sqlite3.connect, iter(range(number))

        def traced(*values: object, **options: object) -> sqlite3.Connection:
            connection = connect(*values, **options)  # type: ignore[call-overload]
            connection.set_trace_callback(
                lambda _: None if next(seen, None) is not None else os.kill(os.getpid(), signal.SIGKILL)
            )
            return connection  # type: ignore[no-any-return]

        sqlite3.connect = traced  # type: ignore[assignment]
        try:
            work()
        except BaseException:  # noqa: BLE001  # nothing of the child may run on in pytest
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def small_run(ledger: Ledger) -> None:
    """Goes on from wherever the last one was killed."""
    for step in range(ledger.committed_step() + 1, 2):
        done = ledger.finished("train", step)
        if ("t", 0) not in done:
            if ("t", 0) not in ledger.finished("train", step, failed=True):
                ledger.record(key(step, 0), broken(index=0))
            ledger.record(key(step, 0), ended(index=0))
        if ("t", 1) not in done:
            ledger.record(key(step, 1), ended(index=1))
        ledger.commit_steps([StepRecord(step, {"loss": step}, [key(step, 0)], [key(step, 1)])], f"step-{step}")


def contents(ledger: Ledger) -> object:
    return ledger.verify(), list(ledger.trajectories()), ledger.steps(), ledger.checkpoint()


def test_kill_9_before_every_statement_ends_as_without_it(tmp_path: Path) -> None:
    def run_whole(path: Path) -> None:
        with Ledger.open(path) as ledger:
            small_run(ledger)

    run_whole(tmp_path / "whole")
    with Ledger.open(tmp_path / "whole") as ledger:
        expected = contents(ledger)
    for number in itertools.count():
        path = tmp_path / f"killed-{number}"
        if not killed_at_statement(number, partial(run_whole, path)):
            break
        with Ledger.open(path) as ledger:
            assert ledger.verify() == []
            small_run(ledger)
            assert contents(ledger) == expected
    assert number > 40
