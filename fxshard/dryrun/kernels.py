"""What CUDA's kernels take for themselves, asked operator by operator."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from fxshard._torch.trees import tree_map_tensors
from fxshard.memory.cuda.kernels import FORMULAS
from fxshard.memory.kernels import NOTHING, Size


@dataclasses.dataclass(frozen=True)
class _TensorNode:
    meta: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class _OperatorNode:
    """An operator that runs, in the place of a node of a graph, which the formulas are given."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


def taken(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Size:
    """Bytes that the kernel takes and gives back; None if that is not known; and what they are."""
    formula: Any = FORMULAS.get(func)
    if formula is None:
        return NOTHING
    args, kwargs = tree_map_tensors(lambda t: _TensorNode({"val": t}), (args, kwargs))
    size: Size = formula(_OperatorNode(func, args, kwargs, {"val": result}))
    return size
