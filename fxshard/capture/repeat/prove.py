"""Which blocks of a model may be left out: proven by rehearsals of it, full and shortened."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from torch import nn

from fxshard.capture.repeat import find
from fxshard.capture.repeat.places import (
    BlockRun,
    Runs,
    SequenceItem,
    Stamp,
    Unproven,
    Wider,
    described,
)
from fxshard.capture.repeat.rehearse import Rehearsal, gathers_gradients


@dataclasses.dataclass(frozen=True)
class Repeats:
    """What is left out of a model, proven for its forward.

    Attributes:
        runs: the blocks.
        full: the rehearsal of the full model.
        calls: its calls, as items.
        names: FQN of each parameter and of each buffer, in order.
    """

    runs: Runs
    full: Rehearsal
    calls: list[SequenceItem]
    names: tuple[list[str], list[str]]


def proven(
    model: nn.Module,
    full: Rehearsal,
    rehearse: Callable[[Runs], Rehearsal],
    right: int,
) -> Repeats:
    """The blocks of `model` that forward shows to be images of others.

    Args:
        full: forward of the full model.
        rehearse: forward of the model without some blocks.
        right: periods that stay after those left out.

    Raises:
        Wider: gradients of blocks are summed up; try the next of `find.RIGHT`.
        Unproven: there are none, or the shortened model does not say what the full one does.
    """
    runs, why = _runs(model, full, right)
    if not runs:
        raise Unproven(why)
    short = rehearse(runs)
    if short.facts != full.facts:
        raise Unproven("what the model returns depends on the number of its blocks")
    stamp = Stamp(runs, short.sequences(runs))
    if right == find.RIGHT[0] and any(gathers_gradients(item, i) for item, i in stamp.shared):
        raise Wider("sums of gradients reach over several blocks")
    sequences = full.sequences(tuple(run.full for run in runs))
    for kind, items in sequences.items():
        _check(stamp, kind, items)
    params = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers()]
    return Repeats(runs, full, sequences["call"], (params, buffers))


def _runs(model: nn.Module, full: Rehearsal, right: int) -> tuple[Runs, str]:
    """The runs of blocks that repeat, and why another one does not."""
    found: list[BlockRun] = []
    why = "no list of blocks"
    for run in find.lists(model)[0]:
        alone = [BlockRun((path,), run.names) for path in run.paths] if len(run.paths) > 1 else []
        each = [find.repeats(model, one, full, right) for one in (run, *alone)]
        good = [one for one in each if isinstance(one, BlockRun)]
        if isinstance(each[0], BlockRun):
            good = good[:1]
        found += good
        if not good:
            why = f"{run.paths[0] or 'the model'}: {each[0]}"
    return tuple(found), why


def _check(stamp: Stamp, kind: str, items: list[SequenceItem]) -> None:
    """Compare what the full model did with what follows from the shortened one."""
    pairs = itertools.zip_longest(stamp.written(kind), items)
    for image, item in pairs:
        if image is None or item is None:
            raise Unproven("the full model runs another number of operators than its blocks say")
        short, shift = image
        same = stamp.place(short, shift) == item.place and short.key == item.key
        if not same or tuple(stamp.refs(short, shift)) != item.refs:
            raise Unproven(f"{described(item.key)} is not what the other blocks say")
