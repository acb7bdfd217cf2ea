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
    for node in program.graph.nodes:
        if node.target in (ops.cast, ops.load) and not ops.is_launch(node):
            for reader in (user for pick in node.users for user in pick.users):
                if reader.target not in (*ops.ASYNCHRONOUS, ops.free):
                    what = f"%{reader.name} reads what %{node.name} makes, which nobody waits for."
                    fail(program, fact, reader, what)
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
        _nobody_interferes(program, launch, wait)


def _nobody_interferes(program: Program, launch: fx.Node, wait: fx.Node) -> None:
    """Between the two nobody writes what `launch` sends, nor reads what it writes in place."""
    sent = set().union(*map(meta.storage_ids, meta.operands(launch)))
    node = launch.next
    while node is not wait:
        if node.target not in (ops.wait, ops.free) and not _is_pick_of(node, launch):
            touched = _written(node)
            if ops.is_in_place(launch):
                touched = set().union(*map(meta.storage_ids, node.all_input_nodes))
            if touched & sent:
                what = f"%{node.name} touches what %{launch.name} works on until %{wait.name}."
                fail(program, Fact.UNSHARD_PAIRED, node, what)
        node = node.next


def params_unsharded(program: Program) -> None:
    for node in program.graph.find_nodes(op="placeholder"):
        tag = meta.get(node)
        if tag.role == "param":
            fail(program, Fact.PARAMS_UNSHARDED, node, f"parameter {tag.fqn!r} comes in whole.")
        if tag.role != "shard":
            continue
        param = program.params[tag.fqn or ""]
        readers: tuple[Any, ...] = (ops.all_gather, ops.cast)
        if program.offloaded:
            readers = (ops.load,)
        elif program.world_size == 1 and param.compute_dtype is param.dtype:
            continue  # it is whole
        for user in node.users:
            if user.target not in readers:
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    user,
                    f"%{user.name} reads the shard of {tag.fqn!r}; only "
                    f"{' or '.join(map(_word, readers))} may.",
                )
    _sent_as_named(program)
    for launch in _unshards(program):
        for pick in launch.users:
            if pick.target is ops.wait:
                continue
            fqn = meta.get(pick).fqn
            want = program.params[fqn or ""]
            shape, dtype = tuple(pick.meta["val"].shape), pick.meta["val"].dtype
            rows = want.chunk(program.world_size)[0] * program.world_size
            if shape != (rows, *want.shape[1:]) or dtype is not want.compute_dtype:
                fail(
                    program,
                    Fact.PARAMS_UNSHARDED,
                    pick,
                    f"%{pick.name} is {list(shape)} of {dtype}, expected "
                    f"{[rows, *want.shape[1:]]} of {want.compute_dtype}.",
                )
            for user in pick.users:
                if shape != want.shape and meta.get(user).role not in ROLES_WITH_PADDING:
                    fail(
                        program,
                        Fact.PARAMS_UNSHARDED,
                        user,
                        f"%{user.name} reads {fqn!r} with its padding; only a cut may.",
                    )


