"""Models that `from_pretrained` shards as it loads them, by fxshard and by torch's FSDP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer
from transformers.distributed import DistributedConfig

import fxshard
import fxshard.integrations.transformers as integration
from tests.fsdp2 import full
from tests.integrations.accelerating import accelerating
from tests.integrations.trainer_cases import logged
from tests.ranks import Ranks
from tests.tiny import VOCABULARY, llama, tokens, training

Pools = Callable[[int], Ranks]


def loaded(folder: str, **sizes: Any) -> Any:
    config = DistributedConfig(**{"fsdp_size": 2, **sizes})
    return LlamaForCausalLM.from_pretrained(f"{folder}/saved", distributed_config=config)


def in_a_loop(rank: int, world_size: int, folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """With torch's FSDP2 and with fxshard: losses, a generation, what is saved and read again."""
    found: dict[str, Any] = {}
    with accelerating(rank, world_size, "torch"):  # the environment
        for by in ("torch", "fxshard"):
            if by == "fxshard":
                integration.enable()
            model = loaded(folder, **sizes)
            integration.disable()
            assert isinstance(model, fxshard.FxshardModule) == (by == "fxshard")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for step in range(3):
                ids = tokens(10 * step + rank, 2, 6)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            model.save_pretrained(f"{folder}/{by}")
            back = LlamaForCausalLM.from_pretrained(f"{folder}/{by}")
            text = model.generate(tokens(rank, 1, 4), max_new_tokens=2, do_sample=False)
            found[by] = losses, text.tolist(), [t.tolist() for t in back.state_dict().values()]
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"fsdp_mixed_precision": True},
    "hybrid": {"dp_replicate_size": 2},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(CASES))
def test_sharded_as_it_is_loaded(ranks: Pools, tmp_path: Path, case: str) -> None:
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "saved")
    answers = ranks(4 if case == "hybrid" else 2).run(in_a_loop, str(tmp_path), CASES[case])
    for found in answers:
        assert found["fxshard"] == found["torch"]
    assert answers[0]["fxshard"][0] != answers[1]["fxshard"][0], "batches differ"


def in_a_trainer(rank: int, world_size: int, folder: str) -> list[Any]:
    found = []
    data = [{"input_ids": (ids := tokens(i, 6)), "labels": ids} for i in range(16)]
    for by in ("torch", "fxshard"):
        with accelerating(rank, world_size, "torch"):
            if by == "fxshard":
                integration.enable()
            clipped = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
            args = training(f"{folder}/{by}", max_steps=3, **clipped)
            model = loaded(folder)
            made = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])
            made.train()
            assert isinstance(made.model, fxshard.FxshardModule) == (by == "fxshard")
            evaluated = made.evaluate()["eval_loss"]
            made.save_model()
            back = LlamaForCausalLM.from_pretrained(f"{folder}/{by}").state_dict()
            found.append((logged(made), evaluated, [t.tolist() for t in back.values()]))
            integration.disable()
    return found


@pytest.mark.slow
def test_a_trainer_around_it(ranks: Pools, tmp_path: Path) -> None:
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "saved")
    for torchs, ours in ranks(2).run(in_a_trainer, str(tmp_path)):
        assert ours == torchs


def with_tensor_parallelism(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """With torch's FSDP2 and with fxshard, after transformers' own plan of tensor parallelism."""
    found: dict[str, Any] = {}
    with accelerating(rank, world_size, "torch"):
        for by in ("torch", "fxshard"):
            if by == "fxshard":
                integration.enable()
            model = loaded(folder, tp_size=2)
            integration.disable()
            assert isinstance(model, fxshard.FxshardModule) == (by == "fxshard")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for step in range(3):
                ids = tokens(10 * step + rank // 2, 2, 6)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            parameters = model.named_parameters()
            found[by] = losses, {name: full(param).tolist() for name, param in parameters}
    return found


@pytest.mark.slow
def test_tensor_parallelism_as_transformers_plans_it(ranks: Pools, tmp_path: Path) -> None:
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "saved")
    answers = ranks(4).run(with_tensor_parallelism, str(tmp_path))
    for found in answers:
        assert found["fxshard"] == found["torch"]
    assert answers[0]["fxshard"][0] != answers[2]["fxshard"][0], "batches differ"


def with_expert_parallelism(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """With torch's FSDP2 and with fxshard, experts as transformers' own plan spreads them."""
    found: dict[str, Any] = {}
    config = DistributedConfig(fsdp_size=world_size, ep_size=2)
    with accelerating(rank, world_size, "torch"):
        for by in ("torch", "fxshard"):
            if by == "fxshard":
                integration.enable()
            model: Any = Qwen3MoeForCausalLM.from_pretrained(
                f"{folder}/saved", distributed_config=config
            )
            integration.disable()
            assert isinstance(model, fxshard.FxshardModule) == (by == "fxshard")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for step in range(3):
                ids = tokens(10 * step + rank, 2, 6)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            model.save_pretrained(f"{folder}/{by}")
            back = Qwen3MoeForCausalLM.from_pretrained(f"{folder}/{by}").state_dict()
            parameters = {name: full(param).tolist() for name, param in model.named_parameters()}
            found[by] = losses, parameters, {name: t.tolist() for name, t in back.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_expert_parallelism_as_transformers_plans_it(
    ranks: Pools, tmp_path: Path, count: int
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = Qwen3MoeConfig(**sizes, **heads, **experts, num_hidden_layers=2)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "saved")
    answers = ranks(count).run(with_expert_parallelism, str(tmp_path))
    for found in answers:
        assert found["fxshard"] == found["torch"]
    assert answers[0]["fxshard"][0] != answers[1]["fxshard"][0], "batches differ"
