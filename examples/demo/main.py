"""The demo's parent process: plan, start the ranks, prove, sum up."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tabulate import tabulate
from torch.distributed.checkpoint.state_dict_loader import load

import fxshard
from examples.demo import claims
from examples.demo.corpus import Corpus, bits, mean_bits_per_byte, read_corpus
from examples.demo.recipe import Settings, checkpoint_state, train_step
from fxshard import Plan
from fxshard.cli.validate import excerpt
from fxshard.errors import FxshardError
from fxshard.ir import ops
from fxshard.runtime.world.backends import BACKENDS
from fxshard.validation.compare import Validation

# Tables are printed as they are: not wrapped, and brackets are no markup.
console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)


class RanksFailedError(FxshardError):
    """A rank of the demo ended with an error."""


def run(settings: Settings) -> int:
    """The whole demo.

    Returns:
        0, or 1 if one of its claims does not hold.

    Raises:
        RanksFailedError: with torchrun's own report already printed.
    """
    start = time.monotonic()
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").unlink(missing_ok=True)  # a run that fails leaves none
    settings.save(out / "settings.json")
    corpus = read(settings)
    plan = make_plan(settings, corpus, out)
    ranks = train_on_ranks(settings)
    eager = train_eager(settings, corpus)
    show_losses(ranks["losses"], ranks["fsdp2_losses"], eager)
    validation = track(settings, corpus, out)
    reloaded = reload(settings, corpus, out)
    summary = {
        "world_size": settings.ranks,
        "parameters": parameters(plan),
        "steps": settings.steps,
        "compared": min(settings.compared, settings.steps),
        "target": settings.target,
        **memory_figures(plan, validation),
        "val_bits_per_byte_first": ranks["val_bits_per_byte_first"],
        "val_bits_per_byte_last": ranks["val_bits_per_byte_last"],
        "val_bits_per_byte_reloaded": reloaded,
        "fsdp2_max_abs_difference": ranks["fsdp2_max_abs_difference"],
        "eager_max_relative_difference": max(map(relative, ranks["losses"], eager)),
        **collective_figures(plan, ranks["collectives_per_step"]),
        "certificate": plan.certificate,
        "ranks_certificate": ranks["certificate"],
        "torch_version": torch.__version__,
        "seconds": round(time.monotonic() - start, 1),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
    return conclude(summary, out)


# -- the six things it does ---------------------------------------------------------------------


def read(settings: Settings) -> Corpus:
    """1. The text."""
    title("1. Model and text")
    with progress("reading the Python standard library"):
        corpus = read_corpus()
    console.print(
        f"Byte-level Llama, {settings.layers} layers of width {settings.hidden}. Train: "
        f"{len(corpus.train):,} bytes of {corpus.train_files:,} source files; validation: "
        f"{len(corpus.validation):,} bytes of {corpus.validation_files:,} others."
    )
    return corpus


def make_plan(settings: Settings, corpus: Corpus, out: Path) -> Plan:
    """2. The plan, on paper and on disk."""
    title(f"2. Plan for {settings.ranks} ranks: nothing runs yet")
    passes = out / "passes"
    passes.mkdir(exist_ok=True)
    positions = itertools.count()
    with progress("tracing and rewriting") as advance:

        def write(name: str, before: str, after: str) -> None:
            stem = f"{next(positions):02d}_{name}"
            (passes / f"{stem}.before.txt").write_text(before + "\n", "utf-8")
            (passes / f"{stem}.after.txt").write_text(after + "\n", "utf-8")
            advance(name)

        plan = fxshard.plan(
            settings.build_model(),
            kwargs=corpus.training_batch(settings, rank=0, step=0),
            world_size=settings.ranks,
            optimizer=settings.optimizer,
            observe=write,
            progress=False,
        )
        memory = plan.memory
        peak = memory.explain_peak(3)
    (out / "schedule.txt").write_text(plan.dump() + "\n", "utf-8")
    (out / "code.py").write_text(plan.code, "utf-8")
    (out / "memory.txt").write_text(memory.table(fold=False) + "\n", "utf-8")
    units = [(u.name, u.kind, sum(map(numel, u.params))) for u in plan.units]
    console.print(tabulate(units, ("unit", "class", "parameters"), "simple", intfmt=","))
    console.print(f"\n{plan.dump()}\n\n{memory.table(depth=1)}\n\n{peak}")
    console.print(f"Every pass is in {passes}/, every module in {out / 'memory.txt'}.")
    return plan


def train_on_ranks(settings: Settings) -> dict[str, Any]:
    """3. Training under torchrun; what rank 0 found.

    Raises:
        RanksFailedError: a rank failed; all that the ranks wrote is printed first.
    """
    title(f"3. Train: {settings.ranks} ranks, {settings.steps} steps of AdamW")
    output: collections.deque[str] = collections.deque(maxlen=400)
    with start_ranks(settings) as torchrun, progress("training", settings.steps) as advance:
        assert torchrun.stdout is not None
        for line in torchrun.stdout:
            if line.startswith("{"):
                advance(f"loss {bits(json.loads(line)['loss']):.3f} bits per byte")
            else:
                output.append(line)
        if torchrun.wait():
            console.print("".join(output))
            raise RanksFailedError(
                f"training failed: torchrun ended with {torchrun.returncode}. Its report above "
                f"names the rank that failed first, and why."
            )
    found: dict[str, Any] = json.loads(Path(settings.out, "ranks.json").read_text("utf-8"))
    console.print(
        f"Validation loss: {found['val_bits_per_byte_first']:.3f} bits per byte at the start, "
        f"{found['val_bits_per_byte_last']:.7f} at the end."
    )
    return found


def start_ranks(settings: Settings) -> subprocess.Popen[str]:
    """Start torchrun with one process per rank; all that they say is one stream."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # the host's name may not resolve
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "127.0.0.1", "--nproc-per-node", str(settings.ranks)),
            *("-m", "examples.demo.rank", str(Path(settings.out, "settings.json"))),
        ],
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def train_eager(settings: Settings, corpus: Corpus) -> list[float]:
    """The first losses of the same training in this process, without fxshard."""
    model = settings.build_model()
    optimizer = settings.optimizer(model.parameters())
    losses = []
    steps = min(settings.compared, settings.steps)
    with progress("the same in one plain process", steps) as advance:
        for step in range(steps):
            batches = [corpus.training_batch(settings, r, step) for r in range(settings.ranks)]
            losses.append(train_step(model, optimizer, batches).item())
            advance()
    return losses


