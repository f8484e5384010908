"""What several tests play with: scripts of replies, a sampler that throws dice, and a task that keeps a diary."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from palestra.backends.scripted import Reply, Script
from palestra.message import JSON, Message, ToolCall, assistant, user
from palestra.protocols import Capacity, Renderer, Sampling
from palestra.task import Task
from palestra.tool import Finish
from palestra.trajectory import Completion, Trajectory


def calling(*calls: tuple[str, dict[str, JSON]], text: str = "") -> Message:
    """A reply with these calls: names and arguments."""
    return assistant(text, *(ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)))


def play(*replies: Reply) -> Script:
    """One reply after the other, whatever is said."""
    left = iter(replies)
    return lambda _: next(left)


def done(answer: str) -> Finish:
    """Hand in.

    Args:
        answer: the answer
    """
    return Finish(answer)


@dataclass
class Diary:
    events: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    def opened(self, name: str) -> None:
        self.events.append(f"open {name}")
        self.open += 1
        self.most_open = max(self.most_open, self.open)

    async def close(self, name: str) -> None:
        await asyncio.sleep(0)  # closing takes a while: whoever cancels has to wait for it
        await asyncio.sleep(0)
        self.open -= 1
        self.events.append(f"close {name}")


@dataclass(frozen=True)
class Probe(Task[str, JSON]):
    """Answered rightly with `done("right")`. It breaks, with the given exception, in the methods (or tool) that it is told to."""

    diary: Diary = field(default_factory=Diary, compare=False)
    breaks: Mapping[str, BaseException] = field(default_factory=dict, compare=False)
    more_tools: Sequence[Callable[..., object]] = ()

    def _reach(self, method: str) -> None:
        self.diary.events.append(method)
        if method in self.breaks:
            raise self.breaks[method]

    async def setup(self, stack: AsyncExitStack) -> str:
        self.diary.opened("runtime")
        stack.push_async_callback(self.diary.close, "runtime")
        stack.callback(self._reach, "closing")
        self._reach("setup")
        return "env"

    def prompt(self, env: str) -> Sequence[Message]:
        self._reach("prompt")
        return [user(f"Solve {self.id}.")]

    def tools(self, env: str) -> Sequence[Callable[..., object]]:
        def look(at: str) -> str:
            """Look."""
            self._reach("look")
            return f"There is {at}."

        return [look, done, *self.more_tools]

    async def harvest(self, env: str, trajectory: Trajectory) -> JSON:
        self._reach("harvest")
        return trajectory.answer

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        self.diary.opened("grader")
        stack.push_async_callback(self.diary.close, "grader")
        self._reach("score")
        return float(artifact == "right")

    async def solve(self, env: str) -> JSON:
        return "right"


@dataclass
class Dice:
    """A sampler that looks at the tea and then answers rightly or wrongly, as its seed has it."""

    renderer: Renderer
    seeds: list[int] = field(default_factory=list)
    open: int = 0
    version: Callable[[], int] = lambda: 0
    """Of the policy, at every call."""

    @property
    def capacity(self) -> Capacity | None:
        return None

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator["_Throw"]:
        self.seeds.append(seed)
        self.open += 1
        yield _Throw(random.Random(seed), self.renderer, self.version)
        self.open -= 1


@dataclass
class _Throw:
    chance: random.Random
    renderer: Renderer
    version: Callable[[], int]
    turns: int = 0

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        self.turns += 1
        for _ in range(self.chance.randrange(6)):  # so that they finish in another order than they began
            await asyncio.sleep(0)
        look, right, wrong = ("look", {"at": "tea"}), ("done", {"answer": "right"}), ("done", {"answer": "wrong"})
        reply = self.renderer.reply(calling(look if self.turns == 1 else self.chance.choice([right, wrong])))
        return Completion(reply, [-self.chance.random() for _ in reply], [self.version()] * len(reply), "stop")
