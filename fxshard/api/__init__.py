"""The verbs, by what is wanted: to plan, to train, to train by whole steps, to validate."""

from fxshard.api.planning import fsdp2_memory, plan, tune
from fxshard.api.training import compile, fully_shard, shard
from fxshard.api.validating import validate
from fxshard.api.whole_step import compile_step

__all__ = [
    "compile",
    "compile_step",
    "fsdp2_memory",
    "fully_shard",
    "plan",
    "shard",
    "tune",
    "validate",
]
