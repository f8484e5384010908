"""The staleness rule, by counting and by playing: random groups, steps and faults, all dispatchers, on a clock that jumps."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

import pytest
from errands import Errand, Fault, Site, attempt, check_left
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from palestra.dispatch.batch import Batch
from palestra.dispatch.bounded import Bounded
from palestra.dispatch.pipeline import Pipeline
from palestra.dispatch.stream import Stream
from palestra.gather import Gathered, Make, MayRun, gather, learn
from palestra.lab import clock
from palestra.pace import Pace
from palestra.protocols import Dispatcher
from palestra.rollout import STAGES, Patience, Rollout

MAKERS: dict[str, Callable[[int], Dispatcher]] = {
    "batch": lambda _: Batch(),
    "bounded": Bounded,
    "pipeline": lambda size: Pipeline(size, size, 1, size),
    "stream": lambda size: Stream(1, size, 1, 2 * size, 3 * size),
}
each_kind = pytest.mark.parametrize("kind", MAKERS)


@dataclass(frozen=True)
class Campaign:
    """A run: so many steps of so many groups of so many rollouts."""

    kind: str
    size: int
    """Of the dispatcher."""
    groups: int
    steps: int
    samples: int
    staleness: int
    extra: int
    seconds: list[tuple[float, float, float]]
    """Of init, run and reward; rollouts take from here in turn. So it is with the other lists."""
    faults: list[Fault]
    """Of init."""
    useless: list[bool]
    """Groups that the learner wants replaced."""
    refills: int
    """How many of them it may ask for."""
    update: float
    publish: float
    take: float

    @property
    def ahead(self) -> int:
        """How many groups may be begun and not taken."""
        return (1 + self.staleness) * self.groups + self.extra


@dataclass
class Played:
    """A campaign under way: what it did, and the learner of it."""

    campaign: Campaign
    planned: int | None = None
    """Groups of the plan; as many as are asked for when not given."""
    version: int = 0
    site: Site = field(default_factory=Site)
    first_version: dict[int, int] = field(default_factory=dict)
    """The policy version at each group's first run."""
    taken: list[list[int]] = field(default_factory=lambda: [[]])
    """By step, the groups that it trains on."""
    replaced: list[int] = field(default_factory=list)
    abandoned: int = 0
    """Groups that were abandoned when a step was full."""
    dropped: list[int] = field(default_factory=list)
    publishing: bool = False
    rollouts: list[Rollout] = field(default_factory=list)

    def __post_init__(self) -> None:
        c = self.campaign
        self.pace = Pace(c.groups, c.steps, staleness=c.staleness, extra=c.extra, version=self.version)
        self.dispatcher = MAKERS[c.kind](c.size)

    async def plan(self) -> AsyncGenerator[Make[Rollout], None]:
        for _ in count() if self.planned is None else range(self.planned):
            yield self.make

    def make(self, number: int, may_run: MayRun) -> Sequence[Rollout]:
        c = self.campaign
        made = []
        for index in range(c.samples):
            turn = number * c.samples + index
            seconds = dict(zip(STAGES, c.seconds[turn % len(c.seconds)], strict=True))
            faults = dict.fromkeys(STAGES, "none") | {"init": c.faults[turn % len(c.faults)]}
            errand = Errand(seconds, faults, closing=turn % 2)  # type: ignore[arg-type]
            made.append(attempt(f"{number}/{index}", errand, self.site, Patience(), may_run, on_run=self._on_run(number)))
        self.rollouts += made
        return made

    def _on_run(self, number: int) -> Callable[[], None]:
        def begun() -> None:
            self.first_version.setdefault(number, self.pace.version)
            untaken = [n for n in self.first_version if n not in self.settled and not self.pace.has_abandoned(n)]
            assert len(untaken) <= self.campaign.ahead

        return begun

    @property
    def settled(self) -> set[int]:
        return {number for step in self.taken for number in step} | set(self.replaced)

    # The learner

    async def take(self, group: Gathered[Rollout]) -> bool:
        c, number = self.campaign, group.number
        assert number not in self.settled | set(self.dropped), "no group is taken twice"
        assert len(group.rollouts) == c.samples
        assert all(rollout.next is None for rollout in group.rollouts)
        assert 0 <= self.pace.staleness_of(number) <= c.staleness
        trained = self.version + len(self.taken) - 1
        # One without a run was begun by nobody, and is as old as one likes.
        assert trained - self.first_version.get(number, trained) <= c.staleness
        await asyncio.sleep(c.take)
        if c.useless[number % len(c.useless)] and len(self.replaced) < c.refills:
            self.replaced.append(number)
            return False
        self.taken[-1].append(number)
        return True

    def abandon(self, rollouts: Sequence[Rollout]) -> None:
        assert len(self.taken[-1]) == self.campaign.groups, "the step is full"
        assert len(rollouts) == self.campaign.samples
        assert not self.publishing
        self.abandoned += 1

    def drop(self, group: Gathered[Rollout]) -> None:
        assert self.pace.has_abandoned(group.number)
        assert group.number not in self.settled | set(self.dropped)
        self.dropped.append(group.number)

    async def update(self) -> None:
        assert not self.publishing
        assert self.abandoned == len(self.pace._abandoned), "those that nobody waits for are told before it, and counted"
        await asyncio.sleep(self.campaign.update)
        self.taken.append([])

    async def publish(self) -> None:
        assert not self.publishing, "one after the other"
        self.publishing = True
        await asyncio.sleep(self.campaign.publish)
        self.publishing = False

    async def play(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        others = asyncio.all_tasks()
        try:
            async with aclosing(self.plan()) as plan, gather(plan, self.dispatcher, self.pace) as groups:
                done = await learn(groups, self.pace, self, self.campaign.steps, stopping)
                await self.afterwards()
                return done
        finally:
            check_left(self.dispatcher, self.site, others)

    async def afterwards(self) -> None:
        """Whatever goes on before the block is left."""

    def check_steps(self) -> None:
        """Of every step that was made."""
        assert self.taken.pop() == [] or len(self.taken) < self.campaign.steps, "what no step was made of"
        for step in self.taken:
            assert len(step) == self.campaign.groups
        everything = [number for step in self.taken for number in step] + self.replaced + self.dropped
        assert len(everything) == len(set(everything))
        if self.campaign.extra == 0:
            assert self.pace._abandoned == set()
            assert self.dropped == []
            assert all(r.trajectory.failure is None or r.trajectory.failure.kind != "abandoned" for r in self.rollouts)
        if not (self.campaign.staleness or self.campaign.extra or self.replaced):
            for number, step in enumerate(self.taken):
                first = number * self.campaign.groups
                assert sorted(step) == list(range(first, first + self.campaign.groups))


seconds = st.integers(0, 7).map(float)


def campaigns(kind: str, extra: st.SearchStrategy[int] = st.integers(0, 3)) -> st.SearchStrategy[Campaign]:  # noqa: B008
    return st.builds(
        Campaign,
        kind=st.just(kind),
        size=st.integers(1, 4),
        groups=st.integers(1, 3),
        steps=st.integers(1, 5),
        samples=st.integers(1, 3),
        staleness=st.integers(0, 3) | st.just(10**9),
        extra=st.just(0) | extra,
        seconds=st.lists(st.tuples(seconds, seconds | st.just(60.0), seconds), min_size=1, max_size=8),
        faults=st.lists(st.sampled_from(["none", "none", "none", "bug", "once", "always"]), min_size=1, max_size=5),
        useless=st.lists(st.booleans(), min_size=1, max_size=5),
        refills=st.sampled_from([0, 0, 3, 8]),
        update=seconds | st.just(20.0),
        publish=seconds | st.just(20.0),
        take=st.sampled_from([0.0, 0.0, 1.0]),
    )


some = settings(max_examples=60, deadline=None, phases=set(Phase) - {Phase.explain})


@each_kind
def test_every_step_takes_its_groups_and_none_is_too_old(kind: str) -> None:
    async def whole(campaign: Campaign) -> None:
        played = Played(campaign)
        assert await played.play(), "all steps are made"
        assert len(played.taken) == campaign.steps + 1
        played.check_steps()

    @some
    @given(campaigns(kind))
    def play(campaign: Campaign) -> None:
        clock.run(whole(campaign))

    play()


@each_kind
def test_a_stop_ends_everything(kind: str) -> None:
    async def whole(campaign: Campaign, at: float) -> None:
        played = Played(campaign)
        pace, begun = played.pace, set[int]()

        def stop() -> None:
            begun.update(pace._begun, played.settled, pace._abandoned, played.first_version)
            pace.stop()

        asyncio.get_running_loop().call_at(at, stop)
        done = await played.play()
        assert done == (len(played.taken) > campaign.steps)
        if not done:
            assert set(played.first_version) <= begun, "nothing new begins"
        played.check_steps()

    @some
    @given(campaigns(kind), st.integers(0, 120).map(float))
    def play(campaign: Campaign, at: float) -> None:
        clock.run(whole(campaign, at))

    play()


@each_kind
def test_a_stop_that_is_asked_for_between_groups_and_steps_ends_everything(kind: str) -> None:
    async def whole(campaign: Campaign, after: int) -> None:
        played = Played(campaign)
        done = await played.play(lambda: len(played.settled) >= after)
        assert done == (len(played.taken) > campaign.steps)
        played.check_steps()

    @some
    @given(campaigns(kind), st.integers(0, 12))
    def play(campaign: Campaign, after: int) -> None:
        clock.run(whole(campaign, after))

    play()


@each_kind
def test_a_plan_that_ends_too_early_ends_everything(kind: str) -> None:
    async def whole(campaign: Campaign, planned: int) -> None:
        played = Played(campaign, planned)
        done = await played.play()
        assert done == (len(played.taken) > campaign.steps)
        if planned >= campaign.steps * campaign.groups + campaign.refills + campaign.extra * campaign.steps:
            assert done
        played.check_steps()

    @some
    @given(campaigns(kind), st.integers(0, 12))
    def play(campaign: Campaign, planned: int) -> None:
        clock.run(whole(campaign, planned))

    play()


@each_kind
def test_who_is_cancelled_leaves_nothing_behind(kind: str) -> None:
    class Idle(Played):
        async def afterwards(self) -> None:
            await asyncio.sleep(1e5)

    async def whole(campaign: Campaign, at: float) -> None:
        played = Idle(campaign)
        playing = asyncio.create_task(played.play())
        await asyncio.sleep(at)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        check_left(played.dispatcher, played.site)

    @some
    @given(campaigns(kind), st.integers(0, 120).map(float))
    def play(campaign: Campaign, at: float) -> None:
        clock.run(whole(campaign, at))

    play()


@each_kind
def test_groups_that_were_abandoned_come_to_their_end_too(kind: str) -> None:
    """The learner hears of each: what they had finished is settled, and how short the kept ones are can be told."""

    class Slow(Played):
        async def update(self) -> None:
            await asyncio.sleep(5000.0)
            assert self.pace._abandoned == set(self.dropped), "an abandoned group never came out"
            await super().update()

    async def whole(campaign: Campaign) -> None:
        played = Slow(campaign)
        assert await played.play()
        played.check_steps()

    @some
    @given(campaigns(kind, extra=st.integers(1, 3)))
    def play(campaign: Campaign) -> None:
        clock.run(whole(campaign))

    play()


RESUMED = 4
"""The version at which the runs below go on."""


def recalled(campaign: Campaign, drawn: Sequence[int]) -> list[int]:
    """Versions of groups that a run could have left behind: later ones are no older, and all of them find room in time."""
    versions: list[int] = []
    for version in sorted(drawn)[: campaign.ahead]:
        oldest = max(RESUMED - campaign.staleness, version)
        while (
            oldest < RESUMED
            and sum(v <= oldest for v in versions) >= (oldest + campaign.staleness - RESUMED + 1) * campaign.groups
        ):
            oldest += 1
        versions.append(oldest)
    return versions


@each_kind
def test_groups_that_an_earlier_run_began_are_never_too_old_either(kind: str) -> None:
    class Resumed(Played):
        recalled: Sequence[int] = ()

        def make(self, number: int, may_run: MayRun) -> Sequence[Rollout]:
            if number < len(self.recalled):
                self.pace.recall(number, self.recalled[number])
                # It may be one that is not there yet, where the run went back to an older checkpoint.
                self.first_version[number] = self.recalled[number]
            return super().make(number, may_run)

    async def whole(campaign: Campaign, drawn: list[int]) -> None:
        played = Resumed(campaign, version=RESUMED)
        played.recalled = recalled(campaign, drawn)
        assert await played.play()
        played.check_steps()

    @some
    @given(campaigns(kind, extra=st.just(0)), st.lists(st.integers(0, RESUMED + 2), max_size=12))
    def play(campaign: Campaign, drawn: list[int]) -> None:
        clock.run(whole(campaign, drawn))

    play()


def test_an_error_of_the_learner_comes_out_as_it_is() -> None:
    class Wrong(Played):
        async def update(self) -> None:
            raise KeyError("mine")

    campaign = Campaign("stream", 2, 2, 3, 2, 1, 0, [(1.0, 2.0, 3.0)], ["none"], [False], 0, 1.0, 1.0, 0.0)
    with pytest.raises(KeyError, match="mine"):
        clock.run(Wrong(campaign).play())


# By counting


def begun(pace: Pace, numbers: Sequence[int]) -> list[int]:
    """Which groups could begin at once, each of them tried."""

    async def all_of_them() -> list[int]:
        tasks = {number: asyncio.create_task(pace.begin(number)) for number in numbers}
        await asyncio.sleep(0)
        found = [number for number, task in tasks.items() if task.done() and task.result()]
        for task in tasks.values():
            task.cancel()
        return found

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(("staleness", "extra", "steps", "expected"), [(0, 0, 9, 2), (2, 0, 9, 6), (0, 1, 9, 3), (3, 0, 2, 4)])
def test_so_many_groups_may_begin_before_the_first_step(staleness: int, extra: int, steps: int, expected: int) -> None:
    pace = Pace(2, steps, staleness=staleness, extra=extra)
    assert begun(pace, range(20)) == list(range(expected)), "none for steps that will not come"


async def test_nothing_begins_while_weights_are_published() -> None:
    pace = Pace(2, 9, staleness=1)
    for number in range(4):
        assert await pace.begin(number)
    for number in (0, 1):
        assert pace.may_take(number)
        pace.take(number)
    pace.update()
    assert pace.may_take(2)
    pace.replace(2)  # another one may begin in its place, but not yet
    assert pace.may_take(3)
    pace.take(3)
    assert not pace.allows(4)
    pace.publish()
    assert [number for number in range(4, 9) if pace.allows(number)] == [4, 5, 6]


async def test_a_step_keeps_its_places_for_those_that_must_not_wait() -> None:
    """Two groups to a step, and two updates between: slow old groups must find room when their time has come."""
    pace = Pace(2, 9, staleness=2)
    for number in range(6):
        assert await pace.begin(number)
    for number in (0, 1):
        assert pace.may_take(number)
        pace.take(number)
    pace.update()
    pace.publish()
    assert await pace.begin(6)
    assert await pace.begin(7)
    # Groups 2 to 5 are of version 0, and have steps 1 and 2 left: exactly their four places.
    assert not pace.may_take(6)
    assert all(pace.may_take(number) for number in (2, 3, 4, 5))


async def test_no_group_is_abandoned_however_the_groups_finish() -> None:
    """Whoever takes the youngest group that it may take still finds room for all."""
    for staleness in range(5):
        pace, number, waiting = Pace(2, 12, staleness=staleness), count(), set[int]()
        ahead = next(number)
        for _ in range(12):
            while not pace.full:
                while pace.allows(ahead):
                    assert await pace.begin(ahead)
                    waiting.add(ahead)
                    ahead = next(number)
                youngest = max(n for n in waiting if pace.may_take(n))
                assert pace.staleness_of(youngest) <= staleness
                pace.take(youngest)
                waiting.remove(youngest)
            pace.update()
            pace.publish()
        assert pace._abandoned == set(), f"staleness {staleness}"


async def test_groups_beyond_are_abandoned_when_the_step_is_full() -> None:
    pace = Pace(2, 9, extra=2)
    for number in range(4):
        assert await pace.begin(number)
    for number in (3, 1):
        assert pace.may_take(number)
        pace.take(number)
    assert pace.full
    assert sorted(pace.close_step()) == [0, 2]
    assert not pace.allows(4)
    pace.update()
    assert not pace.allows(4)
    pace.publish()
    assert [pace.has_abandoned(number) for number in range(4)] == [True, False, True, False]
    assert [number for number in range(20) if pace.allows(number)][-1] == 7


async def test_another_group_begins_in_the_place_of_one_that_was_replaced() -> None:
    pace = Pace(2, 9)
    assert await pace.begin(0)
    assert await pace.begin(1)
    assert not pace.allows(2)
    pace.replace(0)
    assert pace.allows(2)
    assert not pace.full
    assert not pace.allows(3)


async def test_a_group_is_as_old_as_its_first_run() -> None:
    pace = Pace(1, 9, staleness=1)
    assert await pace.begin(0)
    assert await pace.begin(1)
    pace.take(0)
    pace.update()
    pace.publish()
    assert await pace.begin(1), "its second rollout begins later, and makes it no younger"
    assert pace.staleness_of(1) == 1


async def test_runtimes_are_made_one_step_sooner_than_they_run() -> None:
    pace = Pace(2, 3, staleness=0)
    assert await asyncio.wait_for(pace.planned(3, prewarm=True), 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pace.planned(4, prewarm=True), 0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pace.planned(2, prewarm=False), 0.01)
    for number in range(4):
        await pace.begin(number)
        pace.take(number)
        if pace.full:
            pace.update()
            pace.publish()
    with pytest.raises(TimeoutError):  # there is no step after the next
        await asyncio.wait_for(pace.planned(6, prewarm=True), 0.01)


async def test_a_stop_wakes_those_who_wait() -> None:
    pace = Pace(1, 9)
    waiting = [asyncio.create_task(pace.begin(5)), asyncio.create_task(pace.planned(7, prewarm=True))]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    pace.stop()
    assert await asyncio.gather(*waiting) == [False, False]
    assert not await pace.begin(0)


def test_prewarming_opens_runtimes_for_the_next_step_while_this_one_trains() -> None:
    """Strictly on-policy, and yet the next step's inits are done when its policy is published."""

    def seconds(kind: str) -> float:
        async def whole() -> float:
            played = Played(Campaign(kind, 8, 2, 4, 2, 0, 0, [(5.0, 3.0, 1.0)], ["none"], [False], 0, 3.0, 3.0, 0.0))
            assert await played.play()
            played.check_steps()
            return asyncio.get_running_loop().time()

        return clock.run(whole())

    MAKERS["wide stream"] = lambda size: Stream(size, size, size, 2 * size)
    try:
        # Init 5, run 3, reward 1 and an update of 6; the runtime takes up to 1 to close, and so does the grader.
        assert seconds("wide stream") <= seconds("batch") - 3 * 5.0
    finally:
        del MAKERS["wide stream"]


def test_with_staleness_rollouts_and_updates_overlap() -> None:
    def seconds(staleness: int) -> float:
        async def whole() -> float:
            played = Played(Campaign("batch", 0, 2, 8, 2, staleness, 0, [(0.0, 10.0, 0.0)], ["none"], [False], 0, 5.0, 5.0, 0.0))
            assert await played.play()
            played.check_steps()
            return asyncio.get_running_loop().time()

        return clock.run(whole())

    assert seconds(1) < 0.65 * seconds(0)


def test_with_staleness_the_next_step_is_trained_while_weights_are_published() -> None:
    def seconds(staleness: int, publish: float) -> float:
        async def whole() -> float:
            played = Played(
                Campaign("batch", 0, 2, 8, 2, staleness, 0, [(0.0, 1.0, 0.0)], ["none"], [False], 0, 0.0, publish, 5.0)
            )
            assert await played.play()
            played.check_steps()
            return asyncio.get_running_loop().time()

        return clock.run(whole())

    # Two groups of 5 s make a step. Strictly on-policy nothing can be done meanwhile; with staleness, all but the last time.
    assert seconds(0, 8.0) == pytest.approx(seconds(0, 0.0) + 8 * 8.0, abs=1.0)
    assert seconds(1, 8.0) < seconds(1, 0.0) + 3 * 8.0


def test_the_random_campaigns_are_not_idle() -> None:
    """They do reach what they are to test: stale groups, replaced ones and abandoned ones."""
    seen: Counter[str] = Counter()

    async def whole(campaign: Campaign) -> None:
        played = Played(campaign)
        await played.play()
        seen["replaced"] += bool(played.replaced)
        seen["dropped"] += bool(played.dropped)
        seen["abandoned"] += bool(played.pace._abandoned)
        seen["stale"] += any(
            step - played.first_version.get(number, step) > 0 for step, taken in enumerate(played.taken) for number in taken
        )

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(campaigns("stream"))
    def play(campaign: Campaign) -> None:
        clock.run(whole(campaign))

    play()
    assert all(seen[what] for what in ("replaced", "dropped", "abandoned", "stale")), seen
