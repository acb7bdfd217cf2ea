"""Against plain eager, when gradients are where, bytes."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, AdamW

import fxshard
from fxshard._torch import modules
from fxshard.errors import StepError
from fxshard.memory.category import Category
from tests.end_to_end.accumulation_cases import (
    BF16,
    OPEN,
    PATTERNS,
    Options,
    grid,
    reduces,
    seeded,
    train,
)
from tests.end_to_end.training_cases import Net, assert_same, batch, grads_of, loss_of
from tests.fsdp2 import full
from tests.oracles import Collectives, count_collectives
from tests.zoo import MODELS

BLOCK, ROOT = 4 * 54, 4 * 57  # bytes: 6 + 6 + 36 + 6 numbers; 30 + 6 + 18 + 3
ROOT_2 = 4 * 64  # on 2 ranks, which pad 3 rows to 4
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


# -- against plain eager ---------------------------------------------------------------------------


def large_batch(rank: int, world_size: int) -> tuple[Any, Any]:
    """Micro-batches of both ranks; and all their rows at once, in eager, on each rank."""
    model = fxshard.compile(seeded(Net), units=["blocks.*"])
    for i in range(3):
        with reduces(model, i == 2):
            (model(batch(rank, i)).square().mean() / 3).backward()
    eager = seeded(Net)
    rows = [batch(r, i) for i in range(3) for r in range(world_size)]
    eager(torch.cat(rows)).square().mean().backward()
    return grads_of(model), grads_of(eager)


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_to_the_large_batch(ranks: Any, world_size: int) -> None:
    for mine, whole in ranks(world_size).run(large_batch):
        assert_same(mine, whole, rtol=1e-6, atol=1e-7)


def evaluation_inside(rank: int, world_size: int) -> tuple[Any, Any]:
    """A forward without gradients between forward and backward, under no_sync and not, and
    after each micro-batch; the mean of both ranks in plain eager.

    FSDP2 (torch 2.13) loses the root's gradients in the latter case.
    """
    model = fxshard.compile(seeded(Net), units=["blocks.*"])
    for i in range(3):
        with reduces(model, i == 2):
            loss = loss_of(model(batch(rank, i)))
            with torch.no_grad():
                model(batch(rank, 9))
            loss.backward()
        with torch.no_grad():
            model(batch(rank, 9))
    eager = seeded(Net)
    for i in range(3):
        torch.stack([loss_of(eager(batch(r, i))) for r in range(world_size)]).mean().backward()
    return grads_of(model), grads_of(eager)


def test_evaluation_between_forward_and_backward(ranks: Any) -> None:
    for mine, eager in ranks(2).run(evaluation_inside):
        assert_same(mine, eager, rtol=1e-6, atol=1e-7)


IN_PROCESS: list[tuple[Any, Options]] = [
    (1, {}),
    (2, {}),
    (3, {"strategy": "shard_grad_op"}),
    (2, {"strategy": "no_shard"}),
    ((2, 2), {"strategy": "hybrid_shard"}),
    (2, {"ignored": ["blocks.1"]}),
    (4, {"reshard_after_forward": 2}),
]


@pytest.mark.parametrize("flags", [PATTERNS["all but the last"], PATTERNS["mixed"]])
@pytest.mark.parametrize(("world_size", "options"), IN_PROCESS)
@pytest.mark.sample(4)
def test_in_process_as_in_eager(world_size: Any, options: Options, flags: list[bool]) -> None:
    model = fxshard.compile(seeded(Net), units=["blocks.*"], world_size=world_size, **options)
    mine, eager = (dict(train(each, 0, flags)) for each in (model, seeded(Net)))
    for step in range(2):  # in between, what is not reduced is not in .grad
        for i in range(len(flags) - 1):
            del mine[f"grads {step} {i}"], eager[f"grads {step} {i}"]
    assert_same(mine, eager, rtol=1e-6, atol=1e-7)


# -- when gradients are where ----------------------------------------------------------------------


def counted(rank: int, world_size: int, options: Options) -> list[Collectives]:
    """Per micro-batch, the collectives of backward."""
    if "mesh" in options:
        options = options | {"mesh": grid(*options["mesh"])}
    model = fxshard.compile(seeded(Net), units=["blocks.*"], **options)
    found = []
    for i in range(3):
        with reduces(model, i == 2):
            loss = loss_of(model(batch(rank, i)))
            with count_collectives() as seen:
                loss.backward()
        assert all((p.grad is None) == (i < 2) for p in model.parameters())
        found.append(seen)
    return found


@pytest.mark.parametrize(
    ("world_size", "options", "kinds", "nbytes"),
    [
        (2, {}, ["reduce_scatter"] * 4, [BLOCK, BLOCK, BLOCK, ROOT_2]),
        (2, {"strategy": "shard_grad_op"}, ["reduce_scatter"] * 4, [BLOCK, BLOCK, BLOCK, ROOT_2]),
        (2, {"strategy": "no_shard"}, ["all_reduce"] * 4, [BLOCK, BLOCK, BLOCK, ROOT]),
        (
            4,
            {"strategy": "hybrid_shard", "mesh": (2, 2)},
            ["reduce_scatter", "all_reduce"] * 4,
            [BLOCK, BLOCK // 2] * 3 + [ROOT_2, ROOT_2 // 2],
        ),
    ],
)
def test_one_reduction_per_unit_behind_the_last_micro_batch(
    ranks: Any, world_size: int, options: Options, kinds: list[str], nbytes: list[int]
) -> None:
    for *waiting, last in ranks(world_size).run(counted, options):
        for seen in waiting:
            assert set(seen.kinds()) <= {"all_gather"}
        calls = [call for call in last.calls if call.kind != "all_gather"]
        assert [call.kind for call in calls] == kinds
        assert [call.nbytes for call in calls] == nbytes


def accumulated_dtypes(rank: int, world_size: int, options: Options) -> set[torch.dtype]:
    model = fxshard.compile(seeded(Net), units=["blocks.*"], **options)
    with model.no_sync():
        loss_of(model(batch(rank))).backward()
    return {t.dtype for each in model._fxshard.accumulated.values() for t in each}


def test_accumulated_in_the_dtype_of_the_reduction(ranks: Any) -> None:
    assert ranks(2).run(accumulated_dtypes, {"mixed_precision": BF16}) == [{torch.float32}] * 2
    assert ranks(2).run(accumulated_dtypes, {"mixed_precision": LOW}) == [{torch.bfloat16}] * 2
    as_torch = torch.float32 if modules.REDUCES_AS_STORED else torch.bfloat16
    assert ranks(2).run(accumulated_dtypes, {"mixed_precision": OPEN}) == [{as_torch}] * 2


def rounds_once(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """1 and 1/512 sixteen times: in bf16 their sum would stay 1."""
    plain = nn.Linear(1, 2, bias=False)
    model = fxshard.compile(plain, mixed_precision=BF16)
    for i in range(17):
        with reduces(model, i == 16):
            x = torch.full((1, 1), 1.0 if i == 0 else 1 / 512)
            model(x).sum().backward()
    (param,) = model.parameters()
    assert param.grad is not None
    return full(param.grad), torch.full((2, 1), 1 + 16 / 512)


def test_fp32_sums_of_bf16_gradients_do_not_round(ranks: Any) -> None:
    for got, want in ranks(2).run(rounds_once):
        assert torch.equal(got, want)


def dropped(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Gradients of a reducing backward, after an accumulating one and a zero_grad between."""
    found = []
    for how in ("nothing", "module", "optimizer", "before backward"):
        model = fxshard.compile(seeded(Net), units=["blocks.*"])
        optimizer = SGD(model.parameters(), lr=0.1)
        if how != "nothing":
            with model.no_sync():
                loss_of(model(batch(rank, 1))).backward()
        if how == "module":
            model.zero_grad()
        optimizer.zero_grad()
        loss = loss_of(model(batch(rank, 2)))
        if how == "before backward":
            model.zero_grad()
        loss.backward()
        assert not model._fxshard.accumulated
        found.append(grads_of(model))
    return found


