import asyncio
import time

import pytest

from palestra.lab import clock


def test_a_day_passes_at_once_and_sleepers_wake_in_order() -> None:
    woken: list[tuple[float, str]] = []

    async def sleep(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        woken.append((asyncio.get_running_loop().time(), name))

    async def main() -> str:
        async with asyncio.TaskGroup() as group:
            for seconds, name in ((86_400.0, "day"), (0.5, "moment"), (3600.0, "hour"), (0.0, "now")):
                group.create_task(sleep(seconds, name))
        return "done"

    started = time.monotonic()
    assert clock.run(main()) == "done"
    assert time.monotonic() - started < 1.0
    assert woken == [(0.0, "now"), (0.5, "moment"), (3600.0, "hour"), (86_400.0, "day")]


def test_a_time_limit_passes_when_it_should() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.sleep(8.0)
        async with asyncio.timeout(7.0):
            await asyncio.sleep(6.0)
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == 13.0


def test_what_is_left_over_is_cancelled() -> None:
    closed: list[float] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            closed.append(asyncio.get_running_loop().time())

    async def main() -> None:
        left_over.append(asyncio.create_task(forever()))
        await asyncio.sleep(2.0)

    left_over: list[asyncio.Task[None]] = []
    clock.run(main())
    assert left_over[0].cancelled()
    assert closed == [2.0]


def test_an_error_comes_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        raise LookupError("this one")

    with pytest.raises(LookupError, match="this one"):
        clock.run(main())


def test_waiting_for_what_never_comes_is_an_error() -> None:
    closed: list[bool] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError, match="nothing left to wait for"):
        clock.run(main())
    assert closed == [True]
