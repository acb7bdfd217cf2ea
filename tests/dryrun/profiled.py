"""Every live range of a real run, by torch.profiler: a second measure, beside `measure`.

It watches the CPU's allocator where that one watches operators, and shares no code with it. What
the allocator sees and a dry run for the CPU does not tell is left out, and nothing else:

- what gloo takes: in its own threads, and within ``c10d::_allgather_base_`` and its kin;
- what a kernel takes for itself: allocated and freed within one operator. Operators call others:
  the outermost counts, unless it is only a name for those it calls, as ``aten::linear``;
- the 2 of ``x * 2``, which is a tensor while the operator runs: 8 bytes made outside of it.

A storage that is freed by a thread of gloo, as it was the last to hold it, is freed when that
thread gets to it, and unseen by the profiler. The end of such a storage is `LATE`.
"""

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from tests.dryrun.measure import without_collector

NEVER, LATE = -1, -2
_MARK = "fxshard: a step begins or ends"


class Life(NamedTuple):
    """A storage, told without times: those of different runs are compared.

    Attributes:
        born: how many storages were born before the operator that made it.
        bytes: its size.
        died: how many have been born when it is freed, or `NEVER` in these steps, or `LATE`.
    """

    born: int
    bytes: int
    died: int


class Storage(NamedTuple):
    """The same with times, in any unit.

    Attributes:
        born, died: when; died may be `NEVER` or `LATE`.
        bytes: its size.
        maker: the same for all that one operator made, whose order says nothing.
    """

    born: Any
    bytes: int
    maker: Any
    died: Any


def lives(storages: Iterable[Storage]) -> list[Life]:
    """What can be compared."""
    ordered = sorted(storages, key=lambda each: each.born)
    births, first = [each.born for each in ordered], dict[Any, int]()
    found = []
    for i, each in enumerate(ordered):
        known = each.died in (NEVER, LATE)
        died = each.died if known else bisect.bisect_left(births, each.died)
        found.append(Life(first.setdefault(each.maker, i), each.bytes, died))
    return sorted(found)


def profiled(train: Callable[[Callable[[], None]], None]) -> list[Life]:
    """The storages born in the steps of `train`, which calls its argument around each of them."""

    def ended() -> None:
        with record_function(_MARK):
            pass

    activities = [ProfilerActivity.CPU]
    with without_collector(), profile(activities=activities, profile_memory=True) as found:
        train(ended)
    assert found.profiler is not None
    roots: list[Any] = found.profiler.kineto_results.experimental_event_tree()
    events = sorted(each for root in roots for each in _events(root))
    marks = [i for i, each in enumerate(events) if not each.bytes]
    return lives(_storages(events[marks[0] : marks[-1]]))


class _Event(NamedTuple):
    """The allocator gives memory, or takes it: then the bytes are below 0. Of a mark they are 0."""

    time: int
    thread: int
    address: int
    bytes: int
    operator: tuple[int, str] | None  # in which it happens: time and name
    of_fsdp: bool  # it happens in one of its ranges


def _events(
    node: Any, operator: tuple[int, str] | None = None, of_fsdp: bool = False
) -> Iterator[_Event]:
    """Those in a tree."""
    when = (node.start_time_ns, node.start_tid)
    if node.tag == _EventType.Allocation:
        given = node.extra_fields
        yield _Event(*when, given.ptr, given.alloc_size, operator, of_fsdp)
        return
    if node.name == _MARK:
        yield _Event(*when, 0, 0, None, False)
    if operator is None and _is_operator(node.name):
        operator = (node.start_time_ns, node.name)
    for child in node.children:
        yield from _events(child, operator, of_fsdp or node.name.startswith("FSDP::"))


@functools.cache
def _is_operator(name: str) -> bool:
    """False for ranges of code, and for what only calls other operators."""
    known = torch._C._dispatch_get_all_op_names()
    overloads = [each for each in known if each.partition(".")[0] == name]
    return bool(overloads) and not any(map(_calls_others, overloads))


def _calls_others(overload: str) -> bool:
    """True unless it is for names of dimensions, as there is one of most operators."""
    name, _, which = overload.partition(".")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has_kernel(overload, "CompositeImplicitAutograd")
    return composite and "Dimname" not in str(torch._C._get_schema(name, which))


def _storages(events: list[_Event]) -> Iterator[Storage]:
    main, alive, ends = events[0].thread, dict[int, _Event](), dict[_Event, _Event]()
    for event in events:
        if event.bytes > 0:
            alive[event.address] = event
        elif event.address in alive:
            ends[alive.pop(event.address)] = event
    for event in events:
        end = ends.get(event)
        if event.bytes <= 0 or event.thread != main:
            continue
        operator = event.operator
        of_gloo = operator is not None and operator[1].startswith("c10d::")
        of_kernel = operator is not None and end is not None and end.operator == operator
        is_number = operator is None and event.bytes == 8 and not event.of_fsdp
        if not (of_gloo or of_kernel or is_number):
            unseen = LATE if event.of_fsdp else NEVER
            died = unseen if end is None else end.time
            yield Storage(event.time, event.bytes, operator or event, died)
