"""Linear layers for sampling on CPU, with their weights in the layout that oneDNN's kernels read.

Decoding multiplies a few rows by large weights; with plain weights oneDNN rearranges them in every call, which at eight rows
costs as much as the product.
"""

from typing import Any

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias, self._dtype = linear.bias, linear.weight.dtype
        self.replace(linear.weight)

    @torch.no_grad()
    def replace(self, weight: Tensor) -> None:
        """A trainer's master weights may be of another type, as they may be for any other layer."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(self._dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def pack(model: Any) -> None:
    """Pack every linear layer where that helps: on CPU in bfloat16, with oneDNN. Elsewhere the model stays as it is."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, PackedLinear(module))


@torch.no_grad()
def replace_weight(model: Any, name: str, weight: Tensor) -> None:
    """Give a parameter, named as in the model before packing, a new value."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, PackedLinear) and name.endswith(".weight"):
        owner.replace(weight)
        return
    model.get_parameter(name).copy_(weight)
    head = model.get_output_embeddings()
    if owner is model.get_input_embeddings() and model.config.tie_word_embeddings and isinstance(head, PackedLinear):
        head.replace(weight)  # packing gave it a copy of its own
