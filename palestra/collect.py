"""From tasks to finished trajectories and complete groups, each recorded in the ledger before anyone else sees it.

Whatever an earlier, interrupted run of the same step recorded is taken from the ledger instead of being sampled again.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra import agent
from palestra.errors import TaskError, UsageError, cause
from palestra.ledger import Key, Ledger, Phase
from palestra.policy import TokenPolicy
from palestra.protocols import Dispatcher, Policy, Renderer, Sampler, Sampling
from palestra.rollout import OpenPolicy, Rollout, seed_of
from palestra.task import Task
from palestra.trajectory import Group, Trajectory

AnyTask = Task[Any, Any]


@dataclass
class Collector:
    sampler: Sampler
    renderer: Renderer
    dispatcher: Dispatcher
    ledger: Ledger
    limits: agent.Limits
    context: int
    seed: int
    cache: Path
    stopping: Callable[[], bool] = lambda: False
    """Once true, no further rollout starts; those under way come to their end."""
    on_trajectory: Callable[[Trajectory], None] = lambda _: None
    _prepared: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def trajectories(
        self, tasks: Sequence[AnyTask], samples: int, phase: Phase, step: int, sampling: Sampling
    ) -> AsyncIterator[AsyncIterator[Trajectory]]:
        """So many attempts at each task, in the order in which they finish."""
        await self._prepare(tasks)
        # A failed training rollout is tried again; a failed evaluation stays what it was, since the weights have moved on.
        recorded = self.ledger.finished(phase, step, failed=phase != "train")
        wanted = [(task.id, index) for task in tasks for index in range(samples)]
        known = {slot: recorded[slot] for slot in wanted if slot in recorded}
        open_policy = self.policies(sampling)

        def missing() -> Iterator[Rollout]:
            for task in tasks:
                for index in range(samples):
                    if (task.id, index) not in known and not self.stopping():
                        seed = seed_of(self.seed, phase, step, task.id, index)
                        yield Rollout(task, index, open_policy, self.limits, seed)

        async def finished(stream: AsyncIterator[Trajectory]) -> AsyncIterator[Trajectory]:
            for trajectory in known.values():
                yield trajectory
            async for trajectory in stream:
                self.ledger.record(Key(phase, step, trajectory.task_id, trajectory.index), trajectory)
                self.on_trajectory(trajectory)
                yield trajectory

        async with self.dispatcher.stream(missing()) as stream:
            yield finished(stream)

    @asynccontextmanager
    async def groups(
        self, tasks: Sequence[AnyTask], samples: int, step: int, sampling: Sampling
    ) -> AsyncIterator[AsyncIterator[Group]]:
        """The tasks' groups, each as soon as its last attempt has finished. Those cut short by a stop never come."""

        async def complete(stream: AsyncIterator[Trajectory]) -> AsyncIterator[Group]:
            members: dict[str, list[Trajectory]] = defaultdict(list)
            async for trajectory in stream:
                group = members[trajectory.task_id]
                group.append(trajectory)
                if len(group) == samples:
                    yield Group(trajectory.task_id, tuple(sorted(group, key=lambda t: t.index)))

        async with self.trajectories(tasks, samples, "train", step, sampling) as stream:
            yield complete(stream)

    def policies(self, sampling: Sampling) -> OpenPolicy:
        @asynccontextmanager
        async def open_policy(seed: int) -> AsyncIterator[Policy]:
            async with self.sampler.session(seed, self.context) as session:
                yield TokenPolicy(session, self.renderer, sampling, self.context)

        return open_policy

    async def _prepare(self, tasks: Sequence[AnyTask]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    if task.id not in self._prepared:
                        self._prepared.add(task.id)
                        group.create_task(prepare(task, self.cache))
        except BaseExceptionGroup as errors:
            raise cause(errors) from None


async def prepare(task: AnyTask, cache: Path) -> None:
    """Prepare a task in a folder that exists. A task that cannot be prepared is the user's to mend."""
    try:
        cache.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  # quick
        await task.prepare(cache)
    except UsageError:
        raise
    except Exception as error:
        raise TaskError(f"task {task.id!r}: prepare() failed: {type(error).__name__}: {error}") from error
