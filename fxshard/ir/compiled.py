"""Compiled regions as data: the code, and what it does with memory."""

from __future__ import annotations

import dataclasses
import operator

from torch import fx

from fxshard._torch import inductor
from fxshard._torch.export import OpOverload
from fxshard._torch.operators import schema_of
from fxshard.ir import tags


@dataclasses.dataclass(frozen=True)
class RegionStep:
    """A stretch of compiled code: it makes storages, runs kernels, then drops storages.

    Attributes:
        op: what it runs, for people.
        made: ``(number, bytes)`` of each storage.
        dropped: numbers of storages that nothing inside refers to any more.
    """

    op: str
    made: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The code of a region, and what it does with memory.

    Attributes:
        digest: of the region and of all that the code depends on.
        code: what Inductor generated.
        steps: in execution order; storages of inputs have the first numbers, in order of first
            appearance.
        outputs: per result, the number of its storage.
        fresh: True if it was generated here and now, False if it was on disk.
    """

    digest: str
    code: inductor.Generated = dataclasses.field(repr=False)
    steps: tuple[RegionStep, ...]
    outputs: tuple[int, ...]
    fresh: bool


def stays_apart(node: fx.Node) -> bool:
    """True for operators that are left to eager, and for the getitems of their results.

    Inductor may reorder random operators, and eager's order is what a seed means; writes into what
    the caller holds happen where they are written; copies of gradients that are to be sent are
    told from the gradients by their operators. What makes a parameter of a tensor subclass, or what
    is sent of it, rounds as its class does.
    """
    while node.target is operator.getitem:
        node = tags.source(node)
    target = node.target
    if tags.get(node).role in ("pad", "post_reduction", "pre_gather", "post_gather"):
        return True
    if not isinstance(target, OpOverload):
        return False
    return schema_of(target).is_mutable or (tags.is_random(node) and not _without_dropout(node))


def _without_dropout(node: fx.Node) -> bool:
    """True for attention whose dropout is off: it is tagged as random, and draws nothing."""
    schema = schema_of(node.target).arguments
    given = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**defaults, **given}.get("dropout_p") == 0.0
