"""A forward at full depth, on fake tensors and without a graph: what a stamp is proven against.

Every operator that forward dispatches is noted, with its constants, where each tensor comes from,
whether that needs a gradient, the call and the line that it is in. That is a tenth of the cost of a
capture, because nothing is traced and no backward runs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.overrides import TorchFunctionMode

from fxshard._torch import autograd, checkpointing, dtensors, fake_tensors, graphs, sizes
from fxshard._torch.modes import TorchDispatchMode
from fxshard.capture import provenance
from fxshard.capture.repeat.ghosts import Table
from fxshard.capture.repeat.places import (
    OUTSIDE,
    BlockPlace,
    Formless,
    Label,
    Runs,
    SequenceItem,
    Unproven,
    among_left,
    cut,
    name_at,
    place_of,
)
from fxshard.ir import tags
from fxshard.ir.calls import Call

Token = str | tuple[int, int]  # FQN of a leaf, or the line and which of its results


@dataclasses.dataclass(frozen=True)
class RehearsedOperator:
    """One operator of a rehearsal.

    Attributes:
        key: operator, constants, line of code, and whether gradients are off and wanted.
        tokens: where each of its tensors comes from.
        call: the call that it ran in.
        region: the checkpoint that it ran in.
    """

    key: Any
    tokens: tuple[Token, ...]
    call: int | None
    region: int | None


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What a forward did.

    Attributes:
        lines: its operators, in order.
        calls: its calls of modules, in order.
        facts: what it returned beside tensors.
        leaves: name -> identity, and kind, shape, strides, dtype, device and requires_grad of each
            parameter and buffer.
    """

    lines: list[RehearsedOperator]
    calls: list[Call]
    facts: Any
    leaves: dict[str, tuple[int, Any]]

    def sequences(self, runs: Runs) -> dict[str, list[SequenceItem]]:
        """Its calls and lines as items, cut at the blocks of `runs`."""
        labels = call_labels(self.calls, runs)
        calls = call_items(self.calls, labels, runs)
        where = [
            BlockPlace("line", *at)
            for at in cut([None if line.call is None else labels[line.call] for line in self.lines])
        ]
        regions: dict[int | None, BlockPlace] = {}
        counts: dict[tuple[int, int], int] = {}
        items: list[SequenceItem] = []
        for line, place in zip(self.lines, where, strict=True):
            refs: list[BlockPlace] = []
            for token in line.tokens:
                if isinstance(token, str):
                    refs.append(among_left(place_of(token, runs), runs))
                else:
                    at = where[token[0]]
                    refs.append(BlockPlace("line", at.run, at.block, (at.position, token[1])))
            if line.call is not None:
                refs.append(calls[line.call].place)
            if line.region is not None:
                if line.region not in regions:
                    number = counts.get((place.run, place.block), 0)
                    counts[place.run, place.block] = number + 1
                    regions[line.region] = BlockPlace("region", place.run, place.block, number)
                refs.append(regions[line.region])
            items.append(SequenceItem(place, line.key, tuple(refs)))
        return {"call": calls, "line": items}


def call_labels(calls: Sequence[Call], runs: Runs) -> list[Label]:
    """The block that each call is in: that of the call that it ran inside of, or of its module.

    They are two where blocks share a module.
    """
    labels: list[Label] = []
    for call in calls:
        place = among_left(place_of(call.module, runs), runs)
        own = None if place.run == OUTSIDE else (place.run, place.block)
        outer = None if call.parent is None else labels[call.parent]
        labels.append(outer or own)
    return labels


def call_items(calls: Sequence[Call], labels: list[Label], runs: Runs) -> list[SequenceItem]:
    """Calls as items: the module, and the call that it ran inside of."""
    items: list[SequenceItem] = []
    for call, at in zip(calls, cut(labels), strict=True):
        module = among_left(place_of(call.module, runs, "module"), runs)
        parent = () if call.parent is None else (items[call.parent].place,)
        items.append(SequenceItem(BlockPlace("call", *at), "call", (module, *parent)))
    return items


def gathers_gradients(item: SequenceItem, number: int) -> bool:
    """True if a reference of an operator is a tensor that needs a gradient."""
    if item.place.kind != "line":
        return False
    flags: tuple[bool, ...] = item.key[2]
    return number < len(flags) and flags[number]


