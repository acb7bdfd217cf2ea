"""Accelerate on the ranks of a pool, which shards by fxshard or by torch's FSDP2."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

import fxshard.integrations.accelerate as ours


@contextmanager
def accelerating(rank: int, world_size: int, by: str) -> Iterator[None]:
    """What torchrun sets on this rank; FSDP2 is fxshard, or torch's.

    Accelerate takes CPU ranks for DDP. For torch's FSDP2 it is told that they are GPUs whose device
    is the CPU: then all that runs is its code for GPUs.

    Args:
        by: "fxshard" or "torch".
    """
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    set_here = {name: str(value) for name, value in names.items()}
    set_here |= {"LOCAL_WORLD_SIZE": str(world_size), "ACCELERATE_TORCH_DEVICE": "cpu"}
    gpus = ("gloo", DistributedType.MULTI_GPU)

    def prepare_backend(*_: Any, **__: Any) -> Any:
        return gpus

    with mock.patch.dict(os.environ, set_here):
        try:
            if by == "fxshard":
                ours.enable()
                yield
            else:
                with mock.patch.object(PartialState, "_prepare_backend", prepare_backend):
                    yield
        finally:
            ours.disable()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
