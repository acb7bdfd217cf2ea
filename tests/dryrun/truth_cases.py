"""One training script, run for real on gloo ranks and dry: what each holds after each operator."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fxshard import dry_run
from fxshard.memory.ledger import BEFORE
from tests import fsdp2
from tests.dryrun.measure import Measure, Points, without_collector
from tests.dryrun.profiled import NEVER, Life, Storage, lives, profiled
from tests.zoo import Case

STEPS = 2


def train(
    case: Case,
    checkpoint: str,
    half: bool,
    micro_batches: int,
    ended: Callable[[], None] = lambda: None,
) -> None:
    """Two steps of AdamW with FSDP2; all but the last micro-batch reduce nothing."""
    torch.manual_seed(0)
    model = case.build()
    units = fsdp2.units_of(model, case) or _layers(model)
    policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if half else ()))
    for module in model.modules():  # a decoder may have a configuration of its own
        if hasattr(module, "config"):
            module.config.use_cache = False  # recomputation would find keys in it
    if checkpoint:
        wrapper = functools.partial(checkpoint_wrapper, preserve_rng_state=False)
        if checkpoint == "selective":
            wrapper = functools.partial(wrapper, context_fn=_selective)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: any(m is u for u in units)
        )
        units = [m for m in model.modules() if hasattr(m, "_checkpoint_wrapped_module")]
    for unit in units:
        if any(True for _ in unit.parameters()):
            fully_shard(unit, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ended()
    for step in range(STEPS):
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            args, kwargs = case.batch(0, step)
            case.loss(model(*args, **kwargs)).backward()
            del args, kwargs
        optimizer.step()
        optimizer.zero_grad()
        ended()


def _layers(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {id(m) for each in lists for layer in each for m in layer.modules() if m is not layer}
    return [layer for each in lists for layer in each if id(layer) not in inside]


def _selective() -> Any:
    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if func in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def measured(rank: int, world_size: int, *args: Any) -> Points:
    """The script for real, in every rank."""
    before: list[int] = []

    def ended() -> None:
        measure.close()
        before.append(len(measure.points))

    with without_collector(), Measure() as measure:
        train(*args, ended)
    return [(under_mode(name), total) for name, total in measure.points[before[0] :]]


def predicted(world_size: int, *args: Any) -> Points:
    """The script dry, in one process without a process group."""
    with dry_run(world_size=world_size, device="cpu") as run:
        train(*args, ended=run.step)
    found: Points = []
    report = run.memory
    for ledger in (report.first, report.steady):
        ran = [i for i, moment in enumerate(ledger.moments) if _is_operator(moment.op)]
        after = [*ran[1:], len(ledger.moments)]
        for point, following in zip(ran, after, strict=True):
            total = int(ledger.totals[2 * following - 1])
            found.append((under_mode(ledger.moments[point].op), total))
    return found


def under_mode(name: str) -> str:
    """The name under a dispatch mode, as `Measure`: autograd does less in place there."""
    return IN_PLACE.get(name, name)


IN_PLACE = {
    "aten.add_.Tensor": "aten.add.Tensor",
    "aten.index_put_.default": "aten.index_put.default",
    "aten.scatter_.src": "aten.scatter.src",
    "aten.scatter_add_.default": "aten.scatter_add.default",
}


def _is_operator(name: str) -> bool:
    return "." in name and not name.startswith("fxshard.")


def measured_lives(rank: int, world_size: int, *args: Any) -> list[Life]:
    """The storages of the script for real, in every rank."""
    return profiled(functools.partial(train, *args))


def predicted_lives(world_size: int, *args: Any) -> list[Life]:
    """The same dry."""
    with dry_run(world_size=world_size, device="cpu") as run:
        train(*args, ended=run.step)
    found: dict[int, Storage] = {}
    for step, ledger in enumerate((run.memory.first, run.memory.steady)):
        for each in ledger.ranges:
            born, died = (step, each.born), NEVER if each.died is None else (step, each.died)
            if each.bytes == 8 and each.op == "aten.lift_fresh.default":
                continue  # a number; `profiled` says why
            if each.born != BEFORE:
                found[each.storage] = Storage(born, each.bytes, born, died)
            elif each.storage in found:
                found[each.storage] = found[each.storage]._replace(died=died)
    return lives(found.values())
