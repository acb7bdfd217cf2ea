"""What several of the tests beside it need (test_precision)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxshard
from fxshard._torch import trees
from tests import fsdp2
from tests.fsdp2 import run_steps
from tests.zoo import MODELS, Case, cross_entropy

STEPS = 5


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


Policy = MixedPrecisionPolicy


FULL = Policy(param_dtype=FP32, reduce_dtype=FP32)


POLICIES: dict[str, MixedPrecisionPolicy] = {
    "bf16": Policy(param_dtype=BF16, reduce_dtype=FP32),
    "fp16": Policy(param_dtype=FP16, reduce_dtype=FP32),
    "bf16 all through": Policy(param_dtype=BF16, reduce_dtype=BF16),
    "fp16 all through": Policy(param_dtype=FP16, reduce_dtype=FP16),
    "bf16, reduced as torch does": Policy(param_dtype=BF16),  # in bf16; since 2.15 in fp32
    "bf16 reduced": Policy(reduce_dtype=BF16),
    "fp16 reduced": Policy(reduce_dtype=FP16),
    "bf16 reduced in fp16": Policy(param_dtype=BF16, reduce_dtype=FP16),
    "nothing": Policy(),
}


LOW = POLICIES["bf16"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training under FSDP2 and under fxshard.

    Attributes:
        case: the model.
        policy: FSDP2's, of the root and of the case's units.
        special: FSDP2's policies of other modules, by class or FQN glob; the first that matches.
        ours: `mixed_precision`; None: what FSDP2 gets.
        strategy: ours; FSDP2 keeps units unsharded if it does.
        mesh: replicas and shards, if FSDP2 gets a mesh.
        build: our model, if it is not the case's.
    """

    case: Case
    policy: MixedPrecisionPolicy
    special: dict[Any, MixedPrecisionPolicy] = dataclasses.field(default_factory=dict)
    ours: Any = None
    strategy: str = "full_shard"
    mesh: tuple[int, int] | None = None
    build: Callable[[], nn.Module] | None = None


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
            if (isinstance(module, key) if isinstance(key, type) else fsdp2._matches(name, key))
        ]
        if own or id(module) in units or not name:
            fully_shard(module, mp_policy=(own or [recipe.policy])[0], **options)
    return model


def compiled(recipe: Recipe, **options: Any) -> fxshard.FxshardModule:
    torch.manual_seed(0)
    hybrid = recipe.strategy.startswith("hybrid")
    ours = recipe.ours or {"": recipe.policy} | recipe.special
    if dist.is_initialized() and hybrid:
        options["mesh"] = grid(recipe.mesh)
    return fxshard.compile(
        (recipe.build or recipe.case.build)(),
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
    leaves, _ = trees.tree_flatten(output)
    return [
        [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)],
        {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None},
        {name: p.dtype for name, p in model.named_parameters()},
        {name: b.dtype for name, b in model.named_buffers()},
    ]


def beside(rank: int, world_size: int, recipe: Recipe) -> None:
    """Train under both, and see that nothing differs."""
    theirs, ours = reference(recipe), compiled(recipe)
    results = [run_steps(model, recipe.case, STEPS) for model in (theirs, ours)]
    fsdp2.assert_bitwise(results[1], results[0])
    assert all(map(math.isfinite, results[0].losses)), results[0].losses
    assert dtypes(ours, recipe) == dtypes(theirs, recipe)


FEW = ("bf16", "fp16 all through")


WHOLE = {
    f"{policy}, {case}": Recipe(MODELS[case], POLICIES[policy])
    for policy in POLICIES
    for case in ("transformer", "mlp13", "llama", "tied", "dropout")
    if case in ("transformer", "mlp13") or policy in FEW
}


SLOW = pytest.mark.slow


MANY = [f"{policy}, transformer" for policy in POLICIES if policy not in FEW]


class Offset(nn.Module):
    """Needs its input in fp32: bf16 cannot tell its numbers apart. f32[4, 3] -> f32[4, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is FP32
        return self.linear((x - 1000).to(self.linear.weight.dtype)).float() + 1000


class Offsets(nn.Module):
    """f32[4, 3] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Offset() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is FP32
        for block in self.blocks:
            x = block(x)
        return (x - 1000) * self.gain


def thousands(rank: int, step: int) -> Any:
    return (1000 + torch.randn(4, 3, generator=torch.Generator().manual_seed(step * 9 + rank)),), {}


OFFSETS = Case("offsets", Offsets, thousands, cross_entropy, ["blocks.*"])


NOT_CAST = dataclasses.replace(LOW, cast_forward_inputs=False)


IN_FP32 = dataclasses.replace(FULL, output_dtype=BF16)  # among modules in bf16
