"""The classes of modules that `fxshard.fully_shard` was given, and that a model around them holds.

Such a module has the methods of FSDP2's `FSDPModule`, and is one for `isinstance`. Where the model
runs as a program it is traced as its user wrote it. Called by itself, it gathers the parameters of
its unit once, in the dtypes of its policy, and reduces their gradients together.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fxshard.capture import precision
from fxshard.capture.swapped import METHODS, STATE, UNIT, USERS_CLASS, set_class, users_class
from fxshard.errors import ConfigError
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.unit_methods import REFUSALS, UnitMethods


class UnitModule(UnitMethods):
    """Base class of sharded submodules: ``FxshardBlock(UnitModule, Block, FSDPModule)``.

    `FSDPModule` is for ``isinstance``. It is the last one, so that nothing of it runs.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the user's class; that of a whole model gives its units their methods."""
        with as_plain_module(self):
            return copy.deepcopy(self, memo)

    def __copy__(self) -> Any:
        with as_plain_module(self):
            return copy.copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain_module(self):
            made, *rest = self.__reduce_ex__(protocol)
        # pickle would refuse an object of another class than the one that is made.
        return (_new if made is copyreg.__newobj__ else made, *rest)  # type: ignore[attr-defined]


def _new(cls: Any, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def give_methods(runtime: Runtime) -> None:
    """Make the modules that `fully_shard` was called on, but the root, `UnitModule`s.

    Raises:
        ConfigError: the class of one cannot be exchanged, or hides its members.
    """
    modules = dict(runtime.model.named_modules())
    for fqn in runtime.unit_calls:
        module = modules[fqn]
        if fqn and STATE not in module.__dict__:
            check_members(module, unit_names())
            if not isinstance(module, UnitModule):
                exchange(module, unit_class(type(module)))
            module.__dict__[UNIT] = runtime, fqn


def take_methods(module: nn.Module) -> None:
    """Give a `UnitModule` its own class back."""
    del module.__dict__[UNIT]
    module.__class__ = users_class(module)


@contextlib.contextmanager
def as_plain_module(module: nn.Module) -> Iterator[None]:
    """`module`, a `UnitModule`, has its own class for the time of the block."""
    ours, unit = type(module), module.__dict__.pop(UNIT, None)
    set_class(module, users_class(module))
    try:
        yield
    finally:
        set_class(module, ours)
        if unit is not None:
            module.__dict__[UNIT] = unit


def unit_names() -> list[str]:
    """The public names that a `UnitModule` has in addition."""
    return sorted({n for n in dir(UnitModule) if not n.startswith("_")} - set(dir(nn.Module)))


def unit_class(base: Any, methods: tuple[str, ...] = ()) -> Any:
    """The subclass of a user's class for its sharded modules.

    Args:
        base: the user's class.
        methods: names of further methods that run on parameters gathered once.
    """
    return _unit_class(base, methods)


@functools.cache
def _unit_class(base: Any, methods: tuple[str, ...]) -> Any:
    alone = {name: _by_itself(getattr(base, name)) for name in ("forward", *methods)}
    return subclass_of(base, (UnitModule, base, FSDPModule), methods, REFUSALS | alone)


def subclass_of(
    base: Any, bases: tuple[type, ...], methods: tuple[str, ...], members: Mapping[str, Any]
) -> Any:
    """A class of ours that stands in the place of a user's.

    Args:
        base: the user's class.
        bases: of the new class.
        methods: names of methods that run on parameters gathered once.
        members: of the new class, beside what every such class has.
    """
    name = f"Fxshard{base.__name__}"
    own = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": name,
        "__new__": of_users_class,
        USERS_CLASS: base,
        METHODS: methods,
    }
    return type(base)(name, bases, own | dict(members))


def of_users_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``type(module)(...)``, as nn.Sequential writes for a slice, makes one of the user's class."""
    made = cls.__dict__[USERS_CLASS](*args, **kwargs)
    return made


def _by_itself(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of a unit's module; outside of a program its parameters are gathered for it."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = None if torch.compiler.is_dynamo_compiling() else self.__dict__.get(UNIT)
        if place is None or place[0].inside.running or not place[0].stands_alone():
            return method(self, *args, **kwargs)
        runtime, fqn = place
        return run_alone(method, self, runtime, fqn, args, kwargs)

    return run


def run_alone(
    method: Callable[..., Any],
    module: Any,
    runtime: Runtime,
    fqn: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `method` of the module `fqn` on its unit, gathered once, in the dtypes of its policy."""
    (number,) = runtime.units_at(fqn, recurse=False)
    policy = runtime.units[number].precision
    if policy.cast_inputs and policy.param_dtype is not None:
        args, kwargs = precision.cast_floating((args, kwargs), policy.param_dtype)
    with runtime.unit_readable(number, fqn):
        found = method(module, *args, **kwargs)
    runtime.note_backward(number, fqn, found)
    if policy.output_dtype is None:
        return found
    return precision.cast_floating(found, policy.output_dtype)


def exchange(module: nn.Module, made: Any) -> None:
    """Give `module` the class `made`, a subclass of its own.

    Raises:
        ConfigError: Python cannot.
    """
    try:
        module.__class__ = made
    except TypeError as error:
        raise ConfigError(
            f"the class of the model, {users_class(module).__name__}, cannot be exchanged for a "
            f"subclass of it: {error}. Compile a module that holds this one."
        ) from error


def check_members(module: nn.Module, names: Iterable[str]) -> None:
    """Raise ConfigError if one of `names`, of methods of ours, is a member of `module` already."""
    places: dict[str, Any] = {
        "a parameter": module._parameters,
        "a buffer": module._buffers,
        "a submodule": module._modules,
        "an attribute": module.__dict__,
        **{
            f"an attribute of class {c.__qualname__}": vars(c)
            for c in users_class(module).__mro__
            if c not in nn.Module.__mro__
        },
    }
    for name in names:
        for kind, held in places.items():
            if name in held:
                raise ConfigError(
                    f"{users_class(module).__name__} has {kind} {name!r}, and a compiled model has "
                    f"that name of fxshard's (fxshard.FxshardModule.{name}), which would hide it. "
                    f"Rename yours, or compile a module that holds this one: names of submodules "
                    f"are free."
                )
