"""Which blocks of a model may be left out: those that a rehearsal shows to do what others do."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

from torch import nn

from fxshard._torch import modules as torch_modules
from fxshard.capture.repeat.places import BlockRun, SequenceItem, Unproven, relations
from fxshard.capture.repeat.rehearse import Rehearsal

DEEP = 7  # blocks of a list below which a capture is not worth a rehearsal
LONGEST = 8  # period that is looked for
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
WORTH = 2  # blocks that must be left out
LEFT = 1  # periods that stay in front of those left out, and
RIGHT = (2, 4)  # after them: more where sums of gradients reach over blocks


def lists(model: nn.Module) -> tuple[list[BlockRun], str | None]:
    """The lists of blocks of `model` that are deep enough; siblings with like names are one run.

    Lists inside of the blocks of another one stay with their block. A text says why a list that is
    deep enough is none of them.
    """
    names = collections.Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    found: list[tuple[str, tuple[str, ...]]] = []
    why = None
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, CONTAINERS) or len(module) < DEEP:
            continue
        if all(names[id(m)] == 1 for m in (module, *module.children())):
            found.append((path, tuple(module._modules)))
        else:
            why = f"{path or 'the model'} or a block of it is held in two places"
    outer = [
        (path, of) for path, of in found if not any(_inside(path, other) for other, _ in found)
    ]
    siblings: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path, of in outer:
        siblings.setdefault((path.rpartition(".")[0], of), []).append(path)
    return [BlockRun(tuple(paths), of) for (_, of), paths in siblings.items()], why


def _inside(path: str, other: str) -> bool:
    return path != other and path.startswith(f"{other}." if other else "")


def repeats(model: nn.Module, run: BlockRun, full: Rehearsal, right: int) -> BlockRun | str:
    """`run` with the blocks that can be left out, or why none can.

    Args:
        right: periods that stay after those that are left out.
    """
    try:
        sequences = full.sequences((run,))
    except Unproven as reason:
        return str(reason)
    blocks: dict[str, list[list[SequenceItem]]] = {}
    for kind, items in sequences.items():
        stretches: list[list[SequenceItem]] = [[] for _ in range(run.length)]
        for item in items:
            if item.place.run == 0:
                stretches[item.place.block].append(item)
        blocks[kind] = stretches
    if not all(blocks["line"]):
        return "blocks do not run, or not all of them"
    prints = _fingerprints(model, run, full)
    keys = [[hash(tuple(i.key for i in stretch)) for stretch in blocks[k]] for k in sorted(blocks)]
    best = run
    middle = run.length // 2
    differ = [relations(b[middle], b[middle + 1], 0, 1) for b in blocks.values()]
    texts = [text for text in differ if isinstance(text, str)]
    why = texts[0] if texts else "too few of its blocks repeat"
    if prints[middle] != prints[middle + 1]:
        why = "parameters or hooks of one block are not those of the next"
    for period in range(1, min(LONGEST, run.length // 4) + 1):
        same: list[bool] = []
        for i in range(run.length - period):
            j = i + period
            alike = prints[i] == prints[j] and all(of[i] == of[j] for of in keys)
            if alike:
                differ = [relations(b[i], b[j], 0, period) for b in blocks.values()]
                texts = [text for text in differ if isinstance(text, str)]
                alike = not texts
                why = texts[0] if texts else why
            same.append(alike)
        start, end = _longest(same)
        removed = (end - start) // period * period - (LEFT + right - 1) * period
        if removed > best.removed:
            kept = start + LEFT * period
            best = dataclasses.replace(run, period=period, kept=kept, removed=removed)
            if run.length - removed <= LEFT + right + 2:
                break
    return best if best.removed >= WORTH else why


def _longest(same: list[bool]) -> tuple[int, int]:
    """Start and end of the longest stretch of True."""
    best, start = (0, 0), 0
    for i, alike in enumerate([*same, False]):
        if not alike:
            best = max(best, (start, i), key=lambda at: at[1] - at[0])
            start = i + 1
    return best


def _fingerprints(model: nn.Module, run: BlockRun, full: Rehearsal) -> list[list[object]]:
    """Per block, what its operators do not show: all its parameters, and hooks of its backward."""
    found: list[list[object]] = [[] for _ in range(run.length)]
    for name, (_, form) in full.leaves.items():
        place = run.split(name)
        if place is not None:
            found[place[0]].append((place[1], form))
    for path in run.paths:
        for block, module in enumerate(model.get_submodule(path).children()):
            inner = (hook for each in module.modules() for hook in torch_modules.module_hooks(each))
            if any("backward" in kind for kind, _, _ in inner):
                found[block].append(object())  # like no other
    return found


@contextlib.contextmanager
def shortened(model: nn.Module, runs: tuple[BlockRun, ...]) -> Iterator[None]:
    """Leave the blocks out of their lists while the context is open."""
    before = [
        (owner, list(owner._modules.items()))
        for run in runs
        for owner in (model.get_submodule(path) for path in run.paths)
    ]
    try:
        for run in runs:
            for path in run.paths:
                owner = model.get_submodule(path)
                blocks = list(owner._modules.values())
                left = blocks[: run.kept] + blocks[run.kept + run.removed :]
                owner._modules.clear()
                owner._modules.update(dict(zip(run.names, left, strict=False)))
        yield
    finally:
        for owner, modules in before:
            owner._modules.clear()
            owner._modules.update(modules)
