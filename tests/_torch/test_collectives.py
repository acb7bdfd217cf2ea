"""`fxshard._torch.collectives` and `data_parallel`: what they rely on in torch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from fxshard._torch import collectives, data_parallel, dynamo, modes
from fxshard._torch.modes import TorchDispatchMode
from fxshard._torch.operators import schema_of
from fxshard._torch.process_groups import fake_process_group


class Seen(TorchDispatchMode):
    """Writes down operators, and runs those of `collectives` as it says."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(modes.is_wrapper, types)):
            return NotImplemented
        if func is collectives.WRAP:
            return collectives.AsyncCollectiveTensor(args[0])
        if func.namespace != "prim":
            self.names.append(str(func))
        return args[0] if func is collectives.WAIT else func(*args, **(kwargs or {}))


def test_collectives_of_fakes_wait_where_eager_ones_do() -> None:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with fakes, collectives.called_eagerly(fakes), Seen() as seen:
            partial = DTensor.from_local(torch.empty(4), mesh, [Partial()], run_check=False)
            whole = partial.redistribute(mesh, [Replicate()], async_op=True)
            assert seen.names[-1] == "_c10d_functional.all_reduce.default"
            assert isinstance(whole._local_tensor, functional.AsyncCollectiveTensor)
            _ = whole + 1
            assert seen.names[-2:] == [str(collectives.WAIT), "aten.add.Tensor"]
            with FakeTensorMode():  # one of torch's own, as in a trace
                assert functional._are_we_tracing()
        assert not functional._are_we_tracing()
        with fakes:
            assert functional._are_we_tracing()


def test_a_tensor_is_waited_for_by_the_work_that_is_registered() -> None:
    """Once: afterwards the registry knows it no more."""
    waited: list[torch.Tensor] = []

    class Work(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            waited.append(made)
            return True

    with fake_process_group(0, 2):
        made = torch.zeros(2)
        collectives.register_work(made, Work())
        alias = made.detach()  # the registry knows its memory
        assert collectives.WAIT(alias) is alias and len(waited) == 1
        collectives.WAIT(made)
    assert len(waited) == 1


def test_gather_is_what_functional_collectives_call() -> None:
    with fake_process_group(0, 2), Seen() as seen:
        waits: Any = functional.all_gather_tensor(torch.zeros(2), 0, dist.group.WORLD)
        waits.trigger_wait()
    assert str(collectives.GATHER) in seen.names


def test_launches_are_what_functional_collectives_call_and_end_in_their_group() -> None:
    calls: list[Any] = [
        lambda x, group: functional.all_gather_tensor(x, 0, group),
        lambda x, group: functional.all_to_all_single(x, None, None, group),
        lambda x, group: functional.all_reduce(x, "sum", group),
        lambda x, group: functional.reduce_scatter_tensor(x, "sum", 0, group),
        lambda x, group: functional.broadcast(x, 0, group),
    ]
    with fake_process_group(0, 2), Seen() as seen:
        for call in calls:
            call(torch.zeros(2), dist.group.WORLD).trigger_wait()
    launched = [name for name in seen.names if name in map(str, collectives.LAUNCHES)]
    assert launched == [str(each) for each in collectives.LAUNCHES]
    assert collectives.LAUNCHES[: len(collectives.SENDING)] == collectives.SENDING
    for each in collectives.LAUNCHES:
        assert schema_of(each).arguments[-1].name in ("group_name", "group")


def test_the_work_of_finished_has_results() -> None:
    tensors = [torch.zeros(2)]
    work: Any = dist.Work.unbox(collectives.finished(tensors))
    assert work.wait() and work.is_completed()
    assert work.get_future().value()[0] is tensors[0]


def test_a_reducer_allocates_inside_of_around() -> None:
    inside: list[bool] = []
    made: list[tuple[str, bool]] = []

    class Making(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.ops.aten.empty.memory_format:
                made.append((str(kwargs.get("dtype")), bool(inside)))
            if func.namespace == "c10d":
                result = func(*args, **kwargs)
                return args[0], collectives.finished(args[0]) if result else None
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    with fake_process_group(0, 2), data_parallel.reducers_watched(around), Making():
        model = DistributedDataParallel(nn.Linear(4, 4, bias=False))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    buckets = [there for dtype, there in made if dtype == "torch.float32"]
    integers = [there for dtype, there in made if dtype in ("torch.int32", "torch.int64")]
    assert len(buckets) == 2 and all(buckets)  # at first, and rebuilt
    assert integers and all(integers)
    assert not inside


def test_views_that_may_copy_are_composite() -> None:
    aten = torch.ops.aten
    assert modes.is_composite(aten.to.dtype_layout) and modes.is_composite(aten.contiguous.default)
    assert not modes.is_composite(aten.view.default)


class Doubled(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def test_graphs_in_ddp_are_split_elsewhere() -> None:
    seen: list[Any] = []

    def compiled(graph_module: Any) -> Any:
        seen.append(graph_module)
        return graph_module.forward

    with fake_process_group(0, 2), dynamo.splits_for_ddp(compiled):
        model = DistributedDataParallel(Doubled())
        torch.compile(model, backend="eager")(torch.ones(2, 4))
    assert len(seen) == 1
