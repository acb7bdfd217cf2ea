"""torch's test_fsdp_pure_fp16.py: models in fp16, made so before or after they are sharded."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.testing import assert_close

from tests.peers.fsdp1.models import Nested
from tests.peers.fsdp1.shared import compiled, ddp, loss_of, reloaded, train
from tests.peers.fsdp1.test_mixed_precision import reductions

F16, F32 = torch.float16, torch.float32


class HalfNested(Nested):
    def get_input(self) -> tuple[torch.Tensor, ...]:
        return tuple(x.half() for x in super().get_input())


def as_ddp(rank: int, world_size: int, offload: bool) -> None:
    """Of one step the losses are compared, as in torch's test; then the model is loaded back."""
    want = train(ddp(HalfNested().half()), 1)
    model = compiled(HalfNested(), offload=CPUOffload(offload)).half()
    got = train(model, 1, after_step=reloaded)
    assert got.dtype == F16
    assert_close(got, want)


@pytest.mark.parametrize("offload", [True, False], ids=["offload", "stays"])
def test_as_ddp(ranks: Any, offload: bool) -> None:
    ranks(4).run(as_ddp, offload)


def dtypes(rank: int, world_size: int, before: bool, policy: MixedPrecision) -> None:
    model: Any = HalfNested().half() if before else HalfNested()
    model = compiled(model, units=[], mixed_precision=policy)
    if not before:
        model = model.half()
    assert {param.dtype for param in model.parameters()} == {F16}
    loss = loss_of(model)
    assert loss.dtype == (policy.param_dtype or F16)
    with reductions() as seen:
        loss.backward()
    assert seen == [policy.reduce_dtype or policy.param_dtype or F16]
    assert {param.dtype for param in model.parameters()} == {F16}
    assert {param.grad.dtype for param in model.parameters()} == {F16}


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecision(),
        MixedPrecision(param_dtype=F16, reduce_dtype=F32),
        MixedPrecision(param_dtype=F32),
    ],
    ids=["none", "reduce_fp32", "compute_fp32"],
)
def test_dtypes(ranks: Any, before: bool, policy: MixedPrecision) -> None:
    ranks(2).run(dtypes, before, policy)
