"""The text form: the same on all ranks and in every run, folded where layers repeat."""

import dataclasses
import re
from collections import Counter
from typing import Any

import pytest
import torch

import fxshard
from fxshard import pipeline
from fxshard.config.checked import Config
from fxshard.ir import dump, ops
from fxshard.ir.dump import Row
from fxshard.ir.program import Program
from fxshard.memory.views.live import live_after
from fxshard.passes.canonicalize import Canonicalize
from fxshard.verify import certificate
from tests import graphs
from tests.zoo import MODELS


def rewritten(program: Program, **options: Any) -> Program:
    pipeline.run(program, pipeline.default_passes(Config(**options)))
    return program


def plan(name: str, world_size: int = 2, batch: int = 0) -> fxshard.Plan:
    args, kwargs = MODELS[name].batch(batch, batch)
    return fxshard.plan(MODELS[name].build(), args, kwargs, world_size=world_size)


def everything(name: str, batch: int = 0) -> list[str]:
    """All that must not depend on the rank."""
    made = plan(name, batch=batch)
    program = made.program
    return [
        dump.text(program),
        dump.schedule(program),
        *certificate.agreement(program),
        made.certificate,
        made.code,
    ]


def on_a_rank(rank: int, world_size: int, name: str) -> list[str]:
    """The ranks have other weights, another batch, and what they allocate lies elsewhere."""
    torch.manual_seed(rank)
    ballast = [torch.empty(rank) for _ in range(1000 * rank)]
    found = everything(name, batch=rank)
    del ballast
    return found


@pytest.mark.parametrize("name", ["transformer", "tied", "mlp13", "convnet"])
@pytest.mark.sample(2)
def test_two_captures_have_one_text(name: str) -> None:
    assert everything(name, batch=0) == everything(name, batch=1)


@pytest.mark.parametrize("name", ["tied", pytest.param("llama", marks=pytest.mark.slow)])
def test_all_ranks_have_one_text(ranks: Any, name: str) -> None:
    first, second = ranks(2).run(on_a_rank, name)
    assert first == second == everything(name)  # here strings have other hashes, sets other orders


def test_text_says_what_the_graph_holds() -> None:
    program = rewritten(graphs.layered(), **graphs.APART)
    lines = dump.text(program).splitlines()
    assert lines[0] == "program world_size=2 units=3"
    assert lines[1] == "  %tokens : i64[4] = input 0"
    assert "  %scale : f32[4,1] = buffer scale" in lines
    assert "  %shard_embed_weight : f32[3,4] = shard embed.weight" in lines
    assert "  %dy : f32[4,5] = tangent 0" in lines
    assert lines.index("forward:") < lines.index("backward:")
    assert (
        "  %unshard_1 : (f32[4,4], f32[4], f32[4,4]) = fxshard.all_gather("
        "[%shard_layers_0_weight, %shard_layers_0_bias, %shard_layers_0_shift], 2)"
        "  | layers.0 unit=1 pair=1 stream=unshard records=u1"
    ) in lines
    assert "  %large_0 : b8[4] = aten.gt.Scalar(%tokens, 1)" in [
        line.partition("  |")[0] for line in lines
    ]
    assert lines[-1].startswith("  return %y (0), ") and "(layers.1.shift)" in lines[-1]
    assert len(lines) == len(program.graph.nodes) + 3


def test_text_says_what_is_packed() -> None:
    program = rewritten(graphs.layered())
    lines = dump.text(program).splitlines()
    assert lines[1] == "  bucket 0: embed.weight packed"
    assert lines[2] == "  bucket 1: " + ", ".join(
        f"layers.0.{name} packed" for name in ("weight", "bias", "shift")
    )
    assert (
        "  %pack_1 : (f32[18]) = fxshard.pack("
        "[%shard_layers_0_weight, %shard_layers_0_bias, %shard_layers_0_shift], torch.float32)"
        "  | layers.0 unit=1 pair=1 stream=unshard"
    ) in lines
    assert (
        "  %unshard_1 : (f32[36]) = fxshard.all_gather([%getitem_1], 2)"
        "  | layers.0 unit=1 pair=1 stream=unshard records=u1"
    ) in lines
    (unpack,) = (line for line in lines if line.startswith("  %unpack_1 : "))
    assert "(f32[4,4], f32[4], f32[4,4])" in unpack and "[[2, 4], [2], [2, 4]])" in unpack
    assert len(lines) == len(program.graph.nodes) + 3 + len(program.buckets)


