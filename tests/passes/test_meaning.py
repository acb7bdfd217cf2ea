"""Each pass keeps the meaning: before and after it, programs give the same numbers, bit for bit.

`tests.interpreter` says what a program means, and runs it: on all ranks, each with a batch of its
own, with streams as late and as early as may be.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fxshard import pipeline
from fxshard.capture import trace
from fxshard.config.checked import Config
from fxshard.ir.program import Program
from fxshard.ir.splitting import find_units
from fxshard.passes.insert_step import InsertStep
from tests import graphs, interpreter
from tests.interpreter import Found, Values
from tests.passes.passes_cases import marked
from tests.passes.test_streams import SMALL, options_of, untouched
from tests.verify.settings import SETTINGS
from tests.zoo import MODELS

Build = Callable[[], Program]


def assert_same(ours: Found, wanted: Found, said: str) -> None:
    assert ours.keys() == wanted.keys(), said
    for key in wanted:
        assert interpreter.same(ours[key], wanted[key]), f"{said}: {key} differs"


def assert_keeps(
    start: Program, values: list[Values], passes: list[Any], *, divides: bool = False
) -> int:
    """Each of `passes` leaves what `start` gives as it is; returns how many were compared.

    Args:
        divides: insert-reduce divides in other steps than ranks and replicas: up to rounding.
    """
    wanted = interpreter.interpreted(start, values)
    for step in passes:
        pipeline.run(start, [step])
        if step.name == "insert-reduce" and start.signature.training:
            wanted = interpreter.reduced(start, wanted, values)
            ours = interpreter.interpreted(start, values)
            if divides:
                assert_close(ours, wanted)
                wanted = ours
            assert_same(ours, wanted, f"after {step.name}")
        else:
            assert_same(interpreter.interpreted(start, values), wanted, f"after {step.name}")
    return len(passes)


def assert_close(ours: Found, wanted: Found) -> None:
    assert ours.keys() == wanted.keys()
    for key, each in wanted.items():
        for one, other in zip(ours[key], each, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, key=key: f"{key}: {text}")


def ranks_of(program: Program) -> int:
    return program.world_size * program.replicas


def with_step(config: Config) -> list[Any]:
    """The passes, with the optimizer's step in its place."""
    passes = pipeline.default_passes(config)
    at = [step.name for step in passes].index("prefetch") + 1
    return [*passes[:at], InsertStep(), *passes[at:]]


HALF = ("bf16", "fp16", "hybrid_offload_bf16")  # CPUs take their time for these
CASES = [pytest.param(name, marks=[pytest.mark.slow] * (name in HALF)) for name in SMALL]


@pytest.mark.parametrize(
    "name", [*CASES, "steps", pytest.param("checkpoints", marks=pytest.mark.slow)]
)
def test_passes_keep_the_meaning(name: str) -> None:
    steps = functools.partial(graphs.layered, optimizer_in_backward=True)
    build = {**SMALL, "checkpoints": marked, "steps": steps}[name]
    start = build()
    config = Config(**options_of(name))
    passes = with_step(config) if name == "steps" else pipeline.default_passes(config)
    values = interpreter.values_of(start, ranks_of(start))
    assert assert_keeps(start, values, passes, divides=name == "fp16") >= 12


# -- the zoo --------------------------------------------------------------------------------------

FACTOR = {"everything"}  # of these settings insert-reduce divides before it sums
SOME = [
    ("mlp13", "hybrid"),
    ("tied", "columns_regrouped"),
    ("convnet", "reshard_2"),
    ("tied", "offload"),
]
ALL = [(name, setting) for name in MODELS for setting in SETTINGS]
# torch has no batch norm on CPU of a bf16 activation and weight with fp32 statistics.
NO_KERNEL = {("convnet", s) for s, (options, _) in SETTINGS.items() if "mixed_precision" in options}


def batch(name: str) -> interpreter.Batch:
    return lambda rank: tree_flatten(MODELS[name].batch(rank, 0))[0]


def of_zoo(name: str, setting: str) -> None:
    start = untouched(name, setting)
    values = interpreter.values_of(start, ranks_of(start), batch(name))
    config = Config(units=MODELS[name].units, **SETTINGS[setting][0])
    assert_keeps(start, values, pipeline.default_passes(config), divides=setting in FACTOR)


@pytest.mark.parametrize(("name", "setting"), SOME)
@pytest.mark.sample(2)
def test_zoo(name: str, setting: str) -> None:
    of_zoo(name, setting)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), [each for each in ALL if each not in NO_KERNEL])
