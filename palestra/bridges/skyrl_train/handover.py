"""From our trajectories to the rows that SkyRL trains on: a pure function, one row for each segment.

Everything that our `credit` decides is decided here, and told in what SkyRL understands. Rows that are not trained on have a
mask of zeros. A rollout that failed has no reward: NaN, which our estimator leaves out of the baseline.
"""

import math
from dataclasses import dataclass

from palestra.advantage import Credit, Estimator, credit
from palestra.trajectory import Group, Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence. `response` begins with the first sampled token and ends with the last; the lists beside it are as long."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    """The trajectory's on its last row, 0 before."""
    stop: str
    index: int
    """Which attempt of its group it belongs to."""
    is_last: bool


@dataclass(frozen=True)
class Rules:
    """What of the config decides on which trajectories a step trains."""

    estimator: Estimator
    min_group: int
    masked_stops: frozenset[str]


def hand_over(group: Group, rules: Rules, filler: int) -> tuple[list[Row], Credit]:
    """A group's rows in the order of its trajectories. `filler` is the token of one that sampled none."""
    outcome = credit(group, rules.estimator, min_group=rules.min_group, masked_stops=rules.masked_stops)
    rows: list[Row] = []
    for trajectory in group.trajectories:
        trained = outcome.outcome == "trained" and trajectory.failure is None and trajectory.stop not in rules.masked_stops
        rows.extend(_rows(trajectory, trained, filler))
    return rows, outcome


def _rows(trajectory: Trajectory, trained: bool, filler: int) -> list[Row]:
    segments = [segment for segment in trajectory.segments if any(segment.mask)]
    if not segments:
        # SkyRL wants a response from everyone: one token that is not trained on.
        read = trajectory.segments[0].tokens if trajectory.segments else [filler]
        return [Row(list(read), [filler], [0], [0.0], _reward(trajectory), _stop(trajectory), trajectory.index, True)]
    return [_row(trajectory, segment, trained, segment is segments[-1]) for segment in segments]


def _row(trajectory: Trajectory, segment: Segment, trained: bool, is_last: bool) -> Row:
    start = segment.mask.index(True)
    end = len(segment) - segment.mask[::-1].index(True)
    return Row(
        prompt=segment.tokens[:start],
        response=segment.tokens[start:end],
        mask=[int(trained and sampled) for sampled in segment.mask[start:end]],
        logprobs=segment.logprobs[start:end],
        reward=_reward(trajectory) if is_last else 0.0,
        stop=_stop(trajectory),
        index=trajectory.index,
        is_last=is_last,
    )


def _reward(trajectory: Trajectory) -> float:
    return math.nan if trajectory.reward is None else trajectory.reward


def _stop(trajectory: Trajectory) -> str:
    return "failed" if trajectory.failure is not None else str(trajectory.stop)
