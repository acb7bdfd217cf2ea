"""Modules as lines of code, drawn so that eager PyTorch runs every line."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MOST_ELEMENTS = 1500  # of a result; larger ones are not kept


@dataclasses.dataclass(frozen=True)
class Line:
    """A statement of forward: `text` assigns `out` ("" if it only writes) from `reads`."""

    operator: str
    text: str
    out: str = ""
    reads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Class:
    """A module class: what `__init__` and `forward` do, and the expression that is returned."""

    name: str
    args: tuple[str, ...]
    inits: tuple[str, ...]
    lines: tuple[Line, ...]
    result: str

    def code(self) -> str:
        """The class statement."""
        inits = "".join(f"        {text}\n" for text in self.inits)
        body = "".join(f"        {row}\n" for line in self.lines for row in line.text.split("\n"))
        return (
            f"class {self.name}(nn.Module):\n"
            f"    def __init__(self):\n        super().__init__()\n{inits}\n"
            f"    def forward(self, {', '.join(self.args)}):\n{body}"
            f"        return {self.result}\n"
        )


class Unfit(Exception):
    """An operator finds nothing to read."""


class Draft:
    """A class being drawn. It holds a live module and the values of forward's variables."""

    def __init__(self, rng: random.Random, space: dict[str, Any], **inputs: Any) -> None:
        self.rng = rng
        self.space = space  # the globals of the program, with all classes drawn so far
        self.values = dict(inputs)
        self.args = tuple(inputs)
        self.inits: list[str] = []
        self.lines: list[Line] = []
        self.live = nn.Module()
        self.reads: list[str] = []

    # -- what operators draw ---------------------------------------------------------------------

    def one(self, *choices: Any) -> Any:
        """One of `choices`."""
        return self.rng.choice(choices)

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self.rng.random() < probability

    def tensor(self, fits: Callable[[Tensor], bool] = lambda t: True) -> tuple[str, Tensor]:
        """A floating variable and its value; the latest ones are likelier."""
        names = [
            name
            for name, value in self.values.items()
            if isinstance(value, Tensor) and value.is_floating_point() and fits(value)
        ]
        return self._read(names)

    def index(self, fits: Callable[[Tensor], bool] = lambda t: True) -> tuple[str, Tensor]:
        """The same of int64."""
        names = [
            name
            for name, value in self.values.items()
            if isinstance(value, Tensor) and value.dtype == torch.int64 and fits(value)
        ]
        return self._read(names)

    def _read(self, names: list[str]) -> tuple[str, Tensor]:
        if not names:
            raise Unfit
        name = names[-1] if self.chance(0.6) else self.rng.choice(names)
        self.reads.append(name)
        return name, self.values[name]

    def attribute(self, kind: str, code: str) -> str:
        """A new attribute of the module, such as ``self.m3``; `kind` is the letter."""
        name = f"self.{kind}{len(self.inits)}"
        self.init(f"{name} = {code}")
        return name

    def buffer(self, code: str, persistent: bool = True) -> str:
        """A new buffer."""
        name = f"b{len(self.inits)}"
        rest = "" if persistent else ", persistent=False"
        self.init(f"self.register_buffer({name!r}, {code}{rest})")
        return f"self.{name}"

    def init(self, text: str) -> None:
        """A line of ``__init__``; runs at once."""
        exec(text, self.space, {"self": self.live})
        self.inits.append(text)

    def live_value(self, code: str) -> Any:
        """What an expression of `self` is now."""
        return eval(code, self.space, {"self": self.live})

    # -- lines -----------------------------------------------------------------------------------

    def attempt(self, name: str, operator: Callable[[Draft], str]) -> bool:
        """Add a line of this operator if it fits and eager runs it; True if it did."""
        before, attributes = len(self.inits), dict(self.live.__dict__)
        held = {k: dict(v) for k, v in attributes.items() if isinstance(v, dict)}
        self.reads = []
        try:
            text = operator(self)
            writes = text.startswith("!")
            out = "" if writes else f"v{len(self.lines)}"
            text = text[1:] if writes else self._assigned(out, text)
            self._run(text, out)
        except Exception:
            del self.inits[before:]
            for key, value in held.items():
                attributes[key].clear()
                attributes[key].update(value)
            self.live.__dict__.clear()
            self.live.__dict__.update(attributes)
            return False
        self.lines.append(Line(name, text, out, tuple(dict.fromkeys(self.reads))))
        return True

    def _assigned(self, out: str, text: str) -> str:
        return text.replace("@", out) if "@" in text else f"{out} = {text}"

    def _run(self, text: str, out: str) -> None:
        space = self.values | {"self": self.live}
        exec(compile(text, "<draft>", "exec"), self.space, space)
        if out:
            value = space[out]
            leaves = value if isinstance(value, tuple) else (value,)
            for leaf in leaves:
                check(leaf)
            self.values[out] = value

    def finish(self, name: str, result: str) -> Class:
        """The class, which is part of `space` from now on."""
        made = Class(name, self.args, tuple(self.inits), tuple(self.lines), result)
        exec(made.code(), self.space)
        return made


def check(value: Any) -> None:
    """Refuse results that are large, not finite, or of kinds that nothing reads."""
    if not isinstance(value, Tensor):
        raise Unfit
    if value.numel() > MOST_ELEMENTS:
        raise Unfit
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise Unfit
    if value.is_floating_point() and value.numel() and float(value.detach().abs().max()) > 1e3:
        raise Unfit


def renamed(text: str, old: str, new: str) -> str:
    """`text` with the variable `old` called `new`."""
    return re.sub(rf"\b{old}\b", new, text)
