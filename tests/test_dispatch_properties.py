"""Random workloads, random faults and random endings, for every dispatcher, with real rollouts on a clock that jumps."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from errands import FOR_EVER, Errand, Fault, Site, attempt, check_left
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from palestra.dispatch import flow
from palestra.dispatch.batch import Batch
from palestra.dispatch.bounded import Bounded
from palestra.dispatch.pipeline import Pipeline
from palestra.dispatch.stream import Stream
from palestra.errors import TaskError
from palestra.lab import clock
from palestra.protocols import Dispatcher
from palestra.rollout import STAGES, Patience, Rollout
from palestra.trajectory import Stage


@dataclass(frozen=True)
class Planned:
    """An errand, and what is to happen to it."""

    errand: Errand
    may_run: float | None = 0.0
    """From when its run may start; None: never."""
    abandoned: float | None = None
    """When it is abandoned, if it is."""


@dataclass(frozen=True)
class Case:
    kind: str
    limits: dict[str, int]
    plan: list[Planned]
    patience: Patience
    handover: int
    """Places for rollouts that wait to be taken."""
    reader: float
    """Seconds between two of them that are taken."""
    gap: float
    """Seconds between two rollouts that the plan gives."""

    def dispatcher(self) -> Dispatcher:
        limits = self.limits
        match self.kind:
            case "batch":
                return Batch()
            case "bounded":
                return Bounded(limits["slots"])
            case "pipeline":
                return Pipeline(limits["init"], limits["run"], limits["reward"], limits["queue"])
            case _:
                return Stream(limits["init"], limits["run"], limits["reward"], limits["runtimes"], limits["kv"] or None)

    def rollouts(self, site: Site) -> list[Rollout]:
        return [self._rollout(f"{number}", planned, site) for number, planned in enumerate(self.plan)]

    def _rollout(self, name: str, planned: "Planned", site: Site) -> Rollout:
        async def may_run() -> bool:
            if planned.may_run is None:
                return False
            await asyncio.sleep(planned.may_run - asyncio.get_running_loop().time())
            return True

        return attempt(name, planned.errand, site, self.patience, may_run, self.limits.get("kv", 0))


# What has to come of it


def outcome(errand: Errand, patience: Patience) -> tuple[tuple[Stage, str] | None, list[tuple[Stage, str]], list[Stage]]:
    """How an errand ends where nobody interferes: its failure, those before, and its stages in order."""
    tries: Counter[Stage] = Counter()
    retried: list[tuple[Stage, str]] = []
    done: list[Stage] = []
    stage: Stage = "init"
    while True:
        tries[stage] += 1
        done.append(stage)
        fault = errand.faults[stage]
        if fault == "none" or (fault == "once" and tries[stage] > 1):
            if stage == "reward":
                return None, retried, done
            stage = "run" if stage == "init" else "reward"
            continue
        kind = {"bug": "bug", "cancel": "bug", "once": "infrastructure", "always": "infrastructure", "hang": "timeout"}[fault]
        again = kind == "infrastructure" or (kind == "timeout" and stage == "init")
        if not again or len(retried) == patience.retries:
            return (stage, kind), retried, done
        retried.append((stage, kind))
        stage = "reward" if stage == "reward" else "init"


def check_ended(case: Case, rollout: Rollout) -> None:
    """It came to exactly one end, and to the right one."""
    planned = case.plan[int(rollout.task.id)]
    trajectory = rollout.trajectory
    assert rollout.next is None
    assert (trajectory.reward is None) != (trajectory.failure is None)
    assert len(trajectory.retried) <= case.patience.retries
    assert all(failure.kind == "infrastructure" or failure.stage == "init" for failure in trajectory.retried)
    assert all(failure.kind in ("infrastructure", "timeout") for failure in trajectory.retried)
    if planned.abandoned is not None and trajectory.failure is not None and trajectory.failure.kind == "abandoned":
        return
    failure, retried, stages = outcome(planned.errand, case.patience)
    assert (trajectory.failure and (trajectory.failure.stage, trajectory.failure.kind)) == failure
    assert [(failure.stage, failure.kind) for failure in trajectory.retried] == retried
    assert [span.what for span in trajectory.spans if span.what in STAGES] == stages


def comes_out(case: Case, planned: Planned) -> bool:
    """Whether nothing keeps it from coming out. One that fails in its init comes out too: no run was ever asked for."""
    return planned.may_run is not None or "run" not in outcome(planned.errand, case.patience)[2]


def check_limits(case: Case, site: Site) -> None:
    limits, most = case.limits, site.most
    match case.kind:
        case "bounded":
            assert most["inflight"] <= limits["slots"]
            assert most["runtimes"] <= limits["slots"]
        case "pipeline":
            assert all(most[stage] <= limits[stage] for stage in STAGES)
            # A runtime whose rollout has failed is closed after its worker has left.
            assert most["runtimes"] <= limits["init"] + limits["run"] + limits["reward"] + 2 * limits["queue"]
        case "stream":
            assert all(most[stage] <= limits[stage] for stage in STAGES)
            assert most["runtimes"] <= limits["runtimes"]
            assert not limits["kv"] or most["kv"] <= limits["kv"]
    bound = case.patience.retries + 1
    assert all(count <= bound for count in site.tries.values())


# Random cases

few = st.integers(1, 3)
seconds = st.integers(0, 6).map(float)

LIMITS: dict[str, st.SearchStrategy[dict[str, int]]] = {
    "batch": st.just({}),
    "bounded": st.fixed_dictionaries({"slots": few}),
    "pipeline": st.fixed_dictionaries({"init": few, "run": few, "reward": few, "queue": few}),
    "stream": st.fixed_dictionaries(
        {"init": few, "run": few, "reward": few, "runtimes": st.integers(1, 6), "kv": st.sampled_from([0, 1, 100, 250])}
    ),
}
KINDS = list(LIMITS)


def plans(faults: Sequence[Fault]) -> st.SearchStrategy[Planned]:
    # Nothing goes wrong in most stages, or few rollouts would come as far as their reward.
    fault = st.sampled_from([*["none"] * len(faults) * 2, *faults])
    errands = st.builds(
        Errand,
        seconds=st.fixed_dictionaries(dict.fromkeys(STAGES, seconds)),
        faults=st.fixed_dictionaries(dict.fromkeys(STAGES, fault)),
        closing=st.sampled_from([0.0, 0.0, 1.0, 4.0]),
        tokens=st.integers(1, 300),
    )
    return st.builds(
        Planned,
        errands,
        may_run=st.sampled_from([0.0, 0.0, 0.0, 7.0, 13.0, None]),
        abandoned=st.none() | st.none() | seconds | st.integers(0, 40).map(float),
    )


def cases(kind: str, faults: Sequence[Fault] = ("bug", "once", "once", "always", "hang", "cancel")) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        kind=st.just(kind),
        limits=LIMITS[kind],
        plan=st.lists(plans(faults), max_size=12),
        patience=st.builds(
            Patience,
            init_seconds=st.just(10.0),
            reward_seconds=st.just(20.0),
            retries=st.integers(0, 3),
            backoff=st.sampled_from([0.0, 1.0, 2.5]),
        ),
        handover=st.sampled_from([1, 2, 64]),
        reader=st.sampled_from([0.0, 0.0, 3.0]),
        gap=st.sampled_from([0.0, 0.0, 2.0]),
    )


# The three endings


@contextmanager
def playing(case: Case) -> Iterator[tuple[Dispatcher, Site, AsyncIterator[Rollout]]]:
    """The plan of a case, and whoever abandons some of it, beside."""
    site = Site()
    rollouts = case.rollouts(site)
    handles = []

    async def plan() -> AsyncIterator[Rollout]:
        for rollout in rollouts:
            yield rollout
            await asyncio.sleep(case.gap)

    for rollout, planned in zip(rollouts, case.plan, strict=True):
        if planned.abandoned is not None:
            handles.append(asyncio.get_running_loop().call_at(planned.abandoned, rollout.abandon))
    with patch.object(flow, "HANDOVER", case.handover):
        yield case.dispatcher(), site, plan()
    for handle in handles:
        handle.cancel()


async def read(case: Case, stream: AsyncIterator[Rollout], most: int | None = None) -> list[Rollout]:
    handed: list[Rollout] = []
    while most is None or len(handed) < most:
        try:
            handed.append(await anext(stream))
        except StopAsyncIteration:
            break
        await asyncio.sleep(case.reader)
    return handed


def check_handed(case: Case, handed: Sequence[Rollout]) -> None:
    assert len({id(rollout) for rollout in handed}) == len(handed), "no rollout comes out twice"
    for rollout in handed:
        check_ended(case, rollout)


async def to_the_end(case: Case) -> None:
    with playing(case) as (dispatcher, site, plan):
        async with dispatcher.stream(plan) as stream:
            handed = await read(case, stream)
        check_left(dispatcher, site)
    check_handed(case, handed)
    check_limits(case, site)
    names = {int(rollout.task.id) for rollout in handed}
    for number, planned in enumerate(case.plan):
        if planned.abandoned is None:
            assert (number in names) == comes_out(case, planned), f"rollout {number}"
        elif comes_out(case, planned):
            assert number in names, f"rollout {number} was abandoned, and did not come out"


async def leave_early(case: Case, after: int) -> None:
    with playing(case) as (dispatcher, site, plan):
        async with dispatcher.stream(plan) as stream:
            handed = await read(case, stream, after)
        check_left(dispatcher, site)
    check_handed(case, handed)
    check_limits(case, site)


async def cancelled(case: Case, at: float, again: float | None) -> None:
    with playing(case) as (dispatcher, site, plan):

        async def consume() -> None:
            async with dispatcher.stream(plan) as stream:
                await read(case, stream)
                await asyncio.sleep(FOR_EVER)

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(at)
        consumer.cancel()
        if again is not None:  # somebody is impatient
            await asyncio.wait([consumer], timeout=again)
            consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        check_left(dispatcher, site)
    check_limits(case, site)


some = settings(max_examples=80, deadline=None, phases=set(Phase) - {Phase.explain})
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_every_rollout_comes_to_its_end_once(kind: str) -> None:
    @some
    @given(cases(kind))
    def play(case: Case) -> None:
        clock.run(to_the_end(case))

    play()


@each_kind
def test_who_leaves_early_leaves_nothing_behind(kind: str) -> None:
    @some
    @given(cases(kind), st.integers(0, 8))
    def play(case: Case, after: int) -> None:
        clock.run(leave_early(case, after))

    play()


@each_kind
def test_who_is_cancelled_leaves_nothing_behind(kind: str) -> None:
    @some
    @given(cases(kind), st.integers(0, 60).map(float), st.none() | seconds)
    def play(case: Case, at: float, again: float | None) -> None:
        clock.run(cancelled(case, at, again))

    play()


@each_kind
def test_what_the_user_has_to_mend_ends_it_and_leaves_nothing_behind(kind: str) -> None:
    async def mend(case: Case) -> None:
        with playing(case) as (dispatcher, site, plan):
            raised = False
            try:
                async with dispatcher.stream(plan) as stream:
                    await read(case, stream)
            except TaskError as error:
                raised = str(error) == "mend it"
            check_left(dispatcher, site)
        reached = any(
            planned.errand.faults[stage] == "mend" and site.tries[str(number), stage]
            for number, planned in enumerate(case.plan)
            for stage in STAGES
        )
        unclear = any(planned.abandoned is not None for planned in case.plan)
        assert raised == reached or unclear

    @some
    @given(cases(kind, ["mend", "once"]))
    def play(case: Case) -> None:
        clock.run(mend(case))

    play()


# What random cases found once


def planned(run: float = 0.0, reward: float = 0.0, closing: float = 0.0, fault: Fault = "none") -> Planned:
    """The fault is that of the reward."""
    return Planned(Errand({"init": 0.0, "run": run, "reward": reward}, {"init": "none", "run": "none", "reward": fault}, closing))


def test_a_reward_that_is_tried_again_at_once_does_not_wait_for_the_queue_behind_it() -> None:
    """One worker, one place in the queue, and no back-off: who has the worker must not wait for the place."""
    plan = [planned(reward=5.0, fault="once"), planned(reward=5.0), planned(reward=5.0)]
    limits = {"init": 1, "run": 1, "reward": 1, "queue": 1}
    clock.run(to_the_end(Case("pipeline", limits, plan, Patience(backoff=0.0), 64, 0.0, 0.0)))


@each_kind
def test_who_leaves_while_an_abandoned_rollout_closes_need_not_take_it(kind: str) -> None:
    """The places where rollouts wait to be taken are full, and nobody will ever take them."""
    limits = {"slots": 9, "init": 9, "run": 9, "reward": 9, "queue": 9, "runtimes": 9, "kv": 0}
    closing = planned(run=50.0, closing=30.0)
    plan = [planned() for _ in range(5)] + [Planned(closing.errand, abandoned=2.0)]

    async def leave() -> None:
        case = Case(kind, limits, plan, Patience(), 1, 10.0, 0.0)
        await leave_early(case, 1)

    clock.run(leave())


def test_the_checks_see_what_they_are_for() -> None:
    """A dispatcher that forgets its limits, one that hands over twice, and one that leaves a task behind are all found."""
    planned = Planned(Errand(dict.fromkeys(STAGES, 1.0), dict.fromkeys(STAGES, "none"), closing=1.0))
    case = Case("bounded", {"slots": 2}, [planned] * 5, Patience(), 64, 0.0, 0.0)
    clock.run(to_the_end(case))

    class Careless(Case):
        def dispatcher(self) -> Dispatcher:
            return Batch()

    with pytest.raises(AssertionError):
        clock.run(to_the_end(Careless(**vars(case))))

    class Twice(Bounded):
        @asynccontextmanager
        async def stream(self, rollouts):  # type: ignore[no-untyped-def]
            async with super().stream(rollouts) as stream:

                async def doubled() -> AsyncIterator[Rollout]:
                    async for rollout in stream:
                        yield rollout
                        yield rollout

                yield doubled()

    class Doubled(Case):
        def dispatcher(self) -> Dispatcher:
            return Twice(2)

    with pytest.raises(AssertionError, match="no rollout comes out twice"):
        clock.run(to_the_end(Doubled(**vars(case))))

    class Leaving(Bounded):
        @asynccontextmanager
        async def stream(self, rollouts):  # type: ignore[no-untyped-def]
            async with super().stream(rollouts) as stream:
                yield stream
            self.left = asyncio.create_task(asyncio.sleep(5))

    class Behind(Case):
        def dispatcher(self) -> Dispatcher:
            return Leaving(2)

    with pytest.raises(AssertionError), contextlib.suppress(asyncio.CancelledError):
        clock.run(to_the_end(Behind(**vars(case))))
