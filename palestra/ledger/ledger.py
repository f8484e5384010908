"""The ledger itself: trajectories are recorded as they end, and settled when the step that used them is committed.

Nothing is marked before the commit, so after a crash the steps since the last checkpoint find their trajectories still
*finished*, under the same keys, and are trained again from them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from types import TracebackType
from typing import Literal, Self

from palestra.ledger import invariants
from palestra.ledger.packing import from_bytes, pack, pack_segment, to_bytes, unpack
from palestra.ledger.store import Store
from palestra.message import JSON
from palestra.trajectory import Key, Phase, Trajectory

State = Literal["finished", "failed", "consumed", "filtered", "evaluated"]
"""Finished waits for its step's commit, which makes it consumed, or filtered when its group gave no gradient."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One trained step: what it measured, and what became of the trajectories that it took."""

    step: int
    metrics: Mapping[str, JSON]
    trained: Sequence[Key]
    filtered: Sequence[Key] = ()
    failed: Sequence[Key] = ()
    """Those that failed for good: a later step does not try them again."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One row of the ledger."""

    key: Key
    state: State
    attempts: int
    trajectory: Trajectory


class Ledger:
    """Use it from one thread. Writes are short; none waits for anything but the disk."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls, path: Path, read_only: bool = False) -> Self:
        """Open the ledger, and make it where there is none. A reader is never refused, also beside a live writer."""
        return cls(Store(path, read_only))

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def record(self, key: Key, trajectory: Trajectory) -> None:
        """Store a trajectory that ended. Only a failed one can be replaced, by a later attempt."""
        _check_ended(key, trajectory)
        state: State = "failed" if trajectory.failure else _succeeded(key.phase)
        row = (*_values(key), state, trajectory.reward, trajectory.stop, pack(trajectory))
        segments = [pack_segment(segment) for segment in trajectory.segments]
        with self._store.transaction() as db:
            stored = db.execute(
                """INSERT INTO trajectories (phase, step, task_id, idx, state, reward, stop, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
                ON CONFLICT DO UPDATE SET attempts = attempts + 1, state = excluded.state, reward = excluded.reward,
                    stop = excluded.stop, body = excluded.body WHERE state = 'failed' AND settled_by IS NULL RETURNING id""",
                row,
            ).fetchall()
            if not stored:
                raise ValueError(f"{key} is already {_state(db, key)}")
            [(number,)] = stored
            db.execute("DELETE FROM segments WHERE trajectory = ?", (number,))
            db.executemany("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)", [(number, i, *s) for i, s in enumerate(segments)])

    def finished(self, phase: Phase, step: int, failed: bool = False) -> dict[tuple[str, int], Trajectory]:
        """What of a step is done and not yet committed, by task and index; with the failed ones if asked."""
        states: list[State] = [_succeeded(phase), "failed"] if failed else [_succeeded(phase)]
        rows = (row for state in states for row in self.trajectories(phase=phase, step=step, state=state))
        return {(row.key.task_id, row.key.index): row.trajectory for row in rows}

    def trajectories(
        self,
        *,
        phase: Phase | None = None,
        step: int | None = None,
        state: State | None = None,
        min_reward: float | None = None,
    ) -> Iterator[Recorded]:
        """What was recorded, oldest first, one trajectory in memory at a time."""
        # The ids come first: an open cursor would hold a snapshot, and keep the writer's WAL from being folded in.
        ids = self._store.rows(
            """SELECT id FROM trajectories WHERE (?1 IS NULL OR phase = ?1) AND (?2 IS NULL OR step = ?2)
                AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR reward >= ?4) ORDER BY id""",
            *(phase, step, state, min_reward),
        )
        for (number,) in ids:
            yield self._row(number)

    def evaluated(self, phase: Phase) -> list[int]:
        """After how many steps there was such an evaluation."""
        return [
            step for (step,) in self._store.rows("SELECT DISTINCT step FROM trajectories WHERE phase = ? ORDER BY step", phase)
        ]

    def commit_steps(self, steps: Sequence[StepRecord], checkpoint: str) -> None:
        """Settle the steps that a checkpoint holds, all or none, once it is safely on the disk."""
        last = self.committed_step()
        numbers = [step.step for step in steps]
        if not numbers or numbers != list(range(last + 1, last + 1 + len(steps))):
            raise ValueError(f"steps {numbers} do not follow the last committed step, {last}")
        with self._store.transaction(durable=True) as db:
            for step in steps:
                row = (step.step, checkpoint, len(step.trained), len(step.filtered), to_bytes(dict(step.metrics)))
                db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", row)
                for key in step.trained:
                    _settle(db, key, "consumed", step.step)
                for key in step.filtered:
                    _settle(db, key, "filtered", step.step)
                for key in step.failed:
                    _settle(db, key, "failed", step.step)

    def rewind(self, checkpoint: str) -> None:
        """Undo the commits after this checkpoint's, when newer ones cannot be read: what they took is finished again."""
        [(last,)] = self._store.rows("SELECT max(step) FROM steps WHERE checkpoint = ?", checkpoint)
        if last is None:
            raise ValueError(f"no committed step belongs to checkpoint {checkpoint!r}")
        with self._store.transaction(durable=True) as db:
            db.execute(
                """UPDATE trajectories SET state = iif(state = 'failed', 'failed', 'finished'), settled_by = NULL
                WHERE settled_by > ?""",
                (last,),
            )
            db.execute("DELETE FROM steps WHERE step > ?", (last,))

    def committed_step(self) -> int:
        """The last committed step, or -1."""
        [(step,)] = self._store.rows("SELECT coalesce(max(step), -1) FROM steps")
        return int(step)

    def checkpoint(self) -> str | None:
        """The checkpoint that holds the last committed step: the one to resume from."""
        rows = self._store.rows("SELECT checkpoint FROM steps ORDER BY step DESC LIMIT 1")
        return str(rows[0][0]) if rows else None

    def steps(self) -> dict[int, dict[str, JSON]]:
        """The metrics of every committed step, in order."""
        rows = self._store.rows("SELECT step, metrics FROM steps ORDER BY step")
        with self._store.whole("a step's metrics"):
            return {step: from_bytes(metrics) for step, metrics in rows}

    def settled(self) -> set[tuple[int, str]]:
        """The training groups that committed steps have taken, as step and task."""
        rows = self._store.rows(
            "SELECT DISTINCT step, task_id FROM trajectories WHERE phase = 'train' AND settled_by IS NOT NULL"
        )
        return {(step, task.decode("utf-8", "surrogatepass")) for step, task in rows}

    def counts(self) -> dict[Phase, dict[State, int]]:
        """How many trajectories are in each state."""
        counts: dict[Phase, dict[State, int]] = {}
        for phase, state, count in self._store.rows("SELECT phase, state, count(*) FROM trajectories GROUP BY phase, state"):
            counts.setdefault(phase, {})[state] = count
        return counts

    def verify(self) -> list[str]:
        """Every invariant that does not hold; an empty list is a sound ledger."""
        return invariants.violations(self._store)

    def _row(self, number: int) -> Recorded:
        columns = "phase, step, task_id, idx, state, attempts, reward, stop, body"
        with self._store.snapshot():  # a later attempt may replace the row and its segments
            [row] = self._store.rows(f"SELECT {columns} FROM trajectories WHERE id = ?", number)
            arrays = "SELECT tokens, mask, logprobs, versions FROM segments WHERE trajectory = ? ORDER BY number"
            segments = [
                (tokens, mask, logprobs, versions) for tokens, mask, logprobs, versions in self._store.rows(arrays, number)
            ]
        phase, step, task, index, state, attempts, reward, stop, body = row
        with self._store.whole(describe_key(phase, step, task, index)):
            key = Key(phase, step, task.decode("utf-8", "surrogatepass"), index)
            return Recorded(key, state, attempts, unpack(key.task_id, index, reward, stop, body, segments))


