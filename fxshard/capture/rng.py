"""``fxshard::get_rng_state`` and ``set_rng_state``: what recomputed random operators begin with.

They have kernels and run on the compute stream, in regions, as ``aten`` operators do.

=============  ====================================================================================
get_rng_state  the state of the random number generator of a device, uint8, in the CPU's memory.
set_rng_state  the generator goes on from that state.
=============  ====================================================================================

`only_torch_s` refuses the random numbers that no program can draw: those of Python and numpy.
`unseeded` refuses to seed torch's generator, and `refuse_generators` those of the user.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fxshard._torch import modes
from fxshard.capture import hf
from fxshard.errors import CaptureError

CPU_STATE_BYTES = 5056  # of the Mersenne Twister (aten/src/ATen/CPUGeneratorImpl.cpp)
ACCELERATOR_STATE_BYTES = 16  # seed and offset (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp)

_LIBRARY = torch.library.Library("fxshard", "FRAGMENT")
# They count as random operators: executor and worlds keep a generator wherever one of these is.
_RANDOM = (torch.Tag.nondeterministic_seeded,)
_LIBRARY.define("get_rng_state(Device device) -> Tensor", tags=_RANDOM)
_LIBRARY.define("set_rng_state(Tensor state, Device device) -> ()", tags=_RANDOM)


@torch.library.impl("fxshard::get_rng_state", "CompositeExplicitAutograd", lib=_LIBRARY)
def _(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


@torch.library.impl("fxshard::set_rng_state", "CompositeExplicitAutograd", lib=_LIBRARY)
def _(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@torch.library.register_fake("fxshard::get_rng_state", lib=_LIBRARY)
def _(device: torch.device) -> Tensor:
    size = CPU_STATE_BYTES if device.type == "cpu" else ACCELERATOR_STATE_BYTES
    return torch.empty(size, dtype=torch.uint8)


@torch.library.register_fake("fxshard::set_rng_state", lib=_LIBRARY)
def _(state: Tensor, device: torch.device) -> None:
    return None


get_rng_state: Any = torch.ops.fxshard.get_rng_state.default
set_rng_state: Any = torch.ops.fxshard.set_rng_state.default


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """If the block ends with an exception, the generator of `device` is as it was before."""
    restore = noted(device)
    try:
        yield
    except BaseException:
        restore()
        raise


@contextlib.contextmanager
def drawn_again(device: torch.device, restore: Callable[[], None]) -> Iterator[None]:
    """The block draws what was drawn after `restore` was made by `noted`."""
    now = noted(device)
    restore()
    try:
        yield
    finally:
        now()


def noted(device: torch.device) -> Callable[[], None]:
    """Note the state of the generator of `device`; the result puts it back.

    The state is kept as bytes, not in a tensor: it is none of the program's, and no mode that
    watches its operators sees how it is read.
    """
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    where = () if device.type == "cpu" else (device,)
    with modes.unobserved():
        state = bytearray(module.get_rng_state(*where).numpy())

    def restore() -> None:
        with modes.unobserved():
            module.set_rng_state(torch.frombuffer(state, dtype=torch.uint8), *where)

    return restore


@contextlib.contextmanager
def only_torch_s(model: nn.Module, *, by_name: bool = True) -> Iterator[None]:
    """While `model` is traced, refuse numbers that a module draws outside of PyTorch.

    The program would hold what was drawn while tracing: the same mask in every step, without a
    word. (transformers' SpecAugment draws its masks by numpy, LayerDrop may draw by Python.)

    Args:
        by_name: name the module that drew, which takes a look around each call; else one look at
            the end, which is enough where the same is to be traced again.

    Raises:
        CaptureError: a module drew from the global generator of `random` or `numpy.random`.
    """
    names = {id(module): name for name, module in model.named_modules()}
    running: list[nn.Module] = []
    outside = Outside()

    def look() -> None:
        looks = len(running) == 1 or (running and by_name)
        drawn = outside.drawn() if looks else None
        if drawn:
            who = names[id(running[-1])] or "the model"
            raise refusal(model, f"{who} ({type(running[-1]).__name__})", drawn)

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            look()
            running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in names:
            look()
            running.pop()

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    except BaseException:  # in the middle of a module that has drawn, say
        outside.restore()
        raise
    finally:
        for handle in handles:
            handle.remove()


class _Unseeded:
    """In place of a generator of torch, which a program draws from and never seeds."""

    def __init__(self, generator: torch.Generator, line: Callable[[], str]) -> None:
        self._generator, self._line = generator, line

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "initial_seed", "set_state", "set_offset"):
            raise _refusal_to_seed(name, self._line())
        return getattr(self._generator, name)


_GENERATORS: tuple[Any, Any] = (torch.random, torch.cuda)


@contextlib.contextmanager
def unseeded(line: Callable[[], str]) -> Iterator[None]:
    """While forward is traced, refuse to seed the generators of torch, or to put a state back.

    A seed would be set once, while tracing, and never again. ``torch.manual_seed``, ``torch.seed``,
    ``fork_rng`` and their kin all come to the generators that are replaced here.

    Args:
        line: of user code, for the message.

    Raises:
        CaptureError: forward asks for the seed of a generator, or changes its state.
    """
    holder, cuda_holder = _GENERATORS
    cpu, cuda = holder.default_generator, cuda_holder.default_generators
    with modes.outside_modes():
        before = cpu.get_state()
    holder.default_generator = _Unseeded(cpu, line)
    cuda_holder.default_generators = tuple(_Unseeded(each, line) for each in cuda)
    try:
        yield
    finally:
        holder.default_generator, cuda_holder.default_generators = cpu, cuda
        with modes.outside_modes():
            changed = not torch.equal(cpu.get_state(), before)
            cpu.set_state(before)
    if changed:  # by ``torch.default_generator``, say
        raise _refusal_to_seed("manual_seed", "")


def _refusal_to_seed(what: str, line: str) -> CaptureError:
    return CaptureError(
        f"forward calls {what} on a random number generator of torch{line and ', at ' + line}: a "
        f"program draws from the generator as it finds it and cannot seed it. Seed in front of the "
        f"call, or draw these numbers outside of the model and pass them in."
    )


def refuse_generators(func: Any, args: tuple[Any, ...], kwargs: Any, line: str) -> None:
    """Raise CaptureError if an operator draws from a generator of the user."""
    if any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values())):
        raise CaptureError(
            f"{func} draws from a torch.Generator{line and ', at ' + line}: a program draws from "
            f"torch's own generator only. Leave generator= out, or draw these numbers outside of "
            f"the model and pass them in."
        )


class Outside:
    """The global generators of `random` and `numpy.random` as they are now."""

    def __init__(self) -> None:
        self.python: tuple[Any, ...] = random.getstate()
        self.numbers: dict[str, Any] = numpy.random.get_state()

    def drawn(self) -> str | None:
        """Which of them has been drawn from since."""
        if random.getstate() != self.python:
            return "random"
        same = map(numpy.array_equal, numpy.random.get_state(), self.numbers)
        return None if all(same) else "numpy.random"

    def restore(self) -> None:
        """Make them as they were."""
        random.setstate(self.python)
        numpy.random.set_state(self.numbers)


def refusal(model: nn.Module, who: str, drawn: str) -> CaptureError:
    """What to say where forward of `who` draws from such a generator."""
    return CaptureError(
        f"forward of {who} draws from {drawn}: a traced program would repeat the numbers of the "
        f"trace for ever. Draw them with torch (torch.rand), or outside of the model and pass them "
        f"in. (A thread that draws meanwhile looks the same: let it wait for the first call.)"
        f"{hf.remedy_of_numbers(model)}"
    )
