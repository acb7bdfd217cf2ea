"""Faults, by kind: each changes one node, or one tag, of a program that is after the pipeline.

A fault takes a program and a random number generator that chooses the place, changes the program
and returns what it did; or raises `NoPlace`. Whether that does harm is not decided here
(tests/verify/test_faults.py finds out).

One file because it is one list of kinds, which share the few functions at its top.
"""

import dataclasses
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Program

aten = torch.ops.aten
Fault = Callable[[Program, random.Random], str]
FAULTS: dict[str, Fault] = {}
GATHERS = (ops.all_gather,)
REDUCTIONS = (ops.reduce_scatter, ops.all_reduce, ops.comm_hook)


class NoPlace(Exception):
    """A program has no place for a fault of this kind."""


def fault(change: Fault) -> Fault:
    FAULTS[change.__name__] = change
    return change


def nodes(program: Program, *targets: Any, role: str = "") -> list[fx.Node]:
    return [
        n
        for n in program.graph.nodes
        if n.op == "call_function"
        and (not targets or n.target in targets)
        and (not role or tags.get(n).role == role)
    ]


def one(rng: random.Random, found: Sequence[Any]) -> Any:
    if not found:
        raise NoPlace
    return rng.choice(list(found))


def two(rng: random.Random, found: Sequence[Any]) -> Any:
    if len(found) < 2:
        raise NoPlace
    return rng.sample(found, 2)


def items(launch: fx.Node) -> list[fx.Node]:
    return [n for n in launch.users if n.target is operator.getitem]


def waited(program: Program) -> list[fx.Node]:
    """Launches that a wait belongs to."""
    return [n for n in nodes(program) if transfers.is_launch(n)]


def writers(program: Program) -> list[fx.Node]:
    """Launches that a wait belongs to, and what packs and unpacks."""
    return [*waited(program), *nodes(program, ops.pack, ops.unpack)]


def wait_of(program: Program, launch: fx.Node) -> fx.Node:
    for node in nodes(program, ops.wait):
        if tags.get(node).pair == tags.get(launch).pair:
            return node
    raise NoPlace


def compute(program: Program) -> list[fx.Node]:
    return [n for n in nodes(program, role="compute") if n.target is not operator.getitem]


def bypass(node: fx.Node, instead: fx.Node) -> str:
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)
    return f"%{instead} in the place of %{node}"


def copied(node: fx.Node, behind: fx.Node) -> fx.Node:
    with node.graph.inserting_after(behind):
        twin = node.graph.call_function(node.target, node.args, node.kwargs)
    twin.meta = dict(node.meta)
    return twin


def retag(node: fx.Node, **changes: Any) -> str:
    tags.update(node, **changes)
    return f"%{node}: {changes}"


# -- drop -----------------------------------------------------------------------------------------


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


# -- duplicate ------------------------------------------------------------------------------------


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
FAULTS["repeat_store"] = repeater(ops.store)


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


# -- move -----------------------------------------------------------------------------------------


@fault
def move_wait_after_a_reader(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.wait))
    readers = [
        user
        for source in tags.operands(node)
        for user in source.users
        if user.target not in (ops.wait, ops.free) and user.op == "call_function"
    ]
    reader = one(rng, readers)
    reader.append(node)
    return f"%{node} after %{reader}"


@fault
def move_wait_before_its_launch(program: Program, rng: random.Random) -> str:
    launch = one(rng, waited(program))
    wait = wait_of(program, launch)
    launch.prepend(wait)
    return f"%{wait} before %{launch}"


@fault
def move_unpack_before_the_wait(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.unpack))
    wait = wait_of(program, node)
    for each in (node, *items(node)):
        wait.prepend(each)
    return f"%{node} before %{wait}"


@fault
def move_free_before_a_reader(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.free))
    mine = set().union(*map(tags.storage_ids, tags.operands(node)))
    readers = [
        n
        for n in nodes(program)
        if n is not node
        and mine & set().union(set(), *map(tags.storage_ids, n.all_input_nodes))
        and n.target not in (ops.wait, operator.getitem)
    ]
    reader = one(rng, readers)
    reader.prepend(node)
    return f"%{node} before %{reader}"


@fault
def move_free_before_the_wait(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.free))
    wait = wait_of(program, node)
    wait.prepend(node)
    return f"%{node} before %{wait}"


