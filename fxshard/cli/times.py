"""``estimate`` and ``tune``: seconds of a step."""

from __future__ import annotations

import argparse
import functools

import fxshard
from fxshard.cli.model_source import ModelSource, add_arguments, load, refuse_beside, whole_number
from fxshard.cli.outputs import PERFETTO, write
from fxshard.cli.steps import add_step, planned, step_of
from fxshard.config.checked import Config
from fxshard.hardware import hardware_of
from fxshard.host.progress import task
from fxshard.planner.tune import PLANS


def estimate(args: argparse.Namespace) -> int:
    """``fxshard estimate``."""
    args.hardware = hardware_of(args.hardware or Config.hardware, args.ranks_per_node)
    with task("planning"):
        plan = planned(args)
        found = plan.estimate()
    written = []
    if args.perfetto is not None:
        draw = functools.partial(found.to_perfetto, memory=plan.memory)
        written.append(write(args.perfetto, PERFETTO, draw))
    print(found.table(), found.summary(), *written, sep="\n\n")
    return 0


def add_estimate(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard estimate``."""
    add_arguments(parser)
    add_step(parser)
    parser.add_argument(
        "--ranks-per-node", type=whole_number, metavar="N", help="other than the hardware's"
    )
    parser.add_argument("--perfetto", metavar="FILE", help="a trace for ui.perfetto.dev")
    parser.set_defaults(command=estimate)


def tune(args: argparse.Namespace) -> int:
    """``fxshard tune``."""
    if args.batches is not None:
        refuse_beside(args, "--batches", "these are the batches that are tried", "--batch")
    refuse_beside(args, "tune", "give fxshard.tune(mesh='auto', parallelize=...)", "--mesh")
    found = fxshard.tune(
        *load(ModelSource.of(args), "meta"),
        budget=args.budget,
        batches=args.batches,
        plans=args.plans,
        **step_of(args),
    )
    best, written = found.best.plan, []
    assert best is not None  # the best trial keeps its plan
    if args.plot is not None:
        written.append(write(args.plot, "Memory against time, as PNG", found.plot))
    if args.html is not None:
        page = functools.partial(best.memory.to_html, front=found.dots(), budget=found.budget_bytes)
        what = "The best, and memory against time, for a browser"
        written.append(write(args.html, what, page))
    table = found.table(rows=None) if args.all else found.table()
    print(found.summary(), table, *written, sep="\n\n")
    return 0


def add_tune(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard tune``."""
    add_arguments(parser)
    add_step(parser)
    parser.add_argument("--budget", metavar="80GiB", help="memory of one rank (the hardware's)")
    parser.add_argument(
        "--batches", type=whole_number, nargs="+", metavar="N", help="(--batch, and doubled)"
    )
    parser.add_argument(
        "--plans", type=whole_number, default=PLANS, help=f"to be made at most ({PLANS})"
    )
    parser.add_argument("--all", action="store_true", help="every configuration")
    parser.add_argument("--plot", metavar="FILE", help="memory against time, as PNG")
    parser.add_argument("--html", metavar="FILE", help="a page for a browser")
    parser.set_defaults(command=tune)
