"""What a rank needs of the others in one call, and the order that ranks agree on where they differ.

Ranks whose batches take different ways through the model (`Config.ranks_may_differ`) gather and
reduce different parameters. `merged` makes one order of all that any of them needs. Each rank can
follow it: it may gather a parameter earlier than it reads it, and reduce a gradient later than it
has it. So the only order that counts is that of a gradient after the parameters that some rank
reads before it has it; all else is chosen, and it is the order of the ranks where they agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Needs:
    """The collectives that a call is for, by parameter, of one rank or of all.

    Attributes:
        forward: FQNs of the parameters that are gathered in forward, in the order of first use.
        ends: of each of them, how many of `forward` are first read before it is read last.
        backward: ``(kind, FQN)`` in order: "read" is the first use of a parameter in backward,
            "grad" a gradient that is made, or was accumulated, and is to be reduced.
        certain: gradients that every loss reaches.
        sums: those to which sums of earlier calls are added, in the dtype of the reduction.
        kept: parameters that stay unsharded from forward to backward.
        mode: what must be equal on all ranks, as text.
        partial: gradients are reduced over the replicas in a later call, or those of an earlier one
            are in this one.
        own: the collectives that the model calls itself, as text; must be equal too.
    """

    forward: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    backward: tuple[tuple[str, str], ...] = ()
    certain: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    mode: str = ""
    partial: bool = False
    own: tuple[str, ...] = ()

    @property
    def grads(self) -> tuple[str, ...]:
        """FQNs of the gradients that are reduced, in order."""
        return tuple(fqn for kind, fqn in self.backward if kind == "grad")

    def reads(self, phase: str) -> tuple[str, ...]:
        """FQNs of the parameters that are gathered in a phase, in order."""
        if phase == "forward":
            return self.forward
        return tuple(fqn for kind, fqn in self.backward if kind == "read")

    @property
    def uses(self) -> dict[str, tuple[int, int]]:
        """Per parameter that forward reads: numbers for the places of its first and last use."""
        both = zip(self.forward, self.ends, strict=True)
        return {fqn: (2 * i, 2 * end - 1) for i, (fqn, end) in enumerate(both)}

    @property
    def digest(self) -> str:
        """Equal for equal needs."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        """For `of_text`; equal for equal needs."""
        fields = dataclasses.asdict(self)
        return json.dumps(
            {n: sorted(v) if isinstance(v, frozenset) else v for n, v in fields.items()}
        )

    @classmethod
    def of_text(cls, text: str) -> Needs:
        """From `text`.

        Raises:
            ValueError, KeyError, TypeError: `text` is of something else.
        """
        found: dict[str, Any] = json.loads(text)
        return cls(
            forward=tuple(found["forward"]),
            ends=tuple(found["ends"]),
            backward=tuple((str(kind), str(fqn)) for kind, fqn in found["backward"]),
            certain=frozenset(found["certain"]),
            sums=frozenset(found["sums"]),
            kept=frozenset(found["kept"]),
            mode=found["mode"],
            partial=bool(found["partial"]),
            own=tuple(found["own"]),
        )


def merged(needs: Iterable[Needs], places: Mapping[str, int]) -> Needs:
    """What any rank needs, in one order.

    Args:
        needs: of all ranks, of equal `mode` and `own`; their order does not count.
        places: of each parameter in the model, which decides where ranks say nothing.
    """
    every = sorted(set(needs), key=lambda each: each.text())
    forward = in_one_order([each.forward for each in every], places)
    back = {fqn: -place for fqn, place in places.items()}
    kept = frozenset(forward) & frozenset().union(*(each.kept for each in every))
    reads = in_one_order([_without(each.reads("backward"), kept) for each in every], back)
    grads = in_one_order([each.grads for each in every], back)
    return dataclasses.replace(
        every[0],
        forward=tuple(forward),
        ends=tuple(_ends(every, forward)),
        backward=tuple(_interleaved(every, reads, grads)),
        certain=frozenset().union(*(each.certain for each in every)),
        sums=frozenset().union(*(each.sums for each in every)),
        kept=frozenset().union(*(each.kept for each in every)),
    )


def _without(fqns: Sequence[str], left_out: frozenset[str]) -> list[str]:
    return [fqn for fqn in fqns if fqn not in left_out]


def in_one_order(orders: Sequence[Sequence[str]], places: Mapping[str, int]) -> list[str]:
    """Everything in `orders`, each once: as they say, and where they contradict each other or say
    nothing, by `places`.
    """
    before: dict[str, set[str]] = {}
    for order in orders:
        for i, name in enumerate(order):
            before.setdefault(name, set()).update(order[i - 1 : i])
    found: list[str] = []
    left = sorted(before, key=lambda name: (places.get(name, 0), name))
    while left:
        done = set(found)
        name = next((each for each in left if before[each] <= done), left[0])
        left.remove(name)
        found.append(name)
    return found


def _ends(every: Sequence[Needs], forward: Sequence[str]) -> list[int]:
    """Of each parameter of `forward`, the latest last use on any rank."""
    place = {fqn: i for i, fqn in enumerate(forward)}
    latest: dict[str, int] = {}
    for each in every:
        begun = [
            max((place[f] for f in each.forward[: i + 1]), default=0)
            for i in range(len(each.forward))
        ]
        for fqn, end in zip(each.forward, each.ends, strict=True):
            latest[fqn] = max(latest.get(fqn, 0), begun[end - 1] + 1)
    return [latest[fqn] for fqn in forward]


def _interleaved(
    every: Sequence[Needs], reads: Sequence[str], grads: Sequence[str]
) -> list[tuple[str, str]]:
    """Each gradient after what any rank reads before it, and as early as that allows."""
    place = {fqn: i for i, fqn in enumerate(reads)}
    after: dict[str, int] = {}  # gradient -> how many of `reads` come before it
    for each in every:
        begun = 0
        for kind, fqn in each.backward:
            if kind == "read":
                begun = max(begun, place.get(fqn, -1) + 1)
            else:
                after[fqn] = max(after.get(fqn, 0), begun)
    found: list[tuple[str, str]] = []
    taken = 0
    for fqn in grads:
        found += [("read", read) for read in reads[taken : after[fqn]]]
        taken = max(taken, after[fqn])
        found.append(("grad", fqn))
    return found + [("read", read) for read in reads[taken:]]
