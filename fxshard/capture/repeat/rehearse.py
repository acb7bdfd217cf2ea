"""A forward at full depth, on fake tensors and without a graph: what a stamp is proven against.

Every operator that forward dispatches is noted, with its constants, where each tensor comes from,
whether that needs a gradient, the call and the line that it is in. That is a tenth of the cost of a
capture, because nothing is traced and no backward runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxshard._torch import autograd, checkpointing, fake_tensors, graphs, sizes
from fxshard._torch.modes import TorchDispatchMode
from fxshard.capture import provenance
from fxshard.capture.repeat.ghosts import Table
from fxshard.capture.repeat.places import (
    OUTSIDE,
    Formless,
    Item,
    Label,
    Place,
    Runs,
    Unproven,
    cut,
    name_at,
    place_of,
)
from fxshard.ir.calls import Call

Token = str | tuple[int, int]  # FQN of a leaf, or the line and which of its results


@dataclasses.dataclass(frozen=True)
class Line:
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

    lines: list[Line]
    calls: list[Call]
    facts: Any
    leaves: dict[str, tuple[int, Any]]

    def sequences(
        self, runs: Runs, real: Callable[[int, int], int | None]
    ) -> dict[str, list[Item]]:
        """Its calls and lines as items.

        Args:
            runs: the blocks to cut at.
            real: run and number among all blocks -> number among those that ran.
        """
        labels = call_labels(self.calls, runs, real)
        calls = call_items(self.calls, labels, runs, real)
        where = [
            Place("line", *at)
            for at in cut([None if line.call is None else labels[line.call] for line in self.lines])
        ]
        regions: dict[int | None, Place] = {}
        counts: dict[tuple[int, int], int] = {}
        items: list[Item] = []
        for line, place in zip(self.lines, where, strict=True):
            refs: list[Place] = []
            for token in line.tokens:
                if isinstance(token, str):
                    refs.append(_at(place_of(token, runs), real))
                else:
                    at = where[token[0]]
                    refs.append(Place("line", at.run, at.block, (at.position, token[1])))
            if line.call is not None:
                refs.append(calls[line.call].place)
            if line.region is not None:
                if line.region not in regions:
                    number = counts.get((place.run, place.block), 0)
                    counts[place.run, place.block] = number + 1
                    regions[line.region] = Place("region", place.run, place.block, number)
                refs.append(regions[line.region])
            items.append(Item(place, line.key, tuple(refs)))
        return {"call": calls, "line": items}


def _at(place: Place, real: Callable[[int, int], int | None]) -> Place:
    if place.run < 0:
        return place
    block = real(place.run, place.block)
    if block is None:
        raise Unproven("a block that was left out is read")
    return place._replace(block=block)


def call_labels(
    calls: list[Call], runs: Runs, real: Callable[[int, int], int | None]
) -> list[Label]:
    """The block that each call is in: that of the call that it ran inside of, or of its module.

    They are two where blocks share a module.
    """
    labels: list[Label] = []
    for call in calls:
        place = _at(place_of(call.module, runs), real)
        own = None if place.run < 0 else (place.run, place.block)
        outer = None if call.parent is None else labels[call.parent]
        labels.append(outer or own)
    return labels


def call_items(
    calls: list[Call], labels: list[Label], runs: Runs, real: Callable[[int, int], int | None]
) -> list[Item]:
    """Calls as items: the module, and the call that it ran inside of."""
    items: list[Item] = []
    for call, at in zip(calls, cut(labels), strict=True):
        module = _at(place_of(call.module, runs, "module"), real)
        parent = () if call.parent is None else (items[call.parent].place,)
        items.append(Item(Place("call", *at), "call", (module, *parent)))
    return items


def gathers_gradients(item: Item, number: int) -> bool:
    """True if a reference of an operator is a tensor that needs a gradient."""
    if item.place.kind != "line":
        return False
    flags: tuple[bool, ...] = item.key[2]
    return number < len(flags) and flags[number]


class Recorder(TorchDispatchMode):
    """Notes every operator inside.

    Args:
        leaves: what `leaves_of` gave.
        table: of what operators make of ghosts; None where tensors are fake ones.
    """

    def __init__(self, leaves: dict[str, tuple[int, Any]], table: Table | None) -> None:
        super().__init__()
        self._table = table
        self.lines: list[Line] = []
        self._tokens: dict[int, Token] = {}
        for name, (number, _) in leaves.items():
            self._tokens.setdefault(number, name)
        self._alive: list[Any] = []  # an identity is one only while its tensor lives
        self.refused: Exception | None = None  # why, told when forward is over: it may catch errors

    def given(self, tensors: tuple[Tensor, ...]) -> None:
        """Name the tensors of the call."""
        for i, tensor in enumerate(tensors):
            self._tokens[id(tensor)] = f"input[{i}]"

    def refuse(self, why: Exception) -> None:
        """Nothing can be proven: forward goes on, so that it leaves nothing half done behind."""
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
        stack = graphs.current_meta().get(provenance.STACK, {})
        tokens: list[Token] = []
        tensors: list[Tensor] = []
        said: list[Any] = []
        if func in _LITERALS and type(args[0]) is Tensor:
            tensors.append(args[0])
            said.append((args[0].dtype, fake_tensors.values_as_text(args[0])))
        else:
            read((args, kwargs), tensors, said)
            tokens += map(self._token, tensors)
        flags = [tensor.requires_grad for tensor in tensors]
        if autograd.saved_tensors_hooks_on_top() is not None:
            self.refuse(Unproven("hooks for saved tensors run inside of the model"))
        key = (
            *(func, tuple(said), tuple(flags), provenance.line_in(stack)),
            *(provenance.without_gradient(stack), *_settings()),
        )
        region = checkpointing.checkpoint_number(graphs.current_meta())
        self.lines.append(Line(key, tuple(tokens), provenance.call_in(stack), region))
        if self._table is None:
            out = func(*args, **(kwargs or {}))
        else:
            out = self._table.run(func, args, kwargs or {}, (key[1], *_settings()), tensors)
        for i, tensor in enumerate(_tensors(out)):
            if id(tensor) not in self._tokens:
                self._tokens[id(tensor)] = (len(self.lines) - 1, i)
                self._alive.append(tensor)
        return out

    def _token(self, tensor: Tensor) -> Token:
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
            # decides about its backward, and torch tells little of it.
            raise Unproven("custom autograd functions have a backward of their own")


def read(value: Any, tensors: list[Tensor], said: list[Any]) -> None:
    """Split arguments into tensors and constants, in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        said.append(Tensor)
    elif isinstance(value, (list, tuple)):
        said.append(len(value))
        for item in value:
            read(item, tensors, said)
    elif isinstance(value, dict):
        said.extend(value)
        for item in value.values():
            read(item, tensors, said)
    else:
        said.append(said_of(value))


