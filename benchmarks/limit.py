"""How far a step is from what no schedule can do better: in time, and in bytes.

    python -m benchmarks.limit
    python -m benchmarks.limit --models small --steps 8

Time. Two gloo ranks, one thread each; four ways live in the same two processes and take turns, in
an order that is turned round every round, with a barrier before each:

- the step: forward, loss, backward, AdamW (foreach), zero_grad of the sharded model;
- computing alone: forward, loss and backward of the plain model on the same batch, and AdamW of
  tensors of the shards' sizes. Nothing is communicated;
- collectives alone: those of the step, of the same sizes and in its order, all launched before the
  first wait;
- the step without wires: the sharded model on a fake group, whose collectives send nothing. What it
  takes beyond computing alone is fxshard's own work (its executor, and copies into buffers and out
  of them) and, in the optimizer, torch's for parameters that are DTensors. What the step takes
  beyond this one is communication that is not hidden: waits, and on a machine with a core per rank
  the work of gloo's threads, which compute's have to yield to.

No schedule is faster than the slower of computing alone and collectives alone: that is the limit.

Bytes. The peak of forward and backward by torch.profiler's memory events, over the least that any
schedule needs which runs the same operators in the same order and saves the same activations: at
each operator what it reads and makes, the parameters that it reads in full, and what was made
before and is read later; sharded parameters, gradients and optimizer states always. Computed from
the program's dataflow (`least_bytes`): gathered parameters that another operator reads, gradients
that wait for their reduction, and buffers of collectives are not in it.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake"
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from benchmarks.figures import RESULTS, geometric_mean, ratio, spread, write
from benchmarks.models import EVERY, MODELS
from benchmarks.peak_bytes import held_bytes, peaks, planned
from benchmarks.ranks import here, on_ranks
from benchmarks.sides import Setting, Training
from benchmarks.step_time import PHASES, alternating, slowest
from fxshard._torch import dtensors
from fxshard.ir import tags
from fxshard.ir.program import Program
from fxshard.memory.category import SENT, Category
from fxshard.memory.ledger import LiveRange

WORLD = 2
TARGETS = {"step": 1.10, "peak": 1.05}
STEP, COMPUTE, COLLECTIVES, NO_WIRES = "step", "compute", "collectives", "without wires"


# -- time ------------------------------------------------------------------------------------------


class Alone(Training):
    """Computing alone: the plain model, and an optimizer over tensors of the shards' sizes."""

    def __init__(self, sharded: Training) -> None:
        super().__init__(sharded.recipe, "plain")
        self.batch = sharded.batch
        self.shards = [
            nn.Parameter(torch.randn_like(dtensors.local_tensor(param)))
            for param in sharded.model.parameters()
        ]
        self.optimizer = torch.optim.AdamW(self.shards, lr=1e-4, foreach=True)

    def _update(self) -> None:
        for shard in self.shards:
            shard.grad = shard.detach()
        super()._update()
        self.model.zero_grad(set_to_none=True)


