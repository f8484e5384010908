"""Rewards take turns: the longest first, as far as attempts at the same task tell."""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

import pytest

from palestra.dispatch.rewards import Rewards
from palestra.lab import clock
from palestra.trajectory import Stage


@dataclass
class Judged:
    kin: Hashable
    seconds: float
    log: list[Hashable]
    group: Hashable = None
    next: Stage | None = "reward"
    rest: float = 0.0
    expected_tokens: int = 0

    async def may_run(self) -> bool:
        return True

    async def advance(self) -> None:
        self.log.append(self.kin)
        await asyncio.sleep(self.seconds)
        self.next = None

    def abandon(self) -> None: ...

    async def close(self) -> None: ...


def judge(size: int, *kin_and_seconds: tuple[str, float]) -> list[Hashable]:
    """In which order rewards begin that all come at once."""
    log: list[Hashable] = []
    judge_all(size, *(Judged(kin, seconds, log) for kin, seconds in kin_and_seconds))
    return log


def judge_all(size: int, *judged: Judged) -> None:
    async def at_once() -> None:
        rewards = Rewards(size)
        async with asyncio.TaskGroup() as tasks:
            for number, each in enumerate(judged):
                tasks.create_task(rewards.advance(each, number))

    clock.run(at_once())


def test_without_knowledge_they_go_by_number() -> None:
    assert judge(1, ("a", 1), ("b", 1), ("c", 1)) == ["a", "b", "c"]


def test_a_task_whose_reward_took_long_goes_first_and_a_quick_one_last() -> None:
    order = judge(1, ("quick", 1), ("slow", 9), ("quick", 1), ("slow", 9), ("new", 5))
    assert order == ["quick", "slow", "slow", "new", "quick"]


def test_what_nothing_is_known_of_goes_before_the_usual() -> None:
    assert judge(1, ("a", 4), ("b", 6), ("usual", 5), ("usual", 5), ("new", 5)) == ["a", "b", "usual", "new", "usual"]


def test_one_that_still_lasts_tells_that_its_task_is_slow() -> None:
    order = judge(2, ("slow", 100), ("quick", 1), ("quick", 1), ("new", 1), ("slow", 100))
    assert order == ["slow", "quick", "quick", "slow", "new"]


def test_between_rewards_that_are_alike_the_group_goes_first_that_is_closer_to_complete() -> None:
    log: list[Hashable] = []
    judge_all(1, *(Judged(group, 5, log, group) for group in "abab"))
    assert log == ["a", "a", "b", "b"]


def test_one_that_is_tried_again_tells_nothing_of_its_task_nor_of_its_group() -> None:
    log: list[Hashable] = []

    class Failing(Judged):
        async def advance(self) -> None:
            await super().advance()
            self.next = "reward"

    others = [Judged(group, 5, log, group) for group in "bca"]
    judge_all(1, Failing("a", 50, log, "a"), *others)
    assert log == ["a", "b", "c", "a"]


def test_a_group_of_an_earlier_step_counts_for_nothing() -> None:
    log: list[Hashable] = []
    tasks_and_groups = [("old", "0 old"), ("old", "0 old"), ("new", "1 new"), ("old", "1 old"), ("new", "1 new")]
    judge_all(1, *(Judged(task, 5, log, group) for task, group in tasks_and_groups))
    assert log == ["old", "old", "new", "new", "old"]


def test_one_that_takes_much_longer_goes_before_a_group_that_is_closer_to_complete() -> None:
    log: list[Hashable] = []
    slow, quick = Judged("slow", 50, log, "a step before"), [Judged("quick", 5, log, "quick") for _ in range(3)]
    judge_all(1, slow, *quick, Judged("slow", 50, log, "slow"))
    assert log == ["slow", "quick", "slow", "quick", "quick"]


@pytest.mark.parametrize("after", range(4))
async def test_one_that_is_cancelled_gives_way_however_late(after: int) -> None:
    """`after` so many turns of the event loop: while it waits, as it is let in, and when it is inside."""
    rewards, log = Rewards(1), list[Hashable]()
    first, second, third = (asyncio.create_task(rewards.advance(Judged(name, 0, log), n)) for n, name in enumerate("abc"))
    for _ in range(after):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait_for(asyncio.gather(first, second, third, return_exceptions=True), 5)
    await asyncio.wait_for(rewards.advance(Judged("d", 0, log), 3), 5)
    assert [name for name in log if name != "b"] == ["a", "c", "d"]


async def test_one_that_is_cancelled_in_the_moment_of_its_turn_takes_no_place() -> None:
    rewards, log = Rewards(1), list[Hashable]()

    class Canceller(Judged):
        async def advance(self) -> None:
            await asyncio.sleep(0)
            second.cancel()

    first = asyncio.create_task(rewards.advance(Canceller("a", 0, log), 0))
    second = asyncio.create_task(rewards.advance(Judged("b", 0, log), 1))
    await asyncio.gather(first, second, return_exceptions=True)
    await asyncio.wait_for(rewards.advance(Judged("c", 0, log), 2), 5)
    assert log == ["c"]
