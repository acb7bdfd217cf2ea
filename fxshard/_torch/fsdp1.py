"""FSDP1: what its options keep under private names (torch/distributed/fsdp/api.py)."""

from __future__ import annotations

from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2


def full_precision_classes(policy: MixedPrecision) -> tuple[type, ...]:
    """Classes of modules that compute as they are stored, whatever `policy` says of the others."""
    return tuple(policy._module_classes_to_ignore)
