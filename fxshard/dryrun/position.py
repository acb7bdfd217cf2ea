"""Position: where in a training step a run is: phase, call of a module, line of user code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fxshard._torch import autograd
from fxshard.capture.modules import without_wrappers
from fxshard.capture.provenance import user_line
from fxshard.dryrun.tape import Tape
from fxshard.ir.calls import Call
from fxshard.memory.category import Category
from fxshard.memory.ledger import OPTIMIZER, LiveRange, Moment


class Origin(NamedTuple):
    """Where in forward a node of autograd comes from.

    Attributes:
        call: index of the call that it was made in, or None.
        module: FQN of the module.
        line: line of user code.
        phase: "forward" or "loss".
        micro_batch: of the call.
    """

    call: int | None
    module: str
    line: str
    phase: str
    micro_batch: int


@dataclasses.dataclass
class _Running:
    """A call of a module that runs."""

    module: str
    call: int | None
    number: int


class Position:
    """Follows the calls of modules, autograd and optimizers.

    Attributes:
        tape: where calls are written.
        phase: see `fxshard.dryrun.tape.Mark`.
        micro_batch: forwards of this step so far, less one; -1 outside of them.
        stream: the stream that operators run on.
        compiled_line: gives the line of user code of compiled code that runs, or None.
        before_forward: is called before a forward begins.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.phase: str = "between"
        self.micro_batch: int = -1
        self.stream = "compute"
        self.compiled_line: Callable[[], str | None] = lambda: None
        self.before_forward: Callable[[], None] = lambda: None
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._names: dict[int, str] = {}
        self._root: nn.Module | None = None  # whose forward was last
        self._stack: list[_Running] = []
        self._origins: dict[int, Origin] = {}
        self._last = Origin(None, "", "", "forward", 0)
        self._after = "between"  # the phase of what runs outside of forward, backward, optimizer
        self._counts: list[dict[str, int]] = []  # per forward of the step, calls by module
        self._recomputed: list[dict[str, int]] = []
        self._communicating: list[tuple[Category, str]] = []

    # -- what runs -------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """True while autograd runs."""
        return autograd.in_backward()

    @property
    def category(self) -> Category:
        """What a storage is held for that is born now, unless it turns out otherwise."""
        if self._communicating:
            return self._communicating[-1][0]
        forward = self.phase in ("forward", "loss")
        return Category.ACTIVATION if forward else Category.TEMP

    def at_operator(self, read: Callable[[], Iterable[LiveRange]]) -> None:
        """An operator is about to run; `read`: the storages of its arguments."""
        if self.phase == "optimizer":
            return
        if self.in_backward:
            origin = self._origin()
            self.phase = "loss backward" if origin.phase == "loss" else "backward"
            self.micro_batch = origin.micro_batch
            self._after = "between"
            return
        self.phase = "forward" if self._stack else self._after
        if self.phase in ("forward", "loss"):
            self.micro_batch = len(self._counts) - 1
        if self.phase == "loss":
            for each in read():  # labels, and what else only the loss reads
                if each.category is Category.TEMP and each.op:
                    each.category = Category.INPUTS

    def _origin(self) -> Origin:
        """Where the node of autograd comes from that runs now."""
        number = autograd.running_node_number()
        if number is not None and number in self._origins:
            self._last = self._origins[number]
        return self._last

    def moment(self, op: str) -> Moment:
        """What runs, as a point of the ledger."""
        recomputed = self.in_backward and bool(self._stack)
        kind: Literal["row", "operator"] = "row" if self._communicating else "operator"
        if self.phase == "optimizer":
            return Moment(
                op, op, OPTIMIZER, self.stream, self.compiled_line() or user_line(), None, kind
            )
        if self.in_backward and not recomputed:
            call, module, line, *_ = self._origin()
            line = self.compiled_line() or line
        else:
            here = self._stack[-1] if self._stack else None
            call, module = (here.call, here.module) if here else (None, self._outside())
            line = self.compiled_line() or user_line()
            if torch.is_grad_enabled():
                phase = self.phase if here is None else "forward"
                origin = Origin(call, module, line, phase, max(len(self._counts) - 1, 0))
                self._origins.setdefault(autograd.next_node_number() - 1, origin)
        if self._communicating:
            module = self._communicating[-1][1]
        return Moment(op, op, module, self.stream, line, call, kind, recomputed, recomputed)

    def _outside(self) -> str:
        return "(loss)" if self.phase == "loss" else ""

    @contextlib.contextmanager
    def communicating(self, category: Category, module: nn.Module | str) -> Iterator[None]:
        """What is born in the block is sent or received for a unit, or for what has a name."""
        name = module if isinstance(module, str) else self.name_of(module)
        self._communicating.append((category, name))
        try:
            yield
        finally:
            self._communicating.pop()

    # -- modules ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def inside(self, module: nn.Module) -> Iterator[bool]:
        """A module runs; gives True if a forward begins with it.

        That is the outermost one that has parameters; but if it is part of the model whose forward
        was last, that goes on, as where a loss calls the head of a model on pieces of its output.
        """
        if self.in_backward:  # an activation checkpoint recomputes
            with self._recomputing(module):
                yield False
            return
        outermost = not self._stack
        if outermost and not _begins_forward(module):
            yield False
            return
        begins = outermost and not (self._counts and self._is_part(module))
        if begins:
            self.before_forward()
        name = self._name(module)
        if begins:
            self._root = module
            self._begin_forward()
        calls = self.tape.calls[-1][-1]
        number = self._counts[-1].get(name, 0)
        self._counts[-1][name] = number + 1
        calls.append(Call(name, number, self._stack[-1].call if self._stack else None))
        self._stack.append(_Running(name, len(calls) - 1, number))
        try:
            yield begins
        finally:
            self._stack.pop()
            if outermost:
                self._after = "loss" if torch.is_grad_enabled() else "between"

    @contextlib.contextmanager
    def _recomputing(self, module: nn.Module) -> Iterator[None]:
        """Calls of a module are recomputed in the opposite order."""
        name = self._name(module)
        forward = self._origin().micro_batch
        known = forward < len(self._counts)
        calls = self.tape.calls[-1][forward] if known else []
        number = 0
        if known:
            done = self._recomputed[forward].get(name, 0)
            self._recomputed[forward][name] = done + 1
            number = max(self._counts[forward].get(name, 1) - 1 - done, 0)
        same = (i for i, c in enumerate(calls) if (c.module, c.number) == (name, number))
        self._stack.append(_Running(name, next(same, None), number))
        try:
            yield
        finally:
            self._stack.pop()

    def _begin_forward(self) -> None:
        if not self.tape.ends:
            self.tape.end()
        self.phase = "forward"
        self.micro_batch = len(self._counts)
        self._counts.append({})
        self._recomputed.append({})
        self.tape.calls[-1].append([])

    def _is_part(self, module: nn.Module) -> bool:
        """True for a module inside of the one whose forward was last."""
        root = self._root
        return root not in (None, module) and any(each is module for each in root.modules())

    def _name(self, module: nn.Module) -> str:
        """FQN of a module, without the names of wrappers."""
        if id(module) not in self._names:
            if self._stack:
                prefix = f"{self._stack[-1].module}.{type(module).__name__}".lstrip(".")
            else:
                prefix = f"({type(module).__name__})" if self.roots else ""
                self.roots.append(module)
            self._learn(module, prefix)
        return self._names[id(module)]

    def _learn(self, module: nn.Module, prefix: str) -> None:
        if isinstance(module, DistributedDataParallel):  # it adds "module" to names
            self._names[id(module)] = prefix
            module = module.module
        for name, each in module.named_modules():
            parts = [prefix, without_wrappers(name)]
            self._names.setdefault(id(each), ".".join(filter(None, parts)))

    def fqn(self, root: nn.Module, name: str) -> str:
        """FQN of a parameter of a root, without the names of wrappers."""
        if isinstance(root, DistributedDataParallel):
            name = name.removeprefix("module.")
        parts = [self.name_of(root), without_wrappers(name)]
        return ".".join(filter(None, parts))

    def name_of(self, module: nn.Module) -> str:
        """FQN of a module, or its class name if it has not run."""
        return self._names.get(id(module), f"({type(module).__name__})")

    # -- optimizers and steps ----------------------------------------------------------------------

    def begin_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps."""
        if all(each is not optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)
        self.phase, self.micro_batch = "optimizer", -1

    def end_optimizer(self) -> None:
        """It has stepped."""
        self.phase = self._after = "between"

    def end_step(self) -> None:
        """A step is over, or what comes before the first."""
        self.tape.end()
        self._counts, self._recomputed = [], []
        self.micro_batch = -1
        self.phase = "between"
        self._after = "between"
        self._origins = {}


def _begins_forward(module: nn.Module) -> bool:
    """False for a loss, for what prepares a batch, and for what computes a parameter.

    Initialisation reads parameters, as those that `torch.nn.utils.parametrizations` computes.
    """
    computes = isinstance(module, parametrize.ParametrizationList)
    return not computes and any(True for _ in module.parameters())


@contextlib.contextmanager
def followed(
    position: Position,
    began: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    stepping: Callable[[torch.optim.Optimizer], None],
    stepped: Callable[[torch.optim.Optimizer], None],
) -> Iterator[None]:
    """While the block runs, `position` follows every call of a module and every optimizer step.

    Args:
        position: what follows.
        began: called with the outermost module and its arguments when it is called.
        stepping, stepped: called before and after each optimizer's step.
    """
    plain = nn.Module.__call__

    @functools.wraps(plain)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(module, *args, **kwargs)
        with position.inside(module) as outermost:
            if outermost:
                began(module, args, kwargs)
            return plain(module, *args, **kwargs)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepping(optimizer)
        position.begin_optimizer(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        position.end_optimizer()
        stepped(optimizer)

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
