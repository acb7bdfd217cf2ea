"""Gradients: each reduced once, by the ranks that need it, in equal chunks."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from fxshard._torch.operators import schema_of
from fxshard._torch.traced_collectives import is_called_otherwise
from fxshard.ir import dump, ops, tags, transfers
from fxshard.ir.layout import ParamLayout, gathered, split_by_rank
from fxshard.ir.program import Fact, Program, Result
from fxshard.ir.units import Reductions
from fxshard.verify import walk
from fxshard.verify.failure import fail

aten: Any = torch.ops.aten


def reduced_once(program: Program) -> None:
    """Each gradient went through the reductions that its ranks need, each once."""
    fact = Fact.REDUCED_ONCE
    seen: dict[fx.Node, str] = {}
    packs: dict[fx.Node, dict[str | None, tuple[int, int]]] = {}  # item -> parts, by FQN
    left = _left_by_backward(program)
    sums: dict[str, list[fx.Node]] = {}  # partial ones that come in
    for node in program.graph.find_nodes(op="placeholder"):
        if tags.get(node).role == "partial":
            sums.setdefault(tags.get(node).fqn or "", []).append(node)
    order = walk.order(program) if sums else {}
    for value, result in left:
        if result.name not in program.params or result.kind == "output":
            continue
        how = program.reduces(result.name)
        need = _reductions_needed(program, result.name, how)
        if result.kind == "accumulated" and how != "none":
            fail(program, fact, value, f"the gradient of {result.name!r} is not reduced.")
        if result.kind == "accumulated" and tags.get(value).fqn != result.name:
            what = f"the gradient of {result.name!r} is that of {tags.get(value).fqn!r}."
            fail(program, fact, value, what)
        if result.kind == "accumulated":
            continue
        if how == "none" or (how == "shards") != (result.kind == "partial"):
            fail(program, fact, value, f"the gradient of {result.name!r} is not accumulated.")
        items = _reductions_of(value)
        for item in items:
            _by_its_group(program, tags.source(item), result.name)
            if tags.get(item).fqn != "":
                _one_reduction(program, item, result.name, seen)
                continue
            seen[item] = result.name
            if item not in packs:
                packs[item] = _packed(tags.operands(tags.source(item))[walk.item_index(item)])
            packed = packs[item]
            if _piece(value, item) != packed.get(result.name):
                what = f"the gradient of {result.name!r} is not in what %{item.name} reduced."
                if result.name in packed:
                    what = f"%{value.name} is not the part of %{item.name} of {result.name!r}."
                fail(program, fact, item, what)
        done = [tags.source(item).target for item in reversed(items)]
        if done != need:
            ran = _operations(done) or "nothing"
            fail(
                program,
                fact,
                program.output if not done else value,
                f"the gradient of {result.name!r} is returned without being reduced: it went "
                f"through {ran}; its ranks need {_operations(need)}."
                if len(done) < len(need)
                else f"the gradient of {result.name!r} is reduced twice: by {ran}.",
            )
        _fits_its_shard(program, value, result)
        _adds_partial(program, value, result.name, items, sums.get(result.name, []), order)
    _all_returned(program, seen)
    _sent_by_rank(program)
    _divided_alike(program)
    for launch in filter(transfers.is_reduction, program.graph.nodes):
        for item in launch.users:
            if item.target is operator.getitem and item not in seen:
                fqns = walk.packed_fqns(tags.operands(launch)[walk.item_index(item)])
                fqn = tags.get(item).fqn or ", ".join(fqns)
                fail(program, fact, item, f"the reduced gradient of {fqn!r} is not returned.")
    _accumulated_once(program)
    given = {result.name for _, result in left} | _added(program)
    waiting = {fqn for fqn in program.partial if program.reduces(fqn) != "none"}
    for fqn in sorted({*(program.gradients or ()), *waiting} - given):
        fail(program, fact, program.output, f"the gradient of {fqn!r} is not returned.")


def _reductions_needed(program: Program, fqn: str, how: Reductions) -> list[Any]:
    """What the gradient of a parameter must have gone through, in order."""
    if program.comm_hook and how != "shards":
        return [ops.comm_hook]
    grid = program.grid(fqn)
    scattered = [ops.reduce_scatter] if grid.shards > 1 else []
    if how == "shards":
        return scattered
    rest = [ops.all_reduce] if grid.replicas > 1 else []
    return [*scattered, *rest, *([ops.store] if program.offloaded else [])]


def _sent_by_rank(program: Program) -> None:
    """A gradient is cut along the dimension of its parameter: those along 0 lie so already."""
    for launch in program.graph.nodes:
        if launch.target not in (ops.reduce_scatter, ops.comm_hook):
            continue
        for operand in tags.operands(launch):
            for row in walk.packed_rows(operand) or [operand]:
                layout = program.layouts.get(tags.get(row).fqn or "")
                if layout is not None:
                    _cut_along(program, row, layout)


def _cut_along(program: Program, sent: fx.Node, layout: ParamLayout) -> None:
    """`sent` is permuted once, of a view with the ranks at the place of the dimension.

    Along dimension 0 it is not. What is padded shows in the shape, but for where.
    """
    expected, found = [], []
    if layout.dim:
        ranks = layout.parts[layout.dim]
        split, order = split_by_rank(layout.padded_shape, ranks, layout.dim)
        expected = [(split, order)]
        if layout.padding:
            before = len(layout.shape) - 1 - layout.dim
            expected.append(([0, 0] * before + [0, layout.padding], []))
    node = sent
    while node.op == "call_function" and tags.get(node).role == "pad":
        source, given = tags.source(node), node.args[1:2]
        if node.target is aten.permute.default:
            found.append((list(source.meta["val"].shape), list(cast("list[int]", given[0]))))
        if node.target is aten.constant_pad_nd.default and layout.dim:
            found.append((list(cast("list[int]", given[0])), []))
        node = source
    if found != expected:
        what = f"%{sent.name} is not cut along dimension {layout.dim} of {list(layout.shape)}, "
        what += f"which the parameter {tags.get(sent).fqn!r} is sharded along."
        fail(program, Fact.REDUCED_ONCE, sent, what)


def _operations(reductions: Sequence[Any]) -> str:
    return ", ".join(ops.OPERATORS[target].name for target in reductions)


def _added(program: Program) -> set[str]:
    """Parameters whose gradient is added to an accumulated one that the caller holds."""
    return {
        tags.get(node).fqn or ""
        for node in program.graph.find_nodes(op="placeholder")
        if tags.get(node).role == "accumulated"
        and program.reduces(tags.get(node).fqn or "") == "none"
        if any(user.target is torch.ops.aten.add_.Tensor for user in node.users)
    }


def _all_returned(program: Program, seen: dict[fx.Node, str]) -> None:
    """Each gradient in a packed tensor that is reduced is returned."""
    names = {result.name for _, result in _left_by_backward(program)}
    for item in seen:
        if tags.get(item).fqn == "":
            for fqn in _packed(tags.operands(tags.source(item))[walk.item_index(item)]):
                if fqn not in names:
                    what = f"the gradient of {fqn!r}, which %{item.name} holds, is not returned."
                    fail(program, Fact.REDUCED_ONCE, item, what)


def _divided_alike(program: Program) -> None:
    """All gradients are reduced by one operation and divided by one number in all.

    Except where a unit has a divisor of its own: then its gradients are. On meshes of different
    numbers of ranks, either the divisors are equal, or those per rank.
    """
    rows: Rows = {}
    groups: dict[float | None, dict[fx.Node, tuple[str, Way]]] = {}
    for value, result in _left_by_backward(program):
        if result.kind == "grad" and result.name in program.params and not program.comm_hook:
            factor = program.units[program.params[result.name].unit].divide_factor
            how = _divided(program, value, result.name, rows)
            groups.setdefault(factor, {})[value] = result.name, how
    for ways in groups.values():
        found = _with_operations(program, ways)
        per_rank = {
            node: (divisor / program.grid(name).divisor, {*operations})
            for node, (name, (divisor, operations)) in found.items()
        }
        in_all = {node: (how[0], {*how[1]}) for node, (_, how) in found.items()}
        kinds = min(per_rank, in_all, key=lambda known: len({str(how) for how in known.values()}))
        (usual, _), *_ = collections.Counter(map(str, kinds.values())).most_common()
        others = next(how for node, (_, how) in found.items() if str(kinds[node]) == usual)
        for value, (name, how) in found.items():
            if str(kinds[value]) != usual:
                what = f"the gradient of {name!r} is {_way(how)}, the others are {_way(others)}."
                fail(program, Fact.REDUCED_ONCE, value, what)


Way = tuple[float, tuple[str, ...]]  # divisor of the sum over ranks, operations


def _with_operations(
    program: Program, ways: dict[fx.Node, tuple[str, Way]]
) -> dict[fx.Node, tuple[str, Way]]:
    """`ways`, where a mesh of one rank, which reduces nothing, has the operations of another."""
    usual: tuple[str, ...] = next((how[1] for _, how in ways.values() if how[1]), ())
    return {
        node: (name, (how[0], usual if program.grid(name).ranks == 1 else how[1]))
        for node, (name, how) in ways.items()
    }


def _way(how: Way) -> str:
    divisor, operations = how
    return f"reduced by {', '.join(operations) or 'nothing'} and divided by {divisor:g}"


Rows = dict[fx.Node, dict[str | None, fx.Node]]  # packed tensor -> FQN -> its rows in it


def _divided(
    program: Program, value: fx.Node, fqn: str, known: Rows
) -> tuple[float, tuple[str, ...]]:
    """What the sum over ranks is divided by, and the operations of the reductions."""
    divisor, operations, node = 1.0, [], value
    grid = program.grid(fqn)
    while node.op == "call_function":
        made = tags.source(node) if node.target is operator.getitem else None
        if made is not None and transfers.is_reduction(made):
            operation = ops.argument(made, "op")
            if operation is not None:
                ranks = grid.size(ops.group(made) or "") or 1
                divisor *= ranks if operation == "avg" else 1.0
                operations += ["sum" if operation == "avg" else operation]
            node = tags.operands(made)[walk.item_index(node)]
        elif tags.get(node).role in ("post_reduction", "pad"):
            if node.target in (aten.div_.Scalar, aten.div.Scalar):
                divisor *= float(cast("float", node.args[1]))
            if not isinstance(node.args[0], (list, tuple)):
                node = tags.source(node)
                continue
            if node not in known:
                inputs = reversed(node.all_input_nodes)  # the first of a name counts
                known[node] = {name: row for row in inputs for name in _names_of(row)}
            if fqn not in known[node]:
                break
            node = known[node][fqn]
        else:
            break
    return round(divisor, 6), tuple(operations)


def _names_of(row: fx.Node) -> list[str | None]:
    """FQNs of a row of a packed tensor, and of what it was padded or cast from."""
    found = [tags.get(row).fqn]
    while row.op == "call_function" and tags.get(row).role in ("pad", "post_reduction"):
        if len(row.all_input_nodes) != 1:
            break
        (row,) = row.all_input_nodes
        found.append(tags.get(row).fqn)
    return found


def _left_by_backward(program: Program) -> list[tuple[fx.Node, Result]]:
    """The results, and the gradients that are stepped instead of returned."""
    stepped = [(node, Result("grad", fqn)) for fqn, node in transfers.stepped(program).items()]
    return [*zip(program.values, program.results, strict=True), *stepped]


def _one_reduction(program: Program, item: fx.Node, fqn: str, seen: dict[fx.Node, str]) -> None:
    """`item` is the reduced gradient of `fqn`, by its tag and its operand's, and no other's."""
    fact, launch = Fact.REDUCED_ONCE, tags.source(item)
    if item in seen:
        fail(program, fact, item, f"the gradient of {fqn!r} is that of {seen[item]!r}.")
    seen[item] = fqn
    for node in (item, tags.operands(launch)[walk.item_index(item)]):
        if tags.get(node).fqn != fqn:
            what = f"%{node.name}, which is that of {tags.get(node).fqn!r}"
            fail(program, fact, item, f"the gradient of {fqn!r} is made of {what}.")


def _by_its_group(program: Program, launch: fx.Node, fqn: str) -> None:
    schema = schema_of(launch.target).arguments
    kind = {argument.name: argument.default_value for argument in schema}.get("group")
    usual = None if kind is None else program.grid(fqn).group(str(kind))
    if usual is not None and ops.group(launch) != usual:
        what = f"%{launch.name} reduces in {ops.group(launch)!r}, not in {usual!r}."
        fail(program, Fact.REDUCED_ONCE, launch, what)


def _adds_partial(
    program: Program,
    value: fx.Node,
    fqn: str,
    items: Sequence[fx.Node],
    sums: Sequence[fx.Node],
    order: Mapping[fx.Node, int],
) -> None:
    """The partial sum that a gradient has is added, once, between reduce-scatter and all-reduce."""
    fact = Fact.REDUCED_ONCE
    if len(sums) != int(fqn in program.partial):
        what = f"{len(sums)} partial sums of the gradient of {fqn!r} come in."
        fail(program, fact, value, what)
    for total in sums:
        readers = [n for n in total.users if n.op == "call_function" and n.target is not ops.free]
        if [reader.target for reader in readers] != [aten.add_.Tensor]:
            what = f"the partial sum of {fqn!r} is not added once to its gradient."
            fail(program, fact, readers[-1] if readers else total, what)
        (added,) = readers
        sent_on = [tags.source(n) for n in items if tags.source(n).target is ops.all_reduce]
        if program.grid(fqn).shards > 1:
            made = items[-1] if items else tags.source(added)
            right = tags.source(added) is made and tags.get(made).fqn == fqn
        else:  # nothing is scattered: what goes into the all-reduce, or is returned
            ends = [tags.operands(tags.source(n))[walk.item_index(n)] for n in items]
            right = added in (ends or [value])
        if not right or any(order[launch] < order[added] for launch in sent_on):
            what = f"%{added.name} adds the partial sum of {fqn!r} to something else."
            fail(program, fact, added, what)


def _fits_its_shard(program: Program, value: fx.Node, result: Result) -> None:
    fqn = result.name
    param, val = program.params[fqn], value.meta["val"]
    shape = program.layouts[fqn].shard_shape
    if tuple(val.shape) != shape:
        what = f"%{value.name} is {list(val.shape)}, but a shard of {fqn!r} is {list(shape)}."
        fail(program, Fact.REDUCED_ONCE, value, what)
    keeps = program.units[param.unit].precision.keep_low_precision_grads
    if val.dtype is not param.dtype and not keeps and result.kind == "grad":
        what = f"%{value.name} is of {val.dtype}, but a shard of {fqn!r} of {param.dtype}."
        fail(program, Fact.REDUCED_ONCE, value, what)


def _accumulated_once(program: Program) -> None:
    """An accumulated gradient is read once: added to, or reduced; reduced if the step syncs."""
    fact = Fact.REDUCED_ONCE
    both = _left_by_backward(program)
    rows: Rows = {}
    made = {r.name: _origin(v, r.name, rows) for v, r in both if r.name in program.params}
    for node in program.graph.find_nodes(op="placeholder"):
        if tags.get(node).role != "accumulated":
            continue
        fqn = tags.get(node).fqn or ""
        readers = [n for n in node.users if n.target is not ops.free and n.op == "call_function"]
        if len(readers) > 1:
            readers.sort(key=walk.order(program).__getitem__)
            what = f"%{readers[1].name} is the second to read the accumulated gradient of {fqn!r}."
            fail(program, fact, readers[1], what)
        if program.reduces(fqn) != "none" and made.get(fqn) is not node:
            what = f"what was accumulated of the gradient of {fqn!r} is not reduced."
            fail(program, fact, made.get(fqn, node), what)


def _origin(value: fx.Node, fqn: str, known: Rows) -> fx.Node:
    """The gradient that `value` was made of by reductions, paddings, divisions and casts."""
    node = value
    for item in _reductions_of(value):
        node = tags.operands(tags.source(item))[walk.item_index(item)]
        if node not in known:
            rows = reversed(walk.packed_rows(node))  # the first of a name counts
            known[node] = {tags.get(row).fqn: row for row in rows}
        node = known[node].get(fqn, node)
    while node.op == "call_function" and tags.get(node).role in ("pad", "post_reduction"):
        node = tags.source(node)
    return node


def _reductions_of(value: fx.Node) -> list[fx.Node]:
    """Getitems of the reductions that `value` went through, the last first."""
    found: list[fx.Node] = []
    node = value
    while node.op == "call_function":
        if node.target is operator.getitem and transfers.is_reduction(tags.source(node)):
            found.append(node)
            if tags.source(node).target is ops.comm_hook:
                break
            node = tags.operands(tags.source(node))[walk.item_index(node)]
        elif tags.get(node).role == "post_reduction":
            node = tags.source(node)
        else:
            break
    return found


def _packed(sent: fx.Node) -> dict[str | None, tuple[int, int]]:
    """Per gradient in a flat copy: where this rank's part of it begins and ends in the result."""
    found: dict[str | None, tuple[int, int]] = {}
    start = 0
    for row in walk.packed_rows(sent):
        end = start + row.meta["val"].shape[-1]
        found[tags.get(row).fqn] = (start, end)
        start = end
    return found


