"""Models on meshes of several dimensions: Llama as torchtitan cuts it, with its loss inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.published_steps.llama import Block, Llama, Shape

VOCABULARY = 128_256
SHAPES = {
    "8B": Shape(VOCABULARY),
    "70B": Shape(VOCABULARY, 8192, 80, 64, 8, 28_672),
    "405B": Shape(VOCABULARY, 16_384, 126, 128, 8, 53_248),
}


class Trained(nn.Module):
    """A Llama and its loss, the mean over all tokens."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.llama = Llama(shape, length, fp32_logits=False, folded=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Args:
        tokens, labels: i64[batch, length].
        """
        logits = self.llama(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Stage(nn.Module):
    """Blocks of a Llama that are neither its first nor its last ones: a stage of a pipeline."""

    angles: Tensor

    def __init__(self, shape: Shape, layers: int, length: int) -> None:
        super().__init__()
        size = shape.dim // shape.heads
        self.register_buffer("angles", torch.zeros(length, size // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(layers)})

    def forward(self, h: Tensor) -> Tensor:
        """Args:
        h: [batch, length of a rank, dim].
        """
        for layer in self.layers.values():
            h = layer(h, self.angles)
        return h


def model(shape: Shape, length: int) -> nn.Module:
    """It, on meta."""
    with torch.device("meta"):
        return Trained(shape, length)


def batch(size: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, on meta."""
    tokens = torch.zeros(size, length, dtype=torch.int64, device="meta")
    return tokens, tokens.clone()


def tensor_parallel(trained: Any, mesh: DeviceMesh) -> None:
    """Sequences are cut between layers, logits by classes (with `loss_context`)."""
    tp, llama = mesh["tp"], trained.llama
    outer = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(llama, tp, outer)
    blocks_parallel(llama.layers, tp)


def stage_parallel(stage: Any, mesh: DeviceMesh) -> None:
    """As `tensor_parallel`, of a `Stage`."""
    blocks_parallel(stage.layers, mesh["tp"])


def blocks_parallel(blocks: nn.ModuleDict, tp: DeviceMesh) -> None:
    """Each block on the ranks of `tp`."""
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in blocks.values():
        parallelize_module(block, tp, plan)


def loss_context(trained: nn.Module, mesh: DeviceMesh) -> Any:
    """The loss of logits that are cut by classes."""
    return loss_parallel()


def cp_context(parts: tuple[Tensor, Tensor]) -> Any:
    """Ranks of "cp" have a part each of the sequences, and of the angles of rotary embeddings."""

    @contextlib.contextmanager
    def around(trained: Any, mesh: DeviceMesh) -> Iterator[None]:
        buffers, dims = [*parts, trained.llama.angles], [1, 1, 0]
        loss = loss_parallel() if "tp" in (mesh.mesh_dim_names or ()) else contextlib.nullcontext()
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=dims), loss:
            yield

    return around
