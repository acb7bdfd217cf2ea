"""Errors of torch raised as ours: the line of the user's code, and what may be done about it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fxshard._torch import export, fake_tensors, modes
from fxshard.capture import hf, provenance
from fxshard.capture.call import FlatCall
from fxshard.capture.repeat.places import Formless
from fxshard.capture.swapped import users_class
from fxshard.errors import CaptureError

log: logging.Logger = logging.getLogger("fxshard")


class _TracerError(CaptureError):
    """See `is_tracers` and `asks_for_values`."""

    def __init__(self, text: str, from_data: bool) -> None:
        super().__init__(text)
        self.from_data = from_data


def is_tracers(error: CaptureError) -> bool:
    """True if the tracer refuses what the model does: another way may go further."""
    return isinstance(error, _TracerError)


def asks_for_values(error: CaptureError) -> bool:
    """True if Python asked for the values of a tensor."""
    return isinstance(error, _TracerError) and error.from_data


NO_GROUP = "Default process group has not been initialized"  # torch's words
_refused: list[str] = []


@contextlib.contextmanager
def nothing_captured(why: str) -> Iterator[None]:
    """While the block runs, no model is captured, and no program runs.

    Args:
        why: the text of the error, which says what to do.
    """
    _refused.append(why)
    try:
        yield
    finally:
        _refused.pop()


def check_captured() -> None:
    """Raises CaptureError inside of `nothing_captured`."""
    if _refused:
        raise CaptureError(f"{provenance.user_line()}: {_refused[-1]}")


def check_runs(model: nn.Module) -> None:
    """Before a program of `model` runs, or its parameters are gathered.

    Raises:
        CaptureError: something of torch records what is called, or see `check_captured`.
    """
    check_captured()
    if by := modes.tracer():
        refuse_recording(users_class(model).__name__, by)


def check_modes(model: nn.Module) -> None:
    """Before a program of `model` runs.

    Raises:
        CaptureError: the user's code is in a mode that looks at functions of torch.
    """
    for kind in map(type, modes.function_modes()):
        if kind.__module__.partition(".")[0] not in ("torch", "fxshard"):
            raise CaptureError(
                f"{provenance.user_line()}: {users_class(model).__name__} is called inside of "
                f"{kind.__name__}, a TorchFunctionMode: a program calls operators, not the "
                f"functions of torch that such a mode looks at. Enter it inside of forward, where "
                f"it is traced with the rest, and leave it out around calls; a TorchDispatchMode "
                f"sees what a program runs."
            )


def refuse_recording(what: str, by: str) -> NoReturn:
    """Raise CaptureError: `what` is called while `by` records."""
    raise CaptureError(
        f"{provenance.user_line()}: {what} is sharded, and called while {by} records what is "
        f"called: no recording holds its collectives, of shards that each rank has others of. "
        f"Record the plain model, before it is sharded; what a step takes, sends and runs is "
        f"in fxshard.plan(...), and in .plan of a compiled model."
    )


@contextlib.contextmanager
def explained(call: FlatCall) -> Iterator[None]:
    """Turn what torch raises into a CaptureError that names the line of the user's code.

    Raises:
        CaptureError: in place of it.
    """
    cls = type(call.model).__name__
    try:
        yield
    except CaptureError:
        raise
    except export.DATA_DEPENDENT_ERRORS as error:
        raise _TracerError(
            f"{cls} cannot be traced: Python control flow or a shape depends "
            f"on the values of a tensor{line_of(error)}\n{remedy(error)}"
            f"{hf.remedy_of_values(call.model)}",
            from_data=True,
        ) from error
    except Exception as error:
        if isinstance(error, Formless) or str(error).startswith(export.KEPT_BY_FORWARD):
            raise CaptureError(
                f"{cls} cannot be traced: forward reads a tensor that an "
                f"earlier run of forward has made and kept{_kept(call.model)}"
                f"{line_of(error)}\nWhile tracing forward runs more than once, on tensors "
                f"without data. Make that tensor in __init__ (register_buffer), or "
                f"empty the cache and call the model once before it is planned or compiled."
            ) from error
        operator = export.higher_order_operator(error)
        if operator is not None:
            raise CaptureError(
                f"{cls} cannot be traced: it calls the higher-order operator "
                f"{operator}{line_of(error)}\nA program has no branches and no loops. Use "
                f"torch.where, masking, or a loop of Python that is as long in every call."
            ) from error
        if type(call.model).forward is nn.Module.forward:  # nn.ModuleList, say
            raise CaptureError(
                f"{cls} has no forward, and cannot be called. Compile the module that calls those "
                f"in it; it may be a unit of that (units=[...])."
            ) from error
        misfit = _misfit(call)
        if isinstance(error, TypeError) and misfit:
            raise CaptureError(
                f"{cls} cannot be called as {_called(call)}: {misfit}.\n"
                f"Give the call to trace: args=(x,) for model(x), kwargs={{'name': y}} for "
                f"model(name=y)."
            ) from error
        first = str(error).splitlines()[0] if str(error) else ""
        text = f"{cls} cannot be traced ({type(error).__name__}: {first}){line_of(error)}"
        if str(error).startswith(NO_GROUP):
            text += (
                "\nForward calls a collective. Initialise a process group first; to plan without "
                'ranks, one that moves no data: init_process_group("fake", rank=0, world_size=...).'
            )
        if str(error).startswith("Please convert all Tensors to FakeTensors first"):
            text += (
                "\nForward returns a tensor of the module that is neither a parameter nor a "
                "buffer, and computes with nothing else. Register it: "
                "self.register_buffer(name, tensor)."
            )
        if str(error).startswith("you can only change requires_grad flags of leaf variables"):
            text += (
                "\nForward sets requires_grad, and what is traced is no leaf. Set it outside of "
                "forward, before a call; for a part of one call, compute with weight.detach()."
            )
        if str(error).startswith("Cannot backprop through mirrored meta"):
            text += (
                "\nForward calls backward, which writes .grad. Call it outside of the model; what "
                "forward itself needs gives torch.autograd.grad(..., create_graph=True)."
            )
        if ".numpy()" in str(error):
            text += "\nCompute it with torch, or outside of the model and pass it in."
        if "modified by an inplace operation" in str(error):
            text += (
                "\nThe backward of every output is traced, of those too that no loss reads: write "
                "y = y + x for y += x, or return the output detached."
            )
        if _is_of_fsdp(error):
            text += (
                f"\nThat is a method of compiled models, for outside of forward: while forward is "
                f"traced, the model is the plain one, and its parameters are unsharded. Leave "
                f"{error.name} out of forward."
            )
        text += f"\nThe call was {_called(call)}; args=(x,) stands for model(x)."
        if isinstance(error, (RuntimeError, TypeError)):  # others are the model's own
            raise _TracerError(text, from_data=False) from error
        raise CaptureError(text) from error


def of_collective(name: str) -> CaptureError:
    """What to say of a collective in forward that no graph can hold."""
    return CaptureError(
        f"forward calls {name} of torch.distributed, at {provenance.user_line()}, which a traced "
        f"program cannot repeat. Use another of its collectives (all_reduce, broadcast, "
        f"all_gather, reduce_scatter, all_to_all, reduce, gather, scatter), or one of "
        f"torch.distributed._functional_collectives; or call it outside of the model."
    )


def _is_of_fsdp(error: Exception) -> TypeGuard[AttributeError]:
    """True if forward calls a method that FSDP's modules have and its own do not."""
    if not isinstance(error, AttributeError) or not isinstance(error.obj, nn.Module):
        return False
    return any(hasattr(of, error.name or "") for of in (FullyShardedDataParallel, FSDPModule))


