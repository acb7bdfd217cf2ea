"""Small programs that random ones were shrunk to: planned and measured bytes."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import CaptureError
from tests.ranks import Ranks

BF16 = torch.bfloat16


class Net(nn.Module):
    """`run`, with a linear layer and an odd parameter."""

    def __init__(self, run: Callable[["Net", Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.weight = nn.Parameter(weight)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


# What runs, the parameter, the input.
PROGRAMS: dict[str, tuple[Callable[[Net, Tensor], Tensor], Tensor, Tensor]] = {
    # A dimension of one element may have any stride; a gathered parameter has the usual one.
    "strides of one row": (
        lambda net, x: nn.functional.linear(net.linear(x), net.weight),
        torch.randn(1, 3).t(),
        torch.randn(4, 4, 3),
    ),
    # Backward reads no gradient of an output.
    "a gradient of nothing": (
        lambda net, x: torch.cat((net.weight, x.flatten())),
        torch.empty(0),
        torch.randn(2, 3),
    ),
    "nothing runs in backward": (
        lambda net, x: x,
        torch.ones(3),
        torch.randn(3, 2, dtype=BF16).requires_grad_(),
    ),
    # The loss's cast makes the gradient that is sent, and that another operator reads.
    "a cast in the loss": (
        lambda net, x: net.weight - x,
        torch.randn(2, 5, dtype=BF16),
        torch.randn(2, 5, dtype=BF16).requires_grad_(),
    ),
    # Its gradients have the dtype of the first operand, though the second be wider.
    "operands of two dtypes": (
        lambda net, x: nn.functional.smooth_l1_loss(x * net.weight, x.float(), reduction="none"),
        torch.randn(5, dtype=BF16),
        torch.randn(4, 5, dtype=BF16).requires_grad_(),
    ),
    # The gradient of the output is that of the parameter.
    "handed through": (lambda net, x: x + net.weight, torch.randn(3, 5), torch.randn(3, 5)),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("loss", [lambda y: y.float().square().sum(), None])
def test_bytes(name: str, loss: Any) -> None:
    run, weight, x = PROGRAMS[name]
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "loss": loss, "world_size": 2}
    found = fxshard.validate(Net(run, weight), (x,), **options)
    assert found.max_abs_difference == 0 and not found.unknown


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_scalar_that_is_ignored_beside_an_optimizer(in_backward: bool) -> None:
    net = Net(lambda net, x: net.linear(x) * net.weight, torch.tensor(2.0))
    net.weight.requires_grad_(not in_backward)
    options: dict[str, Any] = {"ignored": ["weight"], "world_size": 2}
    options |= {"optimizer": torch.optim.AdamW, "optimizer_in_backward": in_backward}
    found = fxshard.validate(net, (torch.randn(4, 3),), **options)
    assert found.max_abs_difference == 0 and not found.unknown


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_torchs_transformer_layers_are_evaluated_without_gradients() -> None:
    """Where eager takes a fused way, which it never does while it is traced."""
    eager = Attending().eval()
    ours = fxshard.compile(copy.deepcopy(eager), world_size=2)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), eager(x))


def test_buckets_of_several_dtypes_are_gathered_ahead() -> None:
    """Limits count buckets, of which each takes a launch per dtype."""
    dtypes = (torch.float32, BF16, torch.float64)

    def run(net: Net, x: Tensor) -> Tensor:
        for layer, dtype in zip(net.linear, dtypes, strict=True):
            x = layer(x.to(dtype))
        return x * net.weight

    model = Net(run, torch.randn(4))
    model.linear = nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for dtype in dtypes))
    options: dict[str, Any] = {"units": ["linear.*"], "min_bucket_bytes": 10_000, "world_size": 2}
    found = fxshard.validate(model, (torch.randn(2, 4),), forward_prefetch=0, **options)
    assert found.max_abs_difference == 0


def test_an_output_that_has_no_backward_is_refused_with_a_way() -> None:
    """Eager trains while no loss reads it; a trace has the gradients of every output."""

    def run(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        y = net.linear(x)
        z = y.tanh()
        z += y
        return net.weight * y, z

    ours = fxshard.compile(Net(run, torch.randn(5)), world_size=2)
    with pytest.raises(CaptureError, match="write y = y \\+ x for y \\+= x, or return"):
        ours(torch.randn(4, 3))


class Recurrent(nn.Module):
    """Under autocast, of an input [steps, batch, 3] that is float32."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(3, 4)
        self.casts = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=self.casts):
            return self.layer(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_under_autocast_give_eagers_dtype(kind: type[nn.RNNBase]) -> None:
    """Eager's LSTM is one kernel, all of whose operands autocast casts; a trace takes it apart.

    A processor may have no such kernel for bf16, and eager raises: its result in fp32, rounded, is
    the reference there.
    """
    torch.manual_seed(0)
    eager = Recurrent(kind)
    ours = fxshard.compile(copy.deepcopy(eager), world_size=2)
    x = torch.randn(4, 3, 3)
    eager.casts = kind is nn.GRU or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    outputs = [eager(x) if eager.casts else eager(x).to(BF16), ours(x)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.02, atol=0.01)  # and the dtype
    for output in outputs:
        output.float().square().sum().backward()
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0.02, atol=0.02, msg=name)


