"""Where the sampler keeps the keys and values of its sessions: which trunk they share, who has room, who waits, and who loses
what it has when room is short.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from palestra.backends.torch.cache import Cache, Path, Tail, agreement, length, shelf_for
from palestra.protocols import Sampling
from palestra.trajectory import Completion

SHARE = 16
"""Prompts share trunks in whole multiples of so many tokens: fewer different lengths make fewer attention calls."""

WORTH = 512
"""Behind a trunk, a second one is worth its own attention calls in every later step when it saves computing so many tokens."""

REPLY_PIECE = 256
"""Tokens of a reply for which room is kept at a time: most replies end long before their limit."""

HEADROOM = 0.05
"""Who comes in leaves this share of the KV tokens free for those under way to grow: it would be evicted soon otherwise."""


@dataclass(eq=False)
class Request:
    tokens: list[int]
    sampling: Sampling
    deliver: Callable[[Completion | Exception], None]
    written: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    promised: int = 0
    """Tokens of the reply for which room is kept."""
    cancelled: bool = False

    @property
    def next_promise(self) -> int:
        return min(len(self.written) + REPLY_PIECE, self.sampling.max_tokens)


@dataclass(eq=False)
class Strand:
    """A session as the engine sees it."""

    random: random.Random
    held: list[int] = field(default_factory=list)
    """The tokens whose keys and values are in the trunks of its path and in its tail."""
    path: Path | None = None
    tail: Tail | None = None
    request: Request | None = None


class Placement:
    """Of all strands that are open, in the order in which they came."""

    def __init__(self, cache: Cache, kv_tokens: int) -> None:
        self._cache = cache
        self._kv_tokens = kv_tokens
        self._strands: dict[int, Strand] = {}

    def add(self, strand: Strand) -> None:
        self._strands[id(strand)] = strand

    def remove(self, strand: Strand, version: int) -> None:
        self._forget(strand, version)
        self._strands.pop(id(strand), None)

    def running(self) -> list[Strand]:
        """Those with a request."""
        return [strand for strand in self._strands.values() if strand.request is not None]

    def placed(self, version: int) -> list[Strand]:
        """Those who can go on. Who has no room waits, and nobody who came later comes in before."""
        placed, waiting = [], False
        for strand in self.running():
            if strand.path is None and waiting:
                continue
            if _has_room(strand) or self._place(strand, version):
                placed.append(strand)
            else:
                waiting = True
        return placed

    def _place(self, strand: Strand, version: int) -> bool:
        """Give the strand a path, or find that what it holds still fits, with room for a piece of its reply. False when it has
        to wait."""
        request = strand.request
        assert request is not None
        if strand.path is not None:
            if request.written or _keep_prefix(strand, request.tokens):
                return self._promise(strand, version)
            self._forget(strand, version)
        prompt = request.tokens[:-1]
        trunk, agreed = self._cache.longest_trunk(prompt, version)
        if agreed < len(prompt):
            agreed -= agreed % SHARE
        path = trunk.path_to(agreed) if trunk is not None else ()
        new, piece = len(prompt) - agreed, request.next_promise - len(request.written)
        adds_trunk = new >= SHARE and (not path or self._sharers(prompt) * new >= WORTH)
        self._cache.hold(path)  # before room is made, which drops what nobody holds
        if not self._make_room(strand, new + shelf_for(piece) if adds_trunk else shelf_for(new + piece), version):
            self._cache.let_go(path, version)
            return False
        if adds_trunk:
            longer = self._cache.add_trunk(path, prompt, version).path_to(len(prompt))
            self._cache.hold(longer)
            self._cache.let_go(path, version)  # the new trunk holds it
            path = longer
        strand.path, strand.held = path, prompt[: length(path)]
        request.promised = request.next_promise
        return True

    def _sharers(self, prompt: Sequence[int]) -> int:
        """How many others wait with the same prompt."""
        waiting = [s.request.tokens for s in self._strands.values() if s.request is not None and s.path is None]
        return sum(tokens[:-1] == prompt for tokens in waiting) - 1

    def _promise(self, strand: Strand, version: int) -> bool:
        """Keep room for the next piece of its reply. False when that has to wait."""
        request = strand.request
        assert request is not None
        before, request.promised = request.promised, request.next_promise
        if self._make_room(strand, 0, version):
            return True
        request.promised = before
        return False

    def _make_room(self, strand: Strand, tokens: int, version: int) -> bool:
        """Drop what is not needed until so many tokens more fit for this strand. False when it has to wait; then nobody has
        lost anything for it."""
        limit = self._kv_tokens * (1 - HEADROOM if strand.path is None else 1)
        self._drop_unused(limit - tokens, version)
        missing = self.committed() + tokens - limit
        holders = [s for s in self._strands.values() if s.path is not None]
        victims = _dispensable(strand, holders)
        all_give_way = len(victims) == sum(s is not strand for s in holders)
        if missing > sum(map(self._frees, victims)) and not all_give_way:
            return False
        for victim in victims:
            if self.committed() + tokens <= limit:
                break
            self._forget(victim, version)
            self._drop_unused(limit - tokens, version)
        return True

    def _drop_unused(self, limit: float, version: int) -> None:
        """Drop trunks that nobody uses until no more than so many tokens are committed."""
        while self.committed() > limit:
            unused = next((trunk for trunk in self._cache.trunks if trunk.users == 0), None)
            if unused is None:
                return
            self._cache.drop(unused, version)

    def committed(self) -> int:
        """Tokens of trunks, and of the rows that tails have or were promised."""
        rows = sum(self._row(strand) for strand in self._strands.values() if strand.path is not None)
        return rows + sum(trunk.tokens for trunk in self._cache.trunks)

    def _row(self, strand: Strand) -> int:
        """Tokens of the row that the strand has, or will need before the promised piece of its reply ends."""
        assert strand.path is not None
        needed, request = len(strand.held), strand.request
        if request is not None and request.promised:
            needed = len(request.tokens) + request.promised - len(request.written) - 1  # the last one need not be kept
        return max(strand.tail.shelf.capacity if strand.tail is not None else 0, shelf_for(needed - length(strand.path)))

    def _frees(self, strand: Strand) -> int:
        """Tokens that are free without this strand, at least."""
        assert strand.path is not None
        own = strand.path[-1].trunk if strand.path else None
        return self._row(strand) + (own.tokens if own is not None and own.users == 1 else 0)

    def _forget(self, strand: Strand, version: int) -> None:
        if strand.tail is not None:
            self._cache.release(strand.tail)
        if strand.path is not None:
            self._cache.let_go(strand.path, version)
        strand.path, strand.tail, strand.held = None, None, []


def _has_room(strand: Strand) -> bool:
    """Whether it may write the next token of its reply where it is."""
    request = strand.request
    return strand.path is not None and request is not None and len(request.written) < request.promised


def _dispensable(strand: Strand, holders: Sequence[Strand]) -> list[Strand]:
    """Who gives way to this strand, in order. To one that grows: those that started later, the latest first, and then those
    that wait for a tool; so of all at work the one that started first always goes on. To a newcomer nobody, unless all wait for
    tools: then nobody would ever make room."""
    idle = [s for s in reversed(holders) if s.request is None]
    if strand.path is None:
        return idle if len(idle) == len(holders) else []
    later = list(itertools.takewhile(lambda s: s is not strand, reversed(holders)))
    return [*later, *(s for s in idle if s not in later)]


def _keep_prefix(strand: Strand, tokens: Sequence[int]) -> bool:
    """Whether the new tokens begin with all of the path; if so, cut the tail to what still agrees."""
    assert strand.path is not None
    held = strand.held
    agreed = len(held) if held == tokens[: len(held)] else agreement(held, tokens)
    agreed = min(agreed, len(tokens) - 1)
    if agreed < length(strand.path):
        return False
    if strand.tail is not None:
        strand.tail.length = agreed - length(strand.path)
    del held[agreed:]
    return True
