"""One trace for equal calls of equal models: for tests of what comes after the trace.

Half of what a plan of a small model costs is its trace, and tests of strategies and options plan
the same models again and again. Those that conftest.py lists do what `Plan.replan` does, over all
plans of a process, and over all processes of a run of the tests: the first that traces writes the
program as text, which its other ranks, other workers and later pools of ranks read back, at a
twentieth of the cost.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import functools
import hashlib
import os
import pickle
import re
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxshard._torch import context_parallel, trees
from fxshard._torch import modules as torch_modules
from fxshard.capture import strides, trace
from fxshard.capture.swapped import users_class
from fxshard.errors import TextError
from fxshard.ir import text
from fxshard.ir.program import Program
from fxshard.ir.units import Unit
from fxshard.runtime.stage import ScheduleEnd

Capture = Callable[..., Program]
FOLDER = "FXSHARD_TEST_TRACES"  # the variable that names the folder of this run's texts
WAITS_S = (
    60  # for another process that traces the same; a rank may do so while it waits for this one
)


class Shared:
    """Stands for `trace.capture`; `everywhere`: shared with the other processes of the run."""

    def __init__(self, capture: Capture, everywhere: bool = False) -> None:
        self._capture = capture
        self._everywhere = everywhere
        self._made: dict[Any, Program] = {}
        self._keep: list[Any] = []  # what a key knows by its id

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
    ) -> Program:
        if context_parallel.state() is not None:  # of this rank alone, and of these groups
            return self._capture(model, args, kwargs, **options)
        key = self._key(model, args, kwargs, options)
        if key not in self._made:
            capture = functools.partial(self._capture, model, args, kwargs, **options)
            shared = self._everywhere and FOLDER in os.environ and _has_no_address(key)
            self._made[key] = _once_in_a_run(key, capture) if shared else capture()
        return _again(self._made[key])

    def _key(self, model: nn.Module, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """Of all that a trace sees, but for what the code of the model reads elsewhere."""
        numbers: dict[int, int] = {}

        def number(of: Any) -> int:
            return numbers.setdefault(id(of), len(numbers))

        def said(value: Any) -> Any:
            shown = repr(value)
            if " at 0x" not in shown:
                return type(value), shown
            if isinstance(value, FunctionType) and value.__qualname__.isidentifier():
                return value.__module__, value.__qualname__
            if isinstance(value, functools.partial):
                return said(value.func), said(value.args), said(value.keywords)
            if isinstance(value, weakref.ref) and isinstance(value(), Tensor):  # of an LSTM's
                return number(value())
            if isinstance(value, ScheduleEnd):  # of a stage of a pipeline: it computes nothing
                return ScheduleEnd
            if isinstance(value, dict):  # hooks come and go
                return type(value), [(said(k), said(v)) for k, v in value.items()]
            if isinstance(value, (list, tuple)):
                return type(value), [said(each) for each in value]
            self._keep.append(value)
            return hex(id(value))

        def held(tensor: Tensor | None) -> Any:
            """A parameter counts as it is unsharded, where it is sharded too."""
            if tensor is None:
                return None
            shape, stride = tuple(tensor.shape), strides.of_state(tensor)
            facts = (shape, stride, tensor.dtype, tensor.device)
            return number(tensor), facts, tensor.requires_grad

        def given(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return said(leaf)
            storage = number(leaf.untyped_storage()._cdata), leaf.storage_offset()
            return type(leaf), storage, leaf.stride(), held(leaf)

        modules = [
            (
                name,
                self._of_class(users_class(module)),
                [(key, held(p)) for key, p in module._parameters.items()],
                [(key, held(b)) for key, b in module._buffers.items()],
                [(key, number(m)) for key, m in module._modules.items()],
                [(key, said(v)) for key, v in vars(module).items() if _is_read(key)],
            )
            for name, module in model.named_modules()
        ]
        units = [
            (
                unit.fqn,
                unit.precision,
                [(p.fqn, p.compute_dtype, p.requires_grad) for p in unit.params],
                [(p.fqn, p.requires_grad) for p in unit.ignored],
            )
            for unit in options["units"]
        ]
        leaves, spec = trees.tree_flatten((args, kwargs))
        others = {k: v for k, v in options.items() if k not in ("units", "world_size")}
        others["device"] = trace.where_it_computes(model, options.get("device"))
        around = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch_modules.REDUCES_AS_STORED,
        )
        return repr((modules, units, spec, list(map(given, leaves)), others, around))

    def _of_class(self, kind: type) -> Any:
        """Its name; with its id, where the name is another's: of one made in its place."""
        home = vars(sys.modules.get(kind.__module__, object))
        if home.get(kind.__qualname__, kind) is kind:
            return kind
        self._keep.append(kind)
        return kind, hex(id(kind))


def _again(program: Program) -> Program:
    """A graph of its own: who asked may run passes over it, and others ask too."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {})).meta = dict(program.output.meta)
    results, facts = list(program.results), set(program.facts)
    return dataclasses.replace(program, graph=graph, results=results, facts=facts)


def _is_read(name: str) -> bool:
    """By a forward."""
    slots = ("_parameters", "_buffers", "_modules")
    return name not in slots and not name.startswith("_fxshard") and "state_dict" not in name


def _has_no_address(key: str) -> bool:
    return re.search(r"0x[0-9a-f]{6}", key) is None


def _once_in_a_run(key: str, capture: Callable[[], Program]) -> Program:
    """What the first process that asked for it has traced."""
    path = Path(os.environ[FOLDER], hashlib.sha256(key.encode()).hexdigest())
    with _held(path.with_suffix(".lock")):
        if not path.exists():
            program = capture()
            written = _written(program)
            if written is None:
                return program
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(written)
            part.rename(path)
            return program
    return text.parse(*pickle.loads(path.read_bytes()))


def _written(program: Program) -> bytes | None:
    """None for what holds only in this process: functions of a user's, names of its groups."""
    program = copy.copy(program)  # a trace knows no ranks: what the units of this call say of them
    program.units = tuple(map(_without_meshes, program.units))
    try:
        written = text.write(program)
    except TextError:
        return None
    if "c10d" in written or "Mesh(" in written:
        return None
    return pickle.dumps((written, dict(program.constants)))


def _without_meshes(unit: Unit) -> Unit:
    params = tuple(dataclasses.replace(param, mesh="") for param in unit.params)
    return dataclasses.replace(unit, params=params)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """One process at a time; the system lets go of what a dead one held."""
    with open(path, "w") as file:
        end = time.monotonic() + WAITS_S
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
        yield


@contextlib.contextmanager
def folder_of_a_run() -> Iterator[None]:
    """Inside, this process and those it starts share traces."""
    with tempfile.TemporaryDirectory(prefix="traces-") as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


@functools.cache
def _shared() -> Shared:
    """That of this process."""
    return Shared(trace.capture, everywhere=True)


@contextlib.contextmanager
def sharing(shares: bool, *, anew: bool = False) -> Iterator[None]:
    """Inside, if it `shares`, captures are shared; `Ranks.run` has its ranks do so too.

    Args:
        anew: with none of before: a key knows classes by their names.
    """
    before = trace.capture
    if shares:
        trace.capture = Shared(before) if anew else _shared()
    try:
        yield
    finally:
        trace.capture = before


def are_shared() -> bool:
    return isinstance(trace.capture, Shared)
