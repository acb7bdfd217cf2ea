"""A number of ranks, or a pair of them, under a strategy."""

from __future__ import annotations

from typing import Any

from fxshard.config.checked import Config
from fxshard.errors import ConfigError


def grid(world_size: Any, config: Config) -> tuple[int, int]:
    """Replicas and shards of a world under a strategy.

    Raises:
        ConfigError: `world_size` is no number of ranks, or a pair where none is meant.
    """
    if isinstance(world_size, tuple) and len(world_size) == 2:
        for size in world_size:
            _check_world_size(size)
        if not config.hybrid:
            raise ConfigError(
                f"world_size={world_size!r}: strategy {config.strategy!r} has one dimension. Give "
                f"one number, or strategy='hybrid_shard'."
            )
        return world_size
    _check_world_size(world_size)
    if config.hybrid:
        raise ConfigError(
            f"world_size={world_size!r}: strategy {config.strategy!r} has two dimensions. Give a "
            f"pair, replicas x shards, such as world_size=({world_size // 8 or 1}, 8)."
        )
    return (world_size, 1) if config.strategy == "no_shard" else (1, world_size)


def _check_world_size(world_size: Any) -> None:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: expected a whole number of ranks >= 1.")
