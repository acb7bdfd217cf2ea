"""CPU seconds of the first call, of those of a second and a third size, and of later ones.

    python -m benchmarks.second_shape [model ...]

A training forward of two ranks in this process; the models are small, so that what is timed is how
the programs come to be. Each number is the least of three runs, all in one process that has run the
model before: imports are not in it.
"""

from __future__ import annotations

import datetime
import logging
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn

import fxshard

SIZES = (8, 9, 11, 14, 20)
RUNS = 3
Call = dict[str, Tensor]


def tokens(size: int) -> Call:
    """Two rows of `size` tokens, and labels: i64[2, size]."""
    ids = torch.arange(2 * size).view(2, size) % 128
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> nn.Module:
    """Eight layers."""
    config = transformers.GPT2Config(
        n_layer=8, n_embd=32, n_head=2, vocab_size=128, n_positions=128, use_cache=False
    )
    config.bos_token_id = config.eos_token_id = None
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Eight layers."""
    config = transformers.LlamaConfig(
        num_hidden_layers=8,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=128,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def mlp() -> nn.Module:
    """Five layers."""
    inner = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(16, 4))


def conv() -> nn.Module:
    """Two convolutions with batch norms, and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Call]]] = {
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "mlp": (mlp, lambda size: {"input": torch.ones(2 * size, 16)}),
    "conv": (conv, lambda size: {"input": torch.ones(2, 3, size, size)}),
}


def seconds(name: str) -> list[float]:
    """CPU seconds of the calls of `SIZES`, one after the other."""
    build, call = MODELS[name]
    torch.manual_seed(0)
    model: Any = fxshard.compile(build(), world_size=2)
    found = []
    for size in SIZES:
        batch = call(size)
        start = time.process_time()
        model(**batch)
        found.append(time.process_time() - start)
    return found


def main() -> None:
    """Print the table."""
    logging.getLogger("fxshard").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = []
    for name in sys.argv[1:] or MODELS:
        seconds(name)
        runs = [seconds(name) for _ in range(RUNS)]
        first, second, third, *later = map(min, zip(*runs, strict=True))
        ratios = [f"{each / first:.1f}x" for each in (second, third)]
        rows.append([name, f"{first:.2f}", *ratios, f"{max(later):.3f}"])
    today = datetime.date.today().isoformat()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {today}\n")
    headers = ["model", "first, CPU s", "second shape", "third", "later, CPU s"]
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
