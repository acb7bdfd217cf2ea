"""Recording of eager code on tensors without data: what its operators allocate and free.

For what a step does outside of the program: the optimizer, the user's loss.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from fxshard import meta
from fxshard.compat import FakeTensorMode, TorchDispatchMode, is_fake


@dataclasses.dataclass
class Event:
    """One operator: what was allocated by it, and what died before the next one.

    Attributes:
        op: name of the operator.
        allocated: ``(storage number, bytes)``.
        freed: storage numbers.
    """

    op: str
    allocated: list[tuple[int, Any]]
    freed: list[int]


class Recorder(TorchDispatchMode):
    """Notes when storages appear in the results of operators, and when they die."""

    def __init__(self, fake_mode: FakeTensorMode | None = None) -> None:
        """Args: `fake_mode`: in which real tensors from outside become fake ones."""
        super().__init__()
        self.outside: dict[int, torch.UntypedStorage] = {}  # by number: what operators only read
        self._fake_mode = fake_mode
        self._kept: list[torch.Tensor] = []
        self.events: list[Event] = [Event("start", [], [])]
        self.numbers: dict[int, int] = {}
        self._references: list[Any] = []
        self._count = 0

    def know(self, storage: torch.UntypedStorage) -> int | None:
        """Number a storage; None if it is known already."""
        if id(storage) in self.numbers:
            return None
        number = self._count
        self._count += 1
        key = id(storage)
        self.numbers[key] = number

        def died(_: Any) -> None:
            self.numbers.pop(key, None)
            self.events[-1].freed.append(number)

        self._references.append(weakref.ref(storage, died))
        return number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._fake_mode is not None:
            for tensor in meta.tensors([*args, *kwargs.values()]):
                self._read(tensor, self._fake_mode)
        result = func(*args, **kwargs)
        event = Event(str(func), [], [])
        self.events.append(event)
        for tensor in meta.tensors(result):
            storage = tensor.untyped_storage()
            number = self.know(storage)
            if number is not None:
                event.allocated.append((number, storage.nbytes()))
        return result

    def _read(self, tensor: torch.Tensor, fake_mode: FakeTensorMode) -> None:
        """Note a tensor that was there before; the fake one that stands for it is its memo's."""
        fake = tensor if is_fake(tensor) else fake_mode.from_tensor(tensor)
        number = self.know(fake.untyped_storage())
        if number is not None:
            self.outside[number] = tensor.untyped_storage()
            self._kept.append(fake)  # else its memo forgets it, and the next reader gets another
