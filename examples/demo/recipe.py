"""What is trained: the settings, and the model and the optimizer that follow from them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn

from fxshard.errors import ConfigError

HEADS = 8  # of attention; half as many for keys and values


def _setting(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `python -m examples.demo` can be told. Every process of a run has the same."""

    out: str = _setting("runs/demo", "folder for all results")
    ranks: int = _setting(2, "processes to shard over")
    steps: int = _setting(140, "optimizer steps")
    compared: int = _setting(5, "of these, steps beside FSDP2 and beside one plain process")
    layers: int = _setting(4, "decoder layers")
    hidden: int = _setting(320, f"hidden size, a multiple of {2 * HEADS}")
    batch: int = _setting(8, "sequences per rank and step")
    seq: int = _setting(128, "bytes per sequence")
    lr: float = _setting(1e-3, "learning rate of AdamW")
    seed: int = _setting(0, "of weights and batches")
    target: float = _setting(4.0, "bits per byte that the validation loss must get below")

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "compared", "layers", "hidden", "batch", "seq"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 1 or more.")
        for name in ("lr", "target"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a finite number > 0.")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: expected 0 or more.")
        if self.hidden % (2 * HEADS):
            raise ConfigError(f"hidden={self.hidden}: expected a multiple of {2 * HEADS}.")

    @classmethod
    def load(cls, file: Path) -> Settings:
        """Read what `save` wrote.

        Raises:
            ConfigError: it is not that any more.
        """
        try:
            return cls(**json.loads(file.read_text("utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{file}: no settings of a run: {error}.") from error

    def save(self, file: Path) -> None:
        """Write all settings as JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", "utf-8")

    def build_model(self) -> nn.Module:
        """A Llama over bytes with grouped-query attention; random weights, equal everywhere.

        Raises:
            ConfigError: transformers is not installed.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise ConfigError("the demo needs transformers: pip install 'fxshard[hf]'.") from error
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=self.hidden,
                intermediate_size=3 * self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS // 2,
                max_position_embeddings=self.seq,
                initializer_range=0.04,  # a narrow model learns faster than from the usual 0.02
                use_cache=False,
            )
        )

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW over `params`."""
        return torch.optim.AdamW(params, lr=self.lr, betas=(0.9, 0.95))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[dict[str, Any]]
) -> torch.Tensor:
    """One optimizer step on the mean loss of `batches`. Leaves the gradients for who compares."""
    optimizer.zero_grad()
    loss = torch.stack([model(**batch).loss for batch in batches]).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def checkpoint_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds, by FQN: of a sharded model DTensors, of a plain one tensors."""
    weights, state = dcp_state.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}
