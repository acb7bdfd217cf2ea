"""Writes docs/scale.md: Llama 3 of 8, 70 and 405 billion parameters on 8 to 16,384 GPUs, on paper.

    python -m benchmarks.scale_page           # plans everything (20 CPU-minutes), page and plot
    python -m benchmarks.scale_page --page    # page and plot alone, from the last run's results
    python -m benchmarks.scale_page --only 8B # plan one model again, the rest as it was

Nothing runs but captures on meta tensors. Bytes are those of the plan; times are those of the model
in docs/cost.md. The plot needs matplotlib (`pip install fxshard[plot]`); without it the page is
written and the plot is left as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from benchmarks.figures import RESULTS, ROOT, machine, write
from benchmarks.published import GPUS, MEASURED, OTHER_SOURCES, OTHERS, SOURCES, Measured
from benchmarks.shapes import LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, Shape, call
from fxshard import ops
from fxshard.cost import hardware as constants
from fxshard.cost import operators
from fxshard.cost.hardware import PRESETS, Hardware
from fxshard.plans import Plan

PAGE, PLOT = ROOT / "docs" / "scale.md", ROOT / "docs" / "scale.png"
RECORD = RESULTS / "scale_page.json"
HARDWARE = ("h100", "h200")
SEQUENCE, BATCH = 8192, 1
WORLDS = tuple(8 << n for n in range(12))  # 8 to 16,384
KINDS = ("unshard", "reduce", "all-reduce")
HALF, MOST = 0.5, 0.8  # shares of a link's bandwidth
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GIB = 2**30
Cell = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """One model of the page.

    Attributes:
        shape: of it.
        checkpoint: of its activations.
        groups: sizes of the shard group that hybrid is tried with.
    """

    shape: Shape
    checkpoint: str
    groups: tuple[int, ...]


MODELS = {
    "8B": Model(LLAMA3_8B, "selective", (8, 64)),
    "70B": Model(LLAMA3_70B, "full", (32, 128)),
    "405B": Model(LLAMA3_405B, "full", (256, 1024)),
}
# What can be done where units are too small: the 8B model on that many H100, full shard.
LEVERS_WORLD = 4096
LEVERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as above", {}),
    ("larger units: neighbours below 2 GiB together", {"min_bucket_bytes": "2GiB"}),
    ("prefetch two units ahead", {"forward_prefetch": 2, "backward_prefetch": 2}),
    ("not gathered again in backward (ZeRO-2)", {"strategy": "shard_grad_op"}),
    ("gathered again from 8 neighbours (ZeRO++ hpZ)", {"reshard_after_forward": 8}),
    ("hybrid over 1,024", {"strategy": "hybrid_shard", "world_size": (4, 1024)}),
    ("hybrid over 64", {"strategy": "hybrid_shard", "world_size": (64, 64)}),
    ("hybrid over 8", {"strategy": "hybrid_shard", "world_size": (512, 8)}),
)


# -- what a plan says ------------------------------------------------------------------------------


def planned(shape: Shape, batch: int, sequence: int, **options: Any) -> Plan:
    """A plan for CUDA: bf16, reduced in fp32, AdamW."""
    return fxshard.plan(
        shape.model(),
        kwargs=call(batch, sequence),
        optimizer=torch.optim.AdamW,
        mixed_precision=BF16,
        device="cuda",
        **options,
    )


def on(world: int, group: int | None) -> dict[str, Any]:
    """Options for full shard over `world` ranks, or hybrid over groups of `group`."""
    if group is None:
        return {"world_size": world, "strategy": "full_shard"}
    return {"world_size": (world // group, group), "strategy": "hybrid_shard"}


def cell(plan: Plan, hardware: Mapping[str, Hardware]) -> Cell:
    """Bytes, traffic and times of one plan, as JSON."""
    memory = plan.memory
    estimates = {name: plan.estimate(each) for name, each in hardware.items()}
    first = next(iter(estimates.values()))
    return {
        "peak_bytes": memory.peak_bytes,
        "categories": {c.value: n for c, n in memory.peak_by_category.items()},
        "traffic": {kind: dataclasses.asdict(each) for kind, each in first.traffic().items()},
        "padding": padding(plan),
        "message": message(plan),
        "times": {
            name: {
                "step_seconds": each.step_seconds,
                "compute_seconds": each.compute_seconds,
                "exposed_seconds": each.exposed_communication_seconds,
                "mfu": each.mfu,
            }
            for name, each in estimates.items()
        },
    }


def padding(plan: Plan) -> float:
    """Elements that are gathered, over those of the parameters: each is cut along its first dim.

    A parameter with fewer rows than ranks is as large in a gather as if it had a row for each.
    """
    program = plan.program
    ranks = program.world_size
    whole = [(p.shape[0], ranks * p.chunk(ranks)[0], p.shape.numel()) for p in params(plan)]
    return sum(n * padded / rows for rows, padded, n in whole) / sum(n for *_, n in whole)


def params(plan: Plan) -> Iterable[Any]:
    """The sharded parameters of a plan."""
    return plan.program.params.values()


def message(plan: Plan) -> int:
    """Bytes that one rank contributes to the gather of a repeated unit; the median of all gathers."""
    program = plan.program
    sizes = sorted(
        sent.whole // sent.ranks
        for node in program.graph.nodes
        if node.target is ops.all_gather
        for sent in [operators.collective(node, program.world_size)]
    )
    return sizes[len(sizes) // 2]


# -- the cost model, asked -------------------------------------------------------------------------


def knee(hardware: Hardware, ranks: int) -> float:
    """Bytes of a rank's shard with which a gather takes as long for its latency as for its bytes.

    Half of the bandwidth is reached there; with four times as many, four fifths.
    """
    latency = operators.ring_seconds(0, ranks, hardware)
    return latency / (operators.ring_seconds(ranks, ranks, hardware) - latency)


def efficiency(shard: float, hardware: Hardware, ranks: int) -> float:
    """The part of a gather's time that its bytes take; `shard` bytes from each rank."""
    whole = operators.ring_seconds(shard * ranks, ranks, hardware)
    return 1 - operators.ring_seconds(0, ranks, hardware) / whole if whole else 1.0


