"""Independent measures of what really happened: collectives issued, and bytes live at the peak."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._C._autograd import DeviceType
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What a dispatch mode sees: ProcessGroup's methods as c10d ops, functional ones as their own.
_KINDS = {
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_coalesced_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_reduce_coalesced_": "all_reduce",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::broadcast_": "broadcast",
}
_LOCAL = {
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "c10d::check_for_nan",
}


@dataclass(frozen=True)
class Collective:
    """One call to the process group; a coalesced call is one."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", or the op's own name
    op: str  # "c10d::_allgather_base_"
    nbytes: (
        int  # of the larger side on this rank: what is gathered, what is scattered, what is reduced
    )
    tensors: int  # how many on that side; more than one only in a coalesced or list call
    # The group's ranks, where the op was given a ProcessGroup itself.
    ranks: tuple[int, ...] = field(default=(), compare=False)
    group: str = field(default="", compare=False)  # its name: two groups may have the same ranks


@dataclass
class Collectives:
    """Everything that `count_collectives` saw, in order."""

    calls: list[Collective] = field(default_factory=list)

    def count(self, kind: str | None = None) -> int:
        """Calls of `kind`, or all."""
        return len(self._of(kind))

    def nbytes(self, kind: str | None = None) -> int:
        """Bytes of the calls of `kind`, or of all; see `Collective.nbytes`."""
        return sum(call.nbytes for call in self._of(kind))

    def kinds(self) -> list[str]:
        """The kinds in the order of the calls."""
        return [call.kind for call in self.calls]

    def _of(self, kind: str | None) -> list[Collective]:
        return [call for call in self.calls if kind in (None, call.kind)]


class _Recorder(TorchDispatchMode):
    def __init__(self, seen: Collectives) -> None:
        super().__init__()
        self.seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile does nothing, silently, while the mode is on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let it become local ops first: the mode is off inside `func`
        result = func(*args, **(kwargs or {}))
        op = func.name().split(".")[0]
        if op.startswith(("c10d::", "_c10d_functional::")) and op not in _LOCAL:
            sides = [
                [leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)]
                for side in (*args, result)
            ]
            larger = max(sides, key=_nbytes)
            if not any(isinstance(t, FakeTensor) or t.is_meta for t in larger):  # traced, not run
                kind = _KINDS.get(op, op.split("::")[1])
                call = Collective(kind, op, _nbytes(larger), len(larger), *_group(args))
                self.seen.calls.append(call)
        return result


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Record each collective that this thread hands to any process group, whichever API issued it.

    Seen: `torch.distributed`, methods of a ProcessGroup, functional collectives, DTensor, FSDP2,
    backward on CPU, compiled code. Not seen: other threads.
    """
    seen = Collectives()
    with _Recorder(seen):
        yield seen


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: what earlier tests left would be seen freed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def profiler_peak_bytes(
    fn: Callable[[], object], before: Callable[[], object] | None = None
) -> int:
    """Peak of the CPU bytes alive in `fn()`, above those alive at its start, by torch.profiler.

    Sees inside kernels and gloo's threads; unrounded sizes. What was allocated before the profiler
    started it cannot see freed: allocate in `before`, which runs first under the same profiler,
    whatever `fn` frees.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        if before:
            before()
        with uncollected(), record_function("fxshard.peak"):
            fn()
    events = sorted(prof.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (span,) = [event for event in events if event.name() == "fxshard.peak"]
    live = peak = 0
    for event in events:
        inside = span.start_ns() <= event.start_ns() <= span.end_ns()
        if inside and event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _group(args: Iterable[Any]) -> tuple[tuple[int, ...], str]:
    """Ranks and name of the process group among the arguments of an operator."""
    for arg in args:
        if isinstance(arg, ScriptObject) and "ProcessGroup" in str(arg._type()):
            group = dist.ProcessGroup.unbox(arg)
            return tuple(dist.get_process_group_ranks(group)), group.group_name
    return (), ""


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def profiler_temporaries(fn: Callable[[], object]) -> list[tuple[str, int]]:
    """What operators take and give back while they run: ``(operator, bytes)``, in order.

    By torch.profiler's memory events on CPU: bytes at most alive during a top-level operator,
    above what it leaves behind. A number wrapped into a tensor just before its operator (8 bytes,
    freed inside) counts as the operator's.
    """
    fn()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        fn()
    events = sorted(
        prof.profiler.kineto_results.events(), key=lambda e: (e.start_ns(), -e.duration_ns())
    )
    memory = [event for event in events if event.name() == "[memory]"]
    found: list[tuple[str, int]] = []
    end = 0
    for event in events:
        if not event.name().startswith("aten::") or event.start_ns() < end:
            continue
        previous, end = end, event.end_ns()
        before = [m.nbytes() for m in memory if previous <= m.start_ns() < event.start_ns()]
        inside = [m.nbytes() for m in memory if event.start_ns() <= m.start_ns() <= end]
        wrapped = sum(size for size in before if size == 8) if inside[-1:] == [-8] else 0
        live = top = wrapped
        for size in inside:
            live += size
            top = max(top, live)
        if top > max(live, 0):
            found.append((event.name().removeprefix("aten::"), top - max(live, 0)))
    return found
