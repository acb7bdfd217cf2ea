"""Plan Llamas on meshes of 2 to 4 dimensions, and write docs/scale-meshes.md.

    python -m benchmarks.mesh_page                     # everything
    python -m benchmarks.mesh_page --only 8B stages    # these alone
    python -m benchmarks.mesh_page --page              # the page alone, from what was planned

Nothing runs and nothing is allocated; no process group is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from benchmarks import mesh_experts
from benchmarks.figures import RESULTS, ROOT, machine, write_csv
from benchmarks.mesh_models import (
    SHAPES,
    Stage,
    batch,
    cp_context,
    loss_context,
    model,
    stage_parallel,
    tensor_parallel,
)
from benchmarks.page import table
from benchmarks.published import GPUS
from fxshard.hardware import Hardware
from fxshard.plans.plan import Plan

PAGE, RECORD = ROOT / "docs" / "scale-meshes.md", RESULTS / "mesh_page.json"
TABLES = ROOT / "docs" / "scale"
GIB, LENGTH, LONG = 2**30, 8192, 65_536
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CHECKPOINTS = {"8B": "selective", "70B": "full", "405B": "full"}
# The H100 of torchtitan's own measurements: 94 GB, slower memory.
TITAN = dataclasses.replace(GPUS["H100, 2.4 TB/s"], memory_bytes=94 * 10**9)
Mesh = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: `size` sequences of `length` tokens for each data-parallel rank."""

    mesh: Mesh
    size: int
    length: int = LENGTH


