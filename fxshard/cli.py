"""The command line: ``fxshard report | dump | validate | train``.

Exit codes: 0; 1, something does not hold (it does not fit, a difference is not 0); 2, usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard import Plan, dump
from fxshard.config import STRATEGIES
from fxshard.demo.recipe import Settings
from fxshard.errors import CaptureError, ConfigError, FxshardError, UnitError
from fxshard.memory.compare import Validation
from fxshard.memory.report import UNITS, parse_bytes

OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3),
    "none": None,
}

# What transformers' LlamaConfig takes, for --hf-config by name.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny-llama": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "llama3-70b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
}

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # a model, and the call of it to trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except (ConfigError, UnitError, CaptureError) as error:
        print("fxshard:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except FxshardError as error:
        print("fxshard:", error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # `fxshard dump | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def report(args: argparse.Namespace) -> int:
    """``fxshard report``."""
    budget = None if args.budget is None else parse_bytes(args.budget)
    memory = _plan(args).memory
    if args.json:
        print(json.dumps(memory.to_dict(), indent=2))
    else:
        print(memory.explain_peak(5), memory.table(args.depth, args.memory_units), sep="\n\n")
    if budget is not None:
        memory.assert_fits(budget)
    return 0


def dump_(args: argparse.Namespace) -> int:
    """``fxshard dump``."""
    plan = _plan(args)
    if args.graph:
        print(dump.text(plan.program))
    elif args.code:
        print(plan.code)
    elif args.json:
        print(json.dumps(_schedule(plan, args.phase, args.fold), indent=2))
    else:
        print(plan.dump(phase=args.phase, fold=args.fold))
    return 0


def validate(args: argparse.Namespace) -> int:
    """``fxshard validate``."""
    model, inputs, keywords = _load(args, "cpu")
    result = fxshard.validate(
        model,
        inputs,
        keywords,
        world_size=args.world_size,
        steps=args.steps,
        micro_batches=args.micro_batches,
        no_sync=args.no_sync,
        **_options(args),
    )
    if args.json:
        print(json.dumps(_comparison(result), indent=2))
    else:
        print((result if args.all else excerpt(result)).table(), result.summary(), sep="\n\n")
    return 1 if result.max_abs_difference else 0


def train(args: argparse.Namespace) -> int:
    """``fxshard train``."""
    from fxshard.demo.main import run  # rich is not needed by the other commands

    return run(Settings(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Settings)}))


def excerpt(result: Validation) -> Validation:
    """What a reader sees first: the peaks in the last step, of the root, of the first block of
    layers and of the optimizer. And every cell that differs.
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


def _schedule(plan: Plan, phase: str | None, fold: bool) -> dict[str, Any]:
    rows = [row for row in dump.rows(plan.program) if phase in (None, row.phase)]
    blocks = dump.fold(rows) if fold else [(1, rows)]
    return {
        "schema": "fxshard.schedule/1",
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
    return {
        "schema": "fxshard.validation/1",
        "max_abs_difference": result.max_abs_difference,
        "static_peak_bytes": result.static_peak_bytes,
        "measured_peak_bytes": result.measured_peak_bytes,
        "points": [
            {"step": step, "phase": phase, "max_abs_difference": difference}
            for step, phase, difference in result.points
        ],
        "cells": [
            {**dataclasses.asdict(cell), "category": cell.category.value} for cell in result.cells
        ],
    }


def _plan(args: argparse.Namespace) -> Plan:
    model, inputs, keywords = _load(args, "meta")
    return fxshard.plan(model, inputs, keywords, world_size=args.world_size, **_options(args))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    known = OPTIMIZERS.get(args.optimizer)
    if args.optimizer not in OPTIMIZERS:
        known = _imported(args.optimizer, "--optimizer")
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "units": args.units,
        "optimizer": known,
        "strategy": args.strategy,
        "reshard_after_forward": args.reshard_after_forward,
        "mixed_precision": bf16 if args.bf16 else None,
        "offload": CPUOffloadPolicy() if args.offload else None,
    }


# -- the model ----------------------------------------------------------------------------------


def _load(args: argparse.Namespace, device: str) -> Call:
    """The model of --model or --hf-config; `device` is where the latter is built."""
    torch.manual_seed(0)
    if args.hf_config is not None:
        model = _from_config(args.hf_config, device)
        if args.gradient_checkpointing:
            name = "activation_checkpointing_enable"  # transformers before 5.x calls it otherwise
            getattr(model.train(), name, model.gradient_checkpointing_enable)()
        return _with_tokens(model, args.batch, args.seq)
    made = _imported(args.model, "--model")()
    if isinstance(made, nn.Module):
        return _with_tokens(made, args.batch, args.seq)
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        return made
    raise ConfigError(
        f"--model {args.model} returned {type(made).__name__}: expected an nn.Module, or a tuple "
        f"(module, args, kwargs)."
    )


