"""The machine of a recorded run, on the virtual clock: stages that wait and compute, a sampler that slows down as more calls are
under way, and a trainer that may share its processors. All of it is work that advances at a rate which others change.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from palestra.lab.fitting import Array, SamplerFit, StageFit
from palestra.lab.progress import Progress

Judged = Literal["init", "reward"]


class Work(NamedTuple):
    """A stage or a call: seconds that pass in any case, then seconds that take longer in a crowd. For a call of the sampler,
    prefill and decoding."""

    wait: float
    work: float

    def times(self, factor: float) -> "Work":
        return Work(self.wait * factor, self.work * factor)


class Fluid:
    """Work of many that advances at a common rate."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self._progress: Progress[asyncio.Future[None]] = Progress(self._wake)
        self._rate = rate
        self._present = -1.0

    async def work(self, seconds: float) -> None:
        """So many seconds at rate 1."""
        if seconds <= 0:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._progress.advance()
        self._progress.after(seconds, done)
        self._go_on()
        await done

    def review(self) -> None:
        """Others have come or gone."""
        if self._rate() != self._present:
            self._progress.advance()
            self._go_on()

    def _wake(self) -> None:
        self._progress.advance()
        for done in self._progress.due():
            if not done.done():  # else it was cancelled
                done.set_result(None)
        self._go_on()

    def _go_on(self) -> None:
        self._present = self._rate()
        self._progress.run(self._present)


@dataclass(frozen=True)
class Parts:
    """What a machine is made of."""

    init: StageFit
    reward: StageFit
    sampler: SamplerFit
    shared: bool
    """Whether sampler and trainer have the same processors: where both are busy, each is half as fast."""


class Machine:
    """To be made inside the event loop, for at most so many rollouts (or calls of others) at once."""

    def __init__(self, parts: Parts, rollouts: int) -> None:
        self._shared = parts.shared
        crowds = np.arange(rollouts + 1, dtype=float)
        self._inside: dict[Judged, int] = {"init": 0, "reward": 0}
        self._calls = self._trainings = 0
        self._decoding_speed: Sequence[float] = parts.sampler.speed(crowds).tolist()
        self._stages = {
            "init": Fluid(self._stage_rate("init", parts.init, crowds)),
            "reward": Fluid(self._stage_rate("reward", parts.reward, crowds)),
        }
        self._prefill = Fluid(self._sampling)
        self._decode = Fluid(lambda: self._sampling() * self._decoding_speed[self._calls])
        self._train = Fluid(lambda: 0.5 if self._shared and self._calls else 1.0)

    async def stage(self, stage: Judged, work: Work) -> None:
        self._inside[stage] += 1
        self._review(*self._stages.values())
        try:
            await asyncio.sleep(work.wait)
            await self._stages[stage].work(work.work)
        finally:
            self._inside[stage] -= 1
            self._review(*self._stages.values())

    async def sample(self, call: Work) -> None:
        self._calls += 1
        self._review(self._decode, self._train)
        try:
            await self._prefill.work(call.wait)
            await self._decode.work(call.work)
        finally:
            self._calls -= 1
            self._review(self._decode, self._train)

    async def train(self, seconds: float) -> None:
        self._trainings += 1
        self._review(self._prefill, self._decode)
        try:
            await self._train.work(seconds)
        finally:
            self._trainings -= 1
            self._review(self._prefill, self._decode)

    async def pause(self, seconds: float, calls: int) -> None:
        """So long there are so many calls of somebody else."""
        self._calls += calls
        self._review(self._decode, self._train)
        await asyncio.sleep(seconds)
        self._calls -= calls
        self._review(self._decode, self._train)

    def _sampling(self) -> float:
        return 0.5 if self._shared and self._trainings else 1.0

    def _stage_rate(self, stage: Judged, fit: StageFit, crowds: Array) -> Callable[[], float]:
        speeds: Sequence[float] = fit.speed(crowds).tolist()
        return lambda: speeds[sum(self._inside.values()) if fit.both else self._inside[stage]]

    def _review(self, *fluids: Fluid) -> None:
        for fluid in fluids:
            fluid.review()
