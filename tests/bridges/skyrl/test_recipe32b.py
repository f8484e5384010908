"""The recipe for a 32B model, as SkyRL's own config: every published setting arrives, under SkyRL's name for it."""

import random
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from bridges.skyrl.conftest import RECIPE
from bridges.skyrl.making import segment, trajectory

from palestra.bridges.skyrl_train.handover import Rules, hand_over
from palestra.bridges.skyrl_train.settings import skyrl_config
from palestra.config import load
from palestra.errors import ConfigError
from palestra.runs import RunFolder
from palestra.trajectory import Group, Stop

FILE = RECIPE.parent / "swe" / "train32b.toml"

ARRIVES: dict[str, object] = {
    "trainer.policy.model.path": "Qwen3-32B",
    "trainer.policy.model.lora.rank": 0,
    "trainer.bf16": True,
    "trainer.algorithm.advantage_estimator": "palestra_rloo",
    "trainer.algorithm.advantage_batch_normalize": False,
    "trainer.algorithm.policy_loss_type": "palestra_dual_clip",
    "trainer.algorithm.eps_clip_low": 0.2,
    "trainer.algorithm.eps_clip_high": 0.28,
    "trainer.algorithm.clip_ratio_c": 3.0,
    "trainer.algorithm.loss_reduction": "seq_mean_token_sum_norm",
    "trainer.algorithm.max_seq_len": 32768,
    "trainer.algorithm.use_kl_loss": False,
    "trainer.algorithm.use_kl_in_reward": False,
    "trainer.algorithm.use_entropy_loss": False,
    "trainer.algorithm.temperature": 1.0,
    "trainer.algorithm.off_policy_correction.tis_ratio_type": None,
    "trainer.fully_async.enabled": False,
    "trainer.train_batch_size": 64,
    "trainer.policy_mini_batch_size": 64,
    "trainer.update_epochs_per_batch": 1,
    "trainer.policy.optimizer_config.lr": 1e-6,
    "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
    "trainer.policy.optimizer_config.num_warmup_steps": 0,
    "trainer.policy.optimizer_config.weight_decay": 0.0,
    "trainer.policy.optimizer_config.max_grad_norm": 1.0,
    "trainer.max_training_steps": 200,
    "trainer.ckpt_interval": 10,
    "trainer.eval_interval": 20,
    "generator.n_samples_per_prompt": 8,
    "generator.max_turns": 50,
    "generator.max_input_length": 40_960,
    "generator.inference_engine.engine_init_kwargs": {"max_model_len": 40_960, "logprobs_mode": "processed_logprobs"},
    "generator.sampling_params.max_generate_length": 4096,
    "generator.sampling_params.temperature": 1.0,
    "generator.sampling_params.top_p": 1.0,
    "generator.sampling_params.top_k": -1,
    "generator.sampling_params.min_p": 0.0,
    "generator.sampling_params.repetition_penalty": 1.0,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.placement.colocate_all": True,
    "trainer.placement.policy_num_nodes": 2,
    "trainer.placement.policy_num_gpus_per_node": 8,
    "trainer.policy.sequence_parallel_size": 8,
    "generator.inference_engine.tensor_parallel_size": 4,
    "generator.inference_engine.num_engines": 4,
}


def _resolved(tmp_path: Path, *overrides: str, on_cpu: bool = False) -> Any:
    config = load(FILE, overrides)
    assert config.training is not None
    run = RunFolder(tmp_path)
    return skyrl_config(config, config.backend, config.training, run, model=Path("Qwen3-32B"), tasks=198, on_cpu=on_cpu)


def test_every_setting_arrives(tmp_path: Path) -> None:
    cfg = _resolved(tmp_path)
    assert {name: attrgetter(name)(cfg) for name in ARRIVES} == ARRIVES


@pytest.mark.parametrize("stop", ["turns", "context", "time", "stuck"])
def test_attempts_that_did_not_come_to_an_end_are_masked(stop: Stop) -> None:
    """SkyRL has no setting for that: their rows have no token to train on, and keep their reward for the baseline."""
    plan = load(FILE).training
    assert plan is not None
    chance = random.Random(0)
    ended, cut = (trajectory("t", n, [segment(chance, 2)], float(n), how) for n, how in enumerate(("finish", stop)))
    rows, _ = hand_over(Group("t", (ended, cut)), Rules(plan.estimator, plan.min_group, frozenset(plan.masked_stops)), 0)
    assert [any(row.mask) for row in rows] == [True, False]
    assert [row.reward for row in rows] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("loss.kl=0.001",), "loss.kl"),
        (("loss.kind=gspo",), "loss.dual_clip"),
        (("training.warmup_steps=5",), "training.warmup_steps"),
        (("training.refill=true",), "training.refill"),
        (("backend.sequence_parallel=3",), "backend.sequence_parallel"),
        (("training.groups=63", "training.samples=7"), "training.groups"),
        (('backend.skyrl.settings={"trainer.algorithm.use_kl_loss" = true}',), "trainer.algorithm.use_kl_loss"),
        (("backend.micro_batch=2",), "micro_batch"),
        (("backend.verl.worker=2",), "backend.verl.worker"),
    ],
)
def test_what_skyrl_cannot_honour_is_refused_by_name(tmp_path: Path, overrides: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _resolved(tmp_path, *overrides)
    assert named in str(refused.value)


def test_without_a_gpu_the_layout_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend\.gpus, nodes, sequence_parallel, tensor_parallel and engines must be 1"):
        _resolved(tmp_path, on_cpu=True)
