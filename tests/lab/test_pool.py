import asyncio
from collections.abc import Sequence

import pytest

from palestra.lab import clock
from palestra.lab.pool import Pool


def finish_times(capacity: float, jobs: Sequence[tuple[float, float]], cancel: tuple[int, float] | None = None) -> list[float]:
    """When each job (start, work) is done (-1: cancelled)."""

    async def job(pool: Pool, start: float, work: float) -> float:
        await asyncio.sleep(start)
        try:
            await pool.work(work)
        except asyncio.CancelledError:
            return -1.0
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        pool = Pool(capacity)
        tasks = [asyncio.create_task(job(pool, *each)) for each in jobs]
        if cancel is not None:
            asyncio.get_running_loop().call_at(cancel[1], tasks[cancel[0]].cancel)
        return [await task for task in tasks]

    return clock.run(main())


def test_below_capacity_nobody_waits() -> None:
    assert finish_times(3, [(0, 5), (0, 7), (1, 2)]) == pytest.approx([5, 7, 3])


def test_two_share_one_processor() -> None:
    # Both at half speed until the first has its 2 s at 4; the second has 3 s left then, and is alone.
    assert finish_times(1, [(0, 2), (0, 5)]) == pytest.approx([4, 7])


def test_who_comes_later_slows_who_is_there() -> None:
    # Alone until 3 with 1 s left; that takes 2 s with the other; the other has then 9 s left.
    assert finish_times(1, [(0, 4), (3, 10)]) == pytest.approx([5, 14])


def test_above_capacity_all_are_slowed_alike() -> None:
    assert finish_times(2, [(0, 6)] * 3) == pytest.approx([9, 9, 9])


def test_who_is_cancelled_leaves() -> None:
    # Half speed until 4, when the first leaves; the second has 3 s left.
    assert finish_times(1, [(0, 50), (0, 5)], cancel=(0, 4.0)) == pytest.approx([-1, 7])


def test_being_cancelled_in_the_moment_of_finishing_is_counted_once() -> None:
    assert finish_times(1, [(0, 2), (0, 2), (10, 3)], cancel=(0, 4.0))[1:] == pytest.approx([4, 13])
