"""The inference engine of a workload: sequences that prefill and decode in common steps, and the KV cache that holds them.
A context keeps its KV while a tool runs, until it leaves or another needs the room; then it is prefilled again at its next call.
A reply is written in one piece or in several; KV is reserved for one piece at a time.
"""

import asyncio
import bisect
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from palestra.lab import workload
from palestra.lab.inflow import Inflow
from palestra.lab.progress import Mark, Progress

First = Literal["arrived", "shortest", "oldest"]
"""Whose call goes first while KV is short. "arrived": whose came first, and it takes KV from contexts that wait for a tool.
With the others those are pinned: they keep their KV, and their calls go before those of contexts that have none. Of each kind the
shortest goes first, which has come least far and would be the last to end; or the oldest, where nobody waits for the last. With
the oldest first, newcomers have a pace of their own once units have turned to training, whoever else waits."""

Place = tuple[bool, bool, int, int]
"""Where a call stands in the queue; the smallest is served first."""


@dataclass(slots=True)
class Totals:
    prefilled: int = 0
    prefilled_again: int = 0
    decoded: int = 0
    busy: float = 0.0
    """Seconds with at least one sequence in the step."""
    unit_seconds: float = 0.0
    """The same, times the units at work."""
    peak_contexts: int = 0
    """Most contexts that held KV at once."""


class Context:
    """One trajectory's tokens."""

    __slots__ = ("_engine", "call_under_way", "held", "length", "order", "seen")

    def __init__(self, engine: "Engine", order: int) -> None:
        self._engine = engine
        self.order = order
        """Who started earlier has the smaller one."""
        self.length = 0
        self.seen = 0
        """Tokens that were computed before, and so are prefilled again if their KV is lost."""
        self.held = 0
        """Tokens of KV reserved; none when it is not resident."""
        self.call_under_way: _Call | None = None

    @property
    def new(self) -> bool:
        """Whether nothing of it has been computed yet."""
        return not self.seen and not self.held

    async def call(self, new_tokens: int, output_tokens: int) -> None:
        """Prefill what is new (and what was lost), then decode."""
        await self._engine.serve(self, new_tokens, output_tokens)


class _Call:
    __slots__ = ("arrival", "context", "decoding", "done", "kept", "longest_piece", "mark", "output", "place")

    def __init__(self, context: Context, output: int, longest_piece: int, arrival: int, done: asyncio.Future[None]) -> None:
        self.context = context
        self.output = output
        """Tokens still to decode, those of the present piece included."""
        self.longest_piece = longest_piece
        self.arrival = arrival
        self.done = done
        self.place: Place | None = None
        """None when it is not queued."""
        self.kept = 0
        """Tokens that did not have to be prefilled."""
        self.decoding = False
        self.mark: Mark = (0.0, 0)

    @property
    def piece(self) -> int:
        """Tokens to decode before more KV is asked for."""
        return min(self.output, self.longest_piece)

    @property
    def reserve(self) -> int:
        return self.context.length + self.piece


HEADROOM = {"shortest": 0.02, "oldest": 0.03}
"""When pinned, who comes in leaves this share of KV free for those under way to grow: it would be evicted soon otherwise."""

NEWCOMERS_HEADROOM = 0.015
"""What newcomers leave free when they have a pace: less, since they are short."""

HOLE = 0.09
"""With a larger share of KV free, newcomers come whatever their pace."""

YOUNG = 0.25
"""With the oldest first, contexts keep their KV until they are this share of the usual length: they free too little."""


