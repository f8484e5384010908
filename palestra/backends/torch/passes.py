"""Samples packed into training passes: which tokens are computed, and which rows and targets the loss reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from palestra.backends.torch.cache import agreement
from palestra.backends.torch.tree import Tree
from palestra.loss import Tokens
from palestra.trajectory import Sample


@dataclass(frozen=True)
class Pass:
    samples: list[Sample]

    @cached_property
    def tree(self) -> Tree:
        return Tree.of([sample.tokens for sample in self.samples])

    @cached_property
    def _pairs(self) -> tuple[list[tuple[int, int]], list[int]]:
        """The distinct (row, target) pairs, and for each trained token the place of its pair. Equal beginnings of
        several samples are one pair, so that the output head computes them once."""
        pairs: dict[tuple[int, int], int] = {}
        places = []
        for sample, rows in zip(self.samples, self.tree.rows, strict=True):
            for position in _trained(sample):
                pair = (rows[position - 1], sample.tokens[position])
                places.append(pairs.setdefault(pair, len(pairs)))
        return list(pairs), places

    @property
    def rows(self) -> list[int]:
        return [row for row, _ in self._pairs[0]]

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self._pairs[0]]

    @property
    def places(self) -> list[int]:
        return self._pairs[1]

    def tokens(self, device: torch.device, reference: torch.Tensor | None) -> Tokens:
        """What the loss needs to know of each trained token."""
        trained = [list(_trained(sample)) for sample in self.samples]
        lengths = [len(positions) for positions in trained]
        spread = [i for i, length in enumerate(lengths) for _ in range(length)]

        def tensor(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return Tokens(
            old_logprobs=tensor([s.logprobs[p] for s, positions in zip(self.samples, trained, strict=True) for p in positions]),
            advantages=tensor([self.samples[i].advantage for i in spread]),
            weights=tensor([self.samples[i].weight for i in spread]),
            sequence=torch.tensor(spread, device=device),
            lengths=tensor(lengths),
            reference=reference,
        )


def _trained(sample: Sample) -> Iterator[int]:
    """Positions that are trained on. The first token of a sequence is predicted by nothing."""
    return (position for position, mask in enumerate(sample.mask) if mask and position > 0)


def split_into_passes(samples: Sequence[Sample], limit: int) -> list[Pass]:
    """Fill passes up to the limit of tokens, counting shared ones once. Neighbours stay together; no sample is cut."""
    passes: list[Pass] = []
    current: list[Sample] = []
    size = 0
    for sample in samples:
        # Samples of a group are neighbours, so the one before shares at least what any other does, near enough.
        new = len(sample.tokens) - (agreement(sample.tokens, current[-1].tokens) if current else 0)
        if current and size + new > limit:
            passes.append(Pass(current))
            current, size, new = [], 0, len(sample.tokens)
        current.append(sample)
        size += new
    passes.append(Pass(current))
    return passes