def most_ranks(
    unit: float, hardware: Hardware, share: float, worlds: Sequence[int] = WORLDS
) -> int | None:
    """The largest of the worlds in which a unit of so many bytes is gathered at that efficiency.

    None: not even in the smallest.
    """
    fit = [w for w in worlds if efficiency(unit / w, hardware, w) >= share]
    return max(fit, default=None)


def crossover(cells: Iterable[Cell], hardware: str) -> int | None:
    """The smallest world from which on hybrid is always faster than full shard, both fitting.

    A world where only one of them fits or was planned says nothing; None: there is none.
    """
    wins: dict[int, bool] = {}
    for world, (full, hybrid) in best(cells, hardware).items():
        if full is not None and hybrid is not None:
            wins[world] = seconds(hybrid, hardware) < seconds(full, hardware)
    found = None
    for world in sorted(wins, reverse=True):
        if not wins[world]:
            break
        found = world
    return found


def best(cells: Iterable[Cell], hardware: str) -> dict[int, tuple[Cell | None, Cell | None]]:
    """Of each world, full shard and the fastest hybrid, of those that fit."""
    found: dict[int, list[Cell | None]] = {}
    for each in cells:
        both = found.setdefault(each["world"], [None, None])
        if not fits(each, hardware):
            continue
        at = each["group"] is not None
        now = both[at]
        if now is None or seconds(each, hardware) < seconds(now, hardware):
            both[at] = each
    return {world: (full, hybrid) for world, (full, hybrid) in sorted(found.items())}


def fits(each: Cell, hardware: str) -> bool:
    """True if the peak of tensors is below the GPU's memory; what is besides them is not in it."""
    return bool(each["peak_bytes"] < PRESETS[hardware].memory_bytes)


def seconds(each: Cell, hardware: str) -> float:
    """Of a step."""
    return float(each["times"][hardware]["step_seconds"])


# -- measuring -------------------------------------------------------------------------------------

Say = Callable[[str], None]


