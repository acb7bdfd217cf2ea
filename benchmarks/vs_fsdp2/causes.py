"""Why the two tables differ: causes, and the rules that give each byte to one."""

from __future__ import annotations

import collections
import dataclasses

from benchmarks.vs_fsdp2.things import Row, Rows, Thing


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why the figures differ. `bytes` of a part are FSDP2's minus ours.

    Attributes:
        name: as in the tables.
        what: in one or two sentences.
        evidence: where to see it: a file and a function, and what the rule looks at.
        who: "FSDP2 holds more", "fxshard holds more", "tracker" (a figure that is not memory), or
            "moment" (both are right, of different moments).
    """

    name: str
    what: str
    evidence: str
    who: str


FSDP = "torch/distributed/fsdp/_fully_shard/"
CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            "second copy",
            "FSDP2 gathers a unit into one flat buffer, rank by rank, and copies the parameters "
            "out of it: while both exist the unit is there twice. fxshard gathers each parameter "
            "into its own buffer and has no copy-out.",
            f"`foreach_all_gather` and `foreach_all_gather_copy_out` in {FSDP}_fsdp_collectives.py;"
            " the rule sees the unit's flat buffer and its copied-out parameters alive together.",
            "FSDP2 holds more",
        ),
        Cause(
            "late release",
            "In forward FSDP2 keeps the flat buffer after the copy-out, until the next unit has "
            "copied out of its own or the root's forward is over, so that the allocator does not "
            "reuse it under a copy that still runs.",
            f"`FSDPParamGroup.wait_for_unshard` in {FSDP}_fsdp_param_group.py; the rule sees the "
            "flat buffer alive when the unit's parameters are freed already.",
            "FSDP2 holds more",
        ),
        Cause(
            "root kept",
            "`fully_shard` leaves the root's parameters unsharded from forward to the end of "
            "backward (its default for the root). fxshard frees and gathers them again, as for "
            "any unit: less memory for one more all-gather.",
            f"`FSDPState._lazy_init` in {FSDP}_fsdp_state.py; the rule sees the root's parameters "
            "unsharded on FSDP2's side only.",
            "FSDP2 holds more",
        ),
        Cause(
            "free at last use",
            "FSDP2 frees a unit's parameters in the hook after the module; fxshard after the "
            "last operator that reads them, which is earlier.",
            f"`FSDPParamGroup.post_forward` and `post_backward` in {FSDP}_fsdp_param_group.py; the "
            "rule sees a unit's parameters unsharded on FSDP2's side, and in our ledger that they "
            "have been gathered and freed in this phase.",
            "FSDP2 holds more",
        ),
        Cause(
            "unread in backward",
            "Backward does not read every parameter: no bias of a linear, for example. FSDP2 "
            "gathers the full unit again, fxshard what is read.",
            "`plan.dump()`; the rule sees the unit gathered on both sides, and that the difference "
            "is the size of exactly those parameters for which we have no buffer.",
            "FSDP2 holds more",
        ),
        Cause(
            "early gather",
            "A unit is in flight on one side only. fxshard launches the next unit's all-gather "
            "before the present unit's forward; FSDP2 by default in the next unit's own "
            "pre-forward hook. In backward both launch one unit ahead, and FSDP2 somewhat earlier.",
            f"`FSDPParamGroup.pre_forward`, `_backward_prefetch` in {FSDP}_fsdp_param_group.py and "
            "`plan.dump()`; the rule sees buffers of a unit on one side, and on the other none.",
            "either",
        ),
        Cause(
            "cast shard",
            "With mixed precision, fxshard's low-precision copy of the shards lives until the "
            "wait; FSDP2's until the copy-in, between two states.",
            f"`_get_param_all_gather_inputs` in {FSDP}_fsdp_collectives.py (its buffer is gone "
            "after the copy-in); the rule sees buffers of a shard's size in the dtype that is "
            "gathered.",
            "fxshard holds more",
        ),
        Cause(
            "reduce input kept",
            "FSDP2 keeps what went into a reduce-scatter until the next unit's post-backward, or "
            "the end of backward; fxshard until it waits for the reduction, and what it sends are "
            "the gradients themselves where no cast is needed (no copy-in).",
            f"`FSDPParamGroup.post_backward` (`reduce_scatter_states`) in "
            f"{FSDP}_fsdp_param_group.py; the rule sees a unit's input of the reduction on FSDP2's "
            "side, and neither it nor its gradients on ours.",
            "FSDP2 holds more",
        ),
        Cause(
            "early reduce",
            "fxshard launches the reduction after the operator that makes the last gradient: "
            "its output, and with a cast its input, are there before the state's end.",
            "the rule sees a unit's reduced gradients or the reduction's input on our side, and "
            "FSDP2's still to come.",
            "fxshard holds more",
        ),
        Cause(
            "tracker's loop variable",
            "The tracker itself keeps the unit's last unsharded gradient alive: a variable of its "
            "own hook still names it. Without the tracker it is gone.",
            "`FSDPMemTracker._fsdp_param_group_post_backward` in "
            "torch/distributed/_tools/fsdp2_mem_tracker.py; the rule finds the storage in the "
            "hook's frame and in no parameter's `.grad`.",
            "tracker",
        ),
        Cause(
            "Python frame",
            "A value that neither backward nor a later operator reads, but a local variable of "
            "the model's forward still names. fxshard's program drops it at its last reader.",
            "the rule checks with `saved_tensors_hooks` that autograd has not saved the storage.",
            "FSDP2 holds more",
        ),
        Cause(
            "node not over",
            "Autograd keeps what a node has saved until all of the node's gradients are made (of a "
            "product: until both are); fxshard drops each value after its last reader.",
            "peak states only, where both peaks are at the same operator; the rule checks with "
            "`saved_tensors_hooks` that autograd has saved storages of this size in the unit.",
            "FSDP2 holds more",
        ),
        Cause(
            "later moment",
            "fxshard waits for a unit's reduction one unit later, to overlap it: its After "
            "Post-Backward comes after the next unit's backward. What this reads last is gone, and "
            "what it makes is there.",
            "the rule reads in the program that operators of other units ran between the unit's "
            "last operator and the state.",
            "moment",
        ),
        Cause(
            "earlier moment",
            "An operator of the unit that depends on no parameter (a mask, a rotary table) is "
            "hoisted before everything: the unit's forward begins there, before its "
            "parameters are gathered and what precedes it has run.",
            "the rule reads in the program that the unit's unshard, or operators of other units, "
            "lie between the state and the unit's first operator under its own name.",
            "moment",
        ),
        Cause(
            "late recompute",
            "fxshard recomputes a checkpointed unit when backward reads the first recomputed "
            "value: a gradient that needs a parameter only is made before. FSDP2 recomputes first.",
            "the rule finds the bytes in storages made since the unit began its backward.",
            "moment",
        ),
        Cause(
            "other operator",
            "The two peaks are at different operators, in which other activations, gradients and "
            "buffers are alive: fxshard has freed the parameters before a unit's last "
            "operators, and its backward of a unit reaches to the *later moment*.",
            "peak states only: what depends on the moment, where the rule finds that the two "
            "peaks are not at the same operator of the same unit.",
            "moment",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a difference: `bytes` (FSDP2's minus ours) of a unit, by a cause."""

    cause: str
    unit: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One row of the two tables.

    Attributes:
        unit, state: where.
        theirs, ours: bytes per category; ours is None where fxshard has no such state.
        parts: what the difference is made of.
        unexplained: bytes that no rule took, per (kind, unit).
    """

    unit: str
    state: str
    theirs: dict[str, int]
    ours: dict[str, int]
    parts: tuple[Part, ...]
    unexplained: tuple[tuple[str, str, int], ...] = ()

    @property
    def difference(self) -> int:
        """FSDP2's bytes minus ours."""
        return sum(self.theirs.values()) - sum(self.ours.values())


