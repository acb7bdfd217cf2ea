"""What `compile` returns is the user's own object: its class, names, methods, hooks and copies."""

import array
import copy
import dataclasses
import io
import pickle
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError, StepError
from fxshard.runtime.module import public_names
from tests.fsdp2 import full

EVERYWHERE = pytest.mark.parametrize("where", ["in_process", "2 ranks"])


def run(ranks: Any, where: str, check: Callable[..., None], *args: Any) -> None:
    if where == "in_process":
        check(0, 1, *args)
    else:
        ranks(2).run(check, *args)


class Agent(nn.Module):
    """Names and methods that a wrapper would hide, and parameters read in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5), nn.Dropout(0.0))
        self.scale = nn.Parameter(torch.linspace(-1, 1, 5))
        self.cell = nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, 3)
        self.config, self.world, self.units, self.slots = {"mine": 1}, "earth", 12, [1]
        self.variants, self.kind, self.original = "many", "one", "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)) * self.scale)

    def value(self, x: Tensor) -> Tensor:
        hidden = self.block(self.embed(x)) * self.scale.exp()
        return hidden.sum(-1) + (self.head.weight.t() @ hidden.new_ones(3)).sum()

    def recurrent(self, x: Tensor) -> Tensor:
        return self.cell(self.embed(x))[0]

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def add(self, x: int) -> int:
        return x + self.units

    def reset(self) -> str:
        return "reset"


def agent() -> Agent:
    torch.manual_seed(0)
    return Agent()


def compiled(model: nn.Module, **options: Any) -> Any:
    options |= {} if dist.is_initialized() else {"world_size": 2}
    return fxshard.compile(model, **options)


def tokens(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Of this rank, and of all."""
    batch = torch.randint(0, 7, (2 * world_size, 3), generator=torch.Generator().manual_seed(1))
    return batch[2 * rank : 2 * rank + 2], batch


# -- the same object -------------------------------------------------------------------------------


def same_object(rank: int, world_size: int) -> None:
    model = agent()
    before = {key: value for key, value in vars(model).items()}
    names = [name for name, _ in model.named_modules()]
    fqns = [name for name, _ in model.named_parameters()]
    ours = compiled(model)
    assert ours is model and isinstance(model, (Agent, fxshard.FxshardModule))
    assert type(model).__name__ == "FxshardAgent"
    assert vars(model).keys() - before.keys() == {"_fxshard"}
    assert all(vars(model)[key] is value for key, value in before.items())
    assert (model.config, model.world, model.units) == ({"mine": 1}, "earth", 12)
    assert (model.add(1), model.reset(), model.kind) == (13, "reset", "one")
    assert [name for name, _ in model.named_modules()] == names
    assert [name for name, _ in model.named_parameters()] == fqns == [*model.state_dict()]
    assert type(model.block) is nn.Sequential and len(model.block) == 4
    x, _ = tokens(rank, world_size)
    assert_close(model(x), agent()(x))
    assert model.training_step(x).grad_fn.name() == "MeanBackward0"
    assert len(model._fxshard.variants) == 1  # self(...) ran the same program


@EVERYWHERE
def test_the_object_stays_the_users(ranks: Any, where: str) -> None:
    run(ranks, where, same_object)


def test_a_sequential_stays_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    ours = fxshard.compile(model, world_size=2)
    assert ours is model and len(ours) == 2 and ours[1] is model[1]
    assert [type(m) for m in ours] == [nn.Linear, nn.ReLU]


def test_what_was_no_module_gets_one() -> None:
    model = nn.Linear(4, 2)
    exported = torch.export.export(model, (torch.ones(3, 4),))
    ours = fxshard.compile(exported, world_size=2)
    assert isinstance(ours, fxshard.FxshardModule)
    assert_close(ours(torch.ones(3, 4)), model(torch.ones(3, 4)))


