"""Units of unusual shape: nested, empty, shared, called several times; and torch's wrap policies.

Numbers against FSDP2 with the same units, or against eager where FSDP2 has no such unit;
collectives counted by hand; bytes validated; policies against what FSDP1 really wraps.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

import fxshard
from fxshard._torch import process_groups
from fxshard.ir.splitting import find_units
from tests.end_to_end.training_cases import assert_same, grads_of, loss_of, state_of
from tests.fsdp2 import full
from tests.oracles import Collective, count_collectives


class Half(nn.Module):
    """(batch, 6) -> the same; three kinds of parameters, one with fewer rows than ranks."""

    def __init__(self, linear: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = linear or nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(x))


class Nested(nn.Module):
    """Units in units: outer.0 and outer.0.inner; outer.1 has parameters in its inner units only."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.outer = nn.ModuleList([Outer(True), Outer(False)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for outer in self.outer:
            x = outer(x)
        return self.head(x)


class Outer(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6) if own else nn.Tanh()
        self.inner = Half()
        self.after = nn.Linear(6, 6) if own else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.inner(self.before(x)))


class Recalled(nn.Module):
    """One unit, called three times in a forward; one of its calls after another unit's."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.again, self.other = Half(), Half()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.inlet(x)))
        return self.head(self.again(self.other(x)))


class Tied(nn.Module):
    """Two units hold one linear layer: it moves with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.left = Half()
        self.right = Half(self.left.linear)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.right(self.left(self.inlet(x))))


class TiedInside(nn.Module):
    """The same inside a unit: it moves with that unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.outer = nn.Sequential(Half(), Half())
        self.outer[1].linear.weight = self.outer[0].linear.weight  # type: ignore[union-attr]
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(self.inlet(x)))


class Empty(nn.Module):
    """Units without parameters, and a root without: all is in a, b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Short(nn.Module):
    """Parameters with fewer rows than ranks: 1, 2 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 2)
        self.middle = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 2))
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.inlet(x)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its units, and what is counted by hand.

    Attributes:
        gathered: per unit, names of what forward gathers; its reduce-scatters are the same.
        again: per unit, names of what backward gathers.
        fsdp2: units of FSDP2 that own the same parameters, children first; None: as `units`.
        exact: whether sums are taken in the order of FSDP2.
    """

    build: Callable[[], nn.Module]
    units: list[str]
    gathered: list[list[str]]
    again: list[list[str]]
    fsdp2: list[str] | None = None
    exact: bool = True


def named(prefix: str, *names: str) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


LINEAR = ("weight", "bias")
HALF = ("linear.weight", "linear.bias", "gain")
ENDS = [*named("inlet", *LINEAR), *named("head", *LINEAR)]
CASES = {
    "nested": Case(
        Nested,
        ["outer.*", "outer.*.inner"],
        [
            ENDS,
            [*named("outer.0.before", *LINEAR), *named("outer.0.after", *LINEAR)],
            named("outer.0.inner", *HALF),
            named("outer.1.inner", *HALF),
        ],
        [
            ["head.weight"],
            ["outer.0.before.weight", "outer.0.after.weight"],
            named("outer.0.inner", "linear.weight", "gain"),
            named("outer.1.inner", "linear.weight", "gain"),
        ],
        fsdp2=["outer.0.inner", "outer.1.inner", "outer.0", "outer.1"],
    ),
    "recalled": Case(
        Recalled,
        ["again", "other"],
        [ENDS, named("again", *HALF), named("other", *HALF)],
        [
            ["head.weight"],
            named("again", "linear.weight", "gain"),
            named("other", "linear.weight", "gain"),
        ],
        exact=False,  # FSDP2 reduces at every call, fxshard the sum
    ),
    "tied": Case(
        Tied,
        ["left", "right"],
        [[*ENDS, *named("left.linear", *LINEAR)], ["left.gain"], ["right.gain"]],
        [["head.weight", "left.linear.weight"], ["left.gain"], ["right.gain"]],
        fsdp2=[],
    ),
    "tied inside": Case(
        TiedInside,
        ["outer", "outer.*"],
        [
            ENDS,
            ["outer.0.linear.weight"],
            named("outer.0", "linear.bias", "gain"),
            named("outer.1", "linear.bias", "gain"),
        ],
        [["head.weight"], ["outer.0.linear.weight"], ["outer.0.gain"], ["outer.1.gain"]],
        fsdp2=["outer"],
    ),
    "empty": Case(
        Empty,
        ["a", "act", "b"],
        [named("a", *LINEAR), named("b", *LINEAR)],
        [["b.weight"]],
    ),
    "short": Case(
        Short,
        ["middle", "middle.*"],
        [ENDS, named("middle.0", *LINEAR), named("middle.2", *LINEAR)],
        [["head.weight"], ["middle.0.weight"], ["middle.2.weight"]],
        fsdp2=["middle.0", "middle.2"],
    ),
}


