"""Runs a command of `fxshard.cli.main`; each is in the file of its kind, with its arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fxshard.cli.check import add_check
from fxshard.cli.dryruns import add_dryrun, add_fsdp2, behind_dashes
from fxshard.cli.memory import add_diff, add_explain, add_fits, add_report, add_solve
from fxshard.cli.oom import add_explain_oom
from fxshard.cli.overview import COMMANDS
from fxshard.cli.programs import add_dump, add_opt
from fxshard.cli.times import add_estimate, add_tune
from fxshard.cli.validate import add_validate
from fxshard.errors import CaptureError, ConfigError, FxshardError, TextError, UnitError


def run(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; returns its exit code."""
    ours, of_script = behind_dashes(argv)
    args = _parser().parse_args(ours, argparse.Namespace(arguments=of_script))
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except (ConfigError, UnitError, CaptureError, TextError) as error:
        print("fxshard:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except FxshardError as error:
        print("fxshard:", error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # `fxshard dump | head`: the reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fxshard")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add in ARGUMENTS.items():
        add(commands.add_parser(name, description=COMMANDS[name]))
    return parser


ARGUMENTS = {
    "report": add_report,
    "explain": add_explain,
    "explain-oom": add_explain_oom,
    "fsdp2": add_fsdp2,
    "dryrun": add_dryrun,
    "fits": add_fits,
    "solve": add_solve,
    "check": add_check,
    "diff": add_diff,
    "dump": add_dump,
    "opt": add_opt,
    "estimate": add_estimate,
    "tune": add_tune,
    "validate": add_validate,
}
