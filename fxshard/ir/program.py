"""Program: the rewritten graph of one step, and everything needed to run or analyse it.

Note: kinds of tensor
=====================
sharded parameter     this rank's rows of a parameter, padded to ``ceil(rows / world_size)`` so
                      that every rank sends the same number of bytes. A view of the unit's flat
                      storage. Lives as long as the model; on the CPU if it is offloaded.
unsharded parameter   the full parameter, while its unit computes. It is the buffer that the
                      all-gather wrote (from launch to wait: category *All Gather*; from wait to
                      free: category *Unsharded Param*), or a copy of its part of a packed one;
                      cut along another dimension than 0, a copy with its parts in their places.
sent copy             what an all-gather sends if not the shard itself: the shard cast to the
                      unit's dtype, loaded from the CPU, or packed with others (category *All
                      Gather*, like a gathered buffer that is unpacked, until it is).
made parameter        the unsharded parameter that a tensor subclass makes of what it had sent
                      (`fsdp_post_all_gather`): an *Activation* in forward, *Temp* in backward, as
                      any value; what it makes of its shard, to be sent, is *All Gather*.
resharded parameter   rows of an unsharded parameter that a rank of a smaller group keeps from
                      forward to backward (category *Sharded Param*).
ignored parameter     a parameter that `Config.ignored` names: as it is on the model, never
                      sharded, never communicated.
unsharded gradient    the full gradient of a parameter, from the backward operator that makes it
                      to the free after its reduction.
accumulated gradient  the sum of unsharded gradients of steps under ``no_sync``, in the dtype of
                      the reduction (category *Unsharded Grad*).
reduce buffer         a copy of an unsharded gradient: padded, packed, cast, or put rank by rank;
                      made only where it cannot be sent as it is (category *Reduce Scatter*).
sharded gradient      this rank's averaged rows, the result of the reduction; becomes ``.grad``.
saved activation      a forward value that backward reads. An unsharded parameter or a view of one
                      only if its unit is not resharded after forward. One that is offloaded is a
                      copy on the CPU from forward to backward (category *Activation*), and of that
                      a copy on the device again.
tangent               the gradient that arrives at an output of the model.

The joint graph
===============
One `torch.fx.Graph` holds both phases in execution order: forward nodes, then backward nodes.
Every node carries a `fxshard.ir.tags.Meta`. A value dies after its last use, in the order of the
graph; `free` gives a storage back at once. The edges from forward to backward are the saved
values. docs/ir.md has the grammar.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from fxshard._torch import export, fake_tensors, graphs
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.operators import schema_of
from fxshard._torch.traced_collectives import is_collective
from fxshard._torch.trees import TreeSpec
from fxshard.ir import ops, tags
from fxshard.ir.calls import Call
from fxshard.ir.domain import Domain
from fxshard.ir.layout import Grid, ParamLayout, layouts
from fxshard.ir.needs import Needs
from fxshard.ir.schedule import Schedule
from fxshard.ir.tensor_parallel import Placed
from fxshard.ir.units import Param, Reductions, Unit


class Fact(enum.Enum):
    """What must be true of a finished Program; `fxshard.verify` checks it, and knows from when on.

    Passes name those that they require and ensure, so that a wrong order of passes is found.
    """

    WELL_FORMED = "every value is made once, before it is read, and read before it is written over"
    TAGGED = "every node has a phase, a module and a fake value; forward comes before backward"
    UNITS_ASSIGNED = "every node belongs to a unit"
    RECOMPUTED = "backward recomputes what checkpoints do not save"
    UNSHARD_PAIRED = "every unshard has one wait, after it, before any use"
    PARAMS_UNSHARDED = "no full parameter is an input; each use reads an unsharded parameter"
    NO_PARAM_SAVED = "nothing of a parameter is saved for backward, unless its unit stays unsharded"
    REDUCED_ONCE = "each unsharded gradient is reduced exactly once"
    ONE_DTYPE = "every collective moves tensors of one dtype"
    EQUAL_CHUNKS = "every collective moves the same number of bytes on every rank"
    BUCKETED = "every parameter is in one bucket, and each collective moves those of one"
    STEPPED_ONCE = "each reduced gradient is stepped once, after every read of it and its shard"
    CLIPPED = "each step is scaled by the norm of all gradients that are stepped, each in it once"
    OFFLOADED = (
        "saved activations that leave come back whole, once, before they are read; "
        "at most one unit's leave at a time, and ahead + 1 units' wait for their first use"
    )
    FREED = "every unsharded parameter and reduced gradient has one free"
    NO_USE_AFTER_FREE = "nothing reads a storage after its free, through any alias"
    BOUNDED_INFLIGHT = (
        "at most prefetch + 1 units wait for their first use, none outlasts its last, "
        "at most max_inflight are unsharded"
    )
    STREAMS_ORDERED = "every read across streams is ordered by an event"
    JOINED = "what any rank needs is gathered and reduced, in the order that ranks agreed on"
    OUTLINED = "the schedule runs the nodes of the graph as they are tagged, each once, in order"


@dataclasses.dataclass(frozen=True)
class ParamBucket:
    """What one all-gather, and one reduction, moves: by default the parameters of one unit.

    They are on one mesh.

    Attributes:
        fqns: its parameters.
        packed: those of them that are sent in one buffer, if at least two of a dtype are.
    """

    fqns: tuple[str, ...]
    packed: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Result:
    """What one entry of the graph's output is.

    Attributes:
        kind: "output" (of the model), "grad" (of a parameter or input), "accumulated" (the
            unsharded gradient of a parameter, not reduced yet), "partial" (the sharded one, not
            all-reduced yet), "norm" (of all gradients, before they are clipped).
        name: output index, parameter FQN, or ``input[i]``; "" of the norm.
    """

    kind: Literal["output", "grad", "accumulated", "partial", "norm"]
    name: str


@dataclasses.dataclass(frozen=True)
class Signature:
    """How the flat graph is called from the user's side.

    Attributes:
        in_spec: tree of ``(args, kwargs)``.
        out_spec: tree of the model's return value.
        inputs: per flat input: the constant it had, or None where a tensor goes.
        tensor_inputs: flat positions that hold tensors, in order.
        outputs: per flat output: None where a tensor or a size comes, else ``(constant,)``.
        input_names, output_names: readable paths, for messages.
        tangents: flat output indices whose gradient backward takes. Of a tensor that is returned
            twice, the last: there autograd brings its gradient.
        training: True if the program has a backward.
        differentiable: flat output indices that need a gradient in eager; the others leave
            autograd.
        repeats: flat output index, and the first one that holds the very same tensor.
        placed: flat output index of a DTensor, and where that is; the graph gives what a rank has.
    """

    in_spec: TreeSpec
    out_spec: TreeSpec
    inputs: tuple[Any, ...]
    tensor_inputs: tuple[int, ...]
    outputs: tuple[tuple[Any] | None, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    tangents: tuple[int, ...]
    training: bool
    differentiable: tuple[int, ...] = ()
    repeats: tuple[tuple[int, int], ...] = ()
    placed: tuple[tuple[int, Placed], ...] = ()

    @property
    def starts_everywhere(self) -> bool:
        """True if no gradient can arrive at an output that backward does not start from."""
        same = dict(self.repeats)
        starts = {same.get(i, i) for i in self.tangents}
        return all(same.get(i, i) in starts for i in self.differentiable)

    @property
    def computed_outputs(self) -> tuple[int, ...]:
        """Flat positions of outputs that the graph computes, in order: tensors, and open sizes."""
        return tuple(i for i, constant in enumerate(self.outputs) if constant is None)


@dataclasses.dataclass
class Program:
    """One step of one model for one world size. Passes rewrite `graph` in place.

    Attributes:
        graph: the joint graph.
        results: what each entry of the graph's output is.
        signature: how the user's call maps to the graph.
        constants: tensors that the model holds outside of parameters and buffers, by name.
        units: unit 0 is the root.
        world_size: number of ranks that parameters are sharded over.
        replicas: number of such groups of ranks, which hold the same shards.
        meshes: the ranks of those parameters that have a mesh of their own.
        sync: False under ``no_sync``: gradients are accumulated, not reduced.
        accumulated: parameters that have an accumulated gradient when backward begins.
        partial: parameters that have a partial sum of sharded gradients then.
        kept: parameters that are unsharded when forward begins: an earlier call has kept them.
        comm_hook: the user's function reduces gradients (`FxshardModule.register_comm_hook`).
        offloaded: shards and sharded gradients live on the CPU.
        device: where it computes.
        fake_mode: owner of the fake values, for passes that make new ones.
        facts: what passes ensure.
        gradients: names of the gradients that capture found, once the pipeline has begun.
        given: name of each placeholder that is no parameter's -> its role and FQN, from then on.
        buckets: what moves together; none before bucket has run (see `moving`).
        forward_prefetch, backward_prefetch: how many buckets may wait unsharded for their first
            use, besides the one that is launched where it is needed.
        max_inflight: how many buckets may be unsharded at any point; None: no limit of its own.
        reload_ahead: of how many units the offloaded activations may be back before their use,
            besides those of the unit that is next.
        optimizer_in_backward: it steps parameters, in place of returning their gradients.
        whole: it is a whole step: the loss is its output, it starts backward by itself, and both
            phases run as one, with nothing of the caller's between them.
        max_norm: of a whole step, gradients are scaled by the norm of all of them so that it is at
            most this; None: they are not.
        compiled: regions are compiled: what must run in eager's order stands apart from the rest.
        calls: every call of a module in forward, in order; nodes refer to them.
        domain: the sizes that it serves; None: those of the example call.
        checkpoints: FQN of each module whose calls are checkpointed -> "full", "selective" or a
            policy function, as in `Config`.
        schedule: the outer schedule and its regions, once outline-regions has run.
        closed: why the sizes that were to be open are not; "" if they are.
        reached: of each gradient that not all of the tangents reach, by result name: the flat
            output indices of those that do. Where none of them arrives, eager has no gradient.
        needs: where ranks may differ, what this rank gathers and reduces by itself.
        common: what all ranks gather and reduce, if that differs; None: all need the same.
    """

    graph: fx.Graph
    results: list[Result]
    signature: Signature
    constants: dict[str, torch.Tensor]
    units: tuple[Unit, ...]
    world_size: int
    fake_mode: FakeTensorMode
    device: torch.device = torch.device("cpu")  # noqa: RUF009, is immutable
    replicas: int = 1
    meshes: tuple[Grid, ...] = ()
    sync: bool = True
    accumulated: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    comm_hook: bool = False
    offloaded: bool = False
    facts: set[Fact] = dataclasses.field(default_factory=set)
    gradients: frozenset[str] | None = None
    given: dict[str, tuple[tags.Role, str | None]] | None = None
    buckets: tuple[ParamBucket, ...] = ()
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    max_inflight: int | None = None
    reload_ahead: int = 1
    optimizer_in_backward: bool = False
    whole: bool = False
    max_norm: float | None = None
    compiled: bool = False
    calls: tuple[Call, ...] = ()
    domain: Domain | None = None
    checkpoints: dict[str, Any] = dataclasses.field(default_factory=dict)
    schedule: Schedule | None = None
    closed: str = ""
    reached: dict[str, frozenset[int]] = dataclasses.field(default_factory=dict)
    needs: Needs | None = None
    common: Needs | None = None
    _params: tuple[Any, dict[str, Param]] | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    _parallel: tuple[Any, dict[str, Placed]] | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    _layouts: tuple[Any, dict[str, ParamLayout]] | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def params(self) -> dict[str, Param]:
        """Every parameter by FQN, in unit order."""
        if self._params is None or self._params[0] is not self.units:
            params = {param.fqn: param for unit in self.units for param in unit.params}
            self._params = self.units, params
        return self._params[1]

    @property
    def parallel(self) -> dict[str, Placed]:
        """Where parameters are that tensor parallelism has placed, and experts: by the group."""
        if self._parallel is None or self._parallel[0] is not self.units:
            placed = [p.placed for p in self.params.values() if p.placed is not None]
            self._parallel = self.units, {each.group: each for each in placed}
        return self._parallel[1]

    @property
    def apart(self) -> dict[str, int]:
        """By the name of a mesh of parameters, the distance between two ranks that share one.

        Ranks of tensor parallelism, or of experts, lie between them if they are neighbours.
        """
        found = dict.fromkeys(self.grids, 1)
        for param in self.params.values():
            if param.placed is not None:
                found[param.mesh] = param.placed.ranks_between
        return found

    def group_of(self, call: fx.Node) -> str | None:
        """What the ranks of a collective are called; None if the model calls it on its own.

        Args:
            call: an operator of ours, or a functional collective.
        """
        parallel = self.parallel
        if call.target in ops.OPERATORS or not parallel:
            return ops.group(call)
        mine = [g for g, each in parallel.items() if call.args[-1] == each.process_group]
        return mine[0] if mine and is_collective(call) else None

    def reduces(self, fqn: str) -> Reductions:
        """Which reductions the gradient of a parameter goes through (see `Unit.reduce`).

        Without replicas, that is all where it would be the reduce-scatter alone.
        """
        how = self.units[self.params[fqn].unit].reduce if self.sync else "none"
        return "all" if how == "shards" and self.grid(fqn).replicas == 1 else how

    @property
    def layouts(self) -> dict[str, ParamLayout]:
        """Where each parameter is, the ignored ones too, by FQN."""
        if self._layouts is None or self._layouts[0] is not self.units:
            found = layouts(self.units, self.world_size, self.replicas, self.meshes)
            self._layouts = self.units, found
        return self._layouts[1]

    @property
    def grids(self) -> dict[str, Grid]:
        """The ranks of each mesh, by its name; "" is that of the model."""
        own = Grid(self.world_size, self.replicas)
        return {grid.name: grid for grid in (own, *self.meshes)}

    def grid(self, fqn: str) -> Grid:
        """The ranks of the mesh that a parameter is on."""
        return self.grids[self.params[fqn].mesh]

    @property
    def uses_host(self) -> bool:
        """True if something of a step lives on the CPU while it computes elsewhere."""
        leaves = self.graph.find_nodes(op="call_function", target=ops.offload)
        return self.offloaded or bool(leaves)

    @property
    def moving(self) -> tuple[ParamBucket, ...]:
        """`buckets`, or one per unit and mesh where no pass has made any."""
        together = (fqns for unit in self.units for fqns in unit.by_mesh)
        return self.buckets or tuple(map(ParamBucket, together))

    @property
    def ignored(self) -> dict[str, Param]:
        """Every ignored parameter by FQN."""
        return {param.fqn: param for unit in self.units for param in unit.ignored}

    @property
    def output(self) -> fx.Node:
        """The output node of the joint graph."""
        (node,) = self.graph.find_nodes(op="output")
        return node

    @property
    def values(self) -> list[fx.Node]:
        """What the joint graph returns, entry by entry as in `results`."""
        return list(cast("tuple[fx.Node, ...]", self.output.args[0]))

    @values.setter
    def values(self, values: Sequence[fx.Node]) -> None:
        self.output.args = (tuple(values),)

    def phase(self, phase: tags.Phase) -> list[fx.Node]:
        """Nodes of one phase in execution order, without placeholders and output."""
        return [
            node
            for node in self.graph.nodes
            if node.op == "call_function" and tags.get(node).phase == phase
        ]

    def fake(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        """A fresh contiguous fake tensor with a storage of its own."""
        return fake_tensors.fake_empty(self.fake_mode, shape, dtype, device)

    def refake(self, node: fx.Node) -> Any:
        """The fake value of `node`, recomputed from the fake values of its inputs."""

        def val(value: fx.Node) -> Any:
            return value.meta["val"]

        def empty(like: Tensor, shape: Sequence[int], **options: Any) -> Tensor:
            dtype, device = options.get("dtype", like.dtype), options.get("device", like.device)
            return fake_tensors.fake_empty(self.fake_mode, shape, dtype, device)

        target: Any = node.target
        if _is_plain_view(node):
            base, *rest = node.args
            source = val(cast("fx.Node", base))
            return fake_tensors.fake_view(
                self.fake_mode, source, lambda x: target(x, *rest, **node.kwargs)
            )
        args = fx.node.map_arg(node.args, val)
        kwargs = fx.node.map_arg(node.kwargs, val)
        if target in ops.OPERATORS:
            return ops.makes(target, args, empty)
        with self.fake_mode:
            return target(*args, **kwargs)

    def repeated(self, copy: fx.Node, node: fx.Node) -> Any:
        """The fake value of `copy`, which does what `node` does on values of the same layout.

        Made from the value of `node`, storage for storage, without the operator's fake kernel,
        which takes ten times as long. None if the inputs of `copy` have another layout, or a size
        is open.
        """
        made: dict[int, torch.UntypedStorage] = {}  # storage of `node` or its inputs -> of `copy`
        for before, after in zip(node.all_input_nodes, copy.all_input_nodes, strict=True):
            if not _lie_alike(before.meta["val"], after.meta["val"], made):
                return None
        return _laid_out(self.fake_mode, node.meta.get("val"), made)

    def copied(self, units: tuple[Unit, ...], world_size: int) -> Program:
        """A copy that passes may rewrite, for other units and ranks; fake values are shared.

        Only of a program that no pass has touched, or those of `fxshard.pipeline.STEM` alone.
        """
        return dataclasses.replace(
            self,
            graph=graphs.copy_graph(self.graph),
            results=list(self.results),
            units=units,
            world_size=world_size,
            facts=set(),
            schedule=None,
        )

    def refresh_views(self, node: fx.Node, stale: frozenset[int]) -> None:
        """Recompute the fake values of the views of `node`, so that they alias its storage.

        Views are those readers whose value still lies in one of the `stale` storages.
        """
        for user in node.users:
            if user.op == "call_function" and tags.storage_ids(user) & stale:
                user.meta["val"] = self.refake(user)
                self.refresh_views(user, stale)


def _is_plain_view(node: fx.Node) -> bool:
    """True if `node` makes one view of one tensor."""
    target = node.target
    return (
        isinstance(target, export.OpOverload)
        and target.is_view
        and [str(made.type) for made in schema_of(target).returns] == ["Tensor"]
        and node.all_input_nodes == [node.args[0]]
    )


def _lie_alike(one: Any, other: Any, storages: dict[int, torch.UntypedStorage]) -> bool:
    """True if two values have the same layout; notes which storage stands for which."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            _lie_alike(a, b, storages) for a, b in zip(one, other, strict=True)
        )
    if not isinstance(one, Tensor):
        return one is other
    mine, theirs = one.untyped_storage(), other.untyped_storage()
    if storages.setdefault(id(mine), theirs) is not theirs:
        return False
    return one is other or (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and one.dtype is other.dtype
        and one.device == other.device
        and mine.nbytes() == theirs.nbytes()
    )


def _laid_out(mode: FakeTensorMode, val: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    """A value like `val` on other storages: those given, else fresh ones. None if it has none."""
    if isinstance(val, (list, tuple)):
        made = [_laid_out(mode, each, storages) for each in val]
        known = all(a is not None or b is None for a, b in zip(made, val, strict=True))
        return type(val)(made) if known and type(val) in (list, tuple) else None
    if not isinstance(val, Tensor):
        return None
    storage = val.untyped_storage()
    size = storage.nbytes()
    if any(type(n) is not int for n in (size, *val.shape, *val.stride())):
        return None
    if id(storage) not in storages:
        storages[id(storage)] = torch.UntypedStorage(size, device="meta")
    return fake_tensors.fake_over(mode, val, storages[id(storage)])


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


def path_name(path: tuple[Any, ...]) -> str:
    """``['logits']``, ``[0].x``: the place of a leaf in a tree."""
    return "".join(str(key) for key in path).lstrip(".")


def input_name(path: tuple[Any, ...]) -> str:
    """``args[0]``, ``kwargs['labels']``: the place of a flat input in the user's call."""
    return ("args", "kwargs")[path[0].idx] + path_name(path[1:])
