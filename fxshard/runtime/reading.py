"""How the parameters of a model that `fxshard.shard` sharded are read.

The modules of the tree keep the user's objects; their classes are exchanged for subclasses of the
same name in which each sharded parameter is a property. What a read gives depends on where it is:

=====================================  ============================================================
outside of the model's forward         the parameter as it is: a DTensor, which gathers itself
                                       where it meets plain tensors (`fxshard.runtime.gathering`).
                                       Initialisation, optimizers and state dicts must get that,
                                       or they would work on a copy that nobody keeps.
where Dynamo traces                    what ``fxshard::parameter`` makes of the parameter's
                                       *handle*: the whole parameter, to Dynamo's eyes. The handle
                                       becomes an input of Dynamo's graph, and so the graph says
                                       at each call which parameters it reads: layers that share
                                       code share one graph (see `fxshard.dynamo.graphs`).
in forward as it is (eager)            the whole parameter, gathered now. Its gradient is reduced
                                       to the shard. What autograd saves of it is not the whole
                                       parameter but its name: backward gathers it again.
=====================================  ============================================================
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fxshard._torch import autograd, dynamo, process_groups, trees
from fxshard.capture import hf
from fxshard.config import Config
from fxshard.errors import ConfigError, StepError, UnitError
from fxshard.ir.units import Unit, ignored_of
from fxshard.passes.insert_reduce import InsertReduce
from fxshard.pipeline import passes_of
from fxshard.plans.plan import Plan
from fxshard.runtime.sharding import Slot, as_gradient
from fxshard.runtime.store import ParameterStore
from fxshard.runtime.world.backends import as_bytes, as_real
from fxshard.runtime.world.c10d import OPS, C10dWorld

ROOT, HANDLES = "_fxshard_root", "_fxshard_handles"  # attributes besides the user's own

_LIBRARY = torch.library.Library("fxshard", "FRAGMENT")
_LIBRARY.define("parameter(Tensor handle) -> Tensor")


@torch.library.register_fake("fxshard::parameter", lib=_LIBRARY)
def _whole_fake(handle: Tensor) -> Tensor:
    return handle.new_empty(handle.shape)


@torch.library.impl(_LIBRARY, "parameter", "CompositeExplicitAutograd")
def _no_kernel(handle: Tensor) -> Tensor:
    raise StepError(
        "a model that fxshard.shard sharded was compiled by another backend, which cannot gather "
        'its parameters. Write torch.compile(model, backend="fxshard").'
    )


torch.library.register_autograd("fxshard::parameter", lambda ctx, grad: grad, lib=_LIBRARY)
packet = torch.ops.fxshard.parameter  # Dynamo's graphs hold either
parameter = packet.default


@dataclasses.dataclass(eq=False)
class Root:
    """What the modules of one sharded model share.

    Attributes:
        owner: holds its shards, and runs its programs.
        inside: how many forwards of the model run now as they are, not traced by Dynamo.
        plans: what Dynamo has captured of it, in order (see `fxshard.dynamo.graphs`).
        gathered: what is alive of eager reads, by the address of its storage.
    """

    owner: ParameterStore
    inside: int = 0
    plans: list[Plan] = dataclasses.field(default_factory=list)
    gathered: weakref.WeakValueDictionary[int, _Whole] = dataclasses.field(
        default_factory=weakref.WeakValueDictionary
    )
    _hooks: list[saved_tensors_hooks] = dataclasses.field(default_factory=list)
    _around: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None
    _reduction: tuple[Config, InsertReduce] | None = None

    def __post_init__(self) -> None:
        ROOTS.add(self)

    def whole(self, fqn: str) -> Tensor:
        """The parameter, whole, in the dtype that its unit computes in; collective."""
        slot = self.owner.slots[fqn]
        if isinstance(self.owner.world, C10dWorld):
            slot.settle()
            return Gather.apply(slot.tensor, self, slot)
        value, dtype = slot.tensor, self.computes_in(slot)  # whole already
        return value if value.dtype is dtype else value.to(dtype)

    def computes_in(self, slot: Slot) -> torch.dtype:
        """The dtype of the parameter where it is whole."""
        return self.owner.as_it_is(slot.param).compute_dtype

    @property
    def reduction(self) -> InsertReduce:
        """How gradients are reduced, as the pipeline of the model's options says it now."""
        config = self.owner.config  # another one behind set_gradient_divide_factor
        if self._reduction is not None and self._reduction[0] is config:
            return self._reduction[1]
        for step in passes_of(config):
            if isinstance(step, InsertReduce):
                self._reduction = config, step
                return step
        raise StepError(
            "the pipeline of option passes has no insert-reduce, so that the gradient of a "
            "parameter which eager code reads cannot be reduced alike. Leave passes out of "
            'fxshard.shard, and give it to torch.compile(model, backend="fxshard", options=...).'
        )

    def name_of(self, tensor: Tensor) -> str | None:
        """FQN of the parameter that an eager read gathered and `tensor` is, or is a view of."""
        mark = self.gathered.get(_address(tensor))
        return None if mark is None else mark.slot.param.fqn

    @property
    def reads_whole(self) -> bool:
        """True where eager code computes with parameters: in forward, and again in backward, where
        torch.utils.checkpoint repeats parts of it.
        """
        return self.inside > 0 or autograd.in_backward()

    @torch.compiler.disable
    def enter(self) -> None:
        """An eager forward of the model begins."""
        self.inside += 1
        around = autograd.saved_tensors_hooks_on_top() if self.inside == 1 else None
        self._around = around or self._around
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    @torch.compiler.disable
    def leave(self) -> None:
        """It is over."""
        self.inside -= 1
        self._hooks.pop().__exit__()
        if not self.inside:
            self._around = None

    @torch.compiler.disable
    def _pack(self, tensor: Tensor) -> Any:
        mark = self.gathered.get(_address(tensor))
        if mark is None and self._around is not None:  # the user's own: autograd asks one pair only
            pack, unpack = self._around
            return functools.partial(unpack, pack(tensor))
        if mark is None:
            return tensor
        version = autograd.version(mark.slot.tensor)
        size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _Saved(mark.slot, tensor.dtype, size, stride, offset, version)

    @torch.compiler.disable
    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, functools.partial):
            return saved()
        slot = saved.slot
        if autograd.version(slot.tensor) != saved.version:
            raise StepError(
                f"parameter {slot.param.fqn!r} was changed in place between a forward and its "
                f"backward, which reads it. Call backward first (before optimizer.step())."
            )
        whole = gathered(self, slot)
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> Root:
        memo[id(self)] = made = object.__new__(Root)
        Root.__init__(made, copy.deepcopy(self.owner, memo))
        made.owner._root = made
        return made


