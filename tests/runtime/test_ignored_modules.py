"""Ignored modules are left alone: their buffers as well as their parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

import fxshard


class Scale(nn.Module):
    """Computes in its own dtype, as what is ignored may; has another module with a buffer."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("factor", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.weight.dtype) * self.weight * self.factor
        return (y if self.inner is None else self.inner(y)).to(x.dtype)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scale(Scale()), Scale())


@pytest.mark.parametrize("verb", ["compile", "shard"])
def test_buffers_of_ignored_modules_stay_as_they_are(verb: str) -> None:
    """As in FSDP1 (torch/distributed/fsdp/_init_utils.py, ``_get_ignored_buffer_names``)."""
    model, batch = build(), torch.randn(3, 4)
    before = dict(model.named_buffers())
    half = torch.bfloat16
    policy = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    options: dict[str, Any] = {"ignored": ["1"], "mixed_precision": policy}
    sharded = getattr(fxshard, verb)(model, world_size=2, **options)
    after = dict(model.named_buffers())
    for name in ("1.factor", "1.inner.factor"):
        assert after[name] is before[name]
    assert after["2.factor"].dtype is half and before["2.factor"].dtype is torch.float32

    eager = build()
    for i in (0, 2):
        eager[i].to(half)
    assert torch.equal(sharded(batch), eager(batch.to(half)))
    if verb == "compile":
        planned = fxshard.plan(build(), (batch,), world_size=2, **options)
        assert planned.memory.peak_bytes == sharded.memory.peak_bytes


def test_bytes_of_ignored_buffers_are_as_measured() -> None:
    policy = MixedPrecision(buffer_dtype=torch.bfloat16)
    options: dict[str, Any] = {"ignored": ["1"], "mixed_precision": policy}
    found = fxshard.validate(build(), (torch.randn(3, 4),), world_size=2, **options)
    assert found.max_abs_difference == 0
