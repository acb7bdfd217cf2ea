"""The state of a sharded module: norms, unsharded parameters, state dicts, copies.

Everything here reads the placements of a parameter. So it works for any mesh, and for parameters
that are not sharded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from fxshard._torch import autograd, dtensors, optimizers, trees
from fxshard._torch import modules as torch_modules
from fxshard._torch.dtensors import _dtensor, local_part, sharded_like
from fxshard._torch.storages import storage_id
from fxshard.capture import swapped
from fxshard.capture.modules import without_wrappers
from fxshard.errors import CheckpointError, ConfigError, StepError
from fxshard.ir.layout import flat_numels, in_flat_storage
from fxshard.runtime.sharding import Slot
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld

# -- the norm of all gradients ---------------------------------------------------------------------


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale the gradients in place so that the norm of all of them is at most `max_norm`.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsharded model: the norm of the norms of each
    gradient. Low precision gradients are summed in fp32, and the norm has their dtype, as in
    FSDP1 (torch/distributed/fsdp/fully_sharded_data_parallel.py, ``clip_grad_norm_``).

    Returns:
        The total norm, a plain scalar, the same on all ranks of the mesh.
    """
    params = [param for param in parameters if param.grad is not None]
    if not params:
        return torch.tensor(0.0)
    total = _total_norm([param.grad for param in params if param.grad is not None], norm_type)
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for param in params:  # torch scales a list of DTensors of one mesh, or of plain tensors
        mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
        by_mesh.setdefault(mesh, []).append(param)
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _total_norm(grads: Sequence[Tensor], p: float) -> Tensor:
    p = float(p)
    norms: dict[int, Tensor] = {}
    together: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for i, grad in enumerate(grads):
        local = local_part(grad)
        dims = _sharded_dims(grad)
        if isinstance(grad, DTensor) and dims:
            together.setdefault((grad.device_mesh, dims), []).append(i)
            norms[i] = _summand(local, p)
        else:
            norms[i] = torch.linalg.vector_norm(local, p, dtype=_wide(local.dtype))
    for (mesh, dims), members in together.items():  # one all-reduce for all of equal placement
        parts = torch.stack([norms[i] for i in members]).to(mesh.device_type)
        is_nan = parts.isnan()
        if math.isinf(p):  # gloo's maximum loses NaN: it is sent as a flag beside the numbers
            parts = torch.cat([parts.where(~is_nan, 0.0), math.copysign(1, p) * is_nan])
        for dim in dims:
            dist.all_reduce(parts, _reduction(p), group=mesh.get_group(dim))
        if math.isinf(p):
            parts, is_nan = parts.chunk(2)
            parts = parts.where(is_nan == 0, math.nan)
        if math.isfinite(p) and p != 0:
            parts = parts ** (1 / p)
        norms.update(zip(members, parts.unbind(), strict=True))
    device = norms[0].device
    each = torch.stack([norms[i].to(device) for i in range(len(grads))])
    dtype = grads[0].dtype
    for grad in grads:
        dtype = torch.promote_types(dtype, grad.dtype)
    return torch.linalg.vector_norm(each, p).to(dtype)


