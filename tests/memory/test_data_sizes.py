"""`data_sizes`: bytes where a size depends on the data, for as much of it as the user says."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.codegen.emit import TracedExecutor
from fxshard.config import Config
from fxshard.errors import ConfigError, UnknownSizeError
from fxshard.ir.units import configured_units
from fxshard.plans.workload import Workload
from fxshard.runtime.module import sharded
from fxshard.runtime.sharding import Sharding
from fxshard.runtime.world.mesh import world_over
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked_steps
from fxshard.validation.tracker import Tracker, WatchedWorld
from tests.ranks import Ranks

ROWS, WIDTH = 16, 8


class Chosen(nn.Module):
    """Two layers over the rows whose first number is larger than `least`."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > self.least).nonzero()[:, 0]
        return x.index_add(0, rows, self.down(self.up(x[rows]).relu()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Chosen(0.5), Chosen(-1.5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def batch() -> Tensor:
    """5 rows begin with 1, 4 with -1, 7 with -2; and what a layer adds is less than a half."""
    x = torch.zeros(ROWS, WIDTH)
    x[:, 0] = torch.tensor([1.0] * 5 + [-1.0] * 4 + [-2.0] * 7)
    return x


@pytest.fixture
def net(same_seed: None) -> Net:
    made = Net()
    for parameter in made.parameters():
        parameter.data.mul_(0.1)
    return made


def peak(net: Net, told: Any) -> int:
    plan = fxshard.plan(net, (batch(),), world_size=2, units=["layers.*"], data_sizes=told)
    return plan.memory.peak_bytes


@pytest.mark.parametrize("told", [{"layers.0": 5, "layers.1": [9]}, {"**.1": 9, "layers.*": 5}])
@pytest.mark.parametrize("checkpoint", [None, "full"])
def test_bytes_are_exact_where_the_data_has_those_sizes(
    net: Net, told: Any, checkpoint: str | None
) -> None:
    options: Any = {"units": ["layers.*"], "optimizer": torch.optim.AdamW, "checkpoint": checkpoint}
    found = fxshard.validate(net, (batch(),), world_size=2, data_sizes=told, **options)
    assert found.max_abs_difference == 0 and not found.unknown


def test_they_are_bounds_of_fewer(net: Net) -> None:
    peaks = [peak(net, told) for told in range(ROWS + 1)]
    assert peaks == sorted(peaks) and peaks[0] < peaks[5] < peaks[-1]
    assert peak(net, 10 * ROWS) == peaks[-1], "no more than all rows can be chosen"


def test_what_is_not_told_is_not_known(net: Net) -> None:
    with pytest.raises(UnknownSizeError, match=r"data_sizes=\{'layers.1': 64\}"):
        peak(net, {"layers.0": 5})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"blocks.*": 5}, r"no module 'blocks.\*' finds a size.*These do: 'layers.0', 'layers.1'"),
        ({"layers.*": [5, 9]}, "2 numbers are told of layers.0, which finds 1 sizes in its data: "),
        ({"layers.*": -1}, "expected sizes >= 0"),
        ("all", "expected sizes >= 0"),
    ],
)
def test_what_cannot_be_is_refused(net: Net, told: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        peak(net, told)


# -- expert parallelism ----------------------------------------------------------------------------


class Experts(nn.Module):
    """Each rank of a group has an expert; each row goes to the rank of its expert, and back."""

    def __init__(self, group: Any, rank: int) -> None:
        super().__init__()
        self.group, self.size = group, 2
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, self.size, bias=False)
        torch.manual_seed(rank)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def splits(self, x: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """The order of rows by expert, how many go where, and how many come from there."""
        chosen = self.gate(x).argmax(-1)
        counts = torch.histc(chosen.float(), self.size, 0, self.size).long()
        sent = collectives.all_to_all_single(counts, None, None, self.group)
        received = torch.ops._c10d_functional.wait_tensor(sent)
        return chosen.argsort(stable=True), counts.tolist(), received.tolist()

    def forward(self, x: Tensor) -> Tensor:
        order, there, here = self.splits(x)
        weight = self.gate(x).softmax(-1).amax(-1, keepdim=True)
        rows = collectives.all_to_all_single_autograd(x[order], here, there, self.group)
        back = collectives.all_to_all_single_autograd(self.expert(rows), there, here, self.group)
        return x + weight * torch.zeros_like(x).index_copy(0, order, back)


def experts(rank: int, world_size: int) -> tuple[list[int], list[int], int, list[int]]:
    """What is sent and received, the largest difference of bytes, and peaks of more rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    net = nn.Sequential(Experts(mesh["ep"].get_group(), mesh["ep"].get_local_rank()))
    torch.manual_seed(10 + rank)
    x = torch.randn(ROWS, WIDTH)
    _, there, here = net[0].splits(x)
    still = functools.partial(torch.optim.AdamW, lr=0.0)  # so that the second step routes alike
    config = Config(units=["0"], optimizer=still, data_sizes={"0": [*there, *here]})
    work, tracker = Workload(net, ((x,), {}), 2, config), Tracker()

    def make_executor(program: Any, world: Any) -> Any:
        return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

    units = configured_units(net, config)
    world = world_over(mesh["dp"], config, units)
    model = sharded(Sharding(net, units, world, config), make_executor)
    tracked_steps(model, work, tracker, 2)
    plan = model._fxshard.plan
    found = compare(plan.memory, split_steps(tracker.measured(), 2))
    more = [plan.replan(data_sizes={"0": [*there, n, n]}).memory.peak_bytes for n in (16, 32, 64)]
    return there, here, found.max_abs_difference, more


def test_tokens_that_experts_receive(ranks: Callable[[int], Ranks]) -> None:
    seen = ranks(4).run(experts)
    assert len({tuple(here) for _, here, _, _ in seen}) > 1, "ranks receive differently many"
    for there, _, difference, more in seen:
        assert sum(there) == ROWS
        assert difference == 0
        assert more == sorted(set(more))