def copies(rank: int, world_size: int) -> None:
    ours, (x, _) = compiled(agent()), tokens(rank, world_size)
    ours(x)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is type(ours) and twin.config == ours.config
        assert_close(twin(x), ours(x))
        assert_close(twin.value(x), ours.value(x))
        assert twin._fxshard is not ours._fxshard
        with torch.no_grad():
            for param in twin.parameters():
                param.zero_()
        assert not torch.equal(full(twin.scale), full(ours.scale))
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    plain = agent()
    plain.load_state_dict({k: full(v) for k, v in torch.load(file, weights_only=True).items()})
    assert_close(plain(x), ours(x))


@EVERYWHERE
def test_copies(ranks: Any, where: str) -> None:
    run(ranks, where, copies)


def shallow(rank: int, world_size: int) -> None:
    """A refused copy.copy leaves what runs as it was."""
    x, _ = tokens(rank, world_size)
    options: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
    for made_by in ("compile", "shard"):
        ours = getattr(fxshard, made_by)(agent(), **options)
        loss = ours(x).sum()
        with pytest.raises(StepError, match=r"copy\.copy of a .*Agent.* copy\.deepcopy"):
            copy.copy(ours)
        loss.backward()
        eager = agent()
        eager(tokens(rank, world_size)[1]).sum().div(world_size).backward()
        assert_close(full(ours.scale.grad), eager.scale.grad)
    with pytest.raises(StepError, match=r"copy\.copy of a Linear that fxshard\.shard sharded"):
        copy.copy(ours.head)


@EVERYWHERE
def test_a_shallow_copy_is_refused(ranks: Any, where: str) -> None:
    run(ranks, where, shallow)


def test_hooks_on_the_model_run_on_every_call_also_those_from_before() -> None:
    model, seen = nn.Linear(4, 2), []
    model.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    ours = fxshard.compile(model, world_size=2)
    ours.register_forward_hook(lambda module, args, out: 2 * out)
    x = torch.ones(3, 4)
    for _ in range(2):
        assert_close(ours(x), 2 * nn.functional.linear(x, model.weight, model.bias))
    assert seen == ["pre", "pre"] and len(ours._fxshard.variants) == 1


def test_weight_norm_on_the_model_itself_is_part_of_the_program() -> None:
    torch.manual_seed(0)
    with pytest.warns(FutureWarning):
        model = torch.nn.utils.weight_norm(nn.Linear(4, 2))
    eager = nn.Linear(4, 2)
    ours = fxshard.compile(model, world_size=2)
    for _ in range(2):
        x = torch.randn(3, 4)
        with torch.no_grad():
            v = full(ours.weight_v)
            eager.weight.copy_(full(ours.weight_g) * v / v.norm(dim=1, keepdim=True))
            eager.bias.copy_(full(ours.bias))
            assert_close(ours(x), eager(x))
            ours.weight_g.mul_(2)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["parameter", "buffer", "submodule", "attribute", "class"])
def test_a_name_of_ours_is_refused(place: str) -> None:
    class Named(nn.Linear):
        pass

    if place == "class":
        Named.memory = property(lambda self: 1)  # type: ignore[attr-defined]
    model = Named(4, 2)
    if place == "parameter":
        model.memory = nn.Parameter(torch.ones(2))
    elif place == "buffer":
        model.register_buffer("memory", torch.ones(2))
    elif place == "submodule":
        model.memory = nn.Linear(2, 2)
    elif place == "attribute":
        model.memory = 3
    with pytest.raises(ConfigError, match=rf"{place}.*'memory'.*Rename"):
        fxshard.compile(model, world_size=2)
    assert type(model) is Named and "_fxshard" not in vars(model)


def test_public_names_are_few_and_written_down() -> None:
    from tests.end_to_end.test_coming_from_fsdp import DOCUMENT

    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text or f"{name}(" in text for name in public_names())
    taken = {"config", "value", "add", "world", "units", "kind", "reset", "module", "original"}
    assert not taken & set(public_names())


