"""What dispatching itself costs: rollouts that do nothing, against a bare task group with an exit stack and a semaphore."""

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from rich.console import Console

from palestra.dispatch.stream import Stream
from palestra.trajectory import Stage

ROLLOUTS = 100_000
AT_ONCE = 128


class _Nothing:
    """A rollout with a runtime in which nothing happens."""

    __slots__ = ("_runtime", "group", "next")

    rest = 0.0
    kin = 0
    expected_tokens = 1

    def __init__(self, group: int) -> None:
        self.group = group
        self.next: Stage | None = "init"
        self._runtime: AsyncExitStack | None = None

    async def may_run(self) -> bool:
        return True

    async def advance(self) -> None:
        if self.next == "init":
            self._runtime = AsyncExitStack()
            self.next = "run"
        elif self.next == "run":
            await self.close()
            self.next = "reward"
        else:
            self.next = None

    def abandon(self) -> None: ...

    async def close(self) -> None:
        if self._runtime is not None:
            await self._runtime.aclose()
            self._runtime = None


async def _source() -> AsyncIterator[_Nothing]:
    for number in range(ROLLOUTS):
        yield _Nothing(group=number // 8)


async def _dispatched() -> None:
    dispatcher = Stream(AT_ONCE, AT_ONCE, AT_ONCE, AT_ONCE, kv_tokens=AT_ONCE)
    async with dispatcher.stream(_source()) as stream:
        count = 0
        async for _ in stream:
            count += 1
    assert count == ROLLOUTS


async def _bare() -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def nothing() -> None:
        pass

    async def one() -> None:
        async with AsyncExitStack(), slots:
            for _ in range(3):
                await nothing()

    async with asyncio.TaskGroup() as group:
        for _ in range(ROLLOUTS):
            group.create_task(one())


def bench_overhead(console: Console) -> dict[str, Any]:
    ours, theirs = (_measure(work) for work in (_dispatched, _bare))
    figures = {
        "rollouts": ROLLOUTS,
        "stream": ours,
        "bare": theirs,
        "time_ratio": ours["cpu_seconds"] / theirs["cpu_seconds"],
        "memory_ratio": ours["peak_bytes"] / theirs["peak_bytes"],
    }
    for name, each in (("stream", ours), ("bare task group", theirs)):
        each_one = each["cpu_seconds"] / ROLLOUTS * 1e6
        console.print(f"{name}: {each_one:.1f} µs a rollout, peak {each['peak_bytes'] / 1e6:.1f} MB")
    console.print(f"time {figures['time_ratio']:.2f}×, memory {figures['memory_ratio']:.3f}× of the bare task group")
    return figures


def _measure(work: Callable[[], Awaitable[None]]) -> dict[str, float]:
    async def timed() -> float:
        started = time.process_time()
        await work()
        return time.process_time() - started

    seconds = min(_run(timed()) for _ in range(3))
    tracemalloc.start()
    _run(timed())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"cpu_seconds": seconds, "peak_bytes": peak}


def _run(coroutine: Any) -> float:
    gc.collect()
    seconds: float = asyncio.run(coroutine)
    return seconds
