"""What each option of precision does: beside FSDP2 on gloo ranks, beside eager, counted by hand."""

import dataclasses
import math
from collections.abc import Callable
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
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard._torch import modules, trees
from fxshard.config import Config, Precision
from fxshard.errors import ConfigError, UnitError
from fxshard.ir import ops
from fxshard.memory.category import Category
from tests import fsdp2
from tests.end_to_end.test_checkpointing import CASES as CHECKPOINTED
from tests.fsdp2 import Result, adamw, full, run_steps
from tests.oracles import Collectives, count_collectives
from tests.zoo import MODELS, Case, cross_entropy, models

STEPS = 5
APART: dict[str, Any] = {"pack_bytes": 0}  # each parameter has a buffer of its own
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


def for_each(items: dict[str, Any], check: Callable[[Any], object]) -> None:
    """Check each item; an error says which it is of."""
    for name, item in items.items():
        try:
            check(item)
        except Exception as error:
            error.add_note(f"in {name!r}")
            raise


# -- a policy for the whole model -----------------------------------------------------------------


FEW = ("bf16", "fp16 all through")
WHOLE = {
    f"{policy}, {case}": Recipe(MODELS[case], POLICIES[policy])
    for policy in POLICIES
    for case in ("transformer", "mlp13", "llama", "tied", "dropout")
    if case in ("transformer", "mlp13") or policy in FEW
}


SLOW = pytest.mark.slow
MANY = [f"{policy}, transformer" for policy in POLICIES if policy not in FEW]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] if name in MANY else []) for name in WHOLE]
)
def test_bitwise_with_fsdp2_on_2_ranks(ranks: Any, name: str) -> None:
    ranks(2).run(beside, WHOLE[name])


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


class Mixed(nn.Module):
    """f32[4, 3] -> f32[]. Reads one parameter twice beside fp32, and one that it casts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.gain + self.offset.float()).exp() * self.gain).sum()


@pytest.mark.parametrize("wide", [True, False])
def test_gradients_are_reduced_as_wide_as_operators_make_them(
    monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    """As of torch 2.15, with any torch; eager's own ``grad_dtype`` is the reference."""
    monkeypatch.setattr(modules, "REDUCES_AS_STORED", wide)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    eager, ours = Mixed().bfloat16(), Mixed()
    for param in eager.parameters() if wide else ():
        param.grad_dtype = None
    policy = dataclasses.replace(LOW, cast_forward_inputs=False)
    compiled = fxshard.compile(ours, world_size=1, mixed_precision=policy)
    for model in (eager, compiled):
        model(x).backward()
    for name, param in compiled.named_parameters():
        expected = eager.get_parameter(name).grad
        assert expected.dtype is (FP32 if wide and name == "gain" else BF16)
        assert param.grad.dtype is FP32 and torch.equal(param.grad, expected.float()), name
    graph = fxshard.plan(Mixed(), (x,), world_size=2, mixed_precision=policy).program.graph
    casts = graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert all(node.users for node in casts)


def frozen(build: Callable[[], nn.Module]) -> nn.Module:
    """Every other parameter, and so whole units' worth of biases, needs no gradient."""
    model = build()
    for param in list(model.parameters())[::2]:
        param.requires_grad_(False)
    return model


NOT_CAST = dataclasses.replace(LOW, cast_forward_inputs=False)
MODES: dict[str, Recipe] = {
    "inputs as they are": Recipe(OFFSETS, NOT_CAST),
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
    ranks(2).run(beside, MODES[name])


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        ("bf16", "hybrid_shard"),
        ("fp16 all through", "hybrid_shard_zero2"),
        pytest.param("bf16", "hybrid_shard_zero2", marks=SLOW),
        pytest.param("fp16 all through", "hybrid_shard", marks=SLOW),
    ],
)
def test_hybrid_is_bitwise_with_fsdp2_on_4_ranks(ranks: Any, policy: str, strategy: str) -> None:
    recipe = Recipe(MODELS["transformer"], POLICIES[policy], strategy=strategy, mesh=(2, 2))
    ranks(4).run(beside, recipe)


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
    ranks(2).run(beside, PARTS[name])


def test_keys_that_match_nothing_are_refused() -> None:
    model = models.Mlp13()
    for key in ("nothing.*", nn.Conv2d):
        with pytest.raises(UnitError, match="matches no module"):
            fxshard.plan(model, (torch.ones(2, 5),), world_size=2, mixed_precision={key: LOW})
    with pytest.raises(ConfigError, match=r"expected torch.* or MixedPrecision,"):
        Config(mixed_precision={"": "bf16"})


