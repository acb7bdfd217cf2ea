"""Writes docs/scale.md: Llama 3 of 8, 70 and 405 billion parameters on 8 to 16,384 GPUs, on paper.

    python -m benchmarks.scale_page           # plans everything (8 CPU-minutes), page and plot
    python -m benchmarks.scale_page --page    # page and plot alone, from the last run's results
    python -m benchmarks.scale_page --only 8B # plan this again, the rest as it was

Nothing runs but captures on meta tensors. Bytes are those of the plan; times are those of the model
in docs/cost.md. The plot needs matplotlib (`pip install fxshard[plot]`); without it the page is
written and the plot is left as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.figures import ROOT, geometric_mean, machine, write_csv
from benchmarks.page import table
from benchmarks.published import MEASURED, OTHER_SOURCES, OTHERS, SOURCES
from benchmarks.scale_cells import (
    BATCH,
    CHANGES_WORLD,
    FASTER,
    GIB,
    HARDWARE,
    MODELS,
    PARTS,
    RECORD,
    SEQUENCE,
    SIMPLE,
    WORLDS,
    best,
    crossover,
    fits_from,
    knee,
    measure,
    most_ranks,
    simple_is_faster_to,
)
from benchmarks.scale_constants import constant_rows, sources_list
from benchmarks.scale_tables import (
    HALF,
    MOST,
    Rows,
    changes_rows,
    crossover_rows,
    every_cell,
    falls,
    gib,
    knee_rows,
    limits_rows,
    models_rows,
    published_rows,
    ratio_rows,
    reserved_rows,
)
from benchmarks.shapes import LLAMA3_8B
from fxshard.cost import operators
from fxshard.hardware import PRESETS
from fxshard.memory.cuda.fixed_costs import fixed_costs
from fxshard.memory.cuda.reserved import HOPPER

PAGE = ROOT / "docs" / "scale.md"
PLOT, TABLES = PAGE.with_suffix(".png"), PAGE.with_suffix("")


HEAD = """# Llama 3 at scale, on paper

Written by `python -m benchmarks.scale_page`; do not edit. {date}: {machine} ({cpu}), Python
{python}, torch {torch}, transformers {transformers}.

