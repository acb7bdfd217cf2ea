"""``fxshard check memory.toml``: jobs beside their budgets, and the bytes that were recorded.

The jobs are in a TOML file that people write, and that is never written to. The recorded bytes are
beside it, in ``memory.lock.json``: figures of the peak by category, and of the peaks of modules.
Modules that differ in a number only are one (``layers.*``), with the figures of the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.bytesize import SIZES, parse_budget, parse_bytes, size_text
from fxshard.cli.model_source import OPTIMIZERS, ModelSource, imported, load
from fxshard.config.checked import Config
from fxshard.errors import ConfigError, FxshardError, UnitError
from fxshard.host import files
from fxshard.host.progress import task
from fxshard.memory.category import State
from fxshard.memory.report import MemoryReport
from fxshard.memory.views import serialize
from fxshard.memory.views.diff import Diff, diff
from fxshard.memory.views.tables import pattern

SCHEMA = "fxshard.check/1"
DEPTH = 2  # names of a module, without numbers, that are recorded
# What must not grow: its key in a record, and its name.
GATES = {
    "peak_bytes": "peak",
    "first_step_peak_bytes": "peak of the first step",
    "host_peak_bytes": "peak on the CPU",
    "reserved_bytes": "reserved by CUDA's allocator",
}
_PEAKS = (State.PEAK_FORWARD, State.PEAK_BACKWARD)

_KINDS: dict[str, tuple[Any, str]] = {  # of a job: key -> what its value is
    "name": (str, "a text"),
    "model": (str, "pkg.mod:fn"),
    "hf_config": (str, "a config.json or the name of a preset"),
    "batch": (int, "a whole number"),
    "seq": (int, "a whole number"),
    "gradient_checkpointing": (bool, "true or false"),
    "world_size": ((int, list), "a number of ranks, or [replicas, shards]"),
    "micro_batches": (int, "a whole number"),
    "no_sync": (bool, "true or false"),
    "device": (str, '"cuda"'),
    "budget": ((int, str), 'a size, such as "80GiB"'),
    "tolerance": ((int, str), 'a share or a size, such as "1%" or "10MiB"'),
    "options": (dict, "a table of the options of fxshard.plan"),
}
_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclasses.dataclass(frozen=True)
class Job:
    """One model with its settings.

    Attributes:
        name: of it, in the file and in the record.
        source: its model and batch.
        step: arguments and options of `fxshard.plan`.
        budget: bytes of one rank, or None.
        share, spare: how much more than recorded is allowed: a share of it, and bytes.
    """

    name: str
    source: ModelSource
    step: dict[str, Any]
    budget: int | None
    share: float
    spare: int

    def allows(self, recorded: int) -> int:
        """The most that is no failure."""
        return recorded + max(int(recorded * self.share), self.spare)


@dataclasses.dataclass(frozen=True)
class Checked:
    """What became of a job.

    Attributes:
        name: of the job.
        record: its figures now; None if it could not be planned.
        failures: why it fails; empty if it does not.
        notes: what else there is to say.
        changes: the recorded figures beside those of now; None without a record.
    """

    name: str
    record: dict[str, Any] | None
    failures: tuple[str, ...]
    notes: tuple[str, ...] = ()
    changes: Diff | None = None

    def lines(self, show_all: bool, units: str) -> Iterator[str]:
        """For the terminal."""
        size = "" if self.record is None else f": {size_text(self.record['peak_bytes'])}"
        yield f"{'FAIL' if self.failures else 'ok':<5} {self.name}{size}"
        yield from (f"      {said}" for said in (*self.failures, *self.notes))
        different = self.changes is not None and self.changes.only_different().rows
        if self.changes is not None and different and (self.failures or show_all):
            yield ""
            table = self.changes.table(units=units)
            yield from (f"      {line}".rstrip() for line in table.splitlines())
            yield ""


def check(
    path: str, *, only: str | None, update: bool, say: Callable[[str], None]
) -> list[Checked]:
    """Plan the jobs of a file, and compare them with their budgets and their records.

    Args:
        path: the TOML file.
        only: the name of one job; None: all.
        update: record what they have now.
        say: told what is going on.

    Raises:
        ConfigError: the file, or the record beside it, is not as it has to be.
    """
    jobs = [job for job in read(path) if only in (None, job.name)]
    if not jobs:
        raise ConfigError(f"{path} has no job{'' if only is None else f' named {only!r}'}.")
    beside = Path(path).with_suffix(".lock.json")
    recorded = {} if update and only is None else _recorded(beside)
    checked = []
    for job in jobs:
        say(job.name)
        found = None if update else recorded.get("jobs", {}).get(job.name)
        checked.append(_checked(job, found, update, recorded.get("torch"), beside))
    if update:
        names = [job.name for job in read(path)]
        now = recorded.get("jobs", {}) | {c.name: c.record for c in checked if c.record}
        kept = {name: now[name] for name in names if name in now}
        told = {"schema": SCHEMA, "torch": _torch(), "jobs": kept}
        try:
            files.write(beside, json.dumps(told, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {beside}: {error.strerror}.") from error
    return checked


def run(args: argparse.Namespace) -> int:
    """``fxshard check``."""
    with task("planning") as say:
        checked = check(args.file, only=args.only, update=args.update, say=say)
    for each in checked:
        print(*each.lines(args.all, args.memory_units or "MiB"), sep="\n")
    failed = sum(bool(each.failures) for each in checked)
    jobs = "1 job" if len(checked) == 1 else f"{len(checked)} jobs"
    print(f"{jobs}, {failed} failed" + ("; recorded" if args.update else ""))
    return 1 if failed else 0


def add_check(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``fxshard check``."""
    parser.add_argument("file", metavar="memory.toml", help="docs/check.md says what is in it")
    parser.add_argument(
        "--update", action="store_true", help="record what the jobs have now, in memory.lock.json"
    )
    parser.add_argument("--only", metavar="NAME", help="this job alone")
    parser.add_argument("--all", action="store_true", help="the table of jobs that pass, too")
    parser.add_argument("--memory-units", choices=SIZES, help="(MiB)")
    parser.set_defaults(command=run)


