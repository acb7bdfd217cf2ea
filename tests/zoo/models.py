"""The zoo's hand-written modules: plain PyTorch, nothing that knows of FSDP."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _dropout(p: float) -> nn.Module:
    return nn.Dropout(p) if p else nn.Identity()


class Attention(nn.Module):
    """Causal self-attention, (batch, seq, dim) -> the same.

    No bias on q, k, v: a key bias has gradient zero, AdamW turns its rounding noise into steps of
    size lr, and no two implementations would agree.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (
            self.qkv(x).view(batch, seq, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.proj(y.transpose(1, 2).reshape(batch, seq, dim)))


class Mlp(nn.Module):
    """(..., dim) -> (..., dim) by way of 4 * dim."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    """Pre-norm transformer block, (batch, seq, dim) -> the same."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Causal language model: int64 tokens (batch, seq) -> logits (batch, seq, vocab)."""

    def __init__(
        self,
        vocab: int = 64,
        dim: int = 32,
        heads: int = 4,
        depth: int = 3,
        max_seq: int = 16,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(0.02 * torch.randn(max_seq, dim))
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Block13(nn.Module):
    """(batch, 13) -> (batch, 13). 13 rows divide by no world size, `gain` has fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 13)
        self.gain = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(13))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(x)) + self.bias


class Mlp13(nn.Module):
    """(batch, 5) -> logits (batch, 3)."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 13)
        self.blocks = nn.ModuleList(Block13() for _ in range(depth))
        self.head = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvBlock(nn.Module):
    """Residual Conv2d + BatchNorm2d + ReLU, (batch, channels, h, w) -> the same; has buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Images (batch, 3, h, w) -> logits (batch, 10)."""

    def __init__(self, channels: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def llama(depth: int = 3, **overrides: Any) -> nn.Module:
    """A tiny Hugging Face LlamaForCausalLM with grouped-query attention, in training mode, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM  # 2 s, so only for those who build it

    config: dict[str, Any] = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(LlamaConfig(**(config | overrides)))
