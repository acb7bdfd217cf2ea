"""Hardware: the constants that times are estimated from, and presets with the source of each.

Note: sources
=============
[A100]  NVIDIA A100 Tensor Core GPU data sheet, column A100 80GB SXM; without sparsity.
[H100]  NVIDIA H100 Tensor Core GPU data sheet, column H100 SXM. Its tensor-core figures are with
        sparsity; half of them is what dense matrices get.
[H200]  NVIDIA H200 Tensor Core GPU data sheet, column H200 SXM.
[B200]  NVIDIA Blackwell data sheet, column HGX B200, figures of one GPU, halved likewise.
[CX6]   NVIDIA DGX A100 data sheet: for each GPU a ConnectX-6 port of 200 Gb/s, InfiniBand HDR.
[CX7]   NVIDIA ConnectX-7 data sheet: one 400 Gb/s port for each GPU of an HGX node.
[NCCL]  NCCL, src/graph/topo.h (bytes/s of a link) and src/graph/tuning.cc (latencies, share of the
        bandwidth), rows Ring and Tree, protocol LL128; the same tables are in
        torch/_inductor/comm_analysis.py.
[torch] torch/utils/_runtime_estimation.py: matrix products reach 75% of the peak.
[guess] No source: an order of magnitude. docs/cost.md lists them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from fxshard.arguments import check_count
from fxshard.errors import ConfigError

MICRO = 1e-6


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection of one rank, one direction of it.

    Attributes:
        alpha: seconds that a message takes besides its bytes.
        beta: bytes per second.
    """

    alpha: float
    beta: float


