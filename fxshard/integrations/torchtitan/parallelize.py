"""torchtitan's description of a model, with fxshard in the place of what shards it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn

import fxshard
from fxshard.integrations.torchtitan.experts import let_experts_be_traced

Parallelize = Callable[[nn.Module, Any, Any], nn.Module]


def sharded_by_fxshard(spec: Any) -> Any:
    """Return a copy of a `TrainSpec` whose model fxshard shards.

    Args:
        spec: a ``torchtitan.protocols.train_spec.TrainSpec``.
    """
    # torchtitan refuses pipeline parallelism for a model that names no function for it.
    return replace(spec, parallelize_fn=by_fxshard(spec.parallelize_fn), pipelining_fn=None)


def by_fxshard(parallelize: Parallelize) -> Parallelize:
    """Return torchtitan's function with fxshard's `fully_shard` in the place of torch's.

    Activation checkpointing, what becomes a unit, dtypes and offloading stay what torchtitan's
    function makes of its configuration.

    Args:
        parallelize: such as ``parallelize_llama``; its module has an ``apply_fsdp``.
    """

    def parallelize_with_fxshard(
        model: nn.Module, parallel_dims: Any, job_config: Any
    ) -> nn.Module:
        _refuse(parallel_dims, job_config)
        let_experts_be_traced()
        calls = parallelize.__globals__["apply_fsdp"].__globals__
        with mock.patch.dict(calls, fully_shard=fxshard.fully_shard):
            return parallelize(model, parallel_dims, job_config)

    return parallelize_with_fxshard


def _refuse(parallel_dims: Any, job_config: Any) -> None:
    """What torchtitan can do beside data parallelism, and fxshard cannot.

    Raises:
        ConfigError: the configuration asks for it.
    """
    if parallel_dims.cp_enabled:
        raise fxshard.ConfigError(
            "parallelism.context_parallel_degree: torchtitan's style of attention is none that "
            "fxshard traces. Set it to 1, or use torchtitan's own model; in a loop of your own, "
            "torch's context_parallel works."
        )
    backend = getattr(job_config.parallelism, "expert_parallel_comm_backend", "standard")
    if parallel_dims.ep_enabled and backend != "standard":
        raise fxshard.ConfigError(
            f"parallelism.expert_parallel_comm_backend is {backend!r}: its kernels are in no graph "
            "that fxshard can trace. Set it to 'standard', or use torchtitan's own model."
        )
    if job_config.compile.enable and "model" in job_config.compile.components:
        raise fxshard.ConfigError(
            "compile.components has 'model': fxshard makes one program of all blocks. Leave it "
            "out (compile.components=['loss'] works)."
        )
    if not parallel_dims.fsdp_enabled:
        raise fxshard.ConfigError(
            "parallelism.data_parallel_shard_degree is 1: there is nothing to shard over. Set it "
            "to -1 (all ranks), or use torchtitan's own model."
        )
