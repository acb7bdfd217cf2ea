"""Outputs, inputs."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import fxshard
from fxshard.errors import CaptureError
from tests.capture.capture_cases import OUTPUTS, Output, assert_same_output
from tests.eager import Net, assert_trains_like_eager, batch, pair
from tests.zoo import MODELS

# -- outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.sample(8)
def test_outputs_are_what_eager_returns(name: str) -> None:
    function, loss = OUTPUTS[name]
    assert_trains_like_eager(lambda: Net(function), batch(), loss=loss)
    eager, ours = pair(lambda: Net(function))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert_same_output(ours(batch()), eager(batch()))


def test_outputs_without_any_gradient() -> None:
    eager, ours = pair(lambda: Net(lambda net, x: (net.a(x).argmax(-1), net.a(x).detach(), None)))
    assert_same_output(ours(batch()), eager(batch()))


WITHOUT_OPERATORS: dict[str, Any] = {
    "a parameter": lambda net, x: net.a.weight,
    "one twice": lambda net, x: (net.a.weight, net.a.weight),
    "in a dict": lambda net, x: {"w": net.a.weight, "b": net.b.bias},
    "beside an input": lambda net, x: (x, net.a.weight),
    "beside a buffer": lambda net, x: (net.seen, net.a.bias),
    "detached": lambda net, x: net.a.weight.detach(),
    "a view": lambda net, x: net.a.weight.flatten(),
}


@pytest.mark.parametrize("name", WITHOUT_OPERATORS)
def test_a_forward_that_computes_nothing_returns_copies_of_parameters(name: str) -> None:
    function = WITHOUT_OPERATORS[name]
    eager, ours = pair(lambda: Net(function))
    found = [tree_leaves(model(batch())) for model in (eager, ours)]
    assert_close(found[1], found[0])
    for leaves in found:
        if trained := [leaf.square().sum() for leaf in leaves if leaf.requires_grad]:
            sum(trained).backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)
    result = fxshard.validate(Net(function), (batch(),), world_size=2)
    assert result.max_abs_difference == 0, result.table(only_different=True)


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_objects_that_may_hide_tensors_are_refused() -> None:
    takes = Net(lambda net, box: net.a(box.tensor).sum())
    with pytest.raises(CaptureError, match=r"argument args\[0\] is a Opaque, which .* look into"):
        fxshard.plan(takes, (Opaque(batch()),), world_size=2)
    returns = Net(lambda net, x: {"box": Opaque(net.a(x))})
    with pytest.raises(CaptureError, match=r"output \['box'\] is a Opaque"):
        fxshard.plan(returns, (batch(),), world_size=2)
    _, ours = pair(lambda: takes)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"argument args\[0\]"):
            ours(Opaque(batch()))


# -- inputs ----------------------------------------------------------------------------------------


def configured(net: Net, x: Tensor, *, scale: Any = 1.0, mode: str = "a", bias: Any = None) -> Any:
    y = net.a(x) if mode == "a" else net.b(x)
    factor = {bool: 7, int: 3, float: 5}[type(scale)]
    return (y * scale * factor if bias is None else y * scale + bias).sum()


def test_keywords_and_plain_values() -> None:
    eager, ours = pair(lambda: Net(configured))
    x, inf = batch(), float("inf")
    # Equal numbers of other types are other calls.
    for scale in (1, 1.0, True, 0, 0.0, -0.0, False, 2.5, inf):
        assert_close(ours(x, scale=scale), eager(x, scale=scale), equal_nan=True)
    for kwargs in ({"mode": "b"}, {"bias": x[0, 0]}, {"bias": None}, {"mode": "a", "scale": 2}):
        assert_close(ours(x, **kwargs), eager(x, **kwargs))
    assert_close(ours(x=x), eager(x=x))
    nan = float("nan")
    assert ours(x, scale=nan).isnan()
    count = len(ours._fxshard.variants)
    assert ours(x, scale=float("nan")).isnan()
    assert len(ours._fxshard.variants) == count


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    factor: float = 1.0


def test_containers_and_dataclasses_of_tensors() -> None:
    def forward(net: Net, batches: list[Batch], more: dict[str, Tensor]) -> Any:
        total = sum(net.a(b.x).sum() * b.factor for b in batches)
        return Output(total + net.b(more["x"]).sum(), rest=batches)

    eager, ours = pair(lambda: Net(forward))
    x = batch()
    for factor in (1.0, 2.0):
        call = ([Batch(x), Batch(x + 1, factor)], {"x": x})
        assert_same_output(ours(*call), eager(*call))


def test_a_batch_of_other_strides_is_another_call() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.a(x).sum() * (1 if x.is_contiguous() else 2)

    eager, ours = pair(lambda: Net(forward))
    for x in (batch(), batch().t().contiguous().t(), torch.randn(8, 5)[::2]):
        assert_close(ours(x), eager(x))


def test_dropout_draws_the_numbers_of_eager() -> None:
    eager, ours = pair(MODELS["dropout"].build, world_size=1)
    (tokens,), _ = MODELS["dropout"].batch(0, 0)
    for seed in (1, 2):
        torch.manual_seed(seed)
        theirs = eager(tokens)
        torch.manual_seed(seed)
        assert torch.equal(ours(tokens), theirs)


def test_autocast_is_part_of_the_call() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 6))

    eager, ours = pair(build)
    for enabled in (False, True, False):
        found = []
        for model in (eager, ours):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = model(batch())
            output.float().square().sum().backward()
            found.append((output, [p.grad for p in model.parameters()]))
        assert found[0][0].dtype is (torch.bfloat16 if enabled else torch.float32)
        assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_user_code_around_the_layers_runs_as_in_eager() -> None:
    """Hooks, custom autograd functions, parametrizations."""

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 3

    def build() -> nn.Module:
        net = Net(lambda net, x: Triple.apply(net.a(x) * net.b(x)).sum())
        nn.utils.parametrizations.weight_norm(net.a)
        nn.utils.parametrizations.spectral_norm(net.b)
        net.a.register_forward_hook(lambda module, args, output: output * 2)
        net.b.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        net.b.register_full_backward_hook(lambda module, grads, _: tuple(g * 2 for g in grads))
        net.register_forward_hook(lambda module, args, output: output + 1)
        return net

    assert_trains_like_eager(build, batch().requires_grad_())