@dataclasses.dataclass(frozen=True)
class Tree:
    """NCCL's double binary tree, by which it reduces over many nodes instead of around a ring.

    A ring's latency grows with the nodes, a tree's with their logarithm. Source: Jeaugey, Massively
    Scale Your Deep Learning Training with NCCL 2.4 (2019); the constants are those of [NCCL].

    Attributes:
        link_alpha: seconds of a step to the next rank of a node.
        network_alpha: seconds of a step to another node. A ring with one rank in each node takes
            as long per step: nothing hides it there ("with ppn=1 latencies are fully exposed").
        share: the part of a ring's bytes per second that it reaches.
    """

    link_alpha: float
    network_alpha: float
    share: float


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of GPU, and how many of them are connected.

    Attributes:
        name: for messages.
        flops: peak floating-point operations per second of dense matrix products, by dtype of the
            operands, a dict. A dtype that is not in it counts as float32.
        achievable: the part of it that large matrix products reach.
        memory_bandwidth: bytes per second of the GPU's memory.
        memory_bytes: its size.
        launch_overhead: seconds per kernel, besides its work.
        link: between two ranks of a node.
        network: between two nodes, for each rank.
        host: between a GPU and the memory of its CPU.
        collective_overhead: seconds per collective, besides its steps.
        ranks_per_node: ranks ``k * n`` to ``k * n + n - 1`` share node ``k``.
        tree: what an all-reduce takes by a tree; None: there are rings only.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    achievable: float
    memory_bandwidth: float
    memory_bytes: int
    launch_overhead: float
    link: Link
    network: Link
    host: Link
    collective_overhead: float = 0.0
    ranks_per_node: int = 8
    tree: Tree | None = None

    def __post_init__(self) -> None:
        for name, kind in (("link", Link), ("network", Link), ("host", Link), ("flops", Mapping)):
            if not isinstance(getattr(self, name), kind):
                raise self._refusal(name, getattr(self, name), f"is no {kind.__name__}")
        object.__setattr__(self, "flops", dict(self.flops))  # a copy that can be pickled
        rates = {f"flops[{dtype}]": rate for dtype, rate in self.flops.items()}
        rates |= {"achievable": self.achievable, "memory_bandwidth": self.memory_bandwidth}
        rates |= {f"{n}.beta": getattr(self, n).beta for n in ("link", "network", "host")}
        rates |= {"memory_bytes": self.memory_bytes, "ranks_per_node": self.ranks_per_node}
        times = {f"{n}.alpha": getattr(self, n).alpha for n in ("link", "network", "host")}
        times |= {n: getattr(self, n) for n in ("launch_overhead", "collective_overhead")}
        if self.tree is not None:
            rates |= {"tree.share": self.tree.share}
            times |= {f"tree.{n}": getattr(self.tree, n) for n in ("link_alpha", "network_alpha")}
        for name, value in (rates | times).items():
            if not isinstance(value, (int, float)) or value == math.inf:
                raise self._refusal(name, value, "is no finite number")
            if name in rates and not value > 0:
                raise self._refusal(name, value, "is not above 0")
            if not value >= 0:
                raise self._refusal(name, value, "is below 0")
        if torch.float32 not in self.flops:
            raise ConfigError(f"hardware {self.name!r}: flops has no torch.float32.")

    def _refusal(self, name: str, value: object, why: str) -> ConfigError:
        return ConfigError(f"hardware {self.name!r}: {name}={value!r} {why}.")

    def rate(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second of matrix products of `dtype`, at best."""
        return self.flops.get(dtype, self.flops[torch.float32])


_AMPERE = {
    torch.bfloat16: 312e12,  # [A100] 312 TFLOPS
    torch.float16: 312e12,  # [A100] 312; it has no tensor cores for fp8
    torch.float32: 19.5e12,  # [A100] 19.5, without tensor cores: torch's default allows no TF32
    torch.float64: 19.5e12,  # [A100] 19.5, tensor cores
}
_HOPPER = {
    torch.bfloat16: 989.4e12,  # [H100] 1,979 TFLOPS with sparsity
    torch.float16: 989.4e12,  # [H100] 1,979 with sparsity
    torch.float8_e4m3fn: 1978.9e12,  # [H100] 3,958 with sparsity
    torch.float8_e5m2: 1978.9e12,  # [H100] 3,958 with sparsity
    torch.float32: 66.9e12,  # [H100] 67, without tensor cores: torch's default allows no TF32
    torch.float64: 66.9e12,  # [H100] 67, tensor cores
}
_BLACKWELL = {
    torch.bfloat16: 2250e12,  # [B200] 4.5 PFLOPS with sparsity
    torch.float16: 2250e12,  # [B200] 4.5 with sparsity
    torch.float8_e4m3fn: 4500e12,  # [B200] 9 with sparsity
    torch.float8_e5m2: 4500e12,  # [B200] 9 with sparsity
    torch.float32: 75e12,  # [B200] 75 TFLOPS
    torch.float64: 37e12,  # [B200] 37
}
_LL128 = 0.92  # [NCCL] the share of a link's bytes that are data
_NETWORK = Link(
    alpha=4.0 * MICRO,  # [NCCL] hwLat, NET
    beta=50e9 * _LL128,  # [CX7] 400 Gb/s
)
_TREE = Tree(
    link_alpha=1.25 * MICRO,  # [NCCL] hwLat, NVLINK, row Tree
    network_alpha=8.5 * MICRO,  # [NCCL] hwLat, NET, row Tree
    share=0.92,  # [NCCL] of the bus bandwidth, besides what LL128 takes
)
_PCIE5 = Link(
    alpha=10 * MICRO,  # [guess]
    beta=64e9,  # [H100], [B200] PCIe Gen5: 128 GB/s, half of it each way
)

_H100 = Hardware(
    name="h100",
    flops=_HOPPER,
    achievable=0.75,  # [torch]
    memory_bandwidth=3.35e12,  # [H100] 3.35 TB/s
    memory_bytes=80 * 10**9,  # [H100] 80 GB
    launch_overhead=2 * MICRO,  # [guess]
    link=Link(
        alpha=1.9 * MICRO,  # [NCCL] hwLat, NVLINK
        beta=18 * 20.6e9 * _LL128,  # [NCCL] SM90_NVLINK_BW; 18 links, nominally 25 GB/s each
    ),
    network=_NETWORK,
    host=_PCIE5,
    collective_overhead=14 * MICRO,  # [NCCL] baseLat
    ranks_per_node=8,  # [H100] HGX H100
    tree=_TREE,
)

PRESETS: dict[str, Hardware] = {
    "a100": dataclasses.replace(
        _H100,
        name="a100",
        flops=_AMPERE,
        memory_bandwidth=2.039e12,  # [A100] 2,039 GB/s
        memory_bytes=80 * 10**9,  # [A100] 80 GB
        link=Link(
            alpha=1.9 * MICRO,  # [NCCL] hwLat, NVLINK
            beta=12 * 20.0e9 * _LL128,  # [NCCL] SM80_NVLINK_BW; 12 links, nominally 25 GB/s each
        ),
        network=Link(
            alpha=4.0 * MICRO,  # [NCCL] hwLat, NET
            beta=25e9 * _LL128,  # [CX6] 200 Gb/s
        ),
        host=Link(
            alpha=10 * MICRO,  # [guess]
            beta=32e9,  # [A100] PCIe Gen4: 64 GB/s, half of it each way
        ),
    ),
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100,
        name="h200",
        memory_bandwidth=4.8e12,  # [H200] 4.8 TB/s
        memory_bytes=141 * 10**9,  # [H200] 141 GB
    ),
    "b200": dataclasses.replace(
        _H100,
        name="b200",
        flops=_BLACKWELL,
        memory_bandwidth=7.7e12,  # [B200] 7.7 TB/s
        memory_bytes=180 * 10**9,  # [B200] 180 GB
        link=Link(
            alpha=1.9 * MICRO,  # [NCCL] hwLat, NVLINK
            beta=18 * 40.1e9 * _LL128,  # [NCCL] SM100_NVLINK_BW; 18 links, nominally 50 GB/s each
        ),
    ),
}


def hardware_of(chosen: str | Hardware, ranks_per_node: int | None = None) -> Hardware:
    """A preset by name, or the given one; with another number of ranks per node if one is given.

    Raises:
        ConfigError: there is no such preset, or the number is below 1.
    """
    found = PRESETS.get(chosen) if isinstance(chosen, str) else chosen
    if not isinstance(found, Hardware):
        other = "" if isinstance(chosen, str) else f", not {type(chosen).__name__}"
        raise ConfigError(
            f"hardware={chosen!r}: expected one of {', '.join(PRESETS)}, or a "
            f"fxshard.hardware.Hardware with figures of your own{other}."
        )
    if ranks_per_node is not None:
        check_count("ranks_per_node", ranks_per_node)
        return dataclasses.replace(found, ranks_per_node=ranks_per_node)
    return found