def test_a_dtype_per_parameter_is_refused() -> None:
    """`param_dtype_override_fn` is a field since torch 2.15, and one that is there is not lost."""

    @dataclasses.dataclass(frozen=True)
    class Since2_15(MixedPrecisionPolicy):
        param_dtype_override_fn: Any = dataclasses.field(default=None, kw_only=True)

    assert Precision.of(Since2_15(BF16)) == Precision.of(Policy(BF16))
    with pytest.raises(ConfigError, match=r"param_dtype_override_fn is not .* FQN globs"):
        Config(mixed_precision=Since2_15(BF16, param_dtype_override_fn=lambda param: FP32))


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
    """Losses, and whole parameters and buffers at the end, of FSDP1 and of fxshard."""
    results: list[Any] = []
    theirs = fsdp1(case, policy)
    torch.manual_seed(0)
    ours = fxshard.compile(case.build(), units=case.units, mixed_precision=policy)
    for model in (theirs, ours):
        losses = []
        for step in range(STEPS):
            args, kwargs = case.batch(rank, step)
            loss = case.loss(model(*args, **kwargs))
            loss.backward()
            grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
            losses.append((loss.detach(), grads))
            for param in model.parameters():  # optimizers want gradients in the parameter's dtype
                if param.grad is not None:
                    param.data.sub_(param.grad.data.float(), alpha=0.1)
                    param.grad = None
        summon = model.summon_full_params
        with summon(model) if model is theirs else summon():
            tensors = [*model.named_parameters(), *model.named_buffers()]
            held = {n.replace("_fsdp_wrapped_module.", ""): t.detach().clone() for n, t in tensors}
        results.append((losses, held))
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
        assert theirs[1].keys() == ours[1].keys()
        for fqn, a in theirs[1].items():
            assert a.dtype is ours[1][fqn].dtype and torch.equal(a, ours[1][fqn]), fqn


# -- eval -----------------------------------------------------------------------------------------


def eval_outputs(rank: int, world_size: int, name: str, full_precision: bool) -> list[Tensor]:
    """In eval mode, of: the plain model, FSDP2, fxshard; and the same behind two steps of each."""
    recipe = Recipe(MODELS[name], LOW)
    plain = recipe.case.build
    torch.manual_seed(0)
    eager = plain()
    args, kwargs = recipe.case.batch(rank, 0)
    found = []
    sharded = [reference(recipe), compiled(recipe, full_precision_in_eval=full_precision)]
    for _ in range(2):
        states = [{n: full(t) for n, t in m.state_dict().items()} for m in sharded]
        assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
        eager.load_state_dict(states[0])
        with torch.no_grad():
            found += [model.eval()(*args, **kwargs) for model in (eager, *sharded)]
        for model in sharded:
            run_steps(model.train(), recipe.case, 2)
    return found


@pytest.mark.parametrize("full_precision", [True, False])
@pytest.mark.parametrize("name", ["dropout", "mlp13"])
def test_eval(ranks: Any, name: str, full_precision: bool) -> None:
    for outputs in ranks(2).run(eval_outputs, name, full_precision):
        for eager, theirs, ours in (outputs[:3], outputs[3:]):
            expected = eager if full_precision else theirs
            assert ours.dtype is expected.dtype is (FP32 if full_precision else BF16)
            assert torch.equal(ours, expected)


def test_eval_in_one_process() -> None:
    case = MODELS["convnet"]
    args, _ = case.batch(0, 0)
    low = compiled(Recipe(case, LOW, {nn.BatchNorm2d: IN_FP32}), world_size=3).eval()
    high = compiled(
        Recipe(case, LOW, {nn.BatchNorm2d: IN_FP32}), world_size=3, full_precision_in_eval=True
    ).eval()
    torch.manual_seed(0)
    eager = case.build().eval()
    assert torch.equal(high(*args), eager(*args))
    high(*args).square().sum().backward()
    eager(*args).square().sum().backward()
    for name, param in eager.named_parameters():
        assert torch.equal(param.grad, high.get_parameter(name).grad), name
    expected = eager.bfloat16()
    for module in expected.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float().register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda _, args, output: output.bfloat16())
    assert torch.equal(low(*args), expected(args[0].bfloat16()))


# -- casts and bytes ------------------------------------------------------------------------------


def test_a_cast_stands_in_front_of_each_gather() -> None:
    for name in ("transformer", "llama", "mlp13"):
        case = MODELS[name]
        args, kwargs = case.batch(0, 0)
        options = {"world_size": 4, "units": case.units, "mixed_precision": LOW, **APART}
        program = fxshard.plan(case.build(), args, kwargs, **options).program
        words = [n for n in program.graph.nodes if n.target in ops.WORDS]
        gathers = [n for n in words if n.target is ops.all_gather]
        casts = [n for n in words if n.target is ops.cast]
        assert len(casts) == len(gathers) >= 7
        for cast, gather in zip(casts, gathers, strict=True):
            assert words.index(gather) == words.index(cast) + 1
            picks = gather.args[0]
            assert [pick.args[0] for pick in picks] == [cast] * len(picks)
            assert len(cast.args[0]) == len(picks)
            assert {n.op for n in cast.args[0]} == {"placeholder"}
            assert {pick.meta["val"].dtype for pick in (*picks, *gather.users)} == {BF16}


