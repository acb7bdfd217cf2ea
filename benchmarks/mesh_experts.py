"""A model of the shape of DeepSeek-V3; its experts are spread over ranks as torchtitan does it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from benchmarks.published_steps.llama import Norm


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """Sizes of DeepSeek-V3 (its config.json); attention from low ranks of queries and keys."""

    vocabulary: int = 129_280
    dim: int = 7168
    layers: int = 61
    dense_layers: int = 3
    hidden: int = 18_432
    heads: int = 128
    query_rank: int = 1536
    key_rank: int = 512
    plain: int = 128
    rotary: int = 64
    value: int = 128
    experts: int = 256
    chosen: int = 8
    expert_hidden: int = 2048


def linear(size: int, made: int) -> nn.Linear:
    return nn.Linear(size, made, bias=False)


class Attention(nn.Module):
    """Without its rotation, which moves no bytes that others do not."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.shape, heads = shape, shape.heads
        self.wq_a, self.q_norm = linear(shape.dim, shape.query_rank), Norm(shape.query_rank)
        self.wq_b = linear(shape.query_rank, heads * (shape.plain + shape.rotary))
        self.wkv_a, self.kv_norm = linear(shape.dim, shape.key_rank + shape.rotary), Norm(512)
        self.wkv_b = linear(shape.key_rank, heads * (shape.plain + shape.value))
        self.wo = linear(heads * shape.value, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(batch, length, shape.heads, -1)
        low, rotary = self.wkv_a(x).split([shape.key_rank, shape.rotary], -1)
        both = self.wkv_b(self.kv_norm(low)).view(batch, length, shape.heads, -1)
        k, v = both.split([shape.plain, shape.value], -1)
        k = torch.cat([k, rotary.unsqueeze(2).expand(-1, -1, shape.heads, -1)], -1)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return made


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = linear(dim, hidden), linear(hidden, dim), linear(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return made


class Experts(nn.Module):
    """Rows in the order of their experts, and how many each has -> rows."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        sizes = shape.experts, shape.dim, shape.expert_hidden
        self.w1, self.w3 = (nn.Parameter(torch.empty(sizes)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        w1, w2, w3 = (
            p.to_local() if isinstance(p, DTensor) else p for p in (self.w1, self.w2, self.w3)
        )
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = F.silu(torch._grouped_mm(rows, w1, offs=ends))
        return torch._grouped_mm(inner * torch._grouped_mm(rows, w3, offs=ends), w2, offs=ends)


class ToRanks(ParallelStyle):
    """Rows go to the ranks of their experts, and back."""

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in [*module.named_parameters(recurse=False)]:
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))

    def _send(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        rows, counts = inputs
        ranks, group = mesh.size(), mesh.get_group()
        with torch.no_grad():
            arriving = collectives.all_to_all_single(counts, None, None, group)
            arriving = collectives.wait_tensor(arriving).view(ranks, -1)
            self.there = counts.view(ranks, -1).sum(1).tolist()
            self.here = arriving.sum(1).tolist()
        rows = collectives.all_to_all_single_autograd(rows, self.here, self.there, group)
        which = torch.arange(arriving.numel(), device=rows.device) % arriving.shape[1]
        which = which.repeat_interleave(arriving.flatten(), output_size=sum(self.here))
        self.order = which.argsort(stable=True)
        return rows[self.order], arriving.sum(0)

    def _back(self, module: nn.Module, rows: Tensor, mesh: DeviceMesh) -> Tensor:
        rows = torch.empty_like(rows).index_copy(0, self.order, rows)
        return collectives.all_to_all_single_autograd(rows, self.there, self.here, mesh.get_group())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._send, self._back)  # type: ignore[arg-type]


class Routed(nn.Module):
    """The highest scored experts of each token, and one that all tokens have."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.router, self.experts = linear(shape.dim, shape.experts), Experts(shape)
        self.shared = FeedForward(shape.dim, shape.expert_hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape, flat = self.shape, x.flatten(0, -2)
        scores, chosen = self.router(flat).sigmoid().topk(shape.chosen)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), shape.experts).sum(0)
        rows = self.experts(flat[order // shape.chosen], counts)
        back = rows.new_zeros(chosen.numel(), shape.dim)
        back[order] = rows
        back = back.view(*scores.shape, shape.dim)
        made = (back * scores.unsqueeze(-1)).sum(1).view(x.shape)
        return made + self.shared(x)


class Block(nn.Module):
    def __init__(self, shape: ExpertShape, dense: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(shape.dim), Norm(shape.dim)
        self.attention = Attention(shape)
        self.ffn: nn.Module = FeedForward(shape.dim, shape.hidden) if dense else Routed(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        made: Tensor = x + self.ffn(self.ffn_norm(x))
        return made


class Trained(nn.Module):
    """The model and its loss, the mean over all tokens."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        blocks = {str(i): Block(shape, i < shape.dense_layers) for i in range(shape.layers)}
        self.layers, self.norm = nn.ModuleDict(blocks), Norm(shape.dim)
        self.output = linear(shape.dim, shape.vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Args:
        tokens, labels: i64[batch, length].
        """
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def model(shape: ExpertShape) -> nn.Module:
    """It, on meta."""
    with torch.device("meta"):
        return Trained(shape)


def expert_parallel(trained: Any, mesh: DeviceMesh) -> None:
    """Experts over the ranks of "ep"."""
    for layer in trained.layers.values():
        if isinstance(layer.ffn, Routed):
            parallelize_module(layer.ffn, mesh["ep"], {"experts": ToRanks()})


def cut_inside(param: nn.Parameter) -> Shard | None:
    """Experts are cut along their second dimension: along the first most rows would be padding."""
    return Shard(1) if param.dim() == 3 else None
