"""The options of fxshard, validated once, and the environment variables, parsed once."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import logging
import math
import numbers
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.optim import Optimizer

from fxshard._torch.modules import REDUCES_AS_STORED
from fxshard.arguments import check_called, check_flag
from fxshard.bytesize import is_size, parse_budget, parse_bytes
from fxshard.errors import ConfigError

log: logging.Logger = logging.getLogger("fxshard")

Strategy: TypeAlias = Literal[
    "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"
]
Prefetched: TypeAlias = Literal["pre", "post"]

# Fields of MixedPrecisionPolicy that mean something here; what to do instead of newer ones.
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
_NEWER = {
    "param_dtype_override_fn": "Give a dict from module classes or FQN globs to policies: each "
    "module it names is a unit.",
    "grad_dtype": "Leave it out: gradients are made in param_dtype, reduced in reduce_dtype, and "
    "have the dtype of their parameters.",
}
# torch's name of each strategy (torch/distributed/fsdp/api.py) -> ours.
_TORCH_STRATEGIES: dict[ShardingStrategy, Strategy] = {
    ShardingStrategy.FULL_SHARD: "full_shard",
    ShardingStrategy.SHARD_GRAD_OP: "shard_grad_op",
    ShardingStrategy.NO_SHARD: "no_shard",
    ShardingStrategy.HYBRID_SHARD: "hybrid_shard",
    ShardingStrategy._HYBRID_SHARD_ZERO2: "hybrid_shard_zero2",
}
STRATEGIES = tuple(_TORCH_STRATEGIES.values())
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")  # those that take two dimensions of ranks
KEEPING = ("shard_grad_op", "hybrid_shard_zero2")  # those that leave units unsharded after forward
CHECKPOINTS = ("full", "selective")
BACKENDS = ("eager", "inductor")
PREFETCHES = ("pre", "post")
REDUCE_OPS = ("avg", "sum", "max", "min")
DEVICES = (None, "cuda")
FLAGS = (
    *("full_precision_in_eval", "sync_module_states", "optimizer_in_backward"),
    *("ranks_may_differ", "pipeline_stage"),
)


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of one unit; what torch's two policy classes say, in one form.

    Attributes:
        param_dtype: of unsharded parameters, and so of the gather and of compute; None: as stored.
        reduce_dtype: in which gradients are reduced; None: that of the unsharded gradient.
        output_dtype: to which floating outputs of the module are cast; None: not at all.
        buffer_dtype: to which floating buffers are cast when the model is sharded; None: not.
        cast_inputs: cast floating inputs of the module to `param_dtype`.
        cast_root_inputs: the same for the root module.
        keep_low_precision_grads: ``.grad`` stays in the dtype in which it was reduced.
        full_precision_classes: modules of these classes compute in fp32 all the same.
        reduce_as_stored: where `reduce_dtype` is None, gradients are reduced in the dtype of the
            sharded parameters: what a `MixedPrecisionPolicy` says since torch 2.15
            (torch/distributed/fsdp/_fully_shard/_fsdp_api.py).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    cast_root_inputs: bool = True
    keep_low_precision_grads: bool = False
    full_precision_classes: tuple[type, ...] = ()
    reduce_as_stored: bool = False

    def computes_in(self, stored: torch.dtype) -> torch.dtype:
        """The dtype of an unsharded parameter that is stored in another: floating ones are cast."""
        wanted = self.param_dtype
        return wanted if wanted is not None and stored.is_floating_point else stored

    def reduces_in(self, made: torch.dtype) -> torch.dtype:
        """The dtype in which gradients made in another are reduced: floating ones are cast."""
        wanted = self.reduce_dtype
        return wanted if wanted is not None and made.is_floating_point else made

    @classmethod
    def of(cls, policy: Any) -> Precision:
        """From torch's `MixedPrecisionPolicy` or `MixedPrecision`.

        Raises:
            ConfigError: it is neither, or sets a field that newer torches have.
        """
        if isinstance(policy, Precision):
            return policy
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(policy, name, None)
            legal = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if isinstance(policy, (MixedPrecisionPolicy, MixedPrecision)) and not (
                dtype is None or legal
            ):
                raise ConfigError(
                    f"mixed_precision: {name}={dtype!r}: expected a floating torch.dtype, such as "
                    f"torch.bfloat16, or None."
                )
        if isinstance(policy, MixedPrecisionPolicy):
            for field in dataclasses.fields(policy):  # newer torches have more of them
                if field.name not in _POLICY and getattr(policy, field.name) != field.default:
                    instead = _NEWER.get(field.name, "Leave it out.")
                    raise ConfigError(f"mixed_precision: {field.name} is not supported. {instead}")
            return cls(
                param_dtype=policy.param_dtype,
                reduce_dtype=policy.reduce_dtype,
                output_dtype=policy.output_dtype,
                cast_inputs=policy.cast_forward_inputs,
                cast_root_inputs=policy.cast_forward_inputs,
                reduce_as_stored=REDUCES_AS_STORED and policy.param_dtype is not None,
            )
        if isinstance(policy, MixedPrecision):
            return cls(
                param_dtype=policy.param_dtype,
                reduce_dtype=policy.reduce_dtype,
                buffer_dtype=policy.buffer_dtype,
                cast_inputs=policy.cast_forward_inputs,
                cast_root_inputs=policy.cast_root_forward_inputs,
                keep_low_precision_grads=policy.keep_low_precision_grads,
                full_precision_classes=tuple(policy._module_classes_to_ignore),
            )
        raise ConfigError(
            f"mixed_precision={policy!r}: expected torch.distributed.fsdp.MixedPrecisionPolicy or "
            f"MixedPrecision, or a dict from module classes or FQN globs to such policies."
        )


class SizeName(str):
    """Name of an open size that was a ``torch.export.Dim``.

    Attributes:
        least, most: its bounds.
    """

    least: int
    most: float

    @classmethod
    def of(cls, given: Any) -> str:
        """The name that the user gave, or that of a ``Dim``."""
        if isinstance(given, str):
            return given
        name = cls(given.__name__)
        most = float(given.max)
        name.least, name.most = max(int(given.min), 1), int(most) if most.is_integer() else most
        return name


def _named_sizes(given: Any) -> dict[str, tuple[tuple[str, int], ...]]:
    """``dynamic`` as names of sizes and where a call has them, however it is written."""
    found: dict[str, list[tuple[str, int]]] = {}
    for key, places in given.items():
        if isinstance(places, Mapping):  # argument -> dimension -> Dim, as torch.export has it
            for dim, name in places.items():
                if name is not None:
                    found.setdefault(SizeName.of(name), []).append((str(key), _dimension(dim)))
        else:
            several = [(str(argument), _dimension(dim)) for argument, dim in places]
            if not several or not key:
                raise ValueError("a size without a name, or of no dimension")
            found.setdefault(SizeName.of(key), []).extend(several)
    return {name: tuple(places) for name, places in found.items()}


def _dimension(value: Any) -> int:
    if not _is_count(value, least=0):
        raise ValueError("a dimension is an integer >= 0")
    return int(value)


UnitName: TypeAlias = type[torch.nn.Module] | str
PrecisionPolicy: TypeAlias = MixedPrecisionPolicy | MixedPrecision | Precision


class Options(TypedDict, total=False):
    """The options of `fxshard.plan`, `compile`, `shard`, `validate` and `tune`, each with its type.

    The text below each key says what it does. `Config` has the defaults, and checks the values.
    """

    strategy: Strategy | ShardingStrategy | Mapping[Any, Strategy | ShardingStrategy]
    """What is sharded. ``"full_shard"``: parameters, gradients and optimizer states; parameters are
    unsharded again in backward. ``"shard_grad_op"``: the same, but a unit stays unsharded from its
    forward to its backward. ``"no_shard"``: every rank holds everything, gradients are all-reduced.
    ``"hybrid_shard"``, ``"hybrid_shard_zero2"``: the first two inside the shard dimension of a 2-D
    mesh, copies along its replicate dimension. torch's `ShardingStrategy` values are accepted.
    Or a dict from module classes or FQN globs, of units, to such values ("" is the root and the
    default, else ``"full_shard"``): beside hybrid units, others are sharded over both dimensions.
    """

    units: Iterable[UnitName | Sequence[UnitName]] | Callable[..., Any] | None
    """Which modules' parameters are gathered and reduced together. None finds repeated blocks in
    the module tree; a list of module classes or FQN globs (``*`` matches one name, ``**`` any
    number), in which a list of these is one unit of several modules; a callable
    ``(fqn, module) -> bool``; or a ``torch.distributed.fsdp.wrap`` policy.
    """

    ignored: Iterable[torch.nn.Module | torch.Tensor | str] | None
    """Modules, parameters or FQN globs that stay unsharded and are never communicated."""

    shard_placement_fn: Callable[[torch.nn.Parameter], Any] | Mapping[str, Any] | None
    """Along which dimension each parameter is sharded: a function that is called with it and
    returns ``Shard(dim)``, or None for ``Shard(0)``, the default, or torch's
    ``ShardPlacementResult``, with a mesh of its own; or a dict from FQNs to those.
    Along another dimension than 0 what is gathered is copied into place, and so are gradients
    before they are reduced.
    """

    reshard_after_forward: bool | int | Mapping[Any, bool | int] | None
    """What the parameters of a unit become between forward and backward. None: as `strategy` says;
    True: sharded; False: they stay unsharded; an integer n: sharded over groups of n neighbouring
    ranks. Or a dict from module classes or FQN globs to such values.
    """

    mixed_precision: PrecisionPolicy | Mapping[Any, PrecisionPolicy | None] | None
    """None, torch's `MixedPrecisionPolicy` or `MixedPrecision`, or a dict from module classes or
    FQN globs ("" is the root and the default) to such policies; what a key names becomes a unit.
    """

    full_precision_in_eval: bool
    """In eval mode, `mixed_precision` has no effect."""

    forward_prefetch: int | Prefetched | None
    """How many units ahead an unshard is launched in forward; "pre" and FSDP1's True are 1, None,
    False and "post" are 0.
    """

    backward_prefetch: int | Prefetched | BackwardPrefetch | None
    """The same in backward; "pre" is 1; "post" launches after the compute of the unit before and
    before its reduction, which it overlaps; torch's `BackwardPrefetch` is accepted.
    """

    max_inflight: int | None
    """How many units at most are unsharded at any point of the step, those that compute, such as
    the root, included; launches move back to hold it. None: no limit.
    """

    max_bucket_bytes: int | str | None
    """A unit with more is gathered and reduced in several parts, in the order of first use (bytes,
    or text such as "25MiB"; see `fxshard.passes.bucket`). None: no limit.
    """

    min_bucket_bytes: int | str | None
    """Neighbouring units with less (bytes, or text) are gathered and reduced together. None: none.
    """

    pack_bytes: int | str
    """Parameters with less (bytes, or text) share one buffer in a collective; 0: each has its own.
    """

    checkpoint: int | str | Callable[..., Any] | Mapping[Any, Any] | None
    """Activation checkpointing, besides the model's own. None: none. If the option is not given and
    ``backend="inductor"``, the default is ``"selective"``. ``"full"``: of each unit's forward only
    its inputs are saved, the rest is recomputed in backward; ``"selective"``: what matrix
    multiplications, convolutions and attention return is saved too; bytes, or text such as "2GiB":
    what each unit saves is chosen so that activations which live from forward to backward are at
    most that on a rank, and the least is recomputed (see `fxshard.cost.activations`); or a policy
    as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it, ``(ctx, op, *args,
    **kwargs) -> CheckpointPolicy``. Or a dict from module classes or FQN globs to such values,
    without bytes: what its keys name is checkpointed.
    """

    offload: OffloadPolicy | CPUOffload | None
    """None, torch's `CPUOffloadPolicy` or `CPUOffload`: shards, sharded gradients and optimizer
    states live on the CPU.
    """

    reduce_op: Literal["avg", "sum", "max", "min"]
    """How gradients of ranks become one. With "max" and "min" gloo may lose a NaN that some rank
    has (see `fxshard.runtime.world.backends`).
    """

    gradient_divide_factor: float | None
    """Divide by this instead of by the number of ranks ("avg" only)."""

    gradient_predivide_factor: float | None
    """How much of that division is done before the reduction ("avg" only)."""

    param_init_fn: Callable[[torch.nn.Module], Any] | None
    """Called with each module that has parameters on the meta device, to fill them; None calls its
    ``reset_parameters``.
    """

    sync_module_states: bool
    """Rank 0's parameters and buffers are given to all ranks."""

    backend: Literal["eager", "inductor"]
    """``"eager"``: compute regions run op by op, bitwise with eager PyTorch. ``"inductor"``: each
    distinct region is compiled once (see `fxshard.codegen.regions`).
    """

    optimizer: Callable[..., Optimizer] | Optimizer | None
    """A callable ``params -> torch.optim.Optimizer``; its real ``step`` is analysed. A callable
    whose argument is named ``named_parameters`` gets ``(FQN, parameter)`` pairs; one that makes a
    list of optimizers, such as Muon and AdamW, lets them step one after the other. Or an optimizer
    instance over all parameters, whose class and default options are taken; one with groups,
    changed options or state needs a callable.
    """

    optimizer_in_backward: bool
    """The program steps the parameters of a unit as soon as their gradients are reduced, and frees
    the gradients; see `FxshardModule.optimizer`.
    """

    dynamic: Mapping[Any, Any] | Literal[False] | None
    """Which sizes of the inputs one program leaves open, so that it serves calls of other sizes
    too. None: those that turn out to differ between calls; False: none; or names for dimensions,
    ``{"seq": [("input_ids", 1), ("labels", 1)]}``, which are open from the first call on
    (dimensions under one name have one size), besides those that turn out to differ. A name may be
    a ``torch.export.Dim``; so may be written, as torch.export has it,
    ``{"input_ids": {1: Dim("seq")}}``; formulas hold within its bounds. With
    ``backend="inductor"``, none: each size is compiled for.
    """

    data_sizes: int | Mapping[str, int | Sequence[int]] | None
    """How large the sizes are that the model finds in its data (rows that a mask selects, tokens
    that an expert receives), at most: a number for all, or by the module that finds them, by FQN or
    pattern (``{"layers.*.moe": 512}``), a number for each or one for all of a module, in the order
    of forward. Bytes and times are computed for these sizes, and are bounds of those of fewer; what
    runs takes what the data has. None: there are no bytes, and `UnknownSizeError` says so.
    """

    chunk_loss: bool | int
    """A linear head and its cross entropy, in the model, are computed on some of the rows (tokens) at
    a time: that many, or, True, as many as a rule says. Forward computes their gradients too, so
    that neither the logits nor their gradient exist in full (see `fxshard.passes.chunk_loss` and
    docs/chunk-loss.md). A model whose logits are returned or read elsewhere is refused. Each size of
    a batch gets a program of its own.
    """

    ranks_may_differ: bool
    """The batches of ranks may take different ways through the model (a modality that one rank's
    batch lacks, an expert without tokens, a skipped layer). In each call ranks tell each other what
    they need before the first collective, and each takes part in what any of them needs; a gradient
    that a rank does not have counts as zeros. Without it such calls are refused.
    """

    pipeline_stage: bool
    """The model is a stage of a pipeline, for ``torch.distributed.pipelining``: each backward adds
    to unsharded gradients, which are reduced when the schedule says so, after its last micro-batch.
    Units with ``reshard_after_forward=False`` are gathered once per schedule. See
    docs/pipeline-parallel.md.
    """

    max_variants: int
    """How many programs a model may get, for calls that no earlier one serves."""

    device: Literal["cuda"] | torch.device | None
    """None: plan for the device that the model is on. ``"cuda"`` (or torch's device of that type):
    `plan` for one on a machine without it (see docs/cuda.md).
    """

    memory_budget: int | str | None
    """Bytes of one rank, or text such as "80GiB": what is left at its default of
    `reshard_after_forward`, `forward_prefetch`, `backward_prefetch`, `checkpoint` and `offload` is
    chosen so that the step fits at the least estimated time (see `fxshard.planner.budget`), or the
    model is refused with the table of what was tried.
    """

    passes: Sequence[Any] | Callable[[list[Any]], Sequence[Any]] | None
    """A pipeline in place of the default one, or a function that makes it of the default list,
    ``lambda passes: [*passes, Mine()]`` (see `fxshard.pipeline`).
    """


