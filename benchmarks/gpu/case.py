"""One model on one world size, in a process of its own: plan it, run one rank, compare. See run.sh.

    python -m benchmarks.gpu.case "llama-1b" 8 result.json    # a GPU; with --cpu: none

The plan is made first, on the meta device for ``device="cuda"``, as on a machine without a GPU.
Then the rank runs for real on a fake process group, which moves nothing between ranks: its memory
is that of one rank of many. What is measured is torch's own: ``torch.cuda.memory_stats`` on a GPU,
memory events of torch.profiler on a CPU.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

import fxshard
from benchmarks.gpu.models import ON_CPU, ON_GPU, Batch, Recipe
from fxshard._torch import dtensors, process_groups
from fxshard.capture.cuda.operators import capture_signature
from fxshard.memory.cuda.reserved import STEADY_STEPS, DeviceMemory
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.report import MemoryReport

STEPS = 1 + STEADY_STEPS  # what a replay of the allocator follows
ALLOCATED_TARGET, RESERVED_TARGET = 0.01, 0.03  # of what is measured, either way
FIGURES = ("requested", "allocated", "reserved")
META = torch.device("meta")
SHOWN = 20  # lines of a list of differences
# AdamW's loop on a CPU divides a tensor by a Python number, which is a tensor then: f64, and in the
# divisor's dtype once more (aten/src/ATen/native/BinaryOps.cpp, ``wrapped_scalar_tensor``).
NUMBER = 8 + 4
adamw = functools.partial(torch.optim.AdamW, lr=1e-4)

Row = dict[str, Any]
Key = tuple[int, str]  # step from 1, phase
Enter = Callable[[int, str], contextlib.AbstractContextManager[None]]


def run_case(recipe: Recipe, world: int, *, cpu: bool, lock: Path | None) -> Row:
    """Plan and run a model as rank 0 of `world`.

    Returns:
        What the table and the JSON file say of it; ``status`` is "ok", or "does not fit".
    """
    began = time.perf_counter()
    plan = planned(recipe, world, device="cuda")
    found: Row = {
        "parameters": sum(p.numel() for p in plan.workload.module.parameters()),
        "attention": recipe.attention,
        "checkpoint": recipe.checkpoint,
        "backend": "eager",
        "precision": "fp32" if recipe.precision is None else "bf16, reduced in fp32",
    }
    with _alone(lock):  # no CUDA before: plans of other cases are made meanwhile
        capability = (9, 0) if cpu else torch.cuda.get_device_capability(0)
        memory = plan.memory.device_memory(capability=capability, settings=allocator_settings())
        found |= replayed(memory)
        found["plan_seconds"] = round(time.perf_counter() - began, 1)
        began = time.perf_counter()
        if cpu:
            found |= on_cpu(recipe, world)
        else:
            found |= on_gpu(recipe, world, plan, memory, torch.device("cuda", 0))
        found["run_seconds"] = round(time.perf_counter() - began, 1)
    return found


def planned(recipe: Recipe, world: int, device: str | None, **options: Any) -> Any:
    """A plan without values, whatever this machine has; `options` are of `fxshard.plan`."""
    with META:
        model = recipe.model()
    with pinned(recipe):
        return fxshard.plan(
            model,
            recipe.batch(META),
            world_size=world,
            device=device,
            optimizer=adamw,
            **recipe.options(),
            **options,
        )


def pinned(recipe: Recipe) -> contextlib.AbstractContextManager[None]:
    """While a model is traced: the kernel that its attention takes."""
    if recipe.attention == "flash":
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return contextlib.nullcontext()


def allocator_settings() -> AllocatorSettings:
    """Those of this process."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return AllocatorSettings.from_text(text) if text else AllocatorSettings()


def replayed(memory: DeviceMemory) -> Row:
    """What the static side says: its phases, and beside them."""
    unknown = collections.Counter(row.op for row in memory.unknown)
    rows = [dataclasses.asdict(phase) for phase in memory.phases]
    return {
        "replay": [{name: row[name] for name in ("step", "phase", *FIGURES)} for row in rows],
        "static_peak": {
            "allocated": memory.allocated,
            "reserved": memory.reserved,
            "fragmentation": round(memory.fragmentation, 4),
        },
        "workspaces": {cost.name: cost.bytes for cost in memory.fixed if not cost.bound},
        "outside_at_most": memory.outside,
        "unknown_kernels": dict(unknown),
    }


# -- the run ---------------------------------------------------------------------------------------


