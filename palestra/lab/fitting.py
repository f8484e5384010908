"""What a recording says about the machine: how far stages wait and how far they compute, and how the sampler slows down as more
calls are under way. Plain least squares with coefficients that are not negative.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Interval = tuple[float, float]

CLEAR = 3.0
"""How many standard errors a slope has to be above 0 before it counts: several ways to count the crowd are tried."""

MATTERS = 0.1
"""The share of a stage's time that has to be computing before it is told apart from waiting."""

FEWEST = 8
"""Spans below which no slope is looked for."""


class Timeline:
    """How many spans of each kind were under way at each moment."""

    def __init__(self, kinds: Mapping[str, Sequence[Interval]]) -> None:
        spans = {kind: np.asarray(times, float).reshape(-1, 2) for kind, times in kinds.items()}
        self._edges = np.unique(np.concatenate([times.ravel() for times in spans.values()]))
        self._lengths = np.diff(self._edges, append=self._edges[-1:])
        self._counts = {kind: self._under_way(times) for kind, times in spans.items()}

    def __getitem__(self, kind: str) -> Array:
        """From each edge to the next, how many are under way."""
        return self._counts[kind]

    def _under_way(self, spans: Array) -> Array:
        begun, ended = (np.searchsorted(np.sort(spans[:, side]), self._edges, side="right") for side in (0, 1))
        return (begun - ended).astype(float)

    def integral(self, values: Array, spans: Array) -> Array:
        """Over each span, of what has these values from each edge to the next."""
        total = np.concatenate([[0.0], np.cumsum(values * self._lengths)[:-1]])
        at = np.interp(spans, self._edges, total)
        return np.asarray(at[:, 1] - at[:, 0])

    def total(self, values: Array) -> float:
        """The same over all time."""
        return float(values @ self._lengths)

    def mean(self, values: Array, spans: Array, weights: Array | None = None) -> Array:
        """Over each span; 1 for a span without a length, which was there itself."""
        weights = np.ones_like(values) if weights is None else weights
        whole = self.integral(weights, spans)
        return np.divide(self.integral(values * weights, spans), whole, out=np.ones(len(spans)), where=whole > 0)


@dataclass(frozen=True, slots=True)
class StageFit:
    """Seconds of a stage: `wait`, and `work` that is slowed down where more than `cpus` are in it at once."""

    wait: float
    work: float = 0.0
    cpus: int = 1
    both: bool = False
    """Whether inits and rewards count together, since they share the processors."""

    def speed(self, crowd: Array) -> Array:
        """How fast work goes on where so many are there."""
        return np.minimum(1.0, self.cpus / np.maximum(crowd, 1.0))

    def waiting_share(self, crowd: Array) -> Array:
        """Which part of a span in such a crowd was waiting."""
        if not self.work:
            return np.ones(len(crowd))
        return np.asarray(self.wait / (self.wait + self.work / self.speed(crowd)))


@dataclass(frozen=True, slots=True)
class SamplerFit:
    """Seconds of a call: its output tokens times (`token` + `crowd` × calls under way), and `prefill` for each new token."""

    token: float
    crowd: float
    prefill: float
    r2: float
    off: float
    """By how much a call is off, against the mean call."""
    varied: bool
    """Whether the number of calls under way varied enough to tell what it does."""

    def speed(self, calls: Array) -> Array:
        """How fast a call decodes beside others, against alone."""
        alone = self.token + self.crowd
        slowed = self.token + self.crowd * np.maximum(calls, 1.0)
        return alone / slowed if alone > 0 else np.ones(len(calls))

    def prefill_share(self, output: Array, new: Array, calls: Array) -> Array:
        """Which part of a call was not decoding. All of one that wrote nothing."""
        prefill, decode = self.prefill * new, output * (self.token + self.crowd * calls)
        return np.divide(prefill, prefill + decode, out=np.ones(len(new)), where=decode > 0)


def nonnegative(columns: Sequence[Array], values: Array) -> Array:
    """The least-squares coefficients of a few columns, none below 0: the best of all ways to leave some out. Of two as good
    it is the one with fewer columns."""
    best, least = np.zeros(len(columns)), float(values @ values)
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            matrix = np.stack([columns[at] for at in chosen], axis=1)
            found, _, rank, _ = np.linalg.lstsq(matrix, values, rcond=None)
            error = float(np.sum((values - matrix @ found) ** 2))
            if rank == count and (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(len(columns)), error
                best[list(chosen)] = found
    return best


def fit_stage(seconds: Array, own: Array, both: Array, cpus: int) -> StageFit:
    """Given how many were in the same stage meanwhile, and how many in either one. Without a clear slope it is all waiting."""
    best, least = StageFit(float(seconds.mean()) if len(seconds) else 0.0), np.inf
    if len(seconds) < FEWEST:
        return best
    for crowd, together in ((own, False), (both, True)):
        for count in range(1, cpus + 1):
            slowed = np.maximum(1.0, crowd / count)
            if not _clear_slope(slowed, seconds):
                continue
            wait, work = nonnegative([np.ones(len(slowed)), slowed], seconds)
            error = float(np.sum((seconds - wait - work * slowed) ** 2))
            # A processor more or the other stage beside it has to explain more, not the same by chance.
            if error < least * 0.99 and work * slowed.mean() > MATTERS * seconds.mean():
                best, least = StageFit(float(wait), float(work), count, together), error
    return best


def _clear_slope(slowed: Array, seconds: Array) -> bool:
    if slowed.std() < 0.05 or seconds.std() == 0:
        return False
    correlation = float(np.corrcoef(slowed, seconds)[0, 1])
    return correlation > 0 and correlation**2 * (len(seconds) - 2) > CLEAR**2 * (1 - correlation**2)


def fit_sampler(seconds: Array, output: Array, new: Array, calls: Array) -> SamplerFit:
    """Given the tokens of each call, and how many calls were under way meanwhile, itself included."""
    if not len(seconds):
        return SamplerFit(0.0, 0.0, 0.0, r2=0.0, off=0.0, varied=False)
    columns = [output, output * calls, new]
    token, crowd, prefill = nonnegative(columns, seconds)
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    error = float(np.sum((seconds - token * output - crowd * output * calls - prefill * new) ** 2))
    return SamplerFit(
        *(float(token), float(crowd), float(prefill)),
        r2=1 - error / spread if spread else 1.0,
        off=float(np.sqrt(error / len(seconds)) / max(seconds.mean(), 1e-9)),
        varied=bool(calls.std() > 0.05 * calls.mean()),
    )
