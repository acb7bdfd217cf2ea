"""`data_sizes`: bytes where a size depends on the data, for as much of it as the user says."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard._torch.process_groups import fake_process_group
from fxshard.errors import ConfigError, UnknownSizeError
from fxshard.validation.compare import compare
from fxshard.validation.rehearsal import split_steps, tracked
from fxshard.verify.certificate import collectives as certified
from tests.experts import WIDTH, Experts

ROWS = 16


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


@pytest.mark.parametrize("received", [(3, 11), (0, 5)])
def test_tokens_that_an_expert_receives(received: tuple[int, int]) -> None:
    """On a group that moves nothing: gloo's threads hold what was sent for a while."""
    sent = 7, ROWS - 7
    call = torch.randn(ROWS, WIDTH), torch.tensor(sent), torch.tensor(received)
    options: Any = {"units": ["expert"], "optimizer": torch.optim.AdamW}
    with fake_process_group(0, 2):
        told = {"": [*sent, *received]}
        plan = fxshard.plan(Experts(), call, world_size=2, data_sizes=told, **options)
        found = compare(plan.memory, split_steps(tracked(plan.workload, 2), 2))
        assert found.max_abs_difference == 0, found.table(only_different=True)
        peaks = [
            plan.replan(data_sizes={"": [*sent, n, n]}).memory.peak_bytes for n in (16, 32, 64)
        ]
    assert plan.memory.peak_bytes < peaks[0] < peaks[1] < peaks[2]
    assert "bytes of its data" in "\n".join(certified(plan.program))
