"""From a trajectory to the rows that verl trains on, one for each segment, as plain data. Nothing here imports verl.

What a trajectory gives to training is what `palestra.advantage` gives: tokens as sampled, up to the last one that was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.trajectory import Segment, Trajectory


@dataclass(frozen=True)
class Row:
    """One segment: the tokens before the first sampled one, and the rest with mask and logprobs."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]


def rows(trajectory: Trajectory, masked: bool, filler: int) -> list[Row]:
    """The trajectory's rows. One that failed, that was masked, or that sampled nothing gives a row without a sampled token: verl
    wants one for each attempt, and `filler` is any token of the model."""
    trained = [] if masked or trajectory.failure else [segment for segment in trajectory.segments if any(segment.mask)]
    return [_row(segment) for segment in trained] or [Row([filler], [filler], [0], [0.0])]


def _row(segment: Segment) -> Row:
    start, end = segment.mask.index(True), len(segment) - segment.mask[::-1].index(True)
    mask = [int(sampled) for sampled in segment.mask[start:end]]
    return Row(segment.tokens[:start], segment.tokens[start:end], mask, segment.logprobs[start:end])


def versions(trajectory: Trajectory, otherwise: int) -> tuple[int, int]:
    """The oldest and the newest weights that wrote a token of it."""
    written = [version for segment in trajectory.segments for version in segment.versions if version >= 0]
    return (min(written), max(written)) if written else (otherwise, otherwise)


def attempt_label(uid: str, session: str, failed: bool) -> str:
    """What the advantage estimator learns of a row beside mask and reward: its group, its attempt, and whether that failed."""
    return f"{uid}|{session}|{'failed' if failed else 'ended'}"


@dataclass(frozen=True)
class Attempt:
    """All rows of one attempt, as places in the batch."""

    group: str
    failed: bool
    places: list[int]


def attempts(labels: Sequence[str], sampled: Sequence[bool]) -> list[Attempt]:
    """Which rows belong together. A row without a label is an attempt of its own, which failed when it has no sampled token:
    so verl's classic trainer and its padding name them."""
    found: dict[str, Attempt] = {}
    for place, (label, any_sampled) in enumerate(zip(labels, sampled, strict=True)):
        group, *rest = label.split("|")
        key, failed = (label, rest[1] == "failed") if rest else (f"{label}#{place}", not any_sampled)
        found.setdefault(key, Attempt(group, failed, [])).places.append(place)
    return list(found.values())