def _piece(value: fx.Node, item: fx.Node) -> tuple[Any, ...]:
    """Begin and end of `value` in the flat tensor `item`: those of the slice that made it."""
    while value is not item and value.target is not aten.slice.Tensor:
        value = tags.source(value)
    return value.args[2:4] if value is not item else ()


def equal_chunks(program: Program) -> None:
    """Every collective's buffers are its size times its inputs (or the inverse), row-wise."""
    grids = program.grids.values()
    of_model: dict[str | None, tuple[Any, ...]] = {}  # group -> number and name of its ranks
    for node in program.graph.nodes:
        group = ops.group(node)
        if is_called_otherwise(node):
            what = f"%{node.name} is not what the model has called."
            fail(program, Fact.EQUAL_CHUNKS, node, what)
        if ops.of(node).of_model:
            who = node.args[1], *(ops.argument(node, name) for name in ("ranks", "stride"))
            if of_model.setdefault(group, who) != who:
                what = f"%{node.name} is one of the ranks {who}, but {group!r} has "
                fail(program, Fact.EQUAL_CHUNKS, node, what + f"{of_model[group]}.")
        elif group is not None:
            size = next(filter(None, (grid.size(group) for grid in grids)), None)
            if node.args[1] != size:
                what = f"%{node.name} is one of {node.args[1]} ranks, but {group!r} has {size}."
                fail(program, Fact.EQUAL_CHUNKS, node, what)
        if node.target in ops.OPERATORS and node.meta.get("val") is not None:
            _makes_what_it_says(program, node)
        if node.op == "call_function" and tags.get(node).role in ("pad", "post_reduction"):
            _is_what_it_says(program, node)
    for launch in filter(lambda node: ops.of(node).grows, program.graph.nodes):
        size = cast("int", launch.args[1])
        if ops.argument(launch, "dims"):
            _cut_as_placed(program, launch)
            continue
        ins = [t for s in tags.operands(launch) for t in tags.tensors(s.meta["val"])]
        outs = list(tags.tensors(launch.meta["val"]))
        small, large = (ins, outs) if ops.of(launch).grows > 0 else (outs, ins)
        for part, full in zip(small, large, strict=True):
            even = full.shape == gathered(part.shape, size) and full.dtype is part.dtype
            if not even or not full.is_contiguous():
                fail(
                    program,
                    Fact.EQUAL_CHUNKS,
                    launch,
                    f"%{launch.name} moves {dump.types(part)} and {dump.types(full)}: not "
                    f"{size} equal contiguous chunks.",
                )