def test_zero_grad_of_the_module_drops_what_was_accumulated(ranks: Any) -> None:
    for fresh, module, optimizer, late in ranks(2).run(dropped):
        assert_same(module, fresh)
        assert_same(late, fresh)
        assert not torch.equal(optimizer["head.weight"], fresh["head.weight"])


class Linear(nn.Module):
    """Every sum is exact, with small whole numbers, in whatever order it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_((param * 4).round())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def two_forwards(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    """Two forwards inside no_sync, then their backwards one by one, and in one."""
    found = []
    for how in ("one by one", "sum", "eager"):
        model: Any = seeded(Linear)
        if how != "eager":
            model = fxshard.compile(model, units=["blocks.*"])
        sources = [rank] if how != "eager" else list(range(world_size))
        for source in sources:
            x = [(batch(source, i) * 2).round() for i in range(3)]
            with reduces(model, how == "eager"):
                first, second = model(x[0]).sum(), 2 * model(x[1]).sum()
                if how == "sum":
                    (first + second).backward()
                else:
                    second.backward()
                    first.backward()
            (4 * model(x[2]).sum()).backward()
        grads: dict[str, Any] = grads_of(model)
        found.append({n: g / len(sources) for n, g in grads.items()})
    return found[0], found[1], found[2]


def test_two_forwards_inside_then_backward(ranks: Any) -> None:
    for one_by_one, at_once, eager in ranks(2).run(two_forwards):
        assert_same(one_by_one, eager)
        assert_same(at_once, eager)


def too_late(rank: int, world_size: int) -> None:
    model = fxshard.compile(seeded(Net), units=["blocks.*"])
    loss = loss_of(model(batch(rank, 0)))
    with model.no_sync():
        loss_of(model(batch(rank, 1))).backward()
    with pytest.raises(StepError, match="accumulated under no_sync between a forward outside"):
        loss.backward()
    loss_of(model(batch(rank, 0))).backward()  # as it says: backward after each forward
    want = fxshard.compile(seeded(Net), units=["blocks.*"])
    for i in (1, 0):
        with reduces(want, i == 0):
            loss_of(want(batch(rank, i))).backward()
    assert_same(grads_of(model), grads_of(want))


def test_a_backward_that_would_not_reduce_all_is_refused(ranks: Any) -> None:
    ranks(2).run(too_late)


def spoiled(rank: int, world_size: int) -> None:
    """no_sync is left by an exception; the next step reduces."""
    model = fxshard.compile(seeded(Net), units=["blocks.*"])
    with pytest.raises(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    with model.no_sync(), model.no_sync():
        pass
    loss_of(model(batch(rank))).backward()
    assert all(param.grad is not None for param in model.parameters())
    assert not model._fxshard.accumulated


def test_no_sync_ends_with_its_block(ranks: Any) -> None:
    ranks(2).run(spoiled)


def ignored_are_local(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients of what is ignored are in .grad from the first micro-batch on."""
    plain = seeded(Net)
    alone = plain.blocks[1].linear.weight
    model = fxshard.compile(plain, units=["blocks.*"], ignored=["blocks.1.linear.weight"])
    reference = seeded(Net)
    apart = {reference.blocks[1].linear.weight}
    for block in reference.blocks:
        fully_shard(block, ignored_params=apart)
    fully_shard(reference, ignored_params=apart)
    found = [dict(train(each, rank, [False, False, True])) for each in (model, reference)]
    assert isinstance(alone, nn.Parameter)
    mine, other = found
    assert_same(mine, other)
    return mine


