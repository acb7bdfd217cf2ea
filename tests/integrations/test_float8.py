"""torchao's float8 training: its recipes, with and without the float8 all-gather, beside FSDP2."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.testing import assert_close

import fxshard
from benchmarks.float8 import Net
from fxshard.errors import UnitError
from fxshard.integrations.quantized import packed
from fxshard.verify.certificate import collectives

pytest.importorskip("torchao")
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

WIDTH = 16
RECIPES = ("tensorwise", "tensorwise, float8 all-gather", "rowwise", "rowwise_with_gw_hp")


def net(width: int = WIDTH) -> Net:
    """f32[n, width] -> f32[n, width], of one block."""
    return Net(width, 1, width)


def converted(recipe: str, model: nn.Module | None = None, emulate: bool = True) -> Any:
    torch.manual_seed(0)
    name, _, gathers = recipe.partition(", ")
    config = Float8LinearConfig.from_recipe_name(name)
    object.__setattr__(config, "emulate", emulate)
    object.__setattr__(config, "enable_fsdp_float8_all_gather", bool(gathers))
    return convert_to_float8_training(model or net(), config=config)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(2, 8, WIDTH, generator=generator).unbind()
    return x, y


def numbers(tensor: Tensor) -> Tensor:
    """All rows; of a weight that is cast for its all-gather, those that it is cast from."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return getattr(whole, "_tensor", whole).detach().clone()


def trained(
    model: Any, ranks: list[int], steps: int = 2, after: Callable[[nn.Module], None] | None = None
) -> list[Any]:
    """Loss, gradients and parameters of each step. The mean of the losses of `ranks`, each with
    the scales of its own batch, is what they give together. `after` is called after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        losses = []
        for rank in ranks:
            x, y = batch(rank, step)
            losses.append(nn.functional.mse_loss(model(x), y))
            (losses[-1] / len(ranks)).backward()
        grads = [numbers(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(model)
        loss = torch.stack(losses).mean().detach()
        found.append((loss, grads, [numbers(param) for param in model.parameters()]))
    return found


def sharded(model: Any, way: str) -> Any:
    if way == "compile":
        return fxshard.compile(model, units=["blocks.*"])
    fully_shard = fsdp.fully_shard if way == "fsdp2" else fxshard.fully_shard
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def everywhere(rank: int, world_size: int, recipe: str) -> Any:
    ways = ("fsdp2", "fully_shard", "compile")
    found = {way: trained(sharded(converted(recipe), way), [rank]) for way in ways}
    plain = recipe.partition(",")[0]  # nothing is gathered in one process
    return found | {"alone": trained(converted(plain), list(range(world_size)))}


@pytest.mark.parametrize(
    "recipe",
    [
        recipe if "," in recipe else pytest.param(recipe, marks=pytest.mark.slow)
        for recipe in RECIPES
    ],
)
def test_it_trains_as_fsdp2_and_as_one_process(ranks: Any, recipe: str) -> None:
    found = ranks(2).run(everywhere, recipe)
    for rank in found:
        for way in ("fully_shard", "compile"):
            assert_close(rank[way], rank["fsdp2"], rtol=0, atol=0)
    loss, grads, _ = found[0]["alone"][0]
    assert_close((found[0]["compile"][0][0] + found[1]["compile"][0][0]) / 2, loss)
    assert_close(found[0]["compile"][0][1], grads, rtol=1e-4, atol=1e-5)


def precomputed(rank: int, world_size: int) -> Any:
    """As torchao asks for it, after each step; and once, so that FSDP2's scales grow old."""
    found = [trained(sharded(converted(RECIPES[1]), "compile"), [rank], 3)]
    for way in ("fsdp2", "fully_shard", "compile"):
        model = sharded(converted(RECIPES[1]), way)
        found.append(trained(model, [rank], 3, precompute_float8_dynamic_scale_for_fsdp))
    old = sharded(converted(RECIPES[1]), "fully_shard")
    precompute_float8_dynamic_scale_for_fsdp(old)
    return [*found, trained(old, [rank], 3)]


def test_scales_that_are_computed_beforehand_change_nothing(ranks: Any) -> None:
    """FSDP2 takes them; programs compute the same ones, and never use old ones."""
    for without, *others in ranks(2).run(precomputed):
        for found in others:
            assert_close(found, without, rtol=0, atol=0)


def sent(recipe: str, **options: Any) -> list[int]:
    """Bytes of each all-gather of the first block's forward, as the plan says."""
    width = 64
    plan = fxshard.plan(
        converted(recipe, net(width).to(options.pop("dtype", torch.float32)), emulate=False),
        (torch.randn(16, width),),
        world_size=8,
        units=["blocks.*"],
        device="cuda",
        **options,
    )
    lines = [line for line in collectives(plan.program) if "unit=1" in line]
    found = [
        line.split("bytes=")[1].split()[0] for line in lines if "forward fxshard.all_g" in line
    ]
    return [int(each.rstrip(",")) for each in found]


def test_a_plan_for_cuda_has_the_bytes_of_the_float8_all_gather() -> None:
    weights, others = 2 * 2 * 64 * 64 // 8, 4 * (64 + 64 + 64) // 8  # of a rank; others stay fp32
    assert sum(sent("tensorwise")) == 4 * weights + others
    assert sorted(sent("tensorwise, float8 all-gather")) == [others, weights]


@pytest.mark.slow
def test_rowwise_recipes_are_planned_for_cuda() -> None:
    for recipe in RECIPES[2:]:
        assert sum(sent(recipe)) > 0


def test_packing_frozen_weights_leaves_those_that_are_trained_alone() -> None:
    model = converted(RECIPES[1])
    names = [name for name, _ in packed(model).named_parameters()]
    assert names == [name for name, _ in net().named_parameters()]


def test_rows_that_do_not_divide_are_refused_by_name() -> None:
    model = converted(RECIPES[1], net(24))
    try:
        fxshard.plan(model, (torch.randn(4, 24),), world_size=16, units=["blocks.*"])
    except UnitError as error:
        assert "WeightWithDynamicFloat8CastTensor" in str(error) and "rows" in str(error)
        assert "blocks.0.down.weight" in str(error)
    else:
        raise AssertionError("not refused")