def sharded(recipe: Recipe, world: int, device: torch.device) -> tuple[Any, Batch]:
    """The compiled module of rank 0, filled module by module on the device, and its batch."""
    torch.manual_seed(0)
    with META:
        model = recipe.model()
    batch = recipe.batch(device)
    mesh = init_device_mesh(device.type, (world,))
    with pinned(recipe):
        made = fxshard.compile(model, mesh=mesh, args=batch, optimizer=adamw, **recipe.options())
    return made, batch


def train(model: nn.Module, batch: Batch, enter: Enter) -> None:
    """`STEPS` steps, each phase inside of ``enter(step, phase)``."""
    optimizer = adamw(model.parameters())
    for step in range(1, STEPS + 1):
        with enter(step, "forward"):
            loss = model(*batch)
        with enter(step, "backward"):
            loss.backward()
            del loss
        with enter(step, "optimizer"):
            optimizer.step()
        with enter(step, "zero_grad"):
            optimizer.zero_grad(set_to_none=True)


def on_cpu(recipe: Recipe, world: int) -> Row:
    """Bytes by torch.profiler against the plan for the CPU: tensors, and what kernels take."""
    plan = planned(recipe, world, device=None)
    report = plan.memory
    with process_groups.fake_process_group(0, world):
        model, batch = sharded(recipe, world, torch.device("cpu"))
        held = held_bytes(model, batch)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train(model, batch, lambda step, phase: record_function(f"phase {step} {phase}"))
        tops = profiled(profiler.profiler.kineto_results.events(), held)
        capture = compared_captures(plan.program, model.plan.program, report, model.memory)
    static = expected_on_cpu(report)
    rows = [
        {"step": step, "phase": phase, "static": static[step, phase], "measured": tops[step, phase]}
        for step, phase in static
    ]
    for row in rows:
        row["difference"] = row["static"] - row["measured"]
    unknown = {r.op for r in report.kernel_temporaries if r.backend == "cpu" and r.bytes is None}
    return {
        "status": "ok",
        "start": {"static": sum(report.phases(first_step=True)[0].start), "measured": held},
        "phases": rows,
        "exact": not any(row["difference"] for row in rows),
        "unknown_kernels_cpu": sorted(unknown),
        "capture": capture,
    }


def expected_on_cpu(report: MemoryReport) -> dict[Key, int]:
    """Most bytes at once in each phase of each step, kernels' own included where known."""
    inside = {
        (row.phase, row.point): row.bytes or 0
        for row in report.kernel_temporaries
        if row.backend == "cpu"
    }
    found: dict[Key, int] = {}
    for step in range(1, STEPS + 1):
        for phase in report.phases(first_step=step == 1):
            curve = enumerate((sum(phase.start), *phase.during.sum(1).tolist()), start=-1)
            top = max(total + inside.get((phase.phase, point), 0) for point, total in curve)
            found[step, phase.phase] = top + (NUMBER if phase.phase == "optimizer" else 0)
    return found


def held_bytes(model: nn.Module, batch: Batch) -> int:
    """Of the storages of parameters, buffers and batch, each once."""
    found: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers(), *batch):
        local = dtensors.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def profiled(events: Sequence[Any], held: int) -> dict[Key, int]:
    """Most bytes at once inside each span named ``phase <step> <phase>``, `held` among them."""
    events = sorted(events, key=lambda event: event.start_ns())
    spans = {
        (int(event.name().split()[1]), event.name().split()[2]): event
        for event in events
        if event.name().startswith("phase ")
    }
    changes = [event for event in events if event.name() == "[memory]"]
    tops: dict[Key, int] = {}
    live, at = held, 0
    for key, span in sorted(spans.items(), key=lambda item: item[1].start_ns()):
        while at < len(changes) and changes[at].start_ns() < span.start_ns():
            live += changes[at].nbytes()
            at += 1
        top = live
        while at < len(changes) and changes[at].start_ns() <= span.end_ns():
            live += changes[at].nbytes()
            top = max(top, live)
            at += 1
        tops[key] = top
    return tops


