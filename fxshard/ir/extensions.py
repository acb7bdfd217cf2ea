"""Parameters of tensor subclasses that say themselves what is gathered: FSDP2's extension point.

A subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` makes what an all-gather sends
of its shard (fewer bytes, say), and the unsharded parameter of what arrives. Both functions are
traced, once per number of ranks: their operators become nodes of the program.
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``all_gather_inputs`` and
``init_unsharded_param``)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard._torch import fake_tensors, modes, trees
from fxshard._torch.dtensors import POST, PRE, local_tensor
from fxshard.config.precision import Precision
from fxshard.errors import UnitError
from fxshard.ir import tags
from fxshard.ir.layout import gathered, padding, part

GROUP = "fxshard::shard"  # the name that collectives of a traced function give their group

CPU = torch.device("cpu")

_functional = torch.ops._c10d_functional
ALL_REDUCE, WAIT = _functional.all_reduce.default, _functional.wait_tensor.default


@dataclasses.dataclass(frozen=True)
class ParameterForm:
    """What an unsharded parameter is.

    Attributes:
        dtype: of it, and so of its gradient.
        inner: names of the tensors inside of it; empty if it is a plain tensor.
        kind, context: of a subclass, what it is made of them with.
    """

    dtype: torch.dtype
    inner: tuple[str, ...] = ()
    kind: Any = None
    context: Any = None

    def around(self, inner: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """The unsharded parameter that is made of these tensors."""
        if not self.inner:
            return inner[0]
        stride = torch.empty(shape, device="meta").stride()
        held = dict(zip(self.inner, inner, strict=True))
        made: Tensor = self.kind.__tensor_unflatten__(held, self.context, torch.Size(shape), stride)
        return made


@dataclasses.dataclass(frozen=True)
class TracedExtension:
    """The two functions of a parameter, for a number of ranks.

    Attributes:
        pre: shard -> the tensors to send, and those that `post` needs of this rank.
        post: what was gathered of the former, and the latter -> what the unsharded parameter is
            made of: itself, or the tensors inside of it.
        sent: how many tensors are sent.
        form: of the unsharded parameter.
    """

    pre: fx.Graph
    post: fx.Graph
    sent: int
    form: ParameterForm

    @property
    def results(self) -> list[Tensor]:
        """Fake ones of the results of `post`."""
        return [node.meta["val"] for node in _results(self.post)]


@dataclasses.dataclass(frozen=True, eq=False)
class Extension:
    """A parameter of a tensor subclass that takes part in its all-gather.

    Attributes:
        fqn: of the parameter.
        kind: its class.
        inner: name of the tensor inside of it, which is what is sharded.
        context: the rest of it (``__tensor_flatten__``).
        shape, dtype: of the parameter, on all ranks together.
        module: that holds it.
        policy: the mixed precision of its unit.
    """

    fqn: str
    kind: Any
    inner: str
    context: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: nn.Module = dataclasses.field(repr=False)
    policy: MixedPrecisionPolicy = dataclasses.field(default_factory=MixedPrecisionPolicy)
    _traces: dict[Any, TracedExtension] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    _meshes: dict[int, DeviceMesh] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Extension:
        """Itself: nothing of it changes."""
        return self

    def __reduce__(self) -> Any:
        """For pickle: without what was traced."""
        return Extension, tuple(
            getattr(self, field.name) for field in dataclasses.fields(self) if field.init
        )

    def computing_in(self, precision: Precision) -> Extension:
        """The same in a unit of that precision."""
        policy = MixedPrecisionPolicy(
            precision.param_dtype,
            precision.reduce_dtype,
            precision.output_dtype,
            precision.cast_inputs,
        )
        return dataclasses.replace(self, policy=policy)

    def around(self, inner: Tensor) -> Tensor:
        """The subclass around rows of what is inside of it; nothing is copied."""
        made = self.kind.__tensor_unflatten__(
            {self.inner: inner}, self.context, inner.size(), inner.stride()
        )
        if type(made) is not self.kind or made.shape != inner.shape or made.dtype != inner.dtype:
            raise self._error(
                f"its __tensor_unflatten__ makes a {type(made).__name__} {list(made.shape)} "
                f"{made.dtype} of a tensor {list(inner.shape)} {inner.dtype}"
            )
        return made

    @functools.cached_property
    def form(self) -> ParameterForm:
        """Of the unsharded parameter, which no number of ranks changes (`traced` checks it)."""
        return self.traced(1).form

    def require_rows(self, shard_dim: int) -> None:
        """Raises UnitError if it is not sharded by rows."""
        if shard_dim:
            raise self._error(f"it is sharded along dimension {shard_dim}, and only rows are sent")

    def require_even(self, ranks: int) -> None:
        """Raises UnitError if the ranks do not have as many rows each."""
        if padding(self.shape[0], ranks):
            raise self._error(
                f"its {self.shape[0]} rows are not a multiple of the {ranks} ranks, and what "
                f"{PRE} would make of padding nobody knows. Give it rows that {ranks} divides"
            )

    @property
    def in_backward(self) -> UnitError:
        """Why no program steps it."""
        return UnitError(
            f"parameter {self.fqn!r} is a {self.kind.__name__}, whose operators an optimizer's "
            f"step runs, with memory that no plan knows inside of backward. Leave "
            f"optimizer_in_backward out."
        )

    def traced(self, ranks: int, device: torch.device = CPU) -> TracedExtension:
        """Both functions over a number of ranks.

        Args:
            device: where they run.

        Raises:
            UnitError: they are not what FSDP2 takes, or cannot be traced.
        """
        key = ranks, device.type
        if key not in self._traces:
            self.require_even(ranks)
            self._traces[key] = found = self._trace(ranks, device)
            if ranks > 1 and (found.form.dtype, found.form.inner) != (
                self.form.dtype,
                self.form.inner,
            ):
                raise self._error(f"over {ranks} ranks {POST} makes another kind of tensor")
        return self._traces[key]

    def shared_over(self, mesh: DeviceMesh) -> None:
        """Note the mesh of the ranks that share the parameter, in its last dimension."""
        self._meshes[mesh.size(mesh.ndim - 1)] = mesh

    # -- the trace ---------------------------------------------------------------------------------

    def _trace(self, ranks: int, device: torch.device) -> TracedExtension:
        mode = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
        own = part(self.shape, ranks)
        found: dict[str, Any] = {}

        def pre(shard: Tensor) -> list[Tensor]:
            sent, metadata = self._pre(self.around(shard), ranks)
            leaves, found["spec"] = trees.tree_flatten(metadata)
            found["constants"] = [None if isinstance(x, Tensor) else (x,) for x in leaves]
            found["sent"] = len(sent)
            kept = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            for tensor in kept:
                self._require_plain(tensor, f"the metadata of {PRE}")
            return [*(t.reshape(1) if t.dim() == 0 else t.contiguous() for t in sent), *kept]

        def post(*tensors: Tensor) -> list[Tensor]:
            kept = iter(tensors[found["sent"] :])
            leaves = [next(kept) if held is None else held[0] for held in found["constants"]]
            metadata = trees.tree_unflatten(leaves, found["spec"])
            made = self._post(self.around(shard), tensors[: found["sent"]], metadata)
            form, inner = self._taken_apart(made)
            found["form"] = form
            return inner

        shard = fake_tensors.fake_empty(mode, own, self.dtype, device)
        with self._explained(), torch.no_grad(), modes.outside_autocast(), mode:
            first = self._checked(make_fx(pre)(shard).graph, PRE)
            made = [node.meta["val"] for node in _results(first)]
            sent, kept = made[: found["sent"]], made[found["sent"] :]
            arrived = [t.new_empty(gathered(t.shape, ranks)) for t in sent]
            second = self._checked(make_fx(post)(*arrived, *kept).graph, POST)
        return TracedExtension(first, second, found["sent"], found["form"])

    def _pre(self, tensor: Any, ranks: int) -> tuple[Sequence[Tensor], Any]:
        call = getattr(tensor, PRE)
        count = len(inspect.signature(call).parameters)
        mesh = _Mesh(ranks, self._meshes.get(ranks))
        if count not in (1, 5):
            raise self._error(
                f"{PRE}{inspect.signature(call)} takes {count} arguments; FSDP2 gives it one "
                f"(mesh) or five (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        size, stride = torch.Size(self.shape), torch.empty(self.shape, device="meta").stride()
        more = (size, stride, self.module, self.policy) if count == 5 else ()
        with _as_on_ranks():
            made = call(mesh, *more)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list))):
            raise self._error(f"{PRE} returns no (tuple of tensors, metadata)")
        sent, metadata = made
        if not sent:
            raise self._error(f"{PRE} returns nothing to gather")
        for each in sent:
            self._require_plain(each, f"what {PRE} returns")
        return sent, metadata

    def _post(self, tensor: Any, arrived: Sequence[Tensor], metadata: Any) -> Any:
        dtype = self.policy.param_dtype if self.dtype.is_floating_point else None
        with _as_on_ranks():
            made = getattr(tensor, POST)(tuple(arrived), metadata, dtype or self.dtype)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor)):
            raise self._error(f"{POST} without out= returns no (tensor, inner tensors)")
        unsharded = made[0]
        if tuple(unsharded.shape) != self.shape:
            raise self._error(
                f"{POST} makes a tensor {list(unsharded.shape)} of a parameter {list(self.shape)}"
            )
        return unsharded

    def _taken_apart(self, made: Any) -> tuple[ParameterForm, list[Tensor]]:
        """Of an unsharded parameter: its form, and the tensors that it is made of."""
        if not modes.is_wrapper(type(made)):
            self._require_plain(made, f"what {POST} makes")
            if not made.is_contiguous():
                raise self._error(f"{POST} makes a tensor that is not contiguous")
            return ParameterForm(made.dtype), [made]
        names, context = made.__tensor_flatten__()
        inner = [getattr(made, name) for name in names]
        for each in inner:
            self._require_plain(each, f"what is inside of the {type(made).__name__} of {POST}")
        return ParameterForm(made.dtype, tuple(names), type(made), context), inner

    def _require_plain(self, tensor: Any, what: str) -> None:
        plain = isinstance(tensor, Tensor) and type(tensor) in _PLAIN
        if not plain or tensor.layout is not torch.strided:
            raise self._error(f"{what} is a {type(tensor).__name__}, no plain dense tensor")

    def _checked(self, graph: fx.Graph, function: str) -> fx.Graph:
        """`graph` without dead code; refuses what a program could not repeat."""
        graph.eliminate_dead_code()
        given = set().union(*map(tags.storage_ids, graph.find_nodes(op="placeholder")))
        for node in graph.nodes:
            if node.op == "get_attr":
                raise self._error(
                    f"{function} computes with a tensor from elsewhere than its arguments, or made "
                    f"of Python's numbers. Let it compute with numbers, or with torch.full"
                )
            if node.op != "call_function":
                continue
            if tags.is_random(node):
                raise self._error(f"{function} draws random numbers ({node.target})")
            if tags.writes(node) and tags.storage_ids(node) & given:
                raise self._error(f"{function} writes into what it was given ({node.target})")
            namespace = str(node.target).partition(".")[0]
            if namespace in ("_c10d_functional", "c10d") and (
                function == POST or node.target not in (ALL_REDUCE, WAIT)
            ):
                raise self._error(f"{function} communicates by {node.target}")
            if node.target is ALL_REDUCE and not (
                node.args[1] in _REDUCED and node.args[2] in self._groups()
            ):
                raise self._error(f"{function} communicates by {node.target}{node.args[1:]}")
        return graph

    def _groups(self) -> set[str]:
        """Names of the group that collectives of the two functions may run in."""
        real = (_Mesh(0, mesh).get_group() for mesh in self._meshes.values())
        return {GROUP, *(group.group_name for group in real)}

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UnitError:
            raise
        except Exception as error:
            lines = str(error).splitlines() or [""]
            raise self._error(
                f"its {PRE} or {POST} cannot be traced: {type(error).__name__}: {lines[0]}"
            ) from error

    def _error(self, what: str) -> UnitError:
        return UnitError(
            f"parameter {self.fqn!r} is a {self.kind.__name__}: {what}. Programs hold both "
            f"functions as operators, for any step and rank alike. Change them, or use "
            f"torch.distributed.fsdp.fully_shard."
        )


_PLAIN = (Tensor, nn.Parameter, fake_tensors.FakeTensor)
_REDUCED = ("max", "min", "sum", "avg")


def extension_of(fqn: str, tensor: Tensor, module: nn.Module) -> Extension | None:
    """What a parameter says of its all-gather; None if its class says nothing.

    Args:
        fqn: of the parameter.
        tensor: it, sharded or not.
        module: that holds it.

    Raises:
        UnitError: its class has one of the two functions, or is not one plain tensor inside.
    """
    held: Any = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    have = [name for name in (PRE, POST) if hasattr(held, name)]
    if not have:
        return None
    name = f"parameter {fqn!r} is a {type(held).__name__}"
    if len(have) == 1:
        raise UnitError(f"{name} with {have[0]} alone: FSDP2 takes {PRE} and {POST}. Define both.")
    if not modes.is_wrapper(type(held)):
        raise UnitError(
            f"{name} that has its data in itself, and no __tensor_flatten__. Keep the data in a "
            f"tensor inside of it (torch.Tensor._make_wrapper_subclass)."
        )
    names, context = held.__tensor_flatten__()
    inner = [getattr(held, name) for name in names]
    alike = len(inner) == 1 and type(inner[0]) in _PLAIN and _kind(inner[0]) == _kind(held)
    if not alike:
        has = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in zip(names, inner, strict=True))
        raise UnitError(
            f"{name} {list(held.shape)} {held.dtype} around {has}: fxshard shards one plain tensor "
            f"of the parameter's own shape and dtype. Let {PRE} make what else is to be sent; take "
            f"frozen weights apart (fxshard.integrations.quantized.packed(model)); or use "
            f"torch.distributed.fsdp.fully_shard."
        )
    made = Extension(fqn, type(held), names[0], context, tuple(tensor.shape), tensor.dtype, module)
    return made


def has_extension(tensor: Tensor) -> bool:
    """True if the class of a tensor has one of the two functions."""
    return hasattr(type(tensor), PRE) or hasattr(type(tensor), POST)


def drop_computed_scale(held: Any) -> None:
    """Take the scale off a weight that torchao has computed for its next all-gather.

    ``precompute_float8_dynamic_scale_for_fsdp`` puts it there. In a program each all-gather
    computes it, of the same numbers, as does a model in one process, where that function does
    nothing. A scale that is older than the weight counts for neither.
    (torchao/float8/fsdp_utils.py, ``WeightWithDynamicFloat8CastTensor``)
    """
    if type(held).__module__ == "torchao.float8.fsdp_utils":
        held._precomputed_scale = None


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device


def _results(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


@contextlib.contextmanager
def _as_on_ranks() -> Iterator[None]:
    """What is traced communicates as it does on ranks, also where no process group is there."""
    before: Callable[[], bool] = dist.is_initialized
    dist.is_initialized = lambda: True
    try:
        yield
    finally:
        dist.is_initialized = before


class _Mesh(DeviceMesh):
    """The mesh of the ranks that share a parameter, as all of them see it: without a rank.

    Of a hybrid strategy, the last dimension of the mesh. Where there is no process group, only its
    size is known.
    """

    def __init__(self, ranks: int, real: DeviceMesh | None) -> None:
        self._ranks, self._real = ranks, real

    def size(self, mesh_dim: int | None = None) -> int:
        return self._ranks

    @property
    def ndim(self) -> int:
        return 1

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The name of its dimension, if it has one."""
        names = self._real.mesh_dim_names if self._real is not None else None
        return names[-1:] if names else None

    @property
    def device_type(self) -> str:
        """Of the ranks."""
        return self._real.device_type if self._real is not None else "cpu"

    def get_group(self, mesh_dim: Any = None) -> Any:
        """What functional collectives take for a group."""
        return GROUP if self._real is None else self._real.get_group(self._real.ndim - 1)

    def get_rank(self) -> int:
        raise RuntimeError("it asks for its rank, and one program runs on all ranks")

    get_local_rank = get_rank  # type: ignore[assignment]
    get_coordinate = get_rank  # type: ignore[assignment]
