"""Plan: what one training step of a model will do on one rank, known before it runs."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fxshard import dump
from fxshard.config import Config
from fxshard.executor import emit
from fxshard.memory import liveness
from fxshard.memory.optimizer import OptimizerStep, trace_step
from fxshard.memory.report import MemoryReport
from fxshard.program import Program
from fxshard.units import Unit


class Plan:
    """What one training step of a model will do on one rank, known before it runs.

    Attributes:
        program: the rewritten program.
        config: the options it was made with.
    """

    def __init__(self, program: Program, config: Config, model: nn.Module, inputs: Any) -> None:
        """Args: `model` and `inputs`, the ``(args, kwargs)`` traced: for the bytes they hold."""
        self.program, self.config = program, config
        self._held = liveness.held_bytes(model, inputs, program)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units; index 0 is the root."""
        return self.program.units

    @functools.cached_property
    def memory(self) -> MemoryReport:
        """Bytes at every point of the step, per category and module (computed once, on demand)."""
        step = trace_step(self.program, self.config.optimizer)
        return MemoryReport(liveness.analyse(self.program, self._held, step))

    def micro_batch(
        self, step: OptimizerStep | None, *, holds_gradients: bool, last: bool
    ) -> MemoryReport:
        """The report of one of several micro-batches of a step.

        Args:
            step: of the optimizer, as the last micro-batch's program leaves gradients for it.
            holds_gradients: there are gradients of the ones before, in ``.grad`` or accumulated.
            last: the optimizer follows.
        """
        held, holds = self._held, holds_gradients
        return MemoryReport(
            liveness.analyse(self.program, held, step, holds_gradients=holds, last=last)
        )

    @property
    def code(self) -> str:
        """The Python source that the executor runs."""
        return emit(self.program)

    @property
    def certificate(self) -> str:
        """SHA-256 of the collective sequence; equal on all ranks."""
        return dump.certificate(self.program)

    def dump(self, phase: str | None = None, fold: bool = True) -> str:
        """The outer schedule as text.

        Args:
            phase: "forward" or "backward"; None for both.
            fold: identical layers as one block, "x N".
        """
        return dump.schedule(self.program, folded=fold, phase=phase)
