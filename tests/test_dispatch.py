"""The four dispatchers: every rollout comes out once, limits hold, and nothing is left open however the block is left."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from palestra import dispatch
from palestra.config import AnyDispatch, BatchDispatch, BoundedDispatch, PipelineDispatch, StreamDispatch
from palestra.dispatch.batch import Batch
from palestra.dispatch.bounded import Bounded
from palestra.dispatch.flow import HANDOVER
from palestra.dispatch.pipeline import Pipeline
from palestra.dispatch.stream import Stream
from palestra.errors import TaskError
from palestra.protocols import Capacity, Dispatcher
from palestra.trajectory import Failure, Stage, Trajectory

NEXT: dict[Stage, Stage | None] = {"init": "run", "run": "reward", "reward": None}


@dataclass
class Hall:
    """Where the rollouts take place."""

    inside: set[int] = field(default_factory=set)
    most: int = 0
    started: int = 0
    closed: set[int] = field(default_factory=set)
    stages: list[tuple[int, Stage]] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """Those that are told to wait do so until it is set."""

    async def rollouts(self, count: int, **options: object) -> AsyncIterator["Fake"]:
        for number in range(count):
            yield Fake(number, self, **options)  # type: ignore[arg-type]


@dataclass(eq=False)
class Fake:
    number: int
    hall: Hall
    fails: dict[int, Stage] = field(default_factory=dict)
    raises: dict[int, BaseException] = field(default_factory=dict)
    waits: frozenset[int] = frozenset()
    never_run: frozenset[int] = frozenset()
    next: Stage | None = "init"
    rest: float = 0.0
    kin: int = 0
    group: int = 0
    expected_tokens: int = 0

    def __post_init__(self) -> None:
        self.trajectory = Trajectory(str(self.number), 0)

    async def may_run(self) -> bool:
        await asyncio.sleep(0)
        return self.number not in self.never_run

    def abandon(self) -> None:
        raise AssertionError("no dispatcher abandons")

    async def advance(self) -> None:
        hall, stage = self.hall, self.next
        assert stage is not None, "it had ended"
        if stage == "init":
            hall.started += 1
            hall.inside.add(self.number)
            hall.most = max(hall.most, len(hall.inside))
        hall.stages.append((self.number, stage))
        for _ in range(self.number % 3 + 1):
            await asyncio.sleep(0)
        self.next = NEXT[stage]
        if self.fails.get(self.number) == stage:
            self.trajectory.failure = Failure(stage, "bug", "told to")
            self.next = None
        if stage == "run" and self.number in self.raises:
            raise self.raises[self.number]
        if stage == "run" and self.number in self.waits:
            await hall.hold.wait()

    async def close(self) -> None:
        closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:  # whoever cancels has to wait for this
            await closing
            raise

    async def _close(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.hall.inside.discard(self.number)
        self.hall.closed.add(self.number)


MAKERS: dict[str, Callable[[], Dispatcher]] = {
    "batch": Batch,
    "bounded": lambda: Bounded(3),
    "pipeline": lambda: Pipeline(1, 2, 1, 1),
    "stream": lambda: Stream(1, 3, 1, 4, 100),
}
anyhow = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
"""For whatever holds of all dispatchers."""

limited = pytest.mark.parametrize("make", [MAKERS[kind] for kind in MAKERS if kind != "batch"], ids=list(MAKERS)[1:])

INSIDE = {Bounded: 3, Pipeline: 1 + 2 + 1 + 2 * 1, Stream: 2 * 4 + 1}
"""How many rollouts the limited ones let in."""


async def settle() -> None:
    """Let everybody go as far as they can."""
    for _ in range(300):
        await asyncio.sleep(0)


async def exhaust(dispatcher: Dispatcher, rollouts: AsyncIterator["Fake"]) -> list[Fake]:
    async with dispatcher.stream(rollouts) as stream:
        return [rollout async for rollout in stream]


def numbers(rollouts: list[Fake]) -> list[int]:
    return sorted(rollout.number for rollout in rollouts)


@pytest.mark.parametrize("slots", [1, 2, 5, 50])
@pytest.mark.parametrize("count", [0, 1, 13])
async def test_every_rollout_comes_out_once_and_the_slots_hold(slots: int, count: int) -> None:
    hall = Hall()
    finished = await exhaust(Bounded(slots), hall.rollouts(count))
    assert numbers(finished) == list(range(count))
    assert sorted(hall.closed) == list(range(count))
    assert hall.most == min(slots, count)
    assert sorted(hall.stages) == sorted((n, s) for n in range(count) for s in ("init", "run", "reward"))


@anyhow
@pytest.mark.parametrize("count", [0, 1, 30])
async def test_every_rollout_goes_through_its_stages_and_comes_out_once(make: Callable[[], Dispatcher], count: int) -> None:
    hall = Hall()
    finished = await exhaust(make(), hall.rollouts(count))
    assert numbers(finished) == list(range(count))
    assert hall.closed == set(range(count))
    for number in range(count):
        assert [stage for n, stage in hall.stages if n == number] == ["init", "run", "reward"]


@limited
async def test_a_slow_reader_holds_the_dispatcher_back(make: Callable[[], Dispatcher]) -> None:
    hall, dispatcher, count = Hall(), make(), 200
    async with dispatcher.stream(hall.rollouts(count)) as stream:
        await anext(stream)
        for _ in range(5):
            await settle()
        # One was read, some wait to be read, and of those inside all may have finished.
        most = 1 + HANDOVER + INSIDE[type(dispatcher)]
        assert HANDOVER < hall.started <= most < count
        rest = [rollout async for rollout in stream]
    assert len(rest) == count - 1


@anyhow
async def test_they_come_in_the_order_in_which_they_finish(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()
    async with make().stream(hall.rollouts(4, waits=frozenset({0}))) as stream:
        first = [await anext(stream) for _ in range(3)]
        hall.hold.set()
        last = await anext(stream)
    assert numbers(first) == [1, 2, 3]
    assert last.number == 0


async def test_a_bounded_slot_is_held_through_all_stages() -> None:
    hall = Hall()
    async with Bounded(2).stream(hall.rollouts(4, waits=frozenset({0}))) as stream:
        first = [await anext(stream) for _ in range(3)]
        hall.hold.set()
        last = await anext(stream)
    assert [rollout.number for rollout in (*first, last)] == [1, 2, 3, 0], "one slot did all the others, one after the other"


@anyhow
async def test_a_failed_rollout_skips_its_later_stages_and_comes_out(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()
    finished = await exhaust(make(), hall.rollouts(4, fails={1: "init", 2: "run"}))
    assert numbers(finished) == [0, 1, 2, 3]
    assert [stage for number, stage in hall.stages if number == 1] == ["init"]
    assert [stage for number, stage in hall.stages if number == 2] == ["init", "run"]
    assert hall.closed == {0, 1, 2, 3}


@anyhow
async def test_a_rollout_that_may_never_run_is_closed_and_does_not_come_out(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()
    finished = await exhaust(make(), hall.rollouts(20, never_run=frozenset({0, 3, 4, 5, 6, 19})))
    assert numbers(finished) == [1, 2, *range(7, 19)]
    assert hall.closed == set(range(20))
    assert [stage for number, stage in hall.stages if number == 4] == ["init"]


@anyhow
async def test_leaving_early_closes_what_is_under_way_and_starts_nothing_more(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()
    async with make().stream(hall.rollouts(100, waits=frozenset({1, 2, 3}))) as stream:
        await anext(stream)
        await settle()
    assert hall.inside == set()
    assert len(hall.closed) >= hall.started, "what never began may be closed too"
    assert {1, 2, 3} <= set(hall.closed), "those that waited were cancelled, and closed"
    before = hall.started
    await settle()
    assert hall.started == before


@anyhow
async def test_leaving_without_reading_closes_everything(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()
    async with make().stream(hall.rollouts(100)):
        await settle()
        assert hall.started > 0
    assert hall.inside == set()
    assert len(hall.closed) >= hall.started


@anyhow
async def test_leaving_at_once_starts_nothing(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()
    async with make().stream(hall.rollouts(100)):
        pass
    await settle()
    assert (hall.started, hall.inside) == (0, set())


@anyhow
async def test_cancel_returns_when_everything_is_closed(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()

    async def consume() -> None:
        async with make().stream(hall.rollouts(100, waits=frozenset(range(100)))) as stream:
            async for _ in stream:
                raise AssertionError

    consumer = asyncio.create_task(consume())
    await settle()
    assert hall.inside >= {0, 1, 2}
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert hall.inside == set()
    assert len(hall.closed) >= hall.started > 0
    assert asyncio.all_tasks() == {asyncio.current_task()}, "no worker outlives the block"


@anyhow
async def test_an_error_in_the_block_closes_everything_and_comes_out_as_it_is(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()

    async def consume() -> None:
        async with make().stream(hall.rollouts(9, waits=frozenset({1, 2}))) as stream:
            async for _ in stream:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await consume()
    assert hall.inside == set()
    assert len(hall.closed) >= hall.started


@anyhow
async def test_an_error_that_the_user_must_mend_ends_the_stream_as_it_is(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()
    rollouts = hall.rollouts(50, raises={4: TaskError("mend it")}, waits=frozenset({1}))
    with pytest.raises(TaskError, match="mend it"):
        await exhaust(make(), rollouts)
    assert hall.inside == set()
    assert len(hall.closed) >= hall.started


@limited
async def test_after_an_error_that_the_user_must_mend_nothing_new_starts(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()
    with pytest.raises(TaskError, match="mend it"):
        await exhaust(make(), hall.rollouts(50, raises={4: TaskError("mend it")}))
    assert hall.started < 50


@anyhow
async def test_an_error_of_the_plan_itself_ends_the_stream(make: Callable[[], Dispatcher]) -> None:
    hall = Hall()

    async def plan() -> AsyncIterator[Fake]:
        async for rollout in hall.rollouts(2, waits=frozenset({0, 1})):
            yield rollout
        await settle()
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        await exhaust(make(), plan())
    assert (hall.inside, sorted(hall.closed)) == (set(), [0, 1])


@limited
async def test_rollouts_are_made_only_when_there_is_a_place_for_them(make: Callable[[], Dispatcher]) -> None:
    hall, dispatcher = Hall(), make()
    made = []

    async def plan() -> AsyncIterator[Fake]:
        async for rollout in hall.rollouts(20, waits=frozenset(range(20))):
            made.append(rollout.number)
            yield rollout

    async with dispatcher.stream(plan()):
        await settle()
        assert made == list(range(INSIDE[type(dispatcher)]))


@anyhow
async def test_a_plan_may_keep_its_next_rollout_for_later(make: Callable[[], Dispatcher]) -> None:
    """What has ended is handed over while the plan waits, for instance for the trainer."""
    hall, more = Hall(), asyncio.Event()

    async def plan() -> AsyncIterator[Fake]:
        async for rollout in hall.rollouts(5):
            if rollout.number == 3:
                await more.wait()
            yield rollout

    async with make().stream(plan()) as stream:
        first = [await anext(stream) for _ in range(3)]
        await settle()
        assert hall.started == 3
        more.set()
        rest = [rollout async for rollout in stream]
    assert (numbers(first), numbers(rest)) == ([0, 1, 2], [3, 4])


@anyhow
async def test_a_dispatcher_can_be_used_again_after_it_was_left_early(make: Callable[[], Dispatcher]) -> None:
    dispatcher = make()
    for _ in range(5):
        hall = Hall()
        async with dispatcher.stream(hall.rollouts(100, waits=frozenset(range(0, 100, 2)))) as stream:
            await anext(stream)
    hall = Hall()
    assert numbers(await asyncio.wait_for(exhaust(dispatcher, hall.rollouts(10)), 5)) == list(range(10))


@anyhow
async def test_what_was_cancelled_before_it_began_keeps_no_place(make: Callable[[], Dispatcher]) -> None:
    """An error ends the others also in the very moment in which the next one comes in."""
    dispatcher = make()

    async def plan(late: int) -> AsyncIterator[Fake]:
        async for rollout in Hall().rollouts(2, raises={0: TaskError("mend it")}):
            for _ in range(late * rollout.number):
                await asyncio.sleep(0)
            yield rollout

    for late in [*range(12)] * 10:
        with pytest.raises(TaskError, match="mend it"):
            await asyncio.wait_for(exhaust(dispatcher, plan(late)), 5)
    hall = Hall()
    assert numbers(await asyncio.wait_for(exhaust(dispatcher, hall.rollouts(10)), 5)) == list(range(10))


def test_the_config_says_which_dispatcher_and_its_limits() -> None:
    capacity = Capacity(kv_tokens=1000)
    cases: Iterator[tuple[AnyDispatch, type[Dispatcher], dict[str, int | None]]] = iter(
        [
            (BatchDispatch(kind="batch"), Batch, {}),
            (BoundedDispatch(kind="bounded", slots=7), Bounded, {"_slots": 7}),
            (PipelineDispatch(kind="pipeline", init=1, run=2, reward=3, queue=4), Pipeline, {"_inside": 1 + 2 + 3 + 2 * 4}),
            (
                StreamDispatch(kind="stream", init=1, run=2, reward=3, runtimes=9, kv_share=0.5),
                Stream,
                {"_init": 1, "_run": 2, "_rewards": 3, "_runtimes": 9, "_kv": 500},
            ),
            (StreamDispatch(kind="stream", init=4, run=6), Stream, {"_runtimes": 10, "_kv": 4000}),
        ]
    )
    for section, kind, sizes in cases:
        dispatcher = dispatch.make(section, capacity)
        assert type(dispatcher) is kind
        assert {name: getattr(dispatcher, name).size for name in sizes} == sizes
        assert dispatcher.prewarms == (kind is Stream)


def test_a_sampler_that_does_not_know_its_capacity_sets_no_kv_limit() -> None:
    dispatcher = dispatch.make(StreamDispatch(kind="stream"), None)
    assert isinstance(dispatcher, Stream)
    assert dispatcher._kv is None