def _rows(gpus: int, *others: Row) -> list[Row]:
    """FSDP with tensor parallelism over 1 to 8 GPUs, one sequence for each GPU; and `others`."""
    plain = [Row({"dp_shard": gpus}, 1)]
    return [*plain, *(Row({"dp_shard": gpus // n, "tp": n}, n) for n in (2, 4, 8)), *others]


ROWS = {
    "8B": _rows(
        64,
        Row({"dp_replicate": 8, "dp_shard": 8}, 1),
        Row({"dp_replicate": 4, "dp_shard": 2, "tp": 8}, 8),
        Row({"dp_shard": 64}, 1, LONG),
        Row({"dp_shard": 32, "cp": 2}, 1, LONG),
        Row({"dp_shard": 8, "cp": 8}, 1, LONG),
        Row({"dp_shard": 4, "cp": 2, "tp": 8}, 1, LONG),
        Row({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 8}, 1, LONG),
    ),
    "70B": _rows(
        256,
        Row({"dp_replicate": 8, "dp_shard": 4, "tp": 8}, 8),
        Row({"dp_replicate": 2, "dp_shard": 16, "tp": 8}, 8),
    ),
    "405B": _rows(
        512,
        Row({"dp_replicate": 2, "dp_shard": 32, "tp": 8}, 8),
    ),
}
# A model of the shape of DeepSeek-V3, one sequence for each GPU.
EXPERTS, EXPERTS_LENGTH = "DeepSeek-V3", 4096
EXPERT_ROWS = [
    Row({"dp_shard": 8, "ep": 64}, 1, EXPERTS_LENGTH),
    Row({"dp_shard": 64, "ep": 8}, 1, EXPERTS_LENGTH),
    Row({"dp_shard": 512}, 1, EXPERTS_LENGTH),
]
STAGES, STAGE_LAYERS, MICRO_BATCHES = 8, 16, 32


def planned(name: str, row: Row) -> Plan:
    """The plan of a row."""
    parts = batch(row.size, row.length)
    more: dict[str, Any] = {}
    if "tp" in row.mesh:
        more |= {"parallelize": tensor_parallel, "context": loss_context}
    if "cp" in row.mesh:
        more["context"] = cp_context(parts)
    if "dp_replicate" in row.mesh:
        more["strategy"] = "hybrid_shard"
    return fxshard.plan(
        *(model(SHAPES[name], row.length), parts),
        mesh=row.mesh,
        checkpoint=CHECKPOINTS[name],
        optimizer=torch.optim.AdamW,
        mixed_precision=BF16,
        device="cuda",
        **more,
    )


def planned_experts(row: Row) -> Plan:
    """The plan of a row of experts, where each gets as many tokens as any other."""
    shape, ranks = mesh_experts.ExpertShape(), row.mesh.get("ep", 1)
    more: dict[str, Any] = {}
    if ranks > 1:
        told = row.size * row.length * shape.chosen // ranks  # from each rank to each
        more |= {"shard_placement_fn": mesh_experts.cut_inside}
        more |= {"parallelize": mesh_experts.expert_parallel, "data_sizes": {"**.experts": told}}
    return fxshard.plan(
        *(mesh_experts.model(shape), batch(row.size, row.length)),
        mesh=row.mesh,
        checkpoint="full",
        optimizer=torch.optim.AdamW,
        mixed_precision=BF16,
        device="cuda",
        **more,
    )


def cell(plan: Plan, row: Row, hardware: Hardware | str = "h100") -> dict[str, Any]:
    """What is known of a plan, as JSON."""
    estimate = plan.estimate(hardware)
    gpus = math.prod(row.mesh.values())
    samples = row.size * gpus // math.prod(row.mesh.get(name, 1) for name in ("tp", "cp"))
    sent = estimate.traffic()
    return {
        "mesh": row.mesh,
        "gpus": gpus,
        "size": row.size,
        "length": row.length,
        "peak_bytes": plan.memory.peak_bytes,
        "node_bytes": sum(each.link_bytes for each in sent.values()),
        "network_bytes": sum(each.network_bytes for each in sent.values()),
        "collectives": sum(each.collectives for each in sent.values()),
        "step_seconds": estimate.step_seconds,
        "exposed_seconds": estimate.exposed_communication_seconds,
        "mfu": estimate.mfu,
        "tokens": samples * row.length / estimate.step_seconds / gpus,
    }


def stage(in_flight: int) -> dict[str, Any]:
    """A stage in the middle of a pipeline of 405B: 8 x 8 GPUs, 1F1B."""
    shape = SHAPES["405B"]
    with torch.device("meta"):
        blocks = Stage(shape, STAGE_LAYERS, LENGTH)
        part = torch.zeros(1, LENGTH // 8, shape.dim, dtype=torch.bfloat16, requires_grad=True)
    plan = fxshard.plan(
        *(blocks, (part,)),
        mesh={"dp_shard": 8, "tp": 8},
        parallelize=stage_parallel,
        pipeline_stage=True,
        micro_batches=MICRO_BATCHES,
        in_flight=in_flight,
        checkpoint="full",
        optimizer=torch.optim.AdamW,
        mixed_precision=BF16,
        device="cuda",
    )
    return {"in_flight": in_flight, "peak_bytes": plan.memory.peak_bytes}


@dataclasses.dataclass(frozen=True)
class Published:
    """A configuration of torchtitan's, and what was measured with it."""

    model: str
    row: Row
    said: str
    source: str


PUBLISHED = {
    "405B on 128": Published(
        "405B",
        Row({"dp_shard": 16, "tp": 8}, 2),
        "109 tokens/s, 29.0% MFU",
        "bf16, not compiled: torchtitan, docs/performance.md, a later version, with Llama 3.1",
    ),
    "70B on 256": Published(
        "70B",
        Row({"dp_shard": 32, "tp": 8}, 16),
        "829 tokens/s, 71.9 GiB",
        "float8 and compiled, ours is bf16: benchmarks/llama3_h100_202412_torchtitan.md (31a17bf)",
    ),
    "405B on 512": Published(
        "405B",
        Row({"dp_shard": 128, "tp": 4}, 2),
        "152 tokens/s",
        "bf16, compiled; the batch is our assumption: pytorch.org blog, 2024-11-25 (1580429)",
    ),
}
TUNED = {"405B on 128": (2,), "70B on 256": (16,)}  # batches of a data-parallel rank


def tuned(name: str) -> dict[str, Any]:
    """What `tune` chooses for the GPUs of a published configuration."""
    published = PUBLISHED[name]
    began = time.process_time()
    found = fxshard.tune(
        *(model(SHAPES[published.model], LENGTH), batch(1, LENGTH)),
        mesh="auto",
        world_size=math.prod(published.row.mesh.values()),
        parallelize=tensor_parallel,
        context=loss_context,
        hardware=TITAN,
        batches=TUNED[name],
        space={"strategy": ["full_shard"], "offload": [None]},
        plans=1,
        forward_prefetch=1,
        backward_prefetch=1,
        checkpoint="full",
        mixed_precision=BF16,
        optimizer=torch.optim.AdamW,
        device="cuda",
    )
    best = found.best
    assert best.plan is not None and best.batch is not None
    return {
        "table": found.table(rows=6),
        "cpu_seconds": round(time.process_time() - began),
        "planned": found.planned,
        **cell(best.plan, Row(best.mesh, best.batch), TITAN),
    }


PARTS = ("published", *TUNED, "stages", *ROWS, EXPERTS)


def record(result: dict[str, Any]) -> None:
    """Keep what is known so far."""
    RECORD.write_text(json.dumps(result, indent=1) + "\n")


def measure(parts: Sequence[str], say: Callable[[str], None]) -> None:
    """Plan some parts; what was planned of others stays."""
    result: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in parts:
        began = time.process_time()
        if name in TUNED:
            result[name] = tuned(name)
        elif name == "stages":
            result[name] = [stage(STAGES - number) for number in (1, 3, 6)]
        elif name == EXPERTS:
            result[name] = []
            for row in EXPERT_ROWS:
                result[name].append(cell(planned_experts(row), row))
                say(f"{name} {row.mesh}")
                record(result)
        elif name == "published":
            result[name] = {}
            for key, each in PUBLISHED.items():
                result[name][key] = cell(planned(each.model, each.row), each.row, TITAN)
                record(result)
                say(key)
        else:
            result[name] = []
            for row in ROWS[name]:
                result[name].append(cell(planned(name, row), row))
                say(f"{name} {row.mesh}")
                record(result)
        result.setdefault("cpu_seconds", {})[name] = round(time.process_time() - began)
        result["machine"] = machine()
        record(result)
        say(name)


def mesh_text(mesh: Mesh) -> str:
    """``dp_shard 8 x tp 8``."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items())


def figures(name: str, each: dict[str, Any]) -> dict[str, str]:
    """A row of the file of all meshes; times only of what fits into 80 GB."""
    fits = each["peak_bytes"] <= 80 * 10**9
    times = {
        "step, s": f"{each['step_seconds']:.2f}",
        "exposed, s": f"{each['exposed_seconds']:.2f}",
        "MFU": f"{each['mfu']:.1%}",
        "tokens/s, GPU": f"{each['tokens']:,.0f}",
    }
    return {
        "model": name if name == EXPERTS else f"Llama 3 {name}",
        "GPUs": f"{each['gpus']:,}",
        "mesh": mesh_text(each["mesh"]),
        "sequences": f"{each['size']} of {each['length']:,}",
        "peak, GiB": f"{each['peak_bytes'] / GIB:,.2f}" + ("" if fits else " (too much)"),
        "node, GiB": f"{each['node_bytes'] / GIB:,.1f}",
        "network, GiB": f"{each['network_bytes'] / GIB:,.1f}",
        **(times if fits else dict.fromkeys(times, "-")),
    }


SHOWN = ("model", "mesh", "sequences", "peak, GiB", "step, s", "exposed, s", "MFU")


HEAD = """# Meshes of two to four dimensions, on paper

Written by `python -m benchmarks.mesh_page`; do not edit. Parts were planned at different times, the
last on {date}: {machine} ({cpu}), Python {python}, torch {torch}.
CPU seconds of each part: {seconds}.

Llama 3 as torchtitan cuts it (sequence and loss parallelism on `tp`, ring attention on `cp`), on
meta tensors, planned by `fxshard.plan(model, batch, mesh=..., parallelize=..., context=...)` in one
process without a process group ([tensor-parallel.md](tensor-parallel.md)). **Nothing on this page
ran on a GPU.** Bytes, collectives and what they move are read off the program; seconds are those of
a model ([cost.md](cost.md)), which is optimistic, on H100s in nodes of 8 with a network card each.
bf16 parameters and compute, gradients reduced in fp32, AdamW on fp32 shards; checkpoints are
"selective" for 8B and "full" for the others.

`sequences` are those of a data-parallel rank in a step (with `cp`, all its ranks have parts of
them); without `cp` there is one of 8,192 tokens for each GPU, whatever the mesh. `exposed`: what
the compute stream stands still for communication. `too much`: more than 80 GB, before what CUDA and
NCCL take.

{table}

[scale/meshes.csv](scale/meshes.csv) has what a rank sends in a step too, in its node and over the
network."""

WHAT = """## What the tables say

- **Tensor parallelism costs time wherever the batch can be split instead**: it sends activations in
  each layer, and the products that read them wait. 8B takes 1.55 times as long with `tp 8` as by
  FSDP alone, for the same sequences.
- **Whether it saves memory depends on what the peak is made of**: with as many sequences for each
  GPU, 405B needs 72.9 GiB by FSDP alone and 57.4 with `tp 4`; 8B, with "selective", 32.5 and 42.6.
- **`cp` cuts what a long sequence keeps alive** by its ranks: 250 GiB to 40 for 65,536 tokens in 8
  parts.
- MFU counts attention in full, of which causal kernels compute half: with long sequences it may be
  above the 75% that matrix products reach here."""


def meshes(result: dict[str, Any]) -> list[dict[str, str]]:
    """All that is planned, mesh by mesh."""
    names = [name for name in (*ROWS, EXPERTS) if name in result]
    return [figures(name, each) for name in names for each in result[name]]


def page(result: dict[str, Any]) -> str:
    """The page."""
    seconds = ", ".join(f"{name} {spent}" for name, spent in result["cpu_seconds"].items())
    rows = [{name: row[name] for name in SHOWN} for row in meshes(result)]
    parts = [HEAD.format(**result["machine"], seconds=seconds, table=table(rows)), WHAT]
    shape = mesh_experts.ExpertShape()
    each, bubble = EXPERTS_LENGTH * shape.chosen, (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
    parts += [
        "## Experts",
        f"{EXPERTS} stands for a model of its shape: "
        f"{shape.layers} layers, {shape.layers - shape.dense_layers} of them with "
        f"{shape.experts} experts, of which each token has {shape.chosen} and a shared one; "
        f"671B parameters, in this project's own few lines (`benchmarks/mesh_experts.py`: no "
        f"groups of experts, no rotation). Experts are spread over `ep`, and shared by "
        f"`dp_shard` along their second dimension, as in torchtitan where a rank has fewer "
        f"experts than there are ranks to share them; all else is sharded over both. Bytes are "
        f"those for as many tokens as come if all experts get the same, {each:,} rows "
        f"to each rank and layer: "
        f'`data_sizes` tells it. Checkpoints are "full", so that rows are sent again.',
        "## A stage of a pipeline",
        f"405B on 512 GPUs as `pp {STAGES} x dp_shard 8 x tp 8`: a stage in the middle holds "
        f"{STAGE_LAYERS} layers, and is planned alone, with `pipeline_stage=True`, "
        f"`micro_batches={MICRO_BATCHES}` of one sequence, and the forwards that 1F1B runs "
        f"ahead: {_peaks(result['stages'])}. Times of schedules are not estimated; of "
        f"{MICRO_BATCHES} micro-batches in {STAGES} stages, 1F1B stands still {bubble:.0%} of a "
        f"step. No stage with tensor parallelism has been run beside its plan.",
        *_against(result),
        NOT,
    ]
    return "\n\n".join(parts) + "\n"


def _peaks(stages: list[dict[str, Any]]) -> str:
    """Of the stages that are planned, in a sentence."""
    return ", ".join(
        f"{each['peak_bytes'] / GIB:,.2f} GiB in stage {STAGES - each['in_flight'] + 1} of {STAGES}"
        for each in stages
    )


NOT = """## What is not planned

- **Where tokens go**: all experts get the same here; in training some get more, and bytes grow.
- **Schedules of a pipeline**: stages are planned one by one, their memory and not their time."""


def published(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Configurations of torchtitan's, what was measured with them, and ours."""
    rows = []
    for name, each in PUBLISHED.items():
        ours = result["published"][name]
        rows.append(
            {
                "model": f"Llama 3.1 {name} GPUs",
                "their mesh": mesh_text(each.row.mesh),
                "batch": each.row.size,
                "measured, a GPU": each.said,
                "our estimate, tokens/s": f"{ours['tokens']:,.0f}",
                "our estimate, MFU": f"{ours['mfu']:.1%}",
                "our peak, GiB": f"{ours['peak_bytes'] / GIB:,.1f}",
                "source": each.source,
            }
        )
    return rows


def _against(result: dict[str, Any]) -> list[str]:
    parts = [
        "## Beside torchtitan's configurations",
        "Their H100s have 94 GB of memory at 2.4 TB/s and 400 Gb/s for each GPU, and so has the "
        "model here. Measured figures were read on 2026-11-25; their sources are in "
        "[scale/meshes-published.csv](scale/meshes-published.csv).",
        "\n".join(
            f"- {row['model']}, {row['their mesh']}, batch {row['batch']}: measured "
            f"{row['measured, a GPU']}; here {row['our estimate, tokens/s']} tokens/s, "
            f"{row['our estimate, MFU']} MFU, {row['our peak, GiB']} GiB."
            for row in published(result)
        ),
        "`fxshard.tune` with `mesh='auto'`, `checkpoint='full'` and full shard, asked for the same "
        "GPUs and batches, chooses:",
        "\n".join(
            f"- for {name}, batch {list(TUNED[name])}: **{mesh_text(best['mesh'])}**, "
            f"{best['tokens']:,.0f} tokens/s for each GPU, {best['mfu']:.1%} MFU, "
            f"{best['peak_bytes'] / GIB:,.1f} GiB ({best['planned']} plans, "
            f"{best['cpu_seconds']} CPU seconds)."
            for name, best in ((name, result[name]) for name in TUNED)
        ),
    ]
    return parts


def main() -> int:
    """Plan unless told not to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="plan these alone")
    chosen = parser.parse_args()
    if not chosen.page:

        def say(what: str) -> None:
            print(f"{time.process_time():6.0f} CPU-s  {what}", flush=True)

        measure(chosen.only or PARTS, say)
    result = json.loads(RECORD.read_text())
    PAGE.write_text(page(result))
    write_csv(TABLES / "meshes.csv", meshes(result))
    write_csv(TABLES / "meshes-published.csv", published(result))
    print(f"wrote {PAGE} and two tables in {TABLES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
