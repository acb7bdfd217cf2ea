"""Lengths that grow: how much of a model is traced for them, and how many programs there are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import fxshard

OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
SIZES = {"n_head": 2, "n_embd": 16, "vocab_size": 37, "n_positions": 32}


def gpt2(layers: int) -> Any:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, **SIZES, **OFF, **ends))


def compiled(layers: int) -> Any:
    return fxshard.compile(gpt2(layers), world_size=2, units=["transformer.h.*"])


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The calls of blocks, of any model, as they are made: nothing but traces makes them."""
    called: list[int] = []
    forward = GPT2Block.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(id(self))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT2Block, "forward", noted)
    yield called


def test_no_length_traces_more_blocks_than_the_first(blocks: list[int]) -> None:
    """A flattened batch has batch * length rows: a size that follows from those of the inputs."""
    ours, alone = compiled(8), gpt2(8)
    counts = []
    for length in (8, 12, 20, 5, 12):
        tokens = torch.randint(37, (2, length), generator=torch.Generator().manual_seed(length))
        before = len(blocks)
        loss = ours(input_ids=tokens, labels=tokens).loss
        counts.append(len(blocks) - before)
        assert_close(loss, alone(input_ids=tokens, labels=tokens).loss)
    assert max(counts[1:3]) <= counts[0] and counts[3:] == [0, 0], counts
    first, second, third = (variant.program for variant in ours._fxshard.variants.values())
    assert len(second.graph.nodes) == len(first.graph.nodes) and second.domain is None
    assert third.domain is not None and third.domain.text.startswith("open: ")
    assert len(third.graph.nodes) <= len(first.graph.nodes) + 2  # the sizes


def test_growing_by_hand_takes_three_programs() -> None:
    ours, alone = compiled(2), gpt2(2)
    tokens = torch.tensor([[1, 2, 3]])
    for _ in range(6):
        with torch.no_grad():
            logits = ours(input_ids=tokens).logits
            assert_close(logits, alone(input_ids=tokens).logits)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    assert len(ours._fxshard.variants) == 3


@pytest.mark.parametrize("use_cache", [False, True])
def test_generate_needs_no_program(use_cache: bool) -> None:
    ours, alone = compiled(2), gpt2(2)
    tokens = torch.tensor([[1, 2, 3]])
    how = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
    assert torch.equal(ours.generate(tokens, **how), alone.generate(tokens, **how))
    assert len(ours._fxshard.variants) == 0
