"""Each pass: its text before and after on programs written by hand, and the numbers it must keep.

The texts are tests/passes/goldens/<pass file>.<case>.txt. After a wanted change rewrite them with

    UPDATE_GOLDENS=1 python -m pytest tests/passes/test_passes.py

and read the diff.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxshard import pipeline
from fxshard.capture import trace
from fxshard.config import Config, Precision
from fxshard.ir import dump, ops, tags
from fxshard.ir.calls import Call
from fxshard.ir.program import Program
from fxshard.ir.units import find_units
from fxshard.passes.bucket import Bucket
from fxshard.passes.compile_regions import CompileRegions
from fxshard.passes.insert_reduce import InsertReduce
from fxshard.passes.insert_step import InsertStep
from fxshard.passes.prefetch import Prefetch
from tests import graphs
from tests.zoo import MODELS, models

GOLDENS = Path(__file__).parent / "goldens"
PASSES = {step.name.replace("-", "_"): step for step in pipeline.default_passes(Config())}
EXACT = list(PASSES.values())  # what Inductor makes is close: tests/codegen/test_inductor.py
PASSES["compile_regions"] = CompileRegions()
aten = torch.ops.aten

CAST = """
%x : bf16[2,4] = input 0
%w : f32[3,4] = param w
%dy : bf16[2,3] = tangent 0
forward:
%cast = aten._to_copy(%w, dtype=torch.bfloat16)
%t = aten.t(%cast)
%y = aten.mm(%x, %t)
backward:
%u = aten.t(%t)
%dx = aten.mm(%dy, %u)
%dt = aten.t(%dy)
%dcast = aten.mm(%dt, %x)
%dw = aten._to_copy(%dcast, dtype=torch.float32)
return %y (0), %dw (w), %dx (input[0])
"""
RETURNED = """
%x : f32[2,4] = input 0
%w : f32[3,4] = param w
forward:
%t = aten.t(%w)
%y = aten.mm(%x, %t)
return %y (0), %t (1)
"""
WRITTEN = """
%x : f32[2,4] = input 0
%count : f32[4] = buffer count
%w : f32[4] = param layers.0.w
forward:
%more = aten.add.Tensor(%count, 1)  | layers.0
%again = aten.add.Tensor(%count, 1)  | layers.1
%copy = aten.copy_(%count, %more)  | layers.0
%scaled = aten.mul.Tensor(%w, %more)  | layers.0
%y = aten.mul.Tensor(%scaled, %again)  | layers.1
return %y (0)
"""
# Written over: %mm by %sum, %s by %four, %four by %five, %dt by %ds. Not: the caller's %x, %sum
# that is saved, %flat whose base is read later, %row that is narrower; and %six, which is returned,
# and %dw, which is sent, have storages of their own.
DYING = """
%x : f32[2,4] = input 0
%w : f32[4,4] = param w
%dy : f32[2,4] = tangent 0
forward:
%two = aten.mul.Tensor(%x, 2)
%mm = aten.mm(%two, %w)
%sum = aten.add.Tensor(%x, %mm)
%s = aten.silu(%sum)
%flat = aten.view(%s, [8])
%three = aten.mul.Tensor(%flat, 3)
%four = aten.mul.Tensor(%s, 4)
%row = aten.sum.dim_IntList(%four, [0], True)
%five = aten.add.Tensor(%row, %four)
%back = aten.view(%three, [2, 4])
%six = aten.mul.Tensor(%five, %back)
backward:
%dt = aten.mul.Tensor(%dy, 5)
%ds = aten.silu_backward(%dt, %sum)
%across = aten.t(%two)
%dw = aten.mm(%across, %ds)
return %six (0), %dw (w)
"""
NESTED = """
%x : f32[2,4] = input 0
%a : f32[4,4] = param layers.0.a
%b : f32[4,4] = param layers.0.mlp.b
forward:
%mm = aten.mm(%x, %a)  | layers.0.norm
%inner = aten.mm(%mm, %b)  | layers.0.mlp.up
%near = aten.relu(%inner)  | layers.01
%y = aten.relu(%near)  | layers
return %y (0)
"""
CHECKPOINTED = """
%x : f32[2,4] = input 0
%count : f32[4] = buffer count
%a : f32[4,4] = param layers.0.a
%b : f32[4,4] = param layers.1.b
%dy : f32[2,4] = tangent 0
forward:
%ta = aten.t(%a)  | layers.0 checkpoint=0
%h = aten.mm(%x, %ta)  | layers.0 checkpoint=0 save
%large = aten.gt.Scalar(%h, 0)  | layers.0 checkpoint=0
%g = aten.gelu(%h)  | layers.0 checkpoint=0
%noise = aten.rand_like(%g)  | layers.0 checkpoint=0
%more_noise = aten.rand_like(%g)  | layers.0 checkpoint=0
%n = aten.mul.Tensor(%noise, %more_noise)  | layers.0 checkpoint=0
%x_1 = aten.mul.Tensor(%g, %n)  | layers.0 checkpoint=0
%more = aten.add.Tensor(%count, 1)  | layers.1 checkpoint=1
%mm = aten.mm(%x_1, %b)  | layers.1 checkpoint=1
%counted = aten.mul.Tensor(%mm, %more)  | layers.1 checkpoint=1
%x_2 = aten.tanh(%counted)  | layers.1 checkpoint=1
%y = aten.sin(%x_2)
%copy = aten.copy_(%count, %more)
backward:
%cos = aten.cos(%x_2)
%dx_2 = aten.mul.Tensor(%dy, %cos)
%dcounted = aten.tanh_backward(%dx_2, %x_2)  | layers.1 checkpoint=1
%dmm = aten.mul.Tensor(%dcounted, %more)  | layers.1 checkpoint=1
%tx = aten.t(%x_1)  | layers.1 checkpoint=1
%db = aten.mm(%tx, %dmm)  | layers.1 checkpoint=1
%tb = aten.t(%b)  | layers.1 checkpoint=1
%dx_1 = aten.mm(%dmm, %tb)  | layers.1 checkpoint=1
%dg = aten.mul.Tensor(%dx_1, %n)  | layers.0 checkpoint=0
%dlarge = aten.mul.Tensor(%dg, %large)  | layers.0 checkpoint=0
%dh = aten.gelu_backward(%dlarge, %h)  | layers.0 checkpoint=0
%th = aten.t(%dh)  | layers.0 checkpoint=0
%da = aten.mm(%th, %x)  | layers.0 checkpoint=0
return %y (0), %da (layers.0.a), %db (layers.1.b)
"""
READ_ONCE = """
%x : f32[2,4] = input 0
%add : f32[3] = param layers.0.add
%mul : f32[3,4] = param layers.0.mul
%frozen : f32[4,3] = param frozen
%unused : f32[7] = param unused
%dy : f32[2,3] = tangent 0
forward:
%scaled = aten.relu(%x)  | layers.0
%tm = aten.t(%mul)  | layers.0
%h = aten.addmm(%add, %scaled, %tm)  | layers.0
%tf = aten.t(%frozen)
%z = aten.mm(%h, %tf)
%y = aten.mm(%z, %frozen)
backward:
%tb = aten.t(%frozen)
%dz = aten.mm(%dy, %tb)
%dh = aten.mm(%dz, %frozen)
%dadd = aten.sum.dim_IntList(%dh, [0])  | layers.0
%dt = aten.t(%dh)  | layers.0
%dmul = aten.mm(%dt, %scaled)  | layers.0
return %y (0), %dadd (layers.0.add), %dmul (layers.0.mul)
"""
SHARED_GRADS = """
%x : f32[2,4] = input 0
%a : f32[2,4] = param a
%b : f32[2,4] = param b
%w : f32[4,2] = param w
%c : f32[2,4] = param c
%dy : f32[2,4] = tangent 0
forward:
%s = aten.add.Tensor(%x, %a)
%r = aten.add.Tensor(%s, %b)
%h = aten.tanh(%r)
%g = aten.t(%w)
%m = aten.mul.Tensor(%h, %g)
%y = aten.add.Tensor(%m, %c)
backward:
%dg = aten.mul.Tensor(%dy, %h)
%dw = aten.t(%dg)
%gb = aten.t(%w)
%dh = aten.mul.Tensor(%dy, %gb)
%dr = aten.tanh_backward(%dh, %h)
return %y (0), %dr (a), %dr (b), %dw (w), %dy (c)
"""
TANGENT = """
%x : f32[2,4] = input 0
%w : f32[2,4] = param layers.0.w
%dy : f32[2,4] = tangent 0
forward:
%y = aten.add.Tensor(%x, %w)  | layers.0
backward:
%view = aten.view(%dy, [2, 4])
return %y (0), %view (layers.0.w)
"""
DTYPES = """
%x : f32[4] = input 0
%single : f32[4] = param single
%half : bf16[4] = param half
%dy : f32[4] = tangent 0
forward:
%p = aten.mul.Tensor(%x, %single)
%y = aten.mul.Tensor(%p, %half)
backward:
%dp = aten.mul.Tensor(%dy, %half)
%dsingle = aten.mul.Tensor(%dp, %x)
%dhalf32 = aten.mul.Tensor(%dy, %p)
%dhalf = aten._to_copy(%dhalf32, dtype=torch.bfloat16)
return %y (0), %dsingle (single), %dhalf (half)
"""
VIEWS = """
%x : f32[2,4] = input 0
%w : f32[5,4] = param w
forward:
%t = aten.t(%w)
%row = aten.select.int(%w, 0, 1)
%y = aten.mm(%x, %t)
%s = aten.unsqueeze(%row, 0)
%z = aten.add.Tensor(%x, %s)
%late = aten.relu(%z)
return %y (0), %late (1)
"""

PADDED = """
%x : bf16[2,4] = input 0
%w : bf16[3,4] = param w
%b : bf16[3] = param b
%dy : bf16[2,3] = tangent 0
forward:
%t = aten.t(%w)
%y = aten.addmm(%b, %x, %t)
backward:
%db = aten.sum.dim_IntList(%dy, [0])
%dt = aten.t(%dy)
%dw = aten.mm(%dt, %x)
return %y (0), %dw (w), %db (b)
"""

EACH = frozenset({"layers.0.weight", "head"})
INDEX = """
%x : bf16[2,4] = input 0
%w : bf16[4,4] = param w
%rows : i64[2] = param rows
%dy : bf16[2,4] = tangent 0
forward:
%e = aten.index_select(%w, 0, %rows)
%y = aten.mul.Tensor(%x, %e)
backward:
%de = aten.mul.Tensor(%dy, %x)
%dw = aten.index_select_backward(%de, [4, 4], 0, %rows)
return %y (0), %dw (w)
"""

FP16 = Precision(torch.float16)
root = {"": "Model"}
one = partial(graphs.chain, 1)
padded = partial(graphs.parse, PADDED, root)
Build = Callable[[], Program]
CASES: dict[str, tuple[pipeline.Pass, Build]] = {
    f"{name}.{case}": (step or PASSES[name], build)
    for name, case, step, build in [
        ("canonicalize", "layered", None, graphs.layered),
        ("canonicalize", "cast", None, partial(graphs.parse, CAST, root)),
        ("canonicalize", "returned", None, partial(graphs.parse, RETURNED, root)),
        (
            "canonicalize",
            "written",
            None,
            partial(graphs.parse, WRITTEN, root | {"layers.0": "L", "layers.1": "L"}),
        ),
        ("assign_units", "chain", None, graphs.chain),
        (
            "assign_units",
            "nested",
            None,
            partial(graphs.parse, NESTED, root | {"layers.0": "L", "layers.0.mlp": "M"}),
        ),
        ("assign_checkpoints", "two", None, lambda: marked()),
        (
            "checkpoint",
            "two",
            None,
            partial(graphs.parse, CHECKPOINTED, root | {"layers.0": "L", "layers.1": "L"}),
        ),
        # The root's embedding has 5 rows, padded to 6: 96 bytes. A layer: 64 + 16 + 64.
        ("bucket", "split", Bucket(max_bytes=80), graphs.layered),
        ("bucket", "merged", Bucket(min_bytes=65), graphs.chain),
        ("bucket", "packed", Bucket(pack_bytes=65), graphs.layered),
        ("insert_unshard", "layered", None, graphs.layered),
        ("insert_unshard", "split", None, partial(graphs.layered, 1)),
        ("insert_unshard", "merged", None, graphs.chain),
        ("insert_unshard", "packed", None, partial(graphs.layered, 1)),
        (
            "insert_unshard",
            "packed_everything",
            None,
            lambda: graphs.configured(
                padded(), precision=graphs.BF16, world_size=4, reshard=2, offloaded=True
            ),
        ),
        (
            "insert_unshard",
            "read_once",
            None,
            partial(graphs.parse, READ_ONCE, root | {"layers.0": "L"}, frozen=["frozen"]),
        ),
        ("insert_unshard", "bf16", None, partial(one, precision=graphs.BF16)),
        ("insert_unshard", "offload", None, partial(one, offloaded=True)),
        (
            "insert_unshard",
            "offload_bf16",
            None,
            lambda: graphs.configured(padded(), precision=graphs.BF16, offloaded=True),
        ),
        ("insert_unshard", "kept", None, partial(one, reshard=False)),
        ("insert_unshard", "reshard_2_of_4", None, partial(one, world_size=4, reshard=2)),
        ("insert_unshard", "world_1", None, partial(one, world_size=1)),
        (
            "insert_unshard",
            "world_1_bf16",
            None,
            partial(one, world_size=1, precision=graphs.BF16),
        ),
        ("insert_unshard", "ignored", None, partial(one, ignored=["head"])),
        ("insert_reduce", "layered", None, graphs.layered),
        ("insert_reduce", "packed", None, partial(graphs.layered, 1)),
        (
            "insert_reduce",
            "packed_everything",
            None,
            lambda: graphs.configured(padded(), precision=graphs.BF16, replicas=2, offloaded=True),
        ),
        ("insert_reduce", "shared", None, partial(graphs.parse, SHARED_GRADS, root)),
        (
            "insert_reduce",
            "tangent",
            None,
            partial(graphs.parse, TANGENT, root | {"layers.0": "L"}),
        ),
        ("insert_reduce", "dtypes", None, partial(graphs.parse, DTYPES, root)),
        ("insert_reduce", "hybrid", None, partial(one, replicas=2)),
        ("insert_reduce", "no_shard", None, partial(one, world_size=1, replicas=2)),
        (
            "insert_reduce",
            "bf16",
            None,
            lambda: graphs.configured(padded(), precision=graphs.BF16),
        ),
        ("insert_reduce", "fp16", None, partial(one, precision=FP16, world_size=4)),
        (
            "insert_reduce",
            "predivided",
            InsertReduce(divide_factor=4, predivide_factor=2),
            partial(one, replicas=2),
        ),
        ("insert_reduce", "offload", None, partial(one, offloaded=True)),
        (
            "insert_reduce",
            "offload_hybrid_bf16",
            None,
            partial(one, offloaded=True, replicas=2, precision=graphs.BF16),
        ),
        ("insert_reduce", "no_sync", None, partial(one, sync=False, precision=graphs.BF16)),
        (
            "insert_reduce",
            "no_sync_adds",
            None,
            partial(one, sync=False, accumulated=EACH, precision=graphs.BF16),
        ),
        ("insert_reduce", "accumulated", None, partial(one, accumulated=frozenset({"head"}))),
        (
            "insert_reduce",
            "comm_hook",
            None,
            lambda: graphs.configured(padded(), precision=graphs.BF16, comm_hook=True),
        ),
        ("insert_reduce", "ignored", None, partial(one, ignored=["head"])),
        ("prefetch", "depth_0", Prefetch(0, 0), graphs.chain),
        ("prefetch", "depth_1", Prefetch(1, 1), graphs.chain),
        ("prefetch", "depth_2", Prefetch(2, 2), partial(graphs.chain, 3)),
        ("prefetch", "post", Prefetch("post", "post"), graphs.layered),
        ("prefetch", "max_inflight", Prefetch(3, 3, max_inflight=2), partial(graphs.chain, 3)),
        ("prefetch", "hybrid_offload", None, partial(graphs.chain, replicas=2, offloaded=True)),
        ("insert_step", "chain", InsertStep(), partial(graphs.chain, optimizer_in_backward=True)),
        ("reinplace", "dying", None, partial(graphs.parse, DYING, root)),
        ("annotate_streams", "chain", None, graphs.chain),
        (
            "annotate_streams",
            "every_stream",
            None,
            partial(one, replicas=2, offloaded=True, precision=graphs.BF16),
        ),
        ("insert_free", "chain", None, graphs.chain),
        ("insert_free", "sent_copies", None, partial(one, offloaded=True, precision=graphs.BF16)),
        ("insert_free", "packed", None, partial(graphs.layered, 1)),
        ("insert_free", "kept", None, partial(one, reshard=False)),
        ("insert_free", "reshard_2_of_4", None, partial(one, world_size=4, reshard=2)),
        (
            "insert_free",
            "cast_results",
            None,
            partial(one, replicas=2, precision=Precision(torch.bfloat16)),
        ),
        ("insert_free", "views", None, partial(graphs.parse, VIEWS, root)),
        ("outline_regions", "chain", None, graphs.chain),
        ("outline_regions", "layered", None, graphs.layered),
        ("compile_regions", "layered", None, graphs.layered),
    ]
}


# What the bucket pass does in front of the pass of a case, if not the default.
BUCKETS = {
    "insert_unshard.split": Bucket(max_bytes=80),
    "insert_unshard.merged": Bucket(min_bytes=65),
    "insert_unshard.packed": Bucket(pack_bytes=65),
    "insert_unshard.packed_everything": Bucket(pack_bytes=65),
    "insert_reduce.packed": Bucket(pack_bytes=65),
    "insert_reduce.packed_everything": Bucket(pack_bytes=65),
    "insert_free.packed": Bucket(pack_bytes=65),
}


def marked() -> Program:
    """Three calls, of which the first layer is checkpointed selectively and the second fully."""
    text = re.sub(r" checkpoint=\d( save)?", "", CHECKPOINTED)
    text = re.sub(
        r"layers\.(\d)$", lambda m: f"layers.{m[1]} call={int(m[1]) + 1}", text, flags=re.M
    )
    program = graphs.parse(text, root | {"layers.0": "L", "layers.1": "L"})
    program.calls = (Call("", 0, None), Call("layers.0", 0, 0), Call("layers.1", 0, 0))
    program.checkpoints = {"layers.0": "selective", "layers.1": "full"}
    return program


def before(name: str, program: Program, bucket: Bucket | None = None) -> None:
    """Run the passes of the default pipeline that come before `name`; with another `bucket`."""
    names, passes = list(PASSES), PASSES | {"bucket": bucket or Bucket()}
    name = {"insert_step": "reinplace"}.get(name, name)  # where a pipeline has it, if asked for
    pipeline.run(program, [passes[each] for each in names[: names.index(name)]])


def after(program: Program) -> str:
    """The dump; with a schedule, that, and its regions."""
    if program.schedule is None:
        return dump.text(program)
    lines: list[str] = []
    for phase, outer in program.schedule.phases():
        lines += [f"{phase}:", *("  " + dump.line(node) for node in outer.nodes)]
    for region in program.schedule.regions.values():
        lines.append(f"{region.name}:" if region.compiled is None else f"{region.name}, compiled:")
        lines += ["  " + dump.line(node) for node in region.graph.nodes]
    return "\n".join(lines)


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    step, build = CASES[case]
    program = build()
    before(case.partition(".")[0], program, BUCKETS.get(case))
    values = graphs.random_values(build())
    text, numbers = dump.text(program), graphs.run(program, values)
    of_each = graphs.run(program, values, apart=True)
    pipeline.run(program, [step], check_each=True)
    if (
        step.name != "insert-step"
    ):  # returns no gradients: tests/codegen/test_optimizer_in_program.py
        graphs.assert_same(graphs.run(program, values), numbers, exact=True, dtypes=False)
        ours = graphs.run(program, values, apart=True)
        graphs.assert_same(ours, of_each, exact=False, dtypes=False)
    golden, text = GOLDENS / f"{case}.txt", f"# before\n{text}\n\n# after\n{after(program)}\n"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_every_golden_has_its_case_and_every_pass_a_golden() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == set(CASES)
    files = {path.stem for path in (GOLDENS.parents[2] / "passes").glob("[!_]*.py")}
    assert {case.partition(".")[0] for case in CASES} == files == {*PASSES, "insert_step"}


def by_hand(build: Build, model: nn.Module, *args: Any) -> Any:
    return build, model, args, {}


def captured(name: str, world_size: int = 2) -> Any:
    torch.manual_seed(0)
    model = MODELS[name].build()
    args, kwargs = MODELS[name].batch(0, 0)

    def build() -> Program:
        units = find_units(model)
        return trace.capture(model, args, kwargs, units=units, world_size=world_size, training=True)

    return build, model, args, kwargs


STEPS: dict[str, Callable[[], Any]] = {
    "layered": lambda: by_hand(graphs.layered, graphs.Layered(), torch.tensor([0, 3, 1, 4])),
    "chain": lambda: by_hand(graphs.chain, graphs.Chain(), torch.randn(2, 4)),
    "tied": partial(captured, "tied"),
    "mlp13 on 3": partial(captured, "mlp13", 3),
    "convnet": partial(captured, "convnet"),
    "dropout": partial(captured, "dropout"),
}


@pytest.mark.parametrize(
    "model", [pytest.param(n, marks=pytest.mark.slow) if n == "tied" else n for n in STEPS]
)
@pytest.mark.sample(2)
def test_every_pass_keeps_the_numbers_of_eager(model: str) -> None:
    torch.manual_seed(0)
    build, module, args, kwargs = STEPS[model]()
    values = graphs.values_of(module, *args, **kwargs)
    program = build()
    numbers = graphs.run(program, values)
    graphs.assert_same(numbers, graphs.eager(module, values, *args, **kwargs), exact=False)
    for step in EXACT:
        pipeline.run(program, [step], check_each=True)
        graphs.assert_same(graphs.run(program, values), numbers, exact=True)


# Settings of a program, and of Config.
bf16, fp32_reduce = Precision(torch.bfloat16), graphs.BF16
STRATEGIES: dict[str, dict[str, Any]] = {
    "shard_grad_op": {"reshard": False},
    "reshard_2_of_4": {"reshard": 2, "world_size": 4},
    "no_shard": {"world_size": 1, "replicas": 2},
    "hybrid": {"replicas": 2},
    "one_rank": {"world_size": 1},
    "uneven": {"world_size": 3},
    "bf16": {"precision": bf16, "world_size": 3},
    "fp32_reduce": {"precision": fp32_reduce, "world_size": 3},
    "fp16": {"precision": FP16, "world_size": 4},
    "low_precision_grads": {
        "precision": Precision(torch.bfloat16, keep_low_precision_grads=True),
        "replicas": 2,
    },
    "offload": {"offloaded": True},
    "offload_one_rank": {"offloaded": True, "world_size": 1, "replicas": 2},
    "no_sync": {"sync": False, "precision": fp32_reduce},
    "no_sync_adds": {"sync": False, "accumulated": EACH, "precision": bf16},
    "accumulated": {"accumulated": EACH, "precision": fp32_reduce},
    "comm_hook": {"comm_hook": True, "world_size": 3},
    "comm_hook_no_shard": {"comm_hook": True, "world_size": 1, "replicas": 2},
    "ignored": {"ignored": ["head"], "replicas": 2},
    "everything": {
        "reshard": 2,
        "world_size": 4,
        "replicas": 2,
        "offloaded": True,
        "precision": fp32_reduce,
        "accumulated": frozenset({"layers.0.weight"}),
        "ignored": ["layers.1.weight"],
    },
    "everything_kept": {
        "reshard": False,
        "world_size": 3,
        "replicas": 2,
        "offloaded": True,
        "precision": bf16,
        "accumulated": EACH,
    },
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sample(5)
def test_every_strategy_keeps_the_numbers_of_eager(strategy: str) -> None:
    """Alike on all ranks, bit for bit; and with gradients that differ, up to rounding."""
    settings = STRATEGIES[strategy]
    torch.manual_seed(0)
    dtype = settings.get("precision", Precision()).param_dtype or torch.float32
    model, x = graphs.Chain(), torch.randn(2, 4)
    program = graphs.chain(**settings)
    values = graphs.values_of(model, x) | graphs.accumulated_values(program)
    alike, apart = graphs.run(program, values), graphs.run(program, values, apart=True)
    wanted = graphs.eager(model.to(dtype), values, x.to(dtype))
    for fqn in program.accumulated:
        wanted["grad", fqn] = values["accumulated", fqn] + wanted["grad", fqn]
    if not program.sync:
        kinds = {"grad": "accumulated"}
        wanted = {(kinds.get(kind, kind), name): v for (kind, name), v in wanted.items()}
    graphs.assert_same(alike, wanted, exact=False)
    for step in PASSES.values():
        pipeline.run(program, [step], check_each=True)
        same = graphs.run(program, values)
        graphs.assert_same(same, alike, exact=dtype is not torch.float16, dtypes=False)
        each = graphs.run(program, values, apart=True)
        graphs.assert_same(each, apart, exact=False, dtypes=False)
    keeps = program.units[0].precision.keep_low_precision_grads
    for result, value in zip(program.results, program.values, strict=True):
        if result.kind == "grad" and result.name in program.params and not keeps:
            assert value.meta["val"].dtype is torch.float32


@pytest.mark.parametrize("strategy", ["shard_grad_op", "reshard_2_of_4", "no_shard", "offload"])
def test_padding_ties_and_dropout_under_every_strategy(strategy: str) -> None:
    program = graphs.layered(**STRATEGIES[strategy])
    values = graphs.random_values(program)
    numbers = graphs.run(program, values)
    full(program)
    graphs.assert_same(graphs.run(program, values), numbers, exact=True)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offloaded", [False, True])
def test_integers_are_loaded_and_not_cast(world_size: int, offloaded: bool) -> None:
    program = graphs.parse(INDEX, root, frozen=["rows"])
    settings = {"world_size": world_size, "offloaded": offloaded}
    program = graphs.configured(program, precision=graphs.BF16, **settings)
    values = graphs.random_values(program)
    numbers = graphs.run(program, values)
    same = graphs.run(full(program), values)
    graphs.assert_same(same, numbers, exact=True, dtypes=False)


def test_fp32_gradients_are_rounded_to_the_dtype_of_the_reduction() -> None:
    program = graphs.chain(precision=Precision(None, torch.bfloat16))
    values = graphs.random_values(program)
    wanted = graphs.run(program, values)
    wanted |= {key: v.bfloat16().float() for key, v in wanted.items() if key[0] == "grad"}
    graphs.assert_same(graphs.run(full(program), values), wanted, exact=True)


@pytest.mark.parametrize("settings", [{}, {"replicas": 2}, {"precision": FP16, "world_size": 4}])
@pytest.mark.parametrize(
    ("step", "factor"),
    [  # of the mean over 2 or 4 ranks, of which each has twice the gradient of the one before
        (InsertReduce("sum"), {2: 2, 4: 4}),
        (InsertReduce("max"), {2: 2 / 1.5, 4: 8 / 3.75}),
        (InsertReduce(divide_factor=1), {2: 2, 4: 4}),
        (InsertReduce(divide_factor=6), {2: 1 / 3, 4: 2 / 3}),
        (InsertReduce(divide_factor=6, predivide_factor=3), {2: 1 / 3, 4: 2 / 3}),
        (InsertReduce(predivide_factor=8), {2: 1, 4: 1}),
    ],
)
def test_reductions_other_than_the_mean(
    step: InsertReduce, factor: dict[int, float], settings: dict[str, Any]
) -> None:
    program = graphs.chain(1, **settings)
    values = graphs.random_values(program)
    if step.op == "max":
        values = {key: value.abs() for key, value in values.items()}
    wanted = graphs.run(program, values, apart=True)
    wide = factor[program.world_size * program.replicas]
    wanted |= {key: value.float() * wide for key, value in wanted.items() if key[0] == "grad"}
    passes = [step if each.name == step.name else each for each in PASSES.values()]
    pipeline.run(program, passes, check_each=True)
    ours = graphs.run(program, values, apart=True)
    tolerant = {key: value.to(program_dtype(program)) for key, value in ours.items()}
    wanted = {key: value.to(program_dtype(program)) for key, value in wanted.items()}
    graphs.assert_same(tolerant, wanted, exact=False)


def program_dtype(program: Program) -> torch.dtype:
    return program.units[0].precision.param_dtype or torch.float32


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes]


def test_canonicalize_strips_what_changes_nothing() -> None:
    program = graphs.parse(TANGENT, {"": "Model"})
    pipeline.run(program, [PASSES["canonicalize"]])
    assert program.phase("backward") == []
    assert program.values[1].op == "placeholder"


def test_canonicalize_shares_masks_and_draws_every_random_number() -> None:
    program = graphs.layered()
    assert targets(program).count(aten.gt.Scalar) == 2
    assert targets(program).count(aten.detach.default) == 4
    pipeline.run(program, [PASSES["canonicalize"]])
    assert targets(program).count(aten.gt.Scalar) == 1
    assert targets(program).count(aten.detach.default) == 0
    first = program.phase("forward")[0]
    assert first.target is aten.gt.Scalar and tags.get(first).module == ""
    noises = [node for node in program.phase("forward") if node.target is aten.rand_like.default]
    assert [tags.get(node).module for node in noises] == ["layers.0", "layers.1"]


def test_reduce_copies_a_gradient_that_is_an_activation_gradient() -> None:
    program = graphs.layered()
    before("prefetch", program)
    launch = program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)[0]
    weight, bias, shift = tags.operands(launch)
    assert (weight.name, bias.name) == ("dweight_1", "dbias_1")
    assert shift.target is aten.clone.default
    assert [node.name for node in shift.all_input_nodes] == ["dx_1"]


def regions(program: Program) -> int:
    assert program.schedule is not None
    return len(program.schedule.regions)


def full(program: Program) -> Program:
    pipeline.run(program, list(PASSES.values()))
    return program


def transformer(depth: int) -> Program:
    model = models.Transformer(depth=depth)
    args, kwargs = MODELS["transformer"].batch(0, 0)
    return trace.capture(model, args, kwargs, units=find_units(model), world_size=2, training=True)


@pytest.mark.parametrize("build", [graphs.layered, graphs.chain, transformer])
def test_identical_layers_share_regions(build: Callable[[int], Program]) -> None:
    two, eight = full(build(2)), full(build(8))
    assert regions(two) == regions(eight)
    forward = dump.schedule(eight, phase="forward")
    assert re.search(r"^x [67]  forward .* layers\.0 \.\. [56] ", forward, re.MULTILINE)
    assert re.search(r"^x [56]  backward", dump.schedule(eight, phase="backward"), re.MULTILINE)
    assert "layers.3 " in dump.schedule(eight, folded=False)
    assert "x 7" not in dump.schedule(eight, folded=False)
