"""Bounded dispatch: so many slots, each of which takes a rollout through all its stages before it takes the next."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

from palestra.errors import cause
from palestra.protocols import StagedRollout
from palestra.rollout import run_through
from palestra.trajectory import Trajectory


class Bounded:
    def __init__(self, slots: int) -> None:
        self._slots = slots

    @asynccontextmanager
    async def stream(self, rollouts: Iterable[StagedRollout]) -> AsyncIterator[AsyncIterator[Trajectory]]:
        """Finished trajectories, as they finish. Leaving the block early cancels and closes what is still under way."""
        finished: asyncio.Queue[Trajectory | None] = asyncio.Queue(self._slots)
        try:
            async with asyncio.TaskGroup() as group:
                feeder = group.create_task(self._feed(iter(rollouts), finished))
                yield _until_none(finished)
                feeder.cancel()
        except BaseExceptionGroup as errors:
            raise cause(errors) from None

    async def _feed(self, rollouts: Iterator[StagedRollout], finished: asyncio.Queue[Trajectory | None]) -> None:
        async with asyncio.TaskGroup() as slots:
            for _ in range(self._slots):
                slots.create_task(_slot(rollouts, finished))
        await finished.put(None)


async def _slot(rollouts: Iterator[StagedRollout], finished: asyncio.Queue[Trajectory | None]) -> None:
    for rollout in rollouts:
        await run_through(rollout)
        await finished.put(rollout.trajectory)


async def _until_none(queue: asyncio.Queue[Trajectory | None]) -> AsyncIterator[Trajectory]:
    while (trajectory := await queue.get()) is not None:
        yield trajectory
