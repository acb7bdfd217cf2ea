"""What of a graph is computed row by row, and what an operator does to some of the rows.

Note: rows
==========
Of a value with rows, the first dimensions together count them: ``[tokens, vocabulary]`` and
``[batch, sequence, vocabulary]`` have the same rows. In a chunk of rows they are one dimension, the
first, so that views between the two are nothing there. An operator works by rows if each row of its
result depends on that row of its operands alone, or if it sums over rows: then chunks give parts of
the sum. Operators that do neither, or draw random numbers, have no form for a chunk.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxshard._torch.operators import schema_of
from fxshard.ir import tags

aten: Any = torch.ops.aten

ROWS = "rows"  # in the sizes of a `RowForm`: how many rows the chunk has
MEAN, SUM = 1, 2  # at::Reduction
NLL = aten.nll_loss_forward.default
PRODUCTS = (aten.mm.default, aten.addmm.default)


class NotByRowsError(Exception):
    """An operator that cannot be computed on a chunk of rows; says why."""


@dataclasses.dataclass(frozen=True)
class ChunkRows:
    """In the arguments of a `RowForm`: the chunk's rows of a value that is there in full.

    Attributes:
        node: the value.
        dims: how many of its dimensions count rows.
        transposed: the rows are wanted as columns.
    """

    node: fx.Node
    dims: int
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Flat:
    """In the arguments of a `RowForm`: a value without rows, viewed in another shape."""

    node: fx.Node
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowForm:
    """What an operator is on a chunk of rows.

    Attributes:
        target: the operator; None: its first argument, as it is.
        args, kwargs: nodes of the region stand for what they are in the chunk, other nodes for
            themselves; `ChunkRows`, `Flat` and `ROWS` say what else there is.
        dims: how many dimensions of the full result count rows; 0: the result has none, and each
            chunk has its own; -1: rows are the columns of a matrix; None: it is a sum over rows.
        whole: of a sum, by how many elements a mean divides it; else 1.
        gathers: the result has rows, and is wanted in full.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    dims: int | None = 1
    whole: int = 1
    gathers: bool = False


@dataclasses.dataclass
class RowRegion:
    """Operators that are computed by rows, each with its form.

    Attributes:
        count: rows.
        shapes: the dimensions that count rows, in each way in which the region has them.
        forms: by node.
    """

    count: int
    shapes: set[tuple[int, ...]]
    forms: dict[fx.Node, RowForm] = dataclasses.field(default_factory=dict)

    def has(self, node: Any) -> bool:
        """True if `node` is of the region, and its value has rows."""
        form = self.forms.get(node) if isinstance(node, fx.Node) else None
        return form is not None and form.dims is not None and not form.gathers

    def reads(self, node: fx.Node) -> bool:
        """True if `node` reads a value of the region that has rows."""
        return any(self.has(source) for source in node.all_input_nodes)

    def add(self, node: fx.Node) -> None:
        """Take `node` in, and what backward makes for it alone.

        Raises:
            NotByRowsError: it has no form.
        """
        if node in self.forms:
            return
        rule = RULES.get(node.target)
        if rule is None and _is_pointwise(node):
            rule = _pointwise
        if rule is None:
            raise NotByRowsError("is not known to work row by row")
        form = rule(self, node)
        self.forms[node] = form
        if form.dims is not None and form.dims > 0:
            self.shapes.add(tuple(_shape(node)[: form.dims]))

    def dims(self, node: fx.Node) -> int:
        """How many dimensions of the value of `node` count rows."""
        form = self.forms.get(node)
        if form is not None and form.dims is not None:
            return form.dims
        return self.split(_shape(node))

    def split(self, shape: tuple[int, ...]) -> int:
        """How many of the first dimensions count rows.

        Raises:
            NotByRowsError: no first dimensions do.
        """
        known = [n for n in range(len(shape), 0, -1) if shape[:n] in self.shapes]
        known += [n for n in range(1, len(shape) + 1) if math.prod(shape[:n]) == self.count]
        if not known:
            raise NotByRowsError(f"has no dimension for the {self.count} rows in {list(shape)}")
        return known[0]

    def source(self, node: Any) -> Any:
        """The first operand of an operator, which has rows, as an argument."""
        if not isinstance(node, fx.Node):
            raise NotByRowsError("takes no tensor of rows")
        if self.has(node):
            if self.dims(node) < 0:
                raise NotByRowsError("reads rows as columns")
            return node
        if _is_backward(node):
            self.add(node)
            return node
        return ChunkRows(node, self.split(_shape(node)))

    def operand(self, value: Any, rank: int, dims: int) -> Any:
        """An operand that is broadcast to a result of `rank` dimensions, `dims` of which are rows.

        Raises:
            NotByRowsError: its rows are others.
        """
        if not isinstance(value, fx.Node) or not isinstance(value.meta["val"], Tensor):
            return value
        shape = _shape(value)
        rest = rank - dims
        if self.has(value):
            if len(shape) != rank or self.dims(value) != dims:
                raise NotByRowsError("combines rows with others")
            return value
        if len(shape) <= rest:
            return value
        if len(shape) == rank and shape[:dims] in self.shapes:
            return self.source(value)
        if all(size == 1 for size in shape[: len(shape) - rest]):
            return Flat(value, shape[len(shape) - rest :])
        raise NotByRowsError(f"combines rows with a tensor of shape {list(shape)}")


