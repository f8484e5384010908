"""Given our trajectories, SkyRL's own trainer arrives at our tokens, masks, logprobs, rewards, advantages and losses."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bridges.skyrl.making import groups
from bridges.skyrl.replaying import skyrl_trainer, trained_rows, training_input, with_training
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

from palestra import loss as ours
from palestra.advantage import credit
from palestra.backends.torch.opening import open_torch
from palestra.bridges.skyrl_train.cpu_workers import CpuWorkers
from palestra.config import Config, Torch, parse
from palestra.trajectory import Group, Sample, Trajectory

MASKED = frozenset({"context"})
LOSSES: list[dict[str, Any]] = [
    {"kind": "importance_sampling"},
    {"kind": "ppo", "clip_low": 0.1, "clip_high": 0.15},
    {"kind": "ppo", "dual_clip": 1.5},
    {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    {"kind": "cispo", "clip_low": 0.3, "clip_high": 0.4},
    {"kind": "ppo", "truncate": 1.2},
    {"kind": "importance_sampling", "truncate": 1.2},
    {"kind": "ppo", "reduction": "sequence_mean"},
    {"kind": "gspo", "reduction": "sequence_mean"},
    {"kind": "ppo", "reduction": "constant", "constant": 100.0},
]


def _config(config: Config, loss: dict[str, Any], **training: Any) -> Config:
    return with_training(config, loss, masked_stops=sorted(MASKED), **training)


def _samples(config: Config, given: list[Group]) -> list[Sample]:
    assert config.training is not None
    return [s for group in given for s in credit(group, config.training.estimator, masked_stops=MASKED).samples]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo"])
def test_the_rows_that_are_trained_on_are_our_samples(config: Config, tmp_path: Path, estimator: str) -> None:
    config = _config(config, LOSSES[0], estimator=estimator)
    given = groups(0)
    trainer = skyrl_trainer(config, tmp_path)
    data = training_input(trainer, config, given)
    rows, samples = trained_rows(data), _samples(config, given)
    assert len(rows) == len(samples) > 20
    for row, sample in zip(rows, samples, strict=True):
        seen = data["attention_mask"][row].bool()
        assert data["sequences"][row][seen].tolist() == list(sample.tokens)
        here = data["loss_mask"][row].bool()
        aligned = torch.tensor(sample.mask)[-here.shape[0] :]
        assert here[-len(aligned) :].tolist() == aligned.tolist()
        assert sum(here) == sum(sample.mask)
        logprobs = [logprob for logprob, sampled in zip(sample.logprobs, sample.mask, strict=True) if sampled]
        assert data["rollout_logprobs"][row][here].tolist() == pytest.approx(logprobs)
        assert data["advantages"][row][here].tolist() == pytest.approx([sample.advantage] * sum(sample.mask), rel=1e-5)


def test_failed_rollouts_are_neither_rewarded_nor_counted(config: Config, tmp_path: Path) -> None:
    config = _config(config, LOSSES[0])
    given = groups(1)
    data = training_input(skyrl_trainer(config, tmp_path), config, given)
    failed = sum(t.failure is not None for group in given for t in group.trajectories)
    without = data["rewards"].sum(-1).isnan()
    assert int(without.sum()) == failed == 9
    assert not data["loss_mask"][without].any()
    assert data["advantages"][without].abs().max() == 0
    assert data["advantages"].isfinite().all()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(str(value) for value in loss.values()))
def test_the_losses_and_their_gradients_are_ours(config: Config, tmp_path: Path, loss: dict[str, Any]) -> None:
    config = _config(config, loss)
    given = groups(2)
    trainer = skyrl_trainer(config, tmp_path)
    data = training_input(trainer, config, given)
    theirs = trainer._normalize_advantages(data, data.metadata["policy_mini_batch_boundaries"])
    torch.manual_seed(0)
    now = (data["rollout_logprobs"] + 0.3 * torch.randn_like(data["rollout_logprobs"])).requires_grad_()
    algorithm = trainer.cfg.trainer.algorithm
    function = PolicyLossRegistry.get(algorithm.policy_loss_type)
    old = now.detach() if config.loss.truncate else None
    value, _ = function(now, old, theirs["advantages"], algorithm, data["loss_mask"], data["rollout_logprobs"])
    value.backward()

    samples, rows = _samples(config, given), trained_rows(data)
    here = data["loss_mask"].bool()[rows]
    flat = now.detach()[rows][here].clone().requires_grad_()
    lengths = torch.tensor([sum(sample.mask) for sample in samples])
    tokens = ours.Tokens(
        old_logprobs=data["rollout_logprobs"][rows][here],
        advantages=torch.repeat_interleave(torch.tensor([sample.advantage for sample in samples]), lengths),
        weights=torch.ones(int(lengths.sum())),
        sequence=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        lengths=lengths,
    )
    total, _ = ours.policy_loss(flat, tokens, config.loss)
    total = total / ours.normaliser(config.loss, float(lengths.sum()), len(samples))
    total.backward()
    assert value.item() == pytest.approx(total.item(), rel=1e-4, abs=1e-7)
    assert now.grad is not None
    assert torch.allclose(now.grad[rows][here], flat.grad, rtol=1e-4, atol=1e-8)
    assert float(now.grad.abs().sum()) == pytest.approx(float(flat.grad.abs().sum()), rel=1e-4)  # and none elsewhere


async def test_one_step_of_a_real_model_is_ours(config: Config, tmp_path: Path) -> None:
    """Loss, gradient norm and the weights afterwards: the same as the embedded trainer's, to rounding."""
    values = _config(config, {"kind": "ppo"}).model_dump(mode="json", exclude_none=True)
    values["backend"] |= {"train": "full", "micro_batch": 6}
    config = parse(values)
    given = groups(3)
    trainer = skyrl_trainer(config, tmp_path)
    data = training_input(trainer, config, given)
    taken: dict[str, torch.Tensor] = {}
    engine = SimpleNamespace(increment_weight_version=lambda: None, take_weights=taken.update)
    workers = trainer.dispatch = CpuWorkers(trainer.cfg, engine)
    metrics = await asyncio.to_thread(trainer._execute_training_step, "policy", data)
    await workers.save_weights_for_sampler()

    section = Torch(model=config.backend.model, dtype="float32", train="full")
    async with open_torch(config, section, training=True) as (_, _, embedded):
        assert embedded is not None
        assert config.training is not None
        await embedded.accumulate(_samples(config, given), config.loss)
        measured = await embedded.step(config.training.learning_rate)
        assert metrics["policy_loss"] == pytest.approx(measured["loss"], rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(measured["grad_norm"], rel=1e-4)
        for name, weight in embedded._model.named_parameters():
            assert torch.allclose(weight, taken[name], atol=1e-4), name


def test_a_step_without_any_gradient_moves_nothing(config: Config, tmp_path: Path) -> None:
    config = _config(config, LOSSES[0])
    flat = [dataclasses.replace(group, trajectories=tuple(_with_reward(t) for t in group.trajectories)) for group in groups(4)]
    trainer = skyrl_trainer(config, tmp_path)
    data = training_input(trainer, config, flat)
    assert not data["loss_mask"].any()
    assert data["advantages"].abs().max() == 0


def _with_reward(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(trajectory, reward=1.0, failure=None)
