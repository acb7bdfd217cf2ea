"""Truncate and stamp: capture a deep model at the cost of a shallow one.

Blocks that repeat are left out of their lists, the rest is captured, and the nodes of the missing
blocks are written as images of their neighbours'. Nothing is taken on faith: forward of the whole
model, all blocks of it, is rehearsed on fake tensors first, and must be, operator by operator, what
follows from a rehearsal of the shortened one. What is not so is captured flat, and one line of the
log says why. docs/adr/0019-truncate-and-stamp.md has what that proves, and what it cannot see.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from torch import fx, nn

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture.repeat import find, write
from fxshard.capture.repeat.find import shortened
from fxshard.capture.repeat.ghosts import Table, ghost_like
from fxshard.capture.repeat.places import Formless, Item, Run, Runs, Stamp, Unproven, Wider, said
from fxshard.capture.repeat.rehearse import (
    Alike,
    NoTensorHooks,
    Recorder,
    Rehearsal,
    gathers_gradients,
    leaves_of,
)
from fxshard.capture.repeat.write import Noted, Traced
from fxshard.ir.calls import Call

__all__ = [
    "RIGHT",
    "Alike",
    "Formless",
    "NoTensorHooks",
    "Recorder",
    "Rehearsal",
    "Repeats",
    "Runs",
    "Table",
    "Traced",
    "Unproven",
    "Wider",
    "candidates",
    "ghost_like",
    "leaves_of",
    "note",
    "proven",
    "shortened",
    "written",
]

RIGHT, candidates = find.RIGHT, find.lists


@dataclasses.dataclass(frozen=True)
class Repeats:
    """What is left out of a model, proven for its forward.

    Attributes:
        runs: the blocks.
        full: the rehearsal of the whole model.
        calls: its calls, as items.
        names: FQN of each parameter and of each buffer, in order.
    """

    runs: Runs
    full: Rehearsal
    calls: list[Item]
    names: tuple[list[str], list[str]]


def proven(
    model: nn.Module,
    full: Rehearsal,
    rehearse: Callable[[Runs], Rehearsal],
    right: int,
) -> Repeats:
    """The blocks of `model` that forward shows to be images of others.

    Args:
        full: forward of the whole model.
        rehearse: forward of the model without some blocks.
        right: periods that stay behind those left out.

    Raises:
        Wider: gradients of blocks are summed up; try the next of `RIGHT`.
        Unproven: there are none, or the shortened model does not say what the whole one does.
    """
    runs, why = _runs(model, full, right)
    if not runs:
        raise Unproven(why)
    short = rehearse(runs)
    if short.facts != full.facts:
        raise Unproven("what the model returns depends on the number of its blocks")
    stamp = Stamp(runs, short.sequences(runs, lambda run, block: runs[run].short(block)))
    if right == RIGHT[0] and any(gathers_gradients(item, i) for item, i in stamp.shared):
        raise Wider("sums of gradients reach over several blocks")
    sequences = full.sequences(runs, lambda _, block: block)
    for kind, items in sequences.items():
        _check(stamp, kind, items)
    params = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers()]
    return Repeats(runs, full, sequences["call"], (params, buffers))


def _runs(model: nn.Module, full: Rehearsal, right: int) -> tuple[Runs, str]:
    """The runs of blocks that repeat, and why another one does not."""
    found: list[Run] = []
    why = "no list of blocks"
    for run in find.lists(model)[0]:
        alone = [Run((path,), run.names) for path in run.paths] if len(run.paths) > 1 else []
        each = [find.repeats(model, one, full, right) for one in (run, *alone)]
        good = [one for one in each if isinstance(one, Run)]
        if isinstance(each[0], Run):
            good = good[:1]
        found += good
        if not good:
            why = f"{run.paths[0] or 'the model'}: {each[0]}"
    return tuple(found), why


def _check(stamp: Stamp, kind: str, items: list[Item]) -> None:
    """Compare what the whole model did with what follows from the shortened one."""
    pairs = itertools.zip_longest(stamp.written(kind), items)
    for image, item in pairs:
        if image is None or item is None:
            raise Unproven("the whole model runs another number of operators than its blocks say")
        short, shift = image
        same = stamp.place(short, shift) == item.place and short.key == item.key
        if not same or tuple(stamp.refs(short, shift)) != item.refs:
            raise Unproven(f"{said(item.key)} is not what the other blocks say")


def note(
    graph: fx.Graph, made: dict[fx.Graph, list[fx.Node]], calls: list[Call], repeats: Repeats
) -> Noted:
    """Where the nodes of the shortened model's graph were traced: right behind the trace.

    Args:
        graph: as it was traced.
        made: what `compat.nodes_made` found in it.
        calls: of the shortened model.
        repeats: what was left out.

    Raises:
        Unproven: its blocks cannot be told apart.
    """
    return write.note(graph, made.get(graph) or list(graph.nodes), calls, repeats.runs)


def written(
    traced: Traced, noted: Noted, repeats: Repeats, mode: FakeTensorMode, training: bool
) -> Traced:
    """The graph of the whole model from that of the shortened one.

    Args:
        traced: values are fake ones of `mode` without symbols.
        noted: what `note` gave.
        repeats: what was left out.
        mode: owner of the fake values.
        training: the graph has a backward.

    Raises:
        Unproven: its blocks are not images of each other, in backward say.
    """
    writer = write.Writer(
        *(traced, noted, repeats.runs, repeats.names),
        *(repeats.full.calls, repeats.calls, mode, training),
    )
    return writer.write()
