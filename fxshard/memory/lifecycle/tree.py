"""The module tree beside the program: what a rank holds between phases."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.config.checked import Config
from fxshard.ir.layout import flat_numels
from fxshard.ir.program import Program, nbytes
from fxshard.ir.units import Param
from fxshard.memory.category import Category
from fxshard.memory.ledger import LiveRange
from fxshard.memory.recording import OperatorEvent


@dataclasses.dataclass
class StateDictEntry:
    """An entry of a state dict, as torch.distributed.checkpoint writes it from this rank.

    Attributes:
        name: its key.
        full: bytes of the full tensor; 1 of what is no tensor.
        local: bytes that this rank has of it; 0 of what is no tensor.
        storage: bytes of the storage that it is a view of.
        sharded: other ranks have other rows.
        host: it lies on the CPU while the program computes elsewhere.
        shards: how many ranks have rows of it, each others.
        stored: of a buffer that a ``buffer_dtype`` has cast, its bytes in the dtype that it had.
    """

    name: str
    full: int
    local: int
    storage: int
    sharded: bool
    host: bool = False
    stored: int = 0
    shards: int = 1


@dataclasses.dataclass(frozen=True)
class Filled:
    """What the initialisation of a module allocates and frees.

    Attributes:
        events: in order.
        given: ``(name, storage number)`` of each tensor that it has at the beginning.
        left: the same at the end, of the tensors that had no data.
    """

    events: Sequence[OperatorEvent]
    given: tuple[tuple[str, int], ...]
    left: tuple[tuple[str, int], ...]


@dataclasses.dataclass
class ModuleTree:
    """The module tree beside the program.

    Attributes:
        program, config, model: see `lifecycle`.
        held: what the rank holds between phases, but the optimizer's state.
        filled: how modules that have been filled were, by their kind (see `init`).
    """

    program: Program
    config: Config
    model: nn.Module
    held: list[LiveRange]
    filled: dict[Any, Filled] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def params(self) -> dict[str, Param]:
        """Every sharded parameter by each of its names."""
        return {name: p for p in self.program.params.values() for name in p.aliases}

    @functools.cached_property
    def shards(self) -> dict[str, LiveRange]:
        """What is held of each sharded parameter, by FQN."""
        named = {h.name: h for h in self.held if h.category is Category.SHARDED_PARAM}
        return {fqn: named[fqn] for fqn in self.program.params}

    @functools.cached_property
    def flats(self) -> dict[str, int]:
        """Bytes of the flat storage that each sharded parameter lies in, by FQN."""
        layouts = {fqn: self.program.layouts[fqn] for fqn in self.program.params}
        numels = flat_numels(layouts.values())
        return {fqn: numels[p.storage] * p.dtype.itemsize for fqn, p in layouts.items()}

    @property
    def device(self) -> torch.device:
        """Where the program computes, and sharded parameters get their data."""
        return torch.device(self.config.device or self.program.device)

    @property
    def elsewhere(self) -> bool:
        """The CPU is not where the program computes."""
        return self.device.type != "cpu"

    def lies_on_host(self, tensor: Tensor) -> bool:
        """A tensor of the given model stays on the CPU while the program computes elsewhere."""
        return self.program.offloaded and self.elsewhere and tensor.device.type == "cpu"


def dense(tensor: Tensor) -> int:
    return nbytes(tuple(tensor.shape), tensor.dtype)


# What torch.distributed.checkpoint takes beside tensors, as rows without bytes.
MESSAGES = (
    (
        "plans of torch.distributed.checkpoint",
        "pickled, in buffers of torch.distributed, before the data and after it: their size is "
        "that of names and shapes",
    ),
    (
        "buffers of Python's and of the operating system's files",
        "they are not allocated by torch",
    ),
)
