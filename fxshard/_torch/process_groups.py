"""Process groups, their stores and their collectives."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Initialise torch.distributed's default group as a fake one for the time of the block.

    A fake group runs one rank alone: an all-gather repeats this rank's input, a reduce-scatter
    keeps its chunk (torch/csrc/distributed/c10d/FakeProcessGroup.hpp).
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts the rank before each line of a traceback, once per group
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


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
    n-th one of `parent`.
    """
    if dist.get_backend(parent) == "fake":
        return dist.new_group(ranks, use_local_synchronization=True)
    number = group_store(parent).add(f"fxshard/groups/{dist.get_rank()}", 1)
    name = f"fxshard.{parent.group_name}.{number}.{'_'.join(map(str, ranks))}"
    named = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        return dist.new_group(ranks, group_timeout(parent), backend, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = named


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
