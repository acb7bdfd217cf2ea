"""DTensors: what this rank holds of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import _mesh_layout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, debug
from torch.distributed.tensor._api import _FromTorchTensor, _ToTorchTensor
from torch.distributed.tensor._redistribute import Redistribute, _gen_transform_infos
from torch.distributed.tensor.placement_types import _StridedShard

from fxshard._torch.modes import is_wrapper

# What FSDP2 calls of a tensor subclass that says itself what an all-gather sends.
PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


_inner: dict[DeviceMesh, DeviceMesh] = {}  # see `joined`; DTensor puts equal meshes for each other


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, itself and not a view made for autograd (``to_local``)."""
    return tensor._local_tensor


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """`local` as the local part of a DTensor with the mesh, placements and shape of `like`.

    What FSDP2 makes its gradients with: `DTensor.from_local` costs ten times as much.
    (torch/distributed/fsdp/_fully_shard/_fsdp_common.py, ``_from_local_no_grad``)
    """
    return DTensor(local, like._spec, requires_grad=False)


def set_local_tensor(tensor: DTensor | nn.Parameter, local: torch.Tensor) -> None:
    """Give a DTensor another local tensor of the same shape and dtype."""
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local


def stand_in(local: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape, dtype and device of `local`, with storage offset 0 and no values.

    A DTensor has the storage offset of the tensor that it is made of. If that is not 0,
    `torch.save` takes the DTensor for a tensor with data, and fails. So parameters whose rows are
    inside of a larger storage are made of this, and get their rows by `set_local_tensor`.
    (torch/_tensor.py, ``_reduce_ex_internal``, asks for ``data_ptr() == 0``)
    """
    return local.new_empty(()).expand(local.shape)


def unflattened(inner: dict[str, Any], spec: Any, size: Any, stride: Any) -> DTensor:
    """A DTensor over the local tensor of another one, with storage offset 0, as that has it.

    torch's own has the offset of the local tensor, and whatever compares the two fails: fakes of
    parameters, for Dynamo (torch/_subclasses/meta_utils.py, ``MetaConverter.meta_tensor``).
    """
    local = inner["_local_tensor"]
    given = {**inner, "_local_tensor": stand_in(local)}  # a mesh too, in newer torches
    made = DTensor.__tensor_unflatten__(given, spec, size, stride)
    set_local_tensor(made, local)
    return made


def dtensor_handlers() -> dict[Any, Any]:
    """Per operator, what runs instead of DTensor's own dispatch; called with it and its arguments.

    (torch/distributed/tensor/_dispatch.py, ``OpDispatcher``; read in each call)
    """
    return DTensor._op_dispatcher._custom_op_handlers


@contextlib.contextmanager
def without_dtensor_handler(func: Any) -> Iterator[None]:
    """For the time of the block DTensor dispatches an operator itself."""
    handlers = dtensor_handlers()
    handler = handlers.pop(func, None)
    try:
        yield
    finally:
        if handler is not None:
            handlers[func] = handler


def joined(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of the dimensions of `outer`, and then those of `inner`.

    Raises:
        RuntimeError: they are not dimensions of one mesh, or have no names.
    """
    if not (outer.mesh_dim_names and inner.mesh_dim_names):
        raise RuntimeError("its dimensions have no names")
    made = DeviceMesh._concatenate([outer, inner])
    _inner.pop(made, None)  # an equal key would stay
    _inner[made] = inner
    return made


def group_id(mesh: DeviceMesh) -> str:
    """The name that functional collectives give the group of a mesh of one dimension.

    It outlives the group.
    """
    (name,) = mesh._dim_group_names
    return str(name)


def mesh_fields(mesh: DeviceMesh) -> dict[str, Any]:
    """What `mesh_of` makes an equal mesh of: numbers and names.

    (torch/distributed/device_mesh.py, ``DeviceMesh.__eq__``; torch/distributed/_mesh_layout.py)
    """
    layout: Any = mesh._layout
    if hasattr(layout, "axes"):
        axes = [(axis.shape, axis.stride) for axis in layout.axes]
    else:  # before torch 2.13
        axes = list(zip(layout.shape, layout.stride, strict=True))
    return {
        "device": mesh.device_type,
        "axes": tuple((_numbers(shape), _numbers(stride)) for shape, stride in axes),
        "ranks": tuple(mesh._rank_map.tolist()),
        "names": tuple(mesh.mesh_dim_names or ()),
        "groups": tuple(map(str, getattr(mesh, "_dim_group_names", ()))),
        "rank": int(mesh._rank),
    }


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


class _Alone(DeviceMesh):
    """A mesh in a process that is no rank: it asks none which rank it is."""

    def __init__(self, device: str, *, _rank: int, **given: Any) -> None:
        self._rank = _rank
        super().__init__(device, _rank=_rank, **given)

    def _get_mesh_tensor_from_full_mesh(  # type: ignore[override]  # torch's is static
        self, full_mesh: Tensor, current_rank: int | None = None
    ) -> Tensor:
        return super()._get_mesh_tensor_from_full_mesh(full_mesh, self._rank)

    def get_rank(self) -> int:
        return self._rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        names = self.mesh_dim_names or ()
        place = names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0
        coordinate = self.get_coordinate()
        assert coordinate is not None
        return int(coordinate[place])


def mesh_of(
    device: str,
    axes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    ranks: Sequence[int],
    names: Sequence[str],
    groups: Sequence[str],
    rank: int,
) -> DeviceMesh:
    """A mesh as `rank` has it, of what `mesh_fields` says. It makes no process groups.

    Those that it names are its groups where this process has them.

    Raises:
        ValueError: `rank` is not among `ranks`.
    """
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in {list(ranks)}")
    layout: Any
    if hasattr(_mesh_layout, "_FlatLayout"):
        layout = _mesh_layout._MeshLayout([_mesh_layout._FlatLayout(*axis) for axis in axes])
    else:  # before torch 2.13
        parts = [[part[0] if len(part) == 1 else part for part in axis] for axis in axes]
        layout = _mesh_layout._MeshLayout(*map(tuple, zip(*parts, strict=True)))
    kind = DeviceMesh if torch.distributed.is_initialized() else _Alone
    made = kind(
        str(device),
        _layout=layout,
        _rank_map=torch.tensor(ranks, dtype=torch.int),
        mesh_dim_names=tuple(names) or None,
        _init_backend=False,
        _rank=rank,
    )
    if groups:
        made._dim_group_names = list(groups)  # type: ignore[arg-type]  # a NewType of str
    return made


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a mesh in one dimension, named after its own."""
    return mesh._flatten("_".join(mesh.mesh_dim_names or ()))


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that was made as such, of which `mesh` is some dimensions."""
    return mesh._get_root_mesh()


def inner_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """The second of two meshes that were `joined`; None of any other mesh."""
    return _inner.get(mesh)


def under(placement: Placement, inner: Sequence[Placement], sizes: Sequence[int]) -> Placement:
    """`placement` of the rows that `inner`, of later dimensions of the mesh, leave a rank.

    If `inner` cut along the same dimension, what a rank has is no run of the full tensor's rows.
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``_init_sharding_spec_tp``)

    Args:
        sizes: number of ranks, of each of `inner`.
    """
    if not isinstance(placement, Shard):
        return placement
    pairs = zip(inner, sizes, strict=True)
    parts = [size for place, size in pairs if sharded_dim(place) == placement.dim]
    factor = functools.reduce(int.__mul__, parts, 1)
    return _StridedShard(placement.dim, split_factor=factor) if factor > 1 else placement


def sharded_dim(placement: Placement) -> int | None:
    """The dimension that a placement shards along; None if it does not shard.

    ``is_shard()`` is False of a `_StridedShard`.
    """
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def plain(tensor: Tensor) -> Tensor:
    """What is inside of a parameter that says what is gathered; any other tensor as it is."""
    kind: Any = type(tensor)
    if kind is Tensor or not hasattr(kind, PRE) or not is_wrapper(kind):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    found: Tensor = getattr(tensor, names[0])
    return found


def held_part(tensor: Tensor) -> Tensor:
    """What this process holds of a parameter, in its subclass, if it is of one."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a parameter: a plain tensor."""
    return plain(held_part(tensor))


def sharded_like(full: Tensor, like: Tensor) -> Tensor:
    """`full` with the placements of `like`: this rank's rows; nothing is communicated."""
    if not isinstance(like, DTensor):
        return full
    mesh = like.device_mesh
    strided = [isinstance(place, _StridedShard) for place in like.placements]
    for mesh_dim in sorted(range(mesh.ndim), key=strided.__getitem__):  # they cut what others left
        dim = sharded_dim(like.placements[mesh_dim])
        if dim is not None:
            ranks = mesh.size(mesh_dim)
            parts, _ = Shard(dim)._split_tensor(full, ranks, with_padding=False, contiguous=False)
            full = parts[mesh.get_local_rank(mesh_dim)]  # a view
    return _dtensor(full.to(local_part(like).device), like)


def _dtensor(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of `local`, with the mesh, placements, shape and strides of `like`."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def forget_meshes() -> None:
    """What DTensor remembers of operators it works out again.

    It remembers results with their mesh, and takes an equal mesh for the same one, whose process
    groups may be those of another time. (torch/distributed/tensor/debug/__init__.py, and
    _redistribute.py)
    """
    debug._clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()


def is_dtensor(tensor: Tensor) -> bool:
    """True of DTensors."""
    return isinstance(tensor, DTensor)


def constants_of(tensor: Tensor) -> tuple[Any, ...]:
    """Mesh, placements, shape and strides of a DTensor: all that it is but its local tensor.

    Of another tensor there are none.
    """
    if not isinstance(tensor, DTensor):
        return ()
    return (id(tensor.device_mesh), repr(tensor.placements), tuple(tensor.shape), tensor.stride())


# The autograd functions of DTensor (torch/distributed/tensor/_api.py, _redistribute.py).
FUNCTIONS: tuple[Any, ...] = (_FromTorchTensor, _ToTorchTensor, Redistribute)


def is_of_dtensor(node: Any) -> bool:
    """True if an autograd node of a custom function is one of `FUNCTIONS`."""
    return type(node)._forward_cls in FUNCTIONS


@contextlib.contextmanager
def applied(listener: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """For the time of the block `listener` is called with each call of `FUNCTIONS`.

    Collectives are waited for where they are called, as in a trace.
    """
    with contextlib.ExitStack() as stack:
        for function in FUNCTIONS:
            stack.enter_context(_told(function, listener))
        before = functional_collectives._are_we_tracing
        functional_collectives._are_we_tracing = lambda: True
        try:
            yield
        finally:
            functional_collectives._are_we_tracing = before


@contextlib.contextmanager
def _told(function: Any, listener: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    apply = function.apply

    def told(*args: Any) -> Any:
        listener(function.__name__, args)
        return apply(*args)

    function.apply = told
    try:
        yield
    finally:
        del function.apply
