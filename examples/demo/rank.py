"""One rank of the demo: trains through fxshard, for some steps beside FSDP2, and saves.

    torchrun --nproc-per-node 2 -m examples.demo.rank runs/demo/settings.json

Rank 0 prints one JSON line per step, and leaves ``ranks.json``.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from examples.demo.corpus import Corpus, mean_bits_per_byte, read_corpus
from examples.demo.recipe import Settings, checkpoint_state, train_step
from fxshard._torch.modes import TorchDispatchMode
from fxshard.verify.certificate import certificate

TIMEOUT = datetime.timedelta(seconds=120)  # of a collective: a lost rank fails the others, no hang


@record  # tells torchrun which rank failed first, and why
def main() -> None:
    settings = Settings.load(Path(sys.argv[1]))
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found = train(settings, read_corpus())
    if dist.get_rank() == 0:
        Path(settings.out, "ranks.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    dist.destroy_process_group()


def train(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """Train, compare, save; what is returned is the same on all ranks."""
    rank = dist.get_rank()
    model = fxshard.compile(settings.build_model())
    optimizer = settings.optimizer(model.parameters())
    reference = Reference(settings, model)
    validation = corpus.validation_batches(settings)[rank :: settings.ranks]
    first = _mean(mean_bits_per_byte(model, validation))
    losses, counter, difference = [], Counter(), 0.0
    for step in range(settings.steps):
        batch = corpus.training_batch(settings, rank, step)
        with counter if step == settings.steps - 1 else contextlib.nullcontext():
            loss = train_step(model, optimizer, [batch])
        if step < settings.compared:
            difference = max(difference, reference.step_difference(model, loss, batch))
        losses.append(_mean(loss.item()))
        if rank == 0:
            print(json.dumps({"step": step, "loss": losses[-1]}), flush=True)
    last = _mean(mean_bits_per_byte(model, validation))
    save(checkpoint_state(model, optimizer), checkpoint_id=Path(settings.out, "checkpoint"))
    return {
        "losses": losses,
        "fsdp2_losses": reference.losses,
        "fsdp2_max_abs_difference": _reduced(difference, dist.ReduceOp.MAX),
        "val_bits_per_byte_first": first,
        "val_bits_per_byte_last": last,
        "collectives_per_step": dict(counter.seen),
        "certificate": certificate(model.plan.program),
    }


class Reference:
    """The same model, units, seeds and batches under torch's FSDP2."""

    def __init__(self, settings: Settings, like: fxshard.FxshardModule) -> None:
        self.model = settings.build_model()
        for unit in like._fxshard.units[1:]:
            fully_shard(self.model.get_submodule(unit.fqn))
        fully_shard(self.model)
        self.optimizer = settings.optimizer(self.model.parameters())
        self.losses: list[float] = []

    def step_difference(self, model: nn.Module, loss: Tensor, batch: dict[str, Any]) -> float:
        """Train one step; largest difference to what `model` did: loss, gradients, parameters."""
        theirs = train_step(self.model, self.optimizer, [batch])
        self.losses.append(_mean(theirs.item()))
        pairs: list[tuple[Any, Any]] = [(loss, theirs)]
        mine = dict(model.named_parameters())
        for name, param in self.model.named_parameters():
            pairs += [(mine[name], param), (mine[name].grad, param.grad)]
        return max(_difference(_local(a), _local(b)) for a, b in pairs)


class Counter(TorchDispatchMode):
    """Counts the calls that this process makes to its process group, by name, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again, as operators on local tensors
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self.seen[name.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; 0 only if all bits are equal."""
    if torch.equal(_bits(a), _bits(b)):
        return 0.0
    return float((a - b).abs().nan_to_num(math.inf).max()) or math.inf  # 0.0 is not -0.0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _mean(value: float) -> float:
    return _reduced(value, dist.ReduceOp.SUM) / dist.get_world_size()


def _reduced(value: float, operation: Any) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return tensor.item()


if __name__ == "__main__":
    main()
