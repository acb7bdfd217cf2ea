"""Module tree -> units: the sets of parameters that are sharded and unsharded together."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import glob
import inspect
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fxshard._torch import fake_tensors
from fxshard._torch import modules as torch_modules
from fxshard._torch.dtensors import local_part
from fxshard.config.checked import Config
from fxshard.config.options import KEEPING
from fxshard.config.precision import Precision
from fxshard.errors import CaptureError, ConfigError, UnitError
from fxshard.ir import meshes
from fxshard.ir.extensions import Extension, extension_of, has_extension
from fxshard.ir.layout import Grid
from fxshard.ir.placements import check_names, said, shard_dims
from fxshard.ir.tensor_parallel import PLACE, Placed
from fxshard.ir.tensor_parallel import placed as placed_elsewhere


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of the model (tied names are one Param).

    Attributes:
        fqn: its first name.
        aliases: all its names, `fqn` included.
        shape: of what is sharded: all of it, or what this rank has of one that is `placed`.
        dtype: dtype of the sharded parameter.
        requires_grad: False for a frozen parameter.
        unit: index of its unit.
        position: place among ``model.named_parameters()``: the order that optimizers see.
        compute_dtype: dtype of the unsharded parameter and of its gradient.
        shard_dim: the dimension that it is cut along.
        extension: of a tensor subclass, what it sends in place of its shard.
        placed: of a DTensor of tensor parallelism, where it is besides.
        mesh: name of the mesh whose ranks share it; "" for that of the model.
    """

    fqn: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    unit: int
    position: int
    compute_dtype: torch.dtype = None  # type: ignore[assignment]  # set below: `dtype`
    shard_dim: int = 0
    extension: Extension | None = None
    placed: Placed | None = None
    mesh: str = ""

    def __post_init__(self) -> None:
        if self.compute_dtype is None:
            object.__setattr__(self, "compute_dtype", self.dtype)

    @property
    def line(self) -> str:
        """Its name, shape, dtype and placements, alike on all ranks of the mesh."""
        shape, places = self.shape, [f"Shard({self.shard_dim})"]
        if self.placed is not None:
            shape = self.placed.shape
            places += [f"{place} over {self.placed.group}" for place in self.placed.placements]
        return f"parameter {self.fqn} {list(shape)} {self.dtype} {', '.join(places)}"


Reductions: TypeAlias = Literal["all", "shards", "none"]


