"""The parameters of a compiled model outside of its programs.

A submodule that is called alone, another method of the model, and what `torch.utils.checkpoint`
recomputes in backward read parameters as they read any tensor. Under a process group parameters are
DTensors, and plain tensors do not mix with those. So parameters are of a subclass of DTensor that
gathers itself where code computes with it. The value is unsharded, on every rank, in the stored
dtype, and its gradient is reduced to the shard. DTensor itself runs what works on shards:
optimizers, norms without gradients, state dicts.

Writes have the effect that they have in one process. A pointwise operator writes this rank's rows.
For any other operator the full value is gathered and written, and this rank keeps its rows; that is
collective. A view that does not share memory with the shards (a row, a diagonal) can be read;
writing into it is refused.

Each rank draws random numbers for the full tensor: with equal seeds, ranks get what one process
gets. That holds for all DTensors on the mesh of a compiled model, gradients and optimizer states
too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from fxshard._torch import autograd, optimizers, transforms, trees
from fxshard._torch import dtensors as torch_dtensors
from fxshard._torch.dtensors import sharded_like
from fxshard._torch.storages import storage_id
from fxshard.capture import refusals
from fxshard.capture.swapped import as_users_own
from fxshard.errors import FxshardError, StepError
from fxshard.runtime import dtensors, eager, full_matrices, optimizer_calls, parameter_gradients
from fxshard.runtime.copies import (
    ACCESS,
    CopiedPart,
    RefuseLostWrites,
    as_views,
    is_array,
    is_in_place,
    lost,
    mark_copy,
    memory,
    name_of,
    named,
    refuse_copy,
    refuse_into_views,
    storage,
    tensors_in,
)
from fxshard.runtime.replaced import PLACE, StrongReference, gather_as, place_of
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.sharding import Slot
from fxshard.runtime.state import leave
from fxshard.runtime.store.reads import WRITTEN_COPY
from fxshard.runtime.world.c10d import C10dWorld

_VIEWS = ("T", "mT", "H", "mH", "real", "imag")  # attributes that are made by operators
# Pointwise functions that torch has not tagged so, and some that do not change values.
_BY_ELEMENT = (
    *("copy_", "zero_", "fill_", "masked_fill_", "abs_", "absolute_", "add_", "mul_", "subtract_"),
    *("multiply_", "divide_", "true_divide_", "requires_grad_", "detach_"),
)
_SELF = ("view_as", "expand_as")  # how torch finds where a gradient goes
# They return Python numbers, for which DTensor takes this rank's partial values.
_SCALARS = (
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__format__"),
    *("item", "tolist", "is_nonzero"),
)
_KEPT = ("clone", "cpu", "cuda", "to_local", "full_tensor", "redistribute")
_MEMORY = ("__dlpack__", "to_dlpack", "_to_dlpack")
_OF_CLIPPING = ("vector_norm", "linalg_vector_norm", "to")  # no views, no writes, no random numbers
_LISTS = ("_foreach", "_fused", "_amp_foreach")  # functions of lists, which optimizers call
_TO_FILL = ("new_empty", "empty_like")  # what is made to be filled with random numbers next


class _AtItsOffset(tuple[Any, ...]):
    """What DTensor says of itself, of one that has the storage offset of its local tensor, such as
    a gradient. Parameters have none.
    """


class GatheringTensor(DTensor):
    """A DTensor that gathers itself where it meets plain tensors, or where autograd follows it."""

    gathers_itself = True  # see `copies.GATHERS`

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with autograd.plain_torch_functions():
            if func in optimizer_calls.ASKED:
                found = func(*args, **kwargs)
                return gather_as(found, args[0]) if type(found) is DTensor else found
            if func in optimizer_calls.WRITES and optimizer_calls.on_one_mesh(args, kwargs):
                done, found = _tried_on_shards(func, args, kwargs)
                return found if done else _called(func, args, kwargs)
            if func not in parameter_gradients.ASKED:
                return _called(func, args, kwargs)
        return parameter_gradients.asked(func, args, kwargs)

    def full_tensor(self, **options: Any) -> Tensor:
        """As DTensor's; inside of a transform of torch.func it is a constant of the transform."""
        runtime, _ = _origin(self)
        if runtime is not None:
            refusals.check_runs(runtime.model)
        with transforms.outside():
            return super().full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """As DTensor's; all ranks do so, or none."""
        _agree_to_read(self)
        return super().redistribute(*args, **options)

    def __tensor_flatten__(self) -> Any:
        with autograd.plain_torch_functions():
            names, context = super().__tensor_flatten__()
            return names, _AtItsOffset(context) if self.storage_offset() else context

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, *sizes: Any) -> Any:
        at_its_offset = isinstance(context, _AtItsOffset)
        unflatten = DTensor.__tensor_unflatten__ if at_its_offset else torch_dtensors.unflattened
        made = unflatten(inner, context, *sizes)
        made.__class__ = GatheringTensor
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain DTensor."""
        if not isinstance(self, torch.nn.Parameter) and self.storage_offset():
            names, context = self.__tensor_flatten__()
            inner = {name: getattr(self, name) for name in names}
            # torch takes a DTensor with an offset for one that has memory of its own, and fails
            made = torch_dtensors.unflattened(inner, context, self.size(), self.stride())
            return made.__reduce_ex__(protocol)
        own = self.__dict__
        self.__dict__ = {key: value for key, value in own.items() if key != PLACE}
        self.__class__ = DTensor  # type: ignore[assignment]
        try:
            return self.__reduce_ex__(protocol)
        finally:
            self.__class__, self.__dict__ = GatheringTensor, own


optimizers.allow_foreach(GatheringTensor)
optimizers.group_by_mesh()


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch is called with a `GatheringTensor` among its arguments.

    What works on shards DTensor computes, everything else is computed of full tensors.
    """
    name = name_of(func)
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name in ACCESS and attribute not in _VIEWS:
        return _accessed(func, name, attribute, args, kwargs)
    if name == "register_hook":
        return parameter_gradients.hooked(*args, **kwargs)
    if name == "__deepcopy__":
        return _deepcopied(*args, **kwargs)
    if name == "_make_dual" and transforms.transforming():
        for tensor in tensors_in((args, kwargs)):  # jvp takes its arguments apart so
            if isinstance(tensor, GatheringTensor):
                _refuse_transform(tensor, "differentiates")
    refuse_into_views(name, args, kwargs)
    if name == "_foreach_copy_":  # DTensor has none
        return _each_copied(*args, **kwargs)
    tensors = tensors_in((args, kwargs))
    if name.startswith(_LISTS) and len({*_meshes(args[0])}) > 1:
        return _on_each_mesh(func, args, kwargs)
    if name.startswith("_amp"):
        return func(*args, **kwargs)  # DTensor tells all ranks of an infinity
    _refuse_memory(func, name, tensors)
    if name in _SELF and len({id(tensor) for tensor in tensors}) == 1:
        return func(*args, **kwargs)
    if "out" in kwargs and any(isinstance(t, DTensor) for t in tensors_in(kwargs["out"])):
        return _written_out(func, args, kwargs)
    if is_in_place(name) and isinstance(tensors[0], DTensor):
        return _written(func, args, kwargs, tensors)
    # A transform wraps what is computed, so that it would not gather itself.
    followed = torch.is_grad_enabled() or transforms.transforming()
    if name in _OF_CLIPPING and not followed:
        with contextlib.suppress(RuntimeError):  # for one of each gradient, the rest is slow
            return _gathering(func(*args, **kwargs), tensors)
    alone = all(isinstance(t, DTensor) or not t.dim() for t in tensors)
    if alone and not _is_mixed_sum(tensors) and not _is_scalar(name, tensors):
        with dtensors.undoing() as undo:  # what an attempt in vain has drawn of random numbers
            with RefuseLostWrites():
                done, found = _tried_on_shards(func, args, kwargs)
            if done and not (followed and _computes(found, tensors)):
                return found if _is_kept(name) else _gathering(found, tensors)
            undo()
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    for runtime, slot in map(_origin, sharded):
        if runtime is not None and slot is not None:
            runtime.restore_beside(slot)  # before anything is sent
    unsharded = {id(tensor): _unsharded(tensor) for tensor in sharded}
    versions = [autograd.version(full) for full in unsharded.values()]
    try:
        found = func(*trees.exchanged(args, unsharded), **trees.exchanged(kwargs, unsharded))
    except RuntimeError as error:
        if WRITTEN_COPY not in str(error):
            raise
        raise lost(sharded[0], name) from error  # autograd itself refuses the write
    for tensor, full, version in zip(sharded, unsharded.values(), versions, strict=False):
        if autograd.version(full) != version:
            raise lost(tensor, name)
    return _marked(found, unsharded, sharded[0])


