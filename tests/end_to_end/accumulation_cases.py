"""What several of the tests beside it need (test_accumulation)."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW

import fxshard
from tests.end_to_end.training_cases import batch, grads_of, loss_of, state_of

Seen = Iterator[tuple[str, Any]]


Options = dict[str, Any]


@contextlib.contextmanager
def reduces(model: Any, flag: bool) -> Iterator[None]:
    """Calls inside reduce gradients, or accumulate them: each library in its own words."""
    if isinstance(model, fxshard.FxshardModule):
        with contextlib.nullcontext() if flag else model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(flag)
        yield
        model.set_requires_gradient_sync(True)
    else:  # plain eager
        yield


def micro_batches(model: Any, rank: int, flags: list[bool], step: int = 0) -> Seen:
    """One backward per flag: whether it reduces."""
    for i, flag in enumerate(flags):
        with reduces(model, flag):
            loss = loss_of(model(batch(rank, 10 * step + i))) / len(flags)
            loss.backward()
        yield f"loss {step} {i}", loss.detach()
        yield f"grads {step} {i}", grads_of(model)


def train(model: Any, rank: int, flags: list[bool]) -> Seen:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        yield from micro_batches(model, rank, flags, step)
        optimizer.step()
        optimizer.zero_grad()
    yield "parameters", state_of(model)


@functools.cache
def grid(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


OPEN = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # reduced in bf16; since torch 2.15 in fp32


def seeded(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return build()


PATTERNS = {
    "all but the last": [False, False, True],
    "one": [False, True],
    "mixed": [True, False, True, True, False, False, True],
    "last one too": [True, False, False],  # reduced in the next step
}