Llama 3 of 8, 70 and 405 billion parameters (`LlamaForCausalLM` of transformers, from published
shapes, on meta tensors), planned for {least:,} to {most:,} GPUs: bytes, collectives, and how long a
step would take. **Nothing on this page ran on a GPU.** Bytes, collectives and what they move are
read off the program that would run, exactly. Seconds are those of a model ([cost.md](cost.md)),
which is optimistic: [against published measurements](#against-published-measurements) puts it
beside {measured} of them, with no constant fitted. Read the times as what the program and the wires
allow, and compare rows of this page with each other.

Tables are in [scale/](scale/cells.csv), a CSV file each: `cells` has a line for each model, number
of ranks and strategy.

![MFU and exposed communication against ranks](scale.png)

## What to do where communication is exposed

The 8B model, full shard over {changes_world:,} H100, and one thing changed:

{changes}

In the order in which to try them:

- **Hybrid**, over few enough ranks that units are large for each, and no more than the shortest
  matrix has rows: it is the only one that ends the padding. Not over fewer than that: with 8 ranks
  a step of AdamW has eight times as many rows to update as with 64, and as many more to all-reduce.
- **More sequences a rank**, if the batch allows: communication stays, compute grows. The table
  has it per step: divide by the sequences.
- **Larger units** (`min_bucket_bytes`, or `units=` of several layers): fewer, longer collectives,
  for the bytes of larger units unsharded.
- **Fewer gathers**: `strategy="shard_grad_op"` keeps parameters for backward, where there is
  memory; `reshard_after_forward=8` gathers them from the node the second time.
- Prefetching further ahead does not help where the links are busy all the time.
- **Other parallelism.** Beyond that, tensor or pipeline parallelism divides the layers, so that
  fewer ranks share one unit: what Llama 3 was trained with. [On meshes of two to four
  dimensions](scale-meshes.md) has the same models so.

## What is planned

{fits}.
[models.csv](scale/models.csv) has the shapes.

- A rank has {batch} sequence of {sequence:,} tokens, one micro-batch a step. The global batch
  grows with the ranks ({most:,} ranks: {tokens:,.0f} million tokens), which no one trains with:
  it is the least work a rank can have, so the worst case for hiding communication.
- bf16 parameters and compute, gradients reduced in fp32, AdamW on fp32 shards (12 bytes a
  parameter between steps, and 4 for its gradient), as torch runs it by default (foreach).
- Checkpointing: `"selective"` keeps what matrix products and attention return, `"full"` a layer's
  input alone.
- Strategies: `full` is `strategy="full_shard"` over all ranks. `hybrid n` shards over n
  neighbours and keeps copies: gathers and reduce-scatters stay among the n, gradients are
  all-reduced over the copies. The smaller n is one node (NVLink alone) for 8B, and for the others
  about as few ranks as hold them on one of the two GPUs; the larger n leaves more room.
- One unit a layer, the embedding and the head in the root, prefetch of one unit: the defaults.

## Constants

[constants.csv](scale/constants.csv) has them, from `fxshard/hardware.py`; nodes of 8 GPUs, one
network card for each. A row without a source but **[guess]** is an order of magnitude.

{sources}

Collectives: all-gathers and reduce-scatters go around a ring through all ranks, node by node
(NCCL has nothing else for them with several GPUs in a node and no switch that reduces); an
all-reduce goes around a ring or along a tree, whichever is faster.
"""

READING = """
## How to read the figures

- **Bytes** of a rank at the peak of a step, GiB. `unsharded`: parameters, and the buffers they
  are gathered into; `gradients`: also before they are reduced. Where the peak is in the root, it is
  around the loss: no layer is unsharded, and the logits of the full vocabulary are there, in fp32
  too. Where it is in the optimizer, `other` are the step's own temporaries, which `fused=True` does
  without. `on the GPU`: what CUDA's caching allocator reserves for it, by our model of it
  ([cuda.md](cuda.md)), with `expandable_segments:True`; and at most {outside} GiB for the CUDA
  context and NCCL's buffers ({outside_hybrid} with hybrid, which has two communicators). `fits`:
  that is within the GPU's memory.
- **Sent** by a rank in a step, GiB, within its node and to others, on the average of a node's ranks
  (a ring leaves a node once), and how many collectives there are. `padding`: how much more is
  gathered than the parameters are.
- **Times**, where it fits. `exposed` is what the compute stream stands still for communication. MFU
  is the PaLM paper's: model FLOPs, nothing that is computed again, over the peak of bf16.
"""

SCALE = """
## Where hybrid beats full shard

{crossover}.
[hybrid.csv](scale/hybrid.csv) has full shard's time over that of the fastest hybrid that fits, on
H100, for each number of ranks; above 1, hybrid is faster;
[hybrid-from.csv](scale/hybrid-from.csv) from how many ranks on. `h100` is the page's: NCCL's
protocol LL128. `h100, Simple` has the latencies of the other protocol for large messages (14 µs a
step between nodes, 3.4 µs within) and its bandwidth, as a measure of how much hangs on that choice.
By these figures Simple is the faster one for a layer's gather on up to {simple} ranks; there nearly
nothing is exposed with either.

Three things make full shard slower with more ranks; with hybrid each of them stops at the group:

1. **Latency.** A ring over n ranks has n - 1 steps. See the next section.
2. **Padding.** Parameters are cut along their first dimension, as FSDP2 does. With more ranks
   than a matrix has rows, most ranks hold a row of padding or nothing, and gathers move it: the
   keys' and values' projections have {rows} rows, in all three models. And where rows do not divide
   by the ranks, gradients are copied to be padded, which is compute: that is why 405B loses MFU on
   8,192 ranks (its MLP has 53,248 rows) with nothing more exposed.
3. **The network.** A full-shard gather crosses nodes; on these clusters the eight cards of a node
   are together as fast as NVLink, so this costs little. With fewer cards it would.

Hybrid pays with bytes: parameters, gradients and states over n instead of all ranks, and an
all-reduce of the sharded gradients, in fp32, over the network.

## Where a unit gets too small

A gather takes its latency whatever it moves. At the **knee** a rank's message takes as long for
its bytes as for the latency: half of the bandwidth is lost
([knee.csv](scale/knee.csv), on H100). It hardly depends on the ranks: latency and steps grow alike,
and each of a ring's steps costs about as much as {step:,.0f} KiB. So a unit should be worth about
that much *for each rank*:
{limits} ([limits.csv](scale/limits.csv)).
Beyond, each gather and reduction of a layer takes about {per_rank:,.2f} µs for every rank, whatever
is in it: it is exposed as soon as that is longer than the layer computes.

## Against published measurements

The same settings as far as they are said, on GPUs with their figures. A ratio above 1: our
estimate is too fast. `compiled`: with `torch.compile`, which fuses what our program runs operator
by operator. [published.csv](scale/published.csv) has a row for each.

{published_sources}

Over these {count} rows the estimate is {low:.2f} to {high:.2f} times the measurement; its
geometric mean is {mean:.2f}. Why it is off:

- Matrix products are taken to reach 75% of the peak at all sizes, memory all of its bandwidth,
  and the clock never to drop: H100s at their power limit do less, those of torchtitan have 500 W.
  That is all ranks' alike, so it changes the level and not the shape of a curve; and where
  compute is too fast, less communication is hidden than in truth.
- Kernels of communication take multiprocessors and bandwidth from those of compute; here they do
  not.
- JAX and torch.compile fuse elementwise operators, which in our program read and write memory.

Memory that torchtitan read from the allocator (`max reserved`); what a dry run of torch's own FSDP2
says of the same steps, with the plain allocator ([published-peaks.md](published-peaks.md)); and
what fxshard's own schedule reserves, with `expandable_segments:True`, which is recommended, are
in [reserved.csv](scale/reserved.csv). The dry run explains what was measured. Ours is the figure of
another program of the same model, and no estimate of theirs. The fall from
8 to 128 ranks, which sharding alone makes, is {measured_fall:.1f} GiB there; here {our_fall:.1f}
GiB of tensors (gradients are not at this peak) and {reserved_fall:.1f} GiB reserved.

- torchtitan says that 1-D FSDP2 of 405B, 2 x 8,192 tokens with full checkpointing, runs out of
  memory on 128 H100 of 94 GB (docs/performance.md, a later version). Here its peak is {oom:.0f}
  GiB: it does.
- Fernandez et al., Hardware Scaling Trends and Diminishing Returns in Large-Scale Distributed
  Training (2024, arXiv:2411.13055): with FSDP, the throughput of each H100 falls by
  {measured_slower:.0%} from 128 to 2,048 (as summaries of the paper quote it). Here Llama 2 7B with
  2 x 4,096 tokens, which we take to be their setting, falls by {slower:.0%}, and with protocol
  Simple by {simple_slower:.0%}. {verdict}

[others.csv](scale/others.csv) has what is not compared on this page, which has data parallelism
alone, or whose settings are not said.

{other_sources}

## What is not in it

Stragglers, failures, congestion, oversubscribed networks, data loading, checkpoints to disk,
clipping of gradients, and all of [cost.md](cost.md#what-is-not-modelled). At thousands of GPUs
these decide as much as what is here.
"""


def page(result: Mapping[str, Any]) -> str:
    """The page, from what `measure` wrote."""
    h100, models = PRESETS["h100"], result["models"]
    latency = operators.ring_seconds(0, WORLDS[-1], h100) / WORLDS[-1]
    ratios = [each["tokens"] / MEASURED[each["at"]].tokens for each in result["published"]]
    slower = result["weak_scaling"]
    return (HEAD + READING + SCALE).format(
        **{key: result[key] for key in machine()},
        least=WORLDS[0],
        most=WORLDS[-1],
        measured=len(MEASURED),
        changes_world=CHANGES_WORLD,
        changes=table(changes_rows(result["changes"])),
        fits=fits_text(models),
        batch=BATCH,
        sequence=SEQUENCE,
        tokens=WORLDS[-1] * BATCH * SEQUENCE / 1e6,
        sources=sources_list(),
        outside=outside(1),
        outside_hybrid=outside(2),
        crossover=crossover_text(models),
        simple=simple_text(),
        rows=f"{LLAMA3_8B.hidden * LLAMA3_8B.kv_heads // LLAMA3_8B.heads:,}",
        step=knee(h100, WORLDS[-1]) / 1024,
        limits=limits_text(),
        per_rank=1e6 * latency,
        published_sources=listed(SOURCES),
        count=len(ratios),
        low=min(ratios),
        high=max(ratios),
        mean=geometric_mean(ratios),
        **falls(result["published"]),
        oom=result["out_of_memory"]["peak_bytes"] / GIB,
        measured_slower=MEASURED_FALL,
        slower=slower["h100"],
        simple_slower=slower[SIMPLE],
        verdict=TOO_LITTLE if slower["h100"] < MEASURED_FALL else "",
        other_sources=listed(OTHER_SOURCES),
    )


def tables(result: Mapping[str, Any]) -> dict[str, Rows]:
    """The files of docs/scale/, by name."""
    models = result["models"]
    return {
        "cells": every_cell(models),
        "models": models_rows(models),
        "constants": constant_rows(),
        "hybrid": ratio_rows(models, ("h100", SIMPLE)),
        "hybrid-from": crossover_rows(models),
        "knee": knee_rows(PRESETS["h100"]),
        "limits": limits_rows(PRESETS["h100"]),
        "changes": changes_rows(result["changes"]),
        "published": published_rows(result["published"]),
        "reserved": reserved_rows(result["published"]),
        "others": [dict(zip(OTHER_HEADERS, each, strict=True)) for each in OTHERS],
    }


def fits_text(models: Mapping[str, Any]) -> str:
    """From how many ranks on full shard fits, by GPU and model."""
    return "Full shard fits " + ", and ".join(
        f"on {gpu.upper()} from "
        + ", ".join(f"{_count(fits_from(c, gpu))} ranks ({name})" for name, c in models.items())
        for gpu in HARDWARE
    )


def crossover_text(models: Mapping[str, Any]) -> str:
    """From how many ranks on hybrid is faster, by model."""
    found = {name: crossover(cells, "h100") for name, cells in models.items()}
    ranks = ", ".join(f"{_count(at)} ranks ({name})" for name, at in found.items())
    return f"On H100 hybrid is {FASTER:.0%} faster from {ranks} on"


def limits_text() -> str:
    """Up to how many ranks each model's layer is large enough."""
    said = []
    for name, model in MODELS.items():
        unit = 2 * model.shape.layer_parameters
        most, half = (most_ranks(unit, PRESETS["h100"], share) for share in (MOST, HALF))
        said.append(f"{_count(most)} and {_count(half)} ({name})")
    return f"a layer has {MOST:.0%} of the bandwidth, and {HALF:.0%}, up to {', '.join(said)} ranks"


def _count(ranks: int | None) -> str:
    return "none" if ranks is None else f"{ranks:,}"


OTHER_HEADERS = ("model", "GPUs", "parallelism", "measured", "source")
TOO_LITTLE = """So **the model hides too much at thousands of ranks**: it
  overlaps perfectly, every ring runs at the latencies of NCCL's own tables, no rank is late. Take
  its crossovers as upper bounds; those with protocol Simple are nearer to this measurement."""
MEASURED_FALL = 0.3722  # of a GPU's throughput from 128 to 2,048 ranks: Fernandez et al. (2024)


def listed(sources: Mapping[str, str]) -> str:
    """Sources by key, as a list."""
    return "\n".join(f"- **{key}**: {text}." for key, text in sources.items())


def outside(communicators: int) -> str:
    """GiB at most of the CUDA context and NCCL's buffers."""
    costs = fixed_costs(HOPPER, communicators=communicators)
    return gib(sum(each.bytes for each in costs if each.bound))


def simple_text() -> str:
    """Up to how many ranks protocol Simple is faster, by model."""
    ranks = {
        model.shape.name.removeprefix("Llama 3 "): simple_is_faster_to(
            2 * model.shape.layer_parameters
        )
        for model in MODELS.values()
    }
    return ", ".join(f"{count:,} ({name})" for name, count in ranks.items())


def plot(result: Mapping[str, Any]) -> bool:
    """MFU and the exposed share against ranks, on H100. False: there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    titles = ("MFU", "exposed communication, share of the step")
    for (name, cells), colour in zip(result["models"].items(), ("C0", "C1", "C2"), strict=True):
        found = best(cells, "h100")
        for at, (style, kind) in enumerate((("-", "full shard"), ("--", "hybrid, fastest"))):
            shown = [(world, both[at]) for world, both in found.items() if both[at] is not None]
            times = [(world, each["times"]["h100"]) for world, each in shown if each is not None]
            label = f"{MODELS[name].shape.name}, {kind}"
            worlds = [world for world, _ in times]
            exposed = [took["exposed_seconds"] / took["step_seconds"] for _, took in times]
            lines = ([took["mfu"] for _, took in times], exposed)
            for axis, values in zip(axes, lines, strict=True):
                axis.plot(worlds, values, style, color=colour, marker="o", ms=3, label=label)
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=f"{title} (estimated, H100)", xlabel="ranks", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.set_xticks(WORLDS, [f"{world:,}" for world in WORLDS], rotation=45)
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    pyplot.close(figure)
    return True


def main() -> int:
    """Plan unless told not to, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write page and plot alone")
    parser.add_argument("--only", nargs="+", choices=[*MODELS, *PARTS], help="plan these alone")
    chosen = parser.parse_args()
    if not chosen.page:
        began = time.process_time()

        def say(what: str) -> None:
            print(f"{time.process_time() - began:6.0f} CPU-s  {what}", flush=True)

        measure(chosen.only or [*MODELS, *PARTS], say)
    result = json.loads(RECORD.read_text())
    PAGE.write_text(page(result))
    TABLES.mkdir(exist_ok=True)
    for name, rows in tables(result).items():
        write_csv(TABLES / f"{name}.csv", rows)
    print(f"wrote {PAGE} and the tables in {TABLES}")
    print(f"wrote {PLOT}" if plot(result) else "no matplotlib: the plot is as it was")
    return 0


if __name__ == "__main__":
    sys.exit(main())
