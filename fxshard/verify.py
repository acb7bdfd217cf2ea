"""One check per Fact. A check raises VerifyError with the node at fault, or returns."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from fxshard import dump, meta, ops
from fxshard.errors import VerifyError
from fxshard.program import Fact, Program


def verify(program: Program) -> None:
    """Check every Fact in ``program.facts``.

    Raises:
        VerifyError: the first Fact that does not hold, with ten lines of dump around the node.
    """
    for fact in Fact:
        if fact in program.facts:
            CHECKS[fact](program)


def fail(program: Program, fact: Fact, node: fx.Node, message: str) -> None:
    """Raise VerifyError for `node`."""
    raise VerifyError(
        fact.name.lower(), message, node=node.name, excerpt=dump.excerpt(program, node)
    )


def tagged(program: Program) -> None:
    seen_backward = False
    for node in program.graph.nodes:
        if "fxshard" not in node.meta:
            fail(program, Fact.TAGGED, node, f"%{node.name} has no tag; tag nodes when made.")
        tag = meta.get(node)
        if node.op != "call_function":
            continue
        if tag.phase == "backward":
            seen_backward = True
        elif seen_backward:
            fail(program, Fact.TAGGED, node, f"forward node %{node.name} stands in backward.")
        returns = getattr(getattr(node.target, "_schema", None), "returns", [None])
        if returns and "val" not in node.meta:
            fail(program, Fact.TAGGED, node, f"%{node.name} has no fake value.")


def units_assigned(program: Program) -> None:
    for node in program.graph.nodes:
        unit = meta.get(node).unit
        if node.op == "call_function" and not (
            isinstance(unit, int) and 0 <= unit < len(program.units)
        ):
            fail(program, Fact.UNITS_ASSIGNED, node, f"%{node.name} belongs to unit {unit}.")


def unshard_paired(program: Program) -> None:
    """Every launch has one wait behind it, and nothing but that wait comes before it."""
    fact = Fact.UNSHARD_PAIRED
    order = _order(program)
    waits = _by_pair(program, ops.wait)
    for launch in _launches(program):
        tag = meta.get(launch)
        mine = waits.get(tag.pair, [])
        if len(mine) != 1:
            fail(program, fact, launch, f"%{launch.name} has {len(mine)} waits, expected 1.")
        wait = mine[0]
        if order[wait] < order[launch]:
            fail(program, fact, wait, f"%{wait.name} stands before its launch %{launch.name}.")
        if set(meta.operands(wait)) != set(launch.users):
            fail(program, fact, wait, f"%{wait.name} does not wait for all of %{launch.name}.")
        for reader in _alias_readers(program, launch):
            if order[reader] < order[wait] and not _is_pick_of(reader, launch):
                fail(
                    program,
                    fact,
                    reader,
                    f"%{reader.name} reads what %{launch.name} is still writing: "
                    f"its wait %{wait.name} comes later.",
                )


def params_unsharded(program: Program) -> None:
    for node in program.graph.find_nodes(op="placeholder"):
        tag = meta.get(node)
        if tag.role == "param":
            fail(program, Fact.PARAMS_UNSHARDED, node, f"parameter {tag.fqn!r} comes in whole.")
        if tag.role != "shard":
            continue
        for user in node.users:
            if user.target is not ops.all_gather:
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    user,
                    f"%{user.name} reads the shard of {tag.fqn!r}; only an unshard may.",
                )
    for launch in _launches(program, ops.all_gather):
        for pick in launch.users:
            want = program.params[meta.get(pick).fqn or ""]
            shape = tuple(pick.meta["val"].shape)
            rows = want.chunk(program.world_size)[0] * program.world_size
            if shape != (rows, *want.shape[1:]):
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    pick,
                    f"%{pick.name} is {list(shape)}, expected {[rows, *want.shape[1:]]}.",
                )


def no_param_saved(program: Program) -> None:
    for launch in _launches(program, ops.all_gather):
        tag = meta.get(launch)
        for node in (launch, *_aliases(program, launch)):
            for user in node.users:
                if user.op == "output" or meta.get(user).phase != tag.phase:
                    fail(
                        program,
                        Fact.NO_PARAM_SAVED,
                        user,
                        f"%{user.name} reads %{node.name}, an unsharded parameter of unit "
                        f"{program.units[tag.unit or 0].name!r}, outside of {tag.phase}.",
                    )


def reduced_once(program: Program) -> None:
    fact = Fact.REDUCED_ONCE
    made: dict[str, fx.Node] = {}
    for launch in _launches(program, ops.reduce_scatter):
        for pick in launch.users:
            fqn = meta.get(pick).fqn or ""
            if fqn in made:
                fail(program, fact, pick, f"the gradient of {fqn!r} is reduced twice.")
            made[fqn] = pick
        if len(set(meta.operands(launch))) != len(meta.operands(launch)):
            fail(program, fact, launch, f"%{launch.name} reduces one tensor twice.")
    for value, result in zip(program.values, program.results, strict=True):
        if result.kind == "grad" and result.name in program.params:
            if made.get(result.name) is not value:
                fail(
                    program,
                    fact,
                    program.output,
                    f"the gradient of {result.name!r} is returned without being reduced.",
                )
            made.pop(result.name)
    for fqn, pick in made.items():
        fail(program, fact, pick, f"the reduced gradient of {fqn!r} is not returned.")


def equal_chunks(program: Program) -> None:
    """Every collective's buffers are world_size times its inputs (or the inverse), row-wise."""
    for launch in _launches(program):
        ins = [t for s in meta.operands(launch) for t in meta.tensors(s.meta["val"])]
        outs = list(meta.tensors(launch.meta["val"]))
        small, large = (ins, outs) if launch.target is ops.all_gather else (outs, ins)
        for part, whole in zip(small, large, strict=True):
            even = whole.shape[0] == part.shape[0] * program.world_size
            if not even or not whole.is_contiguous():
                fail(
                    program,
                    Fact.EQUAL_CHUNKS,
                    launch,
                    f"%{launch.name} moves {list(part.shape)} and {list(whole.shape)}: not "
                    f"{program.world_size} equal contiguous chunks.",
                )


