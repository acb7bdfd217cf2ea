"""What LoRA and a quantised base save, of Llama 3.2 1B on 8 ranks: planned, nothing is allocated.

    python -m benchmarks.adapters

Needs peft and torchao. Prints the table of docs/coming-from-peft.md.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxshard
from fxshard.integrations.quantized import packed
from fxshard.memory.category import Category

RANKS, BATCH, LENGTH = 8, 1, 1024
SHOWN = (Category.SHARDED_PARAM, Category.SHARDED_GRAD, Category.OPT_STATE)


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def adapted(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        return get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))


def quantised() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model.model, Int8WeightOnlyConfig())
    return model.requires_grad_(False)


CASES = {
    "all trained, bf16": llama,
    "LoRA, r=16, on bf16": lambda: adapted(llama()),
    "LoRA, r=16, on int8": lambda: packed(adapted(quantised())),
}


def main() -> int:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    print("| | " + " | ".join(category.value for category in SHOWN) + " | Peak |")
    for name, make in CASES.items():
        plan = fxshard.plan(
            make(),
            kwargs={"input_ids": ids, "labels": ids},
            world_size=RANKS,
            optimizer=torch.optim.AdamW,
        )
        held = plan.memory.snapshot("", "After Post-Backward")
        cells = [*(held[category] for category in SHOWN), plan.memory.peak_bytes]
        print(f"| {name} | " + " | ".join(f"{cell / 2**20:,.1f}" for cell in cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
