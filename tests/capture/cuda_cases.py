"""What several of the tests beside it need (test_cuda_plan)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxshard
from fxshard.ir import tags
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


def results(traced: Program, target: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each tensor that the one node with this operator gives."""
    (node,) = nodes(traced, target)
    return [(t.dtype, tuple(t.shape)) for t in tags.tensors(node.meta["val"])]


Kinds = dict[tuple[torch.dtype, int], int]


def saved(traced: Program) -> Kinds:
    """What backward reads of what forward makes: ``(dtype, elements)`` of storages -> how many."""
    held = {
        key
        for node in traced.graph.nodes
        if node.op == "placeholder" or tags.get(node).role != "compute"
        for key in tags.storage_ids(node)
    }
    kept: dict[int, tuple[torch.dtype, int]] = {}
    for node in traced.graph.nodes:
        if node.op != "call_function" or tags.get(node).phase == "backward":
            continue
        if any(tags.get(u).phase == "backward" for u in node.users if u.op == "call_function"):
            for tensor in tags.tensors(node.meta["val"]):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                kept[id(tensor.untyped_storage())] = tensor.dtype, size
    kinds = [kind for key, kind in kept.items() if key not in held]
    return {kind: kinds.count(kind) for kind in kinds}


CUDNN = aten._scaled_dot_product_cudnn_attention.default
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
FUSED = (CUDNN, FLASH, EFFICIENT)


class Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32, bias=False), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).sum()
