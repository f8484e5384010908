"""A warm pool: sandboxes started ahead, from the snapshots that were asked for last. Nobody has used them before."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from palestra.errors import InfrastructureError
from palestra.protocols import Sandbox, Sandboxes, Snapshot, Spec

NOTHING = Snapshot()
Warm = tuple[Sandbox, AsyncExitStack]


class Pool:
    """Keeps so many ready in all. Those of the snapshot that was asked for longest ago make room first."""

    def __init__(self, provider: Sandboxes, size: int) -> None:
        self._provider = provider
        self._size = size
        self._ready: OrderedDict[Snapshot, deque[Warm]] = OrderedDict()
        self._starting: set[asyncio.Task[None]] = set()

    async def snapshot(self, spec: Spec, setup: Callable[[Sandbox], Awaitable[object]] | None = None) -> Snapshot:
        return await self._provider.snapshot(spec, setup)

    @asynccontextmanager
    async def open(self, snapshot: Snapshot = NOTHING) -> AsyncIterator[Sandbox]:
        ready = self._ready.setdefault(snapshot, deque())
        self._ready.move_to_end(snapshot)
        warm = ready.popleft() if ready else None
        self._begin(snapshot)
        if warm is None:
            async with self._provider.open(snapshot) as sandbox:
                yield sandbox
        else:
            async with warm[1]:
                yield warm[0]

    def _begin(self, snapshot: Snapshot) -> None:
        if len(self._starting) < self._size:
            task = asyncio.create_task(self._fill(snapshot))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _fill(self, snapshot: Snapshot) -> None:
        while len(self._ready[snapshot]) < self._size:
            stack = AsyncExitStack()
            try:
                sandbox = await stack.enter_async_context(self._provider.open(snapshot))
            except InfrastructureError:  # whoever needs one hears of it
                return
            self._ready[snapshot].append((sandbox, stack))
            await self._make_room()

    async def _make_room(self) -> None:
        while sum(map(len, self._ready.values())) > self._size:
            oldest = next(ready for ready in self._ready.values() if ready)
            await oldest.popleft()[1].aclose()

    async def close(self) -> None:
        for task in tuple(self._starting):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for ready in self._ready.values():
            while ready:
                await ready.popleft()[1].aclose()
        await self._provider.close()
