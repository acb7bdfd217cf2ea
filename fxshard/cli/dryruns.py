"""``fxshard fsdp2`` and ``fxshard dryrun``: memory of torch's own code, run without data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import fxshard
from fxshard.bytesize import parse_budget, size_text
from fxshard.cli.model_source import (
    ModelSource,
    add_arguments,
    load,
    options,
    refuse_beside,
    whole_number,
)
from fxshard.cli.outputs import add_count, add_files, add_table, write_all
from fxshard.dryrun.gpus import DEFAULT, GPUS
from fxshard.dryrun.peaks import peaks_table
from fxshard.dryrun.run import DryRun
from fxshard.dryrun.script import run_script
from fxshard.errors import ConfigError
from fxshard.host.progress import task
from fxshard.memory.report import MemoryReport


def fsdp2(args: argparse.Namespace) -> int:
    """``fxshard fsdp2``."""
    known = options(args)
    names = ("units", "mixed_precision", "reshard_after_forward", "checkpoint", "optimizer")
    why = "torch's FSDP2 has no such option"
    others = sorted(known.keys() - {*names, "offload", "backend"})
    refuse_beside(args, "fsdp2", why, *(f"--{name.replace('_', '-')}" for name in others))
    if args.backend != "eager":
        raise ConfigError("--backend with fsdp2: use --compile, torch.compile of each unit.")
    if not isinstance(args.world_size, int):
        raise ConfigError("--world-size: fsdp2 shards over all ranks; give their number.")
    model, inputs, kwargs = load(ModelSource.of(args), "meta")
    with task("running dry"):
        found = fxshard.fsdp2_memory(
            *(model, inputs, kwargs),
            world_size=args.world_size,
            device=args.device,
            micro_batches=args.micro_batches,
            offload=args.offload,
            compile=args.compile,
            compare=args.compare,
            **{name: known[name] for name in names if name in known},
        )
    print(found.table(), str(found.memory.explain_peak(args.top)), sep="\n\n")
    return _fits(found.memory, args.budget)


def dryrun(args: argparse.Namespace) -> int:
    """``fxshard dryrun``."""
    if args.json == "-":
        raise ConfigError("--json: name a file; on the terminal is what the script prints.")
    run = run_as_told(args)
    memory = run.memory
    steps = "1 step" if run.steps == 1 else f"{run.steps} steps"
    print(f"\n{args.script}: {steps} on rank {args.rank} of {args.world_size}, {args.gpu}\n")
    table = memory.table(args.depth, args.memory_units or "MiB")
    peak = str(memory.explain_peak(args.top, what_ifs=False))
    print(
        peaks_table({f"rank {args.rank}": memory}),
        peak,
        table,
        *write_all(memory, args),
        sep="\n\n",
    )
    return _fits(memory, args.budget)


def run_as_told(args: argparse.Namespace) -> DryRun:
    """The dry run of a script that the arguments of `add_run` describe."""
    return run_script(
        *(args.script, args.arguments),
        module=args.module,
        world_size=args.world_size,
        device=args.gpu,
        rank=args.rank,
        steps=args.steps,
    )


def _fits(memory: MemoryReport, budget: str | None) -> int:
    """Say that memory is within a budget.

    Raises:
        DoesNotFitError: it is not.
    """
    if budget is not None:
        memory.assert_fits(budget)
        print(f"\nfits {size_text(parse_budget(budget))}")
    return 0


def add_fsdp2(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard fsdp2``."""
    add_arguments(parser)
    add_count(parser)
    parser.add_argument("--device", default=DEFAULT, help=f"{', '.join(GPUS)} ({DEFAULT})")
    parser.add_argument("--compile", action="store_true", help="torch.compile of each unit")
    parser.add_argument("--compare", action="store_true", help="fxshard's own plan beside it")
    _add_peak(parser)
    parser.set_defaults(command=fsdp2)


def behind_dashes(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments of a command that runs a script, and those of the script, after "--"."""
    if argv[0] not in ("dryrun", "explain-oom") or "--" not in argv:
        return argv, ()
    at = list(argv).index("--")
    return argv[:at], argv[at + 1 :]


def add_dryrun(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard dryrun``."""
    parser.usage = "fxshard dryrun [options] SCRIPT [-- ARGS]"
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that trains")
    add_run(parser, "--device")
    _add_peak(parser)
    add_table(parser)
    add_files(parser)
    parser.set_defaults(command=dryrun)


def add_run(parser: argparse.ArgumentParser, *names: str) -> None:
    """How a script is run dry; `names`: of ``--gpu``, besides."""
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("--world-size", type=whole_number, default=8, metavar="N", help="ranks (8)")
    parser.add_argument("--rank", type=int, default=0, help="which of them runs (0)")
    known = f"{', '.join(GPUS)} ({DEFAULT}) or cpu"
    parser.add_argument(*names, "--gpu", dest="gpu", default=DEFAULT, help=known)
    parser.add_argument("--steps", type=whole_number, default=2, help="of an optimizer (2)")


def _add_peak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--top", type=whole_number, default=5, help="of the tensors at the peak (5)"
    )
    parser.add_argument(
        "--budget", metavar="79GiB", help="of the GPU: exit with 1 if it does not fit"
    )
