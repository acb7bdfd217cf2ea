"""One check per Fact. A check raises VerifyError with the node at fault, or returns."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn, cast

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


def fail(program: Program, fact: Fact, node: fx.Node, message: str) -> NoReturn:
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
        # Who reads a storage is found through the aliases of fake values: they must be right.
        views = any(getattr(returned, "alias_info", None) for returned in returns)
        if views and not meta.aliases_input(node):
            what = f"%{node.name} is a view, but its fake value is no alias of its input's."
            fail(program, Fact.TAGGED, node, what)


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
        if sorted(map(_picked, launch.users)) != list(range(len(meta.operands(launch)))):
            fail(
                program, fact, launch, f"%{launch.name} has not one pick per tensor that it takes."
            )
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
        param = program.params[tag.fqn or ""]
        if program.world_size == 1 and tuple(node.meta["val"].shape) == param.shape:
            continue  # it is whole
        for user in node.users:
            if user.target not in (ops.all_gather, ops.cast, ops.load):
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    user,
                    f"%{user.name} reads the shard of {tag.fqn!r}; only an unshard may.",
                )
    for launch in _unshards(program):
        for pick in launch.users:
            if pick.target is ops.wait:
                continue
            shard, fqn = meta.operands(launch)[_picked(pick)], meta.get(pick).fqn
            if meta.get(shard).fqn != fqn:
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    pick,
                    f"%{pick.name} stands for {fqn!r}, but picks {meta.get(shard).fqn!r}.",
                )
            want = program.params[fqn or ""]
            shape = tuple(pick.meta["val"].shape)
            rows = want.chunk(program.world_size)[0] * program.world_size
            if shape != (rows, *want.shape[1:]):
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    pick,
                    f"%{pick.name} is {list(shape)}, expected {[rows, *want.shape[1:]]}.",
                )
            for user in pick.users:
                if shape != want.shape and meta.get(user).role not in ROLES_WITH_PADDING:
                    fail(
                        program,
                        Fact.PARAMS_UNSHARDED,
                        user,
                        f"%{user.name} reads {fqn!r} with its padding; only a cut may.",
                    )


ROLES_WITH_PADDING = ("unshard", "reshard", "wait", "free")


def no_param_saved(program: Program) -> None:
    for launch in _unshards(program):
        tag = meta.get(launch)
        stays = program.units[tag.unit or 0].reshard is False
        for node in (launch, *_aliases(program, launch)):
            for user in node.users:
                if user.op == "output" or (meta.get(user).phase != tag.phase and not stays):
                    fail(
                        program,
                        Fact.NO_PARAM_SAVED,
                        user,
                        f"%{user.name} reads %{node.name}, an unsharded parameter of unit "
                        f"{program.units[tag.unit or 0].name!r}, outside of {tag.phase}.",
                    )


def reduced_once(program: Program) -> None:
    """Each gradient went through the reductions that its ranks need, each once."""
    fact = Fact.REDUCED_ONCE
    need = [ops.reduce_scatter] if program.world_size > 1 else []
    need += [ops.all_reduce] if program.replicas > 1 else []
    need = [ops.comm_hook] if program.comm_hook else need
    seen: dict[fx.Node, str] = {}
    for value, result in zip(program.values, program.results, strict=True):
        if result.kind == "accumulated" and program.sync:
            fail(program, fact, value, f"the gradient of {result.name!r} is not reduced.")
        if result.kind != "grad" or result.name not in program.params:
            continue
        param = program.params[result.name]
        picks = _reductions_of(value)
        for pick in picks:
            if meta.source(pick).target is ops.comm_hook:
                seen[pick] = result.name
                if result.name not in _packed(pick):
                    what = f"the gradient of {result.name!r} is not in what %{pick.name} reduced."
                    fail(program, fact, pick, what)
                continue
            if pick in seen:
                fail(
                    program,
                    fact,
                    pick,
                    f"the gradient of {result.name!r} is that of {seen[pick]!r}.",
                )
            seen[pick] = result.name
            if meta.get(pick).fqn != result.name:
                what = f"%{pick.name}, which is that of {meta.get(pick).fqn!r}"
                fail(program, fact, pick, f"the gradient of {result.name!r} is made of {what}.")
            sent = meta.operands(meta.source(pick))[_picked(pick)]
            if meta.get(sent).fqn != result.name:
                what = f"%{sent.name}, which is that of {meta.get(sent).fqn!r}"
                fail(program, fact, pick, f"the gradient of {result.name!r} is made of {what}.")
        done = [meta.source(pick).target for pick in reversed(picks)]
        if done != need:
            ran = ", ".join(_word(target) for target in done) or "nothing"
            fail(
                program,
                fact,
                program.output if not done else value,
                f"the gradient of {result.name!r} is returned without being reduced: it went "
                f"through {ran}; its ranks need {', '.join(_word(t) for t in need)}."
                if len(done) < len(need)
                else f"the gradient of {result.name!r} is reduced twice: by {ran}.",
            )
        shape = param.chunk(program.world_size)
        if tuple(value.meta["val"].shape) != shape:
            fail(
                program,
                fact,
                value,
                f"%{value.name} is {list(value.meta['val'].shape)}, but a shard of "
                f"{result.name!r} is {list(shape)}.",
            )
    for launch in _launches(program, ops.reduce_scatter, ops.all_reduce, ops.comm_hook):
        for pick in launch.users:
            if pick.target is operator.getitem and pick not in seen:
                fqn = meta.get(pick).fqn
                fail(program, fact, pick, f"the reduced gradient of {fqn!r} is not returned.")


def _reductions_of(value: fx.Node) -> list[fx.Node]:
    """Picks of reductions that `value` went through, the last first."""
    found: list[fx.Node] = []
    node = value
    while node.op == "call_function":
        if node.target is operator.getitem and meta.source(node).target in ops.COLLECTIVES:
            found.append(node)
            if meta.source(node).target is ops.comm_hook:
                break
            node = meta.operands(meta.source(node))[_picked(node)]
        elif node.target is operator.getitem and meta.source(node).target is ops.store:
            node = meta.operands(meta.source(node))[_picked(node)]
        elif meta.get(node).role == "settle":
            node = meta.source(node)
        else:
            break
    return found


def _packed(pick: fx.Node) -> set[str | None]:
    """FQNs of the gradients in the flat tensor that a comm_hook reduced."""
    node = meta.operands(meta.source(pick))[0]
    while len(node.all_input_nodes) == 1 and isinstance(node.args[0], fx.Node):
        node = meta.source(node)
    return {meta.get(meta.source(row)).fqn for row in node.all_input_nodes}


def _word(target: Any) -> str:
    return str(target).removeprefix("fxshard.").removesuffix(".default")


def equal_chunks(program: Program) -> None:
    """Every collective's buffers are its size times its inputs (or the inverse), row-wise."""
    for launch in _launches(program, ops.all_gather, ops.reduce_scatter):
        size = cast("int", launch.args[1])
        ins = [t for s in meta.operands(launch) for t in meta.tensors(s.meta["val"])]
        outs = list(meta.tensors(launch.meta["val"]))
        small, large = (ins, outs) if launch.target is ops.all_gather else (outs, ins)
        for part, whole in zip(small, large, strict=True):
            even = whole.shape[0] == part.shape[0] * size
            if not even or not whole.is_contiguous():
                fail(
                    program,
                    Fact.EQUAL_CHUNKS,
                    launch,
                    f"%{launch.name} moves {list(part.shape)} and {list(whole.shape)}: not "
                    f"{size} equal contiguous chunks.",
                )


