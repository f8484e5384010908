"""What the infrastructure broke is tried again, time limits hold, and whoever is abandoned ends: all on a clock that jumps."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from playing import Probe, calling, play

from palestra.agent import Limits
from palestra.backends.scripted import ScriptedSession
from palestra.errors import InfrastructureError
from palestra.lab import clock
from palestra.message import JSON
from palestra.policy import TokenPolicy
from palestra.protocols import Policy, Renderer, Sampling
from palestra.rollout import CLOSE_SECONDS, Patience, Rollout, run_through
from palestra.trajectory import Failure, Key, Stage, Trajectory

FOR_EVER = 1e6
BROKEN = InfrastructureError("no sandbox")


@dataclass(frozen=True)
class Flaky(Probe):
    """In each method it first breaks as often as it is told to, and hangs where it is told to."""

    mishaps: dict[str, list[BaseException]] = field(default_factory=dict, compare=False)
    hangs: dict[str, float] = field(default_factory=dict, compare=False)

    def _reach(self, method: str) -> None:
        super()._reach(method)
        if self.mishaps.get(method):
            raise self.mishaps[method].pop(0)

    async def setup(self, stack: AsyncExitStack) -> str:
        self._open_part(stack, "closing")
        env = await super().setup(stack)
        await self._hang("setup")
        return env

    async def harvest(self, env: str, trajectory: Trajectory) -> JSON:
        await self._hang("harvest")
        return await super().harvest(env, trajectory)

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        self._open_part(stack, "closing the grader")
        reward = await super().score(artifact, trajectory, stack)
        await self._hang("score")
        return reward

    async def _hang(self, method: str) -> None:
        await asyncio.sleep(self.hangs.get(method, 0.0))

    def _open_part(self, stack: AsyncExitStack, closing: str) -> None:
        """A part of the runtime that may take its time to close."""

        async def close() -> None:
            try:
                await self._hang(closing)
            finally:
                await self.diary.close("part")

        self.diary.opened("part")
        stack.push_async_callback(close)

    def count(self, event: str) -> int:
        return self.diary.events.count(event)


def attempt(renderer: Renderer, task: Probe, patience: Patience = Patience(), seconds: float = 60.0) -> Rollout:  # noqa: B008
    """Each of its runs looks around and then hands in the right answer."""

    @asynccontextmanager
    async def open_policy(seed: int) -> AsyncIterator[Policy]:
        task.diary.opened("session")
        replies = play(calling(("look", {"at": "tea"})), calling(("done", {"answer": "right"})))
        try:
            yield TokenPolicy(ScriptedSession(replies, renderer), renderer, Sampling(), 100_000)
        finally:
            await task.diary.close("session")

    return Rollout(task, Key("train", 4, task.id, 3), open_policy, Limits(8, seconds), 7, patience=patience)


def play_out(rollout: Rollout) -> tuple[Trajectory, float]:
    """All its stages, and how many seconds they took."""

    async def whole() -> float:
        await run_through(rollout)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time()

    seconds = clock.run(whole())
    assert rollout.next is None
    return rollout.trajectory, seconds


def stages(trajectory: Trajectory) -> list[str]:
    return [span.what for span in trajectory.spans if span.what in ("init", "run", "reward")]


# Retries


def test_a_reward_is_tried_again_without_its_run(renderer: Renderer) -> None:
    task = Flaky("a", mishaps={"score": [BROKEN, InfrastructureError("still none")]})
    trajectory, seconds = play_out(attempt(renderer, task))
    assert (trajectory.reward, trajectory.failure) == (1.0, None)
    assert trajectory.retried == [
        Failure("reward", "infrastructure", "no sandbox"),
        Failure("reward", "infrastructure", "still none"),
    ]
    assert (task.count("setup"), task.count("open session"), task.count("score")) == (1, 1, 3)
    assert (task.count("open grader"), task.diary.open) == (3, 0), "each reward has a runtime of its own"
    assert stages(trajectory) == ["init", "run", "reward", "reward", "reward"]
    assert seconds == 1.0 + 2.0, "the back-off doubles"


def test_a_failed_init_is_tried_again_from_the_beginning(renderer: Renderer) -> None:
    task = Flaky("a", mishaps={"setup": [BROKEN]})
    rollout = attempt(renderer, task)
    first = rollout.trajectory
    trajectory, seconds = play_out(rollout)
    assert trajectory is not first
    assert (trajectory.task_id, trajectory.index, trajectory.reward, trajectory.failure) == ("a", 3, 1.0, None)
    assert trajectory.retried == [Failure("init", "infrastructure", "no sandbox")]
    assert stages(trajectory) == ["init", "init", "run", "reward"]
    assert seconds == 1.0
    events = task.diary.events
    assert events.index("close runtime") < events.index("setup", events.index("setup") + 1), "closed before it is opened anew"
    assert (task.count("open runtime"), task.count("close runtime"), task.diary.open) == (2, 2, 0)


@pytest.mark.parametrize("where", ["look", "harvest", "closing"])
def test_a_run_that_the_infrastructure_broke_begins_anew(renderer: Renderer, where: str) -> None:
    task = Flaky("a", mishaps={where: [BROKEN]})
    trajectory, _ = play_out(attempt(renderer, task))
    assert (trajectory.reward, trajectory.failure, trajectory.answer) == (1.0, None, "right")
    assert trajectory.retried == [Failure("run", "infrastructure", "no sandbox")]
    assert (len(trajectory.openings), len(trajectory.segments), len(trajectory.turns)) == (1, 1, 2), "nothing of the first try"
    assert stages(trajectory) == ["init", "run", "init", "run", "reward"]
    assert sum(span.what == "sample" for span in trajectory.spans) == (3 if where == "look" else 4), "what it cost is kept"
    assert (task.count("open runtime"), task.count("open session"), task.diary.open) == (2, 2, 0)


def test_retries_are_bounded_and_the_last_failure_stands(renderer: Renderer) -> None:
    task = Flaky("a", breaks={"setup": BROKEN})
    trajectory, seconds = play_out(attempt(renderer, task, Patience(retries=3, backoff=0.5)))
    assert trajectory.failure == Failure("init", "infrastructure", "no sandbox")
    assert (trajectory.reward, len(trajectory.retried), task.count("setup")) == (None, 3, 4)
    assert seconds == 0.5 + 1.0 + 2.0
    assert (task.count("close runtime"), task.diary.open) == (4, 0)


def test_all_stages_share_their_retries(renderer: Renderer) -> None:
    mishaps: dict[str, list[BaseException]] = {"setup": [BROKEN], "look": [BROKEN], "score": [BROKEN, BROKEN]}
    trajectory, seconds = play_out(attempt(renderer, Flaky("a", mishaps=mishaps), Patience(retries=3)))
    assert trajectory.failure == Failure("reward", "infrastructure", "no sandbox")
    assert [failure.stage for failure in trajectory.retried] == ["init", "run", "reward"]
    assert stages(trajectory) == ["init", "init", "run", "init", "run", "reward", "reward"]
    assert seconds == 1.0 + 2.0 + 4.0


@pytest.mark.parametrize("where", ["setup", "look", "harvest", "score"])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()])
def test_a_bug_would_only_repeat_itself(renderer: Renderer, where: str, error: BaseException) -> None:
    task = Flaky("a", mishaps={where: [error]})
    trajectory, seconds = play_out(attempt(renderer, task))
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.retried, trajectory.reward) == ("bug", [], None)
    assert (task.count(where), task.diary.open, seconds) == (1, 0, 0.0)


async def test_each_retry_is_a_stage_of_its_own(renderer: Renderer) -> None:
    """A dispatcher sees which stage comes next, and when."""
    rollout = attempt(renderer, Flaky("a", mishaps={"setup": [BROKEN], "score": [BROKEN]}))
    seen: list[tuple[Stage | None, float]] = [(rollout.next, rollout.rest)]
    while rollout.next is not None:
        await rollout.advance()
        seen.append((rollout.next, rollout.rest))
    assert seen == [("init", 0), ("init", 1.0), ("run", 0), ("reward", 0), ("reward", 2.0), (None, 0)]


async def test_a_failed_reward_leaves_no_reward_behind(renderer: Renderer) -> None:
    rollout = attempt(renderer, Flaky("a", mishaps={"score": [BROKEN]}))
    for _ in range(3):
        await rollout.advance()
    assert (rollout.next, rollout.trajectory.reward, rollout.trajectory.failure) == ("reward", None, None)
    assert rollout.trajectory.turns, "what it did is kept"


# Time limits

SHORT = Patience(init_seconds=5.0, reward_seconds=7.0, retries=1, backoff=10.0)


def test_a_setup_that_hangs_is_tried_again(renderer: Renderer) -> None:
    task = Flaky("a", hangs={"setup": FOR_EVER})
    trajectory, seconds = play_out(attempt(renderer, task, SHORT))
    complaint = Failure("init", "timeout", "setup() took longer than dispatch.init_seconds = 5")
    assert (trajectory.failure, trajectory.retried) == (complaint, [complaint])
    assert (task.count("close runtime"), task.diary.open, seconds) == (2, 0, 5.0 + 10.0 + 5.0)


@pytest.mark.parametrize(
    ("where", "seconds", "failure"),
    [
        ("harvest", 5.0, Failure("run", "timeout", "harvest() took longer than dispatch.init_seconds = 5")),
        ("score", 7.0, Failure("reward", "timeout", "score() took longer than dispatch.reward_seconds = 7")),
    ],
)
def test_what_hangs_after_the_run_is_not_tried_again(renderer: Renderer, where: str, seconds: float, failure: Failure) -> None:
    task = Flaky("a", hangs={where: FOR_EVER})
    trajectory, took = play_out(attempt(renderer, task, SHORT))
    assert (trajectory.failure, trajectory.retried, took, task.diary.open) == (failure, [], seconds, 0)


def test_who_is_told_that_the_time_is_over_and_goes_on_is_too_late_all_the_same(renderer: Renderer) -> None:
    class Deaf(Probe):
        async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
            try:
                await asyncio.sleep(FOR_EVER)
            except asyncio.CancelledError:
                await asyncio.sleep(1.0)
            return 1.0

    trajectory, took = play_out(attempt(renderer, Deaf("a"), SHORT))
    assert trajectory.failure == Failure("reward", "timeout", "score() took longer than dispatch.reward_seconds = 7")
    assert (trajectory.reward, took) == (None, 8.0)


def test_a_limit_within_the_task_is_its_own(renderer: Renderer) -> None:
    task = Flaky("a", breaks={"score": TimeoutError("the tests took longer than 3 s")})
    trajectory, _ = play_out(attempt(renderer, task, SHORT))
    assert trajectory.failure == Failure("reward", "timeout", "the tests took longer than 3 s")


@pytest.mark.parametrize(("where", "stage"), [("closing", "run"), ("closing the grader", "reward")])
def test_a_runtime_that_will_not_close_is_given_up(renderer: Renderer, where: str, stage: Stage) -> None:
    task = Flaky("a", hangs={where: FOR_EVER})
    trajectory, seconds = play_out(attempt(renderer, task))
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.failure.kind, trajectory.reward) == (stage, "timeout", None)
    assert f"{CLOSE_SECONDS:g}" in trajectory.failure.detail
    assert (seconds, task.diary.open) == (CLOSE_SECONDS, 0), "the rest of it is closed"


@dataclass(frozen=True)
class Stubborn(Probe):
    """Its runtime has many parts, none of which will close."""

    shielded: bool = False

    async def setup(self, stack: AsyncExitStack) -> str:
        async def never() -> None:
            if self.shielded:
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.sleep(FOR_EVER)
            await asyncio.sleep(FOR_EVER)

        for _ in range(1 if self.shielded else 3):
            stack.push_async_callback(never)
        return "env"


@pytest.mark.parametrize("shielded", [False, True], ids=["in many parts", "that does not listen"])
def test_a_runtime_of_several_parts_that_will_not_close_is_given_up_too(renderer: Renderer, shielded: bool) -> None:
    async def whole() -> float:
        rollout = attempt(renderer, Stubborn("a", shielded=shielded))
        await run_through(rollout)
        assert rollout.trajectory.failure is not None
        assert rollout.trajectory.failure.kind == "timeout"
        return asyncio.get_running_loop().time()

    assert clock.run(whole()) <= 10 * CLOSE_SECONDS


def test_who_is_cancelled_waits_for_a_hanging_runtime_no_longer_than_the_limit(renderer: Renderer) -> None:
    async def whole() -> float:
        rollout = attempt(renderer, Flaky("a", hangs={"setup": FOR_EVER, "closing": FOR_EVER}))
        running = asyncio.create_task(run_through(rollout))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time()

    assert clock.run(whole()) == 1 + CLOSE_SECONDS


# Abandoning

ABANDONED = "its step no longer waits for it"


def when_abandoned(rollout: Rollout, at: float, then: Callable[[asyncio.Task[None]], Awaitable[None]] | None = None) -> float:
    """Play it out, abandon it at some time, and say when it ended."""

    async def whole() -> float:
        running = asyncio.create_task(run_through(rollout))
        await asyncio.sleep(at)
        rollout.abandon()
        if then is not None:
            await then(running)
        else:
            await running
            assert running.cancelling() == 0, "nobody cancelled whoever carried it"
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time()

    return clock.run(whole())


@pytest.mark.parametrize(("where", "stage"), [("setup", "init"), ("harvest", "run"), ("score", "reward")])
def test_an_abandoned_rollout_ends_in_the_midst_of_its_stage(renderer: Renderer, where: str, stage: Stage) -> None:
    task = Flaky("a", hangs={where: 50.0})
    rollout = attempt(renderer, task)
    assert when_abandoned(rollout, 20.0) == 20.0
    assert rollout.trajectory.failure == Failure(stage, "abandoned", ABANDONED)
    assert (rollout.next, rollout.trajectory.reward, rollout.trajectory.retried, task.diary.open) == (None, None, [], 0)
    assert stages(rollout.trajectory)[-1] == stage


def test_one_that_is_abandoned_before_it_began_opens_nothing(renderer: Renderer) -> None:
    task = Flaky("a")
    rollout = attempt(renderer, task)
    rollout.abandon()
    trajectory, _ = play_out(rollout)
    assert (trajectory.failure, task.diary.events) == (Failure("init", "abandoned", ABANDONED), [])


async def test_one_that_is_abandoned_between_stages_does_not_go_on(renderer: Renderer) -> None:
    task = Flaky("a")
    rollout = attempt(renderer, task)
    await rollout.advance()
    assert await rollout.may_run()
    rollout.abandon()
    await rollout.advance()
    await rollout.close()
    assert (rollout.next, rollout.trajectory.failure) == (None, Failure("run", "abandoned", ABANDONED))
    assert (task.count("open session"), task.diary.open) == (0, 0)


async def test_may_run_is_what_it_was_given_until_it_is_abandoned(renderer: Renderer) -> None:
    answers = [True, False]

    async def may_run() -> bool:
        return answers.pop(0)

    open_policy = attempt(renderer, Probe("a"))._open_policy
    rollout = Rollout(Probe("a"), Key("train", 0, "a", 0), open_policy, Limits(1, 1.0), 0, may_run=may_run)
    assert [await rollout.may_run(), await rollout.may_run()] == [True, False]
    rollout.abandon()
    await rollout.may_run()  # without asking: there is no answer left
    assert await Rollout(Probe("a"), Key("train", 0, "a", 0), open_policy, Limits(1, 1.0), 0).may_run()


def test_one_that_rests_when_it_is_abandoned_is_not_tried_again(renderer: Renderer) -> None:
    task = Flaky("a", breaks={"setup": BROKEN})
    rollout = attempt(renderer, task, Patience(backoff=8.0))
    when_abandoned(rollout, 3.0)
    assert (rollout.trajectory.failure, rollout.next) == (Failure("init", "abandoned", ABANDONED), None)
    assert (task.count("setup"), len(rollout.trajectory.retried)) == (1, 1)


@pytest.mark.parametrize("where", ["setup", "harvest"])
def test_one_that_is_abandoned_while_it_closes_is_closed_in_whole(renderer: Renderer, where: str) -> None:
    task = Flaky("a", hangs={"closing": 10.0}, mishaps={where: [BROKEN]})
    rollout = attempt(renderer, task)
    assert when_abandoned(rollout, 5.0) >= 10.0
    assert rollout.trajectory.failure is not None
    assert (rollout.trajectory.failure.kind, task.count("setup"), task.diary.open) == ("abandoned", 1, 0)


def test_to_abandon_what_has_ended_changes_nothing(renderer: Renderer) -> None:
    rollout = attempt(renderer, Flaky("a"))
    trajectory, _ = play_out(rollout)
    rollout.abandon()
    assert (trajectory.reward, trajectory.failure, rollout.next) == (1.0, None, None)


async def _cancelled(running: asyncio.Task[None]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("where", ["setup", "harvest", "score"])
def test_who_is_cancelled_in_the_moment_of_being_abandoned_is_cancelled(renderer: Renderer, where: str) -> None:
    task = Flaky("a", hangs={where: 50.0})
    when_abandoned(attempt(renderer, task), 20.0, _cancelled)
    assert task.diary.open == 0


@pytest.mark.parametrize("where", ["setup", "harvest", "score"])
def test_who_is_cancelled_while_it_closes_because_it_was_abandoned_is_closed_in_whole(renderer: Renderer, where: str) -> None:
    closing = {"closing": 10.0, "closing the grader": 10.0}
    task = Flaky("a", hangs={where: 50.0} | closing)

    async def then(running: asyncio.Task[None]) -> None:
        await asyncio.sleep(5.0)
        await _cancelled(running)
        assert task.diary.open == 0, "when it returns, everything is closed"

    when_abandoned(attempt(renderer, task), 20.0, then)
