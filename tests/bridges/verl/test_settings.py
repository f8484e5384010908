"""Our config in verl's words, and what verl cannot honour, refused by name."""

from pathlib import Path
from typing import Any

import pytest

from palestra.bridges.verl.settings import NEVER, settings
from palestra.config import Verl, parse
from palestra.errors import ConfigError
from palestra.runs import RunFolder

TRAINING = {"steps": 3, "groups": 4, "samples": 8, "learning_rate": 1e-3}


def made(gpu: bool = False, **sections: Any) -> dict[str, Any]:
    backend = {"kind": "verl", "model": "model", **sections.pop("backend", {})}
    training = TRAINING | sections.pop("training", {})
    config = parse({"run": {"folder": "r"}, "tasks": {"heldout": "t:h"}, "backend": backend, "training": training, **sections})
    assert isinstance(config.backend, Verl)
    assert config.training is not None
    return settings(config, config.backend, config.training, RunFolder(Path("r")), Path("/model"), gpu)


def test_one_update_for_each_step_of_whole_groups() -> None:
    keys = made()
    assert keys["data.train_batch_size"] == keys["actor_rollout_ref.actor.ppo_mini_batch_size"] == 4
    assert keys["actor_rollout_ref.rollout.n"] == 8
    assert keys["actor_rollout_ref.actor.ppo_epochs"] == 1


def test_the_ratio_is_to_the_sampler_unless_it_is_truncated() -> None:
    assert made()["algorithm.rollout_correction.bypass_mode"] is True
    keys = made(loss={"truncate": 2.0})
    assert keys["algorithm.rollout_correction.bypass_mode"] is False
    assert keys["algorithm.rollout_correction.rollout_is"] == "token"
    assert keys["algorithm.rollout_correction.rollout_is_threshold"] == 2.0


def test_verl_clips_only_where_we_do() -> None:
    assert made(loss={"kind": "importance_sampling"})["actor_rollout_ref.actor.clip_ratio_high"] == NEVER
    assert made(loss={"kind": "ppo"})["actor_rollout_ref.actor.clip_ratio_c"] == NEVER
    assert made(loss={"kind": "ppo", "dual_clip": 3.0})["actor_rollout_ref.actor.clip_ratio_c"] == 3.0


def test_the_server_fits_the_machine() -> None:
    assert made(gpu=True)["actor_rollout_ref.rollout.name"] == "vllm"
    assert made(gpu=False)["actor_rollout_ref.rollout.name"] == "embedded"
    assert made(gpu=True, backend={"server": "sglang"})["actor_rollout_ref.rollout.name"] == "sglang"


def test_overrides_come_last() -> None:
    assert made(backend={"overrides": {"reward.num_workers": 3}})["reward.num_workers"] == 3


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"loss": {"kind": "cross_entropy"}}, "loss.kind"),
        ({"loss": {"kind": "gspo", "dual_clip": 3.0}}, "loss.dual_clip"),
        ({"training": {"segment_weight": "trajectory"}}, "training.segment_weight"),
        ({"training": {"staleness": 1}}, "training.staleness"),
        ({"training": {"refill": True}}, "training.refill"),
        ({"training": {"oversample": 1.5}}, "training.oversample"),
        ({"training": {"shuffle_rewards": True}}, "training.shuffle_rewards"),
        ({"warm_start": {"data": "x.jsonl", "steps": 1}}, "warm_start"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature"),
        ({"agent": {"context": 20_000}}, "backend.pack_tokens"),
        ({"backend": {"server": "vllm"}}, 'backend.server = "vllm"'),
        ({"backend": {"gpus": 2}}, "backend.gpus"),
        ({"backend": {"train": "full"}, "loss": {"kl": 0.1}}, "loss.kl"),
        ({"gpu": True, "backend": {"server": "embedded"}}, 'backend.server = "embedded"'),
    ],
)
def test_what_verl_cannot_honour_is_refused_by_name(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**sections)
    assert named in str(refused.value)
