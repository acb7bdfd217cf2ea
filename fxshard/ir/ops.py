"""The ``fxshard::`` operators of the rewritten graph, with fake implementations.

They are the words of the intermediate representation. The executor binds each to a method of the
same name on a World (`fxshard.runtime.world`); they have no kernel of their own.

================  =============================================================================
all_gather        launch: one padded shard ``[chunk, ...]`` per parameter in, one fresh buffer
                  ``[size * chunk, ...]`` per parameter out, all of one dtype.
                  The buffer *is* the unsharded parameter (rank r wrote rows r*chunk onward), so
                  nothing is copied out; padding rows are cut off by a view.
reduce_scatter    launch: one contiguous ``[size * chunk, ...]`` gradient per parameter in,
                  one fresh ``[chunk, ...]`` out, reduced by `op`, all of one dtype.
all_reduce        launch: gradients are reduced over the group in place; the results are they.
comm_hook         launch: the user's function reduces one flat tensor, all gradients of a unit, rank
                  by rank: ``[size * n]`` in, a fresh ``[n]`` out; with size 1 in place.
cast, load        launch, or what an all-gather sends: fresh copies in another dtype, or on the
                  device of compute.
store             launch: fresh copies on the CPU.
pack              what an all-gather sends: one fresh flat tensor ``[n]``, in a dtype, the shards of
                  small parameters one behind the other.
unpack            of a gathered packed buffer ``[size * n]``: one fresh ``[size * chunk, ...]`` per
                  parameter, on the compute stream behind the wait. They are the unsharded
                  parameters then.
reshard           this rank's ``1/size`` of the rows of each buffer, in fresh tensors.
wait              the compute stream waits for the launch that these tensors belong to.
free              give the storage of these tensors back now, whoever still refers to them.
step              the optimizer steps shards in place, with the sharded gradients of `params`.
================  =============================================================================

``group`` names the ranks that take part: "shard" (those that share a parameter), "replicate" (those
that hold the same shard), "reshard<n>" (n neighbours). ``size`` is their number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxshard.ir.layout import gathered, part

_LIBRARY = torch.library.Library("fxshard", "DEF")
for _schema in (
    "all_gather(Tensor[] shards, int size, str group='shard') -> Tensor[]",
    "reduce_scatter(Tensor[] grads, int size, str group='shard', str op='avg') -> Tensor[]",
    "all_reduce(Tensor[] grads, int size, str group='replicate', str op='avg') -> Tensor[]",
    "comm_hook(Tensor[] grads, int size) -> Tensor[]",
    "cast(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
    "load(Tensor[] tensors, Device device) -> Tensor[]",
    "store(Tensor[] tensors) -> Tensor[]",
    "pack(Tensor[] shards, ScalarType dtype) -> Tensor[]",
    "unpack(Tensor[] packed, int size, int[][] chunks) -> Tensor[]",
    "reshard(Tensor[] buffers, int size, str group) -> Tensor[]",
    "wait(Tensor[] tensors) -> ()",
    "free(Tensor[] tensors) -> ()",
    "step(Tensor[] grads, Tensor(a!)[] shards, str[] params) -> ()",
):
    _LIBRARY.define(_schema)


Empty = Callable[..., Tensor]  # makes an empty tensor like another: (like, shape, dtype=, device=)


def _all_gather(empty: Empty, shards: list[Tensor], size: int, group: str = "") -> list[Tensor]:
    return [empty(s, gathered(s.shape, size)) for s in shards]


def _reduce_scatter(
    empty: Empty, grads: list[Tensor], size: int, group: str = "", op: str = ""
) -> list[Tensor]:
    return [empty(g, part(g.shape, size)) for g in grads]


def _all_reduce(
    empty: Empty, grads: list[Tensor], size: int, group: str = "", op: str = ""
) -> list[Tensor]:
    return list(grads)


def _comm_hook(empty: Empty, grads: list[Tensor], size: int) -> list[Tensor]:
    return list(grads) if size == 1 else [empty(g, part(g.shape, size)) for g in grads]


def _cast(empty: Empty, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [empty(t, t.shape, dtype=dtype) for t in tensors]


def _load(empty: Empty, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    return [empty(t, t.shape, device=device) for t in tensors]


def _store(empty: Empty, tensors: list[Tensor]) -> list[Tensor]:
    return [empty(t, t.shape, device=torch.device("cpu")) for t in tensors]


def _pack(empty: Empty, shards: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [empty(shards[0], (sum(s.numel() for s in shards),), dtype=dtype)]


def _unpack(empty: Empty, packed: list[Tensor], size: int, chunks: list[list[int]]) -> list[Tensor]:
    return [empty(packed[0], gathered(chunk, size)) for chunk in chunks]


def _reshard(empty: Empty, buffers: list[Tensor], size: int, group: str) -> list[Tensor]:
    return [empty(b, part(b.shape, size)) for b in buffers]


def _nothing(empty: Empty, *args: Any) -> None:
    return None


_MAKES: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "comm_hook": _comm_hook,
    "cast": _cast,
    "load": _load,
    "store": _store,
    "pack": _pack,
    "unpack": _unpack,
    "reshard": _reshard,
    "wait": _nothing,
    "free": _nothing,
    "step": _nothing,
}
for _name, _makes in _MAKES.items():
    torch.library.register_fake(
        f"fxshard::{_name}", functools.partial(_makes, Tensor.new_empty), lib=_LIBRARY
    )

all_gather = torch.ops.fxshard.all_gather.default
reduce_scatter = torch.ops.fxshard.reduce_scatter.default
all_reduce = torch.ops.fxshard.all_reduce.default
comm_hook = torch.ops.fxshard.comm_hook.default
cast = torch.ops.fxshard.cast.default
load = torch.ops.fxshard.load.default
store = torch.ops.fxshard.store.default
pack = torch.ops.fxshard.pack.default
unpack = torch.ops.fxshard.unpack.default
reshard = torch.ops.fxshard.reshard.default
wait = torch.ops.fxshard.wait.default
free = torch.ops.fxshard.free.default
step = torch.ops.fxshard.step.default

COLLECTIVES = (all_gather, reduce_scatter, all_reduce, comm_hook)
ASYNCHRONOUS = (*COLLECTIVES, cast, load, store, pack)  # run on streams of their own
WORDS = (*COLLECTIVES, cast, load, store, pack, unpack, reshard, wait, free, step)


def makes(target: Any, args: tuple[Any, ...], empty: Empty) -> Any:
    """What a word gives back for `args`, with `empty` for what it allocates.

    Args:
        empty: ``(like, shape, dtype=like.dtype, device=like.device)``.
    """
    return _MAKES[target._schema.name.removeprefix("fxshard::")](empty, *args)
