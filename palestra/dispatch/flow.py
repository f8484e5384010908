"""What all dispatchers share: a task for each rollout under way, a bounded way in and a bounded way out, and nothing left behind.

A dispatcher says who may come in (`entry`), and how a rollout that is in is driven through its stages.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count

from palestra.dispatch.room import Room
from palestra.errors import cause
from palestra.protocols import R

HANDOVER = 64
"""Rollouts that have ended and wait for somebody to take them. One that finds no place here keeps its place in the room."""


@asynccontextmanager
async def flow(
    rollouts: AsyncIterable[R], entry: Room, drive: Callable[[R, int], Awaitable[None]]
) -> AsyncIterator[AsyncIterator[R]]:
    """Enter each rollout, drive it in a task of its own, and hand it over once it has ended. The room is left afterwards."""
    ended: asyncio.Queue[R | None] = asyncio.Queue(HANDOVER)
    inside: set[int] = set()

    def leave(number: int) -> None:
        inside.remove(number)
        entry.leave()

    async def one(rollout: R, number: int) -> None:
        try:
            try:
                await drive(rollout, number)
            finally:
                await rollout.close()
            if rollout.next is None:  # else it never came to its run
                await ended.put(rollout)
        finally:
            leave(number)

    async def feed() -> None:
        source = aiter(rollouts)
        try:
            async with asyncio.TaskGroup() as under_way:
                for number in count():
                    await entry.enter(number)
                    inside.add(number)
                    try:
                        rollout = await anext(source)
                    except StopAsyncIteration:
                        break
                    under_way.create_task(one(rollout, number))
        finally:
            for number in list(inside):  # one that was cancelled before its first step never came to its finally
                leave(number)
        await ended.put(None)

    try:
        async with asyncio.TaskGroup() as group:
            feeder = group.create_task(feed())
            yield _until_none(ended)
            feeder.cancel()
    except BaseExceptionGroup as errors:
        raise cause(errors) from None


async def _until_none(queue: asyncio.Queue[R | None]) -> AsyncIterator[R]:
    while (item := await queue.get()) is not None:
        yield item
