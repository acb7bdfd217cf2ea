"""The GPUs that a dry run knows."""

from __future__ import annotations

import dataclasses

from fxshard.capture.cuda.operators import TARGET, Target
from fxshard.errors import ConfigError

GIB = 1 << 30
GPUS_PER_NODE = 8


@dataclasses.dataclass(frozen=True)
class GpuModel:
    """A kind of GPU.

    Attributes:
        name: as ``torch.cuda.get_device_name`` gives it.
        target: what decides kernels.
        memory: bytes, as ``torch.cuda.get_device_properties`` gives them, rounded down.
    """

    name: str
    target: Target
    memory: int


def _like(capability: tuple[int, int], multiprocessors: int) -> Target:
    return dataclasses.replace(TARGET, capability=capability, multiprocessors=multiprocessors)


# Capability and multiprocessors: NVIDIA's data sheets of the SXM versions.
GPUS = {
    "a100": GpuModel("NVIDIA A100-SXM4-80GB", _like((8, 0), 108), 79 * GIB),
    "h100": GpuModel("NVIDIA H100 80GB HBM3", TARGET, 79 * GIB),
    "h200": GpuModel("NVIDIA H200", TARGET, 139 * GIB),
    "b200": GpuModel("NVIDIA B200", _like((10, 0), 148), 178 * GIB),
}
DEFAULT = "h100"


def gpu(device: str) -> GpuModel | None:
    """The GPU of a name, or of "cuda" the default one; None for "cpu".

    Raises:
        ConfigError: there is none.
    """
    if device == "cpu":
        return None
    name = DEFAULT if device == "cuda" else device
    if name not in GPUS:
        raise ConfigError(f"device={device!r}: expected 'cpu', 'cuda' or one of {', '.join(GPUS)}.")
    return GPUS[name]
