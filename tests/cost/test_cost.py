"""What a step costs: operators, collectives and timelines by hand, FLOPs against torch's."""

import argparse
import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxshard
from fxshard import pipeline
from fxshard.cli import model_source
from fxshard.config import Config, Precision
from fxshard.cost import operators, timeline
from fxshard.cost.hardware import PRESETS, Hardware, Link, Tree, hardware_of
from fxshard.cost.timeline import Estimate
from fxshard.errors import ConfigError
from fxshard.ir import ops, outline, tags, transfers
from fxshard.ir.program import Program
from tests import graphs
from tests.zoo import MODELS, built
from tests.zoo.more import MORE

aten = torch.ops.aten
FREE = Link(0.0, 1e30)


def toy(**changes: Any) -> Hardware:
    """Round numbers: a product of [2,4] and [4,4] takes 1 s, a ring of 2 moves 32 bytes in 1 s.

    A weight f32[4,4] has 64 bytes, and half of it moves: gathering or reducing one takes 1 s too.
    Memory takes no time.
    """
    figures: dict[str, Any] = {
        "name": "toy",
        "flops": {torch.float32: 64.0},
        "achievable": 1.0,
        "memory_bandwidth": 1e30,
        "memory_bytes": 1,
        "launch_overhead": 0.0,
        "link": Link(0.0, 32.0),
        "network": Link(0.0, 32.0),
        "host": FREE,
    }
    return Hardware(**figures | changes)


def rewritten(program: Program, **options: Any) -> Program:
    pipeline.run(program, pipeline.default_passes(Config(**options)))
    return program


def took(program: Program, hardware: Hardware, **options: Any) -> Estimate:
    """The estimate of a program, with what holds for each."""
    found = timeline.estimate([rewritten(program, **options)], hardware)
    busy = found.compute_seconds + found.exposed_communication_seconds
    assert found.step_seconds == pytest.approx(busy)
    units = found.by_unit().values()
    assert sum(unit.compute for unit in units) == pytest.approx(found.compute_seconds)
    assert sum(unit.exposed for unit in units) == pytest.approx(
        found.exposed_communication_seconds - found.tail
    )
    for stream in {row.stream for row in found.rows}:  # a stream does one thing at a time
        own = [row for row in found.rows if row.stream == stream]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    return found


def spans(found: Estimate, *operations: str, phase: str = "forward") -> list[tuple[Any, ...]]:
    """Unit, start and end of the rows of those operations, to a thousandth."""
    return [
        (row.unit, round(row.start, 3), round(row.end, 3))
        for row in found.rows
        if row.operation in operations and row.phase == phase and row.seconds > 1e-9
    ]


def call(text: str, *inputs: str) -> Any:
    """The node of one operator over inputs ``name : type``."""
    lines = [f"%{line} = input {i}" for i, line in enumerate(inputs)]
    program = graphs.parse("\n".join([*lines, "forward:", text, "return %out (0)"]), {"": "M"})
    (node,) = (n for n in program.graph.nodes if n.name == "out")
    return node


# -- hardware -------------------------------------------------------------------------------------


def test_presets_by_name() -> None:
    assert list(PRESETS) == ["h100", "h200", "b200"]
    for name, preset in PRESETS.items():
        assert hardware_of(name) is preset and preset.name == name
        assert preset.ranks_per_node == 8
        assert preset.rate(torch.bfloat16) > 10 * preset.rate(torch.float32)
        assert preset.link.beta > preset.network.beta and preset.link.alpha < preset.network.alpha
    # [H100] 1,979 TFLOPS of bf16 with sparsity, half of it without; 3.35 TB/s; 900 GB/s of NVLink
    assert PRESETS["h100"].rate(torch.bfloat16) == pytest.approx(1979e12 / 2, rel=1e-3)
    assert PRESETS["h100"].memory_bandwidth == 3.35e12
    assert 0.7 * 450e9 < PRESETS["h100"].link.beta < 450e9
    assert PRESETS["h100"].rate(torch.int8) == PRESETS["h100"].rate(torch.float32)
    assert hardware_of("h100", 4) == dataclasses.replace(PRESETS["h100"], ranks_per_node=4)
    assert hardware_of(toy()) == toy()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hardware_of("a100"), r"hardware='a100': expected one of h100, h200, b200"),
        (lambda: hardware_of(3), r"hardware=3: .*not int"),  # type: ignore[arg-type]
        (lambda: hardware_of("h100", 0), r"ranks_per_node=0: expected an integer >= 1"),
        (lambda: toy(memory_bandwidth=0), r"'toy': memory_bandwidth=0 is not above 0"),
        (lambda: toy(achievable=float("nan")), r"achievable=nan is not above 0"),
        (lambda: toy(link=Link(-1.0, 1.0)), r"link\.alpha=-1\.0 is below 0"),
        (lambda: toy(network=Link(0.0, 0.0)), r"network\.beta=0\.0 is not above 0"),
        (lambda: toy(tree=Tree(0.0, -1.0, 0.9)), r"tree\.network_alpha=-1\.0 is below 0"),
        (lambda: toy(tree=Tree(0.0, 0.0, 0.0)), r"tree\.share=0\.0 is not above 0"),
        (lambda: toy(flops={torch.bfloat16: 1.0}), r"flops has no torch\.float32"),
    ],
)
def test_hardware_says_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# -- operators ------------------------------------------------------------------------------------


