"""Capture: any way to hold a model gives one program; what cannot be traced is refused by name."""

import collections
import copy
import dataclasses
import enum
import inspect
import logging
from collections import namedtuple
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import fxshard
from fxshard import verify
from fxshard.capture import aliasing, trace
from fxshard.errors import CaptureError, VerifyError
from fxshard.ir import dump, tags
from fxshard.ir.program import Program
from fxshard.ir.units import find_units
from fxshard.memory.category import Category
from fxshard.verify import certificate
from tests import fsdp2
from tests.eager import Net, assert_trains_like_eager, batch, pair
from tests.zoo import MODELS, models

aten = torch.ops.aten


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build()


# -- one program, however the model is held -------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_real_meta_and_fake_give_one_text(name: str) -> None:
    case = MODELS[name]
    call = case.batch(0, 0)
    with torch.device("meta"):
        on_meta = case.build()
    meta_call = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), call)
    mode = FakeTensorMode()
    with mode:
        fake = case.build()
    fake_call = pytree.tree_map_only(Tensor, mode.from_tensor, call)

    def text(model: nn.Module, call: Any) -> str:
        return dump.text(fxshard.plan(model, *call, world_size=2, units=case.units).program)

    want = text(case.build(), call)
    assert text(on_meta, meta_call) == want
    assert text(fake, fake_call) == want


EXPORTS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "ExportedProgram": lambda model, call: torch.export.export(model, *call),
    "exported module": lambda model, call: torch.export.export(model, *call).module(),
    "symbolic_trace": lambda model, call: fx.symbolic_trace(model),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("transformer", "ExportedProgram"),
        *(pytest.param("transformer", kind, marks=pytest.mark.slow) for kind in list(EXPORTS)[1:]),
        pytest.param("llama", "ExportedProgram", marks=pytest.mark.slow),
    ],
)
def test_exported_models_are_accepted(name: str, kind: str) -> None:
    case, call = MODELS[name], MODELS[name].batch(0, 0)
    eager = built(name)
    model = EXPORTS[kind](copy.deepcopy(eager), call)
    plan, own = (fxshard.plan(m, *call, world_size=2) for m in (model, eager))
    assert [unit.fqn for unit in plan.units] == [unit.fqn for unit in own.units]
    holders = {fqn.rpartition(".")[0] for fqn in own.program.params}
    assert holders <= modules(plan.program) <= {fqn for fqn, _ in eager.named_modules()}
    assert fxshard.validate(model, *call, world_size=2, steps=1).max_abs_difference == 0
    compiled = fxshard.compile(model, world_size=2)
    theirs = fsdp2.run_steps(eager, case, 3)
    fsdp2.assert_close(fsdp2.run_steps(compiled, case, 3), theirs, rtol=1e-6)


def modules(program: Program) -> set[str]:
    return {tags.get(n).module for n in program.graph.nodes if n.op == "call_function"}


# -- every node belongs to the module that a human would name -------------------------------------


@pytest.fixture(scope="module")
def captured() -> Callable[[str], Program]:
    """The program of a zoo model, before any pass."""
    programs: dict[str, Program] = {}

    def get(name: str) -> Program:
        if name not in programs:
            model, (args, kwargs) = with_loss(name), MODELS[name].batch(0, 0)
            programs[name] = trace.capture(
                model, args, kwargs, units=find_units(model), world_size=2, training=True
            )
        return programs[name]

    return get


