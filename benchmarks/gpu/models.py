"""The models that are measured, written out here: nothing but torch is needed to build them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Rotary(nn.Module):
    """Rotary embedding: cosines and sines f32 [seq, dim] as buffers, filled by reset_parameters."""

    def __init__(self, seq: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(seq, dim), persistent=False)
        self.register_buffer("sin", torch.empty(seq, dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill both, on whatever device they are."""
        seq, dim = self.cos.shape
        half = torch.arange(0, dim, 2, device=self.cos.device, dtype=torch.float32)
        where = torch.arange(seq, device=self.cos.device, dtype=torch.float32)
        angles = torch.outer(where, 500_000.0 ** (-half / dim)).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos.to(like.dtype), self.sin.to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each position of x [batch, heads, seq, dim] by its angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    """RMSNorm, grouped attention, RMSNorm, SwiGLU: [batch, seq, dim] -> the same."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.norm1 = nn.RMSNorm(dim, eps=1e-5)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.RMSNorm(dim, eps=1e-5)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        normed = self.norm1(x)
        q = self.q(normed).view(batch, seq, self.heads, self.width).transpose(1, 2)
        k = self.k(normed).view(batch, seq, self.kv_heads, self.width).transpose(1, 2)
        v = self.v(normed).view(batch, seq, self.kv_heads, self.width).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(y.transpose(1, 2).reshape(batch, seq, dim))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Causal language model of Llama's shape with its loss: int64 tokens [batch, seq] -> scalar."""

    def __init__(
        self,
        *,
        vocab: int,
        dim: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        depth: int,
        seq: int,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rotary = Rotary(seq, dim // heads)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.rotary(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return next_token_loss(self.head(self.norm(x)), tokens)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy in f32 of logits [batch, seq, vocab] against the tokens that follow."""
    followed = logits[:, :-1].float()
    return F.cross_entropy(followed.flatten(0, 1), tokens[:, 1:].flatten())


class GptBlock(nn.Module):
    """LayerNorm, attention with dropout, LayerNorm, GELU: [batch, seq, dim] -> the same."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.width, self.rate = heads, dim // heads, dropout
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, self.width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(batch, seq, dim)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Causal language model of GPT-2's shape with its loss: int64 tokens [batch, seq] -> scalar."""

    def __init__(
        self, *, vocab: int, dim: int, heads: int, depth: int, seq: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(seq, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(GptBlock(dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(where))
        for layer in self.layers:
            x = layer(x)
        return next_token_loss(self.head(self.norm(x)), tokens)


class Bottleneck(nn.Module):
    """Three convolutions with batch norm around a residual: [batch, channels, h, w] -> the same."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(x + self.norm3(self.conv3(y)))


class ConvNet(nn.Module):
    """Image classifier with its loss: f32 [batch, 3, side, side], int64 [batch] -> scalar."""

    def __init__(self, *, channels: int, inner: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 8, stride=8, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.layers = nn.ModuleList(Bottleneck(channels, inner) for _ in range(depth))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


Batch = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and how it is trained.

    Attributes:
        model: makes it, on the device that is the default.
        batch: makes the arguments of its forward on a device.
        precision: of ``mixed_precision=``.
        checkpoint: of ``checkpoint=``.
        attention: "flash" pins FlashAttention; "default" leaves the choice to torch.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.device], Batch]
    precision: MixedPrecisionPolicy | None = BF16
    checkpoint: str | None = None
    attention: str = "flash"

    def options(self) -> dict[str, Any]:
        """Options of `fxshard.plan` and `fxshard.compile` alike."""
        return {"mixed_precision": self.precision, "checkpoint": self.checkpoint}


def tokens(batch: int, seq: int, vocab: int) -> Callable[[torch.device], Batch]:
    """Random int64 [batch, seq]."""

    def make(device: torch.device) -> Batch:
        return (torch.randint(0, vocab, (batch, seq), device=device),)

    return make


def images(batch: int, side: int, classes: int) -> Callable[[torch.device], Batch]:
    """Random f32 [batch, 3, side, side] and int64 [batch]."""

    def make(device: torch.device) -> Batch:
        pixels = torch.randn(batch, 3, side, side, device=device)
        return pixels, torch.randint(0, classes, (batch,), device=device)

    return make


VOCAB = 128_256  # of Llama 3


def llama(name: str, seq: int) -> Callable[[], nn.Module]:
    """Llama 3's published shapes."""
    shapes: dict[str, dict[str, Any]] = {
        "1b": {"dim": 2048, "heads": 32, "hidden": 8192, "depth": 16, "tied": True},
        "3b": {"dim": 3072, "heads": 24, "hidden": 8192, "depth": 28, "tied": True},
        "8b": {"dim": 4096, "heads": 32, "hidden": 14_336, "depth": 32, "tied": False},
    }
    return lambda: Llama(vocab=VOCAB, kv_heads=8, seq=seq, **shapes[name])


def tiny_llama() -> nn.Module:
    """For a CPU."""
    return Llama(
        vocab=512, dim=64, heads=4, kv_heads=2, hidden=160, depth=3, seq=64, tied=False
    )  # fmt: skip


ON_GPU: dict[str, Recipe] = {
    "gpt-0.1b": Recipe(
        lambda: Gpt(vocab=50_257, dim=768, heads=12, depth=12, seq=1024, dropout=0.1),
        tokens(8, 1024, 50_257),
    ),
    "convnet-0.1b": Recipe(
        lambda: ConvNet(channels=1024, inner=768, depth=16, classes=1000),
        images(64, 224, 1000),
        precision=None,  # torch's batch norm on CUDA takes no bf16 weights beside fp32 statistics
    ),
    "llama-1b": Recipe(llama("1b", 4096), tokens(2, 4096, VOCAB)),
    "llama-1b, torch's attention": Recipe(
        llama("1b", 4096), tokens(2, 4096, VOCAB), attention="default"
    ),
    "llama-3b": Recipe(llama("3b", 4096), tokens(2, 4096, VOCAB), checkpoint="selective"),
    "llama-8b": Recipe(llama("8b", 8192), tokens(1, 8192, VOCAB), checkpoint="full"),
}

ON_CPU: dict[str, Recipe] = {  # fp32: what kernels take below it, only oneDNN knows
    "gpt-tiny": Recipe(
        lambda: Gpt(vocab=301, dim=48, heads=4, depth=2, seq=48, dropout=0.1),
        tokens(2, 48, 301),
        precision=None,
        attention="default",
    ),
    "llama-tiny": Recipe(
        tiny_llama, tokens(2, 64, 512), precision=None, checkpoint="full", attention="default"
    ),
    "convnet-tiny": Recipe(
        lambda: ConvNet(channels=32, inner=24, depth=2, classes=10),
        images(4, 32, 10),
        precision=None,
        attention="default",
    ),
}
