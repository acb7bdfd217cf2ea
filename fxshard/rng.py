"""``fxshard::get_rng_state`` and ``set_rng_state``: what recomputed random operators begin with.

They have kernels and run on the compute stream, in regions, as ``aten`` operators do.

=============  ====================================================================================
get_rng_state  the state of the random number generator of a device, uint8, in the CPU's memory.
set_rng_state  the generator goes on from that state.
=============  ====================================================================================

`only_torch_s` refuses the random numbers that no program can draw: those of Python and numpy.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fxshard import hf
from fxshard.errors import CaptureError

CPU_STATE_BYTES = 5056  # of the Mersenne Twister (aten/src/ATen/CPUGeneratorImpl.cpp)
ACCELERATOR_STATE_BYTES = 16  # seed and offset (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp)

_LIBRARY = torch.library.Library("fxshard", "FRAGMENT")
# They count as random operators: executor and worlds keep a generator wherever one of these is.
_RANDOM = (torch.Tag.nondeterministic_seeded,)
_LIBRARY.define("get_rng_state(Device device) -> Tensor", tags=_RANDOM)
_LIBRARY.define("set_rng_state(Tensor state, Device device) -> ()", tags=_RANDOM)


@torch.library.impl("fxshard::get_rng_state", "CompositeExplicitAutograd", lib=_LIBRARY)
def _(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


@torch.library.impl("fxshard::set_rng_state", "CompositeExplicitAutograd", lib=_LIBRARY)
def _(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@torch.library.register_fake("fxshard::get_rng_state", lib=_LIBRARY)
def _(device: torch.device) -> Tensor:
    size = CPU_STATE_BYTES if device.type == "cpu" else ACCELERATOR_STATE_BYTES
    return torch.empty(size, dtype=torch.uint8)


@torch.library.register_fake("fxshard::set_rng_state", lib=_LIBRARY)
def _(state: Tensor, device: torch.device) -> None:
    return None


get_rng_state = torch.ops.fxshard.get_rng_state.default
set_rng_state = torch.ops.fxshard.set_rng_state.default


@contextlib.contextmanager
def only_torch_s(model: nn.Module) -> Iterator[None]:
    """While `model` is traced, refuse numbers that a module draws outside of PyTorch.

    The program would hold what was drawn while tracing: the same mask in every step, without a
    word. (transformers' SpecAugment draws its masks by numpy, LayerDrop by hand Python's numbers.)

    Raises:
        CaptureError: a module drew from the global generator of `random` or `numpy.random`.
    """
    names = {id(module): name for name, module in model.named_modules()}
    running: list[nn.Module] = []
    before = _drawn_outside()
    python, numbers = random.getstate(), numpy.random.get_state()

    def look() -> None:
        now = _drawn_outside()
        if now == before or not running:
            return
        drawn = "random" if now[0] != before[0] else "numpy.random"
        random.setstate(python)
        numpy.random.set_state(numbers)
        raise CaptureError(
            f"forward of {names[id(running[-1])] or 'the model'} ({type(running[-1]).__name__}) "
            f"draws from {drawn}: a traced program would repeat the numbers of the trace for "
            f"ever. Draw them with torch (torch.rand), or outside of the model and pass them in."
            f"{hf.remedy_of_numbers(model)}"
        )

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            look()
            running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in names:
            look()
            running.pop()

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drawn_outside() -> tuple[Any, Any]:
    """Equal as long as nobody draws from the global generators of `random` and `numpy.random`."""
    _, words, *rest = numpy.random.get_state()
    return random.getstate(), (numpy.asarray(words).tobytes(), rest)
