"""One trace for equal calls of equal models: for tests of what comes behind the trace.

Half of what a plan of a small model costs is its trace, and tests of strategies and options plan
the same models again and again. Those that conftest.py lists do what `Plan.replan` does, over all
plans of a process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxshard._torch import modules as torch_modules
from fxshard._torch import trees
from fxshard.capture import strides, trace
from fxshard.capture.swapped import users_class
from fxshard.ir.program import Program

Capture = Callable[..., Program]


class Shared:
    """Stands for `trace.capture`."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._made: dict[Any, Program] = {}
        self._keep: list[Any] = []  # what a key knows by its id

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
    ) -> Program:
        key = self._key(model, args, kwargs, options)
        if key not in self._made:
            self._made[key] = self._capture(model, args, kwargs, **options)
        return self._made[key]

    def _key(self, model: nn.Module, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """Of all that a trace sees, but for what the code of the model reads elsewhere."""
        numbers: dict[int, int] = {}

        def number(of: Any) -> int:
            return numbers.setdefault(id(of), len(numbers))

        def said(value: Any) -> Any:
            text = repr(value)
            if " at 0x" not in text:
                return type(value), text
            if isinstance(value, dict):  # hooks come and go
                return type(value), [(said(k), said(v)) for k, v in value.items()]
            if isinstance(value, (list, tuple)):
                return type(value), [said(each) for each in value]
            self._keep.append(value)
            return id(value)

        def held(tensor: Tensor | None) -> Any:
            """A parameter counts as it is whole, where it is sharded too."""
            if tensor is None:
                return None
            shape, stride = tuple(tensor.shape), strides.of_state(tensor)
            facts = (shape, stride, tensor.dtype, tensor.device)
            return number(tensor), facts, tensor.requires_grad

        def given(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return said(leaf)
            storage = number(leaf.untyped_storage()._cdata), leaf.storage_offset()
            return type(leaf), storage, leaf.stride(), held(leaf)

        modules = [
            (
                name,
                users_class(module),
                [(key, held(p)) for key, p in module._parameters.items()],
                [(key, held(b)) for key, b in module._buffers.items()],
                [(key, number(m)) for key, m in module._modules.items()],
                [(key, said(v)) for key, v in vars(module).items() if _is_read(key)],
            )
            for name, module in model.named_modules()
        ]
        units = [
            (
                unit.fqn,
                unit.precision,
                [(p.fqn, p.compute_dtype, p.requires_grad) for p in unit.params],
                [(p.fqn, p.requires_grad) for p in unit.ignored],
            )
            for unit in options["units"]
        ]
        leaves, spec = trees.tree_flatten((args, kwargs))
        others = {k: v for k, v in options.items() if k not in ("units", "world_size")}
        others["device"] = trace.where_it_computes(model, options.get("device"))
        around = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch_modules.REDUCES_AS_STORED,
        )
        return repr((modules, units, spec, list(map(given, leaves)), others, around))


def _is_read(name: str) -> bool:
    """By a forward."""
    slots = ("_parameters", "_buffers", "_modules", "_fxshard")
    return name not in slots and "state_dict" not in name


@functools.cache
def _shared() -> Shared:
    """That of this process."""
    return Shared(trace.capture)


@contextlib.contextmanager
def sharing(shares: bool, *, anew: bool = False) -> Iterator[None]:
    """Inside, if it `shares`, captures are shared; `Ranks.run` has its ranks do so too.

    Args:
        anew: with none of before: a key knows classes by their names.
    """
    before = trace.capture
    if shares:
        trace.capture = Shared(before) if anew else _shared()
    try:
        yield
    finally:
        trace.capture = before


def are_shared() -> bool:
    return isinstance(trace.capture, Shared)
