"""Contracts of what `fxshard._torch.trees` uses of torch."""

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from fxshard._torch import trees


@dataclasses.dataclass
class Box:
    x: Any
    rest: Any = None
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


Point = namedtuple("Point", "a b")


def test_trees_open_dataclasses() -> None:
    tree = ([1, {"k": Box(2, Frozen(3))}], Point(4, Box(5)))
    leaves, spec = trees.tree_flatten(tree)
    assert leaves == [1, 2, 3, 1, 4, 5, None, 1]
    back = trees.tree_unflatten([leaf and leaf * 10 for leaf in leaves], spec)
    assert back[1] == Point(40, back[1].b) and isinstance(back[1].b, Box)
    inner = back[0][1]["k"]
    assert (inner.x, inner.rest, inner.made) == (20, Frozen(30), 10), "__post_init__ ran again"
    with_path, same = trees.tree_flatten_with_path(tree)
    assert same == spec and [leaf for _, leaf in with_path] == leaves
    names = ["".join(map(str, path)) for path, _ in with_path]
    assert names[1:3] == ["[0][1]['k'].x", "[0][1]['k'].rest.x"]


def test_trees_without_dataclasses_are_torch_s() -> None:
    tree = ({"a": [1, (2, None)]}, Point(3, "s"))
    leaves, spec = trees.tree_flatten(tree)
    theirs = pytree.tree_flatten(tree)
    assert (leaves, spec) == theirs and hash(spec) == hash(theirs[1]), "specs cannot be keys"
    assert spec != trees.tree_flatten(({"b": [1, (2, None)]}, Point(3, "s")))[1]
    assert isinstance(spec, trees.TreeSpec)
    assert Box not in pytree.SUPPORTED_NODES, "the user's class became known to all of torch"


def test_tree_map_tensors_leaves_the_rest() -> None:
    made = trees.tree_map_tensors(lambda t: t + 1, ({"a": torch.zeros(1)}, 3, None))
    assert made[0]["a"].item() == 1 and made[1:] == (3, None)


def test_leaves_are_exchanged_by_what_they_are() -> None:
    x, y, other = torch.ones(1), torch.ones(1), torch.zeros(1)
    found = trees.exchanged({"a": [x, y], "b": (x, 3)}, {id(x): other})
    assert found["a"][0] is other and found["b"] == (other, 3) and found["a"][1] is y


def test_a_spec_is_made_of_its_parts() -> None:
    tree = ({"a": [1, (2, None)]}, Point(3, Box(4)), torch.Size([2]))
    spec = trees.tree_flatten(tree)[1]

    def again(each: trees.TreeSpec) -> trees.TreeSpec:
        if each.is_leaf():
            return trees.LEAF
        return trees.spec_of(each.type, each.context, [again(c) for c in each.children()])

    made = again(spec)
    assert made == spec and hash(made) == hash(spec) and made.num_leaves == spec.num_leaves
    with pytest.raises(ValueError, match="pytree does not know"):
        trees.spec_of(Box, None, [])
    with pytest.raises(ValueError, match="pytree does not know"):
        trees.spec_of([], None, [])
