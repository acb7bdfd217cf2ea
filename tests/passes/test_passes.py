"""Each pass: its text before and after on programs written by hand, and the numbers it must keep.

The texts are tests/passes/goldens/<pass file>.<case>.txt: the program before the pass and after it,
as `fxshard.ir.text` writes and reads it. `fxshard opt FILE --passes PASS` reads the first. After a
wanted change rewrite them with

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

from fxshard import pipeline
from fxshard.capture import trace
from fxshard.config.precision import Precision
from fxshard.ir import dump, ops, tags, text
from fxshard.ir.needs import Needs
from fxshard.ir.program import Program
from fxshard.ir.splitting import find_units
from fxshard.passes.async_tensor_parallel import AsyncTensorParallel
from fxshard.passes.begin_backward import BeginBackward
from fxshard.passes.bucket import Bucket
from fxshard.passes.chunk_loss import ChunkLoss
from fxshard.passes.clip_steps import ClipSteps
from fxshard.passes.cut_rows import CutRows
from fxshard.passes.insert_reduce import InsertReduce
from fxshard.passes.insert_step import InsertStep
from fxshard.passes.join_ranks import JoinRanks
from fxshard.passes.offload_activations import OffloadActivations
from fxshard.passes.prefetch import Prefetch
from tests import graphs, texts
from tests.distributed.slow_links import SLOW_LINKS
from tests.passes.passes_cases import (
    CHECKPOINTED,
    EACH,
    FP16,
    LOSS,
    PASSES,
    SHIFTED_LOSS,
    Build,
    full,
    marked,
    root,
)
from tests.zoo import MODELS, models

aten = torch.ops.aten

# Passes that a pipeline has where an option asks for them, and before which one.
ASKED_FOR = {
    "begin_backward": "launch_collectives",
    "insert_step": "launch_collectives",
    "clip_steps": "launch_collectives",
    "join_ranks": "bucket",
    "async_tensor_parallel": "launch_collectives",
    "offload_activations": "reinplace",
    "cut_rows": "assign_units",
    "chunk_loss": "assign_units",
}
GOLDENS = Path(__file__).parent / "goldens"

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
# This rank skips layer 1; another one reads it in backward before it has the gradient of layer 2.
SKIPPED = """
%x : f32[2,4] = input 0
%w : f32[4,4] = param layers.0.weight
%v : f32[4,4] = param layers.1.weight
%u : f32[4,4] = param layers.2.weight
%dy : f32[2,4] = tangent 0
forward:
%tw = aten.t(%w)  | layers.0
%h = aten.mm(%x, %tw)  | layers.0
%tu = aten.t(%u)  | layers.2
%y = aten.mm(%h, %tu)  | layers.2
backward:
%dt = aten.t(%dy)  | layers.2
%du = aten.mm(%dt, %h)  | layers.2
%dh = aten.mm(%dy, %u)  | layers.2
%dht = aten.t(%dh)  | layers.0
%dw = aten.mm(%dht, %x)  | layers.0
return %y (0), %du (layers.2.weight), %dw (layers.0.weight)
"""


def skipped() -> Program:
    """`SKIPPED`, and what ranks have agreed on."""
    program = graphs.parse(SKIPPED, root | {f"layers.{i}": "L" for i in range(3)})
    zero, first, last = (f"layers.{i}.weight" for i in range(3))
    reads, grads = [("read", last), ("read", first)], [("grad", f) for f in (last, first, zero)]
    program.common = Needs((zero, first, last), (1, 2, 3), (*reads, *grads))
    return program


one = partial(graphs.chain, 1)
padded = partial(graphs.parse, PADDED, root)


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
        ("cut_rows", "shifted", CutRows(), partial(graphs.parse, SHIFTED_LOSS, root)),
        ("chunk_loss", "two", ChunkLoss(2), partial(graphs.parse, LOSS, root)),
        ("join_ranks", "skipped", JoinRanks(), skipped),
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
        ("insert_unshard", "columns", None, partial(one, columns=True)),
        (
            "insert_unshard",
            "columns_reshard_2_of_4",
            None,
            partial(one, columns=True, world_size=4, reshard=2),
        ),
        ("insert_reduce", "columns", None, partial(one, columns=True)),
        ("insert_free", "columns", None, partial(one, columns=True)),
        ("prefetch", "depth_0", Prefetch(0, 0), graphs.chain),
        ("prefetch", "depth_1", Prefetch(1, 1), graphs.chain),
        ("prefetch", "depth_2", Prefetch(2, 2), partial(graphs.chain, 3)),
        ("prefetch", "post", Prefetch("post", "post"), graphs.layered),
        ("prefetch", "max_inflight", Prefetch(3, 3, max_inflight=2), partial(graphs.chain, 3)),
        ("prefetch", "stayed", Prefetch(1, 1), partial(graphs.chain, 3, reshard={"": False})),
        ("prefetch", "hybrid_offload", None, partial(graphs.chain, replicas=2, offloaded=True)),
        ("insert_step", "chain", InsertStep(), partial(graphs.chain, optimizer_in_backward=True)),
        ("begin_backward", "chain", BeginBackward(), lambda: graphs.chain(whole=True)),
        (
            "clip_steps",
            "chain",
            ClipSteps(),
            lambda: graphs.chain(optimizer_in_backward=True, max_norm=1.0),
        ),
        (
            "async_tensor_parallel",
            "along_the_sequence",
            AsyncTensorParallel(SLOW_LINKS),
            graphs.along_the_sequence,
        ),
        ("launch_collectives", "each", None, graphs.of_its_own),
        ("offload_activations", "chain", OffloadActivations(10**6), partial(graphs.chain, 3)),
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


# What the bucket pass does before the pass of a case, if not the default.
BUCKETS = {
    "insert_unshard.split": Bucket(max_bytes=80),
    "insert_unshard.merged": Bucket(min_bytes=65),
    "insert_unshard.packed": Bucket(pack_bytes=65),
    "insert_unshard.packed_everything": Bucket(pack_bytes=65),
    "insert_reduce.packed": Bucket(pack_bytes=65),
    "insert_reduce.packed_everything": Bucket(pack_bytes=65),
    "insert_free.packed": Bucket(pack_bytes=65),
}


def before(case: str, program: Program, bucket: Bucket | None = None) -> None:
    """Run the passes of the default pipeline that come before `case`; with another `bucket`."""
    name = case
    names, passes = list(PASSES), PASSES | {"bucket": bucket or Bucket()}
    name = ASKED_FOR.get(name, name)
    first = [InsertStep()] if case.startswith("clip_steps") else []
    pipeline.run(program, [*(passes[each] for each in names[: names.index(name)]), *first])


def schedule(program: Program) -> str:
    """What of a program no text holds, since it follows from that: its schedule and regions."""
    assert program.schedule is not None
    lines: list[str] = []
    for phase, outer in program.schedule.phases():
        lines += [f"{phase}:", *("  " + dump.line(node) for node in outer.nodes)]
    for region in program.schedule.regions.values():
        lines.append(f"{region.name}:" if region.compiled is None else f"{region.name}, compiled:")
        lines += ["  " + dump.line(node) for node in region.graph.nodes]
    return "\n".join([*lines, ""])


def of_inductor(program: Program) -> bool:
    regions = program.schedule.regions.values() if program.schedule is not None else ()
    return any(region.compiled is not None for region in regions)


def sections(program: Program) -> str:
    """What a golden says of the program after the pass; code of Inductor's has no text."""
    found = "" if of_inductor(program) else f"# after\n{text.write(program)}"
    if program.schedule is not None:
        found += f"# schedule\n{schedule(program)}"
    return found


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    step, build = CASES[case]
    built = build()
    before(case.partition(".")[0], built, BUCKETS.get(case))
    golden = GOLDENS / f"{case}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        program = text.parse(first := text.write(built))
        pipeline.run(program, [step])
        golden.write_text(f"# before\n{first}{sections(program)}")
    program = text.parse(golden.read_text())
    assert text.write(program) == text.write(built), "other passes come before it, or other lines"
    values = graphs.random_values(build())
    steps = step.name == "clip-steps"  # before it, too
    numbers = {} if steps else graphs.run(program, values)
    of_each = {} if steps else graphs.run(program, values, apart=True)
    pipeline.run(program, [step], check_each=True)
    # Those that step return no gradients, and another one arrives: tests/end_to_end.
    if step.name not in ("begin-backward", "insert-step", "clip-steps"):
        ours = graphs.run(program, values)
        zeros = {key: ours.pop(key) for key in ours.keys() - numbers.keys()}
        assert bool(zeros) == (step.name == "join-ranks") and not any(
            map(torch.any, zeros.values())
        )
        # chunk-loss adds up in another order; cut-rows leaves rows of zeros out of the sums of a
        # product, which a BLAS may then add in another (one with AMX does, one with AVX2 does not)
        in_order = step.name not in ("chunk-loss", "cut-rows")
        graphs.assert_same(ours, numbers, exact=in_order, dtypes=False)
        ours = graphs.run(program, values, apart=True)
        ours = {key: value for key, value in ours.items() if key not in zeros}
        graphs.assert_same(ours, of_each, exact=False, dtypes=False)
    assert f"# before\n{text.write(built)}{sections(program)}" == golden.read_text()
    if not of_inductor(program):
        _, _, rest = golden.read_text().partition("# after\n")
        texts.assert_equal(text.parse(rest), program)


def test_every_golden_has_its_case_and_every_pass_a_golden() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == set(CASES)
    files = {path.stem for path in (GOLDENS.parents[2] / "passes").glob("[!_]*.py")}
    assert {case.partition(".")[0] for case in CASES} == files == {*PASSES, *ASKED_FOR}


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
