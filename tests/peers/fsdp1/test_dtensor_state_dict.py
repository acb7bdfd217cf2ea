"""torch's test_fsdp_dtensor_state_dict.py, test_hsdp_dtensor_state_dict.py and
test_distributed_checkpoint.py: sharded state dicts on meshes, saved and loaded."""

import copy
import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.shared import compiled, params_of, same

EVEN, UNEVEN = (8, 16, 32, 64, 8), (5, 10, 15, 30, 5)
WIDTHS = pytest.mark.parametrize("widths", [EVEN, UNEVEN], ids=["even", "uneven"])
# of 5 rows, 4 ranks have 2, 2, 1 and none
ON = pytest.mark.parametrize("ways", [(2,), (4,), (2, 2)], ids=["two", "four", "hybrid"])


class Dummy(nn.Module):
    def __init__(self, widths: tuple[int, ...], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first, second, third, last = (nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.net1 = nn.Sequential(first, nn.ReLU())
        self.net2 = nn.Sequential(second, nn.ReLU())
        self.net3, self.net4 = third, nn.Sequential(nn.ReLU(), last)
        self.width = widths[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.net4(self.net3(self.net2(self.net1(x))))


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """All ranks have one batch, as a plain model would."""
    torch.manual_seed(3)
    model(torch.rand(model.width, model.width)).sum().backward()
    optimizer.step()


def made(ways: tuple[int, ...], widths: tuple[int, ...]) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model, its optimizer after a step, and the mesh."""
    mesh = init_device_mesh("cpu", ways)
    options = {"strategy": ShardingStrategy.HYBRID_SHARD} if len(ways) == 2 else {}
    model = compiled(Dummy(widths), units=[], mesh=mesh, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer, mesh


def states(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    yield from model.state_dict().items()
    for name, state in model.optim_state_dict(optimizer)["state"].items():
        yield from ((f"{name}.{key}", value) for key, value in state.items())


def on_the_mesh(rank: int, world_size: int, ways: Any, widths: Any) -> None:
    """All but the count of steps are DTensors of that mesh, with the rows of torch's ShardedTensor:
    those that `torch.chunk` gives a rank. A plain model is trained beside it."""
    model, optimizer, mesh = made(ways, widths)
    alone = Dummy(widths)
    other = torch.optim.Adam(alone.parameters(), lr=0.1)
    step(alone, other)
    want: dict[str, Any] = dict(alone.state_dict())
    for name, param in alone.named_parameters():
        want |= {f"{name}.{key}": value for key, value in other.state[param].items()}
    seen = dict(states(model, optimizer))
    assert seen.keys() == want.keys()
    shards, part = ways[-1], rank % ways[-1]
    for name, value in seen.items():
        if name.endswith(".step"):
            assert value == want[name]
            continue
        assert isinstance(value, DTensor) and value.device_mesh == mesh
        assert value.placements == (*[Replicate()] * (len(ways) - 1), Shard(0))
        chunks = want[name].chunk(shards)
        mine = chunks[part] if part < len(chunks) else want[name][:0]
        assert_close(value.to_local(), mine)


@WIDTHS
@ON
def test_states_are_dtensors_of_the_mesh(ranks: Any, ways: Any, widths: Any) -> None:
    ranks(math.prod(ways)).run(on_the_mesh, ways, widths)


def loaded_back(rank: int, world_size: int, ways: Any, widths: Any) -> None:
    """Saved by `torch.save`; what a further step changes is as it was after loading."""
    model, optimizer, _ = made(ways, widths)
    saved = [io.BytesIO(), io.BytesIO()]
    torch.save(model.state_dict(), saved[0])
    torch.save(model.optim_state_dict(optimizer), saved[1])
    before = copy.deepcopy(dict(states(model, optimizer)))
    step(model, optimizer)
    changed = dict(states(model, optimizer))
    assert not torch.equal(full(changed["net3.weight"]), full(before["net3.weight"]))
    for each in saved:
        each.seek(0)
    model.load_state_dict(torch.load(saved[0]))
    model.optim_state_dict_to_load(optimizer, torch.load(saved[1]), load_directly=True)
    after = dict(states(model, optimizer))
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert isinstance(value, DTensor) == isinstance(before[name], DTensor), name
        assert torch.equal(full(value), full(before[name])), name


@WIDTHS
@ON
def test_saved_and_loaded_on_a_mesh(ranks: Any, ways: Any, widths: Any) -> None:
    ranks(math.prod(ways)).run(loaded_back, ways, widths)


class Mixed(nn.Module):
    """A compiled part after one that is another on rank 0: the root is compiled by nobody."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2))
        options = {"strategy": ShardingStrategy.HYBRID_SHARD, "mesh": mesh}
        self.dense = compiled(Dummy(EVEN), units=[], **options)
        self.name = "sparse0" if dist.get_rank() == 0 else "sparse1"
        setattr(self, self.name, nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        sparse = getattr(self, self.name)(x)
        dist.all_reduce(sparse)
        return self.dense(sparse)


def part_of_a_model(rank: int, world_size: int) -> None:
    models = Mixed(), Mixed()
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    torch.manual_seed(rank)
    x = torch.rand(4, 8)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(x).sum().backward()
        optimizer.step()
    models[0](x).sum().backward()
    optimizers[0].step()
    saved = get_optimizer_state_dict(models[0], optimizers[0])
    for name, state in saved["state"].items():
        for value in (state["exp_avg"], state["exp_avg_sq"]):
            if name.startswith("dense."):
                assert isinstance(value, DTensor)
                assert value.placements == (Replicate(), Shard(0))
            else:
                assert name.startswith(models[0].name)
                assert type(value) is Tensor
    set_optimizer_state_dict(models[1], optimizers[1], saved)
    for one, other in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(full(value), full(other[key]))


def test_a_part_that_is_compiled_in_a_model_that_is_not(ranks: Any) -> None:
    ranks(4).run(part_of_a_model)


class Skips(nn.Module):
    """Units in units in units: f32[n, 10] -> f32[n, 10]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        linears = [nn.Linear(10, 10, bias=False) for _ in range(6)]
        self.linear, self.linear_skip = linears[:2]
        self.nested_linear = nn.Sequential(nn.Sequential(*linears[2:4]), linears[4], linears[5])

    def forward(self, x: Tensor) -> Tensor:
        return self.nested_linear(self.linear_skip(self.linear(x)))


def checkpointed(rank: int, world_size: int, path: str) -> None:
    units = ["linear_skip", "nested_linear", "nested_linear.0"]
    model, other = (compiled(Skips(seed), units=units) for seed in (100, 200))
    with pytest.raises(AssertionError):
        same(other, model)
    dcp.save(model.state_dict(), checkpoint_id=path)
    found = other.state_dict()
    dcp.load(found, checkpoint_id=path)
    other.load_state_dict(found)
    assert_close(params_of(other), params_of(model), rtol=0, atol=0)


def test_a_distributed_checkpoint(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(checkpointed, str(tmp_path))