def attention(query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Scores and their product with the values: two products of b * h * s * t * d."""
    batch, heads, rows, size = query
    return 2 * (2 * batch * heads * rows * key[2] * size)


def attention_backward(grad: Any, query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Scores again, and a product for each of dV, dP, dQ and dK."""
    batch, heads, rows, size = query
    return 5 * (2 * batch * heads * rows * key[2] * size)


CPU_ATTENTION = {  # torch counts CUDA's kernels only
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_flops_are_those_of_eager(name: str) -> None:
    case = (MODELS | MORE)[name]
    model, args, kwargs = built(case)
    program = fxshard.plan(model, args, kwargs, world_size=2).program
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        case.loss(model(*args, **kwargs)).backward()
    assert counter.get_total_flops() > 0
    assert sum(map(operators.flops, program.graph.nodes)) == counter.get_total_flops()


QKV = ("q : f32[2,3,8,4]", "k : f32[2,3,8,4]")
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu"


def test_attention() -> None:
    """2 x 3 heads, 8 x 8 scores, 4 numbers each: a product is 2 * 2 * 3 * 8 * 8 * 4 = 3,072."""
    full = call(f"%out = {SDPA}(%q, %k, %k)", *QKV)
    causal = call(f"%out = {SDPA}(%q, %k, %k, 0.0, True)", *QKV)
    assert operators.flops(full) == operators.flops(causal) == 2 * 3072
    assert operators.executed_flops(full) == 2 * 3072
    assert operators.executed_flops(causal) == 3072
    more = (*QKV, "g : f32[2,3,8,4]", "o : f32[2,3,8,4]", "l : f32[2,3,8]")
    back = call(f"%out = {SDPA}_backward(%g, %q, %k, %k, %o, %l, 0.0, True)", *more)
    assert operators.flops(back) == 5 * 3072
    assert operators.model_flops(back) == 4 * 3072
    assert operators.executed_flops(back) == 2.5 * 3072
    shared = ("q : f32[2,6,8,4]", *QKV[1:])  # two heads of queries per head of keys
    assert operators.flops(call(f"%out = {SDPA}(%q, %k, %k)", *shared)) == 2 * 2 * 3072
    more = (*shared, "g : f32[2,6,8,4]", "o : f32[2,6,8,4]", "l : f32[2,6,8]")
    back = call(f"%out = {SDPA}_backward(%g, %q, %k, %k, %o, %l, 0.0, False)", *more)
    assert operators.flops(back) == 5 * 2 * 3072


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("bf16[6,16]", "bf16[3,16,32]", 2 * 6 * 16 * 32),
        ("bf16[3,2,16]", "bf16[3,16,32]", 3 * 2 * 2 * 16 * 32),
    ],
)
def test_grouped_products(left: str, right: str, expected: int) -> None:
    offsets = ", %offsets" if left.count(",") == 1 else ""
    inputs = (f"left : {left}", f"right : {right}", "offsets : i64[3]")
    node = call("%out = aten.add.Tensor(%left, 1)", *inputs)
    node.target = aten._grouped_mm.default
    by_name = {n.name: n for n in node.graph.nodes}
    node.args = (by_name["left"], by_name["right"], *([by_name["offsets"]] if offsets else []))
    assert operators.flops(node) == expected


@pytest.mark.parametrize(
    ("text", "inputs", "expected"),
    [
        ("aten.add.Tensor(%a, %b)", ("a : f32[8,4]", "b : f32[8,4]"), 3 * 128),
        ("aten.add.Tensor(%a, %a)", ("a : f32[8,4]",), 2 * 128),
        ("aten._to_copy(%a, dtype=torch.bfloat16)", ("a : f32[8,4]",), 128 + 64),
        ("aten.view(%a, [32])", ("a : f32[8,4]",), 0),
        ("aten.t(%a)", ("a : f32[8,4]",), 0),
        ("aten.expand(%a, [8, 4])", ("a : f32[1,4]",), 0),
        ("aten.empty_like(%a)", ("a : f32[8,4]",), 0),
        ("aten.zeros_like(%a)", ("a : f32[8,4]",), 2 * 128),
        ("aten.mul_.Tensor(%a, %b)", ("a : f32[8,4]", "b : f32[4]"), 2 * 128 + 16),
        ("aten.copy_(%a, %b)", ("a : f32[8,4]", "b : f32[8,4]"), 2 * 128),
        # 3 rows of 16 bytes read and written, and 3 indices
        ("aten.embedding(%a, %i)", ("a : f32[1000,4]", "i : i64[3]"), 2 * 48 + 24),
    ],
)
def test_bytes(text: str, inputs: tuple[str, ...], expected: int) -> None:
    assert operators.bytes_moved(call(f"%out = {text}", *inputs)) == expected


