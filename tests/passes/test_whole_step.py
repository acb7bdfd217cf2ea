"""begin-backward and clip-steps: what the program of a whole step is, and what none is."""

import difflib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxshard import pipeline, verify
from fxshard.codegen.emit import emit
from fxshard.config.checked import Config
from fxshard.errors import VerifyError
from fxshard.ir import dump, ops, tags, text
from fxshard.ir.program import Fact, Program
from fxshard.ir.whole import Whole
from fxshard.plans.plan import Plan, make_plan
from fxshard.plans.workload import Workload
from fxshard.runtime.whole_step import step_config
from fxshard.verify.certificate import collectives
from fxshard.verify.clipped import clipped
from tests import texts
from tests.api.compile_step_cases import OPTIMIZERS, batch, loss_fn, net

aten: Any = torch.ops.aten


class Two(nn.Module):
    """Two units besides the root, which comes first and last among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x @ self.w)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def planned(max_norm: float | None, observe: Any = None, **options: Any) -> Plan:
    given = {"units": ["layers.*"], "pack_bytes": 0, **options}
    config = step_config(Config.from_options(given), OPTIMIZERS["adamw"])
    call: Any = (torch.ones(2, 4), torch.ones(2, 4)), {}
    work = Workload(Two(), call, 2, config, whole=Whole(mean, max_norm))
    return make_plan(work, observe=observe)


def changes(name: str, max_norm: float | None) -> str:
    """What a pass changes, without a line around it."""
    found: dict[str, tuple[str, str]] = {}

    def observe(step: str, before: str, after: str) -> None:
        found[step] = before, after

    planned(max_norm, observe)
    before, after = (each.splitlines() for each in found[name])
    lines = difflib.unified_diff(before, after, n=0, lineterm="")
    return "\n".join(line for line in lines if line[:2] not in ("--", "++", "@@"))


def test_begin_backward() -> None:
    assert changes("begin-backward", None) == BEGIN


BEGIN = """\
-  %tangents_1 : f32[] = tangent 0
-  %expand : f32[2,4] = aten.expand(%tangents_1, [2, 4])  | unit=0
+  %ones : f32[] = aten.full([], 1, dtype=torch.float32, device=cpu, pin_memory=False)  | unit=0
+  %expand : f32[2,4] = aten.expand(%ones, [2, 4])  | unit=0"""


def test_clip_steps() -> None:
    assert changes("clip-steps", 1.0) == CLIP
    assert changes("clip-steps", None) == ""


CLIP = """\
-  %step_0 = fxshard.step([%getitem_7], [%shard_layers_1_weight], [layers.1.weight])  | layers.1 unit=2
+  %norms_0 : (f32[1]) = fxshard.grad_norms([%getitem_7], [layers.1.weight], True, torch.float32)  | layers.1 unit=2
+  %getitem_11 : f32[1] = getitem(%norms_0, 0)  | layers.1 unit=2
-  %step_1 = fxshard.step([%getitem_8], [%shard_layers_0_weight], [layers.0.weight])  | layers.0 unit=1
+  %norms_1 : (f32[1]) = fxshard.grad_norms([%getitem_8], [layers.0.weight], True, torch.float32)  | layers.0 unit=1
+  %getitem_12 : f32[1] = getitem(%norms_1, 0)  | layers.0 unit=1
-  %step_2 = fxshard.step([%getitem_9, %getitem_10], [%shard_w, %shard_head_weight], [w, head.weight])  | unit=0
-  return %mean (0)
+  %norms_2 : (f32[2]) = fxshard.grad_norms([%getitem_9, %getitem_10], [w, head.weight], True, torch.float32)  | unit=0
+  %getitem_13 : f32[2] = getitem(%norms_2, 0)  | unit=0
+  %slice_1 : f32[1] = aten.slice.Tensor(%getitem_13, 0, 0, 1)  | unit=0
+  %slice_2 : f32[1] = aten.slice.Tensor(%getitem_13, 0, 1, 2)  | unit=0
+  %norms : f32[4] = aten.cat([%slice_1, %getitem_12, %getitem_11, %slice_2])  | unit=0
+  %reduce_norms_9 : (f32[4]) = fxshard.reduce_norms([%norms], 2, shard, sum)  | unit=0 pair=9
+  %getitem_14 : f32[4] = getitem(%reduce_norms_9, 0)  | unit=0 pair=9
+  %wait_9 = fxshard.wait([%getitem_14])  | unit=0 pair=9
+  %roots : f32[4] = aten.pow.Tensor_Scalar(%getitem_14, 0.5)  | unit=0
+  %grad_norm : f32[] = aten.linalg_vector_norm(%roots, 2.0)  | unit=0
+  %above : f32[] = aten.add.Tensor(%grad_norm, 1e-06)  | unit=0
+  %parts : f32[] = aten.reciprocal(%above)  | unit=0
+  %ratio : f32[] = aten.mul.Tensor(%parts, 1.0)  | unit=0
+  %scale : f32[] = aten.clamp(%ratio, None, 1.0)  | unit=0
+  %step_0 = fxshard.step([%getitem_7], [%shard_layers_1_weight], [layers.1.weight], %scale)  | layers.1 unit=2
+  %step_1 = fxshard.step([%getitem_8], [%shard_layers_0_weight], [layers.0.weight], %scale)  | layers.0 unit=1
+  %step_2 = fxshard.step([%getitem_9, %getitem_10], [%shard_w, %shard_head_weight], [w, head.weight], %scale)  | unit=0
+  return %mean (0), %grad_norm ()"""  # noqa: E501


def operations(plan: Plan) -> list[str]:
    """Rows of backward, without those that compute or free."""
    rows = [row for row in dump.rows(plan.program) if row.phase == "backward"]
    return [
        f"{row.operation} {row.units[0]}"
        for row in rows
        if row.operation in ("reduce", "wait", "norm", "all-reduce norms", "step")
        and not (row.operation == "wait" and row.what == "unshard")
    ]


def test_without_clipping_a_unit_is_stepped_before_the_next_is_reduced() -> None:
    """Its step is in front of the others' backward: they overlap."""
    assert operations(planned(None)) == UNCLIPPED


