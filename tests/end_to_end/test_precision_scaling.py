"""Casts and bytes, how gradients become one, scalers and autocast, memory."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard._torch import modules
from fxshard.config.checked import Config
from fxshard.errors import ConfigError
from fxshard.ir import ops
from fxshard.memory.category import Category
from tests import fsdp2
from tests.end_to_end.precision_cases import (
    BF16,
    FP16,
    FP32,
    IN_FP32,
    LOW,
    POLICIES,
    SLOW,
    STEPS,
    Policy,
    Recipe,
    compiled,
    reference,
)
from tests.fsdp2 import Result, adamw, full, run_steps
from tests.oracles import Collectives, count_collectives
from tests.zoo import MODELS, Case, models

APART: dict[str, Any] = {"pack_bytes": 0}  # each parameter has a buffer of its own


def for_each(items: dict[str, Any], check: Callable[[Any], object]) -> None:
    """Check each item; an error says which it is of."""
    for name, item in items.items():
        try:
            check(item)
        except Exception as error:
            error.add_note(f"in {name!r}")
            raise


# -- casts and bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mlp13", *(pytest.param(n, marks=SLOW) for n in ("transformer", "llama"))]
)
def test_a_cast_stands_in_front_of_each_gather(name: str) -> None:
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    options = {"world_size": 4, "units": case.units, "mixed_precision": LOW, **APART}
    program = fxshard.plan(case.build(), args, kwargs, **options).program
    ours = [n for n in program.graph.nodes if n.target in ops.OPERATORS]
    gathers = [n for n in ours if n.target is ops.all_gather]
    casts = [n for n in ours if n.target is ops.cast]
    assert len(casts) == len(gathers) >= 7
    for cast, gather in zip(casts, gathers, strict=True):
        assert ours.index(gather) == ours.index(cast) + 1
        items = gather.args[0]
        assert [item.args[0] for item in items] == [cast] * len(items)
        assert len(cast.args[0]) == len(items)
        assert {n.op for n in cast.args[0]} == {"placeholder"}
        assert {item.meta["val"].dtype for item in (*items, *gather.users)} == {BF16}


def test_packing_casts_what_it_packs() -> None:
    case = MODELS["mlp13"]
    args, kwargs = case.batch(0, 0)
    options = {"world_size": 4, "units": case.units, "mixed_precision": LOW}
    program = fxshard.plan(case.build(), args, kwargs, **options).program
    gathers = list(program.graph.find_nodes(op="call_function", target=ops.all_gather))
    makers = [item.args[0] for gather in gathers for item in gather.args[0]]
    # One buffer each; backward reads one parameter of the root, and there is nothing to pack.
    assert len(makers) == len(gathers)
    assert [maker.target for maker in makers].count(ops.cast) == 1
    for maker in makers:
        assert maker.target in (ops.cast, ops.pack) and len(maker.users) == 1
        assert (len(maker.args[0]) > 1) == (maker.target is ops.pack)
        assert {(n.op, n.meta["val"].dtype) for n in maker.args[0]} == {("placeholder", FP32)}
        assert {item.meta["val"].dtype for item in maker.users} == {BF16}


def test_parameters_in_the_right_dtype_are_not_cast() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=BF16), nn.Linear(4, 4))
    options = {"world_size": 2, "mixed_precision": LOW, **APART}
    program = fxshard.plan(model, (torch.ones(2, 4),), **options).program
    casts = [n for n in program.graph.nodes if n.target is ops.cast]
    gathers = [n for n in program.graph.nodes if n.target is ops.all_gather]
    assert [len(n.args[0]) for n in gathers] == [4, 1]  # 0.weight: the first layer's is not read
    names = [[shard.meta["fxshard"].fqn for shard in n.args[0]] for n in casts]
    assert names == [["1.weight", "1.bias"], ["1.weight"]]


class ForeachCopies(TorchDispatchMode):
    """Counts ``_foreach_copy_`` by the number of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func is torch.ops.aten._foreach_copy_.default:
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def counted(
    rank: int, name: str, policy: MixedPrecisionPolicy | None, options: dict[str, Any]
) -> tuple[Collectives, list[int], int]:
    """What the process group and `_foreach_copy_` see of a step, and the all-gathers launched."""
    case = MODELS[name]
    model = fxshard.compile(case.build(), units=case.units, mixed_precision=policy, **options)
    args, kwargs = case.batch(rank, 0)
    case.loss(model(*args, **kwargs)).backward()
    with count_collectives() as seen, ForeachCopies() as copies:
        case.loss(model(*args, **kwargs)).backward()
    launches = model.plan.program.graph.find_nodes(op="call_function", target=ops.all_gather)
    return seen, copies.sizes, len(launches)


