"""chunk-loss: compute a linear head and its cross entropy on some of the rows at a time.

Note: one sweep
===============
The gradient of a loss is linear in the gradient that arrives at it, its tangent. So forward already
computes gradients for a tangent of 1, chunk after chunk, while the chunk's logits are there, and
backward multiplies them by the tangent. Of a chunk remain rows of the hidden states' gradient, and
a summand of the gradients of weight and bias; the logits and all that has their size are gone
before the next chunk's are made. A mean is divided by the number of labels that count, which is
counted first. Summands of low precision are added up in fp32, and rounded once.

In float16 a gradient that a mean has divided by thousands would be zero: there forward computes for
a tangent of that number, and backward divides by it, before sums are rounded.

Note: what is found
===================
The pattern is no list of spellings. From an ``nll_loss`` the pass goes back to the product with a
weight that made the logits, and from there takes in what reads them, forward and backward, as long
as `fxshard.ir.rows` knows it to work row by row or to sum over rows: upcasts, soft caps, smoothing,
masks, a z-loss. In backward it ends at the products that make gradients of hidden states and
weight. Whatever else reads a value that has the logits' rows is named in the error.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar, cast

import torch
from torch import fx

from fxshard.capture import fakes
from fxshard.errors import ConfigError
from fxshard.ir import tags
from fxshard.ir.domain import OPEN
from fxshard.ir.program import Fact, Program
from fxshard.ir.rows import (
    MEAN,
    NLL,
    PRODUCTS,
    ROWS,
    ChunkRows,
    Flat,
    NotByRowsError,
    RowForm,
    RowRegion,
    erase_unread,
    is_weight,
    outside,
)
from fxshard.ir.tangent import Tangent, above

aten: Any = torch.ops.aten

MOST_CHUNKS = 256  # each is a copy of the operators
CHOSEN_CHUNKS = 64  # at most, where the pass chooses
LOW = (torch.float16, torch.bfloat16)
LOSSES = (
    *(NLL, aten.nll_loss2d_forward.default),
    aten._log_softmax.default,  # of losses that are written out
)


@dataclasses.dataclass(frozen=True)
class ChunkLoss:
    """Neither the logits nor their gradient exist in full; forward makes gradients too.

    Attributes:
        rows: of a chunk. True: a power of two, such that a chunk's logits have about as many
            elements as the hidden states, or a quarter of those of the weight, if that is more;
            in at most `CHOSEN_CHUNKS` chunks.

    Before::

        %logits = aten.mm(%h, %t)                                           # 4 rows
        %logs = aten._log_softmax(%logits, 1, False)
        %nll = aten.nll_loss_forward(%logs, %y, None, 2, -100)              # a sum
        %loss = getitem(%nll, 0)
        %dlogs = aten.nll_loss_backward(%tangent, %logs, %y, ...)           # backward
        %dlogits = aten._log_softmax_backward_data(%dlogs, %logs, 1, torch.float32)
        %dh = aten.mm(%dlogits, %w)

    After::

        %h_0 = aten.slice(%h, 0, 0, 2)                                      # and so rows 2 and 3
        %logits_0 = aten.mm(%h_0, %t)
        ...
        %dh_0 = aten.mm(%dlogits_0, %w)
        %loss = aten.add(%loss_0, %loss_1)
        %dh_of_1 = aten.cat([%dh_0, %dh_1])
        %dh = aten.mul(%dh_of_1, %tangent)                                  # backward
    """

    rows: int | bool = True

    name: ClassVar[str] = "chunk-loss"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        training = program.signature.training
        forward = program.phase("forward")
        losses = [node for target in LOSSES for node in forward if node.target is target]
        if training and not losses:
            raise ConfigError(_without_loss(program))
        done: set[fx.Node] = set()  # of an earlier loss, such as that of the same logits
        for loss in losses:
            try:
                done |= set() if loss in done else self.rewrite(program, loss)
            except NotByRowsError as error:
                if training:
                    raise ConfigError(_refusal(loss, str(error))) from None

    def rewrite(self, program: Program, loss: fx.Node) -> set[fx.Node]:
        """Chunk the head of one loss, unless all rows are in one chunk.

        Returns:
            The operators that chunks have taken the place of.

        Raises:
            NotByRowsError: something makes it impossible.
            ConfigError: there would be too many chunks.
        """
        logits = _head_of(loss)
        count, vocabulary = logits.meta["val"].shape
        width = cast("fx.Node", logits.args[-1]).meta["val"].shape[0]
        rows = chunk_rows(self.rows, count, width, vocabulary)
        if rows >= count:
            return set()
        if program.domain is not None and OPEN in logits.meta:
            raise NotByRowsError("the number of rows is left open. Leave dynamic=... out")
        if -(-count // rows) > MOST_CHUNKS:
            raise ConfigError(
                f"chunk_loss={self.rows}: {count} rows of logits make {-(-count // rows)} chunks, "
                f"and each is a copy of the operators. Give at least {-(-count // MOST_CHUNKS)} "
                f"rows (at most {MOST_CHUNKS} chunks), or chunk_loss=True."
            )
        region = found_region(program, logits)
        _Sweep(program, logits, region).write(rows)
        return set(region.forms)


def chunk_rows(asked: int | bool, count: int, width: int, vocabulary: int) -> int:
    """Rows of a chunk.

    Args:
        asked: the option.
        count: all rows.
        width: elements of a row of the hidden states.
        vocabulary: elements of a row of the logits.
    """
    if asked is not True:
        return int(asked)
    chunks = min(-(-vocabulary // width), CHOSEN_CHUNKS)
    rows = max(-(-count // chunks), -(-width // 4))
    return 1 << (rows - 1).bit_length()


# -- what is found -------------------------------------------------------------------------------


def found_region(program: Program, logits: fx.Node) -> RowRegion:
    """All that is computed by rows from `logits`, and what of backward is computed from that.

    Raises:
        NotByRowsError: something else reads a value that has the logits' rows.
    """
    count = logits.meta["val"].shape[0]
    region = RowRegion(count, {(count,)})
    region.add(logits)
    for node in program.graph.nodes:
        if node.op != "call_function" or not region.reads(node):
            continue
        try:
            region.add(node)
        except NotByRowsError as error:
            read = next(n for n in node.all_input_nodes if region.has(n))
            raise NotByRowsError(
                f"{node.target} {tags.place(node)} reads {_said(read, logits)} and {error}"
            ) from None
    for value, result in zip(program.values, program.results, strict=True):
        if region.has(value):
            raise NotByRowsError(_returned(program, value, logits, result.kind, result.name))
    return region


def _said(node: fx.Node, logits: fx.Node) -> str:
    large = node.meta["val"].numel() == logits.meta["val"].numel()
    return f"{'the logits' if large else 'rows of the loss'} (%{node.name})"


def _returned(program: Program, value: fx.Node, logits: fx.Node, kind: str, name: str) -> str:
    if kind != "output":
        return f"the gradient of {name!r} is {_said(value, logits)}"
    where = program.signature.output_names[int(name)]
    return (
        f"{_said(value, logits)} are returned, as {where}: nobody can have them in full and in "
        f"chunks. Return the loss alone (a model of transformers does so after "
        f"fxshard.integrations.transformers.without_logits(model))"
    )


def _head_of(loss: fx.Node) -> fx.Node:
    """The product with a weight that makes the logits of a loss.

    Raises:
        NotByRowsError: there is none.
    """
    todo = [tags.source(loss)]
    for node in todo:  # the nearest first
        if node.target in PRODUCTS and is_weight(cast("fx.Node", node.args[-1])):
            return node
        if node.op == "call_function":
            todo += [n for n in node.all_input_nodes if n not in todo]
    raise NotByRowsError("no linear layer of parameters makes its logits")


def _refusal(loss: fx.Node, why: str) -> str:
    return (
        f"chunk_loss: the cross entropy {tags.place(loss)} cannot be computed in chunks of rows: "
        f"{why}. Or leave chunk_loss out."
    )


def _without_loss(program: Program) -> str:
    outputs = ", ".join(program.signature.output_names)
    return (
        f"chunk_loss: no cross entropy is in what the model computes, which returns {outputs}. A "
        f"loss that is computed of what the model returns gets the logits in full: compute "
        f"F.cross_entropy(logits.flatten(0, 1), labels.flatten()) in forward, and return the loss "
        f"alone. Or leave chunk_loss out."
    )


# -- what is written -----------------------------------------------------------------------------


class _Sweep:
    """Writes the chunks of a region into forward, and what is left of its backward."""

    def __init__(self, program: Program, logits: fx.Node, region: RowRegion) -> None:
        """See that it can be written; nothing is changed yet.

        Raises:
            NotByRowsError: a gradient depends on the loss itself.
        """
        self.program, self.graph, self.region = program, program.graph, region
        self.tangent = Tangent(region)
        self.tag = tags.changed(
            tags.get(logits), phase="forward", call=None, checkpoint=None, save=False
        )
        self.members = sorted(region.forms)
        self.sums = [n for n in self.members if region.forms[n].dims is None]
        self.means = [n for n in self.sums if n.target is NLL]
        self.counts = {
            user for n in self.means for user in n.users if user.args[1] == 1
        }  # what an nll_loss divides a mean by
        self.anchor = self._place()
        self.moved = self._required()
        self.instead: dict[fx.Node, fx.Node] = {}  # node -> what stands for it in forward
        self.totals: dict[fx.Node, fx.Node] = {}  # of an nll_loss: how many labels count
        self.full: dict[Any, fx.Node] = {}  # value with rows -> the same with them in front
        self.twins: dict[tuple[fx.Node, Any, int], fx.Node] = {}  # of an earlier, equal chunk

    def write(self, rows: int) -> None:
        """Write chunks of `rows` rows each; the last may have fewer."""
        for node in self.moved:
            self.anchor.prepend(node)
        starts = range(0, self.region.count, rows)
        parts: dict[fx.Node, list[fx.Node]] = {}
        sums: dict[fx.Node, fx.Node] = {}
        with self.graph.inserting_before(self.anchor):
            for node in self.means:
                if node.args[3] == MEAN or any(u in self.counts and u.users for u in node.users):
                    self._count(node)
            for number, start in enumerate(starts):
                chunk = _Chunk(self, number, start, min(start + rows, self.region.count))
                for node in self.members:
                    chunk.write(node, parts, sums)
            made = {node: self._sum(node, value) for node, value in sums.items()}
            for node, pieces in parts.items():
                made[node] = self.emit(node, aten.cat.default, (pieces,), f"{node.name}_of_one")
        self._replace(made)

    def emit(
        self,
        like: fx.Node,
        target: Any,
        args: Any,
        name: str,
        kwargs: dict[str, Any] | None = None,
        rows: int = 0,
    ) -> fx.Node:
        """Append an operator to the sweep, which stands on the line of `like`.

        Args:
            rows: of the chunk that it is in; its value is laid out as in others of so many rows.
        """
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        twin = self.twins.get((like, target, rows))
        val = self.program.repeated(node, twin) if twin is not None else None
        if val is None:
            val = self.program.refake(node)
            if target is not operator.getitem:
                val = fakes.of_kernel(self.program, node, val)
        if rows:
            self.twins[like, target, rows] = node
        return tags.put(node, tags.changed(self.tag, line=tags.get(like).line), val)

    def outer(self, node: fx.Node) -> fx.Node:
        """What stands in forward for a value that is not of the region."""
        if node in self.instead:
            return self.instead[node]
        if node is self.tangent.node:
            made = self._seed(node)
        elif node.op == "placeholder" or tags.get(node).phase == "forward":
            return node
        else:
            args = fx.node.map_arg(node.args, self.outer)
            kwargs = fx.node.map_arg(node.kwargs, self.outer)
            made = self._known(node, args, kwargs) or self.emit(
                node, node.target, args, f"{node.name}_of_one", kwargs
            )
        self.instead[node] = made
        return made

    def _seed(self, tangent: fx.Node) -> fx.Node:
        """The tangent for which forward computes gradients: 1, or how many labels count."""
        val = tangent.meta["val"]
        if not self.tangent.counts:
            options = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
            return self.emit(tangent, aten.full.default, ([], 1.0), "one", options)
        total = self.totals[next(n for n in self.means if n.args[3] == MEAN)]
        made = self.emit(tangent, aten.clamp.default, (total, 1), "counted")
        if made.meta["val"].dtype is not val.dtype:
            dtype = {"dtype": val.dtype}
            made = self.emit(tangent, aten._to_copy.default, (made,), "counted", dtype)
        return made

    def rows_of(self, row: ChunkRows) -> fx.Node:
        """A value with its rows in front."""
        if row.dims == 1:
            return row.node
        if row.node not in self.full:
            node, val = row.node, row.node.meta["val"]
            if not val.is_contiguous():
                dense = {"memory_format": torch.contiguous_format}
                node = self.emit(node, aten.clone.default, (node,), f"{node.name}_dense", dense)
            shape = [self.region.count, *val.shape[row.dims :]]
            self.full[row.node] = self.emit(
                node, aten.view.default, (node, shape), f"{node.name}_rows"
            )
        return self.full[row.node]

    def flat(self, flat: Flat) -> fx.Node:
        """A value without rows, in its other shape."""
        key = flat.node, flat.shape
        if key not in self.full:
            node = self.outer(flat.node)
            self.full[key] = self.emit(
                node, aten.view.default, (node, list(flat.shape)), f"{node.name}_flat"
            )
        return self.full[key]

    def _known(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node | None:
        """The view or cast of a weight that forward has already."""
        if not is_weight(node):
            return None
        for user in args[0].users:
            alike = (user.target, user.args, user.kwargs) == (node.target, args, kwargs)
            if alike and tags.get(user).phase == "forward" and user < self.anchor:
                return user
        return None

    def _place(self) -> fx.Node:
        """The node in front of which the sweep stands: the first that reads what it sums up."""
        forward = [n for n in self.members if tags.get(n).phase == "forward"]
        readers = [
            user
            for node in self.sums
            for made in (node.users if node in self.means else [node])
            for user in made.users
            if user.op == "call_function"
            and user not in self.region.forms
            and tags.get(user).phase == "forward"
        ]
        after = max(forward).next
        while after.op == "call_function" and after.target is operator.getitem:
            after = after.next
        return min(readers) if readers else after

    def _required(self) -> list[fx.Node]:
        """Forward operators after the anchor that the sweep reads, in order.

        Raises:
            NotByRowsError: one of them needs what the sweep sums up.
        """
        made = {n for n in self.sums if tags.get(n).phase == "forward"}
        results = made | {user for n in self.means for user in n.users}
        wanted = [n for n in outside(self.region) if n not in self.counts]
        stop = self.tangent.node
        upward = above(wanted, stop, lambda n: n not in self.counts)
        if results & upward:
            node = min(results & upward)
            raise NotByRowsError(
                f"gradients depend on a sum over all rows, {node.target} {tags.place(node)}"
            )
        late = [
            node
            for node in sorted(upward)
            if node.op == "call_function"
            and tags.get(node).phase == "forward"
            and not node < self.anchor
        ]
        for node in late:
            if tags.is_random(node) or tags.writes(node):
                raise NotByRowsError(f"{node.target} {tags.place(node)} cannot be moved before it")
        return late

    def _count(self, loss: fx.Node) -> None:
        """How many labels count, or the sum of their classes' weights."""
        _, labels, weight, _, ignored = cast("tuple[Any, ...]", loss.args)
        name = f"{loss.name}_count"
        dtype = tags.source(loss).meta["val"].dtype
        if weight is None:
            counted = self.emit(loss, aten.ne.Scalar, (labels, ignored), f"{name}ed")
            total = self.emit(loss, aten.sum.default, (counted,), name)
            total = self.emit(loss, aten._to_copy.default, (total,), name, {"dtype": dtype})
        else:
            out = self.emit(loss, aten.eq.Scalar, (labels, ignored), f"{name}_out")
            legal = self.emit(loss, aten.masked_fill.Scalar, (labels, out, 0), f"{name}_at")
            each = self.emit(loss, aten.index_select.default, (weight, 0, legal), f"{name}_of")
            each = self.emit(loss, aten.masked_fill.Scalar, (each, out, 0), f"{name}ed")
            total = self.emit(loss, aten.sum.default, (each,), name)
        self.totals[loss] = total
        self.instead.update((user, total) for user in loss.users if user in self.counts)

    def _sum(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """The result of `node`, from the sum of its chunks."""
        form = self.region.forms[node]
        result = next(iter(tags.tensors(node.meta["val"])))
        name = f"{node.name}_sum"
        if node in self.means and node.args[3] == MEAN:
            value = self.emit(node, aten.div.Tensor, (value, self.totals[node]), name)
        if form.whole != 1:
            value = self.emit(node, aten.div.Scalar, (value, form.whole), name)
        waits = self.tangent.counts and self.tangent.scales(node)  # to be divided, before a cast
        if value.meta["val"].dtype is not result.dtype and not waits:
            dtype = {"dtype": result.dtype}
            value = self.emit(node, aten._to_copy.default, (value,), name, dtype)
        if value.meta["val"].shape != result.shape:
            value = self.emit(node, aten.view.default, (value, list(result.shape)), name)
        return value

    def _replace(self, made: dict[fx.Node, fx.Node]) -> None:
        """Let others read what the sweep makes, times the tangent; what nobody reads goes."""
        scale: fx.Node | None = None
        for node, value in sorted(made.items()):
            old, new = node, value
            if node in self.means:
                old = next((user for user in node.users if user.args[1] == 0), node)
            elif self.tangent.scales(node):
                with self.graph.inserting_before(node):
                    if scale is None:
                        scale = self._scale(node)
                    name = f"{node.name}_scaled"
                    new = self._after(node, aten.mul.Tensor, (value, scale), name)
                    if new.meta["val"].dtype is not node.meta["val"].dtype:
                        dtype = {"dtype": node.meta["val"].dtype}
                        new = self._after(node, aten._to_copy.default, (new,), name, dtype)
            stale = tags.storage_ids(old)
            old.replace_all_uses_with(new)
            self.program.refresh_views(new, stale)
        for node, value in self.instead.items():
            if node in self.counts:
                node.replace_all_uses_with(value)
        erase_unread(self.graph, [*self.members, *(u for n in self.means for u in n.users)])

    def _scale(self, before: fx.Node) -> fx.Node:
        tangent = cast("fx.Node", self.tangent.node)
        if not self.tangent.counts:
            return tangent
        return self._after(before, aten.div.Tensor, (tangent, self.instead[tangent]), "scale")

    def _after(
        self, like: fx.Node, target: Any, args: Any, name: str, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Append an operator to backward, in no checkpoint: what it reads is saved."""
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        tag = tags.changed(tags.get(like), call=None, checkpoint=None)
        return tags.put(node, tag, self.program.refake(node))


class _Chunk:
    """The operators of a region on some of its rows."""

    def __init__(self, sweep: _Sweep, number: int, start: int, stop: int) -> None:
        self.sweep, self.number, self.start, self.stop = sweep, number, start, stop
        self.made: dict[fx.Node, fx.Node] = {}
        self.cut: dict[Any, fx.Node] = {}

    def write(
        self, node: fx.Node, parts: dict[fx.Node, list[fx.Node]], sums: dict[fx.Node, fx.Node]
    ) -> None:
        """Append what `node` is on these rows; what it gives is rows, or a summand."""
        form = self.sweep.region.forms[node]
        args = tuple(self._taken(value) for value in form.args)
        if form.target is None:
            self.made[node] = args[0]
            return
        kwargs = {name: self._taken(value) for name, value in form.kwargs.items()}
        name = f"{node.name}_chunk{self.number}"
        emit = self.sweep.emit
        if form.dims is None and self._adds(form, node, sums):
            sums[node] = emit(node, aten.addmm.default, (sums[node], *args), name)
            return
        made = emit(node, form.target, args, name, kwargs, self.stop - self.start)
        if form.gathers:
            parts.setdefault(node, []).append(made)
        elif form.dims is not None:
            self.made[node] = made
        else:
            if node in self.sweep.means:
                made = emit(node, operator.getitem, (made, 0), name)
            sums[node] = self._added(node, made, sums.get(node))

    def _adds(self, form: RowForm, node: fx.Node, sums: dict[fx.Node, fx.Node]) -> bool:
        """True if a product adds to the sum by itself: in one dtype."""
        return form.target is aten.mm.default and node in sums and not is_low(node)

    def _added(self, node: fx.Node, part: fx.Node, before: fx.Node | None) -> fx.Node:
        """The sum so far and a summand; of low precision in fp32."""
        emit, name = self.sweep.emit, f"{node.name}_to_chunk{self.number}"
        if before is not None:
            return emit(node, aten.add.Tensor, (before, part), name)
        if is_low(part):
            return emit(node, aten._to_copy.default, (part,), name, {"dtype": torch.float32})
        return part

    def _taken(self, value: Any) -> Any:
        """An argument of a `RowForm`, in this chunk."""
        if isinstance(value, fx.Node):
            return self.made[value] if value in self.made else self.sweep.outer(value)
        if isinstance(value, Flat):
            return self.sweep.flat(value)
        if isinstance(value, str) and value == ROWS:
            return self.stop - self.start
        if isinstance(value, (list, tuple)):
            return type(value)(self._taken(item) for item in value)
        return self._rows(value) if isinstance(value, ChunkRows) else value

    def _rows(self, row: ChunkRows) -> fx.Node:
        if row not in self.cut:
            if row.transposed:
                straight = self._rows(dataclasses.replace(row, transposed=False))
                name = f"{row.node.name}_t_chunk{self.number}"
                made = self.sweep.emit(row.node, aten.t.default, (straight,), name)
            else:
                args = self.sweep.rows_of(row), 0, self.start, self.stop
                name = f"{row.node.name}_chunk{self.number}"
                made = self.sweep.emit(row.node, aten.slice.Tensor, args, name)
            self.cut[row] = made
        return self.cut[row]


def is_low(node: fx.Node) -> bool:
    """True if a value is of low precision."""
    return node.meta["val"].dtype in LOW
