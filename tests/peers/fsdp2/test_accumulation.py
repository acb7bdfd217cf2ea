"""test_fully_shard_pending_grad.py and _grad_dtype.py: sums and dtypes of gradients.

What these files read of gradients that wait is refused by name, and so is the `grad_dtype` of a
policy.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxshard
from tests.peers.fsdp2.common import made

BF16, FP32 = torch.bfloat16, torch.float32
OFFLOADED = pytest.mark.parametrize("offloaded", [False, True])


def policy_of(offloaded: bool) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy()


def assert_full(param: Any, value: float) -> None:
    whole = param.grad.full_tensor()
    assert torch.equal(whole, torch.full_like(whole, value))


# -- sums ------------------------------------------------------------------------------------------


def in_two_dtypes(rank: int, world_size: int, offloaded: bool, reduce: Any) -> None:
    """What waits is summed in bf16, of which 257 is none; what was reduced before stays in fp32."""
    model: Any = nn.Linear(1, 2, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce)
    fxshard.fully_shard(model, mp_policy=policy, offload_policy=policy_of(offloaded))
    cases = [
        ([(True, 256), (False, 1), (True, -256)], 1),
        ([(True, 3), (False, 256), (False, 1), (True, -256)], 3),
    ]
    for calls, expected in cases:
        model.zero_grad(set_to_none=True)
        for sync, value in calls:
            model.set_requires_gradient_sync(sync)
            model(torch.full((1, 1), value, dtype=BF16)).sum().backward()
            assert model.weight.grad.dtype == model.weight.grad.to_local().dtype == FP32
            if not sync:
                assert_full(model.weight, calls[0][1])
        assert_full(model.weight, expected)


@OFFLOADED
@pytest.mark.parametrize("reduce", [None, BF16])
def test_what_waits_is_summed_in_the_dtype_of_compute(
    ranks: Any, reduce: Any, offloaded: bool
) -> None:
    ranks(2).run(in_two_dtypes, offloaded, reduce)


def divided(rank: int, world_size: int) -> None:
    model: Any = nn.Linear(1, 2, bias=False)
    fxshard.fully_shard(model)
    model.set_gradient_divide_factor(3)
    for sync, expected in ((True, 2), (False, 2), (True, 6)):
        model.set_requires_gradient_sync(sync)
        model(torch.full((1, 1), 3.0)).sum().backward()
        assert_full(model.weight, expected)


def test_a_factor_divides_what_waited_once(ranks: Any) -> None:
    ranks(2).run(divided)


class Pair(nn.Module):
    """The second layer may be left out."""

    def __init__(self, ins: int = 4, outs: int = 4) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(ins, outs, bias=False) for _ in range(2))

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = self.first(x)
        return y + self.second(x) if both else y


def cleared(rank: int, world_size: int, to_none: bool) -> None:
    """`zero_grad` of one module of a unit clears what was reduced, and not what waits."""
    model: Any = Pair()
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    fxshard.fully_shard([model.first, model.second], mp_policy=policy)
    fxshard.fully_shard(model)
    for sync, value in ((True, 4), (False, 2)):
        model.set_requires_gradient_sync(sync)
        model(torch.full((1, 4), value, dtype=BF16)).sum().backward()
    model.first.zero_grad(set_to_none=to_none)
    if to_none:
        assert model.first.weight.grad is None
    else:
        assert_full(model.first.weight, 0)
    assert_full(model.second.weight, 4)
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    assert_full(model.first.weight, 3)
    assert_full(model.second.weight, 7)


@pytest.mark.parametrize("to_none", [False, True])
def test_zero_grad_leaves_what_waits(ranks: Any, to_none: bool) -> None:
    ranks(2).run(cleared, to_none)


def partial(rank: int, world_size: int, offloaded: bool, dim: int) -> None:
    """Of a hybrid unit some gradients wait for the all-reduce, others for the reduce-scatter."""
    ins, outs = (1, 5) if dim == 0 else (4, 4)
    model: Any = Pair(ins, outs)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options: Any = {"mesh": mesh, "offload_policy": policy_of(offloaded)}
    fxshard.fully_shard(
        [model.first, model.second],
        shard_placement_fn=lambda param: Shard(dim),
        reshard_after_forward=False,
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
        **options,
    )
    fxshard.fully_shard(model, **options)
    model.set_reshard_after_backward(False)

    def runs(part: Any, value: float, *args: Any, grad: bool = True) -> None:
        x = torch.full((1, ins), value, dtype=BF16, requires_grad=grad)
        part(x, *args).sum().backward()

    runs(model, 4.0, grad=False)
    model.set_requires_all_reduce(False)
    runs(model.first, 2.0)
    runs(model.second, 3.0)
    model.set_requires_gradient_sync(False)
    runs(model.first, 1.0)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    runs(model, 1.0, False, grad=False)
    assert_full(model.first.weight, 8)
    assert_full(model.second.weight, 7)
    runs(model, 1.0, grad=False)
    assert_full(model.first.weight, 9)
    assert_full(model.second.weight, 8)


@pytest.mark.parametrize(("offloaded", "dim"), [(False, 0), (True, 0), (False, 1)])
def test_what_waits_for_all_replicas(ranks: Any, offloaded: bool, dim: int) -> None:
    ranks(4).run(partial, offloaded, dim)


def of_tensor_parallelism(rank: int, world_size: int, offloaded: bool) -> None:
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    ref = made(lambda: nn.Linear(4, 4, bias=False))
    model: Any = parallelize_module(copy.deepcopy(ref), mesh["tp"], ColwiseParallel())
    options = {"reshard_after_forward": False, "offload_policy": policy_of(offloaded)}
    fxshard.fully_shard(model, mesh=mesh["dp"], **options)
    model.set_reshard_after_backward(False)
    for value in (1, 2, 3):
        model.set_requires_gradient_sync(value == 3)
        x = torch.full((2, 4), float(value))
        for each in (ref, model):
            each(x).sum().backward()
        assert (model.weight.grad is None) is (value < 3)
    assert torch.equal(model.weight.grad.full_tensor(), ref.weight.grad)


@OFFLOADED
def test_gradients_of_tensor_parallelism_wait(ranks: Any, offloaded: bool) -> None:
    ranks(2).run(of_tensor_parallelism, offloaded)


# -- dtypes ----------------------------------------------------------------------------------------


class InFp32(torch.autograd.Function):
    """A product whose gradient of the weight comes in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.float().T @ x.float()


