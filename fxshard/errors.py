"""Every error fxshard raises on purpose. Each says what is wrong, where, and what to do."""

from __future__ import annotations


class FxshardError(Exception):
    """Base of all errors below; catch it to catch fxshard's own refusals and nothing else."""


class ConfigError(FxshardError, ValueError):
    """An option that does not exist, a value that is not legal, or options that contradict."""


class TooLittleError(ConfigError):
    """A budget of saved activations that no checkpointing meets.

    Attributes:
        least_bytes: the least that would do.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        super().__init__(message)


class DoesNotFitError(FxshardError):
    """The peak is above the budget; the text says by how much, where, and what is alive."""


class UnitError(FxshardError, ValueError):
    """A unit pattern that matches nothing, or a parameter that cannot be sharded."""


class CaptureError(FxshardError, RuntimeError):
    """The model cannot be traced. Carries the user's source line in its text."""


class UnknownSizeError(FxshardError, ValueError):
    """Bytes or times are asked for, and a size depends on the data."""


class OutOfRangeError(FxshardError, ValueError):
    """A formula is asked for sizes that it does not hold for."""


class VerifyError(FxshardError, AssertionError):
    """A program breaks one of the Facts (see `fxshard.ir.program.Fact`).

    Attributes:
        fact: name of the broken Fact.
        node: name of the node at fault, or None.
        pass_name: the pass after which the check ran, or None.
        advice: what may be wrong with the order of the passes, or "".
    """

    def __init__(
        self, fact: str, message: str, *, node: str | None = None, excerpt: str = ""
    ) -> None:
        self.fact = fact
        self.node = node
        self.pass_name: str | None = None
        self.advice = ""
        self.message = message
        self.excerpt = excerpt
        super().__init__(message)

    def __str__(self) -> str:
        after = f" after pass '{self.pass_name}'" if self.pass_name else ""
        text = f"fact '{self.fact}' does not hold{after}: {self.message}"
        if self.excerpt:
            text += f"\n{self.excerpt}"
        if self.advice:
            text += f"\n{self.advice}"
        if self.pass_name:
            text += "\nreproduce with FXSHARD_DEBUG=4 (dumps the program around every pass)"
        return text


class TextError(FxshardError, ValueError):
    """A program that has no text, or a text that is no program (see `fxshard.ir.text`).

    Attributes:
        line: the line of the text at fault, from 1 on; None if it is the program.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(message if line is None else f"line {line}: {message}")


class PassError(FxshardError, RuntimeError):
    """A pass raised something; names the pass, and carries what it raised as its cause.

    Attributes:
        pass_name: the pass.
    """

    def __init__(self, message: str, pass_name: str) -> None:
        self.pass_name = pass_name
        super().__init__(message)


class RankMismatchError(FxshardError, RuntimeError):
    """Ranks do not agree on the model, the batch structure or the collective sequence."""


class RankDiedError(FxshardError, RuntimeError):
    """A collective failed because other ranks are gone; names them."""


class StepError(FxshardError, RuntimeError):
    """The compiled module was used in an order that has no meaning (backward twice, ...)."""


class CheckpointError(FxshardError, OSError):
    """A checkpoint is not there, or cannot be written; the one before is as it was."""