def test_a_model_is_compiled_once() -> None:
    ours = fxshard.compile(agent(), world_size=2)
    with pytest.raises(ConfigError, match="sharded already"):
        fxshard.compile(ours, world_size=2)
    with pytest.raises(ConfigError, match=r"submodule '0' was given to fxshard\.compile before"):
        fxshard.compile(nn.Sequential(ours, nn.Linear(3, 3)), world_size=2)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.flag = nn.Linear(4, 4), True
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "options",
    [
        {"args": (torch.ones(2, 4),)},
        {"units": ["nothing"]},
        {"optimizer": torch.optim.LBFGS, "optimizer_in_backward": True},
        {"world_size": 0},
        {"strategy": "hybrid_shard"},
    ],
    ids=str,
)
def test_a_failed_compile_leaves_the_model_as_it_was(options: dict[str, Any]) -> None:
    model = Fails().eval()
    before = [(m, type(m), dict(vars(m)), dict(m._parameters)) for m in model.modules()]
    with pytest.raises(fxshard.errors.FxshardError):
        fxshard.compile(model, **{"world_size": 2} | options)
    for module, kind, attributes, parameters in before:
        assert type(module) is kind and vars(module) == attributes
        assert all(module._parameters[name] is p for name, p in parameters.items())
        assert not module._state_dict_hooks and not module._load_state_dict_pre_hooks
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.a(torch.ones(2, 4)).sum().backward()
    optimizer.step()


# -- outside of the program ------------------------------------------------------------------------


def methods(rank: int, world_size: int, made_by: str) -> None:
    options: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
    ours, eager = getattr(fxshard, made_by)(agent(), **options), agent()
    mine, everyone = tokens(rank, world_size)
    for name in ("value", "recurrent", "__call__"):
        for model in (ours, eager):
            model.zero_grad()
        assert_close(getattr(ours, name)(mine), getattr(eager, name)(mine))
        getattr(ours, name)(mine).square().mean().backward()
        getattr(eager, name)(everyone).square().mean().backward()
        for (fqn, param), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
            assert (param.grad is None) == (theirs.grad is None), (name, fqn)
            if theirs.grad is not None:
                assert_close(full(param.grad), theirs.grad, msg=f"{name} {fqn}")
        with torch.no_grad():
            assert_close(getattr(ours, name)(mine), getattr(eager, name)(mine))
    hidden = torch.ones(2, 5)
    assert_close(ours.block(hidden), eager.block(hidden))
    with torch.inference_mode():
        assert_close(ours.block(hidden), eager.block(hidden))
        assert_close(hidden @ ours.head.weight.t(), hidden @ eager.head.weight.t())
    edge = torch.autograd.graph.get_gradient_edge(ours.scale)
    assert edge.node.name() == "torch::autograd::AccumulateGrad"
    penalty = sum(p.pow(2).sum() for p in ours.parameters())
    assert_close(penalty, sum(p.pow(2).sum() for p in eager.parameters()))
    with torch.no_grad():
        for model in (ours, eager):
            model.scale.copy_(torch.arange(5.0))
            model.head.weight.mul_(2)
    assert_close(ours(mine), eager(mine))
    assert_close(ours.head(hidden), eager.head(hidden))


@EVERYWHERE
@pytest.mark.parametrize("made_by", ["compile", "shard"])
def test_methods_and_submodules_read_whole_parameters(ranks: Any, where: str, made_by: str) -> None:
    run(ranks, where, methods, made_by)


def optimizers(rank: int, world_size: int) -> None:
    ours = compiled(agent())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    ours(tokens(rank, world_size)[0]).sum().backward()
    optimizer.step()
    for state in optimizer.state_dict()["state"].values():
        assert type(state["exp_avg"]) in (DTensor, Tensor)


@EVERYWHERE
def test_optimizer_states_are_plain_dtensors(ranks: Any, where: str) -> None:
    run(ranks, where, optimizers)


