"""What options say of units that are there: strategies, resharding, checkpoints."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn

from fxshard.config.checked import Config
from fxshard.config.options import KEEPING
from fxshard.errors import ConfigError, UnitError
from fxshard.ir.names import modules_matching
from fxshard.ir.units import Unit, index_of


def strategy_by_unit(model: nn.Module, config: Config, units: tuple[Unit, ...]) -> dict[str, str]:
    """The strategy of each unit by FQN, as the options say."""
    given = config.strategies
    found: dict[str, str] = {unit.fqn: given[""] for unit in units}
    index, named = index_of(units), dict[str, tuple[str, str]]()
    for key, wanted in given.items():
        for fqn in _units_named("strategy", model, units, index, key) if key != "" else ():
            unit = units[index[fqn]]
            first, before = named.setdefault(unit.fqn, (fqn, wanted))
            if before != wanted and first != fqn:
                raise ConfigError(
                    f"strategy: {first!r} and {fqn!r} are one unit, gathered and reduced together, "
                    f"and have different strategies. Give both the same, or two units."
                )
            found[unit.fqn] = wanted
    return found


def reshard_by_unit(
    model: nn.Module, config: Config, units: tuple[Unit, ...]
) -> dict[str, bool | int]:
    """`Unit.reshard` of each unit by FQN, as the options say."""
    strategies = strategy_by_unit(model, config, units).items()
    found: dict[str, bool | int] = {fqn: each not in KEEPING for fqn, each in strategies}
    value = config.reshard_after_forward
    if value is None:
        return found
    if not isinstance(value, Mapping):
        return dict.fromkeys(found, value)
    index = index_of(units)
    for key, wanted in value.items():
        for fqn in _units_named("reshard_after_forward", model, units, index, key):
            found[units[index[fqn]].fqn] = wanted
    return found


def checkpointed_modules(
    model: nn.Module, config: Config, units: tuple[Unit, ...]
) -> dict[str, Any]:
    """FQN of each module that ``checkpoint`` names -> its policy; without names, of each unit.

    If it is not given, Inductor's regions recompute cheap values, as torch.compile's partitioner
    lets them (torch/_functorch/partitioners.py, min_cut_rematerialization_partition): fused into
    what reads them, they cost less than reading them would.

    Raises:
        ConfigError: there is no unit but the root, whose checkpoint would save nothing.
        UnitError: a pattern matches no module.
    """
    wanted = config.checkpoint
    if wanted is None and config.backend == "inductor" and "checkpoint" not in config.given:
        return {fqn: "selective" for unit in units[1:] for fqn in unit.fqns}
    if wanted is None:
        return {}
    if isinstance(wanted, Mapping):
        return {
            fqn: policy
            for key, policy in wanted.items()
            if policy is not None
            for fqn in sorted(modules_matching(model, key))
        }
    if len(units) == 1:
        raise ConfigError(
            f"checkpoint={wanted!r} checkpoints each unit, and {type(model).__name__} has the root "
            f"unit only. Name modules: checkpoint={{'blocks.*': {wanted!r}}}, or give units=[...]."
        )
    return {fqn: wanted for unit in units[1:] for fqn in unit.fqns}


def offloading(model: nn.Module, config: Config) -> Config:
    """`config` with the FQNs of the modules that ``offload_activations`` names, if it names some.

    Raises:
        UnitError: a pattern matches no module.
    """
    named: Any = config.offload_activations
    if not isinstance(named, tuple):
        return config
    try:
        found = {fqn for key in named for fqn in modules_matching(model, key)}
    except UnitError as error:
        raise UnitError(str(error).replace("units", "offload_activations", 1)) from None
    return config.changed({"offload_activations": tuple(sorted(found))})


def _units_named(
    option: str, model: nn.Module, units: Sequence[Unit], index: Container[str], key: Any
) -> list[str]:
    """FQNs of modules that a key of an option names.

    Raises:
        ConfigError: one is no unit.
    """
    found = [""] if key == "" else sorted(modules_matching(model, key))
    for fqn in found:
        if fqn not in index:
            raise ConfigError(
                f"{option} names {fqn!r}, which is no unit. Units are: "
                f"{', '.join(unit.name for unit in units[:8])}."
            )
    return found
