"""The recipe for a 32B model, as verl's own config: every published setting arrives, under verl's name for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from bridges.verl.attempts import attempt
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from palestra.bridges.verl.driving import verl_config
from palestra.bridges.verl.loop import PalestraLoop
from palestra.bridges.verl.settings import settings
from palestra.config import Verl, load
from palestra.errors import ConfigError
from palestra.runs import RunFolder
from palestra.trajectory import Stop

FILE = Path(__file__).parents[3] / "recipes" / "swe" / "train32b.toml"

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ARRIVES: dict[str, object] = {
    "actor_rollout_ref.model.path": "Qwen3-32B",
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "algorithm.adv_estimator": "palestra_rloo",
    "algorithm.rollout_correction.bypass_mode": True,
    "algorithm.use_kl_in_reward": False,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.28,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    f"{ACTOR}.loss_scale_factor": 32768.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.0,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.ppo_mini_batch_size": 64,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.lr_scheduler_type": "constant",
    f"{ACTOR}.optim.lr_warmup_steps": 0,
    f"{ACTOR}.optim.weight_decay": 0.0,
    f"{ACTOR}.optim.clip_grad": 1.0,
    "data.train_batch_size": 64,
    "data.max_prompt_length": 40_960,
    "data.max_response_length": 40_960,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 8,
    f"{ROLLOUT}.max_model_len": 40_960,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.agent.num_workers": 8,
    "trainer.v1.trainer_mode": "sync",
    "trainer.total_training_steps": 200,
    "trainer.save_freq": 10,
    "trainer.test_freq": 20,
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 8,
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 8,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16_384,
    f"{ROLLOUT}.tensor_model_parallel_size": 4,
}


def _resolved(tmp_path: Path, *overrides: str, gpu: bool = True) -> Any:
    config = load(FILE, ["backend.kind=verl", *overrides])
    assert isinstance(config.backend, Verl)
    assert config.training is not None
    keys = settings(config, config.backend, config.training, RunFolder(tmp_path), Path("Qwen3-32B"), gpu)
    return verl_config(keys, config.backend.overrides)


def test_every_setting_arrives_and_verl_finds_them_valid(tmp_path: Path) -> None:
    whole = _resolved(tmp_path)
    assert {name: OmegaConf.select(whole, name) for name in ARRIVES} == ARRIVES
    assert not need_reference_policy(whole)
    validate_config(config=whole, use_reference_policy=False, use_critic=need_critic(whole))


@pytest.mark.parametrize("stop", ["turns", "context", "time", "stuck"])
def test_attempts_that_did_not_come_to_an_end_are_masked(stop: Stop) -> None:
    """verl has no setting for that: their rows have no token to train on, and keep their reward for the baseline."""
    loop = PalestraLoop.__new__(PalestraLoop)  # its own __init__ wants verl's servers
    loop._scene = SimpleNamespace(config=load(FILE, ["backend.kind=verl"]), renderer=SimpleNamespace(stop_ids={5}))
    loop._verl = OmegaConf.create({"trainer": {"use_v1": True}})
    ended, cut = attempt(0, 0, 0.0), attempt(0, 1, 1.0)
    cut.stop = stop
    assert any(any(output.response_mask) for output in loop._handed_back(ended, 0))
    [masked] = loop._handed_back(cut, 0)
    assert not any(masked.response_mask)
    assert masked.reward_score == 1.0


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("training.staleness=1",), "training.staleness"),
        (("loss.kind=gspo",), "loss.dual_clip"),
        (("training.refill=true",), "training.refill"),
        (("backend.sequence_parallel=2",), "backend.pack_tokens"),
        (('backend.verl.overrides={"algorithm.use_kl" = true}',), "algorithm.use_kl"),
        (("backend.skyrl.micro_batches=1",), "backend.skyrl.micro_batches"),
    ],
)
def test_what_verl_cannot_honour_is_refused_by_name(tmp_path: Path, overrides: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _resolved(tmp_path, *overrides)
    assert named in str(refused.value)


def test_without_a_gpu_the_layout_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend\.gpus, nodes, sequence_parallel and tensor_parallel must be 1"):
        _resolved(tmp_path, gpu=False)
