"""The oracles against hand counts."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fsdp2 import units_of
from tests.oracles import Collectives, count_collectives, profiler_peak_bytes
from tests.zoo import MODELS

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

# Each of these issues one collective; a shard is 8 floats, `n` the world size.


def gather(pg: dist.ProcessGroup, n: int) -> None:
    dist.all_gather_into_tensor(torch.empty(8 * n), torch.ones(8))


def scatter(pg: dist.ProcessGroup, n: int) -> None:
    dist.reduce_scatter_tensor(torch.empty(8), torch.ones(8 * n), op=dist.ReduceOp.AVG)


def gather_list(pg: dist.ProcessGroup, n: int) -> None:
    dist.all_gather([torch.empty(8) for _ in range(n)], torch.ones(8))


def direct_gather(pg: dist.ProcessGroup, n: int) -> None:
    pg._allgather_base(torch.empty(8 * n), torch.ones(8)).wait()


def direct_gather_single(pg: dist.ProcessGroup, n: int) -> None:
    gather_single = getattr(
        pg, "all_gather_single", pg._allgather_base
    )  # torch 2.11 has no such name
    gather_single(torch.empty(8 * n), torch.ones(8)).wait()


def direct_scatter(pg: dist.ProcessGroup, n: int) -> None:
    pg._reduce_scatter_base(torch.empty(8), torch.ones(8 * n)).wait()


def direct_gather_coalesced(pg: dist.ProcessGroup, n: int) -> None:
    outs = [torch.empty(4 * n), torch.empty(4 * n)]
    pg.allgather_into_tensor_coalesced(outs, [torch.ones(4), torch.ones(4)]).wait()


def direct_scatter_coalesced(pg: dist.ProcessGroup, n: int) -> None:
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG
    outs = [torch.empty(4), torch.empty(4)]
    pg.reduce_scatter_tensor_coalesced(outs, [torch.ones(4 * n), torch.ones(4 * n)], options).wait()
    if pg.name() == "gloo":
        assert all(torch.equal(out, torch.ones(4)) for out in outs)


def coalescing_manager(pg: dist.ProcessGroup, n: int) -> None:
    outs = [torch.empty(4 * n), torch.empty(4 * n)]
    with dist._coalescing_manager(group=pg, async_ops=True) as work:
        for out in outs:
            dist.all_gather_into_tensor(out, torch.ones(4), group=pg)
    work.wait()


def functional_gather(pg: dist.ProcessGroup, n: int) -> None:
    functional.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(8), n, pg.group_name)
    )


def functional_gather_coalesced(pg: dist.ProcessGroup, n: int) -> None:
    for out in functional.all_gather_into_tensor_coalesced([torch.ones(4), torch.ones(4)], pg):
        functional.wait_tensor(out)


def functional_scatter(pg: dist.ProcessGroup, n: int) -> None:
    functional.wait_tensor(functional.reduce_scatter_tensor(torch.ones(8 * n), "avg", 0, pg))


def reduce(pg: dist.ProcessGroup, n: int) -> None:
    dist.all_reduce(torch.ones(8))


def direct_reduce(pg: dist.ProcessGroup, n: int) -> None:
    pg.allreduce([torch.ones(8)]).wait()


def functional_reduce(pg: dist.ProcessGroup, n: int) -> None:
    functional.wait_tensor(functional.all_reduce(torch.ones(8), "sum", pg))


def broadcast(pg: dist.ProcessGroup, n: int) -> None:
    dist.broadcast(torch.ones(8), 0)


def direct_broadcast(pg: dist.ProcessGroup, n: int) -> None:
    pg.broadcast(torch.ones(8), 0).wait()


def full_dtensor(pg: dist.ProcessGroup, n: int) -> None:
    mesh = init_device_mesh("cpu", (n,))
    distribute_tensor(torch.ones(8 * n), mesh, [Shard(0)], src_data_rank=None).full_tensor()


def dtensor_op(pg: dist.ProcessGroup, n: int) -> None:
    """A matmul which must gather its second operand, inside DTensor's own dispatch."""
    mesh = init_device_mesh("cpu", (n,))
    left = distribute_tensor(torch.ones(n, 8 * n), mesh, [Shard(0)], src_data_rank=None)
    left @ distribute_tensor(torch.ones(8 * n, 1), mesh, [Shard(0)], src_data_rank=None)


def traced_only(pg: dist.ProcessGroup, n: int) -> None:
    with FakeTensorMode():
        functional.wait_tensor(functional.all_reduce(torch.ones(8), "sum", pg))


def compiled(pg: dist.ProcessGroup, n: int) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x + 1, "sum", pg) + 1

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compile(fn, backend=counter)(torch.ones(8))
    assert counter.frame_count == 1


By = Callable[[int], list[tuple[str, int, int]]]


def once(kind: str, tensors: int = 1) -> By:
    """One call of `kind` with 8 floats."""
    return lambda n: [(kind, 32, tensors)]


def once_whole(kind: str, tensors: int = 1) -> By:
    """One call of `kind` with the 8 floats of each rank."""
    return lambda n: [(kind, 32 * n, tensors)]