class Recorded(TorchDispatchMode):
    """Notes each collective: what is called, and shapes and dtypes of its results and inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Tensor, Tensor]] = []  # and what it is given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            gathers = "allgather" in func.__name__
            bare = dist.all_gather_into_tensor if gathers else dist.reduce_scatter_tensor
            made, given = (each if isinstance(each, list) else [each] for each in args[:2])
            assert gathers or "reduce_scatter" in func.__name__, func
            for one, other in zip(made, given, strict=True):
                self.calls.append((bare, torch.zeros_like(one), torch.zeros_like(other)))
        return func(*args, **(kwargs or {}))


class Collectives:
    """The collectives of a step, all in flight at once, in "forward"; other phases are empty."""

    def __init__(self, sharded: Training) -> None:
        sharded.step()  # the first one traces
        with Recorded() as recorded:
            sharded.step()
        self.calls = recorded.calls

    def phases(self) -> list[tuple[str, Callable[[], Any]]]:
        """As `Training.phases`."""
        return [("forward", self.step), *((name, lambda: None) for name in PHASES[1:])]

    def step(self) -> None:
        """Launch all, then wait for all."""
        for work in [call(out, given, async_op=True) for call, out, given in self.calls]:
            work.wait()

    @property
    def bytes(self) -> int:
        """What a rank holds of their full tensors."""
        return sum(max(out.nbytes, given.nbytes) for _, out, given in self.calls)


def measured(name: str, steps: int) -> dict[str, Any]:
    """Seconds of each way, and the peak of forward and backward; runs on every rank."""
    recipe = EVERY[name]
    sharded = Training(recipe, "fxshard")
    collectives = Collectives(sharded)
    mesh = DeviceMesh.from_group(dist.new_group(backend="fake"), "cpu")
    ways: dict[str, Any] = {
        STEP: sharded,
        COMPUTE: Alone(sharded),
        COLLECTIVES: collectives,
        NO_WIRES: Training(recipe, NO_WIRES, shard=functools.partial(_on, mesh)),
    }
    times = alternating(ways, steps)
    return {"times": times, "bytes": collectives.bytes, "peak": peak(sharded)}


def _on(mesh: DeviceMesh, recipe: Any, model: nn.Module, _: Setting) -> nn.Module:
    return fxshard.compile(model, mesh=mesh, units=[recipe.blocks])


# -- bytes -----------------------------------------------------------------------------------------


def peak(training: Training) -> int:
    """Most bytes at once in forward and backward, the median of three steps."""
    held = held_bytes(training)
    found = [peaks(training, held) for _ in range(3)]
    return sorted(max(each["forward"], each["backward"]) for each in found)[1]


def least_bytes(plan: fxshard.Plan) -> int:
    """The least that a step's forward and backward need at once; see the module's docstring."""
    ledger = plan.memory.ledger()
    points = len(ledger.moments)
    change = np.zeros(2 * points + 2, dtype=np.int64)
    made = np.zeros(2 * points + 2, dtype=np.int64)
    for each in ledger.ranges:
        if _is_needed(each):
            change[max(each.born, 0)] += each.bytes
            change[-1 if each.died is None else each.died] -= each.bytes
        elif each.op.startswith("aten.") and each.born >= 0:
            made[each.born] += each.bytes  # a gradient: by the operator that makes it
    needed = np.cumsum(change)
    reads = full_parameters_read(plan.program)
    most = 0
    for phase in ledger.phases:
        if phase.name in ("forward", "loss", "loss backward", "backward"):
            for point in range(phase.start, phase.start + phase.points + 1):
                moment = ledger.moments[point]
                if not moment.op.startswith("fxshard."):
                    read = reads.get(moment.node, 0)
                    most = max(most, int(needed[2 * point] + made[2 * point]) + read)
    return most


def _is_needed(each: LiveRange) -> bool:
    """False for gathered parameters, full gradients and what only collectives need."""
    ours = each.category is Category.TEMP and each.op.startswith("fxshard.")
    return not ours and each.category not in (*SENT, Category.UNSHARDED_GRAD)


def full_parameters_read(program: Program) -> dict[str, int]:
    """Name of each operator that reads full parameters -> their bytes."""
    sizes = {
        storage: node.meta["val"].nbytes
        for node in program.graph.nodes
        if tags.get(node).role == "unshard" and tags.get(node).fqn
        for storage in tags.storage_ids(node)
    }
    found = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            read = {each for one in node.all_input_nodes for each in tags.storage_ids(one)}
            found[node.name] = sum(sizes[storage] for storage in read & sizes.keys())
    return found


# -- results ---------------------------------------------------------------------------------------


def row_of(name: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of each way (the slower rank), the waterfall, bytes, and the two ratios."""
    every = [rank["times"] for rank in ranks]
    steps = {way: slowest(every, way) for way in every[0]}
    medians = {way: 1e3 * spread(each)["median"] for way, each in steps.items()}
    updates = {
        way: 1e3 * spread(slowest(every, way, PHASES[2:]))["median"] for way in (COMPUTE, NO_WIRES)
    }
    own, update = medians[NO_WIRES] - medians[COMPUTE], updates[NO_WIRES] - updates[COMPUTE]
    limit = max((COMPUTE, COLLECTIVES), key=lambda way: medians[way])
    least = least_bytes(planned(EVERY[name], WORLD, Setting()))
    most = max(rank["peak"] for rank in ranks)
    return {
        "model": name,
        "title": EVERY[name].title,
        "milliseconds": {way: spread([1e3 * s for s in each]) for way, each in steps.items()},
        "limit": limit,
        "waterfall": {
            "computing alone": round(medians[COMPUTE], 2),
            "own work in forward and backward": round(own - update, 2),
            "an optimizer of DTensors": round(update, 2),
            "communication that is not hidden": round(medians[STEP] - medians[NO_WIRES], 2),
        },
        "bytes": {"collectives": ranks[0]["bytes"], "peak": most, "least": least},
        "ratios": {
            "step": round(ratio(steps[STEP], steps[limit]), 4),
            "peak": round(most / least, 4),
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where --out says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--models", nargs="+", choices=[*EVERY], default=[*MODELS])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="a small model, in this process")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/limit.json")
    given = parser.parse_args(arguments)
    rows, run = [], on_ranks
    if given.smoke:
        given.models, given.steps, run = ["smoke"], 2, here
    for name in given.models:
        rows.append(row_of(name, run(WORLD, measured, name, given.steps)))
        print(rows[-1], flush=True)
    claims = []
    for what, target in TARGETS.items():
        mean = geometric_mean(row["ratios"][what] for row in rows)
        claims.append(
            {"claim": f"{what}, fxshard / limit", "geometric_mean": round(mean, 4),
             "target": target, "met": mean <= target}
        )  # fmt: skip
        print(claims[-1])
    if given.out or given.models == [*MODELS]:
        result = {"ranks": WORLD, "steps": given.steps, "models": rows, "claims": claims}
        write(given.out or RESULTS / "limit.json", result)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
