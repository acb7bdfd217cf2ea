"""What-ifs: changes of a step that may lower its peak, each tried by planning the step with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fxshard.config.checked import Config
from fxshard.config.checkpoints import CHECKPOINTS
from fxshard.config.precision import Precision
from fxshard.errors import FxshardError
from fxshard.memory.explain import WhatIf
from fxshard.planner.batches import batch_size, resized
from fxshard.plans.plan import Plan

BF16 = torch.bfloat16


def what_ifs(plan: Plan) -> list[WhatIf]:
    """Every what-if of a plan, best first; those that cannot be planned come last."""
    before = plan.memory.peak_bytes
    found = []
    for name, changes in candidates(plan):
        try:
            peak = plan.replan(**changes).memory.peak_bytes
            found.append(WhatIf(name, changes, peak, before - peak))
        except FxshardError as error:
            found.append(WhatIf(name, changes, None, None, " ".join(str(error).split())))
    found.reverse()
    return sorted(found, key=lambda each: (each.saves_bytes is None, -(each.saves_bytes or 0)))


def candidates(plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    """Name and `Plan.replan` arguments of each what-if that `plan` does not have already."""
    config = plan.config
    found: list[tuple[str, dict[str, Any]]] = []
    if config.strategy == "no_shard":
        found.append(("shard parameters (full_shard)", {"strategy": "full_shard"}))
    elif any(unit.reshard is not True for unit in plan.units):
        changes: dict[str, Any] = {"reshard_after_forward": True}
        if not isinstance(config.strategy, Mapping):
            strategy = str(config.strategy).replace("shard_grad_op", "full_shard")
            changes = {"strategy": strategy.removesuffix("_zero2"), **changes}
        found.append(("reshard after forward", changes))
    if len(plan.units) > 1:
        for name, policy in CHECKPOINTS.items():
            if name == config.checkpoint:  # the others save more
                break
            found.append((policy.what_if, {"checkpoint": name}))
    if config.offload is None:
        changes = {"offload": CPUOffloadPolicy()}
        found.append(("offload shards, gradients and optimizer states", changes))
    if config.forward_prefetch or config.backward_prefetch:
        found.append(("no prefetch", {"forward_prefetch": 0, "backward_prefetch": 0}))
    if config.optimizer is not None and not config.optimizer_in_backward:
        found.append(("optimizer in backward", {"optimizer_in_backward": True}))
    found += _precisions(config)
    return found + _batches(plan)


def _precisions(config: Config) -> list[tuple[str, dict[str, Any]]]:
    if not config.precisions:
        bf16 = Precision(param_dtype=BF16, reduce_dtype=torch.float32)
        return [
            ("bf16 parameters and compute, fp32 reduction", {"mixed_precision": bf16}),
            (
                "bf16 parameters, compute and reduction",
                {"mixed_precision": dataclasses.replace(bf16, reduce_dtype=BF16)},
            ),
        ]
    policies = {key: Precision.of(policy) for key, policy in config.precisions.items()}
    low = [p.reduce_dtype or (None if p.reduce_as_stored else BF16) for p in policies.values()]
    if all(dtype is BF16 for dtype in low):
        return []
    reduced = {key: dataclasses.replace(p, reduce_dtype=BF16) for key, p in policies.items()}
    by_unit = isinstance(config.mixed_precision, Mapping)
    return [("bf16 reduction", {"mixed_precision": reduced if by_unit else reduced[""]})]


def _batches(plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    call = plan.workload.call
    size = batch_size(call)
    if size is None or size < 2:
        return []
    args, kwargs = resized(call, 0, size, size // 2)
    half: dict[str, Any] = {"args": args, "kwargs": kwargs}
    found = [(f"batch of {size // 2} instead of {size}", half)]
    if size % 2 == 0 and not plan.config.optimizer_in_backward:
        twice = 2 * plan.workload.micro_batches
        changes = {**half, "micro_batches": twice}
        found.append((f"accumulation: {twice} micro-batches of {size // 2}", changes))
    return found