@dataclasses.dataclass(frozen=True)
class Unit:
    """A set of parameters that move together.

    Attributes:
        index: position in the program's tuple of units; 0 is the root unit.
        fqn: FQN of the module ("" for the root unit); of several, that of the first.
        kind: class name of the module; equal kinds fold to one row in dumps.
        params: its parameters, in ``named_parameters`` order.
        ignored: parameters of its modules that are never sharded or communicated.
        ignored_modules: FQNs of its modules whose buffers stay as they are too.
        precision: dtypes of compute and reduction.
        reshard: what its parameters are between forward and backward: True sharded, False
            unsharded, n sharded over groups of n neighbouring ranks.
        stays: after backward its parameters are kept unsharded, for the next forward.
        others: FQNs of the further modules whose parameters move with those of the first.
        reduce: which reductions its gradients go through: "all"; "shards", the reduce-scatter
            without the all-reduce of a hybrid strategy, whose partial sums are accumulated; or
            "none": unsharded gradients are accumulated.
        divide_factor: an average of its gradients divides by this; None: as the options say.
        forward_ahead, backward_ahead: FQNs of the units that are launched when this one is
            unsharded; none: as the options say.
    """

    index: int
    fqn: str
    kind: str
    params: tuple[Param, ...]
    ignored: tuple[Param, ...] = ()
    ignored_modules: tuple[str, ...] = ()
    precision: Precision = dataclasses.field(default_factory=Precision)
    reshard: bool | int = True
    stays: bool = False
    others: tuple[str, ...] = ()
    reduce: Reductions = "all"
    divide_factor: float | None = None
    forward_ahead: tuple[str, ...] = ()
    backward_ahead: tuple[str, ...] = ()

    @property
    def fqns(self) -> tuple[str, ...]:
        """The FQNs of its modules."""
        return (self.fqn, *self.others)

    @property
    def by_mesh(self) -> list[tuple[str, ...]]:
        """The FQNs of its parameters, those on one mesh together."""
        found: dict[str, list[str]] = {}
        for param in self.params:
            found.setdefault(param.mesh, []).append(param.fqn)
        return list(map(tuple, found.values()))

    @property
    def ahead(self) -> dict[str, tuple[str, ...]]:
        """`forward_ahead` and `backward_ahead` by phase."""
        return {"forward": self.forward_ahead, "backward": self.backward_ahead}

    @property
    def name(self) -> str:
        """`fqns` as text, or "(root)"."""
        return ", ".join(self.fqns) or "(root)"


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
        UnitError: a pattern matches no module, a parameter cannot be sharded, or
            parameters and buffers are of a kind or lie in memory as programs cannot keep it; or a
            name has a line break or another character that cannot be printed.
    """
    _check_names(model)
    out_modules, out_params = ignored_of(model, ignored)
    _check_kinds(model, out_params)
    _check_memory(model, out_params)
    _check_buffers(model)
    left_alone = {n for n, _ in _named(out_modules, model)}
    chosen = (_unit_fqns(model, spec, out_modules, out_params) | set(also)) - left_alone
    together = _grouped(model, spec, chosen)
    fqns = ["", *(name for name, _ in model.named_modules() if name and name in together)]
    # Not by name: that of a module may be a method's ("half"), and wrappers leave theirs out.
    holders: dict[int, nn.Module] = {}
    for module in model.modules():
        for param in module._parameters.values():
            holders.setdefault(id(param), module)
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
            extension = extension_of(aliases[0], param, holders[key])
        elif parallel is not None:
            raise UnitError(
                f"parameter {aliases[0]!r} is a DTensor of tensor parallelism, and ignored: nobody "
                f"would reduce its gradient over the other dimensions of the mesh. Leave it to "
                f"fxshard, or leave it out of the plan of parallelize_module."
            )
        owner = unit_of(aliases, index)
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


def _check_names(model: nn.Module) -> None:
    """Raises UnitError for names that would break lines: of schedules, tables and source."""
    modules = (name for name, _ in model.named_modules(remove_duplicate=False))
    params = (name for name, _ in model.named_parameters(remove_duplicate=False))
    buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
    for name in itertools.chain(modules, params, buffers):
        if not name.isprintable():
            raise UnitError(
                f"{name!a}: a name of a module, parameter or buffer with a character that cannot "
                f"be printed. Schedules and reports name it in lines of text: rename it."
            )


def configured_units(model: nn.Module, config: Config) -> tuple[Unit, ...]:
    """The units of `model` as `config` says, with their precision, resharding and placements.

    What a key of ``mixed_precision`` names becomes a unit, as ``fully_shard`` on it would make it.

    Raises:
        UnitError: a pattern matches no module, or a parameter cannot be sharded as asked for.
        ConfigError: ``reshard_after_forward`` names a module that is no unit.
    """
    policies = {key: Precision.of(policy) for key, policy in config.precisions.items()}
    default = policies.pop("", Precision())
    special = {fqn: p for key, p in policies.items() for fqn in _matches(model, key)}
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
    return tuple(with_precision(unit, _one_policy(unit, special, default)) for unit in placed_units)


def placed(model: nn.Module, config: Config) -> Config:
    """`config` with what ``shard_placement_fn`` says of `model` in place of the function.

    A function may tell parameters apart by their identity, which copies of them do not have, or
    may be none that can be sent to another process. The strategies that a policy in ``units`` gives
    units, as FSDP1's `CustomPolicy` does, become those of ``strategy``.

    Raises:
        UnitError, ConfigError: see `configured_units`.
    """
    config = _with_strategies_of_policy(model, config)
    if config.shard_placement_fn is None or isinstance(config.shard_placement_fn, Mapping):
        return config
    params = [param for unit in configured_units(model, config) for param in unit.params]
    named = dict(model.named_parameters(remove_duplicate=False))
    every = said(config.shard_placement_fn, {p.aliases: named[p.fqn] for p in params})
    found = {fqn: each for fqn, each in every.items() if each != Shard(0)}
    return dataclasses.replace(config, shard_placement_fn=found)


def _with_strategies_of_policy(model: nn.Module, config: Config) -> Config:
    if not torch_modules.is_wrap_policy(config.units):
        return config
    wrapped = torch_modules.run_wrap_policy(config.units, model)
    found = {glob.escape(n): dict(wrapped[m]) for n, m in model.named_modules() if m in wrapped}
    given = {name: each.pop("sharding_strategy", None) for name, each in found.items()}
    if not any(given.values()):
        return config
    _refuse_options(found)
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


def with_precision(unit: Unit, precision: Precision) -> Unit:
    """`unit` computing in `precision`: only floating parameters are cast."""
    if precision.reduce_as_stored:
        stored = [p.dtype for p in unit.params if p.requires_grad and p.dtype.is_floating_point]
        if precision.reduce_dtype is None and stored:
            dtype = functools.reduce(torch.promote_types, stored)
            precision = dataclasses.replace(precision, reduce_dtype=dtype)
        precision = dataclasses.replace(precision, reduce_as_stored=False)
    params = tuple(_computing_in(param, precision) for param in unit.params)
    return dataclasses.replace(unit, params=params, precision=precision)


def _computing_in(param: Param, precision: Precision) -> Param:
    if param.extension is None:
        return dataclasses.replace(param, compute_dtype=precision.computes_in(param.dtype))
    own = param.extension.computing_in(precision)
    return dataclasses.replace(param, extension=own, compute_dtype=own.form.dtype)


def buffer_dtypes(
    units: tuple[Unit, ...], buffers: Mapping[str, torch.Tensor]
) -> dict[str, torch.dtype]:
    """The dtype of each floating buffer that the precision of its unit changes."""
    by_fqn = index_of(units)
    found: dict[str, torch.dtype] = {}
    for name, buffer in buffers.items():
        unit = units[unit_of([name], by_fqn)]
        if name.rpartition(".")[0] in unit.ignored_modules:
            continue
        wanted = unit.precision.buffer_dtype
        if wanted is not None and buffer.is_floating_point() and buffer.dtype is not wanted:
            found[name] = wanted
    return found


def check_reshard(units: tuple[Unit, ...], world: int, meshes: Iterable[Grid] = ()) -> None:
    """Raise ConfigError if the ranks cannot be cut into the groups that a unit asks for.

    Args:
        world: number of ranks that share a parameter.
        meshes: the ranks of parameters that have a mesh of their own.
    """
    ranks = {"": world} | {grid.name: grid.shards for grid in meshes}
    for unit in units:
        for mesh in {param.mesh for param in unit.params} or {""}:
            shards, copied = ranks[mesh], mesh and ranks[mesh] == 1
            if not isinstance(unit.reshard, bool) and not copied and shards % unit.reshard:
                raise ConfigError(
                    f"reshard_after_forward={unit.reshard} of unit {unit.name!r}: {shards} ranks "
                    f"cannot be cut into groups of {unit.reshard}. Take a divisor of {shards}."
                )


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
            for fqn in sorted(_matches(model, key))
        }
    if len(units) == 1:
        raise ConfigError(
            f"checkpoint={wanted!r} checkpoints each unit, and {type(model).__name__} has the root "
            f"unit only. Name modules: checkpoint={{'blocks.*': {wanted!r}}}, or give units=[...]."
        )
    return {fqn: wanted for unit in units[1:] for fqn in unit.fqns}


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


def _units_named(
    option: str, model: nn.Module, units: Sequence[Unit], index: Container[str], key: Any
) -> list[str]:
    """FQNs of modules that a key of an option names.

    Raises:
        ConfigError: one is no unit.
    """
    found = [""] if key == "" else sorted(_matches(model, key))
    for fqn in found:
        if fqn not in index:
            raise ConfigError(
                f"{option} names {fqn!r}, which is no unit. Units are: "
                f"{', '.join(unit.name for unit in units[:8])}."
            )
    return found


def ignored_of(model: nn.Module, ignored: Sequence[Any]) -> tuple[list[nn.Module], set[int]]:
    """Modules that are left alone, and the ids of their and all other ignored parameters."""
    modules: list[nn.Module] = []
    params: set[int] = set()
    tree = dict(model.named_modules())
    own = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
    for item in ignored:
        if isinstance(item, nn.Module):
            found = [item] if any(item is module for module in tree.values()) else []
        elif isinstance(item, str):
            pattern = item.split(".")
            found = [m for name, m in tree.items() if name and _glob(pattern, name.split("."))]
            named = [p for name, p in own.items() if _glob(pattern, name.split("."))]
            params.update(map(id, named))
            if named:
                continue
        elif isinstance(item, nn.Parameter):
            if any(item is p for p in own.values()):
                params.add(id(item))
                continue
            found = []
        else:
            raise UnitError(f"ignored holds {item!r}: expected a module, a parameter or a glob.")
        if not found:
            what = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
            raise UnitError(f"ignored: {what} is not in {type(model).__name__}.")
        modules += found
    inside = [sub for module in modules for sub in module.modules()]
    params.update(id(p) for module in inside for p in module.parameters(recurse=False))
    return inside, params


def _named(modules: list[nn.Module], model: nn.Module) -> list[tuple[str, nn.Module]]:
    chosen = set(map(id, modules))
    named = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in named if id(module) in chosen]


def check_shardable(fqn: str, param: torch.Tensor) -> None:
    """Raise UnitError if `param` cannot be cut along any dimension."""
    if param.dim() == 0:
        raise UnitError(
            f"parameter {fqn!r} is a scalar (shape []), which has no dim 0 to shard. "
            f"Make it a 1-D tensor with one element: nn.Parameter(x.reshape(1))."
        )
    if not param.is_contiguous():
        raise UnitError(
            f"parameter {fqn!r} is not contiguous (shape {list(param.shape)}, strides "
            f"{list(param.stride())}); its rows cannot be sent as they lie. "
            f"Make it contiguous: nn.Parameter(x.contiguous())."
        )


def _check_kinds(model: nn.Module, out_params: Container[int]) -> None:
    """Raise UnitError if a parameter or buffer is more than the numbers in its storage.

    Programs run on plain tensors. DTensors are for `sharding` to judge, and parameters that say
    what is gathered for `extension_of`.
    """
    for kind, fqn, tensor in _named_tensors(model):
        if nn.parameter.is_lazy(tensor):
            raise UnitError(
                f"{kind} {fqn!r} is lazy and has no shape yet. Call the plain model once, which "
                f"initialises it."
            )
        what = no_plain_tensor(tensor)
        gathers = kind == "parameter" and id(tensor) not in out_params and has_extension(tensor)
        if what and not gathers:
            raise UnitError(
                f"{kind} {fqn!r} is {what}: programs run on plain dense tensors, and would drop "
                f"what it is besides. Take frozen quantised weights apart first "
                f"(fxshard.integrations.quantized.packed(model)), give a parameter's class "
                f"fsdp_pre_all_gather and fsdp_post_all_gather, quantise after training, or use "
                f"torch.distributed.fsdp.fully_shard."
            )


def no_plain_tensor(tensor: torch.Tensor) -> str:
    """What a tensor is that is no plain dense one; empty if it is."""
    if isinstance(tensor, (DTensor, fake_tensors.FakeTensor)):
        return ""
    if _has_own_operators(type(tensor)):
        return f"a {type(tensor).__name__}, a subclass of torch.Tensor with operators of its own"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.is_nested:
        return "nested"
    return f"quantized ({tensor.dtype})" if tensor.is_quantized else ""


def _has_own_operators(cls: type[torch.Tensor]) -> bool:
    if cls is torch.Tensor:
        return False
    plain = nn.Parameter
    same = cls.__torch_function__ is plain.__torch_function__
    same = same and cls.to is plain.to  # bitsandbytes' Int8Params carries its scales along
    return not (same and cls.__torch_dispatch__ is plain.__torch_dispatch__)


def _check_memory(model: nn.Module, out_params: Container[int]) -> None:
    """Raise UnitError if two parameters, or a parameter and a buffer, lie in the same memory.

    Sharding copies a parameter's values, so that what is written into one later would not be seen
    in the other. Parameters that are left alone (`out_params`) stay where they are.
    """
    places: dict[int, list[tuple[int, int, str, str, bool]]] = {}
    params = {id(param) for param in model.parameters()}
    for kind, fqn, held in _named_tensors(model):
        tensor = local_part(held)
        if hasattr(held, PLACE) or not tensor.numel():
            continue
        first = int(tensor.storage_offset()) * tensor.element_size()
        spans = [s * (n - 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        end = first + (sum(spans) + 1) * tensor.element_size()
        stays = id(held) in out_params and not (kind == "buffer" and id(held) in params)
        place = (first, end, kind, fqn, stays)
        places.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    for members in places.values():
        members.sort()
        for i, (_, end, kind, fqn, out) in enumerate(members):
            for start, _, other_kind, other, other_out in members[i + 1 :]:
                both_buffers = kind == other_kind == "buffer"
                if start >= end:
                    break
                if both_buffers or (out and other_out):
                    continue
                raise UnitError(
                    f"{kind} {fqn!r} and {other_kind} {other!r} lie in the same memory: a step "
                    f"that changes one would not change the other any more. Give one of them a "
                    f"copy (.clone()); to tie parameters, assign one nn.Parameter under both names."
                )


def _check_buffers(model: nn.Module) -> None:
    """Raise UnitError if a buffer needs a gradient, or is a DTensor."""
    for fqn, buffer in model.named_buffers():
        if isinstance(buffer, DTensor):
            raise UnitError(
                f"buffer {fqn!r} is a DTensor: programs keep buffers as plain tensors, each rank "
                f"its own. Register what each rank has (buffer.to_local()) in its place, or keep "
                f"its module out of the plan of parallelize_module."
            )
        if buffer.requires_grad:
            raise UnitError(learned_buffer(fqn))


def learned_buffer(fqn: str) -> str:
    """What to say of a buffer that needs a gradient."""
    return (
        f"buffer {fqn!r} requires a gradient, and a program makes none of buffers. Make it an "
        f"nn.Parameter if it is to be trained, or detach it (module.{fqn.rpartition('.')[2]} = "
        f"buffer.detach())."
    )


def note_replaced(fqn: str, param: torch.Tensor) -> None:
    """Remember of what `param` lies in that it was the memory of a parameter, now sharded."""
    local_part(param).untyped_storage()._fxshard_was = fqn  # type: ignore[attr-defined]


def check_constants(
    model: nn.Module, units: Sequence[Unit], constants: Mapping[str, torch.Tensor]
) -> None:
    """Refuse tensors that forward has found elsewhere than in its modules and that will not stay.

    Args:
        model: before it is sharded, or after.
        units: of the model.
        constants: tensors that a capture has met and that are no parameters or buffers.

    Raises:
        CaptureError: one is a parameter of the model (or of its memory), which lies in a list or a
            closure, or needs a gradient, which it would not get.
    """
    named = dict(model.named_parameters())
    chosen = {p.fqn: named[p.fqn] for unit in units for p in unit.params if p.fqn in named}
    known = {local_part(t).untyped_storage()._cdata: fqn for fqn, t in chosen.items() if t.numel()}
    for tensor in constants.values():
        storage = tensor.untyped_storage()
        fqn = getattr(storage, "_fxshard_was", known.get(storage._cdata))
        if fqn is not None:
            raise CaptureError(
                f"forward reads parameter {fqn!r}, or a view of it, from elsewhere than its module "
                f"(a list, a closure, an attribute made before): there it would keep its values "
                f"for ever. Read it in forward through the module that holds it."
            )
        if tensor.requires_grad:
            raise CaptureError(
                f"forward reads a tensor {list(tensor.shape)} that requires a gradient and is no "
                f"parameter of the model: it would get none. Register it as an nn.Parameter, or "
                f"pass it to forward."
            )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for fqn, param in model.named_parameters():
        yield "parameter", fqn, param
    for fqn, buffer in model.named_buffers():
        yield "buffer", fqn, buffer


def owner_of(fqns: Sequence[str], candidates: Container[str]) -> str:
    """The longest of `candidates` that is an ancestor of (or equal to) every one of `fqns`.

    "" if there is none. Looks at the ancestors of the first, not at all candidates.
    """
    ancestor, *rest = fqns
    while ancestor:
        if ancestor in candidates and all(is_under(fqn, ancestor) for fqn in rest):
            break
        ancestor = ancestor.rpartition(".")[0]
    return ancestor


def unit_of(fqns: Sequence[str], index: Mapping[str, int]) -> int:
    """The innermost unit that holds all of `fqns`, of modules or tensors.

    Args:
        index: see `index_of`.
    """
    each = {index[owner_of([fqn], index)] for fqn in fqns}
    return each.pop() if len(each) == 1 else index[owner_of(fqns, index)]


def index_of(units: Iterable[Unit]) -> dict[str, int]:
    """FQN of each module of each unit -> the index of the unit."""
    return {fqn: unit.index for unit in units for fqn in unit.fqns}


def is_under(fqn: str, ancestor: str) -> bool:
    """True if `fqn` is `ancestor` or inside it ("" contains everything)."""
    return not ancestor or fqn == ancestor or fqn.startswith(ancestor + ".")


def _unit_fqns(
    model: nn.Module, spec: Any, ignored: Iterable[nn.Module], ignored_params: Container[int]
) -> set[str]:
    if spec is None:
        return set(repeated_blocks(model))
    if isinstance(spec, Sequence):
        return set().union(*(_matches(model, each) for item in spec for each in _listed(item)))
    try:
        if torch_modules.is_wrap_policy(spec):
            wrapped = torch_modules.run_wrap_policy(spec, model)
            found = {name: wrapped[m] for name, m in model.named_modules() if m in wrapped}
            _refuse_options(found)
            return set(found)
        if callable(spec) and _is_auto_wrap_policy(spec):
            return set(_auto_wrap(model, spec, set(ignored), ignored_params))
        if callable(spec):
            return {name for name, module in model.named_modules() if name and spec(name, module)}
    except UnitError:
        raise
    except Exception as error:
        raise UnitError(
            f"the function units={spec!r} failed with {type(error).__name__}: {error}. It is "
            f"called as units(fqn, module), and says if the module is a unit."
        ) from error
    raise UnitError(
        f"units={spec!r}: expected None, a list of classes or FQN globs, a callable "
        f"(fqn, module) -> bool, or a torch.distributed.fsdp.wrap policy."
    )


def _listed(item: Any) -> Sequence[Any]:
    return item if isinstance(item, (list, tuple)) else (item,)


def _grouped(model: nn.Module, spec: Any, chosen: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The first FQN of each unit but the root -> its others; all of them `chosen`.

    Raises:
        UnitError: a module is in two lists, or one in a list holds another one of that list.
    """
    lists = [item for item in spec if isinstance(item, (list, tuple))] if _is_list(spec) else []
    order = [name for name, _ in model.named_modules() if name and name in chosen]
    first: dict[str, str] = {}  # FQN of a module in a list -> the first of its unit
    for item in lists:
        wanted = set().union(*(_matches(model, each) for each in item))
        mine = [name for name in order if name in wanted]
        for name in mine:
            around = next((other for other in mine if other != name and is_under(name, other)), "")
            if name in first or around:
                where = f"inside of {around!r}, which is too" if around else "in another one"
                raise UnitError(f"units: {name!r} is in the list {list(item)!r}, and {where}.")
            first[name] = mine[0]
    return {
        name: tuple(n for n in order if n != name and first.get(n) == name)
        for name in order
        if first.get(name, name) == name
    }


