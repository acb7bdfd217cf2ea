"""Process groups, their stores and their collectives."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch.dtensors import forget_meshes


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Initialise torch.distributed's default group as a fake one for the time of the block.

    A fake group runs one rank alone: an all-gather repeats this rank's input, a reduce-scatter
    keeps its chunk (torch/csrc/distributed/c10d/FakeProcessGroup.hpp). No mesh of an earlier group
    is taken for an equal one of this group, nor one of this for one of a later group.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts the rank before each line of a traceback, once per group
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    forget_meshes()
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()
        sys.excepthook = hook


class FakeRanks:
    """A fake process group, and the groups of its meshes, that are there in blocks only.

    In every block they are the same ones, so that what an earlier block made of them works on.
    (The state is that of torch/distributed/distributed_c10d.py, ``_world``, and of C++, which
    resolves names of groups; ``init_process_group`` and ``destroy_process_group`` change both.)

    Attributes:
        inside: such a block is open.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._kept: tuple[Any, int, list[dict[Any, Any]]] | None = None
        self.inside: bool = False

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Within the block, and blocks in it, torch.distributed is initialised with this group.

        Raises:
            RuntimeError: it is initialised with another one.
        """
        if self.inside:
            yield
            return
        if dist.is_initialized():
            raise RuntimeError("torch.distributed is initialised with another process group")
        first = fake_process_group(self._rank, self._world_size)
        with _as_before(self._kept) if self._kept else first:
            self.inside = True
            forget_meshes()
            try:
                yield
            finally:
                forget_meshes()
                self.inside = False
                self._kept = _groups()


# Of torch's ``_world``: by group, or by tag.
_BY_GROUP = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"),
)


def _groups() -> tuple[Any, int, list[dict[Any, Any]]]:
    """The default group, how many were made, and what is noted of each."""
    world = distributed_c10d._world
    return world.default_pg, world.group_count, [dict(getattr(world, n)) for n in _BY_GROUP]


@contextlib.contextmanager
def _as_before(kept: tuple[Any, int, list[dict[Any, Any]]]) -> Iterator[None]:
    """For the time of the block, the groups that `_groups` has found are there again."""
    torchs: Any = distributed_c10d
    world, (default, count, noted) = torchs._world, kept
    for name, entries in zip(_BY_GROUP, noted, strict=True):
        getattr(world, name).update(entries)
    for group, name in world.pg_names.items():
        torchs._register_process_group(name, group)
    world.group_count = count
    torchs._update_default_pg(default)
    try:
        yield
    finally:
        torchs._update_default_pg(None)
        for name in _BY_GROUP:
            getattr(world, name).clear()
        torchs._unregister_all_process_groups()
        world.group_count = 0


def forget_groups(mesh: DeviceMesh) -> None:
    """Let `mesh` refer to its process groups no more (torch/distributed/device_mesh.py)."""
    for each in (mesh, mesh._get_root_mesh()):
        getattr(each, "_pg_registry", {}).clear()


def called(name: str) -> Any:
    """The process group that functional collectives call `name`, on this rank."""
    groups: Any = distributed_c10d
    return groups._resolve_process_group(name)


def group_store(group: Any) -> Any:
    """The key-value store of the group; each group has its own keys."""
    return group.get_group_store()


def group_timeout(group: Any) -> Any:
    """The timeout of the group's collectives, a `datetime.timedelta`."""
    return group._get_backend(group._device_types[0]).options._timeout


# torch 2.13 renamed it, and warns of the old name at every call.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def new_group(
    ranks: list[int], parent: dist.ProcessGroup, backend: str | None = None
) -> dist.ProcessGroup:
    """A process group of some ranks of `parent`; collective over these ranks only.

    `backend`: None: that of the default group. A fake group's are fake.

    torch names such a group by its ranks and by the number of groups of this process
    (torch/distributed/distributed_c10d.py, ``_hash_ranks_to_str``). After one of them was
    destroyed, a name may be used again, with old addresses in the store; and ranks with different
    numbers of groups use different names. In both cases ranks hang. Here the group is named as the
    n-th one of `parent`, and not counted, as torch does from 2.14 on: groups that a user makes
    later have the same names on all ranks, also where some ranks have made none here.
    """
    if dist.get_backend(parent) == "fake":
        return dist.new_group(ranks, use_local_synchronization=True)
    number = group_store(parent).add(f"fxshard/groups/{dist.get_rank()}", 1)
    name = f"fxshard.{parent.group_name}.{number}.{'_'.join(map(str, ranks))}"
    named, count = distributed_c10d._hash_ranks_to_str, distributed_c10d._world.group_count
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        return dist.new_group(ranks, group_timeout(parent), backend, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = named
        distributed_c10d._world.group_count = count


# By parent, ranks and backend. torch holds a group until it is destroyed.
_Shared = weakref.WeakValueDictionary[tuple[tuple[int, ...], str | None], dist.ProcessGroup]
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shared] = weakref.WeakKeyDictionary()


def shared_group(
    ranks: Sequence[int], parent: dist.ProcessGroup, backend: str | None = None
) -> dist.ProcessGroup:
    """As `new_group`, but one for equal arguments, as long as that lives.

    Each group of gloo has threads and connections of its own. Collective over `ranks`, which all
    ask for the same groups in the same order.
    """
    made = _shared.setdefault(parent, weakref.WeakValueDictionary())
    key = (tuple(ranks), backend)
    group = made.get(key)
    if group is None or not is_alive(group):
        group = made[key] = new_group([*ranks], parent, backend)
    return group


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """False if it is None or was destroyed."""
    try:
        return group is not None and bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


@functools.cache
def let_go_before_exit() -> None:
    """When this process ends, threads of gloo get the time to let go of tensors, 0.1 s.

    They hold those of the last collectives, and need the interpreter to drop them. While it is
    finalised they do not get it: Python before 3.14 ends such a thread, and with it the process, by
    "terminate called without an active exception" (docs/upstream.md). Nothing tells whether they
    have dropped them; a sleep is what lets them have the interpreter.
    """
    atexit.register(time.sleep, 0.1)


@functools.cache
def gather_one_by_one() -> torch.library.Library:
    """From now on coalesced all-gathers of CPU tensors are a call per tensor, in this process.

    gloo's coalesced one can corrupt the heap, much later (docs/upstream.md), and it is what all of
    torch's functional all-gathers run, of one tensor too: `DTensor.full_tensor`, `redistribute`,
    and with them state dicts and norms (torch/csrc/distributed/c10d/Functional.cpp).

    Returns:
        What holds the registration.
    """

    def gather(outputs: Any, inputs: Any, group: Any, async_op: bool = True) -> Any:
        members = dist.ProcessGroup.unbox(group)
        works: list[dist.Work] = []
        for output, part in zip(outputs, inputs, strict=True):
            for work in works:
                work.wait()  # threads may end out of order, and the caller waits for one work only
            part = part if part.dim() else part.view(1)  # gloo's takes no tensor without dimensions
            works = [members._allgather_base(output, part)]
        return works[0].boxed()

    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():  # "Overriding a previously registered kernel" is intended
        warnings.simplefilter("ignore", UserWarning)
        library.impl("allgather_into_tensor_coalesced_", gather, "CPU")
    return library
