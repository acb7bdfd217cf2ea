"""torchao's int8 training: mixed precision beside FSDP2; quantised weights are refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.testing import assert_close

import fxshard
from fxshard.errors import FxshardError

pytest.importorskip("torchao")
from torchao import quantize_
from torchao.prototype.quantized_training import (
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)

HALF = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # torchao's options, and the sharding's
    "subclass": ({}, {}),
    "subclass, bf16": ({}, {"mp_policy": HALF}),
    "subclass, output alone": ({"grad_input": False, "grad_weight": False}, {}),
    "module": ({"module_swap": True}, {}),
}


def net(**options: Any) -> Any:
    """f32[n, 16] -> f32[n, 8]; both products are of int8 numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8))
    quantize_(model, int8_mixed_precision_training(**options))
    return model


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def numbers(tensor: Tensor) -> Tensor:
    """All rows, as plain numbers."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return getattr(whole, "_data", whole).detach().clone()


def trained(model: Any, ranks: list[int]) -> list[Any]:
    """Loss, gradients and parameters of each step; the mean of what the batches of `ranks` give."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(2):
        losses = [model(batch(rank, step)).float().square().mean() for rank in ranks]
        torch.stack(losses).mean().backward()
        grads = [numbers(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append((losses[0].detach(), grads, [numbers(p) for p in model.parameters()]))
    return found


def sharded(model: Any, fully_shard: Any, **options: Any) -> Any:
    for module in (model[0], model[2], model):
        fully_shard(module, **options)
    return model


def everywhere(rank: int, world_size: int, case: str) -> dict[str, list[Any]]:
    recipe, options = CASES[case]
    found = {
        "fsdp2": sharded(net(**recipe), fsdp.fully_shard, **options),
        "fully_shard": sharded(net(**recipe), fxshard.fully_shard, **options),
        "compile": fxshard.compile(
            net(**recipe), units=["0", "2"], mixed_precision=options.get("mp_policy")
        ),
    }
    alone = trained(net(**recipe), list(range(world_size)))
    return {way: trained(model, [rank]) for way, model in found.items()} | {"alone": alone}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_fsdp2(ranks: Any, case: str) -> None:
    """Each batch is quantised with scales of its own, also in one process, with its mean."""
    found = ranks(2).run(everywhere, case)
    for rank in found:
        for way in ("fully_shard", "compile"):
            assert_close(rank[way], rank["fsdp2"], rtol=0, atol=0)
    if "bf16" not in case:
        assert_close(found[0]["compile"][0][1:], found[0]["alone"][0][1:], rtol=1e-4, atol=1e-5)


def test_quantised_weights_that_are_trained_are_refused_by_name() -> None:
    """They are made of two tensors, of which the optimizer writes both."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    quantize_(model, int8_weight_only_quantized_training())
    with pytest.raises(FxshardError, match="Int8QuantizedTrainingLinearWeight"):
        fxshard.plan(model, (batch(0, 0),), world_size=2, units=["0"])
