"""The sampler's attention plan: which tokens of one flat forward pass belong to which sequence, and what each attends to.

A pass mixes prefill pieces (several new tokens of a trunk or a tail) with decode pieces (the one newest token of a
sequence). Decode pieces of sequences on the same trunk read it in one call; neighbouring tails of a shelf likewise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from palestra.backends.torch.attention import attend, expand, fold, merge
from palestra.backends.torch.cache import Path, Shelf, Tail, Trunk, Use, length


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
    def is_decode(self) -> bool:
        return isinstance(self.home, Tail) and len(self.tokens) == 1

    def kv(self, layer: int) -> Tensor:
        """Its home's keys and values: [2, key heads, capacity, size]."""
        if isinstance(self.home, Trunk):
            return self.home.kv[layer][:, 0]
        return self.home.shelf.kv[layer][:, self.home.row]


@dataclass(frozen=True, slots=True)
class _Read:
    """Part of a trunk, and the decode rows that read it."""

    use: Use
    rows: slice


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring rows of one shelf, read in one call, padded to the longest."""

    shelf: Shelf
    rows: slice
    length: int
    mask: Tensor | None


class PiecesPlan:
    """Pieces in the order of the flat tokens: prefill first, then decode pieces, those on one path side by side."""

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, device: torch.device) -> None:
        order = sorted(range(len(pieces)), key=lambda i: (pieces[i].is_decode, _path_key(pieces[i].path)))
        self.pieces = [pieces[i] for i in order]
        self.order = order
        self._prefill = [piece for piece in self.pieces if not piece.is_decode]
        decode = [piece for piece in self.pieces if piece.is_decode]
        self._first_decode = sum(len(piece.tokens) for piece in self._prefill)
        self._has_decode = bool(decode)
        self._reads = _reads([piece.path for piece in decode])
        self._plan_tails(decode, dtype, device)

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
        for piece in self._prefill:
            rows = slice(start, start + len(piece.tokens))
            parts.append(_attend_prefill(piece, layer, query[:, rows], key[:, rows], value[:, rows], scale))
            start = rows.stop
        if self._has_decode:
            decode = slice(self._first_decode, None)
            parts.append(self._attend_decode(layer, query[:, decode], key[:, decode], value[:, decode], scale))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _plan_tails(self, decode: Sequence[Piece], dtype: torch.dtype, device: torch.device) -> None:
        tails = [piece.home for piece in decode if isinstance(piece.home, Tail)]
        order = sorted(range(len(tails)), key=lambda i: (tails[i].shelf.capacity, tails[i].row))
        self._by_tail = torch.tensor(order, device=device)
        self._from_tail = torch.argsort(self._by_tail)
        self._writes: list[tuple[Shelf, Tensor, Tensor, slice]] = []
        self._runs: list[_Run] = []
        start = 0
        for _, group in groupby((tails[i] for i in order), key=lambda tail: tail.shelf.capacity):
            members = list(group)
            rows = torch.tensor([tail.row for tail in members], device=device)
            lengths = torch.tensor([tail.length for tail in members], device=device)
            self._writes.append((members[0].shelf, rows, lengths, slice(start, start + len(members))))
            self._runs.extend(_runs(members, dtype, device))
            start += len(members)

    def _attend_decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        heads, _, size = query.shape
        key_heads = key.shape[0]
        new = torch.stack((key, value)).transpose(1, 2)[:, self._by_tail]  # [2, sequences by tail, key heads, size]
        for shelf, rows, lengths, mine in self._writes:
            shelf.kv[layer][:, rows, :, lengths] = new[:, mine].transpose(0, 1)

        by_tail = query.transpose(0, 1)[self._by_tail].reshape(-1, key_heads, heads // key_heads, size)
        outs, lses = [], []
        start = 0
        for run in self._runs:
            count = run.rows.stop - run.rows.start
            keys, values = run.shelf.kv[layer][:, run.rows, :, : run.length]
            out, lse = attend(by_tail[start : start + count], keys, values, scale, mask=run.mask)
            outs.append(out)
            lses.append(lse)
            start += count
        out = torch.cat(outs)[self._from_tail].reshape(-1, heads, size).transpose(0, 1)
        lse = torch.cat(lses)[self._from_tail].reshape(-1, heads).T

        out = out.float()
        for read in self._reads:
            part, part_lse = _attend_use(read.use, layer, query[:, read.rows], scale)
            merged = merge(out[:, read.rows], lse[:, read.rows], part, part_lse)
            out[:, read.rows], lse[:, read.rows] = merged
        return out.to(query.dtype)


def _path_key(path: Path) -> list[tuple[int, int]]:
    return [(id(use.trunk), use.tokens) for use in path]


def _reads(paths: Sequence[Path]) -> list[_Read]:
    """For sorted paths: at each depth, the runs of sequences that have come the same way so far read its trunk together."""
    reads = []
    for depth in range(max(map(len, paths), default=0)):
        start = 0
        for way, group in groupby(paths, key=lambda path: path[: depth + 1]):
            count = len(list(group))
            if len(way) > depth:
                reads.append(_Read(way[depth], slice(start, start + count)))
            start += count
    return reads


def _attend_use(use: Use, layer: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    keys, values = use.trunk.kv[layer][..., : use.tokens, :]
    out, lse = attend(fold(query, keys.shape[1]), keys, values, scale)
    return out.reshape(query.shape), lse.reshape(query.shape[:2])


def _runs(tails: Sequence[Tail], dtype: torch.dtype, device: torch.device) -> list[_Run]:
    """Split a shelf's tails (sorted by row) where rows are not neighbours."""
    runs = []
    for _, group in groupby(enumerate(tails), key=lambda pair: pair[1].row - pair[0]):
        members = [tail for _, tail in group]
        lengths = [tail.length + 1 for tail in members]  # the new token is written before it is read
        longest = max(lengths)
        mask = None
        if min(lengths) < longest:
            behind = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
            mask = torch.zeros(behind.shape, dtype=dtype, device=device).masked_fill_(behind, float("-inf"))[:, None, None]
        runs.append(_Run(members[0].shelf, slice(members[0].row, members[-1].row + 1), longest, mask))
    return runs


def _attend_prefill(piece: Piece, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
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
