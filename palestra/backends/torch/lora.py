"""LoRA whose adapter is merged into the weights that the forward pass reads, so that an adapted layer costs one product.

The adapter itself stays in float32. `refresh` folds it in again after each optimizer step; the gradient of the two small
factors is taken directly, without that of the whole weight. Files are PEFT's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from palestra.errors import ModelError

_PEFT_PREFIX = "base_model.model."


class LoraLinear(nn.Module):
    """A linear layer with base weight W that computes x · (W + scale · B · A)ᵀ."""

    merged: Tensor

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)  # as PEFT does
        self.register_buffer("merged", base.weight.detach().clone(), persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        self.merged.copy_(torch.add(self.base.weight.float(), self.up @ self.down, alpha=self.scale))

    @torch.no_grad()
    def detach_adapter(self) -> None:
        """Compute as the base model does, until the next `refresh`."""
        self.merged.copy_(self.base.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _LoraProduct.apply(x, self.merged, self.base.bias, self.down, self.up, self.scale)  # type: ignore[no-untyped-call]
        return out


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, merged: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, merged, down, up)
        ctx.scale = scale
        return nn.functional.linear(x, merged, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, merged, down, up = ctx.saved_tensors
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        d_x = grad @ merged if ctx.needs_input_grad[0] else None
        through_up = grads @ up.to(grads.dtype)
        d_down = (through_up.T @ rows).float() * ctx.scale
        d_up = (grads.T @ (rows @ down.to(rows.dtype).T)).float() * ctx.scale
        return d_x, None, None, d_down, d_up, None


def adapt(model: nn.Module, rank: int, alpha: float, seed: int) -> None:
    """Freeze the model and give every linear layer of its decoder an adapter. The output head stays as it is."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()  # type: ignore[operator]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and module is not head:
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, LoraLinear(module, rank, alpha / rank))


def adapters(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def save_adapter(model: nn.Module, folder: Path, base_model: str) -> None:
    """Write the adapter as PEFT loads it."""
    from peft import LoraConfig

    layers = dict(adapters(model))
    if not layers:
        raise ModelError("the model has no adapter to save")
    first = next(iter(layers.values()))
    rank = first.down.shape[0]
    config = LoraConfig(
        r=rank,
        lora_alpha=first.scale * rank,
        target_modules=sorted({name.rpartition(".")[2] for name in layers}),
        base_model_name_or_path=base_model,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tensors = {}
    for name, layer in layers.items():
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = layer.down.detach().contiguous()
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = layer.up.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ModelError(f"no adapter in {folder}: adapter_model.safetensors is missing")
    tensors = load_file(path)
    for name, layer in adapters(model):
        try:
            down = tensors.pop(f"{_PEFT_PREFIX}{name}.lora_A.weight")
            up = tensors.pop(f"{_PEFT_PREFIX}{name}.lora_B.weight")
        except KeyError as missing:
            raise ModelError(f"the adapter in {folder} has no {missing}; was it made for another model?") from None
        if down.shape != layer.down.shape:
            raise ModelError(f"the adapter in {folder} has rank {down.shape[0]}, the config asks for {layer.down.shape[0]}")
        layer.down.copy_(down)
        layer.up.copy_(up)
        layer.refresh()
    if tensors:
        raise ModelError(f"the adapter in {folder} adapts {next(iter(tensors))}, which this model does not have")
