"""How the parameters of a model that `fxshard.shard` sharded are read.

The modules of the tree keep the user's objects; their classes are exchanged for subclasses of the
same name in which each sharded parameter is a property. What a read gives depends on where it is:

=====================================  ============================================================
outside of the model's forward         the parameter as it is: a DTensor, which gathers itself
                                       where it meets plain tensors (`fxshard.runtime.gathering`).
                                       Initialisation, optimizers and state dicts need it: they
                                       would work on a copy otherwise.
where Dynamo traces                    what ``fxshard::parameter`` makes of the parameter's
                                       *handle*: for Dynamo, the unsharded parameter. The handle
                                       becomes an input of Dynamo's graph, so each call shows which
                                       parameters the graph reads: layers that share code share one
                                       graph (see `fxshard.dynamo.graphs`).
in an eager forward                    the unsharded parameter, gathered now. Its gradient is
                                       reduced to the shard. Autograd does not save the unsharded
                                       parameter: backward gathers it again.
=====================================  ============================================================
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fxshard._torch import dynamo, trees
from fxshard._torch import modules as torch_modules
from fxshard.capture import hf, refusals
from fxshard.capture.swapped import users_class
from fxshard.errors import ConfigError, StepError, UnitError
from fxshard.ir.unit_choice import ignored_of
from fxshard.ir.units import Unit
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.sharding import Slot
from fxshard.runtime.store.parameters import ParameterStore

RUNTIME, HANDLES = "_fxshard_runtime", "_fxshard_handles"  # attributes besides the user's own
SHARDED: weakref.WeakSet[Runtime] = weakref.WeakSet()  # of all models that `attach` was given

_LIBRARY = torch.library.Library("fxshard", "FRAGMENT")
_LIBRARY.define("parameter(Tensor handle) -> Tensor")


@torch.library.register_fake("fxshard::parameter", lib=_LIBRARY)
def _unsharded_fake(handle: Tensor) -> Tensor:
    if torch.compiler.is_exporting():  # by Dynamo (strict=True)
        refusals.refuse_recording("a model", "torch.export")
    return handle.new_empty(handle.shape)


@torch.library.impl(_LIBRARY, "parameter", "CompositeExplicitAutograd")
def _no_kernel(handle: Tensor) -> Tensor:
    raise StepError(
        "a model that fxshard.shard sharded was compiled by another backend, which cannot gather "
        'its parameters. Write torch.compile(model, backend="fxshard").'
    )


torch.library.register_autograd("fxshard::parameter", lambda ctx, grad: grad, lib=_LIBRARY)
packet: Any = torch.ops.fxshard.parameter  # Dynamo's graphs hold either
parameter = packet.default


# -- classes ---------------------------------------------------------------------------------------


def looked_through() -> bool:
    """True if a property is read by who looks through all attributes of a module, for their kinds.

    Such a reader takes AttributeError for an answer, and no other error. (`inspect.getmembers`;
    torch/_jit_internal.py, ``module_has_exports``)
    """
    return sys._getframe(2).f_globals.get("__name__") in ("inspect", "torch._jit_internal")


def refuse_ddp(module: nn.Module) -> NoReturn:
    """Stands in for the attribute that DistributedDataParallel reads of a module first.

    Raises:
        ConfigError: DistributedDataParallel reads it.
        AttributeError: who looks through all attributes does (`inspect.getmembers`, torch.jit).
    """
    if sys._getframe(1).f_globals.get("__name__") != DistributedDataParallel.__module__:
        raise AttributeError("_ddp_params_and_buffers_to_ignore")
    raise ConfigError(
        "DistributedDataParallel wraps a model that fxshard has sharded: no rank holds its "
        "parameters, and its gradients are reduced already. Leave DistributedDataParallel out. "
        "Who adds it by themselves: accelerate's prepare (do not give it the model), "
        "Lightning's strategy 'ddp' and transformers' Trainer on several processes."
    )


def refuse_scripting(module: nn.Module) -> NoReturn:
    """What torch.jit.script asks a module for, to script that in its place.

    (torch/jit/_script.py, ``call_prepare_scriptable_func``)

    Raises:
        CaptureError: always.
    """
    refusals.refuse_recording(users_class(module).__name__, "torch.jit.script")


def classes(model: nn.Module, units: tuple[Unit, ...]) -> dict[nn.Module, type]:
    """The class that each module gets which holds a parameter of `units`, or casts; the root too.

    Raises:
        UnitError: the class of a module cannot be exchanged.
    """
    names: dict[nn.Module, list[str]] = {}
    for path, name in (
        alias.rpartition(".")[::2] for u in units for p in u.params for alias in p.aliases
    ):
        names.setdefault(model.get_submodule(path), []).append(name)
    casts = {model.get_submodule(fqn): _casts(unit) for unit in units for fqn in unit.fqns}
    found: dict[nn.Module, type] = {}
    for path, module in model.named_modules():
        if module is not model and module not in names and not any(casts.get(module, ())):
            continue
        base: Any = type(module)
        kind = (module is model, *casts.get(module, (None, None)))
        try:
            made = _reading_class(base, tuple(dict.fromkeys(names.get(module, ()))), *kind)
            module.__class__, module.__class__ = made, base
        except TypeError as error:
            raise UnitError(
                f"the class of module {path or '(root)'!r}, {base.__name__}, cannot be exchanged "
                f"for one that gathers parameters: {error}. Use fxshard.compile."
            ) from error
        found[module] = made
    return found


def attach(runtime: Runtime, classes: dict[nn.Module, type]) -> None:
    """Let the modules of a newly sharded model read their parameters as the table above says.

    Also mark them for Dynamo as managed by FSDP with original parameters in use.

    Args:
        runtime: of the model.
        classes: see `classes`.
    """
    for module, made in classes.items():
        module.__class__ = made
        module.__dict__[RUNTIME] = runtime
    SHARDED.add(runtime)
    give_handles(runtime)
    hf.keep_eager_branch_in_dynamo()
    for module in managed(runtime):
        dynamo.mark_for_dynamo(module)


def runtime_of(model: Any) -> Runtime | None:
    """The runtime of a model that `attach` was given; None for any other object."""
    found = getattr(model, "__dict__", {}).get(RUNTIME)
    return found if isinstance(found, Runtime) and found.model is model else None


def managed(owner: ParameterStore) -> list[nn.Module]:
    """The modules that torch's FSDP would mark as managed.

    As in FSDP1, ignored modules are left out. As in FSDP2, so are modules that have ignored
    parameters and nothing else.

    (torch/distributed/fsdp/_dynamo_utils.py, ``_annotate_modules_for_dynamo``;
    torch/distributed/fsdp/_fully_shard/_fsdp_init.py, ``_ignore_module``)
    """
    modules, params = ignored_of(owner.model, tuple(owner.config.ignored or ()))
    left_out = set(map(id, modules))
    inside = {id(param) for module in modules for param in module.parameters()}

    def is_bare(module: nn.Module) -> bool:
        return (
            not module._buffers
            and all(id(param) in params for param in module.parameters(recurse=False))
            and all(map(is_bare, module.children()))
        )

    return [
        module
        for module in owner.model.modules()
        if id(module) not in left_out and not (params - inside and is_bare(module))
    ]


def _casts(unit: Unit) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes to which the module of a unit casts floating inputs and outputs."""
    policy = unit.precision
    inputs = policy.cast_inputs if unit.fqn else policy.cast_root_inputs
    return policy.param_dtype if inputs else None, policy.output_dtype


