"""Our config in verl's words: the keys of its config that ours decides, as a plain mapping. Nothing here imports verl."""

from pathlib import Path
from typing import Any

from palestra.bridges.verl.scene import CONFIG
from palestra.config import Config, Loss, Training, Verl
from palestra.errors import ConfigError
from palestra.runs import RunFolder

NEVER = 1e9
"""A bound that no ratio reaches: verl always clips."""

_HOOKS = "palestra.bridges.verl.trainer_hooks"
_REDUCTIONS = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
_LOSSES = {"importance_sampling": "vanilla", "ppo": "vanilla", "gspo": "gspo", "cispo": "cispo"}


def settings(config: Config, section: Verl, plan: Training, run: RunFolder, model: Path, gpu: bool) -> dict[str, Any]:
    """All that our config decides, by verl's dotted keys. `gpu`: whether there is one."""
    _refuse(config, section, gpu)
    return {
        **_data(config, plan, run),
        **_model(section, model, gpu),
        **_loss(config.loss, plan),
        **_optimizer(section, plan, config.run.seed),
        **_rollout(config, section, plan, gpu),
        **_trainer(config, section, plan, run, gpu),
        **section.overrides,
    }


def _refuse(config: Config, section: Verl, gpu: bool) -> None:
    if config.sampling.temperature == 0:
        raise ConfigError("sampling.temperature = 0: training needs a temperature above 0, or all attempts are the same")
    if config.loss.dual_clip is not None and config.loss.kind != "ppo":
        raise ConfigError(f"loss.dual_clip: the backend 'verl' has it for the kind 'ppo' only, not for {config.loss.kind!r}")
    if section.pack_tokens * section.sequence_parallel < config.agent.context:
        raise ConfigError(
            f"backend.pack_tokens = {section.pack_tokens}, times backend.sequence_parallel, is less than "
            f"agent.context = {config.agent.context}: a whole sequence has to fit"
        )
    if gpu and section.server == "embedded":
        raise ConfigError('backend.server = "embedded" is for machines without a GPU; write "vllm" or "sglang"')
    if not gpu and section.server in ("vllm", "sglang"):
        raise ConfigError(f'backend.server = "{section.server}" needs a GPU, and there is none; write "auto"')
    if not gpu and config.loss.kl and section.train == "full":
        raise ConfigError('loss.kl with backend.train = "full" needs a GPU: verl pins its reference\'s memory; train an adapter')
    if not gpu and max(section.nodes, section.gpus, section.sequence_parallel, section.tensor_parallel) > 1:
        raise ConfigError("without a GPU, backend.gpus, nodes, sequence_parallel and tensor_parallel must be 1")


def _data(config: Config, plan: Training, run: RunFolder) -> dict[str, Any]:
    return {
        f"data.{CONFIG}": str((run.path / "config.toml").resolve()),
        "data.custom_cls.path": "pkg://palestra.bridges.verl.dataset",
        "data.custom_cls.name": "TaskRows",
        "data.train_files": "train",
        "data.val_files": "heldout",
        "data.shuffle": False,  # the rows are in their order already
        "data.dataloader_num_workers": 0,
        "data.train_batch_size": plan.groups,
        "data.max_prompt_length": config.agent.context,
        "data.max_response_length": config.agent.context,
    }


def _model(section: Verl, model: Path, gpu: bool) -> dict[str, Any]:
    keys: dict[str, Any] = {"actor_rollout_ref.model.path": str(model)}
    if section.train == "lora":
        keys |= {
            "actor_rollout_ref.model.lora_rank": section.lora.rank,
            "actor_rollout_ref.model.lora_alpha": section.lora.alpha,
            "actor_rollout_ref.rollout.load_format": "safetensors",  # servers load the base themselves, and get adapters only
        }
    if not gpu:
        keys |= {
            "actor_rollout_ref.model.override_config": {"attn_implementation": "sdpa"},
            "actor_rollout_ref.model.use_remove_padding": False,  # which needs flash attention
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        }
    return keys


