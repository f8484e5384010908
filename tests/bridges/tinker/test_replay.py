"""The recorded trajectories over the Tinker API: what is sent, what the loss functions of SkyRL's server make of it, and what the
server itself does with a real model, are the embedded backend's."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from parity.recorded import LOSSES, credited, name_of, recorded
from skyrl.tinker.loss_fns import LOSS_FUNCTION_MAP, LossFnConfig

from palestra.backends.tinker.datum import loss_name, to_datum, total
from palestra.backends.tinker.opening import open_tinker
from palestra.backends.torch.opening import open_torch
from palestra.config import Config, Loss, Torch
from palestra.protocols import Trainer
from palestra.trajectory import Sample

OFFERED = [loss for loss in LOSSES if loss.kind != "gspo"]
"""The API has no GSPO, and the config refuses it."""


def test_tokens_masks_logprobs_and_advantages() -> None:
    loss = Loss(kind="importance_sampling", reduction="sequence_mean")  # which the server computes as it is: scales are 1
    for sample, expected in zip(credited(recorded().groups), recorded().samples, strict=True):
        datum = to_datum(sample, loss, "skyrl")
        sent = {name: list(tensor.data) for name, tensor in datum.loss_fn_inputs.items()}
        assert [*datum.model_input.to_ints(), sent["target_tokens"][-1]] == expected.tokens
        assert sent["target_tokens"] == expected.tokens[1:]
        assert sent["weights"] == expected.mask[1:]
        assert sent["logprobs"] == pytest.approx(expected.logprobs[1:], rel=1e-6)  # float32
        assert sent["advantages"] == pytest.approx([expected.advantage * sampled for sampled in expected.mask[1:]])


@pytest.mark.parametrize("loss", OFFERED, ids=name_of)
def test_losses(loss: Loss) -> None:
    samples = recorded().samples
    name, constants = loss_name(loss, "skyrl")
    given = constants or {"clip_low_threshold": 0.0, "clip_high_threshold": 0.0}
    bounds = LossFnConfig(**{key: jnp.array(value) for key, value in given.items()})
    data = [to_datum(sample, loss, "skyrl", total(samples)).loss_fn_inputs for sample in samples]

    def served(now: list[jax.Array]) -> jax.Array:
        """As the server sums up: over each sequence's weights, then over the sequences."""
        means = []
        for sample, inputs, logprobs in zip(samples, data, now, strict=True):
            sent = {key: jnp.array(tensor.data) for key, tensor in inputs.items()}
            everywhere = jnp.zeros(len(sample.mask) - 1).at[jnp.array(sample.mask[1:]).nonzero()].set(logprobs)
            tokens = LOSS_FUNCTION_MAP[name](everywhere, sent["weights"], sent["logprobs"], sent["advantages"], bounds)
            means.append(tokens.sum() / sent["weights"].sum())
        return sum(means) / len(means)

    value, gradient = jax.value_and_grad(served)([jnp.array(logprobs) for logprobs in recorded().now])
    length = jnp.sqrt(sum((row**2).sum() for row in gradient))
    assert (float(value), float(length)) == pytest.approx(recorded().losses[name_of(loss)], rel=1e-4)


async def test_a_real_model_on_the_server(recipe: Callable[..., Config], tmp_path: Path) -> None:
    kinds = ("importance_sampling", "ppo", "cispo", "cross_entropy")
    losses = [Loss.model_validate({"kind": kind, "reduction": how}) for kind in kinds for how in ("token_mean", "sequence_mean")]
    samples, config = _sampled_one_step_on(), recipe()
    async with open_tinker(config, config.backend, training=True) as (_, _, trainer):  # type: ignore[arg-type]
        assert trainer is not None
        await trainer.export(tmp_path / "adapter")  # so that both have the same random start
        await trainer.accumulate(samples, losses[1])
        await trainer.discard()  # must leave nothing behind
        served = await _measured(trainer, samples, losses)
        half = len(samples) // 2
        await trainer.accumulate(samples[:half], losses[0])
        await asyncio.gather(trainer.publish(), trainer.accumulate(samples[half:], losses[0]))  # as with staleness
        beside = await trainer.step(0.0)
    section = Torch(model=config.backend.model, dtype="float32", threads=1, adapter=tmp_path / "adapter")
    async with open_torch(config, section, training=True) as (_, _, embedded):
        assert embedded is not None
        expected = await _measured(embedded, samples, losses)
    torch.testing.assert_close(served[0], expected[0], atol=1e-4, rtol=1e-4)
    for loss, found, wanted in zip(losses, served[1], expected[1], strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4, abs=1e-5), name_of(loss)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3), name_of(loss)
    assert beside["grad_norm"] == pytest.approx(expected[1][0]["grad_norm"], rel=1e-3)


async def _measured(
    trainer: Trainer, samples: list[Sample], losses: list[Loss]
) -> tuple[torch.Tensor, list[Mapping[str, float]]]:
    """The logprobs of all tokens, and what each loss comes to. Steps of rate 0 leave the weights as they are."""
    logprobs = [value for row in await trainer.logprobs(samples, 1.0) for value in row]
    steps = []
    for loss in losses:
        await trainer.accumulate(samples, loss)
        steps.append(await trainer.step(0.0))
    return torch.tensor(logprobs), steps


def _sampled_one_step_on() -> list[Sample]:
    """As if the policy that is one step on had sampled them, so that ratios are not 1."""
    made = []
    for sample, now in zip(recorded().samples, recorded().now, strict=True):
        values = iter(now)
        made.append(replace(sample, logprobs=[next(values) if sampled else 0.0 for sampled in sample.mask]))
    return made