class RehearsalRecorder(TorchDispatchMode):
    """Notes every operator inside.

    Args:
        leaves: what `leaves_of` gave.
        table: of what operators make of ghosts; None where tensors are fake ones.
    """

    def __init__(self, leaves: dict[str, tuple[int, Any]], table: Table | None) -> None:
        super().__init__()
        self._table = table
        self.lines: list[RehearsedOperator] = []
        self._tokens: dict[int, Token] = {}
        for name, (number, _) in leaves.items():
            self._tokens.setdefault(number, name)
        self._alive: list[Any] = []  # an identity is one only while its tensor lives
        self.refused: Exception | None = None  # why, raised after forward: it may catch errors

    def given(self, tensors: tuple[Tensor, ...]) -> None:
        """Name the tensors of the call."""
        for i, tensor in enumerate(tensors):
            self._tokens[id(tensor)] = f"input[{i}]"

    def refuse(self, why: Exception) -> None:
        """Nothing can be proven: forward goes on, and leaves nothing half done."""
        self.refused = self.refused or why

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is provenance.DEVICE_OF:
            return func(*args)
        try:
            return self._noted(func, args, kwargs)
        except (Unproven, Formless) as error:
            self.refuse(error)
            raise

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        tensors = self._line(func, args, kwargs)
        if any(dtensors.is_dtensor(tensor) for tensor in tensors):
            return NotImplemented  # DTensor runs operators on local tensors: the next lines
        constants = self.lines[-1].key[1]
        if self._table is None:
            out = func(*args, **(kwargs or {}))
        else:
            out = self._table.run(func, args, kwargs or {}, (constants, *_settings()), tensors)
        for i, tensor in enumerate(tags.tensors(out)):
            if id(tensor) not in self._tokens:
                self._tokens[id(tensor)] = (len(self.lines) - 1, i)
                self._alive.append(tensor)
        return out

    def _line(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Note an operator; returns its tensors."""
        stack = graphs.current_meta().get(provenance.STACK, {})
        tokens: list[Token] = []
        tensors: list[Tensor] = []
        constants: list[Any] = []
        if is_literal(func, args):
            tensors.append(args[0])
            constants.append((args[0].dtype, fake_tensors.values_as_text(args[0])))
        else:
            split((args, kwargs), tensors, constants)
            tokens += map(self._token, tensors)
        flags = [tensor.requires_grad for tensor in tensors]
        if autograd.saved_tensors_hooks_on_top() is not None:
            self.refuse(Unproven("hooks for saved tensors run inside of the model"))
        key = (
            *(func, tuple(constants), tuple(flags), provenance.line_in(stack)),
            *(provenance.without_gradient(stack), *_settings()),
        )
        region = checkpointing.checkpoint_number(graphs.current_meta())
        self.lines.append(RehearsedOperator(key, tuple(tokens), provenance.call_in(stack), region))
        return tensors

    def applied(self, what: str, args: tuple[Any, ...]) -> None:
        """Note that DTensor goes to or comes from local tensors, or is redistributed."""
        self._line(what, args, {})

    def _token(self, tensor: Tensor) -> Token:
        tensor = dtensors.held_part(tensor)
        token = self._tokens.get(id(tensor))
        if token is None:  # one that the model holds: the same wherever it is read
            token = self._tokens[id(tensor)] = f"tensor at {id(tensor)}"
            self._alive.append(tensor)
        return token

    def finish(self, outputs: list[Any]) -> None:
        """Raise what was refused on the way.

        Raises:
            Unproven, Formless: something of forward decides about backward, or about a block, out
                of the sight of its operators.
        """
        if self.refused is not None:
            raise self.refused
        if _has_custom_functions(outputs):
            # What it saves, the class that it is of, which gradients are made for it: all of that
            # decides about its backward, and torch says little of it.
            raise Unproven("custom autograd functions have a backward of their own")


def is_literal(func: Any, args: tuple[Any, ...]) -> bool:
    """True if an operator takes a tensor that is a constant of the code."""
    return func in _LITERALS and type(args[0]) is Tensor


def split(value: Any, tensors: list[Tensor], constants: list[Any]) -> None:
    """Split arguments into tensors and constants, in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        constants.extend(dtensors.constants_of(value) or (Tensor,))
    elif isinstance(value, (list, tuple)):
        constants.append(len(value))
        for item in value:
            split(item, tensors, constants)
    elif isinstance(value, dict):
        constants.extend(value)
        for item in value.values():
            split(item, tensors, constants)
    else:
        constants.append(as_text(value))


def _settings() -> tuple[Any, ...]:
    """What operators and autograd go by besides their arguments."""
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def as_text(value: Any) -> str:
    """A constant as text that tells 1, 1.0 and True apart; an object by its identity."""
    if value is None or isinstance(value, (bool, int, float, complex, str, *_PLAIN)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {[as_text(v) for v in value]}"
    if isinstance(value, dict):
        return f"{type(value).__name__} { {k: as_text(v) for k, v in value.items()} }"
    if isinstance(value, sizes.SYMBOLIC):
        return f"symbol {sizes.expression(value)}"
    return f"{type(value).__name__} at {id(value)}"


DETACH = torch.ops.aten.detach.default
_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, Placement)


def _has_custom_functions(outputs: list[Any]) -> bool:
    """True if the backward of an autograd node behind `outputs` is that of no operator."""
    todo = [t.grad_fn for t in tags.tensors(outputs) if t.grad_fn is not None]
    seen: set[Any] = set(todo)
    while todo:
        node = todo.pop()
        if autograd.is_custom_function(node) and not dtensors.is_of_dtensor(node):
            return True
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                todo.append(before)
    return False


class NoTensorHooks(TorchFunctionMode):
    """Lets `recorder` refuse hooks on tensors and on autograd nodes: no operator tells of them."""

    def __init__(self, recorder: RehearsalRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _BY_HOOKS:
            self._recorder.refuse(Unproven("forward may register a hook on a tensor"))
        return func(*args, **(kwargs or {}))


# Through these a model reaches hooks: of a tensor, and of the node that made it.
_BY_HOOKS: tuple[Any, ...] = (
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    *(inspect.getattr_static(Tensor, name).__get__ for name in ("grad_fn", "_backward_hooks")),
)


def leaves_of(model: nn.Module, runs: Runs) -> dict[str, tuple[int, Any]]:
    """Name -> identity and metadata of every parameter and buffer, under each of its names.

    Names are those of the full model, where `runs` are left out.
    """
    found: dict[str, tuple[int, Any]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in (*params.items(), *model.named_buffers(remove_duplicate=False)):
        what = (
            *(type(tensor).__name__, name in params, tuple(tensor.shape), tensor.stride()),
            *(tensor.dtype, tensor.device, tensor.requires_grad),
        )
        place = place_of(name, runs)
        if place.run != OUTSIDE:
            place = place._replace(block=runs[place.run].real(place.block))
        found[name_at(place, runs)] = (id(tensor), what)
    return found
