"""Rewards take turns: of those that wait, the one that will take longest goes first, or a step would end with a long one that
began last. How long it takes is learned from attempts at the same task: what theirs took or, while they last, have taken so far.
A task of which nothing is known yet is taken to be longer than most. Between rewards that are alike, the group goes first of
which most are judged already: only a complete one can be trained on.
"""

import asyncio
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from palestra.protocols import StagedRollout

V = TypeVar("V")

KNOWN = 10_000
"""Tasks and groups whose rewards are remembered, the latest."""

CLOSER = 1 / 8
"""How much sooner a reward is due for each of its group that has begun before it, in usual rewards."""


@dataclass(slots=True)
class _Times:
    """How long some have taken."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.squares += seconds**2

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2)) if self.count else 0.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    rollout: StagedRollout
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
        self._took: dict[Hashable, _Times] = {}
        self._all = _Times()
        self._of_group: dict[Hashable, int] = {}
        """How many of a group have begun, those that have ended too, without those that failed and are tried again."""

    async def advance(self, rollout: StagedRollout, number: int) -> None:
        """Judge a rollout when its turn has come."""
        await self._enter(rollout, number)
        clock = asyncio.get_running_loop().time
        began = clock()
        self._began.setdefault(rollout.kin, []).append(began)
        self._count(rollout.group, 1)
        try:
            await rollout.advance()
            if rollout.next is None:
                self._learn(rollout.kin, clock() - began)
            else:  # it failed and will be tried again: nothing is learned, and its group is no closer to complete
                self._count(rollout.group, -1)
        finally:
            self._began[rollout.kin].remove(began)
            if not self._began[rollout.kin]:
                del self._began[rollout.kin]
            self._inside -= 1
            self._admit()

    async def _enter(self, rollout: StagedRollout, number: int) -> None:
        if not self._waiting and self._inside < self.size:
            self._inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(rollout, number, turn)
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
            first = min(self._waiting, key=lambda each: (-self._urgency(each.rollout), each.number))
            self._waiting.remove(first)
            if not first.turn.done():  # else it was cancelled just now
                self._inside += 1
                first.turn.set_result(None)

    def _urgency(self, rollout: StagedRollout) -> float:
        return self._expected(rollout.kin) + CLOSER * self._all.mean * self._of_group.get(rollout.group, 0)

    def _expected(self, kin: Hashable) -> float:
        began = self._began.get(kin)
        so_far = asyncio.get_running_loop().time() - began[0] if began else 0.0
        took = self._took.get(kin)
        # What nothing is known of may well be long.
        return max(took.mean if took else self._all.mean + self._all.deviation, so_far)

    def _count(self, group: Hashable, change: int) -> None:
        _renew(self._of_group, group, self._of_group.get(group, 0) + change)

    def _learn(self, kin: Hashable, seconds: float) -> None:
        self._all.add(seconds)
        took = self._took.get(kin) or _Times()
        took.add(seconds)
        _renew(self._took, kin, took)


def _renew(known: dict[Hashable, V], key: Hashable, value: V) -> None:
    """Keep it as the latest, and forget the one that is longest ago where there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > KNOWN:
        del known[next(iter(known))]