def test_text_shows_a_node_without_tag() -> None:
    """The dump is what one reads when a pass forgot to tag: it must not fail on that."""
    program = graphs.chain()
    node = program.phase("forward")[2]
    before = dump.text(program)
    del node.meta["fxshard"]
    assert "  %x_1 : f32[2,4] = aten.tanh(%mm_0)" in dump.text(program).splitlines()
    assert len(dump.text(program).splitlines()) == len(before.splitlines())


@pytest.mark.parametrize("at", [0, 3, -1])
def test_excerpt_has_a_caret_under_the_node(at: int) -> None:
    program = graphs.layered()
    node = list(program.graph.nodes)[at]
    lines = dump.excerpt(program, node).splitlines()
    (caret,) = (i for i, line in enumerate(lines) if line.strip(" ^") == "")
    assert lines[caret - 1] == "    " + dump.line(node, program)
    assert lines[caret].startswith("    ^^^") and len(lines[caret]) <= len(lines[caret - 1])
    assert len(lines) <= 12


# -- the folded schedule --------------------------------------------------------------------------


def row(name: str, unit: str = "u", **changes: Any) -> Row:
    made = Row("forward", name, "Layer", (unit,), "", "compute", "", 0)
    return dataclasses.replace(made, **changes)


def folded(text: str) -> str:
    """Fold one row per letter; the units count up: ``a b b`` -> ``a 2(b)``."""
    rows = [row(letter, f"layers.{i}") for i, letter in enumerate(text)]
    blocks = dump.fold(rows)
    units = [unit for _, block in blocks for each in block for unit in each.units]
    assert sorted(units) == sorted(unit for each in rows for unit in each.units)
    parts = ("".join(each.operation for each in block) for _, block in blocks)
    return " ".join(
        part if count == 1 else f"{count}({part})"
        for (count, _), part in zip(blocks, parts, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("abc", "abc"),
        ("aaaa", "4(a)"),
        ("xabababy", "x 3(ab) y"),
        ("xabcabcabyz", "x 2(abc) abyz"),
        ("ababcdcdcd", "2(ab) 3(cd)"),
        ("abcdabcd", "2(abcd)"),
        ("xaabaabaaby", "x 3(aab) y"),
    ],
)
def test_fold(text: str, expected: str) -> None:
    assert folded(text) == expected


def test_rows_that_differ_do_not_fold() -> None:
    same = [row("a", "layers.0"), row("a", "layers.1")]
    assert [count for count, _ in dump.fold(same)] == [2]
    for change in ({"kind": "Other"}, {"bytes": 8}, {"what": "region_1"}, {"stream": "unshard"}):
        assert [count for count, _ in dump.fold([same[0], row("a", **change)])] == [1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.3"], "layers.3"),
        (["layers.0", "layers.1", "layers.2"], "layers.0 .. 2"),
        (["layers.7", "layers.2"], "layers.7 .. 2"),
        (["h.0.mlp", "h.1.mlp"], "h.0.mlp .. 1.mlp"),
        (["(root)", "(root)"], "(root)"),
    ],
)
def test_span(names: list[str], expected: str) -> None:
    assert dump.span(names) == expected


def test_schedule_folds_layers_and_unfolds_to_every_row() -> None:
    program = rewritten(graphs.layered(8))
    whole, short = dump.schedule(program, folded=False), dump.schedule(program)
    assert len(whole.splitlines()) == 3 + len(dump.rows(program))
    assert len(short.splitlines()) < 0.5 * len(whole.splitlines())
    header, units, _, *lines = short.splitlines()
    assert header.split() == ["phase", "operation", "unit", "stream", "waits", "for", *MOVED]
    assert units.split() == ["MiB", "MiB"]
    for phase in ("forward", "backward"):
        (first,) = (i for i, line in enumerate(lines) if re.match(rf"x [567]  {phase}", line))
        block = [lines[first]]
        while lines[first + len(block)].startswith('  "'):
            block.append(lines[first + len(block)])
        assert len(block) > 2
        assert all("layers." in line and " .. " in line for line in block)
    both = [dump.schedule(program, phase=phase, folded=False) for phase in ("forward", "backward")]
    assert sum(len(text.splitlines()) - 3 for text in both) == len(dump.rows(program))


