"""Ignored, bytes, inside this process."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import fxshard
from fxshard._torch import process_groups
from fxshard.errors import ConfigError, UnitError
from fxshard.memory.category import Category
from tests.distributed.strategies_cases import (
    BLOCK,
    BLOCK_2,
    BLOCK_4,
    MIXED,
    READ_2,
    READ_4,
    READ_ROOT_2,
    READ_ROOT_4,
    ROOT,
    ROOT_2,
    ROOT_4,
    STEPS,
    Options,
    assert_reduced,
    average,
    grid,
    net,
    one_step,
    sizes,
)
from tests.end_to_end.training_cases import Net, assert_same, batch, grads_of, loss_of, state_of
from tests.fsdp2 import full
from tests.oracles import count_collectives
from tests.zoo import MODELS

adamw = functools.partial(AdamW, lr=1e-3)


# -- ignored ---------------------------------------------------------------------------------------


IGNORED: dict[str, Callable[[Any], list[Any]]] = {
    "module": lambda model: [model.blocks[1]],
    "inner module": lambda model: [model.blocks[0].norm],
    "parameter": lambda model: [model.blocks[2].linear.weight],
    "globs": lambda model: ["blocks.*.norm", "head.bias"],
    "everything of the root": lambda model: ["inlet", "head"],
}


LEFT_OUT = {
    "module": ["blocks.1.norm", "blocks.1.linear"],
    "inner module": ["blocks.0.norm"],
    "parameter": ["blocks.2.linear.weight"],
    "globs": ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "head.bias"],
    "everything of the root": ["inlet", "head"],
}


# Of 2 ranks, in the order in which backward reduces: 0 is a unit without anything to reduce.
REDUCED = {
    "module": [BLOCK_2, 0, BLOCK_2, ROOT_2],
    "inner module": [BLOCK_2, BLOCK_2, BLOCK_2 - 4 * 12, ROOT_2],
    "parameter": [BLOCK_2 - 4 * 36, BLOCK_2, BLOCK_2, ROOT_2],
    "globs": [BLOCK_2 - 4 * 12] * 3 + [ROOT_2 - 4 * 4],
    "everything of the root": [BLOCK_2] * 3 + [0],
}


def left_out(model: nn.Module, how: str) -> dict[str, nn.Parameter]:
    prefixes = LEFT_OUT[how]
    return {
        name: param
        for name, param in model.named_parameters()
        if any(name == p or name.startswith(p + ".") for p in prefixes)
    }


def averaged_by_hand(params: Iterable[nn.Parameter]) -> None:
    """What a user does with the gradients of what is ignored."""
    for param in params:
        average(param)


def ignores(rank: int, world_size: int, how: str, strategy: str) -> Any:
    plain = net()
    kept = left_out(plain, how)
    model = fxshard.compile(
        plain, units=["blocks.*"], ignored=IGNORED[how](plain), strategy=strategy
    )
    named = dict(model.named_parameters())
    for name, param in kept.items():
        assert named[name] is param and type(param) is nn.Parameter
    assert all(isinstance(param, DTensor) for name, param in named.items() if name not in kept)

    reference = net()
    apart = set(left_out(reference, how).values())
    options: Options = {"ignored_params": apart}
    if strategy == "no_shard":
        options["mesh"] = grid(world_size, 1)
    elif strategy == "shard_grad_op":
        options["reshard_after_forward"] = False
    for block in reference.blocks:
        fully_shard(block, **options)
    fully_shard(reference, **options)

    seen = []
    for each, alone in ((model, kept.values()), (reference, apart)):
        optimizer = AdamW(each.parameters(), lr=1e-2)
        values: list[Any] = []
        for step in range(STEPS):
            loss = loss_of(each(batch(rank, step)))
            with count_collectives() as calls:
                loss.backward()
            values.append((loss.detach(), grads_of(each)))
            if step == 1:
                averaged_by_hand(p for p in each.parameters() if p in set(alone))
            optimizer.step()
            optimizer.zero_grad()
        values.append(state_of(each))
        seen.append((values, calls.calls))
    return seen, {name: seen[0][0][0][1][name] for name in kept}


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("how", IGNORED)
@pytest.mark.sample(3)
def test_ignored_parameters_stay_whole_and_local(ranks: Any, how: str, strategy: str) -> None:
    first, second = ranks(2).run(ignores, how, strategy)
    for (mine, calls), (other, _) in (first[0], second[0]):
        assert_same(mine, other)
        if strategy != "no_shard":
            want = [size for size in REDUCED[how] if size]
            assert sizes(calls, "reduce_scatter") == want
    grads = first[1], second[1]
    assert list(grads[0]) == list(left_out(net(), how))
    for name in grads[0]:
        assert not torch.equal(grads[0][name], grads[1][name])


def gathers_nothing_ignored(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    forward, backward = one_step(rank, world_size, {"ignored": ["blocks.*.linear", "head"]})
    return sizes(forward, "all_gather"), sizes(backward, "all_gather")


def test_ignored_parameters_are_not_gathered(ranks: Any) -> None:
    for forward, backward in ranks(2).run(gathers_nothing_ignored):
        assert forward == [4 * 36, 4 * 12, 4 * 12, 4 * 12]  # the inlet, and the norms
        assert backward == [4 * 12, 4 * 12, 4 * 12]


class Tied(Net):
    """One block's linear layer is another's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear = self.blocks[0].linear