def tables(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Any:
    policies = [None, LOW, POLICIES["fp16"], POLICIES["bf16 all through"]]
    return [counted(rank, name, policy, options) for policy in policies]


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param("transformer", APART, marks=SLOW), ("mlp13", APART), ("mlp13", {})],
)
def test_bytes_halve_and_casts_are_one_per_gather(
    ranks: Any, name: str, options: dict[str, Any]
) -> None:
    """Where parameters are packed, what packs them casts them too."""
    for (plain, none, gathers), *low, all_low in ranks(2).run(tables, name, options):
        unpacked = gathers - 1 if not options else 0  # one gathers a single parameter
        assert len(none) == 2 * unpacked
        for seen, sizes, launched in (*low, all_low):
            assert launched == gathers
            assert seen.kinds() == plain.kinds()
            assert 2 * seen.nbytes("all_gather") == plain.nbytes("all_gather")
            assert len(sizes) == gathers + unpacked
        for seen, *_ in low:
            assert seen.nbytes("reduce_scatter") == plain.nbytes("reduce_scatter")
        assert 2 * all_low[0].nbytes("reduce_scatter") == plain.nbytes("reduce_scatter")


# -- how gradients become one ----------------------------------------------------------------------


def divided(
    rank: int, world_size: int, mesh: tuple[int, int] | None, policy: str, factor: float
) -> None:
    """Ours and FSDP2's."""
    strategy = "hybrid_shard" if mesh else "full_shard"
    recipe = Recipe(MODELS["mlp13"], POLICIES[policy], strategy=strategy, mesh=mesh)
    theirs = reference(recipe)
    for module in theirs.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)
    ours = compiled(recipe, gradient_divide_factor=factor)
    results = [run_steps(model, recipe.case, 2) for model in (theirs, ours)]
    fsdp2.assert_bitwise(results[1], results[0])


@pytest.mark.parametrize("factor", [1.0, 12.0])
@pytest.mark.parametrize("policy", ["nothing", "bf16", "fp16 all through"])
@pytest.mark.parametrize(("count", "mesh"), [(2, None), (4, (2, 2))])
@pytest.mark.sample(3)
def test_divide_factor_is_fsdp2s(
    ranks: Any, count: int, mesh: tuple[int, int] | None, policy: str, factor: float
) -> None:
    ranks(count).run(divided, mesh, policy, factor)


