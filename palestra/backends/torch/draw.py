"""Drawing a token from logits: one uniform number of the sequence's own generator decides, whatever else is in the batch."""

import torch
from torch import Tensor

from palestra.errors import ModelError

BLOCK = 256
"""The vocabulary is searched in two levels, since one running sum over all of it costs more than everything else here."""


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """For each row a token of softmax(logits / temperature) and its logprob there. Temperature 0 takes the likeliest token,
    with its logprob at temperature 1."""
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    peak, likeliest = scaled.max(-1)
    if not peak.isfinite().all():
        raise ModelError("the model's logits are not finite: training has diverged, or its weights overflow in this dtype")
    mass = torch.nn.functional.pad((scaled - peak[:, None]).exp_(), (0, -scaled.shape[-1] % BLOCK))
    blocks = mass.reshape(len(mass), -1, BLOCK)
    sums = blocks.sum(-1).double()
    total = sums.sum(-1)
    block, rest = _search(sums, uniforms * total)
    inside, _ = _search(blocks[torch.arange(len(block)), block].double(), rest)
    token = torch.where(greedy, likeliest, block * BLOCK + inside)
    chosen = scaled.gather(-1, token[:, None])[:, 0]
    return token, chosen - peak - total.log().float()


def _search(mass: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of the mass passes the point, and how far into that entry the point lies."""
    running = mass.cumsum(-1)
    # Rounding may put the point past the end: the last entry with any mass is meant.
    last = mass.shape[-1] - 1 - (mass.flip(-1) > 0).int().argmax(-1)
    index = torch.searchsorted(running, point[:, None], right=True)[:, 0].minimum(last)
    return index, point - (running - mass).gather(-1, index[:, None])[:, 0]