def describe_key(phase: Phase, step: int, task: bytes, index: int) -> str:
    """A trajectory by its columns, whatever their bytes are."""
    return f"attempt {index} at {task.decode(errors='replace')!r} in step {step} ({phase})"


def _values(key: Key) -> tuple[str, int, bytes, int]:
    return key.phase, key.step, key.task_id.encode("utf-8", "surrogatepass"), key.index


def _succeeded(phase: Phase) -> State:
    return "finished" if phase == "train" else "evaluated"


def _check_ended(key: Key, trajectory: Trajectory) -> None:
    if (key.task_id, key.index) != (trajectory.task_id, trajectory.index):
        raise ValueError(f"{key} is not the slot of attempt {trajectory.index} at {trajectory.task_id!r}")
    if trajectory.failure is None and (trajectory.reward is None or not math.isfinite(trajectory.reward)):
        raise ValueError(f"{key} ended without a failure, so it needs a finite reward, not {trajectory.reward}")
    if trajectory.failure is not None and trajectory.reward is not None:
        raise ValueError(f"{key} failed, so it cannot have a reward ({trajectory.reward})")


def _state(db: Connection, key: Key) -> State | None:
    query = "SELECT state FROM trajectories WHERE phase = ? AND step = ? AND task_id = ? AND idx = ?"
    row = db.execute(query, _values(key)).fetchone()
    return row[0] if row else None


def _settle(db: Connection, key: Key, state: State, step: int) -> None:
    update = """UPDATE trajectories SET state = ?, settled_by = ?
        WHERE phase = ? AND step = ? AND task_id = ? AND idx = ? AND state = ? AND settled_by IS NULL"""
    before = "failed" if state == "failed" else "finished"
    if db.execute(update, (state, step, *_values(key), before)).rowcount != 1:
        raise ValueError(f"step {step} cannot take {key}: it is {_state(db, key) or 'not recorded'}")
