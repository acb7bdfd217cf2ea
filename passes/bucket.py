"""bucket: which parameters one collective moves."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from fxshard.ir import tags
from fxshard.ir.program import Fact, ParamBucket, Program, nbytes

# Of a part of a unit that is gathered alone: at 50 GB/s (one InfiniBand link) its transfer takes
# some 40 us, a few times what a launch more costs.
LARGE = 2 * 2**20


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Group parameters into buckets: one all-gather and one reduction each, per dtype.

    By default a bucket is a unit. In it each large parameter has its own buffer: one launch writes
    them all, nothing is copied out, and an unshard holds their bytes once. Small ones
    are packed: copied into one buffer per dtype to be sent, and out of it again, as FSDP2 does with
    all (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), because a message costs its
    latency before it costs its bytes.

    A split unit is gathered part by part, each at its own first use and freed after its own last.
    By default that is done where the parts are large and other units compute between their uses:
    the embedding and the head of a language model are both the root's, and never alive together;
    the head's gradient is reduced while the layers run backward, not after them. Merged units cost
    fewer launches and hold the bytes of all of them.

    Bytes are those of the unsharded parameters in the dtype of compute.

    Attributes:
        max_bytes: a bucket with more is split, in the order of first use; one parameter never is.
        min_bytes: neighbours in that order are merged while both have less, if their units have the
            same precision and resharding, and the first is not read any more where the second is.
        pack_bytes: parameters with less are packed, those without an element excepted: a buffer of
            these alone would not tell how many ranks it is from.

    Before (max_bytes=64)::

        unit 0: embed.weight (64 bytes), head.weight (64 bytes)

    After::

        bucket 0: embed.weight
        bucket 1: head.weight
    """

    name: ClassVar[str] = "bucket"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})

    max_bytes: int | None = None
    min_bytes: int | None = None
    pack_bytes: int = 0

    def apply(self, program: Program) -> None:
        uses = uses_in_forward(program)
        never = len(program.graph.nodes)
        sizes = {fqn: gathered_bytes(program, fqn) for fqn in program.params}
        places = sorted(first for first, _ in uses.values())
        groups: list[list[str]] = []
        for unit in program.units:
            for fqns in map(list, unit.by_mesh):
                if self.max_bytes is not None:
                    fqns.sort(key=lambda fqn: uses.get(fqn, (never, never))[0])
                    groups += split(fqns, sizes, self.max_bytes)
                else:
                    groups += used_apart(fqns, sizes, uses, places)
        if self.min_bytes is not None:
            groups.sort(key=lambda group: min(uses.get(f, (never, never))[0] for f in group))
            groups = self.merge(program, groups, sizes, uses)
        program.buckets = tuple(
            ParamBucket(tuple(group), frozenset(f for f in group if self.packs(program, sizes, f)))
            for group in groups
        )

    def packs(self, program: Program, sizes: dict[str, int], fqn: str) -> bool:
        """Whether a parameter is small; one of a tensor subclass is sent as that says."""
        return 0 < sizes[fqn] < self.pack_bytes and program.params[fqn].extension is None

    def merge(
        self,
        program: Program,
        groups: Sequence[list[str]],
        sizes: dict[str, int],
        uses: dict[str, tuple[int, int]],
    ) -> list[list[str]]:
        """Put too small neighbours together."""
        found: list[list[str]] = []
        for group in groups:
            before = found[-1] if found else []
            both = [sum(sizes[fqn] for fqn in part) for part in (before, group)]
            if (
                before
                and max(both) < (self.min_bytes or 0)
                and (self.max_bytes is None or sum(both) <= self.max_bytes)
                and settings_of(program, before) == settings_of(program, group)
                and follows(before, group, uses)
            ):
                found[-1] = before + group
            else:
                found.append(group)
        return found


def gathered_bytes(program: Program, fqn: str) -> int:
    """Bytes that an all-gather of a parameter is for: without padding, the same on all worlds."""
    param = program.params[fqn]
    return nbytes(param.shape, param.compute_dtype)


def uses_in_forward(program: Program) -> dict[str, tuple[int, int]]:
    """Per parameter that forward reads: places of its first and its last reader in the graph.

    Where ranks differ, those on any of them: buckets are the same on all ranks.
    """
    if program.common is not None:
        return program.common.uses
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    found: dict[str, tuple[int, int]] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        tag = tags.get(node)
        places = [order[u] for u in node.users if tags.get(u).phase == "forward"]
        if tag.role == "param" and tag.fqn in program.params and places:
            first, last = found.get(tag.fqn, (places[0], places[0]))
            found[tag.fqn] = (min(first, *places), max(last, *places))
    return found


def split(fqns: Sequence[str], sizes: dict[str, int], limit: int) -> list[list[str]]:
    """`fqns` cut, in order, into groups of at most `limit` bytes, or of one parameter."""
    found: list[list[str]] = []
    room = -1
    for fqn in fqns:
        if sizes[fqn] > room:
            found.append([])
            room = limit
        found[-1].append(fqn)
        room -= sizes[fqn]
    return found


def used_apart(
    fqns: Sequence[str],
    sizes: dict[str, int],
    uses: dict[str, tuple[int, int]],
    places: Sequence[int],
) -> list[list[str]]:
    """`fqns` of a unit in groups that forward is done with before it comes to the next.

    Only where parameters of other units come in between (`places`, sorted, are those at which
    parameters of any are first read), and where both sides have at least `LARGE` bytes. What
    forward never reads is in the last group.
    """
    order = sorted((f for f in fqns if f in uses), key=lambda fqn: uses[fqn])
    cuts: list[list[str]] = [[]]
    end = -1
    for fqn in order:
        begin = uses[fqn][0]
        between = bisect.bisect_left(places, begin) - bisect.bisect_right(places, end)
        if cuts[-1] and between > 0:
            rest = sum(sizes[f] for f in order[order.index(fqn) :])
            if min(sum(sizes[f] for f in cuts[-1]), rest) >= LARGE:
                cuts.append([])
        cuts[-1].append(fqn)
        end = max(end, uses[fqn][1])
    group = {fqn: i for i, cut in enumerate(cuts) for fqn in cut}
    last = len(cuts) - 1
    return [[f for f in fqns if group.get(f, last) == i] for i in range(len(cuts))]


def settings_of(program: Program, group: Sequence[str]) -> list[object]:
    """What all parameters of a bucket, and their units, must have in common, of its first one."""
    first = program.params[group[0]]
    unit = program.units[first.unit]
    found = [unit.precision, unit.reshard, unit.stays, unit.reduce, unit.divide_factor, unit.ahead]
    return [first.mesh, *found]


def follows(before: Sequence[str], group: Sequence[str], uses: dict[str, tuple[int, int]]) -> bool:
    """True if forward reads `group`, and `before` only earlier than that."""
    last = [uses[fqn][1] for fqn in before if fqn in uses]
    first = [uses[fqn][0] for fqn in group if fqn in uses]
    return bool(last) and bool(first) and max(last) < min(first)
