"""Success rates and the differences between them, with 95% intervals. The unit is the task: attempts at one task are not
independent of each other."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z = statistics.NormalDist().inv_cdf(0.975)

SUCCESS = 1.0 - 1e-9
"""A reward of 1 is a success."""

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def pass_at(k: int, rewards: Mapping[str, Sequence[float]]) -> Estimate:
    """The chance that one of k attempts succeeds, from at least k attempts at each task (Chen et al., 2021)."""
    return mean([chance(k, attempts) for attempts in rewards.values()])


def chance(k: int, attempts: Sequence[float]) -> float:
    """The same for one task."""
    n, right = len(attempts), sum(reward >= SUCCESS for reward in attempts)
    if n < k:
        raise ValueError(f"pass@{k} needs at least {k} attempts at each task, one has {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def mean(values: Sequence[float]) -> Estimate:
    """The mean of values between 0 and 1. Wilson's interval where they are all 0 or 1, else the normal one."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0)
    centre = statistics.fmean(values)
    if all(value in (0.0, 1.0) for value in values) or len(set(values)) == 1:
        return _wilson(centre, n)
    half = Z * statistics.stdev(values) / math.sqrt(n)
    return Estimate(centre, max(0.0, centre - half), min(1.0, centre + half))


def _wilson(share: float, n: int) -> Estimate:
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Estimate:
    """How much higher the mean of `after` is, over the same tasks in the same order. The interval is a bootstrap over tasks,
    since what two policies do on one task goes together."""
    changes = [b - a for a, b in zip(before, after, strict=True)]
    if not changes:
        return Estimate(math.nan, -1.0, 1.0)
    centre = statistics.fmean(changes)
    if len(set(changes)) == 1:  # nothing to resample
        return _hybrid(mean(before), mean(after))
    draw = random.Random(seed).choices
    means = sorted(sum(draw(changes, k=len(changes))) / len(changes) for _ in range(RESAMPLES))
    outside = round(RESAMPLES * 0.025)
    return Estimate(centre, means[outside], means[-1 - outside])


def _hybrid(before: Estimate, after: Estimate) -> Estimate:
    """Newcombe's interval for a difference, from the intervals of both sides."""
    centre = after.value - before.value
    low = centre - math.hypot(after.value - after.low, before.high - before.value)
    high = centre + math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(centre, max(-1.0, low), min(1.0, high))