ROOTS: weakref.WeakSet[Root] = weakref.WeakSet()  # of all models that are sharded now


class _Whole:
    """Lives as long as the storage of a whole parameter that an eager read has gathered."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What autograd keeps in the place of a whole parameter, or of a view of it."""

    slot: Slot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


class Gather(torch.autograd.Function):
    """Sharded parameter -> whole parameter; its gradient is reduced to the shard."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root: Root, slot: Slot, dtype: torch.dtype | None = None
    ) -> Tensor:
        ctx.root, ctx.slot = root, slot
        return gathered(root, slot, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduced(ctx.root, ctx.slot, grad), None, None, None


@torch.compiler.disable
def gathered(root: Root, slot: Slot, dtype: torch.dtype | None = None) -> Tensor:
    """All rows of a parameter, in a storage of its own; in the dtype that its unit computes in."""
    world, dtype = root.owner.world, dtype or root.computes_in(slot)
    assert isinstance(world, C10dWorld)
    world.require_joined()  # without groups it would look like a world of one rank
    shard = slot.shards[0].to(torch.device(world.mesh.device_type), dtype)
    buffer = shard.new_empty(slot.layout.padded_shape)
    if "shard" in world.groups:
        process_groups.all_gather_single(
            as_bytes(buffer), as_bytes(shard.contiguous()), group=world.groups["shard"]
        )
    else:
        buffer.copy_(shard)
    mark = _Whole(slot)
    root.gathered[_address(buffer)] = mark
    # The storage object that Python sees lives as long as the memory does.
    buffer.untyped_storage()._fxshard_mark = mark  # type: ignore[attr-defined]
    return buffer[: slot.param.shape[0]]


@torch.compiler.disable
def reduced(root: Root, slot: Slot, grad: Tensor) -> Tensor:
    """This rank's rows of the gradients of all ranks, reduced as the options say."""
    owner, world = root.owner, root.owner.world
    assert isinstance(world, C10dWorld)
    world.require_joined()
    unit_precision = owner.units[slot.param.unit].precision
    grad = grad.to(unit_precision.reduce_dtype or grad.dtype)
    padded = grad.new_zeros(slot.layout.padded_shape)
    padded[: grad.shape[0]].copy_(grad)
    before, name, behind = root.reduction.division(padded.dtype, world.size * world.replicas)
    shard, op = padded if before is None else padded.div_(before), OPS[name]
    if "shard" in world.groups:
        shard = padded.new_empty(slot.layout.shard_shape)
        into, sent = as_real(shard), as_real(padded)
        process_groups.reduce_scatter_single(into, sent, op=op, group=world.groups["shard"])
    if "replicate" in world.groups:
        dist.all_reduce(as_real(shard), op=op, group=world.groups["replicate"])
    if behind is not None:
        shard.div_(behind)
    if not unit_precision.keep_low_precision_grads:
        shard = shard.to(slot.param.dtype)
    return as_gradient(slot, [shard.to(slot.local.device)], world)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# -- classes ---------------------------------------------------------------------------------------


