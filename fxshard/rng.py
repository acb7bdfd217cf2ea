"""``fxshard::get_rng_state`` and ``set_rng_state``: what recomputed random operators begin with.

They have kernels and run on the compute stream, in regions, as ``aten`` operators do.

=============  ====================================================================================
get_rng_state  the state of the random number generator of a device, uint8, in the CPU's memory.
set_rng_state  the generator goes on from that state.
=============  ====================================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

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