class WithLoss(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model, self.loss = built(name), MODELS[name].loss

    def forward(self, *args: Any) -> Tensor:
        return self.loss(self.model(*args))


def with_loss(name: str) -> nn.Module:
    return built(name) if name == "llama" else WithLoss(name)


NAMED = ("transformer", "llama")


@pytest.mark.parametrize("name", MODELS)
def test_every_node_is_tagged(captured: Callable[[str], Program], name: str) -> None:
    program = captured(name)
    verify.tagged(program)
    assert modules(program) <= {fqn for fqn, _ in with_loss(name).named_modules()}


@pytest.mark.parametrize("name", NAMED)
def test_parameters_are_read_by_the_module_that_holds_them(
    captured: Callable[[str], Program], name: str
) -> None:
    program = captured(name)
    for node in program.graph.find_nodes(op="placeholder"):
        if tags.get(node).role == "param":
            fqn = tags.get(node).fqn or ""
            owner = fqn.rpartition(".")[0]
            forward = [user for user in node.users if tags.get(user).phase == "forward"]
            assert {tags.get(user).module for user in forward} == {owner}, fqn


@pytest.mark.parametrize("name", NAMED)
def test_gradients_are_made_by_the_module_that_holds_the_parameter(
    captured: Callable[[str], Program], name: str
) -> None:
    program = captured(name)
    grads = {r.name: v for v, r in zip(program.values, program.results, strict=True)}
    for fqn in program.params:
        chain = [grads[fqn]]
        while tags.aliases_input(chain[-1]):
            chain.append(chain[-1].all_input_nodes[0])
        owner = fqn.rpartition(".")[0]
        assert {tags.get(node).module for node in chain} == {owner}, fqn


@pytest.mark.parametrize("name", NAMED)
def test_backward_visits_the_layers_in_turn(captured: Callable[[str], Program], name: str) -> None:
    program = captured(name)
    parts = [tags.get(node).module.split(".") for node in program.phase("backward")]
    layers = [int(names[names.index("layers") + 1]) for names in parts if "layers" in names]
    assert set(layers) == {0, 1, 2}
    assert layers == sorted(layers, reverse=True)


def where(program: Program, phase: tags.Phase, target: Any) -> list[str]:
    """Modules of the operators `target` of a phase, in order."""
    return [tags.get(n).module for n in program.phase(phase) if n.target is target]


def test_operators_of_the_transformer(captured: Callable[[str], Program]) -> None:
    program = captured("transformer")
    layers = [f"model.layers.{i}" for i in range(3)]
    residuals = [layer for layer in layers for _ in range(2)]
    assert where(program, "forward", aten.add.Tensor) == ["model", *residuals]
    assert where(program, "forward", aten.gelu.default) == [f"{layer}.mlp" for layer in layers]
    back = layers[::-1]
    assert where(program, "backward", aten.gelu_backward.default) == [f"{b}.mlp" for b in back]
    assert where(program, "backward", aten.native_layer_norm_backward.default) == [
        "model.norm",
        *(f"{layer}.{norm}" for layer in back for norm in ("norm2", "norm1")),
    ]
    # A sum of gradients has no module of its own: it is where the last of them was made.
    assert where(program, "backward", aten.add.Tensor) == [
        f"{layer}.{norm}" for layer in back for norm in ("norm2", "norm1")
    ]
    assert where(program, "backward", aten.embedding_dense_backward.default) == ["model.embed"]
    assert where(program, "backward", aten.slice_backward.default) == ["model"]
    for loss in (aten.nll_loss_backward.default, aten._log_softmax_backward_data.default):
        assert where(program, "backward", loss) == [""]


def test_operators_of_llama(captured: Callable[[str], Program]) -> None:
    program = captured("llama")
    layers = [f"model.layers.{i}" for i in range(3)]
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    projections += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    want = [f"{layer}.{name}" for layer in layers for name in projections]
    assert where(program, "forward", aten.mm.default) == [*want, "lm_head"]
    back = where(program, "backward", aten.mm.default)
    assert {name: back.count(name) for name in back} == {name: 2 for name in [*want, "lm_head"]}
    assert where(program, "forward", aten.silu.default) == [f"{b}.mlp.act_fn" for b in layers]
    assert where(program, "backward", aten.silu_backward.default) == [
        f"{b}.mlp.act_fn" for b in layers[::-1]
    ]
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    assert where(program, "forward", attention.default) == [f"{b}.self_attn" for b in layers]
    residuals = [
        tags.get(node).module
        for node in program.phase("forward")
        if node.target is aten.add.Tensor and tags.get(node).module in layers
    ]
    assert residuals == [layer for layer in layers for _ in range(2)]
    assert set(where(program, "forward", aten.cos.default)) == {"model.rotary_emb"}
    for loss in (aten.nll_loss_backward.default, aten._log_softmax_backward_data.default):
        assert where(program, "backward", loss) == [""]


# -- the user's model afterwards ------------------------------------------------------------------


def picture(model: nn.Module) -> Any:
    """What must not change: every attribute by identity, dictionaries by content too."""
    found = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            content = list(map(id, value.values())) if isinstance(value, dict) else None
            found[name, key] = (id(value), list(value) if content is not None else None, content)
    hooks = nn.modules.module
    counts = (len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks))
    return found, counts, torch.compiler.is_compiling(), torch.is_grad_enabled()


def raises(net: Net, x: Tensor) -> Tensor:
    net.leftover = net.a(x)
    net.seen = net.seen + 1
    net.train(False)
    net.b.register_forward_hook(lambda module, args, output: output)
    return net.b(x)[0].item()


@pytest.mark.parametrize("name", MODELS)
def test_plan_leaves_the_model_as_it_was(name: str) -> None:
    model, call = built(name), MODELS[name].batch(0, 0)
    values = copy.deepcopy(model.state_dict())
    before = picture(model)
    fxshard.plan(model, *call, world_size=2)
    assert picture(model) == before
    assert_close(model.state_dict(), values, rtol=0, atol=0)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda model, x: fxshard.plan(model, (x,), world_size=2),
        lambda model, x: fxshard.compile(model, world_size=2, args=(x,)),
        lambda model, x: fxshard.validate(model, (x,), world_size=2),
    ],
    ids=["plan", "compile", "validate"],
)
def test_a_failed_capture_leaves_the_model_as_it_was(attempt: Callable[..., Any]) -> None:
    model = Net(raises)
    before = picture(model)
    with pytest.raises(CaptureError, match="item"):
        attempt(model, batch())
    assert picture(model) == before


def test_what_forward_assigns_is_undone_and_told(caplog: pytest.LogCaptureFixture) -> None:
    def assigns(net: Net, x: Tensor) -> Tensor:
        net.hidden = net.a(x)
        return net.hidden.sum()

    model = Net(assigns)
    before = picture(model)
    with caplog.at_level(logging.WARNING, "fxshard"):
        fxshard.plan(model, (batch(),), world_size=2)
    assert picture(model) == before
    assert "forward of Net assigns self.hidden" in caplog.text