def _loss(loss: Loss, plan: Training) -> dict[str, Any]:
    free = loss.kind == "importance_sampling"
    keys: dict[str, Any] = {
        "algorithm.adv_estimator": f"palestra_{plan.estimator}",
        "algorithm.palestra_min_group": plan.min_group,
        "algorithm.use_kl_in_reward": False,
        # The ratio is that of the trainer to the sampler; with `truncate`, to the trainer's own old policy.
        "algorithm.rollout_correction.bypass_mode": loss.truncate is None,
        "actor_rollout_ref.actor.policy_loss.loss_mode": _LOSSES[loss.kind],
        "actor_rollout_ref.actor.clip_ratio_low": NEVER if free else loss.clip_low,
        "actor_rollout_ref.actor.clip_ratio_high": NEVER if free else loss.clip_high,
        "actor_rollout_ref.actor.clip_ratio_c": loss.dual_clip or NEVER,
        "actor_rollout_ref.actor.loss_agg_mode": _REDUCTIONS[loss.reduction],
        "actor_rollout_ref.actor.use_kl_loss": loss.kl > 0,
        "actor_rollout_ref.actor.kl_loss_coef": loss.kl,
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
        "actor_rollout_ref.actor.entropy_coeff": 0.0,
    }
    if loss.reduction == "constant":
        keys["actor_rollout_ref.actor.loss_scale_factor"] = loss.constant
    if loss.truncate is not None:
        keys |= {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": loss.truncate,
        }
    return keys


def _optimizer(section: Verl, plan: Training, seed: int) -> dict[str, Any]:
    actor = "actor_rollout_ref.actor"
    precision = "fp32" if section.dtype == "float32" else "bf16"
    return {
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_epochs": 1,
        f"{actor}.ppo_mini_batch_size": plan.groups,  # one update for each step
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": section.pack_tokens,
        f"{actor}.use_torch_compile": False,
        f"{actor}.data_loader_seed": seed,
        f"{actor}.optim.lr": plan.learning_rate,
        f"{actor}.optim.lr_warmup_steps": plan.warmup_steps,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.clip_grad": plan.max_grad_norm,
        f"{actor}.fsdp_config.seed": seed,
        f"{actor}.fsdp_config.ulysses_sequence_parallel_size": section.sequence_parallel,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.fsdp_config.mixed_precision": {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{actor}.checkpoint.load_contents": ["model", "optimizer", "extra"],
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size": section.sequence_parallel,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": section.pack_tokens,
    }


def _rollout(config: Config, section: Verl, plan: Training, gpu: bool) -> dict[str, Any]:
    rollout = "actor_rollout_ref.rollout"
    server = {"auto": "vllm" if gpu else "embedded"}.get(section.server, section.server)
    return {
        f"{rollout}.name": server,
        f"{rollout}.mode": "async",
        f"{rollout}.n": plan.samples,
        f"{rollout}.temperature": config.sampling.temperature,
        f"{rollout}.val_kwargs.temperature": config.sampling.temperature,
        f"{rollout}.dtype": section.dtype,
        f"{rollout}.seed": config.run.seed,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.max_model_len": config.agent.context,
        f"{rollout}.tensor_model_parallel_size": section.tensor_parallel,
        f"{rollout}.agent.num_workers": section.workers,
        f"{rollout}.agent.agent_loop_config_path": str(Path(__file__).with_name("agent_loop.yaml")),
    }


def _trainer(config: Config, section: Verl, plan: Training, run: RunFolder, gpu: bool) -> dict[str, Any]:
    return {
        "trainer.device": "cuda" if gpu else "cpu",
        "trainer.n_gpus_per_node": section.gpus,
        "trainer.nnodes": section.nodes,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": plan.steps,
        "trainer.save_freq": plan.save_every,
        "trainer.max_actor_ckpt_to_keep": plan.keep_checkpoints,
        "trainer.default_local_dir": str(run.checkpoints.resolve()),
        "trainer.resume_mode": "auto",
        "trainer.test_freq": config.evaluation.every or plan.steps,  # the last step is always evaluated
        "trainer.project_name": "palestra",
        "trainer.experiment_name": run.path.name,
        "trainer.logger": ["file"],
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{_HOOKS}",
        "trainer.v1.sampler.custom_sampler.name": "WatchedBuffer",
        "trainer.v1.sampler.sampler_kwargs": {"stall_seconds": section.stall_seconds},
        "trainer.checkpoint_callback_class": f"{_HOOKS}.CommitCallback",
        "critic.enable": False,
        "reward.num_workers": 1,  # rewards are the agent loop's
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": section.nodes,
    }
