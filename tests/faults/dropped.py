"""Faults that drop an operator or an operand, or run one twice."""

import operator
import random
from collections.abc import Callable
from typing import Any

from torch import fx

from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from tests.faults.kinds import FAULTS, Fault, bypass, copied, fault, items, nodes, one, waited

OF_MODEL = [target for target, spec in ops.OPERATORS.items() if spec.of_model]

# -- drop ------------------------------------------------------------------------------------------


def dropper(*targets: Any) -> Fault:
    def drop(program: Program, rng: random.Random) -> str:
        """An operator of ours that gives nothing."""
        node = one(rng, nodes(program, *targets))
        program.graph.erase_node(node)
        return f"no %{node}"

    return drop


FAULTS["drop_wait"] = dropper(ops.wait)
FAULTS["drop_free"] = dropper(ops.free)


def skipper(*targets: Any) -> Fault:
    def skip(program: Program, rng: random.Random) -> str:
        """The results of an operator are its operands: nothing is copied, moved or reduced."""
        node = one(rng, [n for n in nodes(program, *targets) if items(n)])
        for item in items(node):
            item.replace_all_uses_with(tags.operands(node)[item.args[1]])
            program.graph.erase_node(item)
        program.graph.erase_node(node)
        return f"operands of %{node} in the place of its results"

    return skip


FAULTS["skip_gather"] = skipper(ops.all_gather)
FAULTS["skip_reduce_scatter"] = skipper(ops.reduce_scatter)
FAULTS["skip_all_reduce"] = skipper(ops.all_reduce)
FAULTS["skip_cast"] = skipper(ops.cast)
FAULTS["skip_load"] = skipper(ops.load)
FAULTS["skip_store"] = skipper(ops.store)
FAULTS["skip_offload"] = skipper(ops.offload)
FAULTS["skip_reload"] = skipper(ops.reload)
FAULTS["skip_collective_of_the_model"] = skipper(*OF_MODEL)
FAULTS["skip_reshard"] = skipper(ops.reshard)


def cutter(role: str) -> Fault:
    def cut(program: Program, rng: random.Random) -> str:
        """An operator that a pass put around a collective."""
        found = [n for n in nodes(program, role=role) if n.target not in ops.OPERATORS]
        found = [n for n in found if n.target is not operator.getitem and n.all_input_nodes]
        node = one(rng, found)
        return bypass(node, node.all_input_nodes[-1])

    return cut


FAULTS["drop_padding_or_cast_of_gradient"] = cutter("pad")
FAULTS["drop_division_or_cast_of_result"] = cutter("post_reduction")
FAULTS["drop_cut_of_padding"] = cutter("unshard")


def shortener(kept: slice, found: Callable[[Program], list[fx.Node]]) -> Fault:
    def shorten(program: Program, rng: random.Random) -> str:
        """An operator takes one tensor less."""
        node = one(rng, found(program))
        node.args = (tags.operands(node)[kept], *node.args[1:])
        return f"one tensor less into %{node}"

    return shorten


FAULTS["drop_operand"] = shortener(
    slice(-1), lambda program: [n for n in waited(program) if len(tags.operands(n)) > 1]
)
FAULTS["drop_packed_operand"] = shortener(slice(-1), lambda program: nodes(program, ops.pack))
FAULTS["wait_for_a_part"] = shortener(slice(1, None), lambda program: nodes(program, ops.wait))
FAULTS["free_of_a_part"] = shortener(slice(1, None), lambda program: nodes(program, ops.free))


@fault
def drop_result(program: Program, rng: random.Random) -> str:
    found = [i for i, r in enumerate(program.results) if r.kind != "output"]
    at = one(rng, found)
    program.values = [v for i, v in enumerate(program.values) if i != at]
    return f"no gradient of {program.results.pop(at).name}"


# -- duplicate -------------------------------------------------------------------------------------


def doubler(*targets: Any) -> Fault:
    def double(program: Program, rng: random.Random) -> str:
        node = one(rng, nodes(program, *targets))
        copied(node, node)
        return f"%{node} twice"

    return double


FAULTS["double_wait"] = doubler(ops.wait)
FAULTS["double_free"] = doubler(ops.free)


def repeater(*targets: Any) -> Fault:
    def repeat(program: Program, rng: random.Random) -> str:
        """The same launch a second time, with getitems of its own that the wait takes too."""
        node = one(rng, nodes(program, *targets))
        twin = copied(node, (items(node) or [node])[-1])
        at = twin
        for item in items(node):
            at = copied(item, at)
            at.args = (twin, item.args[1])
        return f"%{node} twice"

    return repeat


FAULTS["repeat_gather"] = repeater(ops.all_gather)
FAULTS["repeat_reduce_scatter"] = repeater(ops.reduce_scatter)
FAULTS["repeat_all_reduce"] = repeater(ops.all_reduce)
FAULTS["repeat_collective_of_the_model"] = repeater(*OF_MODEL)
FAULTS["repeat_store"] = repeater(ops.store)
FAULTS["repeat_offload"] = repeater(ops.offload)
FAULTS["repeat_reload"] = repeater(ops.reload)


@fault
def free_of_another_tensor_too(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.free))
    before = []
    for other in program.graph.nodes:
        if other is node:
            break
        before.append(other)
    others = [n for n in before if tags.storage_ids(n) and len(tags.storage_ids(n)) == 1]
    mine = set().union(*map(tags.storage_ids, tags.operands(node)))
    others = [n for n in others if not tags.storage_ids(n) & mine and used_after(n, node)]
    other = one(rng, others)
    node.args = ([*tags.operands(node), other],)
    return f"%{node} frees %{other} too"


def used_after(node: fx.Node, place: fx.Node) -> bool:
    following = place.next
    while following.op != "root":
        if node in following.all_input_nodes:
            return True
        following = following.next
    return False
