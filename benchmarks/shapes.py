"""Published shapes of Llama models, on the meta device with weights that were never made."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a Llama.

    Attributes:
        name: for tables.
        layers, hidden, intermediate, heads, kv_heads, vocabulary: as in its config.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 128_256

    def model(self) -> nn.Module:
        """It, on meta."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            use_cache=False,
            attn_implementation="sdpa",
        )
        with torch.device("meta"):
            return LlamaForCausalLM(config)

    @property
    def layer_parameters(self) -> int:
        """Of one layer: four projections of attention, three of the MLP, two norms."""
        kv = self.hidden * self.kv_heads // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Of all layers, the embedding, the head and the last norm."""
        ends = 2 * self.vocabulary * self.hidden + self.hidden
        return self.layers * self.layer_parameters + ends


def call(batch: int, sequence: int) -> dict[str, Any]:
    """Keyword arguments of a step: tokens and labels, i64[batch, sequence] on meta."""
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens.clone()}


LLAMA3_8B = Shape("Llama 3 8B", 32, 4096, 14_336, 32, 8)
LLAMA3_70B = Shape("Llama 3 70B", 80, 8192, 28_672, 64, 8)
LLAMA3_405B = Shape("Llama 3 405B", 126, 16_384, 53_248, 128, 8)
LLAMA2_7B = Shape("Llama 2 7B", 32, 4096, 11_008, 32, 32, 32_000)
LLAMA2_70B = Shape("Llama 2 70B", 80, 8192, 28_672, 64, 8, 32_000)