def _meshes(tensors: Sequence[Tensor]) -> list[Any]:
    """Of each tensor; None for a plain one."""
    return [t.device_mesh if isinstance(t, DTensor) else None for t in tensors]


def _on_each_mesh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of lists for what is on each mesh, and for plain tensors: DTensor takes those
    on one mesh alone. So torch's clip_grad_norm_ works on all of a model.
    """
    meshes = _meshes(args[0])
    found: list[Any] = [None] * len(meshes)
    for mesh in dict.fromkeys(meshes):
        here = [i for i, each in enumerate(meshes) if each == mesh]

        def part(value: Any, here: list[int] = here) -> Any:
            several = isinstance(value, (list, tuple)) and len(value) == len(meshes)
            return [value[i] for i in here] if several else value

        given = tuple(map(part, args)), {key: part(value) for key, value in kwargs.items()}
        of_part = _called(func, *given) if mesh is not None else func(*given[0], **given[1])
        for i, each in zip(here, of_part or (), strict=False):
            found[i] = each
    return found


def _each_copied(
    into: Sequence[Tensor], values: Sequence[Tensor], non_blocking: bool = False
) -> None:
    for given in zip(into, values, itertools.repeat(non_blocking), strict=False):
        sharded = any(isinstance(tensor, DTensor) for tensor in given)
        _called(Tensor.copy_, given, {}) if sharded else Tensor.copy_(*given)


def _refuse_transform(tensor: Tensor, verb: str) -> NoReturn:
    """A transform of torch.func takes a sharded parameter apart, as its argument.

    Raises:
        StepError: always.
    """
    raise StepError(
        f"a transform of torch.func {verb} {named(tensor)}, which is sharded, as its argument: "
        f"what comes out would be made of this rank's rows or of this rank's batch, and is reduced "
        f"by nobody. For gradients over all ranks call loss.backward(), or torch.autograd.grad("
        f"loss, parameters). For what this rank's batch alone gives, transform a function of plain "
        f"copies: {{name: p.detach().full_tensor() for name, p in model.named_parameters()}}. "
        f"Parameters that are not transformed may be read in it, or be other arguments of it."
    )


def _tried_on_shards(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Let DTensor run a function: whether it can (full tensors may be needed), and its result."""
    try:
        return True, func(*args, **kwargs)
    except FxshardError:
        raise
    except RuntimeError:  # NotImplementedError is one too
        return False, None


