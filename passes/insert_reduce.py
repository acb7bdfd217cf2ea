"""insert-reduce: average each unit's gradients over the ranks, and keep this rank's rows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.layout import Grid, ParamLayout, gathered, spans, split_by_rank
from fxshard.ir.program import Fact, Program, Result
from fxshard.ir.units import Param

aten: Any = torch.ops.aten

Kind = Literal["grad", "accumulated", "partial"]


@dataclasses.dataclass(frozen=True)
class InsertReduce:
    """One reduction per bucket (and dtype), after the last of its gradients.

    A gradient is sent as it is if it is contiguous, divides evenly, has the dtype of the
    reduction, and nothing else refers to its storage; otherwise a copy (padded with zero rows,
    cast) is sent. That of a parameter cut along another dimension than 0 is copied, rank by rank.
    Packed gradients are sent in one flat copy, rank by rank; their sharded gradients are parts of
    its result. Replicas all-reduce the results of the reduce-scatter. The ranks are those of the
    mesh that the parameters of the bucket are on. Then the sharded gradient is
    cast to the dtype of its parameter, and copied to the CPU if parameters are there.

    Under ``no_sync``, and of units that are not reduced, gradients are returned, or added to those
    of earlier steps. The first step that reduces adds these sums to its gradients. Where a unit
    leaves the all-reduce out, results of the reduce-scatter are returned as partial sums; the next
    step adds them to its own, or to zeros if it does not use the parameter.

    Attributes:
        op: "avg", "sum", "max" or "min".
        divide_factor: an average divides by this (None: by the number of ranks).
        predivide_factor: how much of it is divided before the sum (None: nothing; in fp16 about
            the square root, so that neither the sum overflows nor the parts underflow).

    Before::

        %g = aten.mm(%t, %x)                     # f32[6,4]
        return (%g)                              # grad of w

    After (world size 2)::

        %g = aten.mm(%t, %x)
        %reduce_1 = fxshard.reduce_scatter([%g], 2)
        %getitem = getitem(%reduce_1, 0)         # f32[3,4]
        %wait_1 = fxshard.wait([%getitem])
        return (%getitem)                        # sharded grad of w
    """

    name: ClassVar[str] = "insert-reduce"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.REDUCED_ONCE, Fact.ONE_DTYPE, Fact.EQUAL_CHUNKS}
    )

    op: str = "avg"
    divide_factor: float | None = None
    predivide_factor: float | None = None

    def apply(self, program: Program) -> None:
        if not program.signature.training:
            return
        if any(map(transfers.is_reduction, program.graph.nodes)):
            raise ValueError("gradients are reduced already")
        grads = {
            result.name: value
            for result, value in zip(program.results, program.values, strict=True)
            if result.kind == "grad"
        }
        for fqn in program.ignored.keys() & grads.keys():
            grads[fqn] = as_own(program, grads[fqn])
        added = accumulate(program, grads)
        grads |= {name: total for name, total in added.items() if program.reduces(name) != "none"}
        for fqn in sorted(program.partial - grads.keys()):
            if program.reduces(fqn) != "none":  # what this step leaves out, an earlier one has used
                grads[fqn] = nothing_added(program, fqn)
        how = {name: program.reduces(name) for name in grads if name in program.params}
        for name in [name for name in grads if how.get(name) == "none"]:
            grad = grads.pop(name)
            if name not in added:
                grads[name] = as_own(program, to_reduce_dtype(program, name, grad))
                tags.update(grads[name], fqn=name)
        self._reduce_all(program, grads, frozenset(n for n in grads if how.get(n) == "none"))
        kinds: dict[Any, Kind] = {"none": "accumulated", "shards": "partial"}
        results = {name: Result(kinds.get(how.get(name), "grad"), name) for name in grads}
        outputs = [
            (result, value)
            for result, value in zip(program.results, program.values, strict=True)
            if result.kind != "grad"
        ]
        outputs += [(result, grads[name]) for name, result in results.items()]
        program.results[:] = [result for result, _ in outputs]
        program.values = [value for _, value in outputs]

    def _reduce_all(
        self, program: Program, grads: dict[str, fx.Node], without: frozenset[str]
    ) -> None:
        """Replace the gradients of parameters, but for those in `without`, by sharded ones."""
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        returned = returned_storages(program)
        pair = 1 + max((tags.get(n).pair or 0 for n in program.graph.nodes), default=-1)
        groups: list[tuple[fx.Node, list[Param], frozenset[str]]] = []
        for bucket in program.moving:
            by_dtype: dict[torch.dtype, list[Param]] = {}
            for param in (
                program.params[f] for f in bucket.fqns if f in grads and f not in without
            ):
                dtype = reduce_dtype(program, param, grads[param.fqn])
                by_dtype.setdefault(dtype, []).append(param)
            for params in by_dtype.values():
                last = max((grads[p.fqn] for p in params), key=order.__getitem__)
                groups.append((last, params, bucket.packed))
        for last, params, packed in sorted(groups, key=lambda group: order[group[0]]):
            sent = {param.fqn: grads[param.fqn] for param in params}
            packs = packed_together(program, params, sent, packed)
            small = {param.fqn for pack in packs for param in pack}
            own = {
                fqn: owns_storage(grad, last, order, returned)
                for fqn, grad in sent.items()
                if fqn not in small
            }
            reduced = self._reduce(program, params, sent, own, packs, last, pair)
            grads |= {param.fqn: node for param, node in zip(params, reduced, strict=True)}
            pair += len(self._launches(program, program.grid(params[0].fqn))) or 1

    def _launches(self, program: Program, grid: Grid) -> list[str]:
        """The launches that a gradient goes through, in order."""
        if program.comm_hook:
            return ["hook"]
        launches = {"reduce": grid.shards > 1, "all_reduce": grid.replicas > 1}
        launches["store"] = program.offloaded
        return [name for name, needed in launches.items() if needed]

    def _reduce(
        self,
        program: Program,
        params: list[Param],
        grads: dict[str, fx.Node],
        own: dict[str, bool],
        packs: list[list[Param]],
        last: fx.Node,
        pair: int,
    ) -> list[fx.Node]:
        """Insert launches and waits after `last`; returns the sharded gradients.

        Args:
            own: of each gradient that is sent alone: nothing else refers to its storage, so that it
                can be sent as it is, and freed.
            packs: parameters whose gradients are sent in one copy.
        """
        unit = program.units[params[0].unit]
        tag = tags.Meta("backward", "reduce", module=unit.fqn, unit=unit.index, pair=pair)
        alone = [param for param in params if param.fqn in own]
        fqns = [*(param.fqn for param in alone), *("" for _ in packs)]
        grid = program.grid(params[0].fqn)
        launches = self._launches(program, grid)
        dtype = reduce_dtype(program, params[0], grads[params[0].fqn])
        before, op, after = self.division(dtype, grid, unit.divide_factor)
        if program.comm_hook:
            before = None  # the hook averages
        with program.graph.inserting_before(following(program, last)):
            nodes = [
                divided(program, as_sendable(program, param, grads[param.fqn], mine, tag), before)
                for param, mine in ((param, own[param.fqn]) for param in alone)
            ]
            for pack in packs:
                rows = [as_rows(program, param, grads[param.fqn], tag) for param in pack]
                flat = cast(program, flat_copy(program, rows, tag), dtype, "pad", tag)
                nodes.append(divided(program, flat, before))
            if program.comm_hook:
                return through_hook(program, params, nodes, tag)
            if grid.shards > 1:
                group = grid.group("shard")
                usual = (group, op) == ("shard", "avg")
                args = (nodes, grid.shards, *([] if usual else [group, op]))
                name = f"reduce_{pair}"
                nodes = transfers.insert_operator(
                    program, ops.reduce_scatter, args, fqns, tag, name
                )
                transfers.insert_wait(program, nodes, tag)
            both = zip(nodes, alone, strict=False)
            nodes[: len(alone)] = [add_partial(program, n, param, tag) for n, param in both]
            if program.reduces(params[0].fqn) == "shards":  # of which none is packed
                found = {param.fqn: node for param, node in zip(alone, nodes, strict=True)}
                return [found[param.fqn] for param in params]
            if grid.replicas > 1:
                tag = tags.changed(tag, pair=pair + launches.index("all_reduce"))
                args = (nodes, grid.replicas, grid.group("replicate"), op)
                name = f"all_reduce_{tag.pair}"
                nodes = transfers.insert_operator(program, ops.all_reduce, args, fqns, tag, name)
                transfers.insert_wait(program, nodes, tag)
            nodes = [divided(program, node, after, "post_reduction", tag) for node in nodes]
            if not unit.precision.keep_low_precision_grads:
                firsts = [*alone, *(pack[0] for pack in packs)]
                nodes = [
                    cast(program, node, param.dtype, "post_reduction", tag)
                    for node, param in zip(nodes, firsts, strict=True)
                ]
            if program.offloaded:
                tag = tags.changed(tag, pair=pair + launches.index("store"))
                name = f"store_{tag.pair}"
                nodes = transfers.insert_operator(program, ops.store, (nodes,), fqns, tag, name)
                transfers.insert_wait(program, nodes, tag)
            found = {param.fqn: node for param, node in zip(alone, nodes, strict=False)}
            for pack, flat in zip(packs, nodes[len(alone) :], strict=True):
                parts = parts_of(program, pack, flat, tag)
                found |= {param.fqn: part for param, part in zip(pack, parts, strict=True)}
        return [found[param.fqn] for param in params]

    def division(
        self, dtype: torch.dtype, grid: Grid, divide_factor: float | None = None
    ) -> tuple[float | None, str, float | None]:
        """Divisor before the reduction, its operation, and divisor after it.

        `divide_factor` is that of a unit, in place of the one of all.

        As torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
        ``_get_gradient_divide_factors``, with sums where that multiplies inside NCCL.
        """
        if self.op != "avg":
            return None, self.op, None
        risky = dtype not in (torch.float32, torch.bfloat16, torch.float64)
        divide_factor = divide_factor or self.divide_factor or grid.batches or None
        if not risky and divide_factor is None and self.predivide_factor is None:
            return None, "avg", None
        factor = float(divide_factor or grid.ranks)
        before = self.predivide_factor
        if before is None and risky:
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
        return before, "sum", factor / (before or 1.0)


def packed_together(
    program: Program, params: list[Param], grads: dict[str, fx.Node], packed: frozenset[str]
) -> list[list[Param]]:
    """The parameters whose gradients are sent in one copy: two or more, of the same dtypes.

    Not those whose partial sums are kept: of a copy, one would keep them all.
    """
    if program.comm_hook or program.grid(params[0].fqn).ranks == 1:
        return []
    found: dict[tuple[torch.dtype, torch.dtype], list[Param]] = {}
    for param in params:
        if (
            param.fqn in packed
            and param.fqn not in program.partial
            and (program.reduces(param.fqn) == "all")
        ):
            dtypes = (grads[param.fqn].meta["val"].dtype, param.dtype)
            found.setdefault(dtypes, []).append(param)
    return [group for group in found.values() if len(group) > 1]


def as_rows(program: Program, param: Param, grad: fx.Node, tag: tags.Meta) -> fx.Node:
    """A view of `grad`, padded, of shape ``[shards, n]``: row r is what rank r gets."""
    tag = tags.changed(tag, role="pad", fqn=param.fqn)
    layout = program.layouts[param.fqn]
    node = grad
    if layout.dim:
        node = by_rank(program, layout, grad, tag)
    elif layout.padding:
        node = padded(program, grad, layout, tag)
    elif not grad.meta["val"].is_contiguous():
        node = contiguous(program, grad, tag)
    return operation(program, aten.view.default, (node, [program.grid(param.fqn).shards, -1]), tag)


def flat_copy(program: Program, rows: list[fx.Node], tag: tags.Meta) -> fx.Node:
    """Append a flat copy of all of `rows`, rank by rank."""
    tag = tags.changed(tag, role="pad", fqn="")
    joined = operation(program, aten.cat.default, (rows, 1), tag)
    return operation(program, aten.view.default, (joined, [-1]), tag)


def parts_of(
    program: Program, params: list[Param], flat: fx.Node, tag: tags.Meta
) -> Iterator[fx.Node]:
    """Views of `flat`, which holds the sharded gradients of `params` one after the other.

    A generator: each view is appended to the graph when it is asked for.
    """
    shapes = [program.layouts[param.fqn].shard_shape for param in params]
    for param, shape, (start, end) in zip(params, shapes, spans(shapes), strict=True):
        own = tags.changed(tag, role="post_reduction", fqn=param.fqn)
        piece = operation(program, aten.slice.Tensor, (flat, 0, start, end), own)
        yield operation(program, aten.view.default, (piece, list(shape)), own)


def operation(program: Program, target: Any, args: tuple[Any, ...], tag: tags.Meta) -> fx.Node:
    """Append an operator of the compute stream."""
    node = program.graph.call_function(target, args)
    return tags.put(node, tag, program.refake(node))


def through_hook(
    program: Program, params: list[Param], sent: list[fx.Node], tag: tags.Meta
) -> list[fx.Node]:
    """Append the user's reduction of all of `sent`, as one flat tensor in rank order.

    Returns views of its result, in the dtype of each parameter.
    """
    world = program.world_size
    both = zip(params, sent, strict=True)
    pads = [(node, tags.changed(tag, role="pad", fqn=p.fqn)) for p, node in both]
    rows = [operation(program, aten.view.default, (node, [world, -1]), pad) for node, pad in pads]
    flat = flat_copy(program, rows, tag)
    name = f"hook_{tag.pair}"
    items = transfers.insert_operator(program, ops.comm_hook, ([flat], world), [""], tag, name)
    transfers.insert_wait(program, items, tag)
    found: list[fx.Node] = []
    for param, part in zip(params, parts_of(program, params, items[0], tag), strict=True):
        keeps = program.units[param.unit].precision.keep_low_precision_grads
        found.append(part if keeps else cast(program, part, param.dtype, "post_reduction", tag))
    return found


def reduce_dtype(program: Program, param: Param, grad: fx.Node) -> torch.dtype:
    """The dtype in which the gradient of `param` is reduced and accumulated."""
    return program.units[param.unit].precision.reduces_in(grad.meta["val"].dtype)


def accumulate(program: Program, grads: dict[str, fx.Node]) -> dict[str, fx.Node]:
    """Add gradients to the accumulated ones in place, each where it is made; returns the sums."""
    sums: dict[str, fx.Node] = {}
    for fqn in sorted(program.accumulated, key=lambda fqn: program.params[fqn].position):
        param = program.params[fqn]
        *_, last = program.graph.find_nodes(op="placeholder")
        with program.graph.inserting_after(last):
            total = program.graph.placeholder("accumulated_" + fqn.replace(".", "_"))
        dtype = program.units[param.unit].precision.reduces_in(param.compute_dtype)
        tag = tags.Meta("backward", "accumulated", unit=param.unit, fqn=fqn)
        tags.put(total, tag, program.fake(param.shape, dtype, program.device))
        if fqn in grads:
            grad = grads[fqn]
            with program.graph.inserting_before(following(program, grad)):
                added = program.graph.call_function(aten.add_.Tensor, (total, grad))
            like = tags.get(grad) if grad.op == "call_function" else tag
            made = tags.changed(like, phase="backward", role="pad", fqn=fqn)
            total = tags.put(added, made, total.meta["val"])
        sums[fqn] = total
    return sums


def add_partial(program: Program, node: fx.Node, param: Param, tag: tags.Meta) -> fx.Node:
    """Add the partial sum of a parameter, if it has one, in place to its reduced gradient."""
    if param.fqn not in program.partial:
        return node
    *_, last = program.graph.find_nodes(op="placeholder")
    with program.graph.inserting_after(last):
        total = program.graph.placeholder("partial_" + param.fqn.replace(".", "_"))
    held = tags.Meta("backward", "partial", unit=param.unit, fqn=param.fqn)
    val = node.meta["val"]
    tags.put(total, held, program.fake(tuple(val.shape), val.dtype, val.device))
    added = program.graph.call_function(aten.add_.Tensor, (node, total))
    return tags.put(added, tags.changed(tag, role="post_reduction", fqn=param.fqn), val)


def nothing_added(program: Program, fqn: str) -> fx.Node:
    """Append zeros, as the gradient of a parameter that the step does not use."""
    param = program.params[fqn]
    unit = program.units[param.unit]
    dtype = unit.precision.reduces_in(param.compute_dtype)
    options: dict[str, Any] = {"dtype": dtype, "device": program.device, "pin_memory": False}
    with program.graph.inserting_before(program.output):
        node = program.graph.call_function(aten.full.default, (list(param.shape), 0.0), options)
    tag = tags.Meta("backward", "compute", module=unit.fqn, unit=unit.index)
    return tags.put(node, tag, program.fake(param.shape, dtype, program.device))


def following(program: Program, node: fx.Node) -> fx.Node:
    """The node after `node`; the first of backward, if `node` is an input or runs in forward."""
    if node.op == "placeholder" or tags.get(node).phase == "forward":
        return next(iter(program.phase("backward")), program.output)
    return node.next


def to_reduce_dtype(program: Program, fqn: str, grad: fx.Node) -> fx.Node:
    """`grad` in the dtype in which gradients of its parameter are accumulated."""
    param = program.params[fqn]
    tag = tags.Meta("backward", "pad", program.units[param.unit].fqn, param.unit)
    with program.graph.inserting_before(following(program, grad)):
        return cast(program, grad, reduce_dtype(program, param, grad), "pad", tag)


def as_own(program: Program, grad: fx.Node) -> fx.Node:
    """`grad`, or a copy if others refer to its storage: what is returned belongs to the caller."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    if grad.meta["val"].is_contiguous() and owns_storage(
        grad, program.output, order, returned_storages(program)
    ):
        return grad
    tag = tags.get(grad)
    with program.graph.inserting_before(following(program, grad)):
        return contiguous(program, grad, tags.changed(tag, phase="backward"))


