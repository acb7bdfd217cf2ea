"""--data-sizes: how large the sizes are that a model finds in its data."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cli.test_cli import run


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[x[:, 0] > 0])


def picks() -> Any:
    return Picks(), (torch.ones(4, 8),), {}


def test_sizes_that_depend_on_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    picks = ("report", "--model", "tests.cli.test_data_sizes:picks", "--world-size", "2")
    code, _, err = run(capsys, *picks)
    assert code == 1 and "depends on the data" in err and "data_sizes={'': 64}" in err
    peaks = []
    for told in (["0"], ["4"], ["=4"], ["**=1", "=4"]):
        more = [part for each in told for part in ("--data-sizes", each)]
        code, out, err = run(capsys, *picks, *more, "--json")
        assert code == 0, err
        peaks.append(json.loads(out)["peak_bytes"])
    assert peaks[0] < peaks[3] < peaks[1] == peaks[2]