def _refuse_memory(func: Any, name: str, tensors: Sequence[Tensor]) -> None:
    """Raise StepError for a function that takes a parameter for memory of its own.

    Collectives of torch.distributed send and write memory; others hand it to another library.
    """
    if name in _MEMORY or getattr(func, "__module__", None) == distributed_c10d.__name__:
        of = next((t for t in tensors if hasattr(t, PLACE)), tensors[0])
        raise StepError(
            f"{name} of {named(of)}, which is sharded: this rank holds some of its rows, "
            f"and what is written into a copy of it would be lost. Take what is meant: "
            f"param.to_local(), this rank's rows, or param.full_tensor(), a copy of all of them."
        )


def let_gather(runtime: Runtime) -> None:
    """Make the sharded parameters of a model `GatheringTensor`; call it again for new ones."""
    if isinstance(runtime.world, C10dWorld):
        full_matrices.let_step()
        transforms.keep_out(GatheringTensor, _refuse_transform)
        for fqn, slot in runtime.slots.items():
            tensor: Any = slot.tensor
            if type(tensor) in (DTensor, GatheringTensor):  # the latter may be of an inner model's
                dtensors.as_one_process(tensor.device_mesh, runtime.world)
                tensor.__class__ = GatheringTensor
                setattr(tensor, PLACE, (StrongReference(runtime), fqn))


