"""A room holds so many at once. Those who wait outside enter in the order of their numbers, not of their arrival, so that
whoever was sent off first is not overtaken for ever."""

import asyncio
import heapq
from types import TracebackType


class Room:
    def __init__(self, size: int) -> None:
        self.size = size
        self.inside = 0
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._arrivals = 0

    def place(self, number: int, amount: int = 1) -> "_Place":
        """`async with room.place(number):` is inside. More than the whole room counts as all of it."""
        return _Place(self, number, min(amount, self.size))

    async def enter(self, number: int, amount: int = 1) -> None:
        if not self._waiting and self.inside + amount <= self.size:
            self.inside += amount
            return
        self._arrivals += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (number, self._arrivals, amount, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # let in, and cancelled in the same breath
                self.leave(amount)
            else:
                turn.cancel()
                self._admit()
            raise

    def leave(self, amount: int = 1) -> None:
        self.inside -= amount
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            _, _, amount, turn = self._waiting[0]
            if turn.done():  # cancelled
                heapq.heappop(self._waiting)
            elif self.inside + amount <= self.size:
                heapq.heappop(self._waiting)
                self.inside += amount
                turn.set_result(None)
            else:
                return


class _Place:
    __slots__ = ("_amount", "_number", "_room")

    def __init__(self, room: Room, number: int, amount: int) -> None:
        self._room, self._number, self._amount = room, number, amount

    async def __aenter__(self) -> None:
        await self._room.enter(self._number, self._amount)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._room.leave(self._amount)
