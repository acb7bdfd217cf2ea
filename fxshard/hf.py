"""Everything that fxshard knows about Hugging Face transformers, in one place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from fxshard.errors import CaptureError


@contextlib.contextmanager
def eager_attention_branch() -> Iterator[None]:
    """While tracing, let transformers take the branch that it takes in eager mode.

    Under a trace it cannot look into ``position_ids`` for packed sequences, assumes the worst and
    builds an explicit mask in place of SDPA's ``is_causal``: other bytes and other rounding
    (transformers/masking_utils.py, ``find_packed_sequence_indices``). The batch is taken as
    unpacked; `refuse_packed` guards that.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or original is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original  # type: ignore[attr-defined]


def refuse_packed(model: object, kwargs: Mapping[str, Any]) -> None:
    """Raise CaptureError for a call from which transformers would infer packed sequences."""
    if not type(model).__module__.startswith("transformers."):
        return
    if kwargs.get("position_ids") is not None and kwargs.get("attention_mask") is None:
        raise CaptureError(
            "position_ids without attention_mask: transformers would look into their values for "
            "packed sequences, which a traced program cannot. Drop position_ids if the sequences "
            "are not packed, or pass an attention_mask."
        )