def track(settings: Settings, corpus: Corpus, out: Path) -> Validation:
    """4. The same program under the tracker."""
    title("4. Every byte, measured")
    with progress("running rank 0 under the tracker"):
        validation = fxshard.validate(
            settings.build_model(),
            kwargs=corpus.training_batch(settings, rank=0, step=0),
            world_size=settings.ranks,
            optimizer=settings.optimizer,
            progress=False,
        )
        (out / "validation.txt").write_text(validation.table() + "\n", "utf-8")
    console.print(f"{excerpt(validation).table()}\n\n{validation.summary()}")
    console.print(f"Every module, state and category is in {out / 'validation.txt'}.")
    return validation


def reload(settings: Settings, corpus: Corpus, out: Path) -> float:
    """5. The checkpoint, in one process and an unsharded model; its validation loss."""
    title("5. Load the checkpoint in one process")
    model = settings.build_model()
    state = checkpoint_state(model, settings.optimizer(model.parameters()))
    with progress("loading and evaluating"):
        with warnings.catch_warnings(action="ignore"):  # that one process loads what two saved
            load(state, checkpoint_id=out / "checkpoint")
        model.load_state_dict(state["model"])
        loss = mean_bits_per_byte(model, corpus.validation_batches(settings))
    console.print(f"Validation loss {loss:.7f} bits per byte.")
    return loss


def conclude(summary: dict[str, Any], out: Path) -> int:
    """6. What was claimed, and whether it holds."""
    title("6. Does it hold?")
    checked = claims.check(summary)
    for sentence, holds in checked:
        console.print(f"{'yes' if holds else 'NO ':3}  {sentence}", style=None if holds else "red")
    broken = [sentence for sentence, holds in checked if not holds]
    console.print(f"\n{summary['seconds']:.0f} s; all results are in {out}/.")
    if broken:
        print("fxshard: does not hold: " + "; ".join(broken) + ".", file=sys.stderr)
    return 1 if broken else 0


# -- figures ------------------------------------------------------------------------------------


def parameters(plan: Plan) -> int:
    """Number of parameters, of all ranks together."""
    return sum(numel(param) for unit in plan.units for param in unit.params)


def numel(param: Any) -> int:
    return torch.Size(param.shape).numel()


def memory_figures(plan: Plan, validation: Validation) -> dict[str, int]:
    """Peaks in the steady state (the last step), and the largest difference, in bytes."""
    measured: collections.Counter[tuple[str, str]] = collections.Counter()
    last = max(cell.step for cell in validation.cells)
    for cell in validation.cells:
        if cell.step == last:
            measured[cell.module, cell.state] += cell.measured
    return {
        "static_peak_bytes": plan.memory.peak_bytes,
        "measured_peak_bytes": max(measured.values()),
        "max_abs_difference_bytes": validation.max_abs_difference,
    }


def collective_figures(plan: Plan, seen: dict[str, int]) -> dict[str, int]:
    """Collectives in one step: the calls that the process group received, and those planned."""
    planned: collections.Counter[Any] = collections.Counter()
    for node in plan.program.graph.nodes:
        if ops.of(node).collective:
            planned[node.target] += BACKENDS["gloo"].calls(node)
    return {
        "all_gathers_per_step": sum(n for name, n in seen.items() if "allgather" in name),
        "reduce_scatters_per_step": sum(n for name, n in seen.items() if "reduce_scatter" in name),
        "collectives_per_step": sum(seen.values()),
        "all_gathers_planned": planned[ops.all_gather],
        "reduce_scatters_planned": planned[ops.reduce_scatter],
    }


def relative(a: float, b: float) -> float:
    """Relative difference of two losses."""
    return abs(a - b) / abs(b)


# -- what is shown ------------------------------------------------------------------------------


def show_losses(ours: list[float], fsdp2: list[float], eager: list[float]) -> None:
    """The steps that were compared."""
    rows = [
        (step, *figures, relative(figures[0], figures[2]))
        for step, figures in enumerate(zip(ours, fsdp2, eager, strict=False))
    ]
    headers = ("step", "fxshard", "FSDP2", "one plain process", "relative difference")
    formats = ("", ".9f", ".9f", ".9f", ".1e")
    console.print("Training losses of the first steps, in nats per byte:")
    console.print(tabulate(rows, headers, "simple", floatfmt=formats))


def title(text: str) -> None:
    console.print(f"\n{text}", style="bold")


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A progress bar while the block runs; the yielded call advances it, with a note."""
    counter = (MofNCompleteColumn(),) if total else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *counter, TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(what, total=total)

        def advance(note: str = "") -> None:
            bars.update(task, advance=1, description=f"{what}: {note}" if note else what)

        yield advance
        bars.update(task, total=total or 1, completed=total or 1)