def _sent_as_named(program: Program) -> None:
    """Shards, their copies and what is gathered of them bear one name, and one group's ranks."""
    fact = Fact.PARAMS_UNSHARDED
    for node in program.graph.nodes:
        if node.target not in (ops.all_gather, ops.cast, ops.load, ops.reshard):
            continue
        for pick in node.users:
            if not _is_pick_of(pick, node):
                continue
            taken, fqn = meta.operands(node)[_picked(pick)], meta.get(pick).fqn
            if meta.get(taken).role not in ("shard", "unshard", "reshard"):
                fail(program, fact, node, f"%{node.name} takes %{taken.name}, which is no shard.")
            if meta.get(taken).fqn != fqn:
                what = f"%{pick.name} stands for {fqn!r}, but picks {meta.get(taken).fqn!r}."
                fail(program, fact, pick, what)
            if node.target is not ops.all_gather:
                continue
            makers = [n for n in map(_maker, ops.sent_copies(node)) if n.target is ops.reshard]
            has = _group(makers[0]) if makers else "shard"
            if _group(node) != has:
                what = f"%{node.name} gathers in {_group(node)!r} what {has!r} shares."
                fail(program, fact, node, what)


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
    need += [ops.store] if program.offloaded else []
    need = [ops.comm_hook] if program.comm_hook else need
    seen: dict[fx.Node, str] = {}
    for value, result in zip(program.values, program.results, strict=True):
        if result.kind == "accumulated" and program.sync:
            fail(program, fact, value, f"the gradient of {result.name!r} is not reduced.")
        if result.kind == "accumulated" and meta.get(value).fqn != result.name:
            what = f"the gradient of {result.name!r} is that of {meta.get(value).fqn!r}."
            fail(program, fact, value, what)
        if result.kind != "grad" or result.name not in program.params:
            continue
        if not program.sync:
            fail(program, fact, value, f"the gradient of {result.name!r} is not accumulated.")
        picks = _reductions_of(value)
        for pick in picks:
            if meta.source(pick).target is ops.comm_hook:
                seen[pick] = result.name
                if _piece(value, pick) != _packed(pick).get(result.name):
                    what = f"the gradient of {result.name!r} is not in what %{pick.name} reduced."
                    if result.name in _packed(pick):
                        what = f"%{value.name} is not the part of %{pick.name} of {result.name!r}."
                    fail(program, fact, pick, what)
                continue
            _one_reduction(program, pick, result.name, seen)
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
        _fits_its_shard(program, value, result.name)
    for launch in _launches(program, ops.reduce_scatter, ops.all_reduce, ops.comm_hook, ops.store):
        for pick in launch.users:
            if pick.target is operator.getitem and pick not in seen:
                fqn = meta.get(pick).fqn
                fail(program, fact, pick, f"the reduced gradient of {fqn!r} is not returned.")
    _accumulated_once(program)


GROUPS = {ops.reduce_scatter: "shard", ops.all_reduce: "replicate"}


def _one_reduction(program: Program, pick: fx.Node, fqn: str, seen: dict[fx.Node, str]) -> None:
    """`pick` is the gradient of `fqn` behind a reduction, as its name, its ranks and `seen` say."""
    fact, launch = Fact.REDUCED_ONCE, meta.source(pick)
    if pick in seen:
        fail(program, fact, pick, f"the gradient of {fqn!r} is that of {seen[pick]!r}.")
    seen[pick] = fqn
    for node in (pick, meta.operands(launch)[_picked(pick)]):
        if meta.get(node).fqn != fqn:
            what = f"%{node.name}, which is that of {meta.get(node).fqn!r}"
            fail(program, fact, pick, f"the gradient of {fqn!r} is made of {what}.")
    if launch.target in GROUPS and _group(launch) != GROUPS[launch.target]:
        what = f"%{launch.name} reduces in {_group(launch)!r}, not in {GROUPS[launch.target]!r}."
        fail(program, fact, launch, what)


def _fits_its_shard(program: Program, value: fx.Node, fqn: str) -> None:
    param, val = program.params[fqn], value.meta["val"]
    shape = param.chunk(program.world_size)
    if tuple(val.shape) != shape:
        what = f"%{value.name} is {list(val.shape)}, but a shard of {fqn!r} is {list(shape)}."
        fail(program, Fact.REDUCED_ONCE, value, what)
    keeps = program.units[param.unit].precision.keep_low_precision_grads
    if val.dtype is not param.dtype and not keeps:
        what = f"%{value.name} is of {val.dtype}, but a shard of {fqn!r} of {param.dtype}."
        fail(program, Fact.REDUCED_ONCE, value, what)


def _accumulated_once(program: Program) -> None:
    """What steps before have left is read once: added to, or sent; and sent if there is a sync."""
    fact = Fact.REDUCED_ONCE
    both = zip(program.values, program.results, strict=True)
    made = {r.name: _origin(v, r.name) for v, r in both if r.name in program.params}
    for node in program.graph.find_nodes(op="placeholder"):
        if meta.get(node).role != "accumulated":
            continue
        fqn = meta.get(node).fqn or ""
        readers = [n for n in node.users if n.target is not ops.free and n.op == "call_function"]
        if len(readers) > 1:
            readers.sort(key=_order(program).__getitem__)
            what = f"%{readers[1].name} is the second to read the accumulated gradient of {fqn!r}."
            fail(program, fact, readers[1], what)
        if program.sync and made.get(fqn) is not node:
            what = f"what was accumulated of the gradient of {fqn!r} is not reduced."
            fail(program, fact, made.get(fqn, node), what)