def _misfit(call: FlatCall) -> str:
    """What of the call the signature of forward does not take; "" if it takes all of it."""
    request = call.request
    try:
        inspect.signature(call.model.forward).bind(*request.args, **request.kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _called(call: FlatCall) -> str:
    """``model(float32[3, 4], labels=int64[3])``."""
    request = call.request
    every = [_argument(arg) for arg in request.args]
    every += [f"{name}={_argument(arg)}" for name, arg in request.kwargs.items()]
    return f"model({', '.join(every)})"


def _argument(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _kept(model: nn.Module) -> str:
    """``, as self.<name> of <class>``; or where else it may be."""
    for module in model.modules():
        for name, value in vars(module).items():
            if fake_tensors.is_fake(value):
                return f", as self.{name} of {type(module).__name__}"
    return ", in a global, a closure or a collection"


def refuse_saved_tensors_hooks(entered: Sequence[str], where: str = "") -> None:
    """Refuse hooks for saved tensors that are entered; warn of those that only offload.

    A program saves what it needs itself, and calls no hooks.

    Args:
        entered: see `autograd.noting_saved_tensors_hooks`.
        where: they are entered; "": where the model is traced.

    Raises:
        CaptureError: a function of the user's packs: what it makes of values would be lost.
    """
    where = where or INSIDE
    if name := next(filter(None, entered), ""):
        raise CaptureError(
            f"torch.autograd.graph.saved_tensors_hooks with {name} {where}: the program would not "
            f"call it, and saves what it needs for backward itself. If it offloads or recomputes "
            f"activations, pass offload_activations=... or checkpoint=... in its place; a model "
            f"that fxshard.shard shards runs eagerly, with these hooks."
        )
    if entered:
        (log.warning if where == INSIDE else _warned_once)(
            f"fxshard: save_on_cpu (or an offload_wrapper) {where} offloads nothing: "
            f"the program saves what it needs itself. Pass offload_activations=True."
        )


INSIDE = "inside of the model"
_warned_once = functools.cache(log.warning)  # for what is looked at in every call


def no_way(failures: dict[str, CaptureError]) -> CaptureError:
    """What to say when no way was left: the first reason in full, a line for each other."""
    first, *others = failures.items()
    text = str(first[1])
    for way, error in others:
        reason = error.__cause__ or error
        lines = str(reason).strip().splitlines() or [""]
        text += f"\nTried {way} too: {type(reason).__name__}: {lines[0]}"
    refused = CaptureError(text)
    refused.__cause__ = first[1].__cause__
    return refused


@contextlib.contextmanager
def torch_silent() -> Iterator[None]:
    """Keep what torch raises while it traces out of its log: it is raised as ours."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def drop(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


# Files, functions and operators of torch that look at values -> what to do in place of it.
_STOCK = {
    "ctc_loss": "Return the log-probabilities, and compute ctc_loss outside of the model.",
    "pack_padded_sequence": "Feed padded sequences to the module, and mask what it gives.",
    "gaussian_nll_loss": "Write out what it computes: 0.5 * (var.log() + (input - target) ** 2 / "
    "var).mean(). Or compute it outside of the model.",
    "one_hot": "Give one_hot the number of classes: num_classes=...",
    "batchnorm.py": "Give the batch norm a number as its momentum: None makes it a Python number.",
    "aten.linalg_lstsq.default": "Compute torch.linalg.pinv(a) @ b: the shape of lstsq's residuals "
    "depends on the rank of a.",
}


def remedy(error: BaseException) -> str:
    """What the user can do about Python that looks at values; what fits where it is torch's own."""
    operator = _STOCK.get(str(getattr(error, "func", "")))
    if operator is not None:
        return operator
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        known = _STOCK.get(frame.name) or _STOCK.get(Path(frame.filename).name)
        if known is not None:
            return known
        if provenance.is_users(frame.filename):  # of what C++ computes there is no frame
            called = [text for name, text in _STOCK.items() if f"{name}(" in (frame.line or "")]
            if called:
                return called[0]
    return (
        "Make it a tensor operation (torch.where, masking), or compute it outside the model and "
        "pass it in."
    )


def line_of(error: BaseException) -> str:
    """``, at``, and the innermost frame of the user's code; or a stop."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for is_named in (provenance.is_users, provenance.has_no_file):
        for failure in reversed(chain):
            for frame in reversed(traceback.extract_tb(failure.__traceback__)):
                if is_named(frame.filename):
                    where = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
                    return f", at\n  {where}\n    {frame.line}"
    return "."
