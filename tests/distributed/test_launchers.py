"""Several processes without a process group: fxshard makes one, or says what is missing."""

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.errors import ConfigError
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld
from tests.ranks import told

BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def as_torchrun_starts(
    rank: int, world_size: int, port: int, verb: str, options: dict[str, Any]
) -> torch.Tensor:
    dist.destroy_process_group()  # the pool's
    values = (rank, world_size, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(VARIABLES, values, strict=True)})
    model = getattr(fxshard, verb)(build(), **options)
    model(BATCH.chunk(world_size)[rank]).sum().backward()
    grad = next(iter(model.parameters())).grad
    return grad.full_tensor()


@pytest.mark.parametrize(("verb", "options"), [("compile", {"world_size": 2}), ("shard", {})])
def test_under_torchrun_the_process_group_is_initialised(
    hasty: Any, verb: str, options: dict[str, Any]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = hasty(2).run(as_torchrun_starts, port, verb, options)
    eager = build()
    eager(BATCH).sum().backward()
    weight = next(iter(eager.parameters()))
    assert weight.grad is not None
    for grad in found:
        torch.testing.assert_close(grad, weight.grad / 2)  # the mean of two sums


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_SIZE", "4"), ("SLURM_STEP_NUM_TASKS", "8")],
)
def test_one_of_many_processes_that_cannot_meet(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    message = rf"one of several \({name}={value}\).*call torch\.distributed\.init_process_group"
    with pytest.raises(ConfigError, match=message):
        fxshard.compile(build(), world_size=2)


def test_one_process_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a rank of its own, but if many ranks are asked for, they run inside of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in zip(VARIABLES, ("0", "1", "127.0.0.1", str(port)), strict=True):
        monkeypatch.setenv(name, value)
    assert isinstance(fxshard.compile(build(), world_size=2)._fxshard.world, InProcessWorld)
    assert not dist.is_initialized()
    try:
        assert isinstance(fxshard.compile(build())._fxshard.world, C10dWorld)
    finally:
        dist.destroy_process_group()


def test_plans_are_made_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    fxshard.plan(build(), (BATCH,), world_size=2)
    assert not dist.is_initialized()


# -- torch.compile(backend="fxshard") without fxshard.shard ----------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.head(x)


def unsharded(rank: int, world_size: int) -> list[str]:
    batch = BATCH.chunk(world_size)[rank]
    plain, frozen = build(), build().requires_grad_(False)
    sharded = fxshard.shard(Two(), ignored=["head"])

    @torch.compile(backend="fxshard")
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return sharded(x) + plain(x)

    said = [
        told(lambda: torch.compile(plain, backend="fxshard")(batch)),
        told(lambda: mixed(batch)),
        told(lambda: torch.compile(frozen, backend="fxshard")(batch)),
        told(lambda: torch.compile(sharded, backend="fxshard")(batch)),
    ]
    with torch.no_grad():
        said.append(told(lambda: torch.compile(plain, backend="fxshard")(batch)))
    return said


def test_parameters_that_no_rank_would_reduce_are_refused(ranks: Any) -> None:
    for plain, mixed, *right in ranks(2).run(unsharded):
        for said in (plain, mixed):
            assert said.startswith("ConfigError") and "over the 2 ranks" in said, said
            assert "[2, 3] is of no model that fxshard.shard sharded" in said
            assert "Call fxshard.shard(model) before torch.compile" in said
        assert right == ["no error"] * 3  # frozen, ignored, without a gradient


def test_an_unsharded_model_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right where it is alone, and refused where torchrun has started others."""
    torch._dynamo.reset()
    model = torch.compile(build(), backend="fxshard")
    torch.testing.assert_close(model(BATCH), build()(BATCH))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="over the 2 ranks"):
        model(BATCH)
