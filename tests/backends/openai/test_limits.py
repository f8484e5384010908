"""Limits, on a virtual clock."""

import asyncio

from palestra.backends.openai.limits import Limits
from palestra.lab import clock


def admitted(limits_of: dict[str, float | None], tokens: float, count: int, hold: float = 0.0) -> list[float]:
    """When each of so many requests is let through; each then turns out to have so many tokens."""
    times: list[float] = []

    async def ask(limits: Limits) -> None:
        await limits.admit()
        times.append(asyncio.get_running_loop().time())
        limits.spend_tokens(tokens)

    async def main() -> None:
        limits = Limits(limits_of.get("requests"), limits_of.get("tokens"))
        if hold:
            limits.hold(hold)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(ask(limits))

    clock.run(main())
    return times


def test_no_limit_lets_all_through_at_once() -> None:
    assert admitted({}, 1000, 5) == [0.0] * 5


def test_requests_are_spaced() -> None:
    assert admitted({"requests": 30}, 0, 4) == [0.0, 2.0, 4.0, 6.0]


def test_tokens_that_were_spent_are_waited_for() -> None:
    assert admitted({"tokens": 600}, 50, 4) == [0.0, 5.0, 10.0, 15.0]


def test_the_tighter_limit_counts() -> None:
    assert admitted({"requests": 60, "tokens": 600}, 50, 3) == [0.0, 5.0, 10.0]
    assert admitted({"requests": 6, "tokens": 600}, 50, 3) == [0.0, 10.0, 20.0]


def test_a_pause_holds_everybody() -> None:
    assert admitted({}, 0, 3, hold=7.5) == [7.5] * 3
