"""Context parallelism of torch: attention between ranks that have a part of each sequence.

Inside of ``torch.distributed.tensor.experimental.context_parallel`` scaled dot product attention
goes round the ranks of a mesh: DTensor's dispatcher hands the kernels to a template of torch's,
which sends keys and values on with functional collectives. torch has it for kernels of GPUs; here
it is for the CPU's too, so that such a model can be planned, traced and tried where there is no
GPU.
(torch/distributed/tensor/experimental/_context_parallel/_attention.py)
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fxshard._torch.dtensors import dtensor_handlers

_aten: Any = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_SEQUENCE = 2  # the dimension of queries, keys and values (batch, heads, sequence, features)


def state() -> Hashable:
    """What attention between ranks depends on at this moment; None where there is none.

    Calls that differ in it run different operators, with inputs of equal shapes.
    """
    torchs: Any = sys.modules.get(_MODULE)  # who has not imported it is not inside of it
    if torchs is None or dtensor_handlers().keys().isdisjoint(torchs.custom_ops):
        return None
    ranks, options = None, torchs._cp_options
    if F.scaled_dot_product_attention in torchs._replaced_functions:
        mesh = inspect.getclosurevars(F.scaled_dot_product_attention).nonlocals["device_mesh"]
        ranks = tuple(dist.get_process_group_ranks(mesh.get_group()))  # `mesh.mesh` makes a tensor
    return ranks, options.rotate_method, options.enable_load_balance, options.convert_to_f32


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """For the time of the block, the CPU's flash attention goes round the ranks as a GPU's does.

    Only inside of ``context_parallel``; anywhere else nothing changes.
    """
    if state() is None:
        yield
        return
    handlers = dtensor_handlers()
    added = {op: _round for op in (_FORWARD, _BACKWARD) if op not in handlers}
    handlers.update(added)
    try:
        yield
    finally:
        for op in added:
            handlers.pop(op, None)


def _round(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """The handler of both operators: local tensors, round the ranks, and DTensors again."""
    mesh = next(each.device_mesh for each in args if isinstance(each, DTensor))
    values = {**dict(zip(_names(op), map(_local, args), strict=False)), **kwargs}
    if values.pop("attn_mask", None) is not None:
        raise NotImplementedError("attn_mask is not supported by torch's context parallelism")
    torchs: Any = sys.modules[_MODULE]
    around = torchs._templated_ring_attention
    if op is _BACKWARD:
        around = torchs._templated_ring_attention_backward
        values["grad_out_name"] = "grad_out"
    made: tuple[Tensor, ...] = around(mesh.get_group(), _SEQUENCE, op, **values)
    place = [Shard(_SEQUENCE)]
    return tuple(DTensor.from_local(each, mesh, place, run_check=False) for each in made)


def _names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