def ignores_tied(rank: int, world_size: int) -> list[Any]:
    seen = []
    for how in ("fxshard", "fsdp2"):
        torch.manual_seed(0)
        model: Any = Tied()
        weight = model.blocks[0].linear.weight
        if how == "fxshard":
            model = fxshard.compile(model, units=["blocks.*"], ignored=["blocks.0.linear"])
        else:
            alone = set(model.blocks[0].linear.parameters())
            for block in model.blocks:
                fully_shard(block, ignored_params=alone)
            fully_shard(model, ignored_params=alone)
        assert model.blocks[0].linear.weight is model.blocks[2].linear.weight is weight
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            loss_of(model(batch(rank, step))).backward()
            grads = grads_of(model)
            optimizer.step()
            optimizer.zero_grad()
        seen.append((grads, state_of(model)))
    return seen


def test_tied_ignored_parameters(ranks: Any) -> None:
    for mine, other in ranks(2).run(ignores_tied):
        assert_same(mine, other)


def test_ignored_names_must_exist() -> None:
    with pytest.raises(UnitError, match=r"'blocks\.7' is not in Net"):
        fxshard.plan(net(), (batch(0),), world_size=2, ignored=["blocks.7"])


def test_ignoring_what_another_model_holds_changes_nothing() -> None:
    plain = fxshard.plan(net(), (batch(0),), world_size=2)
    for ignored in ([nn.Linear(2, 2)], [nn.Parameter(torch.ones(1))]):
        plan = fxshard.plan(net(), (batch(0),), world_size=2, ignored=ignored)
        assert plan.units == plain.units


# -- bytes -----------------------------------------------------------------------------------------


def report(world_size: Any, **options: Any) -> Any:
    model = net()
    return fxshard.plan(
        model, (batch(0),), world_size=world_size, units=["blocks.*"], **options
    ).memory


def after_forward(world_size: Any, **options: Any) -> dict[Category, int]:
    return report(world_size, **options).snapshot("", "After Post-Forward")


def test_what_stays_unsharded_behind_forward() -> None:
    """What backward reads; the rest is given back in forward."""
    read = 3 * READ_4 + READ_ROOT_4
    for options in ({"strategy": "shard_grad_op"}, {"reshard_after_forward": False}):
        assert after_forward(4, **options)[Category.UNSHARDED_PARAM] == read
    some = {"blocks.1": False}
    assert after_forward(4, reshard_after_forward=some)[Category.UNSHARDED_PARAM] == READ_4
    for strategy in ("full_shard", "no_shard"):
        assert after_forward(4, strategy=strategy)[Category.UNSHARDED_PARAM] == 0
    assert after_forward((2, 2), strategy="hybrid_shard")[Category.UNSHARDED_PARAM] == 0
    zero2 = after_forward((2, 2), strategy="hybrid_shard_zero2")
    assert zero2[Category.UNSHARDED_PARAM] == 3 * READ_2 + READ_ROOT_2


def test_sharded_parameters_by_strategy() -> None:
    def parameters(world_size: Any, **options: Any) -> int:
        return after_forward(world_size, **options)[Category.SHARDED_PARAM]

    assert parameters(4) == (3 * BLOCK_4 + ROOT_4) // 4
    assert parameters(4, strategy="shard_grad_op") == (3 * BLOCK_4 + ROOT_4) // 4
    assert parameters(4, strategy="no_shard") == 3 * BLOCK + ROOT
    assert parameters((2, 2), strategy="hybrid_shard") == (3 * BLOCK_2 + ROOT_2) // 2
    # Resharded to pairs, half of what backward reads is kept besides.
    kept = (3 * READ_4 + READ_ROOT_4) // 2
    assert parameters(4, reshard_after_forward=2) == (3 * BLOCK_4 + ROOT_4) // 4 + kept
    # What is ignored is not sharded: here the norms and the head.
    rest = (3 * 4 * 56 + 4 * 48) // 4
    assert parameters(4, ignored=["blocks.*.norm", "head"]) == rest + 3 * 4 * 12 + 4 * 21


def test_gradients_by_strategy() -> None:
    def gradients(world_size: Any, **options: Any) -> int:
        (*_, backward, _) = report(world_size, **options).phases()
        return int(backward.after[-1, list(Category).index(Category.SHARDED_GRAD)])

    assert gradients(4) == (3 * BLOCK_4 + ROOT_4) // 4
    assert gradients(4, strategy="no_shard") == 3 * BLOCK + ROOT
    assert gradients((2, 2), strategy="hybrid_shard") == (3 * BLOCK_2 + ROOT_2) // 2
    assert gradients((4, 1), strategy="hybrid_shard") == 3 * BLOCK + ROOT


