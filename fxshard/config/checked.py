"""The options, checked once: `Config`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.optim import Optimizer

from fxshard.arguments import check_called, check_flag
from fxshard.bytesize import is_size, parse_budget, parse_bytes
from fxshard.config.checkpoints import CHECKPOINTS
from fxshard.config.options import (
    BACKENDS,
    DEVICES,
    FLAGS,
    HYBRID,
    KEEPING,
    PREFETCHES,
    REDUCE_OPS,
    STRATEGIES,
    TORCH_STRATEGIES,
    PrecisionPolicy,
    Prefetched,
    Strategy,
    UnitName,
)
from fxshard.config.precision import Precision
from fxshard.config.sizes import SizeName, named_sizes
from fxshard.errors import ConfigError
from fxshard.hardware import Hardware, hardware_of


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
    offload_activations: bool | int | str | Sequence[UnitName] | None = None
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
    async_tensor_parallel: bool = False
    pipeline_stage: bool = False
    max_variants: int = 16
    device: Literal["cuda"] | torch.device | None = None
    memory_budget: int | str | None = None
    hardware: str | Hardware = "h100"
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
        self._check_offload_activations()
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
        hardware_of(self.hardware)  # refuses unknown names
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", parse_budget(self.memory_budget))
        for policy in self.precisions.values():
            Precision.of(policy)  # refuses fields that are not known
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
            object.__setattr__(self, "strategy", TORCH_STRATEGIES[self.strategy])
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
            told = named_sizes(self.dynamic)
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

    def _check_offload_activations(self) -> None:
        chosen: Any = self.offload_activations
        if chosen is None or isinstance(chosen, bool):
            return
        if is_size(chosen):
            if parse_bytes(chosen) < 1:
                raise ConfigError(
                    f"offload_activations={chosen!r}: bytes are >= 1; False offloads none."
                )
            object.__setattr__(self, "offload_activations", parse_bytes(chosen))
            if self.dynamic:
                raise ConfigError(
                    f"dynamic=... with offload_activations={chosen!r}: which activations are so "
                    f"many bytes depends on the sizes, so that each gets a program. Name modules "
                    f"instead, such as ['layers.*'], or leave one of the two out."
                )
        elif isinstance(chosen, (list, tuple, set, frozenset)) and chosen:
            object.__setattr__(self, "offload_activations", tuple(chosen))
        else:
            one = f" Write [{chosen!r}]." if isinstance(chosen, str) else ""
            raise ConfigError(
                f"offload_activations={chosen!r}: expected True, bytes such as '8GiB', or a list "
                f"of module classes and FQN globs.{one}"
            )

    @property
    def chooses_offloads(self) -> bool | None:
        """True if bytes of ``checkpoint`` choose what is offloaded too; None: on an accelerator."""
        if type(self.checkpoint) is not int or self.offload_activations not in (None, True):
            return False
        if self.pipeline_stage or self.async_tensor_parallel:
            return False
        if self.offload is not None and not self.offload_activations:
            return False  # the link is busy with parameters and gradients
        return True if self.offload_activations or self.device is not None else None

    @property
    def opens_sizes(self) -> bool:
        """True if programs may leave sizes open: none is compiled or made for one size."""
        return self.dynamic is not False and self.backend != "inductor" and not self.of_one_size

    @property
    def of_one_size(self) -> bool:
        """True if what a program does depends on its sizes: chunks, bytes that are offloaded."""
        return bool(self.chunk_loss) or type(self.offload_activations) is int

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
            "offload_activations": "micro-batches overlap, and each would wait for its own copies",
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
            torchs = TORCH_STRATEGIES
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