def local_gradients(case: Case, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the plain model on this rank's batch."""
    torch.manual_seed(0)
    model = case.build().to(dtype)
    args, kwargs = case.batch(rank, 0)
    case.loss(model(*[arg.to(dtype) for arg in args], **kwargs)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Options, and by hand: `before` each gradient, `both` of them, `behind`; in `dtype`."""

    options: dict[str, Any]
    both: Callable[[Tensor, Tensor], Tensor] = torch.add
    before: float = 1.0
    behind: float = 1.0
    dtype: torch.dtype = FP32
    compute: torch.dtype = FP32


def mixed(param: torch.dtype | None, reduce: torch.dtype | None = None) -> dict[str, Any]:
    return {"mixed_precision": Policy(param_dtype=param, reduce_dtype=reduce)}


REDUCTIONS: dict[str, Reduction] = {
    "average": Reduction({}, behind=2),
    "sum": Reduction({"reduce_op": "sum"}),
    "max": Reduction({"reduce_op": "max"}, torch.maximum),
    "min": Reduction({"reduce_op": "min"}, torch.minimum),
    "max of replicas": Reduction({"reduce_op": "max", "strategy": "no_shard"}, torch.maximum),
    "sum in bf16": Reduction({"reduce_op": "sum", **mixed(None, BF16)}, dtype=BF16),
    "max in bf16": Reduction(
        {"reduce_op": "max", **mixed(BF16, BF16)}, torch.maximum, dtype=BF16, compute=BF16
    ),
    "sum in the dtype of torch's choice": Reduction(
        {"reduce_op": "sum", **mixed(BF16)},
        dtype=FP32 if modules.REDUCES_AS_STORED else BF16,
        compute=BF16,
    ),
    "divided by 3": Reduction({"gradient_divide_factor": 3}, behind=3),
    "divided by 3 before": Reduction(
        {"gradient_divide_factor": 3, "gradient_predivide_factor": 3}, before=3
    ),
    "divided by 5 before and by 7 after": Reduction(
        {"gradient_divide_factor": 35, "gradient_predivide_factor": 5}, before=5, behind=7
    ),
    "divided before": Reduction({"gradient_predivide_factor": 8}, before=8, behind=0.25),
    "replicas divided before": Reduction(
        {"gradient_predivide_factor": 2, "strategy": "no_shard"}, before=2
    ),
    "fp16 halves before": Reduction(mixed(FP16, FP16), before=2, dtype=FP16, compute=FP16),
    "fp16 divided by 12": Reduction(
        {"gradient_divide_factor": 12, **mixed(None, FP16)}, before=4, behind=3, dtype=FP16
    ),
}


def reduced(rank: int, world_size: int) -> None:
    """Gradients of the first step are what a hand computes of both ranks' own."""
    case = MODELS["mlp13"]

    def check(reduction: Reduction) -> None:
        torch.manual_seed(0)
        model = fxshard.compile(case.build(), units=case.units, **reduction.options)
        args, kwargs = case.batch(rank, 0)
        case.loss(model(*args, **kwargs)).backward()
        first, second = (
            local_gradients(case, other, reduction.compute) for other in range(world_size)
        )
        for name, param in model.named_parameters():
            a, b = (
                grad.to(reduction.dtype) / reduction.before for grad in (first[name], second[name])
            )
            expected = (reduction.both(a, b) / reduction.behind).to(FP32)
            assert param.grad is not None and torch.equal(full(param.grad), expected), name

    for_each(REDUCTIONS, check)


def test_reductions_by_hand(ranks: Any) -> None:
    ranks(2).run(reduced)


def test_contradictory_reductions_are_refused() -> None:
    for op in ("sum", "max", "min"):
        for name in ("gradient_divide_factor", "gradient_predivide_factor"):
            with pytest.raises(ConfigError, match=f"{name}=2 has no meaning with reduce_op='{op}'"):
                Config(**{"reduce_op": op, name: 2})
    for bad in (0, -1, "2"):
        with pytest.raises(ConfigError, match="expected a number > 0"):
            Config(gradient_divide_factor=bad)
    with pytest.raises(ConfigError, match="reduce_op='mean' is not supported"):
        Config(reduce_op="mean")


# -- scalers and autocast --------------------------------------------------------------------------


def scaled(model: Any, case: Case, make: Callable[..., Any], rank: int) -> Result:
    """Five steps; the scale is first far too large, and rank 1's third loss is infinite."""
    scaler = make("cpu", init_scale=2.0**22, growth_interval=2, backoff_factor=2.0**-6)
    optimizer = adamw(model.parameters())
    losses, grads = [], []
    for step in range(STEPS):
        args, kwargs = case.batch(rank, step)
        loss = case.loss(model(*args, **kwargs).float())
        scaler.scale(loss * float("inf") if rank == 1 and step == 2 else loss).backward()
        scaler.unscale_(optimizer)
        losses += [loss.item(), scaler.get_scale()]
        own = {n: full(p.grad) for n, p in model.named_parameters()}
        for grad in own.values():
            grad[grad.isnan()] = math.nan  # one of the many that there are
        grads += [own, {}]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Result(losses, grads, {n: full(p) for n, p in model.named_parameters()}, {})


class Around(nn.Module):
    """Its module under autocast."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", self.dtype):
            return self.module(*args, **kwargs)


class Inside(models.Transformer):
    """Autocast in its forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return super().forward(tokens)


SCALERS: dict[str, Callable[..., Any]] = {"torch": GradScaler, "sharded": ShardedGradScaler}


def scaled_beside(rank: int, world_size: int, name: str) -> None:
    def check(item: tuple[Recipe, str]) -> None:
        recipe, kind = item
        results = [
            scaled(model, recipe.case, SCALERS[kind], rank)
            for model in (reference(recipe), compiled(recipe))
        ]
        scales = results[0].losses[1::2]
        assert len(set(scales)) > 1 and all(map(math.isfinite, results[0].losses[0::2])), scales
        fsdp2.assert_bitwise(results[1], results[0])

    policies = ("fp16", "fp16 all through")
    items = {p: (Recipe(MODELS[name], POLICIES[p]), kind) for p in policies for kind in SCALERS}
    for_each(items, check)


@pytest.mark.parametrize("name", [pytest.param("transformer", marks=SLOW), "mlp13"])
def test_scalers_are_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    ranks(2).run(scaled_beside, name)


OUTSIDE, INSIDE = (
    dataclasses.replace(MODELS["transformer"], build=functools.partial(cls, depth=2))
    for cls in (models.Transformer, Inside)
)
AUTOCAST: dict[str, tuple[Recipe, bool]] = {
    "inside, bf16": (Recipe(INSIDE, LOW), False),
    "inside, nothing": (Recipe(INSIDE, POLICIES["nothing"]), False),
    "around, bf16": (Recipe(OUTSIDE, LOW), True),
    "around, fp16": (Recipe(MODELS["mlp13"], POLICIES["fp16"]), True),
    "around, nothing": (Recipe(OUTSIDE, POLICIES["nothing"]), True),
    "around, bf16 reduced": (Recipe(OUTSIDE, POLICIES["bf16 reduced"]), True),
    "around, parts": (Recipe(OUTSIDE, LOW, {nn.LayerNorm: IN_FP32}), True),
}


def autocast_beside(rank: int, world_size: int, name: str) -> None:
    recipe, around = AUTOCAST[name]
    pair = [reference(recipe), compiled(recipe)]
    wrapped = [Around(model, BF16) if around else model for model in pair]
    results = [run_steps(model, recipe.case, 3) for model in wrapped]
    fsdp2.assert_bitwise(results[1], results[0])


@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.sample(3)  # one inside, one in fp16, one of parts
def test_autocast_is_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    ranks(2).run(autocast_beside, name)


# -- memory ----------------------------------------------------------------------------------------


MEASURED: dict[str, Any] = {
    **POLICIES,
    "part in fp32": {"": LOW, "**.0": IN_FP32},
    "gradients stay": MixedPrecision(
        param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True
    ),
}


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=SLOW) for n in (3, 8))])
@pytest.mark.parametrize("name", [pytest.param("transformer", marks=SLOW), "mlp13"])
@pytest.mark.parametrize("key", MEASURED)
@pytest.mark.sample(5)
def test_static_equals_measured(key: str, name: str, world_size: int) -> None:
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    torch.manual_seed(0)
    validation = fxshard.validate(
        case.build(),
        args,
        kwargs,
        world_size=world_size,
        units=case.units,
        mixed_precision=MEASURED[key],
        optimizer=None if key == "gradients stay" else adamw,
    )
    assert validation.max_abs_difference == 0, validation.table(only_different=True)


