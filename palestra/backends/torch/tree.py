"""A batch of sequences as a prefix tree: tokens that several sequences begin with are computed once, forward and backward.

A group's samples share their prompt, groups share their system prompt, and a policy that grows certain writes the same
first turns again and again. In depth-first order the descendants of a node are one contiguous run of rows, so attention
needs no mask: each node's keys are read causally by the node itself and in full by all that stand behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from palestra.backends.torch.attention import attend, attend_backward, expand, fold, merge

MIN_SHARED = 16
"""A shorter shared run is not worth a node of its own: two more attention calls a layer cost more than its tokens."""


@dataclass(frozen=True, slots=True)
class Node:
    start: int
    end: int
    subtree_end: int


@dataclass(frozen=True, slots=True)
class Tree:
    tokens: list[int]
    positions: list[int]
    nodes: list[Node]
    """In depth-first order, parents first."""
    rows: list[list[int]]
    """For each sequence, where each of its tokens stands in `tokens`."""

    @staticmethod
    def of(sequences: Sequence[Sequence[int]]) -> "Tree":
        tree = Tree([], [], [], [[] for _ in sequences])
        order = sorted(range(len(sequences)), key=lambda i: list(sequences[i]))
        tree._grow(sequences, order, 0)
        return tree

    def _grow(self, sequences: Sequence[Sequence[int]], members: list[int], depth: int) -> None:
        """Lay out the sorted members, which agree on their first `depth` tokens."""
        while members:
            branch = _branch(sequences, members, depth)
            members = members[len(branch) :]
            shared = _common(sequences[branch[0]], sequences[branch[-1]], depth)
            place = len(self.nodes)
            start = len(self.tokens)
            self.tokens.extend(sequences[branch[0]][depth:shared])
            self.positions.extend(range(depth, shared))
            self.nodes.append(Node(start, len(self.tokens), -1))
            for member in branch:
                self.rows[member].extend(range(start, len(self.tokens)))
            self._grow(sequences, [m for m in branch if len(sequences[m]) > shared], shared)
            self.nodes[place] = Node(start, self.nodes[place].end, len(self.tokens))


def _branch(sequences: Sequence[Sequence[int]], members: list[int], depth: int) -> list[int]:
    """The members that share a node with the first: those that agree with it on enough tokens (or on all it has)."""
    first = sequences[members[0]]
    enough = min(depth + MIN_SHARED, len(first))
    rest = takewhile(lambda m: _common(first, sequences[m], depth) >= enough, members[1:])
    return [members[0], *rest]


def _common(a: Sequence[int], b: Sequence[int], start: int) -> int:
    """How many first tokens agree, given that `start` do."""
    limit = min(len(a), len(b))
    while start < limit and a[start] == b[start]:
        start += 1
    return start


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The trainer's attention plan: each token sees its ancestors in the tree and what precedes it in its node."""

    nodes: Sequence[Node]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out: Tensor = _TreeAttention.apply(query, key, value, self.nodes, scale)  # type: ignore[no-untyped-call]
        return out


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[Node], scale: float) -> Tensor:
        heads, key_heads = query.shape[0], key.shape[0]
        out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:2], float("-inf"), device=query.device)

        def add(rows: slice, part: Tensor, part_lse: Tensor) -> None:
            shape = out[:, rows].shape
            merged = merge(out[:, rows], lse[:, rows], part.reshape(shape), part_lse.reshape(shape[:2]))
            out[:, rows], lse[:, rows] = merged

        for node in nodes:
            own, behind = slice(node.start, node.end), slice(node.end, node.subtree_end)
            k, v = key[:, own], value[:, own]
            add(own, *attend(query[None, :, own], expand(k, heads), expand(v, heads), scale, causal=True))
            if node.subtree_end > node.end:
                add(behind, *attend(fold(query[:, behind], key_heads), k[None], v[None], scale))
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.nodes, ctx.scale = nodes, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        heads, key_heads = query.shape[0], key.shape[0]
        grads = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (query, key, value)]
        d_query, d_key, d_value = grads
        for node in ctx.nodes:
            own, behind = slice(node.start, node.end), slice(node.end, node.subtree_end)
            k, v = key[:, own], value[:, own]
            rows = (grad[None, :, own], query[None, :, own])
            dq, dk, dv = attend_backward(
                *rows,
                expand(k, heads),
                expand(v, heads),
                out[None, :, own],
                lse[None, :, own].contiguous(),
                ctx.scale,
                causal=True,
            )
            d_query[:, own] += dq[0]
            d_key[:, own] += dk[0].reshape(key_heads, -1, *dk.shape[2:]).sum(1)
            d_value[:, own] += dv[0].reshape(key_heads, -1, *dv.shape[2:]).sum(1)
            if node.subtree_end > node.end:
                folded = [fold(t[:, behind], key_heads) for t in (grad, query, out)]
                dq, dk, dv = attend_backward(
                    folded[0], folded[1], k[None], v[None], folded[2], lse[:, behind].reshape(1, key_heads, -1), ctx.scale
                )
                d_query[:, behind] += dq.reshape(d_query[:, behind].shape)
                d_key[:, own] += dk[0]
                d_value[:, own] += dv[0]
        return (*(g.to(query.dtype) for g in grads), None, None)  # type: ignore[return-value]
