"""The model that `fxshard.compile` was given, as its user wrote it, for the time of a block.

`compile` exchanges the class of a model for a subclass of it whose ``forward`` runs a program (see
`fxshard.runtime.module`). To trace what the user wrote, or to run it as it is, the object gets its
own class back for a while.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from fxshard._torch import modules

STATE = "_fxshard"  # the one attribute of ours on a model: its `fxshard.runtime.runtime.Runtime`
UNIT = "_fxshard_unit"  # that on a submodule which `fully_shard` was given: its place in a model
METHODS = "_fxshard_methods"  # there: names of methods that run on unsharded parameters
USERS_CLASS = "_fxshard_users_class"  # on the generated class: the one that it was made of


@dataclasses.dataclass
class Inside:
    """What of the model itself is in the program, and so must not run around it too.

    Attributes:
        forward: a ``forward`` that the user put on the object, in front of that of its class.
        hooks: by attribute of the module and number, those that are written to be traced.
        running: the model runs as its user wrote it, and so do the modules inside of it.
    """

    forward: Any
    hooks: dict[str, dict[int, Any]]
    running: bool = False

    @contextlib.contextmanager
    def units_alone(self) -> Iterator[None]:
        """For the time of the block modules inside the model run as when called by themselves."""
        outer, self.running = self.running, False
        try:
            yield
        finally:
            self.running = outer

    @classmethod
    def taken_from(cls, model: nn.Module) -> Inside:
        """Take it off `model`; `as_users_own` puts it back for a while."""
        kept, hooks = model.__dict__, {}
        for name in modules.HOOKS:
            hooks[name] = {n: hook for n, hook in kept[name].items() if is_traced(hook)}
            for number in hooks[name]:
                del kept[name][number]
        return cls(kept.pop("forward", None), hooks)

    def put_back(self, model: nn.Module) -> None:
        """Undo `taken_from`, in the very dicts, which the handles of hooks refer to."""
        for name, hooks in self.hooks.items():
            _put_in_front(model.__dict__[name], hooks)
        if self.forward is not None:
            model.__dict__["forward"] = self.forward


def users_class(model: nn.Module) -> type[nn.Module]:
    """The class that the user gave `model`."""
    found: type[nn.Module] = getattr(type(model), USERS_CLASS, type(model))
    return found


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Exchange the class of `module`; a ``__setattr__`` of the user's is not called."""
    object.__setattr__(module, "__class__", kind)


@contextlib.contextmanager
def as_users_own(model: nn.Module, *, hooks: bool = False) -> Iterator[None]:
    """`model` with the class that its user gave it; a model that has it anyway stays as it is.

    Args:
        model: any module.
        hooks: also with the hooks on the model itself that run around its program, at every call.
            Then a method of the user's runs: what it does to hooks, and a ``forward`` that it puts
            on the object, stay. (Without, what is done is done while tracing, and is undone.)
    """
    ours = type(model)
    kept = model.__dict__
    if STATE not in kept:
        yield
        return
    inside: Inside = kept[STATE].inside
    outer, inside.running = inside.running, True
    around = {name: kept[name] for name in modules.HOOKS}
    forward = kept.pop("forward", None)
    set_class(model, users_class(model))
    for name, theirs in around.items():
        if hooks:  # in the very dict, which the handles of hooks refer to
            _put_in_front(theirs, inside.hooks[name])
        else:
            kept[name] = type(theirs)(inside.hooks[name])
    if inside.forward is not None:
        kept["forward"] = inside.forward
    try:
        yield
    finally:
        for name, theirs in around.items():
            for number in inside.hooks[name] if hooks else ():
                theirs.pop(number, None)
        kept.update(around)
        left = kept.pop("forward", None)
        if hooks and left is not inside.forward:
            forward = left
        if forward is not None:
            kept["forward"] = forward
        set_class(model, ours)
        inside.running = outer


def _put_in_front(hooks: dict[int, Any], others: dict[int, Any]) -> None:
    kept = dict(hooks)
    hooks.clear()
    hooks.update(others | kept)


def is_traced(hook: Any) -> bool:
    """True for a hook of torch or transformers themselves: they are written to be traced."""
    return function_module(hook).startswith(("torch.", "transformers."))


def function_module(hook: Any) -> str:
    """The name of the Python module that a hook is from."""
    function = getattr(hook, "func", hook)  # of a partial
    return getattr(function, "__module__", None) or type(function).__module__