UNCLIPPED = [
    "reduce layers.1",
    "wait layers.1",
    "step layers.1",
    "reduce layers.0",
    "wait layers.0",
    "step layers.0",
    "reduce (root)",
    "wait (root)",
    "step (root)",
]


def test_with_clipping_one_all_reduce_follows_the_last_reduction() -> None:
    assert operations(planned(1.0)) == CLIPPED
    program = planned(1.0).program
    (launch,) = program.graph.find_nodes(op="call_function", target=ops.reduce_norms)
    assert tags.get(launch).stream == "all-reduce"
    assert launch.args[1:] == (2, "shard", "sum")
    norms = program.graph.find_nodes(op="call_function", target=ops.grad_norms)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    reductions = program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    assert order[norms[0]] < order[reductions[-1]] < order[norms[-1]] < order[launch]


CLIPPED = [
    "reduce layers.1",
    "wait layers.1",
    "norm layers.1",
    "reduce layers.0",
    "wait layers.0",
    "norm layers.0",
    "reduce (root)",
    "wait (root)",
    "norm (root)",
    "all-reduce norms (root)",
    "wait (root)",
    "step layers.1",
    "step layers.0",
    "step (root)",
]


def test_the_phases_are_one() -> None:
    """Nothing waits for backward to begin, and nothing of the caller's is between."""
    source = emit(planned(1.0).program)
    assert source.count("\ndef whole_step(") == 1 and "def forward" not in source
    assert "c_backward" not in source
    assert not [n for n in planned(1.0).program.graph.nodes if n.name.startswith("tangent")]


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_the_host_waits_for_nothing(max_norm: float | None) -> None:
    """No value is read, nothing is synchronised, and no way depends on a value."""
    source = emit(planned(max_norm).program)
    words = set(re.findall(r"[A-Za-z_]+", source))
    reads = {"item", "synchronize", "tolist", "numpy", "if", "while", "for", "bool"}
    assert not words & reads and ".cpu(" not in source


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_its_text_is_read_back(max_norm: float | None) -> None:
    program = planned(max_norm).program
    read = text.parse(text.write(program))
    texts.assert_equal(program, read)
    assert (read.whole, read.max_norm) == (True, max_norm)
    verify.verify(read)
    assert emit(read) == emit(program)


def test_ranks_agree_on_the_all_reduce_of_norms() -> None:
    line = "9 backward fxshard.reduce_norms group=shard size=2 op=sum unit=0 bytes=16 [f32[4]]"
    assert collectives(planned(1.0).program)[-1] == line
    assert not any("reduce_norms" in line for line in collectives(planned(None).program))


# -- faults ----------------------------------------------------------------------------------------


def steps(program: Program) -> list[fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=ops.step))


def norms(program: Program) -> list[fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=ops.grad_norms))


