"""Numbers of tensors that have no values: they can be printed, and nothing can depend on them."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor

from fxshard._torch.fake_tensors import UnsupportedOperatorException
from fxshard._torch.fully_sharded import local_of, replaced
from fxshard._torch.remembered_device import TorchFunctionMode
from fxshard.capture.provenance import user_line
from fxshard.errors import CaptureError

UNKNOWN = "the value of a tensor is not known in a dry run, which computes nothing"
REMEDY = (
    "Leave out what depends on it while fxshard.dry_run() is active (fxshard.is_dry_run() says so)"
)


class Unknown(float):
    """What ``loss.item()`` gives: prints as "unknown", and cannot be compared."""

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "unknown"

    def _same(self, *_: Any) -> Any:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __round__ = _same

    def _refuse(self, *_: Any) -> NoReturn:
        raise CaptureError(f"{user_line()}: {UNKNOWN}. {REMEDY}.")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __int__ = _refuse
    __hash__ = float.__hash__


class Values(TorchFunctionMode):
    """Gives `Unknown` for the number of a floating-point tensor that has no values."""

    def __init__(self, has_values: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._has_values = has_values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.item, Tensor.__bool__):
            inside = local_of(args[0])
            module = sys._getframe(1).f_globals.get("__name__", "")
            if self._has_values(inside) or inside.is_meta:
                pass
            elif func is Tensor.__bool__ and module == "torch.nn.init":
                return False  # trunc_normal_ asks whether to draw once more
            elif func is Tensor.item and inside.dtype.is_floating_point:
                # A scaler asks how many gradients are infinite: no step is left out.
                return 0.0 if module == "torch.amp.grad_scaler" else Unknown(1.0)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def functions_of_unknown() -> Iterator[None]:
    """Functions of `math` give `Unknown` for one, as for the exponential of a loss."""

    def of_unknown(plain: Any) -> Any:
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            return Unknown(1.0) if any(isinstance(x, Unknown) for x in args) else result

        return call

    names = ("exp", "exp2", "log", "log2", "log10", "pow", "sqrt")
    there = [name for name in names if hasattr(math, name)]
    with replaced([(math, name, of_unknown(getattr(math, name))) for name in there]):
        yield


def refusal(error: Exception, operator: str) -> CaptureError:
    """What is said where an operator needs values, or is not known."""
    line = user_line()
    where = f"{line}: " if line else ""
    if isinstance(error, (UnsupportedOperatorException, NotImplementedError)):
        return CaptureError(
            f"{where}{operator} says nothing about the tensors that it makes (it has no fake "
            f"kernel), so a dry run cannot know their memory. Register one with "
            f"torch.library.register_fake({operator.rpartition('.')[0]!r})."
        )
    return CaptureError(f"{where}{operator} needs values: {UNKNOWN}. {REMEDY}.")
