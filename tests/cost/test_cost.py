"""What a step costs: operators, collectives and timelines by hand, FLOPs against torch's."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fxshard
from fxshard.cost import operators, timeline
from fxshard.errors import ConfigError
from fxshard.hardware import PRESETS, Hardware, Link, Tree, hardware_of
from tests import graphs
from tests.cost.cost_cases import aten, spans, took, toy
from tests.zoo import MODELS, built
from tests.zoo.more import MORE


def call(text: str, *inputs: str) -> Any:
    """The node of one operator over inputs ``name : type``."""
    lines = [f"%{line} = input {i}" for i, line in enumerate(inputs)]
    program = graphs.parse("\n".join([*lines, "forward:", text, "return %out (0)"]), {"": "M"})
    (node,) = (n for n in program.graph.nodes if n.name == "out")
    return node


# -- hardware --------------------------------------------------------------------------------------


def test_presets_by_name() -> None:
    assert list(PRESETS) == ["a100", "h100", "h200", "b200"]
    for name, preset in PRESETS.items():
        assert hardware_of(name) is preset and preset.name == name
        assert preset.ranks_per_node == 8
        assert preset.rate(torch.bfloat16) > 10 * preset.rate(torch.float32)
        assert preset.link.beta > preset.network.beta and preset.link.alpha < preset.network.alpha
    # [A100] 312 TFLOPS of bf16 and 19.5 of fp32; 600 GB/s of NVLink, 64 GB/s of PCIe, 200 Gb/s
    a100 = PRESETS["a100"]
    assert (a100.rate(torch.bfloat16), a100.rate(torch.float32)) == (312e12, 19.5e12)
    assert 0.7 * 300e9 < a100.link.beta < 300e9 and a100.host.beta == 32e9
    assert 2 * a100.network.beta == PRESETS["h100"].network.beta
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
        (lambda: hardware_of("v100"), r"hardware='v100': expected one of a100, h100, h200, b200"),
        (lambda: hardware_of(3), r"hardware=3: .*not int"),  # type: ignore[arg-type]
        (lambda: hardware_of("h100", 0), r"ranks_per_node=0: expected an integer >= 1"),
        (lambda: toy(memory_bandwidth=0), r"'toy': memory_bandwidth=0 is not above 0"),
        (lambda: toy(achievable=float("nan")), r"achievable=nan is not above 0"),
        (lambda: toy(link=Link(-1.0, 1.0)), r"link\.alpha=-1\.0 is below 0"),
        (lambda: toy(network=Link(0.0, 0.0)), r"network\.beta=0\.0 is not above 0"),
        (lambda: toy(tree=Tree(0.0, -1.0, 0.9)), r"tree\.network_alpha=-1\.0 is below 0"),
        (lambda: toy(tree=Tree(0.0, 0.0, 0.0)), r"tree\.share=0\.0 is not above 0"),
        (lambda: toy(memory_bandwidth="2TB/s"), r"memory_bandwidth='2TB/s' is no finite number"),
        (lambda: toy(host=Link(0.0, float("inf"))), r"host\.beta=inf is no finite number"),
        (lambda: toy(host=64e9), r"host=64000000000\.0 is no Link"),
        (lambda: toy(flops=1e12), r"flops=1000000000000\.0 is no Mapping"),
        (lambda: toy(flops={torch.bfloat16: 1.0}), r"flops has no torch\.float32"),
    ],
)
def test_hardware_says_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# -- operators -------------------------------------------------------------------------------------


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
@pytest.mark.sample(3)
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


@pytest.mark.parametrize(
    ("ranks", "expected", "sent"),
    [
        (1, 0, (0, 0)),
        (4, 10 + 3 * 1 + 750 / 100, (750, 0)),
        (8, 10 + 3 * 1 + 4 * 5 + 500 / 20, (375, 500)),  # half of it leaves the node
    ],
)
def test_all_to_alls(ranks: int, expected: float, sent: tuple[float, float]) -> None:
    """Each rank sends every other one a part; the slower of link and network counts."""
    hardware = toy(
        link=Link(1.0, 100.0),
        network=Link(5.0, 20.0),
        collective_overhead=10.0,
        ranks_per_node=4,
    )
    assert operators.all_to_all_seconds(1000, ranks, hardware) == pytest.approx(expected)
    assert operators.all_to_all_bytes(1000, ranks, hardware) == pytest.approx(sent)


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
