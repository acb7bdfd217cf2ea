"""Which candidates there are: a choice per dimension, and a batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fxshard.bytesize import size_text
from fxshard.config.checked import Config
from fxshard.config.checkpoints import CHECKPOINTS
from fxshard.config.precision import Precision
from fxshard.errors import ConfigError
from fxshard.ir.program import Program

BF16 = torch.bfloat16
RESHARD = "reshard_after_forward"
SHARDING = ("strategy", RESHARD, "world_size")
ROOT_STAYS = {"": False}  # of `RESHARD`: all but the root, whose gather in backward nothing hides
PREFETCH = ("forward_prefetch", "backward_prefetch")
# Options that are chosen together: if one is given, none of them is searched.
ACTIVATIONS = ("offload_activations",)
DIMENSIONS = (
    *(SHARDING, ("mixed_precision",), ("checkpoint",), ACTIVATIONS, PREFETCH),
    ("offload",),
)

Choice = dict[str, Any]  # arguments of `Plan.replan`


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that a search may make.

    Attributes:
        changes: arguments of `Plan.replan`, besides the batch; or sizes by name.
        batch: samples per rank and micro-batch; None: that of the call.
        rank: place in the space, the choices that are likely to be faster first.
    """

    changes: Choice
    batch: int | None = None
    rank: int = 0

    @property
    def text(self) -> str:
        """``shard_grad_op, checkpoint=full, prefetch=2``; None of an option is left out."""
        depths = {self.changes.get(name) for name in PREFETCH}
        both = {"prefetch": depths.pop()} if len(depths) == 1 and None not in depths else {}
        others = {n: v for n, v in self.changes.items() if not both or n not in PREFETCH}
        texts = [value_text(n, v) for n, v in {**others, **both}.items() if v is not None]
        return ", ".join(texts) or "as given"

    @property
    def offloads(self) -> bool:
        """True if activations take memory of the CPU."""
        return bool(self.changes.get("offload_activations"))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for candidates that give the same plan."""
        return self.batch, *self.key_without(())

    def key_without(self, names: Collection[str]) -> tuple[tuple[str, str], ...]:
        """Equal for candidates that differ in the batch and in options of these names alone."""
        return tuple((n, repr(value)) for n, value in self.changes.items() if n not in names)


def value_text(name: str, value: Any) -> str:
    """An option and its value, in a table."""
    if name == "strategy":
        return str(value)
    if name == "offload":
        return "offload"
    if name == "offload_activations" and value is True:
        return "offload_activations"
    if name == "world_size":
        return f"{'x'.join(map(str, value)) if isinstance(value, tuple) else value} ranks"
    if name == "checkpoint" and isinstance(value, int):
        return f"checkpoint={size_text(value)}"
    if name == "mixed_precision" and not isinstance(value, Mapping):
        policy = Precision.of(value)
        dtypes = {policy.param_dtype: "", policy.reduce_dtype: " reduced"}
        return ", ".join(f"{str(d)[6:]}{what}" for d, what in dtypes.items() if d is not None)
    if name == RESHARD:
        return f"reshard={'all but root' if value == ROOT_STAYS else value}"
    return f"{name}={value}"


def given_space(space: Mapping[str, Iterable[Any]] | None) -> dict[str, list[Any]]:
    """Values by name of an option (or ``world_size``), in place of the default ones.

    Raises:
        ConfigError: not of that form, a name is no option, or has no values.
    """
    legal = {*Config.names(), "world_size"}
    legal -= {"memory_budget", "hardware"}  # the task of `budget`; what all are compared on
    example = "space={'checkpoint': [None, 'full']}"
    if space is None:
        return {}
    if not isinstance(space, Mapping):
        raise ConfigError(f"space={space!r}: expected a dict by name of an option, as {example}.")
    found = {}
    for name, values in space.items():
        several = isinstance(values, Iterable) and not isinstance(values, (str, Mapping))
        found[name] = list(values) if several else []
        if name not in legal or not found[name]:
            raise ConfigError(
                f"space[{name!r}]={values!r}: expected the name of an option and a list of its "
                f"values, such as {example}. Options are: {', '.join(sorted(legal))}."
            )
    return found


def schedules(config: Config, program: Program) -> list[Choice]:
    """Resharding and prefetch as far as the user leaves them open, the default first.

    Args:
        config: what the user has given stays.
        program: of the plan with the defaults.
    """
    if program.world_size == 1:
        return [{}]
    reshards: list[Choice] = [{}]
    if not config.given & {"strategy", RESHARD}:
        root = [{RESHARD: dict(ROOT_STAYS)}] if len(program.units) > 1 else []
        reshards = [{RESHARD: True}, *root, {RESHARD: False}]
    free = [name for name in reversed(PREFETCH) if name not in config.given]
    found = _combined([reshards, _depths(free)])
    return sorted(found, key=lambda each: any(getattr(config, n) != each[n] for n in free))


def candidates(
    config: Config,
    world_size: int | tuple[int, int],
    node: int,
    units: int,
    batches: Sequence[int | None],
    space: Mapping[str, Sequence[Any]],
) -> list[Candidate]:
    """All configurations, in the order in which they are tried where nothing else decides.

    Args:
        config: what the user has given stays, unless it is in `space`.
        world_size: as of `fxshard.plan`.
        node: how many data-parallel ranks share a node.
        units: number of units of the model.
        batches: to be tried with each.
        space: from `given_space`.
    """
    dimensions: list[list[Choice]] = []
    for names in DIMENSIONS:
        wanted = [[{name: value} for value in space[name]] for name in names if name in space]
        if wanted:
            dimensions.append(_combined(wanted))
        elif not config.given & set(names) and not (names == ACTIVATIONS and config.pipeline_stage):
            dimensions.append(_default(names, world_size, node, units))
    taken = {name for names in DIMENSIONS for name in names}
    dimensions += [
        [{name: value} for value in values] for name, values in space.items() if name not in taken
    ]
    largest_first = sorted(batches, key=lambda batch: -(batch or 0))
    both = itertools.product(_combined(dimensions), largest_first)
    return [Candidate(changes, batch, rank) for rank, (changes, batch) in enumerate(both)]


def _combined(dimensions: Iterable[Iterable[Choice]]) -> list[Choice]:
    """One choice of each dimension together, in every way."""
    return [
        {name: value for choice in each for name, value in choice.items()}
        for each in itertools.product(*dimensions)
    ]


def _depths(names: Sequence[str]) -> list[Choice]:
    """Prefetch of 2, 1 and 0 units, by all of these options alike."""
    return [dict.fromkeys(names, depth) for depth in (2, 1, 0)] if names else [{}]


def _default(
    names: tuple[str, ...], world_size: int | tuple[int, int], node: int, units: int
) -> list[Choice]:
    """The choices of one dimension, the fastest with unlimited memory first."""
    if names == SHARDING:
        return _shardings(world_size, node, units)
    if names == PREFETCH:
        return _depths(names)
    if names == ("mixed_precision",):
        low = Precision(param_dtype=BF16, reduce_dtype=BF16)
        wide = dataclasses.replace(low, reduce_dtype=torch.float32)
        return [{"mixed_precision": each} for each in (low, wide, None)]
    if names == ("checkpoint",):
        policies = (None, *reversed(CHECKPOINTS)) if units > 1 else (None,)
        return [{"checkpoint": policy} for policy in policies]
    if names == ACTIVATIONS:
        return [{"offload_activations": None}, {"offload_activations": True}]
    return [{"offload": None}, {"offload": CPUOffloadPolicy()}]


def _shardings(world_size: int | tuple[int, int], node: int, units: int) -> list[Choice]:
    if isinstance(world_size, tuple):
        return [{"strategy": name} for name in ("hybrid_shard_zero2", "hybrid_shard")]
    if world_size == 1:
        return [{"strategy": "full_shard"}]
    found: list[Choice] = [{"strategy": "no_shard"}]
    nodes, rest = divmod(world_size, node)
    by_node = nodes > 1 and not rest and node > 1
    if by_node:
        pair = {"world_size": (nodes, node)}
        found.append({"strategy": "hybrid_shard_zero2", **pair})
        found.append({"strategy": "hybrid_shard", **pair})
    found.append({"strategy": "shard_grad_op"})
    if by_node:
        found.append({"strategy": "full_shard", RESHARD: node})
    if units > 1:
        found.append({"strategy": "full_shard", RESHARD: dict(ROOT_STAYS)})
    return [*found, {"strategy": "full_shard"}]