def test_what_is_expanded_is_read_once() -> None:
    program = graphs.parse(
        """%a : f32[1,4] = input 0
        forward:
        %wide = aten.expand(%a, [8, 4])
        %out = aten.neg(%wide)
        return %out (0)""",
        {"": "M"},
    )
    (node,) = (n for n in program.graph.nodes if n.name == "out")
    assert operators.bytes_moved(node) == 16 + 128


def test_the_slower_resource_and_the_launch() -> None:
    """mm: 64 FLOPs at 64 * 0.5 per second; 32 + 64 + 32 bytes."""
    node = call("%out = aten.mm(%a, %b)", "a : f32[2,4]", "b : f32[4,4]")
    slow = toy(achievable=0.5, launch_overhead=0.25)
    assert operators.node_seconds(node, slow) == 0.25 + 2
    memory = dataclasses.replace(slow, memory_bandwidth=32.0)
    assert operators.node_seconds(node, memory) == 0.25 + 4
    halves = toy(flops={torch.float32: 64.0, torch.bfloat16: 128.0})
    small = call("%out = aten.mm(%a, %b)", "a : bf16[2,4]", "b : bf16[4,4]")
    assert operators.node_seconds(small, halves) == 0.5
    view = call("%out = aten.t(%a)", "a : f32[2,4]")
    assert operators.node_seconds(view, slow) == 0


@pytest.mark.parametrize(
    ("ranks", "stride", "passes", "expected"),
    [
        (1, 1, 1, 0.0),
        (1, 1, 2, 0.0),
        # one node of 4: 3 steps, 3/4 of 1,000 bytes at 100 a second
        (4, 1, 1, 10 + 3 * 1 + 7.5),
        (4, 1, 2, 10 + 6 * 1 + 15),
        # two nodes: 1 of 7 steps over the network; 4 cards of 20 are slower than a link of 100
        (8, 1, 1, 10 + 6 * 1 + 1 * 5 + 875 / 80),
        (8, 1, 2, 10 + 12 * 1 + 2 * 5 + 1750 / 80),
        # replicas, 4 apart: one in each node, and so one card
        (2, 4, 2, 10 + 2 * 5 + 1000 / 20),
        # 2 apart: two in each node
        (4, 2, 1, 10 + 2 * 1 + 1 * 5 + 750 / 40),
        # further apart than a node is large
        (2, 64, 1, 10 + 5 + 500 / 20),
        # the last node is not full
        (6, 1, 1, 10 + 4 * 1 + 1 * 5 + (5 / 6 * 1000) / 80),
    ],
)
def test_rings(ranks: int, stride: int, passes: int, expected: float) -> None:
    hardware = toy(
        link=Link(1.0, 100.0),
        network=Link(5.0, 20.0),
        collective_overhead=10.0,
        ranks_per_node=4,
    )
    found = operators.ring_seconds(1000, ranks, hardware, stride=stride, passes=passes)
    assert found == pytest.approx(expected)


def test_many_cards_are_not_faster_than_the_link() -> None:
    hardware = toy(link=Link(0.0, 100.0), network=Link(0.0, 30.0), ranks_per_node=4)
    assert operators.ring_seconds(800, 8, hardware) == pytest.approx(700 / 100)


def forest(**changes: Any) -> Hardware:
    """A ring's step takes 1 s on a link and 5 s on the network, a tree's 2 s and 9 s."""
    figures: dict[str, Any] = {
        "link": Link(1.0, 100.0),
        "network": Link(5.0, 20.0),
        "collective_overhead": 10.0,
        "ranks_per_node": 4,
        "tree": Tree(2.0, 9.0, 0.5),
    }
    return toy(**figures | changes)


@pytest.mark.parametrize(
    ("ranks", "stride", "expected"),
    [
        (1, 1, 0.0),
        # one node of 4: 3 ranks up and down; 1,000 bytes twice at half of 100 a second
        (4, 1, 10 + 2 * 3 * 2 + 2000 / 50),
        # 8 nodes of 4: and 3 levels; half of 4 cards of 20
        (32, 1, 10 + 2 * (3 * 2 + 3 * 9) + 2000 / 40),
        # 8 replicas, one in each node; half of one card
        (8, 4, 10 + 2 * 3 * 9 + 2000 / 10),
        # 9 nodes: the logarithm is rounded down
        (9, 4, 10 + 2 * 3 * 9 + 2000 / 10),
    ],
)
def test_trees(ranks: int, stride: int, expected: float) -> None:
    found = operators.tree_seconds(1000, ranks, forest(), stride=stride)
    assert found == pytest.approx(expected)


