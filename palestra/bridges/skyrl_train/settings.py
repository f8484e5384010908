"""Our one config as SkyRL's. What has no counterpart is refused when the config is loaded (`config/backend.py`), or here where
it takes two keys to see it."""

import math
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import validate_cfg

from palestra.bridges.skyrl_train import estimators, losses
from palestra.config import Config, Loss, Skyrl, Training
from palestra.errors import ConfigError
from palestra.runs import RunFolder

_WITHOUT_GPU = {
    "trainer.placement.colocate_all": False,
    "trainer.enable_ray_gpu_monitor": False,
    "generator.inference_engine.enable_ray_prometheus_stats": False,
}


def skyrl_config(
    config: Config, section: Skyrl, plan: Training, run: RunFolder, *, model: Path, tasks: int, on_cpu: bool
) -> SkyRLTrainConfig:
    _refuse_pairs(config, plan)
    if on_cpu and max(section.gpus, section.nodes, section.sequence_parallel, section.tensor_parallel, section.engines or 1) > 1:
        raise ConfigError(
            "without a GPU, backend.gpus, nodes, sequence_parallel, tensor_parallel and engines must be 1: all is in one process"
        )
    estimators.register()
    losses.register()
    ours = {
        **_model(section, model),
        **_algorithm(config, plan),
        **_schedule(config, plan, tasks),
        **_generation(config, section, plan),
        **_places(run),
        **_devices(section, plan),
        **(_WITHOUT_GPU if on_cpu else {}),
    }
    for name in section.settings:
        if name in ours:
            raise ConfigError(f"backend.settings: {name!r} follows from the rest of the config; change it there")
    nested: dict[str, Any] = {}
    for name, value in {**ours, **section.settings}.items():
        *folders, key = name.split(".")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[key] = value
    try:
        made = SkyRLTrainConfig.from_dict_config(OmegaConf.create(nested))
        validate_cfg(made)
    except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"SkyRL refuses this config: {error}") from None
    return made


def _refuse_pairs(config: Config, plan: Training) -> None:
    loss = config.loss
    if config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature = 0: training needs a temperature above 0, or all attempts are the same")
    if loss.dual_clip is not None and loss.kind == "gspo":
        raise ConfigError("loss.dual_clip does not go with loss.kind = 'gspo' under backend.kind = 'skyrl': SkyRL's has none")
    if loss.truncate is not None and plan.staleness:
        raise ConfigError(
            "loss.truncate does not go with training.staleness under backend.kind = 'skyrl': SkyRL keeps no old policy"
        )


def _model(section: Skyrl, model: Path) -> dict[str, Any]:
    return {
        "trainer.policy.model.path": str(model),
        "trainer.policy.model.lora.rank": section.lora.rank if section.train == "lora" else 0,
        "trainer.policy.model.lora.alpha": section.lora.alpha,
        "trainer.bf16": section.dtype == "bfloat16",
        "generator.inference_engine.model_dtype": section.dtype,
    }


def _algorithm(config: Config, plan: Training) -> dict[str, Any]:
    loss: Loss = config.loss
    reductions = {"token_mean": "token_mean", "sequence_mean": "sequence_mean", "constant": "seq_mean_token_sum_norm"}
    algorithm: dict[str, Any] = {
        "advantage_estimator": estimators.name_of(plan.estimator),
        "policy_loss_type": losses.name_of(loss),
        "loss_reduction": reductions[loss.reduction],
        "use_kl_loss": False,
        "use_kl_in_reward": False,
        "use_entropy_loss": False,
        "advantage_batch_normalize": False,
        "temperature": config.sampling.temperature,
        "eps_clip_low": loss.clip_low,
        "eps_clip_high": loss.clip_high,
        "cispo.cispo_eps_clip_low": loss.clip_low,
        "cispo.cispo_eps_clip_high": loss.clip_high,
    }
    if loss.dual_clip is not None:
        algorithm["clip_ratio_c"] = loss.dual_clip
    if loss.reduction == "constant":
        algorithm["max_seq_len"] = loss.constant
    if loss.truncate is not None:
        algorithm["off_policy_correction.tis_ratio_type"] = "token"
        algorithm["off_policy_correction.token_tis_ratio_clip_high"] = loss.truncate
    optimizer = {"lr": plan.learning_rate, "weight_decay": 0.0, "max_grad_norm": plan.max_grad_norm}
    return {f"trainer.algorithm.{name}": value for name, value in algorithm.items()} | {
        f"trainer.policy.optimizer_config.{name}": value for name, value in optimizer.items()
    }


