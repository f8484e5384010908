"""The published schedules do what their papers say, and come out at what is known of them on W1."""

import asyncio
from collections import Counter

import pytest

from palestra.lab import clock
from palestra.lab.published import Schedule, batch, bounded, pipeline
from palestra.lab.simulation import simulate_published
from palestra.lab.workload import Workload


class Stub:
    """Ten seconds for each stage; notes what happened when."""

    def __init__(self, name: str, log: list[tuple[float, str, str]]) -> None:
        self._name, self._log = name, log

    async def _stage(self, stage: str) -> None:
        self._log.append((asyncio.get_running_loop().time(), self._name, stage))
        await asyncio.sleep(10)

    async def open(self) -> None:
        await self._stage("open")

    async def go(self) -> None:
        await self._stage("go")

    async def judge(self) -> None:
        await self._stage("judge")


def log_of(schedule: Schedule, **cfg: int) -> list[tuple[float, str, str]]:
    log: list[tuple[float, str, str]] = []
    trajectories = {name: {number: Stub(f"{name}{number}", log) for number in range(3)} for name in "abcd"}
    settings = {"num_instances": 4, "num_trajectories": 3, **cfg}
    clock.run(schedule(settings, trajectories, "open", "go", "judge"))
    return log


@pytest.mark.parametrize("schedule", [batch, bounded, pipeline])
def test_everything_goes_through_every_stage_in_order(schedule: Schedule) -> None:
    log = log_of(schedule, max_parallel_agents=2)
    assert len(log) == 36
    for name in {name for _, name, _ in log}:
        assert [stage for _, each, stage in log if each == name] == ["open", "go", "judge"]


def test_batch_starts_everything_at_once() -> None:
    assert Counter(time for time, _, _ in log_of(batch)) == {0.0: 12, 10.0: 12, 20.0: 12}


def test_bounded_holds_its_slots_to_the_end_and_goes_task_by_task() -> None:
    log = log_of(bounded, max_parallel_agents=4)
    assert [time for time, _, _ in log] == sorted([10.0 * k for k in range(9)] * 4)
    assert [name for _, name, stage in log if stage == "open"][:5] == ["a0", "a1", "a2", "b0", "b1"]


def test_pipeline_has_workers_for_each_stage_and_goes_sample_by_sample() -> None:
    log = log_of(pipeline, max_parallel_agents=4, max_eval_parallel_agents=2)
    assert [name for _, name, stage in log if stage == "open"] == [f"{name}{number}" for number in range(3) for name in "abcd"]
    assert Counter(time for time, _, stage in log if stage == "go") == {10.0: 4, 20.0: 4, 30.0: 4}
    assert Counter(time for time, _, stage in log if stage == "judge") == {20.0 + 10 * k: 2 for k in range(6)}


@pytest.mark.parametrize("schedule", [batch, bounded, pipeline])
def test_a_simulation_is_the_same_every_time(small: Workload, schedule: Schedule) -> None:
    figures = simulate_published(small, schedule, {"max_parallel_agents": 6}, seed=0)
    assert figures == simulate_published(small, schedule, {"max_parallel_agents": 6}, seed=0)
    assert figures != simulate_published(small, schedule, {"max_parallel_agents": 6}, seed=1)
    assert 0 < figures.of_limit < 1
    assert 0 < figures.gpu_use < 1
    assert figures.peak_runtimes <= (6 if schedule is bounded else 24)


@pytest.mark.parametrize(
    ("schedule", "agents", "known"),
    [(bounded, 96, 322), (batch, 512, 390), (pipeline, 96, 465), (pipeline, 288, 622)],
)
def test_w1_comes_out_as_known(w1: Workload, schedule: Schedule, agents: int, known: float) -> None:
    figures = simulate_published(w1, schedule, {"max_parallel_agents": agents}, seed=0, steps=2)
    assert figures.samples_per_hour == pytest.approx(known, rel=0.08)
    assert figures.of_limit == pytest.approx(known / 1150, rel=0.08)