def bounded_inflight(program: Program) -> None:
    """At most prefetch + 1 units wait for their first use, and no unit is kept behind its last.

    Units between the two may be more (units inside units, layers that are called again): those no
    schedule can free.
    """
    fact = Fact.BOUNDED_INFLIGHT
    prefetch = {"forward": program.forward_prefetch, "backward": program.backward_prefetch}
    order, first = _order(program), _first_uses(program)
    alive: dict[int | None, fx.Node] = {}
    for node in _launches_and_frees(program):
        tag = meta.get(node)
        if node.target is ops.free:
            alive.pop(tag.pair, None)
            continue
        alive[tag.pair] = node
        ahead = [launch for launch in alive.values() if order[first[launch]] > order[node]]
        limit = prefetch[tag.phase] + 1
        if len({first[launch] for launch in ahead}) > limit:
            names = ", ".join(_unit_name(program, launch) for launch in ahead)
            fail(
                program,
                fact,
                node,
                f"with %{node.name}, {len(ahead)} units are unsharded ahead of their use ({names});"
                f" the limit is prefetch + 1 = {limit}.",
            )
        for launch in alive.values():
            if all(order[reader] < order[node] for reader in _alias_readers(program, launch)):
                fail(
                    program,
                    fact,
                    node,
                    f"%{node.name} is launched while {_unit_name(program, launch)!r} is still "
                    f"unsharded, though nothing reads it any more.",
                )


