"""SkyRL's trainer makes of the recorded trajectories what the embedded backend makes of them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges.skyrl.replaying import skyrl_trainer, trained_rows, training_input, with_training
from parity.recorded import LOSSES, MASKED, name_of, recorded
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

from palestra.bridges.skyrl_train.trainers import SyncTrainer
from palestra.config import Config, Loss


def _replayed(config: Config, tmp_path: Path, loss: Loss) -> tuple[SyncTrainer, Any]:
    config = with_training(config, loss.model_dump(exclude_none=True), samples=4, masked_stops=sorted(MASKED))
    trainer = skyrl_trainer(config, tmp_path)
    return trainer, training_input(trainer, config, recorded().groups)


def test_tokens_masks_logprobs_rewards_and_advantages(config: Config, tmp_path: Path) -> None:
    _, data = _replayed(config, tmp_path, LOSSES[0])
    ends = data.metadata["is_last_step"]
    rewards = [value for value, last in zip(data["rewards"].sum(-1).tolist(), ends, strict=True) if last]
    given = [math.nan if t.reward is None else t.reward for group in recorded().groups for t in group.trajectories]
    assert rewards == pytest.approx(given, nan_ok=True)
    for row, sample in zip(trained_rows(data), recorded().samples, strict=True):
        here, tokens = data["loss_mask"][row].bool(), data["sequences"][row][data["attention_mask"][row].bool()]
        assert tokens.tolist() == sample.tokens
        assert here[here.nonzero()[0] :].tolist() == sample.mask[sample.mask.index(True) :]
        logprobs = [value for value, sampled in zip(sample.logprobs, sample.mask, strict=True) if sampled]
        assert data["rollout_logprobs"][row][here].tolist() == pytest.approx(logprobs, abs=1e-6)
        assert data["advantages"][row][here].tolist() == pytest.approx([sample.advantage] * len(logprobs), rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_losses(config: Config, tmp_path: Path, loss: Loss) -> None:
    trainer, data = _replayed(config, tmp_path, loss)
    now = data["rollout_logprobs"].clone()
    for row, logprobs in zip(trained_rows(data), recorded().now, strict=True):
        now[row][data["loss_mask"][row].bool()] = torch.tensor(logprobs)
    now.requires_grad_()
    weighed = trainer._normalize_advantages(data, data.metadata["policy_mini_batch_boundaries"])
    algorithm = trainer.cfg.trainer.algorithm
    function = PolicyLossRegistry.get(algorithm.policy_loss_type)
    value, _ = function(now, None, weighed["advantages"], algorithm, data["loss_mask"], data["rollout_logprobs"])
    value.backward()
    assert (value.item(), now.grad.norm().item()) == pytest.approx(recorded().losses[name_of(loss)], rel=1e-4)
