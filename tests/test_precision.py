"""What each option of precision does: beside FSDP2 on gloo ranks, beside eager, counted by hand."""

import dataclasses
import math
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard import compat, ops
from fxshard.config import Config
from fxshard.errors import ConfigError, UnitError
from fxshard.memory.category import Category
from tests import fsdp2
from tests.fsdp2 import Result, adamw, full, run_steps
from tests.oracles import Collectives, count_collectives
from tests.test_checkpointing import CASES as CHECKPOINTED
from tests.zoo import MODELS, Case, models

STEPS = 5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Policy = MixedPrecisionPolicy
FULL = Policy(param_dtype=FP32, reduce_dtype=FP32)
NORM = {BF16: dataclasses.replace(FULL, output_dtype=BF16)}  # a norm in fp32 among bf16 modules

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "bf16": Policy(param_dtype=BF16, reduce_dtype=FP32),
    "fp16": Policy(param_dtype=FP16, reduce_dtype=FP32),
    "bf16 all through": Policy(param_dtype=BF16),
    "fp16 all through": Policy(param_dtype=FP16),
    "bf16 reduced": Policy(reduce_dtype=BF16),
    "fp16 reduced": Policy(reduce_dtype=FP16),
    "bf16 reduced in fp16": Policy(param_dtype=BF16, reduce_dtype=FP16),
    "fp32 out": Policy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
    "bf16 out": Policy(output_dtype=BF16),
    "nothing": Policy(),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training under FSDP2 and under fxshard.

    Attributes:
        case: the model.
        policy: FSDP2's, of the root and of the case's units.
        special: FSDP2's policies of other modules, by class or by FQN.
        ours: `mixed_precision`; None: `policy` if nothing is special.
        strategy: and `mesh` is the grid of replicas and shards that FSDP2 gets, if any.
    """

    case: Case
    policy: MixedPrecisionPolicy
    special: dict[Any, MixedPrecisionPolicy] = dataclasses.field(default_factory=dict)
    ours: Any = None
    strategy: str = "full_shard"
    mesh: tuple[int, int] | None = None
    loss: Callable[[Any], Tensor] | None = None


def grid(shape: tuple[int, int] | None) -> DeviceMesh | None:
    return shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def reference(recipe: Recipe) -> nn.Module:
    """FSDP2 on the recipe's model: children first, each by its own policy."""
    torch.manual_seed(0)
    model = recipe.case.build()
    units = set(map(id, fsdp2.units_of(model, recipe.case)))
    keep = recipe.strategy in ("shard_grad_op", "hybrid_shard_zero2", "no_shard")
    options: dict[str, Any] = {"mesh": grid(recipe.mesh), "reshard_after_forward": not keep}
    for name, module in reversed(list(model.named_modules())):
        own = [
            policy
            for key, policy in recipe.special.items()
            if (isinstance(module, key) if isinstance(key, type) else name == key)
        ]
        if own or id(module) in units or not name:
            fully_shard(module, mp_policy=(own or [recipe.policy])[0], **options)
    return model


def compiled(recipe: Recipe, **options: Any) -> fxshard.ShardedModule:
    torch.manual_seed(0)
    hybrid = recipe.strategy.startswith("hybrid")
    ours = recipe.policy if recipe.ours is None else recipe.ours
    if dist.is_initialized() and hybrid:
        options["mesh"] = grid(recipe.mesh)
    return fxshard.compile(
        recipe.case.build(),
        units=recipe.case.units,
        strategy=recipe.strategy,
        mixed_precision=ours,
        **options,
    )


def dtypes(model: nn.Module, recipe: Recipe) -> list[Any]:
    """Of what one more step shows: outputs, gradients, parameters, buffers."""
    args, kwargs = recipe.case.batch(0, 9)
    output = model(*args, **kwargs)
    recipe.case.loss(output).backward()
    leaves, _ = compat.tree_flatten(output)
    return [
        [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)],
        {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None},
        {name: p.dtype for name, p in model.named_parameters()},
        {name: b.dtype for name, b in model.named_buffers()},
    ]


def beside(rank: int, world_size: int, recipes: dict[str, Recipe]) -> dict[str, str]:
    """What differs from FSDP2, by the name of the recipe; nothing does."""
    return failures(recipes, compare_training)


def compare_training(recipe: Recipe) -> None:
    theirs, ours = reference(recipe), compiled(recipe)
    results = [run_steps(model, recipe.case, STEPS) for model in (theirs, ours)]
    fsdp2.assert_bitwise(results[1], results[0])
    assert all(map(math.isfinite, results[0].losses)), results[0].losses
    assert dtypes(ours, recipe) == dtypes(theirs, recipe)


def failures(items: dict[str, Any], check: Callable[[Any], object]) -> dict[str, str]:
    """The traceback of each item whose check fails, alike on all ranks."""
    found = {}
    for name, item in items.items():
        try:
            check(item)
        except Exception:
            found[name] = traceback.format_exc()
    return found


def assert_none(each: list[dict[str, str]]) -> None:
    assert not any(each), "\n".join(f"== {name}\n{text}" for name, text in each[0].items())


# -- a policy for the whole model -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["transformer", "llama", "mlp13", "tied", "dropout"])
def test_bitwise_with_fsdp2_on_2_ranks(ranks: Any, name: str) -> None:
    recipes = {key: Recipe(MODELS[name], policy) for key, policy in POLICIES.items()}
    assert_none(ranks(2).run(beside, recipes))
