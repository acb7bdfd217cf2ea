"""What a run of real tensors holds after each operator, measured without fxshard."""

import contextlib
import ctypes
import gc
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

Points = list[tuple[str, int]]  # operator, and the bytes that are alive when it is over

EAGER = torch._C.DispatchKey.CompositeExplicitAutograd
FUNCTIONAL = torch.ops._c10d_functional
ALL_REDUCE = torch.ops.c10d.allreduce_.default


class Measure(TorchDispatchMode):
    """Sums up, before each operator, the sizes of all storages that are alive.

    A size is asked anew each time, so that a storage that was resized needs no watching.
    """

    supports_higher_order_operators = True

    def __init__(self, of_ddp: bool = False) -> None:
        """Args:
        of_ddp: leave all-reduces alone: DDP compares what comes back with its buckets, which live.
        """
        super().__init__()
        self.of_ddp = of_ddp
        self.points: Points = []
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._name = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            with self:
                return func.py_kernels[EAGER](*args, **(kwargs or {}))
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        fake = any(issubclass(kind, FakeTensor) for kind in types)  # DTensor works out shapes
        views = func.is_view and func is not torch.ops.aten.lift_fresh.default
        if func.namespace == "profiler" or views or fake:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and not self._knows(args[1]):
            return func(*args)  # gloo copies what it has received out of a buffer of its own
        self.close()
        self._see((args, kwargs))
        if func.namespace == "c10d" and not (self.of_ddp and func is ALL_REDUCE):
            self._name = str(func)
            return _communicated(func, args)
        if func.namespace == FUNCTIONAL.name and func is not FUNCTIONAL.wait_tensor.default:
            result = _given_back(func, args)
        else:
            result = func(*args, **(kwargs or {}))
        if not any(isinstance(x, FakeTensor) or _is_meta(x) for x in tree_leaves(result)):
            self._name = str(func)
            self._see(result)
        return result

    def close(self) -> None:
        """The operator before is over."""
        if self._name:
            sizes = (ref() for ref in self._alive.values())
            self.points.append((self._name, sum(s.nbytes() for s in sizes if s is not None)))
        self._name = ""

    def _knows(self, tensor: torch.Tensor) -> bool:
        found = self._alive.get(id(tensor.untyped_storage()))
        return found is not None and found() is tensor.untyped_storage()

    def _see(self, tree: Any) -> None:
        ranks = any(f.filename.endswith("device_mesh.py") for f in traceback.extract_stack(limit=9))
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and not ranks:
                storage = leaf.untyped_storage()
                if not self._knows(leaf):
                    self._alive[id(storage)] = weakref.ref(storage)


def _communicated(func: Any, args: tuple[Any, ...]) -> Any:
    """Run a collective to its end, on tensors over the same memory.

    A thread of gloo holds what it was given until some time after the work is done: until it gets
    a core, and Python's lock. FSDP2 has let go of it by then, or not: that depends on the machine.
    """
    result = func(*tree_map_only(Tensor, _over_the_same_memory, args))
    Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
    return result


def _given_back(func: Any, args: tuple[Any, ...]) -> Any:
    """The same of a functional collective, whose result gloo holds, too: it is copied."""
    result = func(*tree_map_only(Tensor, _over_the_same_memory, args))
    FUNCTIONAL.wait_tensor(result)
    return args[0] if func._schema.is_mutable else result.clone()


def _over_the_same_memory(tensor: Tensor) -> Tensor:
    """A contiguous tensor in a storage of its own, which owns nothing."""
    assert tensor.is_contiguous()
    if not tensor.numel():
        return tensor
    memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Cycles live on, as in a dry run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
