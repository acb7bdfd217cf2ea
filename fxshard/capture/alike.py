"""The runs of forward in one trace must do the same, as a program does in all of its runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fxshard._torch import fake_tensors
from fxshard.capture import held, provenance
from fxshard.capture.repeat import rehearse
from fxshard.errors import CaptureError

Numbers = dict[tuple[int, str, Any], float]  # by module, attribute, and key in that
# Names and identities of what each module holds, in order: its submodules, then its parameters.
Registered = list[tuple[nn.Module, list[tuple[str, int]]]]


class Alike:
    """What each run of forward has computed, and counted in its modules.

    Args:
        model: the module that runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._operators: list[list[Any]] = []  # of each run
        self._numbers: list[Numbers] = []  # before the first run, and after each
        self._registered: Registered = []  # when this run began
        self._moved: list[str] = []  # modules and parameters that a run has put elsewhere

    def begin(self, leaves: Mapping[int, str]) -> Callable[..., None]:
        """Begin a run.

        Args:
            leaves: identity -> name of each parameter, buffer and input in this run.

        Returns:
            what is to be called with each operator of the run (see `provenance.LinesNoted`).
        """
        if not self._numbers:
            self._numbers.append(_numbers_in(self._model))
        self._registered = [(m, _registered_by(m)) for m in self._model.modules()]
        run: list[Any] = []
        self._operators.append(run)

        def note(func: Any, args: Any, kwargs: Any, noted: Any) -> None:
            if func is rehearse.DETACH:  # torch's own bookkeeping, as the trace goes
                return
            constants: list[Any] = []
            tensors: list[Tensor] = []
            rehearse.split((args, kwargs), tensors, constants)
            constants += [leaves.get(id(tensor)) for tensor in tensors]
            if rehearse.is_literal(func, args):
                constants.append(fake_tensors.values_as_text(args[0]))
            run.append((func, tuple(map(_unnumbered, constants)), noted))

        return note

    def end(self) -> None:
        """End a run."""
        self._numbers.append(_numbers_in(self._model))
        for module, before in self._registered:  # now: the next run may put them back
            for was, now in itertools.zip_longest(before, _registered_by(module)):
                if was != now:
                    self._moved.append(f"self.{(was or now)[0]} of {type(module).__name__}")

    def require(self, *, open_sizes: bool) -> None:
        """See that no run has changed what the next one does.

        Args:
            open_sizes: a later run may know more of them: what is a symbol in one is not compared.

        Raises:
            CaptureError: forward counts, registers or moves modules, or its runs are not alike.
        """
        counting = self._counting()
        if counting:
            raise CaptureError(
                f"{type(self._model).__name__} cannot be traced: forward counts in "
                f"{', '.join(counting)}, and a traced program neither counts nor reads it. Make it "
                f"a buffer (register_buffer) that forward adds to, pass it in, or count in a "
                f"forward hook on the compiled model, which runs on every call."
            )
        line = self._differs(open_sizes)
        if line is not None:
            raise self.refusal(line)
        if self._moved:
            raise CaptureError(
                f"{type(self._model).__name__} cannot be traced: forward puts another module or "
                f"parameter in the place of {', '.join(dict.fromkeys(self._moved))}, and a traced "
                f"program does the same in every run. Call the modules in another order without "
                f"moving them, and pass in what decides on the order."
            )

    def refusal(self, line: str = "") -> CaptureError:
        """What to say of runs that differ, first at `line` of user code; "": it is unknown."""
        return CaptureError(
            f"{type(self._model).__name__} cannot be traced: forward does otherwise when it is "
            f"run again{line and ', at ' + provenance.line_text(line)}. What it changes in "
            f"Python decides what it computes, and a traced program does the same in every "
            f"run. Make that a buffer, or pass it in."
        )

    def _counting(self) -> list[str]:
        """``self.steps of Net``: numbers that go on in each run."""
        if len(self._numbers) < 3:
            return []
        first, second, third = self._numbers[-3:]
        counts = [
            at for at, n in third.items() if second.get(at, n) != n and first.get(at) != second[at]
        ]
        modules = list(self._model.modules())
        return [
            f"self.{name}{'' if key is None else f'[{key!r}]'} of {type(modules[i]).__name__}"
            for i, name, key in counts
        ]

    def _differs(self, open_sizes: bool) -> str | None:
        """The line of user code of the first operator that one run has and another has not.

        "" if that is unknown; None if they do the same.
        """
        first = self._operators[0]
        for other in self._operators[1:]:
            for pair in itertools.zip_longest(first, other):
                if not (_alike_but_for_sizes(*pair) if open_sizes else pair[0] == pair[1]):
                    _, _, noted = pair[0] or pair[1]
                    return str(noted[provenance.LINE][0])
        return None


def _numbers_in(model: nn.Module) -> Numbers:
    """The numbers that modules hold: as attributes, or in a dict or a list that is one."""
    found: Numbers = {}
    for i, module in enumerate(model.modules()):
        for name, value in vars(module).items():
            items: Iterable[tuple[Any, Any]] = [(None, value)]
            if isinstance(value, (dict, list)):
                if name.startswith("_") or len(value) > held.LONG:
                    continue
                items = value.items() if isinstance(value, dict) else enumerate(value)
            found |= {(i, name, key): number for key, number in items if held.is_number(number)}
    return found


def _registered_by(module: nn.Module) -> list[tuple[str, int]]:
    """Of submodules those that hold tensors: no name of a tensor depends on others."""
    children = [(n, m) for n, m in module._modules.items() if m is not None and _holds_tensors(m)]
    return [(name, id(value)) for name, value in (*children, *module._parameters.items())]


def _holds_tensors(module: nn.Module) -> bool:
    return any(m._parameters or m._buffers for m in module.modules())


def _alike_but_for_sizes(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    return (
        one[0] == other[0]
        and one[2] == other[2]
        and len(one[1]) == len(other[1])
        and all(a == b or "symbol" in (a, b) for a, b in zip(one[1], other[1], strict=True))
    )


def _unnumbered(constant: Any) -> Any:
    """A symbol without its number: each run of forward makes new ones of data."""
    is_symbol = isinstance(constant, str) and constant.startswith("symbol ")
    return "symbol" if is_symbol else constant