def scaled(name: str, say: Say, worlds: Sequence[int] = WORLDS) -> list[Cell]:
    """All worlds and strategies of one model."""
    model = MODELS[name]
    hardware = {each: PRESETS[each] for each in HARDWARE}
    say(f"{name}: capture")
    first = planned(model.shape, BATCH, SEQUENCE, world_size=8, checkpoint=model.checkpoint)
    found = []
    for world in worlds:
        for group in (None, *(g for g in model.groups if g < world)):
            say(f"{name}: {world} ranks, {strategy(group)}")
            made = first.replan(**on(world, group))
            found.append({"world": world, "group": group, **cell(made, hardware)})
    return found


def pulled(say: Say) -> list[Cell]:
    """The 8B model with each of `LEVERS`, and with more sequences."""
    model, found = MODELS["8B"], []
    hardware = {"h100": PRESETS["h100"]}
    options = {"world_size": LEVERS_WORLD, "checkpoint": model.checkpoint}
    first = planned(model.shape, BATCH, SEQUENCE, **options)
    for title, changes in LEVERS:
        say(f"lever: {title}")
        found.append({"lever": title, "tokens": BATCH, **cell(first.replan(**changes), hardware)})
    for batch in (2, 4):
        say(f"lever: batch {batch}")
        made = planned(model.shape, batch, SEQUENCE, **options)
        found.append(
            {"lever": f"{batch} sequences a rank", "tokens": batch, **cell(made, hardware)}
        )
    return found


def compared(say: Say) -> list[Cell]:
    """Our estimate beside each published figure, for the same settings."""
    found: list[Cell] = []
    made: tuple[Any, Plan] | None = None
    for each in sorted(MEASURED, key=_capture):  # those of one capture one after the other
        say(f"published: {each.source}, {each.shape.name}, {each.gpu}, {each.world}")
        if made is None or made[0] != _capture(each):
            options = {"world_size": 8, "checkpoint": each.checkpoint}
            made = _capture(each), planned(each.shape, each.batch, each.sequence, **options)
        plan = made[1].replan(**_world(each.world))
        found.append(beside(each, plan))
    return sorted(found, key=lambda row: row["at"])


def _capture(each: Measured) -> tuple[str, int, int, str]:
    return each.shape.name, each.batch, each.sequence, each.checkpoint or ""


def _world(world: int | tuple[int, int]) -> dict[str, Any]:
    hybrid = isinstance(world, tuple)
    return {"world_size": world, "strategy": "hybrid_shard" if hybrid else "full_shard"}


def beside(each: Measured, plan: Plan) -> Cell:
    """One published figure and ours."""
    estimate = plan.estimate(GPUS[each.gpu])
    row = {
        "at": MEASURED.index(each),
        "tokens": each.batch * each.sequence / estimate.step_seconds,
        "exposed": estimate.exposed_communication_seconds / estimate.step_seconds,
        "mfu": estimate.mfu,
    }
    if each.reserved_gib is not None:
        memory = plan.memory.device_memory()
        row |= {"peak_bytes": plan.memory.peak_bytes, "reserved_bytes": memory.reserved}
    return row


def weak_scaling(say: Say) -> Cell:
    """Llama 2 7B, 2 x 4,096 tokens on each H100, full shard over 128 and over 2,048 ranks."""
    say("published: Fernandez et al.")
    first = planned(LLAMA2_7B, 2, 4096, world_size=128)
    few, many = (first.replan(world_size=w).estimate("h100").step_seconds for w in (128, 2048))
    return {"slower": 1 - few / many}


def out_of_memory(say: Say) -> Cell:
    """Llama 3.1 405B, 2 x 8,192 tokens, full checkpointing, full shard over 128 ranks."""
    say("published: 405B on 128 ranks")
    plan = planned(LLAMA3_405B, 2, SEQUENCE, world_size=128, checkpoint="full")
    return {"peak_bytes": plan.memory.peak_bytes}


