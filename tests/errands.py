"""Real rollouts on errands that take as long, and fail in such ways, as they are told to; and a site that counts them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from palestra.agent import Limits
from palestra.dispatch.room import Room
from palestra.errors import InfrastructureError, TaskError
from palestra.message import JSON, Message, assistant, user
from palestra.protocols import Dispatcher, Policy
from palestra.rollout import Patience, Rollout
from palestra.task import Task
from palestra.tool import Schema
from palestra.trajectory import Key, Segment, Stage, Trajectory, Turn

FOR_EVER = 1e6

Fault = Literal["none", "bug", "once", "always", "hang", "cancel", "mend"]
"""A stage that works, that raises, that the infrastructure breaks the first time or every time, that hangs past its limit, whose
own code raises CancelledError, and one that the user has to mend."""


@dataclass(frozen=True)
class Errand:
    """What is to happen to one rollout."""

    seconds: dict[Stage, float]
    faults: dict[Stage, Fault]
    closing: float = 0.0
    tokens: int = 1


@dataclass
class Site:
    """Counts what is under way."""

    inside: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    tries: Counter[tuple[str, Stage]] = field(default_factory=Counter)

    def enter(self, what: str, amount: int = 1) -> None:
        self.inside[what] += amount
        self.most[what] = max(self.most[what], self.inside[what])

    @contextmanager
    def within(self, what: str, amount: int = 1) -> Iterator[None]:
        self.enter(what, amount)
        try:
            yield
        finally:
            self.inside[what] -= amount

    def open(self, stack: AsyncExitStack, what: str, closing: float) -> None:
        async def close() -> None:
            try:
                await asyncio.sleep(closing)
            finally:
                self.inside[what] -= 1

        self.enter(what)
        stack.push_async_callback(close)


@dataclass(frozen=True)
class Job(Task[None, JSON]):
    errand: Errand
    site: Site

    async def setup(self, stack: AsyncExitStack) -> None:
        with self.site.within("inflight"), self.site.within("init"):
            self.site.open(stack, "runtimes", self.errand.closing)
            await self.work("init")

    def prompt(self, env: None) -> Sequence[Message]:
        return [user("go")]

    def tools(self, env: None) -> Sequence[object]:  # type: ignore[override]
        return []

    async def harvest(self, env: None, trajectory: Trajectory) -> JSON:
        if self.errand.faults["run"] == "hang":  # where the run itself is too long, it stops, and that is no failure
            await asyncio.sleep(FOR_EVER)
        return trajectory.answer

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        with self.site.within("inflight"), self.site.within("reward"):
            self.site.open(stack, "graders", self.errand.closing)
            await self.work("reward")
        return 1.0

    async def work(self, stage: Stage) -> None:
        self.site.tries[self.id, stage] += 1
        await asyncio.sleep(self.errand.seconds[stage])
        match self.errand.faults[stage]:
            case "bug":
                raise ValueError("a bug")
            case "cancel":
                raise asyncio.CancelledError
            case "mend":
                raise TaskError("mend it")
            case "always":
                raise InfrastructureError("no sandbox")
            case "once" if self.site.tries[self.id, stage] == 1:
                raise InfrastructureError("no sandbox this time")
            case "hang" if stage != "run":
                await asyncio.sleep(FOR_EVER)


@dataclass
class Quick:
    """A policy that works for a while and then answers."""

    job: Job
    segments: list[Segment] = field(default_factory=list)

    async def begin(self, messages: Sequence[Message], tools: Sequence[Schema]) -> None: ...

    async def act(self) -> Turn | None:
        await self.job.work("run")
        return Turn(assistant("done"), "stop", 0, (0, 0))

    async def observe(self, messages: Sequence[Message]) -> None: ...


def attempt(
    name: str,
    errand: Errand,
    site: Site,
    patience: Patience,
    may_run: Callable[[], Awaitable[bool]],
    kv: int = 0,
    on_run: Callable[[], None] = lambda: None,
) -> Rollout:
    """A rollout for an errand. One that is larger than the whole KV counts as all of it."""
    job = Job(name, errand, site)

    @asynccontextmanager
    async def open_policy(seed: int) -> AsyncIterator[Policy]:
        on_run()
        size = min(errand.tokens, kv or errand.tokens)
        with site.within("inflight"), site.within("run"), site.within("kv", size):
            yield Quick(job)

    key, limits = Key("train", 0, name, 0), Limits(3, 1000.0)
    return Rollout(job, key, open_policy, limits, 0, patience=patience, may_run=may_run, expected_tokens=errand.tokens)


def check_left(dispatcher: Dispatcher, site: Site, others: Set[asyncio.Task[Any]] = frozenset()) -> None:
    """Nothing is open, nobody is inside, and no task is left."""
    assert {what: count for what, count in site.inside.items() if count} == {}, "something is still open"
    assert asyncio.all_tasks() - others == {asyncio.current_task()} - others, "a task outlives the block"
    values = [part for value in vars(dispatcher).values() for part in (value.values() if isinstance(value, dict) else [value])]
    assert all(room.inside == 0 for room in values if isinstance(room, Room)), "a place is still taken"
