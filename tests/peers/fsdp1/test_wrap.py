"""torch's test_wrap.py: which modules policies make units. Nothing runs: units are planned."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

import fxshard
from fxshard.config.checked import Config
from fxshard.ir.splitting import configured_units, placed
from tests.fsdp2 import full
from tests.oracles import count_collectives
from tests.peers.fsdp1.models import LAYERS, Transformer
from tests.peers.fsdp1.shared import GRAD_OP, NO_SHARD, compiled, ddp, loss_of, same, same_grads
from tests.ranks import told

LARGE = functools.partial(size_based_auto_wrap_policy, min_num_params=40)


def units_of(model: nn.Module, policy: Any, **options: Any) -> list[str]:
    """FQNs of units besides the root."""
    return [u.fqn for u in configured_units(model, Config(units=policy, **options))[1:]]


def sequential() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), inner)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(10), nn.BatchNorm2d(10), nn.BatchNorm3d(10)
        self.sync_bn = nn.SyncBatchNorm(10)


NORMS = ["bn1", "bn2", "bn3", "sync_bn"]
EACH_NORM = functools.partial(_wrap_module_cls_individually, module_classes=[_BatchNorm])


def never(*args: Any, **options: Any) -> bool:
    return False


@pytest.mark.parametrize("either", [True, False], ids=["or_policy", "alone"])
def test_batch_norms(either: bool) -> None:
    policy: Any = EACH_NORM
    if either:
        policy = functools.partial(_or_policy, policies=[never, EACH_NORM])
    assert units_of(Norms(), policy) == NORMS


def test_batch_norms_in_a_unit() -> None:
    """They are units inside of it; without their policy they are part of it."""
    model = nn.ModuleDict({"container": Norms()})

    def container(module: nn.Module, recurse: bool, *args: Any, **options: Any) -> bool:
        return recurse or isinstance(module, Norms)

    policy = functools.partial(_or_policy, policies=[container, EACH_NORM])
    assert units_of(model, policy) == ["container", *(f"container.{name}" for name in NORMS)]
    assert units_of(model, container) == ["container"]


def test_always() -> None:
    assert units_of(sequential(), always_wrap_policy) == ["0", "1", "2", "2.0", "2.1"]


@pytest.mark.parametrize("which", ["function", "policy", "either"])
def test_layers_of_a_transformer(which: str) -> None:
    policy: Any = {
        "function": functools.partial(
            transformer_auto_wrap_policy,
            transformer_layer_cls={nn.TransformerEncoderLayer, nn.TransformerDecoderLayer},
        ),
        "policy": LAYERS,
        "either": functools.partial(_or_policy, policies=[LAYERS]),
    }[which]
    model = Transformer()
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    want = [name for name, module in model.named_modules() if isinstance(module, layers)]
    assert len(want) == 4
    assert units_of(model, policy) == want


WRAPPED = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.BatchNorm1d)


def test_custom_policy() -> None:
    """A function that answers yes or no; all units compute in fp16 but batch norm."""
    model = Transformer()
    want = [name for name, module in model.named_modules() if isinstance(module, WRAPPED)]
    policy = CustomPolicy(lambda module: isinstance(module, WRAPPED))
    assert units_of(model, policy) == want
    half = MixedPrecision(param_dtype=torch.float16)
    units = configured_units(model, Config(units=policy, mixed_precision=half))
    dtypes = {unit.fqn: unit.precision.param_dtype for unit in units}
    assert dtypes == dict.fromkeys(["", *want], torch.float16) | {"bn": torch.float32}


def by_strategies(rank: int, world_size: int) -> None:
    """Each unit in the strategy that the policy gives it: what is sent, and gradients of DDP."""

    def strategy_of(module: nn.Module) -> Any:
        if isinstance(module, nn.BatchNorm1d):
            return {"sharding_strategy": NO_SHARD}
        if isinstance(module, nn.TransformerDecoderLayer):
            return {"sharding_strategy": GRAD_OP}
        return isinstance(module, nn.TransformerEncoderLayer)

    pair = ddp(Transformer()), compiled(Transformer(), units=CustomPolicy(strategy_of))
    for model in pair:
        loss_of(model).backward()
    same_grads(pair[1], pair[0])
    pair[1].zero_grad()
    with count_collectives() as forward:
        loss = loss_of(pair[1])
    with count_collectives() as backward:
        loss.backward()
    sharded = 5  # the layers, and what is around them
    assert (forward.count("all_gather"), forward.count()) == (sharded, sharded)
    gathered = backward.count("all_gather")
    assert gathered == sharded - 2  # without decoders
    assert backward.count("reduce_scatter") == sharded and backward.count("all_reduce") == 1
    assert backward.nbytes("all_reduce") == sum(
        param.nbytes for param in Transformer().bn.parameters()
    )
    same_grads(pair[1], pair[0])


def test_custom_policy_with_strategies(ranks: Any) -> None:
    ranks(2).run(by_strategies)


def test_custom_policy_with_options() -> None:
    """A function that answers with options of FSDP1 for that unit."""
    policy = CustomPolicy(
        lambda module: (
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, **more}
            if isinstance(module, nn.TransformerDecoderLayer)
            else False
        )
    )
    more: dict[str, Any] = {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}
    said = told(lambda: placed(Transformer(), Config(units=policy)))
    assert "the policy in units gives 'transformer.decoder.layers.0' options of its own" in said
    more.clear()
    model = Transformer()
    units = configured_units(model, placed(model, Config(units=policy)))
    assert [(unit.fqn, unit.reshard) for unit in units] == [
        ("", True),
        ("transformer.decoder.layers.0", False),
        ("transformer.decoder.layers.1", False),
    ]


def test_sizes() -> None:
    """A linear layer is too small; what is left of the sequence of two is large enough."""
    assert units_of(sequential(), LARGE) == ["2"]


def test_sizes_leave_lists_alone() -> None:
    assert units_of(nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]), LARGE) == []


def test_sizes_look_into_lists() -> None:
    assert units_of(nn.ModuleList([nn.Linear(10, 10)]), LARGE) == ["0"]


def test_sizes_do_not_look_into_attention() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1))
    assert "0" in units_of(model, LARGE)
    assert "1.out_proj" not in units_of(model, LARGE)


def test_sizes_with_leaves_of_the_users() -> None:
    leaves: Any = size_based_auto_wrap_policy
    policy = functools.partial(LARGE, force_leaf_modules=leaves.FORCE_LEAF_MODULES | {nn.Linear})
    model = nn.Sequential(nn.Linear(10, 10), nn.ModuleList([nn.Linear(10, 10)]))
    assert units_of(model, policy) == []


def test_ignored_modules_are_no_units() -> None:
    model = sequential()
    ignored = [model[1], model[2][0]]
    assert units_of(model, always_wrap_policy, ignored=ignored) == ["0", "2", "2.1"]


IGNORING = {
    "always": (always_wrap_policy, ["", "0", "2", "2.1"]),
    "sizes": (LARGE, [""]),
}


def ignoring(rank: int, world_size: int, which: str) -> None:
    """By `compile`: units, what is sharded, and gradients; ignored ones are each rank's own."""
    policy, units = IGNORING[which]
    torch.manual_seed(0)
    eager = sequential()
    module = copy.deepcopy(eager)
    left_out = [module[1], module[2][0]]
    model = compiled(module, units=policy, ignored=left_out)
    torch.manual_seed(1 + rank)
    x = torch.randn(3, 5)
    for each in (eager, model):
        each(x).square().sum().backward()
    assert [unit.fqn for unit in model.plan.units] == units
    own = {id(param) for each in left_out for param in each.parameters()}
    for (name, param), plain in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert isinstance(param, DTensor) == (id(param) not in own), name
        want = plain.grad
        if id(param) not in own:
            dist.all_reduce(want)
            want /= world_size
        assert_close(full(param.grad), want)


