"""What gloo promises, row by row of the table in `fxshard.runtime.world.backends`."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

import fxshard
from fxshard.ir import ops
from fxshard.runtime.world.backends import BACKENDS, as_bytes, backend_of
from tests.oracles import count_collectives

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
RARE = (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Bytes that differ by place and rank; booleans and floats stay valid."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.arange(size, dtype=torch.uint8) % 50 + 50 * rank
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


def gather(shards: list[Tensor]) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    buffers = [s.new_empty((s.shape[0] * group.size(), *s.shape[1:])) for s in shards]
    flat = [as_bytes(b) for b in buffers], [as_bytes(s) for s in shards]
    for work in list(backend_of(group).all_gather(group, *flat)):
        work.wait()
    return buffers


def all_gathers(rank: int, world_size: int) -> None:
    """Every dtype, and empty ones, odd ones and one that begins in the middle of a word."""
    for dtype in (*FLOATS, *WIDE, *RARE):
        for shape in ((3, 2), (1,), (0, 2), (2, 0)):
            (found,) = gather([of_rank(rank, shape, dtype)])
            want = torch.cat(
                [of_rank(r, shape, dtype).view(torch.uint8) for r in range(world_size)]
            )
            assert bits(found) == bits(want), (dtype, shape)
    misaligned = (torch.arange(9) + 10 * rank).to(torch.bfloat16)[1:4]
    assert misaligned.data_ptr() % 4
    (found,) = gather([misaligned])
    assert found.tolist() == [x + 10 * r for r in range(world_size) for x in (1, 2, 3)]
    mixed = gather([of_rank(rank, (2,), dtype) for dtype in (torch.bfloat16, torch.float32)])
    assert [bits(b) for b in mixed] == [
        bits(torch.cat([of_rank(r, (2,), dtype) for r in range(world_size)]))
        for dtype in (torch.bfloat16, torch.float32)
    ]


def test_all_gathers_of_every_dtype_are_exact(ranks: Any) -> None:
    ranks(2).run(all_gathers)


def reduce_scatter(grads: list[Tensor], op: Any) -> list[Tensor]:
    group: Any = dist.group.WORLD
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    results = [g.new_empty((g.shape[0] // group.size(), *g.shape[1:])) for g in grads]
    group.reduce_scatter_tensor_coalesced(results, grads, options).wait()
    return results


def all_reduce(grads: list[Tensor], op: Any) -> list[Tensor]:
    group: Any = dist.group.WORLD
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    group.allreduce_coalesced(grads, options).wait()
    return grads


def reductions(rank: int, world_size: int) -> None:
    """Each operation in each dtype that a gradient may have, empty ones too; sums are of ints."""
    for dtype in (*FLOATS, torch.complex64):
        given = [
            [torch.arange(4.0).view(4, 1).to(dtype) + r, torch.ones(0, 3, dtype=dtype)]
            for r in range(world_size)
        ]
        total = torch.stack([both[0] for both in given])
        want = {"SUM": total.sum(0), "AVG": total.sum(0) / world_size}
        if not dtype.is_complex:
            want |= {"MAX": total.amax(0), "MIN": total.amin(0)}
        for name, whole in want.items():
            op = getattr(dist.ReduceOp, name)
            mine = [t.clone() for t in given[rank]]
            part, empty = reduce_scatter(mine, op)
            assert torch.equal(part, whole.chunk(world_size)[rank]), (dtype, name)
            assert empty.shape == (0, 3)
            same, empty = all_reduce(mine, op)
            assert torch.equal(same, whole), (dtype, name)
            assert empty.shape == (0, 3)
    for reduce in (reduce_scatter, all_reduce):
        with pytest.raises(RuntimeError, match="can't be cast"):
            reduce([torch.arange(4)], dist.ReduceOp.AVG)


def test_reductions_of_every_dtype_that_gradients_have(ranks: Any) -> None:
    ranks(2).run(reductions)


REFUSED = (torch.int16, torch.float8_e4m3fn, torch.float8_e5m2)
TAKEN = (*FLOATS, torch.complex64, torch.bool, torch.uint8, torch.int32, torch.int64)


def asked_of_gloo(rank: int, world_size: int) -> None:
    """What gloo takes itself: dtypes, and tensors that are not contiguous."""
    for dtype in (*REFUSED, *TAKEN):
        sent = torch.ones(2).to(dtype)
        for collective in (
            lambda sent=sent: dist.all_reduce(sent.clone()),
            lambda sent=sent: dist.reduce_scatter_tensor(sent.new_empty(1), sent),
            lambda sent=sent: dist.all_gather_into_tensor(sent.new_empty(4), sent),
        ):
            if dtype in REFUSED:
                with pytest.raises(RuntimeError, match="Invalid scalar type"):
                    collective()
            else:
                collective()
    columns = torch.arange(4.0).view(2, 2).T
    gathered = torch.empty(4, 2)
    dist.all_gather_into_tensor(gathered, columns)
    assert torch.equal(gathered, torch.cat([columns, columns]))


def test_what_gloo_takes(ranks: Any) -> None:
    ranks(2).run(asked_of_gloo)


def not_a_number(rank: int, world_size: int) -> None:
    """Sums and averages are NaN where one of the ranks is; of the largest gloo drops it."""
    for dtype in FLOATS:
        mine = torch.ones(2, dtype=dtype)
        mine[rank] = math.nan
        for reduce in (reduce_scatter, all_reduce):
            for name in ("SUM", "AVG"):
                (found,) = reduce([mine.clone()], getattr(dist.ReduceOp, name))
                assert found.isnan().all(), (dtype, name)
            for name in ("MAX", "MIN"):
                (found,) = reduce([mine.clone()], getattr(dist.ReduceOp, name))
                kept = torch.zeros(world_size)
                if reduce is all_reduce:
                    kept = found.isnan().float()
                else:
                    kept[rank] = found.isnan().float()
                    dist.all_reduce(kept)
                assert kept.tolist() != [1.0, 1.0], (dtype, name)


def test_a_nan_is_lost_in_the_largest_and_the_smallest(ranks: Any) -> None:
    ranks(2).run(not_a_number)


def many_in_flight(rank: int, world_size: int) -> None:
    """64 launches before the first wait: gathers and reductions of several tensors, in turn."""
    group: Any = dist.group.WORLD
    options = dist.ReduceScatterOptions()
    works, checks = [], []
    for i in range(64):
        shards = [torch.full((3, 2), float(i + rank)), torch.full((2,), 100.0 + i + rank)]
        buffers = [s.new_empty((s.shape[0] * world_size, *s.shape[1:])) for s in shards]
        flat = [as_bytes(b) for b in buffers], [as_bytes(s) for s in shards]
        works += backend_of(group).all_gather(group, *flat)
        checks += [
            (b, torch.cat([s - rank + r for r in range(world_size)]))
            for b, s in zip(buffers, shards, strict=True)
        ]
        grads = [torch.full((2 * world_size,), float(i)), torch.full((world_size, 3), 1.0)]
        results = [g.new_empty((g.shape[0] // world_size, *g.shape[1:])) for g in grads]
        works.append(group.reduce_scatter_tensor_coalesced(results, grads, options))
        checks += [
            (r, torch.full_like(r, g.view(-1)[0].item() * world_size))
            for r, g in zip(results, grads, strict=True)
        ]
    for work in works:
        work.wait()
    for found, want in checks:
        assert torch.equal(found, want)


def test_many_works_in_flight(ranks: Any) -> None:
    ranks(2).run(many_in_flight)


class Mixed(torch.nn.Module):
    """A half-precision weight beside full-precision ones, as adapters on a frozen base."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 5, bias=False, dtype=first)
        self.up = torch.nn.Linear(4, 5, bias=False, dtype=second)
        self.head = torch.nn.Linear(5, 3, dtype=second)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x.to(self.base.weight.dtype)).to(self.up.weight.dtype)
        return self.head(h + self.up(x.to(self.up.weight.dtype)))