# -- the page --------------------------------------------------------------------------------------


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table."""
    return tabulate(list(rows), headers="keys", tablefmt="github", disable_numparse=True)


def strategy(group: int | None) -> str:
    """In a table."""
    return "full" if group is None else f"hybrid {group:,}"


def gib(count: float) -> str:
    """Bytes as GiB."""
    return f"{count / GIB:,.2f}"


CATEGORIES = {
    "parameters": ("Sharded Param",),
    "unsharded": ("Unsharded Param", "All Gather"),
    "gradients": ("Sharded Grad", "Unsharded Grad", "Reduce Scatter"),
    "optimizer": ("OptState",),
    "activations": ("Activation",),
    "other": ("Temp", "Buffer", "Inputs"),
}


def memory_table(cells: Iterable[Cell]) -> str:
    """GiB of a rank by category at the peak."""
    rows = []
    for each in cells:
        own = each["categories"]
        where = [name for name in HARDWARE if fits(each, name)]
        rows.append(
            {
                "ranks": f"{each['world']:,}",
                "strategy": strategy(each["group"]),
                "peak, GiB": gib(each["peak_bytes"]),
                **{n: gib(sum(own.get(c, 0) for c in names)) for n, names in CATEGORIES.items()},
                "fits": ", ".join(where) or "no",
            }
        )
    return table(rows)


def wire_table(cells: Iterable[Cell]) -> str:
    """GiB that a rank sends in a step, by kind and link."""
    rows = []
    for each in cells:
        sent = {kind: each["traffic"].get(kind, {}) for kind in KINDS}
        row = {"ranks": f"{each['world']:,}", "strategy": strategy(each["group"])}
        for kind, title in zip(KINDS, ("gathers", "reduce-scatters", "all-reduces"), strict=True):
            node, net = (sent[kind].get(f"{link}_bytes", 0) for link in ("link", "network"))
            row[f"{title}: node"], row["network " * 1 + title] = gib(node), gib(net)
        row["collectives"] = f"{sum(s.get('collectives', 0) for s in sent.values()):,}"
        row["padding"] = f"{each['padding'] - 1:.1%}"
        rows.append(row)
    return table(rows)


def time_table(cells: Iterable[Cell]) -> str:
    """Step, exposed communication and MFU on each GPU."""
    rows = []
    for each in cells:
        row = {"ranks": f"{each['world']:,}", "strategy": strategy(each["group"])}
        for name in HARDWARE:
            took = each["times"][name]
            step, exposed = took["step_seconds"], took["exposed_seconds"]
            known = fits(each, name)
            row |= {
                f"{name}: step, ms": f"{1e3 * step:,.0f}" if known else "-",
                f"{name}: exposed, ms": f"{1e3 * exposed:,.0f}" if known else "-",
                f"{name}: exposed": f"{exposed / step:.1%}" if known else "-",
                f"{name}: MFU": f"{took['mfu']:.1%}" if known else "-",
            }
        rows.append(row)
    return table(rows)


def crossover_table(models: Mapping[str, list[Cell]]) -> str:
    """From which world on hybrid is faster, and by how much at the largest."""
    rows = []
    for name, cells in models.items():
        for gpu in HARDWARE:
            both = best(cells, gpu)
            full, hybrid = both[max(both)]
            assert full is not None and hybrid is not None
            at = crossover(cells, gpu)
            rows.append(
                {
                    "model": MODELS[name].shape.name,
                    "GPU": gpu,
                    "hybrid is faster from": "nowhere" if at is None else f"{at:,} ranks",
                    f"full at {max(both):,}, ms": f"{1e3 * seconds(full, gpu):,.0f}",
                    "best hybrid there, ms": f"{1e3 * seconds(hybrid, gpu):,.0f}",
                    "its group": f"{hybrid['group']:,}",
                    "full / hybrid": f"{seconds(full, gpu) / seconds(hybrid, gpu):.2f}",
                }
            )
    return table(rows)


def ratio_table(models: Mapping[str, list[Cell]], gpu: str) -> str:
    """Full shard's time over that of the best hybrid, by world."""
    found = {name: best(cells, gpu) for name, cells in models.items()}
    rows = []
    for world in WORLDS:
        row = {"ranks": f"{world:,}"}
        for name, both in found.items():
            full, hybrid = both.get(world, (None, None))
            row[MODELS[name].shape.name] = (
                "-"
                if full is None or hybrid is None
                else f"{seconds(full, gpu) / seconds(hybrid, gpu):.3f} "
                f"({strategy(hybrid['group'])})"
            )
        rows.append(row)
    return table(rows)