@dataclasses.dataclass(slots=True)
class Slots:
    last: Any = None


class Journal:
    """An object of the user's; its class keeps a journal too."""

    pages: ClassVar[list[Any]] = []
    last: Any = None

    def __init__(self) -> None:
        self.own: dict[str, list[Any]] = {}


EVERYWHERE: list[Any] = []


def remembers_everywhere(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.nested["seen"].append(y.detach())
    net.window.append({"y": y.detach()})
    net.ids.add(y.detach())
    net.slots.last = y.detach()
    net.journal.own.setdefault("y", []).append(y.detach())
    net.aside[0].last = y.detach()
    Journal.last = y.detach()
    Journal.pages.append(y.detach())
    EVERYWHERE.append([y.detach()])
    return y


def remembering(function: Callable[..., Tensor]) -> Any:
    model: Any = Net(function)
    model.nested, model.window = {"seen": []}, collections.deque([1], maxlen=2)
    model.ids, model.slots, model.journal = set(), Slots(), Journal()
    model.aside = [nn.Identity()]
    model.aside[0].last = None
    return model


def remembered(model: Any) -> Any:
    held = [model.nested, model.window, model.ids, model.slots, vars(model.journal)]
    return copy.deepcopy([*held, model.aside[0].last, Journal.last, Journal.pages, EVERYWHERE])


def test_what_forward_leaves_in_collections_and_objects_is_undone_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = remembering(remembers_everywhere)
    before = remembered(model)
    with caplog.at_level(logging.WARNING, "fxshard"):
        compiled = fxshard.compile(model, world_size=2)
        compiled(batch())
    assert remembered(compiled) == before
    for name in ("nested", "window", "ids", "slots", "journal", "aside"):
        assert f"forward of Net changes what self.{name} holds" in caplog.text


def test_a_failed_capture_leaves_collections_and_objects_as_they_were() -> None:
    def fails(net: Any, x: Tensor) -> Tensor:
        remembers_everywhere(net, x)
        net.window.append(2)
        net.nested["calls"] = 1
        raise ValueError("no")

    model = remembering(fails)
    before = remembered(model)
    with pytest.raises(CaptureError, match="no"):
        fxshard.compile(model, args=(batch(),), world_size=2)
    assert remembered(model) == before


def test_collections_that_forward_only_reads_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Once(dict):  # type: ignore[type-arg]
        def update(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("an update")

    model: Any = Net(lambda net, x: net.a(x) * net.scales["two"])
    model.scales = Once(two=2)
    with caplog.at_level(logging.WARNING, "fxshard"):
        fxshard.plan(model, (batch(),), world_size=2)
    assert "changes what" not in caplog.text


# -- gradients ------------------------------------------------------------------------------------


def test_a_parameter_that_loses_its_gradient_is_named() -> None:
    def loses(net: Net, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # autograd sees nothing of it, nor is told so
            y = net.b(x)
        return (net.a(x) + y).sum()

    with pytest.raises(CaptureError, match=r"'b\.weight' reaches the loss.*requires_grad_"):
        fxshard.plan(Net(loses), (batch(),), world_size=2)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.a(x).sum(),
        lambda net, x: (net.a(x) + net.b(x).detach()).sum(),
        lambda net, x: (net.a(x) + net.b.weight.data.sum()).sum(),
        lambda net, x: (net.a(x) * (net.b(x) > 0)).sum(),
        lambda net, x: (net.a(x) + torch.ones_like(net.b(x))).sum(),
        lambda net, x: (net.a(x) + torch.no_grad()(net.b)(x)).sum(),
        lambda net, x: (net.a(x) + torch.no_grad()(net.b)(x).square()).sum(),
    ],
    ids=["not called", "detached", "data", "compared", "ones_like", "no_grad", "below no_grad"],
)
def test_an_unused_parameter_has_no_gradient(function: Callable[..., Tensor]) -> None:
    assert_trains_like_eager(lambda: Net(function), batch())
    _, ours = pair(lambda: Net(function))
    ours(batch()).backward()
    assert ours.b.weight.grad is None
    assert ours.a.weight.grad is not None


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def test_frozen_parameters_train_like_eager_and_are_not_reduced() -> None:
    assert_trains_like_eager(frozen, batch())
    program = fxshard.plan(frozen(), (batch(),), world_size=2).program
    reduced = [line for line in certificate.collectives(program) if "reduce_scatter" in line]
    assert len(reduced) == 1
    assert "2.weight" in reduced[0]
    assert "2.bias" not in reduced[0] and "0." not in reduced[0]


def test_freezing_and_unfreezing_between_steps() -> None:
    eager, ours = pair(frozen)
    for flag in (True, False, True):
        for model in (eager, ours):
            model.zero_grad()
            model.get_submodule("0").requires_grad_(flag)
            model(batch()).square().sum().backward()
        for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("everything_frozen", [False, True])
def test_an_input_that_wants_its_gradient_gets_it(everything_frozen: bool) -> None:
    eager, ours = pair(lambda: Net(lambda net, x, scale: (net.a(x) * scale).square().sum()))
    grads = []
    for model in (eager, ours):
        model.requires_grad_(not everything_frozen)
        x, scale = batch().requires_grad_(), torch.tensor(2.0, requires_grad=True)
        model(x * 3, scale).backward()
        grads.append((x.grad, scale.grad))
    assert_close(*grads)


def test_a_gradient_that_two_parameters_share() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return (x.sum() * (net.a.bias + net.b.bias)).sum()

    assert_trains_like_eager(lambda: Net(forward), batch())


class Tied(nn.Module):
    """One weight under three names; `use(model, x)` is the loss."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5, bias=False) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: (m.a.weight + m.b.weight + m.c.weight).sum() * x.sum(),
        lambda m, x: m.c(torch.tanh(m.a(torch.tanh(m.b(x))))).square().sum(),
        lambda m, x: m.b(torch.tanh(m.c(torch.tanh(m.a(x))))).square().sum(),
    ],
    ids=["one gradient", "backwards", "in turn"],
)
def test_a_weight_with_three_names_has_eagers_gradient_bitwise(use: Callable[..., Tensor]) -> None:
    eager, ours = pair(lambda: Tied(use))
    for model in (eager, ours):
        model(batch()).backward()
    assert torch.equal(ours.a.weight.grad, eager.a.weight.grad)


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(5, 6, sparse=True)
    with pytest.raises(CaptureError, match=r"gradient of 'weight' is sparse.*sparse=False"):
        fxshard.plan(model, (torch.tensor([1, 2]),), world_size=2)


# -- state besides parameters ---------------------------------------------------------------------


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.scale = torch.arange(6.0)  # a tensor, but no buffer

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale + torch.tensor([1.0, 2, 3, 4, 5, 6])).sum()


def test_a_tensor_that_is_no_buffer() -> None:
    assert_trains_like_eager(Holds, batch())


POSITIONS = torch.arange(6.0)


class Masked(nn.Module):
    """Multiplies by views of tensors that are no parameters and no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.scale = torch.linspace(0, 1, 48).reshape(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).tanh().chunk(2, dim=-1)
        return (a * self.scale[: x.shape[0], :3] + b * POSITIONS[1:4] + self.scale[0, 3:]).sum()


@pytest.mark.parametrize("dynamic", [None, {"batch": [("x", 0)]}])
def test_views_of_tensors_that_are_not_registered(dynamic: Any) -> None:
    assert_trains_like_eager(Masked, batch())
    plan = fxshard.plan(Masked(), kwargs={"x": batch()}, world_size=2, dynamic=dynamic)
    held = [range_ for range_ in plan.memory.ledger().ranges if range_.category is Category.BUFFER]
    assert sorted(range_.bytes for range_ in held) == [4 * 6, 4 * 48]
    assert fxshard.validate(Masked(), (batch(),), world_size=2).max_abs_difference == 0


@pytest.mark.parametrize("world_size", [1, 3])
def test_batch_norm_statistics_are_written_back(world_size: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    assert_trains_like_eager(build, batch(), world_size=world_size)
    case = MODELS["convnet"]
    torch.manual_seed(0)
    eager = fsdp2.run_steps(case.build(), case, 2)
    torch.manual_seed(0)
    ours = fsdp2.run_steps(fxshard.compile(case.build(), world_size=world_size), case, 2)
    fsdp2.assert_close(ours, eager, rtol=1e-6)
    assert ours.buffers["blocks.0.norm.num_batches_tracked"] == 2


def mutated_after_it_was_read(net: Net, x: Tensor) -> Tensor:
    y = net.a(x) * (net.seen + 1)
    net.seen.add_(1)
    return y.square().sum()


def mutated_before_it_is_read(net: Net, x: Tensor) -> Tensor:
    net.seen.add_(1)
    return (net.a(x) * net.seen).square().sum()


def replaced_after_it_was_read(net: Net, x: Tensor) -> Tensor:
    y = net.a(x) * net.seen  # backward reads the old value
    net.seen = net.seen + y.detach().mean(0)
    return y.square().sum()


def replaced_and_both_read(net: Net, x: Tensor) -> Tensor:
    old, net.seen = net.seen, net.seen * 2
    return (net.a(x) * old * net.seen).sum()


@pytest.mark.parametrize(
    "function",
    [
        mutated_after_it_was_read,
        mutated_before_it_is_read,
        replaced_after_it_was_read,
        replaced_and_both_read,
    ],
)
def test_a_buffer_that_forward_changes(function: Callable[..., Tensor]) -> None:
    assert_trains_like_eager(lambda: Net(function), batch())


class ChangesPlaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.register_buffer("old", torch.zeros(6))
        self.register_buffer("new", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.old, self.new = self.new, self.old + 1
        return (self.linear(x) * self.old + self.new).sum()


def test_buffers_that_change_places() -> None:
    assert_trains_like_eager(ChangesPlaces, batch())


def test_a_buffer_in_the_past_of_two_interleaved_forwards() -> None:
    """Each backward sees the buffer as its own forward saw it."""
    eager, ours = pair(lambda: Net(replaced_after_it_was_read))
    for model in (eager, ours):
        losses = [model(batch()), model(batch())]
        for loss in losses:
            loss.backward()
    for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)
    assert_close(ours.seen, eager.seen)


def read_through(view: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Backward reads the old value of a buffer that is replaced, through a view of it."""

    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        z = y * view(net.seen)
        net.seen = net.seen + y.detach().mean(0)
        return z.square().sum()

    return forward


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda b: b.view(1, 6),
    "expand": lambda b: b.expand(4, 6),
    "detach": lambda b: b.detach(),
    "index": lambda b: b[None],
    "view of a view": lambda b: b.view(2, 3).t().t().reshape(6),
    "one of several": lambda b: b.view(1, 6).unbind(0)[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_backward_reads_the_old_value_of_a_buffer_through_a_view(name: str) -> None:
    assert_trains_like_eager(lambda: Net(read_through(VIEWS[name])), batch())


class Queue(nn.Module):
    """MoCo's: keys are compared with those of earlier steps, then pushed."""

    def __init__(self, strided: bool = False) -> None:
        super().__init__()
        self.key = nn.Linear(5, 6)
        keys = torch.randn(6, 16).t() if strided else torch.randn(16, 6)
        self.register_buffer("keys", keys)

    def forward(self, x: Tensor) -> Tensor:
        k = self.key(x)
        y = k @ self.keys.t()
        self.keys = torch.cat([self.keys[4:], k.detach()])
        return y.logsumexp(-1).sum()


@pytest.mark.parametrize("strided", [False, True])
def test_a_queue_in_a_buffer(strided: bool) -> None:
    assert_trains_like_eager(lambda: Queue(strided), batch())


def test_queues_in_blocks_that_are_alike() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queue, self.back = Queue(), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            k = self.queue.key(x)
            y = k @ self.queue.keys.t()
            self.queue.keys = torch.cat([self.queue.keys[4:], k.detach()])
            return x + self.back(y @ self.queue.keys)

    assert_trains_like_eager(lambda: nn.Sequential(*(Block() for _ in range(4))), batch())


def test_states_of_an_lstm_in_buffers() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 6, batch_first=True)
            self.register_buffer("h", torch.zeros(1, 4, 6))
            self.register_buffer("c", torch.zeros(1, 4, 6))

        def forward(self, x: Tensor) -> Tensor:
            y, (h, c) = self.lstm(x[:, None], (self.h, self.c))
            self.h, self.c = h.detach(), c.detach()
            return y.square().sum()

    assert_trains_like_eager(Stateful, batch())


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda old: old,
    "a view": lambda old: old[1:3],
    "both": lambda old: (old, old.view(2, 3)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_the_old_value_of_a_replaced_buffer_is_returned(name: str) -> None:
    def forward(net: Net, x: Tensor) -> Any:
        old = net.seen
        net.seen = net.seen + 1
        return net.a(x), RETURNED[name](old)

    eager, ours = pair(lambda: Net(forward))
    for grad in (True, True, False):
        with torch.set_grad_enabled(grad):
            assert_same_output(ours(batch()), eager(batch()))
    assert_close(ours.seen, eager.seen)


class ScaledSum(torch.autograd.Function):
    """(x * scale).sum(), of which the caller never takes but the gradient 1: it is `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return (x * scale).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return scale.view_as(scale), None


def sums_and_replaces(net: Net, x: Tensor) -> Tensor:
    y = ScaledSum.apply(net.a.bias, net.seen)
    net.seen = net.seen + 1
    return y


@pytest.mark.parametrize(
    "function", [sums_and_replaces, lambda net, x: ScaledSum.apply(net.a.bias, net.seen + 1)]
)
def test_a_gradient_that_forward_has_made(function: Callable[..., Tensor]) -> None:
    assert_trains_like_eager(lambda: Net(function), batch())


def test_a_program_that_reads_an_old_value_behind_the_write_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aliasing, "keep_old_value", lambda program, holder: holder)
    for build in (Queue, lambda: Net(read_through(VIEWS["expand"]))):
        with pytest.raises(VerifyError, match=r"reads %\w+, which %copy_\w* has written over"):
            fxshard.plan(build(), (batch(),), world_size=2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda net, x: setattr(net, "seen", net.seen.double()), r"'seen' is replaced .*float64"),
        (lambda net, x: net.register_buffer("late", x[0]), "'late' appears during forward"),
        (lambda net, x: net.a.weight.data.mul_(2), r"'a\.weight' is changed .* at .*py:\d+"),
        (lambda net, x: setattr(net.seen, "data", net.seen * 2), r"'seen' is given other memory"),
        (lambda net, x: setattr(net.a.bias, "data", x[0]), r"'a\.bias' is given other memory"),
    ],
    ids=["another dtype", "new", "parameter", "data of a buffer", "data of a parameter"],
)
def test_state_that_cannot_be_written_back(function: Callable[..., Any], message: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        function(net, x)
        return net.a(x).sum()

    with pytest.raises(CaptureError, match=message):
        fxshard.plan(Net(forward), (batch(),), world_size=2)


def copies_into(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    net.seen.copy_(y.mean(0))
    return y


def averages(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    net.seen.mul_(0.9).add_(y.mean(0))
    return y


def keeps_an_auxiliary_loss(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    net.seen = y.pow(2).mean(0)
    return y


def doubles_its_input(net: Net, x: Tensor) -> Tensor:
    return net.a(x.mul_(2))


def writes_into_its_input(net: Net, x: Tensor) -> Tensor:
    y = net.a(x.clone())
    x.copy_(y[:, :5])
    return y


ATTACHED: list[tuple[Callable[..., Tensor], bool, str]] = [
    (copies_into, False, r"gives buffer 'seen' .* in copies_into:.*Detach it.*return it"),
    (averages, False, r"gives buffer 'seen' .* in averages:.*Detach it"),
    (keeps_an_auxiliary_loss, False, r"'seen' .* in keeps_an_auxiliary_loss:.*Detach it"),
    (doubles_its_input, True, r"gives args\[0\] .* in doubles_its_input:.*Write into a clone"),
    (writes_into_its_input, False, r"gives args\[0\] .* in writes_into_its_input:.*Write into"),
]


@pytest.mark.parametrize(("function", "computed", "message"), ATTACHED)
def test_what_forward_leaves_with_the_caller_may_not_need_a_gradient(
    function: Callable[..., Tensor], computed: bool, message: str
) -> None:
    """In eager a loss computed of it trains the model. Without gradients it is as in eager."""
    eager, ours = pair(lambda: Net(function))
    given = nn.Linear(5, 5)(batch()) if computed else batch()
    with pytest.raises(CaptureError, match=rf"(?s){message}"):
        ours(given)
    theirs, mine = given.detach().clone(), given.detach().clone()
    with torch.no_grad():
        assert_close(ours(mine), eager(theirs))
    assert_close((mine, ours.seen), (theirs, eager.seen))
    for net in (eager, ours):
        net.requires_grad_(False)
    assert_close(ours(mine), eager(theirs))
    assert_close((mine, ours.seen), (theirs, eager.seen))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_an_argument_that_is_a_parameter(frozen: bool, learned: bool) -> None:
    """A learned prompt, or an image that is optimised with a frozen network."""
    found = []
    for model in pair(lambda: Net(lambda net, x: net.a(x).sin()).requires_grad_(not frozen)):
        image = nn.Parameter(batch(), requires_grad=learned)
        out = model(image)
        if out.requires_grad:
            out.sum().backward()
        grads = [image.grad, *(p.grad for p in model.parameters())]
        found.append((out.detach(), out.requires_grad, grads))
    assert_close(found[1], found[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_argument_that_is_a_parameter_of_the_model(world_size: int) -> None:
    function = lambda net, x, w: torch.nn.functional.linear(x, w) * net.b(x)  # noqa: E731
    eager, ours = pair(lambda: Net(function), world_size)
    for model in (eager, ours):
        model(batch(), model.b.weight).sum().backward()
    assert_close(ours.b.weight.grad, eager.b.weight.grad)
    assert fxshard.validate(eager, (batch(), eager.b.weight), world_size=2, numerics=True).holds


def test_an_input_that_forward_changes() -> None:
    eager, ours = pair(lambda: Net(lambda net, x: net.a(x.add_(1)).sum()), world_size=3)
    theirs, mine = batch(), batch()
    assert_close(ours(mine), eager(theirs))
    assert_close(mine, theirs)


# -- outputs --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    y: Any
    rest: Any = None
    count: int = 3


Pair = namedtuple("Pair", "first second")


class Mode(enum.Enum):
    FAST = 1


def model_output(net: Net, x: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    y = net.a(x)
    return BaseModelOutput(last_hidden_state=y, hidden_states=(y, x))


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda net, x: (net.a(x), net.b(x)), lambda o: (o[0] * o[1]).sum()),
    "loss and logits": (
        lambda net, x: ((y := net.a(x)).sum(), y, y.detach()),
        lambda o: o[0],
    ),
    "dict": (
        lambda net, x: {"y": net.a(x), "no": None, "int": 3, "str": "s", "float": 1.5, "yes": True},
        lambda o: o["y"].sum(),
    ),
    "nested": (
        lambda net, x: {"all": [net.a(x), (net.b(x), None)], "empty": {}, "mode": Mode.FAST},
        lambda o: o["all"][0].sum() + o["all"][1][0].sum(),
    ),
    "dataclass": (
        lambda net, x: Output(net.a(x), Output({"x": x})),
        lambda o: o.y.sum() * o.count,
    ),
    "namedtuple": (lambda net, x: Pair(net.a(x), x), lambda o: o.first.sum()),
    "torch.Size": (lambda net, x: (net.a(x), x.shape, {"of": x.size()}), lambda o: o[0].sum()),
    "torch.return_types": (lambda net, x: net.a(x).max(-1), lambda o: o.values.sum()),
    "ModelOutput": (model_output, lambda o: o.last_hidden_state.sum()),
    "views of one tensor": (
        lambda net, x: net.a(x).chunk(2, -1),
        lambda o: (o[0] * o[1]).sum(),
    ),
    "one of two views": (lambda net, x: net.a(x).chunk(2, -1), lambda o: o[0].sum()),
    "a tensor and its view": (
        lambda net, x: ((y := net.a(x)), y.view(-1)),
        lambda o: o[0].sum() + o[1].square().sum(),
    ),
    "expanded": (lambda net, x: net.a(x).sum().expand(3), lambda o: o.sum()),
    "one tensor twice": (lambda net, x: [net.a(x)] * 2, lambda o: (o[0] * o[1]).sum()),
    "an input": (lambda net, x: (x, x.t(), net.a(x)), lambda o: (o[2] * o[0][:, :1]).sum()),
    "a parameter": (
        lambda net, x: (net.a.weight, net.a.weight.t(), net.a(x)),
        lambda o: o[0].square().sum() + o[1].sum() + o[2].sum(),
    ),
    "a buffer": (lambda net, x: (net.seen, net.a(x)), lambda o: (o[0] * o[1]).sum()),
    "integers": (
        lambda net, x: (net.a(x).argmax(-1), net.a(x) > 0, net.a(x)),
        lambda o: o[2].sum(),
    ),
    "complex": (lambda net, x: torch.fft.fft(net.a(x)), lambda o: o.abs().sum()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_what_eager_returns(name: str) -> None:
    function, loss = OUTPUTS[name]
    assert_trains_like_eager(lambda: Net(function), batch(), loss=loss)
    eager, ours = pair(lambda: Net(function))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert_same_output(ours(batch()), eager(batch()))


def assert_same_output(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        assert_close(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad or not torch.is_grad_enabled()
        return
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same_output(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_output(mine, other)
    elif dataclasses.is_dataclass(theirs):
        assert_same_output(vars(ours), vars(theirs))
    else:
        assert ours == theirs


def test_outputs_without_any_gradient() -> None:
    eager, ours = pair(lambda: Net(lambda net, x: (net.a(x).argmax(-1), net.a(x).detach(), None)))
    assert_same_output(ours(batch()), eager(batch()))


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_objects_that_may_hide_tensors_are_refused() -> None:
    takes = Net(lambda net, box: net.a(box.tensor).sum())
    with pytest.raises(CaptureError, match=r"argument args\[0\] is a Opaque, which .* look into"):
        fxshard.plan(takes, (Opaque(batch()),), world_size=2)
    returns = Net(lambda net, x: {"box": Opaque(net.a(x))})
    with pytest.raises(CaptureError, match=r"output \['box'\] is a Opaque"):
        fxshard.plan(returns, (batch(),), world_size=2)
    _, ours = pair(lambda: takes)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"argument args\[0\]"):
            ours(Opaque(batch()))


# -- inputs ---------------------------------------------------------------------------------------


def configured(net: Net, x: Tensor, *, scale: Any = 1.0, mode: str = "a", bias: Any = None) -> Any:
    y = net.a(x) if mode == "a" else net.b(x)
    factor = {bool: 7, int: 3, float: 5}[type(scale)]
    return (y * scale * factor if bias is None else y * scale + bias).sum()


def test_keywords_and_plain_values() -> None:
    eager, ours = pair(lambda: Net(configured))
    x, inf = batch(), float("inf")
    # Equal numbers of other types are other calls.
    for scale in (1, 1.0, True, 0, 0.0, -0.0, False, 2.5, inf):
        assert_close(ours(x, scale=scale), eager(x, scale=scale), equal_nan=True)
    for kwargs in ({"mode": "b"}, {"bias": x[0, 0]}, {"bias": None}, {"mode": "a", "scale": 2}):
        assert_close(ours(x, **kwargs), eager(x, **kwargs))
    assert_close(ours(x=x), eager(x=x))
    nan = float("nan")
    assert ours(x, scale=nan).isnan()
    count = len(ours._fxshard.variants)
    assert ours(x, scale=float("nan")).isnan()
    assert len(ours._fxshard.variants) == count


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    factor: float = 1.0


def test_containers_and_dataclasses_of_tensors() -> None:
    def forward(net: Net, batches: list[Batch], more: dict[str, Tensor]) -> Any:
        total = sum(net.a(b.x).sum() * b.factor for b in batches)
        return Output(total + net.b(more["x"]).sum(), rest=batches)

    eager, ours = pair(lambda: Net(forward))
    x = batch()
    for factor in (1.0, 2.0):
        call = ([Batch(x), Batch(x + 1, factor)], {"x": x})
        assert_same_output(ours(*call), eager(*call))


def test_a_batch_of_other_strides_is_another_call() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.a(x).sum() * (1 if x.is_contiguous() else 2)

    eager, ours = pair(lambda: Net(forward))
    for x in (batch(), batch().t().contiguous().t(), torch.randn(8, 5)[::2]):
        assert_close(ours(x), eager(x))


def test_dropout_draws_the_numbers_of_eager() -> None:
    eager, ours = pair(MODELS["dropout"].build, world_size=1)
    (tokens,), _ = MODELS["dropout"].batch(0, 0)
    for seed in (1, 2):
        torch.manual_seed(seed)
        theirs = eager(tokens)
        torch.manual_seed(seed)
        assert torch.equal(ours(tokens), theirs)


def test_autocast_is_part_of_the_call() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 6))

    eager, ours = pair(build)
    for enabled in (False, True, False):
        found = []
        for model in (eager, ours):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = model(batch())
            output.float().square().sum().backward()
            found.append((output, [p.grad for p in model.parameters()]))
        assert found[0][0].dtype is (torch.bfloat16 if enabled else torch.float32)
        assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_user_code_around_the_layers_runs_as_in_eager() -> None:
    """Hooks, custom autograd functions, parametrizations."""

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 3

    def build() -> nn.Module:
        net = Net(lambda net, x: Triple.apply(net.a(x) * net.b(x)).sum())
        nn.utils.parametrizations.weight_norm(net.a)
        nn.utils.parametrizations.spectral_norm(net.b)
        net.a.register_forward_hook(lambda module, args, output: output * 2)
        net.b.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        net.b.register_full_backward_hook(lambda module, grads, _: tuple(g * 2 for g in grads))
        net.register_forward_hook(lambda module, args, output: output + 1)
        return net

    assert_trains_like_eager(build, batch().requires_grad_())


# -- what depends on values -----------------------------------------------------------------------


def branches(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    if y.sum() > 0:  # here
        return y.sum()
    return y.mean()


def loops(net: Net, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().sum())):  # here
        x = x + 1
    return net.a(x).sum()


@pytest.mark.parametrize("function", [branches, loops], ids=lambda f: f.__name__)
def test_data_dependence_is_refused_at_the_line_of_the_user(function: Callable[..., Any]) -> None:
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, line in enumerate(lines) if "# here" in line)
    with pytest.raises(CaptureError) as failure:
        fxshard.plan(Net(function), (batch(),), world_size=2)
    text = str(failure.value)
    assert text.startswith("Net cannot be traced: Python control flow or a shape depends on")
    assert f'File "{__file__}", line {number}, in {function.__name__}' in text
    assert lines[number - first].strip() in text
    assert "torch.where" in text  # the remedy


def test_an_error_of_the_user_is_told_with_its_line() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        raise KeyError("no such expert")

    with pytest.raises(
        CaptureError, match=rf"KeyError: 'no such expert'(.|\n)*{__file__}"
    ) as failure:
        fxshard.plan(Net(forward), (batch(),), world_size=2)
    assert isinstance(failure.value.__cause__, KeyError)


KEPT: dict[str, Tensor] = {}


def keeps_in_a_global(net: Net, x: Tensor) -> Tensor:
    if "ones" not in KEPT:
        KEPT["ones"] = torch.ones(6)
    return (net.a(x) * KEPT["ones"]).sum()


def keeps_in_itself(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "ones"):
        net.ones = torch.ones(6)
    return (net.a(x) * net.ones).sum()


class Keeper(nn.Module):
    """Blocks enough for the trace to leave some out; each reads what the first has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net(keeps_in_a_global) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (lambda: Net(keeps_in_a_global), "in a global, a closure or a collection"),
        (lambda: Net(keeps_in_itself), "as self.ones of Net"),
        (Keeper, "in a global, a closure or a collection"),
    ],
)
@pytest.mark.parametrize("dynamic", [None, {"batch": [("x", 0)]}])
def test_what_forward_makes_and_keeps(
    build: Callable[[], nn.Module], where: str, dynamic: Any
) -> None:
    KEPT.clear()
    call: dict[str, Any] = {"kwargs": {"x": batch()}, "world_size": 2, "dynamic": dynamic}
    for _ in range(2):  # the second time it is there from the beginning
        with pytest.raises(CaptureError, match=f"has made and kept, {where}") as failure:
            fxshard.plan(build(), **call)
        assert "register_buffer" in str(failure.value)
    KEPT.clear()  # the remedy
    model = build()
    model(batch())
    assert fxshard.plan(model, **call).memory.peak_bytes


# -- transformers ---------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = models.llama(1)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self.inner(tokens, position_ids=positions, labels=tokens, **kwargs).loss


def test_packed_sequences_are_refused_however_they_arrive() -> None:
    (_, batch) = MODELS["llama"].batch(0, 0)
    tokens = batch["input_ids"]
    positions = torch.arange(8).expand(2, 8)
    said = "position_ids without attention_mask.*pass an attention_mask"
    with pytest.raises(CaptureError, match=said):
        fxshard.plan(models.llama(1), (), {**batch, "position_ids": positions}, world_size=2)
    with pytest.raises(CaptureError, match=said):
        fxshard.plan(models.llama(1), (tokens, None, positions), world_size=2)
    with pytest.raises(CaptureError, match=said):
        fxshard.plan(Wrapped(), (tokens, positions), world_size=2)


def test_positions_with_a_mask_and_positions_of_the_model_are_eager_s() -> None:
    (_, batch) = MODELS["llama"].batch(0, 0)
    tokens = batch["input_ids"]
    positions = torch.arange(8).expand(2, 8)
    mask = torch.tensor([[1] * 8, [0] * 2 + [1] * 6])
    assert_trains_like_eager(Wrapped, tokens)
    assert_trains_like_eager(Wrapped, tokens, positions, attention_mask=mask)
    program = fxshard.plan(Wrapped(), (tokens,), world_size=2).program
    assert "_assert_async" not in dump.text(program)


def test_tangents_are_told_by_the_place_of_the_output() -> None:
    """Constants in front of a tensor output do not shift its gradient."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return None, {"count": 3, "y": self.line(x)}

    model = Mixed()
    eager = copy.deepcopy(model)
    ours = fxshard.compile(model, world_size=2)
    x = torch.ones(2, 4)
    for each in (ours, eager):
        nothing, found = each(x)
        assert nothing is None and found["count"] == 3
        found["y"].square().sum().backward()
    assert torch.equal(ours.line.weight.grad, eager.line.weight.grad)
