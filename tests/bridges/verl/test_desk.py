"""Rollouts that are asked for one by one go through our dispatcher, within its limits."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass

import pytest

from palestra import agent
from palestra.bridges.verl.desk import Desk
from palestra.dispatch.bounded import Bounded
from palestra.errors import TaskError
from palestra.message import Message, assistant, user
from palestra.protocols import Policy
from palestra.rollout import Rollout
from palestra.task import Task
from palestra.trajectory import Key, Segment, Trajectory, Turn

OPEN = {"now": 0, "most": 0}


@dataclass(frozen=True)
class Patient(Task[None, str]):
    wrong: bool = False

    async def setup(self, stack: AsyncExitStack) -> None:
        OPEN["now"] += 1
        OPEN["most"] = max(OPEN.values())
        stack.callback(lambda: OPEN.__setitem__("now", OPEN["now"] - 1))
        await asyncio.sleep(0)

    def prompt(self, env: None) -> Sequence[Message]:
        return [user("?")]

    def tools(self, env: None) -> list[object]:
        return []

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return "no number" if self.wrong else 1.0  # type: ignore[return-value]


class Says:
    segments: list[Segment] = []  # noqa: RUF012

    async def begin(self, messages: Sequence[Message], tools: object) -> None: ...

    async def act(self) -> Turn:
        return Turn(assistant("yes"), "stop", 0, (0, 0))

    async def observe(self, messages: Sequence[Message]) -> None: ...


@asynccontextmanager
async def policy(seed: int) -> AsyncIterator[Policy]:
    yield Says()


def rollout(index: int, wrong: bool = False) -> Rollout:
    return Rollout(Patient("t", wrong), Key("train", 0, "t", index), policy, agent.Limits(2, 10.0), 0)


async def test_every_rollout_ends_and_no_more_run_at_once_than_the_dispatcher_allows() -> None:
    OPEN.update(now=0, most=0)
    desk = Desk(Bounded(3), nullcontext())
    rollouts = [rollout(index) for index in range(20)]
    await asyncio.gather(*(desk.through(one) for one in rollouts))
    assert [one.trajectory.reward for one in rollouts] == [1.0] * 20
    assert OPEN["most"] <= 3


async def test_what_the_user_has_to_mend_reaches_everybody() -> None:
    desk = Desk(Bounded(1), nullcontext())
    waiting = [asyncio.create_task(desk.through(rollout(index, wrong=True))) for index in range(3)]
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, TaskError) for error in done)
    with pytest.raises(TaskError):
        await desk.through(rollout(9))