class Engine:
    def __init__(self, spec: workload.Engine, units: int, first: First, piece: int | None = None) -> None:
        """Replies are written in pieces of so many tokens, or whole."""
        self._spec = spec
        self._piece = spec.kv_tokens if piece is None else piece
        self._first = first
        self._pinned = first != "arrived"
        self._paused = False
        self._steps: Progress[_Call] = Progress(self._wake)
        self._decoding = self._prefilling = self._arrivals = 0
        self._open: set[Context] = set()
        self._served: set[_Call] = set()
        self._idle: dict[Context, None] = {}
        """Resident and not served, the least recently used first."""
        self._queue: list[tuple[Place, _Call]] = []
        self._used = self._idle_tokens = 0
        self._orders: list[int] = []
        """Of all that are open, the smallest first."""
        self._left = self._left_tokens = 0
        self._inflow = Inflow()
        self._paced = False
        self._totals = Totals()
        self.units = units
        self.kv_tokens = spec.kv_tokens * units
        self.on_leaving: Callable[[], None] = lambda: None
        """Called when a context has left."""

    @property
    def contexts(self) -> int:
        """Contexts that are open: served, queued, or waiting for a tool."""
        return len(self._open)

    @property
    def kv_used(self) -> int:
        return self._used

    def kv_wanted(self) -> int:
        """Tokens of KV that would hold every open context at once, as long as they are now."""
        return _wanted(self._open)

    def totals(self) -> Totals:
        self._advance()
        return self._totals

    @asynccontextmanager
    async def context(self, order: int) -> AsyncIterator[Context]:
        context = Context(self, order)
        self._open.add(context)
        bisect.insort(self._orders, order)
        try:
            yield context
        finally:
            self._advance()
            self._open.remove(context)
            del self._orders[bisect.bisect_left(self._orders, order)]
            self._left += 1
            self._left_tokens += context.length
            self._release(context)
            self._go_on()
            self.on_leaving()

    async def serve(self, context: Context, new_tokens: int, output_tokens: int) -> None:
        self._arrivals += 1
        call = _Call(context, output_tokens, self._piece, self._arrivals, asyncio.get_running_loop().create_future())
        context.length += new_tokens
        whole = context.length + output_tokens
        if whole > self._spec.kv_tokens:
            raise ValueError(f"a call of {whole} tokens does not fit into a unit's KV of {self._spec.kv_tokens}")
        context.call_under_way = call
        self._advance()
        self._enqueue(call)
        self._go_on()
        try:
            await call.done
        except asyncio.CancelledError:
            self._advance()
            self._abandon(call)
            self._go_on()
            raise

    def resize(self, units: int, kv_tokens: int) -> None:
        """From now on so many units generate, with so much KV. A share of KV that goes takes as large a share of what is
        resident with it: idle contexts first, and of those the latest started. A call that is hit goes on when it has room."""
        self._advance()
        if kv_tokens < self.kv_tokens:
            kept = self._used * kv_tokens // self.kv_tokens
            served = {call.context for call in self._served}
            for context in sorted([*self._idle, *served], key=lambda context: (context in served, -context.order)):
                if self._used <= kept:
                    break
                self._evict(context)
        self.units, self.kv_tokens = units, kv_tokens
        if self._first == "oldest" and self._left and not self._paced:
            self._paced = True
            self._inflow.start()
        self._go_on()

    def hurry(self) -> None:
        """No context comes after those that are open. From now on somebody waits for the last of them, so the shortest, which
        has come least far, goes first."""
        if self._first == "oldest":
            self._advance()
            self._first, self._paced = "shortest", False
            queued = [call for _, call in self._queue]
            self._queue.clear()
            for call in queued:
                self._enqueue(call)
            self._go_on()

    def pause(self) -> None:
        """Nothing advances until `resume`; KV is kept."""
        self._advance()
        self._paused = True
        self._go_on()

    def resume(self) -> None:
        self._advance()
        self._paused = False
        self._go_on()

    # The common step. Whatever happens, `_advance` comes before it and `_go_on` after it.

    def _wake(self) -> None:
        self._advance()
        for call in self._steps.due():
            if call.decoding:
                self._end_piece(call)
            else:
                self._decode(call)
        self._go_on()

    def _advance(self) -> None:
        before = self._steps.count
        elapsed = self._steps.advance()
        if self._served and self.units and not self._paused:
            self._totals.busy += elapsed
            self._totals.unit_seconds += elapsed * self.units
        if self._inflow.elapse(elapsed, self._steps.count - before, self._used) and self._paced:
            under_way = [context for context in self._open if not context.new]
            self._inflow.review(self.kv_tokens, _wanted(under_way), len(under_way), self._left)

    def _go_on(self) -> None:
        if self._queue:
            self._admit()
        if self._served and self.units and not self._paused:
            self._steps.run(1.0 / self._spec.step(self.units, self._decoding, self._prefilling))
        else:
            self._steps.run(0.0)

    def _start(self, call: _Call) -> None:
        context = call.context
        call.kept = context.held
        if context.held:
            del self._idle[context]
            self._idle_tokens -= context.held
        context.held = call.reserve
        self._used += call.reserve - call.kept
        self._served.add(call)
        self._totals.peak_contexts = max(self._totals.peak_contexts, len(self._served) + len(self._idle))
        self._prefilling += 1
        call.mark = self._steps.after(math.ceil((context.length - call.kept) / self._spec.prefill_chunk), call)

    def _decode(self, call: _Call) -> None:
        context = call.context
        self._totals.prefilled += context.length - call.kept
        self._totals.prefilled_again += context.seen - call.kept
        context.seen = context.length
        self._prefilling -= 1
        self._decoding += 1
        call.decoding = True
        call.mark = self._steps.after(call.piece, call)

    def _end_piece(self, call: _Call) -> None:
        context = call.context
        self._decoded(call, call.piece)
        if call.output and self._used + call.piece <= self.kv_tokens:
            context.held += call.piece
            self._used += call.piece
            call.mark = self._steps.after(call.piece, call)
            return
        self._decoding -= 1
        self._served.remove(call)
        call.decoding = False
        self._idle[context] = None
        self._idle_tokens += context.held
        if call.output:
            self._enqueue(call)
            return
        context.call_under_way = None
        if not call.done.done():  # its task may have been cancelled in this very moment
            call.done.set_result(None)

    def _decoded(self, call: _Call, tokens: int) -> None:
        self._totals.decoded += tokens
        call.output -= tokens
        call.context.length += tokens
        call.context.seen = call.context.length

    def _stop(self, call: _Call) -> None:
        """Take a call out of the step before it is finished, and keep what it has written."""
        self._served.remove(call)
        self._steps.drop(call.mark)
        if call.decoding:
            self._decoding -= 1
            self._decoded(call, call.piece - math.ceil(self._steps.left(call.mark)))
            call.decoding = False
        else:
            self._prefilling -= 1

    # The queue, and room for its head

    def _enqueue(self, call: _Call) -> None:
        context, held = call.context, bool(call.context.held)
        if self._pinned:  # of those that hold KV, the ones that are spared go before the others
            rank = context.length if self._first == "shortest" else context.order
            call.place = (not held, held and not self._started_first(context), rank, call.arrival)
        else:
            call.place = (False, False, 0, call.arrival)
        bisect.insort(self._queue, (call.place, call))

    def _dequeue(self, call: _Call) -> None:
        del self._queue[bisect.bisect_left(self._queue, call.place, key=lambda entry: entry[0])]
        call.place = None

    def _admit(self) -> None:
        if self._paced:
            self._admit_newcomers()
        while (call := self._next_in_line()) is not None and self._make_room(call):
            self._dequeue(call)
            self._start(call)

    def _admit_newcomers(self) -> None:
        while self._inflow.due or self._used < (1 - HOLE) * self.kv_tokens:
            call = next((call for _, call in self._queue if call.context.new), None)
            if call is None or self._used + call.reserve > (1 - NEWCOMERS_HEADROOM) * self.kv_tokens:
                return
            self._dequeue(call)
            self._start(call)
            self._inflow.came()

    def _next_in_line(self) -> _Call | None:
        """The head of the queue; without newcomers that have a pace, unless nothing else is at work."""
        others_only = self._paced and bool(self._served)
        return next((call for _, call in self._queue if not (others_only and call.context.new)), None)

    def _make_room(self, call: _Call) -> bool:
        missing = self._used + call.reserve - call.context.held - self.kv_tokens
        if self._pinned and self._served and not call.context.held and missing > -HEADROOM[self._first] * self.kv_tokens:
            return False
        if missing <= 0:
            return True
        if missing > self._idle_tokens - call.context.held:
            return False
        victims = []
        for context in self._evictable(call.context):
            victims.append(context)
            missing -= context.held
            if missing <= 0:
                for victim in victims:
                    self._evict(victim)
                return True
        return False

    def _evictable(self, context: Context) -> Iterable[Context]:
        """Who may lose its KV for this context's next call, the first choice first. When pinned: never for a newcomer."""
        others = (other for other in self._idle if other is not context)
        if not self._pinned:
            return others
        choices = sorted(others, key=self._dispensable, reverse=True)
        if not self._served:  # nobody would ever make room
            return choices
        own = self._dispensable(context)
        return [other for other in choices if self._dispensable(other) > own] if context.held else []

    def _dispensable(self, context: Context) -> tuple[bool, int]:
        """The greater, the sooner it loses its KV. With the shortest first: the shortest, which is soon prefilled again, but none
        of those that started first while there are others, so that some come to their end. With the oldest first: who
        started last, but none that is still young while there are others."""
        if self._first == "oldest":
            return context.length >= YOUNG * self._usual_length(), context.order
        return not self._started_first(context), -context.length

    def _started_first(self, context: Context) -> bool:
        """Whether it is among those that started first, as many as KV holds to their end."""
        usual = self._usual_length()
        size = int(self.kv_tokens / usual) if usual else len(self._orders)
        return size >= len(self._orders) or context.order < self._orders[size]

    def _usual_length(self) -> float:
        """Tokens of contexts that have come to their end, on average."""
        return self._left_tokens / self._left if self._left else 0.0

    def _evict(self, context: Context) -> None:
        call = context.call_under_way
        if call is not None:
            if call.place is None:
                self._stop(call)
            else:
                self._dequeue(call)
        self._release(context)
        if call is not None:
            self._enqueue(call)

    def _abandon(self, call: _Call) -> None:
        if call in self._served:
            self._stop(call)
        elif call.place is not None:
            self._dequeue(call)
        call.context.call_under_way = None
        self._release(call.context)

    def _release(self, context: Context) -> None:
        if context in self._idle:
            del self._idle[context]
            self._idle_tokens -= context.held
        self._used -= context.held
        context.held = 0


def _wanted(contexts: Iterable[Context]) -> int:
    return sum(context.held or context.length for context in contexts)
