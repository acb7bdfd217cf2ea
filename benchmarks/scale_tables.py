"""The tables of docs/scale.md and docs/scale/, of what was planned and what others measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.figures import ROOT
from benchmarks.published import MEASURED
from benchmarks.scale_cells import (
    FASTER,
    GIB,
    HARDWARE,
    MODELS,
    SIMPLE,
    VARIANTS,
    WORLDS,
    Cell,
    best,
    crossover,
    efficiency,
    fits,
    fits_from,
    knee,
    most_ranks,
    seconds,
    strategy,
)
from fxshard.cost import operators
from fxshard.hardware import Hardware

Rows = list[dict[str, Any]]
DRY_RUNS = ROOT / "benchmarks" / "results" / "published_steps.json"
KINDS = ("unshard", "reduce", "all-reduce")
HALF, MOST = 0.5, 0.8  # shares of a link's bandwidth


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


def every_cell(models: Mapping[str, list[Cell]]) -> list[dict[str, str]]:
    """The file beside the page: a line for each model, number of ranks and strategy."""
    return [
        {
            "model": MODELS[name].shape.name,
            "ranks": str(each["world"]),
            "strategy": strategy(each["group"]),
            **memory(each),
            **wire(each),
            **times(each),
        }
        for name, cells in models.items()
        for each in cells
    ]


def memory(cell: Cell) -> dict[str, str]:
    """GiB of a rank by category at the peak."""
    own = cell["categories"]
    where = [name for name in HARDWARE if fits(cell, name)]
    return {
        "peak, GiB": gib(cell["peak_bytes"]),
        **{n: gib(sum(own.get(c, 0) for c in names)) for n, names in CATEGORIES.items()},
        "peak in": cell["peak_at"],
        "on the GPU": gib(cell["device_bytes"]),
        "fits": ", ".join(where) or "no",
    }


def wire(cell: Cell) -> dict[str, str]:
    """GiB that a rank sends in a step, by kind and link."""
    sent = {kind: cell["traffic"].get(kind, {}) for kind in KINDS}
    row: dict[str, str] = {}
    for kind, title in zip(KINDS, ("gathers", "reduce-scatters", "all-reduces"), strict=True):
        node, net = (sent[kind].get(f"{link}_bytes", 0) for link in ("link", "network"))
        row[f"{title}: node, GiB"], row[f"{title}: network, GiB"] = gib(node), gib(net)
    row["collectives"] = str(sum(s.get("collectives", 0) for s in sent.values()))
    row["padding"] = f"{cell['padding'] - 1:.1%}"
    return row


def times(cell: Cell) -> dict[str, str]:
    """Step, exposed communication and MFU on each GPU that it fits on."""
    row: dict[str, str] = {}
    for name in HARDWARE:
        took = cell["times"][name]
        step, exposed = took["step_seconds"], took["exposed_seconds"]
        known = fits(cell, name)
        row |= {
            f"{name}: step, ms": f"{1e3 * step:.0f}" if known else "-",
            f"{name}: exposed, ms": f"{1e3 * exposed:.0f}" if known else "-",
            f"{name}: exposed": f"{exposed / step:.1%}" if known else "-",
            f"{name}: MFU": f"{took['mfu']:.1%}" if known else "-",
        }
    return row


def crossover_rows(models: Mapping[str, list[Cell]]) -> Rows:
    """From which world on hybrid is faster, and by how much at the largest in which both fit."""
    rows = []
    for name, cells in models.items():
        for gpu in VARIANTS:
            world, full, hybrid = [
                (world, full, hybrid)
                for world, (full, hybrid) in best(cells, gpu).items()
                if full is not None and hybrid is not None
            ][-1]
            at = crossover(cells, gpu)
            rows.append(
                {
                    "model": MODELS[name].shape.name,
                    "GPU": gpu,
                    f"hybrid is {FASTER:.0%} faster from": "nowhere" if at is None else f"{at:,}",
                    "at ranks": f"{world:,}",
                    "full, ms": f"{1e3 * seconds(full, gpu):,.0f}",
                    "best hybrid, ms": f"{1e3 * seconds(hybrid, gpu):,.0f}",
                    "its group": f"{hybrid['group']:,}",
                    "full / hybrid": f"{seconds(full, gpu) / seconds(hybrid, gpu):.2f}",
                }
            )
    return rows


def ratio_rows(models: Mapping[str, list[Cell]], gpus: Sequence[str]) -> Rows:
    """Full shard's time over that of the best hybrid, by world."""
    rows = []
    for world in WORLDS:
        row = {"ranks": f"{world:,}"}
        for name, cells in models.items():
            for gpu in gpus:
                full, hybrid = best(cells, gpu).get(world, (None, None))
                row[f"{MODELS[name].shape.name}, {gpu}"] = (
                    "-"
                    if full is None or hybrid is None
                    else f"{seconds(full, gpu) / seconds(hybrid, gpu):.2f} ({hybrid['group']:,})"
                )
        rows.append(row)
    return rows


