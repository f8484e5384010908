"""Pipeline dispatch: workers for each stage, with a bounded queue before each.

A worker that finds the next queue full keeps its rollout, so a slow stage holds up those before it instead of letting runtimes
pile up.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager

from palestra.dispatch.flow import flow
from palestra.dispatch.room import Room
from palestra.protocols import R, StagedRollout
from palestra.trajectory import Stage


class Pipeline:
    prewarms = False

    def __init__(self, init: int, run: int, reward: int, queue: int) -> None:
        self._workers: dict[Stage, Room] = {"init": Room(init), "run": Room(run), "reward": Room(reward)}
        self._queues: dict[Stage, Room] = {"run": Room(queue), "reward": Room(queue)}
        self._inside = Room(init + run + reward + 2 * queue)

    def stream(self, rollouts: AsyncIterable[R]) -> AbstractAsyncContextManager[AsyncIterator[R]]:
        return flow(rollouts, self._inside, self._drive)

    async def _drive(self, rollout: StagedRollout, number: int) -> None:
        worker: Room | None = None
        try:
            while (stage := rollout.next) is not None:
                if stage == "init" or worker is self._workers[stage]:  # who is tried again goes straight to a worker
                    if worker is not None:
                        worker.leave()
                        worker = None
                    await asyncio.sleep(rollout.rest)
                    await self._workers[stage].enter(number)
                    worker = self._workers[stage]
                else:
                    async with self._queues[stage].place(number):
                        if worker is not None:
                            worker.leave()
                            worker = None
                        await self._workers[stage].enter(number)
                        worker = self._workers[stage]
                if stage == "run" and not await rollout.may_run():
                    return
                await rollout.advance()
        finally:
            if worker is not None:
                worker.leave()
