"""Architectures of Hugging Face transformers, as a table: one row is one model class.

Each is a tiny one of its real class with random weights, made from its configuration: nothing is
downloaded. What a row does not say is the class's own default, `use_cache` and the implementations
of attention and experts among them: that is what users call.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from tests.zoo import Batch, Case, _generator, float_batch, output_loss
from tests.zoo import labelled_token_batch as labelled
from tests.zoo.more import DECODER, image_batch, translation_batch


def hf(name: str, **config: Any) -> nn.Module:
    """The model of class `name`, in training mode, fp32."""
    import transformers  # 2 s, so only for those who build it

    cls = getattr(transformers, name)
    return cls(cls.config_class(**config)).train()


ENCODER: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
IMAGES: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=8,
    patch_size=4,
    num_labels=10,
)
