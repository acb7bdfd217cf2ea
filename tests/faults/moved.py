"""Faults that move an operator, or swap two."""

import operator
import random
from typing import Any

from fxshard.ir import ops, tags
from fxshard.ir.program import Program
from tests.faults.kinds import (
    FAULTS,
    REDUCTIONS,
    Fault,
    NoPlace,
    alike,
    aten,
    compute,
    cuts,
    fault,
    items,
    nodes,
    one,
    stands_before,
    two,
    wait_of,
    waited,
    writers,
)

# -- move ------------------------------------------------------------------------------------------


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


# -- swap ------------------------------------------------------------------------------------------


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
FAULTS["swap_activations"] = swapper(ops.offload, ops.reload)


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


@fault
def swap_cuts_of_a_packed_gradient(program: Program, rng: random.Random) -> str:
    found = [(a, b) for a in cuts(program) for b in cuts(program) if a.args[0] is b.args[0]]
    found = [(a, b) for a, b in found if a.args != b.args and alike([a, b])]
    a, b = one(rng, found)
    a.args, b.args = b.args, a.args
    return f"%{a} and %{b}"
