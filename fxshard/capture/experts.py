"""Experts beside tensor parallelism: that the ranks which share a batch share out its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxshard._torch.traced_collectives import is_collective
from fxshard.errors import CaptureError
from fxshard.ir import tags
from fxshard.ir.program import Program
from fxshard.ir.tensor_parallel import EXPERTS

aten: Any = torch.ops.aten
_TAKING = (
    *(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default),
    *(aten.index.Tensor, aten.index_select.default),
)
_ALIKE = ("all_reduce", "all_gather_into_tensor", "broadcast")  # with equal results on all ranks


def require_split_tokens(program: Program) -> None:
    """Refuse a model whose ranks of tensor parallelism all send the same tokens to experts.

    Experts would get each token as often, and gradients as many times too large: those of a batch
    are added up, and no rank knows that they are of the same tokens. What is refused is sure: what
    is sent follows from what all these ranks have alike, and no operator on the way takes a part as
    large as a rank's.

    Args:
        program: as it was captured.

    Raises:
        CaptureError: names the module that sends.
    """
    tensor = next((placed for group, placed in program.parallel.items() if group != EXPERTS), None)
    if tensor is None or EXPERTS not in program.parallel:
        return
    ranks = tensor.mesh.size()
    differing: set[fx.Node] = set()
    for node in program.graph.nodes:
        tag = tags.get(node)
        if tag.phase == "backward" or node.op == "output":
            continue
        if node.op == "placeholder":
            param = program.params.get(tag.fqn or "")
            placed = param.placed if param is not None else None
            differs = placed is not None and not all(p.is_replicate() for p in placed.placements)
        elif is_collective(node):
            group, sent = program.group_of(node), node.all_input_nodes[0]
            if group == EXPERTS and "all_to_all" in str(node.target) and sent not in differing:
                raise CaptureError(
                    f"{tag.module or 'the model'}: each of the {ranks} ranks of {tensor.group!r} "
                    f"sends all tokens of its batch to the experts on {EXPERTS!r}. These ranks "
                    f"have one batch, so that its tokens, and their gradients, would count "
                    f"{ranks} times. Share them out before: PrepareModuleInput(..., "
                    f"desired_input_layouts=Shard(1)) of torch.distributed.tensor.parallel, as "
                    f"torchtitan does it, or leave tensor parallelism out."
                )
            alike = group == tensor.group and any(name in str(node.target) for name in _ALIKE)
            differs = not alike
        else:
            differs = any(n in differing for n in node.all_input_nodes) or _is_part(node, ranks)
        if differs:
            differing.add(node)


def _is_part(node: fx.Node, ranks: int) -> bool:
    """True if it takes of a tensor at most a rank's part, along a dimension: maybe this rank's."""
    if node.target not in _TAKING:
        return False
    val, whole = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    first = val[0] if isinstance(val, (list, tuple)) else val
    if not isinstance(first, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    return any(
        part < size and (part - 1) * ranks < size
        for part, size in zip(first.shape, whole.shape, strict=False)
    )