def test_alone_in_its_node_a_rank_waits_as_in_a_tree() -> None:
    """NCCL: "with ppn=1 latencies are fully exposed, use the Tree network latency"."""
    found = operators.ring_seconds(1000, 2, forest(), stride=4, passes=2)
    assert found == pytest.approx(10 + 2 * 9 + 1000 / 20)
    both = operators.ring_seconds(1000, 8, forest(), passes=2)
    assert both == pytest.approx(10 + 12 * 1 + 2 * 5 + 1750 / 80)


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (2, 2 * 1 * 9 + 2 * 1 / 2 * 32 / 8),  # a ring: 8 s for the bytes of a tree
        (64, 2 * 6 * 9 + 2 * 32 / 4),  # a tree: a ring has 126 steps
    ],
)
def test_an_all_reduce_takes_the_faster_of_ring_and_tree(replicas: int, expected: float) -> None:
    """Shards of 32 bytes; trees at 4 bytes a second, rings at 8."""
    hardware = toy(network=Link(5.0, 8.0), ranks_per_node=2, tree=Tree(2.0, 9.0, 0.5))
    found = took(graphs.chain(replicas=replicas), hardware)
    across = spans(found, "all-reduce", phase="backward")
    assert max(end - start for _, start, end in across) == pytest.approx(expected)
    only = took(graphs.chain(replicas=replicas), dataclasses.replace(hardware, tree=None))
    across = spans(only, "all-reduce", phase="backward")
    ring = 2 * (replicas - 1) * 5 + 2 * (replicas - 1) / replicas * 32 / 8
    assert max(end - start for _, start, end in across) == pytest.approx(ring, abs=1e-3)


def test_gathers_have_no_tree() -> None:
    """NCCL has rings alone for them with several ranks per node: a ring of 2 ranks, 1 s."""
    found = took(graphs.chain(), toy(tree=Tree(0.0, 0.0, 1e9)))
    assert {end - start for _, start, end in spans(found, "unshard")} == {1.0, 0.75}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (operators.Collective(1000, 1), (0, 0)),
        (operators.Collective(1000, 4), (750, 0)),  # one node
        (operators.Collective(1000, 4, passes=2), (1500, 0)),
        (operators.Collective(1000, 8), (875 * 3 / 4, 875 / 4)),
        (operators.Collective(1000, 2, stride=4, passes=2), (0, 1000)),  # one in each node
        (operators.Collective(1000, 4, stride=2), (375, 375)),
    ],
)
def test_bytes_on_the_wire(sent: operators.Collective, expected: tuple[float, float]) -> None:
    found = operators.wire_bytes(sent, toy(ranks_per_node=4))
    assert found == pytest.approx(expected)