def _launches_and_frees(program: Program) -> list[fx.Node]:
    """Unshards, and the frees of what they wrote."""
    unshards = {meta.get(launch).pair: launch for launch in _unshards(program)}
    return [
        n
        for n in program.graph.nodes
        if ops.is_unshard(n)
        or (
            n.target is ops.free
            and meta.get(n).pair in unshards
            and set(meta.operands(n)) & set(unshards[meta.get(n).pair].users)
        )
    ]


def _first_uses(program: Program) -> dict[fx.Node, fx.Node]:
    """Per all-gather, the first operator behind its wait that reads it or runs in its unit."""
    launches = {meta.get(launch).pair: launch for launch in _unshards(program)}
    found = dict.fromkeys(launches.values(), program.output)
    waited: list[fx.Node] = []
    for node in program.graph.nodes:
        if node.target is ops.wait and meta.get(node).pair in launches:
            waited.append(launches[meta.get(node).pair])
        elif node.op == "call_function" and meta.get(node).role in ("compute", "pad"):
            reads = set().union(*map(meta.storage_ids, node.all_input_nodes), set())
            for launch in list(waited):
                if meta.get(launch).unit == meta.get(node).unit or meta.storage_ids(launch) & reads:
                    found[launch] = node
                    waited.remove(launch)
    return found


def freed(program: Program) -> None:
    """Everything that a launch wrote or was only sent is freed, once, behind the launch."""
    fact = Fact.FREED
    frees = _by_pair(program, ops.free)
    order = _order(program)
    for launch in _launches(program):
        mine = frees.get(meta.get(launch).pair, [])
        have = [node for free in mine for node in meta.operands(free)]
        want = [*ops.sent_copies(launch), *ops.dying_results(program, launch)]
        if want and not mine:
            fail(program, fact, launch, f"%{launch.name} has 0 frees, expected 1.")
        if len(have) != len(set(have)):
            fail(program, fact, launch, f"%{launch.name} has {len(mine)} frees, expected 1.")
        if set(have) != set(want):
            fail(program, fact, mine[0], f"%{mine[0].name} does not free all of %{launch.name}.")
        stays = (
            ops.is_unshard(launch) and program.units[meta.get(launch).unit or 0].reshard is False
        )
        for free in mine:
            elsewhere = meta.get(free).phase != meta.get(launch).phase and not stays
            if elsewhere or order[free] < order[launch]:
                fail(program, fact, free, f"%{free.name} does not follow %{launch.name}.")


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
    recorded: dict[str, int] = {}  # event -> number of compute-stream nodes that it covers
    implied: dict[str, set[str]] = {}  # event -> events that are over when it is
    seen: set[str] = set()  # events that are over for the compute stream
    done = 0  # compute-stream nodes so far
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        tag = meta.get(node)
        for event in tag.waits:
            if event not in recorded:
                fail(program, fact, node, f"%{node.name} waits for {event}; nothing recorded it.")
        if node.target in ops.ASYNCHRONOUS:
            if tag.stream == "compute":
                fail(program, fact, node, f"%{node.name} runs on the compute stream.")
            if not tag.records:
                fail(program, fact, node, f"%{node.name} records no event when done.")
            if done > max((recorded[event] for event in tag.waits), default=0):
                fail(
                    program,
                    fact,
                    node,
                    f"stream {tag.stream!r} starts %{node.name} without waiting for what the "
                    f"compute stream runs in front of it.",
                )
            for source in node.all_input_nodes:
                maker = _launch_behind(source)
                if maker is None or meta.get(maker).records in seen:
                    continue
                same = meta.get(maker).stream == tag.stream
                if not same and meta.get(maker).records not in tag.waits:
                    fail(
                        program,
                        fact,
                        node,
                        f"%{node.name} on stream {tag.stream!r} uses %{source.name} of stream "
                        f"{meta.get(maker).stream!r} without waiting for event "
                        f"{meta.get(maker).records}.",
                    )
            recorded[str(tag.records)] = done
            before = [str(meta.get(n).records) for n in _same_pair_and_stream(program, node)]
            over = [{event} | implied.get(event, set()) for event in (*tag.waits, *before)]
            implied[str(tag.records)] = set().union(*over)
            continue
        seen = seen.union(*({event} | implied.get(event, set()) for event in tag.waits))
        done += tag.role not in ("unshard", "reduce", "free")  # picks, cuts and frees run nothing
        if tag.records:
            recorded[tag.records] = done
        for source in node.all_input_nodes:
            launch = _launch_behind(source)
            is_pick = node.target is operator.getitem and source.target in ops.ASYNCHRONOUS
            if launch is not None and not is_pick and meta.get(launch).records not in seen:
                fail(
                    program,
                    fact,
                    node,
                    f"%{node.name} on stream {tag.stream!r} uses %{source.name} of stream "
                    f"{meta.get(launch).stream!r} without waiting for event "
                    f"{meta.get(launch).records}.",
                )