@fault
def move_free_to_the_end(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.free))
    program.phase(tags.get(node).phase)[-1].append(node)
    return f"%{node} at the end of its phase"


@fault
def move_free_to_the_other_phase(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program, ops.free) if tags.get(n).phase == "forward"])
    program.phase("backward")[-1].append(node)
    tags.update(node, phase="backward")
    return f"%{node} at the end of backward"


@fault
def move_launch_after_its_wait(program: Program, rng: random.Random) -> str:
    launch = one(rng, waited(program))
    wait = wait_of(program, launch)
    wait.append(launch)
    return f"%{launch} after %{wait}"


@fault
def move_gathers_to_the_front(program: Program, rng: random.Random) -> str:
    """All launches of a phase come before anything runs: everything is unsharded at once."""
    phase = rng.choice(["forward", "backward"])
    found = [n for n in nodes(program, ops.all_gather) if tags.get(n).phase == phase]
    found = [n for n in found if all(s.op == "placeholder" for s in tags.operands(n))]
    if len(found) < 3:
        raise NoPlace
    first = program.phase(phase)[0]  # type: ignore[arg-type]
    for launch in found:
        for node in (launch, *items(launch)):
            first.prepend(node)
    return f"all gathers at the start of {phase}"


@fault
def move_reduction_before_the_gradient(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, *REDUCTIONS))
    tags.operands(node)[0].prepend(node)
    return f"%{node} before what it sends"


@fault
def move_compute_before_the_wait(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.wait))
    after = [n for s in tags.operands(node) for n in s.users if n in compute(program)]
    reader = one(rng, after)
    node.prepend(reader)
    return f"%{reader} before %{node}"


# -- swap -----------------------------------------------------------------------------------------


