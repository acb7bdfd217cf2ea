"""``--mesh`` and ``--parallelize``: a plan on a mesh of several dimensions."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fxshard.cli.model_source import imported, named_size, once
from fxshard.errors import ConfigError

RANKS = 8  # without --world-size and --mesh

# Styles of plans of transformers, by the names that they have there.
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
}


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a mesh, and what parallelises a model for it."""
    parser.add_argument(
        "--mesh",
        type=_dims,
        metavar="dp=64,tp=8",
        help="ranks by dimension, the outermost first; in place of --world-size",
    )
    parser.add_argument(
        "--parallelize",
        metavar="pkg.mod:fn",
        help="fn(model, mesh) applies parallelize_module (of --hf-config: its own plan, on tp)",
    )


def mesh_of(args: argparse.Namespace) -> dict[str, Any]:
    """What `fxshard.plan` is given of a mesh; {} without one.

    Raises:
        ConfigError: --world-size is given too, or no mesh for --parallelize.
    """
    told: Any = getattr(args, "mesh", None)
    function = getattr(args, "parallelize", None)
    if told is None:
        if function is not None:
            raise ConfigError(f"--parallelize {function}: for which mesh? Give --mesh dp=8,tp=4.")
        return {}
    if args.world_size != RANKS:
        raise ConfigError("--mesh with --world-size: the mesh says how many ranks there are.")
    found: dict[str, Any] = {"mesh": once(told, "--mesh")}
    if function is not None:
        found["parallelize"] = imported(function, "--parallelize")
    elif args.hf_config is not None and "tp" in found["mesh"]:
        found["parallelize"] = by_own_plan
    return found


def by_own_plan(model: Any, mesh: DeviceMesh) -> None:
    """Cut a model of transformers over "tp", as its own plan says.

    Raises:
        ConfigError: it has none, or a style of it is another than `STYLES`.
    """
    inner = getattr(model, model.base_model_prefix, model)
    own = getattr(model.config, "base_model_tp_plan", None) or {}
    heads = dict(type(model)._tp_plan or {})
    if model.config.tie_word_embeddings:  # parallelize_module would untie them
        heads.clear()
    if not own:
        raise ConfigError(
            f"--mesh: {type(model).__name__} has no plan of tensor parallelism of its own. Give "
            f"--parallelize pkg.mod:fn."
        )
    for module, plan in ((inner, own), (model, heads)):
        _parallelised(module, plan, mesh["tp"])


def _parallelised(module: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> None:
    unknown = [f"{style!r} of {name}" for name, style in plan.items() if style not in STYLES]
    if unknown:
        raise ConfigError(
            f"--mesh: the model's own plan of tensor parallelism has {unknown[0]}; known are "
            f"{', '.join(map(repr, STYLES))}. Give --parallelize pkg.mod:fn."
        )
    parallelize_module(module, mesh, {name: STYLES[style] for name, style in plan.items()})


def _dims(text: str) -> list[tuple[str, int]]:
    return [named_size(each) for each in text.split(",")]


_dims.__name__ = "mesh, such as dp=64,tp=8"