def test_ignored_parameters_accumulate_in_place(ranks: Any) -> None:
    first, second = ranks(2).run(ignored_are_local)
    name = "blocks.1.linear.weight"
    for step in range(2):
        one, other = (seen[f"grads {step} 0"] for seen in (first, second))
        assert [n for n, grad in one.items() if grad is not None] == [name]
        assert not torch.equal(one[name], other[name])


# -- bytes -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bytes:
    """One validation."""

    world_size: Any
    options: Options


VALIDATED = {
    "full_shard": Bytes(2, {}),
    "full_shard 8": Bytes(8, {}),
    "shard_grad_op": Bytes(4, {"strategy": "shard_grad_op"}),
    "no_shard": Bytes(3, {"strategy": "no_shard"}),
    "hybrid_shard": Bytes((2, 3), {"strategy": "hybrid_shard"}),
    "hybrid_shard_zero2": Bytes((2, 2), {"strategy": "hybrid_shard_zero2"}),
    "bf16": Bytes(2, {"mixed_precision": BF16}),
    "bf16 all through": Bytes(2, {"mixed_precision": LOW}),
    "reshard": Bytes(4, {"reshard_after_forward": 2}),
    "ignored": Bytes(2, {"ignored": ["**.bias"]}),
    "one rank": Bytes(1, {}),
}


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("how", VALIDATED)
@pytest.mark.parametrize("name", ["mlp13", pytest.param("tied", marks=pytest.mark.slow)])
@pytest.mark.sample(4)
def test_static_equals_measured(name: str, how: str, no_sync: bool) -> None:
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    result = fxshard.validate(
        seeded(case.build),
        args,
        kwargs,
        world_size=VALIDATED[how].world_size,
        units=case.units,
        optimizer=AdamW,
        micro_batches=3,
        no_sync=no_sync,
        **VALIDATED[how].options,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


def held(rank: int, world_size: int, options: Options) -> list[int]:
    """Bytes that are accumulated after each micro-batch."""
    model = fxshard.compile(seeded(Net), units=["blocks.*"], **options)
    found = []
    for i in range(3):
        with reduces(model, i == 2):
            loss_of(model(batch(rank, i))).backward()
        tensors = [t for each in model._fxshard.accumulated.values() for t in each]
        found.append(sum(t.untyped_storage().nbytes() for t in tensors))
    return found


def test_accumulated_gradients_are_whole_and_held_once(ranks: Any) -> None:
    whole = 3 * BLOCK + ROOT
    assert ranks(2).run(held, {}) == [[whole, whole, 0]] * 2
    assert ranks(2).run(held, {"mixed_precision": BF16}) == [[whole, whole, 0]] * 2
    assert ranks(2).run(held, {"mixed_precision": LOW}) == [[whole // 2, whole // 2, 0]] * 2


def test_plan_of_one_step_knows_of_no_accumulation() -> None:
    report = fxshard.plan(Net(), (batch(0),), world_size=2, units=["blocks.*"]).memory
    (*_, backward, _) = report.phases()
    assert backward.after[-1, list(Category).index(Category.UNSHARDED_GRAD)] == 0
