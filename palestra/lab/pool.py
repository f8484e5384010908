"""Processors that share themselves out: up to the capacity every job runs at full speed, above it all are slowed alike."""

import asyncio

from palestra.lab.progress import Progress


class Pool:
    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._jobs = 0
        self._served: Progress[asyncio.Future[None]] = Progress(self._finish)
        """What a job that was there from the start would have got done."""

    async def work(self, seconds: float) -> None:
        """So many seconds of work, which take longer in a crowd."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._served.advance()
        mark = self._served.after(seconds, done)
        self._jobs += 1
        self._go_on()
        try:
            await done
        except asyncio.CancelledError:
            if done.cancelled():  # else it was done in the same moment, and has left already
                self._served.advance()
                self._served.drop(mark)
                self._jobs -= 1
                self._go_on()
            raise

    def _finish(self) -> None:
        self._served.advance()
        for done in self._served.due():
            if not done.done():
                done.set_result(None)
                self._jobs -= 1
        self._go_on()

    def _go_on(self) -> None:
        self._served.run(min(1.0, self._capacity / self._jobs) if self._jobs else 0.0)
