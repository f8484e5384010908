"""Two evaluations of the same tasks side by side: how much better the second is, over attempts at the same tasks, and what each
took. An evaluation is a run's folder, or `FOLDER@STEPS` for the one after so many steps; the last one otherwise.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from palestra.errors import UsageError
from palestra.ledger import Ledger
from palestra.runs import RunFolder
from palestra.statistics import Estimate, chance, difference, mean
from palestra.trajectory import Phase, Trajectory

PHASES: Mapping[str, Phase] = {"sampled": "eval", "greedy": "greedy"}


@dataclass(frozen=True)
class Compared:
    """The same quantity on both sides."""

    before: Estimate
    after: Estimate
    difference: Estimate


@dataclass(frozen=True)
class Pairs:
    """What was tried on both sides. Attempts that failed on either are left out."""

    tasks: int
    attempts: int
    left_out: int
    pass_at: dict[int, Compared]
    means: dict[str, tuple[float, float]]
    """Of an attempt, before and after: turns, tokens sampled, calls of each tool, hints."""


@dataclass(frozen=True)
class Cost:
    """What training took until its attempts earned a given reward."""

    steps: int
    sampled_tokens: float
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Comparison:
    before: str
    after: str
    pairs: dict[str, Pairs]
    reached: dict[str, Cost | None]
    """By run; empty unless asked for."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare(before: str, after: str | None = None, reach: float | None = None) -> Comparison:
    """Of one run alone, its first evaluation (or the one that is named) and its last."""
    first = _Evaluation(before, first=after is None)
    last = _Evaluation(str(first.folder) if after is None else after)
    both = {name: (first.attempts(phase), last.attempts(phase)) for name, phase in PHASES.items()}
    pairs = {name: _pair(*sides) for name, sides in both.items() if sides[0].keys() & sides[1].keys()}
    if not pairs:
        raise UsageError(f"{first.name} and {last.name} have no attempt at the same task; compare evaluations of one task set")
    runs = {} if reach is None else {str(side.folder): cost_to_reach(side.metrics(), reach) for side in (first, last)}
    return Comparison(first.name, last.name, pairs, runs)


class _Evaluation:
    def __init__(self, given: str, first: bool = False) -> None:
        folder, at, step = given.rpartition("@")
        self.folder = Path(folder if at and step.isdigit() else given)
        with self._ledger() as ledger:
            steps = ledger.evaluated("eval")
        if not steps:
            raise UsageError(f"{self.folder} has no evaluation yet; give the folder of a run or of `palestra eval`")
        if first and len(steps) == 1:
            raise UsageError(f"{self.folder} has one evaluation only; give another one to compare it with")
        self._step = int(step) if at and step.isdigit() else steps[0] if first else steps[-1]
        if self._step not in steps:
            known = ", ".join(map(str, steps))
            raise UsageError(f"{self.folder} was not evaluated after {self._step} steps, but after {known}")
        self.name = f"{self.folder}@{self._step}"

    def _ledger(self) -> Ledger:
        return Ledger.open(RunFolder(self.folder).ledger, read_only=True)

    def attempts(self, phase: Phase) -> dict[tuple[str, int], Trajectory]:
        with self._ledger() as ledger:
            return ledger.finished(phase, self._step)

    def metrics(self) -> list[dict[str, Any]]:
        return RunFolder(self.folder).read_metrics()


Attempts = Mapping[tuple[str, int], Trajectory]


def _pair(before: Attempts, after: Attempts) -> Pairs:
    keys = sorted(before.keys() & after.keys())
    sides = [_rewards([side[key] for key in keys]) for side in (before, after)]
    fewest = min(map(len, sides[0].values()))
    chances = {k: [[chance(k, rewards) for rewards in side.values()] for side in sides] for k in _powers(fewest)}
    means = [_means([side[key] for key in keys]) for side in (before, after)]
    return Pairs(
        tasks=len(sides[0]),
        attempts=len(keys),
        left_out=len(before.keys() ^ after.keys()),
        pass_at={k: Compared(mean(a), mean(b), difference(a, b)) for k, (a, b) in chances.items()},
        means={name: (means[0].get(name, 0.0), means[1].get(name, 0.0)) for name in dict.fromkeys([*means[0], *means[1]])},
    )


def _powers(most: int) -> Iterator[int]:
    yield from (2**n for n in range(most.bit_length()))


def _rewards(attempts: Sequence[Trajectory]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for attempt in attempts:
        assert attempt.reward is not None
        rewards[attempt.task_id].append(attempt.reward)
    return rewards


def _means(attempts: Sequence[Trajectory]) -> dict[str, float]:
    calls = Counter(
        "unreadable calls" if call.fault is not None else f"calls of {call.name}"
        for attempt in attempts
        for turn in attempt.turns
        for call in turn.message.calls
    )
    figures = {
        "turns": fmean(len(attempt.turns) for attempt in attempts),
        "tokens sampled": fmean(attempt.sampled_tokens for attempt in attempts),
        "hints": fmean(len(attempt.hints or ()) for attempt in attempts),
    }
    return figures | {name: count / len(attempts) for name, count in calls.most_common()}


def cost_to_reach(metrics: Sequence[Mapping[str, Any]], reward: float) -> Cost | None:
    """Of the training before the first step whose attempts earned at least this on average; None when there was none."""
    steps = sorted((row for row in metrics if "evaluation" not in row), key=lambda row: int(row["step"]))
    before = list(takewhile(lambda row: row["reward"] < reward, steps))
    if len(before) == len(steps):
        return None
    total = {key: math.fsum(row.get(key, math.nan) for row in before) for key in ("sampled_tokens", "seconds", "cpu_seconds")}
    return Cost(len(before), **total)


MOST_TOOLS = 6
"""Models invent tools; those that are rarely called are not shown."""


def render(compared: Comparison, console: Console) -> None:
    console.print(f"before: {compared.before}\nafter:  {compared.after}")
    for name, pairs in compared.pairs.items():
        left = f"; {pairs.left_out} without a counterpart left out" if pairs.left_out else ""
        table = Table(f"{name}, {pairs.tasks} tasks, {pairs.attempts} attempts{left}", "before", "after", "difference [95%]")
        for k, rate in pairs.pass_at.items():
            table.add_row(f"pass@{k}", str(rate.before), str(rate.after), _signed(rate.difference))
        for what, (a, b) in list(pairs.means.items())[: 3 + MOST_TOOLS]:
            table.add_row(f"{what}, for an attempt", f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}")
        console.print(table)
    for run, cost in compared.reached.items():
        console.print(f"{run}: {_said(cost)}")


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _said(cost: Cost | None) -> str:
    if cost is None:
        return "no step earned that"
    return (
        f"a step earned that after {cost.steps} updates, {cost.sampled_tokens:,.0f} tokens sampled, {cost.seconds:,.0f} s, "
        f"{cost.cpu_seconds:,.0f} CPU-seconds"
    )
