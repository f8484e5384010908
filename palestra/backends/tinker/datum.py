"""Samples as the Tinker API takes them, so that what its server does with them is our loss.

A server has its own way to sum up, and what it divides by is multiplied in here beforehand, into the advantages.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import tinker
from tinker import types

from palestra.config import Loss
from palestra.loss import normaliser
from palestra.trajectory import Sample

Server = Literal["tinker", "skyrl"]
"""`tinker` sums over all tokens. `skyrl` takes the mean over each sequence's weights, and then over the sequences."""


class Totals(NamedTuple):
    """What a whole step's samples come to, as the normaliser wants to know it."""

    sequences: int
    token_weight: float
    sequence_weight: float


def total(samples: Sequence[Sample]) -> Totals:
    return Totals(len(samples), sum(s.weight * sum(s.mask) for s in samples), sum(s.weight for s in samples))


def needs_totals(loss: Loss, server: Server, unit_weights: bool) -> bool:
    """Whether all samples of a step must be known before one can be converted: not where the server's own means will do."""
    return server == "tinker" or not unit_weights or loss.reduction == "token_mean"


def to_datum(sample: Sample, loss: Loss, server: Server, totals: Totals | None = None) -> types.Datum:
    """One sample. Inputs are all tokens but the last, targets all but the first; what was not sampled has no advantage."""
    scale = _scale(sample, loss, server, totals)
    mask = [float(sampled) for sampled in sample.mask[1:]]
    pull = 1.0 if loss.kind == "cross_entropy" else sample.advantage
    inputs = {"target_tokens": tinker.TensorData(data=list(sample.tokens[1:]), dtype="int64")}
    if loss.kind == "cross_entropy" and server == "tinker":
        inputs["weights"] = _floats([scale * sampled for sampled in mask])
    else:
        inputs["logprobs"] = _floats([float(x) if m else 0.0 for x, m in zip(sample.logprobs[1:], mask, strict=True)])
        inputs["advantages"] = _floats([scale * pull * sampled for sampled in mask])
    if server == "skyrl":
        inputs["weights"] = _floats(mask)  # left out they would count as ones, those of the prompt too
    return types.Datum(model_input=types.ModelInput.from_ints(list(sample.tokens[:-1])), loss_fn_inputs=inputs)


def loss_name(loss: Loss, server: Server) -> tuple[str, dict[str, float] | None]:
    """The server's name for the loss, and its constants."""
    if loss.kind == "cross_entropy" and server == "skyrl":
        # Its cross-entropy divides every scale out again. CISPO with a ratio that is always 1 is the same, and keeps it.
        return "cispo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
    if loss.kind in ("ppo", "cispo"):
        return loss.kind, {"clip_low_threshold": 1 - loss.clip_low, "clip_high_threshold": 1 + loss.clip_high}
    return loss.kind, None


def _scale(sample: Sample, loss: Loss, server: Server, totals: Totals | None) -> float:
    length = sum(sample.mask)
    # With unit weights the server's mean over n sequences is ours, whatever n is.
    sequences, tokens, weight = totals or Totals(1, float(length), 1.0)
    share = sample.weight / (length if loss.reduction == "sequence_mean" else 1)
    ours = share / normaliser(loss, tokens, weight)
    return ours if server == "tinker" else ours * length * sequences


def _floats(values: list[float]) -> tinker.TensorData:
    return tinker.TensorData(data=values, dtype="float32")
