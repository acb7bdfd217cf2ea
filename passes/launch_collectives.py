"""launch-collectives: what a model sends itself runs on a stream of its group."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxshard._torch.traced_collectives import WAIT, CollectiveRanks, note_stands_for, ranks_of
from fxshard.ir import ops, tags, transfers
from fxshard.ir.outline import COMPUTE, belongs_to
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk

_functional = torch.ops._c10d_functional
REDUCTIONS = ("sum", "avg", "max", "min")

# Functional collective -> the operator that launches it, and its arguments after the ranks'.
LAUNCHES: dict[Any, tuple[Any, Callable[[tuple[Any, ...], CollectiveRanks], tuple[Any, ...]]]] = {
    _functional.all_gather_into_tensor.default: (ops.model_all_gather, lambda args, ranks: ()),
    _functional.reduce_scatter_tensor.default: (
        ops.model_reduce_scatter,
        lambda args, ranks: args[1:2],
    ),
    _functional.all_reduce.default: (ops.model_all_reduce, lambda args, ranks: args[1:2]),
    _functional.all_to_all_single.default: (
        ops.model_all_to_all,
        lambda args, ranks: (*args[1:3], ranks.rank),
    ),
    _functional.broadcast.default: (ops.model_broadcast, lambda args, ranks: args[1:2]),
}
COPIES = (ops.model_all_reduce, ops.model_broadcast)  # they take tensors of any strides


@dataclasses.dataclass(frozen=True)
class LaunchCollectives:
    """Launch and wait of the collectives that the model calls, those of tensor parallelism too.

    Functional collectives become launches on a stream of their group, and waits apart from them.
    Within the operators of a unit between two rows of the schedule, a launch runs as soon as what
    it sends is there: what it does not need is computed after it. A wait comes as late as the data
    allow: first runs all that does not depend on it. So the gradient of a weight, which is traced
    before that of the layer's input, is computed while that is reduced.

    Operators that draw random numbers, or write in place, stay where they are, and others on their
    side of them. A collective of another kind, of tensors that are not contiguous, or whose result
    is read without a wait stays as it is: one operator of a region. Sizes of a result that depend
    on data are read after its wait.

    Before::

        %dw = aten.mm(%t, %x)
        %dx = aten.mm(%g, %w)
        %sum = _c10d_functional.all_reduce(%dx, "sum", "tp")
        %done = _c10d_functional.wait_tensor(%sum)
        %y = aten.mul(%done, %z)

    After::

        %dx = aten.mm(%g, %w)
        %all_reduce_3 = fxshard.model_all_reduce([%dx], 2, "tp", ...)
        %getitem = getitem(%all_reduce_3, 0)
        %dw = aten.mm(%t, %x)
        %wait_3 = fxshard.wait([%getitem, %dx])
        %y = aten.mul(%getitem, %z)
    """

    name: ClassVar[str] = "launch-collectives"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        if program.common is not None:  # ranks that differ take each other's, as they are
            return
        calls = [node for node in program.graph.nodes if can_be_launched(node)]
        if not calls:
            return
        for call in calls:
            read_sizes_of_results(call)
        called = set(calls)
        for run in runs(program):
            if any(node in called or is_wait(node) for node in run):
                move(run, ordered(run, called))
        names = group_names(program, calls)
        pair = 1 + max((tags.get(n).pair or 0 for n in program.graph.nodes), default=-1)
        for number, call in enumerate(calls, pair):
            launch(program, call, names[call.args[-1]], number)


def can_be_launched(node: fx.Node) -> bool:
    """True for a functional collective of a kind that is launched, and that has one wait."""
    if node.target not in LAUNCHES or ranks_of(node) is None:
        return False
    target, _ = LAUNCHES[node.target]
    sent = tags.source(node).meta["val"]
    if ops.argument(node, "reduce_op") not in (None, *REDUCTIONS):
        return False
    if target in COPIES:
        dense = node.meta["val"].is_contiguous()
    else:
        dense = sent.is_contiguous() and sent.dim() > 0
    return bool(dense) and wait_of(node) is not None


def wait_of(call: fx.Node) -> fx.Node | None:
    """The one wait for a functional collective; None if its result is read otherwise.

    Of what is sent by numbers from the data, sizes are read too: where nothing computes with them
    before the wait, they are those of what that returns.
    """
    waits = [user for user in call.users if is_wait(user)]
    sizes = [user for user in call.users if walk.reads_sizes(user)]
    if len(waits) != 1 or len(waits) + len(sizes) != len(call.users):
        return None
    readers = {user for size in sizes for user in size.users}
    return waits[0] if readers.isdisjoint(_between(call, waits[0])) else None


def read_sizes_of_results(call: fx.Node) -> None:
    """Let sizes be read of the result of the wait for `call`, after it."""
    wait = at = wait_of(call)
    assert wait is not None and at is not None
    before = set(_between(call, wait))
    for size in [user for user in call.users if user is not wait]:
        size.replace_input_with(call, wait)
        if size in before:
            at.append(size)
            at = size


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def is_wait(node: fx.Node) -> bool:
    """True if `node` waits for a functional collective."""
    return node.target is WAIT


def runs(program: Program) -> Iterator[list[fx.Node]]:
    """Neighbours of one unit that are computed, and may change places as far as data allow."""
    for phase in ("forward", "backward"):
        for key, nodes in itertools.groupby(program.phase(phase), place):
            if key is not None:
                yield list(nodes)


def place(node: fx.Node) -> Any:
    """Equal for neighbours that may change places; None for what stays."""
    stays = tags.get(node).role not in COMPUTE or tags.writes(node) or tags.is_random(node)
    return None if stays else belongs_to(node)


def ordered(run: list[fx.Node], calls: set[fx.Node]) -> list[fx.Node]:
    """`run` with the launches, `calls`, as early and the waits as late as their data allow.

    All that does not depend on a wait that is to come runs before it, in the order of the trace.
    Launches keep their order.
    """
    at = {node: i for i, node in enumerate(run)}
    mine = [node for node in run if node in calls]
    waits = [node for node in run if is_wait(node)]
    bits = {wait: 1 << i for i, wait in enumerate(waits)}
    behind: dict[fx.Node, int] = {}  # bits of the waits that a node comes after
    for node in run:
        behind[node] = bits.get(node, 0)
        for source in node.all_input_nodes:
            behind[node] |= behind.get(source, 0)
    found: dict[fx.Node, None] = {}
    over = 0  # bits of the waits that are in `found`

    def take(node: fx.Node) -> None:
        """Append `node`, after what it needs."""
        needed, todo = {node}, [node]
        while todo:
            sources = todo.pop().all_input_nodes
            new = [n for n in sources if n in at and n not in found and n not in needed]
            needed.update(new)
            todo += new
        found.update(dict.fromkeys(sorted(needed, key=at.__getitem__)))

    while len(found) < len(run):
        for call in mine:
            if call not in found:
                if behind[call] & ~over:
                    break  # the order of launches stays: other ranks may have other data
                take(call)
        left = [wait for wait in waits if wait not in found]
        for node in run:
            runs_nothing = left and tags.aliases_input(node)
            ready = node not in found and node not in calls and not behind[node] & ~over
            if ready and not runs_nothing:
                take(node)
        if left:
            take(left[0])
            over |= bits[left[0]]
    return with_items(list(found))


def with_items(order: list[fx.Node]) -> list[fx.Node]:
    """`order` with the items of a tuple right after what makes it: nothing writes in between."""
    makers = set(order)
    items: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        if node.target is operator.getitem and node.all_input_nodes[0] in makers:
            items.setdefault(node.all_input_nodes[0], []).append(node)
    moved = {item for each in items.values() for item in each}

    def with_its(node: fx.Node) -> list[fx.Node]:
        return [node, *(each for item in items.get(node, ()) for each in with_its(item))]

    return [each for node in order if node not in moved for each in with_its(node)]


def move(run: list[fx.Node], order: list[fx.Node]) -> None:
    """Bring `run`, neighbours in a graph, into another order."""
    at = run[0].prev
    for node in order:
        at.append(node)
        at = node


def group_names(program: Program, calls: list[fx.Node]) -> dict[Any, str]:
    """What the groups of ranks are called, by torch's names: alike on all ranks.

    Two of one name are told apart in the order in which they were made, which is that of all their
    ranks, and not in that of their first calls, which another rank may have otherwise.
    """
    taken = {spec.stream for spec in ops.OPERATORS.values()} | {"shard", "replicate"}
    found: dict[Any, str] = {}
    known = {call.args[-1]: (ranks, call) for call in calls if (ranks := ranks_of(call))}
    for group, (ranks, call) in sorted(known.items(), key=lambda each: each[1][0].number):
        name = (program.group_of(call) or ranks.name).replace("@", " ")
        used = taken.union(found.values())
        more = next(n for n in itertools.count(2) if f"{name} ({n})" not in used)
        found[group] = f"{name} ({more})" if name in used else name
    return found


def launch(program: Program, call: fx.Node, name: str, pair: int) -> None:
    """Put a launch in the place of `call`, and a wait in that of its ``wait_tensor``."""
    (waited,) = call.users
    target, more = LAUNCHES[call.target]
    graph, sent, ranks = program.graph, tags.source(call), ranks_of(call)
    assert isinstance(ranks, CollectiveRanks)
    tag = tags.changed(tags.get(call), role="transfer", pair=pair)
    args = ([sent], ranks.size, name, ranks.process_group, *more(call.args, ranks), ranks.stride)
    with graph.inserting_before(call):
        kind = ops.OPERATORS[target].name.removeprefix("model_")
        made = transfers.node(graph, target, args, f"{kind}_{pair}")
        item = graph.call_function(operator.getitem, (made, 0))
    result: Tensor = waited.meta["val"]
    for node, value in ((made, [result]), (item, result)):
        node.meta = {**waited.meta, "val": value}
        tags.put(node, tag)
    note_stands_for(made, call)
    tags.update(item, fqn=tags.get(waited).fqn)
    with graph.inserting_before(waited):
        wait = transfers.node(graph, ops.wait, ([item, sent],), f"wait_{pair}")
    tags.put(wait, tags.changed(tags.get(waited), role="wait", pair=pair, fqn=None))
    for each in [user for user in waited.users if is_wait(user)] + [waited]:  # autograd waits again
        each.replace_all_uses_with(item, lambda user: user is not wait)
        graph.erase_node(each)
    graph.erase_node(call)
