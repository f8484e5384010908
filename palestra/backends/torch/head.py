"""Logprobs of chosen tokens from hidden states, without ever holding the logits of more than a few rows."""

from typing import Any

import torch
from torch import Tensor

ROWS = 256
"""Rows whose logits are held at once: 50 MB at a vocabulary of 49,152."""


def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden · weightᵀ / temperature)[target] for each row, in float32, differentiable in hidden and weight."""
    out: Tensor = _Logprobs.apply(hidden, weight, targets, temperature)  # type: ignore[no-untyped-call]
    return out


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        chosen, totals = [], []
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            logits = (hidden[rows] @ weight.T).float() / temperature
            totals.append(logits.logsumexp(-1))
            chosen.append(logits.gather(-1, targets[rows, None])[:, 0])
        total = torch.cat(totals)
        ctx.save_for_backward(hidden, weight, targets, total)
        ctx.temperature = temperature
        return torch.cat(chosen) - total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets, total = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, device=weight.device) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            # The logits are computed again rather than kept: they would be the largest tensor of the whole pass.
            scaled = (hidden[rows] @ weight.T).float().div_(ctx.temperature)
            share = scaled.sub_(total[rows, None]).exp_()
            factor = grad[rows, None] / ctx.temperature
            share.mul_(-factor)
            share.scatter_add_(1, targets[rows, None], factor)
            d_logits = share.to(weight.dtype)
            d_hidden[rows] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.T @ hidden[rows]
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None
