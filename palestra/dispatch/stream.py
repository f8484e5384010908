"""Stream dispatch: whatever can go on, goes on.

Each stage has a limit of its own. Runtimes are opened ahead, up to a cap, for rollouts whose policy is not published yet, and
closed before the reward begins. Runs are admitted while what they are expected to hold fits the sampler's KV budget, so that
contexts which wait on a tool need not be evicted for newcomers. Where rewards lag, runtimes wait; where runtimes wait, no new
ones are opened.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager

from palestra.dispatch.flow import flow
from palestra.dispatch.rewards import Rewards
from palestra.dispatch.room import Room
from palestra.protocols import R, StagedRollout


class Stream:
    prewarms = True

    def __init__(self, init: int, run: int, reward: int, runtimes: int, kv_tokens: int | None = None) -> None:
        self._init, self._run, self._runtimes = Room(init), Room(run), Room(runtimes)
        self._rewards = Rewards(reward)
        self._kv = Room(kv_tokens) if kv_tokens is not None else None
        # As many again may wait for their reward or to be taken; where those are not, nothing new comes in.
        self._inside = Room(2 * runtimes + reward)

    def stream(self, rollouts: AsyncIterable[R]) -> AbstractAsyncContextManager[AsyncIterator[R]]:
        return flow(rollouts, self._inside, self._drive)

    async def _drive(self, rollout: StagedRollout, number: int) -> None:
        housed = False
        try:
            while (stage := rollout.next) is not None:
                if rollout.rest:
                    await asyncio.sleep(rollout.rest)
                if stage == "init":
                    if not housed:
                        await self._runtimes.enter(number)
                        housed = True
                    async with self._init.place(number):
                        await rollout.advance()
                elif stage == "run":
                    if not await rollout.may_run():
                        return
                    await self._run_admitted(rollout, number)
                else:
                    if housed:  # the runtime was closed with the run
                        self._runtimes.leave()
                        housed = False
                    await self._rewards.advance(rollout, number)
        finally:
            if housed:
                try:
                    await rollout.close()
                finally:
                    self._runtimes.leave()

    async def _run_admitted(self, rollout: StagedRollout, number: int) -> None:
        async with self._run.place(number):
            if self._kv is None:
                await rollout.advance()
            else:
                async with self._kv.place(number, rollout.expected_tokens):
                    await rollout.advance()
