"""async-tensor-parallel: a matrix product and its collective in parts, which overlap."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import fx

from fxshard._torch import graphs
from fxshard._torch.traced_collectives import WAIT, note_stands_for, ranks_of
from fxshard.cost import operators
from fxshard.hardware import Hardware, hardware_of
from fxshard.ir import layout, tags
from fxshard.ir.program import Fact, Program

aten: Any = torch.ops.aten
_functional = torch.ops._c10d_functional
GATHER: Any = _functional.all_gather_into_tensor.default
SCATTER: Any = _functional.reduce_scatter_tensor.default
VIEWS = (aten.view.default, aten._unsafe_view.default)
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  # -> place of the rows


@dataclasses.dataclass(frozen=True)
class SequenceCollective:
    """A collective whose tensor is cut along the sequence, with the products beside it.

    Attributes:
        call, wait: the collective.
        full: ``[batch, sequence, width]``: what is gathered in order, or what is to be reduced.
        products: that read all rows of the gathered tensor, or the one that is reduced.
    """

    call: fx.Node
    wait: fx.Node
    full: fx.Node
    products: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class AsyncTensorParallel:
    """Gather, multiply and reduce a part of the batch while the next part is on its way.

    Of sequence parallelism: an all-gather along the sequence before matrix products of all its
    rows, and a reduce-scatter along it after one, are cut along the batch. Part i is multiplied
    while part i + 1 is gathered, and reduced while part i + 1 is multiplied: launch-collectives
    launches each part as early as its data allow.

    A sum has the same terms in the same order, but a library of kernels may choose another kernel
    for fewer rows, whose sums round otherwise; an all-reduce or reduce-scatter of more than two
    ranks may add them up in another order for other sizes.

    A collective is cut into as many parts as take the least time on `hardware`, if that is less
    than uncut: kernels and collectives take a time of their own each, and the results of parts are
    copied together.

    Attributes:
        hardware: whose times decide.
        parts: the most that one collective is cut into.

    Before::

        %mm = aten.mm(%x, %w)                                        # [4 * 8, 16]
        %view = aten.view(%mm, [4, 8, 16])
        ...                                                          # cut along the sequence
        %rs = _c10d_functional.reduce_scatter_tensor(%cat, "sum", 2, "tp")
        %done = _c10d_functional.wait_tensor(%rs)

    After::

        %rows = aten.slice(%x, 0, 0, 16)
        %mm_part = aten.mm(%rows, %w)                                # [2 * 8, 16]
        ...
        %rs_part = _c10d_functional.reduce_scatter_tensor(%cat_part, "sum", 2, "tp")
        ...                                                          # the other part
        %done = aten.cat([%done_part, %done_part_1])
    """

    name: ClassVar[str] = "async-tensor-parallel"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    hardware: str | Hardware = "h100"
    parts: int = 4

    def apply(self, program: Program) -> None:
        hardware = hardware_of(self.hardware)
        for call in list(program.graph.nodes):
            found = gathered(call) or scattered(call)
            if found is None or program.domain is not None:
                continue
            count = best(found, hardware, self.parts)
            if count > 1:
                rewrite = gather_in_parts if found.call.target is GATHER else scatter_in_parts
                rewrite(_CutWriter(program, found.call), found, count)


def gathered(call: fx.Node) -> SequenceCollective | None:
    """``products(view(cat(split(wait(call)), 1)))``; `call` gathers ``[batch, part, width]``."""
    wait = _only(call.users) if call.target is GATHER else None
    split = _only(wait.users) if wait is not None and wait.target is WAIT else None
    if split is None or split.target is not aten.split.Tensor or len(split.args) != 2:
        return None
    sent = tags.source(call).meta["val"]
    full = _only({user: None for item in split.users for user in item.users})
    in_order = [item.args[1] for item in split.users] == list(range(len(split.users)))
    ordered = full is not None and full.target is aten.cat.default and full.args[1:] == (1,)
    if sent.dim() != 3 or split.args[1] != sent.shape[0] or not in_order or not ordered:
        return None
    assert full is not None
    if list(cast("Any", full.args[0])) != list(split.users) or not sent.is_contiguous():
        return None
    readers = [(n, view) for view in full.users if _is_flat(view, full) for n in view.users]
    own = [n for n, view in readers if _multiplies(n, view) and _beside(n, full)]
    return SequenceCollective(call, cast("fx.Node", wait), full, tuple(own)) if own else None


def scattered(call: fx.Node) -> SequenceCollective | None:
    """``wait(call(cat(split(view(product), part, 1))))``."""
    wait = _only(call.users) if call.target is SCATTER else None
    joined = tags.source(call) if wait is not None and wait.target is WAIT else None
    if joined is None or joined.target is not aten.cat.default or len(joined.args) != 1:
        return None
    items = list(cast("Sequence[fx.Node]", joined.args[0]))
    if any(item.target is not operator.getitem or len(item.users) != 1 for item in items):
        return None
    splits = [tags.source(item) for item in items]
    fulls = {tags.source(split) for split in splits}
    alike = {(split.target, split.args[1:]) for split in splits}
    full = _only(dict.fromkeys(fulls))
    if full is None or len(alike) != 1 or [item.args[1] for item in items] != [*range(len(items))]:
        return None
    target: Any
    rest: Any
    target, rest = next(iter(alike))
    val = full.meta["val"]
    product = tags.source(full) if full.target in VIEWS else full
    fits = val.dim() == 3 and target is aten.split.Tensor and rest[1:] == (1,)
    if not fits or rest[0] * len(items) != val.shape[1] or not _multiplies(product):
        return None
    private = set(full.users) == set(splits) and _only(product.users) is full
    flat = tuple(product.meta["val"].shape) == (val.shape[0] * val.shape[1], val.shape[2])
    if not private or not flat or not _beside(product, call) or len(joined.users) != 1:
        return None
    return SequenceCollective(call, cast("fx.Node", wait), full, (product,))


def _only(nodes: Any) -> fx.Node | None:
    found = list(nodes)
    return found[0] if len(found) == 1 else None


def _is_flat(view: fx.Node, full: fx.Node) -> bool:
    shape, val = full.meta["val"].shape, cast("Any", view.meta.get("val"))
    flat = view.target in VIEWS and tuple(val.shape) == (shape[0] * shape[1], shape[2])
    return bool(flat)


def _multiplies(node: fx.Node, rows: fx.Node | None = None) -> bool:
    """True if `node` is a product; of `rows` in rows, and nowhere else, if they are given."""
    place = PRODUCTS.get(node.target)
    if place is None or node.kwargs:
        return False
    if rows is not None and [i for i, a in enumerate(node.args) if a is rows] != [place]:
        return False  # such as the gradient of a weight, which is a sum over rows
    return place == 0 or cast("fx.Node", node.args[0]).meta["val"].dim() == 1  # a bias for all rows


def _beside(product: fx.Node, other: fx.Node) -> bool:
    """Both are computed in one phase, by one unit."""
    if product.op != "call_function":
        return False
    mine, its = tags.get(product), tags.get(other)
    return (mine.phase, mine.unit) == (its.phase, its.unit) and mine.role == "compute"


def best(found: SequenceCollective, hardware: Hardware, most: int) -> int:
    """Into how many parts a collective and its products are cut to take the least time.

    Of what is sent, exposed is what neither products of other parts nor other operators hide.
    """
    ranks = ranks_of(found.call)
    if ranks is None:
        return 1
    sent = operators.collective(found.call, ranks.size)
    products = sum(operators.node_seconds(node, hardware, ranks.size) for node in found.products)
    kernels = len(found.products) * hardware.launch_overhead
    copied = (*found.products, found.full) if found.call.target is GATHER else (found.wait,)
    copies = sum(2 * _bytes(node) / hardware.memory_bandwidth for node in copied)
    copies += len(copied) * hardware.launch_overhead
    hidden = sum(operators.node_seconds(n, hardware, ranks.size) for n in meanwhile(found))
    batch = found.full.meta["val"].shape[0]
    seconds: dict[int, float] = {}
    for count in (n for n in range(1, most + 1) if batch % n == 0):
        moving = operators.ring_seconds(
            sent.total / count, sent.ranks, hardware, stride=sent.stride, passes=sent.passes
        )
        each = kernels + max(products - kernels, 0.0) / count
        exposed = moving + (count - 1) * max(moving - each, 0.0)
        again = copies if count > 1 else 0.0
        seconds[count] = count * each + again + max(exposed, hidden)
    return min(seconds, key=seconds.__getitem__)


def meanwhile(found: SequenceCollective) -> list[fx.Node]:
    """What launch-collectives may let run between launch and wait of a collective, uncut.

    That are neighbours, up to the next row, which neither lead to the one nor follow the other.
    """
    run = [found.call]
    while _beside(run[0].prev, found.call):
        run.insert(0, run[0].prev)
    while _beside(run[-1].next, found.call):
        run.append(run[-1].next)
    before, after = {found.call}, {found.wait}
    for node in reversed(run):
        if node in before:
            before.update(node.all_input_nodes)
    for node in run:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    return [node for node in run if node not in before | after]


def _bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    return int(val.numel() * val.element_size())


class _CutWriter:
    """Appends operators with the tag of another, and their fake values."""

    def __init__(self, program: Program, like: fx.Node) -> None:
        self.program: Program = program
        self.like: fx.Node = like

    def call(self, target: Any, *args: Any, like: fx.Node | None = None) -> fx.Node:
        made = self.program.graph.call_function(target, args)
        tags.put(made, tags.changed(tags.get(like or self.like), fqn=None))
        made.meta["val"] = self.program.refake(made)
        return made

    def collective(self, call: fx.Node, sent: fx.Node) -> fx.Node:
        """The same of a part, with its wait; returns that."""
        made = self.call(call.target, sent, *call.args[1:], like=call)
        note_stands_for(made, call)
        wait = self.call(WAIT, made, like=call)
        wait.meta["val"] = made.meta["val"].detach()
        return wait

    def product(self, product: fx.Node, rows: fx.Node) -> fx.Node:
        """`product` of some rows."""
        args = list(product.args)
        args[PRODUCTS[product.target]] = rows
        return self.call(product.target, *args, like=product)

    def replace(self, node: fx.Node, parts: list[fx.Node]) -> None:
        """Put the parts, one after the other along the first dimension, in the place of `node`."""
        whole = self.call(aten.cat.default, parts, like=node)
        tags.update(whole, fqn=tags.get(node).fqn)
        stale = tags.storage_ids(node)
        node.replace_all_uses_with(whole)
        self.program.refresh_views(whole, stale)
        _erase(self.program.graph, node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase `node`, and what only it has read."""
    todo = [node]
    while todo:
        each = todo.pop()
        stays = each.op != "call_function" or tags.writes(each) or tags.is_random(each)
        if not each.users and not stays and not graphs.is_erased(each):
            todo += each.all_input_nodes
            graph.erase_node(each)


