"""``load_state_dict`` of a sharded model: hooks by which it takes what it takes of a plain one.

Full values become this rank's rows. What is on the meta device gets its memory when it gets its
values. With ``assign=True`` each parameter is a new one, as in eager PyTorch and FSDP2. It takes
its place in the flat storage of its unit at once, and the tensor of the state becomes an alias of
it: so the state and the model are never both in memory, and share it afterwards, as in eager
PyTorch. Parameters that were tied stay tied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard._torch import dtensors
from fxshard._torch.dtensors import _dtensor, held_part, local_part, plain, sharded_like
from fxshard.capture.swapped import STATE
from fxshard.errors import StepError
from fxshard.runtime import state
from fxshard.runtime.replaced import PLACE, gather_as
from fxshard.runtime.sharding import Slot


def take_full_values(modules: Iterable[nn.Module]) -> None:
    """Let ``load_state_dict`` of each module take what the module docstring says.

    Also let its ``state_dict`` give DTensors that `torch.save` takes (see `dtensors.stand_in`).
    """
    for module in modules:
        module.register_load_state_dict_pre_hook(_take_rows)
        module.register_state_dict_post_hook(_make_savable)


def keep_ties(model: nn.Module) -> None:
    """Let ``load_state_dict(assign=True)`` of a compiled model keep tied parameters tied.

    Units that `unshard` has unsharded are sharded again first: they take the values.
    """
    model.register_load_state_dict_pre_hook(_reshard_units)
    model.register_load_state_dict_pre_hook(_refuse_to_untie)
    model.register_load_state_dict_post_hook(_tie_again)


def _assigns(local_metadata: dict[str, Any]) -> bool:
    """True in ``load_state_dict(assign=True)``. (torch/nn/modules/module.py, ``load``)"""
    return bool(local_metadata.get("assign_to_params_buffers", False))


def _take_rows(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Replace each value for a sharded parameter of `module` by what torch can load.

    Tensors of another shape or placement stay, for torch or the next call to complain about.
    """
    for name, param in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(param, DTensor) or not isinstance(value, Tensor):
            continue
        if value.shape != param.shape or value.is_meta:
            continue
        if not isinstance(value, DTensor):
            # A copy: with assign=True it becomes the parameter, and see dtensors.stand_in.
            value = state_dict[prefix + name] = sharded_like(value.detach(), param).clone()
        reference, fqn = getattr(param, PLACE, (None, ""))
        store = reference() if reference is not None else None
        slot = None if store is None else store.slots.get(fqn)
        if slot is None or slot.tensor is not param or value.placements != param.placements:
            continue
        if value.device_mesh != param.device_mesh:
            continue
        if _assigns(metadata) and value.dtype is param.dtype:
            store.allocate(slot)
            state_dict[prefix + name] = _assigned(slot, value)
        elif local_part(param).is_meta and not _assigns(metadata):
            store.allocate(slot)
            state.fill(slot)  # torch copies next


@torch.no_grad()
def _assigned(slot: Slot, value: DTensor) -> nn.Parameter:
    """A new parameter, in all places of the old one, of which `value` is an alias."""
    before: Any = slot.tensor
    state.leave(slot)
    slot.local.copy_(local_part(value))
    if type(value) is DTensor:  # no parameter, and no view of one: those have memory of their own
        dtensors.set_local_tensor(value, slot.as_held(slot.local))
    made: Any = nn.Parameter(state.over_shard(slot), before.requires_grad)
    dtensors.set_local_tensor(made, slot.as_held(slot.local))  # autograd made another view
    gather_as(made, before)
    if made.grad_dtype is not before.grad_dtype:
        made.grad_dtype = before.grad_dtype
    slot.place(made)
    return made


def _make_savable(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor) and value.storage_offset():
            held = held_part(value)
            state_dict[prefix + name] = made = _dtensor(dtensors.stand_in(plain(held)), value)
            dtensors.set_local_tensor(made, held)


# -- ties ------------------------------------------------------------------------------------------


def _reshard_units(model: nn.Module, *_: Any) -> None:
    if STATE in model.__dict__:
        model.__dict__[STATE].reshard_units()


def _refuse_to_untie(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Raise StepError if a state to be assigned has different values for tied parameters."""
    if not _assigns(metadata) or STATE not in model.__dict__:
        return
    for slot in model.__dict__[STATE].slots.values():
        names = [prefix + alias for alias in slot.param.aliases]
        there = [name for name in names if isinstance(state_dict.get(name), Tensor)]
        for name in there[1:]:
            if not _equal(state_dict[there[0]], state_dict[name]):
                raise StepError(
                    f"load_state_dict(assign=True): {there[0]!r} and {name!r} are one parameter of "
                    f"this model, and have different values in the state, which would untie them. "
                    f"Leave one of the two out (strict=False), or do not tie them in the model "
                    f"that you shard."
                )


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    one, other = local_part(one.detach()), local_part(other.detach())
    return one.is_meta or other.is_meta or torch.equal(one, other.to(one.device))


def _tie_again(model: nn.Module, _: Any) -> None:
    """What was assigned under one name of a tied parameter is so under all of them."""
    if STATE in model.__dict__:
        model.__dict__[STATE].tie_assigned()
