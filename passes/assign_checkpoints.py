"""assign-checkpoints: mark the calls of modules whose activations the user wants recomputed.

Note: sizes from data
=====================
Experts on other ranks get as many rows as the data say. A checkpoint around them saves, whatever
its policy says, these numbers, and the choice that they come from: the integers that ``topk`` makes
of scores, which are few. All else that is not saved is recomputed, the collectives too: as every
rank runs the same program, in the same order on all. If they were recomputed, of scores that
another kernel rounds otherwise, rows would not fit the numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from fxshard._torch.traced_collectives import WAIT
from fxshard.config.checkpoints import CHECKPOINTS
from fxshard.cost.activations import Seconds, choose
from fxshard.cost.leaving import LEAST_BYTES
from fxshard.cost.operators import node_seconds
from fxshard.hardware import Hardware, hardware_of
from fxshard.ir import tags
from fxshard.ir.program import Fact, Program

aten: Any = torch.ops.aten

NUMBER = aten._local_scalar_dense.default  # item(), and what tolist() calls
CONVERSIONS = (aten._to_copy.default,)
SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@dataclasses.dataclass(frozen=True)
class AssignCheckpoints:
    """Each call of a module that ``checkpoint`` names is one checkpoint; the model's own stay.

    With a number of bytes in place of policies, `fxshard.cost.activations` chooses what they save,
    and what of all that is saved is offloaded.

    Attributes:
        seconds: of one operator; None: on `hardware`.
        offload: whether anything may be offloaded; None: on an accelerator.
        hardware: whose times decide, and whose link to the CPU carries what is offloaded.
        least_bytes: of a tensor that is offloaded.

    Before::

        %h = aten.addmm(%b, %x, %w)            # forward, in blocks.0
        %y = aten.tanh(%h)
        %dh = aten.tanh_backward(%dy, %y)      # backward of blocks.0

    After::

        %h = aten.addmm(%b, %x, %w)            | checkpoint=0  save   # save: if "selective"
        %y = aten.tanh(%h)                     | checkpoint=0
        %dh = aten.tanh_backward(%dy, %y)      | checkpoint=0
    """

    seconds: Seconds | None = None
    offload: bool | None = None
    hardware: str | Hardware = "h100"
    least_bytes: int = LEAST_BYTES

    name: ClassVar[str] = "assign-checkpoints"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_ASSIGNED})
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        if program.checkpoints:
            assign(program)
        save_what_must_be(program)
        budget = next((p for p in program.checkpoints.values() if isinstance(p, int)), None)
        if budget is not None and program.signature.training:
            may_leave = program.device.type != "cpu" if self.offload is None else self.offload
            hardware = hardware_of(self.hardware)
            seconds = self.seconds or functools.partial(node_seconds, hardware=hardware)
            link = hardware if may_leave else None
            found = choose(program, budget, seconds, link, self.least_bytes)
            for node in found.saved:
                tags.update(node, save=True)
            save_waits(program)
            for node in found.offloaded:
                tags.update(node, offload=True)


def assign(program: Program) -> None:
    """Number the checkpoints, and mark what their policies save."""
    numbers: dict[Any, int] = {}  # in the order in which forward runs them
    for node in (*program.phase("forward"), *program.phase("backward")):
        tag = tags.get(node)
        call = checkpointed_call(program, tag.call)
        own = tag.checkpoint is not None
        key = ("own", tag.checkpoint) if own else ("call", call)
        if not own and call is None:
            continue
        number = numbers.setdefault(key, len(numbers))
        save = tag.save
        if not own and call is not None and tag.phase == "forward":
            save = is_saved(node, program.checkpoints[program.calls[call].module])
        save = save and node.target is not operator.getitem  # its operator is saved
        tags.update(node, checkpoint=number, save=save)


def save_what_must_be(program: Program) -> None:
    """Mark what checkpoints save whatever their policies say: see the note on sizes from data."""
    forward = [n for n in program.phase("forward") if tags.get(n).checkpoint is not None]
    numbers = [node for node in forward if node.target is NUMBER]
    for node in (*numbers, *choices(numbers)):
        tags.update(node, save=True)
    save_waits(program)


def save_waits(program: Program) -> None:
    """Mark the waits for collectives whose results are saved: these are there after a wait."""
    for node in program.phase("forward"):
        if node.target is WAIT and tags.get(tags.source(node)).save:
            tags.update(node, save=True)


def choices(numbers: list[fx.Node]) -> set[fx.Node]:
    """The integers and masks that numbers are computed from, where they come from other values."""
    found: set[fx.Node] = set()
    seen, todo = set(numbers), list(numbers)
    while todo:
        node = todo.pop()
        if is_choice(node):
            found.add(node)
            continue
        sources = [n for n in node.all_input_nodes if n.op == "call_function" and n not in seen]
        seen.update(sources)
        todo += sources
    return {node for node in found if tags.get(node).checkpoint is not None}


def is_choice(node: fx.Node) -> bool:
    """True if `node` is integers or a mask, and is no copy of the floating-point numbers it reads.

    Of an operator with several results, such as a sort, it is the item.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return False
    made = tags.source(node) if node.target is operator.getitem else node
    read = [n.meta.get("val") for n in made.all_input_nodes]
    floats = any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in read)
    return floats and made.target not in CONVERSIONS


def checkpointed_call(program: Program, call: int | None) -> int | None:
    """The outermost call around `call`, or itself, whose module is checkpointed."""
    found = None
    while call is not None:
        if program.calls[call].module in program.checkpoints:
            found = call
        call = program.calls[call].parent
    return found


def is_saved(node: fx.Node, policy: str | int | Callable[..., CheckpointPolicy]) -> bool:
    """True if a policy keeps what `node` makes for backward."""
    if isinstance(policy, int):
        return False
    if isinstance(policy, str):
        return node.target in CHECKPOINTS[policy].saves

    def val(value: fx.Node) -> Any:
        return value.meta["val"]

    context = SelectiveCheckpointContext(is_recompute=False)
    args, kwargs = fx.node.map_arg(node.args, val), fx.node.map_arg(node.kwargs, val)
    return policy(context, node.target, *args, **kwargs) in SAVES