def bounded_inflight(program: Program) -> None:
    limits = {"forward": program.forward_prefetch + 1, "backward": program.backward_prefetch + 1}
    alive: dict[int | None, str] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        tag = meta.get(node)
        if node.target is ops.all_gather:
            alive[tag.pair] = program.units[tag.unit or 0].name
            held = [name for name in alive.values() if name != "(root)"]
            if len(held) > limits[tag.phase]:
                fail(
                    program,
                    Fact.BOUNDED_INFLIGHT,
                    node,
                    f"%{node.name} is the {len(held)}th unit unsharded at once ({', '.join(held)});"
                    f" the limit is prefetch + 1 = {limits[tag.phase]}.",
                )
        elif node.target is ops.free:
            alive.pop(tag.pair, None)


def freed(program: Program) -> None:
    fact = Fact.FREED
    frees = _by_pair(program, ops.free)
    order = _order(program)
    for launch in _launches(program):
        tag = meta.get(launch)
        mine = frees.get(tag.pair, [])
        if len(mine) != 1:
            fail(program, fact, launch, f"%{launch.name} has {len(mine)} frees, expected 1.")
        gathers = launch.target is ops.all_gather
        want = set(launch.users) if gathers else set(meta.operands(launch))
        if set(meta.operands(mine[0])) != want:
            fail(program, fact, mine[0], f"%{mine[0].name} does not free all of %{launch.name}.")
        if meta.get(mine[0]).phase != tag.phase or order[mine[0]] < order[launch]:
            fail(program, fact, mine[0], f"%{mine[0].name} does not follow %{launch.name}.")


def no_use_after_free(program: Program) -> None:
    gone: dict[int, fx.Node] = {}
    for node in program.graph.nodes:
        reads = set().union(*map(meta.storage_ids, node.all_input_nodes), set())
        for storage in reads & gone.keys():
            fail(
                program,
                Fact.NO_USE_AFTER_FREE,
                node,
                f"%{node.name} reads a storage that %{gone[storage].name} has freed.",
            )
        if node.target is ops.free:
            for source in meta.operands(node):
                gone |= dict.fromkeys(meta.storage_ids(source), node)
    waits = {meta.get(n).pair: n for n in program.graph.nodes if n.target is ops.wait}
    order = _order(program)
    for node in program.graph.nodes:
        if node.target is ops.free and order[node] < order[waits[meta.get(node).pair]]:
            fail(
                program,
                Fact.NO_USE_AFTER_FREE,
                node,
                f"%{node.name} frees memory of a collective that is still in flight.",
            )


