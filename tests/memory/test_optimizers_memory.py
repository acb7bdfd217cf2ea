"""Every optimizer of torch, and some that torch has never seen: static bytes against measured ones.

Two steps run on one rank of a fake process group under the tracker: the first one, in
which the state is made, and the steady one; states and peak of the step are compared too.
"""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

import fxshard
from fxshard._torch import process_groups
from fxshard.errors import ConfigError
from fxshard.memory.category import Category
from tests.memory.test_memory import built
from tests.zoo import MODELS

# What changes which tensors a step makes, besides foreach, fused and maximize.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "Adam": [{"amsgrad": True}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True}],
    "Adamax": [{"weight_decay": 0.1}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"centered": True}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    ],
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")  # those with a fused kernel for CPU
REFUSED = {
    "Adafactor": "reads the value of a tensor that depends on parameters",
    "LBFGS": "closure",
    "Muon": "only supports 2D parameters",
    "Rprop": r"calls aten\.(index_put_|masked_fill_\.Scalar) on sharded parameters",
    "SparseAdam": "sparse gradients only",
}
CLASSES = {
    name: found
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer
}


def variants(name: str) -> list[dict[str, Any]]:
    """Each of `OPTIONS`, one by one (the default on the CPU), in its foreach and its fused form."""
    own = [{}, *OPTIONS[name]]
    found = [*own, *({**options, "foreach": True} for options in own)]
    if name in FUSED:
        found += [{**options, "fused": True} for options in own]
    return [*found, {**own[-1], "maximize": True}, {**own[-1], "maximize": True, "foreach": True}]


def text(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items()) or "plain"


CASES = [
    pytest.param(name, options, id=f"{name} {text(options)}")
    for name in sorted(set(CLASSES) - set(REFUSED))
    for options in variants(name)
]


def validated(optimizer: Any, model: Any = None, x: Any = None, **options: Any) -> Any:
    if model is None:
        model, (x,), _ = built(MODELS["mlp13"])
    options = {"world_size": 2} | options
    return fxshard.validate(model, (x,), optimizer=optimizer, **options)


def assert_exact(result: Any) -> None:
    rows = result.table(only_different=True).splitlines()
    assert result.max_abs_difference == 0, "\n".join(rows[:12])


def planned(optimizer: Any, model: Any = None, x: Any = None, **options: Any) -> Any:
    if model is None:
        model, (x,), _ = built(MODELS["mlp13"])
    options = {"world_size": 2} | options
    return fxshard.plan(model, (x,), optimizer=optimizer, **options)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_a_learning_rate_in_a_tensor(name: str) -> None:
    assert_exact(validated(functools.partial(CLASSES[name], lr=torch.tensor(0.01))))


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.sample(25)
def test_optimizers_of_torch(name: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))  # rows do not divide by 2
    result = validated(functools.partial(CLASSES[name], **options), model, torch.ones(4, 6))
    assert_exact(result)
    seen = {(c.step, c.state): c.measured for c in result.cells if c.category is Category.OPT_STATE}
    keeps = seen[2, "Before Step"]
    assert seen[1, "After zero_grad"] == keeps
    assert bool(keeps) == (name != "SGD" or bool(options.get("momentum")))


def test_all_classes_of_torch_are_here() -> None:
    assert set(OPTIONS) | set(REFUSED) == set(CLASSES)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]) as failure:
        _ = planned(CLASSES[name]).memory
    assert name in str(failure.value)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("AdamW", {"differentiable": True}, "differentiable=True"),
        ("AdamW", {"capturable": True}, "capturable=True"),
        ("Rprop", {"foreach": True}, "calls aten._foreach_copy_ on sharded parameters"),
    ],
)
def test_options_that_cannot_be_planned(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as failure:
        _ = planned(functools.partial(CLASSES[name], **options)).memory
    assert name in str(failure.value)


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10, bias=False), nn.Tanh(), nn.Linear(10, 7, bias=False))


@functools.cache
def dtensors_assign_under_masks() -> bool:
    """Rprop does, but DTensors of torch 2.11 know of no sharding for it (aten.index_put_)."""
    with process_groups.fake_process_group(0, 2):
        x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Replicate()])
        try:
            x[x.gt(0)] = 2.0
        except NotImplementedError:
            return False
    return True