Rule = Callable[[RowRegion, fx.Node], RowForm]
RULES: dict[Any, Rule] = {}


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def put(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return put


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and tags.get(node).phase == "backward"


def _is_pointwise(node: fx.Node) -> bool:
    known = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in known and not tags.is_random(node) and not tags.writes(node)


def _pointwise(region: RowRegion, node: fx.Node) -> RowForm:
    shape = _shape(node)
    inside = [n for n in node.all_input_nodes if region.has(n)]
    dims = region.dims(inside[0]) if inside else region.split(shape)
    take = lambda value: region.operand(value, len(shape), dims)  # noqa: E731
    args = tuple(take(value) for value in node.args)
    kwargs = {name: take(value) for name, value in node.kwargs.items()}
    return RowForm(node.target, args, kwargs, dims)


@_rule(aten._to_copy.default, aten.clone.default)
def _copy(region: RowRegion, node: fx.Node) -> RowForm:
    source = region.source(node.args[0])
    kwargs = {n: v for n, v in node.kwargs.items() if n != "memory_format"}
    return RowForm(node.target, (source,), kwargs, _dims_of(region, source))


@_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(region: RowRegion, node: fx.Node) -> RowForm:
    source = region.source(node.args[0])
    dims = _dims_of(region, source)
    before, after = _shape(cast("fx.Node", node.args[0]))[dims:], _shape(node)
    ways = [n for n in range(1, len(after) + 1) if math.prod(after[:n]) == region.count]
    if not ways:
        raise NotByRowsError("takes rows apart")
    dims = next((n for n in ways if after[n:] == before), ways[0])
    if after[dims:] == before:
        return RowForm(None, (source,), {}, dims)
    return RowForm(aten.view.default, (source, [ROWS, *after[dims:]]), {}, dims)


@_rule(aten.expand.default)
def _expand(region: RowRegion, node: fx.Node) -> RowForm:
    shape = _shape(node)
    given = cast("fx.Node", node.args[0])
    dims = region.dims(given) if region.has(given) else region.split(shape)
    source = region.operand(given, len(shape), dims)
    return RowForm(node.target, (source, [ROWS, *shape[dims:]]), {}, dims)


@_rule(aten.full.default, aten.zeros.default, aten.ones.default)
def _full(region: RowRegion, node: fx.Node) -> RowForm:
    dims = region.split(_shape(node))
    sizes = [ROWS, *_shape(node)[dims:]]
    return RowForm(node.target, (sizes, *node.args[1:]), dict(node.kwargs), dims)


@_rule(aten.new_zeros.default, aten.new_full.default)
def _new(region: RowRegion, node: fx.Node) -> RowForm:
    dims = region.split(_shape(node))
    sizes = [ROWS, *_shape(node)[dims:]]
    source = region.source(node.args[0])
    return RowForm(node.target, (source, sizes, *node.args[2:]), dict(node.kwargs), dims)


@_rule(aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
def _like(region: RowRegion, node: fx.Node) -> RowForm:
    source = region.source(node.args[0])
    return RowForm(
        node.target, (source, *node.args[1:]), dict(node.kwargs), _dims_of(region, source)
    )


def _dims_of(region: RowRegion, source: Any) -> int:
    return int(source.dims) if isinstance(source, ChunkRows) else region.dims(source)


def _placed(dim: Any, rank: int, dims: int) -> int:
    """A dimension of a value, in a chunk of it."""
    place = int(dim) % rank
    if place < dims:
        raise NotByRowsError("works along the rows")
    return place - dims + 1


def _along(number: int, added: int = 0) -> Rule:
    """The rule of an operator whose argument `number` is a dimension that does not count rows.

    Args:
        added: by how many dimensions more than its operand the dimension is counted.
    """

    def rule(region: RowRegion, node: fx.Node) -> RowForm:
        source = region.source(node.args[0])
        dims = _dims_of(region, source)
        rank = len(_shape(cast("fx.Node", node.args[0])))
        given = node.args[number] if len(node.args) > number else _default(node, number)
        several = isinstance(given, (list, tuple))
        along: Iterable[Any] = cast("Any", given) if several else [given]
        placed = [_placed(dim, rank + added, dims) for dim in along]
        args = list(node.args)
        args[number:] = [placed if several else placed[0], *args[number + 1 :]]
        take = lambda value: region.operand(value, rank, dims)  # noqa: E731
        return RowForm(node.target, (source, *map(take, args[1:])), dict(node.kwargs), dims)

    return rule


def _default(node: fx.Node, number: int) -> Any:
    given = schema_of(node.target).arguments[number].default_value
    if given is None:
        raise NotByRowsError("works along the rows")
    return given


RULES.update(
    dict.fromkeys(
        [
            *(aten._log_softmax.default, aten._softmax.default, aten.logsumexp.default),
            *(aten.amax.default, aten.amin.default, aten.argmax.default, aten.argmin.default),
            *(aten.max.dim, aten.min.dim, aten.gather.default, aten.scatter.src),
            *(aten.scatter.value, aten.scatter_add.default, aten.slice.Tensor, aten.select.int),
            *(aten.squeeze.dim, aten.squeeze.dims),
        ],
        _along(1),
    )
)
RULES[aten.topk.default] = RULES[aten._log_softmax_backward_data.default] = _along(2)
RULES[aten._softmax_backward_data.default] = _along(2)
RULES[aten.unsqueeze.default] = _along(1, added=1)


@_rule(aten.slice_backward.default, aten.select_backward.default)
def _cut_backward(region: RowRegion, node: fx.Node) -> RowForm:
    source = region.source(node.args[0])
    dims = _dims_of(region, source)
    shape = _shape(node)
    place = _placed(node.args[2], len(shape), dims)
    args = (source, [ROWS, *shape[dims:]], place, *node.args[3:])
    return RowForm(node.target, args, dict(node.kwargs), dims)


@_rule(operator.getitem)
def _getitem(region: RowRegion, node: fx.Node) -> RowForm:
    made = cast("fx.Node", node.args[0])
    shape = _shape(node)
    dims = region.split(shape) if shape else 0
    return RowForm(node.target, (made, *node.args[1:]), {}, dims)


@_rule(
    *(aten.sum.default, aten.sum.dim_IntList),
    *(aten.mean.default, aten.mean.dim),
)
def _sum(region: RowRegion, node: fx.Node) -> RowForm:
    """Along the other dimensions it works by rows; over all rows it is a sum of parts."""
    source = region.source(node.args[0])
    dims = _dims_of(region, source)
    before = _shape(cast("fx.Node", node.args[0]))
    rank = len(before)
    given: Any = node.args[1] if len(node.args) > 1 else None
    along = {int(dim) % rank for dim in given} if given else set(range(rank))
    keeps = bool(node.args[2]) if len(node.args) > 2 else False
    kwargs = dict(node.kwargs)
    if all(dim >= dims for dim in along):
        placed = [dim - dims + 1 for dim in sorted(along)]
        return RowForm(node.target, (source, placed, keeps), kwargs, dims)
    if not set(range(dims)) <= along:
        raise NotByRowsError("reduces some of the dimensions that count rows")
    placed = [0, *(dim - dims + 1 for dim in sorted(along) if dim >= dims)]
    means = node.target in (aten.mean.default, aten.mean.dim)
    whole = math.prod(before[dim] for dim in along) if means else 1
    return RowForm(aten.sum.dim_IntList, (source, placed, keeps), kwargs, None, whole)


@_rule(NLL)
def _nll(region: RowRegion, node: fx.Node) -> RowForm:
    logs, target, weight, reduction, ignored = node.args
    if len(_shape(cast("fx.Node", logs))) != 2:
        raise NotByRowsError("takes one row alone")
    region.source(logs)
    labels = region.operand(target, 1, 1)
    if reduction in (MEAN, SUM):
        return RowForm(node.target, (logs, labels, weight, SUM, ignored), {}, None)
    return RowForm(node.target, (logs, labels, weight, reduction, ignored), {}, 0)


@_rule(aten.nll_loss2d_forward.default, aten.permute.default, aten.transpose.int)
def _classes_first(region: RowRegion, node: fx.Node) -> RowForm:
    raise NotByRowsError(
        "has classes in another dimension than the last. Flatten the rows: "
        "F.cross_entropy(logits.flatten(0, 1), labels.flatten())"
    )


@_rule(aten.nll_loss_backward.default)
def _nll_backward(region: RowRegion, node: fx.Node) -> RowForm:
    gradient, logs, target, *others = node.args
    labels = region.operand(target, 1, 1)
    return RowForm(node.target, (region.operand(gradient, 1, 1), logs, labels, *others), {}, 1)


@_rule(aten.t.default)
def _t(region: RowRegion, node: fx.Node) -> RowForm:
    if region.dims(cast("fx.Node", node.args[0])) != 1:
        raise NotByRowsError("turns columns")
    return RowForm(node.target, node.args, {}, -1)


@_rule(*PRODUCTS)
def _product(region: RowRegion, node: fx.Node) -> RowForm:
    """Rows times a weight, or columns times rows, which is a sum over them."""
    *added, left, right = node.args
    form = region.forms.get(left) if isinstance(left, fx.Node) else None
    if form is not None and form.dims == -1 and not added:
        return RowForm(node.target, (left, region.source(right)), {}, None)
    if region.has(right) and not added:  # the transposed rows of what is there in full
        columns = cast("fx.Node", left)
        if columns.target is not aten.t.default:
            raise NotByRowsError("takes rows as columns")
        rows = ChunkRows(tags.source(columns), 1, transposed=True)
        return RowForm(node.target, (rows, right), {}, None)
    if not is_weight(cast("fx.Node", right)) or node.kwargs:
        raise NotByRowsError("multiplies rows by something else than a weight")
    added = [region.operand(value, 2, 1) for value in added]
    return RowForm(
        node.target, (*added, region.source(left), right), {}, 1, gathers=_is_backward(node)
    )


def outside(region: RowRegion) -> list[fx.Node]:
    """What operators of the region read that is not of it, in order."""
    found: dict[fx.Node, None] = {}

    def take(value: Any) -> Any:
        if isinstance(value, (ChunkRows, Flat)):
            value = value.node
        if isinstance(value, fx.Node):
            if value not in region.forms:
                found[value] = None
        elif isinstance(value, (list, tuple)):
            for item in value:
                take(item)

    for form in region.forms.values():
        for value in (*form.args, *form.kwargs.values()):
            take(value)
    return sorted(found)


def is_weight(node: fx.Node) -> bool:
    """True for a parameter or buffer, and what views and casts alone make of it."""
    if node.op == "placeholder":
        return tags.get(node).role in ("param", "ignored", "buffer")
    alone = len(node.all_input_nodes) == 1
    plain = node.target is aten._to_copy.default or tags.aliases_input(node)
    return alone and plain and is_weight(node.all_input_nodes[0])


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that nobody reads, and what was made for them alone."""
    todo = set(nodes)
    while todo:
        node = max(todo)
        todo.remove(node)
        if node.users or node.op != "call_function" or tags.writes(node) or tags.is_random(node):
            continue
        todo.update(node.all_input_nodes)
        graph.erase_node(node)
