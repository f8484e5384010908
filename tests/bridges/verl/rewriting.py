"""A task whose attempts have two segments each, and of which some fail for good."""

import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from palestra import Message, Rewrite, Task, Trajectory, system, user
from palestra.errors import InfrastructureError


@dataclass(frozen=True)
class Restless(Task[None, str]):
    async def setup(self, stack: AsyncExitStack) -> None:
        if random.random() < 0.25:
            raise InfrastructureError("no sandbox today")

    def prompt(self, env: None) -> Sequence[Message]:
        return [system("Say where things are."), user("Where is the red kite?")]

    def tools(self, env: None) -> Sequence[Callable[..., object]]:
        def look_up(thing: str) -> Rewrite:
            """Say where a thing is."""
            return Rewrite([user(f"Where is the {thing}?")])

        def finish(place: str) -> Rewrite:
            """Hand in the place."""
            return Rewrite([user(f"Is it in the {place}?")])

        return [look_up, finish]

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return float(len(trajectory.segments) > 1 and trajectory.segments[0].tokens[-3] % 2)

    async def solve(self, env: None) -> str:
        return ""


def tasks() -> list[Restless]:
    return [Restless(f"restless-{number}") for number in range(8)]


def others() -> list[Restless]:
    return [Restless(f"other-{number}") for number in range(2)]
