"""torch's test_fsdp_optim_state.py: full and sharded states of optimizers, by name."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.models import Transformer
from tests.peers.fsdp1.shared import NO_SHARD, compiled, loss_of
from tests.ranks import told

rekeyed = FullyShardedDataParallel.rekey_optim_state_dict
EACH_KIND = pytest.mark.parametrize("kind", ["full", "sharded"])
IN_GROUPS = pytest.mark.parametrize("groups", [False, True], ids=["one_group", "two_groups"])
REVERSED = pytest.mark.parametrize("reverse", [False, True], ids=["in_order", "reversed"])


class Bias(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Block(nn.Module):
    """A weight, and two biases before and after ReLU, so that their gradients differ."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.bias_module0 = Bias(out)
        self.weight = nn.Parameter(torch.randn(width, out))
        self.bias_module1 = Bias(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.bias_module1(torch.relu(self.bias_module0(x @ self.weight)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block0, self.block1 = Block(5, 3), Block(3, 7)
        self.bias = nn.Parameter(torch.randn(5))
        self.block2 = nn.Sequential(Block(7, 9), Block(9, 9), Block(9, 5))

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.block0, self.block1, self.block2):
            x = torch.relu(block(x))
        return x + self.bias

    def get_input(self) -> tuple[Tensor, ...]:
        return (torch.randn(8, 5),)

    def get_loss(self, inputs: Any, output: Tensor) -> Tensor:
        return output.sum()


UNITS = [
    "block1.bias_module0",
    "block1",
    "block2.1.bias_module0",
    "block2.1.bias_module1",
    "block2.1",
    "block2.2",
]
OTHER_UNITS = ["block0.bias_module0", "block0"]


def adam(model: Any, groups: bool = False, reverse: bool = False) -> torch.optim.Optimizer:
    """With `groups` in two, of which `bias` is in none; with `reverse` the last ones first."""

    def ordered(params: Any) -> list[Any]:
        return list(params)[:: -1 if reverse else 1]

    if not groups:
        return torch.optim.Adam(ordered(model.parameters()), lr=0.01)
    second = [*model.block2.parameters(), *model.block0.parameters()]
    first = {"params": ordered(model.block1.parameters())}
    return torch.optim.Adam([first, {"params": ordered(second), "weight_decay": 0.9}], lr=0.01)


def step(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """All ranks take one batch, as the plain model does."""
    torch.manual_seed(0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model: Any, optimizer: torch.optim.Optimizer, kind: str, rank0: bool = False) -> Any:
    if kind == "sharded":
        return model.optim_state_dict(optimizer)
    return model.full_optim_state_dict(optimizer, rank0_only=rank0)


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def same_state(state: Any, other: Any, of: Callable[[Any], Any] = full) -> None:
    """States and groups, by the same keys; `of` this rank alone, or of all ranks."""
    assert state["state"].keys() == other["state"].keys()
    for key in sorted(state["state"]):  # gathered in one order on all ranks
        values = state["state"][key]
        assert values.keys() == other["state"][key].keys()
        for name, value in values.items():
            assert_close(of(value), of(other["state"][key][name]))
    groups = [
        [group | {"params": sorted(group["params"])} for group in each["param_groups"]]
        for each in (state, other)
    ]
    assert groups[0] == groups[1]


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What torch makes of the plain model's own state, with names for numbers."""
    return rekeyed(optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer)


# -- saved -----------------------------------------------------------------------------------------


def as_plain(
    rank: int, world_size: int, kind: str, groups: bool, rank0: bool, reverse: bool
) -> None:
    model, plain = compiled(Nested(), units=UNITS), Nested()
    optimizers = [adam(each, groups, reverse and rank == 1) for each in (model, plain)]
    # on rank 1 in another order
    losses = [step(each, o) for each, o in zip((model, plain), optimizers, strict=True)]
    assert_close(*losses)
    state = state_of(model, optimizers[0], kind, rank0)
    if rank0 and rank:
        assert state == {}
    else:
        same_state(state, by_name(plain, optimizers[1]))


@IN_GROUPS
@REVERSED
@pytest.mark.parametrize(("kind", "rank0"), [("full", False), ("full", True), ("sharded", False)])
def test_states_as_of_the_plain_model(
    ranks: Any, kind: str, groups: bool, rank0: bool, reverse: bool
) -> None:
    ranks(2).run(as_plain, kind, groups, rank0, reverse)


def keys(rank: int, world_size: int, wrapped: str) -> None:
    """`wrapped`: when a module is, for activation checkpoints."""
    model, units = Nested(), UNITS
    if wrapped == "before":
        wrap(model)
        units = [re.sub(r"block2", "block2._checkpoint_wrapped_module", unit) for unit in UNITS]
    model = compiled(model, units=units, ignored=[model.block2[2].bias_module0])
    if wrapped == "after":
        wrap(model)
    optimizer = adam(model)
    step(model, optimizer, 1)
    state = model.full_optim_state_dict(optimizer, rank0_only=False)
    assert state["state"].keys() == model.full_state_dict(rank0_only=False).keys()
    assert list(state["state"]) == [name for name, _ in Nested().named_parameters()]
    again = adam(model)
    model.optim_state_dict_to_load(again, state, load_directly=True)
    assert_close(model.full_optim_state_dict(again, rank0_only=False)["state"], state["state"])


def wrap(model: Any) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: module is model.block2)


@pytest.mark.parametrize("wrapped", ["", "before", "after"])
def test_keys_as_of_the_state_dict(ranks: Any, wrapped: str) -> None:
    """Ignored parameters are among them; names of wrappers are not."""
    ranks(2).run(keys, wrapped)


def missing(rank: int, world_size: int) -> str:
    """Rank 1's optimizer leaves out a parameter."""
    model = compiled(Nested(), units=UNITS)
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params[:-1] if rank else params)
    step(model, optimizer)
    return told(lambda: model.full_optim_state_dict(optimizer))


def test_ranks_with_other_states(hasty: Any) -> None:
    for said in hasty(2).run_expecting_errors(missing):
        assert said.startswith("RankMismatchError: ")
        assert "a state of block2.2.bias_module1.bias" in said


# -- loaded ----------------------------------------------------------------------------------------


def loaded(
    rank: int,
    world_size: int,
    build: Any,
    kind: str,
    halve: bool,
    sent: str,
    units: Any,
    groups: bool = False,
    reverse: bool = False,
) -> None:
    """Into a model with other units, on half of the ranks, with groups in another order.

    What that model saves is its own state too, loads, and is trained on.
    """
    first = compiled(build(), units=units[0])
    optimizer = adam(first, groups)
    step(first, optimizer)
    state = state_of(first, optimizer, kind, rank0=sent == "rank0")
    group = dist.new_group(ranks=range(0, world_size, 2)) if halve else dist.group.WORLD
    if sent == "rank0":
        every = [state]
        dist.broadcast_object_list(every)
        (state,) = every
    if halve and rank % 2:
        return
    second = compiled(build(), units=units[1], process_group=group)
    other = adam(second, groups, reverse and rank % 4 == 0)
    step(second, other)
    want = copy.deepcopy(other.state_dict())
    to_load = second.optim_state_dict_to_load(other, state)
    same_state(to_load, want, local)  # by numbers, which `reverse` makes other ones on rank 0
    again = second.optim_state_dict_to_load(other, state_of(second, other, kind))
    same_state(again, want, local)
    other.load_state_dict(again)
    step(second, other)


NESTED = [(UNITS, UNITS), (UNITS, OTHER_UNITS)]


NESTED_UNITS = pytest.mark.parametrize("units", NESTED, ids=["same_units", "other_units"])
SENT = pytest.mark.parametrize("sent", ["all", "rank0"])


@pytest.mark.sample(6)
@REVERSED
@IN_GROUPS
@NESTED_UNITS
@SENT
def test_full_state_loaded(ranks: Any, sent: str, units: Any, groups: bool, reverse: bool) -> None:
    ranks(2).run(loaded, Nested, "full", False, sent, units, groups, reverse)


@pytest.mark.sample(4)
@REVERSED
@IN_GROUPS
@NESTED_UNITS
@SENT
def test_full_state_loaded_on_half_of_the_ranks(
    ranks: Any, sent: str, units: Any, groups: bool, reverse: bool
) -> None:
    ranks(4).run(loaded, Nested, "full", True, sent, units, groups, reverse)


def sent_by_rank_0(rank: int, world_size: int, units: Any, groups: bool) -> None:
    """torch's function sends what rank 0 alone has, in the order of the groups on each rank."""
    first = compiled(Nested(), units=units[0])
    optimizer = adam(first, groups)
    step(first, optimizer)
    state = state_of(first, optimizer, "full", rank0=True)
    assert (state == {}) == bool(rank)
    second = compiled(Nested(), units=units[1])
    other = adam(second, groups)
    step(second, other)
    want = copy.deepcopy(other.state_dict())
    for group in want["param_groups"]:
        group["betas"] = list(group["betas"])  # what torch makes of a tuple that it sends
    step(second, other)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(second, other, state, options=options)
    same_state(other.state_dict(), want, local)
    step(second, other)


@IN_GROUPS
@NESTED_UNITS
def test_full_state_sent_by_rank_0(ranks: Any, units: Any, groups: bool) -> None:
    ranks(2).run(sent_by_rank_0, units, groups)


def no_state(rank: int, world_size: int) -> str:
    """FSDP1 would send rank 0's in the group of every second rank."""
    first = compiled(Nested(), units=UNITS)
    optimizer = adam(first)
    step(first, optimizer)
    state = state_of(first, optimizer, "full", rank0=True)
    group = dist.new_group(ranks=range(0, world_size, 2))
    if rank % 2:
        return ""
    second = compiled(Nested(), units=UNITS, process_group=group)
    return told(lambda: second.optim_state_dict_to_load(adam(second), state))


def test_ranks_without_a_state(ranks: Any) -> None:
    """It is for the user to send it: `dist.broadcast_object_list`."""
    said = ranks(4).run(no_state)
    assert said[0] == "no error"
    assert "the optimizer state says nothing of parameter 'bias'" in said[2]
    assert "on every rank (rank0_only=False)" in said[2]


@pytest.mark.sample(2)
@pytest.mark.parametrize("halve", [False, True], ids=["as_many_ranks", "half_of_them"])
@SENT
def test_full_state_of_a_transformer_loaded(ranks: Any, sent: str, halve: bool) -> None:
    units = (Transformer.units, Transformer.units)
    ranks(4 if halve else 2).run(loaded, SameBatches, "full", halve, sent, units)


class SameBatches(Transformer):
    """All ranks have one batch."""

    def get_input(self) -> tuple[Tensor, ...]:
        return torch.arange(12).view(6, 2), torch.arange(8).view(4, 2)


@pytest.mark.parametrize(
    ("build", "units"),
    [*((Nested, units) for units in NESTED), (SameBatches, (Transformer.units,) * 2)],
    ids=["same_units", "other_units", "transformer"],
)
def test_sharded_state_loaded(ranks: Any, build: Any, units: Any) -> None:
    ranks(2).run(loaded, build, "sharded", False, "all", units)


class Unmanaged(Nested):
    """With a parameter that the saved state does not know."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.randn(5, 5))
        if inside:
            self.block2[2].extra, self.extra = self.extra, None


def unmanaged(
    rank: int, world_size: int, kind: str, inside: bool, ignored: tuple[str, ...] = ()
) -> str:
    model = compiled(Nested(), units=UNITS)
    optimizer = adam(model)
    step(model, optimizer, 1)
    state = state_of(model, optimizer, kind)
    other = compiled(Unmanaged(inside), units=UNITS, ignored=list(ignored))
    return told(lambda: other.optim_state_dict_to_load(adam(other), state))


@pytest.mark.parametrize("inside", [False, True], ids=["root", "unit"])
@EACH_KIND
def test_parameter_that_the_state_does_not_know(ranks: Any, kind: str, inside: bool) -> None:
    for said in ranks(2).run(unmanaged, kind, inside):
        assert "the optimizer state says nothing of parameter" in said


@EACH_KIND
def test_ignored_parameter_that_the_state_does_not_know(ranks: Any, kind: str) -> None:
    for said in ranks(2).run(unmanaged, kind, False, ("extra",)):
        assert "the optimizer state says nothing of parameter 'extra'" in said


# -- names and numbers -----------------------------------------------------------------------------


def to_numbers(rank: int, world_size: int, kind: str, groups: bool) -> None:
    model, plain = compiled(Nested(), units=UNITS), Nested()
    optimizers = [adam(each, groups) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        step(each, optimizer)
    state = state_of(model, optimizers[0], kind)
    numbered = rekeyed(state, OptimStateKeyType.PARAM_ID, plain, optim=optimizers[1])
    same_state(numbered, optimizers[1].state_dict())
    if kind == "full":
        optimizers[1].load_state_dict(numbered)
        step(plain, optimizers[1])


@IN_GROUPS
@EACH_KIND
def test_names_to_numbers(ranks: Any, kind: str, groups: bool) -> None:
    ranks(2).run(to_numbers, kind, groups)


def to_names(rank: int, world_size: int) -> None:
    model, plain = compiled(Nested(), units=UNITS), Nested()
    optimizers = [adam(each) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        step(each, optimizer)
    state = model.optim_state_dict_to_load(optimizers[0], by_name(plain, optimizers[1]))
    same_state(state, optimizers[0].state_dict())
    optimizers[0].load_state_dict(state)
    step(model, optimizers[0])


def test_numbers_to_names(ranks: Any) -> None:
    ranks(2).run(to_names)


# -- odd states ------------------------------------------------------------------------------------


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.lin2(x))


def without_first(rank: int, world_size: int, kind: str) -> None:
    """The first parameter has no state: Adam looks there for its step."""
    model = compiled(Unused(), units=["lin1", "lin2"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        state = state_of(model, optimizer, kind)
        assert sorted(state["state"]) == ["lin2.bias", "lin2.weight"]
        optimizer.load_state_dict(model.optim_state_dict_to_load(optimizer, state))


@EACH_KIND
def test_first_parameter_without_state(ranks: Any, kind: str) -> None:
    ranks(2).run(without_first, kind)


class Deep(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.net1.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.net1(x))


def deep_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.rand(8, 8)).sum().backward()
    optimizer.step()


def without_groups(rank: int, world_size: int) -> None:
    model = compiled(Deep(), units=[])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    deep_step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    state = model.full_optim_state_dict(optimizer, rank0_only=False)
    groups = state.pop("param_groups")
    deep_step(model, optimizer)
    loaded_state = model.optim_state_dict_to_load(optimizer, state | {"param_groups": groups})
    optimizer.load_state_dict(loaded_state)
    same_state(optimizer.state_dict(), before)


def test_groups_apart_from_states(ranks: Any) -> None:
    """They are put back before loading."""
    ranks(2).run(without_groups)


def no_groups(rank: int, world_size: int) -> str:
    model = compiled(Deep(), units=[])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    deep_step(model, optimizer)
    state = model.full_optim_state_dict(optimizer, rank0_only=False)
    del state["param_groups"]
    return told(lambda: model.optim_state_dict_to_load(optimizer, state))


def test_state_without_groups(ranks: Any) -> None:
    for said in ranks(2).run(no_groups):
        assert "the optimizer state has no 'param_groups'" in said


def empty(rank: int, world_size: int) -> list[Any]:
    model = compiled(Deep(), units=[])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return [state_of(model, optimizer, kind)["state"] for kind in ("full", "sharded")]


def test_empty_state(ranks: Any) -> None:
    assert ranks(2).run(empty) == [[{}, {}]] * 2


def arguments(rank: int, world_size: int) -> None:
    model = compiled(Deep(), units=[])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    deep_step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(model.optim_state_dict(optimizer))
    deep_step(model, optimizer)
    model.optim_state_dict_to_load(optimizer, state, load_directly=True)
    same_state(optimizer.state_dict(), before)
    tensors = [v for values in state["state"].values() for v in values.values() if v.dim()]
    assert all(isinstance(value, DTensor) for value in tensors)
    whole = model.full_optim_state_dict(optimizer, cpu_offload=True, rank0_only=True)
    assert (whole == {}) == bool(rank)
    for values in whole.get("state", {}).values():
        assert not any(isinstance(value, DTensor) for value in values.values())


def test_arguments(ranks: Any) -> None:
    ranks(2).run(arguments)


class Notes(torch.optim.SGD):
    """Keeps values that are no tensors."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] |= {"value1": 2.74, "value2": None}
        return super().step(closure)


class AdamNotes(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for param in self.state:
            self.state[param] |= {"value1": 2.74, "value2": None}
        return found


def values_of_python(rank: int, world_size: int, tensors: bool, kind: str) -> None:
    model = compiled(Deep(), units=[])
    kinds: Any = AdamNotes if tensors else Notes
    optimizer = kinds(model.parameters(), lr=1e-2)
    deep_step(model, optimizer)
    state = state_of(model, optimizer, kind)
    for values in model.optim_state_dict_to_load(optimizer, state)["state"].values():
        assert values["value1"] == 2.74
        assert values["value2"] is None


@EACH_KIND
@pytest.mark.parametrize("tensors", [False, True], ids=["sgd", "adam"])
def test_values_that_are_no_tensors(ranks: Any, tensors: bool, kind: str) -> None:
    ranks(2).run(values_of_python, tensors, kind)


def unsharded(rank: int, world_size: int, kind: str) -> None:
    model = compiled(Deep(), units=[], strategy=NO_SHARD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    deep_step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    state = state_of(model, optimizer, kind)
    optimizer.load_state_dict(model.optim_state_dict_to_load(optimizer, state))
    same_state(optimizer.state_dict(), before)


@EACH_KIND
def test_no_shard(ranks: Any, kind: str) -> None:
    ranks(2).run(unsharded, kind)


def frozen_in_turns(rank: int, world_size: int, kind: str) -> None:
    model = compiled(Deep(frozen=True), units=[])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(5):
        model.net1.requires_grad_(i % 2 == 1)
        deep_step(model, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        state = state_of(model, optimizer, kind)
        model.optim_state_dict_to_load(optimizer, state, load_directly=True)
        same_state(optimizer.state_dict(), before)


@EACH_KIND
def test_frozen_in_turns(ranks: Any, kind: str) -> None:
    ranks(2).run(frozen_in_turns, kind)
