"""Capture: any way to hold a model gives one program; what cannot be traced is refused by name."""

import collections
import copy
import dataclasses
import logging
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
from tests.capture.capture_cases import (
    assert_same_output,
    where,
)
from tests.eager import Net, assert_trains_like_eager, batch, pair
from tests.zoo import MODELS

aten = torch.ops.aten


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build()


# -- one program, however the model is held --------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
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


# -- every node belongs to the module that a human would name --------------------------------------


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


# -- the user's model afterwards -------------------------------------------------------------------


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


# -- gradients -------------------------------------------------------------------------------------


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


# -- state besides parameters ----------------------------------------------------------------------


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
