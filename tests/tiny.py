"""The small models, data and arguments of tests with Hugging Face's libraries."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

VOCABULARY = 32
# Of trainers: nothing is reported, drawn or pinned.
QUIET = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}


def llama(layers: int = 1, **config: Any) -> LlamaForCausalLM:
    """Always with the same weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes | config))


def tokens(seed: int, *shape: int) -> Tensor:
    """int64, of `VOCABULARY` without 0, which pads."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def training(folder: str | Path, **options: Any) -> TrainingArguments:
    """Of few steps, each of which is logged."""
    steps = {"per_device_train_batch_size": 1, "learning_rate": 1e-2, "logging_steps": 1}
    return TrainingArguments(str(folder), **{"save_strategy": "no", **steps, **QUIET, **options})
