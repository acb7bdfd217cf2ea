"""Bytes of every operator of torch, static against measured: the fakes are as the kernels.

The operators and what they are called with are those of torch's own tests (OpInfo). Each is the
model: float inputs are parameters, the others buffers, and all that it returns is the output.
"""

import itertools
import logging
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.compat import tree_flatten, tree_unflatten
from fxshard.errors import FxshardError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PARTS = 24
SAMPLES = 4  # of each operator, spread over those that there are

# Made by hand, since nothing that torch gives them is what a parameter or a buffer can be.
SPARSE = ("sparse.", "to_sparse", "_segment_reduce", "segment_reduce")
# Views of more than what they are given, which a copy of an argument does not hold.
OF_MORE = ("as_strided",)
# Known to differ: of a product of rank 1, two tensors live one operator longer than in the program.
OPEN = ("singular",)


def operators() -> list[Any]:
    """OpInfos of differentiable operators; torch's test utilities want expecttest for others."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op
        for op in op_db
        if torch.float32 in op.supported_dtypes("cpu")
        and op.supports_autograd
        and not op.name.startswith((*SPARSE, *OF_MORE))
        and op.variant_test_name not in OPEN
    ]


class Operator(nn.Module):
    """Calls an operator with tensors of its own, and a factor of 1 on what needs a gradient."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = op.op  # a function, with nothing of torch's tests behind it
        self.flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.tree = lambda flat: tree_unflatten(flat, spec)  # copied as it is
        for i, value in enumerate(self.flat):
            if not isinstance(value, Tensor):
                continue
            own = value.detach().clone()
            if value.requires_grad and value.dim():
                self.register_parameter(f"_{i}", nn.Parameter(own))
            else:
                self.register_buffer(f"_{i}", own)
            self.flat[i] = None

    def forward(self, factor: Tensor) -> tuple[Tensor, ...]:
        flat = list(self.flat)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            flat[int(name[1:])] = tensor * factor if tensor.requires_grad else tensor
        first, args, kwargs = self.tree(flat)
        leaves, _ = tree_flatten(self.op(first, *args, **kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def samples(op: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    some = list(itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), 16))
    yield from some[:: max(1, len(some) // SAMPLES)][:SAMPLES]


@pytest.mark.parametrize("part", range(PARTS))
def test_static_equals_measured_for_every_operator(part: int) -> None:
    logging.getLogger("fxshard").setLevel(logging.ERROR)
    wrong: list[str] = []
    done = refused = 0
    for op in operators()[part::PARTS]:
        for number, sample in enumerate(samples(op)):
            model = Operator(op, sample)
            if not list(model.parameters()):
                continue
            what = f"{op.name} {op.variant_test_name} {number}"
            try:
                found = fxshard.validate(model, (torch.ones(1),), world_size=1)
            except FxshardError:
                refused += 1
                continue
            except Exception as error:
                wrong.append(f"{what}: {type(error).__name__}: {error}")
                continue
            done += 1
            if found.max_abs_difference:
                wrong.append(f"{what}:\n{found.table(only_different=True, step=1)}")
    assert not wrong, "\n".join(wrong)
    assert done > 10 * refused
