"""A plan for CUDA casts as CUDA's autocast does, by the lists of torch's header."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard._torch import export, fake_tensors, modes
from fxshard.capture.cuda import autocast
from fxshard.errors import CaptureError
from tests.capture.cuda_cases import FLOAT, HALF, Norm, nodes, program, results

pytestmark = pytest.mark.usefixtures("same_seed")
aten = torch.ops.aten


def test_autocast_lists_are_those_of_the_header() -> None:
    """Each list against its macro in torch's own ATen/autocast_mode.h, and all against what the
    dispatcher has for AutocastCUDA."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text()

    def macro(name: str) -> set[str]:
        body = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", text, re.S)
        assert body is not None
        entries = re.findall(r"_\((\w+)(?:, *(\w+))?\)", body[1])
        return {f"{op}.{overload}" if overload else op for op, overload in entries}

    have = set(export.aten_names("AutocastCUDA"))
    by_cudnn = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    assert autocast.LOWER_PRECISION & have == macro("LOWER_PRECISION_FP") | by_cudnn & have
    in_no_header = {"linalg_matrix_sqrth"}  # since 2.15; see the next test
    assert autocast.FP32 & have == macro("FP32") | in_no_header & have
    assert autocast.FP32_RESULT & have == macro("FP32_SET_OPT_DTYPE")
    assert autocast.WIDEST & have == macro("PROMOTE")
    assert all(autocast.policy(name) for name in have)


UNLISTED = [name for name in ("linalg_matrix_sqrth",) if hasattr(aten, name)]  # torch 2.15 has it


@pytest.mark.parametrize("name", ["exp", *UNLISTED])
def test_what_no_header_lists_is_cast_by_cudas_kernel_to_fp32(name: str) -> None:
    """The kernel of AutocastCUDA itself, on a fake CUDA tensor; `exp` is in the header."""
    mode, seen = fake_tensors.FakeTensorMode(), []
    x = fake_tensors.fake_empty(mode, (3, 3), HALF, torch.device("cuda"))

    class Dtypes(modes.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            seen.append((func, args[0].dtype))
            return func(*args, **(kwargs or {}))

    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with Dtypes():
            getattr(aten, name)(x)
    finally:
        torch.set_autocast_enabled("cuda", before)
    assert name in autocast.FP32 and seen[-1] == (getattr(aten, name).default, FLOAT)


class Cast(nn.Module):
    """Each result is of an operator that the two autocasts cast differently, or of a linear."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear, self.norm, self.device = nn.Linear(8, 8), nn.LayerNorm(8), device

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.autocast(self.device, dtype=HALF):
            y = self.linear(x)
            return {
                "linear": y,
                "softmax": y.softmax(-1),
                "layer_norm": self.norm(y),
                "pow": y.pow(2),
                "sum": y.sum(-1),
                "norm": y.norm(),
                "stack": torch.stack([y, y]),
                "addcmul": torch.addcmul(x, y, y),
                "double": x.double().exp(),
            }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_casts_as_on_cuda(device: str) -> None:
    """By hand, from the lists of the header: a linear in bf16, softmax, norms, powers and sums in
    fp32, addcmul in the widest; on the CPU none but the first."""
    plan = fxshard.plan(Cast(device), (torch.randn(4, 8),), world_size=2, device="cuda")
    traced = plan.program
    got = {
        traced.signature.output_names[int(result.name)].strip("[]'"): value.meta["val"].dtype
        for value, result in zip(traced.values, traced.results, strict=True)
        if result.kind == "output"
    }
    fp32 = ("softmax", "layer_norm", "pow", "sum", "norm", "addcmul")
    assert got == {
        **{"linear": HALF, "stack": HALF, "double": torch.float64},
        **dict.fromkeys(fp32, FLOAT),
    }


def test_autocast_around_plan() -> None:
    model, x = Norm(nn.Softmax(-1)), torch.randn(4, 32)
    with torch.autocast("cpu", dtype=HALF):
        traced = program(model, x)
    assert results(traced, aten._softmax.default) == [(FLOAT, (4, 32))]
    first, *_ = nodes(traced, aten.mm.default)
    assert first.meta["val"].dtype == HALF


def test_an_operator_that_no_list_has_is_refused_where_it_is_called_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newer torch casts more, which must not matter to models that call none of it."""
    monkeypatch.setattr(autocast, "FP32", autocast.FP32 - {"layer_norm"})
    x = torch.randn(4, 32)
    with torch.autocast("cpu", dtype=HALF):
        program(Norm(nn.Softmax(-1)), x)
        with pytest.raises(CaptureError, match="casts aten::layer_norm"):
            program(Norm(nn.LayerNorm(32)), x)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_that_turned_itself_off_is_refused() -> None:
    model, x = Norm(nn.Identity()), torch.randn(4, 32)
    with (
        torch.autocast("cuda", dtype=HALF),
        pytest.raises(CaptureError, match=r"torch\.autocast that is off"),
    ):
        program(model, x)
    decorated = torch.autocast("cuda", dtype=HALF)

    class Decorated(Norm):
        def forward(self, x: Tensor) -> Tensor:
            with decorated:
                return super().forward(x)

    with pytest.raises(CaptureError, match="made before the capture"):
        program(Decorated(nn.Identity()), x)
