"""torch's test_fsdp_misc.py: what fits no other file."""

import functools
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.optim import _apply_optimizer_in_backward

import fxshard
from tests.peers.fsdp1.models import Nested, Transformer
from tests.peers.fsdp1.shared import (
    GRAD_OP,
    NO_SHARD,
    STRATEGIES,
    compiled,
    ddp,
    grads_of,
    losses_alike,
    params_of,
    same,
    same_grads,
)
from tests.ranks import told

EACH_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(self.a(x + y))


# -- training and evaluation in turns --------------------------------------------------------------


class Convolutional(nn.Module):
    """(batch, 1, 8, 8) and classes -> the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.norm = nn.LayerNorm(32)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(self.norm(x))))
        return F.cross_entropy(F.log_softmax(self.fc2(x), dim=1), y)


def evaluated(rank: int, world_size: int) -> None:
    """With dropout: the random numbers are those of DDP."""
    units = ModuleWrapPolicy([nn.Linear, nn.Conv2d])
    options = {"units": units, "strategy": GRAD_OP, "forward_prefetch": True}
    pair = ddp(Convolutional()), compiled(Convolutional(), **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in pair]
    torch.manual_seed(rank)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(8, 1, 8, 8), torch.randint(0, 9, (8,))

    def trained() -> None:
        for i in range(3):
            x, y = batch()
            losses, grads = [], []
            for model, optimizer in zip(pair, optimizers, strict=True):
                torch.manual_seed(rank + 100 * i)
                x = x.detach().requires_grad_()
                losses.append(model(x, y).sum())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
                grads.append(x.grad)
            assert torch.allclose(losses[0], losses[1])
            assert torch.allclose(grads[0], grads[1])

    trained()
    with torch.no_grad():
        for model in pair:
            model.eval()
        for _ in range(3):
            x, y = batch()
            assert torch.allclose(pair[0](x, y), pair[1](x, y))
    for model in pair:
        model.train()
    trained()


def test_evaluation_between_steps(ranks: Any) -> None:
    ranks(2).run(evaluated)


# -- what no loss reads ----------------------------------------------------------------------------


class Branches(nn.Module):
    """`b` takes part with no gradient, or not at all."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 10), nn.Linear(10, 10)
        self.second = second

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return (self.a(x), self.b(y)) if self.second else self.a(x)


def no_gradient(rank: int, world_size: int, second: bool, strategy: Any) -> None:
    options = {"strategy": strategy} if strategy else {}
    model = compiled(Branches(second), units=always_wrap_policy, **options)
    x, y = torch.randn(10, 10), torch.randn(10, 10)
    for _ in range(4):
        out = model(x, y)
        (out[0] if second else out).sum().backward()
        grads = grads_of(model)
        assert grads["a.weight"] is not None
        assert grads["b.weight"] is None


@pytest.mark.parametrize("second", [True, False], ids=["unread", "unused"])
@pytest.mark.parametrize("strategy", [NO_SHARD, None], ids=["no_shard", "full_shard"])
def test_module_without_gradient(ranks: Any, second: bool, strategy: Any) -> None:
    ranks(2).run(no_gradient, second, strategy)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin1, self.lin2 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin1(x), self.lin2(x)


def some_outputs(rank: int, world_size: int, strategy: Any) -> None:
    """Two steps with a loss of both outputs, then with a loss of one."""
    pair = (
        ddp(TwoOutputs(), find_unused_parameters=True),
        compiled(TwoOutputs(), units=["lin1"], strategy=strategy),
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in pair]
    x = torch.ones(4) + rank
    for i in range(6):
        before = params_of(pair[1])
        for model, optimizer in zip(pair, optimizers, strict=True):
            a, b = model(x)
            (a @ b if i < 2 else a.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        same(pair[1], pair[0])
        after = params_of(pair[1])
        assert any(not torch.equal(before[name], after[name]) for name in after)


@EACH_STRATEGY
def test_loss_of_some_outputs(ranks: Any, strategy: Any) -> None:
    ranks(2).run(some_outputs, strategy)


# -- optimizer in backward -------------------------------------------------------------------------


def overlapped(rank: int, world_size: int, offload: bool) -> None:
    """The option takes the place of torch's private `_apply_optimizer_in_backward`."""
    sgd = functools.partial(torch.optim.SGD, lr=0.03)
    options = {"units": always_wrap_policy, "offload": CPUOffload(offload)}
    plain = compiled(TwoLayers(), **options)
    model = compiled(TwoLayers(), optimizer=sgd, optimizer_in_backward=True, **options)
    optimizer = sgd(plain.parameters())
    torch.manual_seed(rank)
    for _ in range(6):
        before = params_of(model)
        x = torch.randn(2, 2)
        plain(x, x).sum().backward()
        model(x, x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        after = params_of(model)
        assert not any(torch.equal(before[name], after[name]) for name in after)
        same(model, plain)


@pytest.mark.parametrize("offload", [True, False], ids=["offload", "stays"])
def test_optimizer_in_backward(ranks: Any, offload: bool) -> None:
    ranks(2).run(overlapped, offload)


def applied_by_torch(rank: int, world_size: int, how: str, hooks: bool, offload: bool) -> None:
    """torch's own way works as well: hooks step when a gradient has arrived, its own or ours."""
    if how == "compile":
        options = {"units": always_wrap_policy, "offload": CPUOffload(offload)}
        plain, model = (compiled(TwoLayers(), **options) for _ in range(2))
    else:
        plain, model = (fxshard.shard(TwoLayers(), units=["*"]) for _ in range(2))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.03)
    given = {"optimizer_kwargs": {"lr": 0.03}, "register_hook": hooks}
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), **given)
    torch.manual_seed(rank)
    for _ in range(6):
        x = torch.randn(2, 2)
        plain(x, x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x, x).sum().backward()
        assert all(param.grad is None for param in model.parameters())
        same(model, plain)


