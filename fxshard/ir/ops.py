"""The ``fxshard::`` operators of a rewritten graph: one entry each, with all that is known of them.

Verifier, liveness, code generation, worlds, cost and dump read the entry. So a new operator takes
one `define`, and a method of its name on each world that is to run it (`fxshard.runtime.world`);
operators have no kernel of their own.

Those called ``model_*`` are the collectives that a model calls itself, those of tensor parallelism
among them: what they make are activations, which end with their last reader. So do the copies of
saved activations that `offload` and `reload` make.

The first argument is the list of operands. `group` names the ranks that take part: "shard" (those
that share a parameter), "replicate" (those that hold the same shard), "reshard<n>" (n neighbours);
on another mesh than the model's, with its name (`fxshard.ir.layout.Grid.group`). `size` is their
number. That of a ``model_*`` operator is a name for people, such as "tp", and its stream's; `ranks`
is torch's name of the group on this rank, `stride` how far two neighbours in it are apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fxshard._torch.export import OpOverload
from fxshard._torch.operators import schema_of
from fxshard._torch.traced_collectives import is_collective
from fxshard.ir import tags
from fxshard.ir.layout import gathered, part, unpacked, with_rows

Empty = Callable[..., Tensor]  # makes an empty tensor like another: (like, shape, dtype=, device=)


def _nothing(empty: Empty, *args: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """What is known of an operator.

    Attributes:
        schema: name, arguments and results. A world's method of that name takes the operands and
            the other arguments but `size`: `C10dWorld` those of its rank, and `pair` of what is
            asynchronous; `InProcessWorld` those of each rank of the group, and no `group`.
        fake: what it gives: ``(empty, *arguments)``; what it allocates is made by ``empty``.
        role: of its nodes.
        text: the operation in the schedule's dump and in timelines, if it is not the name.
        stream: where it runs. On any but the compute stream it is asynchronous. "" is the stream
            of its group (see `stream_of`).
        event: of what is asynchronous, the letter of the events that it records.
        prepares: its results may be what a later launch sends, whose wait is then theirs too.
        in_place: whether its results are its operands; "alone": in a group of one rank.
        category: name of the `fxshard.memory.category.Category` of what it makes.
        on_host: what it makes lies in memory of the CPU.
        grows: results have ``size ** grows`` times the rows of the operands.
        of_model: the model calls it.
        of_activations: it copies saved activations to the CPU, or back.
        over: what its bytes go over; "nothing": it neither reads nor writes data.
        passes: of a collective, rounds of a ring: 2 for an all-reduce, else 1.
        gloo: of a collective, what gloo copies of it while it runs.
    """

    schema: str
    fake: Callable[..., Any] = _nothing
    role: tags.Role = "transfer"
    text: str = ""
    stream: tags.Stream = "compute"
    event: str = ""
    prepares: bool = False
    in_place: Literal["never", "alone", "always"] = "never"
    category: str = ""
    on_host: bool = False
    grows: int = 0
    of_model: bool = False
    of_activations: bool = False
    over: Literal["network", "host", "memory", "nothing"] = "memory"
    passes: int = 1
    gloo: Literal["operands", "results", "nothing"] = "nothing"

    @property
    def name(self) -> str:
        """``all_gather``."""
        return self.schema.partition("(")[0]

    @property
    def operation(self) -> str:
        """What dump and timeline call it: ``unshard``, ``all-reduce``."""
        return self.text or self.name.replace("_", "-")

    @property
    def collective(self) -> bool:
        """Several ranks take part."""
        return self.over == "network"

    @property
    def asynchronous(self) -> bool:
        """It runs on a stream of its own."""
        return self.stream != "compute"

    @property
    def holds(self) -> bool:
        """It moves activations: they end with their last reader, without a free, and what it takes
        is held by its wait.
        """
        return self.of_model or self.of_activations


PLACE_OF_RANKS = 3  # of the argument `ranks` of a collective of the model's
OPERATORS: dict[Any, OpSpec] = {}  # by what a node calls
_BY_ID: dict[int, OpSpec] = {}  # for `of`: torch hashes its operators in Python
_COMPUTE = OpSpec("", role="compute", text="compute")  # of an operator that is none of ours
_LIBRARY = torch.library.Library("fxshard", "DEF")


def define(spec: OpSpec) -> Any:
    """Add an operator; returns what a node calls: ``torch.ops.fxshard.NAME.default``.

    Raises:
        ValueError: another operator has its letter for events, or it needs one.
    """
    if spec.asynchronous != (len(spec.event) == 1) or spec.event in ("c", *_letters()):
        raise ValueError(f"{spec.name}: {spec.event!r} is no letter for its events")
    _LIBRARY.define(spec.schema)
    fake = functools.partial(spec.fake, Tensor.new_empty)
    torch.library.register_fake(f"fxshard::{spec.name}", fake, lib=_LIBRARY)
    target = getattr(torch.ops.fxshard, spec.name).default
    OPERATORS[target] = _BY_ID[id(target)] = spec
    return target


def _letters() -> list[str]:
    return [spec.event for spec in OPERATORS.values() if spec.event]


def of(node: fx.Node) -> OpSpec:
    """The entry of the operator that `node` calls; that of compute if it is not one of ours."""
    return _BY_ID.get(id(node.target), _COMPUTE)


def ends(node: fx.Node) -> bool:
    """True if what `node` takes is there no more afterwards: it frees or keeps it."""
    return of(node).role == "free"


def stream_of(node: fx.Node) -> tags.Stream:
    """Where `node` runs: a collective of the model's on the stream of its group, "tp"."""
    return of(node).stream or str(group(node))