def mixed(rank: int, world_size: int) -> None:
    """Outside of the program the dtype is the stored one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    ours = compiled(agent(), mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x, _ = tokens(rank, world_size)
    assert ours(x).dtype is torch.bfloat16
    assert_close(ours.value(x), agent().value(x))


@EVERYWHERE
def test_outside_of_the_program_the_dtype_is_the_stored_one(ranks: Any, where: str) -> None:
    run(ranks, where, mixed)


@pytest.mark.parametrize(
    "change",
    [lambda w: w.data.t(), lambda w: w.data[:1].expand(5, 5), lambda w: w.data.flip(0)],
    ids=["transposed", "one row", "flipped"],
)
@pytest.mark.parametrize("early", [True, False])
def test_data_that_lies_in_the_parameter_itself(early: bool, change: Callable[..., Any]) -> None:
    eager, x = nn.Linear(5, 5), torch.randn(3, 5)
    ours = compiled(copy.deepcopy(eager))
    if not early:
        ours(x)
    for model in (eager, ours):
        model.weight.data = change(model.weight)
        model(x).square().sum().backward()
    assert_close(ours(x), eager(x))
    assert_close(ours.weight.grad, eager.weight.grad)
    ours.weight.data = ours.weight.data[:2]
    with pytest.raises(StepError, match="'weight' is another kind of tensor"):
        ours(x)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def reduced_otherwise(rank: int, world_size: int) -> None:
    """What the options do with gradients would not be done with those of other readers."""
    x, _ = tokens(rank, world_size)
    stepped = compiled(agent(), optimizer=sgd, optimizer_in_backward=True)
    hooked = compiled(agent())
    hooked.register_comm_hook(None, lambda state, *tensors: None)
    for ours, said in ((stepped, "optimizer_in_backward"), (hooked, "register_comm_hook")):
        with pytest.raises(StepError, match=rf"outside of the model's forward.*{said}.*no_grad"):
            ours.value(x).sum().backward()
        assert all(p.grad is None for p in ours.parameters())
        with torch.no_grad():
            assert_close(ours.value(x), agent().value(x))


def test_gradients_that_would_go_another_way_are_refused(ranks: Any) -> None:
    ranks(2).run(reduced_otherwise)


def test_in_one_process_the_next_call_refuses_them() -> None:
    ours = compiled(agent(), optimizer=sgd, optimizer_in_backward=True)
    x, _ = tokens(0, 1)
    ours(x).sum().backward()
    ours.value(x).sum().backward()
    with pytest.raises(StepError, match=r"'scale' has a gradient from outside of .*forward"):
        ours(x)
    ours.zero_grad()
    ours(x).sum().backward()


def gradients_of_inputs(rank: int, world_size: int) -> None:
    """``torch.autograd.grad`` leaves parameters alone, in eager; so must a program, or refuse."""
    ours, x = compiled(nn.Linear(3, 2)), torch.ones(1, 3, requires_grad=True)
    (found,) = torch.autograd.grad(ours(x).sum(), x)
    assert found.shape == x.shape and all(p.grad is None for p in ours.parameters())
    stepped = compiled(nn.Linear(3, 2), optimizer=sgd, optimizer_in_backward=True)
    before = [full(p.detach()) for p in stepped.parameters()]
    with ours.no_sync():
        for model in (ours, stepped):
            for backward in (
                lambda loss: torch.autograd.grad(loss, x),
                lambda loss: loss.backward(inputs=[x]),
            ):
                with pytest.raises(StepError, match=r"leaves the gradients of parameters alone"):
                    backward(model(x).sum())
        ours(x).sum().backward()
    ours(x).sum().backward()
    assert_close([full(p.detach()) for p in stepped.parameters()], before)
    assert_close(full(ours.weight.grad), torch.full((2, 3), 2.0))
    stepped(x).sum().backward()
    assert not torch.equal(full(stepped.bias.detach()), before[1])


@EVERYWHERE
def test_gradients_of_inputs_alone(ranks: Any, where: str) -> None:
    run(ranks, where, gradients_of_inputs)


def wrapped(rank: int, world_size: int) -> None:
    for ours in (compiled(agent()), fxshard.shard(agent())):
        with pytest.raises(ConfigError, match="Leave DistributedDataParallel out"):
            DistributedDataParallel(ours)


def test_ddp_around_it_is_refused(ranks: Any) -> None:
    ranks(2).run(wrapped)


# -- changed after compile -------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


def changes(rank: int, world_size: int) -> None:
    ours, eager, x = compiled(net()).eval(), net().eval(), torch.randn(4, 8)
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model[1] = nn.Tanh()
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model[1] = nn.Softplus(beta=2)
        model.train()
        model[2].p = 0.0
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model[1].beta = 3.0
    assert_close(ours(x), eager(x))
    count = len(ours._fxshard.variants)
    for model in (ours, eager):
        model[1].beta, model[1].note = 2, "nobody reads this"
    assert_close(ours(x), eager(x))
    assert len(ours._fxshard.variants) == count  # that of before serves

    ours[3] = nn.Linear(8, 2)
    with pytest.raises(StepError, match=r"'3\.\w+' was put into the model"):
        ours(x)


@EVERYWHERE
def test_what_changes_after_the_first_call_is_followed_or_refused(ranks: Any, where: str) -> None:
    run(ranks, where, changes)


def replaced(rank: int, world_size: int) -> None:
    x = torch.ones(3, 8)
    ours = compiled(nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(x)
    ours.weight = nn.Parameter(torch.ones_like(ours.weight) * 2)  # a DTensor on ranks
    assert_close(ours(x), torch.full((3, 4), 16.0))
    assert_close(full(ours.weight), torch.full((4, 8), 2.0))
    ours(x).sum().backward()
    with pytest.raises(StepError, match="SGD holds parameter 'weight' as it was before"):
        optimizer.step()
    ours.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(StepError, match="'extra' was put into the model"):
        ours(x)
    del ours.extra
    assert_close(ours(x), torch.full((3, 4), 16.0))
    ours.weight = nn.Parameter(torch.ones(5, 8))
    with pytest.raises(StepError, match="another kind of tensor"):
        ours(x)


@EVERYWHERE
def test_a_replaced_parameter(ranks: Any, where: str) -> None:
    run(ranks, where, replaced)


def early(rank: int, world_size: int) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    ours = compiled(model)
    ours(torch.ones(3, 8)).sum().backward()
    with pytest.raises(StepError, match=r"AdamW holds parameter 'weight'.*after fxshard\.compile"):
        optimizer.step()
    torch.optim.AdamW(ours.parameters()).step()


@EVERYWHERE
def test_an_optimizer_made_before_compile(ranks: Any, where: str) -> None:
    run(ranks, where, early)


class Configured(nn.Module):
    """Reads an object's attribute, a list and a tensor that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.config = type("Config", (), {})()
        self.config.double, self.order, self.shift = False, [1.0, 2.0], torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.order[-1] + self.shift
        return 2 * x if self.config.double else x


