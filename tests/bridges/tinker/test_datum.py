"""Our samples as Tinker's data: what the server makes of them is our loss, whichever way it sums up."""

import math
import random

import pytest
import torch

from palestra import loss as losses
from palestra.backends.tinker.datum import Server, loss_name, needs_totals, to_datum, total
from palestra.config import Loss
from palestra.trajectory import Sample

KINDS = ("importance_sampling", "ppo", "cispo", "cross_entropy")
REDUCTIONS = ("token_mean", "sequence_mean", "constant")


def samples(weights: list[float]) -> list[Sample]:
    """Of different lengths, with turns of the environment between those of the model."""
    chance = random.Random(0)
    made = []
    for number, weight in enumerate(weights):
        mask = [False] * 4 + [True] * (3 + 2 * number) + [False] * 2 + [True] * 4
        logprobs = [math.log(chance.uniform(0.2, 0.9)) if sampled else 0.0 for sampled in mask]
        tokens = [chance.randrange(50) for _ in mask]
        made.append(Sample(tokens, mask, logprobs, [0] * len(mask), chance.uniform(-2, 2), weight))
    return made


def ours(batch: list[Sample], now: torch.Tensor, loss: Loss) -> torch.Tensor:
    lengths = torch.tensor([sum(s.mask) for s in batch])
    sequence = torch.repeat_interleave(torch.arange(len(batch)), lengths)
    tokens = losses.Tokens(
        old_logprobs=torch.tensor([x for s in batch for x, m in zip(s.logprobs, s.mask, strict=True) if m]),
        advantages=torch.tensor([s.advantage for s in batch])[sequence],
        weights=torch.tensor([s.weight for s in batch])[sequence],
        sequence=sequence,
        lengths=lengths,
    )
    summed, _ = losses.policy_loss(now, tokens, loss)
    return summed / losses.normaliser(loss, sum(s.weight * sum(s.mask) for s in batch), sum(s.weight for s in batch))


def theirs(batch: list[Sample], now: torch.Tensor, loss: Loss, server: Server, early: bool) -> torch.Tensor:
    """What the servers' documentation (and skyrl's loss_fns.py) say they compute."""
    totals = None if early else total(batch)
    name, constants = loss_name(loss, server)
    result, start = torch.zeros(()), 0
    for sample in batch:
        inputs = {key: torch.tensor(value.data) for key, value in to_datum(sample, loss, server, totals).loss_fn_inputs.items()}
        sampled = torch.tensor(sample.mask[1:])
        count = int(sampled.sum())
        logprobs = torch.zeros(len(sampled)).masked_scatter(sampled, now[start : start + count])
        start += count
        if name == "cross_entropy":
            per_token = -logprobs * inputs["weights"]
        else:
            low, high = (constants or {"l": 0.0, "h": math.inf}).values()
            ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
            per_token = {
                "importance_sampling": -ratio * advantages,
                "ppo": -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages),
                "cispo": -ratio.clamp(low, high).detach() * logprobs * advantages,
            }[name]
        if server == "skyrl":
            per_token = per_token * inputs["weights"] / inputs["weights"].sum() / len(batch)
        result = result + per_token.sum()
    return result


@pytest.mark.parametrize("server", ["tinker", "skyrl"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 0.5, 0.25]], ids=["unit", "weighted"])
def test_the_servers_loss_and_gradient_are_ours(server: Server, kind: str, reduction: str, weights: list[float]) -> None:
    loss = Loss.model_validate({"kind": kind, "reduction": reduction, "clip_low": 0.1, "clip_high": 0.3, "constant": 20.0})
    batch = samples(weights)
    unit = set(weights) == {1.0}
    chance = torch.Generator().manual_seed(1)
    now = (-torch.rand(sum(sum(s.mask) for s in batch), generator=chance) * 2).requires_grad_()
    expected = ours(batch, now, loss)
    [gradient] = torch.autograd.grad(expected, now)
    for early in {False, not needs_totals(loss, server, unit)}:
        got = theirs(batch, now, loss, server, early)
        [other] = torch.autograd.grad(got, now)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(other, gradient)


def test_what_can_be_sent_before_the_step_is_full() -> None:
    assert not needs_totals(Loss(reduction="sequence_mean"), "skyrl", unit_weights=True)
    assert not needs_totals(Loss(reduction="constant"), "skyrl", unit_weights=True)
    assert needs_totals(Loss(reduction="token_mean"), "skyrl", unit_weights=True)
    assert needs_totals(Loss(reduction="sequence_mean"), "skyrl", unit_weights=False)
    assert needs_totals(Loss(reduction="sequence_mean"), "tinker", unit_weights=True)


def test_inputs_and_targets_are_the_tokens_shifted_by_one() -> None:
    [sample] = samples([1.0])
    datum = to_datum(sample, Loss(kind="ppo"), "skyrl", total([sample]))
    assert datum.model_input.to_ints() == sample.tokens[:-1]
    assert list(datum.loss_fn_inputs["target_tokens"].data) == sample.tokens[1:]
    assert list(datum.loss_fn_inputs["weights"].data) == [float(m) for m in sample.mask[1:]]
    assert [a != 0 for a in datum.loss_fn_inputs["advantages"].data] == sample.mask[1:]
