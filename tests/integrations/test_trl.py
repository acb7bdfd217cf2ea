"""TRL's trainers around models that fxshard shards, beside the same with torch's FSDP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import fxshard
from tests.integrations.accelerating import accelerating
from tests.ranks import Ranks
from tests.tiny import QUIET, VOCABULARY, llama

Pools = Callable[[int], Ranks]

TIMES = ("runtime", "time", "per_second")  # in the names of what differs from run to run
SETTINGS: dict[str, Any] = {
    "fsdp": True,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    **QUIET,
}


def tokenizer() -> Any:
    """Of words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(2, VOCABULARY)} | {"<pad>": 0, "<eos>": 1}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def text(seed: int, length: int) -> str:
    return " ".join(f"w{2 + (7 * seed + j) % 30}" for j in range(length))


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(target_modules=["q_proj", "v_proj"])


def supervised(folder: Path, with_adapters: bool) -> Any:
    """On texts of different lengths."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [text(i, 3 + i % 4) for i in range(16)]
    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    return SFTTrainer(
        model=llama(),
        args=SFTConfig(str(folder), **SETTINGS | saves),
        train_dataset=Dataset.from_dict({"text": texts}),
        eval_dataset=Dataset.from_dict({"text": texts[:5]}),
        processing_class=tokenizer(),
        peft_config=adapters() if with_adapters else None,
    )


def preferring(folder: Path, with_adapters: bool) -> Any:
    """By DPO; the reference is a model of its own, or the same one without its adapters."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = {
        "prompt": [text(i, 2 + i % 3) for i in range(16)],
        "chosen": [" " + text(i + 3, 2 + i % 2) for i in range(16)],
        "rejected": [" " + text(i + 9, 3 - i % 2) for i in range(16)],
    }
    model, reference = llama(), llama()
    reference.load_state_dict(model.state_dict())
    return DPOTrainer(
        model=model,
        ref_model=None if with_adapters else reference,
        args=DPOConfig(str(folder), **SETTINGS),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        peft_config=adapters() if with_adapters else None,
    )


def judged(completions: list[str], **_: Any) -> list[float]:
    return [len(each.split()) + 0.1 * (sum(map(ord, each)) % 7) for each in completions]


def reinforced(folder: Path, with_reference: bool) -> Any:
    """By GRPO, which generates with the model that it trains."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = folder.with_name("model")  # the reference is loaded from where the model is
    options = {"beta": 0.1 if with_reference else 0.0, "num_generations": 2}
    return GRPOTrainer(
        model=str(model),
        reward_funcs=judged,
        args=GRPOConfig(str(folder), max_completion_length=5, **SETTINGS | options),
        train_dataset=Dataset.from_dict({"prompt": [text(i, 2 + i % 3) for i in range(16)]}),
        processing_class=tokenizer(),
    )


def rewarding(folder: Path, _: bool) -> Any:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    data = {
        "chosen": [text(i + 3, 3 + i % 2) for i in range(16)],
        "rejected": [text(i + 9, 4 - i % 2) for i in range(16)],
    }
    config = llama().config
    config.num_labels, config.pad_token_id = 1, 0
    return RewardTrainer(
        model=AutoModelForSequenceClassification.from_config(config),
        args=RewardConfig(str(folder), **SETTINGS),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
    )


def trained(
    rank: int, world_size: int, by: str, make: Callable[..., Any], folder: str, option: bool
) -> tuple[list[dict[str, float]], int]:
    """The log of a training, and how many programs there are."""
    with accelerating(rank, world_size, by):
        torch.manual_seed(0)
        made = make(Path(folder, by), option)
        architectures = made.model.config.architectures
        torch.manual_seed(rank)  # GRPO samples
        made.train()
        assert isinstance(made.model, fxshard.FxshardModule) == (by == "fxshard")
        made.save_model()
        assert made.model.config.architectures == architectures or not option, "as its user left it"
        programs = len(made.model._fxshard.variants) if by == "fxshard" else 0
    said = [
        {k: v for k, v in each.items() if not any(word in k for word in TIMES)}
        for each in made.state.log_history
    ]
    return said, programs


def both(pool: Ranks, make: Callable[..., Any], folder: Path, option: bool) -> tuple[Any, int]:
    """The log and how many programs there are, after comparing with torch's FSDP2, bitwise."""
    wanted, got = (pool.run(trained, by, make, str(folder), option) for by in ("torch", "fxshard"))
    assert [log for log, _ in got] == [log for log, _ in wanted]
    saved = [next((folder / by).glob("*model.safetensors")) for by in ("torch", "fxshard")]
    theirs, mine = map(load_file, saved)
    assert list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)
    log, programs = got[0]
    return log, max(programs, got[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("with_adapters", [False, True], ids=["all", "lora"])
def test_sft(ranks: Pools, tmp_path: Path, with_adapters: bool) -> None:
    log, _ = both(ranks(2), supervised, tmp_path, with_adapters)
    assert "mean_token_accuracy" in log[0] and any("eval_loss" in each for each in log)
    if not with_adapters:
        AutoModelForCausalLM.from_pretrained(tmp_path / "fxshard")


@pytest.mark.slow
@pytest.mark.parametrize("with_adapters", [False, True], ids=["all", "lora"])
def test_dpo(ranks: Pools, tmp_path: Path, with_adapters: bool) -> None:
    """It turns checkpointing off and on around the reference's forward: that makes no programs.

    One starts at the loss, which DPO never asks for, one at log probabilities, one is the
    reference's where it is the same model; and as many for sequences of other lengths.
    """
    log, programs = both(ranks(2), preferring, tmp_path, with_adapters)
    assert log[1]["rewards/margins"] != 0 and log[0]["grad_norm"] > 0
    assert programs <= (6 if with_adapters else 4)


@pytest.mark.slow
@pytest.mark.parametrize("with_reference", [False, True], ids=["alone", "beside a reference"])
def test_grpo(ranks: Pools, tmp_path: Path, with_reference: bool) -> None:
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "model")
    log, programs = both(ranks(2), reinforced, tmp_path, with_reference)
    assert ("kl" in log[0]) == with_reference and log[0]["grad_norm"] > 0
    assert log[0]["completions/mean_length"] > 0 and programs <= 4


@pytest.mark.slow
def test_rewards(ranks: Pools, tmp_path: Path) -> None:
    log, _ = both(ranks(2), rewarding, tmp_path, False)
    assert "margin" in log[0]
