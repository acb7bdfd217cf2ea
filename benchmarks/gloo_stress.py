"""Do ranks survive many works in flight on gloo? ``python -m benchmarks.gloo_stress HOW SECONDS``

HOW: "ours" launches as fxshard does, on two ranks: all-gathers of several buffers, reduce-scatters
and all-reduces of several tensors, in several dtypes, up to 64 launches before the first wait, each
result checked. "coalesced" is what it did before, in one process of plain torch: it dies within a
minute (docs/upstream.md). "functional" is what torch's own functional all-gathers do (those of
`DTensor.full_tensor`), and dies too; "apart" is the same as a process does it that has sharded a
model. Prints rounds and works, and exits with 1 if a rank died.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from fxshard._torch import process_groups
from fxshard.runtime.world.backends import backend_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def coalesced(rank: int, end: float) -> int:
    group: Any = dist.group.WORLD
    count = 0
    while time.time() < end:
        works = [
            group.allgather_into_tensor_coalesced([torch.empty(1)], [torch.ones(1)])
            for _ in range(64)
        ]
        for work in works:
            work.wait()
        count += len(works)
    return count


def functional(rank: int, end: float) -> int:
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    name, count = dist.group.WORLD.group_name, 0  # type: ignore[union-attr]
    while time.time() < end:
        results = [gather(torch.ones(1), 1, name) for _ in range(64)]
        for result in results:
            torch.ops._c10d_functional.wait_tensor(result)
        count += len(results)
    return count


def apart(rank: int, end: float) -> int:
    process_groups.gather_one_by_one()
    return functional(rank, end)


def ours(rank: int, end: float) -> int:
    group: Any = dist.group.WORLD
    size, count, draw = group.size(), 0, random.Random(0)
    minute = time.time()
    scatter, reduce = dist.ReduceScatterOptions(), dist.AllreduceCoalescedOptions()
    going = torch.ones(1)
    while True:
        going.fill_(float(time.time() < end))
        dist.broadcast(going, 0)
        if not going.item():
            return count
        works: list[Any] = []
        checks: list[tuple[torch.Tensor, float]] = []
        for _ in range(draw.randint(1, 64)):
            dtype, rows = draw.choice(DTYPES), draw.choice((0, 1, 3, 70))
            shards = [torch.ones(rows, 6, dtype=dtype), torch.ones(3, dtype=dtype)]
            buffers = [s.new_empty((s.shape[0] * size, *s.shape[1:])) for s in shards]
            works += backend_of(group).all_gather(group, buffers, shards)
            grads = [torch.ones(size * rows, 6, dtype=dtype), torch.ones(size, dtype=dtype)]
            parts = [g.new_empty((g.shape[0] // size, *g.shape[1:])) for g in grads]
            works.append(group.reduce_scatter_tensor_coalesced(parts, grads, scatter))
            sums = [torch.ones(rows, dtype=dtype), torch.ones(2, dtype=dtype)]
            works.append(group.allreduce_coalesced(sums, reduce))
            checks += [(b, 1.0) for b in buffers] + [(t, float(size)) for t in (*parts, *sums)]
        for work in works:
            work.wait()
        assert all((tensor == value).all() for tensor, value in checks)
        count += len(works)
        if rank == 0 and time.time() > minute + 60:
            minute = time.time()
            print(f"{count:,} works so far, {end - minute:.0f} s left", flush=True)


HOW = {f.__name__: f for f in (ours, coalesced, functional, apart)}


def rank_main(rank: int, world_size: int, path: str, how: str, seconds: float) -> None:
    torch.set_num_threads(1)
    store = f"file://{path}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    count = HOW[how](rank, time.time() + seconds)
    print(f"rank {rank}, {how}: {count:,} works in {seconds:g} s, no abort", flush=True)
    os._exit(0)


def main(how: str, seconds: float) -> int:
    world_size = 2 if how == "ours" else 1
    with tempfile.TemporaryDirectory() as path:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=rank_main, args=(r, world_size, path, how, seconds))
            for r in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    print(f"exit codes {[process.exitcode for process in ranks]}; torch {torch.__version__}")
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
