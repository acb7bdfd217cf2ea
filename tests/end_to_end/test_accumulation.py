"""Gradient accumulation without reduction: `no_sync`, line by line as under FSDP2."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import fxshard
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
from tests.end_to_end.training_cases import (
    Net,
    assert_same,
    batch,
    biases_frozen,
    grads_of,
    loss_of,
    state_of,
)
from tests.fsdp2 import full
from tests.zoo import MODELS

# -- as under FSDP2 --------------------------------------------------------------------------------


WAYS: dict[str, tuple[Options, Options]] = {
    "full_shard": ({}, {}),
    "shard_grad_op": ({"strategy": "shard_grad_op"}, {"reshard_after_forward": False}),
    "no_shard": ({"strategy": "no_shard"}, {"mesh": (2, 1)}),
    "bf16": ({"mixed_precision": BF16}, {"mp_policy": BF16}),
    "bf16, reduced as torch does": ({"mixed_precision": OPEN}, {"mp_policy": OPEN}),
    "bf16 no_shard": (
        {"mixed_precision": BF16, "strategy": "no_shard"},
        {"mp_policy": BF16, "mesh": (2, 1)},
    ),
}


HYBRID: tuple[Options, Options] = (
    {"strategy": "hybrid_shard", "mesh": (2, 2)},
    {"mesh": (2, 2)},
)


def pair(build: Callable[[], nn.Module], mine: Options, other: Options) -> tuple[Any, Any]:
    """The same model under fxshard and under FSDP2."""
    mine, other = (
        options | ({"mesh": grid(*options["mesh"])} if "mesh" in options else {})
        for options in (mine, other)
    )
    model = fxshard.compile(seeded(build), units=["blocks.*"], **mine)
    reference = seeded(build)
    for block in reference.get_submodule("blocks").children():
        fully_shard(block, **other)
    return model, fully_shard(reference, **other)


def both(
    rank: int,
    world_size: int,
    build: Callable[[], nn.Module],
    options: tuple[Options, Options],
    flags: list[bool],
) -> tuple[dict[str, Any], dict[str, Any]]:
    mine, other = pair(build, *options)
    return dict(train(mine, rank, flags)), dict(train(other, rank, flags))


@pytest.mark.parametrize("flags", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(3)
def test_bitwise_with_fsdp2(ranks: Any, way: str, flags: list[bool]) -> None:
    for mine, other in ranks(2).run(both, Net, WAYS[way], flags):
        assert_same(mine, other)


@pytest.mark.parametrize("flags", [PATTERNS["mixed"], PATTERNS["all but the last"]])
@pytest.mark.sample(1)
def test_hybrid_bitwise_with_fsdp2(ranks: Any, flags: list[bool]) -> None:
    for mine, other in ranks(4).run(both, Net, HYBRID, flags):
        assert_same(mine, other)


@pytest.mark.parametrize("world_size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_other_world_sizes(ranks: Any, world_size: int) -> None:
    """On 3 ranks every parameter is padded."""
    for mine, other in ranks(world_size).run(both, Net, ({}, {}), PATTERNS["mixed"]):
        assert_same(mine, other, rtol=1e-6, atol=1e-6)


def zoo(rank: int, world_size: int, name: str) -> list[Any]:
    case = MODELS[name]
    mine = fxshard.compile(seeded(case.build), units=case.units)
    other = seeded(case.build)
    for unit in other.get_submodule(str((case.units or [""])[0]).removesuffix(".*")).children():
        fully_shard(unit)
    fully_shard(other)
    found = []
    for model in (mine, other):
        optimizer = AdamW(model.parameters(), lr=1e-2)
        values = []
        for step in range(2):
            for i in range(3):
                torch.manual_seed(10 * step + i)
                args, kwargs = case.batch(rank, 10 * step + i)
                with reduces(model, i == 2):
                    loss = case.loss(model(*args, **kwargs))
                    loss.backward()
                values.append((loss.detach(), grads_of(model)))
            optimizer.step()
            optimizer.zero_grad()
        found.append((values, state_of(model), {n: full(b) for n, b in model.named_buffers()}))
    return found


FAST = ("convnet", "mlp13")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_zoo_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    for mine, other in ranks(2).run(zoo, name):
        assert_same(mine, other)


class Chooses(Net):
    """The second block runs only if it is told so; `spare` never."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 5)

    def forward(self, x: Tensor, second: bool = True, *args: Any, **kwargs: Any) -> Any:
        x = self.blocks[0](self.inlet(x))
        return self.head(self.blocks[2](self.blocks[1](x) if second else x))


def first_block_frozen() -> nn.Module:
    model = Net()
    model.inlet.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("build", [biases_frozen, first_block_frozen, Chooses])
@pytest.mark.sample(2)
def test_frozen_and_unused_parameters(ranks: Any, build: Callable[[], nn.Module]) -> None:
    for mine, other in ranks(2).run(both, build, ({}, {}), PATTERNS["mixed"]):
        assert_same(mine, other)


def skips_a_block(rank: int, world_size: int, uses: list[bool]) -> list[dict[str, Any]]:
    found = []
    for model in pair(Chooses, {}, {}):
        seen: dict[str, Any] = {}
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            for i, second in enumerate(uses):
                with reduces(model, i == len(uses) - 1):
                    loss_of(model(batch(rank, 10 * step + i), second)).backward()
                seen[f"grads {step} {i}"] = grads_of(model)
            optimizer.step()
            optimizer.zero_grad()
        found.append(seen | {"parameters": state_of(model)})
    return found


@pytest.mark.parametrize(
    "uses", [[True, False], [False, True], [False, False], [True, False, True]]
)
@pytest.mark.sample(3)
def test_a_block_that_only_some_micro_batches_use(ranks: Any, uses: list[bool]) -> None:
    """What was accumulated is reduced by a backward that does not reach the block."""
    for mine, other in ranks(2).run(skips_a_block, uses):
        assert_same(mine, other)


def with_the_flag(rank: int, world_size: int) -> list[dict[str, Any]]:
    """`set_requires_gradient_sync` on both."""
    found = []
    for model in pair(Net, {}, {}):
        seen: dict[str, Any] = {}
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            loss_of(model(batch(rank, i))).backward()
            seen[f"grads {i}"] = grads_of(model)
        assert all(grad is None for grad in seen["grads 1"].values())
        found.append(seen)
    return found


def test_set_requires_gradient_sync(ranks: Any) -> None:
    for mine, other in ranks(2).run(with_the_flag):
        assert_same(mine, other)


def with_evaluation(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A forward without gradients before each micro-batch."""
    found = []
    for model in pair(Net, {}, {}):
        seen: dict[str, Any] = {}
        for i in range(3):
            with reduces(model, i == 2):
                with torch.no_grad():
                    seen[f"evaluation {i}"] = model(batch(rank, 9))
                loss_of(model(batch(rank, i))).backward()
        found.append(seen | grads_of(model))
    return found


def test_evaluation_between_micro_batches(ranks: Any) -> None:
    for mine, other in ranks(2).run(with_evaluation):
        assert_same(mine, other)
