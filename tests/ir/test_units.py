"""Which modules become units: by structure, class, FQN, callable or torch's own wrap policies."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from fxshard.errors import FxshardError, UnitError
from fxshard.ir.splitting import find_units
from tests.zoo import models
from tests.zoo.models import Block, Mlp, Transformer


def names(model: nn.Module, spec: Any = None) -> list[str]:
    """FQNs of the units besides the root."""
    root, *units = find_units(model, spec)
    assert root.fqn == "" and root.kind == type(model).__name__
    assert [unit.index for unit in units] == list(range(1, len(units) + 1))
    return [unit.fqn for unit in units]


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{i}" for i in range(count)]


# -- by structure ---------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of experts: lists inside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = models.Attention(8, 2, 0.0)
        self.experts = nn.ModuleList(Mlp(8, 0.0) for _ in range(4))


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(8, 8)


class Residual(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, 3)
        self.norm = nn.BatchNorm2d(out)
        if into != out:
            self.project = nn.Sequential(nn.Conv2d(into, out, 1), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    """As torchvision's ResNet-18: the first block of a widening stage has a projection more."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16), Residual(16, 16))
        self.layer3 = nn.Sequential(Residual(16, 32), Residual(32, 32))
        self.head = nn.Linear(32, 10)


class Stages(nn.Module):
    """Stages that are no lists of blocks, in containers of one structure."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3)), nn.BatchNorm2d(8))
        self.stage2 = nn.Sequential(nn.Sequential(nn.Conv2d(8, 8, 3)), nn.BatchNorm2d(8))
        self.other = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))


class Towers(nn.Module):
    """Siblings that are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.other = Mlp(8, 0.0), Mlp(8, 0.0), Experts()


def hugging_face(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}
        made = getattr(transformers, f"{name}Config")(**(sizes | config))
        suffix = {
            "Llama": "ForCausalLM",
            "Mixtral": "ForCausalLM",
            "T5": "ForConditionalGeneration",
        }
        with torch.device("meta"):
            return getattr(transformers, name + suffix.get(name, "Model"))(made)

    return build


STRUCTURES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "transformer": (Transformer, numbered("layers", 3)),
    "mixture of experts": (MixtureOfExperts, numbered("layers", 3)),
    "resnet": (ResNet, [f"layer{i}.{k}" for i in (1, 2, 3) for k in (0, 1)]),
    "stages": (Stages, ["stage1", "stage2"]),
    "towers": (Towers, ["left", "right", *numbered("other.experts", 4)]),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
    "one linear": (lambda: nn.Linear(4, 4), []),
    "llama": (hugging_face("Llama", num_hidden_layers=2), numbered("model.layers", 2)),
    "bert": (hugging_face("Bert", num_hidden_layers=2), numbered("encoder.layer", 2)),
    "t5": (
        hugging_face("T5", num_layers=3, d_model=16, d_ff=16, d_kv=8, num_heads=2),
        [*numbered("encoder.block", 3), *numbered("decoder.block", 3)],
    ),
    "mixtral": (
        hugging_face("Mixtral", num_hidden_layers=2, num_local_experts=4, num_key_value_heads=2),
        numbered("model.layers", 2),
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_repeated_blocks_are_found(name: str) -> None:
    build, expected = STRUCTURES[name]
    model = build()
    assert names(model) == expected
    params = [param for unit in find_units(model) for param in unit.params]
    found = sorted(params, key=lambda param: param.position)
    assert [param.fqn for param in found] == [name for name, _ in model.named_parameters()]


# -- as the user says -----------------------------------------------------------------------------

layers = numbered("layers", 3)
mlps = [f"{layer}.mlp" for layer in layers]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ([Block], layers),
        ([Mlp, nn.Embedding], ["embed", *mlps]),
        (["layers.*"], layers),
        (["layers.[02]"], ["layers.0", "layers.2"]),
        (["**.mlp"], mlps),
        (["**.norm"], ["norm"]),
        (
            ["layers.*", "*.*.mlp"],
            [name for pair in zip(layers, mlps, strict=True) for name in pair],
        ),
        (("lm_head", Mlp), [*mlps, "lm_head"]),
        ([], []),
        (lambda fqn, module: fqn.endswith("attn"), [f"{layer}.attn" for layer in layers]),
        (lambda fqn, module: isinstance(module, Block), layers),
    ],
)
def test_classes_globs_and_callables(spec: Any, expected: list[str]) -> None:
    assert names(Transformer(), spec) == expected