def _same_pair_and_stream(program: Program, launch: fx.Node) -> list[fx.Node]:
    """What runs in front of `launch` on its stream, for it: a cast of what it sends."""
    found: list[fx.Node] = []
    for operand in meta.operands(launch):
        maker = meta.source(operand) if operand.op == "call_function" else operand
        if maker.target in (ops.cast, ops.load):
            mine = meta.get(launch)
            if (meta.get(maker).pair, meta.get(maker).stream) == (mine.pair, mine.stream):
                found += [maker]
    return found


def outlined(program: Program) -> None:
    """The schedule, flattened, is the graph: operator by operator, on the same values."""
    fact = Fact.OUTLINED
    schedule = program.schedule
    if schedule is None:
        raise VerifyError(fact.name.lower(), "the program has no schedule.")
    nodes = {node.name: node for node in program.graph.nodes}
    saved: list[fx.Node] = []  # in the order in which forward hands them to backward
    for phase, outer in schedule.phases():
        want = iter(program.phase(phase))
        env: dict[fx.Node, Any] = {}  # value of the schedule -> node of the graph, or some
        for row in outer.nodes:
            if row.op == "placeholder":
                env[row] = nodes.get(row.name)
            elif row.op == "call_module":
                region = schedule.regions[str(row.target)]
                inputs = region.graph.find_nodes(op="placeholder")
                inner = {a: env[b] for a, b in zip(inputs, row.all_input_nodes, strict=True)}
                for node in region.body:
                    inner[node] = _stands_for(program, row, node, next(want, None), inner)
                env[row] = fx.node.map_arg(region.graph.output_node().args[0], inner.__getitem__)
            elif row.op == "call_function" and _picks_region(row):
                env[row] = env[meta.source(row)][_picked(row)]
            elif row.op == "call_function":
                env[row] = _stands_for(program, row, row, next(want, None), env)
        left = next(want, None)
        if left is not None:
            fail(program, fact, left, f"no row of the schedule runs %{left.name}.")
        results: Any = fx.node.map_arg(outer.output_node().args[0], env.__getitem__)
        if phase == "forward":
            results, handed = results
            saved = list(handed)
        elif saved != [
            env[p]
            for p in outer.find_nodes(op="placeholder")
            if meta.get(p).role not in (*meta.HELD, "tangent", "accumulated")
        ]:
            fail(program, fact, program.output, "backward takes other values than forward saves.")
        both = zip(program.values, program.results, strict=True)
        mine = [v for v, r in both if (r.kind == "output") == (phase == "forward")]
        if list(results) != mine:
            fail(program, fact, program.output, f"the schedule's {phase} returns other values.")


def _stands_for(
    program: Program, row: fx.Node, run: fx.Node, node: fx.Node | None, env: dict[fx.Node, Any]
) -> fx.Node:
    """`node`, if it is what `run`, in `row` of the schedule, does on the values in `env`."""
    if node is None or node.target is not run.target:
        what = f"row %{row.name} of the schedule runs {dump.operation(run)} there."
        fail(program, Fact.OUTLINED, node or program.output, what)
    if fx.node.map_arg((run.args, run.kwargs), env.get) != (node.args, node.kwargs):
        what = f"row %{row.name} of the schedule runs it on other values."
        fail(program, Fact.OUTLINED, node, what)
    return node


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


def _unit_name(program: Program, node: fx.Node) -> str:
    return program.units[meta.get(node).unit or 0].name


def _order(program: Program) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(program.graph.nodes)}


def _launches(program: Program, *targets: Any) -> list[fx.Node]:
    return [
        node
        for node in program.graph.nodes
        if ops.is_launch(node) and (not targets or node.target in targets)
    ]


def _unshards(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if ops.is_unshard(node)]


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


def _picked(pick: fx.Node) -> int:
    return cast("int", pick.args[1])


def _is_pick_of(node: fx.Node, launch: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0] is launch


def _launch_behind(node: fx.Node) -> fx.Node | None:
    """The launch that wrote `node`, through picks and views."""
    while node.op == "call_function" and node.target not in ops.ASYNCHRONOUS:
        if not meta.aliases_input(node):
            return None
        ids = meta.storage_ids(node)
        source = next((n for n in node.all_input_nodes if meta.storage_ids(n) & ids), None)
        if source is None:
            return None
        node = source
    return node if node.target in ops.ASYNCHRONOUS else None


def _picks_region(row: fx.Node) -> bool:
    return row.target is operator.getitem and meta.source(row).op == "call_module"
