"""What the commands of `fxshard.cli.main` do, and the arguments that they take."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import fxshard
from fxshard import pipeline
from fxshard.bytesize import SIZES, parse_budget, size_text
from fxshard.cli import check
from fxshard.cli.dryruns import add_dryrun, add_fsdp2, add_run, behind_dashes, run_as_told
from fxshard.cli.model_source import (
    Call,
    add_arguments,
    called,
    load,
    named_dimensions,
    named_size,
    once,
    open_sizes,
    options,
    refuse_beside,
    whole_number,
)
from fxshard.cli.outputs import PERFETTO, add_count, add_files, add_table, write, write_all
from fxshard.cli.overview import COMMANDS
from fxshard.config import Config
from fxshard.cost.hardware import PRESETS, Hardware, hardware_of
from fxshard.errors import (
    CaptureError,
    ConfigError,
    FxshardError,
    TextError,
    UnitError,
    UnknownSizeError,
)
from fxshard.host import files
from fxshard.host.progress import task
from fxshard.ir import dump, text
from fxshard.ir.program import Fact, Program
from fxshard.memory.oom import explain as oom
from fxshard.memory.views.diff import diff
from fxshard.memory.views.live import live_after
from fxshard.memory.views.oom import text as text_of_oom
from fxshard.planner.tune import PLANS
from fxshard.plans.plan import Plan
from fxshard.validation.compare import Validation

NUMERICS_ROWS = 20  # of `validate --numerics`, the worst; --all shows the rest
MOST_RANKS = 8  # that `validate` starts unasked
TABLE = ("--depth", "--memory-units")  # options of the form of a table


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


def report(args: argparse.Namespace) -> int:
    """``fxshard report``."""
    budget = None if args.budget is None else parse_budget(args.budget)
    if args.json == "-":
        refuse_beside(args, "--json", "JSON has every module, in bytes", *TABLE)
    with task("planning") as say:
        memory = _plan(args).memory
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


def explain(args: argparse.Namespace) -> int:
    """``fxshard explain``."""
    with task("planning") as say:
        memory = _plan(args).memory
        say("planning again with each what-if" if args.what_ifs else "explaining")
        explained = memory.explain_peak(args.top, what_ifs=args.what_ifs)
    print(explained)
    return 0


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
            return oom.Planned.from_dict(_saved(spec))
        except ConfigError as error:
            raise ConfigError(f"--plan {spec}: {error}") from error
    made = called(spec, "--plan")
    if not isinstance(made, Plan):
        raise ConfigError(
            f"--plan {spec} returned {type(made).__name__}: expected what fxshard.plan returns."
        )
    return oom.Planned.of(made.memory)


def fits(args: argparse.Namespace) -> int:
    """``fxshard fits``."""
    budget = parse_budget(args.budget)
    with task("planning"):
        memory = _plan(args).memory
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


def check_(args: argparse.Namespace) -> int:
    """``fxshard check``."""
    with task("planning") as say:
        checked = check.check(args.file, only=args.only, update=args.update, say=say)
    for each in checked:
        print(*each.lines(args.all, args.memory_units or "MiB"), sep="\n")
    failed = sum(bool(each.failures) for each in checked)
    jobs = "1 job" if len(checked) == 1 else f"{len(checked)} jobs"
    print(f"{jobs}, {failed} failed" + ("; recorded" if args.update else ""))
    return 1 if failed else 0


def diff_(args: argparse.Namespace) -> int:
    """``fxshard diff``."""
    if args.json:
        refuse_beside(args, "--json", "JSON has every row that differs, in bytes", *TABLE, "--all")
    found = diff(_saved(args.before), _saved(args.after))
    if args.json:
        rows = [dataclasses.asdict(row) for row in found.only_different().rows]
        print(json.dumps({"schema": "fxshard.memory-diff/1", "rows": rows}, indent=2))
    else:
        units = args.memory_units or "MiB"
        print(found.table(args.depth, units, only_different=not args.all))
    return 0


def _saved(path: str) -> dict[str, Any]:
    """A report that ``fxshard report --json FILE`` has written."""
    try:
        saved = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no report that can be read: {error}.") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"{path}: no report; write one with fxshard report --json {path}.")
    return saved


def dump_(args: argparse.Namespace) -> int:
    """``fxshard dump``."""
    for form in ("--graph", "--code", "--diff", "--text"):
        if getattr(args, form[2:]) not in (None, False):
            why = "it is for the schedule, which is dumped without that"
            refuse_beside(args, form, why, "--phase", "--no-fold", "--hardware")
    if args.text is not None:
        print(_text(args), end="")
        return 0
    fold, texts = not args.no_fold, dict[str, tuple[str, str]]()

    def note(name: str, before: str, after: str) -> None:
        texts[name] = before, after

    hardware = None if args.hardware is None else hardware_of(args.hardware)
    with task("planning"):
        plan = _plan(args, **({"observe": note} if args.diff is not None else {}))
    if args.diff is not None:
        print(_changes(texts, args.diff))
    elif args.graph:
        print(dump.text(plan.program))
    elif args.code:
        print(plan.code)
    elif args.json:
        print(json.dumps(_schedule(plan, args.phase, fold, hardware), indent=2))
    else:
        print(plan.dump(phase=args.phase, fold=fold, hardware=hardware))
    return 0


@dataclasses.dataclass(frozen=True)
class _Written:
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
            return text.write(_plan(args).program)
    texts: list[str] = []

    def passes(default: list[pipeline.Pass]) -> list[pipeline.Pass]:
        at = [step.name for step in default].index(_named(args.text, default, "--text").name)
        return [*default[:at], _Written(texts), *default[at:]]

    with task("planning"):
        _plan(args, passes=passes)
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


# Options that are read by the passes alone; the others are in the text already.
OF_PASSES = (
    *("max_bucket_bytes", "min_bucket_bytes", "pack_bytes", "max_inflight", "reduce_op"),
    *("gradient_divide_factor", "gradient_predivide_factor"),
    *("forward_prefetch", "backward_prefetch"),
)


def _setting(given: str) -> tuple[str, Any]:
    """``name=value`` of --set."""
    name, equals, value = given.partition("=")
    if not equals or name not in OF_PASSES:
        raise ConfigError(f"--set {given}: expected NAME=VALUE, of {', '.join(OF_PASSES)}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a size such as 25MiB, or a name


def _changes(texts: dict[str, tuple[str, str]], name: str) -> str:
    """What the pass `name` changed in the graph of the last micro-batch."""
    if name not in texts:
        raise ConfigError(f"--diff {name}: no such pass; there are {', '.join(texts)}.")
    return dump.changes(*texts[name]) or f"{name} changes nothing in the graph of this model."


def estimate(args: argparse.Namespace) -> int:
    """``fxshard estimate``."""
    hardware = hardware_of(args.hardware, args.ranks_per_node)
    with task("planning"):
        plan = _plan(args)
        found = plan.estimate(hardware)
    written = []
    if args.perfetto is not None:
        draw = functools.partial(found.to_perfetto, memory=plan.memory)
        written.append(write(args.perfetto, PERFETTO, draw))
    print(found.table(), found.summary(), *written, sep="\n\n")
    return 0


def tune(args: argparse.Namespace) -> int:
    """``fxshard tune``."""
    if args.batches is not None:
        refuse_beside(args, "--batches", "these are the batches that are tried", "--batch")
    found = fxshard.tune(
        *load(args, "meta"),
        hardware=args.hardware,
        budget=args.budget,
        batches=args.batches,
        plans=args.plans,
        **_step(args),
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


def validate(args: argparse.Namespace) -> int:
    """``fxshard validate``."""
    call = load(args, "cpu")
    with task("validating"):
        result = _validated(call, args, {"steps": args.steps, **_step(args)})
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
    ranks = math.prod(args.world_size) if isinstance(args.world_size, tuple) else args.world_size
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


def _schedule(
    plan: Plan, phase: str | None, fold: bool, hardware: Hardware | None
) -> dict[str, Any]:
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


def solve(args: argparse.Namespace) -> int:
    """``fxshard solve``."""
    fixed, dynamic = once(args.at, "--at"), once(args.dynamic, "--dynamic")
    with task("planning"):
        call = load(args, "meta")
        plan = _plan_of(call, args, dynamic=dynamic or open_sizes(*call))
        found = plan.solve(args.what, args.budget, multiple_of=args.multiple_of, **fixed)
    print(found)
    return 0


def _plan(args: argparse.Namespace, **others: Any) -> Plan:
    return _plan_of(load(args, "meta"), args, **others)


def _plan_of(call: Call, args: argparse.Namespace, **others: Any) -> Plan:
    model, inputs, kwargs = call
    plan = fxshard.plan(model, inputs, kwargs, **others, **_step(args))
    if plan.chosen is not None:
        print("fxshard:", plan.chosen, file=sys.stderr)
    return plan


def _step(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments and options of `fxshard.plan` that the command line gives."""
    names = ("world_size", "micro_batches", "no_sync", "device")
    given = {name: value for name in names if (value := getattr(args, name, None))}
    return given | options(args)