def _checked(
    job: Job, recorded: Any, update: bool, torch_then: str | None, beside: Path
) -> Checked:
    try:
        plan = fxshard.plan(*load(job.source, "meta"), **job.step)
        memory = plan.memory
        record = _record(memory)
    except (ConfigError, UnitError) as error:
        raise ConfigError(f"job {job.name!r}: {error}") from error
    except FxshardError as error:
        return Checked(job.name, None, (f"it cannot be planned: {error}",))
    failures, notes, changes = [], [], None
    if job.budget is not None:
        try:
            memory.assert_fits(job.budget)
        except FxshardError as error:
            failures.append(f"budget: {str(error).splitlines()[0]}")
    if update:
        pass
    elif recorded is None:
        failures.append(f"{beside.name} has no record of it: run fxshard check with --update")
    else:
        changes = diff(_report(recorded, beside), _report(record, beside))
        for key, name in GATES.items():
            before, now = recorded.get(key) or 0, record.get(key) or 0
            if now > job.allows(before):
                more = size_text(now - before)
                allowed = size_text(job.allows(before) - before)
                failures.append(f"{name}: {more} more than recorded, {allowed} allowed")
            elif now < 2 * before - job.allows(before):
                notes.append(f"{name}: {size_text(before - now)} less: --update records it")
        if torch_then not in (None, _torch()):
            notes.append(f"recorded with torch {torch_then}; this is {_torch()}")
    return Checked(job.name, record, tuple(failures), tuple(notes), changes)


def _torch() -> str:
    return ".".join(torch.__version__.split(".")[:2])


# -- the record ------------------------------------------------------------------------------------


def _record(memory: MemoryReport) -> dict[str, Any]:
    """The figures of a job."""
    found: dict[str, Any] = {
        "peak_bytes": memory.peak_bytes,
        "first_step_peak_bytes": memory.first_step_peak_bytes,
        "host_peak_bytes": memory.host_peak_bytes,
    }
    if memory.device == "cuda":
        found["reserved_bytes"] = memory.device_memory().reserved
    found["peak_by_category"] = {c.value: n for c, n in memory.peak_by_category.items() if n}
    modules: dict[str, dict[str, dict[str, int]]] = {}
    for where, row in memory.rows().items():
        name = pattern(where.module)
        names = [part for part in name.split(".") if part != "*"]
        if where.state not in _PEAKS or len(names) > DEPTH:
            continue
        sizes = {c.value: n for c, n in row.items() if n}
        states = modules.setdefault(name, {})
        if sum(sizes.values()) > sum(states.get(where.state.value, {}).values()):
            states[where.state.value] = sizes
    return found | {"modules": modules}


