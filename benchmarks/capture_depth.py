"""CPU seconds of a capture by the depth of the model: all blocks traced, and most of them stamped.

    python -m benchmarks.capture_depth [layers ...]

A Llama with the widths of Llama-3-405B, on meta; nothing runs.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time

import torch
from tabulate import tabulate
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fxshard.capture import trace
from fxshard.ir.splitting import find_units

LAYERS = (8, 16, 32, 126)
SEQUENCE = 8192


def model(layers: int) -> nn.Module:
    """The shape of Llama-3-405B with so many layers, bf16, on meta."""
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def seconds(layers: int, *, flat: bool) -> tuple[float, int]:
    """CPU seconds of one capture, and nodes of the program."""
    os.environ["FXSHARD_FLAT_CAPTURE"] = str(int(flat))
    net = model(layers)
    units = find_units(net)
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64, device="meta")
    call = {"input_ids": tokens, "labels": tokens.clone()}
    start = time.process_time()
    program = trace.capture(net, (), call, units=units, world_size=1024, training=True)
    return time.process_time() - start, len(program.graph.nodes)


def main() -> None:
    """Print the table."""
    seconds(4, flat=True)  # what torch imports and builds once
    rows = []
    for layers in map(int, sys.argv[1:] or LAYERS):
        stamped, nodes = seconds(layers, flat=False)
        whole, same = seconds(layers, flat=True)
        assert nodes == same
        rows.append([layers, nodes, f"{whole:.2f}", f"{stamped:.2f}", f"{whole / stamped:.1f}x"])
    today = datetime.date.today().isoformat()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {today}\n")
    headers = ["layers", "nodes", "flat, CPU s", "stamped, CPU s", ""]
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
