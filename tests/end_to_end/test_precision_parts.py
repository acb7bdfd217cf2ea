"""Policies of parts of the model, FSDP1 itself, eval."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fxshard
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.errors import ConfigError, UnitError
from tests import fsdp2
from tests.end_to_end.precision_cases import (
    BF16,
    FP16,
    FP32,
    FULL,
    IN_FP32,
    LOW,
    NOT_CAST,
    OFFSETS,
    STEPS,
    Policy,
    Recipe,
    beside,
    compiled,
    reference,
)
from tests.fsdp2 import full, run_steps
from tests.zoo import MODELS, Case, models

# -- policies of parts of the model ----------------------------------------------------------------


def low_buffers() -> nn.Module:
    """The convnet with buffers in bf16, for FSDP2, which leaves them as they are."""
    model = MODELS["convnet"].build()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(BF16)
    return model


HALF = Policy(param_dtype=FP16, reduce_dtype=FP32, output_dtype=BF16)


FSDP1 = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)  # keeps batch norms in fp32


OUT = dataclasses.replace(LOW, output_dtype=FP32)


PARTS: dict[str, Recipe] = {
    "norms by class": Recipe(MODELS["tied"], LOW, {nn.LayerNorm: IN_FP32}),
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
@pytest.mark.sample(3)
def test_parts_are_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    ranks(2).run(beside, PARTS[name])


def test_keys_that_match_nothing_are_refused() -> None:
    model = models.Mlp13()
    for key in ("nothing.*", nn.Conv2d):
        with pytest.raises(UnitError, match="matches no module"):
            fxshard.plan(model, (torch.ones(2, 5),), world_size=2, mixed_precision={key: LOW})
    with pytest.raises(ConfigError, match=r"expected torch.* or MixedPrecision,"):
        Config(mixed_precision={"": "bf16"})


def test_fields_of_newer_policies_are_refused() -> None:
    """One that nobody has heard of too: what is asked for is not lost."""

    @dataclasses.dataclass(frozen=True)
    class Newer(MixedPrecisionPolicy):
        grad_dtype: Any = None
        unheard_of: bool = False

    Config(mixed_precision=Newer(BF16))
    for policy, said in (
        (Newer(BF16, grad_dtype=FP32), "grad_dtype is not supported. Leave it out: gradients"),
        (Newer(BF16, unheard_of=True), "unheard_of is not supported. Leave it out."),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            Config(mixed_precision=policy)


@pytest.mark.parametrize("wanted", [FP32, None])
def test_a_gradients_dtype_of_its_own_is_refused(wanted: torch.dtype | None) -> None:
    """As FSDP2 does, sharding would forget it, and a step would not be that of eager PyTorch."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    model[1].weight.grad_dtype = wanted
    said = re.escape(f"parameter '1.weight', torch.bfloat16, has grad_dtype={wanted}")
    for verb in (fxshard.compile, fxshard.shard):
        with pytest.raises(UnitError, match=said):
            verb(model, world_size=2)
    with pytest.raises(UnitError, match=said):
        fxshard.plan(model, (torch.ones(2, 3, dtype=BF16),), world_size=2)
    model[1].weight.requires_grad_(False)
    fxshard.compile(model, world_size=2, ignored=["0"])


def test_a_dtype_per_parameter_is_refused() -> None:
    """`param_dtype_override_fn` is a field since torch 2.15, and one that is there is not lost."""

    @dataclasses.dataclass(frozen=True)
    class Since2_15(MixedPrecisionPolicy):
        param_dtype_override_fn: Any = dataclasses.field(default=None, kw_only=True)

    assert Precision.of(Since2_15(BF16)) == Precision.of(Policy(BF16))
    with pytest.raises(ConfigError, match=r"param_dtype_override_fn is not .* FQN globs"):
        Config(mixed_precision=Since2_15(BF16, param_dtype_override_fn=lambda param: FP32))


# -- FSDP1 itself ----------------------------------------------------------------------------------


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
    """Losses, and full parameters and buffers at the end, of FSDP1 and of fxshard."""
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
@pytest.mark.sample(2)
def test_bitwise_with_fsdp1(ranks: Any, name: str) -> None:
    key, policy = ONE[name]
    for theirs, ours in ranks(2).run(steps_beside_fsdp1, MODELS[key], policy):
        for (a, a_dtypes), (b, b_dtypes) in zip(theirs[0], ours[0], strict=True):
            assert torch.equal(a, b) and a.dtype is b.dtype and a_dtypes == b_dtypes
        assert theirs[1].keys() == ours[1].keys()
        for fqn, a in theirs[1].items():
            assert a.dtype is ours[1][fqn].dtype and torch.equal(a, ours[1][fqn]), fqn


# -- eval ------------------------------------------------------------------------------------------


def eval_outputs(rank: int, world_size: int, name: str, full_precision: bool) -> list[Tensor]:
    """In eval mode, of: the plain model, FSDP2, fxshard; and the same after two steps of each."""
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
@pytest.mark.sample(2)
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
