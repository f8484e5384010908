"""The sampler's attention plan: which tokens of one flat forward pass belong to which sequence, and what each attends to.

A pass mixes long pieces (a trunk, or much that is new in a tail) with short ones (the newest token of a sequence that
decodes, or the few that a tool said). Short pieces of sequences on the same trunk read it in one call; neighbouring tails of a
shelf likewise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from palestra.backends.torch.attention import attend, expand, fold, merge
from palestra.backends.torch.cache import Path, Shelf, Tail, Trunk, Use, length

SHORT = 64
"""Pieces of up to so many tokens are attended together, padded to the longest; longer ones are worth a call each."""

GAP = 16
"""Neighbours on a shelf are read in one call though up to so many rows between them do not take part: a call costs more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens behind a path of trunks: they fill a further trunk, or go into a sequence's tail."""

    tokens: Sequence[int]
    path: Path
    home: Trunk | Tail

    @property
    def behind(self) -> int:
        """How many tokens its home already holds."""
        return self.home.filled if isinstance(self.home, Trunk) else self.home.length

    @property
    def is_short(self) -> bool:
        return isinstance(self.home, Tail) and len(self.tokens) <= SHORT

    def kv(self, layer: int) -> Tensor:
        """Its home's keys and values: [2, key heads, capacity, size]."""
        if isinstance(self.home, Trunk):
            return self.home.kv[layer][:, 0]
        return self.home.shelf.kv[layer][:, self.home.row]


@dataclass(frozen=True, slots=True)
class _Read:
    """Part of a trunk, and which of the short pieces' tokens read it."""

    use: Use
    rows: slice


class _Asking(NamedTuple):
    """A short piece: its tail, the place of its first token among those of all short pieces, and how many they are."""

    tail: Tail
    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of one shelf, read in one call, their queries and keys padded to the longest."""

    shelf: Shelf
    rows: slice
    length: int
    take: Tensor
    """[rows × queries]: which of the short pieces' tokens ask. Where a row has fewer, its last one asks again."""
    mask: Tensor | None


