"""prefetch: launch early, wait late."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from typing import ClassVar, Literal

from torch import fx

from fxshard.errors import ConfigError
from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Fact, Program
from fxshard.ir.units import index_of

Ahead = int | Literal["pre", "post"]


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """Launch a bucket's all-gather while an earlier one computes; wait for a reduction late.

    The launch of an unshard, with the casts and loads that it sends, moves to where the unit `d`
    places before it begins to compute: after the wait of that, or, of a unit that has stayed
    unsharded since forward, before its first operator. It is in flight while that computes. Where
    a unit says which ones are launched then (`Unit.ahead`), it is those. The wait of a reduction
    moves before the next reduction, or to the end of backward, and what follows it (an all-reduce,
    a copy to the CPU) with it: at most one of each is in flight.

    "pre" and "post" are FSDP1's modes (torch/distributed/fsdp/_runtime_utils.py,
    ``_pre_backward_hook`` and ``_post_backward_reshard``): "pre" is a depth of 1; with "post" the
    launch comes between the previous bucket's compute and its reduction: it overlaps the
    reduction, and never keeps two buckets unsharded. Forward reduces nothing: "post" is 0 there.

    With `max_inflight`, launches wait for the last readers of earlier buckets, so that at most so
    many buckets are unsharded at any point, whatever the depth.

    Attributes:
        forward: buckets ahead in forward (0: launch and wait stay together), "pre" or "post".
        backward: the same in backward. A bucket that stayed unsharded counts, as in FSDP2.
        max_inflight: how many buckets may be unsharded, from launch to last reader; None: any.

    Before::

        wait a; compute a; launch b; wait b; compute b

    After (depth 1)::

        wait a; launch b; compute a; wait b; compute b
    """

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.UNSHARD_PAIRED})

    forward: Ahead = 1
    backward: Ahead = 1
    max_inflight: int | None = None

    def apply(self, program: Program) -> None:
        """Raises ConfigError if more than `max_inflight` buckets compute at the same time, or if
        there is a limit and a parameter is of a tensor subclass.
        """
        program.forward_prefetch, program.backward_prefetch = map(depth, self._modes())
        program.max_inflight = self.max_inflight
        for phase, ahead in zip(PHASES, self._modes(), strict=True):
            if ahead == "post":
                pass_reductions(program, phase)
                continue
            most = advance_launches(program, phase, depth(ahead))
            if phase == "forward":
                program.forward_prefetch = max(program.forward_prefetch, most)
            else:
                program.backward_prefetch = max(program.backward_prefetch, most)
        if self.max_inflight is not None:
            refuse_copies(program)
            hold_back(program, self.max_inflight)
        defer_reduce_waits(program)

    def _modes(self) -> tuple[Ahead, Ahead]:
        return self.forward, self.backward


PHASES: tuple[tags.Phase, ...] = ("forward", "backward")


def depth(ahead: Ahead) -> int:
    """Buckets that may be unsharded ahead of their use, besides the one that is needed next."""
    return {"pre": 1, "post": 0}[ahead] if isinstance(ahead, str) else ahead


def by_bucket(program: Program, launches: list[fx.Node]) -> list[list[fx.Node]]:
    """`launches` in their order, those of one bucket in a phase together: one per dtype."""
    number = {fqn: i for i, bucket in enumerate(program.moving) for fqn in bucket.fqns}
    bucket = {
        n: (tags.get(n).phase, number[tags.get(transfers.unsharded(n)[0]).fqn or ""])
        for n in launches
    }
    return [list(group) for _, group in itertools.groupby(launches, bucket.__getitem__)]


@dataclasses.dataclass(frozen=True)
class Stop:
    """Where parameters are unsharded and their unit begins to compute: launches may be placed here.

    Attributes:
        unit: index of the unit.
        launches: of the bucket that is waited for here; none if the unit has stayed unsharded.
        first: the first operator of such a unit in the phase.
    """

    unit: int
    launches: tuple[fx.Node, ...] = ()
    first: fx.Node | None = None


def advance_launches(program: Program, phase: tags.Phase, depth: int) -> int:
    """Move each launch, and what it sends, to the stop that it follows.

    The launches of one bucket stand together, also where they are not moved.

    Returns:
        How many buckets at most are then unsharded ahead of their use, besides the next one.
    """
    nodes = program.phase(phase)
    launches = [n for n in nodes if transfers.is_unshard(n)]
    chains = chains_of(nodes, launches)
    waits = {tags.get(n).pair: n for n in nodes if n.target is ops.wait}
    stops = stops_of(program, phase, by_bucket(program, launches), waits)
    follow = followers(program, phase, stops, depth)
    moved = {k for following in follow.values() for k in following}
    for k, stop in enumerate(stops):
        if k not in moved:
            for first, second in itertools.pairwise(stop.launches):
                move_after(chains[first][-1], chains[second])
    for k, following in follow.items():
        chain = [node for i in following for launch in stops[i].launches for node in chains[launch]]
        move_after(anchor_of(stops[k], waits), chain)
    by = {i: k for k, following in follow.items() for i in following}
    return max((sum(by[i] <= k < i for i in by) for k in follow), default=0)


def stops_of(
    program: Program,
    phase: tags.Phase,
    buckets: list[list[fx.Node]],
    waits: dict[int | None, fx.Node],
) -> list[Stop]:
    """The stops of a phase in their order: its buckets, and the units that stayed unsharded.

    Where ranks differ, the latter begin elsewhere on other ranks, between other collectives.
    """
    order = {node: i for i, node in enumerate(program.phase(phase))}
    stops: list[tuple[int, Stop]] = []
    for bucket in buckets:
        at = min(order[waits[tags.get(launch).pair]] for launch in bucket)
        stops.append((at, Stop(tags.get(bucket[0]).unit or 0, tuple(bucket))))
    if phase == "backward" and buckets and program.common is None:
        gathered = {stop.unit for _, stop in stops}
        left = [units for units in stayed(program) if not units & gathered]
        for node, at in order.items():
            unit = tags.get(node).unit
            if any(unit in units for units in left):
                left = [units for units in left if unit not in units]
                stops.append((at, Stop(unit or 0, first=node)))
    return [stop for _, stop in sorted(stops, key=lambda stop: stop[0])]


def stayed(program: Program) -> list[set[int]]:
    """Per bucket that forward unshards and leaves so for backward, the units that it is of."""
    launches = [n for n in program.phase("forward") if transfers.is_unshard(n)]
    there = {
        fqn for n in launches for item in transfers.unsharded(n) if (fqn := tags.get(item).fqn)
    }
    found: list[set[int]] = []
    for bucket in program.moving:
        units = {program.params[fqn].unit for fqn in bucket.fqns if fqn in there}
        if units and all(program.units[unit].reshard is False for unit in units):
            found.append(units)
    return found


def anchor_of(stop: Stop, waits: dict[int | None, fx.Node]) -> fx.Node:
    """The node after which what follows `stop` is launched."""
    if stop.first is not None:
        return stop.first.prev
    last = stop.launches[-1]
    readers = [user for item in transfers.packed_results(last) for user in item.users]
    unpacked = [item for user in readers if user.target is ops.unpack for item in user.users]
    return unpacked[-1] if unpacked else waits[tags.get(last).pair]


def followers(
    program: Program, phase: tags.Phase, stops: list[Stop], depth: int
) -> dict[int, list[int]]:
    """Number of a stop in the phase -> the later ones whose buckets are launched at it, in order.

    The ones that its unit asks for (`Unit.ahead`), or else the one `depth` stops later; at the
    first one all until there. Each is launched once, by the first that it follows.
    """
    taken: set[int] = set()
    found: dict[int, list[int]] = {}
    for k, stop in enumerate(stops):
        asked = program.units[stop.unit].ahead[phase]
        if asked:
            index = index_of(program.units)
            wanted = [index[fqn] for fqn in asked if fqn in index]
            mine = [i for each in wanted for i, other in enumerate(stops) if other.unit == each]
        else:
            mine = list(range(1 if k == 0 else k + depth, k + depth + 1)) if depth else []
        mine = [i for i in mine if k < i < len(stops) and stops[i].launches]
        found[k] = [i for i in mine if i not in taken]
        taken.update(found[k])
    return {k: following for k, following in found.items() if following}


def pass_reductions(program: Program, phase: tags.Phase) -> None:
    """Move each launch, and what it sends, before the reduction of the previous bucket.

    That is the first reduction, with its copies, after the last reader of that bucket.
    """
    everything = [node for node in program.graph.nodes if node.op == "call_function"]
    nodes = program.phase(phase)
    launches = [n for n in nodes if transfers.is_unshard(n)]
    chains, ends = chains_of(nodes, launches), last_readers(everything, launches)
    order = {node: i for i, node in enumerate(everything)}
    reductions = [n for n in nodes if transfers.is_reduction(n)]
    places = [order[node] for node in reductions]
    for before, bucket in itertools.pairwise(by_bucket(program, launches)):
        at = bisect.bisect(places, max(order[ends[launch]] for launch in before))
        if at < len(places) and places[at] < order[chains[bucket[0]][0]]:
            first = reductions[at]  # before its copies too
            while tags.get(first.prev).role == "pad" and first.prev.op == "call_function":
                first = first.prev
            move_after(first.prev, [node for launch in bucket for node in chains[launch]])


def chains_of(nodes: list[fx.Node], launches: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Each launch with its getitems, and the loads, casts and packs of its pair before it.

    With the operators, too, that make what is sent of the shard of a tensor subclass.
    """
    by_pair: dict[int | None, list[fx.Node]] = {tags.get(n).pair: [] for n in launches}
    waited: set[int | None] = set()
    for node in nodes:
        tag = tags.get(node)
        if tag.pair not in by_pair or tag.pair in waited:
            continue
        if node.target is ops.wait:
            waited.add(tag.pair)
        elif tag.role in ("unshard", "pre_gather"):
            by_pair[tag.pair].append(node)
    return {launch: by_pair[tags.get(launch).pair] for launch in launches}


