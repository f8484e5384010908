"""The official SDK against a real server: the task is learned, and from zero advantages nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palestra import learner, train
from palestra.config import Config

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
