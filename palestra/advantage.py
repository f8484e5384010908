"""From the rewards of a group to advantages, and from its trajectories to training samples.

The baseline is over trajectories, never over segments. What a failed or masked trajectory does to its group is decided here
and nowhere else; how a sample becomes a gradient is `loss.py`'s business.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from palestra.trajectory import Group, Sample, Segment, Trajectory

Estimator = Literal["grpo", "rloo", "dr_grpo"]

SegmentWeight = Literal["segment", "trajectory"]
"""How a trajectory of several segments counts: each segment as 1, or all of them together as 1."""

CreditOutcome = Literal["trained", "no_spread", "too_small"]


@dataclass(frozen=True)
class Credit:
    """What a group gives to training, and what it lost on the way."""

    samples: list[Sample]
    outcome: CreditOutcome
    failed: int
    """Trajectories that left the group and its baseline because they failed."""
    masked: int
    """Trajectories that count in the baseline but give no samples because of how they stopped."""


def advantages(rewards: Sequence[float], estimator: Estimator) -> list[float]:
    """How much better than its group each reward is."""
    count = len(rewards)
    if count < 2:
        raise ValueError(f"a baseline needs at least two rewards, not {count}")
    mean = statistics.mean(rewards)  # exact, so that equal rewards give exactly zero
    centred = [reward - mean for reward in rewards]
    match estimator:
        case "dr_grpo":
            return centred
        case "rloo":  # r - mean of the others = (r - mean of all) * n / (n - 1)
            return [difference * count / (count - 1) for difference in centred]
        case "grpo":
            # The paper only writes std(r); TRL and verl take the sample deviation (n - 1), and so do we.
            deviation = statistics.stdev(rewards)
            return [difference / (deviation + 1e-6) for difference in centred]


def credit(
    group: Group,
    estimator: Estimator,
    *,
    min_group: int = 2,
    masked_stops: frozenset[str] = frozenset(),
    segment_weight: SegmentWeight = "segment",
    keep_flat: bool = False,
) -> Credit:
    """Turn a complete group into samples, or say why it gives none. Only controls train on groups without spread."""
    kept = [trajectory for trajectory in group.trajectories if trajectory.failure is None]
    rewards = [_reward(trajectory) for trajectory in kept]
    failed = len(group.trajectories) - len(kept)
    masked = sum(trajectory.stop in masked_stops for trajectory in kept)
    if len(kept) < min_group:
        return Credit([], "too_small", failed, masked)
    if len(set(rewards)) == 1 and not keep_flat:
        return Credit([], "no_spread", failed, masked)
    samples: list[Sample] = []
    for trajectory, advantage in zip(kept, advantages(rewards, estimator), strict=True):
        if trajectory.stop not in masked_stops:
            samples.extend(_samples(trajectory, advantage, segment_weight))
    return Credit(samples, "trained", failed, masked)


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.index} of task {trajectory.task_id!r} has neither a reward nor a failure")
    return trajectory.reward


def _samples(trajectory: Trajectory, advantage: float, segment_weight: SegmentWeight) -> list[Sample]:
    trained = [segment for segment in trajectory.segments if any(segment.mask)]
    weight = 1.0 if segment_weight == "segment" or not trained else 1.0 / len(trained)
    return [_sample(segment, advantage, weight, trajectory.task_id) for segment in trained]


def _sample(segment: Segment, advantage: float, weight: float, task_id: str) -> Sample:
    """What stands behind the last sampled token, such as a result that no turn was left to read, teaches nothing."""
    end = len(segment) - segment.mask[::-1].index(True)
    return Sample(
        segment.tokens[:end], segment.mask[:end], segment.logprobs[:end], segment.versions[:end], advantage, weight, task_id
    )
