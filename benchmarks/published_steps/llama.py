"""Llama as torchtitan's jobs of 2024 and 2025 ran it, with torch's own `fully_shard`."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. `dim` is shared by `heads` queries and, for keys and values, `kv_heads`."""

    vocabulary: int
    dim: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336


LLAMA_7B = Shape(32_000, kv_heads=32, hidden=11_008)
LLAMA3_8B = Shape(128_256)


class Norm(nn.Module):
    """RMSNorm operator by operator, as torch itself computed it in eager until 2.8."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embeddings by complex products. x: (batch, length, heads, size)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    angles = angles[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.dim // shape.heads
        self.groups = shape.heads // shape.kv_heads
        wide, narrow = shape.dim, shape.kv_heads * self.size
        self.wq, self.wo = nn.Linear(wide, wide, bias=False), nn.Linear(wide, wide, bias=False)
        self.wk, self.wv = nn.Linear(wide, narrow, bias=False), nn.Linear(wide, narrow, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """x: (batch, length, dim), or (batch * length, dim); here may be a part of the heads."""
        length = angles.shape[0]
        q, k, v = (f(x) for f in (self.wq, self.wk, self.wv))
        batch = q.numel() // q.shape[-1] // length
        q, k, v = (each.view(batch, length, -1, self.size) for each in (q, k, v))
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (self._repeated(each) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).contiguous()
        return self.wo(out.view(*x.shape[:-1], -1))  # type: ignore[no-any-return]

    def _repeated(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return x
        batch, length, heads, size = x.shape
        wide = x.unsqueeze(3).expand(batch, length, heads, self.groups, size)
        return wide.reshape(batch, length, heads * self.groups, size)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.dim, shape.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm, self.ffn_norm = Norm(shape.dim), Norm(shape.dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), angles)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Llama(nn.Module):
    angles: Tensor

    def __init__(self, shape: Shape, length: int, *, fp32_logits: bool, folded: bool) -> None:
        """Args:
        fp32_logits: they are returned so.
        folded: batch and length are one dimension between embedding and head.
        """
        super().__init__()
        self.fp32_logits, self.folded = fp32_logits, folded
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.dim)
        size = shape.dim // shape.heads
        self.register_buffer("angles", torch.zeros(length, size // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.layers)})
        self.norm = Norm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        if self.folded:
            h = h.view(-1, h.shape[-1])
        for layer in self.layers.values():
            h = layer(h, self.angles)
        h = self.norm(h)
        if self.folded:
            h = h.view(tokens.shape[0], -1, h.shape[-1])
        logits: Tensor = self.output(h)
        return logits.float() if self.fp32_logits else logits
