"""torch's test_fsdp_flatten_params.py, what is of no flat parameter: outputs and norms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.shared import compiled
from tests.ranks import told

HALF = pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
SHARED = pytest.mark.parametrize("shared", [False, True], ids=["each_its_own", "shared"])


def transformer(shared: bool, half: bool) -> nn.Module:
    """With dropout; `shared`: the layers of the decoder have the encoder's feed-forward weights."""
    torch.manual_seed(0)
    model = nn.Transformer(
        d_model=32, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128, dropout=0.1
    )
    model.register_buffer("dummy_buffer", torch.tensor(1.0))
    if shared:
        pairs = zip(model.encoder.layers, model.decoder.layers, strict=True)
        for encoder, decoder in pairs:
            decoder.linear1.weight = encoder.linear1.weight
            decoder.linear2.weight = encoder.linear2.weight
    return model.half() if half else model


def output(model: Any, half: bool) -> Tensor:
    """Time by batch by width; the same masks of dropout at each call."""
    torch.manual_seed(1)
    source, target = torch.rand(20, 8, 32), torch.rand(10, 8, 32)
    return model(*((source.half(), target.half()) if half else (source, target)))


def outputs(rank: int, world_size: int, shared: bool, half: bool) -> None:
    want = output(transformer(shared, half), half)
    assert_close(output(compiled(transformer(shared, half), units=[]), half), want)


@HALF
@SHARED
def test_output_of_one_unit(ranks: Any, shared: bool, half: bool) -> None:
    ranks(1).run(outputs, shared, half)


def norm(model: Any, half: bool) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    output(model, half).sum().backward()
    optimizer.step()
    return torch.stack([full(param).detach().norm() for param in model.parameters()]).norm()


def norms(rank: int, world_size: int, half: bool) -> None:
    """All ranks have one batch."""
    want = norm(transformer(True, half), half)
    assert_close(norm(compiled(transformer(True, half), units=[]), half), want)


@HALF
def test_norm_of_shared_parameters_after_a_step(ranks: Any, half: bool) -> None:
    ranks(1).run(norms, half)
    ranks(2).run(norms, half)


def channels_last(rank: int, world_size: int) -> str:
    sizes = ((10, 20, 3), (20, 10, 5), (10, 10, 1))
    model = nn.Sequential(*(nn.Conv2d(*size, bias=False) for size in sizes))
    return told(lambda: compiled(model.to(memory_format=torch.channels_last), units=[]))


def test_parameters_in_channels_last(ranks: Any) -> None:
    for said in ranks(1).run(channels_last):
        assert "parameter '0.weight' is not contiguous" in said
        assert "Make it contiguous: nn.Parameter(x.contiguous())" in said
