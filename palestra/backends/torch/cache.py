"""Where keys and values live between decode steps: trunks, which sequences share, and tails, which each has for itself.

A trunk is a beginning that was computed once for all sequences that share it; it may itself follow a part of another trunk, as
a group's prompt follows the system prompt of all groups. Tails lie in shelves: a shelf's rows have one capacity, so that
neighbours are read in one attention call without copies; a tail that outgrows its shelf moves to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_SHELF = 128
GROWTH = 4
"""Each shelf's rows hold four times as many tokens as those of the shelf before."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one token's keys and values look like."""

    layers: int
    key_heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    def room(self, rows: int, capacity: int) -> list[Tensor]:
        """For each layer, room for keys and values: [2, rows, key heads, capacity, size]. Zeros, since attention multiplies
        what it masks by nothing, and nothing times NaN is NaN."""
        shape = (2, rows, self.key_heads, capacity, self.size)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.layers)]


class Use(NamedTuple):
    """The first tokens of a trunk, as a sequence or another trunk builds on them."""

    trunk: "Trunk"
    tokens: int


Path = tuple[Use, ...]


def length(path: Path) -> int:
    return sum(use.tokens for use in path)


@dataclass(eq=False, slots=True)
class Trunk:
    """Keys and values behind a path of other trunks, begun under one policy version."""

    path: Path
    whole: list[int]
    """All tokens from the very beginning, those of the path included."""
    version: int
    kv: list[Tensor]
    filled: int = 0
    users: int = 0

    @property
    def tokens(self) -> int:
        return len(self.whole) - length(self.path)

    def path_to(self, count: int) -> Path:
        """The path to the first `count` of all tokens."""
        own = count - length(self.path)
        if own > 0:
            return (*self.path, Use(self, own))
        return self.path[-1].trunk.path_to(count) if self.path else ()


@dataclass(eq=False)
class Shelf:
    """Rows of equal capacity. Rows are handed out lowest first, so that those in use stay neighbours."""

    shape: Shape
    capacity: int
    kv: list[Tensor] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    rows: int = 0

    def take(self) -> int:
        if not self.free:
            self._grow(max(1, 1024 // self.capacity, 2 * self.rows))
        self.free.sort()
        return self.free.pop(0)

    def give_back(self, row: int) -> None:
        self.free.append(row)
        if len(self.free) == self.rows:  # nobody is left: hand the memory back
            self.kv, self.free, self.rows = [], [], 0

    def _grow(self, rows: int) -> None:
        larger = self.shape.room(rows, self.capacity)
        for new, old in zip(larger, self.kv, strict=False):
            new[:, : self.rows] = old
        self.kv = larger
        self.free.extend(range(self.rows, rows))
        self.rows = rows


@dataclass(eq=False, slots=True)
class Tail:
    """A sequence's own keys and values: a row of a shelf, filled up to `length`."""

    shelf: Shelf
    row: int
    length: int = 0


def shelf_for(length: int) -> int:
    """The capacity of the smallest shelf on which so many tokens fit."""
    capacity = SMALLEST_SHELF
    while capacity < length:
        capacity *= GROWTH
    return capacity


class Cache:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.trunks: list[Trunk] = []
        self._shelves: dict[int, Shelf] = {}

    def longest_trunk(self, tokens: Sequence[int], version: int) -> tuple[Trunk | None, int]:
        """The trunk that agrees with most of the first tokens, and on how many."""
        best, agreed = None, 0
        for trunk in self.trunks:
            if trunk.version == version:
                count = agreement(trunk.whole, tokens)
                if count > agreed:
                    best, agreed = trunk, count
        return best, agreed

    def add_trunk(self, path: Path, whole: Sequence[int], version: int) -> Trunk:
        trunk = Trunk(path, list(whole), version, self.shape.room(1, len(whole) - length(path)))
        self.hold(path)
        self.trunks.append(trunk)
        return trunk

    def hold(self, path: Path) -> None:
        if path:  # the last trunk holds those before it
            path[-1].trunk.users += 1

    def let_go(self, path: Path, version: int) -> None:
        """Stop using a path. A trunk that nobody uses stays for newcomers, unless it is of an older policy version."""
        if path:
            trunk = path[-1].trunk
            trunk.users -= 1
            if trunk.users == 0 and trunk.version != version:
                self.drop(trunk, version)

    def drop(self, trunk: Trunk, version: int) -> None:
        self.trunks.remove(trunk)
        self.let_go(trunk.path, version)

    def drop_unused(self, version: int) -> None:
        """Drop the trunks of other versions that nobody uses."""
        for trunk in [t for t in self.trunks if t.users == 0 and t.version != version]:
            self.drop(trunk, version)

    def reserve(self, tail: Tail | None, length: int) -> Tail:
        """A tail with room for `length` tokens: this one, or a copy of it on a larger shelf."""
        if tail is not None and length <= tail.shelf.capacity:
            return tail
        capacity = shelf_for(length)
        shelf = self._shelves.setdefault(capacity, Shelf(self.shape, capacity))
        moved = Tail(shelf, shelf.take())
        if tail is not None:
            for new, old in zip(shelf.kv, tail.shelf.kv, strict=True):
                new[:, moved.row, :, : tail.length] = old[:, tail.row, :, : tail.length]
            moved.length = tail.length
            self.release(tail)
        return moved

    def release(self, tail: Tail) -> None:
        tail.shelf.give_back(tail.row)


def agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
