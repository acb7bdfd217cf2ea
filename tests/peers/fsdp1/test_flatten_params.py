"""torch's test_fsdp_flatten_params.py, what is of no flat parameter: outputs and norms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.fsdp2 import full
from tests.peers.fsdp1.shared import NO_SHARD, compiled
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


def half_embedding() -> Any:
    model = compiled(nn.Embedding(5, 4).half(), units=[], strategy=NO_SHARD)
    assert model(torch.arange(5)).dtype == torch.float16
    return model


def data_in_fp32(rank: int, world_size: int) -> str:
    weight = half_embedding().weight
    return told(lambda: setattr(weight, "data", weight.data.float()))


def model_in_fp32(rank: int, world_size: int) -> None:
    model = half_embedding().float()
    out = model(torch.arange(5))
    assert out.dtype == torch.float32
    assert_close(out, full(model.weight).detach())


def test_data_in_another_dtype(ranks: Any) -> None:
    """Of one parameter it is refused where it is written; `model.float()` converts all."""
    for said in ranks(2).run(data_in_fp32):
        assert "param.data = a tensor of shape [5, 4] and torch.float32, of a sharded" in said
        assert "Convert the whole model (model.to(...))" in said
    ranks(2).run(model_in_fp32)


class Encoder(nn.Module):
    """Its encoder alone is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def partly(rank: int, world_size: int) -> None:
    model = Encoder()
    names = [name for name, _ in model.named_parameters()]
    numel = sum(param.numel() for param in model.parameters())
    head = list(model.head.parameters())
    model.encoder = compiled(model.encoder, units=[])
    assert [name for name, _ in model.named_parameters()] == names
    assert sum(param.numel() for param in model.parameters()) == numel
    assert all(a is b for a, b in zip(model.head.parameters(), head, strict=True))
    model.to(torch.float64)
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    out = model(torch.randn(2, 4, dtype=torch.float64))
    assert out.dtype == torch.float64
    out.sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float64}


def test_part_of_a_model(ranks: Any) -> None:
    """Elements and names are as they were; the rest keeps its parameters; both are converted."""
    ranks(2).run(partly)


def no_parameters(rank: int, world_size: int) -> int:
    model = compiled(nn.Sequential(nn.ReLU()), units=[])
    x = torch.randn(2)
    assert torch.equal(model(x), torch.relu(x))
    return len(list(model.parameters()))


def test_module_without_parameters(ranks: Any) -> None:
    assert ranks(1).run(no_parameters) == [0]
