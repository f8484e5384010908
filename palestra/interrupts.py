"""Ctrl-C and SIGTERM: whoever insists on a stop, everything is closed before we end.

By default Python raises in whatever runs at that moment. In an event loop that may be any of its tasks, and what the others hold
would stay open. So the loop's main task is cancelled instead, and everything unwinds from there: once what runs at that moment
awaits something.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from palestra.errors import Terminated

T = TypeVar("T")


class _Interrupts:
    """What this process has been asked for so far."""

    def __init__(self) -> None:
        self.process = os.getpid()
        """The one that asked to hear; those that are forked off it have copies of its handlers."""
        self.drains = False
        """Whether the first Ctrl-C asks for a clean stop, and only the second one insists."""
        self.asked = False
        self.insistence: type[KeyboardInterrupt] | None = None
        self.cancel: Callable[[], object] | None = None
        """Of the event loop's work, while there is one."""

    def hear(self, number: int, _: object) -> None:
        if os.getpid() != self.process:  # forked, as by a task's own pool, which ends its processes by SIGTERM
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.insistence is not None:
            sys.stderr.write("\nclosing what is open, as soon as what runs now allows it; kill -9 would leave it behind\n")
        elif number == signal.SIGINT and self.drains and not self.asked:
            self.asked = True
            sys.stderr.write("\nstopping: what is under way is finished and saved. Ctrl-C again stops at once\n")
        else:
            self.insistence = Terminated if number == signal.SIGTERM else KeyboardInterrupt
            if self.cancel is None:
                raise self.insistence
            self.cancel()


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_heard: _Interrupts | None = None


@contextmanager
def handled() -> Iterator[None]:
    """Hear signals in this block. Only a process's main thread can. SIGINT is heard even where a shell has us ignore it, as
    in the background: `kill -INT` is how a run is asked to stop."""
    global _heard
    if _heard is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _heard = heard = _Interrupts()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        hear_again()
        yield
    except KeyboardInterrupt:
        if heard.insistence is None:
            raise
        raise heard.insistence from None  # Ray raises a KeyboardInterrupt of its own in the place of ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _heard = None


def hear_again() -> None:
    """After a library has put its own handlers in the place of ours."""
    if _heard is not None and threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, _heard.hear)


@contextmanager
def drained() -> Iterator[Callable[[], bool]]:
    """In this block the first Ctrl-C only asks: whether it has come is what the function says."""
    with handled():
        heard = _heard
        if heard is None or threading.current_thread() is not threading.main_thread():
            yield lambda: False
            return
        heard.drains = True
        try:
            yield lambda: heard.asked
        finally:
            heard.drains = False


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`. Who insists meanwhile has everything closed first; an error in that is raised in its place."""
    heard = _heard
    if heard is None or heard.cancel is not None:
        return asyncio.run(work)

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        heard.cancel = cancel
        if heard.insistence is not None:  # it came while another thread, which waits for this one, had the signals
            cancel()
        return await work

    try:
        result = asyncio.run(cancellable())
    except asyncio.CancelledError:
        if heard.insistence is None:
            raise
    finally:
        heard.cancel = None
    if heard.insistence is not None:  # it may have come too late to cancel anything
        raise heard.insistence
    return result
