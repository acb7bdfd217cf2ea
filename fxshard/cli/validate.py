"""``fxshard validate``: ranks under a tracker, and beside eager PyTorch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from typing import Any

import fxshard
from fxshard.cli.model_source import Call, ModelSource, add_arguments, load, whole_number
from fxshard.cli.on_meshes import add_mesh
from fxshard.cli.steps import add_micro_batches, step_of
from fxshard.errors import ConfigError, UnknownSizeError
from fxshard.host.progress import task
from fxshard.validation.compare import Validation

NUMERICS_ROWS = 20  # of `validate --numerics`, the worst; --all shows the rest


MOST_RANKS = 8  # that `validate` starts unasked


def validate(args: argparse.Namespace) -> int:
    """``fxshard validate``."""
    call = load(ModelSource.of(args), "cpu")
    with task("validating"):
        result = _validated(call, args, {"steps": args.steps, **step_of(args)})
    numerics = result.numerics
    if args.json:
        print(json.dumps(_comparison(result), indent=2))
    else:
        cells = [] if result.unknown else [(result if args.all else excerpt(result)).table()]
        parts = [*cells, result.summary()]
        if numerics is not None:
            if args.all or numerics.verdict != "bitwise":
                top = None if args.all else NUMERICS_ROWS
                parts.append(numerics.table(only_different=not args.all, top=top))
            parts.append(numerics.summary())
        print(*parts, sep="\n\n")
    return 0 if result.holds else 1


def _validated(call: Call, args: argparse.Namespace, how: dict[str, Any]) -> Validation:
    """Validate on real ranks if they are asked for; without ``--ranks``, if that is possible."""
    if args.ranks == "processes":
        return fxshard.validate(*call, **how, ranks="processes")
    size = tuple(how["mesh"].values()) if "mesh" in how else args.world_size
    ranks = math.prod(size) if isinstance(size, tuple) else size
    if args.ranks is None and not args.numerics and ranks <= MOST_RANKS:
        try:
            return fxshard.validate(*call, **how, ranks="processes")
        except (ConfigError, UnknownSizeError) as reason:
            note = f"fxshard: not on real ranks: {' '.join(str(reason).split())}"
        found = fxshard.validate(*call, **how)
        print(note, file=sys.stderr)  # afterwards: fake ranks may fail for the same reason
        return found
    return fxshard.validate(*call, **how, numerics=args.numerics)


def excerpt(result: Validation) -> Validation:
    """The cells that differ, and the peaks of the last step of the root, the first layer and the
    optimizer.
    """
    last = max((cell.step for cell in result.cells), default=0)
    numbered = (c.module for c in result.cells if c.module.rpartition(".")[2].isdigit())
    modules = {"", next(numbered, ""), "optimizer"}
    cells = [
        cell
        for cell in result.cells
        if cell.difference
        or (cell.step == last and cell.module in modules and cell.state.startswith("Peak"))
    ]
    return dataclasses.replace(result, cells=cells)


def _comparison(result: Validation) -> dict[str, Any]:
    numbers = result.numerics
    return {
        "schema": "fxshard.validation/1",
        "unknown": result.unknown,
        "max_abs_difference": None if result.unknown else result.max_abs_difference,
        "static_peak_bytes": result.static_peak_bytes,
        "measured_peak_bytes": result.measured_peak_bytes,
        "peaks": list(result.peaks),
        "points": [
            {"step": step, "phase": phase, "max_abs_difference": difference}
            for step, phase, difference in result.points
        ],
        "cells": [
            {**dataclasses.asdict(cell), "category": cell.category.value} for cell in result.cells
        ],
        "numerics": numbers and {"verdict": numbers.verdict, "rows": numbers.to_list()},
    }


def add_validate(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard validate``."""
    add_arguments(parser)
    parser.add_argument("--steps", type=whole_number, default=2)
    add_micro_batches(parser)
    add_mesh(parser)
    parser.add_argument(
        "--ranks",
        choices=("processes", "fake"),
        help=f"processes: gloo ranks, each with its own batch, beside eager PyTorch (the default "
        f"of up to {MOST_RANKS}, if model and options can be sent to them); fake: rank 0's bytes",
    )
    parser.add_argument(
        "--numerics",
        action="store_true",
        help="with fake ranks: compare loss, gradients and buffers with eager, in one process",
    )
    parser.add_argument("--all", action="store_true", help="every module, state and category")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=validate)
