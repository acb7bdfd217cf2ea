"""What a backend of torch.distributed supports, and how its collectives are called.

This module alone decides which calls a launch makes. Differences between backends:

==============================  ==========================  ==========================
what is called                  gloo                        NCCL
==============================  ==========================  ==========================
several all-gathers, one call   no: a call per buffer (1)   yes
dtypes of an all-gather         not all (2): bytes          not all: bytes
complex numbers in a reduction  yes: sent as real pairs     not all: real pairs
two dtypes in one call          wrong in silence (3)        right
an average                      sum, then a division        inside the collective
an average of integers          an error                    truncated
a NaN in a sum or an average    NaN                         NaN
a NaN in a maximum or minimum   may be lost (4)             not tried
zero elements                   yes                         yes
operands that are not           copied first                refused
contiguous
a collective that fails         raises at its wait          aborts the process
a new group of the ranks of     hangs, as torch names it    not tried
one that was destroyed          (5)
==============================  ==========================  ==========================

(1) ``allgather_into_tensor_coalesced`` is the one operation of gloo that corrupts the heap as soon
as two works are in flight: docs/upstream.md. (2) int16 and the 8-bit floats are refused in every
collective: "Invalid scalar type". (3) It promotes to one dtype and reads the result in another.
fxshard never does that: each collective of a program moves one dtype (`Fact.ONE_DTYPE`), and
all-gathers move bytes. (4) It compares, and no comparison with a NaN is true. So with
``reduce_op="max"`` or "min" a NaN of one rank may be missing in the gradient, where it is present
if all ranks run in one process: look for it in the loss. (5) Every backend, as far as torch's code
says: groups are named anew here (`fxshard._torch.process_groups.new_group`).

tests/distributed/test_backends.py tests these rows on gloo; the last two are in
test_exceptions.py, and in tests/_torch/test_export.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fxshard._torch import process_groups
from fxshard.ir import layout, ops, tags


@dataclasses.dataclass(frozen=True)
class Backend:
    """How the collectives of a launch are called.

    Attributes:
        coalesces_gathers: one call gathers several tensors; False: a call per tensor.
            Reductions of several tensors are one call on every backend.
    """

    coalesces_gathers: bool

    def calls(self, launch: fx.Node) -> int:
        """How many calls a process group receives for `launch`, a collective of a program."""
        one = launch.target is not ops.all_gather or self.coalesces_gathers
        return 1 if one else len(tags.operands(launch))

    def all_gather(
        self,
        group: Any,
        buffers: Sequence[Tensor],
        shards: Sequence[Tensor],
        alias: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[dist.Work]:
        """Gather each of `shards` into the buffer beside it; yields works in flight.

        Args:
            group: the process group.
            buffers: flat, `as_bytes`, one per shard.
            shards: the same.
            alias: makes what the backend may hold of a buffer (`Aliases.of`). None: whoever asks
                frees the buffers, however many refer to them.
        """
        if self.coalesces_gathers:
            yield group.allgather_into_tensor_coalesced(buffers, shards)
            return
        for buffer, shard in zip(buffers, shards, strict=True):
            if alias is not None:
                # Into one buffer is what gloo does in this way too, with parts that it makes itself
                # and that nobody else can let go of.
                ranks = group.size()
                parts = (layout.part_of(buffer, rank, ranks) for rank in range(ranks))
                yield group.allgather([list(map(alias, parts))], [shard])
                continue
            yield process_groups.all_gather_single(buffer, shard, group=group, async_op=True)


ONE_CALL_EACH = Backend(coalesces_gathers=False)
BACKENDS = {
    "gloo": ONE_CALL_EACH,
    "nccl": Backend(coalesces_gathers=True),
    # Moves nothing; its calls are those of NCCL, on whose machines a plan is to run.
    "fake": Backend(coalesces_gathers=True),
}


def backend_of(group: dist.ProcessGroup) -> Backend:
    """The backend of `group`; an unknown one gets a call per buffer, which all support."""
    return BACKENDS.get(dist.get_backend(group), ONE_CALL_EACH)


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view of a contiguous tensor, uint8."""
    return tensor.view(-1).view(torch.uint8)


def as_real(tensor: Tensor) -> Tensor:
    """What a reduction takes for `tensor`: of complex numbers a real view, ``[..., 2]``."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
