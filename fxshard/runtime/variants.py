"""Which program serves a call: what the program of a call depends on, and what may differ."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxshard._torch import trees
from fxshard._torch.trees import TreeSpec
from fxshard.capture import shapes
from fxshard.capture.aliasing import overlapping
from fxshard.capture.call import PLAIN
from fxshard.capture.functions import meaning
from fxshard.capture.shapes import of_call, require_plain
from fxshard.capture.variables import Variables
from fxshard.codegen.emit import Executor
from fxshard.codegen.silenced import silenced
from fxshard.ir import ops, tags, transfers
from fxshard.ir.domain import FIXED, Place, Sizes, Symbols, size_at
from fxshard.ir.outline import saved_values
from fxshard.ir.program import Program, input_name
from fxshard.plans.plan import Plan
from fxshard.runtime import differing
from fxshard.verify.certificate import agreement, digest

aten: Any = torch.ops.aten

REMEMBERED = 1024  # sizes of which a program knows whether it serves them
# Names in a kind's mode.
STARTS = "the outputs that backward starts from"
SUMS = "gradient accumulation"
KEPT = "which parameters are unsharded already"
SETTINGS = "a setting of a unit"
RANKS = "what other ranks need"

MakeExecutor = Callable[[Program], Executor]

_ANY = "contiguous"  # stands in a Kind for the sizes and strides of a contiguous tensor


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the program of a call depends on. Calls of equal kinds run the same program.

    Attributes:
        spec: tree of ``(args, kwargs)``.
        leaves: a key of each leaf, without the sizes of contiguous tensors.
        sizes: those sizes, leaf by leaf; None for other leaves. An int that counts as a size is
            here too, and not in `leaves`.
        mode: the rest, by name: train or eval, grad mode, ``requires_grad`` and so on.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    sizes: Sizes
    mode: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls,
        args: Any,
        kwargs: Any,
        mode: Mapping[str, Any],
        *,
        ints_are_sizes: bool = False,
        held: Sequence[Tensor] | None = None,
    ) -> Kind:
        """Of the call ``model(*args, **kwargs)``.

        Args:
            held: tensors of the model; if given, the kind tells which tensors share memory.

        Raises:
            CaptureError: a tensor is no plain dense one.
        """
        flat, spec = trees.tree_flatten((args, kwargs))
        require_plain(flat, lambda i: input_name(_paths(spec)[i][0]))
        sizes = of_call(flat, ints=ints_are_sizes)
        full_mode = dict(mode)
        if held is not None:
            tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
            full_mode["which tensors share memory"] = overlapping([*tensors, *held])
        return cls(spec, tuple(map(_leaf_key, flat, sizes)), sizes, tuple(full_mode.items()))

    def __getitem__(self, name: str) -> Any:
        """A value of `mode`; None if it has none of that name."""
        return dict(self.mode).get(name)

    def having(self, name: str, value: Any) -> Kind:
        """With another value in `mode`."""
        mode = tuple((each, value if each == name else old) for each, old in self.mode)
        return dataclasses.replace(self, mode=mode)

    def bare(self) -> Kind:
        """Equal for calls that differ in sizes, starts of backward, or what lives between calls."""
        bare = self.having(STARTS, None).having(SUMS, None).having(KEPT, None)
        return dataclasses.replace(bare, sizes=())

    def differs_in(self, other: Kind) -> str:
        """What differs from `other`, as text."""
        names = [input_name(path) for path, _ in _paths(self.spec)]
        if self.spec != other.spec:
            return "the call has other arguments"
        found = [
            f"{name} is {_as_text(now)}, was {_as_text(before)}"
            for name, now, before in zip(names, self.sizes, other.sizes, strict=True)
            if now != before
        ]
        found += [
            f"{name} is of another kind or value"
            for name, now, before in zip(names, self.leaves, other.leaves, strict=True)
            if now != before
        ]
        before = dict(other.mode)
        found += [f"{name} changed" for name, now in self.mode if now != before.get(name)]
        return "; ".join(dict.fromkeys(found))


def _as_text(sizes: tuple[int, ...] | int | None) -> str:
    return str(list(sizes) if isinstance(sizes, tuple) else sizes)


def _paths(spec: TreeSpec) -> list[tuple[Any, Any]]:
    leaves = list(range(spec.num_leaves))
    return trees.tree_flatten_with_path(trees.tree_unflatten(leaves, spec))[0]


def _leaf_key(value: Any, sizes: tuple[int, ...] | int | None) -> Any:
    """Equal for leaves that one program serves; ``1``, ``1.0`` and ``True`` are not equal."""
    if isinstance(sizes, int):
        return int
    if isinstance(value, Tensor):
        layout = (_ANY, value.dim()) if sizes is not None else (tuple(value.shape), value.stride())
        return (*layout, value.dtype, value.device, value.requires_grad)
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # NaN equals itself, -0.0 is not 0.0
    if isinstance(value, types.FunctionType):
        return _function_key(value)
    return (type(value), value if isinstance(value, PLAIN) else id(value))


def _function_key(function: types.FunctionType) -> Any:
    """Equal for functions that compute the same, as far as that is known, and read the same."""
    means = meaning(function)
    return (function, _read_by(function).number((), [function])) if means is None else means


@functools.cache  # none may go: its numbers would begin anew
def _read_by(function: types.FunctionType) -> Variables:
    return Variables()


@contextlib.contextmanager
def functions_traced(args: Any, kwargs: Any) -> Iterator[None]:
    """A call is traced in the block, with the functions among its arguments."""
    with contextlib.ExitStack() as stack:
        for leaf in trees.tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, types.FunctionType):
                stack.enter_context(_read_by(leaf).traced())
        yield


@dataclasses.dataclass(frozen=True)
class TracedProgram:
    """A new program.

    Attributes:
        program: with a schedule.
        symbols: the open sizes that it was traced with.
        captures: where ranks may differ, what was traced: of it are made the programs that take
            part in what other ranks need.
    """

    program: Program
    symbols: Symbols = dataclasses.field(default_factory=dict)
    captures: dict[Any, Program] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Variant:
    """One program of the module, and the kind of call that it was traced for.

    Attributes:
        kind, plan, executor: of the program.
        traced: where it comes from.
    """

    kind: Kind
    plan: Plan
    executor: Executor
    traced: TracedProgram
    _holds: dict[Sizes, bool] = dataclasses.field(default_factory=dict, repr=False)  # of late
    _without: dict[frozenset[int], Executor] = dataclasses.field(default_factory=dict, repr=False)

    def serves(self, kind: Kind) -> bool:
        """True if this program also runs calls of `kind`: only open sizes differ."""
        mine, domain = self.kind, self.program.domain
        alike = dataclasses.replace(kind, sizes=mine.sizes) == mine
        if domain is None or not alike:
            return False
        if kind.sizes not in self._holds:
            if len(self._holds) >= REMEMBERED:
                self._holds.clear()
            self._holds[kind.sizes] = domain.refusal(kind.sizes) is None
        return self._holds[kind.sizes]

    def held_back(self, kind: Kind) -> str:
        """Why this program does not serve the sizes of `kind`, if only sizes differ; else ""."""
        domain = self.program.domain
        if domain is None or dataclasses.replace(kind, sizes=self.kind.sizes) != self.kind:
            return ""
        refusal = domain.refusal(kind.sizes)
        return "" if refusal in (None, FIXED) else f" ({refusal})"

    @property
    def program(self) -> Program:
        """What the executor runs."""
        return self.plan.program

    @functools.cached_property
    def digest(self) -> str:
        """The digest of what must be equal on all ranks."""
        return digest(agreement(self.program))

    @functools.cached_property
    def stated(self) -> str:
        """What a rank tells the others of a call that this would serve (see `differing`)."""
        return differing.stated(self.program)

    @functools.cached_property
    def communicates(self) -> bool:
        """True if it has collectives."""
        return any(map(ops.communicates, self.program.graph.nodes))

    @functools.cached_property
    def written(self) -> frozenset[tuple[str, str | None]]:
        """Role and name of the buffers and inputs that forward writes into."""
        return frozenset(
            (tags.get(node).role, tags.get(node).fqn)
            for node in self.program.graph.find_nodes(op="placeholder")
            if any(user.target is aten.copy_.default for user in node.users)
        )

    def backward_without(self, missing: frozenset[int], make: MakeExecutor) -> Executor:
        """What runs a backward that brings no gradients of some outputs (`codegen.silenced`).

        Args:
            missing: flat indices of outputs that the program starts backward at.
            make: makes an executor of a program.
        """
        if not missing:
            return self.executor
        if missing not in self._without:
            program = silenced(self.program, missing)
            other = self.executor if program is self.program else make(program)
            self._without[missing] = other
        return self._without[missing]

    @functools.cached_property
    def left_unsharded(self) -> dict[str, int]:
        """FQN -> which of the saved values lies in what forward has gathered of it."""
        program = self.program
        fqns = {
            storage: tags.get(item).fqn or ""
            for launch in program.phase("forward")
            if transfers.is_unshard(launch)
            for item in transfers.unsharded(launch)
            for storage in tags.storage_ids(item)
        }
        found: dict[str, int] = {}
        for place, node in enumerate(saved_values(program)):
            for fqn in (fqns[s] for s in tags.storage_ids(node) & fqns.keys()):
                if program.params[fqn].extension is None:
                    found.setdefault(fqn, place)
        return found

    @functools.cached_property
    def consumed(self) -> frozenset[str]:
        """Names of the saved values that backward frees, or writes into."""
        ended: set[int] = set()
        for node in self.program.phase("backward"):
            if ops.ends(node):
                ended |= tags.read_ids(node)
            elif tags.writes(node):
                ended |= tags.read_ids(node) & tags.storage_ids(node)
        saved = saved_values(self.program)
        return frozenset(node.name for node in saved if tags.storage_ids(node) & ended)

    @functools.cached_property
    def read_again(self) -> list[fx.Node]:
        """Placeholders of backward that are tensors of the caller, which must not change."""
        nodes = self.executor.backward_inputs
        return [node for node in nodes if tags.get(node).role in tags.HELD]


def reason_for(kind: Kind, known: Iterable[Variant]) -> str:
    """Why no program serves a call of this kind: how it differs from the nearest one.

    For a program with open sizes, why these do not serve the call.
    """
    nearest, best = None, "the first call"
    for variant in known:
        text, held = kind.differs_in(variant.kind), variant.held_back(kind)
        near = (text.count(";"), not held)
        if nearest is None or near < nearest:
            nearest, best = near, text + held
    return best


def symbols_for(
    kind: Kind,
    others: Sequence[Kind],
    dynamic: Mapping[str, Sequence[tuple[str, int]]] | None,
    model: nn.Module,
    call: tuple[Any, Any],
) -> dict[str, tuple[Place, ...]]:
    """The sizes that a new program leaves open: the named ones, and those that have varied before.

    The first call of other sizes gets a program of fixed sizes, as cheap as the first: most loops
    have two (the last batch, or evaluation). A call that differs from both leaves open what varied.
    Sizes 0 and 1 are never left open: they broadcast. Sizes that were equal in every call are one
    symbol.

    Args:
        kind: of the new call.
        others: of calls that have a program.
        dynamic: the option of that name.
        model, call: for the names of arguments.

    Raises:
        ConfigError: `dynamic` names something that is no tensor argument.
    """
    named = shapes.named(dynamic or {}, model, *call)
    taken = {place for places in named.values() for place in places}
    before = [o.sizes for o in others if (o.spec, o.leaves) == (kind.spec, kind.leaves)]
    if len(set(before)) < 2:
        return named
    names = [input_name(path) for path, _ in _paths(kind.spec)]
    found: dict[tuple[int, ...], list[Place]] = {}
    for place in _places(kind.sizes):
        seen = tuple(size_at(sizes, place) for sizes in (*before, kind.sizes))
        if len(set(seen)) > 1 and seen[-1] > 1 and place not in taken:
            found.setdefault(seen, []).append(place)
    # An int is no input of a program: it is open only where a tensor has that size.
    found = {seen: at for seen, at in found.items() if at[0][1] is not None}
    varying = {f"{names[at[0][0]]}.shape[{at[0][1]}]": tuple(at) for at in found.values()}
    return named | varying


def _places(sizes: Sizes) -> list[Place]:
    """Every size of a call, those of tensors first."""
    numbers = enumerate(sizes)
    of_tensors = [(i, d) for i, s in numbers if isinstance(s, tuple) for d in range(len(s))]
    return [*of_tensors, *((i, None) for i, s in enumerate(sizes) if isinstance(s, int))]
