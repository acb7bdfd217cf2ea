"""The text form: the same on all ranks and in every run, folded where layers repeat."""

import dataclasses
from typing import Any

import pytest
import torch

import fxshard
from fxshard import dump, meta, ops, pipeline
from fxshard.config import Config
from fxshard.dump import Row
from fxshard.passes.canonicalize import Canonicalize
from fxshard.program import Program
from tests import graphs
from tests.zoo import MODELS, models


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
        *dump.collectives(program),
        *dump.agreement(program),
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
def test_two_captures_have_one_text(name: str) -> None:
    assert everything(name, batch=0) == everything(name, batch=1)


@pytest.mark.parametrize("name", ["tied", "llama"])
def test_all_ranks_have_one_text(ranks: Any, name: str) -> None:
    first, second = ranks(2).run(on_a_rank, name)
    assert first == second == everything(name)  # here strings have other hashes, sets other orders


def test_text_says_what_the_graph_holds() -> None:
    program = rewritten(graphs.layered())
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
        "  | layers.0 unit=1 pair=1 stream=unshard waits=c1 records=u1"
    ) in lines
    assert "  %x_1 : f32[4,4] = aten.masked_fill.Scalar(%mul_0, %mask_0, 0.5)" in [
        line.partition("  |")[0] for line in lines
    ]
    assert lines[-1].startswith("  return %y (0), ") and "(layers.1.shift)" in lines[-1]
    assert len(lines) == len(program.graph.nodes) + 3


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
    assert len(whole.splitlines()) == 2 + len(dump.rows(program))
    assert len(short.splitlines()) < 0.5 * len(whole.splitlines())
    header, _, *lines = short.splitlines()
    assert header.split() == ["phase", "operation", "unit", "what", "stream", "waits", "for", "MiB"]
    (first,) = (i for i, line in enumerate(lines) if line.startswith("x 7"))
    block = [lines[first]]
    while lines[first + len(block)].startswith('"'):
        block.append(lines[first + len(block)])
    assert all("layers." in line and " .. " in line for line in block)
    both = [dump.schedule(program, phase=phase, folded=False) for phase in ("forward", "backward")]
    assert sum(len(text.splitlines()) - 2 for text in both) == len(dump.rows(program))


def test_schedule_counts_bytes_of_one_unit() -> None:
    rows = dump.rows(rewritten(graphs.layered()))
    layer = 4 * (16 + 4 + 16)
    seen = {(r.phase, r.operation, r.what, r.units[0]): r.bytes for r in rows}
    assert seen["forward", "unshard", "3 tensors", "layers.0"] == layer
    assert seen["forward", "wait", "unshard", "layers.0"] == layer
    assert seen["forward", "free", "unshard", "layers.0"] == layer
    assert seen["backward", "unshard", "1 tensor", "layers.0"] == 4 * 16
    assert seen["backward", "reduce", "3 tensors", "layers.0"] == layer
    assert seen["backward", "free", "reduce", "layers.0"] == layer
    assert seen["backward", "unshard", "1 tensor", "(root)"] == 4 * 6 * 4  # 5 rows, padded


# -- collectives ----------------------------------------------------------------------------------


def test_collectives_in_order() -> None:
    lines = dump.collectives(rewritten(graphs.chain()))
    assert lines == [
        "forward fxshard.all_gather unit=1 [layers.0.weight f32[2,4]]",
        "forward fxshard.all_gather unit=2 [layers.1.weight f32[2,4]]",
        "forward fxshard.all_gather unit=0 [head f32[2,3]]",
        "backward fxshard.reduce_scatter unit=0 [head f32[4,3]]",
        "backward fxshard.all_gather unit=0 [head f32[2,3]]",
        "backward fxshard.all_gather unit=2 [layers.1.weight f32[2,4]]",
        "backward fxshard.reduce_scatter unit=2 [layers.1.weight f32[4,4]]",
        "backward fxshard.reduce_scatter unit=1 [layers.0.weight f32[4,4]]",
    ]


def test_collectives_are_those_of_the_graph() -> None:
    program = plan("mlp13", world_size=3).program
    launches = [node for node in program.graph.nodes if node.target in ops.COLLECTIVES]
    lines = dump.collectives(program)
    assert len(lines) == len(launches)
    for line, node in zip(lines, launches, strict=True):
        fqns = [meta.get(pick).fqn or "" for pick in node.users]
        assert all(f"{fqn} " in line for fqn in fqns)


def test_certificate_tells_programs_apart() -> None:
    certificates = [
        dump.certificate(rewritten(graphs.chain(4))),
        dump.certificate(rewritten(graphs.chain(3))),
        dump.certificate(rewritten(graphs.layered())),
        dump.certificate(rewritten(graphs.chain(4), backward_prefetch=2)),
    ]
    assert len(set(certificates)) == len(certificates)
    assert dump.certificate(rewritten(graphs.chain(4))) == certificates[0]
    assert len(certificates[0]) == 64


def test_certificate_depends_on_the_world_size() -> None:
    assert plan("tied", 2).certificate != plan("tied", 4).certificate


def test_certificate_does_not_see_what_moves_no_data() -> None:
    """Two programs that issue the same collectives may go together, whatever they compute."""
    one, two = graphs.chain(), graphs.chain()
    node = one.phase("forward")[2]
    node.target = torch.ops.aten.sigmoid.default
    assert dump.certificate(rewritten(one)) == dump.certificate(rewritten(two))


def test_agreement_tells_batches_and_modes_apart() -> None:
    model = models.Transformer(depth=1)

    def agreed(*shape: int) -> list[str]:
        tokens = torch.zeros(shape, dtype=torch.int64)
        return dump.agreement(fxshard.plan(model, (tokens,), world_size=2).program)

    training = agreed(2, 8)
    assert training == agreed(2, 8)
    with torch.no_grad():
        inference = agreed(2, 8)
    assert "mode training" in training and "mode inference" in inference


def test_a_dump_before_any_unit_is_assigned() -> None:
    program = graphs.chain()
    pipeline.run(program, [Canonicalize()])
    assert "unit=" not in dump.text(program)
