"""Where is the red kite? Look it up, then hand in what the register said. Small enough for a model of half a million weights,
so that every backend can be seen to learn on one CPU core."""

import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache

from palestra import Finish, Message, Task, ToolError, Trajectory, system, user

_COLOURS = "red blue green black white brown pink grey gold silver amber ivory coral olive azure purple"
_THINGS = (
    "kite bell lamp drum rope cup coat ring boat fork jar bowl clock brush map flag key hat book chair "
    "spoon plate broom ladder saw basket candle mirror pillow bucket"
)
_PLACES = (
    "cellar attic garage garden kitchen hall office closet barn shed study pantry porch tower stable vault cabin "
    "studio lobby library"
)
PLACES = _PLACES.split()
HELDOUT = 240


class Register:
    """What one attempt works with: the place of one thing."""

    def __init__(self, thing: str, place: str) -> None:
        self._thing, self._place = thing, place

    def look_up(self, thing: str) -> str:
        """Say where a thing is.

        Args:
            thing: colour and name
        """
        if thing.strip() != self._thing:
            raise ToolError("no such thing")
        return self._place


def finish(place: str) -> Finish:
    """Hand in the place.

    Args:
        place: one word
    """
    return Finish(place)


@dataclass(frozen=True)
class Whereabouts(Task[Register, str]):
    thing: str
    place: str

    async def setup(self, stack: AsyncExitStack) -> Register:
        return Register(self.thing, self.place)

    def prompt(self, env: Register) -> Sequence[Message]:
        return [system("Say where things are."), user(f"Where is the {self.thing}?")]

    def tools(self, env: Register) -> Sequence[Callable[..., object]]:
        return [env.look_up, finish]

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return 1.0 if trajectory.stop == "finish" and str(artifact).strip() == self.place else 0.0

    async def solve(self, env: Register) -> str:
        return env.look_up(self.thing)


@cache
def _things() -> tuple[str, ...]:
    things = [f"{colour} {thing}" for colour in _COLOURS.split() for thing in _THINGS.split()]
    random.Random(0).shuffle(things)
    return tuple(things)


def _task(thing: str, place: str) -> Whereabouts:
    return Whereabouts(f"{thing.replace(' ', '-')}-{place}", thing, place)


def heldout() -> Sequence[Whereabouts]:
    """So many things, each in one place. No training task is about any of them."""
    chance = random.Random(1)
    return [_task(thing, chance.choice(PLACES)) for thing in _things()[:HELDOUT]]


def train() -> Sequence[Whereabouts]:
    """All other things, in every place."""
    return [_task(thing, place) for thing in _things()[HELDOUT:] for place in PLACES]