def _is_list(spec: Any) -> bool:
    return isinstance(spec, Sequence) and not isinstance(spec, str)


def _matches(model: nn.Module, item: Any) -> set[str]:
    if isinstance(item, type) and issubclass(item, nn.Module):
        found = {name for name, module in model.named_modules() if isinstance(module, item)}
        what = f"class {item.__name__}"
    elif isinstance(item, str):
        found = {n for n, _ in model.named_modules() if n and matches(item, n)}
        what = f"pattern {item!r}"
    else:
        raise UnitError(f"units holds {item!r}: expected a module class or an FQN glob.")
    if not found:
        some = ", ".join(name for name, _ in list(model.named_modules())[1:9])
        raise UnitError(
            f"units: {what} matches no module of {type(model).__name__}. "
            f"Its modules begin: {some}. ('*' matches one name, '**' any number.)"
        )
    return found


def matches(pattern: str, fqn: str) -> bool:
    """True if an FQN is one of a pattern: ``*`` stands for one name, ``**`` for any number."""
    return _glob(pattern.split("."), fqn.split("."))


def _glob(pattern: list[str], names: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_glob(pattern[1:], names[i:]) for i in range(len(names) + 1))
    return (
        bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and _glob(pattern[1:], names[1:])
    )


_NOT_NEEDED = ("device_id", "limit_all_gathers", "use_orig_params")  # docs/coming-from-fsdp.md


