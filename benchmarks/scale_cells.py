"""The figures behind docs/scale.md: plans, and what is asked of them and of the cost model.

`benchmarks.scale_page` runs it and writes the page.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy

import fxshard
from benchmarks.figures import RESULTS, machine, write
from benchmarks.published import GPUS, MEASURED, TORCHTITAN, Measured
from benchmarks.shapes import LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, Shape, call
from fxshard.cost import operators
from fxshard.hardware import PRESETS, Hardware, Link, Tree
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.plans.plan import Plan

RECORD = RESULTS / "scale_page.json"
HARDWARE = ("h100", "h200")
# What if NCCL took protocol Simple instead: its latencies and whole bandwidth, src/graph/tuning.cc.
SIMPLE = "h100, Simple"
_US = 1e-6
VARIANTS = {
    **{name: PRESETS[name] for name in HARDWARE},
    SIMPLE: dataclasses.replace(
        PRESETS["h100"],
        name=SIMPLE,
        link=Link(3.4 * _US, 18 * 20.6e9),
        network=Link(14.0 * _US, 50e9),
        collective_overhead=8.4 * _US,
        tree=Tree(4.0 * _US, 14.0 * _US, 0.92),
    ),
}
SEQUENCE, BATCH = 8192, 1
FASTER = 0.01  # less is a draw
WORLDS = tuple(8 << n for n in range(12))  # 8 to 16,384
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EXPANDABLE = AllocatorSettings(expandable_segments=True)  # as torchtitan sets it
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
    "405B": Model(LLAMA3_405B, "full", (128, 2048)),
}
# What can be done where units are too small: the 8B model on that many H100, full shard.
CHANGES_WORLD = 4096
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
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
    """A plan for CUDA: bf16, reduced in fp32 if nothing else is said, AdamW."""
    return fxshard.plan(
        shape.model(),
        kwargs=call(batch, sequence),
        optimizer=torch.optim.AdamW,
        device="cuda",
        **{"mixed_precision": BF16, **options},
    )


def on(world: int, group: int | None) -> dict[str, Any]:
    """Options for full shard over `world` ranks, or hybrid over groups of `group`."""
    if group is None:
        return {"world_size": world, "strategy": "full_shard"}
    return {"world_size": (world // group, group), "strategy": "hybrid_shard"}


def cell(plan: Plan, hardware: Mapping[str, Hardware]) -> Cell:
    """Bytes, traffic and times of one plan, as JSON."""
    memory = plan.memory
    on_device = memory.device_memory(settings=EXPANDABLE)
    estimates = {name: plan.estimate(each) for name, each in hardware.items()}
    first = next(iter(estimates.values()))
    return {
        "peak_bytes": memory.peak_bytes,
        "device_bytes": on_device.reserved + on_device.outside,
        "peak_at": f"{memory.peak_at.phase}, {memory.peak_at.module or 'the root'}",
        "categories": {c.value: n for c, n in memory.peak_by_category.items()},
        "traffic": {kind: dataclasses.asdict(each) for kind, each in first.traffic().items()},
        "padding": padding(plan),
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
    params = [plan.program.layouts[fqn] for fqn in plan.program.params]
    padded = sum(math.prod(param.padded_shape) for param in params)
    return padded / sum(math.prod(param.shape) for param in params)


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


def simple_is_faster_to(unit: float, worlds: Sequence[int] = WORLDS) -> int:
    """The largest of the worlds in which protocol Simple gathers so many bytes faster than LL128.

    Raises:
        ValueError: it does in none.
    """
    ll128, simple = PRESETS["h100"], VARIANTS[SIMPLE]
    seconds_of = operators.ring_seconds
    return max(w for w in worlds if seconds_of(unit, w, simple) < seconds_of(unit, w, ll128))


def fits_from(cells: Iterable[Cell], hardware: str) -> int | None:
    """The fewest ranks on which full shard fits; None: it does on none."""
    full = (each["world"] for each in cells if each["group"] is None and fits(each, hardware))
    return min(full, default=None)


def crossover(cells: Iterable[Cell], hardware: str, by: float = FASTER) -> int | None:
    """The smallest world from which on hybrid is always faster than full shard, both fitting.

    A world where only one of them fits or was planned says nothing; None: there is none.

    Args:
        cells: of one model.
        hardware: of `VARIANTS`.
        by: what counts as faster: full shard takes more than ``1 + by`` times as long.
    """
    wins: dict[int, bool] = {}
    for world, (full, hybrid) in best(cells, hardware).items():
        if full is not None and hybrid is not None:
            wins[world] = seconds(hybrid, hardware) * (1 + by) < seconds(full, hardware)
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
    """True if the GPU has what the allocator reserves, with context and NCCL's buffers."""
    return bool(each["device_bytes"] <= VARIANTS[hardware].memory_bytes)


def seconds(each: Cell, hardware: str) -> float:
    """Of a step."""
    return float(each["times"][hardware]["step_seconds"])


def strategy(group: int | None) -> str:
    """In a table."""
    return "full" if group is None else f"hybrid {group:,}"


# -- measuring -------------------------------------------------------------------------------------

Say = Callable[[str], None]


