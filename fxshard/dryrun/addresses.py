"""Addresses of tensors without data: code tells tensors and storages apart by them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxshard._torch.fake_tensors import is_fake
from fxshard._torch.fully_sharded import replaced
from fxshard._torch.remembered_device import TorchFunctionMode

ALIGNED = 512  # bytes, as CUDA's allocator rounds


class Addresses(TorchFunctionMode):
    """Gives every storage without data an address of its own for as long as it lives."""

    def __init__(self, has_memory: Callable[[torch.UntypedStorage], bool]) -> None:
        """Args:
        has_memory: False for a storage of the meta device, which has no address.
        """
        super().__init__()
        self._has_memory = has_memory
        self._next = ALIGNED
        self._of: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id of a storage

    def of(self, storage: torch.UntypedStorage) -> int:
        """The address of a storage, or 0; no two that live share a byte."""
        key = id(storage)
        if not self._has_memory(storage) or not storage.nbytes():
            return 0
        if key not in self._of:
            forget = weakref.ref(storage, lambda _: self._of.pop(key, None))
            self._of[key] = forget, self._next
            self._next += -(-storage.nbytes() // ALIGNED) * ALIGNED
        return self._of[key][1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.data_ptr and is_fake(args[0]):
            start = self.of(args[0].untyped_storage())
            return start and start + args[0].storage_offset() * args[0].element_size()
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def of_storages(self) -> Iterator[None]:
        """While the block runs, ``UntypedStorage.data_ptr`` answers too."""
        plain = torch.UntypedStorage.data_ptr

        @functools.wraps(plain)
        def data_ptr(storage: Any) -> int:
            return self.of(storage) if storage.device.type == "meta" else plain(storage)

        with replaced([(torch.UntypedStorage, "data_ptr", data_ptr)]):
            yield
