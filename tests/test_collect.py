"""From tasks to groups: recorded before anyone sees them, never sampled twice, and the same whatever the schedule."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from playing import Diary, Dice, Probe

from palestra.agent import Limits
from palestra.collect import Collector
from palestra.dispatch.bounded import Bounded
from palestra.errors import InfrastructureError, TaskError
from palestra.ledger import Key, Ledger, Phase
from palestra.protocols import Renderer, Sampling
from palestra.trajectory import Failure, Group, Trajectory


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "ledger.sqlite") as opened:
        yield opened


@pytest.fixture
def collector(renderer: Renderer, ledger: Ledger, tmp_path: Path) -> Collector:
    return Collector(Dice(renderer), renderer, Bounded(4), ledger, Limits(4, 60.0), 100_000, 0, tmp_path / "cache")


def dice(collector: Collector) -> Dice:
    assert isinstance(collector.sampler, Dice)
    return collector.sampler


async def groups(collector: Collector, tasks: Sequence[Probe], samples: int = 3, step: int = 0) -> list[Group]:
    async with collector.groups(tasks, samples, step, Sampling()) as stream:
        return [group async for group in stream]


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
    collector.dispatcher = Bounded(1)
    async with collector.groups(tasks(3), 2, 0, Sampling()) as stream:
        first = await anext(stream)
        assert first.task_id == "task-0"
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
    for number, (slots_, turned) in enumerate([(1, False), (1, True), (7, False), (3, True)]):
        with Ledger.open(tmp_path / f"{number}.sqlite") as ledger:
            collector = Collector(Dice(renderer), renderer, Bounded(slots_), ledger, Limits(4, 60.0), 100_000, 0, tmp_path)
            asked = tasks(4)[::-1] if turned else tasks(4)
            outcomes.append(what_happened(await trajectories(collector, asked, 3)))
    assert len(outcomes[0]) == 12
    assert outcomes[1:] == outcomes[:1] * 3


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
    assert what_happened(after[:5]) == recorded, "what is known comes first, as it was"
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
    found = await groups(collector, tasks(4), step=0)
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


async def test_a_failed_training_rollout_is_tried_again(collector: Collector, ledger: Ledger) -> None:
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
    collector.dispatcher = Bounded(3)
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


# Preparing


@dataclass(frozen=True)
class Prepared(Probe):
    prepared: list[str] = field(default_factory=list, compare=False)
    fails: Exception | None = None
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


@pytest.mark.parametrize("error", [RuntimeError("no network"), InfrastructureError("no network")])
async def test_a_task_that_cannot_be_prepared_is_named(collector: Collector, error: Exception) -> None:
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