def on_gpu(
    recipe: Recipe, world: int, plan: Any, memory: DeviceMemory, device: torch.device
) -> Row:
    """Bytes by torch.cuda.memory_stats against the replay of the plan."""
    torch.cuda.set_device(device)
    free, _ = torch.cuda.mem_get_info(device)
    if memory.reserved > free:
        why = f"{memory.reserved} bytes would be reserved, {free} are free"
        return {"status": "does not fit", "why": why}
    # Without stacks it costs little; it names the blocks behind a difference.
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=4_000_000)
    measured: dict[Key, dict[str, int]] = {}
    with process_groups.fake_process_group(0, world):
        model, batch = sharded(recipe, world, device)
        capture = compared_captures(plan.program, model.plan.program, plan.memory, model.memory)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what filling the model took
        start = {
            "static": sum(plan.memory.phases(first_step=True)[0].start),
            "held": held_bytes(model, batch),
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
        train(model, batch, functools.partial(watched, measured))
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
    rows = compared(memory, measured)
    found: Row = {
        "status": "ok",
        "start": start,
        "phases": rows,
        "retries": stats["num_alloc_retries"],
        "capture": capture,
        "within": {
            "allocated": all(abs(r["error"]["allocated"]) <= ALLOCATED_TARGET for r in rows),
            "reserved": all(abs(r["error"]["reserved"]) <= RESERVED_TARGET for r in rows),
        },
    }
    try:
        (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
        found["blocks"] = blocks_compared(plan.memory, trace, start["static"])
    except Exception:  # a hint beside the figures, from a private function: never instead of them
        found["blocks"] = {"failed": traceback.format_exc(limit=3)}
    return found


@contextlib.contextmanager
def watched(measured: dict[Key, dict[str, int]], step: int, phase: str) -> Iterator[None]:
    """Note the peaks of the block, as ``torch.cuda.max_memory_allocated`` and ``..._reserved``."""
    torch.cuda.reset_peak_memory_stats()
    yield
    stats = torch.cuda.memory_stats()
    measured[step, phase] = {
        "requested": stats["requested_bytes.all.peak"],
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def compared(memory: DeviceMemory, measured: dict[Key, dict[str, int]]) -> list[Row]:
    """Static beside measured, and by how much of the measured static is too high."""
    rows = []
    for phase in memory.phases:
        seen = measured[phase.step, phase.phase]
        static = {name: getattr(phase, name) for name in FIGURES}
        rows.append(
            {
                "step": phase.step,
                "phase": phase.phase,
                "static": static,
                "measured": seen,
                "error": {name: round(static[name] / seen[name] - 1, 6) for name in FIGURES},
            }
        )
    return rows


# -- what a difference comes from ------------------------------------------------------------------


def compared_captures(ours: Any, theirs: Any, report: MemoryReport, other: MemoryReport) -> Row:
    """A trace on the meta device against that on the device that runs: operators, and bytes."""
    mine, his = capture_signature(ours), capture_signature(theirs)
    lines = [f"planned {n} x {what}" for what, n in (mine - his).items()]
    lines += [f"traced {n} x {what}" for what, n in (his - mine).items()]
    both = report.ledger().totals, other.ledger().totals
    return {
        "equal": mine == his,
        "differences": lines[:SHOWN],
        "bytes_equal": [int(v) for v in both[0]] == [int(v) for v in both[1]],
        "peak_planned": report.peak_bytes,
        "peak_traced": other.peak_bytes,
    }


def blocks_compared(report: MemoryReport, trace: Sequence[Row], start: int) -> Row:
    """What is alive at the highest point of the trace, by size, against the ledger's peak.

    Args:
        report: of the plan.
        trace: of the allocator, events with ``action``, ``addr`` and ``size`` as requested.
        start: bytes alive before the first step, to say how far both are apart.
    """
    top, seen = highest(trace)
    ledger = report.ledger()
    tick = int(ledger.totals.argmax())
    sizes: dict[int, int] = collections.defaultdict(int)  # a storage may be several ranges
    for each in ledger.alive(tick):
        if not each.host:
            sizes[each.storage] += each.bytes
    static = collections.Counter(size for size in sizes.values() if size)
    gaps = {size: static[size] - seen[size] for size in static | seen}
    order = sorted((s for s, n in gaps.items() if n), key=lambda s: -abs(s * gaps[s]))
    return {
        "traced_peak": top,
        "static_peak": report.peak_bytes,
        "held": start,
        "at": dataclasses.asdict(report.peak_at),
        "static_minus_traced": [{"bytes": s, "blocks": gaps[s]} for s in order[:SHOWN]],
    }


def highest(trace: Sequence[Row]) -> tuple[int, collections.Counter[int]]:
    """Most requested bytes alive at once in a trace of the allocator, and their sizes then."""
    alive: dict[int, int] = {}
    now = top = 0
    at = 0
    for number, event in enumerate(trace):
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
            now += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in alive:
            now -= alive.pop(event["addr"])
        if now > top:
            top, at = now, number
    alive.clear()
    for event in trace[: at + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    return top, collections.Counter(alive.values())


# -- the process -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    """Only one process at a time runs what is inside; the lock goes with the process."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Run one case, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("world", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--lock", type=Path)
    given = parser.parse_args()
    if given.cpu:
        torch.set_num_threads(1)  # some kernels take memory per thread
    recipe = (ON_CPU if given.cpu else ON_GPU)[given.model]
    found = run_case(recipe, given.world, cpu=given.cpu, lock=given.lock)
    given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
