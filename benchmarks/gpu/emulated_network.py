"""Step time, exposed communication and memory of fxshard and FSDP2 on one emulated network.

    python -m benchmarks.gpu.emulated_network                       # one GPU, 1 to 8 billion
    python -m benchmarks.gpu.emulated_network --device cpu          # a small model, to try it

All figures are *emulated*: one rank runs, and its collectives take the time that a ring over the
modelled link would take (benchmarks/gpu/emulated.py). Both sides run the same model, batch,
precision, checkpointing, optimizer (AdamW, foreach) and collectives' cost, each in a process of its
own. "Exposed" is the step time on the modelled link less that on a link that takes no time. Links
are `fxshard.hardware`'s, with its sources: NVLink inside a node of 8, the network beyond.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from benchmarks.figures import RESULTS, machine, ratio, spread
from benchmarks.gpu.case import pinned
from benchmarks.gpu.emulated import EmulatedGroup, Link, emulated_world
from benchmarks.gpu.models import ON_CPU, ON_GPU, Batch, Recipe
from benchmarks.ranks import alone
from fxshard.hardware import PRESETS

FREE = Link(0.0, float("inf"))
WARM = 2
SIDES = ("fsdp2", "fxshard")
# model, world, checkpoint of each block
GPU_CASES = (
    ("llama-1b", 8, None),
    ("llama-1b", 64, None),
    ("llama-3b", 64, "full"),
    ("llama-8b", 8, "full"),
    ("llama-8b", 64, "full"),
)
CPU_CASES = (("llama-tiny", 8, None), ("llama-tiny", 64, "full"))


def link_of(world: int, preset: str = "h200") -> Link:
    """Between the ranks of a world: all in one node, or the slower of both."""
    hardware = PRESETS[preset]
    found = hardware.link if world <= hardware.ranks_per_node else hardware.network
    return Link(found.alpha, found.beta)


def recipe_of(name: str, checkpoint: str | None, device: str) -> Recipe:
    """The recipe with the checkpointing that both sides can do."""
    found = (ON_CPU if device == "cpu" else ON_GPU)[name]
    return dataclasses.replace(found, checkpoint=checkpoint)


def built(recipe: Recipe, side: str, world: int, device: torch.device) -> tuple[nn.Module, Batch]:
    """A side's sharded model with values, and its batch; in the emulated world."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = recipe.model()
    batch = recipe.batch(device)
    mesh = init_device_mesh(device.type, (world,))
    if side == "fxshard":
        options = {k: v for k, v in recipe.options().items() if v is not None}
        return fxshard.compile(model, mesh=mesh, units=["layers.*"], **options), batch
    options = {"mp_policy": recipe.precision} if recipe.precision else {}
    layers = model.get_submodule("layers")
    for name, layer in list(layers.named_children()):
        block = checkpoint_wrapper(layer) if recipe.checkpoint else layer
        setattr(layers, name, block)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    model.to_empty(device=device)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None and not list(module.parameters(recurse=False)):
            reset()  # tables in buffers
    for param in model.parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        with torch.no_grad():
            local.fill_(1.0) if param.ndim == 1 else local.normal_(0, 0.02)
    return model, batch


def measure(case: tuple[str, int, str | None], side: str, device: str, steps: int) -> Any:
    """One side of a case: seconds of steps on the modelled link and on a free one, and bytes."""
    name, world, checkpoint = case
    recipe = recipe_of(name, checkpoint, device)
    place = torch.device(device)
    link = link_of(world)
    cuda = place.type == "cuda"
    with emulated_world(world, link) as groups, pinned(recipe):
        model, batch = built(recipe, side, world, place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

        def step() -> float:
            began = time.perf_counter()
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        for _ in range(WARM):
            step()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        forget(groups)
        modelled = [step() for _ in range(steps)]
        sent = [each for group in groups for each in group.sent]
        for group in groups:
            group.link = FREE
        step()
        free = [step() for _ in range(steps)]
        found = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": modelled,
            "seconds_on_a_free_link": free,
            "collectives": len(sent) // steps,
            "collective_bytes": sum(each.bytes for each in sent) // steps,
            "link_seconds": sum(each.modelled for each in sent) / steps,
        }
        if cuda:
            found["max_memory_allocated"] = torch.cuda.max_memory_allocated()
        else:
            found["waited_seconds"] = sum(each.waited for each in sent) / steps
        return found


def forget(groups: list[EmulatedGroup]) -> None:
    """Begin the groups' accounts anew."""
    for group in groups:
        group.sent.clear()


def compared(case: tuple[str, int, str | None], device: str, steps: int) -> dict[str, Any]:
    """Both sides of a case."""
    name, world, checkpoint = case
    sides = {side: alone(measure, case, side, device, steps) for side in SIDES}
    row: dict[str, Any] = {
        "model": name, "world_size": world, "checkpoint": checkpoint, "emulated": True,
        "link": dataclasses.asdict(link_of(world)),
    }  # fmt: skip
    for side, found in sides.items():
        middle, free = (
            spread(found[key])["median"] for key in ("seconds", "seconds_on_a_free_link")
        )
        row[side] = {
            **{k: v for k, v in found.items() if not k.startswith("seconds")},
            "step_seconds": spread(found["seconds"]),
            "exposed_seconds": round(middle - free, 6),
        }
    row["ratios"] = {
        "step": round(ratio(sides["fxshard"]["seconds"], sides["fsdp2"]["seconds"]), 4)
    }
    if "max_memory_allocated" in row["fsdp2"]:
        bytes_of = {side: row[side]["max_memory_allocated"] for side in SIDES}
        row["ratios"]["max_memory_allocated"] = round(bytes_of["fxshard"] / bytes_of["fsdp2"], 4)
    return row


def shown(row: dict[str, Any]) -> str:
    """A case as text."""
    lines = [
        f"emulated: {row['model']}, {row['world_size']} ranks, checkpoint {row['checkpoint']}; "
        + ", ".join(f"{what} {value:.3f}" for what, value in row["ratios"].items())
    ]
    for side in SIDES:
        each = row[side]
        text = (
            f"  {side:<8} step {1e3 * each['step_seconds']['median']:.2f} ms, exposed "
            f"{1e3 * each['exposed_seconds']:.2f} ms of {1e3 * each['link_seconds']:.2f} ms on the "
            f"link in {each['collectives']} collectives"
        )
        if "max_memory_allocated" in each:
            text += f", {each['max_memory_allocated'] / 2**30:.2f} GiB allocated"
        lines.append(text)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--worlds", nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0, help="no case is begun later")
    parser.add_argument("--out", type=Path, help="folder for the results")
    given = parser.parse_args(arguments)
    began, rows = time.monotonic(), []
    cpu = given.device == "cpu"
    out = given.out or (Path(tempfile.mkdtemp(prefix="fxshard-emulated-")) if cpu else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    gpu = None if cpu else torch.cuda.get_device_name(0)
    path = out / f"emulated_network_{given.device}.json"
    for case in CPU_CASES if cpu else GPU_CASES:
        if given.models and case[0] not in given.models:
            continue
        if given.worlds and case[1] not in given.worlds:
            continue
        if time.monotonic() - began > 60 * given.minutes:
            print(f"not begun for want of time: {case}")
            continue
        rows.append(compared(case, given.device, given.steps))
        print(shown(rows[-1]), flush=True)
        result = {**machine(), "gpu": gpu, "label": "emulated network, one rank", "cases": rows}
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
