"""Real programs, run on the CPU, as snapshots: their stacks and lives, and the allocator's model.

A mode sees each operator's new storages, with the stack that made them; frees are those of the
storages. What torch resizes in place (FSDP2's unsharded parameters) is seen at the resize.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.memory.snapshots import Program, frame

OWN = (__file__, str(Path(torch.__file__).parent / "utils" / "_python_dispatch.py"))


class Recorder(TorchDispatchMode):
    """Allocates in `program` what operators make."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.known: dict[int, int | None] = {}  # storage -> address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            tensor = getattr(each, "_local_tensor", each)  # of a DTensor
            if isinstance(tensor, torch.Tensor):
                self.sees(tensor.untyped_storage())
        return out

    def sees(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            weakref.finalize(storage, self.gone, key)
            self.known[key] = self.alloc(storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known:
            self.free(self.known[key])
            self.known[key] = self.alloc(storage.nbytes())
        else:
            self.sees(storage)

    def alloc(self, size: int) -> int | None:
        return self.program.alloc(size, stack(sys._getframe(1))) if size else None

    def free(self, address: int | None) -> None:
        if address is not None and address in self.program.made:
            self.program.free(address)

    def gone(self, key: int) -> None:
        self.free(self.known.pop(key, None))


def stack(at: FrameType | None) -> list[dict[str, Any]]:
    """As torch records it: innermost first."""
    found = []
    while at is not None:
        code = at.f_code
        if code.co_filename not in OWN:
            found.append(frame(code.co_filename, at.f_lineno, code.co_name))
        at = at.f_back
    return found


@contextmanager
def recorded(program: Program) -> Iterator[Recorder]:
    """Record what runs inside."""
    resize = torch.UntypedStorage.resize_
    with Recorder(program) as recorder:

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            recorder.resized(storage)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
            yield recorder
