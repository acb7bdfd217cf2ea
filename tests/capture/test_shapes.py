"""Calls of other sizes: when one program serves them, when another is made, and what it says."""

import copy
import dataclasses
import gc
import inspect
import logging
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import ConfigError, StepError
from tests import fsdp2
from tests.fsdp2 import Result
from tests.ranks import told
from tests.zoo import Batch, Case, labelled_token_batch, token_batch
from tests.zoo.more import MATRIX


class Layers(nn.Module):
    """f32 (batch, 8) -> a scalar; longer batches leave the second layer out."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == 1 and x.shape[0] > self.most:
                continue
            x = layer(x).relu()
        return x.mean()


def rows(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """The model, and a copy compiled for two ranks in this process."""
    return model, fxshard.compile(copy.deepcopy(model), world_size=2, **options)


def assert_step_as_eager(eager: nn.Module, ours: Any, *call: Any, loss: Any = None) -> None:
    """Loss and gradients are bitwise those of eager; dropout draws the same numbers."""
    loss = loss or (lambda out: out)
    for model in (eager, ours):
        torch.manual_seed(5)
        model.zero_grad()
    losses = []
    for model in (eager, ours):
        torch.manual_seed(5)
        value = loss(model(*call))
        value.backward()
        losses.append(value.detach())
    assert torch.equal(*losses)
    for (name, a), (_, b) in zip(eager.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


# -- automatic ------------------------------------------------------------------------------------


def test_the_third_size_leaves_what_differs_open() -> None:
    eager, ours = pair(Layers())
    for size in (4, 6, 4, 9, 2, 31, 6):
        assert_step_as_eager(eager, ours, rows(size, 8))
    first, second, third = (variant.program for variant in ours._fxshard.variants.values())
    assert first.domain is None and second.domain is None, "of two sizes both are as cheap"
    assert third.domain.free == ("args[0].shape[0]",)
    assert_step_as_eager(eager, ours, rows(1, 8))  # a size of 1 broadcasts: a program of its own
    assert len(ours._fxshard.variants) == 4


def test_what_varied_in_either_of_two_sizes_is_open_in_the_third() -> None:
    """Batch 4, 2, 4 and length 6, 8, 9: both are open, though no third batch was seen."""
    eager, ours = pair(Computes())
    for shape in ((4, 6), (2, 8), (4, 9), (3, 11), (2, 7)):
        assert_step_as_eager(eager, ours, rows(*shape))
    assert len(ours._fxshard.variants) == 3
    third = list(ours._fxshard.variants.values())[2].program
    assert third.domain.free == ("args[0].shape[0]", "args[0].shape[1]")


LENGTHS = (8, 11, 5, 3, 14, 9, 16, 2, 12, 7)


@pytest.mark.parametrize(
    "name",
    [
        "tied",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("transformer", "dropout", "gpt2", "gemma3", "mixtral", "llama")
        ),
    ],
)
def test_ten_lengths_train_as_eager_in_three_programs(name: str) -> None:
    case = MATRIX[name]
    torch.manual_seed(0)
    eager, ours = pair(case.build(), units=case.units)
    takes_labels = "labels" in case.batch(0, 0)[1]
    batch = partial(labelled_token_batch if takes_labels else token_batch, vocab=32)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, ours)]
    for step, length in enumerate(LENGTHS):
        args, kwargs = batch(0, step, shape=(2, length))
        losses = []
        for model in (eager, ours):
            torch.manual_seed(step)
            losses.append(case.loss(model(*args, **kwargs)))
            losses[-1].backward()
        assert torch.equal(*(loss.detach() for loss in losses)), length
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    # The length 3 does not fill the window of 4 that gemma3's attention slides: another way.
    assert len(ours._fxshard.variants) == (4 if name == "gemma3" else 3)


def test_other_lengths_leave_nothing_behind() -> None:
    _, ours = pair(Layers())

    def alive_after(sizes: tuple[int, ...]) -> int:
        for size in sizes:
            ours(rows(size, 8)).backward()
        ours.zero_grad()
        gc.collect()
        return sum(isinstance(each, Tensor) for each in gc.get_objects())

    before = alive_after((3, 4, 5))
    assert alive_after(tuple(range(6, 16))) <= before, "less, if what other tests left goes"


class Turned(nn.Module):
    """What looks like no change where batch and length are equal: f32 (b, s) -> f32 (s, b)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        turned = (x * self.scale).reshape(x.shape[1], x.shape[0])
        return turned * self.scale + x.reshape(x.shape[1], -1)