def test_whole_zoo(name: str, setting: str) -> None:
    of_zoo(name, setting)


@pytest.mark.parametrize("name", ["tied", "convnet"])
def test_what_is_captured_means_what_eager_does(name: str) -> None:
    """The anchor: on each rank, the program that no pass has touched is the model."""
    start = untouched(name, "apart")
    ranks = ranks_of(start)
    values = interpreter.values_of(start, ranks, batch(name))
    found = interpreter.interpreted(start, values)
    for rank in range(ranks):
        model = MODELS[name].build()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for (kind, fqn), value in values[rank].items():
                if kind in ("param", "buffer"):
                    named[fqn].copy_(value)
        args, kwargs = MODELS[name].batch(rank, 0)
        outputs = tree_flatten(model(*args, **kwargs))[0]
        both = [(out, values[rank]["tangent", str(i)]) for i, out in enumerate(outputs)]
        torch.autograd.backward([out for out, _ in both], [tangent for _, tangent in both])
        for i, out in enumerate(outputs):
            torch.testing.assert_close(found["output", str(i)][rank], out.detach())
        for fqn, param in model.named_parameters():
            torch.testing.assert_close(found["grad", fqn][rank], param.grad)
        for fqn, buffer in model.named_buffers():
            if ("buffer", fqn) in found:
                torch.testing.assert_close(found["buffer", fqn][rank], buffer)


# -- random programs ------------------------------------------------------------------------------


class Random(nn.Module):
    """Some layers one after the other, inside of each other, called again, with a tied weight."""

    def __init__(self, rng: random.Random, depth: int = 0) -> None:
        super().__init__()
        self.width = 4
        self.kinds = [
            rng.choice(KINDS[: len(KINDS) - (depth > 1)]) for _ in range(rng.randint(2, 4))
        ]
        self.parts = nn.ModuleDict()
        for i, kind in enumerate(self.kinds):
            self.parts[str(i)] = {
                "linear": lambda: nn.Linear(4, 4, bias=rng.random() < 0.5),
                "norm": lambda: nn.LayerNorm(4),
                "dropout": lambda: nn.Dropout(0.3),
                "odd": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)),
                "nested": lambda: Random(rng, depth + 1),
            }[kind]()
        linear = [p for p in self.parts.values() if isinstance(p, nn.Linear)]
        if len(linear) > 1 and rng.random() < 0.5:
            linear[0].weight = linear[1].weight
        self.again = rng.choice(sorted(self.parts)) if rng.random() < 0.4 else None
        self.residual = rng.random() < 0.5
        self.scale = nn.Parameter(torch.ones(rng.choice([1, 4])), requires_grad=rng.random() < 0.7)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in (*self.parts.values(), *([self.parts[self.again]] if self.again else [])):
            y = torch.tanh(part(y))
        return (x + y if self.residual else y) * self.scale


KINDS = ["linear", "linear", "norm", "dropout", "odd", "nested"]


def random_program(seed: int) -> tuple[Program, Config]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), Random(rng), nn.Linear(4, 3))
    paths = [name for name, module in model.named_modules() if name and [*module.parameters()]]
    config = Config(
        units=rng.sample(paths, rng.randint(0, min(4, len(paths)))),
        forward_prefetch=rng.randint(0, 2),
        backward_prefetch=rng.randint(0, 2),
        pack_bytes=rng.choice([0, 65, 2**20]),
        max_bucket_bytes=rng.choice([None, 64]),
    )
    units = find_units(model, config.units)
    world = rng.choice([1, 2, 3, 4])
    x = torch.randn(2, 4, requires_grad=rng.random() < 0.5)
    program = trace.capture(model, (x,), {}, units=units, world_size=world, training=True)
    program.replicas = rng.choice([1, 1, 2])
    program.offloaded = rng.random() < 0.2
    program.sync = rng.random() < 0.8
    names = [r.name for r in program.results if r.kind == "grad" and r.name in program.params]
    program.accumulated = frozenset(rng.sample(names, rng.randint(0, len(names))))
    return program, config


@pytest.mark.parametrize("seed", range(3))
def test_random_programs(seed: int) -> None:
    program, config = random_program(seed)
    values = interpreter.values_of(program, ranks_of(program))
    assert_keeps(program, values, pipeline.default_passes(config))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 200))
def test_many_random_programs(seed: int) -> None:
    test_random_programs(seed)