@pytest.mark.parametrize("args", [None, (torch.ones(2, 4),)], ids=["at a call", "with args"])
def test_attributes_that_forward_reads(args: Any) -> None:
    torch.manual_seed(0)
    eager = Configured()
    ours = compiled(copy.deepcopy(eager), args=args)
    x = torch.ones(2, 4)
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model.config.double = True
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model.order.append(3.0)
    assert_close(ours(x), eager(x))
    for model in (ours, eager):
        model.shift = torch.zeros(4)
    assert_close(ours(x), eager(x))
    assert len(ours._fxshard.variants) == 4


class Holds(nn.Module):
    """A linear layer, and what `function` makes of its output."""

    factor = 1.0
    table: ClassVar[list[float]] = [1.0]

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(4, 4), function
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.a(x))

    def helped(self, x: Tensor) -> Tensor:
        """A method that may be exchanged."""
        return x


class Times:
    """An object that is called."""

    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.k


@dataclasses.dataclass(slots=True)
class Sizes:
    k: float = 1.0


class Loop:
    def __init__(self) -> None:
        self.scale, self.steps = 1.0, 0


class Trainer:
    """Counts its calls, as trainers do that a module refers to."""

    def __init__(self) -> None:
        self.base, self.steps, self.loop, self.log = 1.5, 0, Loop(), [0.0]

    @property
    def rate(self) -> float:
        return self.base * 2

    def count(self) -> None:
        self.steps += 1
        self.loop.steps += 1
        self.log.append(self.steps)


class Finds:
    """Its attributes are items of a dict."""

    def __init__(self, **held: float) -> None:
        self.held = held

    def __getattr__(self, name: str) -> float:
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


