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
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD
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
from tests.zoo import MODELS, Case, cross_entropy, models

STEPS = 5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Policy = MixedPrecisionPolicy
FULL = Policy(param_dtype=FP32, reduce_dtype=FP32)

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "bf16": Policy(param_dtype=BF16, reduce_dtype=FP32),
    "fp16": Policy(param_dtype=FP16, reduce_dtype=FP32),
    "bf16 all through": Policy(param_dtype=BF16),
    "fp16 all through": Policy(param_dtype=FP16),
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


def compiled(recipe: Recipe, **options: Any) -> fxshard.ShardedModule:
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


WHOLE = {
    f"{policy}, {case}": Recipe(MODELS[case], POLICIES[policy])
    for policy in POLICIES
    for case in ("transformer", "mlp13", "llama", "tied", "dropout")
    if case in ("transformer", "mlp13") or policy in ("bf16", "fp16 all through")
}


@pytest.mark.parametrize("name", WHOLE)
def test_bitwise_with_fsdp2_on_2_ranks(ranks: Any, name: str) -> None:
    assert_none(ranks(2).run(beside, {name: WHOLE[name]}))


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


def frozen(build: Callable[[], nn.Module]) -> nn.Module:
    """Every other parameter, and so whole units' worth of biases, needs no gradient."""
    model = build()
    for param in list(model.parameters())[::2]:
        param.requires_grad_(False)
    return model


