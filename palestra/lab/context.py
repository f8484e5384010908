"""A trajectory in the engine: its tokens, the KV that it holds, and the call that is under way."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from palestra.lab.progress import Mark

Place = tuple[bool, bool, int, int]
"""Where a call stands in the queue; the smallest is served first."""


@dataclass(eq=False)
class Prompt:
    """What several contexts begin with, where the engine holds it once for all of them."""

    tokens: int
    """But for its last one: the first token of each reply is written from it."""
    holders: int = 0
    """How many of them are resident; it is there as long as one of them is."""
    computed: bool = False


class Context:
    """One trajectory's tokens."""

    __slots__ = ("_serve", "call_under_way", "held", "kin", "length", "order", "prompt", "seen")

    def __init__(self, serve: Callable[["Context", int, int], Awaitable[None]], order: int, kin: int | None) -> None:
        self._serve = serve
        self.order = order
        """Who started earlier has the smaller one."""
        self.kin = kin
        """Those of the same begin with the same prompt; None shares with nobody."""
        self.prompt: Prompt | None = None
        self.length = 0
        self.seen = 0
        """Tokens that were computed before, and so are prefilled again if their KV is lost."""
        self.held = 0
        """Tokens of KV reserved, without the shared ones; none when it is not resident."""
        self.call_under_way: Call | None = None

    @property
    def new(self) -> bool:
        """Whether nothing of it has been computed yet."""
        return not self.seen and not self.held

    @property
    def shared(self) -> int:
        """Its first tokens, of which KV holds one copy for all that begin with them."""
        return self.prompt.tokens if self.prompt is not None else 0

    @property
    def kept(self) -> int:
        """Its first tokens that need not be prefilled."""
        if self.held:
            return self.shared + self.held
        return self.shared if self.prompt is not None and self.prompt.computed else 0

    @property
    def wanted(self) -> int:
        """Tokens of KV that it holds, or would hold, without the shared ones."""
        return self.held or self.length - self.shared

    async def call(self, new_tokens: int, output_tokens: int) -> None:
        """Prefill what is new (and what was lost), then decode."""
        await self._serve(self, new_tokens, output_tokens)


class Call:
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
        """Tokens of KV that it needs, without the shared ones."""
        return self.context.length - self.context.shared + self.piece