MOVED = ["moved", "freed"]


def test_rows_of_one_unit_join() -> None:
    """Bytes and times add up, and what is alive is so after the last."""

    def of(operation: str, what: str = "", **changes: Any) -> Row:
        stands = {"live": (7,), "exposed": (1.0,)}
        return row(operation, **{"what": what, "bytes": 0, **stands, **changes})

    wait = of("wait", "unshard", waits="unshard", bytes=5)
    free = of("free", "unshard", bytes=5, live=(2,), exposed=(0.0,))
    compute, more = of("compute", "region_1"), of("compute", "region_2", live=(3,))
    (both,) = dump.joined([wait, compute, free, more])
    assert (both.operation, both.what, both.waits) == ("compute", "region_1,2", "unshard")
    assert (both.bytes, both.freed, both.live, both.exposed) == (0, 5, (3,), (3.0,))
    (last,) = dump.joined(
        [of("wait", "reduce", waits="reduce"), dataclasses.replace(free, bytes=9)]
    )
    assert (last.operation, last.what, last.freed, last.live) == ("wait", "reduce", 9, (2,))
    cast = of("cast", "2 tensors", stream="unshard", waits="compute", bytes=4)
    sent = of("unshard", "2 tensors", stream="unshard", bytes=8, live=(15,))
    (launch,) = dump.joined([cast, sent])
    assert (launch.operation, launch.what) == ("cast, unshard", "")
    assert (launch.waits, launch.bytes, launch.live) == ("compute", 8, (15,))


@pytest.mark.parametrize(
    "change", [{"units": ("v",)}, {"phase": "backward"}, {"stream": "unshard"}]
)
def test_other_rows_do_not_join(change: dict[str, Any]) -> None:
    free = dataclasses.replace(row("free"), **change)
    assert len(dump.joined([row("compute"), free])) == 2
    assert len(dump.joined([row("reduce"), row("free")])) == 2
    assert len(dump.joined([row("free"), row("compute")])) == 2
    assert len(dump.joined([row("compute"), row("compute", waits="unshard")])) == 2


@pytest.mark.parametrize("folded", [True, False])
def test_live_bytes_are_those_of_the_report(folded: bool) -> None:
    """Of each row, by the names of the ledger's points; of a block, the first and the last."""
    made = plan("transformer")
    ledger = made.memory.ledger()
    assert made.program.schedule is not None
    expected = []
    for phase, graph in made.program.schedule.phases():
        start = next(p.start for p in ledger.phases if p.name == phase)
        names = [moment.node for moment in ledger.moments]
        for node in graph.nodes:
            if node.op == "call_module" or node.target in ops.OPERATORS:
                tick = 2 * names.index(node.name, start + 1) + 1
                expected.append(int(ledger.totals[tick]))
    found = live_after(made.memory)
    rows = dump.rows(made.program, found)
    assert [bytes_ for r in rows for bytes_ in r.live] == expected
    text = dump.schedule(made.program, live=found, folded=folded)
    shown = [line.split()[-1] for line in text.splitlines()[3:]]
    everything = {f"{size / 2**20:.3f}" for size in expected}
    assert set(shown) <= everything
    if not folded:
        assert shown == [f"{size / 2**20:.3f}" for size in expected]


def test_exposed_time_is_that_of_the_estimate() -> None:
    made = plan("transformer")
    estimate = made.estimate("h100")
    lines = made.dump(fold=False, hardware="h100").splitlines()
    assert lines[0].split()[-1] == "exposed" and lines[1].split()[-1] == "ms"
    width = len(lines[2])
    shown = [line[width - 7 :].strip() for line in lines[3:]]
    own = [f"{1e3 * row.exposed:.3f}" if row.exposed else "" for row in estimate.rows]
    assert shown == own and any(shown)
    folded = made.dump(hardware="h100").splitlines()
    width = len(folded[2])
    total = sum(float(line[width - 7 :].strip() or 0) for line in folded[3:])
    assert total == pytest.approx(1e3 * estimate.exposed_communication_seconds, abs=0.01)


