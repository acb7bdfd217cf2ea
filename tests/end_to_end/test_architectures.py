"""Every architecture of the table is planned, runs like eager and is predicted to the byte.

`make test` takes three of `FAST`, which has one or more of each family; `make test-slow` takes all
the others. What is refused is refused for the reason that its row gives, at the line of the model's
code.
"""

import csv
import re
from pathlib import Path

import pytest
import torch

from tests.zoo import trial
from tests.zoo.architectures import ARCHITECTURES, FAST
from tests.zoo.transformers_rows import TRANSFORMERS

ROWS = Path(__file__).parents[2] / "docs" / "models.csv"
TAKEN = [name for name, each in ARCHITECTURES.items() if each.refused is None]
REFUSED = [name for name in ARCHITECTURES if name not in TAKEN]
QUICKLY_REFUSED = {n for n in REFUSED if ARCHITECTURES[n].family.startswith("hand-written")}
QUICKLY_REFUSED |= {"CLIPModel", "MixtralForCausalLM, eager experts"}


def sorted_out(names: list[str], fast: set[str]) -> list[object]:
    """Parameters of a test: those not in `fast` are slow."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", sorted_out(TAKEN, set(FAST)))
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.sample(3)
def test_is_planned_runs_like_eager_and_is_predicted_to_the_byte(name: str) -> None:
    done = trial.try_out(ARCHITECTURES[name])
    assert not done.refusal, done.refusal
    assert done.compared >= 3, "loss, and gradients"
    assert done.bitwise or 0 < done.worst <= trial.CLOSE, done.worst
    assert done.memory_difference == (None if ARCHITECTURES[name].sized_by_data else 0)


@pytest.mark.parametrize("name", sorted_out(REFUSED, QUICKLY_REFUSED))
@pytest.mark.sample(3)
def test_is_refused_with_the_reason_and_the_line(name: str) -> None:
    text = trial.refusal(ARCHITECTURES[name])
    assert trial.matches(ARCHITECTURES[name], text), text


def test_the_comparison_sees_what_differs() -> None:
    one, zero = torch.ones(3), torch.zeros(3)
    theirs: trial.Values = {"loss": one, "gradient of a": one, "gradient of b": 1e-9 * one}
    assert trial.differences(theirs, dict(theirs)) == (True, 0.0, 3)
    off = theirs | {"gradient of a": one * (1 + 1e-4)}
    assert trial.differences(theirs, off)[:2] == (False, pytest.approx(1e-4, rel=1e-2))
    noise = theirs | {"gradient of b": zero}  # all of it, but it is rounding
    assert trial.differences(theirs, noise)[:2] == (False, pytest.approx(1e-9, rel=1e-2))
    small = theirs | {"gradient of b": 1e-5 * one}
    off = small | {"gradient of b": 1.1e-5 * one}
    assert trial.differences(small, off)[:2] == (False, pytest.approx(0.1, rel=1e-2))
    assert trial.differences(theirs | {"loss": zero}, theirs)[:2] == (False, float("inf"))
    mask = theirs | {"buffer mask": torch.tensor([float("inf"), 1, 2])}
    off = mask | {"buffer mask": torch.tensor([float("inf"), 1, 5])}
    assert trial.differences(mask, off)[:2] == (False, 1.5)
    off = mask | {"buffer mask": torch.tensor([3.0, 1, 2])}
    assert trial.differences(mask, off)[:2] == (False, float("inf"))
    for wrong in (None, one * torch.nan, one.double(), torch.ones(4)):
        with pytest.raises(AssertionError, match="gradient of a"):
            trial.differences(theirs, theirs | {"gradient of a": wrong})
    with pytest.raises(AssertionError):
        trial.differences(theirs, {"loss": one})


def test_the_table_has_every_family() -> None:
    classes = [name for family in TRANSFORMERS.values() for name in family]
    assert len(classes) == len(set(classes)) >= 40
    assert set(FAST) <= set(TAKEN)
    assert set(TRANSFORMERS) <= {ARCHITECTURES[name].family for name in FAST}


def test_the_file_of_the_page_lists_every_row_with_its_status() -> None:
    with ROWS.open(newline="") as file:
        status = {row["model"]: row["status"] for row in csv.DictReader(file)}
    listed = set(status)
    assert listed == set(ARCHITECTURES), set(ARCHITECTURES) ^ listed
    for name in ARCHITECTURES:
        kind = "refused" if name in REFUSED else "bitwise|within"
        assert re.match(kind, status[name]), (name, status[name])
