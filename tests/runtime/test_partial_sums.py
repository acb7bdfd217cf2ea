"""Partial sums of hybrid strategies whose parameter the call that all-reduces does not use."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import fxshard
from fxshard.errors import VerifyError
from fxshard.ir.program import Fact
from fxshard.verify import verify
from tests.fsdp2 import full


class Skips(nn.Module):
    """f32[n, 5] -> a loss; `other` is used where `with_other` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(5, 3), nn.Linear(3, 4)
        self.never = nn.Linear(3, 2)

    def forward(self, x: Tensor, with_other: bool) -> Tensor:
        y = self.used(x)
        return (self.other(y) if with_other else y).square().sum()


def net() -> Skips:
    torch.manual_seed(0)
    return Skips()


def batch(rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * rank))


def made(how: str, shape: tuple[int, int]) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model: Any = net()
    if how == "compile":
        return fxshard.compile(model, mesh=mesh, strategy="hybrid_shard", units=["used", "other"])
    for module in (model.used, model.other, model):
        fxshard.fully_shard(module, mesh=mesh)
    return model


def left_behind(rank: int, world_size: int, how: str, shape: tuple[int, int]) -> None:
    """FSDP2 leaves such a sum where it is, so that its gradient is missing; eager has it."""
    model, reference = made(how, shape), net()
    for ways in ([True, False], [True, True, False, False], [False, True]):
        for number, way in enumerate(ways):
            model.set_requires_all_reduce(number == len(ways) - 1)
            model(batch(rank), way).backward()
            for other in range(world_size):
                (reference(batch(other), way) / world_size).backward()
        for name, param in reference.named_parameters():
            grad = model.get_parameter(name).grad
            assert (grad is None) == (param.grad is None), name
            if param.grad is not None:
                assert_close(full(grad), param.grad, rtol=1e-5, atol=1e-5)
        assert not model._fxshard.partial
        for each in (model, reference):
            each.zero_grad()


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["fully_shard", "compile"])
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
def test_a_sum_is_reduced_without_a_gradient_to_add(ranks: Any, how: str, shape: Any) -> None:
    ranks(shape[0] * shape[1]).run(left_behind, how, shape)


def unreduced(rank: int, world_size: int) -> str:
    model = made("compile", (2, 1))
    model.set_requires_all_reduce(False)
    model(batch(rank), True).backward()
    model.set_requires_all_reduce(True)
    model(batch(rank), False).backward()
    program = model._fxshard.variant((batch(rank), False), {}).program
    model.set_requires_all_reduce(False)
    model(batch(rank), True).backward()
    model.set_requires_all_reduce(True)
    program = model._fxshard.variant((batch(rank), False), {}).program
    verify(program)
    program.partial |= {"never.weight"}
    with pytest.raises(VerifyError) as refused:
        verify(program)
    return f"{refused.value.fact}: {refused.value}"


def test_a_sum_that_no_reduction_takes_is_a_fault(ranks: Any) -> None:
    for said in ranks(2).run(unreduced):
        assert said.startswith(Fact.REDUCED_ONCE.name.lower()) and "'never.weight'" in said
