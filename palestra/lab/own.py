"""Palestra's own dispatch in the lab: the very code that runs in training (dispatcher, pace, gather, learn), over simulated
rollouts and a trainer that only takes time.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from palestra.gather import Gathered, Make, MayRun, gather, learn
from palestra.lab import clock
from palestra.lab.cluster import Policy
from palestra.lab.precedence import First
from palestra.lab.simulation import Figures, Member, World
from palestra.lab.workload import Job, Workload
from palestra.pace import Pace
from palestra.protocols import Dispatcher
from palestra.trajectory import Stage

_AFTER: dict[Stage, Stage | None] = {"init": "run", "run": "reward", "reward": None}


@dataclass(frozen=True)
class Setup:
    """One way to run a workload: a dispatcher, which units train when, and how far rollouts may run ahead."""

    dispatcher: Callable[[], Dispatcher]
    policy: Callable[[], Policy]
    staleness: int = 0
    piece: int | None = None
    """Replies reserve KV for so many tokens at a time; None is the whole reply."""

    @property
    def first(self) -> First:
        """With staleness no step waits for its last run."""
        return "oldest" if self.staleness else "shortest"


class SimulatedRollout:
    """A member of the lab's world, as our dispatchers move it."""

    rest = 0.0

    def __init__(self, member: Member, group: int, expected_tokens: int, may_run: MayRun) -> None:
        self.next: Stage | None = "init"
        self.kin = self.group = group
        self.expected_tokens = expected_tokens
        self._may_run, self._member = may_run, member

    async def may_run(self) -> bool:
        return await self._may_run()

    async def advance(self) -> None:
        assert self.next is not None
        await {"init": self._member.initialize, "run": self._member.run, "reward": self._member.evaluate}[self.next]()
        self.next = _AFTER[self.next]

    def abandon(self) -> None:
        raise AssertionError("the lab begins no group beyond what steps take")

    async def close(self) -> None:
        self._member.close()


@dataclass
class SimulatedLearner:
    """Training takes its time for each group, publishing for each step."""

    world: World
    pace: Pace
    stalest: int = 0
    dropped: int = 0
    _complete: dict[int, int] = field(default_factory=dict)

    def ended(self, rollout: SimulatedRollout) -> None:
        """Count the groups that are complete."""
        self._complete[rollout.group] = self._complete.get(rollout.group, 0) + 1
        if self._complete[rollout.group] == self.world.workload.batch.samples:
            del self._complete[rollout.group]
            self.world.cluster.backlog += 1
            self.world.cluster.review()

    async def take(self, group: Gathered[SimulatedRollout]) -> bool:
        self.stalest = max(self.stalest, self.pace.staleness_of(group.number))
        self.world.cluster.backlog -= 1
        workload = self.world.workload
        await self.world.cluster.train(workload.training.seconds / workload.batch.tasks)
        return True

    def abandon(self, rollouts: Sequence[SimulatedRollout]) -> None:
        self.dropped += 1

    def drop(self, group: Gathered[SimulatedRollout]) -> None: ...

    async def update(self) -> None:
        """It is part of the training of the last group."""

    async def publish(self) -> None:
        batch = self.world.workload.batch
        with self.world.logged(-1, "publish"):
            await self.world.cluster.publish()
        self.world.cluster.coming += batch.tasks * batch.samples


def simulate_own(workload: Workload, setup: Setup, seed: int, steps: int | None = None) -> Figures:
    async def figures() -> Figures:
        return await play(World(workload, setup.policy(), setup.first, setup.piece), setup, seed, steps)

    return clock.run(figures())


async def play(world: World, setup: Setup, seed: int, steps: int | None = None) -> Figures:
    """The workload's steps, or so many, in this world."""
    workload = world.workload
    steps = workload.batch.steps if steps is None else steps
    pace = Pace(workload.batch.tasks, steps, staleness=setup.staleness)
    learner = SimulatedLearner(world, pace)
    limits = []

    async def plan() -> AsyncGenerator[Make[SimulatedRollout], None]:
        for step in range(steps):
            jobs = workload.draw(seed, step)
            limits.append(workload.limits(jobs))
            for group in jobs:
                yield _make(group, world)

    rollouts = workload.batch.tasks * workload.batch.samples
    world.cluster.coming, world.cluster.to_come = rollouts, steps * rollouts
    async with aclosing(plan()) as groups, gather(groups, setup.dispatcher(), pace, learner.ended) as gathered:
        await learn(gathered, pace, learner, steps)
    assert learner.stalest <= setup.staleness
    return world.figures(steps * rollouts, limits, learner.dropped)


def _make(jobs: list[Job], world: World) -> Make[SimulatedRollout]:
    def rollouts(number: int, may_run: MayRun) -> list[SimulatedRollout]:
        expected = world.workload.context.end
        first = number * len(jobs)
        return [SimulatedRollout(Member(job, world, first + i), number, expected, may_run) for i, job in enumerate(jobs)]

    return rollouts
