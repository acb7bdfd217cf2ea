"""The step that commands plan, and its arguments."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import fxshard
from fxshard.cli.model_source import Call, ModelSource, load, options
from fxshard.cli.on_meshes import add_mesh, mesh_of
from fxshard.cli.outputs import add_count
from fxshard.plans.plan import Plan


def planned(args: argparse.Namespace, **others: Any) -> Plan:
    """The plan of the model and the options that the command line gives; `others` besides."""
    return planned_call(load(ModelSource.of(args), "meta"), args, **others)


def planned_call(call: Call, args: argparse.Namespace, **others: Any) -> Plan:
    """As `planned`, of a model and a call of it."""
    model, inputs, kwargs = call
    plan = fxshard.plan(model, inputs, kwargs, **others, **step_of(args))
    if plan.chosen is not None:
        print("fxshard:", plan.chosen, file=sys.stderr)
    return plan


def step_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments and options of `fxshard.plan` that the command line gives."""
    mesh = mesh_of(args)
    names = ("micro_batches", "no_sync", "device", *(() if mesh else ("world_size",)))
    given = {name: value for name in names if (value := getattr(args, name, None))}
    return given | mesh | options(args)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Micro-batches, the device, and the mesh."""
    add_micro_batches(parser)
    add_mesh(parser)
    parser.add_argument("--device", metavar="cuda", help="plan for this type of device")


def add_micro_batches(parser: argparse.ArgumentParser) -> None:
    """How many micro-batches a step has, and which reduce nothing."""
    add_count(parser)
    parser.add_argument(
        "--no-sync", action="store_true", help="all micro-batches but the last reduce nothing"
    )
