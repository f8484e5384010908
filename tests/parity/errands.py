"""What the recorded trajectories are about: the bridges' task as it is, in contexts that are rewritten, and with a bad day."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from palestra import InfrastructureError, Rewrite, Trajectory

RECIPE = Path(__file__).parents[2] / "recipes" / "bridges"

_spec = importlib.util.spec_from_file_location("whereabouts", RECIPE / "task.py")
assert _spec is not None
assert _spec.loader is not None
whereabouts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(whereabouts)


@dataclass(frozen=True)
class Forgetful(whereabouts.Whereabouts):  # type: ignore[misc, name-defined]
    """Looking something up is worth it all by itself, and begins a new segment. The second attempt never begins."""

    begun: list[None] = field(default_factory=list, compare=False)

    async def setup(self, stack: AsyncExitStack) -> object:
        self.begun.append(None)
        if len(self.begun) == 2:
            raise InfrastructureError("no register today")
        return await super().setup(stack)

    def tools(self, env: object) -> Sequence[Callable[..., object]]:
        def look_up(thing: str) -> Rewrite:
            """Say where a thing is.

            Args:
                thing: colour and name
            """
            return Rewrite(self.prompt(env))

        return [look_up, whereabouts.finish]

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return float(len(trajectory.segments) > 1)


def tasks() -> Sequence[object]:
    plain, rewritten = whereabouts.heldout()[:3], whereabouts.heldout()[3:6]
    return [*plain, *(Forgetful(task.id, task.thing, task.place) for task in rewritten)]


def others() -> Sequence[object]:
    return list(whereabouts.heldout()[6:7])
