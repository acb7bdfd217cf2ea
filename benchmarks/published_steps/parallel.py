"""How torchtitan's jobs of 2024 and 2025 checkpointed, converted, compiled and sharded a Llama."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.published_steps.llama import Llama

aten = torch.ops.aten

# torchtitan's per-op selective checkpointing saves these, but not each second product; attention
# by cuDNN was not among them.
SAVED = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        aten.max.default,
    }
)
WITH_ABS = SAVED | {aten.abs.default}  # until pull request 820 (2025-02)


def every_second_product(saved: frozenset[Any]) -> Callable[[], Any]:
    """The contexts of torchtitan's per-op selective checkpointing."""

    def contexts() -> Any:
        counts: dict[str, int] = collections.defaultdict(int)

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = op in saved
            if op == aten.mm.default:
                when = "recompute" if context.is_recompute else "forward"
                counts[when] += 1
                keep = counts[when] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def checkpointed(block: nn.Module, policy: str, saved: frozenset[Any]) -> nn.Module:
    """`policy`: "none", "full" or "per-op"."""
    if policy == "none":
        return block
    how = {"context_fn": every_second_product(saved)} if policy == "per-op" else {}
    return checkpoint_wrapper(block, preserve_rng_state=False, **how)


def in_float8(model: nn.Module, recipe: str) -> None:
    """Torchao's training in float8 of all linear layers but the head.

    Args:
        recipe: "tensorwise", "gathered" (tensorwise, and weights are gathered in float8),
            "recomputed" (so, and weights are cast again in backward) or "rowwise".
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = (
        Float8LinearConfig.from_recipe_name("rowwise")
        if recipe == "rowwise"
        else Float8LinearConfig(
            enable_fsdp_float8_all_gather=recipe != "tensorwise",
            force_recompute_fp8_weight_in_bwd=recipe == "recomputed",
        )
    )
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, fqn: fqn != "output"
    )


def scales_computed(model: nn.Module, recipe: str | None) -> None:
    """After each step of the optimizer, for all weights that are gathered in float8."""
    if recipe in ("gathered", "recomputed"):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Tensors of a folded Llama by rows of batch x length, as torchtitan cut them in 2024-03."""
    rows = Shard(0)
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(
                input_layouts=rows, output_layouts=Shard(-1), use_local_output=False
            ),
            "norm": SequenceParallel(sequence_dim=0),
            "layers.0": PrepareModuleInput(
                input_layouts=(Replicate(), None),
                desired_input_layouts=(rows, None),
                use_local_output=True,
            ),
        },
    )
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention": PrepareModuleInput(
                    input_layouts=(rows, None), desired_input_layouts=(Replicate(), None)
                ),
                **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
                "attention.wo": RowwiseParallel(output_layouts=rows),
                "attention_norm": SequenceParallel(sequence_dim=0),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(rows,), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=rows),
                "feed_forward.w3": ColwiseParallel(),
                "ffn_norm": SequenceParallel(sequence_dim=0),
            },
        )


def sharded(
    model: Llama,
    *,
    by: str,
    checkpoint: str,
    saved: frozenset[Any],
    compiles: str,
    tensors: int,
    root: str,
) -> nn.Module:
    """Checkpointed, compiled, sharded, and put on the GPU from the meta device.

    Args:
        by: "fsdp1" or "fsdp2".
        root: "kept": embedding and head are one unit, which stays unsharded from forward to
            backward, as the last block does; "resharded": it does not; "apart": the embedding is a
            unit, norm and head are another, and only that one stays.
        checkpoint, saved: see `checkpointed`.
        compiles: "no", "blocks" or "model".
        tensors: ranks of tensor parallelism.
    """
    mesh = None
    if tensors > 1:
        shape = (dist.get_world_size() // tensors, tensors)
        both = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, both["tp"])
        mesh = both["dp"]
    for name, block in model.layers.items():
        block = checkpointed(block, checkpoint, saved)
        if compiles == "blocks":
            block = torch.compile(block, fullgraph=True)
        model.layers[name] = block
    if by == "fsdp1":
        return _by_fsdp1(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if root == "apart":
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=True)
    for name, block in model.layers.items():
        reshard = root == "apart" or int(name) < len(model.layers) - 1
        fully_shard(block, **options, reshard_after_forward=reshard)
    if root == "apart":
        fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options, reshard_after_forward=root == "resharded")
    if compiles == "model":
        model.compile(dynamic=False)
    return model.to_empty(device="cuda")


def _by_fsdp1(model: Llama) -> nn.Module:
    def empty(module: nn.Module) -> None:
        module.to_empty(device="cuda", recurse=False)

    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
        "use_orig_params": True,
        "param_init_fn": empty,
    }
    for name, block in model.layers.items():
        model.layers[name] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)