def give_handles(runtime: Runtime) -> None:
    """Make the handle of each parameter, and put it on the modules that hold the parameter."""
    for module in runtime.model.modules():
        if RUNTIME in module.__dict__:
            module.__dict__[HANDLES] = {}
    for slot in runtime.slots.values():
        dtype = runtime.as_it_is(slot.param).compute_dtype
        handle = _handle(slot, dtype, torch.device(runtime.compute_device()))
        handle._fxshard = runtime, slot.param.fqn  # type: ignore[attr-defined]
        for module, name in slot.owners:
            module.__dict__[HANDLES][name] = handle


def _handle(slot: Slot, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A tensor of the unsharded parameter's shape and dtype; one element of memory, no values.

    An `nn.Parameter`, because Dynamo takes their sizes for constants.
    """
    one = torch.empty((), dtype=dtype, device=device)
    return nn.Parameter(one.expand(slot.param.shape), slot.tensor.requires_grad)


@functools.cache
def _reading_class(
    base: Any,
    names: tuple[str, ...],
    is_root: bool,
    inputs: torch.dtype | None,
    output: torch.dtype | None,
) -> type:
    """A subclass of a module's class with a property for each of its sharded parameters."""
    namespace: dict[str, Any] = {name: _property(name) for name in names}
    forward: Callable[..., Any] = base.forward
    if issubclass(base, nn.RNNBase):
        namespace["_flat_weights"] = _FLAT_WEIGHTS
    if inputs is not None or output is not None:
        namespace["forward"] = forward = _casting_forward(forward, inputs, output)
    if is_root:
        namespace |= {"forward": _root_forward(forward), "_apply": _apply}
        namespace["_ddp_params_and_buffers_to_ignore"] = property(refuse_ddp)
        namespace["__prepare_scriptable__"] = refuse_scripting
    namespace |= {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _refuse_pickling,
        "__copy__": _refuse_copy,
        "__deepcopy__": _deepcopy,
        "_fxshard_base": base,
    }
    metaclass: Any = type(base)
    return metaclass(base.__name__, (base,), namespace)


def _property(name: str) -> property:
    def read(self: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.fxshard.parameter(self._fxshard_handles[name])
        return _read(self, name)

    dynamo.only_inlined(read)

    def write(self: Any, value: Any) -> None:
        # nn.Module keeps parameters and buffers elsewhere: this is a plain value in their place,
        # as pruning and reparametrisations put there.
        self.__dict__[name] = value

    def delete(self: Any) -> None:
        del self.__dict__[name]

    return property(read, write, delete)


@torch.compiler.disable
def _read(module: nn.Module, name: str) -> Any:
    """A sharded parameter as eager code gets it."""
    if name not in module._parameters:
        if name in module.__dict__:
            return module.__dict__[name]
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    found, handle = module._parameters[name], module.__dict__[HANDLES].get(name)
    if found is None or handle is None:
        return found
    runtime, fqn = handle._fxshard
    slot = runtime.slots[fqn]
    if not runtime.forwards.computing or slot.tensor is not found:
        return found  # sharded; or a parameter that the user has put there
    return runtime.computed(slot)


def _read_flat_weights(self: Any) -> list[Any]:
    """The list that recurrent modules keep of their parameters, read at each access."""
    return [getattr(self, name, None) for name in torch_modules.weight_names(self)]


_FLAT_WEIGHTS = property(_read_flat_weights, lambda self, value: None)


def _root_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    @dynamo.with_a_cache_of_its_own
    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Dynamo inlines this. It cannot break a graph inside of a try block: with a graph break in
        # `inner`, it runs this frame eagerly and traces the frames inside.
        try:
            hf.FORWARDS.inside += 1
            if not torch.compiler.is_dynamo_compiling():
                self._fxshard_runtime.forwards.enter()
            return inner(self, *args, **kwargs)
        finally:
            hf.FORWARDS.inside -= 1
            if not torch.compiler.is_dynamo_compiling():
                self._fxshard_runtime.forwards.leave()

    return forward


def _casting_forward(
    inner: Callable[..., Any], inputs: torch.dtype | None, output: torch.dtype | None
) -> Callable[..., Any]:
    """What `fxshard.capture.precision.casting` does by hooks, where Dynamo sees it."""

    @dynamo.with_a_cache_of_its_own
    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs is not None:
            args, kwargs = trees.tree_map_tensors(_to(inputs), (args, kwargs))
        result = inner(self, *args, **kwargs)
        return result if output is None else trees.tree_map_tensors(_to(output), result)

    return forward


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """``.to()``, ``.half()`` and their kin, on shards (see `ParameterStore.convert`)."""
    base = self._fxshard_base
    self._fxshard_runtime.convert(fn, lambda: base._apply(self, fn, recurse))
    give_handles(self._fxshard_runtime)
    return self


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """As `copy.deepcopy` of a plain module; that of the root also copies the runtime."""
    runtime = self._fxshard_runtime
    is_root = runtime.model is self
    if not is_root and id(runtime) not in memo:
        raise StepError(
            f"copy.deepcopy of a {type(self).__name__} inside of a model that fxshard.shard "
            f"sharded: its shards are part of the model's flat storage. Copy the whole model."
        )
    made: Any = object.__new__(type(self))
    memo[id(self)] = made
    shared = copy.deepcopy(runtime, memo)  # first: it knows how parameters are copied
    state = nn.Module.__getstate__(self)  # without what model.compile() made of this one
    rest = {key: value for key, value in state.items() if key not in (RUNTIME, HANDLES)}
    made.__dict__.update(copy.deepcopy(rest, memo))
    made.__dict__.update({RUNTIME: shared, HANDLES: {}})
    if is_root:
        SHARDED.add(shared)
        give_handles(shared)
    return made


def _refuse_copy(self: Any) -> Any:
    raise StepError(
        f"copy.copy of a {type(self).__name__} that fxshard.shard sharded: two modules would share "
        f"one set of shards, and only one of them would be seen to change. Copy the whole model "
        f"with copy.deepcopy, or keep a second reference to the module."
    )


def _refuse_pickling(self: Any, protocol: Any) -> Any:
    raise StepError(
        f"a model that fxshard.shard sharded cannot be pickled ({type(self).__name__}): it belongs "
        f"to the process group of this run. Save model.state_dict() with "
        f"torch.distributed.checkpoint, and shard the model again where it is loaded."
    )