@pytest.mark.parametrize("name", ["Muon", "Rprop"])
def test_steps_that_mix_rows_are_exact_where_ranks_hold_all_of_them(name: str) -> None:
    x = torch.ones(3, 12)
    if name == "Rprop" and not dtensors_assign_under_masks():
        with pytest.raises(NotImplementedError, match=r"aten\.index_put_"):
            validated(CLASSES[name], matrices(), x, strategy="no_shard")
    else:
        assert_exact(validated(CLASSES[name], matrices(), x, strategy="no_shard"))
    if name == "Muon":  # sends each matrix to its owner
        assert_exact(validated(CLASSES[name], matrices(), x))
        return
    with pytest.raises(ConfigError, match=f"{name}: its step calls aten"):
        _ = planned(CLASSES[name], matrices(), x).memory


# -- optimizers that torch has never seen ----------------------------------------------------------


class Lazy(Optimizer):
    """Makes its state when a gradient is first seen; two moments, one of another dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sign"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["slow"] = p.clone()
                state["sign"].copy_((p.grad * 0.1 + state["sign"]).sign())
                state["slow"].lerp_(p, 0.5)
                p.sub_(state["sign"], alpha=0.01)


class Grouped(Optimizer):
    """One scalar for each group, and one tensor for its first parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first = group["params"][0]
            if not self.state[first]:
                self.state[first] = {"count": torch.zeros(()), "mean": torch.zeros_like(first)}
            self.state[first]["count"] += 1
            self.state[first]["mean"].mul_(0.9).add_(first.grad)
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class Replacing(Optimizer):
    """Exchanges its state at every step: old and new are there at once."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].get("mean", p.grad)
                self.state[p]["mean"] = before * 0.9 + p.grad
                p.sub_(self.state[p]["mean"] * 0.01)


class Alternating(Optimizer):
    """Another temporary in every second step: the steady state is the second one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * 0.1 if self.steps % 2 else (p.grad * 0.1).double().float())


class Peeking(Optimizer):
    """Decides by a value."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if (p.grad * p.grad).flatten()[0].item() > 0:
                    p.sub_(p.grad)


class Trusting(Optimizer):
    """LARS's ratio of norms: ranks would have to add theirs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (p.norm() / p.grad.norm()))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", [Lazy, Grouped, Replacing, Alternating])
@pytest.mark.sample(3)
def test_user_optimizers(optimizer: Any, world_size: int) -> None:
    result = validated(optimizer, world_size=world_size)
    assert_exact(result)


def test_a_step_that_reads_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="Peeking: its step reads the value of a tensor"):
        _ = planned(Peeking).memory


def test_a_step_that_mixes_rows_is_refused_where_ranks_share_them() -> None:
    with pytest.raises(ConfigError, match=r"Trusting: its step calls aten\.linalg_vector_norm"):
        _ = planned(Trusting).memory
    result = validated(Trusting, matrices(), torch.ones(3, 12), strategy="no_shard")
    assert_exact(result)


# -- parameter groups -----------------------------------------------------------------------------


def in_two_groups(params: Any) -> Optimizer:
    """Vectors without momentum, matrices with it: the callable gets parameters, without names."""
    params = list(params)
    return torch.optim.SGD(
        [
            {"params": [p for p in params if p.dim() > 1], "momentum": 0.9, "nesterov": True},
            {"params": [p for p in params if p.dim() < 2], "momentum": 0.0},
        ],
        lr=0.1,
    )


def test_groups_by_shape() -> None:
    result = validated(in_two_groups)
    assert_exact(result)
    model, (x,), _ = built(MODELS["mlp13"])
    report = fxshard.plan(model, (x,), world_size=2, optimizer=in_two_groups).memory
    names = {e.name for e in report.ledger().ranges if e.category is Category.OPT_STATE}
    kept = {name for name, p in model.named_parameters() if p.dim() > 1}
    assert names == {f"momentum_buffer of {name}" for name in kept}