def _sharded_dims(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of the mesh along which ranks hold different rows."""
    if not isinstance(tensor, DTensor):
        return ()
    dims = map(dtensors.sharded_dim, tensor.placements)
    return tuple(mesh_dim for mesh_dim, dim in enumerate(dims) if dim is not None)


def _summand(local: Tensor, p: float) -> Tensor:
    """What this rank's rows add to a norm, before the reduction; neutral if it has no rows.

    (torch has no maximum of an empty tensor.)
    """
    if local.numel() == 0:
        neutral = math.inf if p == -math.inf else 0.0
        return local.new_full((), neutral, dtype=_wide(local.dtype))
    norm = torch.linalg.vector_norm(local, p, dtype=_wide(local.dtype))
    return norm**p if math.isfinite(p) and p != 0 else norm


def is_sharded(tensor: Tensor) -> bool:
    """True if its mesh has ranks that hold different rows, be it one rank."""
    return bool(_sharded_dims(tensor))


def norms_of(
    grads: Sequence[Tensor], squared: bool, dtype: torch.dtype, *, alone: bool = False
) -> Tensor:
    """The 2-norm of each of some gradients, as `clip_grad_norm_` has it: ``[n]``.

    Args:
        grads: this rank's rows, maybe none.
        squared: what ranks add up, before that.
        dtype: of the result, which they are computed in.
        alone: the sum is of this rank alone, and the result its root.
    """
    made = torch.empty(len(grads), dtype=dtype, device=grads[0].device)
    for place, grad in zip(made.unbind(), grads, strict=True):
        torch.linalg.vector_norm(grad, 2.0, dtype=dtype, out=place)
    if squared or alone:
        made.pow_(2.0)
    return made.pow_(0.5) if alone else made


def _reduction(p: float) -> Any:
    return {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}.get(p, dist.ReduceOp.SUM)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# -- unsharded parameters --------------------------------------------------------------------------


@contextlib.contextmanager
def full_parameters(
    slots: Sequence[Slot],
    all_rows: Callable[[Tensor], Tensor],
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """For the time of the block the module tree holds unsharded plain parameters.

    Collective. It does what ``FullyShardedDataParallel.summon_full_params`` does
    (torch/distributed/fsdp/_unshard_param_utils.py), except that ``writeback=False`` discards
    changes on one rank too, and gradients may be offloaded. `all_rows` is that of `ReadableStore`.
    What was not changed in the block is not written back: an optimizer may step the shards in it.

    Raises:
        ConfigError: `writeback` with `rank0_only`: the other ranks have nothing to take rows from.
        StepError: at the end, a parameter has another shape, is not tied any more, or was changed
            both as a full one and as a shard.
    """
    if writeback and rank0_only:
        raise ConfigError(
            "writeback=True with rank0_only=True: changes made on rank 0 alone would not reach the "
            "rows of the other ranks. Pass writeback=False to look, or rank0_only=False to change."
        )
    sharded = [slot.tensor for slot in slots]
    keep = not rank0_only or all(map(_is_first, sharded))
    made = []
    for tensor in sharded:
        full = nn.Parameter(_own(all_rows, tensor, offload_to_cpu), tensor.requires_grad)
        if with_grads and tensor.grad is not None:
            full.grad = _own(all_rows, tensor.grad, offload_to_cpu)
        made.append(full if keep else tensor)
    before = [_versions(tensor) for tensor in sharded]
    gathered = [autograd.version(full) for full in made]
    for slot, full in zip(slots, made, strict=True):
        slot.place(full)
    try:
        yield
    finally:
        found = [[module._parameters[name] for module, name in slot.owners] for slot in slots]
        for slot, tensor in zip(slots, sharded, strict=True):
            slot.place(tensor)
        if writeback:
            for slot, now in zip(slots, found, strict=True):
                _require_alike(slot, now)
            # First of all: parameters that are views of one storage share the count of writes.
            stepped = [_versions(t) != was for t, was in zip(sharded, before, strict=True)]
            for k, (slot, now) in enumerate(zip(slots, found, strict=True)):
                touched = now[0] is not made[k] or autograd.version(made[k]) != gathered[k]
                if stepped[k] and touched:
                    raise _written_twice(slot)
            for slot, now, has_stepped in zip(slots, found, stepped, strict=True):
                if not has_stepped:
                    _write_back(slot, now[0], with_grads)


def _own(all_rows: Callable[[Tensor], Tensor], tensor: Tensor, offload_to_cpu: bool) -> Tensor:
    """All rows of `tensor`, in a storage of their own."""
    value = all_rows(tensor).detach()
    if value.untyped_storage().data_ptr() == local_part(tensor).untyped_storage().data_ptr():
        value = value.clone()  # one rank, or replicated: nothing had to be gathered
    return value.cpu() if offload_to_cpu else value


def _is_first(tensor: Tensor) -> bool:
    """True on the first rank of the mesh."""
    coordinate = tensor.device_mesh.get_coordinate() if isinstance(tensor, DTensor) else None
    return not any(coordinate or ())


def _require_alike(slot: Slot, now: Sequence[nn.Parameter | None]) -> None:
    """Raise StepError if parameters were untied, removed or reshaped in the block."""
    tensor, full, fqn = slot.tensor, now[0], slot.param.fqn
    if any(other is not full for other in now):
        raise StepError(
            f"parameter {fqn!r} was not tied to {slot.param.aliases[1:]} any more at the end of "
            f"summon_full_params: all changes were dropped. Tie them again inside the block."
        )
    if full is None or full.shape != tensor.shape:
        what = "gone" if full is None else f"of shape {list(full.shape)}"
        raise StepError(
            f"parameter {fqn!r} was {what} at the end of summon_full_params, and of shape "
            f"{list(tensor.shape)} before: all changes were dropped. Change values only, or change "
            f"the model before fxshard.compile."
        )


def _versions(tensor: Tensor) -> tuple[int, int]:
    """How often a parameter was written; operators on its local part do not count in the first."""
    return autograd.version(tensor), autograd.version(local_part(tensor))


def _written_twice(slot: Slot) -> StepError:
    return StepError(
        f"parameter {slot.param.fqn!r} was written while it was unsharded, and so was its shard, "
        f"by an optimizer, say: one of the two would be lost. Call model.reshard(), or leave "
        f"summon_full_params, before the optimizer steps."
    )


@torch.no_grad()
def _write_back(slot: Slot, full: nn.Parameter | None, with_grads: bool) -> None:
    """Copy this rank's rows of the unsharded parameter that the block has left."""
    tensor = slot.tensor
    assert full is not None
    _copy_changed(full.detach(), tensor)
    tensor.requires_grad_(full.requires_grad)
    if not with_grads:
        return
    if full.grad is None:
        tensor.grad = None
    elif tensor.grad is None:
        rows = local_part(sharded_like(full.grad.to(tensor.dtype), tensor)).contiguous()
        tensor.grad = (
            _dtensor(rows, tensor) if isinstance(tensor, DTensor) else rows.to(tensor.device)
        )
    else:
        _copy_changed(full.grad, tensor.grad)


def _copy_changed(full: Tensor, tensor: Tensor) -> None:
    """Copy this rank's rows of `full`, if they differ.

    A block that has only looked changes nothing: it may stand between a forward and its backward.
    """
    rows = sharded_like(full, tensor)
    if not torch.equal(_bits(local_part(rows)), _bits(local_part(tensor))):
        tensor.copy_(rows)


def _bits(tensor: Tensor) -> Tensor:
    """Flat uint8: -0.0 is not 0.0, and NaN is NaN."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


# -- state dicts -----------------------------------------------------------------------------------


def full_state(
    state: dict[str, Any],
    all_rows: Callable[[Tensor], Tensor],
    cpu_offload: bool,
    here: bool,
    copies: bool = False,
    cast: Mapping[int, torch.dtype] | None = None,
) -> dict[str, Any]:
    """The state of a model or of its optimizer with full tensors, gathered one after the other.

    Collective. With `copies`, what needs no gathering is copied, as the rest is by gathering. Ranks
    that do not want it `here` keep nothing and get ``{}``. `cast`: dtypes, by the id of a tensor in
    `state`.
    """
    leaves, spec = trees.tree_flatten(state)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            full = _own(all_rows, leaf, False) if copies and here else all_rows(leaf)
            full = full.cpu() if cpu_offload and here else full
            leaves[i] = full.to((cast or {}).get(id(leaf), full.dtype)) if here else None
            del full  # before the next one is made
    return trees.tree_unflatten(leaves, spec) if here else {}


# -- other dtypes and devices; copies --------------------------------------------------------------


def set_aside(slots: Sequence[Slot]) -> contextlib.AbstractContextManager[None]:
    """For the time of the block the module tree holds everything but the sharded parameters."""
    return holding(slots, [None] * len(slots))


@contextlib.contextmanager
def holding(slots: Sequence[Slot], others: Sequence[Tensor | None]) -> Iterator[None]:
    """For the time of the block the module tree holds `others` for the sharded parameters."""
    tensors = [slot.tensor for slot in slots]
    for slot, other in zip(slots, others, strict=True):
        slot.place(other)
    try:
        yield
    finally:
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.place(tensor)


def converted(
    slots: Sequence[Slot],
    fn: Callable[[Tensor], Tensor],
    world: C10dWorld | InProcessWorld,
    *,
    offloaded: bool,
) -> None:
    """Run a conversion of ``nn.Module._apply`` on the shards.

    The Parameter objects stay, as in ``nn.Module._apply``.

    Raises:
        StepError: it moves shards away from the devices of the mesh or to the meta device, or torch
            cannot exchange the values of a parameter because something else refers to it.
    """
    for slot in slots:
        now = local_part(slot.tensor)
        device, homes = fn(now.new_empty(0)).device, {now.device.type}
        if device.type == "meta" and not now.is_meta:
            raise StepError(
                f"parameter {slot.param.fqn!r} cannot move to the meta device: its values would be "
                f"lost, and programs compute with the shards that it has. Delete the model to free "
                f"its memory; a model that is built on the meta device is filled after it is "
                f"sharded (to_empty, load_state_dict)."
            )
        if not isinstance(world, C10dWorld):
            break
        if now.is_meta:
            homes.add("cpu" if offloaded else world.mesh.device_type)
        if device.type not in homes:
            raise StepError(
                f"parameter {slot.param.fqn!r} cannot move to {device}: its shard is on "
                f"{now.device}, and the mesh is of device type {world.mesh.device_type!r}. "
                f"Move the model before fxshard.compile, with a mesh of that device type."
            )
    for group in by_storage(slots):  # one after the other: no second copy of all shards
        fresh: list[tuple[Slot, Tensor]] = []
        for slot in group:
            with torch.no_grad():
                now = local_part(slot.tensor).detach()
                new = fn(now)
            extension = slot.param.extension
            stays = new.dtype is now.dtype and (now.is_meta or new.device == now.device)
            if (
                new is not now
                and extension is not None
                and not (stays and isinstance(slot.tensor, DTensor))
            ):
                raise StepError(
                    f"parameter {slot.param.fqn!r}, a {extension.kind.__name__}, cannot be "
                    f"converted or moved: its all-gather was traced as it is. Convert the plain "
                    f"model before it is sharded."
                )
            if new is not now:
                fresh.append((slot, new))
        for slot, new in fresh:
            _exchange(slot, new, fn)
        lay_out([slot for slot, _ in fresh])


def by_storage(slots: Iterable[Slot]) -> list[list[Slot]]:
    """`slots`, those together whose shards lie in one flat storage."""
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(storage_id(slot.shards[0]), []).append(slot)
    return list(groups.values())


def allocate(slots: Sequence[Slot], device: torch.device, pin: bool) -> None:
    """Exchange the flat storage of `slots`, on the meta device, for a real one of zeros.

    The parameters that the module tree holds stay on the meta device, until they get values.
    """
    shard = slots[0].shards[0]
    numel = shard.untyped_storage().nbytes() // shard.element_size()
    flat = torch.zeros(numel, dtype=shard.dtype, device=device, pin_memory=pin)

    def placed(view: Tensor) -> Tensor:
        return flat.as_strided(view.shape, view.stride(), view.storage_offset())

    for slot in slots:
        slot.local, slot.shards = placed(slot.local), [placed(each) for each in slot.shards]


def over_shard(slot: Slot) -> DTensor:
    """A DTensor of the rows of the shard, like the parameter, which may be on the meta device."""
    like: Any = slot.tensor
    made = _dtensor(dtensors.stand_in(slot.local), like)
    dtensors.set_local_tensor(made, slot.as_held(slot.local))
    return made


def fill(slot: Slot) -> None:
    """Let the parameter, on the meta device, have the rows of its shard; it stays the object."""
    _exchange(slot, dtensors.stand_in(slot.local), lambda grad: grad)
    _set_storage(slot.tensor, slot.as_held(slot.local))


def _exchange(slot: Slot, local: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Exchange the values of the parameter for `local`, and convert its gradient."""
    tensor: Any = slot.tensor
    for module, _ in slot.owners:
        if isinstance(module, nn.RNNBase):
            torch_modules.forget_weights(module)
    grad, tensor.grad = tensor.grad, None
    if isinstance(tensor, DTensor):
        made = nn.Parameter(_dtensor(local, tensor), tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, made)
            swapped_with: Any = made
            tensor.__class__ = type(swapped_with)  # the class and attributes stay the object's
            vars(tensor).update(vars(swapped_with))
        except RuntimeError as error:
            tensor.grad = grad
            raise StepError(
                f"parameter {slot.param.fqn!r} cannot be converted while something else refers to "
                f"it: an autograd graph, or a weak reference. Drop those first. Cause: {error}"
            ) from error
    else:
        tensor.data = local
    if grad is not None:
        new = fn(local_part(grad))
        tensor.grad = _dtensor(new, grad) if isinstance(grad, DTensor) else new


def lay_out(slots: Sequence[Slot]) -> None:
    """Move the parameters that the module tree holds now to new flat storage, of the same layout.

    The padded shards of a unit are views of one storage per dtype.
    """
    groups: dict[tuple[int, torch.dtype, torch.device, str], list[Slot]] = {}
    for slot in slots:
        param, now = slot.param, local_part(slot.tensor)
        groups.setdefault((param.unit, now.dtype, now.device, param.mesh), []).append(slot)
    for (_, dtype, device, _), members in groups.items():
        placed = in_flat_storage(dataclasses.replace(s.layout, dtype=dtype) for s in members)
        ranks, (numel,) = len(members[0].shards), flat_numels(placed).values()
        pin = members[0].local.is_pinned()
        flat = torch.zeros(ranks * numel, dtype=dtype, device=device, pin_memory=pin)
        for slot, layout in zip(members, placed, strict=True):
            slot.param = dataclasses.replace(slot.param, dtype=dtype)
            slot.layout, slot.shards = layout, layout.shards_in(flat, ranks)
            slot.moves += 1
            # In-process, the rows of the full parameter continue in the shards after the first.
            slot.local = slot.shards[0].as_strided(slot.local.shape, slot.local.stride())
            slot.local.copy_(local_part(slot.tensor).detach())
            _set_storage(slot.tensor, slot.as_held(slot.local))


def leave(slot: Slot) -> None:
    """Move a parameter to other memory: who holds that of now, a state dict say, keeps its values.

    In one process ``param.data = ...`` gives a parameter the memory of another tensor. Here it is
    given the values, and they must not be written where others read those before.
    """
    if not local_part(slot.tensor).is_meta:
        lay_out([slot])


def restore_storage(slot: Slot) -> None:
    """Put the parameter back on the memory of its shards, if something gave it another.

    It is other memory than before: the parameter that was there, if it is another, keeps its own,
    and may come back, as ``functional_call`` puts parameters in the place of others for one call.

    Raises:
        StepError: see `Slot.is_elsewhere`.
    """
    if slot.is_elsewhere():
        lay_out([slot])


def _set_storage(tensor: Tensor, local: Tensor) -> None:
    if isinstance(tensor, DTensor):
        dtensors.set_local_tensor(tensor, local)
    else:
        tensor.data = local


def copied(slots: Mapping[str, Slot], memo: dict[int, Any]) -> dict[str, Slot]:
    """Deep copies of `slots`, with a parameter of its own for each; modules are found by `memo`."""
    for slot in slots.values():
        restore_storage(slot)
        copy.deepcopy(slot.shards, memo)  # views of one storage stay so: memo holds the storage
        local, tensor = copy.deepcopy(slot.local, memo), slot.tensor
        if isinstance(tensor, DTensor):
            made = nn.Parameter(_dtensor(dtensors.stand_in(local), tensor), tensor.requires_grad)
            dtensors.set_local_tensor(made, slot.as_held(local))
        else:
            made = nn.Parameter(slot.as_held(local), tensor.requires_grad)
        memo[id(tensor)] = made
    return copy.deepcopy(dict(slots), memo)


def without_data(slot: Slot) -> Slot:
    """`slot` for pickle: the layout alone; `lay_out` fills it from the parameter."""
    shards = [shard.to("meta") for shard in slot.shards]
    return dataclasses.replace(slot, shards=shards, local=slot.local.to("meta"))


def check_picklable(option: str, value: Any) -> None:
    """Raise StepError, which names the option, if pickle cannot take its value."""
    try:
        pickle.dumps(value)
    except Exception as error:
        raise StepError(
            f"the compiled module cannot be pickled: option {option}={value!r} cannot. Save "
            f"model.state_dict() and compile again, or use a module-level function. Cause: {error}"
        ) from error


# -- hooks -----------------------------------------------------------------------------------------


def traced_hooks(model: nn.Module) -> dict[int, str]:
    """Hooks of submodules, and of all modules, that run while tracing only: number -> description.

    Those of torch and transformers themselves are left out: they are written to be traced.
    """
    on_all = torch_modules.global_hooks()
    return {number: f"{kind} {_function_name(hook)}" for kind, number, hook in on_all} | {
        number: f"{kind} {_function_name(hook)} of module {fqn!r}"
        for fqn, module in model.named_modules()
        for kind, number, hook in torch_modules.module_hooks(module)
        if fqn and not swapped.is_traced(hook)
    }


def _function_name(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of a partial
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{swapped.function_module(hook)}.{name}"


# -- optimizer states ------------------------------------------------------------------------------


def optim_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of `optimizer` by parameter name, as it is sharded."""
    with optimizers.not_stepped(optimizer):
        return dict(get_optimizer_state_dict(model, optimizer))


def optim_state_dict_to_load(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]
) -> dict[str, Any]:
    """`saved`, by parameter name, as ``optimizer.load_state_dict`` takes it: by number.

    Full tensors become this rank's rows; nothing is communicated.

    Raises:
        CheckpointError: a parameter of `optimizer` is in no group of `saved`, or the parameters of
            one group were in several groups with different options; or `saved` has no groups.
    """
    names = {id(param): without_wrappers(name) for name, param in model.named_parameters()}
    if saved.get("state") and "param_groups" not in saved:
        raise CheckpointError(
            "the optimizer state has no 'param_groups', which say what each parameter's options "
            "were. Put those that were saved back: {'state': ..., 'param_groups': [{'params': "
            "[FQNs], ...}]}."
        )
    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    number = 0
    for group in optimizer.param_groups:
        numbers = range(number, number := number + len(group["params"]))
        found: dict[str, Any] = {}
        for i, param in zip(numbers, group["params"], strict=True):
            name = names.get(id(param), f"number {i}")
            before = found
            found = next((g for g in saved.get("param_groups", ()) if name in g["params"]), {})
            if not found:
                raise CheckpointError(
                    f"the optimizer state says nothing of parameter {name!r}. It must be by "
                    f"parameter name, as optim_state_dict and full_optim_state_dict give it, and "
                    f"on every rank (rank0_only=False)."
                )
            if before and (option := _differing(before, found)):
                raise CheckpointError(
                    f"parameter {name!r} was in another group of the saved optimizer than those "
                    f"before it in its group now, with another {option!r}. Make the optimizer with "
                    f"the groups that were saved."
                )
            if name in saved["state"]:
                leaves, spec = trees.tree_flatten(saved["state"][name])
                leaves = [_rows_of_state(leaf, param) for leaf in leaves]
                state[i] = trees.tree_unflatten(leaves, spec)
        groups.append({**group, **found, "params": list(numbers)})
    return {"state": state, "param_groups": groups}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first option in which two groups differ; empty if there is none."""
    for option in dict.fromkeys([*one, *other]):
        values = one.get(option), other.get(option)
        if option in ("params", "param_names"):
            continue
        if not (option in one and option in other):
            return option
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) == 1 or not (
            torch.equal(*tensors) if tensors else bool(values[0] == values[1])
        ):
            return option
    return ""


def _rows_of_state(value: Any, param: nn.Parameter) -> Any:
    """This rank's rows of an optimizer state, if it is a full tensor of the shape of `param`."""
    full = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if isinstance(param, DTensor) and full and value.shape == param.shape:
        return sharded_like(value.detach(), param).clone()
    return value
