"""The named policies of activation checkpoints, and what each saves.

Options, passes, searches and reports read this table. (`fxshard.cost.activations` chooses by bytes,
without a name.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

aten: Any = torch.ops.aten

# Operators whose work grows faster than their result.
HEAVY = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.convolution.default, aten._grouped_mm.default),
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.all_to_all_single.default,  # of experts: rows that others wait for
)


@dataclasses.dataclass(frozen=True)
class NamedPolicy:
    """What a checkpoint saves under one name.

    Attributes:
        saves: operators whose results are saved, besides the inputs of what is checkpointed.
        what_if: how a report calls it among what could be changed.
    """

    saves: tuple[Any, ...]
    what_if: str


# From what saves least to what saves most, as searches try them.
CHECKPOINTS = {
    "full": NamedPolicy((), "checkpoint each unit"),
    "selective": NamedPolicy(HEAVY, "checkpoint selectively"),
}