def test_groups_by_name() -> None:
    """The callable gets parameters in the order of ``named_parameters``."""
    model, (x,), _ = built(MODELS["mlp13"])
    names = [name for name, _ in model.named_parameters()]

    def by_name(params: Any) -> Optimizer:
        named = list(zip(names, params, strict=True))
        return torch.optim.AdamW(
            [
                {"params": [p for n, p in named if n.endswith("weight")], "amsgrad": True},
                {"params": [p for n, p in named if not n.endswith("weight")]},
            ],
            lr=0.1,
        )

    result = validated(by_name, model, x)
    assert_exact(result)
    report = planned(by_name, model, x).memory
    most = {e.name for e in report.ledger().ranges if e.name.startswith("max_exp_avg_sq")}
    weights = [name for name in names if name.endswith("weight")]
    assert most == {f"max_exp_avg_sq of {name}" for name in weights}


@pytest.mark.parametrize("frozen", [False, True])
def test_an_instance_is_taken_with_the_options_of_its_class(frozen: bool) -> None:
    """Over all parameters, or over all that are trained."""
    model = matrices()
    model[0].weight.requires_grad_(not frozen)
    trained = [param for param in model.parameters() if param.requires_grad]
    for params in (list(model.parameters()), trained):
        own = torch.optim.AdamW(params, amsgrad=True, foreach=True)
        assert_exact(validated(own, model, torch.ones(3, 12)))
    named = torch.optim.Adagrad(model.named_parameters(), lr=torch.tensor(0.1))  # has state
    assert_exact(validated(named, model, torch.ones(3, 12)))


class Wrapped(torch.optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def _instance(what: str, model: nn.Module) -> torch.optim.Optimizer:
    """One that steps the model otherwise than one of its class and defaults would."""
    params = list(model.parameters())
    if what == "groups":
        return torch.optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.1)
    if what == "one group of its own options":
        return torch.optim.SGD([{"params": params, "lr": 0.5}], lr=0.1)
    if what == "some parameters":
        return torch.optim.SGD(params[:1], lr=0.1)
    if what == "options through **":
        return Wrapped(params, lr=0.5)
    made = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if what == "changed":
        made.param_groups[0]["lr"] = 0.5
    elif what == "scheduler":
        torch.optim.lr_scheduler.StepLR(made, 1, 0.1)
    elif what == "hook":
        made.register_step_pre_hook(lambda *_: None)
    elif what == "state":
        sum(param.sum() for param in params).backward()
        made.step()
    return made


@pytest.mark.parametrize(
    ("what", "told"),
    {
        "groups": "2 parameter groups",
        "one group of its own options": "lr: 0.5 in place of 0.1",
        "some parameters": "1 parameters where the model has",
        "options through **": "changed option .lr: 0.001 in place of 0.5",
        "changed": "lr: 0.5 in place of 0.1",
        "scheduler": "initial_lr: 0.1, which is no default",
        "hook": "hooks .optimizer_step_pre_hooks",
        "state": "state of steps",
    }.items(),
)
def test_an_instance_that_would_lose_something_is_refused(what: str, told: str) -> None:
    """Nothing of it is left out in silence: plan, compile and validate ask for a callable."""
    message = rf"has .*{told}.* Give a callable that makes it, of named parameters"
    with pytest.raises(ConfigError, match=message):
        _ = planned(_instance(what, model := matrices()), model, torch.ones(3, 12)).memory
    with pytest.raises(ConfigError, match=message):
        validated(_instance(what, model := matrices()), model, torch.ones(3, 12))
    for in_backward in (False, True):
        with pytest.raises(ConfigError, match=message):
            own = _instance(what, model := matrices())
            options = {"optimizer": own, "optimizer_in_backward": in_backward}
            _ = fxshard.compile(model, world_size=2, **options).optimizer


def test_frozen_parameters_have_no_state() -> None:
    model = matrices()
    model[0].weight.requires_grad_(False)
    result = validated(torch.optim.AdamW, model, torch.ones(3, 12))
    assert_exact(result)
    report = planned(torch.optim.AdamW, model, torch.ones(3, 12)).memory
    owners = {e.module for e in report.ledger().ranges if e.category is Category.OPT_STATE}
    assert owners == {"2"}


def test_what_is_no_optimizer() -> None:
    for wrong in ("AdamW", 3, lambda params: None):
        with pytest.raises(ConfigError, match="expected a callable"):
            _ = planned(wrong).memory