# -- the arguments ------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fxshard")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add in ARGUMENTS.items():
        add(commands.add_parser(name, description=COMMANDS[name]))
    return parser


def _add_report(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    _add_step(parser)
    add_table(parser)
    parser.add_argument("--budget", metavar="80GiB", help="exit with 1 if the peak is above it")
    add_files(parser)
    parser.set_defaults(command=report)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    _add_step(parser)
    parser.add_argument("--top", type=whole_number, default=20, help="how many of them (20)")
    parser.add_argument(
        "--no-what-ifs", dest="what_ifs", action="store_false", help="do not try what would save"
    )
    parser.set_defaults(command=explain)


def _add_explain_oom(parser: argparse.ArgumentParser) -> None:
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


def _add_fits(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    _add_step(parser)
    parser.add_argument("--budget", metavar="80GiB", required=True, help="memory of one rank")
    parser.set_defaults(command=fits)


def _add_solve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", help="max_batch, max_seq, min_world, or max_<name> of --dynamic")
    parser.add_argument("--budget", metavar="80GiB", required=True, help="memory of one rank")
    add_arguments(parser, sizes=(2, 128))  # sizes of 1 are not left open
    _add_step(parser)
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


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="memory.toml", help="docs/check.md says what is in it")
    parser.add_argument(
        "--update", action="store_true", help="record what the jobs have now, in memory.lock.json"
    )
    parser.add_argument("--only", metavar="NAME", help="this job alone")
    parser.add_argument("--all", action="store_true", help="the table of jobs that pass, too")
    parser.add_argument("--memory-units", choices=SIZES, help="(MiB)")
    parser.set_defaults(command=check_)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="written by fxshard report --json A")
    parser.add_argument("after", metavar="B", help="likewise")
    add_table(parser)
    parser.add_argument("--all", action="store_true", help="what does not differ, too")
    parser.add_argument("--json", action="store_true", help="every figure that differs")
    parser.set_defaults(command=diff_)


