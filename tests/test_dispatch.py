"""Bounded dispatch: never more than its slots, and nothing left open however the block is left."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from palestra.config import Dispatch
from palestra.dispatch import make
from palestra.dispatch.bounded import Bounded
from palestra.errors import TaskError
from palestra.trajectory import Failure, Stage, Trajectory


@dataclass
class Hall:
    """Where the rollouts take place."""

    inside: set[int] = field(default_factory=set)
    most: int = 0
    started: int = 0
    closed: list[int] = field(default_factory=list)
    stages: list[tuple[int, Stage]] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """Those that are told to wait do so until it is set."""

    def rollouts(self, count: int, **options: object) -> Iterator["Fake"]:
        for number in range(count):
            yield Fake(number, self, **options)  # type: ignore[arg-type]


@dataclass
class Fake:
    number: int
    hall: Hall
    fails: dict[int, Stage] = field(default_factory=dict)
    raises: dict[int, BaseException] = field(default_factory=dict)
    waits: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.trajectory = Trajectory(str(self.number), 0)

    async def advance(self, stage: Stage) -> None:
        hall = self.hall
        if stage == "init":
            hall.started += 1
            hall.inside.add(self.number)
            hall.most = max(hall.most, len(hall.inside))
        hall.stages.append((self.number, stage))
        for _ in range(self.number % 3 + 1):
            await asyncio.sleep(0)
        if self.fails.get(self.number) == stage:
            self.trajectory.failure = Failure(stage, "bug", "told to")
        if stage == "run" and self.number in self.raises:
            raise self.raises[self.number]
        if stage == "run" and self.number in self.waits:
            await hall.hold.wait()

    async def close(self) -> None:
        for _ in range(3):  # whoever cancels has to wait for this
            await asyncio.sleep(0)
        self.hall.inside.discard(self.number)
        self.hall.closed.append(self.number)


async def settle() -> None:
    """Let everybody go as far as they can."""
    for _ in range(200):
        await asyncio.sleep(0)


async def exhaust(rollouts: Iterator["Fake"]) -> list[Trajectory]:
    async with Bounded(3).stream(rollouts) as stream:
        return [trajectory async for trajectory in stream]


def numbers(trajectories: list[Trajectory]) -> list[int]:
    return sorted(int(trajectory.task_id) for trajectory in trajectories)


@pytest.mark.parametrize("slots", [1, 2, 5, 50])
@pytest.mark.parametrize("count", [0, 1, 13])
async def test_every_rollout_comes_out_once_and_the_slots_hold(slots: int, count: int) -> None:
    hall = Hall()
    async with Bounded(slots).stream(hall.rollouts(count)) as stream:
        finished = [trajectory async for trajectory in stream]
    assert numbers(finished) == list(range(count))
    assert sorted(hall.closed) == list(range(count))
    assert hall.most == min(slots, count)
    assert sorted(hall.stages) == sorted((n, s) for n in range(count) for s in ("init", "run", "reward"))


async def test_a_slow_reader_holds_the_slots_back() -> None:
    hall = Hall()
    async with Bounded(3).stream(hall.rollouts(100)) as stream:
        await anext(stream)
        await settle()
        # One was read, three wait to be read, and three slots hold a finished one each.
        assert hall.started <= 1 + 3 + 3
        rest = [trajectory async for trajectory in stream]
    assert len(rest) == 99


async def test_they_come_in_the_order_in_which_they_finish() -> None:
    hall = Hall()
    async with Bounded(2).stream(hall.rollouts(4, waits=frozenset({0}))) as stream:
        first = [await anext(stream) for _ in range(3)]
        hall.hold.set()
        last = await anext(stream)
    assert [t.task_id for t in (*first, last)] == ["1", "2", "3", "0"]


async def test_a_failed_rollout_skips_its_later_stages_and_comes_out() -> None:
    hall = Hall()
    async with Bounded(2).stream(hall.rollouts(4, fails={1: "init", 2: "run"})) as stream:
        finished = [trajectory async for trajectory in stream]
    assert numbers(finished) == [0, 1, 2, 3]
    assert [stage for number, stage in hall.stages if number == 1] == ["init"]
    assert [stage for number, stage in hall.stages if number == 2] == ["init", "run"]
    assert sorted(hall.closed) == [0, 1, 2, 3]


async def test_leaving_early_closes_what_is_under_way_and_starts_nothing_more() -> None:
    hall = Hall()
    async with Bounded(4).stream(hall.rollouts(100, waits=frozenset({1, 2, 3}))) as stream:
        await anext(stream)
    assert hall.inside == set()
    assert len(hall.closed) == hall.started
    assert {1, 2, 3} <= set(hall.closed), "those that waited were cancelled, and closed"
    before = hall.started
    await settle()
    assert hall.started == before


async def test_leaving_without_reading_closes_everything() -> None:
    hall = Hall()
    async with Bounded(4).stream(hall.rollouts(100)):
        await settle()
        assert hall.started > 0
    assert (hall.inside, len(hall.closed)) == (set(), hall.started)


async def test_cancel_returns_when_everything_is_closed() -> None:
    hall = Hall()

    async def consume() -> None:
        async with Bounded(4).stream(hall.rollouts(100, waits=frozenset(range(100)))) as stream:
            async for _ in stream:
                raise AssertionError

    consumer = asyncio.create_task(consume())
    await settle()
    assert hall.inside == {0, 1, 2, 3}
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert (hall.inside, sorted(hall.closed), hall.started) == (set(), [0, 1, 2, 3], 4)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "no worker outlives the block"


async def test_an_error_in_the_block_closes_everything_and_comes_out_as_it_is() -> None:
    hall = Hall()

    async def consume() -> None:
        async with Bounded(3).stream(hall.rollouts(9, waits=frozenset({1, 2}))) as stream:
            async for _ in stream:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await consume()
    assert (hall.inside, len(hall.closed)) == (set(), hall.started)


async def test_an_error_that_the_user_must_mend_ends_the_stream_as_it_is() -> None:
    hall = Hall()
    rollouts = hall.rollouts(50, raises={4: TaskError("mend it")}, waits=frozenset({1, 2}))
    with pytest.raises(TaskError, match="mend it"):
        await exhaust(rollouts)
    assert (hall.inside, len(hall.closed)) == (set(), hall.started)
    assert hall.started < 50


async def test_an_error_of_the_plan_itself_ends_the_stream() -> None:
    hall = Hall()

    def plan() -> Iterator[Fake]:
        yield from hall.rollouts(2, waits=frozenset({0, 1}))
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        await exhaust(plan())
    assert (hall.inside, sorted(hall.closed)) == (set(), [0, 1])


async def test_rollouts_are_made_only_when_a_slot_takes_them() -> None:
    hall = Hall()
    made = []

    def plan() -> Iterator[Fake]:
        for rollout in hall.rollouts(20, waits=frozenset(range(20))):
            made.append(rollout.number)
            yield rollout

    async with Bounded(3).stream(plan()):
        await settle()
        assert made == [0, 1, 2]


def test_the_config_gives_the_slots() -> None:
    dispatcher = make(Dispatch(slots=7))
    assert isinstance(dispatcher, Bounded)
    assert dispatcher._slots == 7
