"""Given our trajectories, verl's own code gives our advantages and our losses, up to rounding."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import numpy as np
import torch
from bridges.verl.attempts import attempt
from bridges.verl.test_settings import made
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from palestra.advantage import Estimator, credit
from palestra.bridges.verl import estimator
from palestra.bridges.verl.driving import verl_config
from palestra.bridges.verl.rows import Row, attempt_label, rows
from palestra.config import Loss
from palestra.loss import Tokens, normaliser, policy_loss
from palestra.trajectory import Failure, Group, Sample, Trajectory

ESTIMATORS: tuple[Estimator, ...] = ("grpo", "dr_grpo", "rloo")
LOSSES = [
    Loss(kind=kind, reduction=reduction, constant=50.0)
    for kind in ("importance_sampling", "ppo", "gspo", "cispo")
    for reduction in ("token_mean", "sequence_mean", "constant")
] + [Loss(kind="ppo", dual_clip=1.5), Loss(kind="ppo", clip_low=0.1, clip_high=0.4)]


def groups(seed: int, fail: bool) -> list[Group]:
    chance = random.Random(seed)
    made_up = []
    for number in range(4):
        attempts = [attempt(seed * 100 + number * 10 + i, i, chance.choice((0.0, 0.1, 1.0)), f"task-{number}") for i in range(5)]
        for trajectory in attempts:
            if fail and chance.random() < 0.5:
                trajectory.reward, trajectory.failure = None, Failure("run", "infrastructure", "gone")
        made_up.append(Group(f"task-{number}", tuple(attempts)))
    return made_up


def batch(of: list[Group], shuffle: random.Random) -> tuple[list[Row], list[str], list[float]]:
    """The rows as verl has them: in any order, the whole reward of the attempt on each, padding among them."""
    found = [
        (row, attempt_label(group.task_id, str(t.index), t.failure is not None), t.reward or 0.0)
        for group in of
        for t in group.trajectories
        for row in rows(t, False, 7)
    ]
    found += [(Row([7], [7], [0], [0.0]), "pad0", 0.0)] * 3
    shuffle.shuffle(found)
    made_rows, labels, rewards = zip(*found, strict=True)
    return list(made_rows), list(labels), list(rewards)


def padded(values: list[list[float]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in values], batch_first=True)


def advantages(of: list[Group], name: Estimator, min_group: int = 2) -> tuple[list[Row], Tensor, Tensor]:
    made_rows, labels, rewards = batch(of, random.Random(1))
    mask = padded([list(map(float, row.mask)) for row in made_rows])
    scores = padded([[0.0] * (len(row.mask) - 1) + [reward] for row, reward in zip(made_rows, rewards, strict=True)])
    estimate = get_adv_estimator_fn(estimator.PREFIX + name)
    index = np.array(labels, dtype=object)
    given, _ = estimate(token_level_rewards=scores, response_mask=mask, index=index, config={estimator.MIN_GROUP: min_group})
    return made_rows, mask, given


def ours(of: list[Group], name: Estimator, min_group: int = 2) -> list[Sample]:
    return [sample for group in of for sample in credit(group, name, min_group=min_group).samples]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_ours(name: Estimator, fail: bool, seed: int) -> None:
    for min_group in (2, 4):
        of = groups(seed, fail)
        made_rows, mask, given = advantages(of, name, min_group)
        expected = {tuple(sample.tokens): sample.advantage for sample in ours(of, name, min_group)}
        for row, counts, advantage in zip(made_rows, mask, given, strict=True):
            wanted = expected.get(tuple(row.prompt + row.response), 0.0) * counts
            torch.testing.assert_close(advantage, wanted, rtol=1e-5, atol=1e-5)


def test_a_failed_attempt_is_no_part_of_the_baseline() -> None:
    [group] = [Group("t", tuple(attempt(i, i, reward) for i, reward in enumerate((1.0, 0.0, 1.0, 1.0))))]
    group.trajectories[3].reward, group.trajectories[3].failure = None, Failure("run", "infrastructure", "gone")
    _, _, given = advantages([group], "dr_grpo")
    assert given.max().item() == pytest.approx(1 / 3)
    assert given.min().item() == pytest.approx(-2 / 3)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind}-{loss.reduction}-{loss.dual_clip}-{loss.clip_high}")
def test_losses_are_ours(loss: Loss) -> None:
    of = [Group(g.task_id, tuple(_spread(g))) for g in groups(3, False)]
    samples = ours(of, "grpo")
    old = padded([list(sample.logprobs) for sample in samples])
    mask = padded([list(map(float, sample.mask)) for sample in samples])
    torch.manual_seed(0)
    new = (old + 0.4 * torch.randn_like(old)).requires_grad_()
    given = torch.tensor([[sample.advantage] for sample in samples]) * mask
    keys = made(loss=loss.model_dump(exclude_none=True))
    actor = omega_conf_to_dataclass(verl_config(keys, {}).actor_rollout_ref.actor)
    actor.global_batch_info.update(
        dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=len(samples), loss_scale_factor=actor.loss_scale_factor
    )
    theirs, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=new,
        advantages=given,
        response_mask=mask.bool(),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=None,
    )
    [gradient] = torch.autograd.grad(theirs, new)
    value, own_gradient = _our_loss(new, old, mask, given, loss)
    assert theirs.item() == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(gradient, own_gradient, rtol=1e-4, atol=1e-7)


def _spread(group: Group) -> list[Trajectory]:
    """Without a group of equal rewards, which we leave out and verl counts with advantage 0."""
    for place, trajectory in enumerate(group.trajectories):
        trajectory.reward = float(place % 2)
    return list(group.trajectories)


def _our_loss(new: Tensor, old: Tensor, mask: Tensor, given: Tensor, loss: Loss) -> tuple[float, Tensor]:
    chosen = mask.bool()
    sequence = torch.arange(len(mask)).unsqueeze(1).expand_as(mask)[chosen]
    lengths = mask.sum(dim=1).long()
    tokens = Tokens(old[chosen], given[chosen], torch.ones_like(old[chosen]), sequence, lengths)
    total, _ = policy_loss(new[chosen], tokens, loss)
    total = total / normaliser(loss, float(mask.sum()), float(len(mask)))
    [gradient] = torch.autograd.grad(total, new)
    return total.item(), gradient


def test_a_key_that_verl_does_not_have_is_refused_by_name() -> None:
    from palestra.errors import ConfigError

    keys: dict[str, Any] = {"trainer.no_such_key": 1}
    with pytest.raises(ConfigError, match=r"trainer\.no_such_key"):
        verl_config(keys, keys)


def test_the_agent_loop_is_registered_by_the_yaml() -> None:
    from omegaconf import OmegaConf

    from palestra.bridges.verl import dataset, loop

    [entry] = OmegaConf.load(Path(loop.__file__).with_name("agent_loop.yaml"))
    assert entry.name == dataset.LOOP
    assert entry._target_ == f"{loop.PalestraLoop.__module__}.{loop.PalestraLoop.__qualname__}"