def test_equal_sizes_are_not_taken_for_one() -> None:
    eager, ours = pair(Turned(), dynamic={"b": [("x", 0)], "s": [("x", 1)]})
    for shape in ((4, 4), (4, 6), (3, 5), (6, 2), (5, 5)):
        assert_step_as_eager(eager, ours, rows(*shape), loss=lambda out: (out**2).sum())
    # torch's reshape asks whether they are equal, which holds for the first and the last call.
    first, *others = (variant.program.domain for variant in ours._fxshard.variants.values())
    assert first.text == "open: b, s while Eq(s, b)"
    assert len(others) == 2 and all("Ne(s, b)" in domain.text for domain in others)


def test_gradients_of_outputs_come_in_the_layout_of_the_call() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y.t(), y * 2

    eager, ours = pair(Transposed())
    for size in (3, 5, 7):
        for loss in (lambda out: out[0].exp().sum(), lambda out: (out[0].t() * out[1]).sum()):
            assert_step_as_eager(eager, ours, rows(size, 8), loss=loss)


def test_a_size_that_decides_the_way_gets_a_program_for_each_way() -> None:
    eager, ours = pair(Layers(most=6))
    for size in (3, 4, 5, 7, 8, 9, 6, 20, 2):
        assert_step_as_eager(eager, ours, rows(size, 8))
    # 3 and 4 alone, then up to 6, then from 7 on.
    assert len(ours._fxshard.variants) == 4
    _, _, short, long = (variant.program.domain for variant in ours._fxshard.variants.values())
    assert "args[0].shape[0] <= 6" in short.text and "args[0].shape[0] > 6" in long.text


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int = 1) -> tuple[Tensor, int]:
        assert x.shape[0] % 2 == 0
        return self.linear(x.view(x.shape[0] // 2, 2, 4)).sum() * times, x.shape[0] // 2


class Computes(nn.Module):
    """f32 (rows, columns) -> a scalar, by sizes that are computed from sizes."""

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.pad(x, (0, -x.shape[1] % 8)) * self.weight
        halved = wide[:, : math.ceil(x.shape[1] / 2)].clamp(-x.shape[0] + 1, 2)
        return halved.sum() / x.shape[1] ** 0.5 + max(x.shape[0], x.shape[1]) * wide.mean()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))


def test_sizes_are_computed_as_python_computes_them() -> None:
    eager, ours = pair(Computes())
    for size in (3, 5, 6, 11):
        assert_step_as_eager(eager, ours, rows(4, size))
    assert len(ours._fxshard.variants) == 3


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.sample(2)
def test_sizes_of_images_stay_open_where_they_are_interpolated(mode: str) -> None:
    class Enlarges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.interpolate(self.conv(x), scale_factor=2, mode=mode)
            return (self.conv(y) * y).sum()

    eager, ours = pair(Enlarges())
    for size in (2, 3, 5, 4):
        assert_step_as_eager(eager, ours, rows(size, 2, 4, 4))
    images = rows(6, 2, 4, 4).contiguous(memory_format=torch.channels_last)
    assert_step_as_eager(eager, ours, images)
    domains = [variant.program.domain for variant in ours._fxshard.variants.values()]
    if mode != "nearest" and torch.__version__.startswith("2.11."):
        # its autograd hands the backward of these a list that it then refuses ("Expected IntList")
        assert domains == [None] * 5, "a program for each size, all of them right"
    else:
        assert len(domains) == 4 and domains[2].free == ("args[0].shape[0]",)


def test_buffers_of_other_shapes_or_dtypes_get_programs_of_their_own() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.mask).sum()

    eager, ours = pair(Masked())
    for mask in (torch.ones(1, 4), torch.ones(1, 4).double(), rows(5, 4)):
        for model in (eager, ours):
            model.mask = mask
        assert_step_as_eager(eager, ours, rows(5, 4))
        assert ours(rows(5, 4)).dtype is eager(rows(5, 4)).dtype
    assert len(ours._fxshard.variants) == 3