class Counting(nn.Module):
    """A layer that reads as many numbers as its input has positive ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + x[x > 0].sum())


def test_layers_that_are_equal_but_for_sizes_that_depend_on_data() -> None:
    """Each has a symbol of its own, so that no region stands for two of them."""
    eager = nn.Sequential(*(Counting() for _ in range(3)))
    ours = fxshard.compile(copy.deepcopy(eager), world_size=2)
    x = torch.randn(4, 3)
    torch.testing.assert_close(ours(x), eager(x))


class OfABuffer(nn.Module):
    """A layer of a buffer, then the same one of the input, whose size is open."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.register_buffer("fixed", torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return second(x).tanh().sum() + first(self.fixed).tanh().sum()


def test_a_region_of_an_open_size_is_no_region_of_that_number() -> None:
    ours = fxshard.compile(
        OfABuffer(), world_size=2, units=["layers.*"], dynamic={"batch": [("x", 0)]}
    )
    ours(torch.randn(4, 3))
    schedule = ours.plan.program.schedule
    calls = [row.target for row in schedule.forward.nodes if row.op == "call_module"]
    assert len(calls) == len(set(calls))


class Normalized(nn.Module):
    """Batch norm of what lies in memory in another order than that of its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(0, 1))


def test_batch_norm_of_a_transposed_input() -> None:
    """Its gradient is contiguous, of which views in backward are made."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4)
    eager = Normalized()
    ours = fxshard.compile(copy.deepcopy(eager), world_size=2)
    for model in (eager, ours):
        model(x).square().log1p().sum().backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    found = fxshard.validate(Normalized(), (x,), world_size=2)
    assert found.max_abs_difference == 0


def test_the_gradient_of_a_transposed_output_of_open_size() -> None:
    """It arrives as the output lies, which is not as backward was traced for: there is a copy."""
    net = Net(lambda net, x: (net.linear(x) * net.weight).t(), torch.randn(3))
    options: dict[str, Any] = {"loss": lambda y: y.square().log1p().sum(), "world_size": 2}
    options["dynamic"] = {"batch": [("x", 0)]}
    found = fxshard.validate(net, (torch.randn(5, 3),), **options)
    assert found.max_abs_difference == 0


class Row(nn.Module):
    """The gradient of its parameter has strides (1, 1), of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,io->...o", x, self.row)


def gradient_of_a_row(rank: int, world_size: int) -> Tensor | None:
    model = fxshard.compile(Row(), strategy="no_shard")
    model(torch.full((3, 2, 6), rank + 1.0)).sum().backward()
    (parameter,) = model.parameters()
    return (
        parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    )


def test_gloo_reduces_a_row_alone_whatever_its_strides(ranks: Callable[[int], Ranks]) -> None:
    """It compares the strides of what was sent with those that its shape has."""
    for grad in ranks(2).run(gradient_of_a_row):
        torch.testing.assert_close(grad, torch.full((1, 5), 54.0))


def test_a_capture_that_took_a_second_way_keeps_no_output() -> None:
    """An error of the first way is no garbage that holds frames, and what callers have in them."""
    ours = fxshard.compile(Counting(), world_size=2)
    gc.collect()
    gc.disable()
    try:
        output = ours(torch.randn(4, 3))
        seen = weakref.ref(output)
        del output
        assert seen() is None
    finally:
        gc.enable()


class Hollow(nn.Module):
    """A unit whose small parameters, packed together, have no element; [n, 3] -> [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.one]) + self.other.sum()


def hollow_step(rank: int | None, world_size: int) -> list[Tensor]:
    """Gradients and output of a step; `rank` None: all ranks in this process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Hollow(), nn.Linear(3, 3))
    world = {"world_size": world_size} if rank is None else {}
    fxshard.compile(model, units=["0", "1", "2"], pack_bytes=1 << 20, **world)
    out = model(torch.ones(4, 3))
    out.sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    return [out.detach(), *full]


def test_packed_parameters_without_an_element(ranks: Any) -> None:
    """The buffer of the packed ones told how many ranks it is from."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 3), Hollow(), nn.Linear(3, 3))
    out = eager(torch.ones(4, 3))
    out.sum().backward()
    expected = [out.detach(), *(p.grad for p in eager.parameters() if p.grad is not None)]
    for found in (hollow_step(None, 2), *ranks(2).run(hollow_step)):
        torch.testing.assert_close(found, expected)
