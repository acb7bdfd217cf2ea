"""What is set around a call: settings of torch that forward reads, and modes that change it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard.errors import CaptureError
from tests.capture.capture_cases import Computes, eager_and_ours


class Doubled(TorchFunctionMode):
    """Twice what F.linear computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        return found * 2 if func is F.linear else found


class DoubledProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        return found * 2 if func is torch.ops.aten.mul.Scalar else found


def both(compute: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    return eager_and_ours(lambda: Computes(compute))


@contextlib.contextmanager
def set_for_a_while(put: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


SETTINGS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "default dtype": (
        lambda x: x.to(torch.get_default_dtype()),
        lambda: set_for_a_while(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "dtype of what is made": (
        lambda x: x + torch.linspace(0, 1, 4),
        lambda: set_for_a_while(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "deterministic algorithms": (
        lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3),
        lambda: set_for_a_while(torch.use_deterministic_algorithms, True, False),
    ),
    "precision of products": (
        lambda x: x * (2 if torch.get_float32_matmul_precision() == "highest" else 3),
        lambda: set_for_a_while(torch.set_float32_matmul_precision, "high", "highest"),
    ),
    "default device": (
        lambda x: x * (2 if torch.get_default_device().type == "meta" else 3),
        lambda: torch.device("meta"),
    ),
}


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_a_setting_of_torch_that_forward_reads(case: str) -> None:
    compute, block = SETTINGS[case]
    eager, ours = both(compute)
    x = torch.arange(8.0).view(2, 4)
    assert_close(ours(x), eager(x))
    with block():
        mine, theirs = ours(x), eager(x)
    assert_close(mine, theirs)
    assert_close(ours(x), eager(x))
    assert len(ours._fxshard.variants) == 2


@pytest.mark.parametrize("called_before", [False, True])
def test_a_function_mode_around_a_call_is_refused(called_before: bool) -> None:
    eager, ours = both(torch.tanh)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxshard.compile_step(model, F.mse_loss, optimizer, world_size=2)
    x = torch.ones(2, 4)
    calls: list[Callable[[], Any]] = [lambda: ours(x), lambda: step(x, x)]
    if called_before:
        for call in calls:
            call()
    for call in calls:
        with Doubled(), pytest.raises(CaptureError, match="inside of Doubled, a TorchFunctionMode"):
            call()
    assert_close(ours(x), eager(x))


def test_a_function_mode_inside_of_forward_is_traced() -> None:
    weight = torch.eye(4)

    def compute(x: Tensor) -> Tensor:
        with Doubled():
            return F.linear(x, weight)

    eager, ours = both(compute)
    assert_close(ours(torch.ones(2, 4)), eager(torch.ones(2, 4)))


@pytest.mark.parametrize("called_before", [False, True])
def test_a_dispatch_mode_changes_what_runs(called_before: bool) -> None:
    eager, ours = both(lambda x: torch.ops.aten.mul.Scalar(x, 3.0))
    x = torch.ones(2, 4)
    if called_before:
        ours(x)
    for _ in range(2):
        with torch.no_grad(), DoubledProducts():
            mine, theirs = ours(x), eager(x)
        assert_close(mine, theirs)
    assert_close(ours(x), eager(x))


def linears_doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(module, nn.Linear) else None


def all_moved(module: nn.Module, args: Any, output: Any) -> Any:
    return output + 1


def inputs_tripled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 3,)


def gradients_halved(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if grad is None else grad / 2 for grad in inputs)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(
    "register, hook",
    [
        (torch_module.register_module_forward_hook, linears_doubled),
        (torch_module.register_module_forward_hook, all_moved),
        (torch_module.register_module_forward_pre_hook, inputs_tripled),
        (torch_module.register_module_full_backward_hook, gradients_halved),
    ],
    ids=["linears", "all", "inputs", "gradients"],
)
def test_a_hook_on_all_modules(register: Any, hook: Any, called_before: bool) -> None:
    eager, ours = both(torch.tanh)

    def same() -> None:
        found = []
        for model in (ours, eager):
            x = torch.arange(8.0).view(2, 4).div(8).requires_grad_()
            out = model(x)
            out.square().sum().backward()
            found.append([out, x.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert_close(*found)

    if called_before:
        same()
    handle = register(hook)
    try:
        same()
        same()
    finally:
        handle.remove()
    same()
    assert len(ours._fxshard.variants) == 2


def test_a_hook_on_all_modules_sees_those_of_the_model() -> None:
    _, ours = both(torch.tanh)
    seen: list[str] = []
    handle = torch_module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        for _ in range(2):
            ours(torch.ones(2, 4))
    finally:
        handle.remove()
    assert set(seen) == {"Linear", type(ours).__name__}
    assert seen.count(type(ours).__name__) == 2