def test_bytes_of_a_ring_counted_hop_by_hop() -> None:
    """Six ranks in two nodes: each part travels five hops, from 2 to 3 and from 5 to 0 across."""
    parts, hops = 6, [(r, (r + 1) % 6) for r in range(6)]
    sent = {"link": 0, "network": 0}
    for part in range(parts):
        for step in range(parts - 1):
            start, end = hops[(part + step) % 6]
            sent["network" if start // 3 != end // 3 else "link"] += 100
    found = operators.wire_bytes(operators.Collective(600, 6), toy(ranks_per_node=3))
    assert found == pytest.approx((sent["link"] / 6, sent["network"] / 6))


def test_traffic_of_a_step_by_hand() -> None:
    """Weights of 64, 64 and 48 bytes on two ranks of one node: a rank sends half of each.

    All are gathered in forward, and again in backward but for the first layer, whose input has no
    gradient; each is reduced once.
    """
    found = took(graphs.chain(), toy())
    gathered, reduced = (32 + 32 + 24) + (32 + 24), 32 + 32 + 24
    assert found.traffic() == {
        "unshard": timeline.Traffic(5, gathered, 0, pytest.approx(gathered / 32)),
        "reduce": timeline.Traffic(3, reduced, 0, pytest.approx(reduced / 32)),
    }
    across = took(graphs.chain(replicas=2), toy(ranks_per_node=2)).traffic()
    assert across["reduce"] == found.traffic()["reduce"]
    assert across["all-reduce"].network_bytes == 32 + 32 + 24
    assert across["all-reduce"].link_bytes == 0


# -- timelines, by hand ---------------------------------------------------------------------------

UNEVEN = """
%x_0 : f32[2,4] = input 0
%w_0 : f32[4,4] = param a.weight
%w_1 : f32[4,4] = param b.weight
%w_2 : f32[4,12] = param c.weight
forward:
%x_1 = aten.mm(%x_0, %w_0)  | a
%x_2 = aten.mm(%x_1, %w_1)  | b
%y = aten.mm(%x_2, %w_2)  | c
return %y (0)
"""


@pytest.mark.parametrize(
    ("depth", "gathers", "computes", "exposed"),
    [
        # one behind the other
        (0, [(0, 1), (3, 4), (6, 9)], [(1, 3), (4, 6), (9, 15)], 1 + 1 + 3),
        # c is launched when b is there: it takes 3 s, and b computes 2 s
        (1, [(0, 1), (1, 2), (3, 6)], [(1, 3), (3, 5), (6, 12)], 1 + 0 + 1),
        # c is launched when a is there, behind b
        (2, [(0, 1), (1, 2), (2, 5)], [(1, 3), (3, 5), (5, 11)], 1),
    ],
)
def test_prefetch(depth: int, gathers: Any, computes: Any, exposed: float) -> None:
    """Gathers of 1, 1 and 3 s; products of 2, 2 and 6 s at half the speed."""
    program = graphs.parse(UNEVEN, {"": "M", "a": "A", "b": "B", "c": "C"})
    found = took(program, toy(achievable=0.5), forward_prefetch=depth)
    names = ("a", "b", "c")
    assert spans(found, "unshard") == [
        (name, *span) for name, span in zip(names, gathers, strict=True)
    ]
    assert spans(found, "compute") == [
        (name, *span) for name, span in zip(names, computes, strict=True)
    ]
    assert found.exposed_communication_seconds == pytest.approx(exposed)
    assert found.compute_seconds == pytest.approx(10)
    assert found.mfu == pytest.approx(5 / (10 + exposed))  # at peak: 64 + 64 + 192 FLOPs in 5 s


RowOf = tuple[str, str, str, str]  # word, unit, events that it waits for, event that it records


def by_hand(*rows: RowOf) -> Program:
    """A schedule written down: ``mm``, ``unshard`` and ``reduce`` take 1 s each on `toy`.

    ``wait`` is for the last launch of its unit. The schedule begins with an ``mm`` of the root.
    """
    program = graphs.parse(
        """%x : f32[2,4] = input 0
        %w : f32[4,4] = input 1
        forward:
        %first = aten.mm(%x, %w)
        return %first (0)""",
        {"": "M", "a": "A", "b": "A"},
    )
    x, w, first, output = program.graph.nodes
    tags.update(first, unit=0, records="c0")
    launched: dict[str, list[Any]] = {}
    with program.graph.inserting_before(output):
        for pair, (word, unit, waits, records) in enumerate(rows):
            tag = tags.Meta(
                "forward",
                "compute",
                unit=["", "a", "b"].index(unit),
                waits=tuple(waits.split()),
                records=records or None,
                pair=pair,
            )
            if word == "mm":
                node = program.graph.call_function(aten.mm.default, (x, w))
                tags.put(node, tag, program.refake(node))
            elif word == "wait":
                transfers.insert_wait(program, launched[unit], tag)
            else:
                target, sent = {
                    "unshard": (ops.all_gather, x),
                    "reduce": (ops.reduce_scatter, w),
                }[word]
                tag = dataclasses.replace(tag, role=word, stream=word)
                name = f"{word}_{pair}"
                launched[unit] = transfers.insert_word(
                    program, target, ([sent], 2), ["p"], tag, name
                )
    program.schedule = outline.build(program)
    return program


OVERLAPPED: tuple[RowOf, ...] = (
    ("unshard", "a", "", "u1"),
    ("wait", "a", "u1", ""),
    ("unshard", "b", "c0", "u2"),
    ("mm", "a", "", ""),
    ("wait", "b", "u2", ""),
    ("mm", "b", "", "c1"),
    ("reduce", "b", "c1", "r1"),
    ("mm", "a", "", "c2"),
    ("wait", "b", "r1", ""),
    ("reduce", "a", "c2", "r2"),
    ("wait", "a", "r2", ""),
)


def timed(program: Program, hardware: Hardware) -> tuple[Estimate, list[tuple[float, ...]]]:
    """Start, end and exposed seconds of each row."""
    found = timeline.estimate([program], hardware)
    rows = [(row.start, row.end, row.exposed) for row in found.rows]
    return found, [tuple(round(number, 6) for number in row) for row in rows]


def test_all_but_the_last_is_hidden() -> None:
    found, rows = timed(by_hand(*OVERLAPPED), toy())
    assert rows == [
        (0, 1, 0),  # the root's product
        (0, 1, 0),  # a is gathered beside it
        (1, 1, 0),
        (1, 2, 0),  # b, while a computes
        (1, 2, 0),
        (2, 2, 0),
        (2, 3, 0),
        (3, 4, 0),  # b is reduced, while a computes
        (3, 4, 0),
        (4, 4, 0),
        (4, 5, 0),  # a, and nothing computes
        (5, 5, 1),
    ]
    assert (found.step_seconds, found.compute_seconds) == pytest.approx((5, 4))
    assert found.communication_seconds == pytest.approx(4)
    assert found.exposed_communication_seconds == pytest.approx(1)
    assert found.mfu == pytest.approx(4 / 5)
    assert found.by_unit() == {
        "(root)": timeline.UnitSeconds(pytest.approx(1), 0, 0),
        "a": timeline.UnitSeconds(pytest.approx(2), pytest.approx(2), pytest.approx(1)),
        "b": timeline.UnitSeconds(pytest.approx(1), pytest.approx(2), 0),
    }


def test_half_of_it_is_hidden() -> None:
    """Collectives of 2 s: a gather or reduction beside a product is exposed for 1 s."""
    found, rows = timed(by_hand(*OVERLAPPED), toy(link=Link(0.0, 16.0)))
    assert rows == [
        (0, 1, 0),
        (0, 2, 0),
        (2, 2, 1),
        (2, 4, 0),
        (2, 3, 0),
        (4, 4, 1),
        (4, 5, 0),
        (5, 7, 0),
        (5, 6, 0),
        (7, 7, 1),
        (7, 9, 0),
        (9, 9, 2),
    ]
    assert found.exposed_communication_seconds == pytest.approx(5)
    assert found.step_seconds == pytest.approx(9)


def test_nothing_is_hidden() -> None:
    """Each launch waits for the product in front of it, and the next product for the launch."""
    found, rows = timed(
        by_hand(
            ("unshard", "a", "c0", "u1"),
            ("wait", "a", "u1", ""),
            ("mm", "a", "", "c1"),
            ("unshard", "b", "c1", "u2"),
            ("wait", "b", "u2", ""),
            ("mm", "b", "", ""),
        ),
        toy(),
    )
    assert rows == [(0, 1, 0), (1, 2, 0), (2, 2, 1), (2, 3, 0), (3, 4, 0), (4, 4, 1), (4, 5, 0)]
    assert found.exposed_communication_seconds == found.communication_seconds == pytest.approx(2)


def test_what_nobody_waits_for_is_the_tail() -> None:
    found, rows = timed(by_hand(("reduce", "a", "c0", "")), toy())
    assert rows == [(0, 1, 0), (1, 2, 0)]
    assert (found.step_seconds, found.tail) == pytest.approx((2, 1))
    assert found.exposed_communication_seconds == pytest.approx(1)


def test_one_group_has_one_communicator() -> None:
    """A gather behind a reduction waits for it, though their streams and events do not."""
    _, rows = timed(
        by_hand(("reduce", "a", "c0", "r1"), ("unshard", "b", "c0", "u1"), ("wait", "b", "u1", "")),
        toy(),
    )
    assert rows == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 3, 2)]


