"""From tasks to groups: recorded before anyone sees them, never sampled twice, and the same whatever the schedule."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from playing import Diary, Dice, Probe

from palestra.agent import Limits
from palestra.collect import Attempt, Collector, first_version, group_of
from palestra.dispatch.batch import Batch
from palestra.dispatch.bounded import Bounded
from palestra.dispatch.pipeline import Pipeline
from palestra.dispatch.stream import Stream
from palestra.errors import InfrastructureError, TaskError
from palestra.evaluation import evaluate_both
from palestra.gather import Groups
from palestra.ledger import Ledger, StepRecord
from palestra.pace import Pace
from palestra.policy import TokenPolicies
from palestra.protocols import Dispatcher, Renderer, Sampling
from palestra.rollout import Patience
from palestra.trajectory import Completion, Failure, Group, Key, Phase, Segment, Trajectory

ALL = 1000
"""More groups than any test has: the pace lets all of them run at once, and the stream ends with the plan."""


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "ledger.sqlite") as opened:
        yield opened


@pytest.fixture
def collector(renderer: Renderer, ledger: Ledger, tmp_path: Path) -> Collector:
    policies = TokenPolicies(Dice(renderer), renderer)
    return Collector(policies, lambda: Bounded(4), ledger, Limits(4, 60.0), 100_000, 0, tmp_path / "cache")


def dice(collector: Collector) -> Dice:
    assert isinstance(collector.policies, TokenPolicies)
    assert isinstance(collector.policies.sampler, Dice)
    return collector.policies.sampler


def opened(
    collector: Collector, rounds: Sequence[Sequence[Probe]], samples: int, first: int = 0, pace: Pace | None = None
) -> AbstractAsyncContextManager[Groups[Attempt]]:
    return collector.groups(enumerate(rounds, first), samples, pace or Pace(ALL, 1), Sampling())


async def groups(collector: Collector, tasks: Sequence[Probe], samples: int = 3, step: int = 0) -> list[Group]:
    async with opened(collector, [tasks], samples, step) as stream:
        return [group_of(group) async for group in stream]


async def trajectories(
    collector: Collector, tasks: Sequence[Probe], samples: int = 3, phase: Phase = "eval", step: int = 0
) -> list[Trajectory]:
    async with collector.trajectories(tasks, samples, phase, step, Sampling()) as stream:
        return [trajectory async for trajectory in stream]


def slots(found: Sequence[Trajectory]) -> list[tuple[str, int]]:
    return sorted((trajectory.task_id, trajectory.index) for trajectory in found)


def tasks(count: int, **options: object) -> list[Probe]:
    return [Probe(f"task-{number}", **options) for number in range(count)]  # type: ignore[arg-type]


def what_happened(found: Sequence[Trajectory]) -> dict[tuple[str, int], object]:
    return {(t.task_id, t.index): (t.answer, t.reward, t.segments) for t in found}


async def test_groups_are_complete_and_in_order(collector: Collector) -> None:
    found = await groups(collector, tasks(5), samples=4)
    assert sorted(group.task_id for group in found) == [f"task-{n}" for n in range(5)]
    for group in found:
        assert [t.index for t in group.trajectories] == [0, 1, 2, 3]
        assert {t.task_id for t in group.trajectories} == {group.task_id}
    rewards = {t.reward for group in found for t in group.trajectories}
    assert rewards == {0.0, 1.0}, "the dice should fall both ways"
    assert dice(collector).open == 0


async def test_a_group_comes_before_the_others_are_done(collector: Collector) -> None:
    collector.make_dispatcher = lambda: Bounded(1)
    async with opened(collector, [tasks(3)], 2) as stream:
        first = await anext(stream)
        assert (first.number, group_of(first).task_id) == (0, "task-0")
        assert len(dice(collector).seeds) < 6


async def test_a_trajectory_is_in_the_ledger_before_anyone_sees_it(collector: Collector, ledger: Ledger) -> None:
    heard: list[tuple[str, int]] = []
    collector.on_trajectory = lambda t: heard.append((t.task_id, t.index))
    async with collector.trajectories(tasks(3), 2, "train", 5, Sampling()) as stream:
        async for trajectory in stream:
            stored = ledger.finished("train", 5)[trajectory.task_id, trajectory.index]
            assert what_happened([stored])[trajectory.task_id, trajectory.index] is not None
            assert stored.reward == trajectory.reward
            assert heard[-1] == (trajectory.task_id, trajectory.index)
    assert len(heard) == 6


async def test_the_schedule_changes_nothing(renderer: Renderer, tmp_path: Path) -> None:
    outcomes = []
    makers: list[Callable[[], Dispatcher]] = [
        lambda: Bounded(1),
        lambda: Bounded(7),
        Batch,
        lambda: Pipeline(2, 1, 3, 1),
        lambda: Stream(1, 2, 1, 3, 150_000),
    ]
    for number, (make, turned) in enumerate((make, turned) for make in makers for turned in (False, True)):
        with Ledger.open(tmp_path / f"{number}.sqlite") as ledger:
            collector = Collector(TokenPolicies(Dice(renderer), renderer), make, ledger, Limits(4, 60.0), 100_000, 0, tmp_path)
            asked = tasks(4)[::-1] if turned else tasks(4)
            outcomes.append(what_happened(await trajectories(collector, asked, 3)))
    assert len(outcomes[0]) == 12
    assert outcomes[1:] == outcomes[:1] * 9


async def test_each_rollout_has_a_seed_of_its_own(collector: Collector) -> None:
    await trajectories(collector, tasks(4), 3, "eval", 0)
    await trajectories(collector, tasks(4), 3, "eval", 1)
    await trajectories(collector, tasks(4), 3, "train", 0)
    assert len(dice(collector).seeds) == len(set(dice(collector).seeds)) == 36
    collector.seed = 1
    await trajectories(collector, tasks(4), 3, "train", 1)
    assert len(set(dice(collector).seeds)) == 48


@pytest.mark.parametrize("phase", ["train", "eval", "greedy"])
async def test_what_is_known_is_not_sampled_again(collector: Collector, phase: Phase) -> None:
    async with collector.trajectories(tasks(4), 3, phase, 2, Sampling()) as stream:
        before = [await anext(stream) for _ in range(5)]  # and here the run was killed
    sampled = len(dice(collector).seeds)
    recorded = what_happened(list(collector.ledger.finished(phase, 2).values()))
    assert set(recorded) == set(what_happened(before))
    heard: list[Trajectory] = []
    collector.on_trajectory = heard.append
    after = await trajectories(collector, tasks(4), 3, phase, 2)
    assert slots(after) == [(f"task-{task}", index) for task in range(4) for index in range(3)]
    assert len(dice(collector).seeds) - sampled == 12 - 5
    known = [trajectory for trajectory in after if (trajectory.task_id, trajectory.index) in recorded]
    assert what_happened(known) == recorded, "what is known comes as it was"
    assert len(heard) == 7, "only what is new is told of"
    again = await trajectories(collector, tasks(4), 3, phase, 2)
    assert slots(again) == slots(after)
    assert len(dice(collector).seeds) - sampled == 12 - 5


async def test_a_resumed_step_gives_whole_groups(collector: Collector) -> None:
    whole = {group.task_id: [t.answer for t in group.trajectories] for group in await groups(collector, tasks(4), step=1)}
    async with collector.trajectories(tasks(4), 3, "train", 0, Sampling()) as stream:
        for _ in range(7):
            await anext(stream)
    sampled = len(dice(collector).seeds)
    heard: list[Trajectory] = []
    collector.on_trajectory = heard.append
    found = await groups(collector, tasks(4), step=0)
    assert len(heard) == 5, "only what is new is told of"
    assert sorted(group.task_id for group in found) == sorted(whole)
    assert all([t.index for t in group.trajectories] == [0, 1, 2] for group in found)
    assert len(dice(collector).seeds) - sampled == 5


async def test_what_the_ledger_has_of_other_tasks_and_attempts_is_left_alone(collector: Collector) -> None:
    await groups(collector, tasks(4), samples=5)
    found = await groups(collector, tasks(2), samples=3)
    assert sorted((group.task_id, len(group.trajectories)) for group in found) == [("task-0", 3), ("task-1", 3)]
    assert slots(await trajectories(collector, tasks(1), 2, "train")) == [("task-0", 0), ("task-0", 1)]


def failed(task: str, index: int) -> Trajectory:
    return Trajectory(task, index, failure=Failure("run", "infrastructure", "no sandbox"))


async def test_a_failed_training_rollout_of_an_interrupted_run_is_tried_again(collector: Collector, ledger: Ledger) -> None:
    ledger.record(Key("train", 0, "task-0", 1), failed("task-0", 1))
    [group] = await groups(collector, tasks(1))
    assert [t.failure for t in group.trajectories] == [None, None, None]
    assert len(dice(collector).seeds) == 3


async def test_a_failed_evaluation_stays_what_it_was(collector: Collector, ledger: Ledger) -> None:
    ledger.record(Key("eval", 0, "task-0", 1), failed("task-0", 1))
    found = await trajectories(collector, tasks(1))
    assert sorted(t.index for t in found if t.failure is not None) == [1]
    assert len(dice(collector).seeds) == 2


async def test_failures_are_members_of_their_group(collector: Collector, ledger: Ledger) -> None:
    broken = Probe("broken", breaks={"look": RuntimeError("a bug")})
    found = {group.task_id: group for group in await groups(collector, [*tasks(2), broken])}
    assert [t.failure is None for t in found["task-0"].trajectories] == [True, True, True]
    assert [t.failure and t.failure.kind for t in found["broken"].trajectories] == ["bug", "bug", "bug"]
    assert ledger.counts() == {"train": {"finished": 6, "failed": 3}}


async def test_once_it_is_stopping_nothing_starts_and_what_began_is_recorded(collector: Collector, ledger: Ledger) -> None:
    collector.make_dispatcher = lambda: Bounded(3)
    collector.stopping = lambda: len(dice(collector).seeds) >= 4
    found = await groups(collector, tasks(5), samples=2)
    assert len(dice(collector).seeds) <= 4 + 2, "those under way may end"
    assert all(len(group.trajectories) == 2 for group in found)
    assert ledger.counts()["train"]["finished"] == len(dice(collector).seeds)
    assert len(found) < 5


async def test_leaving_early_closes_every_runtime(collector: Collector) -> None:
    diary = Diary()
    async with collector.trajectories(tasks(9, diary=diary), 3, "eval", 0, Sampling()) as stream:
        await anext(stream)
    assert (diary.open, diary.most_open > 1) == (0, True)


async def test_what_the_user_must_mend_comes_out_as_it_is(collector: Collector) -> None:
    diary = Diary()
    with pytest.raises(TaskError, match="mend it"):
        await groups(collector, [*tasks(3, diary=diary), Probe("odd", diary, breaks={"score": TaskError("mend it")})])
    assert diary.open == 0


async def test_what_the_infrastructure_breaks_is_tried_again_and_recorded_once(collector: Collector, ledger: Ledger) -> None:
    @dataclass(frozen=True)
    class Shaky(Probe):
        tries: list[int] = field(default_factory=list, compare=False)

        def _reach(self, method: str) -> None:
            super()._reach(method)
            if method == "setup":
                self.tries.append(1)
                if len(self.tries) % 2:
                    raise InfrastructureError("no sandbox")

    collector.patience = Patience(retries=1, backoff=0.0)
    collector.make_dispatcher = lambda: Bounded(1)
    [group] = await groups(collector, [Shaky("a")])
    assert [(t.failure, len(t.retried)) for t in group.trajectories] == [(None, 1)] * 3
    assert [(row.state, row.attempts, len(row.trajectory.retried)) for row in ledger.trajectories()] == [("finished", 1, 1)] * 3
    assert len(dice(collector).seeds) == len(set(dice(collector).seeds)) == 3


# Rounds


async def take(collector: Collector, rounds: Sequence[Sequence[Probe]], pace: Pace, count: int) -> list[tuple[int, Group]]:
    """Take so many groups, one after the other, and publish whenever a step is full."""
    found = []
    async with opened(collector, rounds, 2, pace=pace) as stream:
        async for gathered in stream:
            found.append((pace.version, group_of(gathered)))
            assert pace.may_take(gathered.number)
            pace.take(gathered.number)
            if pace.full:
                pace.update()
                pace.publish()
            if len(found) == count:
                break
    return found


async def test_round_after_round_as_the_pace_allows(collector: Collector, ledger: Ledger) -> None:
    rounds = [tasks(6)[0:2], tasks(6)[2:4], tasks(6)[4:6], tasks(6)[0:2]]
    found = await take(collector, rounds, Pace(2, 4), 8)
    assert sorted((version, group.task_id) for version, group in found) == [
        (0, "task-0"), (0, "task-1"), (1, "task-2"), (1, "task-3"),
        (2, "task-4"), (2, "task-5"), (3, "task-0"), (3, "task-1"),
    ]  # fmt: skip
    keys = sorted((row.key.step, row.key.task_id, row.key.index) for row in ledger.trajectories())
    assert keys == [(n, task.id, index) for n, round_ in enumerate(rounds) for task in round_ for index in (0, 1)]
    assert len(set(dice(collector).seeds)) == 16, "the same task in a later round is another attempt"


async def test_nothing_runs_before_its_policy_is_published(collector: Collector) -> None:
    diary = Diary()
    rounds = [[Probe(f"{step}-{n}", diary) for n in range(2)] for step in range(3)]
    collector.make_dispatcher = lambda: Stream(8, 8, 8, 16)
    pace = Pace(2, 3)
    async with opened(collector, rounds, 2, pace=pace) as stream:
        for _ in range(2):
            await anext(stream)
        for _ in range(500):
            await asyncio.sleep(0)
        assert len(dice(collector).seeds) == 4, "the next step's runs wait"
        assert diary.events.count("setup") == 8, "in runtimes that are open already"
        for number in range(2):
            pace.may_take(number)
            pace.take(number)
        pace.update()
        pace.publish()
        second = [await anext(stream) for _ in range(2)]
    assert {group_of(group).task_id for group in second} == {"1-0", "1-1"}
    assert diary.open == 0, "those of the third round were closed"


async def test_groups_that_a_committed_step_has_settled_are_left_out(collector: Collector, ledger: Ledger) -> None:
    rounds = [tasks(4)[:2], tasks(4)[2:]]
    await take(collector, rounds, Pace(2, 2), 4)
    done = [Key("train", 0, "task-0", index) for index in range(2)]
    others = [Key("train", 1, "task-2", index) for index in range(2)]
    ledger.commit_steps([StepRecord(0, {}, done, others)], "a")
    sampled = len(dice(collector).seeds)
    async with opened(collector, rounds, 2) as stream:
        found = sorted(group_of(group).task_id for group in [group async for group in stream])
    assert found == ["task-1", "task-3"]
    assert len(dice(collector).seeds) == sampled, "and what was recorded of the others is not sampled again"


async def test_a_group_that_goes_on_is_as_old_as_its_first_token(collector: Collector, ledger: Ledger) -> None:
    def of(version: int, task: str, index: int) -> Trajectory:
        segment = Segment()
        segment.read([1, 2])
        segment.wrote(Completion([3, 4], [-1.0, -1.0], [version, version + 1], "stop"))
        return Trajectory(task, index, segments=[segment], stop="finish", reward=1.0)

    ledger.commit_steps([StepRecord(step, {"version": step + 1}, []) for step in range(6)], "a")
    ledger.record(Key("train", 0, "task-0", 1), of(5, "task-0", 1))
    ledger.record(Key("train", 0, "task-0", 0), of(6, "task-0", 0))
    ledger.record(Key("train", 0, "task-1", 0), of(3, "task-1", 0))
    pace, ages = Pace(3, 4, staleness=2, version=6), {}
    async with opened(collector, [tasks(3)], 2, pace=pace) as stream:
        for _ in range(3):
            gathered = await anext(stream)
            assert pace.may_take(gathered.number)
            ages[group_of(gathered).task_id] = pace.staleness_of(gathered.number)
    assert ages == {"task-0": 1, "task-1": 2, "task-2": 0}, "and never older than what may still be trained on"


def test_the_first_version_is_that_of_the_first_sampled_token() -> None:
    read, written = Segment(), Segment()
    read.read([1, 2, 3])
    written.read([1])
    written.wrote(Completion([2, 3], [0.0, 0.0], [7, 8], "stop"))
    assert first_version(Trajectory("a", 0, segments=[read, written])) == 7
    assert first_version(Trajectory("a", 0, segments=[read])) is None


async def test_an_abandoned_attempt_is_not_recorded(collector: Collector, ledger: Ledger) -> None:
    """Its group comes out, for whoever counts what was lost; a run that goes on may try it again."""
    hold = asyncio.Event()

    async def wait(at: str) -> str:
        """Look."""
        await hold.wait()
        return at

    @dataclass(frozen=True)
    class Slow(Probe):
        def tools(self, env: str) -> Sequence[Callable[..., object]]:
            _, *others = super().tools(env)
            wait.__name__ = "look"
            return [wait, *others]

    pace = Pace(1, 3, extra=1)
    collector.make_dispatcher, collector.limits = Batch, Limits(4, 2.0)
    async with opened(collector, [[Slow("slow"), *tasks(1)]], 2, pace=pace) as stream:
        first = await anext(stream)
        assert group_of(first).task_id == "task-0"
        pace.may_take(first.number)
        pace.take(first.number)
        for _ in range(100):
            await asyncio.sleep(0)
        [number] = pace.close_step()
        assert [attempt.trajectory.failure for attempt in stream.abandon(number)] == [None, None], "they are told"
        lost = await anext(stream)
    assert pace.has_abandoned(lost.number)
    assert [t.failure and t.failure.kind for t in group_of(lost).trajectories] == ["abandoned"] * 2
    assert all(t.sampled_tokens > 0 for t in group_of(lost).trajectories), "what it had written by then is counted"
    assert {row.key.task_id for row in ledger.trajectories()} == {"task-0"}


async def test_what_was_left_of_an_abandoned_group_is_not_taken_by_a_resumed_run(collector: Collector) -> None:
    """One attempt had ended well, the other had not, when the step was full; then the run was killed."""
    [half] = await trajectories(collector, [Probe("half")], 1, "train")
    assert first_version(half) == 0
    pace = Pace(1, 2, extra=1, version=1)
    async with opened(collector, [[Probe("half"), *tasks(2)]], 2, pace=pace) as stream:
        numbers = {group_of(group).task_id: group.number for group in [await anext(stream), await anext(stream)]}
    assert numbers == {"task-0": 0, "task-1": 1}
    assert all(pace.may_take(number) for number in numbers.values())


async def test_evaluations_side_by_side_keep_to_the_limits_together(collector: Collector) -> None:
    diary = Diary()
    collector.make_dispatcher = lambda: Bounded(3)
    await evaluate_both(collector, tasks(6, diary=diary), 2, 0, Sampling(), greedy=True)
    assert diary.most_open == 3
    assert diary.open == 0


# Preparing


@dataclass(frozen=True)
class Prepared(Probe):
    prepared: list[str] = field(default_factory=list, compare=False)
    fails: BaseException | None = None
    look: Callable[[Path], None] = lambda _: None

    async def prepare(self, cache: Path) -> None:
        await asyncio.sleep(0)
        self.prepared.append(self.id)
        self.look(cache)
        if self.fails is not None:
            raise self.fails


async def test_each_task_is_prepared_once_before_its_first_rollout(collector: Collector) -> None:
    prepared: list[str] = []
    some = [Prepared(f"task-{n}", prepared=prepared, look=lambda cache: (cache / "data").touch()) for n in range(3)]
    await trajectories(collector, some[:2])
    await trajectories(collector, some, step=1)
    assert sorted(prepared) == ["task-0", "task-1", "task-2"]
    assert (collector.cache / "data").exists(), "the cache is a folder that exists"


@dataclass(frozen=True)
class SlowlyPrepared(Probe):
    """Its set-up needs what its preparation made."""

    made: list[str] = field(default_factory=list, compare=False)

    async def prepare(self, cache: Path) -> None:
        await asyncio.sleep(0.01)
        self.made.append(self.id)

    async def setup(self, stack: AsyncExitStack) -> str:
        assert self.id in self.made
        return await super().setup(stack)


async def test_nobody_begins_while_somebody_else_prepares_the_task(collector: Collector) -> None:
    some = [SlowlyPrepared(f"task-{n}") for n in range(3)]
    both = await evaluate_both(collector, some, 2, 0, Sampling(), greedy=True)
    assert [result.failures for result in both.values()] == [{}, {}]
    assert [task.made for task in some] == [[task.id] for task in some], "once"


async def test_what_could_not_be_prepared_is_tried_anew(collector: Collector) -> None:
    failing = Prepared("task-0", fails=RuntimeError("no network"))
    with pytest.raises(TaskError, match="no network"):
        await trajectories(collector, [failing])
    sound = Prepared("task-0")
    await trajectories(collector, [sound])
    assert sound.prepared == ["task-0"]


@pytest.mark.parametrize(
    "error", [RuntimeError("no network"), InfrastructureError("no network"), asyncio.CancelledError("no network")]
)
async def test_a_task_that_cannot_be_prepared_is_named(collector: Collector, error: BaseException) -> None:
    some = [*tasks(2), Prepared("bad", fails=error)]
    with pytest.raises(TaskError, match=r"^task 'bad': prepare\(\) failed: \w+Error: no network$"):
        await trajectories(collector, some)
    assert dice(collector).seeds == []


async def test_an_error_of_use_in_prepare_is_not_wrapped(collector: Collector) -> None:
    with pytest.raises(TaskError, match=r"^write it so$"):
        await trajectories(collector, [Prepared("bad", fails=TaskError("write it so")), *tasks(1)])


async def test_tasks_that_differ_only_in_their_id_are_different(collector: Collector) -> None:
    one = Probe("one")
    found = await trajectories(collector, [one, replace(one, id="two")], 1)
    assert slots(found) == [("one", 0), ("two", 0)]
    first, second = found
    assert first.segments[0].tokens != second.segments[0].tokens


async def test_whoever_asks_gets_attempts_in_the_order_asked(collector: Collector, ledger: Ledger) -> None:
    wanted = [(task, Key("train", 3, task.id, index)) for task in tasks(3) for index in range(2)]
    async with collector.requests() as ask:
        halves = await asyncio.gather(ask(wanted[:4], Sampling()), ask(wanted[4:], Sampling()))
        again = await ask(wanted[::-1], Sampling())
    found = [trajectory for half in halves for trajectory in half]
    assert [(t.task_id, t.index) for t in found] == [(key.task_id, key.index) for _, key in wanted]
    assert [(t.answer, t.segments[0].tokens) for t in reversed(again)] == [(t.answer, t.segments[0].tokens) for t in found]
    assert len(dice(collector).seeds) == 6  # what is recorded is not sampled again
    assert len(ledger.finished("train", 3)) == 6
    assert dice(collector).open == 0


async def test_what_is_asked_for_together_stays_together(collector: Collector) -> None:
    ended: list[str] = []
    collector.make_dispatcher = lambda: Bounded(1)
    collector.on_trajectory = lambda trajectory: ended.append(trajectory.task_id)
    async with collector.requests() as ask:
        await asyncio.gather(
            *(ask([(task, Key("train", 0, task.id, index)) for index in range(4)], Sampling()) for task in tasks(3))
        )
    assert ended == [task.id for task in tasks(3) for _ in range(4)]


async def test_what_the_user_has_to_mend_ends_it_for_all_who_ask(collector: Collector) -> None:
    def refuse(trajectory: Trajectory) -> None:
        raise TaskError("mend me")

    collector.on_trajectory = refuse
    [task] = tasks(1)
    with pytest.raises(TaskError, match="mend me"):
        async with collector.requests() as ask:
            await ask([(task, Key("train", 0, task.id, 0))], Sampling())
