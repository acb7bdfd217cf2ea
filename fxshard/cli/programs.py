"""``dump`` and ``opt``: schedules, graphs, and programs as text."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from fxshard import pipeline
from fxshard.cli.model_source import add_arguments, refuse_beside
from fxshard.cli.outputs import write
from fxshard.cli.steps import planned
from fxshard.config.checked import Config
from fxshard.errors import ConfigError
from fxshard.host import files
from fxshard.host.progress import task
from fxshard.ir import dump, text
from fxshard.ir.program import Fact, Program
from fxshard.memory.views.live import live_after
from fxshard.plans.plan import Plan

# Options that are read by the passes alone; the others are in the text already.
OF_PASSES = (
    *("max_bucket_bytes", "min_bucket_bytes", "pack_bytes", "max_inflight", "reduce_op"),
    *("gradient_divide_factor", "gradient_predivide_factor"),
    *("forward_prefetch", "backward_prefetch", "hardware"),
)


def dump_(args: argparse.Namespace) -> int:
    """``fxshard dump``."""
    for form in ("--graph", "--code", "--diff", "--text"):
        if getattr(args, form[2:]) not in (None, False):
            why = "it is for the schedule, which is dumped without that"
            refuse_beside(args, form, why, "--phase", "--no-fold")
    if args.text is not None:
        print(_text(args), end="")
        return 0
    fold, texts = not args.no_fold, dict[str, tuple[str, str]]()

    def note(name: str, before: str, after: str) -> None:
        texts[name] = before, after

    with task("planning"):
        plan = planned(args, **({"observe": note} if args.diff is not None else {}))
    if args.diff is not None:
        print(_changes(texts, args.diff))
    elif args.graph:
        print(dump.text(plan.program))
    elif args.code:
        print(plan.code)
    elif args.json:
        print(json.dumps(_schedule(plan, args.phase, fold, args.hardware), indent=2))
    else:
        print(plan.dump(phase=args.phase, fold=fold, hardware=args.hardware))
    return 0


def add_dump(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard dump``."""
    add_arguments(parser)
    parser.add_argument("--phase", choices=("forward", "backward"))
    parser.add_argument("--no-fold", action="store_true", help="identical layers one by one")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--graph", action="store_true", help="the joint graph, every operator")
    form.add_argument("--code", action="store_true", help="the Python source that runs")
    form.add_argument("--json", action="store_true")
    form.add_argument("--diff", metavar="PASS", help="what a pass changed in the joint graph")
    form.add_argument(
        "--text",
        nargs="?",
        const="",
        metavar="PASS",
        help="the full program, for fxshard opt; with PASS, as it is before that pass",
    )
    parser.set_defaults(command=dump_)


def _schedule(plan: Plan, phase: str | None, fold: bool, hardware: str | None) -> dict[str, Any]:
    exposed = None
    if hardware is not None:
        exposed = plan.estimate(hardware).exposed(len(plan.programs) - 1)
    everything = dump.rows(plan.program, live_after(plan.memory), exposed)
    rows = [row for row in everything if phase in (None, row.phase)]
    blocks = dump.fold(rows) if fold else [(1, rows)]
    return {
        "schema": "fxshard.ir.schedule/1",
        "world_size": plan.program.world_size,
        "certificate": plan.certificate,
        "units": [
            {"name": unit.name, "kind": unit.kind, "parameters": [p.fqn for p in unit.params]}
            for unit in plan.units
        ],
        "blocks": [
            {"count": count, "rows": [dataclasses.asdict(row) for row in block]}
            for count, block in blocks
        ],
    }


def _changes(texts: dict[str, tuple[str, str]], name: str) -> str:
    """What the pass `name` changed in the graph of the last micro-batch."""
    if name not in texts:
        raise ConfigError(f"--diff {name}: no such pass; there are {', '.join(texts)}.")
    return dump.changes(*texts[name]) or f"{name} changes nothing in the graph of this model."


@dataclasses.dataclass(frozen=True)
class _WriteText:
    """A pass that changes nothing: it writes the program as text."""

    texts: list[str]

    name: ClassVar[str] = "write-text"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    ensures: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, program: Program) -> None:
        self.texts.append(text.write(program))


def _text(args: argparse.Namespace) -> str:
    """The program of the last micro-batch as text, finished or before the pass of --text."""
    if not args.text:
        with task("planning"):
            return text.write(planned(args).program)
    texts: list[str] = []

    def passes(default: list[pipeline.Pass]) -> list[pipeline.Pass]:
        at = [step.name for step in default].index(_named(args.text, default, "--text").name)
        return [*default[:at], _WriteText(texts), *default[at:]]

    with task("planning"):
        planned(args, passes=passes)
    return texts[-1]


def _named(name: str, passes: Sequence[pipeline.Pass], option: str) -> pipeline.Pass:
    """The pass of a name."""
    for step in passes:
        if step.name == name:
            return step
    raise ConfigError(
        f"{option} {name}: no such pass; there are {', '.join(step.name for step in passes)}."
    )


def opt(args: argparse.Namespace) -> int:
    """``fxshard opt``."""
    for module in args.imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"--import {module}: {error}.") from error
    try:
        source = sys.stdin.read() if args.file == "-" else Path(args.file).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{args.file}: no text that can be read: {error}.") from error
    program = text.parse(source)
    settings: dict[str, Any] = dict(map(_setting, args.settings))
    settings["optimizer_in_backward"] = program.optimizer_in_backward
    settings["backend"] = "inductor" if program.compiled else "eager"
    bytes_of = [each for each in program.checkpoints.values() if isinstance(each, int)]
    settings |= {"checkpoint": bytes_of[0]} if bytes_of else {}
    passes = pipeline.default_passes(Config.from_options(settings))
    if args.passes is not None:
        names = filter(None, args.passes.split(","))
        passes = [_named(name, passes, "--passes") for name in names]

    def show(name: str, before: str, after: str) -> None:
        print(f"[fxshard] after {name}:", after, sep="\n", file=sys.stderr)

    pipeline.run(program, passes, observe=show if args.print_after_all else None)
    written = text.write(program)
    if args.output is None:
        print(written, end="")
        return 0
    write(args.output, "Text", lambda path: files.write(path, written))
    return 0


def _setting(given: str) -> tuple[str, Any]:
    """``name=value`` of --set."""
    name, equals, value = given.partition("=")
    if not equals or name not in OF_PASSES:
        raise ConfigError(f"--set {given}: expected NAME=VALUE, of {', '.join(OF_PASSES)}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a size such as 25MiB, or a name


def add_opt(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard opt``."""
    parser.add_argument("file", metavar="FILE", help="from fxshard dump --text; -: standard input")
    parser.add_argument(
        "--passes",
        metavar="A,B",
        help="names of passes, in order; by default all of the pipeline",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option that passes read, such as max_bucket_bytes=25MiB or forward_prefetch=0",
    )
    parser.add_argument(
        "--print-after-all",
        action="store_true",
        help="the joint graph after each pass, on standard error",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it first: the text names classes of it, in what the model takes or returns",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the text there")
    parser.set_defaults(command=opt)
