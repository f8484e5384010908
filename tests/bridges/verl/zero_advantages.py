"""A control: an estimator for verl's registry that finds every attempt as good as any other. verl loads it as a plugin."""

from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est


@register_adv_est("zero")
def zero(token_level_rewards: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(token_level_rewards), torch.zeros_like(token_level_rewards)
