"""fxshard: fully sharded data parallelism as a compiler."""

from fxshard import collector

with collector.paused():  # torch brings thousands of modules along: half of the time goes there
    from fxshard.api import compile, plan, shard, tune, validate
    from fxshard.checkpoint import load_checkpoint, save_checkpoint
    from fxshard.dynamo import reports
    from fxshard.module import FxshardModule
    from fxshard.plans import Plan

__all__ = [
    "FxshardModule",
    "Plan",
    "compile",
    "load_checkpoint",
    "plan",
    "reports",
    "save_checkpoint",
    "shard",
    "tune",
    "validate",
]