NOT_CAST = dataclasses.replace(LOW, cast_forward_inputs=False)
MODES: dict[str, Recipe] = {
    "inputs as they are": Recipe(
        OFFSETS, NOT_CAST
    ),
    "root's inputs only": Recipe(MODELS["mlp13"], NOT_CAST, {"": LOW}),
    "checkpoint": Recipe(CHECKPOINTED["checkpoint"], LOW),
    "reentrant": Recipe(CHECKPOINTED["reentrant"], POLICIES["fp16"]),
    "frozen": Recipe(
        dataclasses.replace(
            MODELS["transformer"], build=partial(frozen, MODELS["transformer"].build)
        ),
        LOW,
    ),
    "shard_grad_op": Recipe(MODELS["transformer"], LOW, strategy="shard_grad_op"),
    "shard_grad_op, fp16 all through": Recipe(
        MODELS["mlp13"], POLICIES["fp16 all through"], strategy="shard_grad_op"
    ),
    "no_shard": Recipe(MODELS["transformer"], LOW, strategy="no_shard", mesh=(2, 1)),
    "no_shard, all through": Recipe(
        MODELS["mlp13"], POLICIES["bf16 all through"], strategy="no_shard", mesh=(2, 1)
    ),
    "no_shard, fp16 all through": Recipe(
        MODELS["mlp13"], POLICIES["fp16 all through"], strategy="no_shard", mesh=(2, 1)
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_are_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    assert_none(ranks(2).run(beside, {name: MODES[name]}))


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_hybrid_is_bitwise_with_fsdp2_on_4_ranks(ranks: Any, strategy: str) -> None:
    policies = {key: POLICIES[key] for key in ("bf16", "fp16 all through")}
    recipes = {
        key: Recipe(MODELS["transformer"], policy, strategy=strategy, mesh=(2, 2))
        for key, policy in policies.items()
    }
    assert_none(ranks(4).run(beside, recipes))


# -- policies of parts of the model ---------------------------------------------------------------


def low_buffers() -> nn.Module:
    """The convnet with buffers in bf16, for FSDP2, which leaves them as they are."""
    model = MODELS["convnet"].build()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(BF16)
    return model


HALF = Policy(param_dtype=FP16, reduce_dtype=FP32, output_dtype=BF16)
IN_FP32 = dataclasses.replace(FULL, output_dtype=BF16)  # among modules in bf16
FSDP1 = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)  # keeps batch norms in fp32
OUT = dataclasses.replace(LOW, output_dtype=FP32)
PARTS: dict[str, Recipe] = {
    "norms by class": Recipe(MODELS["transformer"], LOW, {nn.LayerNorm: IN_FP32}),
    "norms by glob": Recipe(MODELS["llama"], LOW, {"model.layers.*.*norm": IN_FP32}),
    "one layer in fp32": Recipe(MODELS["transformer"], LOW, {"layers.1": IN_FP32}),
    "one layer in fp16": Recipe(MODELS["mlp13"], LOW, {"blocks.1": HALF}),
    "one layer, the rest in fp32": Recipe(
        MODELS["mlp13"],
        Policy(),
        {"blocks.1": OUT},
        ours={"blocks.1": OUT},
    ),
    "a submodule that was no unit": Recipe(MODELS["transformer"], LOW, {"lm_head": LOW}),
    "output": Recipe(MODELS["transformer"], OUT, {"layers.*": LOW}),
    "output of llama": Recipe(MODELS["llama"], OUT, {"model.layers.*": LOW}),
    "output lower than the model": Recipe(
        MODELS["mlp13"], Policy(output_dtype=BF16), {"blocks.*": Policy()}
    ),
    "outputs of all": Recipe(MODELS["mlp13"], OUT, {"head": LOW}),
    "batch norm in fp32": Recipe(MODELS["convnet"], LOW, {nn.BatchNorm2d: IN_FP32}),
    "FSDP1": Recipe(MODELS["convnet"], NOT_CAST, {nn.BatchNorm2d: IN_FP32, "": LOW}, ours=FSDP1),
    "FSDP1 on some units": Recipe(
        MODELS["convnet"],
        Policy(),
        {nn.BatchNorm2d: IN_FP32, "blocks.*": LOW, "head": FULL},
        ours={"blocks.*": dataclasses.replace(FSDP1, cast_forward_inputs=True), "head": FULL},
    ),
    "FSDP1 casts": Recipe(
        MODELS["mlp13"], LOW, ours=dataclasses.replace(FSDP1, cast_forward_inputs=True)
    ),
    "FSDP1 casts no root input": Recipe(
        OFFSETS,
        NOT_CAST,
        ours=dataclasses.replace(FSDP1, cast_root_forward_inputs=False),
    ),
    "FSDP1 ignores layer norms": Recipe(
        MODELS["transformer"],
        NOT_CAST,
        {nn.LayerNorm: IN_FP32},
        ours=dataclasses.replace(FSDP1, _module_classes_to_ignore=(nn.LayerNorm,)),
    ),
    "FSDP1 ignores nothing, buffers in bf16": Recipe(
        dataclasses.replace(MODELS["convnet"], build=low_buffers),
        NOT_CAST,
        {"": LOW},
        ours=dataclasses.replace(FSDP1, _module_classes_to_ignore=(), buffer_dtype=BF16),
        build=MODELS["convnet"].build,
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    assert_none(ranks(2).run(beside, {name: PARTS[name]}))


def test_keys_that_match_nothing_are_refused() -> None:
    model = models.Mlp13()
    for key in ("nothing.*", nn.Conv2d):
        with pytest.raises(UnitError, match="matches no module"):
            fxshard.plan(model, (torch.ones(2, 5),), world_size=2, mixed_precision={key: LOW})
    with pytest.raises(ConfigError, match="expected torch.distributed.fsdp.MixedPrecisionPolicy"):
        Config(mixed_precision={"": "bf16"})


# -- FSDP1 itself ---------------------------------------------------------------------------------


def fsdp1(case: Case, policy: MixedPrecision) -> nn.Module:
    torch.manual_seed(0)
    model = case.build()
    blocks = {type(module) for module in fsdp2.units_of(model, case)}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(blocks),
        mixed_precision=policy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def steps_beside_fsdp1(rank: int, world_size: int, case: Case, policy: MixedPrecision) -> Any:
    """Losses, and whole parameters at the end, of FSDP1 and of fxshard."""
    results: list[Any] = []
    theirs = fsdp1(case, policy)
    torch.manual_seed(0)
    ours = fxshard.compile(case.build(), units=case.units, mixed_precision=policy)
    for model in (theirs, ours):
        optimizer = SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            args, kwargs = case.batch(rank, step)
            loss = case.loss(model(*args, **kwargs))
            loss.backward()
            grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
            losses.append((loss.detach(), grads))
            if policy.keep_low_precision_grads:
                for param in model.parameters():
                    if param.grad is not None:
                        param.data.sub_(param.grad.data.float(), alpha=0.1)
            else:
                optimizer.step()
            optimizer.zero_grad()
        summon = model.summon_full_params
        with summon(model) if model is theirs else summon():
            clean = {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in model.named_parameters()
            }
        buffers = {
            name.replace("_fsdp_wrapped_module.", ""): b.clone() for name, b in model.named_buffers()
        }
        results.append((losses, clean, buffers))
    return results


ONE: dict[str, tuple[str, MixedPrecision]] = {
    "batch norms stay": ("convnet", FSDP1),
    "buffers in bf16": (
        "convnet",
        MixedPrecision(
            param_dtype=BF16,
            reduce_dtype=FP32,
            buffer_dtype=BF16,
            cast_forward_inputs=True,
            _module_classes_to_ignore=(),
        ),
    ),
    "bf16 all through": ("mlp13", MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)),
    "inputs as they are": ("transformer", FSDP1),
    "gradients stay": (
        "mlp13",
        MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True),
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_bitwise_with_fsdp1(ranks: Any, name: str) -> None:
    key, policy = ONE[name]
    for theirs, ours in ranks(2).run(steps_beside_fsdp1, MODELS[key], policy):
        for (a, a_dtypes), (b, b_dtypes) in zip(theirs[0], ours[0], strict=True):
            assert torch.equal(a, b) and a.dtype is b.dtype and a_dtypes == b_dtypes
        for a, b in zip(theirs[1:], ours[1:], strict=True):
            assert a.keys() == b.keys()
            for fqn in a:
                assert a[fqn].dtype is b[fqn].dtype and torch.equal(a[fqn], b[fqn]), fqn
