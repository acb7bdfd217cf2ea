"""What others measured of FSDP steps of Llama shapes, with the settings that they state.

Data only; `benchmarks.scale_page` computes our estimate for the same settings. Nothing here was
used to choose a constant. Files of GitHub are named with the commit that was read.
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.shapes import LLAMA2_7B, LLAMA2_70B, LLAMA3_8B, LLAMA3_70B, Shape
from fxshard.hardware import PRESETS, Hardware, Link

MICRO = 1e-6
TORCHTITAN = "every second product"  # its selective policy, of operators
LL128 = 0.92  # NCCL: the share of a link's bytes that are data

SOURCES = {
    "torchtitan-h100": (
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (31a17bf), tables 1 and 3: FSDP2, "
        "H100 with 2.4 TB/s at 500 W, 400 Gb/s for each GPU; memory is the peak that the allocator "
        "reserved"
    ),
    "torchtitan-a100": (
        "torchtitan, docs/performance.md (0413364): FSDP2 on 64 A100 of 80 GB; their network is "
        "not named, 200 Gb/s for each GPU is our assumption"
    ),
    "maxtext": (
        "NVIDIA/dgxc-benchmarking, maxtext/README_70b.md and configure.sh (8f5cbb3): JAX, sharded "
        "over all ranks up to 256, from 512 on over 128 and replicated; XLA compiles and fuses; "
        "the policy saves the projections of query, key and value, ours nothing"
    ),
    "ibm": (
        "pytorch.org blog, Maximizing training throughput using PyTorch FSDP (2024-03-13, "
        "pytorch.github.io 2ad1005), table 1, and foundation-model-stack/fms-fsdp for the "
        "strategies and for gradients reduced in bf16: FSDP1, 400 Gb/s for each node of A100s, "
        "800 Gb/s for each node of H100s"
    ),
}

_A100 = Hardware(
    name="a100",
    # NVIDIA A100 data sheet, column 80GB SXM: 312 TFLOPS of bf16 and 19.5 of fp32 without
    # sparsity or TF32, 2,039 GB/s
    flops={torch.bfloat16: 312e12, torch.float32: 19.5e12},
    achievable=PRESETS["h100"].achievable,
    memory_bandwidth=2.039e12,
    memory_bytes=80 * 10**9,
    launch_overhead=PRESETS["h100"].launch_overhead,
    link=Link(1.9 * MICRO, 12 * 20.0e9 * LL128),  # NCCL, topo.h: SM80_NVLINK_BW; 12 links
    network=Link(4.0 * MICRO, 25e9 * LL128),
    host=Link(10 * MICRO, 32e9),
    collective_overhead=PRESETS["h100"].collective_overhead,
    tree=PRESETS["h100"].tree,
)


def _with_network(hardware: Hardware, name: str, per_node: float) -> Hardware:
    """With so many bytes per second for each node of 8."""
    network = Link(hardware.network.alpha, per_node / 8 * LL128)
    return dataclasses.replace(hardware, name=name, network=network)


GPUS = {
    "H100, 2.4 TB/s": dataclasses.replace(
        PRESETS["h100"], name="h100, 2.4 TB/s", memory_bandwidth=2.4e12
    ),
    "H100": PRESETS["h100"],
    "A100": _A100,
    "A100, 400 Gb/s a node": _with_network(_A100, "a100, 400 Gb/s a node", 50e9),
    "H100, 800 Gb/s a node": _with_network(PRESETS["h100"], "h100, 800 Gb/s a node", 100e9),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One published figure.

    Attributes:
        source: a key of `SOURCES`.
        shape: of the model.
        gpu: a key of `GPUS`.
        world: ranks; a pair is replicas x shards.
        batch, sequence: of a rank.
        checkpoint: what we ask for, the nearest to what they did: as the option of `fxshard.plan`,
            or `TORCHTITAN`.
        tokens: per second and GPU, bf16.
        compiled: the same with torch.compile, where they say it.
        reserved_gib: peak memory of a rank, where they say it.
        reduce: dtype in which gradients are reduced.
    """

    source: str
    shape: Shape
    gpu: str
    world: int | tuple[int, int]
    batch: int
    sequence: int
    checkpoint: str | None
    tokens: float
    compiled: float | None = None
    reserved_gib: float | None = None
    reduce: torch.dtype = torch.float32


def _torchtitan(world: int, tokens: float, compiled: float, reserved: float) -> Measured:
    gpu = "H100, 2.4 TB/s"
    settings = ("torchtitan-h100", LLAMA3_8B, gpu, world, 2, 8192, TORCHTITAN)
    return Measured(*settings, tokens, compiled, reserved)


def _maxtext(world: int | tuple[int, int], seconds: float) -> Measured:
    tokens = 2 * 8192 / seconds
    return Measured("maxtext", LLAMA3_70B, "H100", world, 2, 8192, "full", tokens)


def _ibm(
    shape: Shape, gpu: str, world: int | tuple[int, int], checkpoint: str | None, tokens: float
) -> Measured:
    settings = ("ibm", shape, gpu, world, 2, 4096, checkpoint, tokens)
    return Measured(*settings, reduce=torch.bfloat16)


MEASURED = (
    _torchtitan(8, 5762, 6667, 82.4),
    _torchtitan(128, 5605, 6514, 67.0),
    Measured("torchtitan-a100", LLAMA3_8B, "A100", 64, 1, 8192, TORCHTITAN, 2973),
    Measured("torchtitan-a100", LLAMA3_70B, "A100", 64, 1, 8192, "full", 331),
    _maxtext(128, 15.563),
    _maxtext(256, 15.444),
    _maxtext((4, 128), 15.519),
    _maxtext((8, 128), 15.603),
    _maxtext((16, 128), 15.898),
    _ibm(LLAMA2_7B, "A100, 400 Gb/s a node", (16, 8), None, 3700),
    _ibm(LLAMA2_7B, "H100, 800 Gb/s a node", (12, 8), None, 7500),
    _ibm(LLAMA2_70B, "A100, 400 Gb/s a node", 128, "full", 370),
    _ibm(LLAMA2_70B, "H100, 800 Gb/s a node", 96, "full", 800),
)

# What was measured of these shapes with other parallelism, or without the settings: shown, and
# compared with nothing.
OTHERS = (
    ("Llama 3 405B", "8,192 H100", "tensor 8, pipeline 16, data 64 (FSDP)", "43% MFU", "llama3"),
    ("Llama 3 405B", "16,384 H100", "tensor 8, pipeline 16, data 128 (FSDP)", "41% MFU", "llama3"),
    (
        "Llama 3 405B, 131,072 tokens",
        "16,384 H100",
        "tensor 8, context 16, pipeline 16, data 8",
        "38% MFU",
        "llama3",
    ),
    ("Llama 3.1 405B", "512 H100", "FSDP2 with tensor 4, compiled", "152 tokens/s", "float8-blog"),
    ("Llama 3.1 405B", "128 H100", "FSDP2 16 with tensor 8", "109 tokens/s", "torchtitan-405b"),
    (
        "Llama 3 70B",
        "512 H100",
        "FSDP2, compiled; batch and checkpointing not said",
        "960 tokens/s",
        "float8-blog",
    ),
)
OTHER_SOURCES = {
    "llama3": "The Llama 3 Herd of Models (2024), table 4",
    "float8-blog": (
        "pytorch.org blog, Supercharging Training using float8 and FSDP2 (2024-11-25, "
        "pytorch.github.io 1580429), tables 1 and 3, bf16"
    ),
    "torchtitan-405b": "torchtitan, docs/performance.md, a later version with Llama 3.1",
}
