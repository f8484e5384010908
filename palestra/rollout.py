"""One attempt at one task: init, run, reward. What goes wrong is recorded with its stage and kind, and everything is closed."""

import asyncio
import hashlib
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Literal

from palestra import agent
from palestra.errors import InfrastructureError, UsageError
from palestra.protocols import Policy, StagedRollout
from palestra.task import Task, as_score
from palestra.tool import Toolbox
from palestra.trajectory import Failure, FailureKind, Stage, Trajectory

STAGES: tuple[Stage, ...] = ("init", "run", "reward")

OpenPolicy = Callable[[int], AbstractAsyncContextManager[Policy]]
"""Opens the policy for one rollout, given its sampling seed."""


def seed_of(*parts: str | int) -> int:
    """A sampling seed that depends on what the rollout is, and not on when it runs."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Rollout:
    def __init__(
        self,
        task: Task[Any, Any],
        index: int,
        open_policy: OpenPolicy,
        limits: agent.Limits,
        seed: int,
        watch: agent.Watch = lambda _: None,
    ) -> None:
        self.task = task
        self.trajectory = Trajectory(task.id, index)
        self._open_policy, self._limits, self._seed, self._watch = open_policy, limits, seed, watch
        self._runtime = AsyncExitStack()
        self._env: Any = None
        self._artifact: Any = None

    async def advance(self, stage: Stage) -> None:
        """Run one stage. Raises only cancellation, and what the user has to mend."""
        await self._timed(stage, {"init": self._init, "run": self._run, "reward": self._reward}[stage])

    async def instead_of_run(self, what: Literal["gold", "noop"]) -> None:
        """In place of the run stage, without a model: apply the gold solution, or do nothing."""
        await self._timed("run", self._solve if what == "gold" else self._do_nothing)

    async def close(self) -> None:
        """Close the runtime; what goes wrong in that is recorded too. Calling it again does no harm."""
        await self._guarded("run", lambda: _close(self._runtime))

    async def _timed(self, stage: Stage, work: Callable[[], Awaitable[None]]) -> None:
        started = time.monotonic()
        try:
            await self._guarded(stage, work)
        finally:
            self.trajectory.seconds[stage] = time.monotonic() - started

    async def _guarded(self, stage: Stage, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except UsageError:
            raise
        except InfrastructureError as error:
            self._fail(stage, "infrastructure", str(error))
        except TimeoutError as error:
            self._fail(stage, "timeout", str(error) or "a time limit passed")
        except Exception as error:  # noqa: BLE001  # the boundary of a rollout: a bug in a task or tool must not stop the others
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._fail(stage, "bug", f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})")

    async def _init(self) -> None:
        self._env = await self.task.setup(self._runtime)

    async def _run(self) -> None:
        tools = Toolbox(self.task.tools(self._env))
        async with self._open_policy(self._seed) as policy:
            await agent.run(policy, self.task.prompt(self._env), tools, self._limits, self.trajectory, self._watch)
        await self._harvest()

    async def _solve(self) -> None:
        self._check_scene()
        self.trajectory.answer = await self.task.solve(self._env)
        self.trajectory.stop = "finish"
        await self._harvest()

    async def _do_nothing(self) -> None:
        self._check_scene()
        await self._harvest()

    def _check_scene(self) -> None:
        """What a run would begin with, made and thrown away: wrong tools and prompts show without a model."""
        Toolbox(self.task.tools(self._env))
        self.task.prompt(self._env)

    async def _harvest(self) -> None:
        self._artifact = await self.task.harvest(self._env, self.trajectory)
        self.trajectory.artifact = self._artifact
        await self.close()

    async def _reward(self) -> None:
        stack = AsyncExitStack()
        try:
            value = await self.task.score(self._artifact, self.trajectory, stack)
        finally:
            await _close(stack)
        score = as_score(value, self.task.id)
        self.trajectory.reward = score.reward
        self.trajectory.metrics = dict(score.metrics)

    def _fail(self, stage: Stage, kind: FailureKind, detail: str) -> None:
        self.trajectory.reward = None
        if self.trajectory.failure is None:  # the first one tells why; a runtime that then will not close does not
            self.trajectory.failure = Failure(stage, kind, detail)


async def run_through(rollout: StagedRollout) -> None:
    """All stages, one after the other, up to the first failure; closed at the end, come what may."""
    try:
        for stage in STAGES:
            await rollout.advance(stage)
            if rollout.trajectory.failure is not None:
                break
    finally:
        await rollout.close()


async def _close(stack: AsyncExitStack) -> None:
    """Close what is on the stack. Who is cancelled meanwhile waits: half a closing could leave a sandbox running."""
    closing = asyncio.create_task(stack.aclose())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise


def describe(failure: Failure) -> str:
    return f"{failure.stage} failed ({failure.kind}): {failure.detail}"
