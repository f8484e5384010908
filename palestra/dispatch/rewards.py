"""Rewards take turns: of those that wait, the one that will take longest goes first, or a step would end with a long one that
began last. How long it takes is learned from attempts at the same task: what theirs took or, while they last, have taken so far.
"""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

from palestra.protocols import StagedRollout

KNOWN = 10_000
"""Tasks whose rewards are remembered, the latest."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    kin: Hashable
    number: int
    turn: asyncio.Future[None]


class Rewards:
    """So many at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._inside = 0
        self._waiting: list[_Waiting] = []
        self._began: dict[Hashable, list[float]] = {}
        """When each one under way began, the earliest first."""
        self._took: dict[Hashable, float] = {}
        self._count, self._seconds = 0, 0.0

    async def advance(self, rollout: StagedRollout, number: int) -> None:
        """Judge a rollout when its turn has come."""
        await self._enter(rollout.kin, number)
        clock = asyncio.get_running_loop().time
        began = clock()
        self._began.setdefault(rollout.kin, []).append(began)
        try:
            await rollout.advance()
            self._learn(rollout.kin, clock() - began)
        finally:
            self._began[rollout.kin].remove(began)
            if not self._began[rollout.kin]:
                del self._began[rollout.kin]
            self._inside -= 1
            self._admit()

    async def _enter(self, kin: Hashable, number: int) -> None:
        if not self._waiting and self._inside < self.size:
            self._inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(kin, number, turn)
        self._waiting.append(waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not turn.cancelled():  # let in, and cancelled in the same breath
                self._inside -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and self._inside < self.size:
            first = min(self._waiting, key=lambda each: (-self._expected(each.kin), each.number))
            self._waiting.remove(first)
            if not first.turn.done():  # else it was cancelled just now
                self._inside += 1
                first.turn.set_result(None)

    def _expected(self, kin: Hashable) -> float:
        usual = self._seconds / self._count if self._count else 0.0
        began = self._began.get(kin)
        so_far = asyncio.get_running_loop().time() - began[0] if began else 0.0
        return max(self._took.get(kin, usual), so_far)

    def _learn(self, kin: Hashable, seconds: float) -> None:
        self._count, self._seconds = self._count + 1, self._seconds + seconds
        self._took[kin] = max(seconds, self._took.pop(kin, 0.0))
        if len(self._took) > KNOWN:
            del self._took[next(iter(self._took))]