def _schedule(config: Config, plan: Training, tasks: int) -> dict[str, Any]:
    """One step is one batch, one mini-batch and one update."""
    schedule = {
        "seed": config.run.seed,
        "train_batch_size": plan.groups,
        "policy_mini_batch_size": plan.groups,
        "update_epochs_per_batch": 1,
        "epochs": math.ceil(plan.steps / (tasks // plan.groups)),
        "max_training_steps": plan.steps,
        "eval_interval": config.evaluation.every or plan.steps,
        "ckpt_interval": plan.save_every,
        "max_ckpts_to_keep": plan.keep_checkpoints,
        "resume_mode": "latest",
        "fully_async.enabled": plan.staleness > 0,
        "fully_async.max_staleness_steps": plan.staleness,
        "fully_async.num_parallel_generation_workers": plan.groups * (plan.staleness + 1),
    }
    return {f"trainer.{name}": value for name, value in schedule.items()}


def _generation(config: Config, section: Skyrl, plan: Training) -> dict[str, Any]:
    generation: dict[str, Any] = {
        "n_samples_per_prompt": plan.samples,
        "step_wise_trajectories": True,  # a row for each segment
        "max_turns": config.agent.turns,
        "max_input_length": config.agent.context,
        "sampling_params.temperature": config.sampling.temperature,
        "sampling_params.max_generate_length": config.sampling.max_tokens,
        "sampling_params.logprobs": 1,
        # The logprobs are to be those of the distribution that was sampled from, and vLLM's own default is before temperature.
        "inference_engine.engine_init_kwargs": {"max_model_len": config.agent.context, "logprobs_mode": "processed_logprobs"},
    }
    return {f"generator.{name}": value for name, value in generation.items()} | {
        "trainer.max_prompt_length": config.agent.context,
        "trainer.micro_train_batch_size_per_gpu": _micro_batch(section, plan),
        "trainer.micro_forward_batch_size_per_gpu": _micro_batch(section, plan),
    }


def _micro_batch(section: Skyrl, plan: Training) -> int:
    """Of the attempts that each GPU, or each few that share their sequences, has of a step."""
    shares, odd = divmod(section.gpus * section.nodes, section.sequence_parallel)
    if odd:
        raise ConfigError(f"backend.sequence_parallel = {section.sequence_parallel} must divide backend.gpus × backend.nodes")
    attempts, rest = divmod(plan.groups * plan.samples, shares)
    if rest:
        raise ConfigError(
            f"training.groups × training.samples = {plan.groups * plan.samples} must be divisible by the {shares} shares "
            "of a step, backend.gpus × backend.nodes / backend.sequence_parallel"
        )
    size = section.micro_batch or max(size for size in range(1, 9) if attempts % size == 0)
    if attempts % size:
        raise ConfigError(f"backend.micro_batch = {size} must divide the {attempts} attempts that each GPU has of a step")
    return size


def _devices(section: Skyrl, plan: Training) -> dict[str, Any]:
    return {
        "trainer.placement.colocate_all": section.colocate and not plan.staleness,
        "trainer.placement.policy_num_gpus_per_node": section.gpus,
        "trainer.placement.policy_num_nodes": section.nodes,
        "trainer.policy.sequence_parallel_size": section.sequence_parallel,
        "generator.inference_engine.tensor_parallel_size": section.tensor_parallel,
        "generator.inference_engine.num_engines": section.engines
        or max(1, section.gpus * section.nodes // section.tensor_parallel),
    }


def _places(run: RunFolder) -> dict[str, Any]:
    return {
        "data.train_data": [],
        "data.val_data": [],
        "data.dataloader.num_workers": 0,
        "trainer.ckpt_path": str(run.checkpoints),
        "trainer.export_path": str(run.path / "skyrl"),
        "trainer.log_path": str(run.path / "skyrl"),
        "trainer.eval_before_train": not (run.checkpoints / "latest_ckpt_global_step.txt").exists(),
        "trainer.logger": "console",
        "trainer.print_example_interval": 0,
    }
