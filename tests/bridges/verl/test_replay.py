"""verl's own code makes of the recorded trajectories what the embedded backend makes of them."""

import pytest

pytest.importorskip("verl")

import numpy as np
import torch
from bridges.verl.test_parity import padded
from bridges.verl.test_settings import made
from parity.recorded import LOSSES, MASKED, name_of, recorded
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from palestra.bridges.verl import estimator
from palestra.bridges.verl.driving import verl_config
from palestra.bridges.verl.loop import output
from palestra.bridges.verl.rows import attempt_label, rows
from palestra.config import Loss
from palestra.trajectory import Sample, Trajectory

FILLER = 7


def _handed_back() -> list[tuple[Trajectory, AgentLoopOutput]]:
    attempts = [trajectory for group in recorded().groups for trajectory in group.trajectories]
    return [(t, output(row, t, 0)) for t in attempts for row in rows(t, t.stop in MASKED, FILLER)]


def _advantages(mask: Tensor) -> Tensor:
    given = _handed_back()
    scores = torch.zeros_like(mask)
    for place, (_, made_of) in enumerate(given):
        scores[place, len(made_of.response_ids) - 1] = made_of.reward_score
    labels = [attempt_label(t.task_id, str(t.index), t.failure is not None) for t, _ in given]
    estimate = get_adv_estimator_fn(f"{estimator.PREFIX}grpo")
    found, _ = estimate(
        token_level_rewards=scores, response_mask=mask, index=np.array(labels, dtype=object), config={estimator.MIN_GROUP: 2}
    )
    return found


def _trained(advantages: Tensor) -> list[int]:
    return [place for place, row in enumerate(advantages) if row.any()]


def _sampled(sample: Sample) -> list[bool]:
    return list(sample.mask[sample.mask.index(True) :])


def test_tokens_masks_logprobs_rewards_and_advantages() -> None:
    given = _handed_back()
    assert [made_of.reward_score for _, made_of in given] == [t.reward or 0.0 for t, _ in given]
    advantages = _advantages(padded([list(map(float, made_of.response_mask)) for _, made_of in given]))
    for place, sample in zip(_trained(advantages), recorded().samples, strict=True):
        made_of, sampled = given[place][1], _sampled(sample)
        assert made_of.prompt_ids + made_of.response_ids == sample.tokens
        assert made_of.response_mask == sampled
        assert made_of.response_logprobs == sample.logprobs[-len(sampled) :]
        wanted = torch.tensor(sampled) * sample.advantage
        torch.testing.assert_close(advantages[place, : len(sampled)], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_losses(loss: Loss) -> None:
    given = [made_of for _, made_of in _handed_back()]
    mask = padded([list(map(float, made_of.response_mask)) for made_of in given])
    old = padded([list(made_of.response_logprobs) for made_of in given])
    advantages = _advantages(mask)
    now = old.clone()
    for place, logprobs in zip(_trained(advantages), recorded().now, strict=True):
        now[place][mask[place].bool()] = torch.tensor(logprobs)
    now.requires_grad_()
    keys = made(loss=loss.model_dump(exclude_none=True))
    actor = omega_conf_to_dataclass(verl_config(keys, {}).actor_rollout_ref.actor)
    actor.global_batch_info.update(
        dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=len(given), loss_scale_factor=actor.loss_scale_factor
    )
    value, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=now,
        advantages=advantages,
        response_mask=mask.bool(),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=None,
    )
    value.backward()
    assert now.grad is not None
    # verl divides by everything in the step, we by what has a gradient.
    tokens = sum(sum(sample.mask) for sample in recorded().samples)
    share = tokens / mask.sum().item() if loss.reduction == "token_mean" else len(recorded().samples) / len(given)
    found = (value.item() / share, now.grad.norm().item() / share)
    assert found == pytest.approx(recorded().losses[name_of(loss)], rel=1e-4)
