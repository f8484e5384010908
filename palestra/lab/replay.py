"""A recorded run played again on the virtual clock, as it was or with something changed: the dispatchers, pace, gather and learn
are the real ones, and rollouts, sampler and trainer take the time that the model says they would.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from palestra import dispatch
from palestra.config import AnyDispatch
from palestra.gather import Gathered, Make, MayRun, gather, learn
from palestra.lab import clock
from palestra.lab.machine import Machine
from palestra.lab.model import Job, JobGroup, Model
from palestra.learner import REFILLS
from palestra.pace import Pace
from palestra.trajectory import Stage


@dataclass(frozen=True, slots=True)
class Times:
    """How long everything of a kind takes, as a multiple of what was recorded. 0 is free."""

    init: float = 1.0
    sampling: float = 1.0
    tools: float = 1.0
    reward: float = 1.0
    training: float = 1.0


def replay(model: Model, section: AnyDispatch, staleness: int, times: Times = Times()) -> float:  # frozen
    """Seconds that all steps take together, counted as a run counts them: without checkpoints and evaluations between them."""
    return clock.run(_replay(model, section, staleness, times))


async def _replay(model: Model, section: AnyDispatch, staleness: int, times: Times) -> float:
    rollouts = sum(len(group.jobs) for group in model.groups)
    machine = Machine(model.parts, rollouts + max(ending.beside for ending in model.steps))
    pace = Pace(model.groups_per_step, len(model.steps), staleness=staleness)
    learner = _Learner(model, machine, times)

    async def plan() -> AsyncGenerator[Make[_Rollout], None]:
        for group in model.groups:
            yield _make(group, machine, model.context, times)

    dispatcher = dispatch.make(section, model.capacity)
    async with aclosing(plan()) as groups, gather(groups, dispatcher, pace) as gathered:
        whole = await learn(gathered, pace, learner, len(model.steps))
    assert whole
    return learner.seconds


def _make(group: JobGroup, machine: Machine, expected_tokens: int, times: Times) -> Make["_Rollout"]:
    return lambda number, may_run: [_Rollout(job, number, machine, expected_tokens, times, may_run) for job in group.jobs]


class _Rollout:
    """A recorded rollout, as dispatchers move it."""

    rest = 0.0

    def __init__(self, job: Job, group: int, machine: Machine, expected_tokens: int, times: Times, may_run: MayRun) -> None:
        self.next: Stage | None = "init"
        self.kin = self.group = group
        self.expected_tokens = expected_tokens
        self._job, self._machine, self._times, self._may_run = job, machine, times, may_run

    async def may_run(self) -> bool:
        return await self._may_run()

    async def advance(self) -> None:
        job, times = self._job, self._times
        match self.next:
            case "init":
                await self._machine.stage("init", job.init.times(times.init))
                self.next = "run" if job.run is not None else None
            case "run":
                await self._run()
                self.next = "reward" if job.reward is not None else None
            case "reward":
                assert job.reward is not None
                await self._machine.stage("reward", job.reward.times(times.reward))
                self.next = None

    async def _run(self) -> None:
        for piece in self._job.run or ():
            if piece.what == "sample":
                await self._machine.sample(piece.work.times(self._times.sampling))
            else:
                await asyncio.sleep(piece.work.wait * (self._times.tools if piece.what == "tool" else 1.0))

    def abandon(self) -> None:
        raise AssertionError("no group is begun beyond what steps take")

    async def close(self) -> None: ...


class _Learner:
    """A trainer that only takes time, and counts it."""

    def __init__(self, model: Model, machine: Machine, times: Times) -> None:
        self._model, self._machine, self._times = model, machine, times
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._step = self._replaced = 0
        self._spare = len(model.groups) - len(model.steps) * model.groups_per_step
        """No more groups are replaced than were: others are not recorded."""
        self._trained = 0.0
        """Seconds in which gradients were taken, of all steps."""
        self.seconds = 0.0

    async def take(self, group: Gathered[_Rollout]) -> bool:
        played = self._model.groups[group.number]
        started = self._loop.time()
        await self._machine.train(played.training * self._times.training)
        self._trained += self._loop.time() - started
        if played.gave or not self._spare or self._replaced >= REFILLS * self._model.groups_per_step:
            return True
        self._replaced += 1
        self._spare -= 1
        return False

    def abandon(self, rollouts: Sequence[_Rollout]) -> None:
        raise AssertionError("no group is begun beyond what steps take")

    def drop(self, group: Gathered[_Rollout]) -> None: ...

    async def update(self) -> None:
        ending = self._model.steps[self._step]
        await self._machine.train(ending.update * self._times.training)
        self.seconds += self._loop.time() - self._began
        self._replaced = 0

    async def publish(self) -> None:
        """A recording has publishing in its updates. This is what a run does before its next step; of it only what the next step
        is trained meanwhile counts."""
        ending, trained = self._model.steps[self._step], self._trained
        await self._machine.pause(ending.pause, ending.beside)
        self._began = self._loop.time() - (self._trained - trained)
        self._step += 1
