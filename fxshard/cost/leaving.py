"""Which saved activations can be on the CPU from forward to backward, and how many at no cost.

Two ask: the pass that moves them (`fxshard.passes.offload_activations`), of a whole program; and
the choice of what to keep, recompute or offload (`fxshard.cost.activations`), before anything is
recomputed or sharded.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable

import torch
from torch import fx

from fxshard.capture import rng, shapes
from fxshard.cost import operators
from fxshard.hardware import Hardware
from fxshard.ir import ops, tags, transfers
from fxshard.ir.program import Program
from fxshard.verify import walk

LEAST_BYTES = 2**20  # smaller tensors are not worth a copy, unless they are asked for
Way = tuple[int, int]  # numbers of the runs after which, and before which, a storage moves


@dataclasses.dataclass(frozen=True)
class Movable:
    """A storage that forward makes, and that a copy can replace in backward.

    Attributes:
        base: the tensor that is all of it.
        inside: what lies in it, in the order of forward.
        last: place, in forward, of the last operator that touches it.
    """

    base: fx.Node
    inside: list[fx.Node]
    last: int


class Runs:
    """Operators of a phase, cut where another unit computes.

    Attributes:
        nodes: all of the phase, in order.
        starts: place of the first operator of compute of each run.
        ends: place of its last.
    """

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes
        self.starts: list[int] = []
        self.ends: list[int] = []
        unit: int | None = None
        for place, node in enumerate(nodes):
            tag = tags.get(node)
            if tag.role != "compute":
                continue
            if not self.starts or tag.unit != unit:
                self.starts.append(place)
                self.ends.append(place)
            self.ends[-1], unit = place, tag.unit

    def of(self, place: int) -> int:
        """The number of the run that a place is in, or of the one before it."""
        return max(0, bisect.bisect(self.starts, place) - 1)

    def seconds(self, hardware: Hardware) -> list[float]:
        """What each run computes."""
        found = [0.0] * len(self.starts)
        for place, node in enumerate(self.nodes):
            if tags.get(node).role == "compute":
                found[self.of(place)] += operators.node_seconds(node, hardware)
        return found


def movable(program: Program) -> dict[int, Movable]:
    """By storage, in the order in which forward makes them."""
    order = {node: place for place, node in enumerate(program.phase("forward"))}
    stay = set().union(*map(tags.storage_ids, program.values))
    holders: dict[int, list[fx.Node]] = {}  # storage -> what lies in it, in order
    last: dict[int, int] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            stay |= tags.storage_ids(node)
            continue
        stay |= walk.written(node)
        if node in order:
            last |= dict.fromkeys(tags.read_ids(node) | tags.storage_ids(node), order[node])
            for storage in tags.storage_ids(node):
                holders.setdefault(storage, []).append(node)
    found = {}
    for storage, inside in holders.items():
        base = None if storage in stay else base_of(program, storage, inside)
        if base is not None:
            found[storage] = Movable(base, inside, last[storage])
    return found


def base_of(program: Program, storage: int, inside: list[fx.Node]) -> fx.Node | None:
    """The first of the tensors `inside` of a storage that is all of it; None: it cannot leave."""
    maker = transfers.storage_maker(inside[0])
    if maker is None or tags.get(maker).role != "compute" or maker.target is rng.get_rng_state:
        return None
    if any(ops.of(node).role == "transfer" for node in inside):
        return None
    for node in inside:
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor) or val.device != program.device or not val.numel():
            continue
        if shapes.fills_storage(node) and is_dense(val):
            return node
    return None


def is_dense(val: torch.Tensor) -> bool:
    """True if the elements of a tensor lie side by side, its dimensions in any order."""
    step = 1
    for stride, size in sorted((st, si) for st, si in zip(val.stride(), val.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def views_from(base: fx.Node, at: fx.Node) -> list[fx.Node] | None:
    """The chain of views from a tensor to another one of its storage; None: there is none."""
    chain: list[fx.Node] = []
    while at is not base:
        if not tags.aliases_input(at) or tags.writes(at) or len(tags.storage_ids(at)) != 1:
            return None
        if not isinstance(at.meta["val"], torch.Tensor) or len(at.all_input_nodes) != 1:
            return None
        chain.append(at)
        at = at.all_input_nodes[0]
    return chain[::-1]


def rooms(
    ways: Iterable[Way], forward: Runs, backward: Runs, hardware: Hardware, ahead: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes that may move while others compute, so that neither phase waits for them.

    Between two units whose activations leave, and between the launch of a copy back and the wait
    for it, there is time for so many.

    Args:
        ways: of all that may move.
        forward, backward: the operators of both phases.
        hardware: whose times count.
        ahead: units, as of `OffloadActivations`.

    Returns:
        By run of forward, what may leave after it; by run of backward, what may be there before it.
    """
    ways = list(ways)
    there, back = forward.seconds(hardware), backward.seconds(hardware)
    left: dict[int, float] = {}
    ends = [*sorted({leaves for leaves, _ in ways}), len(there) - 1]
    for run, following in itertools.pairwise(ends):
        left[run] = carried(sum(there[run + 1 : following + 1]), hardware)
    arrive: dict[int, float] = {}
    waits = sorted({returns for _, returns in ways})
    for at, run in enumerate(waits):
        start = waits[at - ahead] if at >= ahead else 0
        share = sum(back[start:run]) / max(1, ahead)  # the copies of others are on the way too
        arrive[run] = carried(share, hardware)
    return left, arrive


def stays(way: Way, forward: Runs) -> bool:
    """True for what forward uses last and backward first: nothing computes while it is away."""
    return way == (len(forward.starts) - 1, 0)


def carried(seconds: float, hardware: Hardware) -> float:
    """Bytes that one copy to the CPU moves in some time."""
    return max(0.0, seconds - hardware.host.alpha) * hardware.host.beta