def test_two_nodes() -> None:
    """Two ranks in two nodes: 16 bytes a second over the network, twice the time of a link."""
    inside = took(graphs.chain(), toy(network=Link(0.0, 16.0)))
    across = took(graphs.chain(), toy(network=Link(0.0, 16.0), ranks_per_node=1))
    assert inside.communication_seconds == pytest.approx(7.25)
    assert across.communication_seconds == pytest.approx(2 * 7.25)
    assert across.compute_seconds == pytest.approx(inside.compute_seconds)


def test_hybrid_shards_inside_a_node() -> None:
    """2 x 2 ranks, 2 per node: gathers and reduce-scatters on the link, all-reduces across."""
    hardware = toy(network=Link(0.0, 8.0), ranks_per_node=2)
    found = took(graphs.chain(replicas=2), hardware)
    assert {end - start for _, start, end in spans(found, "unshard")} == {1.0, 0.75}
    across = spans(found, "all-reduce", phase="backward")
    # a shard has 32 bytes: twice half of them at 8 a second; the head's 24 bytes
    assert sorted(end - start for _, start, end in across) == [3.0, 4.0, 4.0]


def test_offload_takes_the_host_link() -> None:
    """A layer's shard has 32 bytes, which take 2 s each way."""
    found = took(graphs.chain(offloaded=True), toy(host=Link(0.0, 16.0)))
    assert {round(end - start, 3) for _, start, end in spans(found, "load")} == {2.0, 1.5}
    stores = spans(found, "store", phase="backward")
    assert sorted(end - start for _, start, end in stores) == pytest.approx([1.5, 2.0, 2.0])


def test_nothing_to_do_takes_no_time() -> None:
    found = timeline.estimate([], toy())
    assert (found.step_seconds, found.mfu, found.by_unit()) == (0, 0, {})


