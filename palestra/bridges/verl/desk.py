"""Where the rollouts that verl asks for, one by one, become a stream for our dispatcher."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing

from palestra.protocols import Dispatcher
from palestra.rollout import Rollout


class Desk:
    """One for each event loop. The limits of the config's [dispatch] hold in each of verl's agent-loop workers. The rollouts run
    within `surroundings`, such as the provider of their sandboxes."""

    def __init__(self, dispatcher: Dispatcher, surroundings: AbstractAsyncContextManager[object]) -> None:
        self._arrived: asyncio.Queue[Rollout] = asyncio.Queue()  # no longer than verl's calls that wait for theirs
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._work = asyncio.create_task(self._serve(dispatcher, surroundings))

    async def through(self, rollout: Rollout) -> None:
        """All stages of the rollout, when it is its turn. Raises what ended the stream for everybody."""
        if self._work.done():
            self._work.result()
        self._waiting[id(rollout)] = ended = asyncio.get_running_loop().create_future()
        self._arrived.put_nowait(rollout)
        await ended

    async def _serve(self, dispatcher: Dispatcher, surroundings: AbstractAsyncContextManager[object]) -> None:
        try:
            async with surroundings, aclosing(self._source()) as source, dispatcher.stream(source) as stream:
                async for rollout in stream:
                    self._waiting.pop(id(rollout)).set_result(None)
        except BaseException as error:
            for waiting in self._waiting.values():
                waiting.set_exception(error)
            raise

    async def _source(self) -> AsyncGenerator[Rollout, None]:
        while True:
            yield await self._arrived.get()