def _refuse_options(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UnitError if a policy (`CustomPolicy`) gives a unit options that mean something."""
    for name, given in found.items():
        options = {key: value for key, value in given.items() if key not in _NOT_NEEDED}
        if options:
            raise UnitError(
                f"the policy in units gives {name!r} options of its own, {options!r}. Units "
                f"of one model differ by strategy=, reshard_after_forward= and mixed_precision=, "
                f"dicts by class or FQN glob: let the policy return True, and say it there."
            )


def _is_auto_wrap_policy(spec: Callable[..., Any]) -> bool:
    """FSDP1's function policies take ``(module, recurse, nonwrapped_numel)`` by these names.

    Older ones take the last in ``**kwargs``.
    """
    function = spec.func if isinstance(spec, functools.partial) else spec
    try:
        return "recurse" in inspect.signature(function).parameters
    except ValueError:  # of some builtins Python knows no signature
        return False


def _auto_wrap(
    model: nn.Module,
    policy: Callable[..., bool],
    ignored: Container[nn.Module],
    ignored_params: Container[int],
) -> Iterator[str]:
    """Units that FSDP1 would wrap: children first, a parent sees what its children left.

    What is ignored does not count.

    (torch/distributed/fsdp/wrap.py, ``_recursive_wrap``)
    """

    def visit(name: str, module: nn.Module) -> tuple[int, list[str]]:
        numel = sum(p.numel() for p in module.parameters() if id(p) not in ignored_params)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0, []
        wrapped = 0
        found: list[str] = []
        for child_name, child in module.named_children():
            if child in ignored:
                continue
            path = f"{name}.{child_name}" if name else child_name
            below, names = visit(path, child)
            wrapped, found = wrapped + below, found + names
        if name and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            return numel, [*found, name]
        return wrapped, found

    return iter(visit("", model)[1])


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # their class says nothing


def repeated_blocks(model: nn.Module) -> list[str]:
    """FQNs of the repeated blocks of `model`, found by structure alone.

    A block is a module with submodules and parameters that has a sibling like it. Lists of blocks
    (children named 0, 1, ...) are looked for first, from the top down; there the class decides, for
    the first block of a list often has a parameter more. Siblings that are plain attributes must
    have one structure (class, and names and ranks of parameters), and count only where no list was
    found inside them.
    """

    def visit(name: str, module: nn.Module) -> list[str]:
        children = [
            (f"{name}.{child}" if name else child, child, sub)
            for child, sub in module.named_children()
            if any(True for _ in sub.parameters())
        ]
        groups: dict[Any, list[str]] = {}
        for path, child, sub in children:
            if any(True for _ in sub.children()):
                by_class = child.isdigit() and type(sub) not in _CONTAINERS
                groups.setdefault(type(sub) if by_class else _structure(sub), []).append(path)
        repeats = [path for paths in groups.values() if len(paths) > 1 for path in paths]
        listed = {path for path, child, _ in children if path in repeats and child.isdigit()}
        found = list(listed)
        deeper = {path: visit(path, sub) for path, _, sub in children if path not in listed}
        for path, below in deeper.items():
            found += below or ([path] if path in repeats else [])
        return found

    return visit("", model)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    params = ((name, p.dim()) for name, p in module.named_parameters(remove_duplicate=False))
    return (type(module), *params)
