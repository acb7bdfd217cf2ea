"""Time and peak of a step beside tensor parallelism: fxshard, and torch's own FSDP2.

    python -m benchmarks.mesh_step_time
    python -m benchmarks.mesh_step_time --models titan --steps 8

Four gloo ranks of one thread each, a mesh of 2 x 2: parameters are sharded over "dp", and
``parallelize_module`` cuts the same models in the same way over "tp" on both sides. As in
benchmarks/step_time.py both live in the same processes and take turns, and a step's time is that of
the slowest rank. The peak is what `torch.profiler` sees allocated in one more step of each side,
beside what is there between steps (parameters, optimizer states, batch); the highest of the ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import fxshard
from benchmarks import mesh_models
from benchmarks.figures import RESULTS, geometric_mean, ratio, spread, write
from benchmarks.models import Batch, Model, llama, vision
from benchmarks.peak_bytes import held_bytes
from benchmarks.points import peak
from benchmarks.published_steps.llama import Shape
from benchmarks.ranks import on_ranks
from benchmarks.sides import Setting, Training
from benchmarks.step_time import alternating, slowest

RANKS = 4
TARGETS = {"step": 0.85, "peak": 0.90}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is cut over "tp".

    Attributes:
        cut: changes the model.
        around: what the loop computes the loss and its gradients in.
    """

    recipe: Model
    cut: Callable[[nn.Module, DeviceMesh], None]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def titan(dim: int, depth: int, vocab: int, batch: int, seq: int) -> Case:
    """Llama with torchtitan's plan: sequences between layers and the classes of logits are cut."""

    def build() -> nn.Module:
        shape = Shape(vocab, dim, depth, dim // 32, dim // 64, 3 * dim)
        return mesh_models.Trained(shape, seq)

    def make() -> Batch:
        tokens = torch.randint(0, vocab, (batch, seq + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    title = f"Llama, torchtitan's plan, {dim} wide, {depth} layers, {batch} x {seq} tokens"
    recipe = Model("titan", title, build, make, lambda loss, _: loss, "llama.layers.*", True)
    return Case(recipe, mesh_models.tensor_parallel, loss_parallel)


def by_layers(recipe: Model, columns: list[str], rows: list[str], outer: dict[str, Any]) -> Case:
    """Layers of a block that are cut by columns or rows; activations between blocks are full."""
    styles = {
        **{f"{recipe.blocks}.{name}": ColwiseParallel() for name in columns},
        **{f"{recipe.blocks}.{name}": RowwiseParallel() for name in rows},
    }

    def cut(model: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh["tp"], outer | styles)

    return Case(recipe, cut)


CASES = {
    case.recipe.name: case
    for case in (
        titan(256, 6, 2048, 4, 192),
        by_layers(
            llama("llama", dim=256, depth=6, vocab=1024, batch=4, seq=192),
            [*(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj"],
            ["self_attn.o_proj", "mlp.down_proj"],
            {
                "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
                "lm_head": ColwiseParallel(output_layouts=Replicate()),
            },
        ),
        by_layers(
            vision("vision", dim=256, depth=6, batch=8, side=64),
            [*(f"attention.{n}_proj" for n in "qkv"), "mlp.fc1"],
            ["attention.o_proj", "mlp.fc2"],
            {},
        ),
    )
}


class On(Training):
    """A training on a mesh: a side's model is cut, then sharded."""

    def __init__(self, case: Case, side: str, mesh: DeviceMesh) -> None:
        def shard(recipe: Model, model: nn.Module, _: Setting) -> nn.Module:
            case.cut(model, mesh)
            if side == "fxshard":
                return fxshard.compile(model, mesh=mesh, units=[recipe.blocks])
            for block in recipe.block_modules(model):
                fully_shard(block, mesh=mesh["dp"])
            return fully_shard(model, mesh=mesh["dp"])

        super().__init__(case.recipe, side, shard=shard)
        self.case = case

    def phases(self) -> list[tuple[str, Callable[[], Any]]]:
        return [(name, self._inside(run)) for name, run in super().phases()]

    def _inside(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def inside() -> None:
            with self.case.around():
                run()

        return inside


def measured(name: str, steps: int) -> dict[str, Any]:
    """Seconds and the peak of each side, of this rank, and its losses; runs on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    trainings = {side: On(CASES[name], side, mesh) for side in ("fxshard", "fsdp2")}
    for training in trainings.values():
        # Ranks of one "tp" group have the same batch, those of another have another.
        torch.manual_seed(mesh["dp"].get_local_rank())
        training.batch = training.recipe.batch()
    losses = {side: loss_of(training) for side, training in trainings.items()}
    times = alternating(trainings, steps)
    peaks = {side: peak(training, held_bytes(training)) for side, training in trainings.items()}
    return {"losses": losses, "times": times, "peaks": peaks}


def loss_of(training: On) -> float:
    args, kwargs = training.recipe.call(training.batch)
    with torch.no_grad(), training.case.around():
        found: Tensor = training.recipe.loss(training.model(*args, **kwargs), training.batch[1])
    return found.full_tensor().item() if hasattr(found, "full_tensor") else found.item()


def row_of(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds and bytes of each side (the slowest rank, the highest peak), and the ratios."""
    steps = {side: slowest([rank["times"] for rank in ranks], side) for side in ranks[0]["times"]}
    peaks = {side: max(rank["peaks"][side] for rank in ranks) for side in steps}
    return {
        "model": name,
        "title": CASES[name].recipe.title,
        "losses": ranks[0]["losses"],
        "milliseconds": {side: spread([1e3 * s for s in each]) for side, each in steps.items()},
        "peaks": peaks,
        "ratios": {
            "step": round(ratio(steps["fxshard"], steps["fsdp2"]), 4),
            "peak": round(peaks["fxshard"] / peaks["fsdp2"], 4),
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where --out says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--models", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/mesh_step_time.json")
    given = parser.parse_args(arguments)
    rows = []
    for name in given.models:
        rows.append(row_of(name, on_ranks(RANKS, measured, name, given.steps)))
        print(rows[-1], flush=True)
    claims = []
    for what, target in TARGETS.items():
        mean = geometric_mean(row["ratios"][what] for row in rows)
        claim = f"{what}, fxshard / FSDP2, beside tensor parallelism"
        claims.append(
            {"claim": claim, "geometric_mean": round(mean, 4), "target": target,
             "met": mean <= target}
        )  # fmt: skip
        print(claims[-1])
    if given.out or given.models == [*CASES]:
        result = {"ranks": RANKS, "mesh": "dp 2 x tp 2", "steps": given.steps}
        write(
            given.out or RESULTS / "mesh_step_time.json",
            {**result, "models": rows, "claims": claims},
        )
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
