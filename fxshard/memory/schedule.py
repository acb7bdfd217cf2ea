"""Liveness of a pipeline's stage: one program for all micro-batches, several of them in flight.

Beside what the calls of the program make, a schedule of torch.distributed.pipelining holds: the
inputs of all micro-batches and, of a stage that is not the last, what gradients of outputs are
received in; outputs until their backward is over, of the last stage to the end of the step if they
are returned, as are losses; the gradient of an input until that of the next micro-batch is there;
and what came last of these until the schedule returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import fx

from fxshard.ir import tags
from fxshard.ir.layout import ParamLayout
from fxshard.ir.program import Program, nbytes
from fxshard.memory.category import Category
from fxshard.memory.gradients import unreached
from fxshard.memory.ledger import LiveRange, Moment, owner_of
from fxshard.memory.liveness import Walk
from fxshard.memory.loss import LossStep

REDUCTION = "reduction"  # the phase after the last micro-batch


def order(micro_batches: int, in_flight: int) -> list[tuple[Literal["forward", "backward"], int]]:
    """The passes of a stage in 1F1B order: `in_flight` forwards, then backwards and forwards."""
    ahead = min(in_flight, micro_batches)
    found: list[tuple[Literal["forward", "backward"], int]]
    found = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        found.append(("backward", number))
        if number + ahead < micro_batches:
            found.append(("forward", number + ahead))
    return found


def held_by_schedule(
    held: Sequence[LiveRange], program: Program, micro_batches: int, loss: LossStep | None
) -> list[LiveRange]:
    """`held` of one call, with the inputs of all micro-batches, and gradients that are received."""
    found = list(held)
    batch = [each for each in held if each.category is Category.INPUTS]
    if loss is None:
        for node in program.graph.find_nodes(op="placeholder"):
            if tags.get(node).role == "tangent":
                size = sum(storage.nbytes() for storage in tags.storages(node))
                name = f"gradient of output {tags.get(node).fqn}"
                made = LiveRange(len(found), name, "", "", Category.INPUTS, size)
                found.append(made)
                batch.append(made)
    for number in range(1, micro_batches):
        for each in batch:
            made = each.copied()
            made.storage, made.name = len(found), f"{each.name} (micro-batch {number + 1})"
            found.append(made)
    return found


def walked(
    program: Program,
    held: Sequence[LiveRange],
    micro_batches: int,
    in_flight: int,
    loss: LossStep | None,
    *,
    keep_outputs: bool,
) -> Walk:
    """The walk of one schedule, up to where it returns.

    Args:
        program: of a micro-batch.
        held: from `held_by_schedule`.
        micro_batches: of the schedule.
        in_flight: forwards that run ahead of the first backward.
        loss: of the last stage; None: of another one.
        keep_outputs: the last stage returns its outputs.
    """
    walk = ScheduleWalk(held)
    walk.run_all(program, micro_batches, in_flight, loss, keep_outputs=keep_outputs)
    return walk


@dataclasses.dataclass
class _InFlight:
    """A micro-batch between its forward and its backward; tokens.

    Attributes:
        caller: see `Walk.run`.
        saved: of each saved value.
        outputs: of the outputs.
        made: by the loss, by number in its recording.
    """

    caller: list[int] = dataclasses.field(default_factory=list)
    saved: list[list[int]] = dataclasses.field(default_factory=list)
    outputs: list[int] = dataclasses.field(default_factory=list)
    made: dict[int, int] = dataclasses.field(default_factory=dict)


class ScheduleWalk(Walk):
    """A walk in which micro-batches share unsharded parameters and sums of gradients."""

    def run_all(
        self,
        program: Program,
        micro_batches: int,
        in_flight: int,
        loss: LossStep | None,
        *,
        keep_outputs: bool,
    ) -> None:
        """See `walked`."""
        self._enter_program(program, loss)
        forward, backward = (graph for _, graph in self.schedule.phases())
        calls: dict[int, _InFlight] = {}
        self._sent: list[int] = []  # the gradients of inputs that came last
        self._losses: list[int] = []
        latest: list[int] = []  # outputs of the forward that ran last
        sends: list[int] = []  # those that the warm-up has sent last
        ahead = min(in_flight, micro_batches)
        for phase, number in order(micro_batches, in_flight):
            if phase == "forward":
                made = calls[number] = _InFlight()
                self._forward(forward, number, made.caller, made.saved)
                made.outputs = [token for tokens in self._outputs for token in tokens]
                before, latest = latest, self._held(made.outputs)
                if number == ahead - 2 and loss is None:
                    sends = self._held(made.outputs)
                if loss is not None and keep_outputs:
                    self._past += self._held(made.outputs)
                self._between_phases(before)
                if loss is not None:
                    self._loss("loss", loss, number, self._labels(backward, loss), made.made)
                continue
            call = calls.pop(number)
            self._of_loss = call.made
            self._backward(backward, number, loss, call.caller, call.saved)
            before, self._sent = self._sent, self._received_by_inputs()
            if number == micro_batches - ahead:
                before, sends = before + sends, []
            self._between_phases(before)
        self._release(self._losses[:-1])
        self._reduce(program, unreached(program, loss))
        self._add("schedule returned")
        self._release([*latest, *self._sent, *self._losses[-1:]])
        if loss is not None and keep_outputs:
            sizes = [self._open[token].bytes for token in self._past if token in self._open]
            self._add("outputs merged")
            merged = self._new_range("merged outputs", Category.ACTIVATION, sum(sizes))
            self.now += 1
            self._release([merged])

    def _held(self, tokens: Sequence[int]) -> list[int]:
        self._hold(tokens)
        return list(tokens)

    def _between_phases(self, dropped: Sequence[int]) -> None:
        """Release what the schedule drops after a phase, before the next one begins."""
        self.now: int = 2 * len(self.ledger.moments)
        self._release(dropped)

    def _sums_are_there(self, phase: str) -> None:
        """The first backward makes zeros to add to."""
        if phase == "backward":
            super()._sums_are_there("forward")

    def _arriving(self, tangent: fx.Node) -> list[int]:
        return []  # received, into memory that is held

    def _made_by_loss(
        self, loss: LossStep, micro_batch: int, graph: fx.Graph, caller: list[int]
    ) -> dict[int, int]:
        made = self._of_loss
        self._loss("loss backward", loss, micro_batch, self._labels(graph, loss), made)
        if loss.value in made:
            self._losses.append(made.pop(loss.value))
        return made

    def _taken(self, fqns: Sequence[str]) -> list[list[int]]:
        """All calls take the same parameters."""
        for fqn in fqns:
            self._hold(self._kept[fqn])
        return [self._kept[fqn] for fqn in fqns]

    def _keep(self, fqn: str, tokens: list[int]) -> None:
        """They are kept already."""

    def _received_by_inputs(self) -> list[int]:
        known = self.program.params.keys() | self.program.ignored.keys()
        names = [name for name in self._grads if name not in known]
        return [token for name in names for token in self._grads.pop(name)]

    # -- after the last micro-batch ----------------------------------------------------------------

    def _add(self, name: str) -> None:
        self.now = 2 * self.ledger.add([Moment(name)])

    def _new_range(self, name: str, category: Category, size: int, fqn: str = "") -> int:
        return self._new(LiveRange(0, fqn or name, name, owner_of(fqn), category, size))

    def _reduce(self, program: Program, without: frozenset[str]) -> None:
        """As `fxshard.runtime.stage.reduce_gradients`: a launch per unit and dtype."""
        self.ledger.begin(REDUCTION, -1)
        self._add("reshard")
        self._release([token for tokens in self._kept.values() for token in tokens])
        self._kept.clear()
        named = sorted(self._sums, key=lambda fqn: program.params[fqn].position)
        for unit in program.units:
            mine = [fqn for fqn in named if program.params[fqn].unit == unit.index]
            dtypes = {
                fqn: unit.precision.reduces_in(program.params[fqn].compute_dtype) for fqn in mine
            }
            for dtype in dict.fromkeys(dtypes.values()):
                self._reduce_unit(program, [f for f in mine if dtypes[f] is dtype], dtype)
        for fqn in without & self._grads.keys():
            self._release(self._grads.pop(fqn))

    def _reduce_unit(self, program: Program, fqns: list[str], dtype: torch.dtype) -> None:
        sent: list[int] = []
        for fqn in fqns:
            layout = program.layouts[fqn]
            tokens = self._sums.pop(fqn)
            for _ in range((layout.padding > 0) + (layout.dim > 0)):
                self._add(f"pad {fqn}")
                size = nbytes(layout.padded_shape, dtype)
                made = self._new_range("pad", Category.REDUCE_SCATTER, size, fqn)
                self.now += 1
                self._release(tokens)
                tokens = [made]
            sent += tokens
        name = f"reduce {program.units[program.params[fqns[0]].unit].name}"
        self._add(name)
        if program.world_size > 1:
            made_of = {fqn: self._shard(name, program.layouts[fqn], dtype, fqn) for fqn in fqns}
            self.now += 1
            self._release(sent)
        else:
            self._relabel(sent, Category.SHARDED_GRAD)
            made_of = dict(zip(fqns, sent, strict=True))
        unit = program.units[program.params[fqns[0]].unit]
        casts = [f for f in fqns if program.params[f].dtype is not dtype]
        if casts and not unit.precision.keep_low_precision_grads:
            self._add(f"cast {unit.name}")
            before = [made_of[fqn] for fqn in casts]
            for fqn in casts:
                own = program.params[fqn].dtype
                made_of[fqn] = self._shard("cast", program.layouts[fqn], own, fqn)
            self.now += 1
            self._release(before)
        self._grads |= {fqn: [token] for fqn, token in made_of.items()}

    def _shard(self, name: str, layout: ParamLayout, dtype: torch.dtype, fqn: str) -> int:
        size = nbytes(layout.shard_shape, dtype)
        return self._new_range(name, Category.SHARDED_GRAD, size, fqn)
