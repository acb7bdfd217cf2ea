"""Trainings by transformers' Trainer, sharded by fxshard or by torch's FSDP2."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    T5Config,
    Trainer,
)

import fxshard
from tests.integrations.accelerating import accelerating
from tests.tiny import VOCABULARY, llama, tokens, training


def gpt2() -> Any:
    """Its embedding and its head are tied; with dropout."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    return AutoModelForCausalLM.from_config(config)


def bert() -> Any:
    """It classifies sequences, with dropout."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return AutoModelForSequenceClassification.from_config(config)


def t5() -> Any:
    """Its encoder, its decoder and its head share a parameter."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_ff=16,
        d_kv=4,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return AutoModelForSeq2SeqLM.from_config(config)


def deeper_llama() -> Any:
    return llama(layers=2)


MODELS = {made.__name__: made for made in (llama, deeper_llama, gpt2, bert, t5)}


def trainer(name: str, folder: Path, **options: Any) -> Trainer:
    """Of a small model and 16 sequences of 6 tokens; it logs every step."""
    torch.manual_seed(0)
    model = MODELS[name]()
    data = [
        {"input_ids": (ids := tokens(i, 6)), "labels": ids[0] % 2 if name == "bert" else ids}
        for i in range(16)
    ]
    chosen: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"version": 2},
        "max_steps": 4,
    }
    args = training(folder, **chosen | options)
    return Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:5])


SAID = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "step")


def logged(made: Trainer) -> list[dict[str, float]]:
    """What it logged, without times."""
    return [{k: each[k] for k in SAID if k in each} for each in made.state.log_history]


def by_whom(made: Trainer) -> str:
    return "fxshard" if isinstance(made.model, fxshard.FxshardModule) else "torch"


def trained(
    rank: int, world_size: int, by: str, name: str, folder: str, options: dict[str, Any]
) -> dict[str, Any]:
    """A training, an evaluation, predictions, an export."""
    with accelerating(rank, world_size, by):
        made = trainer(name, Path(folder, by), **options)
        made.train()
        assert by_whom(made) == by
        data = made.eval_dataset
        found: dict[str, Any] = {
            "log": logged(made),
            "evaluated": made.evaluate()["eval_loss"],
            "predicted": made.predict(data).predictions,
            "best": made.state.best_model_checkpoint,
        }
        if by == "fxshard":
            assert made.model.memory.peak_bytes > 0
            found["programs"] = len(list(made.model._fxshard.variants))
        made.save_model()
        if hasattr(made.model, "generate") and name != "bert":
            more = rank if by == "fxshard" else 0  # with FSDP2 all ranks must go equally far
            greedy = {"max_new_tokens": 2 + more, "do_sample": False}
            found["generated"] = made.model.generate(tokens(rank, 1, 4), **greedy)
        return found


def resumed(
    rank: int, world_size: int, by: str, name: str, checkpoint: str, options: dict[str, Any]
) -> list[dict[str, float]]:
    """The log of a training that goes on from a checkpoint, which is left as it is."""
    own = Path(checkpoint).parents[1] / f"{by}-{world_size}"
    with accelerating(rank, world_size, by):
        made = trainer(name, own, **options)
        made.train(resume_from_checkpoint=checkpoint)
        assert by_whom(made) == by
    return logged(made)
