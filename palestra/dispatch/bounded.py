"""Bounded dispatch: so many slots, each of which takes a rollout through all its stages before it takes the next."""

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager

from palestra.dispatch.flow import flow
from palestra.dispatch.room import Room
from palestra.protocols import R
from palestra.rollout import run_through


class Bounded:
    prewarms = False

    def __init__(self, slots: int) -> None:
        self._slots = Room(slots)

    def stream(self, rollouts: AsyncIterable[R]) -> AbstractAsyncContextManager[AsyncIterator[R]]:
        return flow(rollouts, self._slots, lambda rollout, _: run_through(rollout))