def _add_dump(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--hardware", metavar="NAME", help=f"adds exposed milliseconds: {', '.join(PRESETS)}"
    )
    parser.set_defaults(command=dump_)


def _add_opt(parser: argparse.ArgumentParser) -> None:
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


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    _add_step(parser)
    parser.add_argument("--hardware", required=True, metavar="NAME", help=", ".join(PRESETS))
    parser.add_argument(
        "--ranks-per-node", type=whole_number, metavar="N", help="other than the hardware's"
    )
    parser.add_argument("--perfetto", metavar="FILE", help="a trace for ui.perfetto.dev")
    parser.set_defaults(command=estimate)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    _add_step(parser)
    parser.add_argument("--hardware", required=True, metavar="NAME", help=", ".join(PRESETS))
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


def _add_validate(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--steps", type=whole_number, default=2)
    _add_micro_batches(parser)
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


def _add_step(parser: argparse.ArgumentParser) -> None:
    _add_micro_batches(parser)
    parser.add_argument("--device", metavar="cuda", help="plan for this type of device")


def _add_micro_batches(parser: argparse.ArgumentParser) -> None:
    add_count(parser)
    parser.add_argument(
        "--no-sync", action="store_true", help="all micro-batches but the last reduce nothing"
    )


ARGUMENTS = {
    "report": _add_report,
    "explain": _add_explain,
    "explain-oom": _add_explain_oom,
    "fsdp2": add_fsdp2,
    "dryrun": add_dryrun,
    "fits": _add_fits,
    "solve": _add_solve,
    "check": _add_check,
    "diff": _add_diff,
    "dump": _add_dump,
    "opt": _add_opt,
    "estimate": _add_estimate,
    "tune": _add_tune,
    "validate": _add_validate,
}
