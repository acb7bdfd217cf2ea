"""Batches for the models of Hugging Face transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.zoo import Batch, _generator, float_batch
from tests.zoo import labelled_token_batch as labelled


def image_batch(rank: int, step: int, *, shape: tuple[int, ...], classes: int) -> Batch:
    """Normal fp32 `pixel_values` and int64 `labels`, as keywords."""
    (pixels,), _ = float_batch(rank, step, shape=shape)
    labels = torch.randint(classes, shape[:1], generator=_generator(rank, step))
    return (), {"pixel_values": pixels, "labels": labels}


def translation_batch(rank: int, step: int, *, vocab: int) -> Batch:
    """Padded int64 tokens with their mask, and shorter labels, as keywords."""
    _, source = labelled(rank, step, vocab=vocab, shape=(2, 8))
    _, target = labelled(rank, step + 1, vocab=vocab, shape=(2, 6))
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    source |= {"attention_mask": mask, "labels": target["labels"]}
    return (), source


def speech_batch(rank: int, step: int, *, labels: list[Any]) -> Batch:
    """fp32 `input_values` (2, 400), a wave form, and `labels`."""
    (wave,), _ = float_batch(rank, step, shape=(2, 400))
    return (), {"input_values": wave, "labels": torch.tensor(labels)}


def spectrum_batch(rank: int, step: int, *, name: str, shape: tuple[int, ...]) -> Batch:
    """fp32 features called `name`, and tokens as labels."""
    (features,), _ = float_batch(rank, step, shape=shape)
    return (), {name: features, "labels": labelled(rank, step, vocab=64)[1]["labels"]}


def spectrogram_batch(rank: int, step: int) -> Batch:
    """fp32 `input_values` (2, 16, 8), a spectrogram, and `labels` (2,)."""
    (values,), _ = float_batch(rank, step, shape=(2, 16, 8))
    return (), {"input_values": values, "labels": torch.tensor([0, 1])}


def pixels_only(rank: int, step: int) -> Batch:
    """fp32 `pixel_values` (2, 3, 8, 8)."""
    return (), {"pixel_values": float_batch(rank, step, shape=(2, 3, 8, 8))[0][0]}


def segmentation_batch(rank: int, step: int) -> Batch:
    """fp32 `pixel_values` (2, 3, 32, 32) and a class of each pixel."""
    (pixels,), _ = float_batch(rank, step, shape=(2, 3, 32, 32))
    labels = torch.randint(10, (2, 32, 32), generator=_generator(rank, step))
    return (), {"pixel_values": pixels, "labels": labels}


def pairs_batch(rank: int, step: int) -> Batch:
    """int64 `input_ids` (2, 8) and fp32 `pixel_values` (2, 3, 8, 8) that belong together."""
    tokens = labelled(rank, step, vocab=64)[1]["input_ids"]
    return (), {"input_ids": tokens, "return_loss": True, **pixels_only(rank, step)[1]}


def captions_batch(rank: int, step: int) -> Batch:
    """int64 `input_ids` (2, 8), four of which are those of an image, that image, and `labels`."""
    tokens = torch.randint(59, (2, 8), generator=_generator(rank, step))
    tokens[:, 1:5] = 60
    return (), {"input_ids": tokens, "labels": tokens.clone(), **pixels_only(rank, step)[1]}


TOKENS = partial(labelled, vocab=64)
TRANSLATION = partial(translation_batch, vocab=64)
CLASSIFIED = partial(speech_batch, labels=[0, 1])


def images(size: int) -> Callable[[int, int], Batch]:
    """Two images of `size` x `size` pixels."""
    return partial(image_batch, shape=(2, 3, size, size), classes=10)
