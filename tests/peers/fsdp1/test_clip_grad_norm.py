"""torch's test_fsdp_clip_grad_norm.py: the norm of all gradients of all ranks, as DDP's."""

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.testing import assert_close

from tests.peers.fsdp1.models import Nested, Transformer
from tests.peers.fsdp1.shared import (
    FULL,
    GRAD_OP,
    NO_SHARD,
    compiled,
    ddp,
    grads_of,
    loss_of,
    plain,
    same,
)

NORMS = list(itertools.product((1, 2.5), (1, 2, math.inf)))
# Layers are units, or the encoder and the decoder, of which one is not sharded.
HALVES = {
    "units": ["transformer.encoder", "transformer.decoder"],
    "strategy": {"": FULL, "transformer.encoder": NO_SHARD},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {"strategy": FULL},
    "no_shard": {"strategy": NO_SHARD},
    "mixed_strategy": HALVES,
}
GRID = [
    pytest.param(*norms, options | {"offload": CPUOffload(offload)}, id=f"{norms}-{name}-{offload}")
    for norms, (name, options), offload in itertools.product(
        NORMS, STRATEGIES.items(), (False, True)
    )
]


def as_ddp(
    rank: int, world_size: int, max_norm: float, norm_type: float, options: dict[str, Any]
) -> None:
    pair = ddp(Transformer()), compiled(Transformer(), **options)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in pair]
    for model in pair:
        loss_of(model).backward()
        for param in model.parameters():
            param.grad *= 100
    before = [grads_of(model) for model in pair]

    def clipped() -> None:
        want = nn.utils.clip_grad_norm_(pair[0].parameters(), max_norm, norm_type)
        assert_close(pair[1].clip_grad_norm_(max_norm=max_norm, norm_type=norm_type), want)

    clipped()
    for model, grads in zip(pair, before, strict=True):
        assert not any(torch.equal(g, grads[name]) for name, g in grads_of(model).items())
    for optimizer in optimizers:
        optimizer.step()
    same(pair[1], pair[0])
    for i in range(3):
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            model(*plain(model).get_input()).sum().backward()
        clipped()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("max_norm", "norm_type", "options"), GRID)
def test_norms_as_ddp(
    ranks: Any, max_norm: float, norm_type: float, options: dict[str, Any]
) -> None:
    ranks(2).run(as_ddp, max_norm, norm_type, options)


def low_precision(
    rank: int, world_size: int, max_norm: float, norm_type: float, strategy: Any
) -> None:
    policy = MixedPrecision(
        param_dtype=torch.float16, reduce_dtype=torch.float16, keep_low_precision_grads=True
    )
    model = compiled(Nested(), strategy=strategy, mixed_precision=policy)
    model(*model.get_input()).sum().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float16}
    assert model.clip_grad_norm_(max_norm, norm_type).dtype == torch.float16
    for grad in grads_of(model).values():
        assert grad is not None
        assert torch.linalg.vector_norm(grad, norm_type).item() <= max_norm


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [FULL, NO_SHARD], ids=["full_shard", "no_shard"])
@pytest.mark.parametrize(("max_norm", "norm_type"), NORMS)
def test_norms_of_fp16(ranks: Any, max_norm: float, norm_type: float, strategy: Any) -> None:
    ranks(2).run(low_precision, max_norm, norm_type, strategy)


def without_gradients(rank: int, world_size: int) -> torch.Tensor:
    policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    linear = nn.Linear(24, 24)
    model = compiled(linear, units=[], strategy=GRAD_OP, mixed_precision=policy)
    model(torch.randn(32, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return model.clip_grad_norm_(1)


def test_norm_without_gradients(ranks: Any) -> None:
    """Zero, in fp32."""
    for norm in ranks(2).run(without_gradients):
        assert_close(norm, torch.tensor(0.0))


def of_two_dtypes(rank: int, world_size: int) -> torch.Tensor:
    kept = MixedPrecision(
        param_dtype=torch.bfloat16, keep_low_precision_grads=True, cast_forward_inputs=True
    )
    wide = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model = compiled(model, units=["0", "1"], mixed_precision={"0": kept, "1": wide})
    model(torch.randn(2, 5)).sum().backward()
    grads = [grad for grad in grads_of(model).values() if grad is not None]
    assert {grad.dtype for grad in grads} == {torch.bfloat16, torch.float32}
    want = torch.stack([grad.float().norm() for grad in grads]).norm()
    got = model.clip_grad_norm_(max_norm=1)
    assert_close(got, want, rtol=1e-2, atol=1e-5)
    return got


def test_norm_of_gradients_in_two_dtypes(ranks: Any) -> None:
    for norm in ranks(2).run(of_two_dtypes):
        assert norm.dtype == torch.float32


def of_a_submodule(rank: int, world_size: int) -> bool:
    model = compiled(Nested())
    return any(hasattr(module, "clip_grad_norm_") for module in list(model.modules())[1:])


def test_submodules_have_no_norm(ranks: Any) -> None:
    assert ranks(2).run(of_a_submodule) == [False, False]
