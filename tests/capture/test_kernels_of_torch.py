"""Fake results against those of kernels, on the samples that torch tests its own operators with.

Each of them runs forward and backward, its inputs and gradients in several orders of dimensions;
every operator that the dispatcher sees on the way is compared, not only the one that was called.
"""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture import fakes
from fxshard.capture.strides import KernelFakeMode

# Samples are in the testing package of torch, which wants a class of a package that is not needed.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest"))
sys.modules["expecttest"].__dict__.setdefault("TestCase", unittest.TestCase)
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

aten: Any = torch.ops.aten
# Where strides are equal, as of an expanded tensor, FFTs partition dimensions in an unstable way;
# ldexp is two operators in C++, which lie otherwise for each dtype. See docs/upstream.md.
OTHERWISE = (aten._fft_c2c.default, aten._fft_r2c.default, aten.ldexp.Tensor)
PARTS = 24

Lays = Callable[[Tensor], Tensor]
INPUTS: list[Lays] = [
    lambda t: t,
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else t,
    lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 2 else t,
    lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
    lambda t: torch.stack([t, t], -1)[..., 0],
]
GRADIENTS: list[Lays] = [
    lambda t: torch.ones((), dtype=t.dtype).expand(t.shape),
    torch.ones_like,
    lambda t: torch.ones(t.shape, dtype=t.dtype),
    lambda t: torch.ones(t.shape[::-1], dtype=t.dtype).permute(*reversed(range(t.dim()))),
    lambda t: torch.ones(t.shape[-1:], dtype=t.dtype).expand(t.shape),
]


def described(result: Any) -> list[Any]:
    """Shape, dtype and strides of each tensor, but those of dimensions that take no step."""
    return [
        (
            tuple(t.shape),
            t.dtype,
            [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and t.numel()],
        )
        for t in tree_leaves(result)
        if isinstance(t, Tensor)
    ]


class Compare(TorchDispatchMode):
    """Runs each operator on fakes, too, once for arguments that are described alike."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()
        self.wrong: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        key = str(func), repr([described(x) if isinstance(x, Tensor) else x for x in leaves])
        known = key in self.seen or func._schema.is_mutable or func.is_view or func in OTHERWISE
        self.seen.add(key)
        fake = (
            None if known else faked(KernelFakeMode(allow_non_fake_inputs=True), func, args, kwargs)
        )
        out = func(*args, **kwargs)
        if isinstance(fake, Exception):  # sizes that depend on data, say: torch's own has none, too
            torchs = faked(FakeTensorMode(allow_non_fake_inputs=True), func, args, kwargs)
            if not isinstance(torchs, Exception):
                self.wrong[str(func)] = key[1], described(out), fake
        elif fake is not None and described(fake) != (made := described(out)):
            self.wrong[str(func)] = key[1], made, described(fake)
        return out


def faked(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` gives for fakes of its arguments, or the error that it raises."""
    try:
        args, kwargs = tree_map_only(Tensor, lambda t: mode.from_tensor(t.detach()), (args, kwargs))
        with mode:
            return fakes.as_made(func, tuple(args), func(*args, **kwargs), mode)
    except Exception as error:
        return error


def samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Some of torch's, and if all tensors of one have its shape, larger ones."""
    given = list(info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd))
    yield from given[:12]
    for sample in given[:3]:
        tensors = [t for t in tree_leaves((sample.input, sample.args)) if isinstance(t, Tensor)]
        if isinstance(sample.input, Tensor) and len({t.shape for t in tensors}) == 1:
            for shape in ((2, 3, 4, 5), (3, 4, 5), (4, 6)):
                yield tree_map_only(Tensor, lambda t, shape=shape: enlarged(t, shape), sample)


def enlarged(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not t.is_floating_point() and not t.is_complex():
        return torch.ones(shape, dtype=t.dtype)
    return (torch.rand(shape) + 0.1).to(t.dtype).requires_grad_(t.requires_grad)


def compare(info: Any, dtype: torch.dtype, compared: Compare) -> None:
    for sample in samples(info, dtype):
        for lays, gradient in zip(INPUTS, GRADIENTS, strict=True):

            def lying(t: Tensor, lays: Lays = lays) -> Tensor:
                made = lays(t.detach()) if t.layout is torch.strided else t
                return made.requires_grad_(t.requires_grad)

            try:
                call = (sample.input, sample.args, sample.kwargs)
                input, args, kwargs = tree_map_only(Tensor, lying, call)
                with compared:
                    outputs = tree_leaves(info(input, *args, **kwargs))
                    outputs = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
                    torch.autograd.backward(outputs, [gradient(t) for t in outputs])
            except Exception:
                continue  # an operator that takes no such input


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_fakes_of_torchs_samples_lie_as_kernels_make_them(part: int) -> None:
    compared = Compare()
    for info in op_db[part::PARTS]:
        for dtype in (torch.float32, torch.bfloat16):
            if dtype in info.dtypes:
                compare(info, dtype, compared)
    assert len(compared.seen) > 1000
    assert not compared.wrong
