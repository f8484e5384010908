"""SkyRL's own policy losses, with the sampler's logprobs in the place of the old policy's.

SkyRL recomputes the old policy's logprobs by default. In Palestra the ratio is that of the trainer to the sampler, whatever lies
between them; that is also the only ratio there is when rollouts run ahead of training.
"""

import dataclasses
from functools import partial
from typing import Any

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from torch import Tensor

from palestra.config import Loss

OWN = ("regular", "dual_clip", "gspo", "cispo", "importance_sampling")


def register() -> None:
    for own in OWN:
        if _against_sampler(own) not in PolicyLossRegistry.list_available():
            PolicyLossRegistry.register(_against_sampler(own), partial(loss_against_sampler, own))


def name_of(loss: Loss) -> str:
    """The name in SkyRL's registry. With `truncate` it is SkyRL's own loss, which keeps the old policy and the sampler apart."""
    kind = {"ppo": "regular", "importance_sampling": "regular" if loss.truncate else "importance_sampling"}.get(
        loss.kind, loss.kind
    )
    if kind == "regular" and loss.dual_clip is not None:
        kind = "dual_clip"
    return kind if loss.truncate else _against_sampler(kind)


def _against_sampler(own: str) -> str:
    return f"palestra_{own}"


def loss_against_sampler(
    own: str,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """SkyRL's loss of that name. The arguments are those of every loss in its registry."""
    function = PolicyLossRegistry.get(own)
    settings = dataclasses.replace(config, policy_loss_type=own)
    value: tuple[Tensor, dict[str, float]] = function(log_probs, rollout_logprobs, advantages, settings, loss_mask)
    return value
