"""torch's test_fsdp_mixed_precision.py: submodules in other precisions, and ignored ones."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

import fxshard
from fxshard.errors import CaptureError
from tests.peers.fsdp1.shared import compiled

F16, F32 = torch.float16, torch.float32
HALF = MixedPrecision(param_dtype=F16, cast_forward_inputs=True)
AS_GIVEN = MixedPrecision(param_dtype=F16, cast_forward_inputs=False)
WIDE = MixedPrecision(param_dtype=F32, cast_forward_inputs=True)


def told(action: Callable[[], Any]) -> str:
    """torch's own error, which eager raises too."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "no error"


class Layer(nn.Module):
    """Notes the dtype of what it is given, while it is traced."""

    def __init__(self, seen: dict[str, Any], name: str, casts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.note = functools.partial(seen.__setitem__, name)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        self.note(x.dtype)
        return self.linear(x.to(self.linear.weight.dtype) if self.casts else x)


class Two(nn.Module):
    def __init__(self, seen: dict[str, Any], casts: bool) -> None:
        super().__init__()
        self.c1, self.c2 = Layer(seen, "c1", casts), Layer(seen, "c2", casts)
        self.note = functools.partial(seen.__setitem__, "model")

    def forward(self, x: Tensor) -> Tensor:
        self.note(x.dtype)
        return self.c2(self.c1(x))


def dtypes(
    rank: int, world_size: int, casts: bool, policies: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    seen: dict[str, Any] = {}
    model = compiled(Two(seen, casts), units=[], mixed_precision=policies)

    def step() -> None:
        model(torch.zeros(2, 10)).sum().backward()

    return told(step), seen


def test_half_in_one_submodule(ranks: Any) -> None:
    for said, seen in ranks(2).run(dtypes, False, {"c2": HALF}):
        assert said == "no error"
        assert seen == {"model": F32, "c1": F32, "c2": F16}


def test_half_in_one_submodule_that_casts_itself(ranks: Any) -> None:
    for said, seen in ranks(2).run(dtypes, True, {"c2": AS_GIVEN}):
        assert said == "no error"
        assert seen == {"model": F32, "c1": F32, "c2": F32}


def test_half_in_one_submodule_without_casts(ranks: Any) -> None:
    """As in eager: the dtypes do not fit."""
    for said, _ in ranks(2).run(dtypes, False, {"c2": AS_GIVEN}):
        assert "must have the same dtype" in said


def test_two_precisions(ranks: Any) -> None:
    for said, seen in ranks(2).run(dtypes, False, {"": WIDE, "c2": HALF}):
        assert said == "no error"
        assert seen == {"model": F32, "c1": F32, "c2": F16}


def test_two_precisions_whose_dtypes_do_not_fit(ranks: Any) -> None:
    """The root casts its own inputs only: `c2` is given what `c1` has made."""
    for said, _ in ranks(2).run(dtypes, False, {"": WIDE, "c1": HALF}):
        assert "must have the same dtype" in said


class TakesTwo(nn.Module):
    def __init__(self, seen: dict[str, Any]) -> None:
        super().__init__()
        self.l = nn.Linear(10, 10)
        self.note = seen.__setitem__

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.note("x", x.dtype)
        self.note("y", y.dtype)
        return self.l(x)


class MakesOne(nn.Module):
    def __init__(self, seen: dict[str, Any]) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(10, 10), TakesTwo(seen)
        self.note = seen.__setitem__

    def forward(self, x: Tensor) -> Tensor:
        self.note("model", x.dtype)
        return self.l2(self.l1(x), torch.ones(2, 10))


def made_inside(rank: int, world_size: int) -> dict[str, Any]:
    """`cast_forward_inputs` is False by default in FSDP1: only the root casts."""
    seen: dict[str, Any] = {}
    policy = MixedPrecision(param_dtype=F16)
    model = compiled(MakesOne(seen), units=["l2"], mixed_precision=policy)
    model(torch.zeros(2, 10)).sum().backward()
    return seen


def test_inputs_that_are_made_inside(ranks: Any) -> None:
    assert ranks(2).run(made_inside) == [{"model": F16, "x": F16, "y": F32}] * 2


class WithIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.ignored, self.l2 = (nn.Linear(10, 10) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(self.ignored(self.l1(x)))


def ignored(rank: int, world_size: int) -> str:
    options = {"ignored": ["ignored"], "mixed_precision": MixedPrecision(param_dtype=F16)}
    model = compiled(WithIgnored(), units=[], **options)
    return told(lambda: model(torch.ones(2, 10)))


def test_ignored_module_in_fp32(ranks: Any) -> None:
    """It stays as it is, and its inputs are not cast."""
    for said in ranks(1).run(ignored):
        assert "must have the same dtype" in said


def test_a_product_of_two_dtypes_names_the_place() -> None:
    """Without a bias torch's shape rules compare no dtypes: eager's kernel would fail."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x.double())

    with pytest.raises(RuntimeError, match="same dtype"):
        Wide()(torch.ones(2, 4))
    said = r"must have the same dtype, as in eager, and are float64 and float32, at .*in forward"
    with pytest.raises(CaptureError, match=said):
        fxshard.plan(Wide(), (torch.ones(2, 4),), world_size=2)