def batch(rank: int, step: int = 0) -> Tensor:
    """f32[4, 5]."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].build()


def reference(name: str) -> Any:
    """The case under FSDP2."""
    model, case = built(name), CASES[name]
    for path in case.units if case.fsdp2 is None else case.fsdp2:
        fully_shard(model.get_submodule(path))
    return fully_shard(model)


def train(model: Any, ranks: Iterable[int], count: int = 3) -> list[Any]:
    """Losses (mean over `ranks`), gradients and parameters of AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for step in range(count):
        loss = torch.stack([loss_of(model(batch(rank, step))) for rank in ranks]).mean()
        loss.backward()
        found += [loss.detach(), grads_of(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, state_of(model)]


# -- numbers --------------------------------------------------------------------------------------


def both(rank: int, world_size: int, name: str) -> tuple[list[Any], list[Any]]:
    ours = fxshard.compile(built(name), units=CASES[name].units)
    return train(ours, [rank]), train(reference(name), [rank])


@pytest.mark.parametrize("world_size", [1, 4, 2, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(8)
def test_like_fsdp2(ranks: Any, name: str, world_size: int) -> None:
    """Bitwise where a sum has one order only, as everywhere on 1 and 2 ranks."""
    for ours, theirs in ranks(world_size).run(both, name):
        if world_size <= 2 and CASES[name].exact:
            assert_same(ours, theirs, name)
        else:
            assert_same(ours, theirs, name, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(12)
def test_in_process_like_eager(name: str, world_size: int) -> None:
    ours = fxshard.compile(built(name), units=CASES[name].units, world_size=world_size)
    assert_same(train(ours, [0]), train(built(name), [0]), rtol=1e-6, atol=1e-6)


def shards(rank: int, world_size: int, name: str) -> tuple[list[Any], list[Any]]:
    models = fxshard.compile(built(name), units=CASES[name].units), reference(name)
    for model in models:
        loss_of(model(batch(rank))).backward()
    ours, theirs = ([part for p in m.parameters() for part in parts(p)] for m in models)
    return ours, theirs


def parts(param: Any) -> list[Any]:
    """Shapes and strides of a parameter and its gradient, full and on this rank."""
    tensors = [param, param.to_local(), param.grad, param.grad.to_local()]
    return [(tuple(t.shape), t.stride() if t.numel() else None) for t in tensors]


@pytest.mark.parametrize("world_size", [3, 4])
def test_empty_shards_are_those_of_fsdp2(ranks: Any, world_size: int) -> None:
    found = ranks(world_size).run(shards, "short")
    for ours, theirs in found:
        assert ours == theirs
    names = [name for name, _ in built("short").named_parameters()]
    local = dict(zip(names, found[-1][0][1::4], strict=True))
    assert local["middle.0.weight"][0] == (0, 2)
    assert local["inlet.weight"][0] == (0, 5)


# -- counts and bytes -----------------------------------------------------------------------------


def nbytes(model: nn.Module, names: list[str], world_size: int) -> int:
    """Of what a collective moves: full parameters, padded to equal chunks."""
    shapes = [model.get_parameter(name).shape for name in names]
    return sum(
        4 * world_size * math.ceil(shape[0] / world_size) * math.prod(shape[1:]) for shape in shapes
    )


def sizes(calls: Iterable[Collective], kind: str) -> list[int]:
    return sorted(call.nbytes for call in calls if call.kind == kind)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_collectives_are_those_counted_by_hand(name: str, world_size: int) -> None:
    case, plain = CASES[name], built(name)
    gathered = sorted(nbytes(plain, names, world_size) for names in case.gathered)
    again = sorted(nbytes(plain, names, world_size) for names in case.again)
    if world_size == 1:
        gathered, again = [], []  # a rank alone has everything
    with process_groups.fake_process_group(0, world_size):
        model = fxshard.compile(built(name), units=case.units)
        with count_collectives() as forward:
            loss = loss_of(model(batch(0)))
        with count_collectives() as backward:
            loss.backward()
    assert sizes(forward.calls, "all_gather") == gathered
    assert sizes(backward.calls, "all_gather") == again
    assert sizes(backward.calls, "reduce_scatter") == gathered
    assert forward.count() == len(gathered)
    assert backward.count() == len(again) + len(gathered)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(12)
def test_bytes_are_as_measured(name: str, world_size: int) -> None:
    result = fxshard.validate(
        built(name),
        (batch(0),),
        world_size=world_size,
        units=CASES[name].units,
        optimizer=torch.optim.AdamW,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_no_unit_and_no_parameter() -> None:
    """A unit that is the whole model, and a model that has nothing to shard."""
    model = nn.Sequential(nn.Linear(5, 3))
    ours = fxshard.compile(copy.deepcopy(model), units=["0"], world_size=2)
    assert_same(train(ours, [0]), train(model, [0]), rtol=1e-6, atol=1e-7)
    nothing = fxshard.compile(nn.Sequential(nn.Tanh()), world_size=2)
    x = batch(0).requires_grad_()
    nothing(x).sum().backward()
    want = batch(0).requires_grad_()
    want.tanh().sum().backward()
    assert x.grad is not None and want.grad is not None
    assert_same(full(x.grad), full(want.grad), rtol=1e-6, atol=1e-7)


# -- torch's policies -----------------------------------------------------------------------------


class Containers(nn.Module):
    """What torch's defaults treat on their own: lists, dicts, MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(2))
        self.heads = nn.ModuleDict({"small": nn.Linear(16, 4), "large": nn.Linear(16, 128)})
        self.deep = nn.Sequential(nn.Sequential(nn.Linear(16, 40), nn.ReLU()), nn.Linear(40, 16))
        self.attention = nn.MultiheadAttention(16, 4)
        self.free = nn.Parameter(torch.zeros(8))


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.second = nn.ModuleList([self.first[0], nn.Linear(16, 16)])


def legacy_policy(module: nn.Module, recurse: bool, unwrapped_params: int = 0, **_: Any) -> bool:
    return recurse or isinstance(module, (nn.LayerNorm, nn.Sequential))


def not_in_lists(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A policy of one's own: does not look inside lists, wraps what is left if it is large."""
    if recurse:
        return not isinstance(module, nn.ModuleList)
    return nonwrapped_numel > 100


def own_sizes(least: int, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Its own argument stands in front."""
    return recurse or nonwrapped_numel > least


POLICIES: dict[str, Any] = {
    "module": ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.Sequential}),
    "module, nested": ModuleWrapPolicy([nn.TransformerEncoderLayer, nn.Linear, nn.LayerNorm]),
    "custom": CustomPolicy(lambda module: isinstance(module, (nn.MultiheadAttention, nn.Linear))),
    "custom with options": CustomPolicy(
        lambda module: {"limit_all_gathers": False} if isinstance(module, nn.Embedding) else False
    ),
    "size, default": size_based_auto_wrap_policy,
    **{
        f"size {size}": functools.partial(size_based_auto_wrap_policy, min_num_params=size)
        for size in (1, 100, 500, 1000, 2000, 3000)
    },
    "size, lists too": functools.partial(
        size_based_auto_wrap_policy, min_num_params=1000, exclude_wrap_modules=set()
    ),
    "size, leaves": functools.partial(
        size_based_auto_wrap_policy,
        min_num_params=300,
        force_leaf_modules={nn.TransformerEncoderLayer},
        exclude_wrap_modules={nn.ModuleList, nn.Linear},
    ),
    "transformer": functools.partial(
        transformer_auto_wrap_policy,
        transformer_layer_cls={nn.TransformerEncoderLayer, nn.Embedding},
    ),
    "lambda": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)
    ),
    "legacy": legacy_policy,
    "always": always_wrap_policy,
    "own": not_in_lists,
    "own, bound": functools.partial(own_sizes, least=100),
}


def fsdp1_wraps(rank: int, world_size: int, build: Callable[[], nn.Module], name: str) -> list[str]:
    """FQNs of the modules that FSDP1 really wraps (a module with two names twice, of one name)."""
    model = build()
    names = {module: path for path, module in model.named_modules()}
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=POLICIES[name],
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    units = FullyShardedDataParallel.fsdp_modules(wrapped)
    return sorted({names[unit.module] for unit in units if unit is not wrapped})


@pytest.mark.parametrize("name", POLICIES)
def test_policies_give_the_units_that_fsdp1_wraps(ranks: Any, name: str) -> None:
    for build in (Containers, Shared, Nested):
        (theirs,) = ranks(1).run(fsdp1_wraps, build, name)
        ours = [unit.fqn for unit in find_units(build(), POLICIES[name])]
        assert sorted(ours[1:]) == theirs, build.__name__


def wrapped_by_hand(rank: int, world_size: int) -> tuple[list[str], list[str], list[Tensor]]:
    """FSDP1's units and options where a model wraps its own parts, and what it computes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=torch.device("cpu")):
        for i in (0, 2):
            model[i] = wrap(model[i])
        theirs = wrap(model)
    units = FullyShardedDataParallel.fsdp_modules(theirs)
    names = {module: path for path, module in theirs.module.named_modules()}
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    ours = fxshard.compile(plain, units=["0", "2"])
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    wrapped = [names[unit] for unit in units if unit is not theirs]
    outputs = [each(x).detach() for each in (theirs, ours)]
    return wrapped, [unit.fqn for unit in ours.plan.units], outputs


def test_modules_that_are_named_are_those_that_fsdp1_wraps_by_hand(ranks: Any) -> None:
    for theirs, ours, (expected, found) in ranks(2).run(wrapped_by_hand):
        assert ours == ["", *theirs]
        assert torch.equal(found, expected)
