"""TRL's SFTTrainer around models that fxshard shards, beside the same with torch's FSDP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fxshard
from tests.integrations.accelerating import accelerating
from tests.ranks import Ranks
from tests.tiny import QUIET, VOCABULARY, llama

Pools = Callable[[int], Ranks]

SAID = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss")


def tokenizer() -> Any:
    """Of words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(2, VOCABULARY)} | {"<pad>": 0, "<eos>": 1}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def trained(
    rank: int, world_size: int, by: str, folder: str, adapters: bool
) -> list[dict[str, float]]:
    """The log of a training on texts of different lengths."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(f"w{2 + (7 * i + j) % 30}" for j in range(3 + i % 4)) for i in range(16)]
    with accelerating(rank, world_size, by):
        args = SFTConfig(
            str(Path(folder, by)),
            fsdp=True,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            **QUIET,
        )
        torch.manual_seed(0)
        made = SFTTrainer(
            model=llama(),
            args=args,
            train_dataset=Dataset.from_dict({"text": texts}),
            eval_dataset=Dataset.from_dict({"text": texts[:5]}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]) if adapters else None,
        )
        made.train()
        assert isinstance(made.model, fxshard.FxshardModule) == (by == "fxshard")
        made.save_model()
        assert not adapters or made.model.config.architectures is None, "as its user left it"
        return [{k: each[k] for k in SAID if k in each} for each in made.state.log_history]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["all", "lora"])
def test_sft(ranks: Pools, tmp_path: Path, adapters: bool) -> None:
    wanted, got = (
        ranks(2).run(trained, by, str(tmp_path), adapters) for by in ("torch", "fxshard")
    )
    assert got == wanted and "mean_token_accuracy" in got[0][0]
    if not adapters:
        saved = [AutoModelForCausalLM.from_pretrained(tmp_path / by) for by in ("torch", "fxshard")]
        for theirs, mine in zip(*(each.named_parameters() for each in saved), strict=True):
            assert mine[0] == theirs[0] and torch.equal(mine[1], theirs[1])
        return
    from safetensors.torch import load_file

    theirs, mine = (
        load_file(tmp_path / by / "adapter_model.safetensors") for by in ("torch", "fxshard")
    )
    assert list(mine) == list(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)