@contextlib.contextmanager
def as_plain(runtime: Runtime) -> Iterator[None]:
    """For the time of the block the model is as its user wrote it, with unsharded parameters.

    Entering is collective. Without gradients, ranks may do different things inside. With gradients
    enabled, those of unsharded parameters are reduced to the shards as backward reaches them: all
    ranks must call backward through the same parameters in the same order. Values that are written
    inside are lost.

    Raises:
        RankMismatchError: some ranks do something else.
        StepError: see `ReadableStore.require_readable`.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(runtime.world, C10dWorld) and not runtime.summoned:
            runtime.reshard()
            stack.enter_context(runtime.readable())
        stack.enter_context(as_users_own(runtime.model, hooks=True))
        yield


def _origin(tensor: Tensor) -> tuple[Runtime | None, Slot | None]:
    """The runtime and the slot of the parameter that a tensor is, or was computed from."""
    reference, fqn = getattr(tensor, PLACE, (None, ""))
    runtime = reference() if reference is not None else None
    return runtime, runtime.slots.get(fqn) if runtime is not None else None


def _world(tensor: Tensor) -> C10dWorld | None:
    """The ranks that have the rows of a sharded parameter, or of what was computed from it."""
    reference, _ = place_of(tensor)
    return None if reference is None else reference.world


def _agree_to_read(tensor: Tensor) -> None:
    """Before all rows of a tensor are gathered outside of forward and backward.

    Raises:
        RankMismatchError: see `AgreeingRank.read`.
    """
    world, (runtime, _) = _world(tensor), _origin(tensor)
    if world is None or torch.compiler.is_compiling() or autograd.in_backward():
        return
    if runtime is None or not runtime.forwards.inside:
        world.read(f"{named(tensor)} of shape {list(tensor.shape)}")


def _unsharded(tensor: Any) -> Tensor:
    """All rows of a DTensor; collective.

    Raises:
        CaptureError: see `refusals.check_runs`.
        StepError: its gradient would be this rank's rows of this rank's own.
    """
    runtime, slot = _origin(tensor)
    if runtime is not None:
        if slot is not None and slot.tensor is tensor:
            _agree_to_read(tensor)
            return runtime.read_here(slot)
        refusals.check_runs(runtime.model)
    world = _world(tensor)
    if world is None:
        return tensor.full_tensor()
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise StepError(
            f"a copy of {named(tensor)} that requires a gradient (of detach().requires_grad_(), "
            f"or of torch.autograd.functional) is computed with: its gradient would be this rank's "
            f"rows of what this rank's batch gives, reduced by nobody. Take gradients of the "
            f"parameter itself; or compute with plain copies, param.detach().full_tensor()."
        )
    with transforms.outside():
        dtensors.require_together(world)
        return eager.all_rows(tensor, world)


# -- attributes ------------------------------------------------------------------------------------


def _accessed(func: Any, name: str, attribute: str, args: Any, kwargs: Any) -> Any:
    """An attribute of a parameter is read, set or deleted."""
    tensor = args[0]
    if name == "__set__" and attribute == "data":
        value = args[1]
        if isinstance(value, Tensor):
            return _set_data(tensor, value)
    if name == "__set__" and attribute == "grad":
        return func(tensor, parameter_gradients.as_of(args[1], tensor))
    if name == "__get__" and attribute == "dtype":
        runtime, slot = _origin(tensor)
        if runtime is not None and slot is not None and slot.tensor is tensor:
            return runtime.dtype_here(slot)
    found = func(*args, **kwargs)
    return _gathering(found, [tensor]) if attribute == "data" else found


def _set_data(into: Any, value: Tensor) -> None:
    """``param.data = value``: this rank's rows, in memory of their own. (torch would lose those of
    a DTensor.)

    As in one process, who holds the memory before (``param.data``, ``detach()``, a state dict)
    keeps its values: they may be put back.

    Raises:
        StepError: the shape or dtype is not that of the parameter.
    """
    if (value.shape, value.dtype) != (into.shape, into.dtype):
        raise StepError(
            f"param.data = a tensor of shape {list(value.shape)} and {value.dtype}, of a sharded "
            f"parameter of shape {list(into.shape)} and {into.dtype}. Convert the whole model "
            f"(model.to(...)), or change the plain model, and compile that."
        )
    refuse_copy(into, "param.data = ...")
    own = value.detach() if isinstance(value, DTensor) else sharded_like(value.detach(), into)
    _, slot = _origin(into)
    with torch.no_grad():
        if slot is not None and slot.tensor is into:
            leave(slot)
        else:  # of param.detach(), say, which the parameter does not follow
            torch_dtensors.set_local_tensor(into, torch_dtensors.local_tensor(into).clone())
        into.copy_(own)


def _deepcopied(tensor: Any, memo: dict[int, Any]) -> Any:
    """What DTensor's ``__deepcopy__`` does."""
    if id(tensor) not in memo:
        made: Any = DTensor.detach(tensor).clone()
        made = torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made
        memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