@pytest.mark.parametrize(
    ("how", "hooks", "offload"),
    [
        ("compile", False, False),
        ("compile", False, True),
        ("compile", True, False),
        ("compile", True, True),
        ("shard", False, False),
    ],
)
@pytest.mark.sample(5)
def test_optimizer_in_backward_by_torch(ranks: Any, how: str, hooks: bool, offload: bool) -> None:
    ranks(2).run(applied_by_torch, how, hooks, offload)


# -- on the CPU ------------------------------------------------------------------------------------


def on_cpu(rank: int, world_size: int, strategy: Any) -> None:
    options = {"units": always_wrap_policy, "strategy": strategy}
    if "HYBRID" in strategy.name:
        options["mesh"] = init_device_mesh("cpu", (1, world_size))
    pair = ddp(TwoLayers()), compiled(TwoLayers(), **options)
    torch.manual_seed(42 + rank)
    x = torch.randn(2, 2)
    losses_alike(pair, x, x)


@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda strategy: strategy.name)
def test_training_on_cpu(ranks: Any, strategy: Any) -> None:
    ranks(2).run(on_cpu, strategy)


def stays_on_cpu(rank: int, world_size: int) -> None:
    model = compiled(Nested())
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    model(*model.get_input()).sum().backward()


def test_cpu_module_stays_on_cpu(ranks: Any) -> None:
    ranks(2).run(stays_on_cpu)


# -- states of rank 0 ------------------------------------------------------------------------------


class OfARank(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.lin = nn.Linear(10, 10, bias=False)
        self.register_buffer("buffer", torch.ones(1) * rank)


def all_alike(model: nn.Module) -> bool:
    states = {name: value.detach() for name, value in model.named_parameters()}
    states |= {name: value.detach() for name, value in model.named_buffers()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, states)
    return all(torch.equal(each[name], every[0][name]) for each in every for name in states)


def synced(rank: int, world_size: int) -> None:
    model: Any = OfARank(rank)
    assert not all_alike(model)
    model = compiled(model, units=[], sync_module_states=True)
    with model.summon_full_params():
        assert all_alike(model)
    assert model.buffer.item() == 0
    other = compiled(OfARank(rank), units=[])
    with other.summon_full_params():
        assert other.buffer.item() == rank


def test_states_of_rank_0(ranks: Any) -> None:
    ranks(2).run(synced)


def synced_buffers(rank: int, world_size: int) -> None:
    module: Any = Nested()
    module.buf = nn.Buffer(torch.ones(2, 2) * rank)
    module.module[0].buf = nn.Buffer(torch.ones(3, 2) * rank)
    model = compiled(module, units=ModuleWrapPolicy({nn.Linear}), sync_module_states=True)
    assert torch.equal(model.buf, torch.zeros(2, 2))
    assert torch.equal(model.module[0].buf, torch.zeros(3, 2))


def test_buffers_of_rank_0(ranks: Any) -> None:
    ranks(2).run(synced_buffers)


# -- odd modules -----------------------------------------------------------------------------------

Outputs = namedtuple("Outputs", ["a", "b", "c", "d"])


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10)

    def forward(self, x: Any) -> Any:
        return x


def named_tuple(rank: int, world_size: int) -> None:
    """What comes in comes out, with gradients."""
    model = compiled(Passes(), units=[])
    t = torch.ones(1, requires_grad=True)
    out = model(Outputs(t, t, t, t))
    assert type(out) is Outputs
    sum(out).backward()
    assert torch.equal(t.grad, torch.full((1,), 4.0))


