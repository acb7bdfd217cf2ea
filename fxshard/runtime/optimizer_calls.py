"""What torch's optimizers call with sharded parameters, for each of them in each step.

Its gradient and its shape are asked for, and it is written where all that is given lies on its
mesh: none of that needs the look through arguments that `gathering` takes at other functions. What
DTensor has no rule for is done on this rank's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard._torch import dtensors, trees
from fxshard.errors import StepError
from fxshard.runtime.copies import GATHERS, is_copy, name_of, named, tensors_in

POINTWISE = (
    *("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "sqrt_", "copy_", "zero_"),
    *("neg_", "abs_", "reciprocal_", "sign_"),
)
# What optimizers ask each parameter for in each step: its gradient, and nothing of its values.
ASKED: frozenset[Any] = frozenset(
    {
        *(torch.is_complex, torch.is_floating_point, Tensor.is_complex, Tensor.is_floating_point),
        *(Tensor.dim, Tensor.size, Tensor.numel, torch.numel, Tensor.element_size),
        *(Tensor.shape.__get__, Tensor.device.__get__, Tensor.layout.__get__),  # type: ignore[attr-defined]
        *(Tensor.requires_grad.__get__, Tensor.is_leaf.__get__, Tensor.is_sparse.__get__),  # type: ignore[attr-defined]
        Tensor.grad.__get__,  # type: ignore[union-attr]
    }
)
# What optimizers write with. (DTensor has no _foreach_copy_.)
WRITES: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name) for name in POINTWISE),
        *(getattr(torch, f"_foreach_{name}") for name in POINTWISE if name != "copy_"),
    }
)
NUMBERS = frozenset({bool, int, float, type(None)})


def on_one_mesh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for numbers, and tensors on the mesh of what is written, which is no copy.

    For steps of optimizers, which write each parameter several times: `gathering` would find
    the same, in three times as long.
    """
    mesh = None
    for given in (*args, *kwargs.values()):
        for each in given if type(given) in (list, tuple) else (given,):
            kind = type(each)
            if kind is DTensor or hasattr(kind, GATHERS):
                if mesh is None:
                    mesh = each.device_mesh
                elif each.device_mesh is not mesh:
                    return False
            elif kind not in NUMBERS:
                return False
    into = args[0]
    return not (any(map(is_copy, into)) if type(into) in (list, tuple) else is_copy(into))


def on_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of lists with this rank's rows of their tensors, which lie alike.

    Raises:
        StepError: a tensor of a list is not sharded as that of the first list.
    """
    _require_alike(name_of(func), args)
    of = {id(t): t for t in tensors_in(args) if isinstance(t, DTensor)}
    local = {key: dtensors.local_tensor(t) for key, t in of.items()}
    found = func(*trees.exchanged(args, local), **kwargs)
    torch.autograd.graph.increment_version(list(of.values()))
    return None if found is None else args[0]


def _require_alike(name: str, args: tuple[Any, ...]) -> None:
    """Raise StepError unless the tensors of all lists are sharded as those of the first one.

    Where they are not, DTensor makes others that are, and a fused step writes states: into those.
    """
    lists = [each for each in args if type(each) is list and tensors_in(each)]
    for param, *others in zip(*lists, strict=True):
        lying = [param, *(t for t in others if isinstance(t, DTensor) or t.dim())]
        where = {(t.device_mesh, t.placements) if isinstance(t, DTensor) else None for t in lying}
        if len(where) > 1:
            raise StepError(
                f"{name} of {named(param)}: its gradient, or a state of the optimizer, is not "
                f"sharded as it is. Make them like it: torch.zeros_like(param)."
            )
