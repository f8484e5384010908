"""One attempt at one task: init, run, reward. What goes wrong is recorded with its stage and kind, and everything is closed.

A rollout knows which stage comes next, after a failure too: what the infrastructure broke is tried again, what the model or the
task did is not. A dispatcher only decides when.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Literal

from palestra import agent
from palestra.errors import InfrastructureError, UsageError, cause, where_it_failed
from palestra.hints import Hints
from palestra.protocols import Policy, StagedRollout
from palestra.task import AnyTask, as_prompt, as_score
from palestra.tool import AnyTool, Toolbox
from palestra.trajectory import Failure, FailureKind, Key, Span, Stage, Trajectory, now

STAGES: tuple[Stage, ...] = ("init", "run", "reward")

CLOSE_SECONDS = 60.0
"""A runtime that takes longer to close is given up: one hanging sandbox must not hang the whole run."""

PARTS, PART_SECONDS = 32, 1.0

OpenPolicy = Callable[[int], AbstractAsyncContextManager[Policy]]
"""Opens the policy for one rollout, given its sampling seed."""

OpenTools = Callable[[AsyncExitStack], Awaitable[Sequence[AnyTool]]]
"""Opens, on a rollout's stack, tools that its agent gets besides those of its task."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long stages may take, and how often a rollout is tried again."""

    init_seconds: float = 600.0
    """Also for taking out what is graded: both are the runtime's time, not the model's."""
    reward_seconds: float = 600.0
    retries: int = 2
    backoff: float = 1.0
    """Seconds before the first retry; twice as many before each further one."""


def seed_of(*parts: str | int) -> int:
    """A sampling seed that depends on what the rollout is, and not on when it runs."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def at_once() -> bool:
    return True


async def no_more_tools(stack: AsyncExitStack) -> Sequence[AnyTool]:
    return ()


class Rollout:
    def __init__(
        self,
        task: AnyTask,
        key: Key,
        open_policy: OpenPolicy,
        limits: agent.Limits,
        seed: int,
        *,
        patience: Patience = Patience(),  # frozen
        may_run: Callable[[], Awaitable[bool]] = at_once,
        expected_tokens: int = 0,
        watch: agent.Watch = lambda _: None,
        hints: Hints | None = None,
        open_tools: OpenTools = no_more_tools,
    ) -> None:
        self.task, self.key = task, key
        self.trajectory = Trajectory(task.id, key.index)
        self.next: Stage | None = "init"
        self.rest = 0.0
        self.kin, self.group = task.id, key.group
        self.expected_tokens = expected_tokens
        self._open_policy, self._limits, self._seed, self._watch = open_policy, limits, seed, watch
        self._patience, self._may_run, self._hints, self._open_tools = patience, may_run, hints, open_tools
        self._runtime = AsyncExitStack()
        self._open = False
        self._env: Any = None
        self._more_tools: Sequence[AnyTool] = ()
        self._artifact: Any = None
        self._working: asyncio.Task[None] | None = None
        self._context: Context | None = None
        self._abandoned = False

    async def may_run(self) -> bool:
        return self._abandoned or await self._may_run() or self._abandoned  # who is abandoned goes on, and ends at once

    async def advance(self) -> None:
        """Run the next stage. Raises only cancellation, and what the user has to mend."""
        stage = self.next
        assert stage is not None
        await self._timed(stage, {"init": self._init, "run": self._run, "reward": self._reward}[stage])

    async def instead_of_run(self, what: Literal["gold", "noop"]) -> None:
        """In place of the run stage, without a model: apply the gold solution, or do nothing."""
        await self._timed("run", self._solve if what == "gold" else self._do_nothing)

    async def close(self) -> None:
        """Close the runtime; what goes wrong in that is recorded too. Calling it again does no harm."""
        await self._close_after("run")

    async def _close_after(self, stage: Stage) -> None:
        if self._open:  # not in a task of its own: that could be cancelled before it has begun
            await self._awaited(stage, self._recorded(stage, self._close_runtime))

    async def _close_runtime(self) -> None:
        self._open = False
        await _close(self._runtime, self._context)

    def abandon(self) -> None:
        """Nobody waits for it any more: end it as soon as can be."""
        if self._working is not None and not self._abandoned:
            self._working.cancel()
        self._abandoned = True

    async def _timed(self, stage: Stage, work: Callable[[], Awaitable[None]]) -> None:
        started = now()
        try:
            if self._abandoned:
                self._fail(stage, "abandoned", "its step no longer waits for it")
            else:
                await self._guarded(stage, work)
        finally:
            self.trajectory.spans.append(Span(stage, started, now()))
        await self._move_on(stage)

    async def _guarded(self, stage: Stage, work: Callable[[], Awaitable[None]]) -> None:
        """In a task of its own: a recipe's code that cancels the one it runs in, as a TaskGroup of that stage does whose helper
        fails, must not pass for whoever waits here being cancelled. All stages share one context: that of whoever asked for the
        first."""
        if self._context is None:
            self._context = copy_context()
        self._working = asyncio.create_task(self._recorded(stage, work), context=self._context)
        try:
            await self._awaited(stage, self._working)
        finally:
            self._working = None

    async def _awaited(self, stage: Stage, work: Awaitable[None]) -> None:
        """That it was cancelled, though whoever waits for it was not, is a failure of its own."""
        try:
            await work
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            if self._abandoned:
                self._fail(stage, "abandoned", "its step no longer waits for it")
            else:
                await self._close_after(stage)  # a helper in the runtime that failed, and so cancelled it, tells why
                self._fail(stage, "bug", "CancelledError: something that it waited for was cancelled")

    async def _recorded(self, stage: Stage, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a bug in a task or tool must not stop the others
            why = cause(error) if isinstance(error, BaseExceptionGroup) else error
            if isinstance(why, UsageError):
                raise why from why.__cause__
            self._fail(stage, *_kind_and_detail(why))

    async def _move_on(self, stage: Stage) -> None:
        """Decide what comes next."""
        failure, self.rest = self.trajectory.failure, 0.0
        if failure is None:
            self.next = {"init": "run", "run": "reward", "reward": None}[stage]
            return
        earlier = self.trajectory.retried
        if not _may_be_tried_again(failure) or len(earlier) >= self._patience.retries:
            self.next = None
            return
        self.rest = self._patience.backoff * 2 ** len(earlier)
        if stage == "reward":  # what is graded is at hand: the run is not to be repeated
            self.trajectory.failure = None
        else:
            await self.close()
            spans, usage = self.trajectory.spans, self.trajectory.usage
            self.trajectory = Trajectory(self.task.id, self.key.index, spans=spans, usage=usage)
        self.trajectory.retried = [*earlier, failure]
        self.next = "reward" if stage == "reward" else "init"

    async def _init(self) -> None:
        self._open = True
        async with _within(self._patience.init_seconds, "setup()", "dispatch.init_seconds"):
            self._env = await self.task.setup(self._runtime)
            self._more_tools = await self._open_tools(self._runtime)

    async def _run(self) -> None:
        tools = Toolbox([*self.task.tools(self._env), *self._more_tools])
        async with self._open_policy(self._seed) as policy:
            prompt = as_prompt(self.task.prompt(self._env), self.task.id)
            await agent.run(policy, prompt, tools, self._limits, self.trajectory, self._watch, self._hints)
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
        as_prompt(self.task.prompt(self._env), self.task.id)

    async def _harvest(self) -> None:
        async with _within(self._patience.init_seconds, "harvest()", "dispatch.init_seconds"):
            self._artifact = await self.task.harvest(self._env, self.trajectory)
        self.trajectory.artifact = self._artifact
        await self._close_runtime()

    async def _reward(self) -> None:
        stack = AsyncExitStack()
        try:
            async with _within(self._patience.reward_seconds, "score()", "dispatch.reward_seconds"):
                value = await self.task.score(self._artifact, self.trajectory, stack)
        finally:
            await _close(stack, self._context)
        score = as_score(value, self.task.id)
        self.trajectory.reward = score.reward
        self.trajectory.metrics = dict(score.metrics)

    def _fail(self, stage: Stage, kind: FailureKind, detail: str) -> None:
        self.trajectory.reward = None
        if self.trajectory.failure is None:  # the first one tells why; a runtime that then will not close does not
            self.trajectory.failure = Failure(stage, kind, detail)


def _kind_and_detail(error: BaseException) -> tuple[FailureKind, str]:
    if isinstance(error, InfrastructureError):
        return "infrastructure", str(error)
    if isinstance(error, TimeoutError):
        return "timeout", str(error) or "a time limit passed"
    return "bug", where_it_failed(error)


def being_cancelled() -> bool:
    """Whether somebody has cancelled the asyncio task that this runs in."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _within:
    """A time limit that says whose it was."""

    def __init__(self, seconds: float, what: str, key: str) -> None:
        self._limit = asyncio.timeout(seconds)
        self._complaint = f"{what} took longer than {key} = {seconds:g}"

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._limit.__aexit__(*error)
        except TimeoutError:
            raise TimeoutError(self._complaint) from None
        if self._limit.expired() and error[0] is None:  # it was told, and went on to its end
            raise TimeoutError(self._complaint)


