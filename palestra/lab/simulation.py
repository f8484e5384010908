"""A workload played: trajectories that only take time, on pools, an engine and units that are shared. What a schedule makes of
it is measured in samples an hour.
"""

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from palestra.errors import UsageError
from palestra.lab import clock
from palestra.lab.account import UnitTime, account
from palestra.lab.cluster import Cluster, Policy, Together
from palestra.lab.engine import Engine
from palestra.lab.pool import Pool
from palestra.lab.precedence import First
from palestra.lab.published import Schedule, Settings
from palestra.lab.workload import Job, Limits, Workload
from palestra.trajectory import Stage


@dataclass(frozen=True, slots=True)
class Figures:
    samples_per_hour: float
    gpu_use: float
    """The share of unit-seconds in which a unit generated, trained or published."""
    reprefill_share: float
    """Of all tokens that were prefilled, those whose KV had been there before."""
    peak_runtimes: int
    groups_dropped: int
    of_limit: float
    """How fast it was, with generation at full KV, training and publishing end to end as 1."""
    unit_time: UnitTime


class World:
    """All that trajectories share. To be made inside the event loop."""

    def __init__(self, workload: Workload, policy: Policy, first: First, piece: int | None = None) -> None:
        self.workload = workload
        self._loop = asyncio.get_running_loop()
        self.init = Pool(workload.init.capacity)
        self.reward = Pool(workload.reward.capacity)
        self.cluster = Cluster(workload.engine, workload.training.publish_seconds, policy, first, piece)
        self.runtimes = 0
        self.peak_runtimes = 0
        self.log: list[tuple[int, str, float, float]] = []
        """Which member did what from when to when; kept for pictures, where `logs` says so."""
        self.logs = False

    def open_runtime(self) -> None:
        self.runtimes += 1
        self.peak_runtimes = max(self.peak_runtimes, self.runtimes)

    def close_runtime(self) -> None:
        self.runtimes -= 1

    @contextmanager
    def logged(self, order: int, what: str) -> Iterator[None]:
        started = self._loop.time()
        yield
        if self.logs:
            self.log.append((order, what, started, self._loop.time()))

    def figures(self, trajectories: int, limits: Sequence[Limits], groups_dropped: int = 0) -> Figures:
        """What came of so many trajectories, in steps with these limits."""
        seconds = asyncio.get_running_loop().time()
        totals = self.cluster.engine.totals()
        return Figures(
            samples_per_hour=trajectories / seconds * 3600,
            gpu_use=self.cluster.use().share,
            reprefill_share=totals.prefilled_again / max(1, totals.prefilled),
            peak_runtimes=self.peak_runtimes,
            groups_dropped=groups_dropped,
            of_limit=sum(limit.step for limit in limits) / seconds,
            unit_time=account(self.cluster, sum(limit.gpu for limit in limits)),
        )


class Member:
    """One trajectory. Its runtime lives from the start of its init until it has run."""

    def __init__(self, job: Job, world: World, order: int) -> None:
        self._job = job
        self._world = world
        self._order = order
        self._has_runtime = False
        self.stages: list[Stage] = []
        """Those that it has gone through."""

    async def initialize(self) -> None:
        self._world.open_runtime()
        self._has_runtime = True
        with self._world.logged(self._order, "init"):
            await self._world.init.work(self._job.init_seconds)
        self.stages.append("init")

    async def run(self) -> None:
        cluster = self._world.cluster
        cluster.begin_run()
        try:
            with self._world.logged(self._order, "run"):
                await self._converse(cluster.engine)
        finally:
            self.close()
        self.stages.append("run")

    async def _converse(self, engine: Engine) -> None:
        async with engine.context(self._order, self._order // self._world.workload.batch.samples) as context:
            for turn in self._job.turns:
                await context.call(turn.new_tokens, turn.output_tokens)
                await asyncio.sleep(turn.tool_seconds)

    async def evaluate(self) -> None:
        with self._world.logged(self._order, "reward"):
            await self._world.reward.work(self._job.reward_seconds)
        self.stages.append("reward")

    def close(self) -> None:
        """Close the runtime, if it is still open."""
        if self._has_runtime:
            self._has_runtime = False
            self._world.close_runtime()


def simulate_published(workload: Workload, schedule: Schedule, cfg: Settings, seed: int, steps: int | None = None) -> Figures:
    """Steps one after the other: all trajectories through the schedule, then training and publishing."""
    return clock.run(_published(workload, schedule, cfg, seed, workload.batch.steps if steps is None else steps))


async def _published(workload: Workload, schedule: Schedule, cfg: Settings, seed: int, steps: int) -> Figures:
    world = World(workload, Together(), "arrived")
    tasks, samples = workload.batch.tasks, workload.batch.samples
    settings = {**cfg, "num_instances": tasks, "num_trajectories": samples}
    limits = []
    world.cluster.to_come = steps * tasks * samples
    for step in range(steps):
        jobs = workload.draw(seed, step)
        limits.append(workload.limits(jobs))
        members = {
            task: {sample: Member(job, world, task * samples + sample) for sample, job in enumerate(group)}
            for task, group in enumerate(jobs)
        }
        all_members = [member for group in members.values() for member in group.values()]  # it may empty what it is given
        world.cluster.coming += tasks * samples
        await _in_time(schedule(settings, members, "initialize", "run", "evaluate"), workload.one_by_one(jobs), step)
        _require_all(all_members, step)
        await world.cluster.train(workload.training.seconds)
        await world.cluster.publish()
    return world.figures(steps * tasks * samples, limits)


async def _in_time(scheduled: Awaitable[None], one_by_one: float, step: int) -> None:
    """One that looks again and again whether something has happened would do so for ever."""
    try:
        async with asyncio.timeout(2 * one_by_one) as limit:
            await scheduled
    except TimeoutError:
        if not limit.expired():
            raise
        raise UsageError(
            f"it had not returned from step {step} after {2 * one_by_one:.0f} s of virtual time, in half of which all "
            "trajectories could have gone through their stages one after the other"
        ) from None


def _require_all(members: Sequence[Member], step: int) -> None:
    """A schedule that leaves something out would look fast."""
    amiss = [member.stages for member in members if member.stages != ["init", "run", "reward"]]
    if amiss:
        raise UsageError(
            f"it returned from step {step} with {len(amiss)} of {len(members)} trajectories that did not go through init, run "
            f"and reward once each, such as one with {', '.join(amiss[0]) or 'none of them'}"
        )