def space(**names: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**names)


def exchange_config(model: Any) -> None:
    model.cfg.sub = space(k=1.0)
    model(torch.ones(2, 4))
    model.cfg.sub.k = 3.0


CHANGES: dict[str, tuple[Callable[[], Holds], Callable[[Any], Any]]] = {
    "of the class, shadowed": (
        lambda: Holds(lambda m, y: y * m.factor),
        lambda m: setattr(m, "factor", 3.0),
    ),
    "a list of the class, shadowed": (
        lambda: Holds(lambda m, y: y * m.table[0]),
        lambda m: setattr(m, "table", [3.0]),
    ),
    "a default": (
        lambda: Holds(lambda m, y: y * getattr(m, "k", 1.0)),
        lambda m: setattr(m, "k", 3.0),
    ),
    "none yet": (
        lambda: Holds(lambda m, y: y * 3 if hasattr(m, "k") else y),
        lambda m: setattr(m, "k", None),
    ),
    "no buffer yet": (
        lambda: Holds(lambda m, y: y * getattr(m, "k", 1.0)),
        lambda m: m.register_buffer("k", torch.tensor(3.0)),
    ),
    "gone": (
        lambda: Holds(lambda m, y: y * getattr(m, "k", 1.0), k=2.0),
        lambda m: delattr(m, "k"),
    ),
    "an int, then the same as a float": (
        lambda: Holds(lambda m, y: y * (torch.full((4,), 2**24 + 1) * m.k - 2**24), k=1),
        lambda m: setattr(m, "k", 1.0),
    ),
    "a method": (
        lambda: Holds(lambda m, y: m.helped(y)),
        lambda m: setattr(m, "helped", lambda y: y * 3),
    ),
    "forward of a layer": (
        lambda: Holds(lambda m, y: y),
        lambda m: setattr(m.a, "forward", lambda x: x * 3),
    ),
    "a nested configuration": (
        lambda: Holds(lambda m, y: y * m.cfg.sub.k, cfg=space(sub=space(k=1.0))),
        lambda m: setattr(m.cfg.sub, "k", 3.0),
    ),
    "an exchanged configuration": (
        lambda: Holds(lambda m, y: y * m.cfg.sub.k, cfg=space(sub=space(k=1.0))),
        exchange_config,
    ),
    "a configuration in a dict": (
        lambda: Holds(lambda m, y: y * m.d["c"].k, d={"c": space(k=1.0)}),
        lambda m: setattr(m.d["c"], "k", 3.0),
    ),
    "a configuration with slots": (
        lambda: Holds(lambda m, y: y * m.sizes[0].k, sizes=(Sizes(),)),
        lambda m: setattr(m.sizes[0], "k", 3.0),
    ),
    "an object that is called": (
        lambda: Holds(lambda m, y: m.times(y), times=Times(1.0)),
        lambda m: setattr(m.times, "k", 3.0),
    ),
    "a list of lists": (
        lambda: Holds(lambda m, y: y * m.order[0][0], order=[[1.0], torch.ones(1)]),
        lambda m: m.order[0].append(m.order[0].pop() * 3),
    ),
    "a tensor in a list": (
        lambda: Holds(lambda m, y: y * m.order[0], order=[torch.tensor(1.0)]),
        lambda m: m.order.__setitem__(0, torch.tensor(3.0)),
    ),
    "a tensor in a deque": (
        lambda: Holds(lambda m, y: y * m.order[-1], order=deque([torch.tensor(1.0)])),
        lambda m: m.order.append(torch.tensor(3.0)),
    ),
    "a layer in a list": (
        lambda: Holds(lambda m, y: m.aside[0](y), aside=[nn.LeakyReLU(0.5)]),
        lambda m: setattr(m.aside[0], "negative_slope", 3.0),
    ),
    "an array": (
        lambda: Holds(lambda m, y: y * float(m.n[0]), n=np.ones(1)),
        lambda m: m.n.__setitem__(0, 3.0),
    ),
    "a large array": (
        lambda: Holds(lambda m, y: y * float(m.n[-1, 1]), n=np.ones((2, 200, 100)).T[..., 0]),
        lambda m: m.n.__setitem__((-1, 1), 3.0),
    ),
    "an array of objects": (
        lambda: Holds(lambda m, y: y * m.n[0].k, n=np.array([space(k=1.0)])),
        lambda m: setattr(m.n[0], "k", 3.0),
    ),
    "bytes": (
        lambda: Holds(lambda m, y: y * m.n[0], n=bytearray(b"1")),
        lambda m: m.n.__setitem__(0, 3),
    ),
    "an array of Python's": (
        lambda: Holds(lambda m, y: y * m.n[0], n=array.array("d", [1.0])),
        lambda m: m.n.__setitem__(0, 3.0),
    ),
    "what an object of an object holds": (
        lambda: Holds(lambda m, y: y * m.trainer.loop.scale, trainer=Trainer()),
        lambda m: setattr(m.trainer.loop, "scale", 3.0),
    ),
    "what a property reads": (
        lambda: Holds(lambda m, y: y * m.trainer.rate, trainer=Trainer()),
        lambda m: setattr(m.trainer, "base", 3.0),
    ),
    "what an object of a list holds": (
        lambda: Holds(lambda m, y: y * m.trainers["all"][0].base, trainers={"all": [Trainer()]}),
        lambda m: setattr(m.trainers["all"][0], "base", 3.0),
    ),
    "what an object may hold": (
        lambda: Holds(lambda m, y: y * getattr(m.trainer, "factor", 1.0), trainer=Trainer()),
        lambda m: setattr(m.trainer, "factor", 3.0),
    ),
    "all that an object holds": (
        lambda: Holds(lambda m, y: y * sum(vars(m.trainer.loop).values()), trainer=Trainer()),
        lambda m: setattr(m.trainer.loop, "more", 3.0),
    ),
    "what an object finds in another way": (
        lambda: Holds(lambda m, y: y * m.of.scale, of=Finds(scale=1.0)),
        lambda m: m.of.held.update(scale=3.0),
    ),
}


