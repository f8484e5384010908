"""Batch dispatch: everything at once. What is not limited elsewhere is not limited."""

import sys
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager

from palestra.dispatch.flow import flow
from palestra.dispatch.room import Room
from palestra.protocols import R
from palestra.rollout import run_through


class Batch:
    prewarms = False

    def stream(self, rollouts: AsyncIterable[R]) -> AbstractAsyncContextManager[AsyncIterator[R]]:
        return flow(rollouts, Room(sys.maxsize), lambda rollout, _: run_through(rollout))
