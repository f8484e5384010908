"""The trainer: gradients that do not depend on batching, files that go on as if nothing had happened, exports others load."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra.config import Loss
from palestra.errors import ModelError
from palestra.protocols import Sampling
from palestra.trajectory import Sample

from .conftest import load, random_samples, random_tokens

Engine = Callable[..., Any]
REWARD = Loss(kind="importance_sampling")


async def gradients(trainer: Any, batches: Sequence[Sequence[Sample]], loss: Loss) -> dict[str, torch.Tensor]:
    """What the optimizer would be given."""
    given: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        given.update({name: master.grad.clone() for name, master in trainer._masters.items() if master.grad is not None})

    hook = trainer._optimizer.register_step_pre_hook(look)
    for batch in batches:
        await trainer.accumulate(batch, loss)
    await trainer.step(0.0)
    hook.remove()
    return given


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("train", ["lora", "full"])
async def test_order_and_batching_of_accumulate_do_not_matter(engine: Engine, train: str, reduction: str) -> None:
    loss = Loss(kind="ppo", reduction=reduction)
    samples = random_samples(0)
    shuffled = random.Random(1).sample(samples, len(samples))
    async with engine(train=train) as (_, trainer):
        await trainer.accumulate(samples, REWARD)
        await trainer.step(1e-3)  # away from an adapter that does nothing
        whole = await gradients(trainer, [samples], loss)
        apart = await gradients(trainer, [[sample] for sample in shuffled], loss)
    assert whole.keys() == apart.keys()
    assert any(gradient.norm() > 0 for gradient in whole.values())
    for name, gradient in whole.items():
        assert torch.allclose(gradient, apart[name], rtol=1e-3, atol=1e-3 * gradient.abs().max().item() + 1e-9), name


async def test_lora_gradients_are_those_of_peft(engine: Engine, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sample = random_samples(3, groups=1, members=1)[0]
    async with engine() as (_, trainer):
        await trainer.accumulate([sample], REWARD)
        await trainer.step(1e-2)
        await trainer.export(tmp_path)
        ours = await gradients(trainer, [[sample]], Loss(kind="cross_entropy"))
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny("llama")), tmp_path, is_trainable=True)
    logits = peft(torch.tensor([sample.tokens])).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
    (-chosen[torch.tensor(sample.mask[1:])]).mean().backward()
    theirs = {name: parameter.grad for name, parameter in peft.named_parameters() if parameter.requires_grad}
    assert len(theirs) == len(ours)
    for name, gradient in ours.items():
        module, _, which = name.rpartition(".")
        other = theirs[f"base_model.model.{module}.lora_{'A' if which == 'down' else 'B'}.default.weight"]
        assert (gradient - other).norm() <= 1e-3 * other.norm(), name


@pytest.mark.parametrize("train", ["lora", "full"])
async def test_what_it_saves_goes_on_as_if_nothing_had_happened(engine: Engine, tmp_path: Path, train: str) -> None:
    first, second = random_samples(1), random_samples(2)

    async def train_on(trainer: Any, samples: list[Sample]) -> None:
        await trainer.accumulate(samples, REWARD)
        await trainer.step(1e-2)
        await trainer.publish()

    async with engine(train=train) as (_, trainer):
        await train_on(trainer, first)
        await trainer.save(tmp_path)
        await train_on(trainer, second)
        expected = await trainer.logprobs(second, 1.0)
        version = await trainer.publish()
    async with engine(train=train) as (sampler, trainer):
        before = await trainer.logprobs(second, 1.0)
        await trainer.load(tmp_path)
        assert sampler.version == 1
        await train_on(trainer, second)
        assert await trainer.publish() == version
        assert await trainer.logprobs(second, 1.0) == expected
    assert before != expected


async def test_an_adapter_loads_in_peft_as_it_is(engine: Engine, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    samples = random_samples(1)
    async with engine() as (_, trainer):
        await trainer.accumulate(samples, REWARD)
        await trainer.step(1e-2)
        await trainer.export(tmp_path)
        ours = (await trainer.logprobs(samples[:1], 1.0))[0]
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny("llama")), tmp_path)
    assert_same_logprobs(peft, samples[0], ours)


async def test_full_weights_load_in_transformers_as_they_are(engine: Engine, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    samples = random_samples(1)
    async with engine(train="full") as (_, trainer):
        await trainer.accumulate(samples, REWARD)
        await trainer.step(1e-2)
        await trainer.export(tmp_path)
        ours = (await trainer.logprobs(samples[:1], 1.0))[0]
    assert_same_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path), samples[0], ours)


def assert_same_logprobs(model: Any, sample: Sample, ours: list[float]) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([sample.tokens])).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(ours[1:]), theirs, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # with the head tied to the embeddings, and with biases
@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_published_weights_are_what_the_sampler_samples_from(
    engine: Engine, kind: str, train: str, dtype: torch.dtype
) -> None:
    prompt = random_tokens(random.Random(0), 30)
    async with engine(kind, train=train, dtype=dtype) as (sampler, trainer):
        await trainer.accumulate(random_samples(1), REWARD)
        await trainer.step(0.1)  # far enough that one weight left behind would show
        await trainer.publish()
        async with sampler.session(0, 100) as session:
            completion = await session.sample(prompt, Sampling(1.0, 20))
        tokens = prompt + list(completion.tokens)
        sample = Sample(tokens, [], [0.0] * len(tokens), [0] * len(tokens), 0.0)
        computed = (await trainer.logprobs([sample], 1.0))[0][len(prompt) :]
    gap = max(abs(a - b) for a, b in zip(completion.logprobs, computed, strict=True))
    assert gap < (1e-4 if dtype == torch.float32 else 0.5)
    assert set(completion.versions) == {1}


@pytest.mark.parametrize("train", ["lora", "full"])
async def test_the_reference_is_the_model_that_training_found(engine: Engine, train: str) -> None:
    samples = random_samples(1)
    async with engine(train=train) as (_, trainer):
        trainer.keep_reference()
        await trainer.accumulate(samples, Loss(kind="importance_sampling", kl=0.1))
        assert (await trainer.step(1e-2))["kl_reference"] == pytest.approx(0.0, abs=1e-6)
        before = await trainer.logprobs(samples, 1.0)
        await trainer.accumulate(samples, Loss(kind="importance_sampling", kl=0.1))
        metrics = await trainer.step(0.0)
        assert metrics["kl_reference"] > 1e-4
        assert await trainer.logprobs(samples, 1.0) == before  # the weights are back


async def test_cross_entropy_learns_what_it_is_shown(engine: Engine) -> None:
    samples = random_samples(4, groups=1, members=2)
    async with engine() as (_, trainer):
        losses = []
        for _ in range(15):
            await trainer.accumulate(samples, Loss(kind="cross_entropy"))
            losses.append((await trainer.step(2e-2))["loss"])
    assert losses[-1] < 0.5 * losses[0]


async def test_discard_forgets_and_an_empty_step_is_an_error(engine: Engine) -> None:
    async with engine() as (_, trainer):
        await trainer.accumulate(random_samples(1), REWARD)
        await trainer.discard()
        with pytest.raises(ValueError, match="nothing was accumulated"):
            await trainer.step(1e-2)


async def test_a_step_whose_gradient_is_not_finite_is_not_taken(engine: Engine, tmp_path: Path) -> None:
    async with engine() as (_, trainer):
        good = random_samples(1)
        await trainer.save(tmp_path / "before")
        await trainer.accumulate([replace(sample, advantage=float("inf")) for sample in good], REWARD)
        with pytest.raises(ModelError, match="training has diverged, and this step is not taken; try a lower learning_rate"):
            await trainer.step(1e-2)
        await trainer.save(tmp_path / "after")
    before, after = (torch.load(tmp_path / name / "trainer.pt") for name in ("before", "after"))
    assert all(torch.equal(weight, after["masters"][name]) for name, weight in before["masters"].items())


@pytest.mark.parametrize("other", [{"train": "full"}, {"rank": 3}])
async def test_a_checkpoint_of_another_kind_is_refused(engine: Engine, tmp_path: Path, other: dict[str, Any]) -> None:
    async with engine(**other) as (_, trainer):
        await trainer.save(tmp_path)
    async with engine() as (_, trainer):
        with pytest.raises(ModelError, match="another model or adapter"):
            await trainer.load(tmp_path)


def test_a_model_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        load(tmp_path)
