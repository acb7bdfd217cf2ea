"""Module tree -> units: the sets of parameters that are sharded and unsharded together."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fxshard._torch import modules as torch_modules
from fxshard._torch.dtensors import local_part
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.errors import ConfigError, UnitError
from fxshard.ir import meshes
from fxshard.ir.extensions import extension_of
from fxshard.ir.names import modules_matching, owner_of, unit_of
from fxshard.ir.placements import check_names, said, shard_dims
from fxshard.ir.shardable import (
    check_buffers,
    check_cast_buffers,
    check_gradient_dtype,
    check_kinds,
    check_memory,
    check_printable,
    check_reduced_here,
    check_shardable,
    check_type,
)
from fxshard.ir.tensor_parallel import placed as placed_elsewhere
from fxshard.ir.unit_choice import grouped, ignored_of, refuse_options, unit_fqns
from fxshard.ir.unit_options import reshard_by_unit, strategy_by_unit
from fxshard.ir.units import Param, Unit, buffer_dtypes, with_precision


def find_units(
    model: nn.Module, spec: Any = None, *, ignored: Sequence[Any] = (), also: Iterable[str] = ()
) -> tuple[Unit, ...]:
    """Split the parameters of `model` into units; the rest is the root unit, index 0.

    Args:
        model: the module tree; parameters may be real, meta or fake.
        spec: None, or a list of classes, FQN globs and lists of these (one unit each), or a
            callable ``(fqn, module) -> bool``, or a policy of ``torch.distributed.fsdp.wrap``.
        ignored: modules, parameters and FQN globs: what is in no unit.
        also: FQNs of modules that are units besides those of `spec`.

    Raises:
        UnitError: a pattern matches no module, a parameter cannot be sharded, or torch's own
            reduces gradients of a part; or parameters and buffers are of a kind or lie in memory as
            programs cannot keep it; or a name has a line break or another character that cannot be
            printed.
    """
    check_printable(model)
    check_reduced_here(model)
    out_modules, out_params = ignored_of(model, ignored)
    check_kinds(model, out_params)
    check_memory(model, out_params)
    check_buffers(model)
    left_alone = {n for n, _ in _named(out_modules, model)}
    chosen = (unit_fqns(model, spec, out_modules, out_params) | set(also)) - left_alone
    together = grouped(model, spec, chosen)
    fqns = ["", *(name for name, _ in model.named_modules() if name and name in together)]
    # Not by name: that of a module may be a method's ("half"), and wrappers leave theirs out.
    holders: dict[int, nn.Module] = {}
    places: dict[int, list[str]] = {}  # names of the holders
    for path, module in model.named_modules(remove_duplicate=False):
        for param in module._parameters.values():
            holders.setdefault(id(param), module)
            places.setdefault(id(param), []).append(path)
    names: dict[int, list[str]] = {}
    by_id: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        by_id[id(param)] = param
    members: list[list[Param]] = [[] for _ in fqns]
    left_out: list[list[Param]] = [[] for _ in fqns]
    index = {name: i for i, fqn in enumerate(fqns) for name in (fqn, *together.get(fqn, ()))}
    for position, (key, aliases) in enumerate(names.items()):
        param, extension = by_id[key], None
        parallel = placed_elsewhere(aliases[0], param)
        if key not in out_params:
            check_shardable(aliases[0], param if parallel is None else local_part(param))
            check_type(aliases[0], param)
            if not isinstance(param, DTensor):  # those of earlier calls of `fully_shard`
                check_gradient_dtype(aliases[0], param)
            extension = extension_of(aliases[0], param, holders[key])
        elif parallel is not None:
            raise UnitError(
                f"parameter {aliases[0]!r} is a DTensor of tensor parallelism, and ignored: nobody "
                f"would reduce its gradient over the other dimensions of the mesh. Leave it to "
                f"fxshard, or leave it out of the plan of parallelize_module."
            )
        owner = unit_of(places[key], index)
        (left_out if key in out_params else members)[owner].append(
            Param(
                fqn=aliases[0],
                aliases=tuple(aliases),
                shape=tuple(param.shape) if parallel is None else parallel.local_shape,
                dtype=param.dtype,
                requires_grad=param.requires_grad,
                unit=owner,
                position=position,
                extension=extension,
                placed=parallel,
            )
        )
    modules = dict(model.named_modules())
    out_names = [name for name, _ in _named(out_modules, model)]
    return tuple(
        Unit(
            i,
            fqn,
            type(modules[fqn]).__name__,
            tuple(members[i]),
            tuple(left_out[i]),
            tuple(name for name in out_names if unit_of([name], index) == i),
            others=together.get(fqn, ()),
        )
        for i, fqn in enumerate(fqns)
    )


def configured_units(model: nn.Module, config: Config) -> tuple[Unit, ...]:
    """The units of `model` as `config` says, with their precision, resharding and placements.

    What a key of ``mixed_precision`` names becomes a unit, as ``fully_shard`` on it would make it.

    Raises:
        UnitError: a pattern matches no module, a parameter cannot be sharded as asked for, or a
            buffer that is to be cast lies in the memory of another.
        ConfigError: ``reshard_after_forward`` names a module that is no unit.
    """
    policies = {key: Precision.of(policy) for key, policy in config.precisions.items()}
    default = policies.pop("", Precision())
    special = {fqn: p for key, p in policies.items() for fqn in modules_matching(model, key)}
    asked = {"": default} | special
    for name, module in model.named_modules():
        around = asked[owner_of([name], asked)]
        if name and name not in asked and isinstance(module, around.full_precision_classes):
            back = around.param_dtype
            special[name] = Precision(torch.float32, torch.float32, output_dtype=back)
    units = find_units(model, config.units, ignored=tuple(config.ignored or ()), also=special)
    strategies = strategy_by_unit(model, config, units)
    reshard = reshard_by_unit(model, config, units)
    named = dict(model.named_parameters(remove_duplicate=False))
    check_names(config.shard_placement_fn, named)
    chosen = {p.aliases: named[p.fqn] for unit in units for p in unit.params}
    dims = shard_dims(config.shard_placement_fn, chosen)
    own = meshes.of_params(config, chosen)
    usual = {u.fqn: meshes.of_strategy(config, strategies[u.fqn]) for u in units}
    placed_units = (
        dataclasses.replace(
            unit,
            params=tuple(
                dataclasses.replace(
                    p, shard_dim=dims.get(p.fqn, 0), mesh=own.get(p.fqn, usual[unit.fqn])
                )
                for p in unit.params
            ),
            reshard=reshard[unit.fqn],
        )
        for unit in units
    )
    found = tuple(
        with_precision(unit, _one_policy(unit, special, default)) for unit in placed_units
    )
    buffers = dict(model.named_buffers())
    check_cast_buffers(buffers, buffer_dtypes(found, buffers))
    return found


def placed(model: nn.Module, config: Config, *, experts: bool = True) -> Config:
    """`config` with what ``shard_placement_fn`` says of `model` in place of the function.

    A function may tell parameters apart by their identity, which copies of them do not have, or
    may be none that can be sent to another process. The strategies that a policy in ``units`` gives
    units, as FSDP1's `CustomPolicy` does, become those of ``strategy``.

    Args:
        model: it.
        config: its options.
        experts: the mesh of experts is said too, as far as the user does not.

    Raises:
        UnitError, ConfigError: see `configured_units`.
    """
    config = _with_strategies_of_policy(model, config)
    named = dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(config.shard_placement_fn, (Mapping, type(None))):
        params = [param for unit in configured_units(model, config) for param in unit.params]
        every = said(config.shard_placement_fn, {p.aliases: named[p.fqn] for p in params})
        found = {fqn: each for fqn, each in every.items() if each != Shard(0)}
        config = dataclasses.replace(config, shard_placement_fn=found)
    return meshes.with_experts(config, named) if experts else config


def _with_strategies_of_policy(model: nn.Module, config: Config) -> Config:
    if not torch_modules.is_wrap_policy(config.units):
        return config
    wrapped = torch_modules.run_wrap_policy(config.units, model)
    found = {glob.escape(n): dict(wrapped[m]) for n, m in model.named_modules() if m in wrapped}
    given = {name: each.pop("sharding_strategy", None) for name, each in found.items()}
    if not any(given.values()):
        return config
    refuse_options(found)
    own = {name: strategy for name, strategy in given.items() if strategy is not None}
    units = [name for name in found if name]
    return config.changed({"units": units, "strategy": {**config.strategies, **own}})


def _one_policy(unit: Unit, special: Mapping[str, Precision], default: Precision) -> Precision:
    """The policy of a unit.

    Raises:
        ConfigError: its modules have different ones.
    """
    first, *rest = (special.get(fqn, default) for fqn in unit.fqns)
    for fqn, policy in zip(unit.others, rest, strict=True):
        if policy != first:
            raise ConfigError(
                f"mixed_precision: {unit.fqn!r} and {fqn!r} are one unit, gathered and reduced "
                f"together, and have different policies. Give both the same, or two units."
            )
    return first


def _named(modules: list[nn.Module], model: nn.Module) -> list[tuple[str, nn.Module]]:
    chosen = set(map(id, modules))
    named = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in named if id(module) in chosen]