def _origin(value: fx.Node, fqn: str) -> fx.Node:
    """The gradient that `value` was made of by reductions, paddings, divisions and casts."""
    node = value
    for pick in _reductions_of(value):
        launch = meta.source(pick)
        if launch.target is ops.comm_hook:
            rows = {meta.get(meta.source(row)).fqn: row for row in _rows(launch)}
            node = rows[fqn]
        else:
            node = meta.operands(launch)[_picked(pick)]
    while node.op == "call_function" and meta.get(node).role in ("pad", "settle"):
        node = meta.source(node)
    return node


def _reductions_of(value: fx.Node) -> list[fx.Node]:
    """Picks of reductions that `value` went through, the last first."""
    found: list[fx.Node] = []
    node = value
    while node.op == "call_function":
        if node.target is operator.getitem and ops.is_launch(meta.source(node)):
            found.append(node)
            if meta.source(node).target is ops.comm_hook:
                break
            node = meta.operands(meta.source(node))[_picked(node)]
        elif meta.get(node).role == "settle":
            node = meta.source(node)
        else:
            break
    return found


def _rows(hook: fx.Node) -> list[fx.Node]:
    """The gradients in the flat tensor that `hook` takes, rank by rank, as they lie there."""
    node = meta.operands(hook)[0]
    while len(node.all_input_nodes) == 1 and isinstance(node.args[0], fx.Node):
        node = meta.source(node)
    return list(cast("list[fx.Node]", node.args[0]))


def _packed(pick: fx.Node) -> dict[str | None, tuple[int, int]]:
    """Per gradient that a comm_hook reduced: where it begins and ends in `pick`, its result."""
    found: dict[str | None, tuple[int, int]] = {}
    start = 0
    for row in _rows(meta.source(pick)):
        end = start + row.meta["val"].shape[1]
        found[meta.get(meta.source(row)).fqn] = (start, end)
        start = end
    return found


def _piece(value: fx.Node, pick: fx.Node) -> tuple[Any, ...]:
    """Begin and end of `value` in `pick`: those of the slice between the two."""
    while meta.source(value) is not pick:
        value = meta.source(value)
    return value.args[2:4]


def _word(target: Any) -> str:
    return str(target).removeprefix("fxshard.").removesuffix(".default")


def equal_chunks(program: Program) -> None:
    """Every collective's buffers are its size times its inputs (or the inverse), row-wise."""
    ranks = {"shard": program.world_size, "replicate": program.replicas}
    for node in program.graph.nodes:
        if node.target in (*ops.COLLECTIVES, ops.reshard):
            group = _group(node)
            size = ranks.get(group) or int(group.removeprefix("reshard"))
            if node.args[1] != size:
                what = f"%{node.name} is one of {node.args[1]} ranks, but {group!r} has {size}."
                fail(program, Fact.EQUAL_CHUNKS, node, what)
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
        if all(meta.get(reader).role == "unshard" for reader in _alias_readers(program, node)):
            fail(program, fact, node, f"nothing reads what %{node.name} gathers.")
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
    kept = ops.kept_storages(program)
    for launch in _launches(program):
        mine = frees.get(meta.get(launch).pair, [])
        have = [node for free in mine for node in meta.operands(free)]
        want = [*ops.sent_copies(launch), *ops.dying_results(launch, kept)]
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


def _maker(node: fx.Node) -> fx.Node:
    """The operator that `node` is a pick of; itself for a placeholder."""
    return node if node.op == "placeholder" else meta.source(node)


def _group(node: fx.Node) -> str:
    """The ranks that take part in a ``fxshard::`` operator."""
    at = {"all_reduce": "replicate"}.get(_word(node.target), "shard")
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("group") if "group" in names else len(node.args)
    return str(node.args[place]) if place < len(node.args) else at


def _written(node: fx.Node) -> set[int]:
    """Storages that `node` writes in place."""
    schema = getattr(node.target, "_schema", None)
    both = zip(schema.arguments, node.args, strict=False) if schema is not None else ()
    return set().union(
        *(
            meta.storage_ids(value)
            for argument, value in both
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value, fx.Node)
        )
    )


def _picks_region(row: fx.Node) -> bool:
    return row.target is operator.getitem and meta.source(row).op == "call_module"