def test_sizes_that_the_model_returns_are_those_of_the_call() -> None:
    eager, ours = pair(Halves())
    for size in (2, 4, 8, 6):
        assert ours(rows(size, 4))[1] == size // 2
        assert_step_as_eager(eager, ours, rows(size, 4), loss=lambda out: out[0] * out[1])
    *fixed, third = (variant.program.domain for variant in ours._fxshard.variants.values())
    assert fixed == [None, None] and "Mod(args[0].shape[0], 2)" in third.text


def test_modes_have_programs_of_their_own_and_learn_of_sizes_from_each_other() -> None:
    eager, ours = pair(Layers())
    for size in (3, 4):
        assert_step_as_eager(eager, ours, rows(size, 8))
    with torch.no_grad():
        for size in (5, 6, 7):
            assert torch.equal(ours(rows(size, 8)), eager(rows(size, 8)))
    assert len(ours._fxshard.variants) == 3, (
        "the first call without gradients has a new size: it is open"
    )


# -- named ----------------------------------------------------------------------------------------


def named_dimensions(case: Case) -> dict[str, list[tuple[str, int]]]:
    """Batch, and length where there are tokens, of every tensor of the call."""
    args, kwargs = case.batch(0, 0)
    takes = list(inspect.signature(case.build().forward).parameters)
    tensors = [*zip(takes, args, strict=False), *kwargs.items()]
    dynamic = {"batch": [(name, 0) for name, _ in tensors]}
    for name, tensor in tensors:
        if not tensor.is_floating_point() and tensor.dim() > 1:
            dynamic.setdefault(f"length_{tensor.shape[1]}", []).append((name, 1))
    return dynamic


FAST = "tied"


@pytest.mark.parametrize(
    "name",
    [FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in MATRIX if n != FAST)],
)
def test_bytes_of_a_program_with_open_sizes_are_exact(name: str) -> None:
    case = MATRIX[name]
    torch.manual_seed(0)
    model, (args, kwargs) = case.build(), case.batch(0, 0)
    options = {"world_size": 2, "units": case.units, "optimizer": torch.optim.AdamW}
    plan = fxshard.plan(model, args, kwargs, **options, dynamic=named_dimensions(case))
    assert plan.program.domain is not None and plan.program.domain.free
    result = fxshard.validate(model, args, kwargs, **options, dynamic=named_dimensions(case))
    assert result.max_abs_difference == 0, result.table(only_different=True)
    fixed = fxshard.plan(model, args, kwargs, **options).memory
    assert plan.memory.peak_bytes == fixed.peak_bytes, "open sizes cost memory"


def test_named_sizes_are_open_from_the_first_call_on() -> None:
    case = MATRIX["llama"]
    torch.manual_seed(0)
    dynamic = {"seq": [("input_ids", 1), ("labels", 1)], "batch": [("input_ids", 0), ("labels", 0)]}
    eager, ours = pair(case.build(), dynamic=dynamic, units=case.units)
    for shape in ((2, 8), (3, 5), (2, 16)):
        args, kwargs = labelled_token_batch(0, 0, vocab=32, shape=shape)
        losses = [case.loss(model(*args, **kwargs)).detach() for model in (eager, ours)]
        assert torch.equal(*losses)
    (variant,) = ours._fxshard.variants.values()
    assert variant.program.domain.free == ("seq", "batch")


