"""The class that `fxshard.compile` gives a model: a subclass of the user's with another forward.

The object stays the user's, as in FSDP2: names, attributes, submodules, hooks and state dicts are
what they were. fxshard adds one private attribute (`fxshard.capture.swapped.STATE`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fxshard._torch import fully_sharded
from fxshard.capture import hf
from fxshard.capture.swapped import METHODS, STATE, USERS_CLASS, Inside, as_users_own, users_class
from fxshard.codegen.emit import Executor
from fxshard.errors import ConfigError, StepError
from fxshard.memory.report import MemoryReport
from fxshard.plans.plan import Plan
from fxshard.runtime import loading, reading
from fxshard.runtime.fsdp import FsdpMethods
from fxshard.runtime.gathering import as_plain, let_gather
from fxshard.runtime.runtime import MakeExecutor, Runtime
from fxshard.runtime.sharding import Sharding
from fxshard.runtime.stage import as_stage
from fxshard.runtime.unit_methods import REFUSALS
from fxshard.runtime.unit_modules import (
    UnitModule,
    check_members,
    exchange,
    give_methods,
    run_alone,
    subclass_of,
    unit_class,
)


class FxshardModule(FsdpMethods):
    """Base class of every model that `fxshard.compile` returns.

    The model's class is made of it and the user's, ``FxshardLlama(FxshardModule, Llama)``. Under a
    process group each parameter is a DTensor, with placement ``Shard(0)`` if the option
    ``shard_placement_fn`` does not say otherwise; without one, each is unsharded and all ranks run
    inside this process.
    """

    # One of the user's class is part of the program.
    __call__: Callable[..., Any] = nn.Module.__call__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module of the user's class: a slice of an `nn.Sequential` makes one by ours."""
        return getattr(cls, USERS_CLASS)(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The plan of the training step traced last (of any call, if none trains).

        Raises:
            StepError: nothing is traced yet.
            AttributeError: the same, where all attributes are looked through (inspect.getmembers).
        """
        if not self._fxshard.variants and reading.looked_through():
            raise AttributeError("plan")
        return self._fxshard.plan

    @property
    def memory(self) -> MemoryReport:
        """The memory report of `plan`.

        Raises:
            StepError: nothing is traced yet.
            AttributeError: the same, where all attributes are looked through (inspect.getmembers).
        """
        if not self._fxshard.variants and reading.looked_through():
            raise AttributeError("memory")
        return self._fxshard.plan.memory

    @property
    def optimizer(self) -> Any:
        """The optimizer of the option ``optimizer``, over the parameters of this module.

        Of its class, with torch's ``param_groups``, ``state_dict`` and ``load_state_dict``, for
        learning rate schedulers and torch.distributed.checkpoint; its step runs on local shards
        without DTensor (`fxshard.codegen.optimizer`), Muon's on full matrices (docs/muon.md). Of
        several it is one, with the groups of all (``members`` has each of them).

        With ``optimizer_in_backward`` backward has stepped already, with the learning rates of the
        moment: ``.grad`` stays None, and ``step()`` and ``zero_grad()`` find nothing left to do.
        Copies of the module make one of their own.

        Raises:
            ConfigError: the class of the optimizer needs unsharded parameters.
            AttributeError: there is no option ``optimizer``.
        """
        if self._fxshard.config.optimizer is None:
            raise AttributeError("there is no option optimizer=...")
        return self._fxshard.optimizer()

    _ddp_params_and_buffers_to_ignore = property(reading.refuse_ddp)
    __prepare_scriptable__ = reading.refuse_scripting

    def __copy__(self) -> Self:
        """Raises StepError: the copy would share programs, which know of one model only."""
        raise StepError(
            f"copy.copy of a compiled {users_class(self).__name__}: two models would share one set "
            f"of shards and programs, which follow what is done to the first alone. Use "
            f"copy.deepcopy for an independent model, or keep a second reference to this one."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent model in the same world; nothing is communicated or traced."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        runtime = copy.deepcopy(self._fxshard, memo)  # first: it knows how to copy parameters
        rest = _users_attributes(self.__dict__)
        made.__dict__.update(copy.deepcopy(rest, memo))
        made.__dict__[STATE] = runtime
        runtime.note_parts()
        _give_methods(made, runtime)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle: the user's class is found by its name, and the subclass is made of it.

        Raises:
            StepError: a parameter is of a tensor subclass, which torch cannot pickle.
        """
        slots = list(self._fxshard.slots.values())
        self._fxshard.require_plain(slots, "cannot be pickled with its module")
        state: Any = super().__getstate__()
        if isinstance(state, dict):
            state = _users_attributes(state)
        fsdp2 = isinstance(self, FSDPModule)
        made_of = users_class(self), vars(type(self))[METHODS], fsdp2
        return _unpickled, made_of, (state, self._fxshard)

    def __setstate__(self, state: Any) -> None:
        users, runtime = state
        super().__setstate__(users)
        self.__dict__[STATE] = runtime
        runtime.restored()
        _give_methods(self, runtime)


def sharded(
    sharding: Sharding, make_executor: MakeExecutor = Executor, kind: type[Runtime] = Runtime
) -> FxshardModule:
    """Shard a model and exchange its class.

    Raises:
        ConfigError: see `check_swappable`.
        UnitError: see `fxshard.runtime.sharding.shard_parameters`.
    """
    model = sharding.model
    check_swappable(model)
    runtime = kind(sharding, make_executor)
    runtime.inside = Inside.taken_from(model)
    model.__dict__[STATE] = runtime
    model.__class__ = _fxshard_class(type(model))
    let_gather(runtime)
    loading.keep_ties(model)
    assert isinstance(model, FxshardModule)
    return model


def as_fsdp_module(model: nn.Module, runtime: Runtime) -> None:
    """Make what `fully_shard` has sharded `FSDPModule`s, for ``isinstance`` and by its methods.

    Raises:
        ConfigError: see `fxshard.runtime.unit_modules.give_methods`.
    """
    if not isinstance(model, FSDPModule):
        exchange(model, _fxshard_class(users_class(model), vars(type(model))[METHODS], True))
    _give_methods(model, runtime)


def _give_methods(model: nn.Module, runtime: Runtime) -> None:
    """Let parameters gather themselves, blocks and the stage of a pipeline do as FSDP2's do."""
    let_gather(runtime)
    give_methods(runtime)
    if runtime.stage is not None:
        as_stage(model)


def _users_attributes(held: dict[str, Any]) -> dict[str, Any]:
    """Those of a model without what fxshard adds."""
    return fully_sharded.without_state({k: v for k, v in held.items() if k != STATE})


def released(model: nn.Module) -> Runtime:
    """Give `model` its own class back. Its parameters stay sharded, for a model that holds it.

    Returns:
        The runtime that the model had.
    """
    runtime: Runtime = model.__dict__.pop(STATE)
    fully_sharded.forget_state(model)
    model.__class__ = users_class(model)
    runtime.inside.put_back(model)
    return runtime


def public_names() -> tuple[str, ...]:
    """The names that a compiled model has in addition (docs/coming-from-fsdp.md lists them)."""
    found = {name for name in dir(FxshardModule) if not name.startswith("_")}
    return tuple(sorted(found - set(dir(nn.Module))))


def check_swappable(model: nn.Module) -> None:
    """Raise ConfigError if the class of `model` cannot be exchanged, or would hide its members."""
    for path, module in model.named_modules():
        if isinstance(module, (FxshardModule, UnitModule)):
            where = f"its submodule {path!r}" if path else "it"
            raise ConfigError(
                f"the model is sharded already: {where} was given to fxshard.compile before. "
                f"Compile once, the plain model; what a compiled one runs is in its .plan and "
                f".memory."
            )
    if not isinstance(model, FSDPModule):  # which is refused as sharded
        check_members(model, public_names())
    base = type(model)
    try:
        exchange(model, _fxshard_class(base))
    finally:
        model.__class__ = base


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Put every module of `model` back as it was if the block raises: attributes and class."""
    before = [
        (module, type(module), [(key, value, _items(value)) for key, value in vars(module).items()])
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        for module, kind, attributes in before:
            module.__class__ = kind
            module.__dict__.clear()
            for key, value, items in attributes:
                if items is not None:
                    value.clear()
                    value.update(items)
                module.__dict__[key] = value
        raise


def _items(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, set)) else None


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a compiled model run as the user wrote it, on parameters gathered once.

    Otherwise the method gathers each parameter where it reads it, and all ranks must run the same
    code. (FSDP2's function of this name. It does nothing for a module that is not compiled.)

    Args:
        module: what `fxshard.compile` returned, or a module that `fxshard.fully_shard` was given:
            of a submodule, the parameters of its unit are gathered, as for a call of it.
        method_name: of a method of its class.

    Raises:
        ConfigError: the model has no such method.
    """
    if not isinstance(module, (FxshardModule, UnitModule)):
        return
    base, known = users_class(module), vars(type(module))[METHODS]
    if not callable(getattr(base, method_name, None)):
        raise ConfigError(f"{base.__name__} has no method {method_name!r}.")
    if method_name not in known:
        made: Any
        if isinstance(module, UnitModule):
            made = unit_class(base, (*known, method_name))
        else:
            made = _fxshard_class(base, (*known, method_name), isinstance(module, FSDPModule))
        module.__class__ = made


def _around(base: type[nn.Module], name: str, fsdp2: bool) -> Any:
    """A method that runs on parameters gathered once: all of them, or, as in FSDP2, of its unit."""
    of_unit = fsdp2 and name not in hf.methods_on_whole(base)
    return (_on_its_unit if of_unit else _on_full_parameters)(getattr(base, name))


def _on_full_parameters(method: Any) -> Any:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        placed = any(slot.param.placed for slot in self._fxshard.slots.values())
        gathers = not (
            hf.brings_its_state(method, (self, *args), kwargs)
            or (placed and hf.gathers_its_state(method, self))
        )
        with as_plain(self._fxshard) if gathers else as_users_own(self, hooks=True):
            return method(self, *args, **kwargs)

    return run


def _on_its_unit(method: Any) -> Any:
    """`method` of a model that `fully_shard` was given, as of a block: one gather of its unit."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        runtime: Runtime = self._fxshard
        alone = runtime.stands_alone()
        with as_users_own(self, hooks=True):
            if not alone:
                return method(self, *args, **kwargs)
            with runtime.inside.units_alone():
                return run_alone(method, self, runtime, "", args, kwargs)

    return run


def _fxshard_class(
    base: type[nn.Module], methods: tuple[str, ...] | None = None, fsdp2: bool = False
) -> type[nn.Module]:
    """The subclass of a user's class whose ``forward`` runs a program; made once.

    Args:
        base: the user's class.
        methods: names of methods that run on unsharded parameters; None: those of transformers.
        fsdp2: it is a subclass of FSDP2's `FSDPModule` too: `fully_shard` has made it.
    """
    names = hf.methods_on_whole(base) if methods is None else methods
    bases: tuple[type, ...] = (FxshardModule, base, FSDPModule) if fsdp2 else (FxshardModule, base)
    for known in base.__subclasses__():
        if (known.__bases__, vars(known).get(METHODS)) == (bases, names):
            return known

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fxshard.call(args, kwargs)

    members = {
        "forward": forward,
        **{n: m for n, m in REFUSALS.items() if not any(hasattr(b, n) for b in bases[:2])},
        **{name: _around(base, name, fsdp2) for name in names},
    }
    made: type[nn.Module] = subclass_of(base, bases, names, members)
    return made


def _unpickled(base: type[nn.Module], methods: tuple[str, ...], fsdp2: bool) -> nn.Module:
    made: nn.Module = object.__new__(_fxshard_class(base, methods, fsdp2))
    return made