class Alike:
    """The runs of forward in one trace, which must do the same."""

    def __init__(self) -> None:
        self._runs: list[list[Any]] = []

    def one(self, leaves: Mapping[int, str]) -> Callable[..., None]:
        """To be told the operators of the next run.

        Args:
            leaves: identity -> name of each parameter, buffer and input in this run.
        """
        run: list[Any] = []
        self._runs.append(run)

        def told(func: Any, args: Any, kwargs: Any, noted: Any) -> None:
            if func is torch.ops.aten.detach.default:  # torch's own bookkeeping, as the trace goes
                return
            said: list[Any] = []
            tensors: list[Tensor] = []
            read((args, kwargs), tensors, said)
            said += [leaves.get(id(tensor)) for tensor in tensors]
            if func in _LITERALS and type(args[0]) is Tensor:
                said.append(fake_tensors.values_as_text(args[0]))
            run.append((func, tuple(map(_unnumbered, said)), noted))

        return told

    def differs(self) -> str | None:
        """The line of user code of the first operator that one run has and another has not.

        "" if that is unknown; None if they do the same.
        """
        first = self._runs[0]
        for other in self._runs[1:]:
            for pair in itertools.zip_longest(first, other):
                if pair[0] != pair[1]:
                    _, _, noted = pair[0] or pair[1]
                    return str(noted[provenance.LINE][0])
        return None

    def check(self) -> None:
        """Raises Unproven: they do not."""
        if self.differs() is not None:
            raise Unproven("forward does otherwise when it is run again")


def _unnumbered(said: Any) -> Any:
    """A symbol without its number: each run of forward makes those of data anew."""
    return "symbol" if isinstance(said, str) and said.startswith("symbol ") else said


def _settings() -> tuple[Any, ...]:
    """What operators and autograd go by besides their arguments."""
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def said_of(value: Any) -> str:
    """A constant as text that tells 1, 1.0 and True apart; an object by its identity."""
    if value is None or isinstance(value, (bool, int, float, complex, str, *_PLAIN)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {[said_of(v) for v in value]}"
    if isinstance(value, dict):
        return f"{type(value).__name__} { {k: said_of(v) for k, v in value.items()} }"
    if isinstance(value, sizes.SYMBOLIC):
        return f"symbol {sizes.expression(value)}"
    return f"{type(value).__name__} at {id(value)}"


_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _has_custom_functions(outputs: list[Any]) -> bool:
    """True if the backward of an autograd node behind `outputs` is that of no operator."""
    todo = [t.grad_fn for t in _tensors(outputs) if t.grad_fn is not None]
    seen: set[Any] = set(todo)
    while todo:
        node = todo.pop()
        if autograd.is_custom_function(node):
            return True
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                todo.append(before)
    return False


class NoTensorHooks(TorchFunctionMode):
    """Lets `recorder` refuse hooks on tensors and on autograd nodes: no operator tells of them."""

    def __init__(self, recorder: Recorder) -> None:
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

    Names are those of the whole model, where `runs` are left out.
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
