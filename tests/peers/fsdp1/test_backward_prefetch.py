"""torch's test_fsdp_backward_prefetch.py: which unit is gathered next in backward."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.testing import assert_close

from tests.oracles import count_collectives
from tests.peers.fsdp1.models import LAYERS
from tests.peers.fsdp1.shared import compiled, ddp, grads_of

MODES = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)
NUMBER = 6  # layers of the encoder, and of the decoder


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Transformer(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0)


def gathered(rank: int, world_size: int, mode: Any) -> None:
    """The root, then the decoder's layers, then the encoder's, which are smaller. (Of the first and
    last of a kind backward reads less.) What is launched where: tests/passes/test_prefetch.py."""
    reference = ddp(transformer())
    model = compiled(transformer(), units=LAYERS, backward_prefetch=mode)
    torch.manual_seed(1 + rank)
    source, target = torch.randn(10, 1, 8), torch.randn(20, 1, 8)
    for _ in range(2):
        for each in (reference, model):
            each.zero_grad()
        reference(source, target).sum().backward()
        loss = model(source, target).sum()
        with count_collectives() as seen:
            loss.backward()
        sizes = [call.nbytes for call in seen.calls if call.kind == "all_gather"]
        root, decoder, encoder = sizes[:1], sizes[1 : 1 + NUMBER], sizes[1 + NUMBER :]
        assert len(encoder) == NUMBER and root < [min(encoder)]
        assert max(encoder) < min(decoder)
        assert_close(grads_of(model), grads_of(reference))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name if mode else "none")
def test_layers_are_gathered_in_the_order_of_backward(ranks: Any, mode: Any) -> None:
    ranks(2).run(gathered, mode)
