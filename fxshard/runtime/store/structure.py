"""Which modules, parameters and buffers a model has, and what of that may change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fxshard.capture.modules import join, without_wrappers
from fxshard.capture.swapped import users_class
from fxshard.errors import StepError
from fxshard.ir.units import Param
from fxshard.runtime.sharding import Slot


class Structure:
    """The tree of a model at some time.

    Attributes:
        modules: all of it, the model first.
        buffers: by FQN, the module that holds a buffer and its name there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[nn.Module] = list(model.modules())
        self.buffers: dict[str, tuple[nn.Module, str]] = {
            join(path, key): (module, key)
            for path, module in model.named_modules()
            for key in module._buffers
        }
        self._names = [_names(module) for module in self.modules]

    def changed(self) -> bool:
        """True if a module, its class, or a name of a parameter or buffer, is another since."""
        return any(map(_differ, self.modules, self._names))


def _names(module: nn.Module) -> tuple[Any, ...]:
    """The class, children and names of a module; compared by `_differ` on every call."""
    children = tuple(module._modules.values())
    return users_class(module), children, tuple(module._parameters), tuple(module._buffers)


def _differ(module: nn.Module, before: tuple[Any, ...]) -> bool:
    kind, children, params, buffers = before
    return (
        users_class(module) is not kind
        or tuple(module._modules.values()) != children
        or tuple(module._parameters) != params
        or tuple(module._buffers) != buffers
    )


def names_now(
    model: nn.Module, slots: Mapping[str, Slot], ignored: Iterable[Param]
) -> dict[str, str]:
    """How parameters are called now, by the names that they had: modules may be wrapped.

    Raises:
        StepError: parameters were added or removed.
    """
    known = {
        join(path, name)
        for path, module in model.named_modules()
        for name, param in module._parameters.items()
        if param is not None
    }
    params = (*(slot.param for slot in slots.values()), *ignored)
    names = {alias: alias for param in params for alias in param.aliases}
    plain = {without_wrappers(name): name for name in known}
    for name in names.keys() - known:  # wrappers of activation checkpoints
        names[name] = plain.get(without_wrappers(name), name)
    expected = {*names.values()}
    held = {id(module) for module in model.modules()}
    new = known - expected
    for fqn, slot in slots.items():
        if any(id(module) not in held for module, _ in slot.owners):
            new |= {fqn} & known
    for name in sorted(new):
        param = model.get_parameter(name)
        before = [fqn for fqn, slot in slots.items() if slot.tensor is param]
        if before and before[0] not in known:
            raise StepError(
                f"parameter {before[0]!r} is {name!r} since its module was wrapped, after "
                f"fxshard.compile. Wrap modules before; for activation checkpointing there is "
                f"the option checkpoint=..., which needs no wrappers."
            )
    if new:
        raise StepError(
            f"parameter {min(new)!r} was put into the model after fxshard.compile, and is not "
            f"sharded. Change values (load_state_dict, summon_full_params), or change the "
            f"plain model and compile that."
        )
    if gone := expected - known:
        raise StepError(
            f"parameter {min(gone)!r} was taken out of the model after fxshard.compile. Change "
            f"the plain model and compile that."
        )
    _require_places(model, slots, names)
    return names


def _require_places(model: nn.Module, slots: Mapping[str, Slot], names: dict[str, str]) -> None:
    """Raise StepError if another module than before has the name of one that holds a parameter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for slot in slots.values():
        for alias in slot.param.aliases:
            path, _, key = names[alias].rpartition(".")
            if (modules[path], key) not in slot.owners:
                raise StepError(
                    f"module {path!r} is another one than when the model was sharded, and has its "
                    f"own parameter {key!r}: modules changed places after fxshard.compile or "
                    f"fully_shard, and programs know parameters by name. Change the plain model "
                    f"and compile that."
                )
