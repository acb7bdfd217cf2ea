"""torch's test_fsdp_comm.py: how many collectives a step issues."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tests.oracles import count_collectives
from tests.peers.fsdp1.models import Nested, Transformer
from tests.peers.fsdp1.shared import GRAD_OP, compiled, ddp, grads_of, loss_of, losses_alike, same

UNITS = {Nested: 4, Transformer: 5}  # with the root


def counted(
    rank: int,
    world_size: int,
    kind: type[nn.Module],
    strategy: Any,
    contexts: list[bool],
    stays: bool = False,
) -> list[tuple[int, int, int, int]]:
    """Of each step: all-gathers in forward and in backward, reduce-scatters, all else."""
    keeps_root = {"reshard_after_forward": {"": False}}  # as FSDP1 does, and ours does not
    model = compiled(kind(), **({"strategy": strategy} if strategy else keeps_root))
    found = []
    for without_sync in contexts:
        if stays:
            model.set_reshard_after_backward(not without_sync)
        with model.no_sync() if without_sync else contextlib.nullcontext():
            with count_collectives() as forward:
                loss = loss_of(model)
            with count_collectives() as backward:
                loss.backward()
        kinds = forward.kinds() + backward.kinds()
        rest = [kind for kind in kinds if kind not in ("all_gather", "reduce_scatter")]
        assert forward.count("reduce_scatter") == 0
        found.append(
            (
                forward.count("all_gather"),
                backward.count("all_gather"),
                backward.count("reduce_scatter"),
                len(rest),
            )
        )
    return found


@pytest.mark.parametrize("strategy", [None, GRAD_OP], ids=["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("kind", UNITS)
def test_collectives_of_a_step(ranks: Any, kind: type[nn.Module], strategy: Any) -> None:
    n = UNITS[kind]
    in_backward = 0 if strategy else n - 1
    for steps in ranks(2).run(counted, kind, strategy, [False] * 3):
        assert steps == [(n, in_backward, n, 0)] * 3


@pytest.mark.parametrize("kind", UNITS)
def test_collectives_without_sync(ranks: Any, kind: type[nn.Module]) -> None:
    """None reduces inside; the first step outside reduces each unit once."""
    n = UNITS[kind]
    for steps in ranks(2).run(counted, kind, None, [True] * 3 + [False] * 3):
        assert steps == [(n, n - 1, 0, 0)] * 3 + [(n, n - 1, n, 0)] * 3


@pytest.mark.parametrize("kind", UNITS)
def test_shard_grad_op_gathers_once_without_sync(ranks: Any, kind: type[nn.Module]) -> None:
    """With `set_reshard_after_backward(False)`, which FSDP1 does by itself under `no_sync`."""
    n = UNITS[kind]
    for steps in ranks(2).run(counted, kind, GRAD_OP, [True] * 3 + [False] * 3, True):
        assert steps == [(n, 0, 0, 0)] + [(0, 0, 0, 0)] * 2 + [(0, 0, n, 0)] + [(n, 0, n, 0)] * 2


class Reduces(nn.Module):
    """Communicates by itself, outside of what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        y = F.relu(x @ self.weight)
        work = dist.all_reduce(y, async_op=True)
        assert work is not None
        return y, work


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.outlet(F.relu(self.inlet(x))))


class Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, *ys: Tensor) -> Tensor:
        return sum(mlp(y) for mlp, y in zip(self.each, ys, strict=True))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.reduces = nn.ModuleList(Reduces() for _ in range(3))
        self.mlps: nn.Module = Mlps()

    def forward(self, x: Tensor) -> Tensor:
        ys, works = zip(*(module(x) for module in self.reduces), strict=True)
        for work in works:
            work.wait()
        return self.mlps(*ys)


def part_of_ddp(rank: int, world_size: int) -> None:
    reference, model = ddp(Model()), Model()
    model.mlps = compiled(model.mlps, units=[Mlp], strategy=GRAD_OP)
    names = [f"mlps.{name}" for name, _ in model.mlps.named_parameters()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    pair = reference, ddp(model)
    torch.manual_seed(43 + rank)
    losses_alike(pair, torch.randn(2, 8))
    same(pair[1], reference)


def test_ddp_around_a_compiled_part(ranks: Any) -> None:
    """DDP is told to leave its parameters alone."""
    ranks(2).run(part_of_ddp)


def unsharded_after_backward(rank: int, world_size: int, async_op: bool) -> None:
    """Full parameters as they were; when it is over, gradients are there and as DDP's."""
    torch.manual_seed(0)
    theirs = nn.Sequential(Mlp(), nn.Linear(8, 4))
    model = copy.deepcopy(theirs)
    model[0] = compiled(model[0], units=[])
    torch.manual_seed(1 + rank)
    x, reference = torch.randn(2, 8), ddp(theirs)
    for each in (model, reference):
        each(x).sum().backward()
    handle = model[0].unshard(async_op=async_op)
    handle.wait()
    for (name, param), want in zip(
        model[0].named_parameters(), theirs[0].parameters(), strict=True
    ):
        assert not isinstance(param, DTensor), name
        assert torch.equal(param, want), name
    model[0].reshard()
    assert all(isinstance(param, DTensor) for param in model[0].parameters())
    assert_close(grads_of(model[0]), grads_of(theirs[0]))


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_unshard_after_backward(ranks: Any, async_op: bool) -> None:
    """A part of a plain model."""
    ranks(2).run(unsharded_after_backward, async_op)
