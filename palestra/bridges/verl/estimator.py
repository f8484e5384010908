"""Our advantage estimators in verl's registry: verl's own arithmetic, over the attempts that ended and nothing else.

verl's estimators take every row for an attempt of its own, and a group of one for a baseline of zero. Here a failed attempt
leaves its group, a group that becomes too small gives no gradient, and the segments of an attempt share one advantage.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from palestra.bridges.verl.rows import Attempt, attempts

PREFIX = "palestra_"
MIN_GROUP = "palestra_min_group"
"""A key of ours in verl's `algorithm` section."""

Advantages = tuple[Tensor, Tensor]


def install() -> None:
    for name, outcome in {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}.items():
        core_algos.register_adv_est(PREFIX + name)(_over_attempts(outcome))


def _over_attempts(outcome: Callable[..., Any]) -> Callable[..., Advantages]:
    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str], config: Any, **others: Any
    ) -> Advantages:
        scores = token_level_rewards.sum(dim=-1)
        found = attempts(list(index), response_mask.any(dim=-1).tolist())
        counted = _counted(found, scores.tolist(), config.get(MIN_GROUP, 2))
        spread = torch.zeros_like(token_level_rewards)
        if counted:
            # Each attempt as one row of one token, with its whole reward.
            rewards = scores[[attempt.places[0] for attempt in counted]].unsqueeze(-1)
            groups = np.array([attempt.group for attempt in counted], dtype=object)
            advantages, _ = outcome(rewards, torch.ones_like(rewards), groups)
            for attempt, advantage in zip(counted, advantages[:, 0], strict=True):
                spread[attempt.places] = advantage
        spread = spread * response_mask
        return spread, spread

    return estimate


def _counted(found: Sequence[Attempt], scores: Sequence[float], min_group: int) -> list[Attempt]:
    """Those that ended, in groups that are large enough for a baseline and whose rewards differ. Equal ones would get what
    rounding leaves of zero, divided by a deviation as small."""
    groups: dict[str, list[Attempt]] = {}
    for attempt in found:
        if not attempt.failed:
            groups.setdefault(attempt.group, []).append(attempt)
    useful = (group for group in groups.values() if len(group) >= min_group)
    return [attempt for group in useful if len({scores[a.places[0]] for a in group}) > 1 for attempt in group]


def _grpo(rewards: Tensor, mask: Tensor, groups: Any) -> Any:
    return core_algos.compute_grpo_outcome_advantage(rewards, mask, groups)


def _dr_grpo(rewards: Tensor, mask: Tensor, groups: Any) -> Any:
    return core_algos.compute_grpo_outcome_advantage(rewards, mask, groups, norm_adv_by_std_in_grpo=False)


def _rloo(rewards: Tensor, mask: Tensor, groups: Any) -> Any:
    return core_algos.compute_rloo_outcome_advantage(rewards, mask, groups)


install()