def refuse_ddp(module: nn.Module) -> NoReturn:
    """Instead of what DistributedDataParallel asks a module for before anything else.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "DistributedDataParallel wraps a model that fxshard has sharded: no rank holds its "
        "parameters, and its gradients are reduced already. Leave DistributedDataParallel out. "
        "Who adds it by themselves: accelerate's prepare (do not give it the model), "
        "Lightning's strategy 'ddp' and transformers' Trainer on several processes."
    )


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
    casts = {model.get_submodule(unit.fqn): _casts(unit) for unit in units}
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


def attach(root: Root, classes: dict[nn.Module, type]) -> None:
    """Let the modules of a model that was just sharded read their parameters as said above.

    And mark them for Dynamo as managed by FSDP with original parameters in use.

    Args:
        root: of the model.
        classes: see `classes`.
    """
    for module, made in classes.items():
        module.__class__ = made
        module.__dict__[ROOT] = root
    give_handles(root)
    hf.keep_eager_branch_in_dynamo()
    for module in managed(root.owner):
        dynamo.mark_for_dynamo(module)


def root_of(model: Any) -> Root | None:
    """What `attach` has made for `model`; None for any other object."""
    found = getattr(model, "__dict__", {})
    root = found.get(ROOT)
    return root if isinstance(root, Root) and root.owner.model is model else None


def managed(owner: ParameterStore) -> list[nn.Module]:
    """The modules that torch's FSDP would call managed: not those that are ignored, as in FSDP1,
    and if parameters are ignored, no module that has nothing else, as in FSDP2.

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
    """To which dtypes the module of a unit casts floating inputs and outputs."""
    said = unit.precision
    inputs = said.cast_inputs if unit.fqn else said.cast_root_inputs
    return said.param_dtype if inputs else None, said.output_dtype


def give_handles(root: Root) -> None:
    """Make the handle of each parameter, and put it on the modules that hold the parameter."""
    owner = root.owner
    for module in owner.model.modules():
        if ROOT in module.__dict__:
            module.__dict__[HANDLES] = {}
    for slot in owner.slots.values():
        handle = _handle(slot, root.computes_in(slot), torch.device(owner.compute_device()))
        handle._fxshard = root, slot.param.fqn  # type: ignore[attr-defined]
        for module, name in slot.owners:
            module.__dict__[HANDLES][name] = handle


def _handle(slot: Slot, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Of the whole parameter's shape and dtype; one element of memory, no values.

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
    root, fqn = handle._fxshard
    if not root.reads_whole or root.owner.slots[fqn].tensor is not found:
        return found  # or the user's own, put there since
    return root.whole(fqn)


def _read_flat_weights(self: Any) -> list[Any]:
    """Recurrent modules keep a list of their parameters, which would be the unsharded ones."""
    return [getattr(self, name, None) for name in self._flat_weights_names]


_FLAT_WEIGHTS = property(_read_flat_weights, lambda self, value: None)


def _root_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Dynamo inlines this, and finds nothing to do. If a graph break is inside, it cannot stop
        # in the middle of a try block: it lets this frame run as it is, and goes on inside.
        try:
            hf.FORWARDS.inside += 1
            if not torch.compiler.is_dynamo_compiling():
                self._fxshard_root.enter()
            return inner(self, *args, **kwargs)
        finally:
            hf.FORWARDS.inside -= 1
            if not torch.compiler.is_dynamo_compiling():
                self._fxshard_root.leave()

    return forward


def _casting_forward(
    inner: Callable[..., Any], inputs: torch.dtype | None, output: torch.dtype | None
) -> Callable[..., Any]:
    """What `fxshard.capture.precision.casting` does by hooks, where Dynamo sees it."""

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
    root = self._fxshard_root
    base = self._fxshard_base
    root.owner.convert(fn, lambda: base._apply(self, fn, recurse))
    give_handles(root)
    return self


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """As `copy.deepcopy` of a plain module; that of the root copies what all modules share."""
    root = self._fxshard_root
    is_root = root.owner.model is self
    if not is_root and id(root) not in memo:
        raise StepError(
            f"copy.deepcopy of a {type(self).__name__} inside of a model that fxshard.shard "
            f"sharded: its shards lie amid those of the model. Copy the whole model."
        )
    made: Any = object.__new__(type(self))
    memo[id(self)] = made
    shared = copy.deepcopy(root, memo)  # first: it knows how parameters are copied
    state = nn.Module.__getstate__(self)  # without what model.compile() made of this one
    rest = {key: value for key, value in state.items() if key not in (ROOT, HANDLES)}
    made.__dict__.update(copy.deepcopy(rest, memo))
    made.__dict__.update({ROOT: shared, HANDLES: {}})
    if is_root:
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
