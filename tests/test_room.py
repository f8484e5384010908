"""A room holds so many at once; those who wait come in by number, and whoever goes away while waiting is forgotten."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from palestra.dispatch.room import Room
from palestra.lab import clock


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Visitors:
    """Tasks that enter, and say so."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.inside: list[int] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def arrive(self, number: int, amount: int = 1) -> None:
        async def enter() -> None:
            await self.room.enter(number, amount)
            self.inside.append(number)

        self.tasks[number] = asyncio.create_task(enter())
        await settle()


async def test_they_enter_by_number_and_not_by_arrival() -> None:
    visitors = Visitors(Room(1))
    for number in (5, 9, 7, 1, 8, 2):
        await visitors.arrive(number)
    assert visitors.inside == [5]
    for _ in range(5):
        visitors.room.leave()
        await settle()
    assert visitors.inside == [5, 1, 2, 7, 8, 9]


async def test_equal_numbers_enter_as_they_came() -> None:
    room, order = Room(1), list[str]()

    async def enter(name: str) -> None:
        await room.enter(3)
        order.append(name)

    tasks = [asyncio.create_task(enter(name)) for name in "abc"]
    for _ in tasks:
        await settle()
        room.leave()
    assert order == ["a", "b", "c"]


async def test_so_many_are_inside_and_no_more() -> None:
    visitors = Visitors(Room(3))
    for number in range(7):
        await visitors.arrive(number)
    assert (visitors.inside, visitors.room.inside) == ([0, 1, 2], 3)
    visitors.room.leave()
    visitors.room.leave()
    await settle()
    assert (visitors.inside, visitors.room.inside) == ([0, 1, 2, 3, 4], 3)


async def test_a_free_place_is_taken_without_waiting() -> None:
    room = Room(2)
    entering = room.enter(0)
    with pytest.raises(StopIteration):
        entering.send(None)
    assert room.inside == 1


async def test_amounts_are_counted() -> None:
    visitors = Visitors(Room(10))
    await visitors.arrive(0, 6)
    await visitors.arrive(1, 6)
    await visitors.arrive(2, 3)
    assert visitors.inside == [0], "the small one does not slip past the large one that is first"
    visitors.room.leave(6)
    await settle()
    assert (visitors.inside, visitors.room.inside) == ([0, 1, 2], 9)


async def test_one_with_a_smaller_number_goes_first_also_when_it_is_larger() -> None:
    visitors = Visitors(Room(4))
    await visitors.arrive(5, 4)
    await visitors.arrive(9, 1)
    await visitors.arrive(1, 4)
    visitors.room.leave(4)
    await settle()
    assert visitors.inside == [5, 1]


async def test_more_than_the_whole_room_counts_as_all_of_it() -> None:
    room = Room(4)
    async with room.place(0, 1000):
        assert room.inside == 4
        waiting = asyncio.create_task(room.enter(1))
        await settle()
        assert not waiting.done()
    await waiting
    assert room.inside == 1


async def test_a_place_is_left_when_the_block_fails() -> None:
    room = Room(3)

    async def fail() -> None:
        async with room.place(0, 2):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await fail()
    assert room.inside == 0


async def test_whoever_is_cancelled_while_waiting_is_forgotten() -> None:
    visitors = Visitors(Room(1))
    for number in (0, 1, 2):
        await visitors.arrive(number)
    visitors.tasks[1].cancel()
    await settle()
    visitors.room.leave()
    await settle()
    assert (visitors.inside, visitors.room.inside) == ([0, 2], 1)


async def test_a_large_one_that_goes_away_lets_the_small_ones_in() -> None:
    visitors = Visitors(Room(4))
    await visitors.arrive(0, 2)
    await visitors.arrive(1, 4)
    await visitors.arrive(2, 1)
    await visitors.arrive(3, 1)
    assert visitors.inside == [0]
    visitors.tasks[1].cancel()
    await settle()
    assert (visitors.inside, visitors.room.inside) == ([0, 2, 3], 4)


async def test_whoever_is_let_in_and_cancelled_in_the_same_breath_leaves_again() -> None:
    visitors = Visitors(Room(1))
    for number in (0, 1, 2):
        await visitors.arrive(number)
    visitors.room.leave()
    visitors.tasks[1].cancel()
    await settle()
    assert (visitors.inside, visitors.room.inside) == ([0, 2], 1)
    assert visitors.tasks[1].cancelled()


async def test_whoever_is_cancelled_and_then_let_in_is_passed_over() -> None:
    visitors = Visitors(Room(1))
    for number in (0, 1, 2):
        await visitors.arrive(number)
    visitors.tasks[1].cancel()
    visitors.room.leave()
    await settle()
    assert (visitors.inside, visitors.room.inside) == ([0, 2], 1)


Visit = tuple[int, int, int, int, int | None]
"""Its number, its amount, when it comes, how long it stays, and how long after it came it is cancelled, if it is."""

visits = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 6), st.integers(0, 6), st.none() | st.integers(0, 9)),
    max_size=12,
)


@settings(max_examples=200, deadline=None, phases=set(Phase) - {Phase.explain})
@given(st.integers(1, 4), visits)
def test_no_place_is_lost_and_nobody_waits_for_ever(size: int, planned: Sequence[Visit]) -> None:
    async def visit(room: Room, number: int, amount: int, comes: int, stays: int) -> None:
        await asyncio.sleep(comes)
        async with room.place(number, amount):
            assert room.inside <= room.size
            await asyncio.sleep(stays)

    async def whole() -> None:
        room = Room(size)
        tasks = []
        for number, amount, comes, stays, cancelled in planned:
            task = asyncio.create_task(visit(room, number, amount, comes, stays))
            if cancelled is not None:
                asyncio.get_running_loop().call_at(comes + cancelled, task.cancel)
            tasks.append(task)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert room.inside == 0

    clock.run(whole())
