"""Where each operator comes from: the call of a module that it runs in, and the line of user code.

Written while the model is traced, into the ``nn_module_stack`` of what the trace makes; the
operators of backward inherit it from the forward operator that they differentiate
(torch/_functorch/_aot_autograd/utils.py, ``copy_fwd_metadata_to_bw_nodes``).
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fxshard._torch import graphs
from fxshard._torch.modes import TorchDispatchMode
from fxshard.capture import aliasing, precision, rng
from fxshard.ir.calls import Call

STACK = "nn_module_stack"
STACKS = {"forward": STACK, "backward": f"fwd_{STACK}"}
LINE = "fxshard_line"  # keys in that stack, beside the FQNs
CALL = "fxshard_call"
NO_GRAD = "fxshard_no_grad"
NOTES = (LINE, CALL, NO_GRAD)
GIVEN_LINE = "fxshard_given_line"  # beside that stack: the line, where frames do not tell it

DEVICE_OF = torch.ops.prim.device.default

Function = TypeVar("Function", bound=Callable[..., Any])
SOURCE_WIDTH = 48  # of a line of code that people are shown


@contextlib.contextmanager
def calls_noted(model: nn.Module) -> Iterator[list[Call]]:
    """Note every call of a submodule of `model` while the block runs; yields the growing list.

    Patching ``Module.__call__`` would be bypassed by modules that call ``forward``'s siblings
    directly; hooks fire wherever modules are called.
    """
    names = {id(module): name for name, module in model.named_modules()}
    calls: list[Call] = []
    counts: dict[str, int] = {}
    restores: list[Any] = []
    stack: list[dict[str, Any]] = [{}]

    def enter(module: nn.Module, args: Any) -> None:
        name = names.get(id(module))
        if name is None:
            restores.append(None)
            return
        if len(stack) == 1:  # the trace runs the model twice: its last run counts
            calls.clear()
            counts.clear()
        parent = stack[-1].get(CALL)
        number = counts.get(name, 0)
        counts[name] = number + 1
        calls.append(Call(name, number, parent[0] if parent else None))
        here = {key: value for key, value in stack[-1].items() if key != CALL}
        stack.append({**here, name: (name, type(module)), CALL: (len(calls) - 1, Call)})
        restores.append(graphs.with_current_meta(STACK, stack[-1]))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        restore = restores.pop()
        if restore is not None:
            stack.pop()
            restore()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def in_root() -> Iterator[None]:
    """What runs in the block belongs to the root module, though it is no call of it."""
    restore = graphs.with_current_meta(STACK, {"": ("", nn.Module)})
    try:
        yield
    finally:
        restore()


class LinesNoted(TorchDispatchMode):
    """Notes the line of user code of every operator inside, and if gradients are off there.

    Args:
        listener: called with each operator, its arguments and what is noted.
    """

    def __init__(self, listener: Callable[..., None] | None = None) -> None:
        super().__init__()
        self._listener = listener

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE_OF:  # what C++ asks of every fake tensor that it meets: no node
            return func(*args)
        stack = graphs.current_meta().get(STACK, {})
        line = str(graphs.current_meta().get(GIVEN_LINE) or user_line())
        rng.refuse_generators(func, args, kwargs, line)
        aliasing.refuse_unregistered(func, args, kwargs, line)
        precision.refuse_mixed(func, args, line)
        noted = {
            LINE: (line, LinesNoted),
            NO_GRAD: (not torch.is_grad_enabled(), bool),
        }
        graphs.with_current_meta(STACK, {**stack, **noted})
        if self._listener is not None:
            self._listener(func, args, kwargs, noted)
        return func(*args, **(kwargs or {}))


def is_backward(node: fx.Node) -> bool:
    """True if a node of a trace is marked as one of backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def stack_of(node: fx.Node, phase: str) -> dict[str, Any] | None:
    """The stack of a node of "forward" or "backward": the latter have that of forward noted."""
    found: dict[str, Any] | None = node.meta.get(STACKS[phase]) or node.meta.get(STACK)
    return found


def module_in(stack: dict[str, Any] | None) -> str | None:
    """FQN of the innermost module of a stack; None if it names none."""
    names = [entry[0] for key, entry in (stack or {}).items() if key not in NOTES]
    return names[-1] if names else None


def call_in(stack: dict[str, Any] | None) -> int | None:
    """Index of the innermost call of a stack."""
    entry = (stack or {}).get(CALL)
    return None if entry is None else int(entry[0])


def line_in(stack: dict[str, Any] | None) -> str:
    """The line of a stack, as `user_line` gave it; "" if there is none."""
    entry = (stack or {}).get(LINE)
    return "" if entry is None else str(entry[0])


def without_gradient(stack: dict[str, Any] | None) -> bool:
    """True if the operator of a stack ran under ``torch.no_grad()``, or one like it."""
    entry = (stack or {}).get(NO_GRAD)
    return entry is not None and bool(entry[0])


def user_line() -> str:
    """``path:line in function`` of the innermost frame outside of torch and fxshard; or "".

    While a model is traced, of the frames of its forward: who asks for the trace is no part of it.
    Where none of them is in a file, of code that has none: ``<stdin>:3 in forward``.
    """
    frame, without_file = sys._getframe(1), ""
    while frame is not None and frame.f_code not in _entries:
        code = frame.f_code
        if _is_users(code):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        if not without_file and has_no_file(code.co_filename):
            without_file = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return without_file if frame is not None else ""


_entries: set[CodeType] = set()


def enters(function: Function) -> Function:
    """Mark a function that calls the user's model: `user_line` looks no farther out."""
    _entries.add(function.__code__)
    return function


def line_text(line: str) -> str:
    """A line for people: ``dir/model.py:42 in forward: h = self.fc(x)``."""
    place, _, function = line.partition(" in ")
    path, _, number = place.rpartition(":")
    if not path:
        return line
    source = linecache.getline(path, int(number)).strip()
    if len(source) > SOURCE_WIDTH:
        source = source[: SOURCE_WIDTH - 1] + "…"
    short = "/".join(Path(path).parts[-2:])
    return f"{short}:{number} in {function}" + (f": {source}" if source else "")


def has_no_file(path: str) -> bool:
    """True for what people type or ``exec``: ``<stdin>``, ``<string>``, ``<ipython-input-3>``."""
    return path.startswith("<") and not path.startswith(("<eval_with_key>", "<frozen "))


def is_users(path: str) -> bool:
    """True for a file outside of torch, fxshard and Python's own library."""
    own = (Path(__file__).resolve().parents[1], Path(torch.__file__).resolve().parent)
    file = Path(path).resolve()
    if "<" in file.name or any(file.is_relative_to(each) for each in own):
        return False
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return not file.is_relative_to(library) or "site-packages" in file.parts


@functools.cache
def _is_users(code: CodeType) -> bool:
    return is_users(code.co_filename)