class Blocks(nn.Module):
    """Four square layers of 8 x 8, two in a block; f32[2, 8] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def blocks(**options: Any) -> fxshard.Plan:
    with torch.device("meta"):
        model, x = Blocks(), torch.zeros(2, 8)
    return fxshard.plan(model, (x,), world_size=2, **options)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def test_the_optimizer_behind_backward() -> None:
    """4 weights of 4 x 8 fp32 on a rank: 3 times 128 bytes, and twice two states and a step each.

    The weight is read and written, its gradient read, each state read and written.
    """
    hardware = toy(memory_bandwidth=16.0, launch_overhead=0.5)
    plain, stepped = blocks().estimate(hardware), blocks(optimizer=adamw).estimate(hardware)
    states = 4 * (2 * 2 * 128)
    moved = 4 * 3 * 128 + states
    steps = blocks(optimizer=adamw).memory.ledger().ranges
    scalars = sum(each.bytes for each in steps if each.name.startswith("step of "))
    assert scalars == 4 * 4
    row = stepped.rows[-1]
    assert (row.phase, row.unit, row.stream) == ("optimizer", "(optimizer)", "compute")
    assert row.seconds == pytest.approx(0.5 + (moved + 2 * scalars) / 16)
    assert row.start == pytest.approx(plain.step_seconds)
    assert stepped.step_seconds == pytest.approx(plain.step_seconds + row.seconds)


def test_a_step_in_backward_is_part_of_it() -> None:
    hardware = toy(memory_bandwidth=1e6)
    after = blocks(optimizer=adamw).estimate(hardware)
    within = blocks(optimizer=adamw, optimizer_in_backward=True).estimate(hardware)
    steps = [row for row in within.rows if row.operation == "step"]
    assert steps and {row.phase for row in steps} == {"backward"}
    assert not [row for row in within.rows if row.phase == "optimizer"]
    assert sum(r.seconds for r in steps) == pytest.approx(after.rows[-1].seconds, rel=1e-6)


def test_micro_batches_follow_each_other() -> None:
    hardware = toy(link=FREE)
    one, three = blocks().estimate(hardware), blocks(micro_batches=3).estimate(hardware)
    assert three.step_seconds == pytest.approx(3 * one.step_seconds)
    assert three.model_flops == 3 * one.model_flops
    assert [p.micro_batch for p in three.phases] == [0, 0, 1, 1, 2, 2]
    quiet = blocks(micro_batches=2, no_sync=True).estimate(toy())
    assert {r.micro_batch for r in quiet.rows if r.operation == "reduce"} == {1}


def test_what_is_computed_again_is_no_use() -> None:
    """Backward is two products a weight, or three: the model's FLOPs are the same, the time not."""
    hardware = toy(link=FREE)
    plain, again = blocks().estimate(hardware), blocks(checkpoint="full").estimate(hardware)
    product = 2 * 2 * 8 * 8
    # the first layer has no gradient of its input; the last of a block is not made again
    assert plain.model_flops == again.model_flops == product * (4 + 8 - 1)
    assert plain.step_seconds == pytest.approx(plain.model_flops / 64)
    assert again.step_seconds > plain.step_seconds
    executed = sum(map(operators.flops, blocks(checkpoint="full").program.graph.nodes))
    assert again.compute_seconds == pytest.approx(executed / 64)
    assert again.mfu == pytest.approx(plain.model_flops / executed)


def preset(name: str, *options: str) -> fxshard.Plan:
    parser = argparse.ArgumentParser()
    model_source.add_arguments(parser)
    args = parser.parse_args(["--hf-config", name, *options])
    model, inputs, keywords = model_source.load(args, "meta")
    return fxshard.plan(
        model, inputs, keywords, world_size=args.world_size, **model_source.options(args)
    )


@pytest.mark.parametrize(
    ("name", "tokens"), [("tiny-llama", 32), pytest.param("llama3-8b", 64, marks=pytest.mark.slow)]
)
def test_a_llama_by_hand(name: str, tokens: int) -> None:
    """6 N T + 12 L h T^2: PaLM's appendix B, without the tables that are looked up in."""
    shape = model_source.PRESETS[name]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    key = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * key + 3 * hidden * shape["intermediate_size"]
    weights = layers * layer + shape["vocab_size"] * hidden
    if name == "llama3-8b":
        assert weights + shape["vocab_size"] * hidden == 8_030_261_248 - 65 * hidden
    plan = preset(name, "--seq", str(tokens))
    expected = 6 * weights * tokens + 12 * layers * hidden * tokens**2
    assert plan.estimate("h100").model_flops == expected


# -- what it needs --------------------------------------------------------------------------------


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


def test_nothing_runs() -> None:
    plan = blocks(optimizer=adamw)
    plan.memory  # noqa: B018, records the optimizer's step
    with Nothing():
        plan.estimate("h100")


def test_identical_layers_are_costed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = operators.bytes_moved
    monkeypatch.setattr(operators, "bytes_moved", lambda n: calls.append(n) or original(n))

    def counted(depth: int) -> int:
        program = rewritten(graphs.layered(depth))
        calls.clear()
        timeline.estimate([program], toy())
        return len([node for node in calls if node.target not in ops.WORDS])

    assert counted(4) == counted(16) > 0


