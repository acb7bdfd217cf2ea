"""The models that are compared, with their settings, and one step of training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

WORLD = 8
make_optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)


class Block(nn.Module):
    """Pre-norm transformer block, (batch, seq, dim) -> the same."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        shape = (batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Dense(nn.Module):
    """Causal language model with its loss: int64 tokens (batch, seq) -> scalar."""

    def __init__(
        self, vocab: int = 64, dim: int = 32, heads: int = 4, depth: int = 3, again: bool = False
    ) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class LossOutside(Dense):
    """Dense without its loss: int64 tokens -> logits."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LlamaLoss(nn.Module):
    """HF Llama of four heads; int64 tokens (batch, seq) -> its loss, the only output."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
        self.lm = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.lm(input_ids=tokens, labels=tokens).loss
        return loss


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its settings, the same for both sides."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    units: str
    policy: MixedPrecisionPolicy | None = None
    shape: tuple[int, int] = (2, 16)

    def model(self) -> tuple[nn.Module, Tensor]:
        """The model and its batch, int64 tokens."""
        torch.manual_seed(0)
        return self.build(), torch.randint(64, self.shape)

    def options(self) -> dict[str, Any]:
        """fxshard's: each parameter has a buffer of its own."""
        low = {"mixed_precision": self.policy} if self.policy else {}
        return {"world_size": WORLD, "units": [self.units], "pack_bytes": 0, **low}


CASES = {
    case.name: case
    for case in (
        Case("dense", "dense transformer, fp32", Dense, "layers.*"),
        Case("llama", "Hugging Face Llama, fp32", LlamaLoss, "lm.model.layers.*"),
        Case(
            "checkpointed",
            "dense transformer, fp32, every layer checkpointed",
            functools.partial(Dense, again=True),
            "layers.*",
        ),
        Case(
            "bf16",
            "dense transformer, computed in bf16, gradients reduced in fp32",
            Dense,
            "layers.*",
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ),
    )
}
# For the peaks and the estimators, which leave activations out: a model with few of them.
WIDE = Case(
    "wide",
    "dense transformer, fp32, 512 wide, 16 tokens",
    functools.partial(Dense, vocab=1024, dim=512, heads=8),
    "layers.*",
    shape=(1, 16),
)


def training(model: nn.Module, tokens: Tensor) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """AdamW, and a step of it on one batch: forward, backward, optimizer, zero_grad."""
    optimizer = make_optimizer(model.parameters())

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step.tokens = tokens  # type: ignore[attr-defined]
    return optimizer, step
