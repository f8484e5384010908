"""From tasks to finished trajectories and complete groups, each recorded in the ledger before anyone else sees it.

Whatever an earlier, interrupted run recorded is taken from the ledger instead of being sampled again.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from palestra import agent
from palestra.errors import TaskError, UsageError, cause
from palestra.gather import Gathered, Groups, Make, MayRun, gather
from palestra.hints import Hints
from palestra.ledger import Ledger
from palestra.pace import Pace
from palestra.protocols import Dispatcher, Policies, Sampling
from palestra.rollout import OpenPolicy, OpenTools, Patience, Rollout, at_once, being_cancelled, no_more_tools, seed_of
from palestra.task import AnyTask
from palestra.trajectory import Group, Key, Phase, Stage, Trajectory

Ask = Callable[[Sequence[tuple[AnyTask, Key]], Sampling], Awaitable[list[Trajectory]]]
"""Makes one attempt for each key, and gives the trajectories in the order asked."""


class Recalled:
    """A rollout that had ended in an earlier, interrupted run."""

    next: Stage | None = None
    rest = 0.0
    expected_tokens = 0

    def __init__(self, key: Key, trajectory: Trajectory) -> None:
        self.key, self.trajectory = key, trajectory
        self.kin, self.group = key.task_id, key.group

    async def may_run(self) -> bool:
        return True

    async def advance(self) -> None:
        raise AssertionError("it has ended")

    def abandon(self) -> None: ...

    async def close(self) -> None: ...


Attempt = Rollout | Recalled
"""An attempt at a task, with the key under which it is recorded."""


@dataclass
class Collector:
    policies: Policies
    make_dispatcher: Callable[[], Dispatcher]
    ledger: Ledger
    limits: agent.Limits
    context: int
    seed: int
    cache: Path
    patience: Patience = field(default_factory=Patience)
    hints: Hints | None = None
    open_tools: OpenTools = no_more_tools
    stopping: Callable[[], bool] = lambda: False
    """Once true, no further rollout starts; those under way come to their end."""
    on_trajectory: Callable[[Trajectory], None] = lambda _: None
    _prepared: set[str] = field(default_factory=set)
    _preparing: dict[str, asyncio.Lock] = field(default_factory=dict)

    @cached_property
    def _evaluation_dispatcher(self) -> Dispatcher:
        """One for all evaluations, those side by side too. Training has its own, which may be full of runtimes that wait for the
        next policy."""
        return self.make_dispatcher()

    @asynccontextmanager
    async def trajectories(
        self, tasks: Sequence[AnyTask], samples: int, phase: Phase, step: int, sampling: Sampling, *, again: bool = False
    ) -> AsyncIterator[AsyncIterator[Trajectory]]:
        """So many attempts at each task, in the order in which they finish."""
        await self._prepare(tasks)
        # In training a failed evaluation stays what it was, since the weights have moved on.
        recorded = self.ledger.finished(phase, step, failed=not again)
        open_policy = self.opener(sampling)

        async def attempts() -> AsyncGenerator[Attempt, None]:
            for task in tasks:
                for index in range(samples):
                    if self.stopping():
                        return
                    yield self._attempt(task, Key(phase, step, task.id, index), recorded, open_policy)

        async def finished(stream: AsyncIterable[Attempt]) -> AsyncGenerator[Trajectory, None]:
            async for attempt in stream:
                self._record(attempt)
                yield attempt.trajectory

        async with (
            aclosing(attempts()) as source,
            self._evaluation_dispatcher.stream(source) as stream,
            aclosing(finished(stream)) as trajectories,
        ):
            yield trajectories

    @asynccontextmanager
    async def groups(
        self, rounds: Iterator[tuple[int, Sequence[AnyTask]]], samples: int, pace: Pace, sampling: Sampling
    ) -> AsyncIterator[Groups[Attempt]]:
        """Groups of training attempts, round after round, as the pace allows. Groups that a committed step has settled are left
        out, and so are leftovers of an interrupted run that are too old by now; those cut short by a stop never come."""
        settled = self.ledger.settled()
        open_policy = self.opener(sampling)

        def begun(task: AnyTask, recorded: Mapping[tuple[str, int], Trajectory]) -> int | None:
            """The version under which an interrupted run began its group."""
            known = [recorded[task.id, index] for index in range(samples) if (task.id, index) in recorded]
            return min((version for version in map(first_version, known) if version is not None), default=None)

        def make(
            task: AnyTask, round_: int, recorded: Mapping[tuple[str, int], Trajectory], version: int | None
        ) -> Make[Attempt]:
            def attempts(number: int, may_run: MayRun) -> list[Attempt]:
                if version is not None:
                    pace.recall(number, version)
                keys = (Key("train", round_, task.id, index) for index in range(samples))
                return [self._attempt(task, key, recorded, open_policy, may_run) for key in keys]

            return attempts

        async def plan() -> AsyncGenerator[Make[Attempt], None]:
            for number, tasks in rounds:
                left = [task for task in tasks if (number, task.id) not in settled]
                if left:
                    await self._prepare(left)
                    recorded = self.ledger.finished("train", number)
                    for task in left:
                        version = begun(task, recorded)
                        if version is None or not pace.has_outlived(version):
                            yield make(task, number, recorded, version)

        def ended(attempt: Attempt) -> None:
            self._record(attempt)
            if self.stopping():
                pace.stop()

        async with aclosing(plan()) as makers, gather(makers, self.make_dispatcher(), pace, ended) as stream:
            yield stream

    @asynccontextmanager
    async def requests(self) -> AsyncIterator[Ask]:
        """Attempts for whoever asks, when another trainer drives. All who ask share one dispatcher. What the user has to mend
        ends the block; who waits for an attempt then waits in vain."""
        wanted: asyncio.Queue[Attempt] = asyncio.Queue(1)
        turn = asyncio.Lock()  # attempts that are asked for together stay together, so that groups end one after the other
        promised: dict[Attempt, asyncio.Future[Trajectory]] = {}

        async def source() -> AsyncGenerator[Attempt, None]:
            while True:
                yield await wanted.get()

        async def serve() -> None:
            async with aclosing(source()) as attempts, self.make_dispatcher().stream(attempts) as stream:
                async for attempt in stream:
                    self._record(attempt)
                    promise = promised.pop(attempt)
                    if not promise.done():  # else nobody waits any more
                        promise.set_result(attempt.trajectory)

        async def ask(keys: Sequence[tuple[AnyTask, Key]], sampling: Sampling) -> list[Trajectory]:
            await self._prepare([task for task, _ in keys])
            recorded = {at: self.ledger.finished(*at) for at in {(key.phase, key.step) for _, key in keys}}
            open_policy = self.opener(sampling)
            promises = []
            async with turn:
                for task, key in keys:
                    attempt = self._attempt(task, key, recorded[key.phase, key.step], open_policy)
                    await wanted.put(attempt)
                    promised[attempt] = promise = asyncio.get_running_loop().create_future()
                    promises.append(promise)
            return list(await asyncio.gather(*promises))

        try:
            async with asyncio.TaskGroup() as beside:
                serving = beside.create_task(serve())
                yield ask
                serving.cancel()
        except BaseExceptionGroup as errors:
            raise cause(errors) from None

    def _attempt(
        self,
        task: AnyTask,
        key: Key,
        recorded: Mapping[tuple[str, int], Trajectory],
        open_policy: OpenPolicy,
        may_run: MayRun = at_once,
    ) -> Attempt:
        """The attempt that was recorded, or a new one."""
        if (known := recorded.get((task.id, key.index))) is not None:
            return Recalled(key, known)
        return Rollout(
            task,
            key,
            open_policy,
            self.limits,
            seed_of(self.seed, key.phase, key.step, key.task_id, key.index),
            patience=self.patience,
            may_run=may_run,
            expected_tokens=self.context,
            hints=self.hints_for(key),
            open_tools=self.open_tools,
        )

    def hints_for(self, key: Key) -> Hints | None:
        return None if self.hints is None else self.hints.for_group(self.seed, key)

    def _record(self, attempt: Attempt) -> None:
        failure = attempt.trajectory.failure
        if isinstance(attempt, Recalled) or (failure is not None and failure.kind == "abandoned"):
            return
        self.ledger.record(attempt.key, attempt.trajectory)
        self.on_trajectory(attempt.trajectory)

    def opener(self, sampling: Sampling) -> OpenPolicy:
        return lambda seed: self.policies.open(seed, sampling, self.context)

    async def _prepare(self, tasks: Sequence[AnyTask]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    if task.id not in self._prepared:
                        group.create_task(self._prepare_once(task))
        except BaseExceptionGroup as errors:
            raise cause(errors) from None

    async def _prepare_once(self, task: AnyTask) -> None:
        """Whoever comes second waits for the first, and tries it anew where that one failed or was cancelled."""
        async with self._preparing.setdefault(task.id, asyncio.Lock()):
            if task.id not in self._prepared:
                await prepare(task, self.cache)
                self._prepared.add(task.id)


async def prepare(task: AnyTask, cache: Path) -> None:
    """Prepare a task in a folder that exists. A task that cannot be prepared is the user's to mend."""
    try:
        cache.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  # quick
        await task.prepare(cache)
    except UsageError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if being_cancelled():
            raise
        raise TaskError(f"task {task.id!r}: prepare() failed: {type(error).__name__}: {error}") from error


def first_version(trajectory: Trajectory) -> int | None:
    """The policy version that wrote its first token, if there is one."""
    return next((version for segment in trajectory.segments for version in segment.versions if version >= 0), None)


def group_of(gathered: Gathered[Attempt]) -> Group:
    trajectories = tuple(attempt.trajectory for attempt in gathered.rollouts)
    return Group(trajectories[0].task_id, trajectories)
