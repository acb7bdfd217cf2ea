"""`validate(ranks="processes")`: gloo ranks, batches that differ, eager PyTorch beside them."""

import functools
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.config.checked import Config
from fxshard.errors import ConfigError, RankDiedError
from fxshard.plans.workload import Workload
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.validation import on_ranks, processes
from fxshard.validation.compare import Validation

adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Statistics over the rank's batch, dropout, rows that no number of ranks divides, a layer that
    is frozen; f32[4, 5] and labels -> cross entropy and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.first(x)).relu()
        logits = self.last(self.drop(self.frozen(h)))
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 5, generator=generator), torch.tensor([0, 1, 2, 0])


def checked(world_size: Any = 2, **options: Any) -> Validation:
    torch.manual_seed(0)
    given = {"ranks": "processes", **options}
    return fxshard.validate(Net(), batch(), world_size=world_size, **given)


BF16 = {
    "": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "norm": MixedPrecisionPolicy(),
}


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": adamw, "units": ["first", "last"]},
        {
            "optimizer": sgd,
            "units": ["norm"],
            "mixed_precision": BF16,
            "micro_batches": 2,
            "no_sync": True,
        },
        {"optimizer": adamw, "optimizer_in_backward": True, "ignored": ["norm"]},
        {"optimizer": sgd, "strategy": "no_shard", "offload": CPUOffloadPolicy()},
        {"reduce_op": "sum", "micro_batches": 2, "steps": 1},
        {"gradient_divide_factor": 3.0, "reshard_after_forward": False, "steps": 1},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.sample(2)
def test_real_ranks_compute_what_eager_does(options: dict[str, Any]) -> None:
    result = checked(**options)
    assert result.numerics is not None and len(result.peaks) == 2
    assert result.numerics.verdict != "wrong", result.numerics.table()
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert result.holds


@pytest.mark.slow
def test_hybrid_ranks_compute_what_eager_does() -> None:
    result = checked((2, 2), strategy="hybrid_shard", optimizer=adamw)
    assert result.holds, result.numerics.table()
    assert any("(replica 1)" in row.name for row in result.numerics.rows)


def test_every_rank_has_a_batch_of_its_own_and_all_of_it_is_compared() -> None:
    work = Workload(Net(), (batch(), {}), 3, Config())
    calls = on_ranks.batches(work, 3)
    for (first, _), (second, _) in [(calls[0], calls[1]), (calls[0], calls[2])]:
        assert not torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
        assert sorted(first[1].tolist()) == sorted(second[1].tolist()), "ids are others"
    assert all(map(torch.equal, calls[0][0], batch()))
    rows = {(row.kind, row.name) for row in checked(optimizer=sgd, steps=1).numerics.rows}
    assert {("loss", "['loss'] (rank 1)"), ("buffer", "norm.running_mean (rank 0)")} <= rows
    assert {("gradient", "last.weight"), ("parameter", "frozen.weight")} <= rows
    assert ("gradient", "frozen.weight") not in rows


class Bags(nn.Module):
    """Offsets in another order are none: they stay; f32[3, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        if (offsets.diff() < 0).any():  # with one thread, torch's kernel does not say it
            raise ValueError("offsets decrease")
        return self.bag(ids, offsets)


def test_integers_that_the_model_takes_in_no_other_order_stay() -> None:
    call = (torch.arange(8), torch.tensor([0, 3, 5])), {}
    calls = on_ranks.batches(Workload(Bags(), call, 4, Config()), 4)
    for (_, offsets), _ in calls:
        Bags()(torch.arange(8), offsets)
    for (ids, offsets), _ in calls[1:]:  # the others are varied all the same
        assert not torch.equal(ids, torch.arange(8)) and torch.equal(offsets, call[0][1])


# -- faults on the wire, which one process does not see --------------------------------------------


def is_rank() -> bool:
    """Whether this is a process that `validate` has started."""
    return dist.is_initialized() and dist.get_backend() == "gloo"


def damaged(damage: Any, params: Any) -> torch.optim.Optimizer:
    """SGD; the ranks' all-gathers send something else from now on."""
    right = C10dWorld.all_gather
    if is_rank():

        def wrong(world: Any, shards: list[Tensor], *rest: Any, **how: Any) -> list[Tensor]:
            return right(world, [damage(shard) for shard in shards], *rest, **how)

        C10dWorld.all_gather = wrong  # type: ignore[method-assign]
    return torch.optim.SGD(params, lr=0.1)


def rows_swapped(shard: Tensor) -> Tensor:
    return shard.flip(0)


def in_another_dtype(shard: Tensor) -> Tensor:
    return shard.bfloat16().to(shard.dtype)


@pytest.mark.parametrize("damage", [rows_swapped, in_another_dtype])
def test_a_fault_on_the_wire_is_seen(damage: Any) -> None:
    optimizer = functools.partial(damaged, damage)
    assert fxshard.validate(
        Net(), batch(), world_size=2, numerics=True, optimizer=optimizer
    ).holds, "one process has no wire"
    result = checked(optimizer=optimizer, steps=1)
    assert not result.holds
    wrong = {(row.kind, row.name) for row in result.numerics.of("wrong")}
    assert {("loss", "['loss'] (rank 0)"), ("loss", "['loss'] (rank 1)")} <= wrong
    assert ("gradient", "first.weight") in wrong


# -- ranks that do not come back -------------------------------------------------------------------


def ends(how: str, params: Any) -> torch.optim.Optimizer:
    """SGD; rank 1 comes to an end."""
    if is_rank() and dist.get_rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            signal.pause()
        raise ArithmeticError("no more")
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies", "rank 1 died, with exit code -9"),
        ("raises", "rank 1 failed:(.|\n)*ArithmeticError: no more"),
        # Which comes first depends on how long ranks take to start.
        ("hangs", "has not answered in 6 s|rank 1 never asked"),
    ],
)
@pytest.mark.sample(2)
def test_a_rank_that_ends_is_named(how: str, said: str, monkeypatch: Any) -> None:
    if how == "hangs":
        monkeypatch.setattr(processes, "LIMIT_S", 6.0)
    with pytest.raises(RankDiedError, match=said):
        checked(optimizer=functools.partial(ends, how))


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"option optimizer cannot be sent.*ranks='fake'"):
        checked(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    model = Net()
    model.norm.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="the model cannot be sent"):
        fxshard.validate(model, batch(), world_size=2, ranks="processes")
    with pytest.raises(ConfigError, match="expected 'fake' or 'processes'"):
        checked(ranks="threads")
