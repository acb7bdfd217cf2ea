"""Bytes of gradients that no loss reaches: they are reduced, and then None is returned for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard

HALF = torch.bfloat16
PRECISIONS = {
    "f32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=HALF),
    "bf16, reduced in f32": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32),
    "f32, reduced in bf16": MixedPrecisionPolicy(reduce_dtype=HALF),
}
RANKS = {"full_shard": 2, "no_shard": 2, "hybrid_shard": (2, 2)}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(4, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


def of_the_first(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].float().square().sum()


@pytest.mark.sample(8)
@pytest.mark.parametrize("strategy", RANKS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", [{}, {"pack_bytes": 0}, {"units": ["unused"]}], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_they_are_what_is_measured(
    strategy: Any, precision: str, options: dict[str, Any], micro_batches: int
) -> None:
    found = fxshard.validate(
        *(TwoHeads(), (torch.ones(4, 3, 4),)),
        world_size=RANKS[strategy],
        strategy=strategy,
        mixed_precision=PRECISIONS[precision],
        loss=of_the_first,
        micro_batches=micro_batches,
        no_sync=micro_batches > 1,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **options,
    )
    assert found.max_abs_difference == 0, found.table(only_different=True)
