"""Our config as SkyRL's own: what is mapped, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from bridges.skyrl.conftest import configured

from palestra.bridges.skyrl_train.settings import skyrl_config
from palestra.errors import ConfigError
from palestra.runs import RunFolder


def _mapped(model: Path, folder: Path, *overrides: str) -> Any:
    config = configured(model, folder, *overrides)
    assert config.training is not None
    return skyrl_config(config, config.backend, config.training, RunFolder(folder), model=model, tasks=100, on_cpu=True)


def test_every_knob_arrives(model: Path, tmp_path: Path) -> None:
    cfg = _mapped(
        model,
        tmp_path,
        *(
            "training.groups=4",
            "training.samples=6",
            "training.learning_rate=0.002",
            "training.estimator=rloo",
            "training.steps=30",
        ),
        *("training.max_grad_norm=0.5", "training.save_every=3", "training.keep_checkpoints=5", "sampling.temperature=0.7"),
        *("loss.kind=ppo", "loss.clip_high=0.3", "loss.dual_clip=4.0", "loss.truncate=2.5", "loss.reduction=constant"),
        *(
            "evaluation.every=7",
            "run.seed=9",
            "backend.train=full",
            'backend.settings={"trainer.gradient_checkpointing" = false}',
        ),
    )
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size, cfg.generator.n_samples_per_prompt) == (4, 4, 6)
    assert (trainer.epochs, trainer.max_training_steps, trainer.eval_interval, trainer.seed) == (2, 30, 7, 9)
    assert (trainer.policy.optimizer_config.lr, trainer.policy.optimizer_config.max_grad_norm) == (0.002, 0.5)
    assert trainer.policy.optimizer_config.weight_decay == 0.0
    assert (trainer.ckpt_interval, trainer.max_ckpts_to_keep, trainer.policy.model.lora.rank) == (3, 5, 0)
    assert (algorithm.advantage_estimator, algorithm.policy_loss_type) == ("palestra_rloo", "dual_clip")
    assert (algorithm.eps_clip_high, algorithm.clip_ratio_c, algorithm.temperature) == (0.3, 4.0, 0.7)
    assert algorithm.off_policy_correction.token_tis_ratio_clip_high == 2.5
    assert (algorithm.loss_reduction, algorithm.max_seq_len) == ("seq_mean_token_sum_norm", 1024.0)
    assert not trainer.gradient_checkpointing
    assert not algorithm.use_kl_loss


def test_staleness_is_skyrls_fully_async_training(model: Path, tmp_path: Path) -> None:
    cfg = _mapped(model, tmp_path, "training.staleness=2", "loss.kind=ppo")
    assert cfg.trainer.fully_async.enabled
    assert cfg.trainer.fully_async.max_staleness_steps == 2
    assert cfg.trainer.fully_async.num_parallel_generation_workers == 24
    assert cfg.trainer.algorithm.policy_loss_type == "palestra_regular"


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("loss.truncate=2.0", "training.staleness=1"), r"loss\.truncate does not go with training\.staleness"),
        (("loss.kind=gspo", "loss.dual_clip=2.0"), r"loss\.dual_clip does not go with loss\.kind = 'gspo'"),
        (("sampling.temperature=0.0",), r"sampling\.temperature = 0"),
        (("backend.micro_batch=5",), r"backend\.micro_batch = 5 must divide the 64 attempts"),
        (('backend.settings={"trainer.seed" = 3}',), r"'trainer\.seed' follows from the rest of the config"),
        (('backend.settings={"trainer.sead" = 3}',), r"SkyRL refuses this config: Invalid fields \{'sead'\}"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    model: Path, tmp_path: Path, overrides: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _mapped(model, tmp_path, *overrides)
