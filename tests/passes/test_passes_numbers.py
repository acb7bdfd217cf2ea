"""Each pass keeps the numbers of eager, under every strategy and policy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fxshard import pipeline
from fxshard.capture import trace
from fxshard.config.precision import Precision
from fxshard.ir.program import Program
from fxshard.ir.splitting import find_units
from fxshard.passes.insert_reduce import InsertReduce
from tests import graphs
from tests.passes.passes_cases import EACH, EXACT, FP16, PASSES, Build, full, root
from tests.zoo import MODELS

INDEX = """
%x : bf16[2,4] = input 0
%w : bf16[4,4] = param w
%rows : i64[2] = param rows
%dy : bf16[2,4] = tangent 0
forward:
%e = aten.index_select(%w, 0, %rows)
%y = aten.mul.Tensor(%x, %e)
backward:
%de = aten.mul.Tensor(%dy, %x)
%dw = aten.index_select_backward(%de, [4, 4], 0, %rows)
return %y (0), %dw (w)
"""


def by_hand(build: Build, model: nn.Module, *args: Any) -> Any:
    return build, model, args, {}


def captured(name: str, world_size: int = 2) -> Any:
    torch.manual_seed(0)
    model = MODELS[name].build()
    args, kwargs = MODELS[name].batch(0, 0)

    def build() -> Program:
        units = find_units(model)
        return trace.capture(model, args, kwargs, units=units, world_size=world_size, training=True)

    return build, model, args, kwargs


STEPS: dict[str, Callable[[], Any]] = {
    "layered": lambda: by_hand(graphs.layered, graphs.Layered(), torch.tensor([0, 3, 1, 4])),
    "chain": lambda: by_hand(graphs.chain, graphs.Chain(), torch.randn(2, 4)),
    "tied": partial(captured, "tied"),
    "mlp13 on 3": partial(captured, "mlp13", 3),
    "convnet": partial(captured, "convnet"),
    "dropout": partial(captured, "dropout"),
}


@pytest.mark.parametrize(
    "model",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("tied", "dropout") else n for n in STEPS],
)
@pytest.mark.sample(2)
def test_every_pass_keeps_the_numbers_of_eager(model: str) -> None:
    torch.manual_seed(0)
    build, module, args, kwargs = STEPS[model]()
    values = graphs.values_of(module, *args, **kwargs)
    program = build()
    numbers = graphs.run(program, values)
    graphs.assert_same(numbers, graphs.eager(module, values, *args, **kwargs), exact=False)
    for step in EXACT:
        pipeline.run(program, [step], check_each=True)
        graphs.assert_same(graphs.run(program, values), numbers, exact=True)


# Settings of a program, and of Config.
bf16, fp32_reduce = Precision(torch.bfloat16), graphs.BF16
STRATEGIES: dict[str, dict[str, Any]] = {
    "shard_grad_op": {"reshard": False},
    "reshard_2_of_4": {"reshard": 2, "world_size": 4},
    "no_shard": {"world_size": 1, "replicas": 2},
    "hybrid": {"replicas": 2},
    "one_rank": {"world_size": 1},
    "uneven": {"world_size": 3},
    "bf16": {"precision": bf16, "world_size": 3},
    "fp32_reduce": {"precision": fp32_reduce, "world_size": 3},
    "fp16": {"precision": FP16, "world_size": 4},
    "low_precision_grads": {
        "precision": Precision(torch.bfloat16, keep_low_precision_grads=True),
        "replicas": 2,
    },
    "offload": {"offloaded": True},
    "offload_one_rank": {"offloaded": True, "world_size": 1, "replicas": 2},
    "no_sync": {"sync": False, "precision": fp32_reduce},
    "no_sync_adds": {"sync": False, "accumulated": EACH, "precision": bf16},
    "accumulated": {"accumulated": EACH, "precision": fp32_reduce},
    "comm_hook": {"comm_hook": True, "world_size": 3},
    "comm_hook_no_shard": {"comm_hook": True, "world_size": 1, "replicas": 2},
    "ignored": {"ignored": ["head"], "replicas": 2},
    "everything": {
        "reshard": 2,
        "world_size": 4,
        "replicas": 2,
        "offloaded": True,
        "precision": fp32_reduce,
        "accumulated": frozenset({"layers.0.weight"}),
        "ignored": ["layers.1.weight"],
    },
    "everything_kept": {
        "reshard": False,
        "world_size": 3,
        "replicas": 2,
        "offloaded": True,
        "precision": bf16,
        "accumulated": EACH,
    },
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sample(5)
def test_every_strategy_keeps_the_numbers_of_eager(strategy: str) -> None:
    """Alike on all ranks, bit for bit; and with gradients that differ, up to rounding."""
    settings = STRATEGIES[strategy]
    torch.manual_seed(0)
    dtype = settings.get("precision", Precision()).param_dtype or torch.float32
    model, x = graphs.Chain(), torch.randn(2, 4)
    program = graphs.chain(**settings)
    values = graphs.values_of(model, x) | graphs.accumulated_values(program)
    alike, apart = graphs.run(program, values), graphs.run(program, values, apart=True)
    wanted = graphs.eager(model.to(dtype), values, x.to(dtype))
    for fqn in program.accumulated:
        wanted["grad", fqn] = values["accumulated", fqn] + wanted["grad", fqn]
    if not program.sync:
        kinds = {"grad": "accumulated"}
        wanted = {(kinds.get(kind, kind), name): v for (kind, name), v in wanted.items()}
    graphs.assert_same(alike, wanted, exact=False)
    for step in PASSES.values():
        pipeline.run(program, [step], check_each=True)
        same = graphs.run(program, values)
        graphs.assert_same(same, alike, exact=dtype is not torch.float16, dtypes=False)
        each = graphs.run(program, values, apart=True)
        graphs.assert_same(each, apart, exact=False, dtypes=False)
    keeps = program.units[0].precision.keep_low_precision_grads
    for result, value in zip(program.results, program.values, strict=True):
        if result.kind == "grad" and result.name in program.params and not keeps:
            assert value.meta["val"].dtype is torch.float32


@pytest.mark.parametrize("strategy", ["shard_grad_op", "reshard_2_of_4", "no_shard", "offload"])
def test_padding_ties_and_dropout_under_every_strategy(strategy: str) -> None:
    program = graphs.layered(**STRATEGIES[strategy])
    values = graphs.random_values(program)
    numbers = graphs.run(program, values)
    full(program)
    graphs.assert_same(graphs.run(program, values), numbers, exact=True)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offloaded", [False, True])
def test_integers_are_loaded_and_not_cast(world_size: int, offloaded: bool) -> None:
    program = graphs.parse(INDEX, root, frozen=["rows"])
    settings = {"world_size": world_size, "offloaded": offloaded}
    program = graphs.configured(program, precision=graphs.BF16, **settings)
    values = graphs.random_values(program)
    numbers = graphs.run(program, values)
    same = graphs.run(full(program), values)
    graphs.assert_same(same, numbers, exact=True, dtypes=False)


def test_fp32_gradients_are_rounded_to_the_dtype_of_the_reduction() -> None:
    program = graphs.chain(precision=Precision(None, torch.bfloat16))
    values = graphs.random_values(program)
    wanted = graphs.run(program, values)
    wanted |= {key: v.bfloat16().float() for key, v in wanted.items() if key[0] == "grad"}
    graphs.assert_same(graphs.run(full(program), values), wanted, exact=True)


@pytest.mark.parametrize("settings", [{}, {"replicas": 2}, {"precision": FP16, "world_size": 4}])
@pytest.mark.parametrize(
    ("step", "factor"),
    [  # of the mean over 2 or 4 ranks, of which each has twice the gradient of the one before
        (InsertReduce("sum"), {2: 2, 4: 4}),
        (InsertReduce("max"), {2: 2 / 1.5, 4: 8 / 3.75}),
        (InsertReduce(divide_factor=1), {2: 2, 4: 4}),
        (InsertReduce(divide_factor=6), {2: 1 / 3, 4: 2 / 3}),
        (InsertReduce(divide_factor=6, predivide_factor=3), {2: 1 / 3, 4: 2 / 3}),
        (InsertReduce(predivide_factor=8), {2: 1, 4: 1}),
    ],
)
def test_reductions_other_than_the_mean(
    step: InsertReduce, factor: dict[int, float], settings: dict[str, Any]
) -> None:
    program = graphs.chain(1, **settings)
    values = graphs.random_values(program)
    if step.op == "max":
        values = {key: value.abs() for key, value in values.items()}
    wanted = graphs.run(program, values, apart=True)
    wide = factor[program.world_size * program.replicas]
    wanted |= {key: value.float() * wide for key, value in wanted.items() if key[0] == "grad"}
    passes = [step if each.name == step.name else each for each in PASSES.values()]
    pipeline.run(program, passes, check_each=True)
    ours = graphs.run(program, values, apart=True)
    tolerant = {key: value.to(program_dtype(program)) for key, value in ours.items()}
    wanted = {key: value.to(program_dtype(program)) for key, value in wanted.items()}
    graphs.assert_same(tolerant, wanted, exact=False)


def program_dtype(program: Program) -> torch.dtype:
    return program.units[0].precision.param_dtype or torch.float32