def gather_in_parts(write: _CutWriter, found: SequenceCollective, count: int) -> None:
    """Gather part by part, and multiply each."""
    graph, call, full = write.program.graph, found.call, found.full
    sent, shape = tags.source(call), full.meta["val"].shape
    each = shape[0] // count
    rows: list[fx.Node] = []
    wholes: list[fx.Node] = []
    with graph.inserting_before(call):
        cut = [
            write.call(aten.slice.Tensor, sent, 0, i * each, (i + 1) * each) for i in range(count)
        ]
        waits = [write.collective(call, part) for part in cut]
    with graph.inserting_before(full):
        for wait in waits:
            split = write.call(aten.split.Tensor, wait, each, like=full)
            items = range(len(split.meta["val"]))
            parts = [write.call(operator.getitem, split, i, like=full) for i in items]
            wholes.append(write.call(aten.cat.default, parts, 1, like=full))
            flat = [each * shape[1], shape[2]]
            rows.append(write.call(aten.view.default, wholes[-1], flat, like=full))
    flat_views = [view for view in full.users if _is_flat(view, full)]
    readers = {reader for view in flat_views for reader in view.users} - {*found.products}
    if readers or len(flat_views) < len(full.users):  # such as the gradient of a weight
        with graph.inserting_before(full):
            write.replace(full, wholes)
    for product in found.products:
        with graph.inserting_before(product):
            write.replace(product, [write.product(product, part) for part in rows])


def scatter_in_parts(write: _CutWriter, found: SequenceCollective, count: int) -> None:
    """Multiply part by part, and reduce each."""
    graph, call = write.program.graph, found.call
    (product,) = found.products
    rows = cast("fx.Node", product.args[PRODUCTS[product.target]])
    batch, length, width = found.full.meta["val"].shape
    each = batch // count
    joined = tags.source(call)
    ranks = len(cast("Any", joined.args[0]))
    shape = [each, length, width]
    rows_of_rank = layout.part(shape, ranks, 1)[1]
    waits: list[fx.Node] = []
    with graph.inserting_before(found.wait):
        for i in range(count):
            bounds = (0, i * each * length, (i + 1) * each * length)
            part = write.call(aten.slice.Tensor, rows, *bounds, like=product)
            made = write.product(product, part)
            view = write.call(aten.view.default, made, shape, like=product)
            split = write.call(aten.split.Tensor, view, rows_of_rank, 1, like=joined)
            items = [write.call(operator.getitem, split, r, like=joined) for r in range(ranks)]
            sent = write.call(aten.cat.default, items, like=joined)
            waits.append(write.collective(call, sent))
        write.replace(found.wait, waits)