def test_named_tuples(ranks: Any) -> None:
    ranks(2).run(named_tuple)


def by_policy(rank: int, world_size: int, function: bool) -> list[str]:
    classes = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
    policy: Any = ModuleWrapPolicy(classes)
    if function:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    model = compiled(Transformer(), units=policy)
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    model(*model.get_input())
    return [unit.fqn for unit in model.plan.units]


@pytest.mark.parametrize("function", [False, True], ids=["policy", "function"])
def test_devices_of_units(ranks: Any, function: bool) -> None:
    for units in ranks(2).run(by_policy, function):
        assert len(units) == 5


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
        self.lin = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.seq(x))


def offloaded(rank: int, world_size: int) -> None:
    units = ModuleWrapPolicy({nn.Sequential})
    model = compiled(Sequence(), units=units, offload=CPUOffload(True))
    model(torch.randn(2, 10)).sum().backward()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {p.grad.device.type for p in model.parameters()} == {"cpu"}


def test_offloaded_units(ranks: Any) -> None:
    ranks(2).run(offloaded)


def ignored_on_meta(rank: int, world_size: int) -> list[str]:
    said = []
    for fill in (None, lambda module: module.to_empty(device="cpu", recurse=False)):
        with torch.device("meta"):
            model: Any = TwoLayers()
        options = {"units": [], "ignored": [model.a], "param_init_fn": fill}
        said.append(told(functools.partial(compiled, model, **options)))
    return said


def test_ignored_module_on_meta(ranks: Any) -> None:
    for said in ranks(2).run(ignored_on_meta):
        assert len(said) == 2
        assert all("'a.weight' is ignored, and on the meta device" in each for each in said)


def not_moved(rank: int, world_size: int) -> None:
    model: Any = TwoLayers()
    model.a.buf = nn.Buffer(torch.ones(1))
    before = [*model.a.parameters(), *model.a.buffers()]
    model = compiled(model, units=[], ignored=[model.a])
    after = [*model.a.parameters(), *model.a.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_ignored_states_stay_as_they_are(ranks: Any) -> None:
    ranks(2).run(not_moved)


def without_parameters(rank: int, world_size: int) -> None:
    model = compiled(nn.ReLU(), units=[])
    assert model(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]


def test_module_without_parameters(ranks: Any) -> None:
    ranks(2).run(without_parameters)


def containers(rank: int, world_size: int) -> list[str]:
    models = [
        nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]),
        nn.ModuleDict({"1": nn.Linear(8, 8), "2": nn.Linear(8, 8)}),
    ]
    return [told(functools.partial(compiled(model), torch.ones(8))) for model in models]


def test_containers_have_no_forward(ranks: Any) -> None:
    """FSDP1 warns when it wraps one."""
    for of_list, of_dict in ranks(2).run(containers):
        assert "ModuleList has no forward, and cannot be called. Compile the module" in of_list
        assert "ModuleDict has no forward, and cannot be called. Compile the module" in of_dict


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[0](x))


def containers_as_units(rank: int, world_size: int) -> None:
    """FSDP1 gathers no parameters for them; a program gathers what is used."""
    pair = ddp(Holds(), find_unused_parameters=True), compiled(Holds(), units=[nn.ModuleList])
    x = torch.ones(2, 8) + rank
    for model in pair:
        model(x).sum().backward()
    same_grads(pair[1], pair[0])
    (unit,) = (unit for unit in pair[1].plan.units if unit.params)
    assert (unit.fqn, len(unit.params)) == ("layers", 6)


def test_containers_as_units(ranks: Any) -> None:
    ranks(2).run(containers_as_units)


def single(rank: int, world_size: int, strategy: Any) -> list[str]:
    """FSDP1 warns that it takes NO_SHARD; here one rank holds all rows, and nothing is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled(nn.Linear(3, 3), units=[], strategy=strategy)
        model(torch.ones(1, 3)).sum().backward()
    return [str(each.message) for each in caught]


@EACH_STRATEGY
def test_one_rank(ranks: Any, strategy: Any) -> None:
    assert ranks(1).run(single, strategy) == [[]]


class Watched(nn.Module):
    """Its own `__setattr__` is called for what forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("set", []).append(name)
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def set_attributes(rank: int, world_size: int) -> list[str]:
    """No program sets an attribute of the user's, whatever their class does then."""
    model = compiled(Watched(), units=[])
    model.set.clear()
    for _ in range(2):  # the first call traces
        model(torch.randn(8, 5)).sum().backward()
    return model.set


def test_no_attribute_is_set(ranks: Any) -> None:
    assert ranks(1).run(set_attributes) == [[]]