def explain(unit: str, state: str, theirs: Row, ours: Row, frames: set[int]) -> Comparison:
    """Split one difference over `CAUSES`.

    Args:
        unit, state: which row.
        theirs, ours: the storages of both sides.
        frames: numbers of storages that are known to hang on a Python frame; added to.
    """
    parts: list[Part] = []
    rest: list[tuple[str, str, int]] = []
    elsewhere = ours.elsewhere
    if state.startswith("Peak") and theirs.at != ours.at:
        elsewhere = "other operator"
    for where in sorted({t.unit for t in (*theirs.things, *ours.things)}):
        a, b = _sizes(theirs, where), _sizes(ours, where)
        for cause, size in (
            *_gathered(where, a, b, ours, "Forward" not in state or "AC" in state),
            *_reduced(a, b),
            *_values(theirs, ours, where, state, frames, same_moment=not elsewhere),
        ):
            if cause in (LOOSE if elsewhere == "other operator" else MOMENTARY) and elsewhere:
                parts.append(Part(elsewhere, where, size))
            elif cause in CAUSES:
                parts.append(Part(cause, where, size))
            elif size:
                rest.append((cause, where, size))
        for kind in sorted({*a, *b} - EXPLAINED):
            if a[kind] != b[kind]:
                rest.append((kind, where, a[kind] - b[kind]))
    return Comparison(unit, state, theirs.figures(), ours.figures(), _merged(parts), tuple(rest))


