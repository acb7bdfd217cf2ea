"""Strides of fakes against those that kernels give: elementwise operators, memory formats."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard
from fxshard.capture.strides import KernelFakeMode
from tests.capture.test_fakes import layouts
from tests.eager import assert_trains_like_eager

aten: Any = torch.ops.aten
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Two operators in C++, which lie otherwise for each dtype; nothing in torch.nn calls it.
OTHERWISE = (aten.ldexp,)
VALUES: dict[str, Any] = {"number": 0.5, "float": 0.5, "int": 1, "bool": False}


def of_tensors() -> Iterator[Any]:
    """The elementwise operators of two tensors and more that allocate one."""
    for name in sorted(dir(aten)):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            schema = op._schema
            needed = [str(a.type) for a in schema.arguments if not a.has_default_value()]
            if packet in OTHERWISE:
                continue
            if torch.Tag.pointwise not in op.tags or schema.is_mutable or "out" in overload:
                continue
            if [str(r.type) for r in schema.returns] != ["Tensor"] or is_composite(op):
                continue
            if needed.count("Tensor") > 1 and {*needed} <= {"Tensor", *VALUES}:
                yield op


def is_composite(op: Any) -> bool:
    """True of what is no operator of a trace: it is made of others."""
    name = str(op).removesuffix(".default").replace("aten.", "aten::", 1)
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


OPERATORS = list(of_tensors())


def strides(op: Any, args: list[Any], mode: KernelFakeMode | None = None) -> Any:
    """Of the result of `op`; with a mode, of fakes."""
    if mode is not None:
        args = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
    with mode or contextlib.nullcontext():
        result = op(*args)
    results = result if isinstance(result, tuple) else (result,)
    return [None if t is None else (tuple(t.shape), t.stride()) for t in results]


@pytest.mark.parametrize("op", OPERATORS, ids=str)
@pytest.mark.sample(12)
def test_fakes_of_an_elementwise_operator_lie_as_the_kernel_makes_them(op: Any) -> None:
    needed = [a for a in op._schema.arguments if not a.has_default_value()]
    mode, compared = KernelFakeMode(), 0
    for dtype in (F32, BF16, F16, torch.bool, torch.int64):
        shaped = [*layouts((2, 3, 4)), torch.rand(()).expand(2, 3, 4), torch.rand(3, 1)]
        given = [(tensor > 0.4 if dtype is torch.bool else tensor).to(dtype) for tensor in shaped]
        given[-3] = given[0][:, :1].expand(2, 3, 4)  # a conversion makes it contiguous
        given[-2] = given[0][:1, :1, :1].expand(2, 3, 4)
        for tensors in itertools.product(
            given, repeat=sum("Tensor" in str(a.type) for a in needed)
        ):
            if "backward" in str(op) and len({tensor.shape for tensor in tensors}) > 1:
                continue  # kernels read past the end of the smaller one
            rest = iter(tensors)
            args = [next(rest) if "Tensor" in str(a.type) else VALUES[str(a.type)] for a in needed]
            try:
                expected = strides(op, args)
            except (RuntimeError, NotImplementedError):  # no kernel for the dtype, or the shapes
                continue
            compared += 1
            assert strides(op, args, mode) == expected, [(t.dtype, t.stride()) for t in tensors]
    assert compared


def padded(op: Any) -> tuple[Any, ...]:
    """Arguments beside the tensors that make its image larger by one on each side."""
    return ([1] * 2 * (3 if "3d" in str(op) else 2),)


# Operators that lie in the memory format of their image, or contiguous: shapes, and what is beside.
FORMATS: list[tuple[Any, Any, Any]] = [
    *(
        (op, [(2, 3, 4, 5)], padded(op))
        for op in (aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad3d)
    ),
    *((op, [(2, 3, 6, 7), (2, 3, 4, 5)], padded(op))
        for op in (aten.reflection_pad2d_backward, aten.replication_pad2d_backward)),
    *((op, [(2, 5, 6, 7), (2, 3, 4, 5)], padded(op))
        for op in (aten.reflection_pad3d_backward, aten.replication_pad3d_backward)),
    *((op, [(2, 3, 6, 7, 8), (2, 3, 4, 5, 6)], padded(op))
        for op in (aten.reflection_pad3d_backward, aten.replication_pad3d_backward)),
    (aten.channel_shuffle, [(2, 6, 4, 5)], (3,)),
    (aten.channel_shuffle, [(2, 6, 4)], (3,)),
    *((aten.roll, [(2, 3, 4, 5)], each) for each in (([1],), ([1], [2]), ([4], [2]))),
    (aten.roll, [(2, 3, 4, 5)], ([1, 1], [2, 3])),
    (aten.log_sigmoid_forward, [(2, 3, 4, 5)], ()),
    (aten.glu_backward, [(2, 3, 4), (2, 6, 4)], (1,)),
    (aten.im2col, [(3, 8, 8)], ([2, 2], [1, 1], [0, 0], [4, 4])),
]  # fmt: skip


def orders(shape: tuple[int, ...]) -> list[Tensor]:
    """Tensors of `shape` whose dimensions lie in other orders in memory; channels last, too."""
    dims = range(len(shape))
    found = [tuple(dims), (1, 0, *dims[2:]), tuple(reversed(dims)), (0, *dims[2:], 1)]
    return [torch.rand([shape[i] for i in o]).permute(*map(o.index, dims)) for o in found]


@pytest.mark.parametrize(("op", "shapes", "beside"), FORMATS, ids=str)
@pytest.mark.sample(6)
def test_fakes_lie_in_the_memory_format_of_the_kernel(op: Any, shapes: Any, beside: Any) -> None:
    mode = KernelFakeMode()
    for tensors in itertools.product(*map(orders, shapes)):
        args = [*tensors, *beside]
        assert strides(op.default, args, mode) == strides(op.default, args), tensors


class Multiplies(nn.Module):
    """A gradient that is the same everywhere, times a transposed parameter, is viewed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.other = nn.Parameter(torch.randn(2, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).view(2, 4, 6) * self.other.transpose(1, 2)).sum()


class Transposed(nn.Module):
    """A sigmoid's logarithm of what is transposed, and its gradient in those strides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.logsigmoid(self.linear(x).transpose(0, 1))


def squares(out: Tensor) -> Tensor:
    return out.float().square().sum()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("build", "shape"), [(Multiplies, (8, 6)), (Transposed, (2, 4, 5))])
def test_programs_train_as_eager_in_the_bytes_that_are_planned(
    build: Any, shape: Any, dtype: torch.dtype
) -> None:
    batch = torch.randn(shape).to(dtype)
    assert_trains_like_eager(lambda: build().to(dtype), batch, loss=squares)
    options = {"world_size": 2, "ranks": "fake", "loss": squares, "micro_batches": 1}
    found = fxshard.validate(build().to(dtype), (batch,), **options)
    assert found.max_abs_difference == 0, found.table(only_different=True)
