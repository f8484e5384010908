"""The official SDK against a real server: loss and gradient are ours, the task is learned, and from zero advantages nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra import learner, train, user
from palestra.backends.tinker.opening import open_tinker
from palestra.backends.torch.opening import open_torch
from palestra.config import Config, Loss, Torch
from palestra.protocols import Sampling
from palestra.trajectory import Sample

Recipe = Callable[..., Config]


def p_value(before: float, after: float, n: int) -> float:
    """Of a two-sided two-proportion z-test."""
    pooled = (before + after) / 2
    deviation = math.sqrt(2 * pooled * (1 - pooled) / n) or 1e-9
    return math.erfc(abs(after - before) / deviation / math.sqrt(2))


def success(summary: dict[str, Any], when: str, how: str) -> float:
    return float(summary["evaluations"][when][how]["pass@1"]["value"])


def test_the_task_is_learned(recipe: Recipe) -> None:
    summary = train(recipe("loss.reduction=sequence_mean", "training.steps=6"), quiet=True)
    for how in ("sampled", "greedy"):
        before, after = success(summary, "base", how), success(summary, "final", how)
        assert after > before + 0.3
        assert p_value(before, after, 240) < 0.01
    assert (Path(summary["adapter"]) / "adapter_config.json").is_file()


def test_nothing_is_learned_from_zero_advantages(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    credit = learner.credit

    def worthless(*arguments: Any, **options: Any) -> Any:
        given = credit(*arguments, **options)
        return replace(given, samples=[replace(sample, advantage=0.0) for sample in given.samples])

    monkeypatch.setattr(learner, "credit", worthless)
    summary = train(recipe("training.steps=4"), quiet=True)
    for how in ("sampled", "greedy"):
        assert p_value(success(summary, "base", how), success(summary, "final", how), 240) > 0.01


def _samples(completions: list[Any], prompt: list[int]) -> list[Sample]:
    made = []
    for number, written in enumerate(completions):
        tokens = [*prompt, *written.tokens]
        mask = [False] * len(prompt) + [True] * len(written.tokens)
        logprobs = [0.0] * len(prompt) + [value - 0.05 * number for value in written.logprobs]
        made.append(Sample(tokens, mask, logprobs, [0] * len(tokens), 1.0 - 0.7 * number))
    return made


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo", "cross_entropy"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
async def test_loss_and_gradient_are_as_embedded(recipe: Recipe, tmp_path: Path, kind: str, reduction: str) -> None:
    config = recipe()
    loss = Loss.model_validate({"kind": kind, "reduction": reduction})
    async with open_tinker(config, config.backend, training=True) as (sampler, renderer, trainer):  # type: ignore[arg-type]
        assert trainer is not None
        await trainer.export(tmp_path / "adapter")  # so that both have the same random start
        prompt = renderer.prompt([user("Where is the red kite?")], [])
        async with sampler.session(3, 100) as session:
            drawn = [await session.sample(prompt, Sampling(1.0, 12 + 8 * n, renderer.stop_ids)) for n in range(2)]
        samples = _samples(drawn, prompt)
        theirs = await trainer.logprobs(samples, 1.0)
        await trainer.accumulate(samples, loss)
        await trainer.discard()  # must leave nothing behind
        await trainer.accumulate(samples, loss)
        measured = await trainer.step(0.0)
    section = Torch(model=config.backend.model, dtype="float32", threads=1, adapter=tmp_path / "adapter")
    async with open_torch(config, section, training=True) as (_, _, embedded):
        assert embedded is not None
        ours = await embedded.logprobs(samples, 1.0)
        await embedded.accumulate(samples, loss)
        expected = await embedded.step(0.0)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-4, rtol=1e-4)
    assert measured["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-5)
    assert measured["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