# -- writes ----------------------------------------------------------------------------------------


def _written(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> Any:
    """Run a function that writes into a parameter, on this rank's rows or on the full value.

    Args:
        tensors: those among its arguments.
    """
    name = name_of(func)
    into: Any
    into, *others = tensors
    refuse_copy(into, name)
    if name == "__setitem__" and _is_mask(args[1], into) and _is_number(args[2]):
        func, name = Tensor.masked_fill_, "masked_fill_"  # element by element
    plain = [t for t in others if not isinstance(t, DTensor) and t.dim()]
    if plain and any(place.is_partial() for place in into.placements):
        raise StepError(
            f"{name} writes a plain tensor into what was computed of a sharded parameter, and is "
            f"not summed over the ranks yet. Write it out of place (a + b for a += b)."
        )
    several = name.startswith(_LISTS)
    if several:
        for each in args[0]:
            refuse_copy(each, name)
    if name.startswith("_fused"):  # it writes states too
        return optimizer_calls.on_rows(func, args, kwargs)
    fit = all(t.shape == into.shape for t in plain)
    if several and not fit:
        raise StepError(
            f"{name} writes plain tensors into sharded parameters of other shapes. Write into the "
            f"unsharded ones: with model.summon_full_params(): ..."
        )
    if fit and (several or _is_by_element(name)):
        rows = {id(t): sharded_like(t, into) for t in plain}
        on_rows = trees.exchanged(args, rows), trees.exchanged(kwargs, rows)
        if several:
            try:
                return func(*on_rows[0], **on_rows[1])
            except NotImplementedError:  # DTensor has no rule for it
                return optimizer_calls.on_rows(func, *on_rows)
        done, found = _tried_on_shards(func, *on_rows)
        if done:
            return found
    return _written_in_full(func, args, kwargs, [into])


def _is_mask(index: Any, of: Tensor) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool and index.shape == of.shape


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _written_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function whose ``out=`` has parameters."""
    outs = [t for t in tensors_in(kwargs["out"]) if isinstance(t, DTensor)]
    for out in outs:
        refuse_copy(out, name_of(func))
    tensors = tensors_in((args, kwargs))
    if len(tensors) > len(outs) and _is_by_element(name_of(func)):
        layouts = {
            (t.shape, t.placements, t.device_mesh) if isinstance(t, DTensor) else None
            for t in tensors
        }
        if len(layouts) == 1:  # this rank's rows of each are the same ones
            return func(*args, **kwargs)
    return _written_in_full(func, args, kwargs, outs)


def _written_in_full(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: list[DTensor]
) -> Any:
    """Write into full tensors, and keep this rank's rows; collective.

    Raises:
        RankMismatchError: some ranks do something else.
        StepError: the function changes more than values.
    """
    name = name_of(func)
    for world in dict.fromkeys(map(_world, into)):
        if world is not None:
            world.together(f"{name}, which writes into a parameter")
    unsharded: dict[int, Tensor] = {}
    for tensor in into:
        with torch.no_grad():
            made = _unsharded(tensor).clone()
        unsharded[id(tensor)] = made.requires_grad_(tensor.requires_grad)  # autograd asks for that
    for read in tensors_in((args, kwargs)):
        if isinstance(read, DTensor) and id(read) not in unsharded:
            unsharded[id(read)] = _unsharded(read)
    found = func(*trees.exchanged(args, unsharded), **trees.exchanged(kwargs, unsharded))
    for tensor in into:
        full = unsharded[id(tensor)]
        if full.shape != tensor.shape or full.grad_fn is not None:
            raise StepError(
                f"{name} changes more of a sharded parameter than its values: its shape, or what "
                f"autograd knows of it. Write values, under torch.no_grad(), or inside of "
                f"model.summon_full_params()."
            )
    with torch.no_grad():
        for tensor in into:
            full, needed = unsharded[id(tensor)], tensor.requires_grad
            tensor.copy_(sharded_like(full.detach(), tensor))
            if full.requires_grad != needed:  # torch.eye(out=...) drops it
                tensor.requires_grad_(full.requires_grad)
    return trees.exchanged(found, {id(unsharded[id(tensor)]): tensor for tensor in into})


@functools.cache
@functools.cache
def _is_by_element(name: str) -> bool:
    """True for a pointwise function, or one that draws each element.

    DTensor gets some others wrong: scatter_add_ gives the parameter another shape.
    """
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in _BY_ELEMENT:
        return name != "__setitem__"
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return bool(tags & {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded})


def _marked(found: Any, unsharded: dict[int, Tensor], of: DTensor) -> Any:
    """`found`, the result of a function on unsharded tensors; views of these are marked copies."""
    known = {key for full in unsharded.values() for key in memory(full)}
    if is_array(found):
        _, slot = _origin(of)
        if slot is not None and storage_id(storage(of)) == storage_id(slot.local):
            found.flags.writeable = False  # in one process it would be the parameter's memory
        return found
    leaves, spec = trees.tree_flatten(found)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.requires_grad:
            continue
        if transforms.is_transformed(leaf):
            continue  # `as_views` marks it
        if storage_id(leaf) in known:
            mark_copy(leaf.untyped_storage())
            leaves[i] = _gathering(dtensors.replicated(leaf, of), [of])
    found = trees.tree_unflatten(leaves, spec)
    return as_views(found, unsharded.values(), place_of(of))


def _is_scalar(name: str, tensors: Sequence[Tensor]) -> bool:
    """True if a tensor becomes a Python number."""
    return name in _SCALARS and all(t.numel() == 1 for t in tensors)


def _is_mixed_sum(tensors: Sequence[Tensor]) -> bool:
    """True if a sum that is not added up over ranks meets a plain number, of a rank's loss, say.

    DTensor would multiply each rank's part by that rank's number.
    """
    plain = any(not isinstance(t, DTensor) for t in tensors)
    sums = (p for t in tensors if isinstance(t, DTensor) for p in t.placements if p.is_partial())
    return plain and any(sums)


def _is_kept(name: str) -> bool:
    """True for functions whose results stay plain DTensors, as optimizer states must."""
    likes = name.endswith("_like") or name.startswith("new_")
    return name in _KEPT or (likes and name not in _TO_FILL)


def _computes(found: Any, given: Sequence[Tensor]) -> bool:
    """True if a result of an operator on the given tensors requires a gradient, or a transform
    follows it.
    """
    known = set(map(id, given))
    follows = transforms.transforming()
    return any((follows or t.requires_grad) and id(t) not in known for t in tensors_in(found))


def _gathering(found: Any, given: Sequence[Tensor]) -> Any:
    """`found` with its DTensors made `GatheringTensor`: they may meet plain tensors next."""
    place = next((place_of(tensor) for tensor in given if hasattr(tensor, PLACE)), None)
    for tensor in tensors_in(found):
        if type(tensor) in (DTensor, CopiedPart):
            tensor.__class__ = GatheringTensor
            if place is not None:
                setattr(tensor, PLACE, place)
    return found
