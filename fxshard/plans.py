"""Plan: what one training step of a model will do on one rank, known before it runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from fxshard import dump
from fxshard.config import Config
from fxshard.executor import emit
from fxshard.memory import liveness
from fxshard.memory.optimizer import trace_step
from fxshard.memory.report import MemoryReport
from fxshard.program import Program
from fxshard.units import Unit


class Plan:
    """What one training step of a model will do on one rank, known before it runs.

    Attributes:
        programs: the rewritten programs, one per micro-batch of a step.
        config: the options they were made with.
    """

    def __init__(
        self, programs: Sequence[Program], config: Config, model: nn.Module, inputs: Any
    ) -> None:
        """Args: `model` and `inputs`, the ``(args, kwargs)`` traced: for the bytes they hold."""
        self.programs, self.config = tuple(programs), config
        self._held = liveness.held_ranges(model, inputs, self.program)

    @property
    def program(self) -> Program:
        """The program of the last micro-batch: the one that reduces all gradients."""
        return self.programs[-1]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units; index 0 is the root."""
        return self.program.units

    @functools.cached_property
    def memory(self) -> MemoryReport:
        """Bytes at every point of the step, per category and module (computed once, on demand)."""
        step = trace_step(self.program, self.config.optimizer)
        return MemoryReport(liveness.analyse(self.programs, self._held, step))

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
