"""Timelines, by hand, what it needs, the trace."""

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

import fxshard
from fxshard.cli import model_source
from fxshard.config.precision import Precision
from fxshard.cost import operators, timeline
from fxshard.cost.timeline import Estimate
from fxshard.hardware import Hardware, Link
from fxshard.ir import ops, outline, tags, transfers
from fxshard.ir.program import Program
from tests import graphs
from tests.cost.cost_cases import FREE, aten, preset, rewritten, spans, took, toy

# -- timelines, by hand ----------------------------------------------------------------------------


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
        # one after the other
        (0, [(0, 1), (3, 4), (6, 9)], [(1, 3), (4, 6), (9, 15)], 1 + 1 + 3),
        # c is launched when b is there: it takes 3 s, and b computes 2 s
        (1, [(0, 1), (1, 2), (3, 6)], [(1, 3), (3, 5), (6, 12)], 1 + 0 + 1),
        # c is launched when a is there, after b
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


RowOf = tuple[str, str, str, str]  # operator, unit, events that it waits for, event that it records


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
        for pair, (operator, unit, waits, records) in enumerate(rows):
            tag = tags.Meta(
                "forward",
                "compute",
                unit=["", "a", "b"].index(unit),
                waits=tuple(waits.split()),
                records=records or None,
                pair=pair,
            )
            if operator == "mm":
                node = program.graph.call_function(aten.mm.default, (x, w))
                tags.put(node, tag, program.refake(node))
            elif operator == "wait":
                transfers.insert_wait(program, launched[unit], tag)
            else:
                target, sent = {
                    "unshard": (ops.all_gather, x),
                    "reduce": (ops.reduce_scatter, w),
                }[operator]
                tag = dataclasses.replace(tag, role=operator, stream=operator)
                name = f"{operator}_{pair}"
                launched[unit] = transfers.insert_operator(
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
    """Each launch waits for the product before it, and the next product for the launch."""
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
    """A gather after a reduction waits for it, though their streams and events do not."""
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


def test_the_optimizer_after_backward() -> None:
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


def test_what_is_recomputed_is_no_use() -> None:
    """Backward is two products a weight, or three: the model's FLOPs are the same, the time not."""
    hardware = toy(link=FREE)
    plain, again = blocks().estimate(hardware), blocks(checkpoint="full").estimate(hardware)
    product = 2 * 2 * 8 * 8
    # the first layer has no gradient of its input; the last of a block is not recomputed
    assert plain.model_flops == again.model_flops == product * (4 + 8 - 1)
    assert plain.step_seconds == pytest.approx(plain.model_flops / 64)
    assert again.step_seconds > plain.step_seconds
    executed = sum(map(operators.flops, blocks(checkpoint="full").program.graph.nodes))
    assert again.compute_seconds == pytest.approx(executed / 64)
    assert again.mfu == pytest.approx(plain.model_flops / executed)


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


# -- what it needs ---------------------------------------------------------------------------------


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
        return len([node for node in calls if node.target not in ops.OPERATORS])

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


# -- the trace -------------------------------------------------------------------------------------


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
    """Live bytes rise at a row's own time: those after each row, at the clock after it."""
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