def divided(
    program: Program,
    node: fx.Node,
    factor: float | None,
    role: tags.Role = "pad",
    tag: tags.Meta | None = None,
) -> fx.Node:
    """`node` divided by `factor` in place."""
    if factor is None or factor == 1:
        return node
    made = program.graph.call_function(aten.div_.Scalar, (node, factor))
    like = tags.changed(tag or tags.get(node), role=role, fqn=tags.get(node).fqn)
    return tags.put(made, like, node.meta["val"])


def cast(
    program: Program, node: fx.Node, dtype: torch.dtype, role: tags.Role, tag: tags.Meta
) -> fx.Node:
    """`node` in `dtype`: itself, or a copy."""
    val = node.meta["val"]
    if val.dtype is dtype:
        return node
    made = program.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    fake = program.fake(tuple(val.shape), dtype, val.device)
    return tags.put(made, tags.changed(tag, role=role, fqn=tags.get(node).fqn), fake)


def as_sendable(
    program: Program, param: Param, grad: fx.Node, alone: bool, tag: tags.Meta
) -> fx.Node:
    """`grad` itself, or a contiguous copy of ``shards * chunk`` rows in the reduction's dtype.

    What is sent is tagged with the FQN of the parameter whose gradient it is.
    """
    tag = tags.changed(tag, fqn=param.fqn)
    val, layout = grad.meta["val"], program.layouts[param.fqn]
    pad, dtype = layout.padding, reduce_dtype(program, param, grad)
    if layout.dim:
        node = by_rank(program, layout, grad, tag)
    elif not pad and val.is_contiguous() and (alone or val.dtype is not dtype):
        if val.dtype is dtype:
            tags.update(grad, fqn=param.fqn)
        node = grad
    elif pad:
        node = padded(program, grad, layout, tag)
    else:
        node = contiguous(program, grad, tag)
    if val.dtype is dtype:
        return node
    node = cast(program, node, dtype, "pad", tag)
    tags.update(node, fqn=param.fqn)
    return node