def _may_be_tried_again(failure: Failure) -> bool:
    return failure.kind == "infrastructure" or (failure.kind == "timeout" and failure.stage == "init")


async def run_through(rollout: StagedRollout) -> None:
    """All stages, one after the other, retries included; closed at the end, come what may."""
    try:
        while rollout.next is not None:
            if rollout.rest:
                await asyncio.sleep(rollout.rest)
            if rollout.next == "run" and not await rollout.may_run():
                return
            await rollout.advance()
    finally:
        await rollout.close()


async def _close(stack: AsyncExitStack, context: Context | None) -> None:
    """Close what is on the stack. Who is cancelled meanwhile waits: half a closing could leave a sandbox running."""
    closing = asyncio.create_task(_close_in_time(stack, context))
    cancelled: asyncio.CancelledError | None = None
    while not closing.done():
        try:
            await asyncio.wait([closing])
        except asyncio.CancelledError as error:
            cancelled = error
    failure = closing.exception() or closing.result()
    if cancelled is not None:
        raise cancelled
    if failure is not None:
        raise failure


async def _close_in_time(stack: AsyncExitStack, context: Context | None) -> SystemExit | None:
    closing = asyncio.create_task(_close_or_exit(stack), context=context)
    _, late = await asyncio.wait([closing], timeout=CLOSE_SECONDS)
    if not late:
        return closing.result()
    for _ in range(PARTS):  # each part that hangs has to be cancelled in its turn
        if late:
            closing.cancel()
            _, late = await asyncio.wait([closing], timeout=PART_SECONDS)
    raise TimeoutError(f"the runtime was not closed within {CLOSE_SECONDS:g} s")


async def _close_or_exit(stack: AsyncExitStack) -> SystemExit | None:
    """An exit is returned: raised in a task of its own, it would end the whole program."""
    try:
        await stack.aclose()
    except SystemExit as error:
        return error
    return None


def describe(failure: Failure) -> str:
    return f"{failure.stage} failed ({failure.kind}): {failure.detail}"