def knee_table(hardware: Hardware) -> str:
    """The knee by ranks, and what each model's layer sends there."""
    rows = []
    for world in WORLDS:
        row = {
            "ranks": f"{world:,}",
            "latency, µs": f"{1e6 * operators.ring_seconds(0, world, hardware):,.0f}",
            "knee, KiB a rank": f"{knee(hardware, world) / 1024:,.0f}",
        }
        for model in MODELS.values():
            shard = 2 * model.shape.layer_parameters / world
            row[f"{model.shape.name}: layer, KiB a rank"] = f"{shard / 1024:,.0f}"
            row[f"{model.shape.name}: of bandwidth"] = f"{efficiency(shard, hardware, world):.0%}"
        rows.append(row)
    return table(rows)


def limits_table(hardware: Hardware) -> str:
    """Up to where each model's layer is large enough."""
    rows = []
    for model in MODELS.values():
        unit = 2 * model.shape.layer_parameters
        kv = model.shape.hidden * model.shape.kv_heads // model.shape.heads
        rows.append(
            {
                "model": model.shape.name,
                "a layer in bf16, MiB": f"{unit / 2**20:,.0f}",
                f"{MOST:.0%} of bandwidth up to": _ranks(most_ranks(unit, hardware, MOST)),
                f"{HALF:.0%} up to": _ranks(most_ranks(unit, hardware, HALF)),
                "its shortest matrix, rows": f"{kv:,}",
            }
        )
    return table(rows)


def _ranks(count: int | None) -> str:
    return "none" if count is None else f"{count:,}"


def levers_table(cells: Sequence[Cell]) -> str:
    """What each lever does to time, bytes and collectives."""
    rows = []
    for each in cells:
        took, sent = each["times"]["h100"], each["traffic"]
        rows.append(
            {
                "8B on 4,096 H100": each["lever"],
                "step, ms": f"{1e3 * took['step_seconds']:,.0f}",
                "exposed, ms": f"{1e3 * took['exposed_seconds']:,.0f}",
                "MFU": f"{took['mfu']:.1%}",
                "collectives": f"{sum(s['collectives'] for s in sent.values()):,}",
                "padding": f"{each['padding'] - 1:.1%}",
                "peak, GiB": gib(each["peak_bytes"]),
            }
        )
    return table(rows)


def published_table(cells: Iterable[Cell]) -> str:
    """Measured, ours, and the ratio."""
    rows = []
    for each in cells:
        said = MEASURED[each["at"]]
        world = said.world
        tokens = f"{said.tokens:,.0f}"
        rows.append(
            {
                "model": said.shape.name,
                "GPUs": f"{world:,} {said.gpu}"
                if isinstance(world, int)
                else f"{world[0] * world[1]:,} {said.gpu}",
                "strategy": strategy(None if isinstance(world, int) else world[1]),
                "tokens a rank": f"{said.batch} x {said.sequence:,}",
                "checkpoint": said.checkpoint or "none",
                "measured tokens/s": tokens,
                "estimated": f"{each['tokens']:,.0f}",
                "ratio": f"{each['tokens'] / said.tokens:.2f}",
                "compiled": "" if said.compiled is None else f"{said.compiled:,.0f}",
                "ratio to it": ""
                if said.compiled is None
                else f"{each['tokens'] / said.compiled:.2f}",
                "exposed": f"{each['exposed']:.1%}",
                "source": said.source,
            }
        )
    return table(rows)


def reserved_table(cells: Iterable[Cell]) -> str:
    """Measured and predicted peaks of the allocator."""
    rows = []
    for each in cells:
        said = MEASURED[each["at"]]
        if said.reserved_gib is not None:
            rows.append(
                {
                    "model": said.shape.name,
                    "ranks": said.world,
                    "measured, reserved, GiB": f"{said.reserved_gib:.1f}",
                    "ours, reserved, GiB": gib(each["reserved_bytes"]),
                    "ours, peak of tensors, GiB": gib(each["peak_bytes"]),
                    "ratio of reserved": f"{each['reserved_bytes'] / GIB / said.reserved_gib:.2f}",
                }
            )
    return table(rows)


