"""Calls in which ranks may take different ways: what they tell each other, and what follows of it.

Each rank says, through the store of the process group, what the program of its call gathers and
reduces (`fxshard.ir.needs`). If all say the same, they run these programs. If not, each completes
its own with what it lacks (`fxshard.passes.join_ranks`), and they compare the results as they do
for any new program (docs/adr/0037).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fxshard.errors import ConfigError, RankMismatchError, StepError
from fxshard.ir.needs import Needs, merged
from fxshard.ir.program import Program
from fxshard.ir.units import Unit
from fxshard.verify.certificate import agreement, digest

WHAT = "what its batch needs"  # that a rank tells the others


def require_plain(units: Sequence[Unit]) -> None:
    """Raises ConfigError for parameters that not every rank can gather by itself."""
    for param in (param for unit in units for param in unit.params):
        if param.extension is not None:
            raise ConfigError(
                f"ranks_may_differ=True with parameter {param.fqn!r}, of a tensor subclass: what a "
                f"rank that does not read it would have to send is not known. Leave one out."
            )
        if param.placed is not None:
            raise ConfigError(
                f"ranks_may_differ=True with parameter {param.fqn!r}, a DTensor of tensor "
                f"parallelism: the ranks of {param.placed.group!r} compute one batch together, and "
                f"must take the same way through the model. Leave one out."
            )


def require_noted(program: Program) -> None:
    """Raises ConfigError if the pipeline has not noted what a rank needs."""
    if program.needs is None:
        raise ConfigError(
            "ranks_may_differ=True, but the passes have no 'join-ranks', which notes what a rank "
            "needs. Put it after 'checkpoint'."
        )


def stated(program: Program) -> str:
    """What a rank tells the others of its call; equal if its collectives are."""
    assert program.needs is not None
    return json.dumps({"lines": digest(agreement(program)), "needs": program.needs.text()})


def refusing(error: Exception) -> str:
    """What a rank tells the others of a call that it refuses."""
    return json.dumps({"refused": f"{type(error).__name__}: {error}".partition("\n")[0]})


def elsewhere(program: Program, arrived: Sequence[int]) -> StepError:
    """The error for a gradient at an output that backward does not start from."""
    signature = program.signature
    new = [
        signature.output_names[i] or "the output" for i in arrived if i not in signature.tangents
    ]
    return StepError(
        f"a gradient arrived at {', '.join(new)}, where backward does not start: with a scalar "
        f"output that needs a gradient (a loss), it starts there alone. With ranks_may_differ=True "
        f"forward does not run again for it: make the whole loss in forward, or return no scalar."
    )


def common(said: Mapping[str, Sequence[int]], places: Mapping[str, int]) -> Needs | None:
    """What all ranks need in a call, in the order that they follow; None: they need the same.

    Args:
        said: what ranks have told, and which ranks did: the same on all ranks.
        places: of each parameter in the model.

    Raises:
        RankMismatchError: on all ranks: some refuse the call, or they differ in more.
    """
    if len(said) == 1:
        return None
    found = {text: json.loads(text) for text in said}
    for text, what in found.items():
        if "refused" in what:
            raise RankMismatchError(
                f"{_names(said[text])} refuses this call of the model, and the others do not: "
                f"{what['refused']}"
            )
    needs = {text: Needs.of_text(what["needs"]) for text, what in found.items()}
    _require_equal(
        {text: each.mode for text, each in needs.items()},
        said,
        "Ranks may take different ways through the model, but all train or none does: under one "
        "grad mode, with outputs that need gradients on all or on none, and all under no_sync or "
        "none.",
    )
    _require_equal(
        {text: f"calls {', '.join(each.own) or 'no collective'}" for text, each in needs.items()},
        said,
        "The model calls collectives itself, and not the same on all ranks, so that they would "
        "wait for each other: ranks_may_differ completes what fxshard gathers and reduces, not "
        "these. Call them on every way through the model.",
    )
    if any(each.partial for each in needs.values()):
        raise RankMismatchError(
            "ranks take different ways through the model while set_requires_all_reduce(False) "
            "leaves partial sums of gradients: which of them have one would depend on the rank. "
            "Accumulate with no_sync or set_requires_gradient_sync(False) instead."
        )
    return merged(needs.values(), places)


def _require_equal(values: Mapping[str, str], said: Mapping[str, Sequence[int]], why: str) -> None:
    """Raises RankMismatchError if `values`, by what ranks have told, are not all equal."""
    ways: dict[str, list[int]] = {}
    for text, value in values.items():
        ways[value] = sorted([*ways.get(value, []), *said[text]])
    if len(ways) > 1:
        each = sorted((ranks, value) for value, ranks in ways.items())
        listed = "; ".join(f"{_names(ranks)}: {value}" for ranks, value in each)
        raise RankMismatchError(f"ranks differ in a call of the model ({listed}). {why}")


def _names(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