def named(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def unscaled(program: Program) -> None:
    step = steps(program)[0]
    step.args = step.args[:3]


def scaled_otherwise(program: Program) -> None:
    step = steps(program)[0]
    step.args = (*step.args[:3], named(program, "ratio"))


def another_norm(program: Program) -> None:
    program.max_norm = 2.0


def not_clamped(program: Program) -> None:
    scale = named(program, "scale")
    scale.args = (scale.args[0], None, 2.0)


def counted_twice(program: Program) -> None:
    joined = named(program, "norms")
    parts = list(joined.args[0])  # type: ignore[arg-type]
    joined.args = ([*parts[:-1], parts[0]],)


def left_out(program: Program) -> None:
    joined = named(program, "norms")
    joined.args = (list(joined.args[0])[:-1],)  # type: ignore[arg-type]


def out_of_order(program: Program) -> None:
    joined = named(program, "norms")
    joined.args = (list(joined.args[0])[::-1],)  # type: ignore[arg-type]


def of_another_gradient(program: Program) -> None:
    row, other = norms(program)[:2]
    row.args = (other.args[0], *row.args[1:])


def not_squared(program: Program) -> None:
    row = norms(program)[0]
    row.args = (*row.args[:2], False, row.args[3])


def not_summed(program: Program) -> None:
    (launch,) = program.graph.find_nodes(op="call_function", target=ops.reduce_norms)
    launch.args = (*launch.args[:3], "max")


def of_other_ranks(program: Program) -> None:
    (launch,) = program.graph.find_nodes(op="call_function", target=ops.reduce_norms)
    launch.args = (launch.args[0], 4, *launch.args[2:])


def not_returned(program: Program) -> None:
    program.values, program.results = program.values[:-1], program.results[:-1]


FAULTS: dict[Callable[[Program], None], str] = {
    unscaled: "is not scaled by the norm that the other steps",
    scaled_otherwise: "is not scaled by the norm that the other steps",
    another_norm: "is not max_norm=2.0 over a norm",
    not_clamped: "is not max_norm=1.0 over a norm",
    counted_twice: "is 2 times in the norm|is 0 times in the norm",
    left_out: "is 0 times in the norm",
    out_of_order: "not in order",
    of_another_gradient: "as the gradient of .*, which it is not",
    not_squared: "is no norm of gradients",
    not_summed: "is not summed up over the ranks that share parameters",
    of_other_ranks: "is not summed up over the ranks that share parameters",
    not_returned: "scales the steps, and is not returned",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(fault: Callable[[Program], None]) -> None:
    program = planned(1.0).program
    clipped(program)
    fault(program)
    with pytest.raises(VerifyError, match=FAULTS[fault]):
        clipped(program)


def test_a_step_before_the_norm_is_found() -> None:
    """By dataflow: it would read its scale before that is made."""
    program = planned(1.0).program
    step = steps(program)[0]
    norms(program)[-1].prepend(step)
    with pytest.raises(VerifyError):
        verify.CHECKS[Fact.WELL_FORMED](program)


def test_a_loop_s_program_clips_nothing() -> None:
    program = planned(1.0).program
    program.max_norm = None
    with pytest.raises(VerifyError, match="scales, though nothing is to be clipped"):
        clipped(program)


def test_the_default_pipeline_does_not_have_them() -> None:
    default = pipeline.default_passes(optimizer_in_backward=True, optimizer=OPTIMIZERS["adamw"])
    names = [each.name for each in default]
    assert "insert-step" in names and not {"begin-backward", "clip-steps"} & {*names}
    more = [each.name for each in pipeline.as_whole_step(default)]
    at = more.index("insert-step")
    assert more[at - 1 : at + 2] == ["begin-backward", "insert-step", "clip-steps"]
    assert pipeline.advice(more) == ""


def test_a_model_in_blocks_is_captured_at_the_cost_of_few() -> None:
    """The loss is part of it: the same program, stamped or traced as a whole."""
    config = step_config(Config.from_options({"units": ["layers.*"]}), OPTIMIZERS["adamw"])
    work = Workload(net(), (batch(0, 0), {}), 2, config, whole=Whole(loss_fn, 1.0))
    program = make_plan(work).program
    assert {unit.fqn for unit in program.units} == {"", "layers.0", "layers.1", "layers.2"}
    losses = [n for n in program.graph.nodes if "nll_loss" in str(n.target)]
    assert losses and all(tags.get(n).module == "" and tags.get(n).unit == 0 for n in losses)
