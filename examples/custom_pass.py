"""A pass of your own: activations of GELU are not saved, backward recomputes them.

    python examples/custom_pass.py                            # two ranks in one process
    torchrun --nproc-per-node 2 examples/custom_pass.py       # two ranks over gloo

The gradient of ``down(gelu(up(x)))`` reads ``up(x)``, for GELU, and ``gelu(up(x))``, for `down`.
The second follows from the first at the cost of one elementwise kernel, so it need not be saved.
(Inputs are matrices here. With more dimensions a view stands between GELU and what reads it; the
built-in way is ``checkpoint="selective"``, or a policy.)
The script shows the graph before and after the pass, the bytes of both plans, and that no bit of
the loss and of the gradients differs. docs/ir.md has the grammar of the graph.
"""

import copy
import dataclasses
import difflib
import os
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.ir import tags
from fxshard.ir.program import Fact, Program

RANKS = int(os.environ.get("WORLD_SIZE", "2"))  # torchrun sets it
RANK = int(os.environ.get("RANK", "0"))
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class RecomputeGelu:
    """What backward reads of GELU's results is recomputed from what GELU read."""

    name: ClassVar[str] = "recompute-gelu"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})  # as the capture leaves it
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        backward = program.phase("backward")
        for node in program.phase("forward"):
            if node.target is not aten.gelu.default:
                continue
            readers = [user for user in backward if user in node.users]
            if not readers:
                continue
            with program.graph.inserting_before(readers[0]):
                copy = program.graph.create_node(
                    "call_function",
                    node.target,
                    node.args,
                    node.kwargs,
                    name=f"{node.name}_recomputed",
                )
            tag = dataclasses.replace(tags.get(node), phase="backward", recomputed=True)
            tags.put(copy, tag, program.refake(copy))
            for reader in readers:
                reader.replace_input_with(node, copy)


def after_canonicalize(passes: list[Any]) -> list[Any]:
    """The default pipeline with `RecomputeGelu` in it."""
    at = [each.name for each in passes].index("canonicalize") + 1
    return [*passes[:at], RecomputeGelu(), *passes[at:]]


def main() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(256, 64)
    changes: list[str] = []

    def observe(name: str, before: str, after: str) -> None:
        if name == RecomputeGelu.name:
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
            changes.extend(line for line in lines if line[:3] not in ("---", "+++"))

    usual = fxshard.plan(model, (x,), world_size=RANKS)
    ours = fxshard.plan(model, (x,), world_size=RANKS, passes=after_canonicalize, observe=observe)
    say("What the pass changed in the graph:", *changes)
    for what, plan in (("without", usual), ("with", ours)):
        saved = plan.memory.snapshot("", "After Post-Forward")
        say(f"{what:7} the pass: {sum(saved.values()):,} B live between forward and backward")

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    results = [gradients(model, x), gradients(model, x, passes=after_canonicalize)]
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    tell(f"loss and {len(results[0]) - 1} gradients are the same bits: {same}")
    if dist.is_initialized():
        dist.destroy_process_group()
    else:  # it needs process groups of its own
        found = fxshard.validate(
            model, (x,), world_size=RANKS, passes=after_canonicalize, numerics=True
        )
        say(found.summary(), found.numerics.summary())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """f32 [batch, 64] -> the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def gradients(model: nn.Module, x: Tensor, **options: object) -> list[Tensor]:
    """The loss, and this rank's rows of every gradient; `model` stays as it is."""
    sharded = fxshard.compile(copy.deepcopy(model), world_size=RANKS, **options)
    loss = sharded(x)
    loss.backward()
    grads = [param.grad for param in sharded.parameters()]
    return [loss.detach()] + [g.to_local() if isinstance(g, DTensor) else g for g in grads]


def tell(text: str) -> None:
    """Print on every rank; a line in one write, as all ranks share the terminal."""
    print(f"rank {RANK}: {text}\n", end="", flush=True)


def say(*lines: str) -> None:
    if RANK == 0:
        print("\n".join(lines) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
