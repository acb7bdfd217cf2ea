"""Points of `benchmarks.front`: ways of FSDP2, plans of fxshard, and what is measured of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import fxshard
from benchmarks.models import FRONT, SMOKE, Model
from benchmarks.peak_bytes import held_bytes, peaks
from benchmarks.sides import Setting, Training, checkpointed
from benchmarks.step_time import PHASES, alternating
from fxshard._torch import dtensors
from fxshard.memory.category import Category

WORLD = 2
EVERY = {**FRONT, SMOKE.name: SMOKE}
aten: Any = torch.ops.aten
SAVED = [  # what `"selective"` of fxshard and torchtitan's per-operator policy save
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


@dataclasses.dataclass(frozen=True)
class Point:
    """One way to run a step.

    Attributes:
        name: in tables.
        ours: by fxshard, else by FSDP2.
        compiled: blocks of FSDP2 by torch.compile, regions of fxshard by Inductor.
        checkpoint: of FSDP2's blocks: None, "selective" or "full".
        budget: torch's `activation_memory_budget`.
        options: of `fxshard.compile`.
    """

    name: str
    ours: bool = False
    compiled: bool = False
    checkpoint: str | None = None
    budget: float = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def shard(self, recipe: Model, model: nn.Module, setting: Setting) -> nn.Module:
        """The model sharded so; in fp32, whatever the setting."""
        if self.ours:
            options: Any = {"backend": "inductor" if self.compiled else "eager", **self.options}
            return fxshard.compile(model, units=[recipe.blocks], **options)
        for block in recipe.block_modules(model):
            more = {"context_fn": SELECTIVE} if self.checkpoint == "selective" else {}
            each = checkpointed(model, block, **more) if self.checkpoint else block
            if self.compiled:
                each.compile(fullgraph=True)
            fully_shard(each)
        fully_shard(model)
        return model


REFERENCE = Point("FSDP2")
THEIRS = (
    REFERENCE,
    Point("FSDP2, selective", checkpoint="selective"),
    Point("FSDP2, checkpointed", checkpoint="full"),
)
THEIRS_COMPILED = (
    *(dataclasses.replace(each, name=f"{each.name}, compiled", compiled=True) for each in THEIRS),
    *(
        Point(f"FSDP2, compiled, budget {budget}", compiled=True, budget=budget)
        for budget in (0.25, 0.5, 0.75)
    ),
)
SHARES = (0.25, 0.5, 0.75)  # of what the default plan saves and a checkpointed one does not
ONE_UNIT = {"forward_prefetch": 0, "backward_prefetch": 0}  # is unsharded at a time
LEAN = {**ONE_UNIT, "max_bucket_bytes": "1MiB"}
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, SAVED)


def plans(recipe: Model, compiled: bool) -> list[Point]:
    """The plans of fxshard that are tried, the budgets by what the default one saves."""
    batch = recipe.batch()
    plan = fxshard.plan(
        recipe.build(), *recipe.call(batch), world_size=WORLD, units=[recipe.blocks]
    )
    least, most = saved(plan.replan(checkpoint="full")), saved(plan)
    options: dict[str, dict[str, Any]] = {
        "all saved": {"checkpoint": None},
        "selective": {"checkpoint": "selective"},
        "checkpointed": {"checkpoint": "full"},
        **{
            f"{share:.0%} saved": {"checkpoint": least + int(share * (most - least))}
            for share in SHARES
        },
        "checkpointed, no prefetch": {"checkpoint": "full", **ONE_UNIT},
        "all saved, lean": {"checkpoint": None, **LEAN},
        "checkpointed, lean": {"checkpoint": "full", **LEAN},
    }
    if recipe.labels:  # the loss is in the model
        options |= {
            f"{name}, loss in chunks": {**given, "chunk_loss": True}
            for name, given in list(options.items())
            if name in ("all saved", "50% saved") or name.startswith("checkpointed")
        }
    words = "fxshard, inductor" if compiled else "fxshard"
    return [
        Point(f"{words}, {name}", ours=True, compiled=compiled, options=given)
        for name, given in options.items()
    ]


def saved(plan: fxshard.Plan) -> int:
    """Bytes of activations where backward begins."""
    backward = next(phase for phase in plan.memory.phases() if phase.phase == "backward")
    return int(backward.start[Category.ACTIVATION.column])


def measured(name: str, points: Sequence[Point], steps: int) -> dict[str, dict[str, Any]]:
    """Seconds of each step, and bytes, of each point; runs on every rank."""
    recipe = EVERY[name]
    torch._functorch.config.activation_memory_budget = points[-1].budget  # of the compiled one
    trainings = {point.name: Training(recipe, point.name, shard=point.shard) for point in points}
    times = alternating(trainings, steps)
    return {
        each: {
            "seconds": [sum(step[phase] for phase in PHASES) for step in times[each]],
            "bytes": bytes_above(training),
        }
        for each, training in trainings.items()
    }


def bytes_above(training: Training) -> int:
    """Peak of a steady step above sharded parameters, gradients and optimizer states.

    The median of three steps: when a collective lets go of what it has sent is a matter of threads.
    """
    held = held_bytes(training)
    params: Iterable[Any] = (p for p in training.model.parameters() if p.requires_grad)
    grads = sum(int(dtensors.local_tensor(p).nbytes) for p in params)
    training.step()
    return sorted(peak(training, held) for _ in range(3))[1] - held - grads


def peak(training: Training, held: int) -> int:
    """Most bytes at once in a step."""
    return max(peaks(training, held).values())
