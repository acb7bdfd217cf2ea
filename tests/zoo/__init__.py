"""Models as data: a test takes its models from `MODELS`, and a new model is one entry there."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import models

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model with its data. Picklable: its callables are module-level functions or partials."""

    name: str
    build: Callable[[], nn.Module]  # deterministic after torch.manual_seed
    batch: Callable[[int, int], Batch]  # (rank, step) -> (args, kwargs)
    loss: Callable[[Any], Tensor]  # model output -> scalar
    units: list[str] | None = None  # FQN globs of the units besides the root; "*" stops at a dot
    dropout: bool = False  # random numbers in the forward
    batch_norm: bool = False  # a step depends on how the global batch is split over ranks


def built(case: Case) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model of a case from seed 0, and the first batch of rank 0."""
    torch.manual_seed(0)
    return case.build(), *case.batch(0, 0)


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def token_batch(rank: int, step: int, *, vocab: int, shape: tuple[int, int] = (2, 8)) -> Batch:
    """int64 tokens of `shape` (batch, seq), the one positional argument."""
    return (torch.randint(vocab, shape, generator=_generator(rank, step)),), {}


def labelled_token_batch(
    rank: int, step: int, *, vocab: int, shape: tuple[int, int] = (2, 8)
) -> Batch:
    """The same tokens as keywords `input_ids` and `labels` (Hugging Face shifts them itself)."""
    (tokens,), _ = token_batch(rank, step, vocab=vocab, shape=shape)
    return (), {"input_ids": tokens, "labels": tokens.clone()}


def float_batch(rank: int, step: int, *, shape: tuple[int, ...]) -> Batch:
    """Normal fp32 numbers of `shape`, the one positional argument."""
    return (torch.randn(shape, generator=_generator(rank, step)),), {}


def cross_entropy(logits: Tensor) -> Tensor:
    """Mean cross entropy of (..., classes) against targets 0, 1, 2, ... modulo classes, row by row.

    The targets come from the shape alone, so that a loss needs nothing but the model's output.
    """
    rows = logits.flatten(0, -2)
    return F.cross_entropy(rows, torch.arange(len(rows), device=rows.device) % rows.shape[1])


def output_loss(output: Any) -> Tensor:
    """The scalar that the model itself returned."""
    return output.loss


MODELS: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "transformer",
            build=models.Transformer,
            batch=partial(token_batch, vocab=64),
            loss=cross_entropy,
            units=["layers.*"],
        ),
        Case(
            "llama",
            build=models.llama,
            batch=partial(labelled_token_batch, vocab=128),
            loss=output_loss,
            units=["model.layers.*"],
        ),
        Case(
            "tied",
            build=partial(models.Transformer, depth=2, tied=True),
            batch=partial(token_batch, vocab=64),
            loss=cross_entropy,
            units=["layers.*"],
        ),
        Case(
            "mlp13",
            build=models.Mlp13,
            batch=partial(float_batch, shape=(4, 5)),
            loss=cross_entropy,
            units=["blocks.*"],
        ),
        Case(
            "convnet",
            build=models.ConvNet,
            batch=partial(float_batch, shape=(4, 3, 8, 8)),
            loss=cross_entropy,
            units=["blocks.*"],
            batch_norm=True,
        ),
        Case(
            "dropout",
            build=partial(models.Transformer, dropout=0.1),
            batch=partial(token_batch, vocab=64),
            loss=cross_entropy,
            units=["layers.*"],
            dropout=True,
        ),
    )
}
