"""The full tensors of a model, module by module: as given, filled from meta, or rank 0's.

Sharding copies its rows of one tensor and drops the tensor before it asks for the next. So no rank
holds more of a meta model than its shards, its buffers and one module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard._torch import autograd, modes
from fxshard._torch.dtensors import plain
from fxshard.capture.modules import join, own_tensors, put_back
from fxshard.errors import UnitError
from fxshard.runtime.world.c10d import C10dWorld

log: logging.Logger = logging.getLogger("fxshard")

InitFn = Callable[[nn.Module], Any]


def leave_empty(module: nn.Module) -> None:
    """Stands for a `param_init_fn` where what is on the meta device stays there, as in FSDP2."""


def full_tensors(
    model: nn.Module,
    device: torch.device,
    param_init_fn: InitFn | None,
    sync: C10dWorld | None = None,
    without: Iterable[Tensor] = (),
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter and buffer of `model` once, with its data: ``(as it is held, full)``.

    Both are the same tensor if it has data. The order is that of ``named_modules``: a module's own
    parameters and then its own buffers; tied ones where they come first. A module with meta tensors
    is filled by one call of `param_init_fn`, or of its ``reset_parameters``; tensors with data keep
    it. The model itself is not changed. Equal seeds give equal values, and those of plain
    construction if that initialises in the same order.
    (torch/distributed/fsdp/_init_utils.py, ``_materialize_meta_module``)

    Args:
        device: where meta tensors get their data.
        sync: broadcast the data of its rank 0 to all its ranks, tensor by tensor; the other ranks
            initialise nothing, and their data is ignored.
        without: parameters that are left alone.

    Raises:
        UnitError: a module was not filled as it should be (see also `check_fillable`).
    """
    seen = set(map(id, without))
    receives = sync is not None and not has_the_data(sync)
    room = _room(model, device, seen) if receives else None
    for path, module in model.named_modules():
        own = _new_tensors(module, seen)
        if sync and room is not None:
            yield from _received(own, room, sync)
        else:
            yield from _held(path, module, own, device, param_init_fn, sync)


def has_the_data(world: C10dWorld) -> bool:
    """True on the rank whose data all others get: the first of the mesh. A fake rank is alone."""
    return all(world.peers[name].rank == 0 or world.peers[name].fake for name in _dims(world))


def _dims(world: C10dWorld) -> list[str]:
    """The names of the groups that together reach every rank of the mesh."""
    return [name for name in ("shard", "replicate") if name in world.groups]


def check_fillable(
    model: nn.Module, param_init_fn: InitFn | None, without: Iterable[Tensor] = ()
) -> None:
    """Raise UnitError if a module has meta tensors and nothing is there that would fill them."""
    seen = set(map(id, without))
    for path, module in model.named_modules():
        empty = {name: t for name, t in _new_tensors(module, seen).items() if t.is_meta}
        if not empty or param_init_fn or callable(getattr(module, "reset_parameters", None)):
            continue
        where = f"module {path or '(root)'!r} ({type(module).__name__})"
        params = [name for name in empty if name in module._parameters]
        if params:
            raise UnitError(
                f"parameter {join(path, params[0])!r} is on the meta device, and {where} has no "
                f"reset_parameters to fill it. Pass param_init_fn to fxshard.compile: it is called "
                f"with each module that has something on the meta device."
            )
        raise UnitError(
            f"buffer {join(path, next(iter(empty)))!r} is on the meta device, and {where} has no "
            f"reset_parameters to fill it. Pass param_init_fn to fxshard.compile, or register the "
            f"buffer on a real device."
        )


def owners_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """By id of each parameter and buffer: every (module, name) that holds it."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, tensor in own_tensors(module).items():
            owners.setdefault(id(tensor), []).append((module, name))
    return owners


def _held(
    path: str,
    module: nn.Module,
    own: dict[str, Tensor],
    device: torch.device,
    param_init_fn: InitFn | None,
    sync: C10dWorld | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a module on a rank that has the data, or makes it."""
    made: dict[str, Tensor] = {}
    if param_init_fn is leave_empty:
        own = {name: tensor for name, tensor in own.items() if not tensor.is_meta}
    if any(tensor.is_meta for tensor in own.values()):
        made = _filled(path, module, own, device, param_init_fn)
    for name, tensor in own.items():
        full = made.pop(name, tensor)
        if sync:
            # A copy only where it is on another device, such as a CPU buffer of a CUDA model.
            sent = full if full.device.type == device.type else full.to(device)
            _broadcast(plain(sent).detach().contiguous(), sync)
            del sent
        yield tensor, full


def _room(model: nn.Module, device: torch.device, without: set[int]) -> Tensor:
    """u8[bytes of the largest parameter]: where all are received, one after the other.

    With a tensor for each, several would be alive at a time: gloo's threads drop them late.
    """
    sizes = [p.numel() * p.element_size() for p in model.parameters() if id(p) not in without]
    return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)


def _received(
    own: dict[str, Tensor], room: Tensor, sync: C10dWorld
) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a module on a rank that receives rank 0's; the next one overwrites `room`."""
    for tensor in own.values():
        if isinstance(tensor, nn.Parameter):
            nbytes = tensor.numel() * tensor.element_size()
            full = room[:nbytes].view(tensor.dtype).view(tensor.shape)
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=room.device)
        _broadcast(full, sync)
        yield tensor, full


