"""``report``, ``explain``, ``fits``, ``solve`` and ``diff``: bytes of one rank."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from fxshard.bytesize import parse_budget, size_text
from fxshard.cli.model_source import (
    ModelSource,
    add_arguments,
    load,
    named_dimensions,
    named_size,
    once,
    open_sizes,
    refuse_beside,
    whole_number,
)
from fxshard.cli.outputs import add_files, add_table, write_all
from fxshard.cli.steps import add_step, planned, planned_call
from fxshard.errors import ConfigError
from fxshard.host.progress import task
from fxshard.memory.views.diff import diff

TABLE = ("--depth", "--memory-units")  # options of the form of a table


def report(args: argparse.Namespace) -> int:
    """``fxshard report``."""
    budget = None if args.budget is None else parse_budget(args.budget)
    if args.json == "-":
        refuse_beside(args, "--json", "JSON has every module, in bytes", *TABLE)
    with task("planning") as say:
        memory = planned(args).memory
        say("writing")
        written = write_all(memory, args)
    if args.json == "-":
        print(json.dumps(memory.to_dict(), indent=2))
    else:
        table = memory.table(args.depth, args.memory_units or "MiB")
        print(memory.explain_peak(5, what_ifs=False), table, *written, sep="\n\n")
    if budget is not None:
        memory.assert_fits(budget)
    return 0


def add_report(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard report``."""
    add_arguments(parser)
    add_step(parser)
    add_table(parser)
    parser.add_argument("--budget", metavar="80GiB", help="exit with 1 if the peak is above it")
    add_files(parser)
    parser.set_defaults(command=report)


def explain(args: argparse.Namespace) -> int:
    """``fxshard explain``."""
    with task("planning") as say:
        memory = planned(args).memory
        say("planning again with each what-if" if args.what_ifs else "explaining")
        explained = memory.explain_peak(args.top, what_ifs=args.what_ifs)
    print(explained)
    return 0


def add_explain(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard explain``."""
    add_arguments(parser)
    add_step(parser)
    parser.add_argument("--top", type=whole_number, default=20, help="how many of them (20)")
    parser.add_argument(
        "--no-what-ifs", dest="what_ifs", action="store_false", help="do not try what would save"
    )
    parser.set_defaults(command=explain)


def fits(args: argparse.Namespace) -> int:
    """``fxshard fits``."""
    budget = parse_budget(args.budget)
    with task("planning"):
        memory = planned(args).memory
    memory.assert_fits(budget)
    made = [phase.peak_bytes for phase in memory.lifecycle if phase.name.startswith("init")]
    needed = max(memory.peak_bytes, memory.first_step_peak_bytes, *made)
    free = size_text(budget - needed)
    print(f"It fits: {size_text(needed)} needed of {size_text(budget)}, {free} left.")
    if memory.device == "cuda":
        outside = memory.device_memory().outside
        reserved = memory.device_memory(capacity=budget - outside).reserved
        print(
            f"CUDA's allocator reserves {size_text(reserved)} for it; its context and NCCL take "
            f"{size_text(outside)} at most."
        )
    return 0


def add_fits(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard fits``."""
    add_arguments(parser)
    add_step(parser)
    parser.add_argument("--budget", metavar="80GiB", required=True, help="memory of one rank")
    parser.set_defaults(command=fits)


def solve(args: argparse.Namespace) -> int:
    """``fxshard solve``."""
    fixed, dynamic = once(args.at, "--at"), once(args.dynamic, "--dynamic")
    with task("planning"):
        call = load(ModelSource.of(args), "meta")
        plan = planned_call(call, args, dynamic=dynamic or open_sizes(*call))
        found = plan.solve(args.what, args.budget, multiple_of=args.multiple_of, **fixed)
    print(found)
    return 0


def add_solve(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard solve``."""
    parser.add_argument("what", help="max_batch, max_seq, min_world, or max_<name> of --dynamic")
    parser.add_argument("--budget", metavar="80GiB", required=True, help="memory of one rank")
    add_arguments(parser, sizes=(2, 128))  # sizes of 1 are not left open
    add_step(parser)
    parser.add_argument(
        "--at", action="append", type=named_size, metavar="seq=8192", help="a size that is fixed"
    )
    parser.add_argument(
        "--multiple-of", type=whole_number, default=1, metavar="N", help="ask for such sizes only"
    )
    parser.add_argument(
        "--dynamic",
        action="append",
        type=named_dimensions,
        metavar="batch=x:0,y:0",
        help="a size by name, and which dimensions of which arguments have it",
    )
    parser.set_defaults(command=solve)


def diff_(args: argparse.Namespace) -> int:
    """``fxshard diff``."""
    if args.json:
        refuse_beside(args, "--json", "JSON has every row that differs, in bytes", *TABLE, "--all")
    found = diff(saved(args.before), saved(args.after))
    if args.json:
        rows = [dataclasses.asdict(row) for row in found.only_different().rows]
        print(json.dumps({"schema": "fxshard.memory-diff/1", "rows": rows}, indent=2))
    else:
        units = args.memory_units or "MiB"
        print(found.table(args.depth, units, only_different=not args.all))
    return 0


def add_diff(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard diff``."""
    parser.add_argument("before", metavar="A", help="written by fxshard report --json A")
    parser.add_argument("after", metavar="B", help="likewise")
    add_table(parser)
    parser.add_argument("--all", action="store_true", help="what does not differ, too")
    parser.add_argument("--json", action="store_true", help="every figure that differs")
    parser.set_defaults(command=diff_)


def saved(path: str) -> dict[str, Any]:
    """A report that ``fxshard report --json FILE`` has written."""
    try:
        saved = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no report that can be read: {error}.") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"{path}: no report; write one with fxshard report --json {path}.")
    return saved