class PiecesPlan:
    """Pieces in the order of the flat tokens: long ones first, then short ones, those on one path side by side."""

    def __init__(self, pieces: Sequence[Piece], sharing: int, dtype: torch.dtype, device: torch.device) -> None:
        """`sharing`: how many query heads share a key head."""
        order = sorted(range(len(pieces)), key=lambda i: (pieces[i].is_short, _path_key(pieces[i].path)))
        self.pieces = [pieces[i] for i in order]
        self.order = order
        self._long = [piece for piece in self.pieces if not piece.is_short]
        short = [piece for piece in self.pieces if piece.is_short]
        self._first_short = sum(len(piece.tokens) for piece in self._long)
        self._has_short = bool(short)
        self._reads = _reads(short)
        self._plan_tails(short, sharing, dtype, device)

    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    def positions(self) -> list[int]:
        positions: list[int] = []
        for piece in self.pieces:
            first = length(piece.path) + piece.behind
            positions.extend(range(first, first + len(piece.tokens)))
        return positions

    def last_rows(self) -> list[int]:
        """Where each given piece's last token stands in the pass, in the order in which the pieces were given."""
        last = [0] * len(self.pieces)
        row = -1
        for place, piece in zip(self.order, self.pieces, strict=True):
            row += len(piece.tokens)
            last[place] = row
        return last

    def done(self) -> None:
        """After the pass: what was computed is now part of its trunk or tail."""
        for piece in self.pieces:
            if isinstance(piece.home, Trunk):
                piece.home.filled += len(piece.tokens)
            else:
                piece.home.length += len(piece.tokens)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        parts = []
        start = 0
        for piece in self._long:
            rows = slice(start, start + len(piece.tokens))
            parts.append(_attend_long(piece, layer, query[:, rows], key[:, rows], value[:, rows], scale))
            start = rows.stop
        if self._has_short:
            rows = slice(self._first_short, None)
            parts.append(self._attend_short(layer, query[:, rows], key[:, rows], value[:, rows], scale))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _plan_tails(self, short: Sequence[Piece], sharing: int, dtype: torch.dtype, device: torch.device) -> None:
        """Where the new keys and values of short pieces go, and who reads which rows."""
        firsts = accumulate((len(piece.tokens) for piece in short), initial=0)
        asking = [
            _Asking(piece.home, first, len(piece.tokens))
            for piece, first in zip(short, firsts, strict=False)
            if isinstance(piece.home, Tail)
        ]
        asking.sort(key=lambda a: (a.tail.shelf.capacity, a.tokens > 1, a.tail.row))
        self._writes: list[tuple[Shelf, Tensor, Tensor, Tensor]] = []
        self._runs: list[_Run] = []
        back = [0] * sum(a.tokens for a in asking)
        for _, group in groupby(asking, key=lambda a: a.tail.shelf.capacity):
            members = list(group)
            shelf = members[0].tail.shelf
            rows = [a.tail.row for a in members for _ in range(a.tokens)]
            places = [a.tail.length + n for a in members for n in range(a.tokens)]
            tokens = [a.first + n for a in members for n in range(a.tokens)]
            where, at, which = (torch.tensor(numbers, device=device) for numbers in (rows, places, tokens))
            self._writes.append((shelf, where, at, which))
            for together in _neighbours(members):
                start = sum(len(run.take) for run in self._runs)
                self._runs.append(_run(together, sharing, dtype, device))
                row, queries = together[0].tail.row, max(a.tokens for a in together)
                for a in together:
                    for n in range(a.tokens):
                        back[a.first + n] = start + (a.tail.row - row) * queries + n
        self._back = torch.tensor(back, dtype=torch.long, device=device)
        """For each token of the short pieces, where in the runs' results its own is."""

    def _attend_short(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, _, size = query.shape
        key_heads = key.shape[0]
        new = torch.stack((key, value)).transpose(1, 2)  # [2, tokens, key heads, size]
        for shelf, rows, places, tokens in self._writes:
            shelf.kv[layer][:, rows, :, places] = new[:, tokens].transpose(0, 1)

        by_token = query.transpose(0, 1)
        outs, lses = [], []
        for run in self._runs:
            count = run.rows.stop - run.rows.start
            asking = by_token[run.take].reshape(count, -1, key_heads, heads // key_heads, size).permute(0, 2, 3, 1, 4)
            keys, values = run.shelf.kv[layer][:, run.rows, :, : run.length]
            out, lse = attend(asking.flatten(2, 3), keys, values, scale, mask=run.mask)
            outs.append(out.reshape(asking.shape).permute(0, 3, 1, 2, 4).reshape(-1, heads, size))
            lses.append(lse.reshape(asking.shape[:-1]).permute(0, 3, 1, 2).reshape(-1, heads))
        out = torch.cat(outs)[self._back].transpose(0, 1).float()
        lse = torch.cat(lses)[self._back].T

        for read in self._reads:
            part, part_lse = _attend_use(read.use, layer, query[:, read.rows], scale)
            merged = merge(out[:, read.rows], lse[:, read.rows], part, part_lse)
            out[:, read.rows], lse[:, read.rows] = merged
        return out.to(query.dtype)


def _path_key(path: Path) -> list[tuple[int, int]]:
    return [(id(use.trunk), use.tokens) for use in path]


def _reads(pieces: Sequence[Piece]) -> list[_Read]:
    """For pieces sorted by path: at each depth, those that have come the same way so far read its trunk together."""
    reads = []
    for depth in range(max((len(piece.path) for piece in pieces), default=0)):
        start = 0
        for way, group in groupby(pieces, key=lambda piece: piece.path[: depth + 1]):
            count = sum(len(piece.tokens) for piece in group)
            if len(way) > depth:
                reads.append(_Read(way[depth], slice(start, start + count)))
            start += count
    return reads


def _attend_use(use: Use, layer: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    keys, values = use.trunk.kv[layer][..., : use.tokens, :]
    out, lse = attend(fold(query, keys.shape[1]), keys, values, scale)
    return out.reshape(query.shape), lse.reshape(query.shape[:2])


def _neighbours(members: Sequence[_Asking]) -> Iterator[list[_Asking]]:
    """Split a shelf's tails (those that decode first, then by row) where too many rows lie between two."""
    together: list[_Asking] = []
    for asking in members:
        if together:
            last = together[-1]
            if (last.tokens > 1) != (asking.tokens > 1) or asking.tail.row - last.tail.row > GAP:
                yield together
                together = []
        together.append(asking)
    yield together


def _run(members: Sequence[_Asking], sharing: int, dtype: torch.dtype, device: torch.device) -> _Run:
    """The new tokens are written before they are read. Rows that do not take part ask something, and nobody listens."""
    row, queries = members[0].tail.row, max(a.tokens for a in members)
    rows = members[-1].tail.row + 1 - row
    take, seen = [[0] * queries for _ in range(rows)], [[1] * queries for _ in range(rows)]
    for a in members:
        places = [min(n, a.tokens - 1) for n in range(queries)]
        take[a.tail.row - row] = [a.first + n for n in places]
        seen[a.tail.row - row] = [a.tail.length + n + 1 for n in places]
    longest = max(map(max, seen))
    mask = None
    if any(count < longest for counts in seen for count in counts):
        behind = torch.arange(longest, device=device) >= torch.tensor(seen, device=device).repeat(1, sharing)[..., None]
        mask = torch.zeros(behind.shape, dtype=dtype, device=device).masked_fill_(behind, float("-inf"))[:, None]
    asking = torch.tensor(take, device=device).flatten()
    return _Run(members[0].tail.shelf, slice(row, row + rows), longest, asking, mask)


def _attend_long(piece: Piece, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    heads, rows, _ = query.shape
    kv, start = piece.kv(layer), piece.behind
    kv[0, :, start : start + rows] = key
    kv[1, :, start : start + rows] = value
    out, lse = attend(query[None], expand(key, heads), expand(value, heads), scale, causal=True)
    out, lse = out[0], lse[0]
    past = [_attend_use(use, layer, query, scale) for use in piece.path]
    if start:
        part, part_lse = attend(fold(query, key.shape[0]), kv[None, 0, :, :start], kv[None, 1, :, :start], scale)
        past.append((part.reshape(out.shape), part_lse.reshape(lse.shape)))
    for part, part_lse in past:
        out, lse = merge(out, lse, part, part_lse)
    return out.to(query.dtype)
