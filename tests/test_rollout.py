"""One attempt: what goes wrong is recorded with its stage and kind, and the runtime is always closed."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar

import pytest
from playing import Diary, Probe, calling, play

from palestra.agent import Limits
from palestra.backends.scripted import Reply, ScriptedSession
from palestra.errors import InfrastructureError, TaskError, ToolDefinitionError, ToolError
from palestra.message import JSON
from palestra.policy import TokenPolicy
from palestra.protocols import Policy, Renderer, Sampling
from palestra.rollout import STAGES, OpenPolicy, Patience, Rollout, describe, run_through, seed_of
from palestra.task import Score
from palestra.tool import Finish
from palestra.trajectory import Failure, Key, Trajectory

RIGHT = (calling(("look", {"at": "tea"})), calling(("done", {"answer": "right"})))


def policies(renderer: Renderer, diary: Diary, *replies: Reply) -> OpenPolicy:
    @asynccontextmanager
    async def open_policy(seed: int) -> AsyncIterator[Policy]:
        diary.opened("session")
        try:
            yield TokenPolicy(ScriptedSession(play(*replies), renderer), renderer, Sampling(), 100_000)
        finally:
            await diary.close("session")

    return open_policy


AT_ONCE = Patience(backoff=0.0)
ONCE = Patience(retries=0)


def make(renderer: Renderer, task: Probe, *replies: Reply, patience: Patience = ONCE) -> Rollout:
    """An attempt whose every run hears the same replies."""
    key = Key("train", 0, task.id, 3)
    return Rollout(task, key, policies(renderer, task.diary, *(replies or RIGHT)), Limits(8, 60.0), 7, patience=patience)


async def advance(rollout: Rollout) -> Trajectory:
    await run_through(rollout)
    return rollout.trajectory


async def test_all_three_stages(renderer: Renderer) -> None:
    task = Probe("a")
    trajectory = await advance(make(renderer, task))
    assert (trajectory.task_id, trajectory.index) == ("a", 3)
    assert (trajectory.stop, trajectory.answer, trajectory.artifact, trajectory.reward) == ("finish", "right", "right", 1.0)
    assert trajectory.failure is None
    assert list(trajectory.seconds) == list(STAGES)
    assert task.diary.events == [
        *("open runtime", "setup", "open session", "prompt", "look", "close session"),
        *("harvest", "closing", "close runtime"),  # the runtime is gone before the grading
        *("open grader", "score", "close grader"),
    ]


@pytest.mark.parametrize(
    ("where", "stage"),
    [
        ("setup", "init"),
        ("prompt", "run"),
        ("look", "run"),
        ("harvest", "run"),
        ("closing", "run"),
        ("score", "reward"),
    ],
)
@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (RuntimeError("it broke"), "bug", "RuntimeError: it broke (_reach, line "),
        (InfrastructureError("no sandbox"), "infrastructure", "no sandbox"),
        (TimeoutError("too slow"), "timeout", "too slow"),
        (TimeoutError(), "timeout", "a time limit passed"),
    ],
)
async def test_a_failure_has_its_stage_and_kind(
    renderer: Renderer, where: str, stage: str, error: Exception, kind: str, detail: str
) -> None:
    task = Probe("a", breaks={where: error})
    trajectory = await advance(make(renderer, task))
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.failure.kind) == (stage, kind)
    assert trajectory.failure.detail.startswith(detail)
    assert trajectory.reward is None
    assert task.diary.open == 0
    assert stage in trajectory.seconds
    assert describe(trajectory.failure).startswith(f"{stage} failed ({kind}): ")


@pytest.mark.parametrize("where", ["setup", "prompt", "look", "harvest", "score"])
@pytest.mark.parametrize("error", [TaskError("mend it"), ToolDefinitionError("mend it")])
async def test_what_the_user_has_to_mend_is_raised(renderer: Renderer, where: str, error: Exception) -> None:
    task = Probe("a", breaks={where: error})
    with pytest.raises(type(error), match="mend it"):
        await advance(make(renderer, task))
    assert task.diary.open == 0


async def test_a_score_that_is_no_number_is_the_users_to_mend(renderer: Renderer) -> None:
    class Odd(Probe):
        async def score(self, artifact: object, trajectory: Trajectory, stack: object) -> float:
            return "1"  # type: ignore[return-value]

    with pytest.raises(TaskError, match=r"task 'a': score\(\) returned '1'"):
        await advance(make(renderer, Odd("a")))


async def test_a_tool_error_is_no_failure(renderer: Renderer) -> None:
    trajectory = await advance(make(renderer, Probe("a", breaks={"look": ToolError("look elsewhere")})))
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)
    assert trajectory.turns[0].results[0].content == "Error: look elsewhere"


async def test_a_stop_without_an_answer_is_graded_and_no_failure(renderer: Renderer) -> None:
    rollout = Rollout(Probe("a"), Key("eval", 0, "a", 0), policies(renderer, Diary(), *RIGHT), Limits(1, 60.0), 0)
    trajectory = await advance(rollout)
    assert (trajectory.stop, trajectory.answer, trajectory.reward, trajectory.failure) == ("turns", None, 0.0, None)


async def test_the_first_failure_is_kept_when_closing_fails_too(renderer: Renderer) -> None:
    breaks = {"look": InfrastructureError("the sandbox died"), "closing": RuntimeError("so it cannot be closed")}
    task = Probe("a", breaks=breaks)
    trajectory = await advance(make(renderer, task))
    assert trajectory.failure == Failure("run", "infrastructure", "the sandbox died")
    assert task.diary.open == 0


async def test_a_session_that_cannot_be_opened_is_a_failure_of_the_run(renderer: Renderer) -> None:
    @asynccontextmanager
    async def broken(seed: int) -> AsyncIterator[Policy]:
        raise InfrastructureError("the server is gone")
        yield

    task = Probe("a")
    trajectory = await advance(Rollout(task, Key("eval", 0, "a", 0), broken, Limits(3, 60.0), 0, patience=ONCE))
    assert trajectory.failure == Failure("run", "infrastructure", "the server is gone")
    assert task.diary.open == 0


def cancel_oneself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def leave() -> None:
    sys.exit(0)


@pytest.mark.parametrize(
    ("act", "message"),
    [(cancel_oneself, "CancelledError: something that it waited for was cancelled"), (leave, "SystemExit: 0 (leave, line ")],
)
@pytest.mark.parametrize(("where", "stage"), [("setup", "init"), ("score", "reward")])
async def test_a_task_that_cancels_or_ends_what_it_runs_in_ends_only_itself(
    renderer: Renderer, act: Callable[[], None], message: str, where: str, stage: str
) -> None:
    class Own(Probe):
        async def setup(self, stack):  # type: ignore[no-untyped-def]
            env = await super().setup(stack)
            await self._acting("setup")
            return env

        async def score(self, artifact, trajectory, stack):  # type: ignore[no-untyped-def]
            await self._acting("score")
            return await super().score(artifact, trajectory, stack)

        async def _acting(self, here: str) -> None:
            if here == where:
                act()
                await asyncio.sleep(1)

    task = Own("a")
    trajectory = await advance(make(renderer, task))
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.failure.kind) == (stage, "bug")
    assert trajectory.failure.detail.startswith(message)
    assert task.diary.open == 0
    me = asyncio.current_task()
    assert me is not None
    assert me.cancelling() == 0


async def test_a_helper_that_dies_in_a_task_group_of_the_runtime_fails_the_rollout(renderer: Renderer) -> None:
    class Helped(Probe):
        async def setup(self, stack):  # type: ignore[no-untyped-def]
            env = await super().setup(stack)
            helpers = await stack.enter_async_context(asyncio.TaskGroup())
            helpers.create_task(self._die())
            await asyncio.sleep(1)
            return env

        async def _die(self) -> None:
            raise InfrastructureError("the helper died")

    task = Helped("a")
    trajectory = await advance(make(renderer, task))
    assert trajectory.failure == Failure("init", "infrastructure", "the helper died")
    assert task.diary.open == 0


async def test_a_group_of_errors_counts_as_its_cause(renderer: Renderer) -> None:
    class Grouped(Probe):
        async def setup(self, stack):  # type: ignore[no-untyped-def]
            raise ExceptionGroup("several", [ValueError("never raised itself")])

    trajectory = await advance(make(renderer, Grouped("a")))
    assert trajectory.failure == Failure("init", "bug", "ValueError: never raised itself")


async def test_a_runtime_that_ends_the_program_as_it_closes_ends_only_itself(renderer: Renderer) -> None:
    class Leaving(Probe):
        async def setup(self, stack):  # type: ignore[no-untyped-def]
            env = await super().setup(stack)
            stack.callback(leave)
            return env

    task = Leaving("a")
    trajectory = await advance(make(renderer, task))
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.failure.kind) == ("run", "bug")
    assert trajectory.failure.detail.startswith("SystemExit: 0 (leave, line ")
    assert task.diary.open == 0


async def test_what_a_stage_sets_in_its_context_the_next_one_finds(renderer: Renderer) -> None:
    name: ContextVar[str] = ContextVar("name")

    class Named(Probe):
        async def setup(self, stack):  # type: ignore[no-untyped-def]
            name.set("tea")
            return await super().setup(stack)

        async def score(self, artifact, trajectory, stack):  # type: ignore[no-untyped-def]
            await super().score(artifact, trajectory, stack)
            return float(name.get() == "tea")

    trajectory = await advance(make(renderer, Named("a")))
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)


@pytest.mark.parametrize("where", ["setup", "look", "nowhere"])
async def test_what_a_stage_sets_in_its_context_is_there_when_the_runtime_closes(renderer: Renderer, where: str) -> None:
    name: ContextVar[str] = ContextVar("name")
    closed: list[str] = []

    class Named(Probe):
        async def setup(self, stack):  # type: ignore[no-untyped-def]
            token = name.set("tea")
            stack.callback(lambda: (closed.append(name.get()), name.reset(token)))
            if where == "setup":
                raise InfrastructureError("broken")
            return await super().setup(stack)

        def prompt(self, env):  # type: ignore[no-untyped-def]
            if where == "look":
                raise InfrastructureError("broken")
            return super().prompt(env)

    trajectory = await advance(make(renderer, Named("a"), patience=Patience(retries=0)))
    assert (trajectory.failure is None) == (where == "nowhere")
    assert closed == ["tea"]


async def test_stages_run_in_the_context_of_whoever_asks_for_them(renderer: Renderer) -> None:
    provided: ContextVar[str] = ContextVar("provided")

    class Needing(Probe):
        async def setup(self, stack):  # type: ignore[no-untyped-def]
            provided.get()
            return await super().setup(stack)

    async def serve() -> Trajectory:
        provided.set("sandboxes")
        return await advance(rollout)

    rollout = make(renderer, Needing("a"))  # verl's agent loop makes rollouts outside of what provides their sandboxes
    trajectory = await asyncio.create_task(serve())
    assert trajectory.failure is None


@pytest.mark.parametrize("where", ["setup", "look", "score"])
async def test_a_cancelled_rollout_is_closed(renderer: Renderer, where: str) -> None:
    reached = asyncio.Event()

    async def hang(*_: object) -> object:
        reached.set()
        await asyncio.sleep(3600)
        raise AssertionError

    async def look(at: str) -> str:
        """Look."""
        await hang()
        return at

    class Hanging(Probe):
        async def setup(self, stack):  # type: ignore[no-untyped-def]
            env = await super().setup(stack)
            return await hang() if where == "setup" else env

        def tools(self, env: str) -> list[Callable[..., object]]:
            return [look, done] if where == "look" else list(super().tools(env))

        async def score(self, artifact, trajectory, stack):  # type: ignore[no-untyped-def]
            await super().score(artifact, trajectory, stack)
            return await hang()

    def done(answer: str) -> Finish:
        """Hand in."""
        return Finish(answer)

    task = Hanging("a")
    rollout = make(renderer, task)
    running = asyncio.create_task(advance(rollout))
    await reached.wait()
    assert task.diary.open > 0
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert task.diary.open == 0
    assert rollout.trajectory.failure is None, "to be cancelled is nobody's failure"


@pytest.mark.parametrize("where", ["runtime", "grader"])
async def test_who_is_cancelled_while_closing_waits_for_it(renderer: Renderer, where: str) -> None:
    closing, closed = asyncio.Event(), []

    async def close() -> None:
        closing.set()
        for _ in range(5):
            await asyncio.sleep(0)
        closed.append(where)

    class Slow(Probe):
        async def setup(self, stack: AsyncExitStack) -> str:
            if where == "runtime":
                stack.push_async_callback(close)
            return "env"

        async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
            stack.push_async_callback(close)
            return 1.0

    running = asyncio.create_task(advance(make(renderer, Slow("a"))))
    await closing.wait()
    assert closed == []
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert closed == [where]


async def test_closing_twice_does_no_harm(renderer: Renderer) -> None:
    task = Probe("a")
    rollout = make(renderer, task)
    await rollout.advance()
    await rollout.close()
    await rollout.close()
    assert task.diary.events.count("close runtime") == 1


async def test_the_gold_solution_and_doing_nothing(renderer: Renderer) -> None:
    for what, reward in (("gold", 1.0), ("noop", 0.0)):
        task = Probe("a")
        rollout = make(renderer, task)
        await rollout.advance()
        await rollout.instead_of_run(what)  # type: ignore[arg-type]
        assert rollout.next == "reward"
        await rollout.advance()
        assert rollout.next is None
        assert (rollout.trajectory.failure, rollout.trajectory.reward, task.diary.open) == (None, reward, 0)
        assert rollout.trajectory.segments == []


async def test_metrics_of_a_score_are_kept(renderer: Renderer) -> None:
    class Measured(Probe):
        async def score(self, artifact: object, trajectory: Trajectory, stack: object) -> Score:  # type: ignore[override]
            return Score(0.5, {"tests": 3.0})

    trajectory = await advance(make(renderer, Measured("a")))
    assert (trajectory.reward, trajectory.metrics) == (0.5, {"tests": 3.0})


def test_seeds_follow_from_what_a_rollout_is() -> None:
    assert seed_of(0, "train", 1, "a", 2) == seed_of(0, "train", 1, "a", 2)
    names = [
        (0, "train", 1, "a", 2),
        (1, "train", 1, "a", 2),
        (0, "eval", 1, "a", 2),
        (0, "train", 1, "a", 3),
        (0, "train", 11, "a", 2),
    ]
    assert len({seed_of(*name) for name in names}) == len(names)
    assert seed_of("ab", "c") != seed_of("a", "bc")
    assert all(0 <= seed_of(name) < 2**63 for name in ("", "a", "\ud800", "é" * 999))


def test_seeds_are_the_same_in_every_process() -> None:
    """A run that goes on tomorrow draws what it would have drawn today, so a change of this figure is a change of behaviour."""
    assert seed_of(0, "train", 0, "problem-0001", 0) == 5387570855165821754