def by_rank(program: Program, layout: ParamLayout, grad: fx.Node, tag: tags.Meta) -> fx.Node:
    """A contiguous copy of `grad`, padded, in which the ranks' parts follow each other."""
    tag = tags.changed(tag, role="pad")
    node = padded(program, grad, layout, tag) if layout.padding else grad
    ranks = layout.parts[layout.dim]
    split, order = split_by_rank(layout.padded_shape, ranks, layout.dim)
    node = operation(program, aten.view.default, (node, split), tag)
    node = operation(program, aten.permute.default, (node, order), tag)
    shape = list(gathered(layout.shard_shape, ranks))
    return operation(program, aten.view.default, (contiguous(program, node, tag), shape), tag)


def padded(program: Program, grad: fx.Node, layout: ParamLayout, tag: tags.Meta) -> fx.Node:
    """A contiguous copy of `grad` with more rows, of zeros: as many as its shards have."""
    val = grad.meta["val"]
    padding = [0, 0] * (val.dim() - 1 - layout.dim) + [0, layout.padding]
    source = grad if val.is_contiguous() else contiguous(program, grad, tag)
    node = program.graph.call_function(aten.constant_pad_nd.default, (source, padding))
    fake = program.fake(layout.padded_shape, val.dtype, val.device)
    return tags.put(node, tags.changed(tag, role="pad"), fake)


