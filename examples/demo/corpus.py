"""The text: the source files of this machine's Python standard library, as bytes."""

from __future__ import annotations

import dataclasses
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.demo.recipe import Settings
from fxshard.errors import ConfigError

HELD_OUT = 10  # every tenth file is for validation
VALIDATION_BATCHES = 4  # per rank

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text in two parts that share no file.

    Attributes:
        train, validation: uint8 [bytes].
        train_files, validation_files: how many files they were read from.
    """

    train: Tensor
    validation: Tensor
    train_files: int
    validation_files: int

    def training_batch(self, settings: Settings, rank: int, step: int) -> Batch:
        """One rank's part of a global batch: sequences from random places, always the same."""
        number = 1_000_000 * settings.seed + settings.ranks * step + rank
        places = torch.randint(
            len(self.train) - settings.seq,
            (settings.batch,),
            generator=torch.Generator().manual_seed(number),
        )
        return _batch(self.train, places.tolist(), settings.seq)

    def validation_batches(self, settings: Settings) -> list[Batch]:
        """All validation batches, of sequences at even distances; rank r evaluates [r::ranks]."""
        count = VALIDATION_BATCHES * settings.ranks
        last = len(self.validation) - settings.seq
        places = torch.linspace(0, last, count * settings.batch, dtype=torch.float64).long()
        return [
            _batch(self.validation, chunk.tolist(), settings.seq) for chunk in places.chunk(count)
        ]


def read_corpus() -> Corpus:
    """Read every source file of the standard library, in the order of their names.

    Raises:
        ConfigError: this Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [f.relative_to(root).as_posix() for f in root.rglob("*.py")]
    files = sorted(name for name in files if "-packages/" not in name)
    if len(files) < HELD_OUT:
        raise ConfigError(f"{root} has {len(files)} Python source files: too few to train on.")
    held_out = files[::HELD_OUT]
    kept = sorted(set(files) - set(held_out))
    return Corpus(_bytes(root, kept), _bytes(root, held_out), len(kept), len(held_out))


@torch.no_grad()
def mean_bits_per_byte(model: nn.Module, batches: list[Batch]) -> float:
    """Mean over `batches` of the loss in evaluation mode: -log2 of the chance of the next byte."""
    model.eval()
    losses = [model(**batch).loss.item() for batch in batches]
    model.train()
    return bits(sum(losses) / len(losses))


def bits(nats: float) -> float:
    """A loss in bits."""
    return nats / math.log(2)


def _bytes(root: Path, names: list[str]) -> Tensor:
    text = bytearray().join((root / name).read_bytes() for name in names)
    return torch.frombuffer(text, dtype=torch.uint8)


def _batch(text: Tensor, places: list[int], seq: int) -> Batch:
    """Sequences as inputs and as labels (transformers shifts them); int64 [batch, seq]."""
    tokens = torch.stack([text[at : at + seq] for at in places]).long()
    return {"input_ids": tokens, "labels": tokens}
