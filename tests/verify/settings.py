"""Options of many strategies and policies, and traced models that tests run the passes on."""

import functools
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fxshard.capture import trace
from fxshard.config.checked import Config
from fxshard.ir.program import Program
from fxshard.ir.splitting import configured_units
from tests import graphs
from tests.zoo.more import MATRIX

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def columns(param: torch.Tensor) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options, and of the program
    "shard_grad_op": ({"strategy": "shard_grad_op"}, {}),
    "no_shard": ({"strategy": "no_shard"}, {"world_size": 1, "replicas": 2}),
    "hybrid": ({"strategy": "hybrid_shard"}, {"replicas": 2}),
    "reshard_2": ({"reshard_after_forward": 2}, {"world_size": 4}),
    "bf16": ({"mixed_precision": HALF}, {"world_size": 3}),
    "bf16_one_rank": ({"mixed_precision": HALF}, {"world_size": 1}),
    "offload": ({"offload": CPUOffloadPolicy()}, {}),
    "hook": ({}, {"comm_hook": True}),
    "no_sync": ({}, {"sync": False}),
    "apart": (graphs.APART, {}),
    "columns": ({"shard_placement_fn": columns}, {}),
    "columns_regrouped": (
        {"shard_placement_fn": columns, "reshard_after_forward": 2, "mixed_precision": HALF}
        | graphs.APART,
        {"world_size": 4, "replicas": 2},
    ),
    "everything": (
        {
            "strategy": "hybrid_shard_zero2",
            "mixed_precision": HALF,
            "offload": CPUOffloadPolicy(),
            "forward_prefetch": 2,
            "gradient_predivide_factor": 2.0,
        },
        {"replicas": 2},
    ),
    "everything_regrouped": (
        {"reshard_after_forward": 2, "mixed_precision": HALF, "offload": CPUOffloadPolicy()},
        {"world_size": 4, "replicas": 2},
    ),
}
SETTINGS["everything_apart"] = (
    SETTINGS["everything_regrouped"][0] | graphs.APART,
    SETTINGS["everything_regrouped"][1],
)


@functools.cache
def traced(name: str, half: bool) -> Program:
    torch.manual_seed(0)
    model = MATRIX[name].build()
    args, kwargs = MATRIX[name].batch(0, 0)
    config = Config(units=MATRIX[name].units, mixed_precision=HALF if half else None)
    units = configured_units(model, config)
    return trace.capture(model, args, kwargs, units=units, world_size=1, training=True)
