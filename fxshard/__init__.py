"""fxshard: fully sharded data parallelism as a compiler."""

from fxshard.api import Plan, compile, plan, validate
from fxshard.module import ShardedModule

__all__ = ["Plan", "ShardedModule", "compile", "plan", "validate"]