@dataclasses.dataclass(frozen=True)
class Config:
    """The `Options`, checked: immutable; unknown names and values are refused.

    Its fields are the keys of `Options`, with their defaults; what each means stands there.

    Attributes:
        given: names of the options that the user has set, be it to their default. No option itself;
            a field, so that a Config made of this one (`changed`, `dataclasses.replace`, pickle)
            has it too.
    """

    strategy: Strategy | ShardingStrategy | Mapping[Any, Strategy | ShardingStrategy] = "full_shard"
    units: Iterable[UnitName | Sequence[UnitName]] | Callable[..., Any] | None = None
    ignored: Iterable[torch.nn.Module | torch.Tensor | str] | None = ()
    shard_placement_fn: Callable[[torch.nn.Parameter], Any] | Mapping[str, Any] | None = None
    reshard_after_forward: bool | int | Mapping[Any, bool | int] | None = None
    mixed_precision: PrecisionPolicy | Mapping[Any, PrecisionPolicy | None] | None = None
    full_precision_in_eval: bool = False
    forward_prefetch: int | Prefetched | None = 1
    backward_prefetch: int | Prefetched | BackwardPrefetch | None = 1
    max_inflight: int | None = None
    max_bucket_bytes: int | str | None = None
    min_bucket_bytes: int | str | None = None
    pack_bytes: int | str = "1MiB"
    checkpoint: int | str | Callable[..., Any] | Mapping[Any, Any] | None = None
    offload: OffloadPolicy | CPUOffload | None = None
    reduce_op: Literal["avg", "sum", "max", "min"] = "avg"
    gradient_divide_factor: float | None = None
    gradient_predivide_factor: float | None = None
    param_init_fn: Callable[[torch.nn.Module], Any] | None = None
    sync_module_states: bool = False
    backend: Literal["eager", "inductor"] = "eager"
    optimizer: Callable[..., Optimizer] | Optimizer | None = None
    optimizer_in_backward: bool = False
    dynamic: Mapping[Any, Any] | Literal[False] | None = None
    data_sizes: int | Mapping[str, int | Sequence[int]] | None = None
    chunk_loss: bool | int = False
    ranks_may_differ: bool = False
    pipeline_stage: bool = False
    max_variants: int = 16
    device: Literal["cuda"] | torch.device | None = None
    memory_budget: int | str | None = None
    passes: Sequence[Any] | Callable[[list[Any]], Sequence[Any]] | None = None
    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changed = {name for name in self.names() if getattr(self, name) is not defaults[name]}
        self._check_flags()
        self._check_lists()
        self._check_functions()
        self._accept_torch_names()
        self._check_strategies()
        _one_of("backend", self.backend, BACKENDS)
        _one_of("reduce_op", self.reduce_op, REDUCE_OPS)
        for name in ("forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            known = value in PREFETCHES if isinstance(value, str) else _is_count(value, least=0)
            if not known:
                raise ConfigError(
                    f"{name}={value!r}: expected an integer >= 0 (units ahead), "
                    f"{' or '.join(map(repr, PREFETCHES))}."
                )
        if self.max_inflight is not None and not _is_count(self.max_inflight, least=1):
            raise ConfigError(
                f"max_inflight={self.max_inflight!r}: expected None or an integer >= 1 (units that "
                f"may be unsharded at once)."
            )
        self._check_buckets()
        self._check_dynamic()
        self._check_data_sizes()
        self._check_chunk_loss()
        for name in ("gradient_divide_factor", "gradient_predivide_factor"):
            value = getattr(self, name)
            if value is not None and not _is_factor(value):
                raise ConfigError(f"{name}={value!r}: expected a number > 0, and a finite one.")
            if value is not None:
                object.__setattr__(self, name, float(value))
            if value is not None and self.reduce_op != "avg":
                raise ConfigError(
                    f"{name}={value!r} has no meaning with reduce_op={self.reduce_op!r}: only an "
                    f"average divides. Leave one of the two out."
                )
        optimizer = self.optimizer
        if not (optimizer is None or callable(optimizer) or isinstance(optimizer, Optimizer)):
            raise ConfigError(
                f"optimizer={optimizer!r}: expected a callable params -> torch.optim.Optimizer, "
                f"such as lambda params: torch.optim.AdamW(params, lr=1e-3)."
            )
        if self.optimizer_in_backward and optimizer is None:
            raise ConfigError("optimizer_in_backward=True needs an optimizer=... to run.")
        self._check_reshard()
        self._check_differing()
        self._check_stage()
        self._check_checkpoint()
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", parse_budget(self.memory_budget))
        for policy in self.precisions.values():
            if Precision.of(policy).buffer_dtype is not None and self.full_precision_in_eval:
                raise ConfigError(
                    "full_precision_in_eval=True with a buffer_dtype: buffers are cast for good "
                    "when the model is sharded. Leave buffer_dtype out."
                )
        if self.given:  # of another Config, whose values may be defaults in their parsed form
            plain = Config()
            changed = {name for name in changed if getattr(self, name) != getattr(plain, name)}
        object.__setattr__(self, "given", self.given | changed)

    def _check_flags(self) -> None:
        for name in FLAGS:
            check_flag(name, getattr(self, name))

    def _check_lists(self) -> None:
        """`units` and `ignored` are read repeatedly: a set or a generator becomes a tuple."""
        if self.ignored is None:
            object.__setattr__(self, "ignored", ())
        for name, what in (
            ("units", "module classes and FQN globs"),
            ("ignored", "modules, parameters and FQN globs"),
        ):
            value = getattr(self, name)
            one = value.__name__ if isinstance(value, type) else repr(value)
            if isinstance(value, (torch.nn.Module, torch.Tensor)):
                one = f"<{type(value).__name__}>"
            if isinstance(value, (str, type, torch.nn.Module, torch.Tensor)):
                raise ConfigError(f"{name}={one}: expected a list of {what}; write {name}=[{one}].")
            is_list = isinstance(value, (list, tuple, Mapping, bytes)) or callable(value)
            if isinstance(value, Iterable) and not is_list:
                object.__setattr__(self, name, tuple(value))
        if not isinstance(self.ignored, (list, tuple)):
            raise ConfigError(
                f"ignored={self.ignored!r}: expected a list of modules, parameters and FQN globs, "
                f"such as [model.head, 'blocks.0.*']."
            )

    def _check_functions(self) -> None:
        if self.param_init_fn is not None:
            check_called("param_init_fn", self.param_init_fn, "a module")
        if not (self.shard_placement_fn is None or isinstance(self.shard_placement_fn, Mapping)):
            check_called("shard_placement_fn", self.shard_placement_fn, "a parameter")
        if self.passes is None:
            return
        given: Any = self.passes
        listed = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        if listed and given and all(map(is_pass, given)):
            return
        if listed or not callable(self.passes) or isinstance(self.passes, type):
            raise ConfigError(
                f"passes={self.passes!r}: expected a list of passes (instances of classes with "
                f"name, requires, ensures and apply), or a function that takes the default list "
                f"(fxshard.pipeline.default_passes) and returns one."
            )
        check_called("passes", self.passes, "the default list")

    def _accept_torch_names(self) -> None:
        """Replace torch's enums and classes by what they mean here."""
        if isinstance(self.strategy, ShardingStrategy):
            object.__setattr__(self, "strategy", _TORCH_STRATEGIES[self.strategy])
        if self.backward_prefetch is None:
            object.__setattr__(self, "backward_prefetch", 0)
        elif isinstance(self.backward_prefetch, BackwardPrefetch):
            before = self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
            object.__setattr__(self, "backward_prefetch", "pre" if before else "post")
        if self.forward_prefetch is None or isinstance(self.forward_prefetch, bool):
            object.__setattr__(self, "forward_prefetch", int(self.forward_prefetch or 0))
        offload = self.offload
        if isinstance(offload, CPUOffload):
            offload = CPUOffloadPolicy() if offload.offload_params else None
        elif type(offload) is OffloadPolicy:  # torch's way to say: no offload
            offload = None
        if not (offload is None or isinstance(offload, CPUOffloadPolicy)):
            raise ConfigError(
                f"offload={self.offload!r}: expected torch.distributed.fsdp.CPUOffloadPolicy() or "
                f"CPUOffload(offload_params=True)."
            )
        object.__setattr__(self, "offload", offload)
        device: Any = self.device
        if isinstance(device, torch.device):
            device = device.type
        if device not in DEVICES:
            raise ConfigError(
                f"device={self.device!r} is not supported; legal: {', '.join(map(repr, DEVICES))}. "
                f"Without it, a plan is for the device that the model is on."
            )
        object.__setattr__(self, "device", device)

    def check_runs_on(self, device: torch.device) -> None:
        """Refuse to run what is planned for another device.

        Raises:
            ConfigError: `device` of the options is another than the one that computes.
        """
        if self.device not in (None, device.type):
            raise ConfigError(
                f"device={self.device!r} with a model that computes on {device.type!r}: the option "
                f"is for fxshard.plan, which runs nothing. Leave it out, or move the model to "
                f"{self.device!r}."
            )

    @property
    def bounds(self) -> dict[str, tuple[int, float]]:
        """The least and the largest size of each name of ``dynamic`` that was a ``Dim``."""
        names = [name for name in self.dynamic or () if isinstance(name, SizeName)]
        return {name: (name.least, name.most) for name in names}

    def _check_dynamic(self) -> None:
        if not _is_count(self.max_variants, least=1):
            raise ConfigError(f"max_variants={self.max_variants!r}: expected an integer >= 1.")
        if self.dynamic is None or self.dynamic is False:
            return
        if self.backend == "inductor":
            raise ConfigError(
                "dynamic=... with backend='inductor': regions are compiled for the sizes of one "
                "call, so that each size gets a program. Leave one of the two out."
            )
        try:
            told = _named_sizes(self.dynamic)
        except (AttributeError, TypeError, ValueError):
            raise ConfigError(
                f"dynamic={self.dynamic!r}: expected None, False, or names for dimensions, such as "
                f'{{"batch": [("input_ids", 0), ("labels", 0)]}}; or as torch.export has it, '
                f'{{"input_ids": {{0: Dim("batch")}}}}.'
            ) from None
        if "world" in told:
            raise ConfigError("dynamic={'world': ...}: so formulas call the number of ranks.")
        object.__setattr__(self, "dynamic", told)

    def _check_data_sizes(self) -> None:
        told = self.data_sizes
        sizes = told.values() if isinstance(told, Mapping) else [told]
        lists = [size if isinstance(size, (list, tuple)) else [size] for size in sizes]
        if told is not None and not all(_is_count(n, least=0) for some in lists for n in some):
            raise ConfigError(
                f"data_sizes={told!r}: expected sizes >= 0: one for all that the model finds in "
                f'its data, or by the module that finds them: {{"layers.*.moe": 512}}.'
            )

    def _check_chunk_loss(self) -> None:
        rows = self.chunk_loss
        if not (isinstance(rows, bool) or _is_count(rows, least=1)):
            raise ConfigError(
                f"chunk_loss={rows!r}: expected False, True, or the rows (tokens) of a chunk, an "
                f"integer >= 1."
            )
        if rows and self.dynamic:
            raise ConfigError(
                "dynamic=... with chunk_loss: a program has a copy of the loss for each chunk, so "
                "that each size gets a program. Leave one of the two out."
            )

    @property
    def opens_sizes(self) -> bool:
        """True if programs may leave sizes open: none is compiled or cut into chunks."""
        return self.dynamic is not False and self.backend != "inductor" and not self.chunk_loss

    def _check_checkpoint(self) -> None:
        value: Any = self.checkpoint
        if is_size(value):
            object.__setattr__(self, "checkpoint", parse_bytes(value))
            if parse_bytes(value) < 0:
                raise ConfigError(f"checkpoint={value!r}: bytes are >= 0.")
            return
        for policy in value.values() if isinstance(value, Mapping) else [value]:
            if not (policy is None or policy in CHECKPOINTS or callable(policy)):
                whole = " Bytes are a budget of all units together." if is_size(policy) else ""
                raise ConfigError(
                    f"checkpoint={policy!r}: expected {', '.join(map(repr, CHECKPOINTS))}, a "
                    f"policy (ctx, op, *args, **kwargs) -> CheckpointPolicy, or a "
                    f"dict from module classes or FQN globs to these; or bytes such as '2GiB'."
                    f"{whole}"
                )

    def _check_buckets(self) -> None:
        for name in ("max_bucket_bytes", "min_bucket_bytes", "pack_bytes"):
            value = getattr(self, name)
            if value is None and name != "pack_bytes":
                continue
            if not is_size(value) or parse_bytes(value) < (name != "pack_bytes"):
                raise ConfigError(
                    f"{name}={value!r}: expected bytes > 0, or text such as '25MiB'"
                    f"{'; 0 packs nothing' if name == 'pack_bytes' else '; None is no limit'}."
                )
            object.__setattr__(self, name, parse_bytes(value))
        least, most = self.min_bucket_bytes, self.max_bucket_bytes
        if isinstance(least, int) and isinstance(most, int) and least > most:
            raise ConfigError(
                f"min_bucket_bytes={least} is more than max_bucket_bytes={most}: no bucket is both."
            )

    def _check_differing(self) -> None:
        """Ranks that differ have one order of collectives: what moves it by rank is refused."""
        if not self.ranks_may_differ:
            return
        for name, legal, why in (
            ("reduce_op", ("avg", "sum"), "a rank without a gradient counts as zeros"),
            ("max_inflight", (None,), "launches would wait for what one rank alone computes"),
            ("forward_prefetch", (), "launches would wait for what one rank alone computes"),
            ("backward_prefetch", (), "launches would wait for what one rank alone computes"),
        ):
            value = getattr(self, name)
            if (value not in legal) if legal else value == "post":
                raise ConfigError(
                    f"{name}={value!r} with ranks_may_differ=True: {why}. Leave one of the two out."
                )

    def _check_stage(self) -> None:
        """The gradients of a stage are reduced outside of its program."""
        if not self.pipeline_stage:
            return
        for name, why in {
            "optimizer_in_backward": "no backward of a stage has all gradients of a step",
            "ranks_may_differ": "ranks agree on what a call reduces, and none of a stage's does",
            "max_inflight": "what stays unsharded for a whole schedule would count in it",
        }.items():
            value = getattr(self, name)
            if value not in (False, None):
                raise ConfigError(
                    f"{name}={value!r} with pipeline_stage=True: {why}. Leave one of the two out."
                )

    def _check_strategies(self) -> None:
        """One strategy, or several; where all are the same, they are one."""
        given: Any = self.strategy
        if isinstance(given, Mapping):
            torchs = _TORCH_STRATEGIES
            given = {
                key: torchs[each] if isinstance(each, ShardingStrategy) else each
                for key, each in {"": "full_shard", **given}.items()
            }
            if len({*map(repr, given.values())}) == 1:
                given = given[""]
            object.__setattr__(self, "strategy", given)
        for each in given.values() if isinstance(given, Mapping) else [given]:
            _one_of("strategy", each, STRATEGIES)

    def _check_reshard(self) -> None:
        value = self.reshard_after_forward
        each = list(value.values()) if isinstance(value, Mapping) else [value]
        for item in each:
            if item is not None and not (isinstance(item, bool) or _is_count(item)):
                raise ConfigError(
                    f"reshard_after_forward={item!r}: expected True, False, or the number of ranks "
                    f"(>= 2) to shard over between forward and backward."
                )
        if self.strategy == "no_shard" and any(each):
            raise ConfigError(
                "reshard_after_forward has no meaning with strategy='no_shard': nothing is sharded."
            )

    @property
    def precisions(self) -> Mapping[Any, Any]:
        """`mixed_precision` as a dict from class or FQN glob to policy; "" is the default."""
        if self.mixed_precision is None:
            return {}
        if isinstance(self.mixed_precision, Mapping):
            return self.mixed_precision
        return {"": self.mixed_precision}

    @property
    def offload_policy(self) -> CPUOffloadPolicy | None:
        """`offload`, without torch's other names."""
        found: Any = self.offload
        policy: CPUOffloadPolicy | None = found
        return policy

    @property
    def prefetch(self) -> tuple[int | Prefetched, int | Prefetched]:
        """`forward_prefetch` and `backward_prefetch`, without torch's names."""
        forward: Any = self.forward_prefetch
        backward: Any = self.backward_prefetch
        return forward, backward

    @property
    def strategies(self) -> dict[Any, str]:
        """`strategy` as a dict from class or FQN glob to strategy; "" is the default."""
        given: Any = self.strategy
        return dict(given) if isinstance(given, Mapping) else {"": given}

    @property
    def keeps_unsharded(self) -> bool:
        """True if `strategy` leaves all units unsharded between forward and backward."""
        return self.strategy in KEEPING

    @property
    def hybrid(self) -> bool:
        """True if `strategy`, or one of them, takes a 2-D mesh, replicate x shard."""
        return any(each in HYBRID for each in self.strategies.values())

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Config:
        """Build a Config from keyword options.

        Raises:
            ConfigError: an unknown name (the message lists the legal ones and the nearest).
        """
        legal = cls.names()
        for name in options:
            if name not in legal:
                near = difflib.get_close_matches(name, legal, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"unknown option {name!r}.{hint} Options are: {', '.join(legal)}."
                )
        return cls(**options, given=frozenset(options))

    @classmethod
    def names(cls) -> list[str]:
        """The names of all options."""
        return [field.name for field in dataclasses.fields(cls) if field.name != "given"]

    def changed(self, changes: Mapping[str, Any]) -> Config:
        """A copy with some options changed; what the user has not given stays not given."""
        return Config.from_options({n: getattr(self, n) for n in self.given} | dict(changes))


@functools.cache
def option_docs() -> dict[str, str]:
    """What `Options` says of each option, in one line; empty where there is no source to read."""
    try:
        source = inspect.getsource(sys.modules[__name__])
    except OSError:
        return {}
    found = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in found if node.name == Options.__name__)
    return {
        key.target.id: " ".join(str(doc.value.value).split())
        for key, doc in itertools.pairwise(body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


F = TypeVar("F", bound=Callable[..., Any])


def with_options(function: F) -> F:
    """Put every option, with its default and what `Options` says of it, into ``**options:``."""
    lines = (function.__doc__ or "").splitlines()
    start = next((n for n, line in enumerate(lines) if line.lstrip().startswith("**options:")), -1)
    if start < 0:
        return function
    margin = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > margin:
        end += 1
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    listed = [
        textwrap.fill(
            f"{name}: (default {defaults[name]!r}) {doc}",
            width=100,
            initial_indent=" " * (margin + 4),
            subsequent_indent=" " * (margin + 8),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, doc in option_docs().items()
    ]
    function.__doc__ = "\n".join([*lines[:end], *listed, *lines[end:]])
    return function


@dataclasses.dataclass(frozen=True)
class Environment:
    """What ``FXSHARD_*`` variables say (documented in docs/env.md).

    Attributes:
        debug: 0 quiet; 1 pass list and timing; 2 op-count differences; 3 text differences per
            pass; 4 full dumps.
        dump_dir: where dumps go (None: standard error).
        flat_capture: trace every block of a deep model (see `fxshard.capture.repeat`).
    """

    debug: int = 0
    dump_dir: Path | None = None
    flat_capture: bool = False


def environment() -> Environment:
    """Parse the environment.

    Raises:
        ConfigError: ``FXSHARD_DEBUG`` is not an integer from 0 to 4, or ``FXSHARD_FLAT_CAPTURE``
            neither 0 nor 1, or ``FXSHARD_PROGRESS`` is neither (see `fxshard.host.progress`).
    """
    raw = os.environ.get("FXSHARD_DEBUG", "0")
    if raw not in {"0", "1", "2", "3", "4"}:
        raise ConfigError(f"FXSHARD_DEBUG={raw!r}: expected 0, 1, 2, 3 or 4 (docs/env.md).")
    dump_dir = os.environ.get("FXSHARD_DUMP_DIR")
    for name in ("FXSHARD_FLAT_CAPTURE", "FXSHARD_PROGRESS"):
        flag = os.environ.get(name, "0")
        if flag not in {"0", "1"}:
            raise ConfigError(f"{name}={flag!r}: expected 0 or 1 (docs/env.md).")
    flat = os.environ.get("FXSHARD_FLAT_CAPTURE", "0")
    return Environment(int(raw), Path(dump_dir) if dump_dir else None, flat == "1")


def notice(line: str) -> None:
    """One line on what cost time: to the logger, and to standard error if FXSHARD_DEBUG is set."""
    log.info("fxshard: %s", line)
    if "FXSHARD_DEBUG" in os.environ:
        print(f"[fxshard] {line}", file=sys.stderr)


def is_pass(value: object) -> bool:
    """True if it is of the form of `fxshard.pipeline.Pass`."""
    own = ("name", "requires", "ensures", "apply")
    return not isinstance(value, type) and all(hasattr(value, name) for name in own)


def _is_factor(value: object) -> bool:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]  # NaN is neither


def _is_count(value: object, least: int = 2) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _one_of(name: str, value: object, legal: Sequence[str]) -> None:
    if value not in legal:
        raise ConfigError(f"{name}={value!r} is not supported; legal: {', '.join(legal)}.")


def grid(world_size: Any, config: Config) -> tuple[int, int]:
    """Replicas and shards of a world under a strategy.

    Raises:
        ConfigError: `world_size` is no number of ranks, or a pair where none is meant.
    """
    if isinstance(world_size, tuple) and len(world_size) == 2:
        for size in world_size:
            _check_world_size(size)
        if not config.hybrid:
            raise ConfigError(
                f"world_size={world_size!r}: strategy {config.strategy!r} has one dimension. Give "
                f"one number, or strategy='hybrid_shard'."
            )
        return world_size
    _check_world_size(world_size)
    if config.hybrid:
        raise ConfigError(
            f"world_size={world_size!r}: strategy {config.strategy!r} has two dimensions. Give a "
            f"pair, replicas x shards, such as world_size=({world_size // 8 or 1}, 8)."
        )
    return (world_size, 1) if config.strategy == "no_shard" else (1, world_size)


def _check_world_size(world_size: Any) -> None:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: expected a whole number of ranks >= 1.")
