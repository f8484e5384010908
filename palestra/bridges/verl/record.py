"""The run's ledger in a process of its own, since verl's agent loops run in many. A trajectory is recorded before verl sees
it, and a step is committed once verl's checkpoint of it is written.

After a crash verl goes on from its newest checkpoint and asks for the attempts of the steps since then again. It gets those that
were recorded: they come from the same weights, up to rounding.
"""

from collections.abc import Sequence
from pathlib import Path

from palestra.advantage import credit
from palestra.config import Training
from palestra.errors import PalestraError
from palestra.ledger import Ledger, StepRecord
from palestra.trajectory import Group, Key, Phase, Trajectory


class Record:
    """An actor's class, with nothing in it that needs Ray."""

    def __init__(self, path: Path, plan: Training) -> None:
        self._ledger, self._plan = Ledger.open(path), plan
        self._known: dict[tuple[Phase, int], dict[tuple[str, int], Trajectory]] = {}
        self._news: list[tuple[Key, Trajectory]] = []
        self._refusal: PalestraError | None = None

    def recall(self, key: Key) -> Trajectory | None:
        """The attempt, where it was recorded already; one that failed in training is tried again."""
        where = key.phase, key.step
        if where not in self._known:
            self._known[where] = self._ledger.finished(key.phase, key.step, failed=key.phase != "train")
        return self._known[where].get((key.task_id, key.index))

    def keep(self, key: Key, trajectory: Trajectory) -> None:
        self._ledger.record(key, trajectory)
        self._news.append((key, trajectory))

    def refuse(self, complaint: PalestraError) -> None:
        """The run is to end, and to say this."""
        self._refusal = self._refusal or complaint

    def news(self) -> tuple[list[tuple[Key, Trajectory]], PalestraError | None]:
        """What was recorded since the last call, and why the run is to end."""
        news, self._news = self._news, []
        return news, self._refusal

    def commit(self, steps: int, checkpoint: str) -> None:
        """verl's checkpoint holds so many steps."""
        done = range(self._ledger.committed_step() + 1, steps)
        if done:
            self._ledger.commit_steps([self._settled(step) for step in done], checkpoint)
        self._known.clear()

    def go_on_from(self, steps: int, checkpoint: str) -> None:
        """verl goes on from the checkpoint with so many steps: what was committed later, or not yet, is made to fit."""
        if steps - 1 < self._ledger.committed_step():
            self._ledger.rewind(checkpoint)
        self.commit(steps, checkpoint)

    def evaluation(self, phase: Phase, step: int) -> list[Trajectory]:
        return list(self._ledger.finished(phase, step, failed=True).values())

    def close(self) -> None:
        self._ledger.close()

    def _settled(self, step: int) -> StepRecord:
        """What became of the step's attempts, by the same rule as verl's estimator: `palestra.advantage`'s."""
        groups: dict[str, list[tuple[Key, Trajectory]]] = {}
        for row in self._ledger.trajectories(phase="train", step=step):
            groups.setdefault(row.key.task_id, []).append((row.key, row.trajectory))
        trained: list[Key] = []
        filtered: list[Key] = []
        for task_id, attempts in groups.items():
            group = Group(task_id, tuple(trajectory for _, trajectory in attempts))
            gave = credit(group, self._plan.estimator, min_group=self._plan.min_group).outcome == "trained"
            (trained if gave else filtered).extend(key for key, trajectory in attempts if not trajectory.failure)
        everything = [attempt for attempts in groups.values() for attempt in attempts]
        failed = [key for key, trajectory in everything if trajectory.failure]
        return StepRecord(step, measured([trajectory for _, trajectory in everything]), trained, filtered, failed)


def measured(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    done = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    count = max(1, len(done))
    return {
        "reward": sum(trajectory.reward or 0.0 for trajectory in done) / count,
        "turns": sum(len(trajectory.turns) for trajectory in done) / count,
        "sampled_tokens": sum(trajectory.sampled_tokens for trajectory in done),
        "failed": len(trajectories) - len(done),
        "retried": sum(len(trajectory.retried) for trajectory in trajectories),
    }
