"""Truncate and stamp, of models whose parameters are DTensors: equal to the flat capture."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fxshard._torch.process_groups import fake_process_group
from tests.capture.test_stamp import both, planned
from tests.distributed.tensor_parallel_cases import (
    VOCABULARY,
    Block,
    Llama,
    of_sequences,
    of_sequences_and_logits,
    of_tensors,
)

DEPTH = 8


@pytest.fixture(autouse=True)
def ranks_without_data() -> Iterator[None]:
    with fake_process_group(0, 4):
        yield


def parallel(
    plan: Callable[[nn.Module, DeviceMesh], None], change: Callable[[Any], Any] = lambda model: None
) -> nn.Module:
    """Llama of `DEPTH` layers, parallelised, then changed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    model = Llama(layers=DEPTH)
    change(model)
    plan(model, mesh)
    return model


def call() -> tuple[tuple[Tensor], dict[str, Any]]:
    return (torch.arange(16).reshape(2, 8) % VOCABULARY,), {}


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (of_sequences, {"checkpoint": "full"}),
        pytest.param(of_tensors, {}, marks=pytest.mark.slow),
        pytest.param(of_sequences_and_logits, {}, marks=pytest.mark.slow),
    ],
)
def test_stamped(
    plan: Any, options: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = both(partial(parallel, plan), call(), monkeypatch, caplog, planned, **options)
    assert (seen.stamped, seen.lines) == (1, [])


class OtherBackward(Block):
    """Runs the operators of a block in forward, and others in backward."""

    placement: Any = Replicate()

    def forward(self, x: Tensor) -> Tensor:
        mesh = next(p.device_mesh for p in self.parameters() if isinstance(p, DTensor))
        around = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return super().forward(around.to_local(grad_placements=[self.placement]))


def other_backward(model: Llama, *, of: int | None) -> None:
    """All layers say where the gradient of their input is; one of them another place."""
    for layer in model.layers:
        layer.__class__ = OtherBackward
    if of is not None:
        model.layers[of].placement = Partial()


def other_plan(model: nn.Module, mesh: DeviceMesh, *, of: int) -> None:
    """One layer is cut otherwise: its output projection is full on all ranks."""
    of_tensors(model, mesh)
    layer: Any = model.layers[of]  # type: ignore[index]
    layer.feed_forward.extra = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())


@pytest.mark.parametrize(
    "of", [4, *(pytest.param(of, marks=pytest.mark.slow) for of in (None, 0, DEPTH - 1))]
)
def test_what_backward_alone_does_is_seen(
    of: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = partial(parallel, of_tensors, partial(other_backward, of=of))
    seen = both(build, call(), monkeypatch, caplog)
    assert (seen.stamped == 1) == (of in (None, 0, DEPTH - 1)), seen.lines


@pytest.mark.slow
def test_a_parameter_that_one_layer_alone_has_is_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = partial(parallel, partial(other_plan, of=4))
    assert both(build, call(), monkeypatch, caplog).stamped == 0


def test_placements_of_one_layer_are_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(model: Any, mesh: DeviceMesh) -> None:
        of_tensors(model, mesh)
        norm = model.layers[4].norm_1
        weight = DTensor.from_local(norm.weight.detach(), mesh, [Replicate()], run_check=False)
        norm.weight = nn.Parameter(weight)
        norm.register_forward_pre_hook(
            lambda _, args: DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
        )
        norm.register_forward_hook(lambda *given: given[-1].to_local())

    assert both(partial(parallel, plan), call(), monkeypatch, caplog).stamped == 0


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class WithOwnFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(OwnFunction.apply(x))


@pytest.mark.slow
def test_functions_of_the_users_own_are_not_stamped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def change(model: Any) -> None:
        for layer in model.layers:
            layer.__class__ = WithOwnFunction

    seen = both(partial(parallel, of_tensors, change), call(), monkeypatch, caplog)
    assert seen.stamped == 0 and "custom autograd functions" in seen.lines[0]
