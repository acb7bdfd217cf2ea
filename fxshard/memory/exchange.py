"""What a step would send: it is noted where a recording mixes rows, and for updates of matrices."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fxshard._torch.modes import TorchDispatchMode
from fxshard.codegen.full_matrices import Matrix, Rounds, most_flops
from fxshard.codegen.full_matrices import table as owners_table
from fxshard.errors import ConfigError
from fxshard.ir import tags
from fxshard.memory.optimizer_step import Sent
from fxshard.memory.recording import name_of

# What DTensor has no rule for (torch/distributed/tensor/_ops), not even for full parameters.
NOWHERE = ("aten._foreach_copy_",)
# What runs on each rank's rows alone, besides operators tagged pointwise.
_ALONE = re.compile(
    r"aten\.(empty|zeros|ones|full|new_|rand|arange|scalar_tensor|normal_|uniform_|bernoulli"
    r"|clone|_to_copy|copy_|detach|alias|fill|zero_|view|unsqueeze|squeeze|expand|permute|transpose"
    r"|t\.|is_same_size|_local_scalar_dense|lift_fresh|_fused_|_foreach_(?!norm|max\.|copy_))"
)


class Mixing(TorchDispatchMode):
    """Notes the first operator that mixes rows: DTensor communicates for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str = ""
        self.paused: bool = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        mixes = not self.paused and not _runs_alone(func)
        if mixes and any(t.dim() for t in tags.tensors((args, kwargs))):
            self.found = self.found or name_of(func).removesuffix(".default")
        return func(*args, **(kwargs or {}))


@functools.cache
def _runs_alone(func: Any) -> bool:
    name = name_of(func)
    pointwise = torch.Tag.pointwise in func.tags
    return pointwise or bool(_ALONE.match(name)) or name.startswith("prim.")


class RecordedExchange:
    """Sends nothing: of all-to-alls a recording has the buffers.

    Attributes:
        size, rank: as which rank of how many it is recorded.
        device: of the buffers.
        sent: what would be sent in the step that is recorded.
        numbers: of the recorder, by storage.
        mixing: does not look at what owners compute.
        extended: FQNs of parameters of tensor subclasses, and of DTensors.
        several: parameters are on several meshes.
    """

    def __init__(self, size: int, device: torch.device, rank: int = 0) -> None:
        self.size: int = size
        self.rank: int = rank
        self.device: torch.device = device
        self.sent: Sent = Sent()
        self.numbers: dict[int, int] = {}
        self.mixing: Mixing = Mixing()
        self.extended: frozenset[str] = frozenset[str]()
        self.several = False

    @contextlib.contextmanager
    def stepping(self, matrices: Sequence[Matrix], schedule: Rounds) -> Iterator[None]:
        """See `fxshard.codegen.full_matrices.Exchange`.

        Raises:
            ConfigError: a matrix is of a tensor subclass, or parameters are on several meshes.
        """
        if self.several:
            raise ConfigError(several_meshes(matrices[0].fqn))
        for matrix in matrices:
            if matrix.fqn in self.extended:
                raise ConfigError(
                    f"parameter {matrix.fqn!r}, of a tensor subclass or a DTensor of tensor "
                    f"parallelism, has an update that needs all of its rows (Muon): those of plain "
                    f"tensors are sent. Give it to an optimizer that steps each element on its own."
                )
        self.sent.flops += most_flops(matrices, schedule)
        self.sent.schedules.append(owners_table(matrices, schedule))
        self.mixing.paused = True
        yield
        self.mixing.paused = False

    def all_to_all(
        self, into: Tensor, sent: Tensor, received: Sequence[int], given: Sequence[int]
    ) -> None:
        """See `fxshard.codegen.full_matrices.Exchange`."""
        self.sent.exchanges.append(max(into.nbytes, sent.nbytes))
        for buffer, name in ((sent, "rows for the owners"), (into, "matrices of this owner")):
            self.sent.names.setdefault(self.numbers[id(buffer.untyped_storage())], name)


def several_meshes(fqn: str) -> str:
    """What to say of an update of full matrices where parameters are on several meshes."""
    return (
        f"parameter {fqn!r} has an update that needs all of its rows (Muon), and parameters of the "
        f"model are on several meshes: matrices are sent to owners among the ranks of one. Give "
        f"all units one mesh and strategy, or choose an optimizer that steps each element on its "
        f"own."
    )
