"""One training step after the other: groups give their gradients as they come, and an update is made of them when enough are in.

What a step trained on, and what it measured, goes to whoever keeps the run's record.
"""

import dataclasses
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from palestra.advantage import Credit, credit
from palestra.collect import Attempt, group_of
from palestra.config import Loss, Training
from palestra.errors import PalestraError
from palestra.gather import Gathered
from palestra.ledger import StepRecord
from palestra.pace import Pace
from palestra.protocols import Trainer
from palestra.rollout import describe
from palestra.trajectory import Group, Key, Trajectory

REFILLS = 4
"""With dynamic sampling, a step replaces at most so many times its groups: tasks that nobody can fail or solve must not hold it
up for ever."""


def _cpu_seconds() -> float:
    """Processor time of this process and of the sandboxes that it has closed; what servers elsewhere use is not in it."""
    return sum(os.times()[:4])


@dataclass
class StepLearner:
    plan: Training
    loss: Loss
    trainer: Trainer
    pace: Pace
    seed: int
    step: int
    """The one that takes groups now."""
    done: Callable[[StepRecord], Awaitable[None]]
    """Hears of every step once its weights are published."""
    begin: Callable[[int], None]
    """Hears of the next step then; with staleness it may have taken groups already."""
    _groups: list[Gathered[Attempt]] = field(default_factory=list)
    _credits: list[Credit] = field(default_factory=list)
    _abandoned: list[list[int]] = field(default_factory=list)
    """For each group that the step did not wait for, the tokens that its attempts had written by then."""
    _dropped: list[Gathered[Attempt]] = field(default_factory=list)
    """Such groups that have come to their end, and are not in the record yet."""
    _staleness: list[int] = field(default_factory=list)
    _replaced: int = 0
    _train_seconds: float = 0.0
    _made: StepRecord | None = None
    """The step whose weights are published next."""
    _collected: float = 0.0
    """When it had its last group."""
    _started: float = field(default_factory=time.monotonic)
    _early: float = 0.0
    """Seconds of the present step in which it was trained while the record of the step before was kept."""
    _cpu_started: float = field(default_factory=_cpu_seconds)

    async def take(self, group: Gathered[Attempt]) -> bool:
        self._staleness.append(self.pace.staleness_of(group.number))
        self._groups.append(group)
        attempts = group_of(group)
        if self.plan.shuffle_rewards:
            attempts = _dealt_out(attempts, random.Random(f"{self.seed}/{self.step}/{group.number}"))
        self._credits.append(await self._credit(attempts))
        if self._credits[-1].samples or not self.plan.refill or self._replaced >= REFILLS * self.plan.groups:
            return True
        self._replaced += 1
        return False

    def abandon(self, rollouts: Sequence[Attempt]) -> None:
        self._abandoned.append([attempt.trajectory.sampled_tokens for attempt in rollouts])

    def drop(self, group: Gathered[Attempt]) -> None:
        self._dropped.append(group)

    async def update(self) -> None:
        trajectories = [attempt.trajectory for group in self._groups for attempt in group.rollouts]
        _refuse_total_failure(trajectories, self.step)
        self._collected = time.monotonic()
        learned: dict[str, float] = {}
        if any(outcome.samples for outcome in self._credits):
            learned = dict(await self.trainer.step(self._learning_rate(self.step)))
        metrics = {**self._describe(trajectories), **learned, "train_seconds": self._train_seconds}
        self._made = self._record(self.step, metrics)
        self._groups, self._credits, self._staleness, self._replaced = [], [], [], 0
        self._abandoned, self._dropped = [], []
        self._train_seconds = 0.0
        self.step += 1

    async def publish(self) -> None:
        made = self._made
        assert made is not None
        await self.trainer.publish()  # also the same weights: versions count the steps
        published, cpu_published, trained = time.monotonic(), _cpu_seconds(), self._train_seconds
        took = {
            "seconds": published - self._started,
            "rollout_seconds": self._collected - self._started,
            "update_seconds": published - self._collected,
            "cpu_seconds": cpu_published - self._cpu_started,
        }
        if self.plan.staleness:
            took["early_seconds"] = self._early
        await self.done(dataclasses.replace(made, metrics={**made.metrics, **took}))
        # The next step's clock starts now, less what it was trained meanwhile; its processor time cannot be told apart.
        self._early = self._train_seconds - trained
        self._started = time.monotonic() - self._early
        self._cpu_started = cpu_published if self._early else _cpu_seconds()
        if made.step + 1 < self.plan.steps:
            self.begin(made.step + 1)

    async def _credit(self, group: Group) -> Credit:
        outcome = credit(
            group,
            self.plan.estimator,
            min_group=self.plan.min_group,
            masked_stops=self.plan.masked_stops,
            segment_weight=self.plan.segment_weight,
        )
        if outcome.samples:
            started = time.monotonic()
            await self.trainer.accumulate(outcome.samples, self.loss)
            self._train_seconds += time.monotonic() - started
        return outcome

    def _learning_rate(self, step: int) -> float:
        warmup = self.plan.warmup_steps
        return self.plan.learning_rate * (min(1.0, (step + 1) / warmup) if warmup else 1.0)

    def _describe(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        done = [t for t in trajectories if t.reward is not None]
        outcomes = Counter(outcome.outcome for outcome in self._credits)
        count = max(1, len(done))
        figures = {
            "reward": sum(t.reward or 0.0 for t in done) / count,
            "turns": sum(len(t.turns) for t in done) / count,
            "sampled_tokens": sum(t.sampled_tokens for t in done),
            "failed": len(trajectories) - len(done),
            "retried": sum(len(t.retried) for t in trajectories),
            "groups_trained": outcomes["trained"],
            "groups_without_spread": outcomes["no_spread"],
            "groups_too_small": outcomes["too_small"],
        }
        if self.plan.staleness:
            figures["staleness"] = sum(self._staleness) / len(self._staleness)
        if self.plan.refill:
            figures["groups_replaced"] = self._replaced
        if self.plan.oversample > 1:
            figures |= self._length_bias(done)
        return figures

    def _length_bias(self, kept: Sequence[Trajectory]) -> dict[str, float]:
        """Short rollouts are complete first, so stopping early keeps too many of them. What was abandoned counts with what it
        had written by then, so the true bias is at least this."""
        lengths = [trajectory.sampled_tokens for trajectory in kept]
        everything = [*lengths, *chain.from_iterable(self._abandoned)]
        bias = (sum(lengths) / max(1, len(lengths))) / max(1.0, sum(everything) / max(1, len(everything)))
        return {"groups_abandoned": len(self._abandoned), "length_bias": bias}

    def _record(self, step: int, metrics: dict[str, float]) -> StepRecord:
        """Which trajectories the step trained on, which gave no gradient, and which had failed."""
        trained: list[Key] = []
        filtered: list[Key] = []
        failed: list[Key] = []
        groups = list(zip(self._groups, (credit.outcome == "trained" for credit in self._credits), strict=True))
        for group, gave in [*groups, *((group, False) for group in self._dropped)]:
            for attempt in group.rollouts:
                failure = attempt.trajectory.failure
                if failure is None:
                    (trained if gave else filtered).append(attempt.key)
                elif failure.kind != "abandoned":
                    failed.append(attempt.key)
        return StepRecord(step, metrics, trained, filtered, failed)


def _refuse_total_failure(trajectories: Sequence[Trajectory], step: int) -> None:
    """A step in which nothing succeeded in running at all would go on failing, quietly and for ever."""
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    if len(failures) == len(trajectories):
        raise PalestraError(f"every rollout of step {step} failed; the first: {describe(failures[0])}")


def _dealt_out(group: Group, chance: random.Random) -> Group:
    """The control: the group's own rewards, dealt out at random among its attempts. What has a spread keeps it."""
    done = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
    rewards = [trajectory.reward for trajectory in done]
    chance.shuffle(rewards)
    dealt = {id(trajectory): reward for trajectory, reward in zip(done, rewards, strict=True)}
    return Group(group.task_id, tuple(dataclasses.replace(t, reward=dealt.get(id(t))) for t in group.trajectories))
