"""torch's test_fsdp_comm_hooks.py: gradients are reduced by a hook of the user's."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.shared import NO_SHARD, STRATEGIES, compiled, grads_of
from tests.ranks import told

GRID = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
WRAPPED = pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "root_alone"])


class Net(nn.Module):
    """(batch, 8) -> (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.net(x)))


def net(strategy: Any, wrapped: bool = True, **options: Any) -> Any:
    return compiled(Net(), units=["net", "net.2"] if wrapped else [], strategy=strategy, **options)


def by_default(rank: int, world_size: int, strategy: Any) -> None:
    """A weight of a row per rank: without a hook the gradient is the mean of the ranks."""
    model = compiled(nn.Linear(1, world_size, bias=False), units=[], strategy=strategy)
    for _ in range(4):
        model.zero_grad()
        model(torch.tensor([float(rank)])).sum().backward()
        assert (full(model.weight.grad) == sum(range(world_size)) / world_size).all()


@GRID
def test_the_default_is_the_mean(ranks: Any, strategy: Any) -> None:
    ranks(2).run(by_default, strategy)


def noisy(noise: float, grad: Tensor, out: Tensor | None = None) -> None:
    """Adds noise and reduces; in place where nothing is sharded."""
    grad.add_(noise)
    if out is None:
        dist.all_reduce(grad)
    else:
        dist.reduce_scatter_tensor(out, grad)


def hooked(rank: int, world_size: int, strategy: Any, wrapped: bool) -> str:
    """The hook gets each unit's gradients, once; a second hook is refused."""
    with_hook, without = (net(strategy, wrapped) for _ in range(2))
    calls = []

    def hook(state: float, *tensors: Tensor) -> None:
        calls.append(len(tensors))
        noisy(state, *tensors)

    with_hook.register_comm_hook(1234.0, hook)
    torch.manual_seed(rank)
    x = torch.rand(16, 8)
    for model in (with_hook, without):
        model(x).sum().backward()
    assert calls == [1 if strategy is NO_SHARD else 2] * (3 if wrapped else 1)
    got, want = grads_of(with_hook), grads_of(without)
    for name, grad in got.items():
        mean = want[name]
        assert grad is not None and mean is not None
        assert_close(grad, (mean + 1234.0) * world_size, rtol=1e-5, atol=1e-3)
    return told(lambda: with_hook.register_comm_hook(1234.0, hook))


@WRAPPED
@GRID
def test_hook_registered_once(ranks: Any, strategy: Any, wrapped: bool) -> None:
    for said in ranks(2).run(hooked, strategy, wrapped):
        assert "register_comm_hook does not go together with another hook" in said


def without_a_hook(rank: int, world_size: int) -> list[str]:
    register = functools.partial(net(STRATEGIES[0]).register_comm_hook, None)
    return [told(functools.partial(register, hook)) for hook in (None, "fp16")]


def test_what_cannot_be_called_is_no_hook(ranks: Any) -> None:
    for none, text in ranks(2).run(without_a_hook):
        assert "register_comm_hook: None cannot be called" in none
        assert "register_comm_hook: 'fp16' cannot be called" in text


def of_a_submodule(rank: int, world_size: int, strategy: Any) -> bool:
    """Submodules are the user's own objects: the method is the root's."""
    model = net(strategy)
    return any(hasattr(module, "register_comm_hook") for module in list(model.modules())[1:])


@GRID
def test_submodules_take_no_hook(ranks: Any, strategy: Any) -> None:
    assert ranks(2).run(of_a_submodule, strategy) == [False, False]


def with_replicas(rank: int, world_size: int, strategy: Any) -> str:
    options = {"strategy": strategy, "mesh": init_device_mesh("cpu", (1, world_size))}
    model = compiled(Net(), units=[nn.Linear], **options)
    return told(lambda: model.register_comm_hook(1234.0, noisy))


@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2],
    ids=lambda strategy: strategy.name,
)
def test_hybrid_strategies_take_no_hook(ranks: Any, strategy: Any) -> None:
    for said in ranks(2).run(with_replicas, strategy):
        assert "register_comm_hook does not go together with strategy='hybrid_shard" in said


def compressed(
    rank: int, world_size: int, name: str, dtype: torch.dtype, strategy: Any, wrapped: bool
) -> None:
    """torch's own hooks leave the gradients that `reduce_dtype` does."""

    def decompress(state: Any, grad: Tensor) -> None:
        """torch's calls `record_stream`, which there is on accelerators only."""
        grad.data = grad.data.to(state.parameter_type)

    with_hook = net(strategy, wrapped)
    state = default_hooks.LowPrecisionState(process_group=dist.group.WORLD)
    with_hook.register_comm_hook(state, getattr(default_hooks, name))
    with_policy = net(strategy, wrapped, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    torch.manual_seed(0)
    x = torch.rand(16, 8) + rank
    for model in (with_hook, with_policy):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mock.patch.object(default_hooks, "_decompress", decompress):
            model(x).sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        optimizer.step()
    assert_close(grads_of(with_hook), grads_of(with_policy))


@pytest.mark.sample(2)
@WRAPPED
@GRID
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16_compress_hook", torch.float16), ("bf16_compress_hook", torch.bfloat16)],
    ids=["fp16", "bf16"],
)
def test_compressing_hook(
    ranks: Any, name: str, dtype: torch.dtype, strategy: Any, wrapped: bool
) -> None:
    ranks(2).run(compressed, name, dtype, strategy, wrapped)
