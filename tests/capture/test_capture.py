"""Any way to hold a model gives one program; each node is in the module that a human would name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import fxshard
from fxshard import verify
from fxshard.capture import trace
from fxshard.ir import dump, tags
from fxshard.ir.program import Program
from fxshard.ir.splitting import find_units
from tests import fsdp2
from tests.capture.capture_cases import built, where
from tests.zoo import MODELS

aten = torch.ops.aten


# -- one program, however the model is held --------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(2)
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
        ("mlp13", "ExportedProgram"),
        *(pytest.param("mlp13", kind, marks=pytest.mark.slow) for kind in list(EXPORTS)[1:]),
        *(pytest.param("transformer", kind, marks=pytest.mark.slow) for kind in EXPORTS),
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
@pytest.mark.sample(3)
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


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + x


@pytest.mark.parametrize("symbols", [{}, {"n": ((0, 0),)}])
def test_what_is_on_the_meta_device_is_traced_where_the_model_computes(symbols: Any) -> None:
    """Buffers and example inputs too: they have no data yet, and no device."""
    with torch.device("meta"):
        model = Scaled()
    x = torch.empty(3, 4, device="meta")
    program = trace.capture(
        *(model, (x,), {}),
        units=find_units(model),
        world_size=2,
        training=False,
        device=torch.device("cuda"),
        symbols=symbols,
    )
    values = (node.meta.get("val") for node in program.graph.nodes)
    assert {v.device.type for v in values if isinstance(v, Tensor)} == {"cuda"}
