"""Accelerate's own FSDP2 path, around models that fxshard shards and beside torch's FSDP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig, TorchDynamoPlugin
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import fxshard
import fxshard.integrations.accelerate as integration
from tests.integrations.accelerating import accelerating
from tests.ranks import Ranks, told
from tests.tiny import llama

Pools = Callable[[int], Ranks]


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        **{
            "fsdp_version": 2,
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
            **options,
        }
    )


def trained(
    rank: int, world_size: int, by: str, folder: str, fsdp: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step, and the third again from the checkpoint."""
    here = Path(folder, by)
    sizes = options.get("parallelism_config")
    options = {**options, "parallelism_config": sizes and ParallelismConfig(**sizes)}
    with accelerating(rank, world_size, by):
        made = Accelerator(
            cpu=True, fsdp_plugin=plugin(**fsdp), gradient_accumulation_steps=2, **options
        )
        model: Any = llama()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        data = torch.randint(32, (12 * world_size, 6), generator=torch.Generator().manual_seed(1))
        loader: Any = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader, scheduler = made.prepare(model, optimizer, loader, scheduler)
        assert isinstance(model, fxshard.FxshardModule if by == "fxshard" else FSDPModule)
        losses, norms = [], []

        def micro_batch(tokens: Tensor) -> None:
            with made.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                made.backward(loss)
                losses.append(loss.item())
                if made.sync_gradients:
                    norm: Any = made.clip_grad_norm_(model.parameters(), 0.5)
                    norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        batches = list(loader)
        for tokens in batches[:4]:
            micro_batch(tokens)
        made.save_state(str(here))
        for tokens in batches[4:] * 2:
            if len(losses) == 6:
                made.load_state(str(here))
            micro_batch(tokens)
        state: dict[str, Tensor] = made.get_state_dict(model)
        unwrapped = made.unwrap_model(model)
        unwrapped.save_pretrained(
            here / "saved", is_main_process=made.is_main_process, state_dict=dict(state)
        )
        made.wait_for_everyone()
        return {"losses": losses, "norms": norms, "state": state, "same": unwrapped is model}


def both(
    pool: Ranks, folder: Path, fsdp: dict[str, Any], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each rank found with fxshard, after comparing it bitwise with torch's FSDP2."""
    torchs, ours = (
        pool.run(trained, by, str(folder), fsdp, options) for by in ("torch", "fxshard")
    )
    for wanted, got in zip(torchs, ours, strict=True):
        assert got["losses"] == wanted["losses"] and got["norms"] == wanted["norms"]
        assert got["losses"][4:6] == got["losses"][6:8], "resumed"
        assert got["same"] and wanted["same"]
    assert ours[0]["losses"] != ours[1]["losses"], "each rank has its own batches"
    assert list(ours[0]["state"]) == list(torchs[0]["state"])
    for fqn, value in torchs[0]["state"].items():
        assert torch.equal(ours[0]["state"][fqn], value), fqn
    back = LlamaForCausalLM.from_pretrained(folder / "fxshard" / "saved").state_dict()
    assert all(torch.equal(value, ours[0]["state"][fqn]) for fqn, value in back.items())
    return ours


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_loop(ranks: Pools, precision: str, tmp_path: Path) -> None:
    """Losses, norms, checkpoints and what is exported are bitwise those with torch's own."""
    both(ranks(2), tmp_path, {}, {"mixed_precision": precision})


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hybrid": ({}, {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}}),
    "sharded checkpoints": ({"state_dict_type": "SHARDED_STATE_DICT"}, {}),
    "rank 0 loads": ({"cpu_ram_efficient_loading": True}, {}),
    "activation_checkpointing": ({"activation_checkpointing": True}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(OTHERS))
def test_other_settings(ranks: Pools, case: str, tmp_path: Path) -> None:
    fsdp, options = OTHERS[case]
    both(ranks(4 if case == "hybrid" else 2), tmp_path, fsdp, options)


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What each wish is answered by; and nothing is left of a refused Accelerator."""

    def made(**options: Any) -> Accelerator:
        options.setdefault("fsdp_plugin", plugin())
        return Accelerator(**{"cpu": True, **options})

    def late() -> None:
        made()
        integration.disable()
        integration.enable()

    ahead = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
    wishes: dict[str, Callable[[], Any]] = {
        "alone": lambda: made(cpu=False),
        "ddp": lambda: made(fsdp_plugin=None),
        "version": lambda: made(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1)),
        "host": lambda: made(fsdp_plugin=plugin(**ahead)),
        "compile": lambda: made(dynamo_plugin=TorchDynamoPlugin(backend="inductor")),
        "context": lambda: made(parallelism_config=ParallelismConfig(cp_size=2)),
        "late": late,
    }
    found = {}
    for name, wish in wishes.items():
        with accelerating(rank, world_size, "fxshard"):
            found[name] = told(wish)
    return found


def test_what_cannot_be_is_refused_with_what_to_do(ranks: Pools) -> None:
    said = ranks(2).run(refused)[0]
    for name, words in {
        "alone": "2 processes (WORLD_SIZE) train, each by itself. On the CPU: Accelerator(cpu=",
        "ddp": "is to train by MULTI_CPU. Turn FSDP2 on: TrainingArguments(fsdp=True)",
        "version": "fsdp_version is 1. Set it to 2",
        "host": "activation_checkpointing_offload is on",
        "compile": "torch.compile is on (INDUCTOR). fxshard compiles the model itself: leave",
        "context": "cp_size=2, sp_size=1: only dp_shard_size and dp_replicate_size",
        "late": "Call enable() before it",
    }.items():
        assert said[name].startswith("ConfigError: ") and words in said[name], said[name]


def test_enabled_and_disabled_again() -> None:
    from accelerate import accelerator, state

    state.AcceleratorState._reset_state(True)  # another test's Accelerator in this process
    before = accelerator.fsdp2_prepare_model, torch.distributed.fsdp.register_fsdp_forward_method
    integration.enable()
    integration.enable()
    assert integration.is_enabled() and accelerator.fsdp2_prepare_model is not before[0]
    integration.disable()
    after = accelerator.fsdp2_prepare_model, torch.distributed.fsdp.register_fsdp_forward_method
    assert after == before and not integration.is_enabled()
    assert after[1] is register_fsdp_forward_method