def move_after(anchor: fx.Node, nodes: list[fx.Node]) -> None:
    """Move `nodes`, in their order, to where `anchor` is done."""
    for node in reversed(nodes):
        anchor.append(node)


def refuse_copies(program: Program) -> None:
    """Raise ConfigError if an unsharded parameter outlives what was gathered of it."""
    for node in program.graph.nodes:
        if node.op == "call_function" and tags.get(node).role == "post_gather":
            raise ConfigError(
                f"max_inflight with parameter {tags.get(node).fqn!r}, of a tensor subclass: what "
                f"fsdp_post_all_gather makes may outlive the gathered buffers, which are counted. "
                f"Leave max_inflight out."
            )


def hold_back(program: Program, limit: int) -> None:
    """Move launches back until at most `limit` buckets are unsharded at any point.

    A bucket is unsharded from its launch to its last reader. Waits do not move, so no order of the
    launches gets below the number of buckets that compute at the same time.

    Raises:
        ConfigError: more than `limit` are in use at once.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    order = {node: i for i, node in enumerate(nodes)}
    waits = {tags.get(n).pair: n for n in nodes if n.target is ops.wait}
    launches = [node for node in nodes if transfers.is_unshard(node)]
    launches.sort(key=lambda launch: order[waits[tags.get(launch).pair]])
    chains = chains_of(nodes, launches)
    ends = last_readers(nodes, launches)
    held: list[tuple[int, list[fx.Node]]] = []  # last reader's place, launches: of those before
    start, end = -1, None  # where the previous bucket is launched now, and its chain's last node
    for bucket in by_bucket(program, launches):
        chain = [node for launch in bucket for node in chains[launch]]
        its_waits = [waits[tags.get(launch).pair] for launch in bucket]
        wait = min(its_waits, key=order.__getitem__)
        mine = max(order[chain[0]], start)
        later = sorted((place for place, _ in held if place > order[chain[0]]), reverse=True)
        if len(later) >= limit:
            mine = max(mine, later[limit - 1])
        if mine >= order[wait]:
            using = [other for place, other in held if place > order[wait]]
            raise_in_use(program, [*using, bucket], wait, limit)
        if mine > order[chain[0]]:
            anchor = end if mine == start and end is not None else nodes[mine]
            move_after(anchor, chain)
        start, end = mine, chain[-1]
        last = max(order[node] for node in (*(ends[launch] for launch in bucket), *its_waits))
        held.append((last, bucket))


def last_readers(nodes: list[fx.Node], launches: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Per unshard the last operator that reads, through any alias, what it leaves."""
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        last.update(dict.fromkeys(tags.storage_ids(node), i))
        last.update(dict.fromkeys(tags.read_ids(node), i))
    found: dict[fx.Node, fx.Node] = {}
    for launch in launches:
        storages = set().union(*map(tags.storage_ids, transfers.unsharded(launch)))
        found[launch] = nodes[max(last[storage] for storage in storages)]
    return found