def alike(found: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Places of two tensors that have one shape and dtype."""
    kinds = [(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in found]
    return [(i, j) for j in range(len(kinds)) for i in range(j) if kinds[i] == kinds[j]]


def swapper(*targets: Any, role: str = "") -> Fault:
    def swap(program: Program, rng: random.Random) -> str:
        """Two operands of one operator, which have one shape."""
        every = nodes(program, *targets, role=role)
        found = [(n, pair) for n in every for pair in alike(tags.operands(n))]
        node, (i, j) = one(rng, found)
        operands = tags.operands(node)
        if operands[i] is operands[j]:
            raise NoPlace
        operands[i], operands[j] = operands[j], operands[i]
        node.args = (operands, *node.args[1:])
        return f"operands {i} and {j} of %{node}"

    return swap


FAULTS["swap_shards_of_a_gather"] = swapper(ops.all_gather)
FAULTS["swap_gradients_of_a_reduction"] = swapper(ops.reduce_scatter)
FAULTS["swap_shards_of_a_pack"] = swapper(ops.pack)
FAULTS["swap_packed_gradients"] = swapper(aten.cat.default, role="pad")
FAULTS["swap_operands_of_a_cast_load_or_store"] = swapper(ops.cast, ops.load, ops.store)


def exchanger(*targets: Any) -> Fault:
    def exchange(program: Program, rng: random.Random) -> str:
        """An operand of one operator for one of another, which has the same shape."""
        found = [(n, i) for n in nodes(program, *targets) for i in range(len(tags.operands(n)))]
        rng.shuffle(found)
        for node, i in found:
            for other, j in found:
                mine, its = tags.operands(node)[i], tags.operands(other)[j]
                same = alike([mine, its]) and mine is not its
                if other is node or not same or tags.get(mine).fqn == tags.get(its).fqn:
                    continue
                if its.op == "call_function" and not stands_before(its, node):
                    continue
                operands = tags.operands(node)
                operands[i] = its
                node.args = (operands, *node.args[1:])
                return f"%{node} takes %{its}, which %{other} takes"
        raise NoPlace

    return exchange


def stands_before(node: fx.Node, other: fx.Node) -> bool:
    following = node
    while following.op != "root":
        if following is other:
            return True
        following = following.next
    return False


FAULTS["gather_a_shard_of_another_unit"] = exchanger(ops.all_gather)
FAULTS["reduce_a_gradient_of_another_unit"] = exchanger(ops.reduce_scatter)
FAULTS["all_reduce_a_gradient_of_another_unit"] = exchanger(ops.all_reduce)
FAULTS["load_a_shard_of_another_unit"] = exchanger(ops.load)
FAULTS["store_a_gradient_of_another_unit"] = exchanger(ops.store)


def crosser(*targets: Any) -> Fault:
    def cross(program: Program, rng: random.Random) -> str:
        """What two waits, or two frees, take."""
        a, b = two(rng, nodes(program, *targets))
        a.args, b.args = b.args, a.args
        return f"what %{a} and %{b} take"

    return cross


FAULTS["swap_waits"] = crosser(ops.wait)
FAULTS["swap_frees"] = crosser(ops.free)


@fault
def swap_returned_gradients(program: Program, rng: random.Random) -> str:
    values = program.values
    found = [i for i, r in enumerate(program.results) if r.kind == "grad"]
    places = [(found[i], found[j]) for i, j in alike([values[i] for i in found])]
    place = one(rng, places)
    i, j = place
    values[i], values[j] = values[j], values[i]
    program.values = values
    return f"gradients {i} and {j}"


@fault
def swap_items(program: Program, rng: random.Random) -> str:
    found = [(a, b) for n in writers(program) for a in items(n) for b in items(n)]
    found = [(a, b) for a, b in found if a is not b and alike([a, b])]
    a, b = one(rng, found)
    a.args, b.args = b.args, a.args
    return f"%{a} and %{b}"


def cuts(program: Program) -> list[fx.Node]:
    """What takes one parameter's part of a packed gradient, or cuts padding off."""
    found = nodes(program, aten.slice.Tensor, role="post_reduction")
    return [n for n in found if isinstance(n.args[2], int) and isinstance(n.args[3], int)]


@fault
def swap_cuts_of_a_packed_gradient(program: Program, rng: random.Random) -> str:
    found = [(a, b) for a in cuts(program) for b in cuts(program) if a.args[0] is b.args[0]]
    found = [(a, b) for a, b in found if a.args != b.args and alike([a, b])]
    a, b = one(rng, found)
    a.args, b.args = b.args, a.args
    return f"%{a} and %{b}"


# -- regroup, resize, retype, rename --------------------------------------------------------------


def argument(name: str, values: dict[Any, Any], *targets: Any) -> Fault:
    def change(program: Program, rng: random.Random) -> str:
        node = one(rng, nodes(program, *targets))
        schema = node.target._schema.arguments
        args = [*node.args, *(a.default_value for a in schema[len(node.args) :])]
        at = [a.name for a in schema].index(name)
        args[at] = values.get(args[at], values.get(None))
        node.args = tuple(args)
        return f"{name} of %{node} is {args[at]}"

    return change


OTHER_GROUP = {"shard": "replicate", "replicate": "shard", None: "shard"}
OTHER_OP = {"avg": "sum", None: "avg"}
SCATTER, REDUCE = ops.reduce_scatter, ops.all_reduce
FAULTS["regroup_gather"] = argument("group", OTHER_GROUP, ops.all_gather)
FAULTS["regroup_reduce_scatter"] = argument("group", OTHER_GROUP, SCATTER)
FAULTS["regroup_all_reduce"] = argument("group", OTHER_GROUP, REDUCE)
FAULTS["regroup_reshard"] = argument("group", OTHER_GROUP, ops.reshard)
FAULTS["resize_gather"] = argument("size", {None: 7}, ops.all_gather)
FAULTS["resize_reduction"] = argument("size", {None: 7}, SCATTER, REDUCE, ops.comm_hook)
FAULTS["resize_reshard"] = argument("size", {None: 7}, ops.reshard)
FAULTS["another_operation"] = argument("op", OTHER_OP, SCATTER, REDUCE)
FAULTS["retype_cast"] = argument("dtype", {None: torch.float64}, ops.cast)
FAULTS["retype_pack"] = argument("dtype", {None: torch.float64}, ops.pack)
FAULTS["resize_unpack"] = argument("size", {None: 7}, ops.unpack)


# -- dimensions --------------------------------------------------------------------------------


def another(dims: Sequence[int], rng: random.Random) -> list[int]:
    """Dimensions of matrices and vectors, one of them another."""
    at = one(rng, [i for i, dim in enumerate(dims) if dim])
    return [1 - dim if i == at else dim for i, dim in enumerate(dims)]


@fault
def another_dimension_of_an_unpack(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program, ops.unpack) if len(n.args) > 3])
    node.update_arg(3, another(node.args[3], rng))
    return f"%{node} takes apart along {node.args[3]}"