class Product(nn.Module):
    """Sums x @ w.t(): f32[2, 4] by f32[5, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight.t()).sum()


def test_peaks_by_hand() -> None:
    """Over 2 ranks the shard is f32[3, 4], 48 bytes; the batch is f32[2, 4], 32 bytes."""
    x = torch.ones(2, 4)
    options: dict[str, Any] = {"world_size": 2, "mixed_precision": LOW}
    report = fxshard.plan(Product(), (x,), **options).memory
    forward = report.snapshot("", "Peak Forward", first_step=True)
    # While it is gathered: x in bf16 (16), the shard in bf16 (24), the whole bf16[6, 4] (48).
    assert forward == {c: 0 for c in Category} | {
        Category.SHARDED_PARAM: 48,
        Category.INPUTS: 32,
        Category.ACTIVATION: 16,
        Category.ALL_GATHER: 24 + 48,
    }
    backward = report.snapshot("", "Peak Backward", first_step=True)
    # The gradient bf16[5, 4] is padded to bf16[6, 4] (48) and cast to f32[6, 4] (96). The loss and
    # what arrives at it are bf16 (2 each).
    assert backward == {c: 0 for c in Category} | {
        Category.SHARDED_PARAM: 48,
        Category.INPUTS: 32,
        Category.REDUCE_SCATTER: 48 + 96,
        Category.ACTIVATION: 2,
        Category.TEMP: 2,
    }
    assert report.peak_bytes == sum(backward.values()) == 228
    validation = fxshard.validate(Product(), (x,), **options)
    assert validation.max_abs_difference == 0
    assert validation.measured_peak_bytes == 228
