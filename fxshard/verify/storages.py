"""Storages: what a launch writes is freed once and used before; how much is alive."""

from __future__ import annotations

from torch import fx

from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Fact, Program
from fxshard.verify import walk
from fxshard.verify.failure import fail


def freed(program: Program) -> None:
    """What a launch wrote, and what was only made to be sent, is freed once, after the launch."""
    fact = Fact.FREED
    frees = walk.by_pair(program, ops.free, ops.keep)
    order = walk.order(program)
    kept = transfers.kept_storages(program)
    for launch in walk.launches(program):
        mine = frees.get(tags.get(launch).pair, [])
        have = [node for free in mine for node in tags.operands(free)]
        want = [*transfers.sent_copies(launch), *transfers.packed_results(launch)]
        want += transfers.dying_results(launch, kept)
        if want and not mine:
            fail(program, fact, launch, f"%{launch.name} has 0 frees, expected 1.")
        if len(have) != len(set(have)):
            fail(program, fact, launch, f"%{launch.name} has {len(mine)} frees, expected 1.")
        if set(have) != set(want):
            fail(program, fact, mine[0], f"%{mine[0].name} does not free all of %{launch.name}.")
        stays = ops.of(launch).role == "transfer" or (
            transfers.is_unshard(launch)
            and program.units[tags.get(launch).unit or 0].reshard is False
        )
        for free in mine:
            elsewhere = tags.get(free).phase != tags.get(launch).phase and not stays
            if elsewhere or order[free] < order[launch]:
                fail(program, fact, free, f"%{free.name} does not follow %{launch.name}.")
        _kept_or_freed(program, launch, mine)


def _kept_or_freed(program: Program, launch: fx.Node, mine: list[fx.Node]) -> None:
    """What is unsharded is kept if its unit stays so and nothing gathers it again; else freed."""
    results = transfers.unsharded(launch) if transfers.is_unshard(launch) else []
    keeps = bool(results) and transfers.keeps(program, launch)
    for node in mine:
        taken = tags.operands(node)
        if (node.target is ops.keep) != (keeps and taken[0] in results):
            what = "frees" if node.target is ops.free else "keeps"
            fail(program, Fact.FREED, node, f"%{node.name} {what} what %{launch.name} left.")
        named = [tags.get(item).fqn for item in taken]
        if node.target is ops.keep and ops.argument(node, "params") != named:
            fail(program, Fact.FREED, node, f"%{node.name} keeps {named} under other names.")


def no_use_after_free(program: Program) -> None:
    gone: dict[int, fx.Node] = {}
    for node in program.graph.nodes:
        for storage in tags.read_ids(node) & gone.keys():
            fail(
                program,
                Fact.NO_USE_AFTER_FREE,
                node,
                f"%{node.name} reads a storage that %{gone[storage].name} has freed.",
            )
        if ops.ends(node):
            for source in tags.operands(node):
                gone |= dict.fromkeys(tags.storage_ids(source), node)
    waits = {tags.get(n).pair: n for n in program.graph.nodes if n.target is ops.wait}
    order = walk.order(program)
    for node in program.graph.nodes:
        if ops.ends(node) and order[node] < order[waits[tags.get(node).pair]]:
            fail(
                program,
                Fact.NO_USE_AFTER_FREE,
                node,
                f"%{node.name} frees memory of a collective that is still in flight.",
            )