def test_false_makes_a_program_per_size() -> None:
    _, ours = pair(Layers(), dynamic=False)
    for size in (2, 3, 4, 3):
        ours(rows(size, 8))
    assert len(ours._fxshard.variants) == 3


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"n": [("y", 0)]}, "dynamic['n'] names 'y', but the call has args[0], x and forward"),
        ({"n": [("x", 2)]}, "names dimension 2 of 'x'"),
        ({"n": [("x", 0), ("args[0]", 1)]}, "dimensions of different sizes: [4, 8]"),
        ({"n": "x"}, "expected None, False, or names for dimensions"),
        ([("x", 0)], "expected None, False, or names for dimensions"),
    ],
)
def test_names_that_are_refused(dynamic: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        fxshard.plan(Layers(), (rows(4, 8),), world_size=2, dynamic=dynamic)


# -- how many, and what is said --------------------------------------------------------------------


def test_more_programs_than_allowed_are_refused_with_the_list() -> None:
    eager, ours = pair(Layers(), dynamic=False, max_variants=2)
    for size in (4, 5):
        ours(rows(size, 8))
    with pytest.raises(StepError) as failure:
        ours(rows(6, 8))
    text = str(failure.value)
    assert "args[0] is [6, 8], was [" in text and "max_variants=2" in text
    assert "1: the first call" in text and "2: args[0] is [5, 8], was [4, 8]" in text
    assert_step_as_eager(eager, ours, rows(4, 8))  # what there is goes on
    with pytest.raises(ConfigError, match="max_variants=0: expected an integer >= 1"):
        fxshard.compile(Layers(), world_size=2, max_variants=0)


def test_the_condition_that_a_call_breaks_is_told() -> None:
    _, ours = pair(Layers(most=6), max_variants=3)
    for size in (3, 4, 5):  # the third program is for at most 6 rows
        ours(rows(size, 8))
    holds = r"is \[8, 8\], was \[5, 8\] \(the program holds for .*<= 6 only \(.*test_shapes"
    with pytest.raises(StepError, match=holds):
        ours(rows(8, 8))


class OwnLimit(nn.Module):
    """f32 (batch, 8) -> same; more rows than `most` pass it by."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(8, 8), most

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() if x.shape[0] <= self.most else x


class Limits(nn.Module):
    """f32 (batch, 8) -> a scalar; a few of its blocks are traced, and one in between has a limit.

    It pads first: the kernel in C++ takes an open size as a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnLimit(20 if i == 5 else 99) for i in range(10))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, 0, 0, 1))[:-1]
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_what_a_block_that_is_not_traced_asks_of_a_size_holds_too() -> None:
    eager, ours = pair(Limits())
    for size in (3, 4, 5, 12, 24, 25, 20):
        assert_step_as_eager(eager, ours, rows(size, 8))
    assert len(ours._fxshard.variants) == 4, "up to 20 rows, and above"


def test_each_program_is_announced_once_with_its_reason(
    caplog: Any, capsys: Any, monkeypatch: Any
) -> None:
    _, ours = pair(Layers(most=6))
    caplog.set_level(logging.INFO, "fxshard")
    for _ in range(2):
        ours(rows(4, 8))
        ours(rows(3, 8))
        ours(rows(5, 8))
    ours.eval()
    ours(rows(4, 8))
    lines = [r.message for r in caplog.records if " nodes" in r.message]
    assert [re.sub(r"[\d.]+ s, \d+ nodes", "..", line) for line in lines] == [
        "fxshard: program 1 (the first call): ..",
        "fxshard: program 2 (args[0] is [3, 8], was [4, 8]): ..",
        "fxshard: program 3 (args[0] is [5, 8], was [4, 8]): ..; "
        "open: args[0].shape[0] while args[0].shape[0] <= 6",
        "fxshard: program 4 (train or eval changed): ..; "
        "open: args[0].shape[0] while args[0].shape[0] <= 6",
    ]
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FXSHARD_DEBUG", "0")
    with torch.no_grad():
        ours(rows(4, 8))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[fxshard] program 5 (grad mode changed): ")


# -- ranks ----------------------------------------------------------------------------------------

STEPS = {0: (8, 8, 12, 5, 8), 1: (8, 10, 3, 16, 2)}  # rank -> rows of each step


def of_a_size(rank: int, step: int) -> Batch:
    return (rows(STEPS[rank][step], 5) * (1 + rank + step),), {}


def sizes(rank: int, world_size: int) -> tuple[Result, Result, int]:
    case = dataclasses.replace(MATRIX["mlp13"], batch=of_a_size)
    torch.manual_seed(0)
    model = fxshard.compile(case.build(), units=case.units)
    ours = fsdp2.run_steps(model, case, len(STEPS[rank]))
    return fsdp2.train(case, len(STEPS[rank])), ours, len(model._fxshard.variants)