class Projection(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((32, 32), 0.125, dtype=dtype))

    def forward(self, x: Tensor) -> Any:
        return InFp32.apply(x, self.weight)  # type: ignore[no-untyped-call]


def ones(rows: int) -> Tensor:
    return torch.full((rows, 32), 1.0078125, dtype=BF16)


def made_in_fp32(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Autograd casts it to bf16, the unsharded weight's dtype, before it is reduced in fp32."""
    model: Any = Projection(dtype)
    fxshard.fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    x, grad = ones(2 + rank), ones(2 + rank) * (rank + 1)
    model(x).backward(grad)
    exact = grad.float().T @ x.float()
    expected = exact.bfloat16().float()
    assert not torch.equal(exact, expected)
    dist.all_reduce(expected)
    expected /= world_size
    assert model.weight.grad.dtype == dtype
    assert torch.equal(model.weight.grad.full_tensor(), expected.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_have_the_dtype_of_compute_before_they_are_reduced(
    ranks: Any, dtype: torch.dtype
) -> None:
    ranks(2).run(made_in_fp32, dtype)


def converted(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """A conversion that fails leaves gradients as they were; one that succeeds takes them along."""
    model: Any = nn.Sequential(Projection(dtype))
    fxshard.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))

    def steps() -> None:
        model(ones(3)).backward(ones(3))

    steps()
    param = model[0].weight
    before, values = param.grad, param.to_local().detach().clone()
    grads = before.to_local().clone()

    def fails(tensor: Tensor) -> Tensor:
        if tensor.equal(values):  # the parameter's own, not its gradient's
            raise RuntimeError("conversion failed")
        return tensor.clone()

    with pytest.raises(RuntimeError, match="conversion failed"):
        model._apply(fails)
    assert param.grad is before
    for convert in (lambda: model.cpu(), lambda: model.to(device="cpu")):
        convert()
        assert model[0].weight is param
        assert param.grad_dtype == param.grad.dtype == param.grad.to_local().dtype == dtype
        assert torch.equal(param.to_local(), values)
        assert torch.equal(param.grad.to_local(), grads)
    steps()
    assert torch.equal(param.grad.to_local(), grads * 2)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_conversions_keep_gradients(ranks: Any, dtype: torch.dtype) -> None:
    ranks(2).run(converted, dtype)
