"""A GPU that is not there: what is asked of ``torch.cuda``, and where tensors are asked to be."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxshard._torch import remembered_device
from fxshard._torch.fully_sharded import Change, replaced
from fxshard._torch.modes import outside_modes
from fxshard._torch.remembered_device import TorchFunctionMode
from fxshard._torch.trees import tree_iter
from fxshard.capture import rng
from fxshard.capture.provenance import user_line
from fxshard.dryrun.recorder import TapeRecorder
from fxshard.dryrun.streams import Streams
from fxshard.errors import CaptureError, ConfigError

CPU = torch.device("cpu")
# What C++ moves from the host without telling anybody.
FROM_HOST = (torch.as_tensor, torch.asarray, Tensor.new_tensor)
aten: Any = torch.ops.aten

GRAPHED = (
    "a CUDA graph keeps what it allocates in a pool of its own, which a dry run does not follow. "
    "Leave it out while fxshard.is_dry_run(), or by the option of your trainer."
)


class Placement(TorchFunctionMode):
    """Where tensors are: on the GPU or in the host's memory.

    Tensors that are asked to be on CUDA are made on the CPU, and it is remembered. What an operator
    makes is where it is asked to be, or else on the GPU if anything is that it reads. What it makes
    of nothing, without being asked, is where the function of torch that it belongs to reads; what
    autograd makes of nothing is on the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorder: TapeRecorder | None = None
        self.default = False  # torch.set_default_device("cuda")
        self.reducing = False  # DDP's reducer makes tensors of nothing
        self._reading: list[bool] = []  # whether functions of torch that run read from the GPU
        self._moving: bool | None = None  # a tensor is copied to the GPU, or to the host

    def is_there(self, tensor: Tensor) -> bool:
        """True if a tensor is on the GPU."""
        assert self.recorder is not None
        return self.recorder.is_on_device(tensor)

    def any_there(self, tree: Any) -> bool:
        """True if any of the tensors in `tree` is on the GPU."""
        return any(isinstance(leaf, Tensor) and self.is_there(leaf) for leaf in tree_iter(tree))

    def placed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """An operator's keywords for the CPU, and whether its results are in the host's memory."""
        assert self.recorder is not None
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            return kwargs | {"device": CPU}, False
        if self._moving is not None:
            return kwargs, not self._moving
        if any(isinstance(leaf, Tensor) for leaf in tree_iter((args, kwargs))):
            return kwargs, not self.any_there((args, kwargs))
        if self.reducing:  # all on the GPU, but for the parameters that it counts on the host
            return kwargs, func is aten.zeros.default
        if self._reading:
            return kwargs, not (self._reading[-1] or self.default)
        return kwargs, not (self.default or self.recorder.position.in_backward)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not remembered_device.asks_for_cpu(sys._getframe(1)):
            answer = remembered_device.asked_device(func, args, self.is_there)
            if answer is not None:
                return answer
        if func is torch.device and args and isinstance(args[0], int):
            return _device(args[0])
        if func is Tensor.pin_memory and not self.is_there(args[0]):
            return args[0].clone()  # what is pinned is the host's memory, too
        if func in FROM_HOST:
            device = kwargs.pop("device", None)
            made = func(*args, **kwargs)
            if device is not None:
                return self._moved(made, _device(device).type == "cuda", {})
            like = func is Tensor.new_tensor and self.is_there(args[0])
            return self._moved(made, True, {}) if like else made
        if func in (Tensor.cpu, Tensor.cuda, Tensor.to):
            device = _wanted(func, args, kwargs, self.is_there)
            if device is not None and device.type in ("cpu", "cuda"):
                return self._moved(args[0], device.type == "cuda", _besides(args, kwargs))
        self._reading.append(self.any_there((args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:
            self._reading.pop()

    def _moved(self, tensor: Tensor, there: bool, besides: dict[str, Any]) -> Tensor:
        """``tensor.to(device, ...)``: a copy if it is elsewhere."""
        if tensor.is_meta:
            with outside_modes():
                torch.empty(0, device="meta").to(CPU)  # raises torch's own error
        before, self._moving = self._moving, there
        try:
            copy = besides.pop("copy", False) or there != self.is_there(tensor)
            return tensor.to(besides.pop("dtype", tensor.dtype), copy=copy, **besides)
        finally:
            self._moving = before


def _wanted(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_there: Callable[[Tensor], bool]
) -> torch.device | None:
    """The device that ``Tensor.to`` and its kin are asked for; None if for none."""
    if func is not Tensor.to:
        return torch.device("cpu" if func is Tensor.cpu else "cuda")
    for each in (*args[1:], kwargs.get("device"), kwargs.get("other")):
        if isinstance(each, Tensor):
            return torch.device("cuda" if is_there(each) else "cpu")
        if isinstance(each, (str, int, torch.device)) and not isinstance(each, bool):
            return _device(each)
    return None


def _besides(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What ``Tensor.to`` is asked for besides a device."""
    found = {k: v for k, v in kwargs.items() if k in ("dtype", "copy", "memory_format") and v}
    for each in (*args[1:], kwargs.get("other")):
        if isinstance(each, torch.dtype):
            found["dtype"] = each
        elif isinstance(each, Tensor):
            found["dtype"] = each.dtype
    flags = [each for each in args[1:] if isinstance(each, bool)]  # non_blocking, copy
    return found | ({"copy": True} if len(flags) > 1 and flags[1] else {})


def _device(given: Any) -> torch.device:
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


@contextlib.contextmanager
def present(
    placement: Placement,
    streams: Streams,
    *,
    capability: tuple[int, int],
    name: str,
    memory: int,
    count: int,
    allocated: Callable[[], tuple[int, int]],
) -> Iterator[None]:
    """While the block runs, ``torch.cuda`` answers as on a machine with GPUs.

    Args:
        placement: is told of ``torch.set_default_device``.
        streams: what ``torch.cuda.Stream`` and ``torch.cuda.stream`` are.
        capability, name, memory, count: of the GPUs; `memory` in bytes.
        allocated: gives the bytes now, and the most so far.
    """

    def set_default_device(device: Any) -> None:
        placement.default = device is not None and _device(device).type == "cuda"

    def properties(*_: Any) -> Any:
        return _Properties(name, memory, *capability)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "set_device": nothing,
        "device": _Guard,
        "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": properties,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "synchronize": streams.synchronize,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "reset_peak_memory_stats": nothing,
        "memory_allocated": lambda *_: allocated()[0],
        "max_memory_allocated": lambda *_: allocated()[1],
        "memory_reserved": lambda *_: allocated()[0],
        "max_memory_reserved": lambda *_: allocated()[1],
        "mem_get_info": lambda *_: (memory - allocated()[0], memory),
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "get_rng_state": _rng_state,
        "set_rng_state": nothing,
        "initial_seed": lambda: 0,
        "seed": nothing,
        "Stream": streams.kind,
        "Event": streams.Event,
        "stream": streams.using,
        "current_stream": streams.current,
        "default_stream": lambda *_: streams.default,
        "set_stream": streams.set,
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda *_: _Stats(*allocated()),
    }

    def record_stream(tensor: Tensor, stream: Any) -> None:
        assert placement.recorder is not None
        placement.recorder.used_on(tensor, stream.name)

    class CUDAGraph:
        """``torch.cuda.CUDAGraph``."""

        def __init__(self, *_: Any, **__: Any) -> None:
            graphed()

    def graphed(*_: Any, **__: Any) -> NoReturn:
        raise CaptureError(f"{user_line()}: {GRAPHED}")

    answers |= dict.fromkeys(("graph", "graph_pool_handle", "make_graphed_callables"), graphed)
    answers["CUDAGraph"] = CUDAGraph
    changes: list[Change] = [(torch.cuda, k, v) for k, v in answers.items()]
    randomly = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")
    changes += [(torch.cuda.random, name, answers[name]) for name in randomly]
    changes += [
        (torch, "set_default_device", set_default_device),
        (Tensor, "record_stream", record_stream),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")),
        (torch.accelerator, "device_count", lambda: count),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "set_device_index", nothing),
        (torch.accelerator, "synchronize", streams.synchronize),
        (torch.accelerator, "current_stream", streams.current),
    ]
    there = [change for change in changes if hasattr(change[0], change[1])]
    with replaced([(owner, name, _alone(owner, name, answer)) for owner, name, answer in there]):
        yield


# What compiles, or makes fake tensors, asks what this machine has: compilers have stand-ins of
# their own (`dryrun.compiled`).
COMPILERS = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._subclasses",
    "torch.fx",
)


def _rng_state(*_: Any, **__: Any) -> Tensor:
    """The state of a GPU's generator, which lies in the host's memory."""
    with outside_modes():
        return torch.zeros(rng.ACCELERATOR_STATE_BYTES, dtype=torch.uint8)


def _alone(owner: Any, name: str, answer: Any) -> Any:
    """A function of its own for each name, as Dynamo has rules by function."""
    if isinstance(answer, type):
        return answer
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith(COMPILERS):
            return False if name == "is_available" else plain(*args, **kwargs)
        return answer(*args, **kwargs)

    return call


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """CUDA's kernel, which keeps a mask of booleans (native/Dropout.cpp, ``dropout``)."""
    if train and 0 < p < 1 and tensor.numel():
        dropped: Tensor = aten.native_dropout(tensor, p, train)[0]
        return dropped
    return tensor * 0 if train and p == 1 else tensor


KERNELS = {("dropout", "AutogradCPU"): _dropout}  # for `export.aten_kernels`


class _Guard(contextlib.nullcontext[None]):
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        super().__init__()


class _Stats(dict[str, int]):
    """``torch.cuda.memory_stats``: what is not known is 0."""

    def __init__(self, now: int, most: int) -> None:
        super().__init__()
        for key in ("allocated_bytes.all", "active_bytes.all", "reserved_bytes.all"):
            self |= {f"{key}.current": now, f"{key}.peak": most}

    def __missing__(self, key: str) -> int:
        return 0


class _Properties:
    """``torch.cuda.get_device_properties``."""

    def __init__(self, name: str, memory: int, major: int, minor: int) -> None:
        self.name, self.total_memory, self.major, self.minor = name, memory, major, minor

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"torch.cuda.get_device_properties().{name} is not known without the GPU: the dry run "
            f"knows name, total_memory, major and minor."
        )