def test_ranks_may_see_other_sizes(ranks: Any) -> None:
    for theirs, ours, programs in ranks(2).run(sizes):
        fsdp2.assert_bitwise(ours, theirs)
        assert programs == 3


def another_way(rank: int, world_size: int) -> tuple[str, str]:
    torch.manual_seed(0)
    model = fxshard.compile(Layers(most=6))
    model(rows(4, 8)).backward()
    first = told(lambda: model(rows(8 if rank == 1 else 5, 8)).backward())
    return first, told(lambda: model(rows(4, 8)))


def test_ranks_whose_lengths_need_other_collectives_all_raise_at_once(hasty: Any) -> None:
    """Rank 1 gathers two layers where the others gather three; nobody waits for a timeout."""
    found = hasty(3).run(another_way)
    assert all(first.startswith("RankMismatchError") for first, _ in found)
    assert "rank 1 waits for all ranks to agree on" in found[0][0]
    assert "rank 1 would do something else in this call of the model than rank " in found[1][0]
    assert "layers.1.weight" in found[1][0]
    assert found[1][1].startswith("RankMismatchError: this rank has left the process group")


class Ways(nn.Module):
    """Goes through one of two layers of equal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.layers[way](x).mean()


def ways_apart(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    model = fxshard.compile(Ways())
    told_of = []
    for way in (0, 1, 0, int(rank == world_size - 1), 0):
        told_of.append(told(lambda way=way: model(rows(4, 8), way).backward()))
    return told_of


def test_ranks_that_go_other_known_ways_are_told_in_the_next_call(hasty: Any) -> None:
    """Nothing of it shows in the sizes of collectives: they would go on with mixed numbers."""
    for rank, found in enumerate(hasty(2).run(ways_apart)):
        assert found[:4] == ["no error"] * 4
        assert found[4].startswith(
            f"RankMismatchError: in the last call rank {1 - rank} ran another program than"
        )
        assert f"it has 'input args[1]: {1 - rank}', here it is 'input args[1]: {rank}'" in found[4]


def test_a_rank_that_went_the_way_of_the_next_is_told_too(hasty: Any) -> None:
    """Rank 0 and rank 1 went alike: rank 0 sees no difference, but that the others leave."""
    found = hasty(3).run(ways_apart)
    assert all(each[:4] == ["no error"] * 4 for each in found)
    assert all(each[4].startswith("RankMismatchError: ") for each in found)
    assert "in the last call rank 2 ran another program than rank 1" in found[1][4]
    assert "in the last call rank 0 ran another program than rank 2" in found[2][4]
    # Whoever of the two leaves first has said why.
    left = r"rank (1 ran another program than rank 2|2 ran another program than rank 0) in the last"
    assert re.search(left, found[0][4])


def clipped_apart(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    model = fxshard.compile(Ways())
    told_of = [told(lambda: model.clip_grad_norm_(1.0))]
    for way in (0, 1, 0, rank):
        model(rows(4, 8), way).backward()
        told_of.append(told(lambda: model.clip_grad_norm_(1.0)))
    return told_of


def test_ranks_that_went_other_known_ways_do_nothing_together(hasty: Any) -> None:
    """What they clip or save is mixed already."""
    for found in hasty(2).run(clipped_apart):
        assert found[:4] == ["no error"] * 4
        assert found[4].startswith("RankMismatchError: ranks differ in what they do to the model")
        assert "after program" in found[4]


def one_program_too_many(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    model = fxshard.compile(Layers(), dynamic=False, max_variants=2)
    sizes = [(3, 4, 5), (3, 6, 7)][rank]
    return [told(lambda size=size: model(rows(size, 8)).backward()) for size in sizes]


def test_a_call_that_all_refuse_for_sizes_of_their_own_has_one_reason(ranks: Any) -> None:
    for found, size in zip(ranks(2).run(one_program_too_many), (5, 7), strict=True):
        assert found[:2] == ["no error"] * 2
        assert found[2].startswith("StepError: this call needs one more program: args[0] is")
        assert f"[{size}, 8]" in found[2]
