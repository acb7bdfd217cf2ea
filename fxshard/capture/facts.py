"""What programs of a model depend on that no argument shows: what its code reads, and its hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from fxshard.capture import attributes
from fxshard.capture.attributes import Attributes
from fxshard.capture.functions import Hooks
from fxshard.capture.variables import Variables

VARIABLES = "a global or a closure that forward reads"


class Facts:
    """Of one model; programs of equal facts are equal.

    Attributes:
        attributes: of its modules.
        variables: that its modules read.
    """

    def __init__(self) -> None:
        self.attributes: Attributes = Attributes()
        self.variables: Variables = Variables()
        self._hooks = Hooks()
        self._read_by_hooks = Variables()

    def mode(self, tree: list[nn.Module]) -> dict[str, Any]:
        """What is so now, by name; asked on every call.

        Args:
            tree: all modules of the model, the root first, whose own hooks run around each call.
        """
        hooks = self._hooks.state(tree[1:])
        return {
            "an attribute of a module that forward reads": self.attributes.number(tree),
            VARIABLES: (
                self.variables.number(tree),
                self._read_by_hooks.number((), self._hooks.functions),
            ),
            "a hook of a module": hooks,
        }

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """The model is traced in the block: what it reads is noted, and what it changes."""
        noted = attributes.noted(self.attributes.reads)
        with noted, self.variables.traced(), self._read_by_hooks.traced():
            yield
