"""Peaks as torch.profiler measures them, and two estimators' formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import fxshard
from benchmarks.vs_fsdp2.models import WORLD, Case, training
from benchmarks.vs_fsdp2.tracked import fully_sharded
from fxshard._torch import process_groups


def measured_peak(model: nn.Module, optimizer: Any, step: Callable[[], None]) -> int:
    """Bytes at the peak of a step, kernels and all: torch.profiler's allocations and frees on CPU,
    on top of what model, optimizer and batch hold between steps.
    """
    step()
    held: dict[int, int] = {}
    state = [value for each in optimizer.state.values() for value in each.values()]
    batch = step.tokens  # type: ignore[attr-defined]
    for tensor in (*model.parameters(), *model.buffers(), *state, batch):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()  # so that the profiler knows what the next one frees
        with record_function("fxshard.peak"):
            step()
    events = sorted(prof.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (span,) = [event for event in events if event.name() == "fxshard.peak"]
    live = top = 0
    for event in events:
        if event.name() == "[memory]" and span.start_ns() <= event.start_ns() <= span.end_ns():
            live += event.nbytes()
            top = max(top, live)
    return sum(held.values()) + top


def peaks(case: Case) -> dict[str, int]:
    """Measured: of FSDP2, of fxshard, of one device without either (with autocast for bf16)."""
    found = {}
    with process_groups.fake_process_group(0, WORLD):
        found["fsdp2"] = measured_peak(*fully_sharded(case))
    with process_groups.fake_process_group(0, WORLD):
        model, tokens = case.model()
        sharded = fxshard.compile(model, args=(tokens,), **case.options())
        found["fxshard"] = measured_peak(sharded, *training(sharded, tokens))
    model, tokens = case.model()
    dtype = case.policy.param_dtype if case.policy else None
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        found["one device"] = measured_peak(model, *training(model, tokens))
    return found


def zero3_bytes(parameters: int, largest: int, gpus: int) -> int:
    """DeepSpeed's estimate for a GPU under ZeRO-3 without offload, in bytes.

    (deepspeed/runtime/zero/stage3.py, ``estimate_zero3_model_states_mem_needs``: 18 bytes per
    parameter over all GPUs, and the layer with most parameters of its own in 4 bytes each.)
    """
    return 4 * largest + int(18 * parameters / gpus)


def adam_bytes(size: int, mixed: bool) -> int:
    """Accelerate's estimate of training with Adam on one device, in bytes.

    (accelerate/commands/estimate.py, ``estimate_training_usage``; ``estimate-memory`` prints the
    largest of its stages. fp32: weights, gradients and two states, 4x. Mixed: the states, 2x.)

    Args:
        size: of all parameters and buffers in fp32 (``calculate_maximum_sizes``).
        mixed: for bf16 or fp16.
    """
    return 2 * size if mixed else 4 * size


def estimates(case: Case) -> dict[str, int]:
    """What both estimators say of the case's model."""
    model, _ = case.model()
    parameters = sum(p.numel() for p in model.parameters())
    own = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
    tensors = (*model.parameters(), *model.buffers())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {
        "DeepSpeed": zero3_bytes(parameters, max(own), WORLD),
        "accelerate": adam_bytes(size, mixed=case.policy is not None),
    }