@fault
def another_dimension_of_a_reshard(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program, ops.reshard) if len(n.args) > 3])
    node.update_arg(3, another(node.args[3], rng))
    return f"%{node} cuts along {node.args[3]}"


@fault
def fewer_rows_of_a_reshard(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program, ops.reshard) if len(n.args) > 3])
    first, *rows = node.args[4]
    node.update_arg(4, [first - 1, *rows])
    return f"%{node} keeps {node.args[4]} rows"


@fault
def another_order_of_a_gradient(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, aten.permute.default, role="pad"))
    first, second, *others = node.args[1]
    node.update_arg(1, [second, first, *others])
    return f"%{node} is permuted as {node.args[1]}"


@fault
def another_split_of_a_gradient(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, aten.permute.default, role="pad")).args[0]
    node.update_arg(1, node.args[1][::-1])
    return f"%{node} is viewed as {node.args[1]}"


@fault
def another_dimension_of_a_parameter(program: Program, rng: random.Random) -> str:
    """The program is that of a dimension, and the shards that are held are cut along another."""
    param = one(rng, [p for p in program.params.values() if len(p.shape) > 1])
    other = dataclasses.replace(param, shard_dim=1 - param.shard_dim)
    program.units = tuple(
        dataclasses.replace(unit, params=tuple(other if p is param else p for p in unit.params))
        for unit in program.units
    )
    return f"{param.fqn} is cut along {other.shard_dim}"


@fault
def shift_cut_of_a_packed_gradient(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in cuts(program) if n.args[2]])
    node.args = (*node.args[:2], node.args[2] - 1, node.args[3] - 1)
    return f"%{node} takes from one earlier"


@fault
def move_chunks_of_an_unpack(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.unpack))
    first, *others = node.args[2]
    node.update_arg(2, [*others, first])
    return f"the first chunk of %{node} is the last"


@fault
def retype_buffer(program: Program, rng: random.Random) -> str:
    item = one(rng, [p for n in writers(program) for p in items(n)])
    with program.fake_mode:
        item.meta["val"] = item.meta["val"].to(torch.float64)
    return f"%{item} is f64"


@fault
def resize_buffer(program: Program, rng: random.Random) -> str:
    item = one(rng, [p for n in writers(program) for p in items(n)])
    val = item.meta["val"]
    item.meta["val"] = program.fake((val.shape[0] + 1, *val.shape[1:]), val.dtype, val.device)
    return f"%{item} has a row more"


@fault
def divide_by_another_number(program: Program, rng: random.Random) -> str:
    roles = ("pad", "post_reduction")
    found = [n for n in nodes(program, aten.div_.Scalar) if tags.get(n).role in roles]
    node = one(rng, found)
    node.update_arg(1, 7.0)
    return f"%{node} divides by 7"


def renamer(*targets: Any) -> Fault:
    def rename(program: Program, rng: random.Random) -> str:
        """A getitem gets the FQN of another parameter."""
        found = [p for n in nodes(program, *targets) for p in items(n) if tags.get(p).fqn]
        node = one(rng, found)
        names = sorted(set(program.params) - {tags.get(node).fqn})
        return retag(node, fqn=one(rng, names))

    return rename


FAULTS["rename_gathered"] = renamer(ops.all_gather)
FAULTS["rename_reduced"] = renamer(ops.reduce_scatter, ops.all_reduce)
FAULTS["rename_unpacked"] = renamer(ops.unpack)
FAULTS["rename_loaded_or_cast"] = renamer(ops.load, ops.cast)


@fault
def rename_shard(program: Program, rng: random.Random) -> str:
    found = [n for n in program.graph.find_nodes(op="placeholder") if tags.get(n).role == "shard"]
    node, other = two(rng, [n for n in found if n.users])
    return retag(node, fqn=tags.get(other).fqn)


@fault
def another_pair(program: Program, rng: random.Random) -> str:
    node = one(rng, nodes(program, ops.wait, ops.free))
    return retag(node, pair=(tags.get(node).pair or 0) + 1)


@fault
def another_phase(program: Program, rng: random.Random) -> str:
    found = [n for n in waited(program) if tags.get(n).phase == "forward"]
    node = one(rng, found)
    return retag(node, phase="backward")


# -- events and streams ---------------------------------------------------------------------------


def waiters(program: Program) -> list[fx.Node]:
    return [n for n in nodes(program) if tags.get(n).waits]