def _broadcast(full: Tensor, world: C10dWorld) -> None:
    """Write the first rank's data into a contiguous tensor, dimension by dimension of the mesh.

    It is sent as bytes: gloo and NCCL lack some of the dtypes.
    """
    if full.numel():
        sent = full.reshape(-1).view(torch.uint8)
        for name in _dims(world):
            with world.explained(name):
                dist.broadcast(sent, group=world.groups[name], group_src=0)


def _filled(
    path: str,
    module: nn.Module,
    own: dict[str, Tensor],
    device: torch.device,
    param_init_fn: InitFn | None,
) -> dict[str, Tensor]:
    """The meta tensors among `own` with data, by name; `module` is restored.

    The initialisation sees all of the module's own tensors on a real device: copies of those with
    data, and empty ones for the rest, also for those that another module has filled. If a
    `param_init_fn` leaves some empty, it is called once more with the module on the meta device, as
    FSDP1 calls it: it may test for that, and make the tensors itself.
    (torch/distributed/fsdp/_init_utils.py, ``_materialize_with_param_init_fn``)
    """
    filler = "param_init_fn" if param_init_fn else f"{type(module).__name__}.reset_parameters"
    wanted = {name: tensor for name, tensor in own.items() if tensor.is_meta}
    copies = {
        id(tensor): _stand_in(tensor, device)
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    }
    found = _called(module, param_init_fn, filler, path, copies)
    made = {
        name: _checked(join(path, name), filler, tensor, found.get(name), device)
        for name, tensor in wanted.items()
    }
    left = [name for name, full in made.items() if _is_empty(full, copies.values())]
    if left and param_init_fn:
        real = {key: copy for key, copy in copies.items() if key not in map(id, wanted.values())}
        found = _called(module, param_init_fn, filler, path, real)
        again = [name for name in left if found.get(name) is not wanted[name]]
        for name in again:
            made[name] = _checked(join(path, name), filler, own[name], found.get(name), device)
        left = [name for name in left if _is_empty(made[name], copies.values())]
    if left and not param_init_fn:
        kind = "buffer" if left[0] in module._buffers else "parameter"
        raise UnitError(
            f"{kind} {join(path, left[0])!r} is on the meta device, and {filler} does not fill it. "
            f"Pass param_init_fn to fxshard.compile, or build the {kind} on a real device."
        )
    if left:
        log.warning(
            "fxshard: param_init_fn has left %s without values (NaN): load a state dict before the "
            "first call.",
            ", ".join(repr(join(path, name)) for name in left),
        )
    return made


def _called(
    module: nn.Module,
    param_init_fn: InitFn | None,
    filler: str,
    path: str,
    copies: dict[int, Tensor],
) -> dict[str, Tensor]:
    """The tensors of `module` after an initialisation that has seen `copies` (by id of tensor)."""
    with put_back(module), torch.no_grad(), NanWhereEmpty():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in both:
            slots.update({k: copies.get(id(t), t) for k, t in slots.items() if t is not None})
        try:
            if param_init_fn:
                param_init_fn(module)
            else:
                module.reset_parameters()  # type: ignore[operator]
        except Exception as error:
            error.add_note(f"fxshard.compile called {filler} to fill module {path or '(root)'!r}.")
            raise
        return own_tensors(module)


_EMPTY = (
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided),
    *(torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided),
)


class NanWhereEmpty(modes.TorchDispatchMode):
    """Fills new empty tensors with NaN, so that what nothing writes afterwards can be found."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return _with_nan(made) if func.overloadpacket in _EMPTY else made


def _with_nan(tensor: Tensor) -> Tensor:
    if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta:
        tensor.fill_(math.nan)  # of a subclass, the result may be another tensor
    return tensor


def _is_empty(full: Tensor, copies: Iterable[Tensor]) -> bool:
    """True if nothing has written into it: its ends are NaN; of integers, a copy never written."""
    if full.is_floating_point() or full.is_complex():
        return holds_nan(full)
    return full.numel() > 0 and autograd.version(full) == 0 and any(full is copy for copy in copies)


def holds_nan(tensor: Tensor) -> bool:
    """True if an end of it is NaN, as where nothing was written since it was made (see above)."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    flat = plain(tensor).detach().reshape(-1)
    return any(value != value for value in (flat[0].item(), flat[-1].item()))


def _checked(
    fqn: str, filler: str, tensor: Tensor, full: Tensor | None, device: torch.device
) -> Tensor:
    """`full`, if its device, shape and dtype are those that the meta tensor needs."""
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    if full is None:
        raise UnitError(f"{filler} removed {kind} {fqn!r}. It must fill it, best in place.")
    if full.device.type != device.type:
        raise UnitError(
            f"{filler} left {kind} {fqn!r} on {full.device}, but it is needed on "
            f"{device.type!r}. Fill it in place: it was empty and on {device.type!r} when "
            f"{filler} was called."
        )
    if (full.shape, full.dtype) != (tensor.shape, tensor.dtype):
        raise UnitError(
            f"{filler} made {kind} {fqn!r} {list(full.shape)} {full.dtype}; in the meta model it "
            f"is {list(tensor.shape)} {tensor.dtype}. Fill it in place, or build the model so."
        )
    return full


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor with storage of its own that an initialisation may write into."""
    copy = tensor.detach().clone()
    if tensor.is_meta:
        copy = _with_nan(torch.empty_like(tensor, device=device))
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _new_tensors(module: nn.Module, seen: set[int]) -> dict[str, Tensor]:
    """The module's own tensors that are not in `seen`, and now are."""
    new: dict[str, Tensor] = {}
    for name, tensor in own_tensors(module).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            new[name] = tensor
    return new
