"""The embedded trainer: gradients of packed prefix trees, summed as samples arrive and normalised once at the step.

Master weights are float32, those of the adapter or, for full fine-tuning, of the whole model; what the passes compute with
may be bfloat16. All torch work runs on one thread of its own, so that the event loop stays free.
"""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra import loss as losses
from palestra.backends.torch import lora
from palestra.backends.torch.head import logprobs as head_logprobs
from palestra.backends.torch.passes import Pass, split_into_passes
from palestra.backends.torch.sampler import TorchSampler
from palestra.backends.torch.tree import TreePlan
from palestra.config import Loss
from palestra.errors import ModelError
from palestra.trajectory import Sample


class TorchTrainer:
    def __init__(
        self,
        model: Any,
        sampler: TorchSampler,
        *,
        adapter: bool,
        temperature: float,
        max_grad_norm: float,
        pack_tokens: int,
        source: str,
    ) -> None:
        self._model, self._sampler = model, sampler
        self._adapter, self._source = adapter, source
        self._temperature, self._max_grad_norm, self._pack_tokens = temperature, max_grad_norm, pack_tokens
        self._device: torch.device = model.device
        self._masters = _masters(model)
        self._optimizer = torch.optim.AdamW(self._masters.values(), weight_decay=0.0, fused=self._device.type == "cuda")
        self._reference: Any = None
        self._version = 0
        self._waiting: list[Sample] = []
        self._loss: Loss | None = None
        self._sums: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="palestra-trainer")

    def close(self) -> None:
        self._thread.shutdown()

    # --- the protocol: everything heavy goes to the thread ---------------------------------------------------------

    async def accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
        await self._in_thread(self._accumulate, samples, loss)

    @property
    def version(self) -> int:
        return self._version

    async def step(self, learning_rate: float) -> Mapping[str, float]:
        metrics: Mapping[str, float] = await self._in_thread(self._step, learning_rate)
        return metrics

    async def discard(self) -> None:
        await self._in_thread(self._discard)

    async def publish(self) -> int:
        await self._in_thread(self.publish_now)
        return self._version

    async def logprobs(self, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
        values: list[list[float]] = await self._in_thread(self._all_logprobs, samples, temperature)
        return values

    async def save(self, folder: Path) -> None:
        await self._in_thread(self._save, folder)

    async def load(self, folder: Path) -> None:
        await self._in_thread(self._load, folder)

    async def export(self, folder: Path) -> None:
        await self._in_thread(self._export, folder)

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    # --- gradients -------------------------------------------------------------------------------------------------

    def _accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
        if self._loss is not None and loss != self._loss:
            raise ValueError("one step takes one loss")
        self._loss = loss
        self._waiting.extend(samples)
        # A pass that is not yet full waits for more samples: the more it packs, the more they share.
        *full, rest = split_into_passes(self._waiting, self._pack_tokens)
        for batch in full:
            self._backward(batch, loss)
        self._waiting = rest.samples

    def _backward(self, batch: Pass, loss: Loss) -> None:
        reference = self._reference_logprobs(batch) if loss.kl else None
        logprobs = self._chosen_logprobs(self._model, batch, self._temperature)
        tokens = batch.tokens(self._device, reference)
        total, metrics = losses.policy_loss(logprobs, tokens, loss)
        total.backward()  # type: ignore[no-untyped-call]
        self._count("loss", total.item())
        self._count("tokens", float(len(logprobs)))
        self._count("token_weight", tokens.weights.sum().item())
        self._count("sequence_weight", float(sum(sample.weight for sample in batch.samples)))
        self._count("computed_tokens", float(len(batch.tree.tokens)))
        for name, value in metrics.items():
            self._count(name, value.item())

    def _count(self, name: str, value: float) -> None:
        before = self._sums.get(name, 0.0)
        self._sums[name] = max(before, value) if name.endswith("_max") else before + value

    def _chosen_logprobs(self, model: Any, batch: Pass, temperature: float) -> Tensor:
        """Logprobs of the batch's trained tokens, in the order of its samples."""
        tree = batch.tree
        hidden = model.base_model(
            input_ids=torch.tensor([tree.tokens], device=self._device),
            position_ids=torch.tensor([tree.positions], device=self._device),
            use_cache=False,
            plan=TreePlan(tree.nodes),
        ).last_hidden_state[0]
        rows, targets, places = (
            torch.tensor(x, dtype=torch.long, device=self._device) for x in (batch.rows, batch.targets, batch.places)
        )
        head = model.get_output_embeddings().weight
        return head_logprobs(hidden[rows], head, targets, temperature)[places]

    def _step(self, learning_rate: float) -> Mapping[str, float]:
        if self._loss is None:
            raise ValueError("step() needs samples: nothing was accumulated")
        if self._waiting:
            for batch in split_into_passes(self._waiting, self._pack_tokens):
                self._backward(batch, self._loss)
        sums = self._sums
        scale = losses.normaliser(self._loss, sums["token_weight"], sums["sequence_weight"])
        for master in self._masters.values():
            if master.grad is not None:
                master.grad.div_(scale)
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._max_grad_norm)
        if not norm.isfinite():  # one step with it, and no weight would be a number any more
            self._discard()
            raise ModelError(
                f"the gradient's norm is {norm.item()}: training has diverged, and this step is not taken; "
                "try a lower learning_rate or training.max_grad_norm"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._discard()
        self._write_back()
        return {"grad_norm": norm.item(), **_averages(sums, scale)}

    def _discard(self) -> None:
        self._optimizer.zero_grad()
        self._waiting, self._loss, self._sums = [], None, {}

    def _all_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
        values: list[list[float]] = []
        everywhere = [Sample(s.tokens, [False] + [True] * (len(s.tokens) - 1), s.logprobs, s.versions, 0.0) for s in samples]
        with torch.no_grad():
            for batch in split_into_passes(everywhere, self._pack_tokens):
                flat = iter(self._chosen_logprobs(self._model, batch, temperature).tolist())
                values.extend([0.0, *(next(flat) for _ in sample.tokens[1:])] for sample in batch.samples)
        return values

    # --- weights ---------------------------------------------------------------------------------------------------

    def _write_back(self) -> None:
        """Give the passes what the optimizer did to the masters."""
        if self._adapter:
            for _, layer in lora.adapters(self._model):
                layer.refresh()
            return
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name in self._masters and self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    def publish_now(self) -> None:
        if self._adapter:
            weights = {f"{name}.weight": layer.merged for name, layer in lora.adapters(self._model)}
        else:
            weights = dict(self._model.named_parameters())
        self._version += 1
        self._sampler.replace_weights(weights, self._version)

    @torch.no_grad()
    def _reference_logprobs(self, batch: Pass) -> Tensor:
        """Those of the model that training found: of the base without its adapter, or of the copy that was kept."""
        if not self._adapter:
            if self._reference is None:
                raise ValueError("a loss with kl > 0 needs keep_reference() before training")
            return self._chosen_logprobs(self._reference, batch, self._temperature)
        for _, layer in lora.adapters(self._model):
            layer.detach_adapter()
        try:
            return self._chosen_logprobs(self._model, batch, self._temperature)
        finally:
            self._write_back()

    def keep_reference(self) -> None:
        """Remember the present weights for the KL. An adapter needs nothing: its base is the reference."""
        if not self._adapter:
            self._reference = copy.deepcopy(self._model)

    # --- files -----------------------------------------------------------------------------------------------------

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        masters = {name: master.detach() for name, master in self._masters.items()}
        state = {"masters": masters, "optimizer": self._optimizer.state_dict(), "version": self._version}
        torch.save(state, folder / "trainer.pt")

    def _load(self, folder: Path) -> None:
        state = torch.load(folder / "trainer.pt", map_location=self._device, weights_only=True)
        if _shapes(state["masters"]) != _shapes(self._masters):
            raise ModelError(f"checkpoint {folder} is of another model or adapter; resume with the config it was made with")
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["masters"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._write_back()
        self._version = state["version"] - 1
        self.publish_now()

    def _export(self, folder: Path) -> None:
        if self._adapter:
            lora.save_adapter(self._model, folder, self._source)
        else:
            self._model.save_pretrained(folder)


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def _masters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The float32 weights that the optimizer moves. A bfloat16 parameter gets a master beside it, and its gradient is summed
    there: sums of many small gradients would be lost in bfloat16."""
    masters = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype == torch.float32:
            masters[name] = parameter
            continue
        master = torch.nn.Parameter(parameter.detach().float())
        master.grad = torch.zeros_like(master)

        def move(p: Tensor, master: torch.nn.Parameter = master) -> None:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if p.grad is not None:
                master.grad += p.grad
            p.grad = None

        parameter.register_post_accumulate_grad_hook(move)
        masters[name] = master
    return masters


def _averages(sums: Mapping[str, float], scale: float) -> dict[str, float]:
    """Metrics of the step: sums over tokens become means."""
    tokens = sums["tokens"]
    plain = ("tokens", "computed_tokens")
    metrics = {name: sums[name] for name in plain} | {"loss": sums["loss"] / scale}
    for name, value in sums.items():
        if name not in (*plain, "loss", "token_weight", "sequence_weight"):
            metrics[name] = value if name.endswith("_max") else value / tokens
    return metrics
