"""Hugging Face's Trainer and PEFT around a compiled model, and around the model itself."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import LlamaForCausalLM, Trainer

import fxshard
from tests.fsdp2 import full
from tests.tiny import llama, tokens, training


def trained(model: nn.Module, folder: Path) -> tuple[list[dict[str, float]], Trainer]:
    """What the trainer logs: losses, norms of gradients, evaluations."""
    data = [{"input_ids": (ids := tokens(i, 6)), "labels": ids} for i in range(8)]
    clipped = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    options = training(folder, max_steps=2, eval_strategy="steps", eval_steps=2, **clipped)
    trainer = Trainer(model=model, args=options, train_dataset=data, eval_dataset=data[:2])
    trainer.train()
    said = ("loss", "grad_norm", "eval_loss", "train_loss")
    return [{k: each[k] for k in said if k in each} for each in trainer.state.log_history], trainer


def test_a_trainer_in_one_process_logs_what_it_logs_of_the_model_itself(tmp_path: Path) -> None:
    model = llama()
    wanted, _ = trained(copy.deepcopy(model), tmp_path)
    ours = fxshard.compile(model, world_size=2)
    got, trainer = trained(ours, tmp_path)
    assert len(got) == 4
    assert_close(got, wanted)
    trainer.save_model(str(tmp_path / "saved"))
    back = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    for (name, param), mine in zip(back.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(param, full(mine)), name


def low_rank(rank: int, world_size: int, folder: str) -> None:
    """PEFT's defaults: adapters in fp32 on a base in bf16 that is frozen."""
    base = llama().bfloat16()
    eager: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"]))
    ours: Any = fxshard.compile(copy.deepcopy(eager))
    optimizers = [
        torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        for model in (eager, ours)
    ]
    for step in range(2):
        batches = [tokens(10 * step + each, 2, 6) for each in range(world_size)]
        losses = []
        for model, ids in ((eager, torch.cat(batches)), (ours, batches[rank])):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        assert_close(losses[1] / world_size, losses[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, wanted), param in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert_close(full(param), wanted.detach(), msg=lambda m, name=name: f"{name}: {m}")
    ids = tokens(rank, 1, 4)
    greedy = {"input_ids": ids, "max_new_tokens": 2, "do_sample": False}
    assert torch.equal(ours.generate(**greedy), eager.generate(**greedy))
    ours.save_pretrained(f"{folder}/{rank}")
    back = PeftModel.from_pretrained(llama().bfloat16(), f"{folder}/{rank}")
    for (name, param), mine in zip(back.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(param, full(mine)), name


def test_adapters_train_generate_and_are_saved_on_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(low_rank, str(tmp_path))


def saved_by_one(rank: int, world_size: int, folder: str) -> None:
    ours: Any = fxshard.compile(llama())
    whole = {fqn: full(each).clone() for fqn, each in ours.state_dict().items()}
    if rank == 0:
        ours.save_pretrained(folder, state_dict=dict(whole))
    dist.barrier()
    back = LlamaForCausalLM.from_pretrained(folder)
    assert back.config.architectures == ["LlamaForCausalLM"]
    assert type(ours) is not LlamaForCausalLM
    for fqn, value in back.state_dict().items():
        assert torch.equal(value, whole[fqn]), fqn


def test_one_rank_saves_a_state_that_it_has(ranks: Any, tmp_path: Path) -> None:
    """``save_pretrained`` with a state reads no parameter: it waits for no other rank."""
    ranks(2).run(saved_by_one, str(tmp_path))
