"""``fxshard explain-oom``: a snapshot of a program that ran out of memory."""

from __future__ import annotations

import argparse

from fxshard.cli.dryruns import add_run, run_as_told
from fxshard.cli.memory import saved
from fxshard.cli.model_source import called, whole_number
from fxshard.errors import ConfigError
from fxshard.host.progress import task
from fxshard.memory.oom import explain as oom
from fxshard.memory.views.oom import text as text_of_oom
from fxshard.plans.plan import Plan


def explain_oom(args: argparse.Namespace) -> int:
    """``fxshard explain-oom``."""
    plan = None
    if args.plan is not None:
        with task("planning again with each what-if"):
            plan = _planned(args.plan)
    elif args.script is not None:
        plan = oom.Planned.of(run_as_told(args).memory)
    with task("replaying"):
        explained = oom.explain_oom(args.snapshot, device=args.device, plan=plan)
    print(text_of_oom(explained, top=args.top))
    return 0


def _planned(spec: str) -> oom.Planned:
    """The plan that --plan names: a function that makes it, or a report of it as JSON."""
    if ":" not in spec:
        try:
            return oom.Planned.from_dict(saved(spec))
        except ConfigError as error:
            raise ConfigError(f"--plan {spec}: {error}") from error
    made = called(spec, "--plan")
    if not isinstance(made, Plan):
        raise ConfigError(
            f"--plan {spec} returned {type(made).__name__}: expected what fxshard.plan returns."
        )
    return oom.Planned.of(made.memory)


def add_explain_oom(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard explain-oom``."""
    parser.add_argument(
        "snapshot", metavar="SNAPSHOT", help="written by torch.cuda.memory._dump_snapshot"
    )
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument(
        "--plan",
        metavar="PLAN",
        help="of the same step, to put beside: pkg.mod:fn, where fn() returns a plan, or a FILE "
        "that fxshard report --json or dryrun --json has written",
    )
    beside.add_argument(
        "--dry-run",
        dest="script",
        metavar="SCRIPT [-- ARGS]",
        help="what a dry run of the script says, to put beside; its options as for fxshard dryrun",
    )
    add_run(parser)
    parser.add_argument("--device", type=int, metavar="N", help="(the one that ran out)")
    parser.add_argument("--top", type=whole_number, default=10, help="rows of a table (10)")
    parser.set_defaults(command=explain_oom)