def communicates(node: fx.Node) -> bool:
    """True if `node` is a collective: one of ours, or one that the model calls itself."""
    return of(node).collective or is_collective(node)


def makes(target: Any, args: tuple[Any, ...], empty: Empty) -> Any:
    """What an operator gives back for `args`, with `empty` for what it allocates.

    Args:
        empty: ``(like, shape, dtype=like.dtype, device=like.device)``.
    """
    return OPERATORS[target].fake(empty, *args)


def given(node: fx.Node) -> dict[str, Any]:
    """The arguments that `node` gives an operator of ours after the operands, by name."""
    names = [argument.name for argument in schema_of(node.target).arguments]
    return {**node.kwargs, **dict(zip(names[1:], node.args[1:], strict=False))}


def argument(node: fx.Node, name: str) -> Any:
    """The argument of an operator by its name, or its default; None if it has no such argument."""
    if not isinstance(node.target, OpOverload):
        return None
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, argument.default_value)
    return None


def group(node: fx.Node) -> str | None:
    """The ranks that take part in an operator of ours; None: each rank runs it by itself."""
    if node.target not in OPERATORS:
        return None
    return argument(node, "group") or ("shard" if of(node).collective else None)


# -- what they give -------------------------------------------------------------------------------


def _all_gather(empty: Empty, shards: list[Tensor], size: int, group: str = "") -> list[Tensor]:
    return [empty(s, gathered(s.shape, size)) for s in shards]


def _reduce_scatter(
    empty: Empty, grads: list[Tensor], size: int, group: str = "", op: str = ""
) -> list[Tensor]:
    return [empty(g, part(g.shape, size)) for g in grads]


def _all_reduce(
    empty: Empty, grads: list[Tensor], size: int, group: str = "", op: str = ""
) -> list[Tensor]:
    return list(grads)


def _alike(empty: Empty, tensors: list[Tensor], size: int, *rest: Any) -> list[Tensor]:
    return [empty(t, t.shape) for t in tensors]


def _model_all_gather(empty: Empty, tensors: list[Tensor], size: int, *rest: Any) -> list[Tensor]:
    return [empty(t, gathered(t.shape, size)) for t in tensors]


def _model_reduce_scatter(
    empty: Empty, tensors: list[Tensor], size: int, *rest: Any
) -> list[Tensor]:
    return [empty(t, part(t.shape, size)) for t in tensors]


def _model_all_to_all(
    empty: Empty,
    tensors: list[Tensor],
    size: int,
    group: str,
    ranks: str,
    into: Sequence[int],
    sent: Sequence[int],
    *rest: Any,
) -> list[Tensor]:
    return [empty(t, (sum(into), *t.shape[1:])) for t in tensors]


def _comm_hook(empty: Empty, grads: list[Tensor], size: int) -> list[Tensor]:
    return list(grads) if size == 1 else [empty(g, part(g.shape, size)) for g in grads]


