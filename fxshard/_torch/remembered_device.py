"""Fake tensors on the CPU that say to be on the accelerator that they were asked for on.

A fake tensor on CUDA cannot exist where torch was built without it: C++ asks a tensor's device, and
then the device's hooks. So the tensor is on the CPU for C++ and for the code of torch that makes
fake results, and on the accelerator for all Python code besides.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils, checkpoint

from fxshard._torch.fully_sharded import replaced

# Code that makes fake results, or tensors that wrap others, asks for the device to make one there.
ON_CPU = (
    "torch._",
    "torch.autograd",
    "torch.fx",
    "torch.distributed.tensor",
    "torch.distributed._functional",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    "fxshard._torch",
    "fxshard.capture",
    "fxshard.dryrun.recorder",
)

# Among it, what makes tensors of the run: AOTAutograd around a compiled forward and backward, and
# operators that take functions, in eager.
ON_DEVICE = ("torch._functorch._aot_autograd.runtime_wrappers", "torch._higher_order_ops")

# FSDP2's functions that make a DTensor, which C++ gives the device that it asks for there.
WRAPPING = ("_from_local_no_grad", "init_unsharded_param")

_device_of: Any = Tensor.device.__get__
_RAW_STREAM = "_cuda_getCurrentRawStream"  # bitsandbytes takes it where there is CUDA
_is_cuda: Any = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_is_cpu: Any = Tensor.is_cpu.__get__  # type: ignore[attr-defined]

__all__ = ["TorchFunctionMode", "asked_device", "asks_for_cpu", "in_backward_too", "remembered"]


def asks_for_cpu(frame: FrameType | None) -> bool:
    """True if the caller's module is one that has to see where a tensor is for C++."""
    if frame is None:
        return False
    module = frame.f_globals.get("__name__", "")
    makes_fakes = module.startswith(ON_CPU) and not module.startswith(ON_DEVICE)
    return frame.f_code.co_name in WRAPPING or makes_fakes


def asked_device(func: Any, args: tuple[Any, ...], is_there: Callable[[Tensor], bool]) -> Any:
    """The answer to a question for a tensor's device, or None if `func` is no such question.

    Args:
        func, args: what a `TorchFunctionMode` is given.
        is_there: True if a tensor is on the accelerator.
    """
    if func not in (_device_of, _is_cuda, _is_cpu):
        return None
    there = is_there(args[0])
    if func == _device_of:
        return torch.device("cuda", 0) if there else None
    return there if func == _is_cuda else not there


@contextlib.contextmanager
def remembered(is_there: Callable[[Tensor], bool]) -> Iterator[None]:
    """`FakeTensor.device` gives the accelerator for tensors of which `is_there` says so."""
    plain = fake_tensor.FakeTensor.device

    def device(self: Any) -> torch.device:
        if not asks_for_cpu(sys._getframe(1)) and is_there(self):
            return torch.device("cuda", 0)
        found: torch.device = plain.fget(self)  # type: ignore[attr-defined]
        return found

    fake = fake_tensor.FakeTensor

    def foreach_devices() -> list[str]:
        return ["cuda", "cpu"]  # of C++'s groups by device

    plain_accelerator: Any = torch._C._get_accelerator

    def accelerator(*args: Any) -> torch.device:
        """CUDA for FSDP2's default mesh; what compiles asks what there really is."""
        asks = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed")
        return torch.device("cuda") if asks else plain_accelerator(*args)

    def described(tensor: Tensor) -> dict[str, Any]:
        """Where autograd saves a tensor and none of our modes is active."""
        told = plain_description(tensor)
        return told | ({"device": torch.device("cuda", 0)} if is_there(tensor) else {})

    checks = checkpoint._allowed_determinism_checks_to_fns
    plain_description = checks["default"]

    plain_wrapper: Any = Tensor._make_wrapper_subclass

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        """A tensor around others is on the CPU for C++, as these are: autograd asks it there."""
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        made: Tensor = plain_wrapper(*args, **kwargs)
        return made

    name = "_get_foreach_kernels_supported_devices"
    changes = [
        (fake, "device", property(device, plain.fset)),  # type: ignore[attr-defined]
        (_foreach_utils, name, foreach_devices),
        (optimizer, name, foreach_devices),
        (torch._C, "_get_accelerator", accelerator),
        (torch._C, _RAW_STREAM, getattr(torch._C, _RAW_STREAM, lambda device: 0)),
        (Tensor, "_make_wrapper_subclass", staticmethod(wrapper)),
    ]
    with replaced(changes), mock.patch.dict(checks, {"default": described}):
        yield


@contextlib.contextmanager
def foreach_takes_fakes() -> Iterator[None]:
    """Optimizers and clipping take fake tensors for plain ones, of which they take many at once."""
    kinds = (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types)
    for each in kinds:
        each.append(fake_tensor.FakeTensor)
    try:
        yield
    finally:
        for each in kinds:
            each.remove(fake_tensor.FakeTensor)


@contextlib.contextmanager
def in_backward_too(mode: TorchFunctionMode) -> Iterator[None]:
    """`mode` is active while autograd runs, which a function calls that the mode has left for.

    (torch/autograd/__init__.py, ``_engine_run_backward``)
    """
    plain: Any = vars(torch.autograd)["_engine_run_backward"]

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return plain(*args, **kwargs)

    with replaced([(torch.autograd, "_engine_run_backward", run)]):
        yield
