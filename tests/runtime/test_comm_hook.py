"""The user's reduction of gradients, as FSDP1's `register_comm_hook`."""

import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

import fxshard
from fxshard._torch import process_groups
from fxshard.codegen.emit import Executor, TracedExecutor
from fxshard.config.checked import Config
from fxshard.errors import ConfigError
from fxshard.ir.splitting import configured_units
from fxshard.plans.workload import Workload
from fxshard.runtime.module import sharded
from fxshard.runtime.sharding import Sharding
from fxshard.runtime.world.mesh import world_over
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked_steps
from fxshard.validation.tracker import Tracker, WatchedWorld
from tests import fsdp2
from tests.fsdp2 import Result
from tests.oracles import count_collectives
from tests.zoo import MODELS

HOOKS = {
    "plain": (default_hooks.reduce_scatter_hook, default_hooks.DefaultState),
    "bf16": (default_hooks.bf16_compress_hook, default_hooks.LowPrecisionState),
    "fp16": (default_hooks.fp16_compress_hook, default_hooks.LowPrecisionState),
}


def decompress(state: Any, grad: Tensor) -> None:
    """As torch's, which asks for the stream of a CPU tensor, and dies: it knows accelerators."""
    grad.data = grad.data.to(state.parameter_type)


def trained(name: str, hook: str | None, **options: Any) -> tuple[Result, list[Any]]:
    """Three steps, and the collectives of the last backward's kinds."""
    case = MODELS[name]
    torch.manual_seed(0)
    model = fxshard.compile(case.build(), units=case.units, **options)
    if hook:
        function, state = HOOKS[hook]
        if options.get("strategy") == "no_shard" and hook == "plain":
            function = default_hooks.allreduce_hook
        model.register_comm_hook(state(dist.distributed_c10d._get_default_group()), function)
    with (
        count_collectives() as seen,
        unittest.mock.patch.object(default_hooks, "_decompress", decompress),
    ):
        result = fsdp2.run_steps(model, case, 3)
    return result, seen.calls


def default_hooks_against_fsdp2(rank: int, world_size: int, name: str) -> None:
    case = MODELS[name]
    theirs = fsdp2.train(case, 3)
    plain, calls = trained(name, "plain")
    fsdp2.assert_bitwise(plain, theirs)
    units = len(fsdp2.units_of(case.build(), case)) + 1
    assert sum(call.kind == "reduce_scatter" for call in calls) == 3 * units
    whole = sum(call.nbytes for call in calls if call.kind == "reduce_scatter")
    for hook, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        ours, calls = trained(name, hook)
        half = sum(call.nbytes for call in calls if call.kind == "reduce_scatter")
        assert half * 2 == whole, hook
        for fqn, grad in ours.grads[0].items():
            if grad is not None:
                assert grad.dtype == torch.float32
                assert torch.equal(grad, grad.to(dtype).float()), fqn  # was rounded on its way
                expected = theirs.grads[0][fqn]
                torch.testing.assert_close(grad, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["mlp13", pytest.param("transformer", marks=pytest.mark.slow)])
def test_torchs_hooks(ranks: Any, name: str) -> None:
    ranks(2).run(default_hooks_against_fsdp2, name)


def no_shard(rank: int, world_size: int) -> None:
    reference, _ = trained("mlp13", None, strategy="no_shard")
    for hook in ("plain", "bf16"):
        ours, calls = trained("mlp13", hook, strategy="no_shard")
        assert {call.kind for call in calls} == {"all_reduce"} | (set())
        if hook == "plain":
            fsdp2.assert_close(ours, reference, rtol=1e-6)
        else:
            grads = ours.grads[0]
            assert all(
                torch.equal(g, g.bfloat16().float()) for g in grads.values() if g is not None
            )


def test_no_shard_hook_takes_one_tensor(ranks: Any) -> None:
    ranks(2).run(no_shard)


def seen_by_a_hook(rank: int, world_size: int) -> None:
    """The hook gets each rank's rows one after the other, and what it writes is the gradient."""
    shapes: list[tuple[int, int]] = []

    def hook(state: list[int], flat: Tensor, out: Tensor) -> None:
        shapes.append((flat.numel(), out.numel()))
        assert state == [7]
        out.copy_(flat.view(world_size, -1)[rank])  # no communication at all

    model = fxshard.compile(torch.nn.Sequential(torch.nn.Linear(3, 5)), mixed_precision=None)
    model.register_comm_hook([7], hook)
    torch.manual_seed(rank)
    x = torch.randn(4, 3)
    model(x).sum().backward()
    # rows of f32[5,3] and f32[5] padded to 6: 18 + 6 numbers, half of them here
    assert shapes == [(24, 12)]
    mine = x.sum(0).expand(5, 3)[rank * 3 : rank * 3 + 3]
    torch.testing.assert_close(model[0].weight.grad.to_local(), mine)
    assert torch.equal(model[0].bias.grad.to_local(), torch.full((3 - rank,), 4.0))
    with pytest.raises(ConfigError, match="another hook"):
        model.register_comm_hook([7], hook)


def test_hook_sees_rank_order(ranks: Any) -> None:
    ranks(2).run(seen_by_a_hook)


def copying_hook(world_size: int, flat: Tensor, *out: Tensor) -> None:
    if out:
        out[0].copy_(flat[: out[0].numel()])


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_bytes(strategy: str) -> None:
    """Static = measured, with a hook that holds nothing of its own."""
    case = MODELS["mlp13"]
    args, kwargs = case.batch(0, 0)
    config = Config(strategy=strategy, units=case.units, optimizer=torch.optim.AdamW)
    with process_groups.fake_process_group(0, 3):
        torch.manual_seed(0)
        model, tracker = case.build(), Tracker()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (3,))

        def make(program: Any, world: Any) -> Executor:
            return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

        units = configured_units(model, config)
        sharding = Sharding(model, units, world_over(mesh, config, units), config)
        compiled = sharded(sharding, make)
        compiled.register_comm_hook(3, copying_hook)
        work = Workload(model, (args, kwargs), 3, config)
        tracked_steps(compiled, work, tracker, 2)
        result = compare(compiled.memory, split_steps(tracker.measured(), 2))
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_refused_by_name() -> None:
    def hook(state: Any, flat: Tensor) -> None:
        pass

    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="process group"):
        fxshard.compile(layer, world_size=2).register_comm_hook(None, hook)
    for options, name in (
        ({"reduce_op": "sum"}, "reduce_op='sum'"),
        ({"gradient_divide_factor": 2.0}, "gradient_divide_factor"),
    ):
        with process_groups.fake_process_group(0, 2):
            model = fxshard.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)), **options)
            with pytest.raises(ConfigError, match=name):
                model.register_comm_hook(None, hook)
    with process_groups.fake_process_group(0, 4):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
        model = fxshard.compile(
            torch.nn.Sequential(torch.nn.Linear(2, 2)), strategy="hybrid_shard", mesh=mesh
        )
        with pytest.raises(ConfigError, match="hybrid_shard"):
            model.register_comm_hook(None, hook)