@fault
def drop_event_of_a_launch(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in waiters(program) if n.target is not ops.wait])
    waits = list(tags.get(node).waits)
    waits.pop(rng.randrange(len(waits)))
    return retag(node, waits=tuple(waits))


@fault
def drop_event_of_a_wait(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in waiters(program) if n.target is ops.wait])
    return retag(node, waits=())


@fault
def drop_record(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program) if tags.get(n).records])
    return retag(node, records=None)


@fault
def swap_events(program: Program, rng: random.Random) -> str:
    a, b = two(rng, waiters(program))
    first, second = tags.get(a).waits, tags.get(b).waits
    if first == second:
        raise NoPlace
    tags.update(a, waits=second)
    return retag(b, waits=first)


@fault
def swap_records(program: Program, rng: random.Random) -> str:
    a, b = two(rng, [n for n in nodes(program) if tags.get(n).records])
    first = tags.get(a).records
    tags.update(a, records=tags.get(b).records)
    return retag(b, records=first)


@fault
def record_earlier(program: Program, rng: random.Random) -> str:
    found = [n for n in nodes(program) if (tags.get(n).records or "").startswith("c")]
    node = one(rng, found)
    earlier = [n for n in compute(program) if stands_before(n, node) and not tags.get(n).records]
    earlier = [n for n in earlier if n is not node and not tags.aliases_input(n)]
    place = one(rng, earlier)
    event = tags.get(node).records
    tags.update(node, records=None)
    return retag(place, records=event)


@fault
def wait_for_an_older_event(program: Program, rng: random.Random) -> str:
    events: list[str] = []
    found: list[tuple[fx.Node, str]] = []
    for node in nodes(program):
        tag = tags.get(node)
        if tag.waits and events:
            found += [(node, event) for event in events if event not in tag.waits]
        events += [tag.records] if tag.records else []
    node, event = one(rng, found)
    return retag(node, waits=(event,))


@fault
def another_stream(program: Program, rng: random.Random) -> str:
    node = one(rng, [n for n in nodes(program) if ops.of(n).asynchronous])
    others = ["compute", "unshard", "reduce", "all-reduce", "load", "store"]
    return retag(node, stream=rng.choice([s for s in others if s != tags.get(node).stream]))


# -- insert ---------------------------------------------------------------------------------------


def insert(program: Program, behind: fx.Node, target: Any, *args: Any) -> fx.Node:
    with program.graph.inserting_after(behind):
        node = program.graph.call_function(target, args)
    tag = dataclasses.replace(
        tags.get(behind), role="compute", stream="compute", records=None, waits=(), pair=None
    )
    return tags.put(node, tag, program.refake(node))


def returned(program: Program, node: fx.Node) -> None:
    """Add what `node` made to the first output of the model, so that it matters."""
    at = next(i for i, r in enumerate(program.results) if r.kind == "output")
    total = insert(program, node, aten.sum.default, node)
    values = program.values
    made = values[at]
    if made.op != "call_function" or not stands_before(total, made):
        return
    added = insert(program, made, aten.add.Tensor, made, total)
    program.values = [added if i == at else v for i, v in enumerate(values)]


@fault
def read_in_flight(program: Program, rng: random.Random) -> str:
    pairs = {tags.get(n).pair for n in nodes(program, ops.wait)}
    found = [n for n in nodes(program, ops.all_gather) if tags.get(n).phase == "forward"]
    launch = one(rng, [n for n in found if tags.get(n).pair in pairs])
    reader = insert(program, items(launch)[-1], aten.abs.default, items(launch)[-1])
    returned(program, reader)
    return f"%{reader} reads what %{launch} writes"


@fault
def read_after_free(program: Program, rng: random.Random) -> str:
    found = [n for n in nodes(program, ops.free) if tags.get(n).phase == "forward"]
    free = one(rng, found)
    reader = insert(program, free, aten.abs.default, tags.operands(free)[0])
    returned(program, reader)
    return f"%{reader} reads what %{free} has freed"


@fault
def write_in_flight(program: Program, rng: random.Random) -> str:
    launch = one(rng, nodes(program, *REDUCTIONS))
    behind = items(launch)[-1]
    writer = insert(program, behind, aten.mul_.Scalar, tags.operands(launch)[0], 2)
    return f"%{writer} writes what %{launch} sends"