def _recorded(beside: Path) -> dict[str, Any]:
    if not beside.exists():
        return {}
    try:
        told = json.loads(beside.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{beside}: it cannot be read: {error}.") from error
    if (
        not isinstance(told, dict)
        or told.get("schema") != SCHEMA
        or not isinstance(told.get("jobs"), dict)
    ):
        raise ConfigError(
            f"{beside} is no record of this version of fxshard check; --update writes it again."
        )
    return told


def _report(record: Any, beside: Path) -> dict[str, Any]:
    """A record in the form of `MemoryReport.to_dict`, as far as `diff` reads it."""
    try:
        rows = [
            {
                **{"module": module, "state": state, "call": 0, "micro_batch": 0},
                **{"bytes": sum(sizes.values()), "by_category": sizes},
            }
            for module, states in record["modules"].items()
            for state, sizes in states.items()
        ]
        figures = {key: record[key] for key in (*GATES, "peak_by_category") if key in record}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{beside} was altered; --update writes it again.") from error
    steps = {"first_step": {"phases": [], "rows": []}, "steady_step": {"phases": [], "rows": rows}}
    return {"schema": serialize.SCHEMA, **figures, **steps}


# -- the jobs --------------------------------------------------------------------------------------


def read(path: str) -> list[Job]:
    """The jobs of a file.

    Raises:
        ConfigError: it cannot be read, or a key or value is not legal; names it and what is.
    """
    try:
        told = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}.") from error
    _check_keys(told, ("defaults", "job"), path)
    defaults, jobs = told.get("defaults", {}), told.get("job", [])
    if not isinstance(defaults, dict) or not isinstance(jobs, list):
        raise ConfigError(f"{path}: write [defaults] once, and [[job]] for each job.")
    _check_values(defaults, f"{path}, defaults")
    found: dict[str, Job] = {}
    for number, job in enumerate(jobs, 1):
        where = f"{path}, job {number}"
        if not isinstance(job, dict) or not isinstance(job.get("name"), str):
            raise ConfigError(f"{where}: it has no name.")
        where = f"{path}, job {job['name']!r}"
        _check_values(job, where)
        if job["name"] in found:
            raise ConfigError(f"{where}: there are two of this name.")
        options = {**defaults.get("options", {}), **job.get("options", {})}
        found[job["name"]] = _job({**defaults, **job, "options": options}, where)
    return list(found.values())


def _check_values(told: dict[str, Any], where: str) -> None:
    _check_keys(told, _KINDS, where)
    for key, value in told.items():
        kind, what = _KINDS[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{where}: {key}={value!r}: expected {what}.")


def _check_keys(told: Mapping[str, Any], legal: Any, where: str) -> None:
    for key in told:
        if key not in legal:
            near = difflib.get_close_matches(key, list(legal), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"{where}: unknown key {key!r}{hint}; legal: {', '.join(legal)}.")


def _job(told: dict[str, Any], where: str) -> Job:
    if ("model" in told) == ("hf_config" in told):
        raise ConfigError(f"{where}: give either model or hf_config.")
    for key in ("batch", "seq", "micro_batches"):
        if told.get(key, 1) < 1:
            raise ConfigError(
                f"{where}: {key}={told[key]!r}: expected a whole number of at least 1."
            )
    source = ModelSource(
        model=told.get("model"),
        hf_config=told.get("hf_config"),
        batch=told.get("batch"),
        seq=told.get("seq"),
        gradient_checkpointing=told.get("gradient_checkpointing", False),
        chunk_loss=bool(told["options"].get("chunk_loss")),
    )
    world = told.get("world_size", 8)
    step: dict[str, Any] = {"world_size": tuple(world) if isinstance(world, list) else world}
    step |= {key: told[key] for key in ("micro_batches", "no_sync", "device") if key in told}
    try:
        options = {name: _option(name, value) for name, value in told["options"].items()}
        if "optimizer" not in options:
            options["optimizer"] = OPTIMIZERS["adamw"]
        Config.from_options(options)
        budget = parse_budget(told["budget"]) if "budget" in told else None
        share, spare = _tolerance(told.get("tolerance", 0))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if "device" in told and "device" in options:
        raise ConfigError(f"{where}: device is given twice.")
    return Job(told["name"], source, step | options, budget, share, spare)


def _option(name: str, value: Any) -> Any:
    """The value of an option, as TOML can have it."""
    if name == "optimizer" and isinstance(value, str):
        return OPTIMIZERS[value] if value in OPTIMIZERS else imported(value, "optimizer")
    if name == "offload" and isinstance(value, bool):
        return CPUOffloadPolicy() if value else None
    if name == "mixed_precision" and value == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if name == "mixed_precision" and isinstance(value, dict):
        _check_keys(value, (*_DTYPES, "cast_forward_inputs"), name)
        policy: dict[str, Any] = {
            key: _dtype(each) if key in _DTYPES else each for key, each in value.items()
        }
        return MixedPrecisionPolicy(**policy)
    if name in ("param_init_fn", "passes") and isinstance(value, str):
        return imported(value, name)
    return value


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name!r} is no dtype of torch, such as 'bfloat16'.")
    return found


def _tolerance(value: int | str) -> tuple[float, int]:
    """A share, and bytes."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            share = float(value.strip()[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise ConfigError(f"tolerance={value!r}: expected 0% to 100%, such as '1%'.")
        return share, 0
    spare = parse_bytes(value)
    if spare < 0:
        raise ConfigError(f"tolerance={value!r} is below 0.")
    return 0.0, spare