@pytest.mark.parametrize("which", IGNORING)
def test_ignored_modules_by_compile(ranks: Any, which: str) -> None:
    ranks(2).run(ignoring, which)


def test_sizes_without_ignored_modules() -> None:
    model = sequential()
    assert units_of(model, LARGE, ignored=[model[1], model[2][0]]) == []


class LoraAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x) + self.lora_B(self.lora_A(x))


class LoraMLP(nn.Module):
    """All is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.proj1, self.proj2 = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj2(torch.relu(self.proj1(x)))


class LoraDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = LoraAttention(), LoraMLP()
        self.norm = nn.LayerNorm(8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x + self.attn(x)))


LORA = (LoraAttention, LoraMLP, LoraDecoder)


def with_options(module: nn.Module) -> Any:
    if isinstance(module, LoraAttention):
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    return isinstance(module, LORA)


LORA_POLICIES = {
    "classes": ModuleWrapPolicy(set(LORA)),
    "function": CustomPolicy(lambda module: isinstance(module, LORA)),
    "function_with_options": CustomPolicy(with_options),
}


def lora(rank: int, world_size: int, policy: str) -> None:
    """FSDP1 warns that frozen and trained ones share a unit; here gradients are no larger."""
    torch.manual_seed(0)
    plain = nn.Sequential(LoraDecoder(), LoraDecoder())
    model = compiled(copy.deepcopy(plain), units=LORA_POLICIES[policy])
    pair = ddp(plain), model
    torch.manual_seed(rank)
    x = torch.randn(4, 8)
    for each in pair:
        with count_collectives() as seen:
            each(x).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    same(pair[1], pair[0])
    trained = [param for param in pair[0].parameters() if param.requires_grad]
    assert seen.count("reduce_scatter") == 2
    assert seen.nbytes("reduce_scatter") == sum(param.nbytes for param in trained)
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        f"{i}.attn.lora_{each}.weight" for i in range(2) for each in "AB"
    }
    assert [unit.fqn for unit in model.plan.units] == [
        "",
        *(f"{i}{part}" for i in range(2) for part in ("", ".attn", ".mlp")),
    ]


@pytest.mark.parametrize("policy", LORA_POLICIES)
def test_frozen_and_trained_in_one_unit(ranks: Any, policy: str) -> None:
    ranks(2).run(lora, policy)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin1, self.lin2 = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.lin3 = nn.Sequential(nn.Linear(1, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin3(self.lin2(self.lin1(x)))


def small(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Every module a unit, each of one element."""
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=0)
    pair = ddp(Small()), compiled(Small(), units=policy, **options)
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(1) + rank).sum().backward()
            optimizer.step()
    same(pair[1], pair[0])
    assert [unit.fqn for unit in pair[1].plan.units if unit.params] == ["lin1", "lin2", "lin3.0"]


