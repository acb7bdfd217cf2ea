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
from tests import fsdp2
from tests.dryrun.measure import Measure, Points, without_collector
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
    if hasattr(model, "config"):
        model.config.use_cache = False  # recomputation would find keys in it
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
    return measure.points[before[0] :]


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
            found.append((ledger.moments[point].op, int(ledger.totals[2 * following - 1])))
    return found


def _is_operator(name: str) -> bool:
    return "." in name and not name.startswith("fxshard.")
