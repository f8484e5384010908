"""Rollouts in, complete groups out, at the trainer's pace.

`gather` feeds the groups of a plan to a dispatcher, in order, and hands each over when its last rollout has ended. `learn` takes
them: gradients accumulate as groups complete, while the rewards of others still run, and a step is made when it is full. While
its weights are published, the next step takes what it may.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol

from palestra.errors import cause
from palestra.pace import Pace
from palestra.protocols import Dispatcher, R

MayRun = Callable[[], Awaitable[bool]]

Make = Callable[[int, MayRun], Sequence[R]]
"""Makes the rollouts of one group, given its number and what their runs have to wait for."""


@dataclass(frozen=True, slots=True)
class Gathered(Generic[R]):
    """A complete group: all its rollouts have ended, in whatever way."""

    number: int
    rollouts: tuple[R, ...]


class Groups(Generic[R]):
    """Complete groups as they come, those too that were abandoned."""

    def __init__(self, complete: AsyncIterator[Gathered[R]], under_way: Mapping[int, Sequence[R]]) -> None:
        self._complete, self._under_way = complete, under_way

    def __aiter__(self) -> "Groups[R]":
        return self

    async def __anext__(self) -> Gathered[R]:
        return await anext(self._complete)

    def abandon(self, number: int) -> Sequence[R]:
        """End a group's rollouts as soon as can be; they are returned as they are. None of a group that has come out."""
        rollouts = self._under_way.get(number, ())
        for rollout in rollouts:
            rollout.abandon()
        return rollouts


@asynccontextmanager
async def gather(
    plan: AsyncIterable[Make[R]], dispatcher: Dispatcher, pace: Pace, ended: Callable[[R], None] = lambda _: None
) -> AsyncIterator[Groups[R]]:
    """The plan's groups, each as soon as its last rollout has ended; `ended` hears of every rollout at once."""
    open_groups: dict[int, Sequence[R]] = {}
    number_of: dict[R, int] = {}

    async def source() -> AsyncGenerator[R, None]:
        number = 0
        makers = aiter(plan)
        while await pace.planned(number, dispatcher.prewarms):
            try:
                make = await anext(makers)
            except StopAsyncIteration:
                return
            rollouts = make(number, _begin(pace, number))
            open_groups[number] = rollouts
            number_of.update(dict.fromkeys(rollouts, number))
            for rollout in rollouts:
                yield rollout
            number += 1

    async def complete(stream: AsyncIterator[R]) -> AsyncGenerator[Gathered[R], None]:
        missing: dict[int, int] = {}
        async for rollout in stream:
            ended(rollout)
            number = number_of.pop(rollout)
            missing[number] = missing.get(number, len(open_groups[number])) - 1
            if missing[number] == 0:
                del missing[number]
                yield Gathered(number, tuple(open_groups.pop(number)))

    async with aclosing(source()) as rollouts, dispatcher.stream(rollouts) as stream, aclosing(complete(stream)) as groups:
        yield Groups(groups, open_groups)


def _begin(pace: Pace, number: int) -> MayRun:
    return lambda: pace.begin(number)


class Learner(Protocol[R]):
    async def take(self, group: Gathered[R]) -> bool:
        """Take a group's gradients in; False when it gave none and another one is wanted in its place."""

    def abandon(self, rollouts: Sequence[R]) -> None:
        """The step is full, and does not wait for the group of these. They stay as they are now, or end soon."""

    def drop(self, group: Gathered[R]) -> None:
        """A group that was abandoned has come to its end."""

    async def update(self) -> None:
        """Make a step of what was taken."""

    async def publish(self) -> None:
        """Give its weights to those that sample. Meanwhile the next step takes groups."""


async def learn(
    groups: Groups[R],
    pace: Pace,
    learner: Learner[R],
    steps: int,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """So many steps; False when the groups ended before."""
    ready = _Ready(groups, pace, learner, stopping)
    try:
        async with asyncio.TaskGroup() as beside:
            filling = beside.create_task(ready.fill())
            done = await _steps(ready, pace, learner, steps, stopping, beside)
            filling.cancel()
    except BaseExceptionGroup as errors:
        raise cause(errors) from None
    return done


async def _steps(
    ready: "_Ready[R]", pace: Pace, learner: Learner[R], steps: int, stopping: Callable[[], bool], beside: asyncio.TaskGroup
) -> bool:
    async def publish() -> None:
        await learner.publish()
        pace.publish()
        if stopping():
            pace.stop()
        ready.look_again()

    publishing: asyncio.Task[None] | None = None
    for _ in range(steps):
        try:
            filled = await _fill_step(ready, pace, learner)
        except Exception:
            if publishing is not None:
                await publishing  # else the group of tasks would cancel it, and a step that is made would be lost
            raise
        if publishing is not None:
            await publishing
        if not filled:
            return False
        ready.abandon(pace.close_step())
        await learner.update()
        pace.update()
        publishing = beside.create_task(publish())
        await asyncio.sleep(0)  # it is under way before the next group is taken
    if publishing is not None:
        await publishing
    return True


async def _fill_step(ready: "_Ready[R]", pace: Pace, learner: Learner[R]) -> bool:
    """Take as many groups as make a step; False when they ended before."""
    while not pace.full:
        group = await ready.next()
        if group is None:
            return False
        if await learner.take(group):
            pace.take(group.number)
        else:
            pace.replace(group.number)
    return True


class _Ready(Generic[R]):
    """Complete groups that no step has taken yet. There are never more than the pace allows to begin."""

    def __init__(self, groups: Groups[R], pace: Pace, learner: Learner[R], stopping: Callable[[], bool]) -> None:
        self._groups, self._pace, self._learner, self._stopping = groups, pace, learner, stopping
        self._waiting: list[Gathered[R]] = []
        self._news = asyncio.Event()
        self._ended = False

    async def fill(self) -> None:
        async for group in self._groups:
            if self._pace.has_abandoned(group.number):
                self._learner.drop(group)
            else:
                self._waiting.append(group)
                self._news.set()
            if self._stopping():
                self._pace.stop()
        self._ended = True
        self._news.set()

    async def next(self) -> Gathered[R] | None:
        """The oldest group that the present step may take; None when no more will come."""
        while True:
            fit = [group for group in self._waiting if self._pace.may_take(group.number)]
            if fit:
                oldest = min(fit, key=lambda group: (-self._pace.staleness_of(group.number), group.number))
                self._waiting.remove(oldest)
                return oldest
            if self._ended and not self._pace.publishing:  # which may be what the groups at hand wait for
                return None
            self._news.clear()
            await self._news.wait()

    def look_again(self) -> None:
        """Weights were published: some groups may be taken that could not before."""
        self._news.set()

    def abandon(self, numbers: Sequence[int]) -> None:
        """Nobody waits for these groups any more, whether they are complete or not."""
        complete = {group.number: group for group in self._waiting}
        for number in numbers:
            group = complete.get(number)
            if group is None:
                self._learner.abandon(self._groups.abandon(number))
            else:
                self._waiting.remove(group)
                self._learner.abandon(group.rollouts)
                self._learner.drop(group)
