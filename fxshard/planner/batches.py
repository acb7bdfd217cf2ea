"""The same call with another batch, or another size of some dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fxshard._torch import context_parallel, trees
from fxshard.bytesize import is_count, is_size
from fxshard.capture.other_sizes import with_sizes
from fxshard.errors import ConfigError
from fxshard.ir.program import Program, input_name
from fxshard.plans.plan import Plan, Steps, make_plan
from fxshard.plans.workload import Call, Workload

BATCH = "batch"  # name of the open size
DOUBLINGS = 8  # of the batch of the example


def has_dimension(leaf: Any, dim: int) -> bool:
    """True for a tensor with a dimension `dim`."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > dim


def batch_size(call: Call) -> int | None:
    """Size of the first dimension of the first tensor of a call that has one; else None."""
    leaves, _ = trees.tree_flatten(call)
    return next((leaf.shape[0] for leaf in leaves if has_dimension(leaf, 0)), None)


def resized(call: Call, dim: int, before: int | None, after: int) -> Call:
    """A call with dimension `dim` changed where its size is `before`, in meta tensors."""
    leaves, _ = trees.tree_flatten(call)
    places = tuple(
        (number, dim)
        for number, leaf in enumerate(leaves)
        if has_dimension(leaf, dim) and leaf.shape[dim] == before
    )
    return with_sizes(call, {"": places}, {"": after})


def _hold_as_much(cut: Call, call: Call) -> None:
    """Let the meta tensors of `call` hold storages of whole sequences, as those of `cut` do.

    ``context_parallel`` makes a tensor smaller in place, and its storage stays.
    """
    both = zip(trees.tree_flatten(cut)[0], trees.tree_flatten(call)[0], strict=True)
    for before, after in both:
        if has_dimension(after, 0) and after is not before and before.numel():
            whole = before.untyped_storage().nbytes() // before.element_size()
            after.data.resize_(after.numel() * whole // before.numel())


class Batches:
    """A workload with its batch left open, and its plans at other batches.

    Attributes:
        sizes: batches to try, in samples per rank and micro-batch; [None]: the call has none.
        opened: the size that is traced with the batch open, for all sizes; not 1, which broadcasts.
        workload: what plans are made of.
    """

    def __init__(self, workload: Workload, asked: Sequence[int] | None) -> None:
        """Open the batch of `workload`; `asked`: its sizes, as of `fxshard.tune`.

        Raises:
            ConfigError: `asked` are no sizes, or the call has no batch.
        """
        self._example = batch_size(workload.call)
        self.sizes: list[int | None] = self._checked(asked)
        self.opened: int | None = next(
            (size for size in self.sizes if size and size > 1), self.sizes[0]
        )
        self.workload: Workload = self._open(workload)
        self._calls: dict[int | None, Call] = {self._example: self.workload.call}
        self._captures: dict[Any, Program] = {}
        self._steps: Steps = {}
        self._stems: dict[Any, Program] = {}

    def plan(self, batch: int | None, changes: dict[str, Any]) -> Plan:
        """The plan with another batch and some options changed; captures and stems are shared."""
        if batch not in self._calls:
            call = resized(self.workload.call, 0, self._example, batch or 1)
            if context_parallel.state() is not None:
                _hold_as_much(self.workload.call, call)
            self._calls[batch] = call
        args, kwargs = self._calls[batch]
        size = changes.get("offload_activations")
        if changes.get("chunk_loss") or is_size(size):  # for which no size can be left open
            changes = {"dynamic": None, **changes}
        workload = self.workload.changed({**changes, "args": args, "kwargs": kwargs})
        return make_plan(workload, captures=self._captures, steps=self._steps, stems=self._stems)

    def forget(self) -> None:
        """Let go of captures, which plans that are kept still have: those of deep models are large.

        Further plans trace again.
        """
        self._captures, self._stems = {}, {}

    def samples(self, batch: int | None) -> int:
        """Samples of a rank in a step; 1 per micro-batch if there is no batch."""
        return (batch or 1) * self.workload.micro_batches

    def _checked(self, asked: Sequence[int] | None) -> list[int | None]:
        if self._example is None:
            if asked is not None:
                raise ConfigError("batches=...: the call has no tensor with a dimension for it.")
            return [None]
        if asked is None:
            return [self._example << power for power in range(DOUBLINGS + 1)]
        sizes = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, bytes) else []
        if not sizes or not all(map(is_count, sizes)):
            raise ConfigError(
                f"batches={asked!r}: expected a list of whole numbers >= 1, such as [1, 2, 4]."
            )
        return [*sorted(set(sizes))]

    def _open(self, workload: Workload) -> Workload:
        """With the batch left open, as the user has named it or else wherever tensors have it."""
        config = workload.config
        if self._example is None or config.dynamic or config.of_one_size:
            return workload
        leaves, _ = trees.tree_flatten_with_path(workload.call)
        batched = [
            (path, leaf)
            for path, leaf in leaves
            if has_dimension(leaf, 0) and leaf.shape[0] == self._example
        ]
        contiguous = all(leaf.is_contiguous() for _, leaf in batched)
        places = [(input_name(path), 0) for path, _ in batched]
        return workload.changed({"dynamic": {BATCH: places} if contiguous else None})