def built(first: torch.dtype, second: torch.dtype, frozen: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Mixed(first, second)
    model.base.requires_grad_(not frozen)
    return model


OPTIONS: list[dict[str, Any]] = [
    {},
    {"pack_bytes": 0},
    {"pack_bytes": 0, "forward_prefetch": 2, "backward_prefetch": "post"},
    {"strategy": "shard_grad_op", "units": ["base", "up"]},
    {"strategy": "no_shard"},
    {"max_inflight": 1},
    {"units": ["base", "up", "head"], "min_bucket_bytes": 1000},
    {"offload": CPUOffloadPolicy(), "forward_prefetch": 0},
]
PAIRS = [
    (torch.bfloat16, torch.float32, True),
    (torch.bfloat16, torch.float32, False),
    (torch.float32, torch.bfloat16, False),
    (torch.float16, torch.float32, False),
    (torch.float32, torch.float64, False),
]


def mixed_training(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Three steps of SGD beside eager PyTorch, each rank's gradients averaged, on the same data."""
    for first, second, frozen in PAIRS:
        plain = built(first, second, frozen)
        model = fxshard.compile(built(first, second, frozen), **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        torch.manual_seed(1)
        for _ in range(3):
            batch = torch.randn(world_size, 2, 4)
            losses = [plain(x).float().square().mean() for x in batch]
            (sum(losses) / world_size).backward()  # type: ignore[union-attr]
            loss = model(batch[rank]).float().square().mean()
            loss.backward()
            assert torch.equal(loss, losses[rank]), (first, second, loss, losses[rank])
            for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
                if want.grad is None:
                    assert got.grad is None, name
                    continue
                # Eager adds the ranks' parts in another order than gloo: within one rounding.
                close = torch.finfo(want.dtype).eps * 2
                torch.testing.assert_close(
                    got.grad.full_tensor(), want.grad, rtol=close, atol=close
                )
                want.grad.copy_(got.grad.full_tensor())  # so that later steps begin alike
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for want, got in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(got.full_tensor(), want), (first, second)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "default")
@pytest.mark.sample(2)
def test_mixed_dtypes_train_as_in_eager(ranks: Any, options: dict[str, Any]) -> None:
    ranks(2).run(mixed_training, options)


def calls_of_a_step(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    model = fxshard.compile(built(torch.bfloat16, torch.float32, False), pack_bytes=0)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    with count_collectives() as seen:
        model(x).sum().backward()
    program = model.plan.program
    launches = [n for n in program.graph.nodes if ops.of(n).collective]
    planned = {str(t): 0 for t in (ops.all_gather, ops.reduce_scatter)}
    for launch in launches:
        planned[str(launch.target)] += BACKENDS["gloo"].calls(launch)
    found = {"fxshard.all_gather.default": seen.count("all_gather")}
    found["fxshard.reduce_scatter.default"] = seen.count("reduce_scatter")
    return planned, found


def test_planned_calls_are_those_that_gloo_receives(ranks: Any) -> None:
    """bf16: one weight. f32: two weights and a bias, a call each in forward; what backward reads
    is the head's weight. Reductions of a dtype are one call.
    """
    for planned, found in ranks(2).run(calls_of_a_step):
        assert planned == found
        assert found == {"fxshard.all_gather.default": 5, "fxshard.reduce_scatter.default": 2}


def test_each_launch_has_one_dtype_and_the_launches_of_a_unit_go_together() -> None:
    model = built(torch.bfloat16, torch.float32, False)
    plan = fxshard.plan(model, (torch.ones(2, 4),), world_size=2, units=["base"], pack_bytes=0)
    gathers = plan.program.graph.find_nodes(op="call_function", target=ops.all_gather)
    forward = [[t.dtype for t in node.meta["val"]] for node in gathers][:2]
    assert forward == [[torch.bfloat16], [torch.float32] * 3]
    alone = fxshard.plan(
        built(torch.bfloat16, torch.float32, False), (torch.ones(2, 4),), world_size=2
    )
    nodes = list(alone.program.graph.nodes)
    places = [i for i, n in enumerate(nodes) if n.target is ops.all_gather][:2]
    between = {n.target for n in nodes[places[0] : places[1]]}
    assert ops.wait not in between, "the second launch of a unit waits for the first"
