"""Which modules are units, as the option ``units`` says or by structure, and what is ignored."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fxshard._torch import modules as torch_modules
from fxshard.errors import UnitError
from fxshard.ir.names import is_under, matches, modules_matching


def unit_fqns(
    model: nn.Module, spec: Any, ignored: Iterable[nn.Module], ignored_params: Container[int]
) -> set[str]:
    if spec is None:
        return set(repeated_blocks(model))
    if isinstance(spec, Sequence):
        return set().union(
            *(modules_matching(model, each) for item in spec for each in _listed(item))
        )
    try:
        if torch_modules.is_wrap_policy(spec):
            wrapped = torch_modules.run_wrap_policy(spec, model)
            found = {name: wrapped[m] for name, m in model.named_modules() if m in wrapped}
            refuse_options(found)
            return set(found)
        if callable(spec) and _is_auto_wrap_policy(spec):
            return set(_auto_wrap(model, spec, set(ignored), ignored_params))
        if callable(spec):
            return {name for name, module in model.named_modules() if name and spec(name, module)}
    except UnitError:
        raise
    except Exception as error:
        raise UnitError(
            f"the function units={spec!r} failed with {type(error).__name__}: {error}. It is "
            f"called as units(fqn, module), and says if the module is a unit."
        ) from error
    raise UnitError(
        f"units={spec!r}: expected None, a list of classes or FQN globs, a callable "
        f"(fqn, module) -> bool, or a torch.distributed.fsdp.wrap policy."
    )


def _listed(item: Any) -> Sequence[Any]:
    return item if isinstance(item, (list, tuple)) else (item,)


def grouped(model: nn.Module, spec: Any, chosen: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The first FQN of each unit but the root -> its others; all of them `chosen`.

    Raises:
        UnitError: a module is in two lists, or one in a list holds another one of that list.
    """
    lists = [item for item in spec if isinstance(item, (list, tuple))] if _is_list(spec) else []
    order = [name for name, _ in model.named_modules() if name and name in chosen]
    first: dict[str, str] = {}  # FQN of a module in a list -> the first of its unit
    for item in lists:
        wanted = set().union(*(modules_matching(model, each) for each in item))
        mine = [name for name in order if name in wanted]
        for name in mine:
            around = next((other for other in mine if other != name and is_under(name, other)), "")
            if name in first or around:
                where = f"inside of {around!r}, which is too" if around else "in another one"
                raise UnitError(f"units: {name!r} is in the list {list(item)!r}, and {where}.")
            first[name] = mine[0]
    return {
        name: tuple(n for n in order if n != name and first.get(n) == name)
        for name in order
        if first.get(name, name) == name
    }


def _is_list(spec: Any) -> bool:
    return isinstance(spec, Sequence) and not isinstance(spec, str)


def ignored_of(model: nn.Module, ignored: Sequence[Any]) -> tuple[list[nn.Module], set[int]]:
    """Modules that are left alone, and the ids of their and all other ignored parameters.

    Those that are not in `model` may be given too, as FSDP1 takes them: one list may serve the
    calls for several parts of a model.

    Raises:
        UnitError: a glob matches nothing, or what is given is none of the three.
    """
    modules: list[nn.Module] = []
    params: set[int] = set()
    tree = dict(model.named_modules())
    own = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
    for item in ignored:
        if isinstance(item, nn.Module):
            found = [item]
        elif isinstance(item, str):
            found = [m for name, m in tree.items() if name and matches(item, name)]
            named = [p for name, p in own.items() if matches(item, name)]
            params.update(map(id, named))
            if not (found or named):
                raise UnitError(f"ignored: {item!r} is not in {type(model).__name__}.")
        elif isinstance(item, nn.Parameter):
            params.add(id(item))
            continue
        else:
            raise UnitError(f"ignored holds {item!r}: expected a module, a parameter or a glob.")
        modules += found
    inside = [sub for module in modules for sub in module.modules()]
    params.update(id(p) for module in inside for p in module.parameters(recurse=False))
    return inside, params


_NOT_NEEDED = ("device_id", "limit_all_gathers", "use_orig_params")  # docs/coming-from-fsdp.md


def refuse_options(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UnitError if a policy (`CustomPolicy`) gives a unit options that mean something."""
    for name, given in found.items():
        options = {key: value for key, value in given.items() if key not in _NOT_NEEDED}
        if options:
            raise UnitError(
                f"the policy in units gives {name!r} options of its own, {options!r}. Units "
                f"of one model differ by strategy=, reshard_after_forward= and mixed_precision=, "
                f"dicts by class or FQN glob: let the policy return True, and say it there."
            )


def _is_auto_wrap_policy(spec: Callable[..., Any]) -> bool:
    """FSDP1's function policies take ``(module, recurse, nonwrapped_numel)`` by these names.

    Older ones take the last in ``**kwargs``.
    """
    function = spec.func if isinstance(spec, functools.partial) else spec
    try:
        return "recurse" in inspect.signature(function).parameters
    except ValueError:  # of some builtins Python knows no signature
        return False


def _auto_wrap(
    model: nn.Module,
    policy: Callable[..., bool],
    ignored: Container[nn.Module],
    ignored_params: Container[int],
) -> Iterator[str]:
    """Units that FSDP1 would wrap: children first, a parent sees what its children left.

    What is ignored does not count.

    (torch/distributed/fsdp/wrap.py, ``_recursive_wrap``)
    """

    def visit(name: str, module: nn.Module) -> tuple[int, list[str]]:
        numel = sum(p.numel() for p in module.parameters() if id(p) not in ignored_params)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0, []
        wrapped = 0
        found: list[str] = []
        for child_name, child in module.named_children():
            if child in ignored:
                continue
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