def _with_tokens(model: nn.Module, batch: int, seq: int) -> Call:
    """A call with token ids, int64 [batch, seq]; a transformers model gets them as labels too."""
    device = next((p.device for p in model.parameters()), None)
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device=device)
    if type(model).__module__.startswith("transformers."):
        return model, (), {"input_ids": tokens, "labels": tokens.clone()}
    return model, (tokens,), {}


def _from_config(source: str, device: str) -> Any:
    values = PRESETS[source] if source in PRESETS else _read_config(source)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import: a config needs no network
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("--hf-config needs transformers: pip install 'fxshard[hf]'.") from error
    try:
        config = AutoConfig.for_model(**values)
        config.use_cache = False  # a cache is an output that training does not need
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config)
    except (TypeError, ValueError) as error:
        reason = re.split(r"\.\s", str(error))[0]  # behind it: a list of all that there is
        raise ConfigError(f"--hf-config {source}: no causal language model: {reason}.") from error


def _read_config(source: str) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(source).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--hf-config {source}: neither a preset ({', '.join(PRESETS)}) nor a config.json "
            f"that can be read: {error}"
        ) from error


def _imported(spec: str, option: str) -> Any:
    """The callable that ``pkg.mod:fn`` names; modules in the working directory are found too."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{option} {spec}: expected pkg.mod:fn, the name of a callable.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} {spec}: {error}.") from error
    if not callable(found):
        raise ConfigError(f"{option} {spec}: {type(found).__name__} is not callable.")
    return found


# -- the arguments ------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fxshard", description=fxshard.__doc__, epilog=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_report(commands)
    _add_dump(commands)
    _add_validate(commands)
    _add_train(commands)
    return parser


def _add_report(commands: Any) -> None:
    parser = commands.add_parser("report", help="memory of one rank, from the program alone")
    _add_model(parser)
    parser.add_argument("--depth", type=_count, help="modules with at most this many names")
    parser.add_argument("--memory-units", choices=UNITS, default="MiB")
    parser.add_argument("--budget", metavar="80GiB", help="exit with 1 if the peak is above it")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=report)


def _add_dump(commands: Any) -> None:
    parser = commands.add_parser("dump", help="the schedule, the graph or the code")
    _add_model(parser)
    parser.add_argument("--phase", choices=("forward", "backward"))
    parser.add_argument(
        "--no-fold", dest="fold", action="store_false", help="identical layers one by one"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--graph", action="store_true", help="the joint graph, every operator")
    form.add_argument("--code", action="store_true", help="the Python source that runs")
    form.add_argument("--json", action="store_true")
    parser.set_defaults(command=dump_)


def _add_validate(commands: Any) -> None:
    parser = commands.add_parser(
        "validate", help="run one rank under a tracker and compare it with the report"
    )
    _add_model(parser)
    parser.add_argument("--steps", type=_count, default=2)
    parser.add_argument("--micro-batches", type=_count, default=1, metavar="K", help="per step (1)")
    parser.add_argument(
        "--no-sync", action="store_true", help="all micro-batches but the last reduce nothing"
    )
    parser.add_argument("--all", action="store_true", help="every module, state and category")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=validate)


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="the demo: plan, train on several ranks, prove every claim",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Settings):
        parser.add_argument(
            f"--{field.name}",
            type=type(field.default),
            default=field.default,
            help=field.metadata["help"],
        )
    parser.set_defaults(command=train)


def _add_model(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", metavar="pkg.mod:fn", help="fn() returns a module, or (module, args, kwargs)"
    )
    source.add_argument(
        "--hf-config",
        metavar="FILE",
        help=f"config.json of a transformers causal language model, or {', '.join(PRESETS)}",
    )
    parser.add_argument("--batch", type=_count, default=1, help="sequences per rank (1)")
    parser.add_argument("--seq", type=_count, default=128, help="tokens per sequence (128)")
    parser.add_argument(
        "--world-size", type=_ranks, default=8, metavar="N", help="ranks (8); hybrid: 2x8"
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="full_shard")
    parser.add_argument(
        "--reshard-after-forward", type=_reshard, metavar="yes|no|N", help="N: over N neighbours"
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 parameters, fp32 reduction")
    parser.add_argument("--offload", action="store_true", help="shards live on the CPU")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="of the transformers model"
    )
    parser.add_argument(
        "--units", action="append", metavar="GLOB", help="FQNs of units; may be repeated"
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)} or pkg.mod:fn (adamw); fn(params) returns an optimizer",
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _ranks(text: str) -> int | tuple[int, int]:
    replicas, by, shards = text.partition("x")
    return (_count(replicas), _count(shards)) if by else _count(text)


def _reshard(text: str) -> bool | int:
    return {"yes": True, "no": False}[text] if text in ("yes", "no") else _count(text)


_ranks.__name__ = "number of ranks"
_reshard.__name__ = "yes, no or whole number"
_count.__name__ = "whole number"  # argparse puts it into "invalid ... value"