def test_packing_casts_what_it_packs() -> None:
    case = MODELS["mlp13"]
    args, kwargs = case.batch(0, 0)
    options = {"world_size": 4, "units": case.units, "mixed_precision": LOW}
    program = fxshard.plan(case.build(), args, kwargs, **options).program
    gathers = list(program.graph.find_nodes(op="call_function", target=ops.all_gather))
    makers = [pick.args[0] for gather in gathers for pick in gather.args[0]]
    # One buffer each; backward reads one parameter of the root, and there is nothing to pack.
    assert len(makers) == len(gathers)
    assert [maker.target for maker in makers].count(ops.cast) == 1
    for maker in makers:
        assert maker.target in (ops.cast, ops.pack) and len(maker.users) == 1
        assert (len(maker.args[0]) > 1) == (maker.target is ops.pack)
        assert {(n.op, n.meta["val"].dtype) for n in maker.args[0]} == {("placeholder", FP32)}
        assert {pick.meta["val"].dtype for pick in maker.users} == {BF16}


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
    ("name", "options"), [("transformer", APART), ("mlp13", APART), ("mlp13", {})]
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


# -- how gradients become one ---------------------------------------------------------------------


def divided(rank: int, world_size: int, mesh: tuple[int, int] | None) -> None:
    """Ours and FSDP2's."""
    strategy = "hybrid_shard" if mesh else "full_shard"

    def check(item: tuple[MixedPrecisionPolicy, float]) -> None:
        policy, factor = item
        recipe = Recipe(MODELS["mlp13"], policy, strategy=strategy, mesh=mesh)
        theirs = reference(recipe)
        for module in theirs.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)
        ours = compiled(recipe, gradient_divide_factor=factor)
        results = [run_steps(model, recipe.case, 2) for model in (theirs, ours)]
        fsdp2.assert_bitwise(results[1], results[0])

    policies = {name: POLICIES[name] for name in ("nothing", "bf16", "fp16 all through")}
    items = {f"{n} by {f}": (p, f) for n, p in policies.items() for f in (1.0, 12.0)}
    for_each(items, check)


@pytest.mark.parametrize(("count", "mesh"), [(2, None), (4, (2, 2))])
def test_divide_factor_is_fsdp2s(ranks: Any, count: int, mesh: tuple[int, int] | None) -> None:
    ranks(count).run(divided, mesh)


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
    "divided by 5 before and by 7 behind": Reduction(
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


# -- scalers and autocast -------------------------------------------------------------------------


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


def autocast_beside(rank: int, world_size: int) -> None:
    def check(item: tuple[Recipe, bool]) -> None:
        recipe, around = item
        pair = [reference(recipe), compiled(recipe)]
        wrapped = [Around(model, BF16) if around else model for model in pair]
        results = [run_steps(model, recipe.case, 3) for model in wrapped]
        fsdp2.assert_bitwise(results[1], results[0])

    inside = dataclasses.replace(MODELS["transformer"], build=Inside)
    policies = {name: POLICIES[name] for name in ("nothing", "bf16", "bf16 reduced")}
    items: dict[str, Any] = {
        f"around, {name}": (Recipe(MODELS["transformer"], policy), True)
        for name, policy in policies.items()
    }
    items["around, fp16"] = (Recipe(MODELS["mlp13"], POLICIES["fp16"]), True)
    items["around, parts"] = (Recipe(MODELS["transformer"], LOW, {nn.LayerNorm: IN_FP32}), True)
    items["inside, nothing"] = (Recipe(inside, POLICIES["nothing"]), False)
    items["inside, bf16"] = (Recipe(inside, LOW), False)
    for_each(items, check)


def test_autocast_is_bitwise_with_fsdp2(ranks: Any) -> None:
    ranks(2).run(autocast_beside)


# -- memory ---------------------------------------------------------------------------------------

MEASURED: dict[str, Any] = {
    **POLICIES,
    "part in fp32": {"": LOW, "**.0": IN_FP32},
    "gradients stay": MixedPrecision(
        param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True
    ),
}


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=SLOW) for n in (3, 8))])
@pytest.mark.parametrize("name", [pytest.param("transformer", marks=SLOW), "mlp13"])
def test_static_equals_measured(name: str, world_size: int) -> None:
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    for key, policy in MEASURED.items():
        torch.manual_seed(0)
        validation = fxshard.validate(
            case.build(),
            args,
            kwargs,
            world_size=world_size,
            units=case.units,
            mixed_precision=policy,
            optimizer=None if key == "gradients stay" else adamw,
        )
        assert validation.max_abs_difference == 0, (key, validation.table(only_different=True))


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
