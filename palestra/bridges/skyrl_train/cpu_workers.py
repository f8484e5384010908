"""Where there is no GPU: forward, backward, optimizer, checkpoints and weight sync in this process, in the place of SkyRL's
`WorkerDispatch` and its workers, which need CUDA. The policy losses, the logprobs and the micro-batches are SkyRL's own code."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.backends.skyrl_train.utils.torch_utils import logprobs_from_logits
from skyrl.backends.skyrl_train.workers.worker_utils import (
    compute_minibatch_rollout_logprob_diff_metrics,
    get_microbatch_iterator,
    reduce_metrics,
)
from skyrl.train.config import SkyRLTrainConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

from palestra.bridges.skyrl_train.cpu_engine import CpuEngine


class CpuWorkers:
    """One policy in float32, with the part of `WorkerDispatch` that the trainers call."""

    def __init__(self, cfg: SkyRLTrainConfig, engine: CpuEngine) -> None:
        self._cfg, self._engine = cfg.trainer, engine
        self._model = _policy(cfg.trainer.policy.model, cfg.trainer.seed)
        optimizer = cfg.trainer.policy.optimizer_config
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=optimizer.lr, betas=tuple(optimizer.adam_betas), weight_decay=optimizer.weight_decay
        )
        self._loss = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)

    # --- gradients -------------------------------------------------------------------------------------------------

    def forward(self, model: str, data: Any) -> WorkerOutput:
        with torch.no_grad():
            rows = [row.tolist() for batch in self._micro_batches(data) for row in self._logprobs(batch)]
        return WorkerOutput(loss_fn_outputs=[{"logprobs": row} for row in rows])

    def stage_data(self, model: str, data: Any, mini_batch_boundaries: Sequence[tuple[int, int]]) -> list[Any]:
        return [data[start:end] for start, end in mini_batch_boundaries]

    def forward_from_staged(self, model: str, chunk_refs: Any) -> WorkerOutput:
        return self.forward(model, chunk_refs)

    def forward_backward_from_staged(self, model: str, chunk_refs: Any) -> WorkerOutput:
        metrics: dict[str, list[float]] = defaultdict(list)
        for batch in self._micro_batches(chunk_refs):
            if batch["loss_mask"].any():  # else it has no gradient
                for name, value in self._backward(batch).items():
                    metrics[name].append(value)
        return WorkerOutput(metrics=reduce_metrics(metrics, sum_loss_metrics=True))

    def _backward(self, batch: Any) -> dict[str, float]:
        logprobs, mask, rollout = self._logprobs(batch), batch["loss_mask"], batch["rollout_logprobs"]
        old = batch.get("action_log_probs")
        loss, measured = self._loss(logprobs, old, batch["advantages"], self._cfg.algorithm, mask, rollout)
        loss.backward()
        return {
            "policy_loss": loss.item(),
            **{f"loss_metrics/{name}": value for name, value in measured.items()},
            **compute_minibatch_rollout_logprob_diff_metrics(logprobs.detach(), rollout, mask),
        }

    def _micro_batches(self, data: Any) -> Iterator[Any]:
        size = self._cfg.micro_train_batch_size_per_gpu
        yield from get_microbatch_iterator(data, micro_batch_size=size, max_tokens_per_microbatch=-1)

    def _logprobs(self, batch: Any) -> Tensor:
        """Of the response's tokens, right-aligned as in all of SkyRL's batches."""
        tokens, seen, responses = batch["sequences"], batch["attention_mask"], batch.metadata["response_length"]
        places = (seen.long().cumsum(-1) - 1).clamp(min=0)
        answer = self._model(tokens, attention_mask=seen, position_ids=places, use_cache=False, logits_to_keep=responses + 1)
        logits = answer.logits[:, :-1] / self._cfg.algorithm.temperature
        logprobs: Tensor = logprobs_from_logits(logits, tokens[:, -responses:])
        return logprobs

    def optim_step(self, model: str) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._cfg.policy.optimizer_config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm.item()

    # --- weights ---------------------------------------------------------------------------------------------------

    async def save_weights_for_sampler(self) -> None:
        with torch.no_grad():
            self._engine.increment_weight_version()
            self._engine.take_weights(_weights_to_read(self._model))

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None) -> None:
        Path(ckpt_dir).mkdir(parents=True, exist_ok=True)
        state = {"weights": _trained_weights(self._model), "optimizer": self._optimizer.state_dict()}
        torch.save(state, Path(ckpt_dir) / "policy.pt")

    def load_checkpoint(self, model: str, ckpt_dir: str, **_: Any) -> None:
        state = torch.load(Path(ckpt_dir) / "policy.pt", weights_only=True)
        with torch.no_grad():
            for name, weight in _trained_weights(self._model).items():
                weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        self._model.save_pretrained(export_dir)
        tokenizer.save_pretrained(export_dir)

    # --- what only several processes need --------------------------------------------------------------------------

    def init_weight_sync_state(self, inference_engine_client: Any) -> None: ...

    def empty_cache(self, model: str | None = None) -> None: ...

    def get_lcm_dp_size(self) -> int:
        return 1


def _policy(section: Any, seed: int) -> Any:
    """The model or, with LoRA, the model under an adapter on all its linear layers, as SkyRL's own workers make it."""
    model = AutoModelForCausalLM.from_pretrained(section.path, dtype=torch.float32, attn_implementation="sdpa")
    if section.lora.rank:
        torch.manual_seed(seed)
        adapter = LoraConfig(
            task_type="CAUSAL_LM", r=section.lora.rank, lora_alpha=section.lora.alpha, target_modules=section.lora.target_modules
        )
        model = get_peft_model(model, adapter)
    return model


def _trained_weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def _weights_to_read(model: Any) -> dict[str, Tensor]:
    """All weights that training moves, by the names that the plain model has for them; an adapter is merged into them."""
    adapted = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    if not adapted:
        return dict(model.named_parameters())
    plain = "base_model.model."
    return {
        f"{name.removeprefix(plain)}.weight": layer.get_base_layer().weight + layer.get_delta_weight("default")
        for name, layer in adapted.items()
    }
