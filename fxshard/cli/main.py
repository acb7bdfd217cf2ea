"""The command line: ``report``, ``explain``, ``fits``, ``diff``, ``dump``, ``estimate`` and more.

Exit codes: 0; 1, something does not hold (it does not fit, a difference is not 0); 2, usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from fxshard.cli.overview import COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    if not given or given[0] not in COMMANDS:
        _overview().parse_args(given)  # prints the commands, and exits
    from fxshard.cli import commands  # imports torch, which the overview does not need

    return commands.run(given)


def _overview() -> argparse.ArgumentParser:
    about = "fxshard: fully sharded data parallelism as a compiler."
    parser = argparse.ArgumentParser("fxshard", description=about, epilog=__doc__)
    parser.add_argument("--version", action="version", version=f"fxshard {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    return parser


def _version() -> str:
    """Of the package that is installed: pyproject.toml has it."""
    try:
        return metadata.version("fxshard")
    except metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"
