"""What a model may hold: tensors that programs can keep and shard, in memory of their own."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard._torch import data_parallel, fake_tensors
from fxshard._torch.dtensors import local_part
from fxshard._torch.storages import storage_id
from fxshard.errors import CaptureError, UnitError
from fxshard.ir.extensions import has_extension
from fxshard.ir.tensor_parallel import PLACE
from fxshard.ir.units import Unit


def check_printable(model: nn.Module) -> None:
    """Raises UnitError for names that would break lines: of schedules, tables and source."""
    modules = (name for name, _ in model.named_modules(remove_duplicate=False))
    params = (name for name, _ in model.named_parameters(remove_duplicate=False))
    buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
    for name in itertools.chain(modules, params, buffers):
        if not name.isprintable():
            raise UnitError(
                f"{name!a}: a name of a module, parameter or buffer with a character that cannot "
                f"be printed. Schedules and reports name it in lines of text: rename it."
            )


def check_reduced_here(model: nn.Module) -> None:
    """Raise UnitError if something of torch's reduces gradients of a part of `model` itself."""
    for name, module in model.named_modules():
        if by := data_parallel.reduced_by(module):
            what = f"module {name!r}" if name else "the model"
            raise UnitError(
                f"{what} is one of torch's {by}, which reduces gradients itself, as programs "
                f"cannot know. Give fxshard the plain module: it replicates and shards; or put "
                f"DistributedDataParallel around the whole model, with what is sharded in "
                f"_set_params_and_buffers_to_ignore_for_model."
            )


def check_shardable(fqn: str, param: torch.Tensor) -> None:
    """Raise UnitError if `param` cannot be cut along any dimension."""
    if param.dim() == 0:
        raise UnitError(
            f"parameter {fqn!r} is a scalar (shape []), which has no dim 0 to shard. "
            f"Make it a 1-D tensor with one element: nn.Parameter(x.reshape(1))."
        )
    if not param.is_contiguous():
        raise UnitError(
            f"parameter {fqn!r} is not contiguous (shape {list(param.shape)}, strides "
            f"{list(param.stride())}); its rows cannot be sent as they lie. "
            f"Make it contiguous: nn.Parameter(x.contiguous())."
        )


def check_gradient_dtype(fqn: str, param: torch.Tensor) -> None:
    """Raise UnitError if the user wants gradients of `param` in another dtype than it has.

    FSDP2 forgets it in silence, when it exchanges the parameter.
    """
    wanted = param.grad_dtype if param.requires_grad else param.dtype
    if wanted is not param.dtype:
        raise UnitError(
            f"parameter {fqn!r}, {param.dtype}, has grad_dtype={wanted}, which its shards would "
            f"not have: gradients are made in param_dtype, and get the dtype of the parameter. "
            f"Leave it out; or keep the model in fp32, with mixed_precision=MixedPrecisionPolicy("
            f"param_dtype=torch.bfloat16, reduce_dtype=torch.float32)."
        )


def check_type(fqn: str, param: torch.Tensor) -> None:
    """Raise UnitError if the package spmd_types says of `param` how ranks share it.

    It says so in an attribute, which FSDP2 reads since torch 2.14, and gives to what is unsharded.
    """
    if said := getattr(param, "_local_type", None):
        raise UnitError(
            f"parameter {fqn!r} has a type of the package spmd_types ({said}), which neither its "
            f"shards nor what is gathered of them would have. Parallelise the model with DTensors "
            f"instead (torch.distributed.tensor.parallel.parallelize_module)."
        )


def check_kinds(model: nn.Module, out_params: Container[int]) -> None:
    """Raise UnitError if a parameter or buffer is more than the numbers in its storage.

    Programs run on plain tensors. DTensors are for `sharding` to judge, and parameters that say
    what is gathered for `extension_of`.
    """
    for kind, fqn, tensor in _named_tensors(model):
        if nn.parameter.is_lazy(tensor):
            raise UnitError(
                f"{kind} {fqn!r} is lazy and has no shape yet. Call the plain model once, which "
                f"initialises it."
            )
        what = no_plain_tensor(tensor)
        gathers = kind == "parameter" and id(tensor) not in out_params and has_extension(tensor)
        if what and not gathers:
            raise UnitError(
                f"{kind} {fqn!r} is {what}: programs run on plain dense tensors, and would drop "
                f"what it is besides. Take frozen quantised weights apart first "
                f"(fxshard.integrations.quantized.packed(model)), give a parameter's class "
                f"fsdp_pre_all_gather and fsdp_post_all_gather, quantise after training, or use "
                f"torch.distributed.fsdp.fully_shard."
            )


def no_plain_tensor(tensor: torch.Tensor) -> str:
    """What a tensor is that is no plain dense one; empty if it is."""
    if isinstance(tensor, (DTensor, fake_tensors.FakeTensor)):
        return ""
    if _has_own_operators(type(tensor)):
        return f"a {type(tensor).__name__}, a subclass of torch.Tensor with operators of its own"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.is_nested:
        return "nested"
    return f"quantized ({tensor.dtype})" if tensor.is_quantized else ""


def _has_own_operators(cls: type[torch.Tensor]) -> bool:
    if cls is torch.Tensor:
        return False
    plain = nn.Parameter
    same = cls.__torch_function__ is plain.__torch_function__
    same = same and cls.to is plain.to  # bitsandbytes' Int8Params carries its scales along
    return not (same and cls.__torch_dispatch__ is plain.__torch_dispatch__)