def streams_ordered(program: Program) -> None:
    """Follow the events: a launch sees its inputs, a reader of its result sees its end."""
    fact = Fact.STREAMS_ORDERED
    seen: set[str] = set()  # events that the compute stream has waited for
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        tag = meta.get(node)
        if node.target in ops.LAUNCHES:
            if tag.stream == "compute":
                fail(program, fact, node, f"%{node.name} runs on the compute stream.")
            if not tag.records:
                fail(program, fact, node, f"%{node.name} records no event when done.")
            if f"c{tag.pair}" not in tag.waits:
                fail(
                    program,
                    fact,
                    node,
                    f"stream {tag.stream!r} reads what the compute stream wrote for %{node.name} "
                    f"without waiting for it.",
                )
            continue
        seen |= set(tag.waits)
        for source in node.all_input_nodes:
            launch = _launch_behind(source)
            is_pick = node.target is operator.getitem and source.target in ops.LAUNCHES
            if launch is not None and not is_pick and meta.get(launch).records not in seen:
                fail(
                    program,
                    fact,
                    node,
                    f"%{node.name} on stream {tag.stream!r} uses %{source.name} of stream "
                    f"{meta.get(launch).stream!r} without waiting for event "
                    f"{meta.get(launch).records}.",
                )


def outlined(program: Program) -> None:
    """The schedule, flattened, is the graph, operator by operator."""
    fact = Fact.OUTLINED
    schedule = program.schedule
    if schedule is None:
        raise VerifyError(fact.name.lower(), "the program has no schedule.")
    for phase, outer in schedule.phases():
        want = iter(program.phase(phase))
        for row in outer.nodes:
            if row.op == "call_module":
                for inner in schedule.regions[str(row.target)].body:
                    node = next(want, None)
                    if node is None or node.target is not inner.target:
                        fail(
                            program,
                            fact,
                            node or program.output,
                            f"row %{row.name} runs {inner.target} there.",
                        )
            elif row.op == "call_function" and not _picks_region(row):
                node = next(want, None)
                if node is None or node.target is not row.target:
                    fail(program, fact, node or program.output, f"row %{row.name} stands there.")
        left = next(want, None)
        if left is not None:
            fail(program, fact, left, f"no row of the schedule runs %{left.name}.")


CHECKS: dict[Fact, Callable[[Program], None]] = {
    Fact.TAGGED: tagged,
    Fact.UNITS_ASSIGNED: units_assigned,
    Fact.UNSHARD_PAIRED: unshard_paired,
    Fact.PARAMS_UNSHARDED: params_unsharded,
    Fact.NO_PARAM_SAVED: no_param_saved,
    Fact.REDUCED_ONCE: reduced_once,
    Fact.EQUAL_CHUNKS: equal_chunks,
    Fact.BOUNDED_INFLIGHT: bounded_inflight,
    Fact.FREED: freed,
    Fact.NO_USE_AFTER_FREE: no_use_after_free,
    Fact.STREAMS_ORDERED: streams_ordered,
    Fact.OUTLINED: outlined,
}


def _order(program: Program) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(program.graph.nodes)}


def _launches(program: Program, target: Any = None) -> list[fx.Node]:
    wanted = ops.LAUNCHES if target is None else (target,)
    return [node for node in program.graph.nodes if node.target in wanted]


def _by_pair(program: Program, target: Any) -> dict[int | None, list[fx.Node]]:
    found: dict[int | None, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.target is target:
            found.setdefault(meta.get(node).pair, []).append(node)
    return found


def _aliases(program: Program, launch: fx.Node) -> list[fx.Node]:
    """Nodes whose value lies in a storage that `launch` writes."""
    storages = meta.storage_ids(launch)
    found: dict[fx.Node, None] = {}
    todo = [launch]
    while todo:
        for user in todo.pop().users:
            if user not in found and meta.storage_ids(user) & storages:
                found[user] = None
                todo.append(user)
    return list(found)


def _alias_readers(program: Program, launch: fx.Node) -> list[fx.Node]:
    """Nodes other than `fxshard::` ones that read a storage that `launch` writes."""
    return [
        user
        for node in (launch, *_aliases(program, launch))
        for user in node.users
        if user.target not in (ops.wait, ops.free) and user.op == "call_function"
    ]


def _is_pick_of(node: fx.Node, launch: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0] is launch


def _launch_behind(node: fx.Node) -> fx.Node | None:
    """The launch that wrote `node`, through picks and views."""
    while node.op == "call_function" and node.target not in ops.LAUNCHES:
        if not meta.aliases_input(node):
            return None
        ids = meta.storage_ids(node)
        node = next((n for n in node.all_input_nodes if meta.storage_ids(n) & ids), node.prev)
    return node if node.target in ops.LAUNCHES else None


def _picks_region(row: fx.Node) -> bool:
    return row.target is operator.getitem and meta.source(row).op == "call_module"
