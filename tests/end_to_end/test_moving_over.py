"""What calls torch's `fully_shard` moves over by one import: here, Accelerate's own FSDP2 path.

Accelerate takes CPU ranks for DDP; its state is told otherwise. All else is its code for GPUs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import fxshard
from tests.ranks import Ranks


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


@contextmanager
def accelerator(policy: MixedPrecisionPolicy | None) -> Iterator[Accelerator]:
    """On this rank, by FSDP2; it accumulates gradients over two micro-batches."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        mixed_precision_policy=policy,
    )
    try:
        made = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
        made.state.distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = plugin
        yield made
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
            del os.environ[name]


def trained(rank: int, policy: MixedPrecisionPolicy | None, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step, and the third again from the checkpoint."""
    with accelerator(policy) as made:
        model = llama()
        model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        made.state.distributed_type = DistributedType.FSDP
        losses, norms = [], []

        def micro_batch(number: int) -> None:
            seeded = torch.Generator().manual_seed(10 * number + rank)
            tokens = torch.randint(32, (2, 6), generator=seeded)
            with made.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                made.backward(loss)
                losses.append(loss.item())
                if made.sync_gradients:
                    norm: Any = made.clip_grad_norm_(model.parameters(), 0.5)
                    norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
                optimizer.step()
                optimizer.zero_grad()

        for number in range(4):
            micro_batch(number)
        made.save_state(str(folder))
        for number in (4, 5):
            micro_batch(number)
        made.load_state(str(folder))
        for number in (4, 5):
            micro_batch(number)
        state: dict[str, Tensor] = made.get_state_dict(model)
        return {"losses": losses, "norms": norms, "state": state, "kind": type(model).__mro__}


def both(rank: int, world_size: int, policy: MixedPrecisionPolicy | None, folder: str) -> list[Any]:
    here = Path(folder)
    torchs = trained(rank, policy, here / "torch")
    with mock.patch.object(torch.distributed.fsdp, "fully_shard", fxshard.fully_shard):
        ours = trained(rank, policy, here / "fxshard")
    assert fxshard.FxshardModule in ours.pop("kind"), "it was not fxshard that ran"
    assert fxshard.FxshardModule not in torchs.pop("kind")
    return [torchs, ours]


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_accelerates_fsdp2_path(
    ranks: Callable[[int], Ranks], policy: MixedPrecisionPolicy | None, tmp_path: Path
) -> None:
    """Losses, norms, checkpoints and what is exported are bitwise those with torch's own."""
    answers = ranks(2).run(both, policy, str(tmp_path))
    for torchs, ours in answers:
        assert ours["losses"] == torchs["losses"] and ours["norms"] == torchs["norms"]
        assert ours["losses"][4:6] == ours["losses"][6:8], "resumed"
    assert answers[0][1]["losses"] != answers[1][1]["losses"], "each rank has its own batches"
    (torchs, ours), _ = answers
    assert list(ours["state"]) == list(torchs["state"])
    for fqn, value in torchs["state"].items():
        assert torch.equal(ours["state"][fqn], value), fqn
