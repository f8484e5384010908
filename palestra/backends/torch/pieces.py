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
from palestra.backends.torch.cache import Shelf, Tail, Trunk


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence. Without a tail they fill the trunk; with one they follow trunk and tail."""

    tokens: Sequence[int]
    trunk: Trunk
    tail: Tail | None

    @property
    def position(self) -> int:
        return self.trunk.filled + (self.tail.length if self.tail else 0)

    @property
    def is_decode(self) -> bool:
        return self.tail is not None and len(self.tokens) == 1


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring rows of one shelf, read in one call, padded to the longest."""

    shelf: Shelf
    rows: slice
    length: int
    mask: Tensor | None


class PiecesPlan:
    """Pieces in the order of the flat tokens: prefill first, then decode pieces, those on one trunk side by side."""

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, device: torch.device) -> None:
        order = sorted(range(len(pieces)), key=lambda i: (pieces[i].is_decode, id(pieces[i].trunk)))
        self.pieces = [pieces[i] for i in order]
        self.order = order
        self._prefill = [piece for piece in self.pieces if not piece.is_decode]
        decode = [piece for piece in self.pieces if piece.is_decode]
        self._first_decode = sum(len(piece.tokens) for piece in self._prefill)
        self._on_trunk = [(trunk, len(list(group))) for trunk, group in groupby(decode, key=lambda piece: piece.trunk)]
        self._plan_tails(decode, dtype, device)

    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    def positions(self) -> list[int]:
        return [piece.position + i for piece in self.pieces for i in range(len(piece.tokens))]

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
            if piece.tail is None:
                piece.trunk.filled += len(piece.tokens)
            else:
                piece.tail.length += len(piece.tokens)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        parts = []
        start = 0
        for piece in self._prefill:
            rows = slice(start, start + len(piece.tokens))
            parts.append(_attend_prefill(piece, layer, query[:, rows], key[:, rows], value[:, rows], scale))
            start = rows.stop
        if self._on_trunk:
            decode = slice(self._first_decode, None)
            parts.append(self._attend_decode(layer, query[:, decode], key[:, decode], value[:, decode], scale))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _plan_tails(self, decode: Sequence[Piece], dtype: torch.dtype, device: torch.device) -> None:
        tails = [piece.tail for piece in decode if piece.tail is not None]
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

        trunk_outs, trunk_lses = [], []
        start = 0
        for trunk, count in self._on_trunk:
            rows = query[:, start : start + count]
            part, part_lse = _attend_trunk(trunk.kv[layer], rows, scale)
            trunk_outs.append(part)
            trunk_lses.append(part_lse)
            start += count
        merged, _ = merge(out, lse, torch.cat(trunk_outs, dim=1), torch.cat(trunk_lses, dim=1))
        return merged.to(query.dtype)


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


def _attend_trunk(kv: Tensor, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if kv.shape[-2] == 0:  # a prompt of a single token
        return torch.zeros_like(query), torch.full(query.shape[:2], float("-inf"), device=query.device)
    out, lse = attend(fold(query, kv.shape[2]), kv[0], kv[1], scale)
    return out.reshape(query.shape), lse.reshape(query.shape[:2])


def _attend_prefill(piece: Piece, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    heads, rows, _ = query.shape
    past = []
    if piece.trunk.filled:
        past.append(piece.trunk.kv[layer][:, 0, :, : piece.trunk.filled])
    if piece.tail is None:
        home, start = piece.trunk.kv[layer][:, 0], piece.trunk.filled
    else:
        home, start = piece.tail.shelf.kv[layer][:, piece.tail.row], piece.tail.length
        if start:
            past.append(home[:, :, :start])
    home[0, :, start : start + rows] = key
    home[1, :, start : start + rows] = value
    out, lse = attend(query[None], expand(key, heads), expand(value, heads), scale, causal=True)
    out, lse = out[0], lse[0]
    for keys, values in past:
        part, part_lse = attend(fold(query, key.shape[0]), keys[None], values[None], scale)
        out, lse = merge(out, lse, part.reshape(out.shape), part_lse.reshape(lse.shape))
    return out.to(query.dtype)
