"""reinplace: the operators that it knows give the same bits in place; what a step saves by it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard import pipeline
from fxshard.config.checked import Config
from fxshard.passes.reinplace import OVER_FIRST, OVER_GRADIENT

aten = torch.ops.aten
SHAPES = [(3, 5), (64, 129), (2, 7, 1030)]  # below and above the kernels' vectors and chunks
MORE: dict[Any, tuple[Any, ...]] = {  # arguments after the tensors
    aten.mul.Scalar: (-0.5,),
    aten.div.Scalar: (3.0,),
    aten.pow.Tensor_Scalar: (3,),
    aten.threshold_backward.default: (0,),
}
TENSORS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def arguments(target: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    first = torch.randn(shape).to(dtype)
    if target in (aten.rsqrt.default, aten.sqrt.default, aten.log.default):
        first = first.abs() + 0.1
    if target is aten.addmm.default:
        rows, columns = first.flatten(0, -2).shape
        factors = [torch.randn(rows, 7).to(dtype), torch.randn(7, columns).to(dtype)]
        return [first.flatten(0, -2), *factors]
    if target is aten.masked_fill.Scalar:
        return [first, torch.rand(shape) > 0.5, -1.0]
    if target in TENSORS:
        return [first, torch.randn(shape[-1:]).to(dtype)]
    if target in OVER_GRADIENT:
        second = torch.randn(shape).to(dtype)
        if "softmax" in str(target):
            log = "log" in str(target)
            second = second.log_softmax(-1) if log else second.softmax(-1)
            return [first, second, len(shape) - 1, dtype]
        return [first, second, *MORE.get(target, ())]
    return [first, *MORE.get(target, ())]


@pytest.mark.parametrize("target", [*OVER_FIRST, *OVER_GRADIENT], ids=str)
def test_an_operator_gives_the_same_bits_over_its_input(target: Any) -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        expected = target(*arguments(target, shape, dtype))
        first, *others = arguments(target, shape, dtype)
        if target in OVER_GRADIENT:
            in_place, name = OVER_GRADIENT[target]
            got = in_place(first, *others, **{name: first})
        else:
            got = OVER_FIRST[target](first, *others)
        assert got.data_ptr() == first.data_ptr()
        assert torch.equal(got, expected) and got.dtype is expected.dtype, (shape, dtype)


class Classifier(nn.Module):
    """Wide logits after a narrow layer: the peak is in the backward of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 512, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x).tanh(), target)


def test_one_tensor_of_the_logits_size_less_in_the_backward_of_a_loss() -> None:
    x, target = torch.randn(256, 2), torch.randint(512, (256,))
    passes = [p for p in pipeline.default_passes(Config()) if p.name != "reinplace"]
    with_it = fxshard.plan(Classifier(), (x, target), world_size=2)
    without = fxshard.plan(Classifier(), (x, target), world_size=2, passes=passes)
    logits = 256 * 512 * 4
    # tanh and log_softmax are saved; of their gradients there is one at a time, not two. The peak
    # is at nll_loss_backward now, which reads a scalar more (total_weight, fp32).
    assert without.memory.peak_bytes - with_it.memory.peak_bytes == logits - 4
    peak = with_it.memory.peak_by_category
    assert 3 * logits <= sum(peak.values()) < 4 * logits


def test_what_is_written_over_is_measured_so() -> None:
    x, target = torch.randn(256, 2), torch.randint(512, (256,))
    seen = fxshard.validate(Classifier(), (x, target), world_size=2)
    assert seen.max_abs_difference == 0
