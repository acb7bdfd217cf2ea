"""Contracts of what `fxshard._torch.modes` uses of torch."""

import contextlib
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from fxshard._torch import fake_tensors, modes, modules, process_groups
from fxshard._torch import sizes as torch_sizes


def test_dispatch_modes_see_backward_and_collectives() -> None:
    seen: list[str] = []

    class Names(modes.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with process_groups.fake_process_group(0, 2), Names():
        torch.ones(2, requires_grad=True).sin().sum().backward()
        group = dist.group.WORLD
        group.allgather_into_tensor_coalesced([torch.ones(4)], [torch.ones(2)]).wait()
    assert "aten.cos.default" in seen, "a mode no longer sees what backward runs"
    assert "c10d.allgather_into_tensor_coalesced_.default" in seen, (
        "a mode no longer sees the calls of a process group"
    )


def test_without_a_reduce_dtype_fsdp2_reduces_as_stored_or_as_computed() -> None:
    seen: list[torch.dtype] = []

    class Reductions(modes.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "reduce_scatter" in str(func):
                seen.extend(t.dtype for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
            return func(*args, **(kwargs or {}))

    with process_groups.fake_process_group(0, 2):
        model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        with Reductions():
            model(torch.ones(2, 4)).sum().backward()
    assert set(seen) == {torch.float32 if modules.REDUCES_AS_STORED else torch.bfloat16}


def test_autocast_can_be_passed_by_and_seen() -> None:
    x = torch.ones(2, 2)
    assert not modes.inside_autocast()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert modes.inside_autocast() and (x @ x).dtype == torch.bfloat16
        with modes.without_autocast("cpu"):
            assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert modes.inside_autocast()
    assert not modes.inside_autocast()


def test_outside_autocast_nothing_is_cast() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with modes.outside_autocast():
            assert (x @ x).dtype is torch.float32


def test_kernels_in_python_leave_sizes_open_that_those_in_cpp_close() -> None:
    """Traces use them too. (ATen/native/ConstantPadNd.cpp)"""
    closed = []
    for kernels in (contextlib.nullcontext, modes.python_kernels):
        env = torch_sizes.ShapeEnv(duck_shape=False)
        rows = torch_sizes.symbolic_size(env, "rows", 8)
        with kernels(), fake_tensors.FakeTensorMode(shape_env=env):
            torch.nn.functional.pad(torch.empty(3, rows), (0, 1))
        closed.append(bool(env.replacements))
    assert closed == [True, False]


def test_rng_is_kept() -> None:
    before = torch.get_rng_state()
    with modes.rng_kept():
        torch.manual_seed(before[0].item() + 1)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_composed_of_other_operators() -> None:
    aten = torch.ops.aten
    x, seen = torch.zeros(2), []

    class Names(modes.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if modes.is_composite(func):
                with self:
                    return func.decompose(*args, **(kwargs or {}))
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Names(), modes.below_autograd():
        moved = x.to(torch.float64)
    assert seen == [aten._to_copy.default] and moved.dtype is torch.float64
    assert modes.is_composite(aten.to.dtype)
    # these have kernels of their own: taken apart, they would be others
    for operator in (aten.silu_backward.default, aten.add.Tensor, aten.view.default):
        assert not modes.is_composite(operator)


def test_function_modes_can_be_left_out() -> None:
    seen: list[object] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch() as watch:
        assert modes.function_modes()[-1] is watch
        with modes.outside_function_modes():
            torch.ones(2).sum()
        assert not seen
        torch.ones(2)
    assert seen == [torch.ones]


def test_settings_are_what_is_set() -> None:
    before = modes.settings()
    assert before == modes.settings()
    with torch.device("cpu"):
        mode = type(modes.function_modes()[-1])
        assert modes.settings() == (*before, (mode, torch.device("cpu")))
    torch.set_default_dtype(torch.float64)
    try:
        assert modes.settings() != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert modes.settings() == before


def test_a_mode_gets_operators_that_take_functions_and_what_they_run_in_eager() -> None:
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    cond: Any = torch.ops.higher_order.cond
    seen: list[str] = []

    class Mode(modes.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            if not modes.is_higher_order(func):
                return func(*args, **(kwargs or {}))
            with self:
                return args[1](*args[3])

    with Mode(), torch.no_grad():
        cond(True, lambda x: (x.sin(),), lambda x: (x.cos(),), (torch.zeros(2),))
    assert seen[-2:] == ["cond", "aten.sin.default"]
    assert not modes.is_higher_order(torch.ops.aten.sin.default)
    for operator in (flex_attention, flex_attention_backward):
        assert modes.is_higher_order(operator) and modes.eager_kernel(operator) is not None


def test_a_profiler_is_seen() -> None:
    assert not modes.profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert modes.profiled()
    assert not modes.profiled()


def test_what_records_operators_is_known_by_name() -> None:
    seen: list[str] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(modes.tracer())
            return x.sin()

    model, x = Asking(), torch.ones(2)
    make_fx(model)(x)
    make_fx(model, tracing_mode="fake")(x)
    make_fx(model, pre_dispatch=True)(x)
    torch.export.export(model, (x,), strict=False)
    with fake_tensors.FakeTensorMode(allow_non_fake_inputs=True):
        model(x)
    torch.jit.trace(model, (x,), check_trace=False)
    with FlopCounterMode(display=False):
        model(x)
    assert set(seen[:-3]) == {"make_fx or torch.export"}
    assert seen[-3:] == ["FakeTensorMode", "torch.jit.trace", ""]
