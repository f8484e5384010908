"""The inference engine of a workload: sequences that prefill and decode in common steps, and the KV cache that holds them.
A context keeps its KV while a tool runs, until it leaves or another needs the room; then it is prefilled again at its next call.
A reply is written in one piece or in several; KV is reserved for one piece at a time.
"""

import asyncio
import bisect
import math
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from palestra.lab import workload
from palestra.lab.context import Call, Context, Place, Prompt
from palestra.lab.inflow import Inflow
from palestra.lab.kv import Kv
from palestra.lab.precedence import First, Precedence
from palestra.lab.progress import Progress
from palestra.lab.totals import Totals

HEADROOM = {"shortest": 0.02, "oldest": 0.03}
"""When pinned, who comes in leaves this share of KV free for those under way to grow: it would be evicted soon otherwise."""

NEWCOMERS_HEADROOM = 0.015
"""What newcomers leave free when they have a pace: less, since they are short."""

HOLE = 0.09
"""With a larger share of KV free, newcomers come whatever their pace."""


class Engine:
    def __init__(self, spec: workload.Engine, units: int, first: First, piece: int | None = None) -> None:
        """Replies are written in pieces of so many tokens, or whole."""
        self._spec = spec
        self._piece = spec.kv_tokens if piece is None else piece
        self._precedence = Precedence(first)
        self._kv = Kv(spec.kv_tokens * units)
        self._paused = False
        self._steps: Progress[Call] = Progress(self._wake)
        self._decoding = self._prefilling = self._arrivals = 0
        self._open: set[Context] = set()
        self._prompts: WeakValueDictionary[int, Prompt] = WeakValueDictionary()
        """Those that open contexts share, by their kin."""
        self._served: set[Call] = set()
        self._queue: list[tuple[Place, Call]] = []
        self._inflow = Inflow()
        self._paced = False
        """With the oldest first, newcomers have a pace of their own once units have turned to training, whoever else waits."""
        self._totals = Totals()
        self.units = units
        self.on_leaving: Callable[[], None] = lambda: None
        """Called when a context has left."""

    @property
    def contexts(self) -> int:
        """Contexts that are open: served, queued, or waiting for a tool."""
        return len(self._open)

    @property
    def kv_tokens(self) -> int:
        return self._kv.tokens

    @property
    def kv_used(self) -> int:
        return self._kv.used

    def kv_wanted(self) -> int:
        """Tokens of KV that would hold every open context at once."""
        return _wanted(self._open)

    def totals(self) -> Totals:
        self._advance()
        return self._totals

    def empty_seconds(self) -> float:
        """Unit-seconds that KV which nobody held has cost so far: a step's fixed cost could have served more contexts."""
        return self.totals().empty * self._spec.step_seconds

    @asynccontextmanager
    async def context(self, order: int, kin: int | None = None) -> AsyncIterator[Context]:
        """Where the engine shares prompts, contexts of the same kin begin with the same one."""
        context = Context(self._serve, order, kin if self._spec.shares_prompts else None)
        self._open.add(context)
        self._precedence.opened(context)
        try:
            yield context
        finally:
            self._advance()
            self._open.remove(context)
            self._precedence.closed(context)
            self._kv.release(context)
            self._go_on()
            self.on_leaving()

    def resize(self, units: int, kv_tokens: int) -> None:
        """From now on so many units generate, with so much KV. A share of KV that goes takes as large a share of what is
        resident with it: idle contexts first, and of those the latest started. A call that is hit goes on when it has room."""
        self._advance()
        if kv_tokens < self._kv.tokens:
            kept = self._kv.used * kv_tokens // self._kv.tokens
            served = {call.context for call in self._served}
            for context in sorted([*self._kv.idle, *served], key=lambda context: (context in served, -context.order)):
                if self._kv.used <= kept:
                    break
                self._evict(context)
        self.units, self._kv.tokens = units, kv_tokens
        if self._precedence.first == "oldest" and self._precedence.ended and not self._paced:
            self._paced = True
            self._inflow.start()
        self._go_on()

    def hurry(self) -> None:
        """No context comes after those that are open. From now on somebody waits for the last of them, so the shortest, which
        has come least far, goes first."""
        if self._precedence.first == "oldest":
            self._advance()
            self._precedence.first, self._paced = "shortest", False
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

    async def _serve(self, context: Context, new_tokens: int, output_tokens: int) -> None:
        self._arrivals += 1
        call = Call(context, output_tokens, self._piece, self._arrivals, asyncio.get_running_loop().create_future())
        if context.kin is not None and not context.length:
            context.prompt = self._prompt(context.kin, new_tokens)
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

    def _prompt(self, kin: int, tokens: int) -> Prompt | None:
        if tokens < 2:
            return None
        prompt = self._prompts.get(kin) or Prompt(tokens - 1)
        self._prompts[kin] = prompt
        return prompt

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
        steps = self._steps.count - before
        if self._served and self.units and not self._paused:
            self._totals.count(elapsed, steps, self.units, self._kv, self._prefilling)
        if self._inflow.elapse(elapsed, steps, self._kv.used) and self._paced:
            under_way = [context for context in self._open if not context.new]
            self._inflow.review(self._kv.tokens, _wanted(under_way), len(under_way), self._precedence.ended)

    def _go_on(self) -> None:
        if self._queue:
            self._admit()
        if self._served and self.units and not self._paused:
            self._steps.run(1.0 / self._spec.step(self.units, self._decoding, self._prefilling))
        else:
            self._steps.run(0.0)

    def _start(self, call: Call) -> None:
        context = call.context
        call.kept = context.kept
        self._kv.hold(context, call.reserve)
        self._served.add(call)
        self._totals.peak_contexts = max(self._totals.peak_contexts, len(self._served) + len(self._kv.idle))
        self._prefilling += 1
        call.mark = self._steps.after(self._spec.prefill_steps(context.length - call.kept), call)

    def _decode(self, call: Call) -> None:
        context = call.context
        self._totals.prefilled += context.length - call.kept
        self._totals.prefilled_again += max(0, context.seen - call.kept)
        context.seen = context.length
        if context.prompt is not None:
            context.prompt.computed = True
        self._prefilling -= 1
        self._decoding += 1
        call.decoding = True
        call.mark = self._steps.after(call.piece, call)

    def _end_piece(self, call: Call) -> None:
        context = call.context
        self._decoded(call, call.piece)
        if call.output and self._kv.used + call.piece <= self._kv.tokens:
            self._kv.hold(context, context.held + call.piece)
            call.mark = self._steps.after(call.piece, call)
            return
        self._decoding -= 1
        self._served.remove(call)
        call.decoding = False
        self._kv.rest(context)
        if call.output:
            self._enqueue(call)
            return
        context.call_under_way = None
        if not call.done.done():  # its task may have been cancelled in this very moment
            call.done.set_result(None)

    def _decoded(self, call: Call, tokens: int) -> None:
        self._totals.decoded += tokens
        call.output -= tokens
        call.context.length += tokens
        call.context.seen = call.context.length

    def _stop(self, call: Call) -> None:
        """Take a call out of the step before it is finished, and keep what it has written. What it has prefilled is lost."""
        self._served.remove(call)
        self._steps.drop(call.mark)
        if call.decoding:
            self._decoding -= 1
            self._decoded(call, call.piece - math.ceil(self._steps.left(call.mark)))
            call.decoding = False
        else:
            self._prefilling -= 1
            tokens = call.context.length - call.kept
            steps = self._spec.prefill_steps(tokens) - self._steps.left(call.mark)
            lost = min(tokens, int(steps * self._spec.prefill_chunk))
            self._totals.prefilled += lost
            self._totals.prefilled_again += lost

    # The queue, and room for its head

    def _enqueue(self, call: Call) -> None:
        call.place = self._precedence.place(call, self._kv.tokens)
        bisect.insort(self._queue, (call.place, call))

    def _dequeue(self, call: Call) -> None:
        del self._queue[bisect.bisect_left(self._queue, call.place, key=lambda entry: entry[0])]
        call.place = None

    def _admit(self) -> None:
        if self._paced:
            self._admit_newcomers()
        while (call := self._next_in_line()) is not None and self._make_room(call):
            self._dequeue(call)
            self._start(call)

    def _admit_newcomers(self) -> None:
        while self._inflow.due or self._kv.used < (1 - HOLE) * self._kv.tokens:
            call = next((call for _, call in self._queue if call.context.new), None)
            if call is None or self._missing(call) > -NEWCOMERS_HEADROOM * self._kv.tokens:
                return
            self._dequeue(call)
            self._start(call)
            self._inflow.came()

    def _next_in_line(self) -> Call | None:
        """The head of the queue; without newcomers that have a pace, unless nothing else is at work."""
        others_only = self._paced and bool(self._served)
        return next((call for _, call in self._queue if not (others_only and call.context.new)), None)

    def _make_room(self, call: Call) -> bool:
        kv, precedence, held = self._kv, self._precedence, call.context.held
        missing = self._missing(call)
        if precedence.pinned and self._served and not held and missing > -HEADROOM[precedence.first] * kv.tokens:
            return False
        if missing <= 0:
            return True
        if self._served and missing > kv.idle_tokens - held:  # prompts that would be free too do not count: somebody makes room
            return False
        victims = []
        choices = precedence.victims(call.context, kv.idle, kv.tokens, nobody_served=not self._served)
        for context, freed in kv.freed(choices, call.context):
            victims.append(context)
            missing -= freed
            if missing <= 0:
                for victim in victims:
                    self._evict(victim)
                return True
        return False

    def _missing(self, call: Call) -> int:
        """Tokens of KV that it lacks; below 0, those that are left with it."""
        return self._kv.used + self._kv.more(call.context, call.reserve) - self._kv.tokens

    def _evict(self, context: Context) -> None:
        call = context.call_under_way
        if call is not None:
            if call.place is None:
                self._stop(call)
            else:
                self._dequeue(call)
        self._kv.release(context)
        if call is not None:
            self._enqueue(call)

    def _abandon(self, call: Call) -> None:
        if call in self._served:
            self._stop(call)
        elif call.place is not None:
            self._dequeue(call)
        call.context.call_under_way = None
        self._kv.release(call.context)


def _wanted(contexts: Collection[Context]) -> int:
    """Tokens of KV that would hold them all, as long as they are now."""
    prompts = {context.prompt for context in contexts if context.prompt is not None}
    return sum(context.wanted for context in contexts) + sum(prompt.tokens for prompt in prompts)
