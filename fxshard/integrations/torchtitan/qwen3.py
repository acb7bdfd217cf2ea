"""Qwen 3 of torchtitan."""

from __future__ import annotations

from torchtitan.models import qwen3
from torchtitan.protocols.train_spec import TrainSpec

from fxshard.integrations.torchtitan.parallelize import sharded_by_fxshard


def get_train_spec() -> TrainSpec:
    """Return torchtitan's, but for what shards the model."""
    return sharded_by_fxshard(qwen3.get_train_spec())
