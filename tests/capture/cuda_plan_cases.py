"""What several of the tests beside it need (test_cuda_plan)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn

import fxshard
from fxshard.ir.program import Program

aten = torch.ops.aten


HALF, FLOAT = torch.bfloat16, torch.float32


B, H, S, D = 2, 4, 16, 8  # batch, heads, sequence, head dim


class Attention(nn.Module):
    """(B, S, dim) -> a scalar, through one scaled_dot_product_attention."""

    def __init__(self, dim: int = H * D, heads: int = H, kv_heads: int = H, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.options = heads, kv_heads, options
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim // heads * kv_heads, bias=False)
        self.v = nn.Linear(dim, dim // heads * kv_heads, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options).sum()


def program(model: nn.Module, *args: Any, device: str | None = "cuda", **options: Any) -> Program:
    return fxshard.plan(model, args, world_size=2, device=device, **options).program


def attend(dtype: torch.dtype = HALF, dim: int = H * D, **options: Any) -> Program:
    model = Attention(dim, **options).to(dtype)
    return program(model, torch.randn(B, S, dim, dtype=dtype))


def nodes(traced: Program, target: Any) -> list[fx.Node]:
    return [node for node in traced.graph.nodes if node.target is target]


CUDNN = aten._scaled_dot_product_cudnn_attention.default


UNLISTED = [name for name in ("linalg_matrix_sqrth",) if hasattr(aten, name)]  # torch 2.15 has it


@pytest.fixture(autouse=True)
def same_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
