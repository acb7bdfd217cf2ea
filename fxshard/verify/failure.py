"""How a check reports the node that breaks a Fact."""

from __future__ import annotations

from typing import NoReturn

from torch import fx

from fxshard.errors import VerifyError
from fxshard.ir import dump
from fxshard.ir.program import Fact, Program


def fail(program: Program, fact: Fact, node: fx.Node, message: str) -> NoReturn:
    """Raise VerifyError for `node`."""
    raise VerifyError(
        fact.name.lower(), message, node=node.name, excerpt=dump.excerpt(program, node)
    )
