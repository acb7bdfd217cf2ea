"""What the code of a model holds: what its functions name, and no more of the files they are in."""

import types
from typing import Any

import pytest
from torch import Tensor, nn

from fxshard.capture.held import ModelSnapshot

SOURCE = """
from torch import nn

registry = {"a": lambda: Other}
counts = {"calls": 0}
total = 0

class Other: made = 0

class Limits: largest = 3

def helper(x):
    counts["calls"] += 1
    return x * Limits.largest

def named():
    return globals()["registry"]

class Model(nn.Module):
    def forward(self, x):
        global total
        total += 1
        return BODY
"""


def model(body: str) -> tuple[Any, dict[str, Any]]:
    file = types.ModuleType("a_users_file")
    exec(SOURCE.replace("BODY", body), vars(file))
    return file.Model(), vars(file)


def holds(net: nn.Module, value: Any) -> bool:
    return any(holder is value for holder, _ in ModelSnapshot(net).code)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("x", set()),
        ("helper(x)", {"counts", "Limits"}),
        ("[helper(y) for y in x]", {"counts", "Limits"}),
        ("(lambda: Other)().made * x", {"Other"}),
        ("registry['a']().made * x", {"registry", "Other"}),
        ("named() and x", {"counts", "Limits", "registry", "Other"}),
    ],
)
def test_what_functions_name_of_their_file(body: str, found: set[str]) -> None:
    net, here = model(body)
    assert {n for n in ("counts", "Limits", "registry", "Other") if holds(net, here[n])} == found


def test_numbers_are_put_back_where_code_counts() -> None:
    net, here = model("helper(x)")
    before = ModelSnapshot(net)
    net(2)
    assert (here["total"], here["counts"]["calls"]) == (1, 1)
    before.restore()
    assert (here["total"], here["counts"]["calls"]) == (0, 0)


def test_tensors_are_not_held() -> None:
    assert not any(isinstance(holder, Tensor) for holder, _ in ModelSnapshot(nn.Linear(2, 2)).code)