BY_HAND: dict[Callable[[dist.ProcessGroup, int], None], By] = {
    gather: once_whole("all_gather"),
    scatter: once_whole("reduce_scatter"),
    gather_list: lambda n: [("all_gather", 32 * n, n)],
    direct_gather: once_whole("all_gather"),
    direct_gather_single: once_whole("all_gather"),
    direct_scatter: once_whole("reduce_scatter"),
    direct_gather_coalesced: once_whole("all_gather", 2),
    direct_scatter_coalesced: once_whole("reduce_scatter", 2),
    coalescing_manager: once_whole("all_gather", 2),
    functional_gather: once_whole("all_gather"),
    functional_gather_coalesced: once_whole("all_gather", 2),
    functional_scatter: once_whole("reduce_scatter"),
    reduce: once("all_reduce"),
    direct_reduce: once("all_reduce"),
    functional_reduce: once("all_reduce"),
    broadcast: once("broadcast"),
    direct_broadcast: once("broadcast"),
    full_dtensor: once_whole("all_gather"),
    dtensor_op: once_whole("all_gather"),
    compiled: once("all_reduce"),
    traced_only: lambda n: [],
}


def wrong_counts(rank: int, n: int) -> list[str]:
    """What was counted otherwise than by hand, on this process's default group of size `n`."""
    wrong = []
    for call, by_hand in BY_HAND.items():
        with count_collectives() as seen:
            call(dist.group.WORLD, n)
        got = [(c.kind, c.nbytes, c.tensors) for c in seen.calls]
        if got != by_hand(n):
            wrong.append(f"{call.__name__}: {got}, by hand {by_hand(n)}")
    return wrong


@pytest.fixture
def fake_world() -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield 4
    dist.destroy_process_group()


def test_collectives_on_gloo(ranks) -> None:
    assert ranks(2).run(wrong_counts) == [[], []]


def test_collectives_on_the_fake_group(fake_world: int) -> None:
    assert wrong_counts(0, fake_world) == []


def test_a_failed_collective_is_not_counted(fake_world: int) -> None:
    with count_collectives() as seen, pytest.raises(RuntimeError):
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(8))
    assert seen == Collectives([])


def fsdp2_step(rank: int, world_size: int) -> Collectives:
    case = MODELS["transformer"]
    model = case.build()
    for unit in units_of(model, case):
        fully_shard(unit)
    fully_shard(model)
    args, kwargs = case.batch(rank, 0)
    with count_collectives() as seen:
        case.loss(model(*args, **kwargs)).backward()
    return seen


def test_collectives_of_fsdp2(ranks) -> None:
    """Root and 3 layers gathered in forward, the layers again in backward, all 4 reduced once."""
    first, second = ranks(2).run(fsdp2_step)
    assert first == second
    kinds = first.kinds()
    assert kinds[:4] == ["all_gather"] * 4
    assert sorted(kinds[4:]) == ["all_gather"] * 3 + ["reduce_scatter"] * 4
    model = MODELS["transformer"].build()
    assert first.nbytes("reduce_scatter") == sum(4 * p.numel() for p in model.parameters())


def kib(n: int) -> torch.Tensor:
    return torch.empty(1024 * n, dtype=torch.uint8)


def test_peak_of_nothing() -> None:
    assert profiler_peak_bytes(lambda: None) == 0


def test_peak_of_allocations() -> None:
    def allocate() -> None:
        a, b = kib(1), kib(2)
        del a
        c = kib(4)  # 6 KiB
        c.untyped_storage().resize_(0)
        del b
        d = kib(5)
        d.resize_(1024 * 6)  # old and new at once: 11 KiB

    assert profiler_peak_bytes(allocate) == 11 * 1024


def test_peak_is_relative_to_the_start() -> None:
    held: list[torch.Tensor] = []

    def step() -> None:
        held.append(kib(3))
        while len(held) > 1:
            del held[0]
        kib(1)

    assert profiler_peak_bytes(step) == 4 * 1024
    held.clear()
    assert profiler_peak_bytes(step, before=step) == 3 * 1024  # 3 were there; 6 while both live


def test_peak_sees_inside_kernels_and_backward() -> None:
    x = torch.randn(1024, requires_grad=True)

    def step() -> None:
        y = x.exp()  # 4 KiB, saved
        y.sum().backward()  # expanded gradient takes none; x.grad 4 KiB

    assert 8 * 1024 <= profiler_peak_bytes(step) < 8 * 1024 + 64


def gather_peak(rank: int, world_size: int) -> int:
    shard, whole = torch.ones(1024), torch.empty(1024 * world_size)
    dist.all_gather_into_tensor(whole, shard)
    return profiler_peak_bytes(lambda: dist.all_gather_into_tensor(whole, shard))


def test_peak_sees_gloos_buffers(ranks) -> None:
    """Gloo gathers into a buffer of its own first."""
    assert all(peak >= 8 * 1024 for peak in ranks(2).run(gather_peak))
