"""Module tree -> units: the sets of parameters that are sharded and unsharded together."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxshard import compat
from fxshard.errors import UnitError


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of the model (tied names are one Param).

    Attributes:
        fqn: its first name.
        aliases: all its names, `fqn` included.
        shape: global shape.
        dtype: dtype of the sharded parameter.
        requires_grad: False for a frozen parameter.
        unit: index of its unit.
        position: place among ``model.named_parameters()``: the order that optimizers see.
    """

    fqn: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    unit: int
    position: int

    def chunk(self, world_size: int) -> tuple[int, ...]:
        """Shape of one rank's padded shard: dim 0 is ``ceil(shape[0] / world_size)``.

        That is torch.chunk's rule, hence DTensor's ``Shard(0)``.
        """
        return (-(-self.shape[0] // world_size), *self.shape[1:])

    def rows(self, rank: int, world_size: int) -> range:
        """Rows of dim 0 that `rank` owns; empty for trailing ranks of a short parameter."""
        chunk = self.chunk(world_size)[0]
        start = min(rank * chunk, self.shape[0])
        return range(start, min(start + chunk, self.shape[0]))


@dataclasses.dataclass(frozen=True)
class Unit:
    """A set of parameters that move together.

    Attributes:
        index: position in the program's tuple of units; 0 is the root unit.
        fqn: FQN of the module ("" for the root unit).
        kind: class name of the module; equal kinds fold to one row in dumps.
        params: its parameters, in ``named_parameters`` order.
    """

    index: int
    fqn: str
    kind: str
    params: tuple[Param, ...]

    @property
    def name(self) -> str:
        """`fqn`, or "(root)"."""
        return self.fqn or "(root)"


def find_units(model: nn.Module, spec: Any = None) -> tuple[Unit, ...]:
    """Split the parameters of `model` into units; the rest is the root unit, index 0.

    Args:
        model: the module tree; parameters may be real, meta or fake.
        spec: None, or a list of classes and FQN globs, or a callable ``(fqn, module) -> bool``,
            or a policy of ``torch.distributed.fsdp.wrap``.

    Raises:
        UnitError: a pattern matches no module, or a parameter cannot be sharded on dim 0.
    """
    fqns = _unit_fqns(model, spec)
    names: dict[int, list[str]] = {}
    by_id: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        by_id[id(param)] = param
    members: dict[str, list[Param]] = {fqn: [] for fqn in fqns}
    index = {fqn: i for i, fqn in enumerate(fqns)}
    for position, (key, aliases) in enumerate(names.items()):
        param = by_id[key]
        check_shardable(aliases[0], param)
        owner = owner_of(aliases, fqns)
        members[owner].append(
            Param(
                fqn=aliases[0],
                aliases=tuple(aliases),
                shape=tuple(param.shape),
                dtype=param.dtype,
                requires_grad=param.requires_grad,
                unit=index[owner],
                position=position,
            )
        )
    modules = dict(model.named_modules())
    return tuple(
        Unit(index[fqn], fqn, type(modules[fqn]).__name__, tuple(members[fqn])) for fqn in fqns
    )


def check_shardable(fqn: str, param: torch.Tensor) -> None:
    """Raise UnitError if `param` cannot be cut along dim 0."""
    if param.dim() == 0:
        raise UnitError(
            f"parameter {fqn!r} is a scalar (shape []), which has no dim 0 to shard. "
            f"Make it a 1-D tensor with one element: nn.Parameter(x.reshape(1))."
        )
    if not param.is_contiguous():
        raise UnitError(
            f"parameter {fqn!r} is not contiguous (shape {list(param.shape)}, strides "
            f"{list(param.stride())}); its rows cannot be sent as they lie. "
            f"Make it contiguous: nn.Parameter(x.contiguous())."
        )


def owner_of(fqns: Iterable[str], candidates: Iterable[str]) -> str:
    """The longest of `candidates` that is an ancestor of (or equal to) every one of `fqns`."""
    wanted = list(fqns)
    return max(
        (c for c in candidates if all(is_under(fqn, c) for fqn in wanted)), key=len, default=""
    )


def is_under(fqn: str, ancestor: str) -> bool:
    """True if `fqn` is `ancestor` or inside it ("" contains everything)."""
    return not ancestor or fqn == ancestor or fqn.startswith(ancestor + ".")


def _unit_fqns(model: nn.Module, spec: Any) -> list[str]:
    if spec is None:
        chosen = set(repeated_blocks(model))
    elif isinstance(spec, Sequence):
        chosen = set().union(*(_matches(model, item) for item in spec))
    elif compat.is_wrap_policy(spec):
        wrapped = compat.run_wrap_policy(spec, model)
        chosen = {name for name, module in model.named_modules() if module in wrapped}
    elif callable(spec):
        chosen = _run_callable(model, spec)
    else:
        raise UnitError(
            f"units={spec!r}: expected None, a list of classes or FQN globs, a callable "
            f"(fqn, module) -> bool, or a torch.distributed.fsdp.wrap policy."
        )
    order = [name for name, _ in model.named_modules()]
    return ["", *(name for name in order if name and name in chosen)]


def _matches(model: nn.Module, item: Any) -> set[str]:
    if isinstance(item, type) and issubclass(item, nn.Module):
        found = {name for name, module in model.named_modules() if isinstance(module, item)}
        what = f"class {item.__name__}"
    elif isinstance(item, str):
        found = {n for n, _ in model.named_modules() if n and _glob(item.split("."), n.split("."))}
        what = f"pattern {item!r}"
    else:
        raise UnitError(f"units holds {item!r}: expected a module class or an FQN glob.")
    if not found:
        some = ", ".join(name for name, _ in list(model.named_modules())[1:9])
        raise UnitError(
            f"units: {what} matches no module of {type(model).__name__}. "
            f"Its modules begin: {some}. ('*' matches one name, '**' any number.)"
        )
    return found


def _glob(pattern: list[str], names: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_glob(pattern[1:], names[i:]) for i in range(len(names) + 1))
    return (
        bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and _glob(pattern[1:], names[1:])
    )


def _run_callable(model: nn.Module, spec: Callable[..., Any]) -> set[str]:
    if _is_auto_wrap_policy(spec):
        return set(_auto_wrap(model, spec))
    return {name for name, module in model.named_modules() if name and spec(name, module)}


def _is_auto_wrap_policy(spec: Callable[..., Any]) -> bool:
    """FSDP1's function policies take ``(module, recurse, nonwrapped_numel)`` by these names.

    Older ones take the last in ``**kwargs``.
    """
    function = spec.func if isinstance(spec, functools.partial) else spec
    return "recurse" in inspect.signature(function).parameters


def _auto_wrap(model: nn.Module, policy: Callable[..., bool]) -> Iterator[str]:
    """Units that FSDP1 would wrap: children first, a parent sees what its children left.

    (torch/distributed/fsdp/wrap.py, ``_recursive_wrap``)
    """

    def visit(name: str, module: nn.Module) -> tuple[int, list[str]]:
        numel = sum(p.numel() for p in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0, []
        wrapped = 0
        found: list[str] = []
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            below, names = visit(path, child)
            wrapped, found = wrapped + below, found + names
        if name and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            return numel, [*found, name]
        return wrapped, found

    return iter(visit("", model)[1])


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # their class says nothing


def repeated_blocks(model: nn.Module) -> list[str]:
    """FQNs of the repeated blocks of `model`, found by structure alone.

    A block is a module with submodules and parameters that has a sibling like it. Lists of blocks
    (children named 0, 1, ...) are looked for first, from the top down; there the class decides, for
    the first block of a list often has a parameter more. Siblings that are plain attributes must
    have one structure (class, and names and ranks of parameters), and count only where no list was
    found inside them.
    """

    def visit(name: str, module: nn.Module) -> list[str]:
        children = [
            (f"{name}.{child}" if name else child, child, sub)
            for child, sub in module.named_children()
            if any(True for _ in sub.parameters())
        ]
        groups: dict[Any, list[str]] = {}
        for path, child, sub in children:
            if any(True for _ in sub.children()):
                by_class = child.isdigit() and type(sub) not in _CONTAINERS
                groups.setdefault(type(sub) if by_class else _structure(sub), []).append(path)
        repeats = [path for paths in groups.values() if len(paths) > 1 for path in paths]
        listed = {path for path, child, _ in children if path in repeats and child.isdigit()}
        found = list(listed)
        deeper = {path: visit(path, sub) for path, _, sub in children if path not in listed}
        for path, below in deeper.items():
            found += below or ([path] if path in repeats else [])
        return found

    return visit("", model)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    params = ((name, p.dim()) for name, p in module.named_parameters(remove_duplicate=False))
    return (type(module), *params)
