"""torch's test_fsdp_core.py: parity with DDP over several steps, saved and loaded on the way."""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision
from torch.testing import assert_close

from fxshard.runtime.world.c10d import C10dWorld
from tests.peers.fsdp1.models import AlwaysNested, Experts, Nested, Transformer
from tests.peers.fsdp1.shared import (
    GRAD_OP,
    HALF,
    NO_SHARD,
    OFFLOADS,
    compiled,
    ddp,
    loss_of,
    params_of,
    reloaded,
    same,
    train,
)

Options = dict[str, Any]
PREFETCHES = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)
# Not the default of FSDP1 in the second: the first is that of ours.
GRID: list[Options] = [
    {
        "offload": offload,
        "backward_prefetch": backward,
        "forward_prefetch": forward,
        **({"strategy": strategy} if strategy else {}),
    }
    for offload, strategy, backward, forward in itertools.product(
        OFFLOADS, (None, GRAD_OP, NO_SHARD), PREFETCHES, (False, True)
    )
]


def said(options: Options) -> str:
    return "-".join(
        [
            "offload" if options["offload"] else "stays",
            options["strategy"].name.lower() if "strategy" in options else "default",
            options["backward_prefetch"].name.lower() if options["backward_prefetch"] else "none",
            "ahead" if options["forward_prefetch"] else "on_demand",
        ]
    )


def over_the_grid(sampled: int) -> Callable[..., Any]:
    """`sampled` of the cases run in `make test`."""

    def mark(test: Callable[..., Any]) -> Any:
        grid = pytest.mark.parametrize("options", GRID, ids=said)
        return pytest.mark.sample(sampled)(grid(test))

    return mark


def parity(
    rank: int,
    world_size: int,
    kind: type[nn.Module],
    options: Options,
    steps: int = 2,
    backward: Callable[..., Any] = lambda _, loss: loss.backward(),
) -> None:
    reference, model = ddp(kind()), compiled(kind(), **options)
    want = train(reference, steps)
    got = train(model, steps, backward=backward, after_step=reloaded)
    assert_close(got, want)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    same(model, reference)


def run_parity(pool: Any, kind: type[nn.Module], options: Options) -> None:
    pool.run(parity, kind, options)


@over_the_grid(6)
def test_nested(ranks: Any, options: Options) -> None:
    run_parity(ranks(2), Nested, options)


@over_the_grid(3)
def test_every_module_a_unit(ranks: Any, options: Options) -> None:
    run_parity(ranks(2), AlwaysNested, options)


@over_the_grid(4)
def test_transformer(ranks: Any, options: Options) -> None:
    run_parity(ranks(2), Transformer, options)


def test_nested_on_4_ranks(ranks: Any) -> None:
    run_parity(ranks(4), Nested, GRID[0])


# -- one step in fp16 ------------------------------------------------------------------------------


def half_parity(rank: int, world_size: int, options: Options) -> None:
    """DDP under autocast, of inputs in fp16: the losses are close."""
    reference = ddp(Nested())
    inputs = tuple(x.half() for x in reference.module.get_input())
    with torch.autocast("cpu", dtype=torch.float16):
        want = loss_of(reference, inputs)
    model = compiled(Nested(), mixed_precision=HALF, **options)
    got = train(model, 1, after_step=reloaded)
    assert got.dtype == torch.float16
    assert_close(got, want, check_dtype=False)


@over_the_grid(4)
def test_nested_in_fp16(ranks: Any, options: Options) -> None:
    ranks(2).run(half_parity, options)


# -- delays: nobody reads what is not there yet ----------------------------------------------------


def late_step(rank: int, world_size: int, options: Options) -> None:
    """Rank 1 is late with its optimizer step: rank 0's next all-gather waits for it."""

    def backward(model: Any, loss: Tensor) -> None:
        loss.backward()
        time.sleep(0.05 * rank)

    parity(rank, world_size, Nested, options, backward=backward)


