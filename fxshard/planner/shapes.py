"""Which shapes of a mesh are searched: how many ranks compute a sample together, and by what."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch import trees
from fxshard.bytesize import is_count
from fxshard.config.checked import Config
from fxshard.config.world_size import grid
from fxshard.errors import CaptureError, ConfigError, UnitError
from fxshard.hardware import Hardware
from fxshard.ir.splitting import placed
from fxshard.planner.batches import Batches
from fxshard.planner.on_mesh import ModelOnMesh, on_mesh
from fxshard.planner.result import TP, Together, Trial, Tuning
from fxshard.planner.search import first_line
from fxshard.planner.space import Candidate, given_space
from fxshard.planner.tune import Progress, Tuner, found_by
from fxshard.plans.workload import Call, Workload
from fxshard.runtime.world.mesh import CONTEXTS
from fxshard.runtime.world.parallelised import Context, Parallelize

FUNCTIONS = {  # what is called where a dimension has more than one rank, and what it is to do
    TP: "parallelize=..., which applies parallelize_module to a model for mesh['tp']",
    CONTEXTS: "context=..., in which attention goes round mesh['cp']: "
    "lambda model, mesh: context_parallel(mesh['cp'], ...) (docs/context-parallel.md)",
}


def tuned_over_shapes(
    step: Callable[[ModelOnMesh], Workload],
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
    if parallelize is None and context is None:
        every = ", or ".join(FUNCTIONS.values())
        raise ConfigError(f"mesh='auto' needs {every}. Without both leave mesh= out.")
    asked = dict(space or {}) if isinstance(space, Mapping) or space is None else space
    shapes: list[Together] = []
    if isinstance(asked, dict):
        given = {TP: parallelize, CONTEXTS: context}
        shapes = _shapes(asked, given, world_size, hardware)
    values = given_space(asked)
    tuners: list[Tuner] = []
    others: list[Trial] = []
    for shape in shapes:
        try:
            there = _on(module, config, world_size, shape, parallelize, context)
            work = step(there)
            whole = _sizes(work.call)
            with work.around():
                _require_parts(whole, _sizes(work.call), shape.cp)
                opened = Batches(work, batches)
                tuner = Tuner(work, opened, hardware, budget, values, plans, progress, shape)
                tuner.search_all()  # other batches are made of tensors that are cut
            tuners.append(tuner)
        except (CaptureError, UnitError, ConfigError) as error:
            why, ranks = f"refused: {first_line(error)}", max(1, world_size // shape.tp)
            others.append(Trial(Candidate({}), config, ranks, 1, why, shape=shape))
            if len(others) == len(shapes):
                raise
    return found_by(tuners, others)


def ranks_together(mesh: Mapping[str, int], there: ModelOnMesh) -> Together:
    """Which ranks compute a sample together on a mesh that is given.

    Raises:
        ConfigError: those of other dimensions than "tp" and "cp" do.
    """
    beside = math.prod(mesh.values()) // math.prod(grid(there.world_size, there.config))
    if beside != mesh.get(TP, 1):
        raise ConfigError(
            f"fxshard.tune with mesh={dict(mesh)!r}: besides data parallelism it knows {TP!r} and "
            f"{CONTEXTS!r}. Call the dimension of tensor parallelism so, and plan others with "
            f"fxshard.plan."
        )
    return Together(beside, mesh.get(CONTEXTS, 1))


def _shapes(
    space: dict[str, Any], given: Mapping[str, Any], world_size: int, hardware: Hardware
) -> list[Together]:
    """The shapes to try; what says so is taken out of `space`.

    Where both dimensions are asked for, those that do not divide the ranks are rows that say so.

    Args:
        given: the function of each dimension.

    Raises:
        ConfigError: sizes that do not divide `world_size`, or more than one without a function.
    """
    asked = {name: space.pop(name, None) for name in FUNCTIONS}
    sizes = {n: _sizes_of(n, asked[n], given[n], world_size, hardware) for n in FUNCTIONS}
    every = itertools.starmap(Together, itertools.product(sizes[TP], sizes[CONTEXTS]))
    named = all(each is not None for each in asked.values())
    return [shape for shape in every if named or world_size % shape.ranks == 0]


def _sizes_of(
    name: str, asked: Any, function: Any, world_size: int, hardware: Hardware
) -> list[int]:
    """How many ranks of a dimension are tried: those of a node at most, if none are asked.

    Raises:
        ConfigError: `asked` are no numbers that divide `world_size`, or `function` is missing.
    """
    node = hardware.ranks_per_node
    if asked is None:
        powers = (1 << n for n in range(node.bit_length() if function is not None else 1))
        return [n for n in powers if node % n == 0 and world_size % n == 0]
    sizes = list(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else []
    if not sizes or not all(is_count(n) and world_size % n == 0 for n in sizes):
        raise ConfigError(
            f"space[{name!r}]={asked!r}: expected numbers of ranks that divide "
            f"world_size={world_size}, such as [1, 2, 4, {node}]."
        )
    if function is None and max(sizes) > 1:
        raise ConfigError(f"space[{name!r}]={asked!r} needs {FUNCTIONS[name]}.")
    return sorted(set(sizes))


def _on(
    module: nn.Module,
    config: Config,
    world_size: int,
    shape: Together,
    parallelize: Parallelize | None,
    context: Context | None,
) -> ModelOnMesh:
    if world_size % shape.ranks:
        raise ConfigError(
            f"tp={shape.tp} x cp={shape.cp} ranks do not divide world_size={world_size}"
        )
    if shape.ranks == 1:
        return ModelOnMesh(module, placed(module, config), world_size, contextlib.nullcontext)
    dims = {"dp_shard": world_size // shape.ranks, **shape.dims}
    if config.hybrid:
        raise ConfigError(
            f"mesh='auto' with strategy={config.strategy!r}: which ranks are replicas is searched. "
            f"Leave strategy out, or give the mesh."
        )
    if shape.cp == 1 and context is not None:
        context = _without_contexts(context)
    return on_mesh(module, config, dims, parallelize if shape.tp > 1 else None, context)


def _without_contexts(context: Context) -> Context:
    """`context` on a mesh without "cp": no block at all if it asks for that dimension.

    One of other things, such as `loss_parallel`, is what it is.
    """

    @contextlib.contextmanager
    def entered(model: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(context(model, mesh))
            except KeyError as error:  # of a DeviceMesh, whose message names the dimension
                if repr(CONTEXTS) not in str(error.args[0] if error.args else ""):
                    raise
            yield

    return entered


def _sizes(call: Call) -> list[Size]:
    leaves, _ = trees.tree_flatten(call)
    return [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]


def _require_parts(whole: Sequence[Size], parts: Sequence[Size], cp: int) -> None:
    """Raise ConfigError unless a rank of `cp` has its part of the sequences of a call.

    Args:
        whole, parts: sizes of the tensors of a call, outside and inside of the context.
    """
    cut = [(a, b) for a, b in zip(whole, parts, strict=True) if a != b]
    if cp > 1 and not cut:
        raise ConfigError(
            f"context(model, mesh) cuts no tensor of the call, so that each of cp={cp} ranks has "
            f"all of a sequence. Give them: context_parallel(mesh['cp'], buffers=[...], "
            f"buffer_seq_dims=[...])"
        )
    for all_of_it, part in cut:
        both = zip(all_of_it, part, strict=True)
        uneven = [(n, m) for n, m in both if n != m and n != m * cp]
        if uneven:
            raise ConfigError(
                f"a sequence of {uneven[0][0]} is not cut into equal parts by cp={cp} ranks: the "
                f"first has {uneven[0][1]} of {list(all_of_it)}"
            )