def _cast(empty: Empty, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [empty(t, t.shape, dtype=dtype) for t in tensors]


def _load(empty: Empty, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    return [empty(t, t.shape, device=device) for t in tensors]


def _store(empty: Empty, tensors: list[Tensor]) -> list[Tensor]:
    return [empty(t, t.shape, device=torch.device("cpu")) for t in tensors]


def _offload(empty: Empty, tensors: list[Tensor]) -> list[Tensor]:
    return [_laid_out(empty, t, torch.device("cpu")) for t in tensors]


def _reload(empty: Empty, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    return [_laid_out(empty, t, device) for t in tensors]


def _laid_out(empty: Empty, dense: Tensor, device: torch.device) -> Tensor:
    """As ``torch.empty_like`` does, with the dimensions of a dense tensor in their order."""
    strides = dense.stride()
    order = sorted(range(dense.dim()), key=lambda dim: (-strides[dim], dim))
    made = empty(dense, [dense.shape[dim] for dim in order], device=device)
    if order == sorted(order):
        return made
    return made.permute([order.index(dim) for dim in range(dense.dim())])


def _pack(empty: Empty, shards: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [empty(shards[0], (sum(s.numel() for s in shards),), dtype=dtype)]


def _kept(
    empty: Empty,
    shards: list[Tensor],
    params: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    both = zip(shards, shapes, strict=True)
    return [empty(shard, shape, dtype=dtype, device=device) for shard, shape in both]


def _unpack(
    empty: Empty,
    packed: list[Tensor],
    size: int,
    chunks: list[list[int]],
    dims: Sequence[int] = (),
    lengths: Sequence[int] = (),
) -> list[Tensor]:
    return [empty(packed[0], shape) for shape in unpacked(size, chunks, dims, lengths)]


def _grad_norms(
    empty: Empty, grads: list[Tensor], params: Sequence[str], squared: bool, dtype: torch.dtype
) -> list[Tensor]:
    return [empty(grads[0], (len(grads),), dtype=dtype)]


def _reshard(
    empty: Empty,
    buffers: list[Tensor],
    size: int,
    group: str,
    dims: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> list[Tensor]:
    if not dims:
        return [empty(b, part(b.shape, size)) for b in buffers]
    every = zip(buffers, dims, rows, strict=True)
    return [empty(b, with_rows(b.shape, dim, count)) for b, dim, count in every]


# -- the table ------------------------------------------------------------------------------------

# One padded shard ``[chunk, ...]`` per parameter in, one fresh buffer ``[size * chunk, ...]`` per
# parameter out, all of one dtype. The buffer *is* the unsharded parameter (rank r wrote rows
# r*chunk onward), so nothing is copied out; padding rows are cut off by a view.
all_gather: Any = define(
    OpSpec(
        "all_gather(Tensor[] shards, int size, str group='shard') -> Tensor[]",
        fake=_all_gather,
        role="unshard",
        text="unshard",
        stream="unshard",
        event="u",
        category="ALL_GATHER",
        grows=1,
        over="network",
        gloo="results",
    )
)
# One contiguous ``[size * chunk, ...]`` gradient per parameter in, one fresh ``[chunk, ...]`` out,
# reduced by `op`, all of one dtype.
reduce_scatter: Any = define(
    OpSpec(
        "reduce_scatter(Tensor[] grads, int size, str group='shard', str op='avg') -> Tensor[]",
        fake=_reduce_scatter,
        role="reduce",
        text="reduce",
        stream="reduce",
        event="r",
        category="SHARDED_GRAD",
        grows=-1,
        over="network",
        gloo="operands",
    )
)
# Gradients are reduced over the group in place; the results are the operands.
all_reduce: Any = define(
    OpSpec(
        "all_reduce(Tensor[] grads, int size, str group='replicate', str op='avg') -> Tensor[]",
        fake=_all_reduce,
        role="reduce",
        stream="all-reduce",
        event="a",
        in_place="always",
        category="SHARDED_GRAD",
        over="network",
        passes=2,
        gloo="operands",
    )
)
# What `fsdp_pre_all_gather` reduces over the ranks before it makes what is sent: fresh tensors. The
# compute stream waits for them at once.
reduce_now: Any = define(
    OpSpec(
        "reduce_now(Tensor[] tensors, int size, str group='shard', str op='max') -> Tensor[]",
        fake=_alike,
        role="transfer",
        category="ALL_GATHER",
        over="network",
        passes=2,
        gloo="operands",
    )
)
# What a model calls itself (`fxshard.passes.launch_collectives`): one contiguous tensor in, a fresh
# one out; rows of all ranks.
model_all_gather: Any = define(
    OpSpec(
        "model_all_gather(Tensor[] tensors, int size, str group, str ranks, int stride=1) "
        "-> Tensor[]",
        fake=_model_all_gather,
        text="all-gather",
        stream="",
        event="g",
        category="COMMUNICATION",
        grows=1,
        of_model=True,
        over="network",
        gloo="results",
    )
)
# This rank's rows of the reduction.
model_reduce_scatter: Any = define(
    OpSpec(
        "model_reduce_scatter(Tensor[] tensors, int size, str group, str ranks, str op, "
        "int stride=1) -> Tensor[]",
        fake=_model_reduce_scatter,
        text="reduce-scatter",
        stream="",
        event="d",
        category="COMMUNICATION",
        grows=-1,
        of_model=True,
        over="network",
        gloo="operands",
    )
)
# A reduced copy.
model_all_reduce: Any = define(
    OpSpec(
        "model_all_reduce(Tensor[] tensors, int size, str group, str ranks, str op, int stride=1) "
        "-> Tensor[]",
        fake=_alike,
        text="all-reduce",
        stream="",
        event="m",
        category="COMMUNICATION",
        of_model=True,
        over="network",
        passes=2,
    )
)
# Each rank gets `into[r]` rows of rank r, and sends it `sent[r]`; `rank`: this one in the group.
model_all_to_all: Any = define(
    OpSpec(
        "model_all_to_all(Tensor[] tensors, int size, str group, str ranks, int[] into, "
        "int[] sent, int rank=0, int stride=1) -> Tensor[]",
        fake=_model_all_to_all,
        text="all-to-all",
        stream="",
        event="x",
        category="COMMUNICATION",
        of_model=True,
        over="network",
    )
)
# A copy of what the rank `root` (of all) has.
model_broadcast: Any = define(
    OpSpec(
        "model_broadcast(Tensor[] tensors, int size, str group, str ranks, int root, "
        "int stride=1) -> Tensor[]",
        fake=_alike,
        text="broadcast",
        stream="",
        event="o",
        category="COMMUNICATION",
        of_model=True,
        over="network",
    )
)
# The user's function reduces one flat tensor, all gradients of a unit, rank by rank: ``[size * n]``
# in, a fresh ``[n]`` out.
comm_hook: Any = define(
    OpSpec(
        "comm_hook(Tensor[] grads, int size) -> Tensor[]",
        fake=_comm_hook,
        role="reduce",
        stream="reduce",
        event="h",
        in_place="alone",
        category="SHARDED_GRAD",
        grows=-1,
        over="network",
        gloo="operands",
    )
)
# A launch, or what an all-gather sends: fresh copies in another dtype.
cast: Any = define(
    OpSpec(
        "cast(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
        fake=_cast,
        role="unshard",
        stream="unshard",
        event="k",
        prepares=True,
        category="ALL_GATHER",
    )
)
# The same on the device of compute.
load: Any = define(
    OpSpec(
        "load(Tensor[] tensors, Device device) -> Tensor[]",
        fake=_load,
        role="unshard",
        stream="load",
        event="l",
        prepares=True,
        category="ALL_GATHER",
        over="host",
    )
)
# Fresh copies on the CPU.
store: Any = define(
    OpSpec(
        "store(Tensor[] tensors) -> Tensor[]",
        fake=_store,
        role="reduce",
        stream="store",
        event="s",
        category="SHARDED_GRAD",
        on_host=True,
        over="host",
    )
)
# Saved activations, dense ones, in memory of the CPU from forward to backward: fresh copies, which
# are laid out in the same way. They share the streams of parameters that are offloaded: all of them
# go over the same link.
offload: Any = define(
    OpSpec(
        "offload(Tensor[] tensors) -> Tensor[]",
        fake=_offload,
        stream="store",
        event="f",
        category="ACTIVATION",
        on_host=True,
        of_activations=True,
        over="host",
    )
)
# The same back on the device of compute.
reload: Any = define(
    OpSpec(
        "reload(Tensor[] tensors, Device device) -> Tensor[]",
        fake=_reload,
        stream="load",
        event="e",
        category="ACTIVATION",
        of_activations=True,
        over="host",
    )
)
# What an all-gather sends: one fresh flat tensor ``[n]`` in a dtype, the concatenated shards of
# small parameters.
pack: Any = define(
    OpSpec(
        "pack(Tensor[] shards, ScalarType dtype) -> Tensor[]",
        fake=_pack,
        role="unshard",
        stream="unshard",
        event="p",
        prepares=True,
        category="ALL_GATHER",
    )
)
# From a gathered buffer of ``size * n`` elements, after its wait: one fresh ``[size * chunk, ...]``
# per parameter. These are the unsharded parameters. Of those that are cut along another dimension
# than 0 (`dims`), each rank's rows lie at the beginning of its chunk; `lengths` are the numbers of
# rows of all ranks, without padding (along dimension 0, with it).
unpack: Any = define(
    OpSpec(
        "unpack(Tensor[] packed, int size, int[][] chunks, int[] dims=[], int[] lengths=[]) "
        "-> Tensor[]",
        fake=_unpack,
        role="unpack",
        category="UNSHARDED_PARAM",
    )
)
# This rank's ``1/size`` of the rows of each buffer, in fresh tensors. Where one is cut along
# another dimension than 0, `dims` are the dimensions and `rows` how many a rank gets, with padding.
reshard: Any = define(
    OpSpec(
        "reshard(Tensor[] buffers, int size, str group, int[] dims=[], int[] rows=[]) -> Tensor[]",
        fake=_reshard,
        role="reshard",
        category="SHARDED_PARAM",
        grows=-1,
    )
)
# The compute stream waits for the launch that these tensors belong to.
wait: Any = define(OpSpec("wait(Tensor[] tensors) -> ()", role="wait", over="nothing"))
# Free the storage of these tensors now, even if something still refers to them.
free: Any = define(OpSpec("free(Tensor[] tensors) -> ()", role="free", over="nothing"))
# In place of a free: the caller keeps these unsharded parameters, by name, until the next forward.
# Like a step, it is bound by the caller (`fxshard.codegen.emit.Executor.bind`).
keep: Any = define(
    OpSpec("keep(Tensor[] tensors, str[] params) -> ()", role="free", text="keep", over="nothing")
)
# In place of an all-gather: what the caller has kept of the parameters of these shards, with
# padding. Nothing moves. Bound by the caller too.
kept: Any = define(
    OpSpec(
        "kept(Tensor[] shards, str[] params, int[][] shapes, ScalarType dtype, Device device) "
        "-> Tensor[]",
        fake=_kept,
        role="unshard",
        stream="unshard",
        event="t",
        category="UNSHARDED_PARAM",
        over="nothing",
    )
)
# Other ranks read these unsharded parameters, so that this one gathers them too: it does nothing.
join: Any = define(OpSpec("join(Tensor[] params) -> ()", role="join", over="nothing"))
# The 2-norms of this rank's rows of the sharded gradients of `params`, in one fresh tensor ``[n]``;
# where ranks share parameters, squared: to be summed up. Bound by the caller, who knows which rows
# are padding.
grad_norms: Any = define(
    OpSpec(
        "grad_norms(Tensor[] grads, str[] params, bool squared, ScalarType dtype) -> Tensor[]",
        fake=_grad_norms,
        role="norm",
        text="norm",
        category="TEMP",
    )
)
# The sum of these over the ranks that share parameters, in place.
reduce_norms: Any = define(
    OpSpec(
        "reduce_norms(Tensor[] norms, int size, str group='shard', str op='sum') -> Tensor[]",
        fake=_all_reduce,
        text="all-reduce norms",
        stream="all-reduce",
        event="n",
        in_place="always",
        category="TEMP",
        over="network",
        passes=2,
        gloo="operands",
    )
)
# The optimizer steps shards in place, with the sharded gradients of `params`; it scales those in
# place before, if a scale is given, and nothing reads them after it. Worlds do not have it: the
# caller binds it (`fxshard.codegen.emit.Executor.bind_step`).
step: Any = define(
    OpSpec(
        "step(Tensor[] grads, Tensor(a!)[] shards, str[] params, Tensor? scale=None) -> ()",
        role="step",
    )
)
