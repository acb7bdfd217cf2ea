"""Code of others that calls torch's `fully_shard`, with ours in its place: the same numbers?

    git clone https://github.com/pytorch/examples
    git clone https://github.com/pytorch/torchtitan    # and what its requirements.txt names
    python -m benchmarks.moving_over --examples PATH --torchtitan PATH

Each runs on two gloo ranks, three steps, with torch's `fully_shard` and then with fxshard's:

- the model and the checkpoints of torch's FSDP2 tutorial (examples/distributed/FSDP2), from meta,
  with explicit prefetching and mixed precision as its script has them; and from its checkpoint;
- torchtitan's `apply_ac` and `apply_fsdp` of Llama 3, on a small Llama, in bf16.

Writes benchmarks/results/moving_over.json. Ranks have batches of their own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from benchmarks.figures import RESULTS
from benchmarks.ranks import on_ranks

STEPS = 3
BY: dict[str, Callable[..., Any]] = {"torch": fsdp.fully_shard, "fxshard": fxshard.fully_shard}
Steps = list[tuple[float, float]]  # the loss of this rank and the norm of all gradients, by step


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, ...],
    vocabulary: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Steps:
    """Some, on batches of this rank."""
    made: Steps = []
    for step in range(STEPS):
        seeded = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(vocabulary, shape, generator=seeded)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        made.append((loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
    return made


def tutorial(by: str, checkout: str, folder: str, precise: bool, dcp_api: bool) -> Steps:
    """Steps of the tutorial's model from the checkpoint in `folder`, or from its own start.

    Its script's order of calls. Its ``reset_parameters`` leaves the layers out, which fxshard
    refuses to run (they were never filled); here they are filled, too.
    """
    sys.path.insert(0, str(Path(checkout, "distributed", "FSDP2")))
    files: Any = importlib.import_module("model")
    checkpoints: Any = importlib.import_module("checkpoint")
    example: Any = importlib.import_module("example")
    settings = files.ModelArgs(n_layers=3, n_heads=4, vocab_size=1024, max_seq_len=64, dropout_p=0)
    with torch.device("meta"):
        model = files.Transformer(settings)
    options: dict[str, Any] = {}
    if precise:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        BY[by](layer, **options)
    BY[by](model, **options)
    importlib.import_module("utils").inspect_model(model)
    example.set_modules_to_forward_prefetch(model, num_to_forward_prefetch=2)
    example.set_modules_to_backward_prefetch(model, num_to_backward_prefetch=2)
    kept = checkpoints.Checkpointer(folder, dcp_api=dcp_api)
    starts = kept.last_training_time is None
    if starts:
        model.to_empty(device="cpu")
        model.reset_parameters()
        for layer in model.layers:
            layer.reset_parameters()
    else:
        kept.load_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if not starts:
        kept.load_optim(model, optimizer)
    made = steps(model, optimizer, (8, 64), 1024, lambda out, _: out.sum())
    if starts:
        kept.save(model, optimizer)
    dist.barrier()
    return made


def torchtitans(by: str, checkout: str, checkpoint: str) -> Steps:
    """Steps of a small Llama that torchtitan's functions have checkpointed and sharded."""
    sys.path.insert(0, checkout)
    with mock.patch.object(fsdp, "fully_shard", BY[by]):
        parallelize: Any = importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    with mock.patch.object(parallelize, "fully_shard", BY[by]):
        arguments: Any = importlib.import_module("torchtitan.models.llama3.model.args")
        files: Any = importlib.import_module("torchtitan.models.llama3.model.model")
        torch.manual_seed(0)
        model = files.Transformer(
            arguments.TransformerModelArgs(
                dim=64, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=128, max_seq_len=32
            )
        )
        if checkpoint != "none":
            how = SimpleNamespace(
                mode=checkpoint,
                selective_ac_option="op",
                per_op_sac_force_recompute_mm_shapes_by_fqns=[],
            )
            parallelize.apply_ac(model, how)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize.apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(out: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())

    return steps(model, optimizer, (2, 32), 128, loss_of)


def compared(function: Callable[..., Steps], *args: Any) -> dict[str, Any]:
    """The first rank's steps on both sides, and whether those of all ranks are equal."""
    both = {by: on_ranks(2, function, by, *args) for by in BY}
    return {by: each[0] for by, each in both.items()} | {"equal": both["torch"] == both["fxshard"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", required=True)
    parser.add_argument("--torchtitan", required=True)
    asked = parser.parse_args()
    examples, titan = (str(Path(path).absolute()) for path in (asked.examples, asked.torchtitan))
    found: dict[str, Any] = {}
    for precise in (False, True):
        for dcp_api in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                on_ranks(2, tutorial, "torch", examples, folder, precise, dcp_api)
                how = "bf16" if precise else "fp32", "DCP" if dcp_api else "torch.save"
                found[f"tutorial, {', '.join(how)}"] = compared(
                    tutorial, examples, folder, precise, dcp_api
                )
    for checkpoint in ("none", "selective", "full"):
        found[f"torchtitan, checkpoint {checkpoint}"] = compared(torchtitans, titan, checkpoint)
    for name, each in found.items():
        print(f"{name}: {'equal' if each['equal'] else 'DIFFERENT'} {each['fxshard']}")
    about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    about |= {"python": platform.python_version(), "machine": platform.machine()}
    RESULTS.joinpath("moving_over.json").write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