def test_params_belong_to_the_innermost_unit() -> None:
    units = {unit.fqn: unit for unit in find_units(Transformer(), ["layers.*", "layers.0.mlp"])}
    assert [param.fqn for param in units["layers.0.mlp"].params] == [
        f"layers.0.mlp.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    ]
    assert not any("mlp" in param.fqn for param in units["layers.0"].params)
    assert any("mlp" in param.fqn for param in units["layers.1"].params)
    assert [param.fqn for param in units[""].params][:2] == ["position", "embed.weight"]
    assert {units[fqn].kind for fqn in layers} == {"Block"}


class Wrapped(nn.Module):
    """What FullyShardedDataParallel would be: remembers which modules it wraps."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module


def torch_wraps(model: nn.Module, policy: Any) -> list[str]:
    model = copy.deepcopy(model)
    order = {module: name for name, module in model.named_modules()}
    _auto_wrap(model, policy, set(), set(), {"mixed_precision": None}, Wrapped)
    wrapped = {each.module for each in model.modules() if isinstance(each, Wrapped)}
    return [name for module, name in order.items() if name and module in wrapped]


def legacy_policy(module: nn.Module, recurse: bool, **kwargs: Any) -> bool:
    return recurse or isinstance(module, nn.LayerNorm)


POLICIES = {
    "module": ModuleWrapPolicy({Block, nn.Embedding}),
    "custom": CustomPolicy(lambda module: isinstance(module, Mlp)),
    "custom with options": CustomPolicy(
        lambda module: {"limit_all_gathers": True} if isinstance(module, Mlp) else False
    ),
    "size 3000": functools.partial(size_based_auto_wrap_policy, min_num_params=3000),
    "size 8000": functools.partial(size_based_auto_wrap_policy, min_num_params=8000),
    "size, not in blocks": functools.partial(
        size_based_auto_wrap_policy, min_num_params=1000, force_leaf_modules={Block}
    ),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)
    ),
    "always": always_wrap_policy,
    "legacy": legacy_policy,
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("build", [Transformer, MixtureOfExperts, ResNet])
def test_policies_choose_what_fsdp1_wraps(name: str, build: Callable[[], nn.Module]) -> None:
    model = build()
    assert names(model, POLICIES[name]) == torch_wraps(model, POLICIES[name])


def test_policies_choose_something() -> None:
    assert all(torch_wraps(Transformer(), policy) for policy in POLICIES.values())


# -- tied parameters ------------------------------------------------------------------------------


def owner(model: nn.Module, spec: Any, fqn: str) -> str:
    units = find_units(model, spec)
    (found,) = ((u, p) for u in units for p in u.params if fqn in p.aliases)
    assert found[1].unit == found[0].index
    return found[0].fqn


def test_tied_parameters_move_with_their_lowest_common_owner() -> None:
    model = Transformer(tied=True)
    model.layers[0].mlp.up.weight = model.layers[1].mlp.up.weight
    model.layers[2].norm1.weight = model.layers[2].norm2.weight
    spec = ["layers.*", "**.norm1", "**.norm2", "lm_head"]
    assert owner(model, spec, "lm_head.weight") == ""
    assert owner(model, spec, "layers.0.mlp.up.weight") == ""
    assert owner(model, spec, "layers.2.norm1.weight") == "layers.2"
    assert owner(model, spec, "layers.1.norm1.weight") == "layers.1.norm1"
    params = [param for unit in find_units(model, spec) for param in unit.params]
    assert len(params) == len(list(model.parameters()))
    (embed,) = (param for param in params if "lm_head.weight" in param.aliases)
    assert embed.fqn == "embed.weight" and embed.aliases == ("embed.weight", "lm_head.weight")


def test_param_says_what_the_model_has() -> None:
    model = Transformer().to(torch.bfloat16)
    model.embed.weight.requires_grad_(False)
    for unit in find_units(model):
        for param in unit.params:
            tensor = model.get_parameter(param.fqn)
            assert (param.shape, param.dtype) == (tuple(tensor.shape), torch.bfloat16)
            assert param.requires_grad == (param.fqn != "embed.weight")


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (["layer.*"], ["pattern 'layer.*'", "matches no module of Transformer", "embed, layers"]),
        (["layers.*", "*.mlp"], ["pattern '*.mlp'", "'*' matches one name, '**' any number"]),
        ([nn.Conv2d], ["class Conv2d", "matches no module of Transformer"]),
        ([3], ["units holds 3", "a module class or an FQN glob"]),
        ([dict], ["units holds <class 'dict'>", "a module class or an FQN glob"]),
        (3, ["units=3", "policy"]),
    ],
)
def test_a_spec_that_means_nothing_is_refused(spec: Any, parts: list[str]) -> None:
    with pytest.raises(UnitError) as caught:
        find_units(Transformer(), spec)
    assert isinstance(caught.value, FxshardError) and isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)


def test_a_scalar_parameter_is_refused() -> None:
    model = Transformer()
    model.layers[1].gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UnitError, match=r"'layers\.1\.gain' is a scalar.*reshape\(1\)"):
        find_units(model)


def test_a_parameter_that_is_not_contiguous_is_refused() -> None:
    model = Transformer()
    model.layers[1].gain = nn.Parameter(torch.randn(4, 6).t())
    with pytest.raises(
        UnitError, match=r"'layers\.1\.gain' is not contiguous.*strides \[1, 6\].*contiguous\(\)"
    ):
        find_units(model)


def test_a_parameter_with_a_type_of_ranks_is_refused() -> None:
    """As the package spmd_types writes it; the shards and what is gathered would not have it."""
    model = Transformer()
    model.layers[1].gain = nn.Parameter(torch.randn(4))
    model.layers[1].gain._local_type = {"tp": "S(0)"}  # type: ignore[attr-defined]
    message = "parameter 'layers.1.gain' has a type of the package spmd_types ({'tp': 'S(0)'})"
    with pytest.raises(UnitError, match=re.escape(message)):
        find_units(model)
    find_units(model, ignored=["layers.1"])


@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        (["nothing"], r"ignored: 'nothing' is not in Sequential"),
        ([3], r"ignored holds 3: expected a module, a parameter or a glob"),
    ],
)
def test_ignoring_what_is_not_there(ignored: list[Any], message: str) -> None:
    with pytest.raises(UnitError, match=message):
        find_units(nn.Sequential(nn.Linear(2, 2)), ignored=ignored)