def contiguous(program: Program, grad: fx.Node, tag: tags.Meta) -> fx.Node:
    """A contiguous copy of `grad`."""
    val = grad.meta["val"]
    kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
    node = program.graph.call_function(aten.clone.default, (grad,), kwargs)
    fake = program.fake(tuple(val.shape), val.dtype, val.device)
    return tags.put(node, tags.changed(tag, role="pad"), fake)


def returned_storages(program: Program) -> collections.Counter[int]:
    """How often each storage is among what the program returns."""
    return collections.Counter(s for value in program.values for s in tags.storage_ids(value))


def owns_storage(
    grad: fx.Node, last: fx.Node, order: dict[fx.Node, int], returned: collections.Counter[int]
) -> bool:
    """True if `grad` fills its storage, is returned once, and is not read after `last`."""
    val = grad.meta["val"]
    if val.untyped_storage().nbytes() != val.numel() * val.element_size():
        return False
    (storage,) = tags.storage_ids(grad)
    if returned[storage] > 1:
        return False
    maker: fx.Node | None = grad
    aliases: list[fx.Node] = []
    while maker is not None:
        aliases.append(maker)
        maker = next((n for n in maker.all_input_nodes if storage in tags.storage_ids(n)), None)
    if aliases[-1].op == "placeholder" and tags.get(aliases[-1]).role != "accumulated":
        return False
    todo = aliases[-1:]
    while todo:
        for user in todo.pop().users:
            if storage in tags.storage_ids(user):
                todo.append(user)
            elif user.op != "output" and order.get(user, -1) > order[last]:
                return False
    return True