def knee_rows(hardware: Hardware) -> Rows:
    """The knee by ranks, and what each model's layer sends there."""
    rows, simple = [], VARIANTS[SIMPLE]
    for world in WORLDS:
        row = {
            "ranks": f"{world:,}",
            "latency, µs": f"{1e6 * operators.ring_seconds(0, world, hardware):,.0f}",
            "knee, KiB a rank": f"{knee(hardware, world) / 1024:,.0f}",
            "Simple: latency, µs": f"{1e6 * operators.ring_seconds(0, world, simple):,.0f}",
            "Simple: knee, KiB": f"{knee(simple, world) / 1024:,.0f}",
        }
        for model in MODELS.values():
            shard = 2 * model.shape.layer_parameters / world
            row[f"{model.shape.name}: layer, KiB a rank"] = f"{shard / 1024:,.0f}"
            row[f"{model.shape.name}: of bandwidth"] = f"{efficiency(shard, hardware, world):.0%}"
        rows.append(row)
    return rows


def limits_rows(hardware: Hardware) -> Rows:
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
    return rows


def _ranks(count: int | None) -> str:
    return "none" if count is None else f"{count:,}"


def changes_rows(cells: Sequence[Cell]) -> Rows:
    """What each change does to time, bytes and collectives."""
    rows = []
    for each in cells:
        took, sent = each["times"]["h100"], each["traffic"]
        rows.append(
            {
                "8B on 4,096 H100": each["change"],
                "step, ms": f"{1e3 * took['step_seconds']:,.0f}",
                "exposed, ms": f"{1e3 * took['exposed_seconds']:,.0f}",
                "MFU": f"{took['mfu']:.1%}",
                "collectives": f"{sum(s['collectives'] for s in sent.values()):,}",
                "padding": f"{each['padding'] - 1:.1%}",
                "peak, GiB": gib(each["peak_bytes"]),
                "on the GPU": gib(each["device_bytes"]),
                "fits": "yes" if fits(each, "h100") else "no",
            }
        )
    return rows


def published_rows(cells: Iterable[Cell]) -> Rows:
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
    return rows


def reserved_rows(cells: Iterable[Cell]) -> Rows:
    """Measured peaks of the allocator, dry runs of the same FSDP2, and our own schedule's."""
    dry_runs = json.loads(DRY_RUNS.read_text("utf-8"))
    rows = []
    for each in cells:
        said = MEASURED[each["at"]]
        if said.reserved_gib is not None:
            dry_run = dry_runs[f"ttb-8b-{said.world}gpu-eager"]
            rows.append(
                {
                    "model": said.shape.name,
                    "ranks": said.world,
                    "FSDP2, measured, GiB": f"{said.reserved_gib:.1f}",
                    "FSDP2, dry run, GiB": gib(dry_run["reserved"]),
                    "fxshard, GiB": gib(each["reserved_bytes"]),
                    "its peak of tensors, GiB": gib(each["peak_bytes"]),
                }
            )
    return rows


def models_rows(models: Mapping[str, list[Cell]]) -> Rows:
    """Shapes and sizes, and from how many ranks on full shard fits."""
    rows = []
    for name, cells in models.items():
        shape = MODELS[name].shape
        rows.append(
            {
                "model": shape.name,
                "layers": shape.layers,
                "hidden": f"{shape.hidden:,}",
                "intermediate": f"{shape.intermediate:,}",
                "heads": f"{shape.heads} / {shape.kv_heads}",
                "vocabulary": f"{shape.vocabulary:,}",
                "parameters": f"{shape.parameters:,}",
                "checkpoint": MODELS[name].checkpoint,
                "hybrid over": " and ".join(f"{group:,}" for group in MODELS[name].groups),
                **{f"fits from, {gpu}": _ranks(fits_from(cells, gpu)) for gpu in HARDWARE},
            }
        )
    return rows


def falls(cells: Iterable[Cell]) -> dict[str, float]:
    """By how many GiB the peak falls from the fewest to the most ranks: measured, and ours."""
    said = [(MEASURED[each["at"]], each) for each in cells if "reserved_bytes" in each]
    (first, ours), (last, fewer) = said[0], said[-1]
    assert first.reserved_gib is not None and last.reserved_gib is not None
    return {
        "measured_fall": first.reserved_gib - last.reserved_gib,
        "our_fall": (ours["peak_bytes"] - fewer["peak_bytes"]) / GIB,
        "reserved_fall": (ours["reserved_bytes"] - fewer["reserved_bytes"]) / GIB,
    }