def bounded_inflight(program: Program) -> None:
    """At most prefetch + 1 units wait for their first use, and no unit is kept after its last.

    More units may be between first and last use (units inside units, layers that are called more
    than once): no schedule can free those.
    """
    fact = Fact.BOUNDED_INFLIGHT
    prefetch = {"forward": program.forward_prefetch, "backward": program.backward_prefetch}
    order, first = walk.order(program), _first_uses(program)
    number = {fqn: i for i, bucket in enumerate(program.moving) for fqn in bucket.fqns}
    _limited(program)
    alive: dict[int | None, fx.Node] = {}
    last: dict[fx.Node, int] = {}  # of what is alive, where it is read last
    unused: dict[fx.Node, None] = {}  # of what is alive, what waits for its first use
    for node in _launches_and_frees(program):
        tag = tags.get(node)
        gone = alive.pop(tag.pair, None) if ops.ends(node) else alive.get(tag.pair)
        if gone is not None:
            unused.pop(gone, None)
            del last[gone]
        if ops.ends(node):
            continue
        alive[tag.pair] = node
        keeps = transfers.keeps(program, node)
        cuts = ("unshard", "unpack")
        readers = walk.alias_readers(node)
        if all(tags.get(reader).role in cuts for reader in readers) and not keeps:
            fail(program, fact, node, f"nothing reads what %{node.name} gathers.")
        last[node] = len(order) if keeps else max(order[reader] for reader in readers)
        unused[node] = None
        ahead = [launch for launch in unused if order[first[launch]] > order[node]]
        unused = dict.fromkeys(ahead)
        limit = prefetch[tag.phase] + 1
        earliest: dict[int, fx.Node] = {}  # per bucket, which may take a launch per dtype
        for launch in sorted(ahead, key=lambda launch: order[first[launch]]):
            earliest.setdefault(number[walk.moved(launch)[0]], first[launch])
        if len({*earliest.values()}) > limit:
            names = ", ".join(walk.unit_name(program, launch) for launch in ahead)
            fail(
                program,
                fact,
                node,
                f"with %{node.name}, {len(ahead)} units are unsharded ahead of their use ({names});"
                f" the limit is prefetch + 1 = {limit}.",
            )
        if min(last.values()) < order[node]:
            launch = next(each for each in alive.values() if last[each] < order[node])
            fail(
                program,
                fact,
                node,
                f"%{node.name} is launched while {walk.unit_name(program, launch)!r} is still "
                f"unsharded, though nothing reads it any more.",
            )
    _freed_in_time(program)


def _freed_in_time(program: Program) -> None:
    """Nothing runs between the last use of what is freed and the free."""
    for free in program.graph.find_nodes(op="call_function", target=ops.free):
        storages = set().union(*map(tags.storage_ids, tags.operands(free)))
        node = free.prev
        while node.op == "call_function":
            uses = tags.read_ids(node) | tags.storage_ids(node)
            mine = node.target is ops.wait and tags.get(node).pair == tags.get(free).pair
            if mine or (uses & storages and node.target is not ops.free):
                break
            if node.target not in (ops.wait, ops.free, ops.keep) and not tags.aliases_input(node):
                what = f"%{free.name} stands after %{node.name}, though nothing before that "
                fail(program, Fact.BOUNDED_INFLIGHT, free, what + "needs what it frees any more.")
            node = node.prev


def _limited(program: Program) -> None:
    """At most `max_inflight` buckets are unsharded: from a launch until all it wrote is freed."""
    if program.max_inflight is None:
        return
    number = {fqn: i for i, bucket in enumerate(program.moving) for fqn in bucket.fqns}
    left: dict[fx.Node, set[fx.Node]] = {}
    for node in program.graph.nodes:
        if transfers.is_unshard(node):
            left[node] = set(transfers.unsharded(node))
        elif ops.ends(node):
            for launch in list(left):
                left[launch] -= set(tags.operands(node))
                if not left[launch]:
                    del left[launch]
        buckets = {
            number[walk.moved(launch)[0]]: walk.unit_name(program, launch) for launch in left
        }
        if len(buckets) > program.max_inflight:
            names = ", ".join(buckets.values())
            what = f"with %{node.name}, {len(buckets)} units are unsharded ({names}); the limit is "
            fail(program, Fact.BOUNDED_INFLIGHT, node, f"{what}{program.max_inflight}.")


def _launches_and_frees(program: Program) -> list[fx.Node]:
    """Unshards, and the frees of what they wrote."""
    unshards = {tags.get(launch).pair: launch for launch in walk.unshards(program)}
    return [
        n
        for n in program.graph.nodes
        if transfers.is_unshard(n)
        or (
            ops.ends(n)
            and tags.get(n).pair in unshards
            and set(tags.operands(n)) & set(transfers.unsharded(unshards[tags.get(n).pair]))
        )
    ]


def _first_uses(program: Program) -> dict[fx.Node, fx.Node]:
    """Per all-gather, the first operator after its wait that reads it or runs in its unit."""
    launches = {tags.get(launch).pair: launch for launch in walk.unshards(program)}
    found = dict.fromkeys(launches.values(), program.output)
    written = {launch: walk.written_by(launch) for launch in found}
    waited: list[fx.Node] = []
    for node in program.graph.nodes:
        if node.target is ops.wait and tags.get(node).pair in launches:
            waited.append(launches[tags.get(node).pair])
        elif node.op == "call_function" and tags.get(node).role in ("compute", "pad", "join"):
            reads = tags.read_ids(node)
            for launch in list(waited):
                if tags.get(launch).unit == tags.get(node).unit or written[launch] & reads:
                    found[launch] = node
                    waited.remove(launch)
    return found