def test_all_ranks_estimate_alike() -> None:
    one, two = blocks().estimate("h100"), blocks().estimate("h100")
    assert one == two and one.table() == two.table()
    assert blocks().estimate("h100", ranks_per_node=1).hardware.ranks_per_node == 1


def test_table_and_summary() -> None:
    found = timeline.estimate(
        [by_hand(("mm", "a", "", ""), ("mm", "b", "", ""), ("reduce", "b", "c0", ""))], toy()
    )
    lines = found.table().splitlines()
    assert lines[0].split() == ["unit", "compute", "ms", "communication", "ms", "exposed", "ms"]
    assert [line.split() for line in lines[2:]] == [
        ["x", "2", "(root)", "..", "a", "1,000.000", "0.000", "0.000"],
        ["b", "1,000.000", "1,000.000", "0.000"],
        ["step", "3,000.000", "1,000.000", "0.000"],
    ]
    text = found.summary()
    shown = re.search(r"^([\d,.]+) ms a step on toy", text)
    assert shown and float(shown[1].replace(",", "")) == pytest.approx(1e3 * found.step_seconds)
    assert f"{found.mfu:.1%} of peak (MFU)" in text


# -- the trace ------------------------------------------------------------------------------------


def test_perfetto_read_back(tmp_path: Path) -> None:
    plan = blocks(optimizer=adamw)
    found = plan.estimate("h100")
    found.to_perfetto(tmp_path / "trace.json", plan.memory)
    told = json.loads((tmp_path / "trace.json").read_text())
    events = told["traceEvents"]
    assert told["otherData"]["step_seconds"] == found.step_seconds
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    rows = [e for e in slices if "row" in e.get("args", {})]
    assert len(rows) == len([row for row in found.rows if row.seconds])
    for stream in ("compute", "unshard", "reduce"):
        drawn = [e["dur"] for e in rows if tracks[e["pid"], e["tid"]] == f"stream {stream}"]
        own = [row.seconds for row in found.rows if row.stream == stream]
        assert sum(drawn) == pytest.approx(1e6 * sum(own))
    exposed = [e["dur"] for e in slices if e["name"] == "exposed"]
    assert sum(exposed) == pytest.approx(1e6 * found.exposed_communication_seconds)
    inner = [e for e in slices if "args" not in e]
    assert {e["name"] for e in inner} >= {"aten.mm"}
    for event in inner:  # each lies in one row of the compute stream
        end = event["ts"] + event["dur"]
        around = [
            e
            for e in rows
            if e["tid"] == 0 and e["ts"] <= event["ts"] + 1e-6 and end <= e["ts"] + e["dur"] + 1e-6
        ]
        assert len(around) == 1
    totals = [e for e in events if e["ph"] == "C" and e["name"] == "total"]
    assert max(e["args"]["bytes"] for e in totals) == plan.memory.peak_bytes
    moments = [e["ts"] for e in totals]
    assert moments == sorted(moments) and moments[-1] <= 1e6 * found.step_seconds + 1e-6
    found.to_perfetto(tmp_path / "alone.json")
    alone = json.loads((tmp_path / "alone.json").read_text())["traceEvents"]
    assert not [e for e in alone if e["ph"] == "C"]


def test_bytes_stand_where_their_rows_do() -> None:
    """Live bytes rise at a row's own time: those behind each row, at the clock behind it."""
    from fxshard.cost.perfetto import times
    from fxshard.memory.views.live import live_after

    plan = blocks()
    found, ledger = plan.estimate("h100"), plan.memory.ledger()
    clock = times(found, ledger.phases)
    assert len(clock) == len(ledger.totals) + 1
    assert all(a <= b for a, b in itertools.pairwise(clock))
    after = live_after(plan.memory)
    for row in found.rows:
        if row.stream == "compute" and row.seconds:
            ticks = [t for t, time in enumerate(clock[:-1]) if abs(time - 1e6 * row.end) < 1e-9]
            assert after[row.phase, row.name] in [int(ledger.totals[t]) for t in ticks]


def test_bf16_halves_what_moves() -> None:
    bf16 = Precision(torch.bfloat16, torch.float32)
    hardware = toy(flops={torch.float32: 64.0, torch.bfloat16: 64.0})
    full, half = took(graphs.chain(), hardware), took(graphs.chain(precision=bf16), hardware)
    seconds = [
        [row.seconds for row in each.rows if row.operation == "unshard"] for each in (full, half)
    ]
    assert seconds[1] == pytest.approx([each / 2 for each in seconds[0]])
    reduces = [
        [row.seconds for row in each.rows if row.operation == "reduce"] for each in (full, half)
    ]
    assert reduces[1] == pytest.approx(reduces[0])  # in fp32
