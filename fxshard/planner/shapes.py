"""Which shapes of a mesh are searched: how many ranks of a node compute a sample together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fxshard.bytesize import is_count
from fxshard.config.checked import Config
from fxshard.config.world_size import grid
from fxshard.errors import CaptureError, ConfigError, UnitError
from fxshard.hardware import Hardware
from fxshard.ir.splitting import placed
from fxshard.planner.batches import Batches
from fxshard.planner.on_mesh import OnMesh, on_mesh
from fxshard.planner.result import Trial, Tuning
from fxshard.planner.search import first_line
from fxshard.planner.space import Candidate, given_space
from fxshard.planner.tune import Progress, Tuner, found_by
from fxshard.plans.workload import Workload
from fxshard.runtime.world.mesh import CONTEXTS
from fxshard.runtime.world.parallelised import Context, Parallelize

TP = "tp"


def tuned_over_shapes(
    step: Callable[[OnMesh], Workload],
    module: nn.Module,
    config: Config,
    world_size: Any,
    parallelize: Parallelize | None,
    context: Context | None,
    hardware: Hardware,
    budget: int,
    *,
    batches: Sequence[int] | None,
    space: Mapping[str, Iterable[Any]] | None,
    plans: int | None,
    progress: Progress,
) -> Tuning:
    """Search every shape; see `fxshard.tune`.

    Args:
        step: the workload of a model on a mesh.
        module, config: plain.
        budget: bytes of one rank.

    Raises:
        ConfigError, DoesNotFitError: see `fxshard.tune`.
    """
    if not is_count(world_size):
        raise ConfigError(
            f"mesh='auto' with world_size={world_size!r}: give the number of GPUs, world_size=512; "
            f"replicas are searched too."
        )
    if parallelize is None:
        raise ConfigError(
            "mesh='auto' needs parallelize=..., which applies parallelize_module to a model for "
            "mesh['tp']. Without tensor parallelism leave mesh= out."
        )
    asked = dict(space or {}) if isinstance(space, Mapping) or space is None else space
    sizes = _sizes(asked.pop(TP, None), world_size, hardware) if isinstance(asked, dict) else []
    values = given_space(asked)
    tuners: list[Tuner] = []
    others: list[Trial] = []
    for size in sizes:
        try:
            there = _on(module, config, world_size, size, parallelize, context)
            work = step(there)
            with work.around():
                opened = Batches(work, batches)
                tuner = Tuner(work, opened, hardware, budget, values, plans, progress, size)
            tuner.search_all()
            tuners.append(tuner)
        except (CaptureError, UnitError, ConfigError) as error:
            why, ranks = f"refused: {first_line(error)}", world_size // size
            others.append(Trial(Candidate({}), config, ranks, 1, why, together=size))
            if len(others) == len(sizes):
                raise
    return found_by(tuners, others)


def ranks_together(mesh: Mapping[str, int], there: OnMesh) -> int:
    """How many ranks compute a sample together on a mesh that is given, by tensor parallelism.

    Raises:
        ConfigError: on more dimensions than "tp" they do.
    """
    together = math.prod(mesh.values()) // math.prod(grid(there.world_size, there.config))
    if CONTEXTS in mesh or together != mesh.get(TP, 1):
        raise ConfigError(
            f"fxshard.tune with mesh={dict(mesh)!r}: besides data parallelism it knows {TP!r}. "
            f"Call the dimension of tensor parallelism so, and plan others with fxshard.plan."
        )
    return together


def _sizes(asked: Any, world_size: int, hardware: Hardware) -> list[int]:
    """How many ranks of tensor parallelism are tried: those of a node at most, if none are asked.

    Raises:
        ConfigError: `asked` are no numbers that divide `world_size`.
    """
    node = hardware.ranks_per_node
    if asked is None:
        powers = (1 << n for n in range(node.bit_length()))
        return [n for n in powers if node % n == 0 and world_size % n == 0]
    sizes = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else []
    if not sizes or not all(is_count(n) and world_size % n == 0 for n in sizes):
        raise ConfigError(
            f"space['tp']={asked!r}: expected numbers of ranks that divide "
            f"world_size={world_size}, such as [1, 2, 4, {node}]."
        )
    return sorted(set(sizes))


def _on(
    module: nn.Module,
    config: Config,
    world_size: int,
    size: int,
    parallelize: Parallelize,
    context: Context | None,
) -> OnMesh:
    if size == 1:
        return OnMesh(module, placed(module, config), world_size, contextlib.nullcontext)
    ranks = world_size // size
    dims = {"dp_shard": ranks, TP: size}
    if config.hybrid:
        raise ConfigError(
            f"mesh='auto' with strategy={config.strategy!r}: which ranks are replicas is searched. "
            f"Leave strategy out, or give the mesh."
        )
    return on_mesh(module, config, dims, parallelize, context)
