"""Linear layers in oneDNN's layout: new weights may come in whatever type a trainer keeps them."""

import pytest
import torch
from torch import nn

from palestra.backends.torch.packed import PackedLinear


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 64])
def test_master_weights_replace_packed_ones(kept: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(64, 32, bias=False).to(torch.bfloat16))
    new, x = torch.randn(32, 64, dtype=kept), torch.randn(rows, 64, dtype=torch.bfloat16)
    packed.replace(new)
    with torch.inference_mode():
        expected = nn.functional.linear(x.float(), new.to(torch.bfloat16).float())
        assert torch.allclose(packed(x).float(), expected, rtol=2e-2, atol=2e-1)
