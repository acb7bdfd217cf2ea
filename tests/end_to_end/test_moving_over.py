"""Scripts for FSDP2 with one line changed, the import of `fully_shard`: the same numbers.

They call in the order of torch's FSDP2 tutorial and of torchtitan's Llama 3. `python -m
benchmarks.moving_over` runs those themselves.
"""

from typing import Any

import pytest
import torch

THEIRS = "from torch.distributed.fsdp import fully_shard\n"
OURS = "from fxshard import fully_shard\n"

HEAD = (
    """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
"""
    + THEIRS
    + """
from tests.peers.fsdp2.common import Args, Transformer

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def train(model, optimizer, steps):
    found = []
    for step in steps:
        seeded = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(8, (2, 16), generator=seeded)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found
"""
)

TUTORIAL = (
    HEAD
    + """
def made(policy):
    with torch.device("meta"):
        model = Transformer(Args(layers=3, tied=False))
    options = {} if policy is None else {"mp_policy": policy}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    layers = list(model.layers)
    for i in range(len(layers) - 2):
        layers[i].set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
    for i in range(2, len(layers)):
        layers[i].set_modules_to_backward_prefetch([layers[i - 1], layers[i - 2]])
    assert isinstance(model, Transformer) and isinstance(model, FSDPModule)
    return model


def run(how):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how == "bf16" else None
    model = made(policy)
    torch.manual_seed(0)
    start = Transformer(Args(layers=3, tied=False)).state_dict()
    set_model_state_dict(model, start if dist.get_rank() == 0 else {}, options=BROADCAST)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.unshard(async_op=True)
    found = train(model, optimizer, range(2))
    state = get_model_state_dict(model, options=FULL)
    kept = {name: value.clone() for name, value in state.items()}
    states = get_optimizer_state_dict(model, optimizer, options=FULL)

    again = made(policy)  # from what rank 0 has saved
    set_model_state_dict(again, state, options=BROADCAST)
    optimizer = torch.optim.Adam(again.parameters(), lr=1e-2)
    set_optimizer_state_dict(again, optimizer, optim_state_dict=states, options=BROADCAST)
    return found + train(again, optimizer, range(2, 4)), kept
"""
)

LLAMA = (
    HEAD
    + """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


def parallelized(model, mesh, options):
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
    fully_shard(model.tok_embeddings, reshard_after_forward=True, **options)
    for block in model.layers:
        fully_shard(block, reshard_after_forward=True, **options)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **options)
    fully_shard(model, **options)


def run(how):
    torch.manual_seed(0)
    model = Transformer(Args(layers=2, tied=False))
    if how == "hybrid":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelized(model, mesh, {"mesh": mesh, "mp_policy": policy})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):  # two micro-batches each
        model.set_requires_gradient_sync(False)
        tokens = torch.arange(32).view(2, 16) % 8
        model(tokens).float().square().mean().backward()
        model.set_requires_gradient_sync(True)
        found += train(model, optimizer, [step])
    return found, get_model_state_dict(model, options=FULL)
"""
)
SCRIPTS = {"tutorial": TUTORIAL, "llama": LLAMA}


def ran(rank: int, world_size: int, script: str, how: str) -> Any:
    found = []
    for text in (SCRIPTS[script], SCRIPTS[script].replace(THEIRS, OURS)):
        names: dict[str, Any] = {"__name__": script}
        exec(compile(text, f"<{script}>", "exec"), names)
        found.append(names["run"](how))
    return found


@pytest.mark.parametrize(
    "script, how",
    [
        pytest.param("tutorial", "fp32", marks=pytest.mark.slow),
        ("tutorial", "bf16"),
        pytest.param("llama", "shard", marks=pytest.mark.slow),
        ("llama", "hybrid"),
    ],
)
def test_one_changed_import_gives_the_same_numbers(ranks: Any, script: str, how: str) -> None:
    assert SCRIPTS[script].count(THEIRS) == 1
    for (expected, theirs), (found, ours) in ranks(2).run(ran, script, how):
        assert found == expected
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
