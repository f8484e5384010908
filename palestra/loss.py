"""Policy losses over the sampled tokens of a micro-batch, as flat tensors and as sums.

Every loss is a plain sum, and the trainer divides by `normaliser` once, at its step; so it does not matter how sequences are
ordered or batched, as long as none is cut in two. Models, micro-batching and optimisers live in the backends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.config import Loss


@dataclass
class Tokens:
    """What is known of the sampled tokens, one entry each; only `lengths` has one entry for each sequence."""

    old_logprobs: Tensor
    """The sampler's."""
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    """int64: the place in `lengths` of the sequence that each token belongs to."""
    lengths: Tensor
    """Sampled tokens in each sequence."""
    reference: Tensor | None = None
    """The reference model's logprobs, which the KL needs."""


def policy_loss(logprobs: Tensor, tokens: Tokens, spec: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss as an unnormalised sum, and metrics as sums over tokens (those named `*_max`: maxima).

    Without `truncate` the ratio is that of the trainer to the sampler. The sampler's numbers differ a little from the
    trainer's even for the same weights, and a clip would act on that difference as if it were a change of policy. With
    `truncate=C` the two are told apart: each token's loss is multiplied by min(trainer / sampler, C), which corrects the
    distribution and carries no gradient; and the ratio is that of the trainer to its own old policy. There is exactly
    one update for each batch, so that old policy is the present one, and the ratio is 1 with a gradient: it is never clipped.
    """
    gap = logprobs - tokens.old_logprobs
    if spec.truncate is None:
        loss, clipped = _surrogate(logprobs, gap, tokens, spec)
    else:
        correction = _exp(gap.detach())
        loss, _ = _surrogate(logprobs, logprobs - logprobs.detach(), tokens, spec)
        loss, clipped = loss * correction.clamp(max=spec.truncate), correction > spec.truncate
    metrics = _metrics(gap.detach(), clipped)
    if spec.kl:
        if tokens.reference is None:
            raise ValueError("a loss with kl > 0 needs the reference's logprobs")
        divergence = _k3(tokens.reference - logprobs)
        loss = loss + spec.kl * divergence
        metrics["kl_reference"] = divergence.detach().sum()
    weights = tokens.weights
    if spec.reduction == "sequence_mean":
        weights = weights / tokens.lengths[tokens.sequence]
    return (weights * loss).sum(), metrics


def normaliser(spec: Loss, tokens_total: float, sequences_total: float) -> float:
    """What the summed gradients are divided by, from the weights of all tokens and of all sequences of the step."""
    match spec.reduction:
        case "token_mean":
            return tokens_total
        case "sequence_mean":
            return sequences_total
        case "constant":
            return spec.constant * sequences_total


def _surrogate(logprobs: Tensor, log_ratio: Tensor, tokens: Tokens, spec: Loss) -> tuple[Tensor, Tensor]:
    """The loss of each token, and at which tokens a clip acted."""
    nowhere = torch.zeros_like(logprobs, dtype=torch.bool)
    match spec.kind:
        case "cross_entropy":
            return -logprobs, nowhere
        case "importance_sampling":
            return -_exp(log_ratio) * tokens.advantages, nowhere
        case "ppo":
            return _clip(_exp(log_ratio), tokens.advantages, spec)
        case "gspo":
            return _clip(_exp(_sequence_log_ratio(log_ratio, tokens)), tokens.advantages, spec)
        case "cispo":
            ratio = _exp(log_ratio).detach()
            bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
            return -bounded * tokens.advantages * logprobs, bounded != ratio


def _clip(ratio: Tensor, advantages: Tensor, spec: Loss) -> tuple[Tensor, Tensor]:
    free = -ratio * advantages
    loss = torch.maximum(free, -ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantages)
    if spec.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -spec.dual_clip * advantages), loss)
    return loss, loss != free


def _sequence_log_ratio(log_ratio: Tensor, tokens: Tokens) -> Tensor:
    """The log of GSPO's ratio, the geometric mean over a sequence's tokens, given to each of them.

    This is the paper's GSPO-token: the value is the sequence's, the gradient each token's own. With one advantage for the
    whole sequence, value and gradient are those of GSPO.
    """
    values = log_ratio.detach()
    sums = torch.zeros_like(tokens.lengths, dtype=values.dtype).index_add_(0, tokens.sequence, values)
    return (sums / tokens.lengths)[tokens.sequence] + log_ratio - values


def _metrics(gap: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    return {
        "clipped": clipped.sum(),
        "ratio": _exp(gap).sum(),
        "logprob_gap": gap.abs().sum(),
        "logprob_gap_max": gap.abs().max(),
        "kl_sampler": _k3(gap).sum(),
    }


def _k3(log_ratio: Tensor) -> Tensor:
    """Schulman's k3: an unbiased and never negative estimate of a KL, from log(other / the one that sampled)."""
    return _exp(log_ratio) - log_ratio.clamp(-20, 20) - 1


def _exp(log_ratio: Tensor) -> Tensor:
    """Bounded, so that one absurd logprob cannot make the whole sum infinite."""
    return log_ratio.clamp(-20, 20).exp()
