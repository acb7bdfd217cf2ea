"""What several commands write besides what they print, and the arguments that say so."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable

from fxshard.bytesize import SIZES
from fxshard.cli.model_source import whole_number
from fxshard.errors import ConfigError
from fxshard.host import files
from fxshard.memory.report import MemoryReport


def _to_json(memory: MemoryReport, path: str) -> None:
    files.write(path, json.dumps(memory.to_dict(), indent=2))


def _to_csv(memory: MemoryReport, path: str) -> None:
    files.write(path, memory.to_csv())


PERFETTO = "Trace for ui.perfetto.dev"
OUTPUTS: dict[str, tuple[str, Callable[[MemoryReport, str], None]]] = {  # of ``report``
    "json": ("Everything as JSON", _to_json),
    "csv": ("All rows as CSV", _to_csv),
    "html": ("Timeline, schedule and tables, for a browser", MemoryReport.to_html),
    "perfetto": (PERFETTO, MemoryReport.to_perfetto),
    "memory_viz": ("Snapshot for pytorch.org/memory_viz", MemoryReport.to_memory_viz),
}


def write_all(memory: MemoryReport, args: argparse.Namespace) -> list[str]:
    """Write the files that are asked for; returns a line about each."""
    return [
        write(path, what, functools.partial(make, memory))
        for name, (what, make) in OUTPUTS.items()
        if (path := getattr(args, name)) not in (None, "-")
    ]


def write(path: str, what: str, make: Callable[[str], None]) -> str:
    """Write a file; returns a line about it for the terminal."""
    try:
        make(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
    return f"{what}: {path}"


def add_table(parser: argparse.ArgumentParser) -> None:
    """The form of a table of modules."""
    parser.add_argument("--depth", type=whole_number, help="modules with at most this many names")
    parser.add_argument("--memory-units", choices=SIZES, help="(MiB)")


def add_count(parser: argparse.ArgumentParser) -> None:
    """Micro-batches of a step."""
    parser.add_argument(
        "--micro-batches", type=whole_number, default=1, metavar="K", help="per step (1)"
    )


def add_files(parser: argparse.ArgumentParser) -> None:
    """``--json`` and the other files that `write_all` writes."""
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="everything as JSON (to the terminal)"
    )
    parser.add_argument("--csv", metavar="FILE", help="every phase and row")
    parser.add_argument("--html", metavar="FILE", help="a page for a browser")
    parser.add_argument("--perfetto", metavar="FILE", help="a trace for ui.perfetto.dev")
    parser.add_argument("--memory-viz", metavar="FILE", help="for pytorch.org/memory_viz")