@over_the_grid(3)
def test_delayed_optimizer_step(ranks: Any, options: Options) -> None:
    ranks(2).run(late_step, options)


def late_reductions(rank: int, world_size: int, options: Options) -> None:
    """Rank 1 launches its reductions late: backward ends when all have arrived."""

    def late(launch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(launch)
        def after_a_while(*args: Any, **options: Any) -> Any:
            time.sleep(0.02 * rank)
            return launch(*args, **options)

        return after_a_while

    with (
        mock.patch.object(C10dWorld, "reduce_scatter", late(C10dWorld.reduce_scatter)),
        mock.patch.object(C10dWorld, "all_reduce", late(C10dWorld.all_reduce)),
    ):
        parity(rank, world_size, Nested, options)


@over_the_grid(3)
def test_delayed_reductions(ranks: Any, options: Options) -> None:
    ranks(2).run(late_reductions, options)


# -- experts: parameters of this rank alone --------------------------------------------------------


def experts(rank: int, world_size: int, options: Options, late_free: bool = False) -> None:
    """What is ignored keeps this rank's own gradient, all others get the mean."""

    def by_hand(model: Any, loss: Tensor) -> None:
        loss.backward()
        for name, param in model.named_parameters():
            if not name.startswith("module.2."):
                dist.all_reduce(param.grad)
                param.grad /= world_size

    def free(self: Any, tensors: list[Tensor]) -> None:
        time.sleep(0.01 * rank)
        freed(self, tensors)

    freed = C10dWorld.free
    reference = Experts()
    want = train(reference, 2, backward=by_hand)
    with mock.patch.object(C10dWorld, "free", free if late_free else freed):
        model = compiled(Experts(), ignored=["module.2"], **options)
        got = train(model, 2, after_step=reloaded)
    assert_close(got, want)
    same(model, reference)
    weights = [torch.empty(12, 23) for _ in range(world_size)]
    dist.all_gather(weights, model.module[2].weight.detach())
    assert not torch.equal(weights[0], weights[1])


@over_the_grid(4)
def test_experts(ranks: Any, options: Options) -> None:
    ranks(2).run(experts, options)


@over_the_grid(2)
def test_experts_freed_late(ranks: Any, options: Options) -> None:
    ranks(2).run(experts, options, True)


# -- parameters that change, evaluation ------------------------------------------------------------


def changed(rank: int, world_size: int, policy: Any) -> None:
    model, other = (compiled(Transformer(), mixed_precision=policy) for _ in range(2))
    inputs = model.get_input()
    before = model(*inputs)
    nn.init.normal_(next(other.parameters()).data)
    assert not torch.allclose(other(*inputs), before)


@pytest.mark.parametrize("policy", [None, MixedPrecision()], ids=["none", "empty"])
def test_parameter_changed_after_compile(ranks: Any, policy: Any) -> None:
    ranks(2).run(changed, policy)


def without_gradients(rank: int, world_size: int, policy: Any) -> None:
    model = compiled(Transformer(train=True), mixed_precision=policy)
    train(model, 1)
    inputs = model.get_input()
    model.eval()
    want = model(*inputs)
    with torch.no_grad():
        got = model(*inputs)
    assert want.dtype == (torch.float16 if policy else torch.float32)
    assert_close(got, want)


@pytest.mark.parametrize("policy", [None, HALF], ids=["fp32", "fp16"])
def test_evaluation_without_gradients(ranks: Any, policy: Any) -> None:
    ranks(2).run(without_gradients, policy)


def trained_after_loading(rank: int, world_size: int) -> None:
    """Backward still reduces after a state dict has been saved and loaded."""
    reference, model = ddp(Transformer()), compiled(Transformer())
    for each in (reference, model):
        train(each, 2)
        each.load_state_dict(each.state_dict())
        train(each, 1)
    assert params_of(model).keys() == params_of(reference).keys()
    same(model, reference)


def test_trained_after_loading(ranks: Any) -> None:
    ranks(2).run(trained_after_loading)
