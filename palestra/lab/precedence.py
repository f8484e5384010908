"""Whose call the engine serves first while KV is short, and who loses its KV for another."""

import bisect
from collections.abc import Iterable
from typing import Literal

from palestra.lab.context import Call, Context, Place

First = Literal["arrived", "shortest", "oldest"]
"""Whose call goes first. "arrived": whose came first, and it takes KV from contexts that wait for a tool. With the others those
are pinned: they keep their KV, and their calls go before those of contexts that have none. Of each kind the shortest goes first,
which has come least far and would be the last to end; or the oldest, where nobody waits for the last."""

YOUNG = 0.25
"""With the oldest first, contexts keep their KV until they are this share of the usual length: they free too little."""


class Precedence:
    def __init__(self, first: First) -> None:
        self.first = first
        self.ended = 0
        """Contexts that have come to their end."""
        self._ended_tokens = 0
        self._orders: list[int] = []
        """Of all contexts that are open, the smallest first."""

    @property
    def pinned(self) -> bool:
        return self.first != "arrived"

    def opened(self, context: Context) -> None:
        bisect.insort(self._orders, context.order)

    def closed(self, context: Context) -> None:
        del self._orders[bisect.bisect_left(self._orders, context.order)]
        self.ended += 1
        self._ended_tokens += context.length

    def place(self, call: Call, kv_tokens: int) -> Place:
        """Where a call stands in the queue, with so much KV in all."""
        context, held = call.context, bool(call.context.held)
        if not self.pinned:
            return False, False, 0, call.arrival
        rank = context.length if self.first == "shortest" else context.order
        # Of those that hold KV, the ones that are spared go before the others.
        return not held, held and not self._started_first(context, kv_tokens), rank, call.arrival

    def victims(self, context: Context, idle: Iterable[Context], kv_tokens: int, *, nobody_served: bool) -> Iterable[Context]:
        """Who of the idle may lose its KV for this context's next call, the first choice first. When pinned: never for one that
        holds none, unless nobody is served, and so nobody would ever make room."""
        others = (other for other in idle if other is not context)
        if not self.pinned:
            return others
        if not nobody_served and not context.held:
            return ()

        def dispensable(one: Context) -> tuple[bool, int]:
            return self._dispensable(one, kv_tokens)

        choices = sorted(others, key=dispensable, reverse=True)
        if nobody_served:
            return choices
        own = dispensable(context)
        return [other for other in choices if dispensable(other) > own]

    def _dispensable(self, context: Context, kv_tokens: int) -> tuple[bool, int]:
        """The greater, the sooner it loses its KV. With the shortest first: the shortest, which is soon prefilled again, but none
        of those that started first while there are others, so that some come to their end. With the oldest first: who
        started last, but none that is still young while there are others."""
        if self.first == "oldest":
            return context.length >= YOUNG * self._usual_length(), context.order
        return not self._started_first(context, kv_tokens), -context.length

    def _started_first(self, context: Context, kv_tokens: int) -> bool:
        """Whether it is among those that started first, as many as KV holds to their end."""
        usual = self._usual_length()
        size = int(kv_tokens / usual) if usual else len(self._orders)
        return size >= len(self._orders) or context.order < self._orders[size]

    def _usual_length(self) -> float:
        """Tokens of contexts that have come to their end, on average."""
        return self._ended_tokens / self.ended if self.ended else 0.0