# -- what a pass changed --------------------------------------------------------------------------


def test_changes_of_every_pass() -> None:
    """The lines with + and - are all that one text has and the other has not."""
    texts: dict[str, tuple[str, str]] = {}
    args, kwargs = MODELS["mlp13"].batch(0, 0)
    made = fxshard.plan(
        MODELS["mlp13"].build(),
        args,
        kwargs,
        world_size=2,
        checkpoint="full",
        observe=lambda name, before, after: texts.update({name: (before, after)}),
    )
    assert list(texts) == [step.name for step in pipeline.default_passes(made.config)]
    changed = set()
    for name, (before, after) in texts.items():
        lines = dump.changes(before, after).splitlines()[2:]
        less, more = Counter(before.splitlines()), Counter(after.splitlines())
        gone = Counter(line[1:] for line in lines if line.startswith("-"))
        come = Counter(line[1:] for line in lines if line.startswith("+"))
        assert less - gone == more - come  # what stays is the same
        assert gone <= less and come <= more
        assert (less - more) <= gone and (more - less) <= come
        kept = [line[1:] for line in lines if line.startswith((" ", "+"))]
        assert is_part(kept, after.splitlines())
        assert (before == after) == (lines == [])
        changed |= {name} if lines else set()
    assert {"assign-units", "insert-unshard", "insert-reduce", "prefetch", "insert-free"} <= changed


def is_part(some: list[str], lines: list[str]) -> bool:
    """True if `some` are among `lines`, in this order."""
    rest = iter(lines)
    return all(any(line == other for other in rest) for line in some)


def test_schedule_counts_bytes_of_one_unit() -> None:
    rows = dump.rows(rewritten(graphs.layered(), **graphs.APART))
    layer = 4 * (16 + 4 + 16)
    seen = {(r.phase, r.operation, r.what, r.units[0]): r.bytes for r in rows}
    assert seen["forward", "unshard", "3 tensors", "layers.0"] == layer
    assert seen["forward", "wait", "unshard", "layers.0"] == layer
    assert seen["forward", "free", "unshard", "layers.0"] == layer
    assert seen["backward", "unshard", "1 tensor", "layers.0"] == 4 * 16
    assert seen["backward", "reduce", "3 tensors", "layers.0"] == layer
    assert seen["backward", "free", "reduce", "layers.0"] == layer
    assert seen["backward", "unshard", "1 tensor", "(root)"] == 4 * 6 * 4  # 5 rows, padded


def test_schedule_counts_bytes_of_one_packed_unit() -> None:
    rows = [row for row in dump.rows(rewritten(graphs.layered())) if row.units == ("layers.0",)]
    layer = 4 * (16 + 4 + 16)
    seen = [(r.phase, r.operation, r.what, r.bytes) for r in rows if r.operation != "compute"]
    assert seen == [
        ("forward", "pack", "1 tensor", layer // 2),
        ("forward", "unshard", "1 tensor", layer),
        ("forward", "wait", "unshard", layer),
        ("forward", "free", "unshard", layer // 2),  # what was sent
        ("forward", "unpack", "3 tensors", layer),
        ("forward", "free", "unshard", layer),  # what was gathered
        ("forward", "free", "unshard", layer),  # and the copies out of it
        ("backward", "unshard", "1 tensor", 4 * 16),  # the weight: nothing reads the others
        ("backward", "wait", "unshard", 4 * 16),
        ("backward", "free", "unshard", 4 * 16),
        ("backward", "reduce", "1 tensor", layer),
        ("backward", "wait", "reduce", layer // 2),
        ("backward", "free", "reduce", layer),
    ]


def test_a_dump_before_any_unit_is_assigned() -> None:
    program = graphs.chain()
    pipeline.run(program, [Canonicalize()])
    assert "unit=" not in dump.text(program)