def raise_in_use(program: Program, buckets: list[list[fx.Node]], wait: fx.Node, limit: int) -> None:
    """Say which buckets compute at the same time."""
    names = [program.units[tags.get(launches[0]).unit or 0].name for launches in buckets]
    kept = [
        unit.name for unit in program.units if unit.reshard is False and unit.name in set(names)
    ]
    hint = " Those with reshard_after_forward=False stay from forward to backward." if kept else ""
    raise ConfigError(
        f"max_inflight={limit} cannot be held: at %{wait.name} in {tags.get(wait).phase}, "
        f"{len(buckets)} units are unsharded because they compute: {', '.join(names)}.{hint} Give "
        f"at least {len(buckets)}, or split the largest with max_bucket_bytes."
    )


def defer_reduce_waits(program: Program) -> None:
    """Move what follows each launch of a reduction after the next unit's launch of that kind.

    A reduction has stages: copies and launch; wait, and the launch of an all-reduce; and so on.
    Stage n runs right before stage n - 1 of the next unit, so that the buffers of two units never
    add up. The stages of the last unit run at the end.
    """
    left: list[list[list[fx.Node]]] = []  # stages still to be placed, of the units so far
    for first, *rest in stages(program):
        at = first[0]
        waiting = [rest]
        for stage, *later in filter(None, left):
            for node in stage:
                at.prepend(node)
            at = stage[0]
            waiting.append(later)
        left = waiting
    while any(left):
        end = program.phase("backward")[-1]
        for stage, *_ in reversed([each for each in left if each]):
            for node in stage:
                end.append(node)
                end = node
        left = [each[1:] for each in left]


def stages(program: Program) -> list[list[list[fx.Node]]]:
    """Per reduction of a unit: its nodes, cut before each wait.

    An all-reduce or a copy to the CPU has a pair of its own; it belongs to what it reads.
    """
    found: list[list[list[fx.Node]]] = []
    number: dict[int, int] = {}  # pair -> place in `found`
    for node in program.phase("backward"):
        tag = tags.get(node)
        if tag.pair is None or tag.role not in ("pad", "reduce", "wait", "post_reduction"):
            continue
        if tag.pair not in number:
            if tag.role == "wait":
                continue  # of an unshard
            before = [tags.get(source).pair for source in node.all_input_nodes]
            known = [number[pair] for pair in before if pair in number]
            if not known:
                found.append([[]])
            number[tag.pair] = known[0] if known else len(found) - 1
        group = found[number[tag.pair]]
        if tag.role == "wait":
            group.append([])
        group[-1].append(node)
    return found