def check_memory(model: nn.Module, out_params: Container[int]) -> None:
    """Raise UnitError if two parameters, or a parameter and a buffer, lie in the same memory.

    Sharding copies a parameter's values, so that what is written into one later would not be seen
    in the other. Parameters that are left alone (`out_params`) stay where they are.
    """
    params = {id(param) for param in model.parameters()}
    found = []
    for kind, fqn, held in _named_tensors(model):
        if not hasattr(held, PLACE):
            stays = id(held) in out_params and not (kind == "buffer" and id(held) in params)
            found.append(((kind, fqn, stays), local_part(held)))
    for (kind, fqn, out), (other_kind, other, other_out) in _overlaps(found):
        both_buffers = kind == other_kind == "buffer"
        if not both_buffers and not (out and other_out):
            raise UnitError(
                f"{kind} {fqn!r} and {other_kind} {other!r} lie in the same memory: a step "
                f"that changes one would not change the other any more. Give one of them a "
                f"copy (.clone()); to tie parameters, assign one nn.Parameter under both names."
            )


def check_cast_buffers(buffers: Mapping[str, torch.Tensor], dtypes: Container[str]) -> None:
    """Raise UnitError if a buffer of another dtype now lies in the memory of another buffer.

    Casting copies its values, so that what is written into one later would not be seen in the
    other; FSDP1 takes them apart in silence.

    Args:
        buffers: of the model, by name; those of several names once.
        dtypes: names of those that a ``buffer_dtype`` casts.
    """
    for one, other in _overlaps(buffers.items()):
        if one in dtypes or other in dtypes:
            raise UnitError(
                f"buffers {one!r} and {other!r} lie in the same memory, and mixed_precision casts "
                f"them (buffer_dtype): what is written into one would not be seen in the other any "
                f"more. Give one of them a copy (.clone()), or make it a view of the other inside "
                f"of forward."
            )


_Key = TypeVar("_Key", str, tuple[str, str, bool])


def _overlaps(tensors: Iterable[tuple[_Key, torch.Tensor]]) -> Iterator[tuple[_Key, _Key]]:
    """The pairs of tensors of which bytes lie in the same memory."""
    places: dict[int, list[tuple[int, int, _Key]]] = {}
    for key, tensor in tensors:
        if tensor.numel():
            first = int(tensor.storage_offset()) * tensor.element_size()
            spans = [s * (n - 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
            end = first + (sum(spans) + 1) * tensor.element_size()
            places.setdefault(storage_id(tensor), []).append((first, end, key))
    for members in places.values():
        members.sort()
        for i, (_, end, key) in enumerate(members):
            for start, _, other in members[i + 1 :]:
                if start >= end:
                    break
                yield key, other


def check_buffers(model: nn.Module) -> None:
    """Raise UnitError if a buffer needs a gradient, or is a DTensor."""
    for fqn, buffer in model.named_buffers():
        if isinstance(buffer, DTensor):
            raise UnitError(
                f"buffer {fqn!r} is a DTensor: programs keep buffers as plain tensors, each rank "
                f"its own. Register what each rank has (buffer.to_local()) in its place, or keep "
                f"its module out of the plan of parallelize_module."
            )
        if buffer.requires_grad:
            raise UnitError(learned_buffer(fqn))


def learned_buffer(fqn: str) -> str:
    """What to say of a buffer that needs a gradient."""
    return (
        f"buffer {fqn!r} requires a gradient, and a program makes none of buffers. Make it an "
        f"nn.Parameter if it is to be trained, or detach it (module.{fqn.rpartition('.')[2]} = "
        f"buffer.detach())."
    )


def note_replaced(fqn: str, param: torch.Tensor) -> None:
    """Remember of what `param` lies in that it was the memory of a parameter, now sharded."""
    local_part(param).untyped_storage()._fxshard_was = fqn  # type: ignore[attr-defined]


def check_constants(
    model: nn.Module, units: Sequence[Unit], constants: Mapping[str, torch.Tensor]
) -> None:
    """Refuse tensors that forward has found elsewhere than in its modules and that will not stay.

    Args:
        model: before it is sharded, or after.
        units: of the model.
        constants: tensors that a capture has met and that are no parameters or buffers.

    Raises:
        CaptureError: one is a parameter of the model (or of its memory), which lies in a list or a
            closure, or needs a gradient, which it would not get.
    """
    named = dict(model.named_parameters())
    chosen = {p.fqn: named[p.fqn] for unit in units for p in unit.params if p.fqn in named}
    known = {storage_id(local_part(t)): fqn for fqn, t in chosen.items() if t.numel()}
    for tensor in constants.values():
        storage = tensor.untyped_storage()
        fqn = getattr(storage, "_fxshard_was", known.get(storage_id(storage)))
        if fqn is not None:
            raise CaptureError(
                f"forward reads parameter {fqn!r}, or a view of it, from elsewhere than its module "
                f"(a list, a closure, an attribute made before): there it would keep its values "
                f"for ever. Read it in forward through the module that holds it."
            )
        if tensor.requires_grad:
            raise CaptureError(
                f"forward reads a tensor {list(tensor.shape)} that requires a gradient and is no "
                f"parameter of the model: it would get none. Register it as an nn.Parameter, or "
                f"pass it to forward."
            )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for fqn, param in model.named_parameters():
        yield "parameter", fqn, param
    for fqn, buffer in model.named_buffers():
        yield "buffer", fqn, buffer
