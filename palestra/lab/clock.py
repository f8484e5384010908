"""An asyncio event loop whose clock jumps: where a real loop would wait for its next timer, this one sets its time to it.
Hours of sleeping take seconds, and come out the same every time. Sockets and threads are not listened to.
"""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


SPINS = 1_000_000
"""Rounds of the loop, one right after the other, in which no time passes."""


class _Jumping(selectors.SelectSelector):
    """In the place of waiting until the next timer, it calls `jump`."""

    def __init__(self, jump: Callable[[], None]) -> None:
        super().__init__()
        self._jump, self._spins = jump, 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing left to wait for: every task waits for another one, and no timer is set")
        if timeout > 0:  # which is a day at most, however far the timer
            self._jump()
            self._spins = 0
        self._spins += 1
        if self._spins > SPINS:
            self._spins = 0  # the loop goes on to cancel what is there
            raise RuntimeError("something goes on without ever waiting, such as asyncio.sleep(0) in a loop: no time passes")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self._jump))

    def time(self) -> float:
        return self._now

    def _jump(self) -> None:
        self._now = self._scheduled[0].when()  # type: ignore[attr-defined]
        # What is this near is due; the real clock's resolution would be lost in rounding after some months.
        self._clock_resolution = max(1e-6, 2 * math.ulp(self._now))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, with the time starting at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
