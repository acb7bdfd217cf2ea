"""Tensor parallelism tried on a laptop: four gloo ranks beside plain eager PyTorch in one process.

    python examples/validate_tensor_parallel.py

`fxshard.validate` starts the ranks, which apply `parallelize` to the model and train it. The second
plan leaves a sum out, and its tensors are named. docs/tensor-parallel.md shows what it prints.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import fxshard

TOKENS = 256  # there are


class Model(nn.Module):
    """A Llama of transformers, tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.llama = LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, **sizes, **heads))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.llama(input_ids=tokens, use_cache=False).logits
        return logits


def parallelize(model: Model, mesh: DeviceMesh, down: RowwiseParallel | None = None) -> None:
    block = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": down or RowwiseParallel(),
    }
    plan = {f"model.layers.*.{name}": style for name, style in block.items()}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model.llama, mesh["tp"], plan)


def loss(logits: Tensor) -> Tensor:
    rows = logits.flatten(0, 1)
    return F.cross_entropy(rows, torch.arange(len(rows)) % TOKENS)


def main() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, TOKENS, (2, 16))
    unreduced = RowwiseParallel(output_layouts=Partial())
    for plan in (parallelize, functools.partial(parallelize, down=unreduced)):
        found = fxshard.validate(
            Model(),
            (tokens,),
            mesh={"dp": 2, "tp": 2},
            parallelize=plan,
            loss=loss,
            optimizer=torch.optim.AdamW,
            ranks="processes",
        )
        print(found.summary(), found.numerics.summary(), sep="\n")
        if not found.holds:
            print(found.numerics.table(only_different=True, top=4))


if __name__ == "__main__":  # the ranks import this file
    main()