def constants_table() -> str:
    """Every constant of the presets that the page uses, with the tag of its source in hardware.py."""
    tags = source_tags()
    rows = []
    for name, get, unit in CONSTANTS:
        row = {"constant": name}
        for gpu in HARDWARE:
            row[gpu] = f"{get(PRESETS[gpu]):,.6g} {unit}".strip()
        row["source"] = " ".join(f"[{tag}]" for tag in tags[name])
        rows.append(row)
    return table(rows)


Get = Callable[[Hardware], float]


def _tree(hardware: Hardware) -> constants.Tree:
    assert hardware.tree is not None
    return hardware.tree


CONSTANTS: tuple[tuple[str, Get, str], ...] = (
    ("flops, bf16", lambda h: h.rate(torch.bfloat16) / 1e12, "TFLOP/s"),
    ("flops, fp32", lambda h: h.rate(torch.float32) / 1e12, "TFLOP/s"),
    ("achievable", lambda h: h.achievable, ""),
    ("memory_bandwidth", lambda h: h.memory_bandwidth / 1e12, "TB/s"),
    ("memory_bytes", lambda h: h.memory_bytes / 1e9, "GB"),
    ("launch_overhead", lambda h: 1e6 * h.launch_overhead, "µs"),
    ("link.alpha", lambda h: 1e6 * h.link.alpha, "µs"),
    ("link.beta", lambda h: h.link.beta / 1e9, "GB/s"),
    ("network.alpha", lambda h: 1e6 * h.network.alpha, "µs"),
    ("network.beta, a GPU", lambda h: h.network.beta / 1e9, "GB/s"),
    ("collective_overhead", lambda h: 1e6 * h.collective_overhead, "µs"),
    ("ranks_per_node", lambda h: h.ranks_per_node, ""),
    ("tree.link_alpha", lambda h: 1e6 * _tree(h).link_alpha, "µs"),
    ("tree.network_alpha", lambda h: 1e6 * _tree(h).network_alpha, "µs"),
    ("tree.share", lambda h: _tree(h).share, ""),
)
# constant -> the texts in hardware.py behind which the tags of its source stand
_LINES = {
    "flops, bf16": ("torch.bfloat16: 989.4e12",),
    "flops, fp32": ("torch.float32: 66.9e12",),
    "achievable": ("achievable=0.75",),
    "memory_bandwidth": ("memory_bandwidth=3.35e12", "memory_bandwidth=4.8e12"),
    "memory_bytes": ("memory_bytes=80 * 10**9", "memory_bytes=141 * 10**9"),
    "launch_overhead": ("launch_overhead=2 * MICRO",),
    "link.alpha": ("alpha=1.9 * MICRO",),
    "link.beta": ("beta=18 * 20.6e9 * _LL128",),
    "network.alpha": ("alpha=4.0 * MICRO",),
    "network.beta, a GPU": ("beta=50e9 * _LL128", "_LL128 = 0.92"),
    "collective_overhead": ("collective_overhead=14 * MICRO",),
    "ranks_per_node": ("ranks_per_node=8",),
    "tree.link_alpha": ("link_alpha=1.25 * MICRO",),
    "tree.network_alpha": ("network_alpha=8.5 * MICRO",),
    "tree.share": ("share=0.92",),
}


def source_tags() -> dict[str, list[str]]:
    """Of each constant, the tags that stand behind it in hardware.py: "H100", "NCCL", "guess".

    Raises:
        ValueError: the line is not there, or has none.
    """
    lines = inspect.getsource(constants).splitlines()
    found: dict[str, list[str]] = {}
    for name, starts in _LINES.items():
        found[name] = []
        for start in starts:
            said = [line for line in lines if line.strip().startswith(start)]
            tags = re.findall(r"# \[(\w+)\]", said[0]) if said else []
            if not tags:
                raise ValueError(f"{name}: no line {start!r} with the tag of a source")
            found[name] += [tag for tag in tags if tag not in found[name]]
    return found


def sources_list() -> str:
    """What the tags mean, as hardware.py says it."""
    said = (constants.__doc__ or "").partition("=\n")[2]
    entries = re.findall(r"\[(\w+)\]\s+(.*?)(?=\n\[|\Z)", said, re.DOTALL)
    used = {tag for tags in source_tags().values() for tag in tags}
    return "\n".join(f"- **[{t}]** {' '.join(x.split())}" for t, x in entries if t in used)
