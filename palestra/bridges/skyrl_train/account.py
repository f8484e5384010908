"""Which trajectories went to SkyRL, and which of its steps took them.

A step is settled in the ledger once SkyRL has written a checkpoint that holds it. What is to be settled is written beside that
checkpoint first, so a run that goes on from it can make up for a crash between the two.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palestra.advantage import Credit
from palestra.errors import PalestraError, StorageError
from palestra.ledger import Ledger, StepRecord
from palestra.rollout import describe as describe_failure
from palestra.trajectory import Key, Trajectory

SETTLED = "palestra.json"


@dataclass(frozen=True)
class Handed:
    """A group that SkyRL was given."""

    keys: Sequence[Key]
    trajectories: Sequence[Trajectory]
    credit: Credit


@dataclass
class Account:
    ledger: Ledger
    patience: int
    """So many rollouts that fail one after the other end the run: it would go on failing, quietly and for ever."""
    ahead: bool = False
    """Whether rollouts go on while a step is trained."""
    _given: dict[str, Handed] = field(default_factory=dict)
    _uncommitted: list[StepRecord] = field(default_factory=list)
    _measured: dict[int, dict[str, float]] = field(default_factory=dict)
    _failed_in_a_row: int = 0
    _step_began: float = field(default_factory=time.monotonic)
    _took: float = field(default_factory=time.monotonic)

    def heard_of(self, trajectory: Trajectory) -> None:
        """A rollout has ended."""
        self._failed_in_a_row = 0 if trajectory.failure is None else self._failed_in_a_row + 1
        if trajectory.failure is not None and self._failed_in_a_row >= self.patience:
            raise PalestraError(
                f"the last {self._failed_in_a_row} rollouts all failed; the last one: {describe_failure(trajectory.failure)}"
            )

    def handed_over(self, groups: Sequence[Handed]) -> None:
        self._given.update((group.keys[0].task_id, group) for group in groups)

    def took(self, step: int, task_ids: Iterable[str]) -> None:
        """SkyRL trains on these groups now."""
        groups = [self._given.pop(task_id) for task_id in dict.fromkeys(task_ids)]
        kinds: dict[str, list[Key]] = {"trained": [], "filtered": [], "failed": []}
        for group in groups:
            for key, trajectory in zip(group.keys, group.trajectories, strict=True):
                kind = "trained" if group.credit.outcome == "trained" else "filtered"
                kinds["failed" if trajectory.failure is not None else kind].append(key)
        now = time.monotonic()
        metrics = {**describe(groups), "rollout_seconds": now - (self._took if self.ahead else self._step_began)}
        self._took = now
        self._measured[step] = metrics
        self._uncommitted.append(StepRecord(step, metrics, **kinds))

    def ended(self, step: int) -> dict[str, float] | None:
        """What the step measured on our side, once; None for anything that is no step of training."""
        metrics = self._measured.pop(step, None)
        if metrics is not None:
            metrics["seconds"] = time.monotonic() - self._step_began
            self._step_began = time.monotonic()
        return metrics

    def leave_out(self, seconds: float) -> None:
        """Time that is not the step's, such as an evaluation's."""
        self._step_began += seconds
        self._took += seconds

    @property
    def has_news(self) -> bool:
        """Whether there are steps that no checkpoint holds."""
        return bool(self._uncommitted)

    def write(self, checkpoint: Path) -> None:
        """Say in the checkpoint's folder what it will settle."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / SETTLED).write_text(json.dumps([asdict(record) for record in self._uncommitted]), encoding="utf-8")

    def commit(self, checkpoint: str) -> None:
        """The checkpoint is on the disk."""
        self.ledger.commit_steps(self._uncommitted, checkpoint)
        self._uncommitted = []

    def go_on_from(self, done: int, checkpoint: Path | None) -> None:
        """SkyRL goes on with weights that have so many steps behind them; the ledger is to have as many."""
        self._step_began = time.monotonic()
        committed = self.ledger.committed_step() + 1
        if committed == done:
            return
        if checkpoint is None:
            raise StorageError(f"the ledger has {committed} steps, but SkyRL finds no checkpoint of them to go on from")
        if committed > done:
            self.ledger.rewind(checkpoint.name)
            return
        try:
            rows = json.loads((checkpoint / SETTLED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise StorageError(
                f"{checkpoint} holds {done} steps and the ledger {committed}: {SETTLED} is missing there"
            ) from None
        self.ledger.commit_steps([_record(row) for row in rows], checkpoint.name)


def _record(row: dict[str, Any]) -> StepRecord:
    keys = {kind: [Key(**key) for key in row[kind]] for kind in ("trained", "filtered", "failed")}
    return StepRecord(row["step"], row["metrics"], **keys)


def describe(groups: Sequence[Handed]) -> dict[str, float]:
    """The figures of a step, under the names that the embedded backend's have."""
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    done = [trajectory for trajectory in everyone if trajectory.reward is not None]
    outcomes = Counter(group.credit.outcome for group in groups)
    count = max(1, len(done))
    return {
        "reward": sum(trajectory.reward or 0.0 for trajectory in done) / count,
        "turns": sum(len(trajectory.turns) for trajectory in done) / count,
        "sampled_tokens": sum(trajectory.sampled_tokens for trajectory in done),
        "failed": len(everyone) - len(done),
        "retried": sum(len(trajectory.retried) for trajectory in everyone),
        "groups_trained": outcomes["trained"],
        "groups_without_spread": outcomes["no_spread"],
        "groups_too_small": outcomes["too_small"],
    }