@pytest.mark.parametrize("args", [None, (torch.ones(2, 4),)], ids=["at a call", "with args"])
@pytest.mark.parametrize("what", CHANGES)
def test_attributes_that_are_changed_after_the_first_call(what: str, args: Any) -> None:
    build, change = CHANGES[what]
    torch.manual_seed(0)
    eager = build()
    ours, x = compiled(copy.deepcopy(eager), args=args), torch.randn(2, 4)
    assert_close(ours(x), eager(x))
    ours(x)
    assert len(ours._fxshard.variants) == 1
    before = eager(x)
    change(eager)
    change(ours)
    assert not torch.equal(eager(x), before)
    assert_close(ours(x), eager(x))
    count = len(ours._fxshard.variants)
    ours(x)
    assert len(ours._fxshard.variants) == count


def test_attributes_that_are_given_equal_values_keep_their_program() -> None:
    def function(m: Any, y: Tensor) -> Tensor:
        return y * m.k * m.order[0] * m.cfg.k * float(m.n[0]) * m.low

    made = {"k": 1.5, "order": [2.0, [1.5]], "cfg": space(k=2.5), "n": np.ones(3), "low": 2.0}
    ours = compiled(Holds(function, **made, twice=None))
    x = torch.randn(2, 4)
    ours(x)
    ours.k, ours.order, ours.cfg.k = float("1.5"), [2.0, [float("1.5")]], float("2.5")
    ours.n, ours.low = np.ones(3), np.float64(2.0)
    ours(x)
    first = len(ours._fxshard.variants)  # np.float64 is another kind of number
    ours.low = np.float64("2.0")
    ours(x)
    assert len(ours._fxshard.variants) == first == 2
    ours.low = 2.0
    ours.order[1][0] = 7.0
    ours(x)
    ours.order[1][0] = 1.5
    ours(x)
    assert len(ours._fxshard.variants) == 3


