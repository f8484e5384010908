"""Our advantage estimators in SkyRL's registry. They see the rewards of whole groups; a failed rollout's is NaN, and it is left
out of the baseline and gets an advantage of 0."""

import math
from collections import defaultdict
from functools import partial
from typing import Any, get_args

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry
from torch import Tensor

from palestra.advantage import Estimator, advantages


def name_of(estimator: Estimator) -> str:
    """Its name in SkyRL's registry, where `grpo` and `rloo` stand for SkyRL's own."""
    return f"palestra_{estimator}"


def register() -> None:
    for estimator in get_args(Estimator):
        if name_of(estimator) not in AdvantageEstimatorRegistry.list_available():
            AdvantageEstimatorRegistry.register(name_of(estimator), partial(estimate, estimator))


def estimate(
    estimator: Estimator, *, token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """The advantage of each row at each of its tokens, as SkyRL asks for it; `index` tells the groups apart."""
    rewards = token_level_rewards.sum(dim=-1).tolist()
    groups: dict[str, list[int]] = defaultdict(list)
    for row, group in enumerate(index):
        if not math.isnan(rewards[row]):
            groups[str(group)].append(row)
    scores = [0.0] * len(rewards)
    for rows in groups.values():
        if len(rows) > 1:
            for row, score in zip(rows, advantages([rewards[row] for row in rows], estimator), strict=True):
                scores[row] = score
    spread = torch.tensor(scores, dtype=torch.float32).unsqueeze(-1) * response_mask
    return spread, spread
