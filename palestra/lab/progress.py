"""A counter that advances with time at a rate that changes at events, and things that are due when it reaches their marks.
Pools, the engine and training are each one of these; nothing is computed between events.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

Mark = tuple[float, int]
"""Where the counter has to get to, and a number that tells apart those at the same place."""

NEAR = 1e-6
"""What is this close to its mark is there: timers and sums are exact only to about a nanosecond."""

ROUNDINGS = 8
"""Or as close as so many roundings of the counter and of the clock, which count for more when either is very far."""


class Progress(Generic[T]):
    """After every event the owner calls `run` with the new rate; `wake` is called when something is due."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = wake
        self._count, self._rate, self._as_of = 0.0, 0.0, self._loop.time()
        self._marks: list[tuple[float, int, T]] = []
        self._numbered = 0
        self._dropped: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> float:
        """As of the last `advance`."""
        return self._count

    def advance(self) -> float:
        """Bring the counter up to now; the seconds that have passed since it was."""
        now = self._loop.time()
        elapsed = now - self._as_of
        self._count += elapsed * self._rate
        self._as_of = now
        return elapsed

    def after(self, distance: float, thing: T) -> Mark:
        """Have the thing due when the counter has advanced so far from where it is now."""
        self._numbered += 1
        mark = (self._count + distance, self._numbered)
        heapq.heappush(self._marks, (*mark, thing))
        return mark

    def drop(self, mark: Mark) -> None:
        """Forget what is due at a mark that has not been reached."""
        self._dropped.add(mark[1])

    def left(self, mark: Mark) -> float:
        """How far the counter still is from a mark."""
        return max(0.0, mark[0] - self._count)

    def due(self) -> Iterator[T]:
        """What has reached its mark, taken off, the nearest mark first."""
        marks, rounding = self._marks, math.ulp(self._count) + self._rate * math.ulp(self._as_of)
        reached = self._count + max(NEAR, ROUNDINGS * rounding)
        while marks and (marks[0][0] <= reached or marks[0][1] in self._dropped):
            _, number, thing = heapq.heappop(marks)
            if number in self._dropped:
                self._dropped.remove(number)
            else:
                yield thing

    def run(self, rate: float) -> None:
        """Go on at this rate."""
        self._rate = rate
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._marks and rate > 0:
            self._timer = self._loop.call_at(self._as_of + (self._marks[0][0] - self._count) / rate, self._wake)