def scaled(name: str, say: Say, worlds: Sequence[int] = WORLDS) -> list[Cell]:
    """All worlds and strategies of one model."""
    model = MODELS[name]
    say(f"{name}: capture")
    first = planned(model.shape, BATCH, SEQUENCE, world_size=8, checkpoint=model.checkpoint)
    found = []
    for world in worlds:
        for group in (None, *(g for g in model.groups if g < world)):
            say(f"{name}: {world} ranks, {strategy(group)}")
            made = first.replan(**on(world, group))
            found.append({"world": world, "group": group, **cell(made, VARIANTS)})
    return found


def pulled(say: Say) -> list[Cell]:
    """The 8B model with each of `CHANGES`, and with more sequences."""
    model, found = MODELS["8B"], []
    hardware = {"h100": PRESETS["h100"]}
    options = {"world_size": CHANGES_WORLD, "checkpoint": model.checkpoint}
    first = planned(model.shape, BATCH, SEQUENCE, **options)
    for title, changes in CHANGES:
        say(f"change: {title}")
        found.append({"change": title, "tokens": BATCH, **cell(first.replan(**changes), hardware)})
    for batch in (2, 4):
        say(f"change: batch {batch}")
        made = planned(model.shape, batch, SEQUENCE, **options)
        found.append(
            {"change": f"{batch} sequences a rank", "tokens": batch, **cell(made, hardware)}
        )
    return found


def compared(say: Say) -> list[Cell]:
    """Our estimate beside each published figure, for the same settings."""
    found: list[Cell] = []
    made: tuple[Any, Plan] | None = None
    for each in sorted(MEASURED, key=_capture):  # those of one capture one after the other
        say(f"published: {each.source}, {each.shape.name}, {each.gpu}, {each.world}")
        if made is None or made[0] != _capture(each):
            options = {
                "world_size": 8,
                "checkpoint": policy(each.checkpoint),
                "mixed_precision": MixedPrecisionPolicy(torch.bfloat16, each.reduce),
            }
            made = _capture(each), planned(each.shape, each.batch, each.sequence, **options)
        plan = made[1].replan(**_world(each.world))
        found.append(beside(each, plan))
    return sorted(found, key=lambda row: row["at"])


def policy(checkpoint: str | None) -> Any:
    """What `fxshard.plan` is given for a published setting."""
    return every_second_product() if checkpoint == TORCHTITAN else checkpoint


def every_second_product() -> Callable[..., CheckpointPolicy]:
    """Torchtitan's selective policy, of operators: all of attention, every second product.

    Source: torchtitan, `_save_list` and `_custom_policy`. It counts from each layer anew, and a
    Llama's has seven: those of query, value, gate and the last are saved.
    """
    counted = itertools.count()

    def saved(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = op is torch.ops.aten.mm.default and next(counted) % 7 % 2 == 0
        if product or op in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return saved


ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,  # torch's choice on H100 by now
)


def _capture(each: Measured) -> tuple[str, int, int, str, str]:
    reduced = str(each.reduce)
    return each.shape.name, each.batch, each.sequence, each.checkpoint or "", reduced


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
        memory = plan.memory.device_memory(settings=EXPANDABLE)
        row |= {"peak_bytes": plan.memory.peak_bytes, "reserved_bytes": memory.reserved}
    return row


def weak_scaling(say: Say) -> dict[str, float]:
    """By how much a GPU of 2,048 is slower than one of 128, with either protocol.

    Llama 2 7B, 2 x 4,096 tokens on each H100, full shard: Fernandez et al. (2024), as we read them.
    """
    say("published: Fernandez et al.")
    first = planned(LLAMA2_7B, 2, 4096, world_size=128)
    few, many = first, first.replan(world_size=2048)
    return {
        name: 1
        - few.estimate(VARIANTS[name]).step_seconds / many.estimate(VARIANTS[name]).step_seconds
        for name in ("h100", SIMPLE)
    }


def out_of_memory(say: Say) -> Cell:
    """Llama 3.1 405B, 2 x 8,192 tokens, full checkpointing, full shard over 128 ranks."""
    say("published: 405B on 128 ranks")
    plan = planned(LLAMA3_405B, 2, SEQUENCE, world_size=128, checkpoint="full")
    return {"peak_bytes": plan.memory.peak_bytes}


PARTS: dict[str, Callable[[Say], dict[str, Any]]] = {
    "changes": lambda say: {"changes": pulled(say)},
    "published": lambda say: {
        "published": compared(say),
        "weak_scaling": weak_scaling(say),
        "out_of_memory": out_of_memory(say),
    },
}


def measure(names: Sequence[str], say: Say) -> None:
    """Plan parts of the page and write what came out, as it comes.

    Args:
        names: of `MODELS` and `PARTS`; what is not named stays as the last run found it, if that
            was of the same versions.
        say: called with what is done next.

    Raises:
        ValueError: the last run was of other versions.
    """
    torch.set_num_threads(1)
    result: dict[str, Any] = {"models": {}}
    if set(names) != {*MODELS, *PARTS}:
        result = json.loads(RECORD.read_text())
        if any(result[key] != machine()[key] for key in ("torch", "transformers", "python")):
            raise ValueError("the last run was of other versions: plan everything again")
        result = {key: value for key, value in result.items() if key not in machine()}
    for name in names:
        if name in MODELS:
            result["models"][name] = scaled(name, say)
        else:
            result |= PARTS[name](say)
        result["models"] = {n: result["models"][n] for n in MODELS if n in result["models"]}
        write(RECORD, result)