# What has no cause at the same moment, and what another moment may explain as well.
LOOSE = {"parameters", "reduced", "gradients", "values"}
MOMENTARY = LOOSE | {"early gather", "reduce input kept", "early reduce"}
EXPLAINED = {
    *("flat", "kept flat", "flight", "cast shard", "copy"),
    *("gradient", "held", "sent", "reduced", "values"),
}
Found = list[tuple[str, int]]  # (cause or a word for what has none, bytes)
Sizes = collections.Counter[str]  # bytes per kind


def _sizes(row: Row, unit: str) -> Sizes:
    found: Sizes = collections.Counter()
    for thing in row.things:
        if thing.unit == unit:
            found[thing.kind] += thing.bytes
    return found


def _gathered(unit: str, a: Sizes, b: Sizes, ours: Row, backward: bool) -> Found:
    """Of a unit's parameters: held twice or longer by FSDP2, or unsharded on one side only."""
    found = [("cast shard", -b["cast shard"])]
    if a["copy"]:
        found.append(("second copy", a["flat"] + a["kept flat"]))
    else:
        found.append(("late release", a["kept flat"]))
    theirs, mine = a["copy"] or a["flat"], b["copy"] + b["flight"]
    cause = "parameters"
    if theirs and mine:
        if backward and theirs - mine == ours.unread[unit]:
            cause = "unread in backward"
    elif a["copy"] and not unit and (backward or unit in ours.freed):
        cause = "root kept"
    elif a["copy"] and unit and unit in ours.freed:
        cause = "free at last use"
    elif a["flat"] or b["flight"]:
        cause = "early gather"
    return [*found, (cause, theirs - mine)]


def _reduced(a: Sizes, b: Sizes) -> Found:
    """Of a unit's gradients: unsharded, on their way, sharded."""
    difference = a["reduced"] - b["reduced"]
    found = [
        ("tracker's loop variable", a["held"]),
        ("early reduce" if difference < 0 else "reduced", difference),
    ]
    theirs, mine = a["sent"] + a["gradient"], b["sent"] + b["gradient"]
    cause = "gradients"
    if a["sent"] and not mine:
        cause = "reduce input kept"
    elif b["sent"] and not a["sent"] and a["gradient"]:
        cause = "early reduce"
    return [*found, (cause, theirs - mine)]


def _values(
    theirs: Row, ours: Row, unit: str, state: str, frames: set[int], *, same_moment: bool
) -> Found:
    """Of activations and temporaries: matched by size, unsaved ones last."""
    left = collections.Counter(t.bytes for t in ours.things if (t.kind, t.unit) == ("values", unit))
    mine = [t for t in theirs.things if (t.kind, t.unit) == ("values", unit)]
    alone = []
    for thing in sorted(mine, key=lambda t: (not t.saved, t.number in frames)):
        if left[thing.bytes]:
            left[thing.bytes] -= 1
        else:
            alone.append(thing)
    left = +left
    difference = sum(t.bytes for t in alone) - sum(size * n for size, n in left.items())
    if left and not alone and state.endswith("AC"):
        fresh = collections.Counter(t.bytes for t in ours.things if t.fresh)
        return [("late recompute" if left <= fresh else "values", difference)]
    if alone and not left and same_moment and "Backward" not in state:
        frames |= {t.number for t in alone if not t.saved}
        held = sum(t.bytes for t in alone if not t.saved)
        return [("Python frame", held), ("values", difference - held)]
    if alone and not left and same_moment and state.startswith("Peak"):
        saved = collections.Counter(t.bytes for t in mine if t.saved)
        return [("node not over" if _sized(alone) <= saved else "values", difference)]
    known = sum(t.bytes for t in alone if t.number in frames)
    return [("Python frame", known), ("values", difference - known)]


def _sized(things: list[Thing]) -> collections.Counter[int]:
    return collections.Counter(thing.bytes for thing in things)


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    sums: dict[tuple[str, str], int] = {}
    for part in parts:
        sums[part.cause, part.unit] = sums.get((part.cause, part.unit), 0) + part.bytes
    return tuple(Part(cause, unit, size) for (cause, unit), size in sums.items() if size)


def compare(theirs: Rows, ours: Rows) -> list[Comparison]:
    """All rows that FSDP2 has, moments before peaks."""
    frames: set[int] = set()
    order = sorted(theirs, key=lambda key: key[1].startswith("Peak"))
    return [
        explain(unit, state, theirs[unit, state], ours[unit, state], frames)
        for unit, state in order
        if (unit, state) in ours
    ]