def _cut_as_placed(program: Program, reshard: fx.Node) -> None:
    """Each parameter is cut along the dimension that it is sharded along, into its chunks."""
    _, size, _, dims, counts = cast("tuple[Any, int, str, list[int], list[int]]", reshard.args)
    for node, dim, rows in zip(tags.operands(reshard), dims, counts, strict=True):
        layout = program.layouts[tags.get(node).fqn or ""]
        expected = layout.dim, layout.chunk_shape(size)[layout.dim]
        if (dim, rows) != expected:
            what = f"%{reshard.name} cuts %{node.name} into {rows} rows along dimension {dim}, but "
            what += f"of {size} ranks each has {expected[1]} along {expected[0]}."
            fail(program, Fact.EQUAL_CHUNKS, reshard, what)


def _is_what_it_says(program: Program, node: fx.Node) -> None:
    """The fake value of what a pass put around a collective is what the operator makes."""
    if isinstance(node.meta["val"], (list, tuple)) or node.target is operator.getitem:
        return  # an operator's of ours: that is looked at there
    given = node.all_input_nodes[0].meta["val"]
    shape, dtype = list(given.shape), given.dtype
    if node.target is aten.constant_pad_nd.default:
        padding = cast("list[int]", node.args[1])
        for i in range(len(padding) // 2):
            shape[-1 - i] += padding[2 * i] + padding[2 * i + 1]
    elif node.target is aten._to_copy.default:
        dtype = cast("torch.dtype", node.kwargs.get("dtype", dtype))
    elif node.target is aten.view.default:
        shape = _without_minus_one(cast("list[int]", node.args[1]), given.numel())
    elif node.target is aten.slice.Tensor:
        dim, start, end = cast("tuple[int, int, int]", node.args[1:4])
        shape[dim] = len(range(shape[dim])[start:end])
    elif node.target not in (aten.clone.default, aten.div_.Scalar, aten.add_.Tensor):
        made = program.refake(node)
        shape, dtype = list(made.shape), made.dtype
    val = node.meta["val"]
    if list(val.shape) != shape or val.dtype is not dtype:
        what = f"%{node.name} is {dump.types(val)}, but makes {shape} of {dtype}."
        fail(program, Fact.EQUAL_CHUNKS, node, what)


def _without_minus_one(shape: Sequence[int], numel: int) -> list[int]:
    """The shape that ``view(shape)`` gives a tensor of `numel` items; empty if it has none."""
    rest = math.prod(n for n in shape if n != -1)
    found = [numel // rest if n == -1 and rest else n for n in shape]
    return found if math.prod(found) == numel else []


def _makes_what_it_says(program: Program, node: fx.Node) -> None:
    """The fake values of an operator of ours and of its getitems are what it makes."""
    made = list(tags.tensors(program.refake(node)))
    if dump.types(node.meta["val"]) != dump.types(made):
        what = f"%{node.name} is {dump.types(node.meta['val'])}, but makes {dump.types(made)}."
        fail(program, Fact.EQUAL_CHUNKS, node, what)
    for item in node.users:
        if walk.is_item_of(item, node):
            value, expected = item.meta["val"], made[walk.item_index(item)]
            if (value.shape, value.dtype) != (expected.shape, expected.dtype):
                what = f"%{item.name} is {dump.types(value)}, but %{node.name} makes "
                fail(program, Fact.EQUAL_CHUNKS, item, what + f"{dump.types(expected)} there.")
