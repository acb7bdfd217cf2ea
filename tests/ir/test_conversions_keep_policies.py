"""Mixed precision outlasts ``.to(...)`` and ``.half()``, also where it was no cast before."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

import fxshard
from tests.fsdp2 import full

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype))


def after_conversion(
    rank: int, world_size: int, kind: str, param_dtype: torch.dtype, to: torch.dtype
) -> tuple[torch.dtype, list[Tensor]]:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=param_dtype)
    model: Any = build(param_dtype)
    if kind == "fsdp2":
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        model = getattr(fxshard, kind)(model, units=["0", "1"], mixed_precision=policy)
    model.to(to)
    y = model(BATCH.chunk(world_size)[rank])
    y.float().pow(2).sum().backward()
    grads = [full(param.grad) for param in model.parameters()]
    assert all(grad.dtype is to for grad in grads)
    return y.dtype, [y.detach(), *grads]


@pytest.mark.parametrize("kind", ["compile", "shard"])
@pytest.mark.parametrize(("param_dtype", "to"), [(BF16, F32), (F32, BF16)])
def test_a_policy_that_was_no_cast_when_it_was_given(
    ranks: Any, kind: str, param_dtype: torch.dtype, to: torch.dtype
) -> None:
    """FSDP2's test_clamp_reduce_dtype."""
    theirs = ranks(2).run(after_conversion, "fsdp2", param_dtype, to)
    for mine, wanted in zip(
        ranks(2).run(after_conversion, kind, param_dtype, to), theirs, strict=True
    ):
        assert mine[0] is wanted[0] is param_dtype
        torch.testing.assert_close(mine[1], wanted[1], rtol=0, atol=0)


def test_half_under_a_policy_of_fp32() -> None:
    """FSDP1's test_fp16_dtypes."""
    policy = MixedPrecision(param_dtype=F32)
    model = fxshard.compile(build(F32), world_size=2, mixed_precision=policy).half()
    assert model(BATCH.half()).dtype is F32
    assert all(param.dtype is F16 for param in model.parameters())


def test_without_a_policy_a_conversion_is_one() -> None:
    for verb in (fxshard.compile, fxshard.shard):
        model = verb(build(F32), world_size=2, ignored=["1"]).to(BF16)
        assert model(BATCH.to(BF16)).dtype is BF16