def test_what_forward_does_not_read_of_an_object_may_change() -> None:
    """A trainer counts steps. It is as it was once the model is traced, and may be copied."""

    def function(m: Any, y: Tensor) -> Tensor:
        return y * m.trainer.rate * m.trainer.loop.scale

    eager = Holds(function, trainer=Trainer())
    ours, x = compiled(copy.deepcopy(eager)), torch.randn(2, 4)
    for _ in range(12):
        assert_close(ours(x), eager(x))
        ours.trainer.count()
    assert len(ours._fxshard.variants) == 1
    assert Trainer.__getattribute__ is Loop.__getattribute__ is object.__getattribute__
    assert copy.deepcopy(ours.trainer).steps == 12


# -- methods on whole parameters -------------------------------------------------------------------


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, **heads)).eval()


def of_transformers(rank: int, world_size: int, folder: str) -> None:
    from transformers import LlamaForCausalLM

    eager, ours = tiny_llama(), compiled(tiny_llama())
    assert ours.config.model_type == "llama" and ours.dtype is torch.float32
    ids = torch.arange(5 + rank)[None]  # ranks generate other numbers of tokens
    options = {"max_new_tokens": 2 + rank, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    assert torch.equal(ours.get_input_embeddings()(ids), eager.get_input_embeddings()(ids))
    ours.save_pretrained(folder)
    if rank == 0:
        loaded = LlamaForCausalLM.from_pretrained(folder)
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        for mine, theirs in zip(loaded.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    names = [name for name, _ in ours.named_parameters()]
    assert names == [name for name, _ in eager.named_parameters()]
    assert all(ours.get_parameter(name) is not None for name in names)  # sharded again


@EVERYWHERE
def test_a_model_of_transformers(ranks: Any, where: str, tmp_path: Any) -> None:
    run(ranks, where, of_transformers, str(tmp_path))


def registered(rank: int, world_size: int) -> None:
    ours, eager = compiled(agent()), agent()
    fxshard.register_fsdp_forward_method(ours, "value")
    fxshard.register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # not compiled: nothing
    mine, everyone = tokens(rank, world_size)
    assert_close(ours.value(mine), eager.value(mine))
    ours.value(mine).mean().backward()
    eager.value(everyone).mean().backward()
    for (fqn, param), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(full(param.grad), theirs.grad, msg=fqn)
    twin = pickle.loads(pickle.dumps(ours))
    with torch.no_grad():
        assert_close(twin.value(mine), eager.value(mine))
    assert_close(ours(mine), eager(mine))
    with pytest.raises(ConfigError, match="no method 'nothing'"):
        fxshard.register_fsdp_forward_method(ours, "nothing")


@EVERYWHERE
def test_a_registered_method(ranks: Any, where: str) -> None:
    run(ranks, where, registered)


class Arms(nn.Module):
    """Methods that do to the object what others do from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)

    def arm(self) -> Any:
        return self.register_forward_hook(lambda module, args, out: out * 0)

    def disarm(self, handle: Any) -> None:
        handle.remove()

    def exchange(self) -> None:
        inner = self.forward
        self.forward = lambda x: inner(x) + 1


def arms() -> Arms:
    torch.manual_seed(0)
    return Arms()


def armed(rank: int, world_size: int) -> None:
    ours, eager, x = compiled(arms()), arms(), torch.ones(2, 4)
    for name in ("arm", "disarm", "exchange"):
        fxshard.register_fsdp_forward_method(ours, name)
    calls: list[int] = []
    ours.register_forward_hook(lambda module, args, out: calls.append(1))
    handle, other = ours.arm(), ours.arm()
    assert len(ours._forward_hooks) == 3 and ours(x).eq(0).all() and calls == [1]
    handle.remove()
    assert ours(x).eq(0).all()
    ours.disarm(other)
    assert len(ours._forward_hooks) == 1
    assert_close(ours(x), eager(x))
    ours.exchange()
    eager.exchange()
    with torch.no_grad():
        assert_close(ours(x), eager(x))
    assert calls == [1] * 4
    del ours.forward, eager.forward
    assert_close(ours(x), eager(x))


@EVERYWHERE
def test_what_a_registered_method_does_to_the_object_stays(ranks: Any, where: str) -> None:
    run(ranks, where, armed)