GRID = [
    pytest.param(
        {"offload": CPUOffload(offload), "backward_prefetch": back, "forward_prefetch": ahead},
        id=f"offload={offload}-{back.name}-{ahead}",
    )
    for offload, back, ahead in itertools.product((False, True), BackwardPrefetch, (False, True))
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", GRID)
def test_units_of_one_element(ranks: Any, options: dict[str, Any]) -> None:
    ranks(2).run(small, options)


class Argumentless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.tensor([1.0]))

    def forward(self) -> Tensor:
        return self.a


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.tensor([1.0])

    def forward(self) -> Tensor:
        return self.a


def no_argument(rank: int, world_size: int) -> str:
    assert torch.equal(compiled(Argumentless(), units=[])(), torch.tensor([1.0]))
    return told(lambda: compiled(Unregistered(), units=[])())


def test_no_argument(ranks: Any) -> None:
    """A tensor that is no buffer is refused, with what to do."""
    for said in ranks(1).run(no_argument):
        assert "Register it: self.register_buffer(name, tensor)" in said


def twice(rank: int, world_size: int, nested: bool) -> str:
    """A part is compiled already."""
    part = compiled(nn.Linear(1, 1), units=[])
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), part) if nested else part)
    return told(lambda: fxshard.compile(model, units=LARGE))


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "direct"])
def test_already_compiled(ranks: Any, nested: bool) -> None:
    for said in ranks(2).run(twice, nested):
        where = "0.1" if nested else "0"
        assert f"sharded already: its submodule {where!r} was given to fxshard.compile" in said


def smoke(rank: int, world_size: int, offload: bool) -> None:
    torch.manual_seed(0)
    plain = sequential()
    torch.manual_seed(0)
    model = compiled(sequential(), units=LARGE, offload=CPUOffload(offload))
    x = torch.rand(1, 5)
    for each in (plain, model):
        nn.functional.mse_loss(each(x), x).backward()
    assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
    assert [unit.fqn for unit in model.plan.units] == ["", "2"]


@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offload"])
def test_one_rank(ranks: Any, offload: bool) -> None:
    ranks(1).run(smoke, offload)
