"""Device memory that no tensor of the program explains: workspaces, the CUDA context, NCCL."""

from __future__ import annotations

import dataclasses

import torch

from fxshard.memory.cuda.settings import KIB, MIB

HOPPER_WORKSPACE = 32 * MIB
# CUBLAS_WORKSPACE_CONFIG as if it were :4096:2:16:8, two buffers of 4 MiB and eight of 16 KiB
OTHER_WORKSPACE = 2 * 4 * MIB + 8 * 16 * KIB
HOPPER_AND_BLACKWELL = (9, 10, 12)  # major compute capabilities
MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
WITH_BIAS = ("aten.addmm",)  # what cuBLASLt multiplies

# Of its own where torch.backends.cuda has no ``cublaslt_workspace_size``, whose page says that
# cuBLASLt shares cuBLAS's by default. Measured with torch 2.11 (benchmarks/results, H200).
LT_WORKSPACE = 1 * MIB

# Stated bounds.
CUDA_CONTEXT = 1024 * MIB
NCCL_CHANNELS = 32
NCCL_NEIGHBOURS = 2  # of a rank in a ring
NCCL_BUFFERS = 10 * MIB + 2 * MIB  # per channel and neighbour


@dataclasses.dataclass(frozen=True)
class FixedCost:
    """Memory that is there whatever the model.

    Attributes:
        name: what it is.
        bytes: how much.
        bound: True: outside the caching allocator, in no figure of ``torch.cuda.memory_stats``, and
            `bytes` is no more than a stated bound. False: inside, exact, and counted in `allocated`
            and `reserved` from its first use on.
        source: where the figure is from.
        operators: what is inside the allocator is there from the first of these on that
            autograd's thread runs, in `backward`, or that of forward, outside of it.
        backward: see `operators`.
    """

    name: str
    bytes: int
    bound: bool
    source: str
    operators: tuple[str, ...] = ()
    backward: bool = False


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace, where CUBLAS_WORKSPACE_CONFIG is unset.

    Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``, ``parseChosenWorkspaceSize``. (Older torch
    knew 32 MiB for capability 9.0 alone.)

    Args:
        capability: of the GPU, as ``torch.cuda.get_device_capability``.
    """
    return HOPPER_WORKSPACE if capability[0] in HOPPER_AND_BLACKWELL else OTHER_WORKSPACE


def fixed_costs(capability: tuple[int, int], *, communicators: int = 1) -> list[FixedCost]:
    """What one rank holds besides tensors, for a training step on one compute stream.

    Each thread that multiplies matrices has its own cuBLAS handle, and each handle and stream its
    own workspace, never freed: one for the thread that runs forward, one for autograd's.

    Args:
        capability: of the GPU, as ``torch.cuda.get_device_capability``.
        communicators: of NCCL, one per process group that is used.
    """
    workspace = cublas_workspace(capability)
    pool = "torch aten/src/ATen/cuda/CublasHandlePool.cpp"
    buffers = communicators * NCCL_CHANNELS * NCCL_NEIGHBOURS * NCCL_BUFFERS
    kinds: list[tuple[str, int, tuple[str, ...]]] = [("cuBLAS", workspace, MATRIX_PRODUCTS)]
    if not hasattr(torch.backends.cuda, "cublaslt_workspace_size"):
        kinds.append(("cuBLASLt", LT_WORKSPACE, WITH_BIAS))
    inside = [
        FixedCost(f"{kind} workspace, {thread} thread", size, False, pool, first, backward)
        for kind, size, first in kinds
        for thread, backward in (("forward", False), ("autograd", True))
    ]
    return [
        *inside,
        FixedCost(
            "CUDA context and kernels",
            CUDA_CONTEXT,
            True,
            "0.3 to 0.4 GB with lazy loading, the default, 1 GB without: "
            "pytorch/pytorch issues 107667, 109888, 28394",
        ),
        FixedCost(
            "NCCL buffers",
            buffers,
            True,
            "rings, 32 channels, 10 MiB and 2 MiB per channel and neighbour: NVIDIA/nccl "
            "issues 1685, 986; 688 MB seen in 964; trees and NVLink SHARP take more",
        ),
    ]