@fault
def save_unsharded_parameter(program: Program, rng: random.Random) -> str:
    found = [n for n in nodes(program, ops.all_gather) if tags.get(n).phase == "forward"]
    readers = [n for n in compute(program) if tags.get(n).phase == "backward"]
    readers = [n for n in readers if n.target is aten.mm.default]
    launch, reader = one(rng, found), one(rng, readers)
    if program.units[tags.get(launch).unit or 0].reshard is False:
        raise NoPlace
    reader.update_arg(1, items(launch)[0])
    return f"%{reader} reads what %{launch} gathered"


@fault
def return_unreduced_gradient(program: Program, rng: random.Random) -> str:
    found = nodes(program, ops.reduce_scatter, ops.all_reduce)
    launch = one(rng, found)
    item = one(rng, items(launch))
    values = program.values
    if item not in values:
        raise NoPlace
    program.values = [tags.operands(launch)[item.args[1]] if v is item else v for v in values]
    return f"what %{launch} was sent is returned"


# -- any operator, any tag ------------------------------------------------------------------------


def kinds(program: Program) -> list[list[fx.Node]]:
    """Nodes with a tag, in groups of what they run and what they are for."""
    found: dict[Any, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if "fxshard" in node.meta:
            what = node.target if node.op == "call_function" else node.op
            what = (
                what if what in (*ops.OPERATORS, operator.getitem, "placeholder") else "an operator"
            )
            found.setdefault((what, tags.get(node).role), []).append(node)
    return list(found.values())


def retagger(field: str) -> Fault:
    def change(program: Program, rng: random.Random) -> str:
        """A node says of itself what another one says; each kind is as likely."""
        node = one(rng, one(rng, kinds(program)))
        values = {getattr(tags.get(n), field) for group in kinds(program) for n in group}
        others = sorted(values - {getattr(tags.get(node), field)}, key=repr)
        return retag(node, **{field: one(rng, others)})

    return change


RETAGGED = ("phase", "role", "unit", "fqn", "stream", "pair", "records", "waits")
FAULTS |= {f"retag_{field}": retagger(field) for field in RETAGGED}


@fault
def another_argument(program: Program, rng: random.Random) -> str:
    """Of any operator of ours: a number, a dtype, the name of a group, a shape."""
    found = [
        (n, i)
        for n in nodes(program, *ops.OPERATORS)
        for i, value in enumerate(n.args)
        if not isinstance(value, fx.Node) and not (i == 0 and tags.operands(n))
    ]
    place = one(rng, found)
    node, i = place
    value: Any = node.args[i]
    if isinstance(value, (list, tuple)):
        value = value[:-1]
    elif isinstance(value, bool):
        value = not value
    elif isinstance(value, (int, float)):
        value = value + 1
    elif isinstance(value, torch.dtype):
        value = torch.float64
    elif isinstance(value, str):
        value = {**OTHER_GROUP, **OTHER_OP}.get(value, "max")
    else:
        raise NoPlace
    node.update_arg(i, value)
    return f"argument {i} of %{node} is {value}"


@fault
def another_operand(program: Program, rng: random.Random) -> str:
    """Of any operator of ours: a tensor of the same shape, made before."""
    found = [(n, i) for n in nodes(program, *ops.OPERATORS) for i in range(len(tags.operands(n)))]
    place = one(rng, found)
    node, i = place
    mine = tags.operands(node)[i]
    before = [n for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    before = [n for n in before if n is not mine and stands_before(n, node) and n is not node]
    other = one(rng, [n for n in before if alike([mine, n])])
    operands = tags.operands(node)
    operands[i] = other
    node.args = (operands, *node.args[1:])
    return f"%{node} takes %{other} for %{mine}"


def mover(earlier: bool) -> Fault:
    def move(program: Program, rng: random.Random) -> str:
        """Any operator of ours, as far as the graph allows, or a part of that.

        What is launched may be so earlier: how much is bounded, and its bytes are counted.
        """
        found = nodes(program, *ops.OPERATORS)
        node = one(rng, [n for n in found if not (earlier and ops.of(n).asynchronous)])
        place, places = node, []
        while True:
            place = place.prev if earlier else place.next
            if place.op != "call_function" or (
                place in node.all_input_nodes if earlier else node in place.all_input_nodes
            ):
                break
            places.append(place)
        to = one(rng, places)
        (to.prepend if earlier else to.append)(node)
        return f"%{node} {'before' if earlier else 'after'} %{to}"

    return move


FAULTS["move_earlier"] = mover(earlier=True)
FAULTS["move_later"] = mover(earlier=False)
