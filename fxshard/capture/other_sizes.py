"""Other sizes: a call that has them, and the captured program of such a call, without a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor

from fxshard._torch import fake_tensors, trees
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.ir.domain import OPEN, OpenTensor, Sizes, Symbols, size_at
from fxshard.ir.program import Program


def with_sizes(
    call: tuple[tuple[Any, ...], dict[str, Any]], places: Symbols, sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with other sizes; its tensors that have them become meta tensors.

    Args:
        call: ``(args, kwargs)``.
        places: per name of a size, where the call has it.
        sizes: new ones, by name.
    """
    leaves, spec = trees.tree_flatten(call)
    changed: dict[int, dict[int, int]] = {}
    for name, size in sizes.items():
        for leaf, dim in places[name]:
            changed.setdefault(leaf, {})[dim if dim is not None else -1] = size
    made: dict[int, torch.Tensor] = {}
    flat = list(leaves)
    for number, dims in changed.items():
        leaf = leaves[number]
        if id(leaf) not in made:
            shape = [dims.get(dim, size) for dim, size in enumerate(leaf.shape)]
            new = torch.empty(shape, dtype=leaf.dtype, device="meta")
            made[id(leaf)] = new.requires_grad_(leaf.requires_grad)
        flat[number] = made[id(leaf)]
    args, kwargs = trees.tree_unflatten(flat, spec)
    return args, kwargs


def at_sizes(program: Program, sizes: Sizes) -> Program | None:
    """A captured program with the fake values of a call of other sizes; nothing is traced again.

    Equal to the capture of such a call. No pass may have touched `program`, which stays as it is;
    fake values that are the same for all sizes are shared.

    Args:
        program: captured with open sizes.
        sizes: of the call, as `of_call` gives them.

    Returns:
        None if the program has no open sizes, or does not hold for `sizes`.
    """
    domain = program.domain
    if domain is None or domain.refusal(sizes) is not None:
        return None
    if sizes == domain.example:
        return program
    values = {domain.symbols[name]: size_at(sizes, at[0]) for name, at in domain.places.items()}
    given = dict(enumerate(program.signature.inputs))
    given |= {leaf: sizes[leaf] for at in domain.places.values() for leaf, dim in at if dim is None}
    made = program.copied(program.units, program.world_size)
    made.domain = dataclasses.replace(domain, example=sizes)
    made.signature = dataclasses.replace(program.signature, inputs=tuple(given.values()))
    other = _OtherSizes(values, program.fake_mode)
    for node in made.graph.nodes:
        if "val" not in node.meta:
            continue
        before = node.meta["val"]
        node.meta["val"] = other.of(before, node.meta.get(OPEN))
        if OPEN not in node.meta and node.op == "call_function" and node.meta["val"] is before:
            node.meta["val"] = made.refake(node)  # `normalize` made it, after the trace
    return made


class _OtherSizes:
    """Values of a call of other sizes for those of the example call."""

    def __init__(self, values: Mapping[sympy.Symbol, int], mode: FakeTensorMode) -> None:
        self._fakes = Fakes(mode)
        self._values = {symbol: sympy.Integer(size) for symbol, size in values.items()}
        self._numbers: dict[sympy.Basic, Any] = {}
        self._tensors: dict[int, Tensor] = {}

    def of(self, value: Any, opened: Any) -> Any:
        """The same value for these sizes; aliases stay aliases.

        Args:
            value: of the example call.
            opened: what `_Example.open` gave for it; None for what was made after the trace.
        """
        if isinstance(value, (list, tuple)):
            each = opened or [None] * len(value)
            made = [self.of(*both) for both in zip(value, each, strict=True)]
            same = all(a is b for a, b in zip(value, made, strict=True))
            return value if same else type(value)(made)
        if isinstance(value, Tensor):
            if id(value) not in self._tensors and opened is not None:
                self._tensors[id(value)] = self._tensor(value, opened)
            return self._tensors.get(id(value), value)
        return value if opened is None else type(value)(self._number(opened))

    def _number(self, expression: sympy.Basic) -> Any:
        if expression not in self._numbers:
            self._numbers[expression] = expression.xreplace(self._values)
        return self._numbers[expression]

    def _tensor(self, value: Tensor, place: OpenTensor) -> Tensor:
        size, stride = (
            tuple(int(self._number(n)) for n in at) for at in (place.size, place.stride)
        )
        nbytes = int(self._number(place.nbytes)) if place.nbytes.free_symbols else None
        where = size, stride, int(self._number(place.offset))
        return self._fakes.like(value, where, nbytes)


class Fakes:
    """Fake tensors of other sizes; those of one storage stay in one."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._storages: dict[int, tuple[Any, Tensor]] = {}  # the first keeps its identity taken

    def like(self, value: Tensor, where: tuple[Any, Any, Any], nbytes: int | None) -> Tensor:
        """A tensor in place of `value`.

        Args:
            value: a fake tensor.
            where: size, stride and offset of the new one.
            nbytes: of the new one's storage; None: it is that of `value`.
        """
        storage = value.untyped_storage()
        if id(storage) not in self._storages:
            flat = value
            if nbytes is not None:
                count = nbytes // value.element_size()
                flat = fake_tensors.fake_empty(self._mode, (count,), value.dtype, value.device)
            self._storages[id(storage)] = storage, flat
        _, flat = self._storages[id(storage)]
        made = fake_tensors.fake_view(
            self._mode, flat, lambda x: x.view(value.dtype).as_strided(*where)
        )
        return made.requires_grad_() if value.requires_grad and value.is_leaf else made