VALIDATED: list[tuple[Any, Options]] = [
    (2, {"strategy": "shard_grad_op"}),
    (8, {"strategy": "shard_grad_op"}),
    (1, {"strategy": "shard_grad_op"}),
    (1, {"strategy": "no_shard"}),
    (8, {"strategy": "no_shard"}),
    ((2, 3), {"strategy": "hybrid_shard"}),
    ((2, 3), {"strategy": "hybrid_shard_zero2"}),
    ((4, 1), {"strategy": "hybrid_shard"}),
    ((1, 4), {"strategy": "hybrid_shard_zero2"}),
    (8, {"reshard_after_forward": 2}),
    (8, {"reshard_after_forward": 4}),
    ((2, 4), {"strategy": "hybrid_shard", "reshard_after_forward": 2}),
    (8, {"reshard_after_forward": 8}),
    (4, {"ignored": ["**.bias"]}),
    (4, {"ignored": ["**.bias"], "strategy": "shard_grad_op"}),
    (3, {"ignored": ["**.bias"], "strategy": "no_shard"}),
    (4, {"forward_prefetch": 2, "backward_prefetch": 2, "strategy": "shard_grad_op"}),
    ((2, 2), {"forward_prefetch": 0, "backward_prefetch": 0, "strategy": "hybrid_shard"}),
]


def named(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


@pytest.mark.parametrize(("world_size", "options"), VALIDATED, ids=named)
@pytest.mark.parametrize(
    "name", ["mlp13", "tied", pytest.param("transformer", marks=pytest.mark.slow)]
)
@pytest.mark.sample(18)
def test_static_equals_measured(name: str, world_size: Any, options: Options) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    result = fxshard.validate(
        case.build(),
        args,
        kwargs,
        world_size=world_size,
        units=case.units,
        optimizer=adamw,
        **options,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_static_equals_measured_with_units_of_all_kinds() -> None:
    for world_size, options in ((4, MIXED), (4, {"ignored": ["blocks.1", "head.bias"]})):
        result = fxshard.validate(
            net(),
            (batch(0),),
            world_size=world_size,
            units=["blocks.*"],
            optimizer=adamw,
            **options,
        )
        assert result.max_abs_difference == 0, result.table(only_different=True)


# -- inside this process ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        ((2, 2), {"strategy": "hybrid_shard"}),
        ((2, 3), {"strategy": "hybrid_shard_zero2"}),
        ((3, 1), {"strategy": "hybrid_shard"}),
        (3, {"strategy": "shard_grad_op"}),
        (3, {"strategy": "no_shard"}),
        (4, {"reshard_after_forward": 2}),
        ((2, 4), {"strategy": "hybrid_shard", "reshard_after_forward": 2}),
        (4, MIXED),
        (2, {"ignored": ["blocks.1", "**.bias"]}),
        ((2, 2), {"strategy": "hybrid_shard", "ignored": ["blocks.*.norm"]}),
    ],
    ids=named,
)
@pytest.mark.sample(3)
def test_in_process_equals_eager(world_size: Any, options: Options) -> None:
    model = fxshard.compile(net(), units=["blocks.*"], world_size=world_size, **options)
    seen = []
    for each in (model, net()):
        optimizer = AdamW(each.parameters(), lr=1e-2)
        values: list[Any] = []
        for step in range(STEPS):
            loss = loss_of(each(batch(0, step)))
            loss.backward()
            values.append((loss.detach(), grads_of(each)))
            optimizer.step()
            optimizer.zero_grad()
        values.append({name: full(p) for name, p in each.named_parameters()})
        seen.append(values)
    mine, eager = seen
    assert_same(mine, eager, rtol=1e-6, atol=1e-7)


def test_hybrid_worlds_are_given_as_pairs() -> None:
    for call in (fxshard.plan, fxshard.validate):
        with pytest.raises(ConfigError, match="has two dimensions"):
            call(net(), (batch(0),), world_size=4, strategy="hybrid_shard")
        with pytest.raises(ConfigError, match="has one dimension"):
            call(net(), (batch(0),), world_size=(2, 2))
    with pytest.raises(ConfigError, match="has two dimensions"):
        fxshard.compile(net(), world_size=4, strategy="hybrid_shard")


def test_a_fake_group_of_any_size_counts_as_the_ranks_do() -> None:
    with process_groups.fake_process_group(0, 8):
        grid.cache_clear()
        _, backward = one_step(0, 8, {"strategy": "hybrid_shard", "mesh": (4, 2)})
        grid.cache_clear()
    assert_reduced(backward, (0, 1), (0, 2, 4, 6))
