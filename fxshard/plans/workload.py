"""What a plan is made for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fxshard._torch import trees
from fxshard.arguments import check_called, check_flag
from fxshard.bytesize import is_count
from fxshard.config.checked import Config
from fxshard.config.options import Options
from fxshard.errors import ConfigError
from fxshard.ir.whole import Whole

Call = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a call of the model


class Changes(Options, total=False):
    """What `Plan.replan` may change: options, and arguments of `fxshard.plan`, as there."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    world_size: int | tuple[int, int]
    micro_batches: int
    no_sync: bool
    loss: Callable[[Any], torch.Tensor] | None
    keep_outputs: bool
    in_flight: int | None


Around = Callable[[], AbstractContextManager[object]]


def entered_once(around: Around) -> Around:
    """`around`, which does nothing inside of itself: what a block like `loss_parallel` sets up is
    gone when an inner one ends.
    """
    inside = False

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        nonlocal inside
        if inside:
            yield
            return
        with around():
            inside = True
            try:
                yield
            finally:
                inside = False

    return entered


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a plan is made for: everything that decides what a step does.

    Attributes:
        module: the plain model.
        call: the ``(args, kwargs)`` of one micro-batch.
        world_size: number of ranks; for a hybrid strategy a pair, replicas x shards.
        config: the options.
        micro_batches: forward and backward passes per step.
        no_sync: all but the last of them run under `FxshardModule.no_sync`.
        loss: what the user computes from the model's output, outside of it; None: nothing.
        keep_outputs: the loop still refers to the model's output in backward.
        tangents: the outputs (flat indices) that backward starts from; None: as
            `fxshard.capture.trace.capture` chooses.
        in_flight: of a pipeline's stage, how many forwards run ahead of the first backward; None:
            all of the step.
        around: gives a block in which the call is as it will be: the ranks of the mesh of a model
            that was parallelised for the plan are there, and what the loop calls the model in. The
            block may be entered again inside of itself (see `entered_once`).
        whole: the step is one program, of `fxshard.compile_step`, and `call` has the target too.
    """

    module: nn.Module
    call: Call
    world_size: int | tuple[int, int]
    config: Config
    micro_batches: int = 1
    no_sync: bool = False
    loss: Callable[[Any], torch.Tensor] | None = None
    keep_outputs: bool = True
    tangents: tuple[int, ...] | None = None
    in_flight: int | None = None
    around: Around = contextlib.nullcontext
    whole: Whole | None = None

    def __post_init__(self) -> None:
        if not is_count(self.micro_batches):
            raise ConfigError(
                f"micro_batches={self.micro_batches!r}: expected how many a step has, an integer "
                f">= 1."
            )
        check_flag("no_sync", self.no_sync)
        if self.in_flight is not None and not is_count(self.in_flight):
            raise ConfigError(
                f"in_flight={self.in_flight!r}: expected how many micro-batches run forward ahead "
                f"of the first backward, an integer >= 1; in 1F1B, how many stages of the "
                f"pipeline there are from this one to the last."
            )
        if self.in_flight is not None and not self.config.pipeline_stage:
            raise ConfigError(
                f"in_flight={self.in_flight} without pipeline_stage=True: in a loop each backward "
                f"follows its forward. Give pipeline_stage=True, or leave in_flight out."
            )
        if self.no_sync and self.config.pipeline_stage:
            raise ConfigError(
                "no_sync=True with pipeline_stage=True: no micro-batch of a stage is reduced, and "
                "the schedule's end reduces their sum. Leave no_sync out."
            )
        if self.loss is not None:
            check_called("loss", self.loss, "what the model returns")
        check_flag("keep_outputs", self.keep_outputs)
        if not self.keep_outputs and self.loss is None:
            raise ConfigError(
                "keep_outputs=False without a loss: the loop holds the outputs that backward "
                "starts from. Give what it computes from them, such as "
                "loss=lambda output: output.loss, and the others are dropped."
            )
        if self.config.optimizer_in_backward and self.micro_batches > 1 and not self.no_sync:
            raise ConfigError(
                "optimizer_in_backward=True with micro_batches > 1: the first micro-batch would "
                "step already. Accumulate under no_sync (no_sync=True), or leave one of them out."
            )

    def changed(self, changes: Mapping[str, Any]) -> Workload:
        """With some of its fields, of the call's ``args`` and ``kwargs``, or options replaced."""
        fixed = {"module", "config", "call", "around", "whole"}
        own = {f.name for f in dataclasses.fields(self)} - fixed
        mine = {name: value for name, value in changes.items() if name in own}
        if "loss" in mine:
            mine.setdefault("tangents", None)  # those of another loss
        args, kwargs = self.call
        mine["call"] = example(changes.get("args", args), changes.get("kwargs", kwargs))
        options = {n: v for n, v in changes.items() if n not in (*own, "args", "kwargs")}
        return dataclasses.replace(self, config=self.config.changed(options), **mine)


def example(args: Any, kwargs: Any) -> Call:
    """The call ``model(*args, **kwargs)``.

    Raises:
        ConfigError: `args` is no tuple, or `kwargs` no dict.
    """
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, (dict, type(None))):
        raise ConfigError(
            f"args is a {type(args).__name__} and kwargs a {type(kwargs).__name__}: expected a "
            f"tuple and a dict, for model(*args, **kwargs). Write args=(x,) for model(x)."
        )
    odd = [name for name in kwargs or () if not isinstance(name, str)]
    if odd:
        raise ConfigError(f"kwargs has the key {odd[0]!r}: expected names of arguments.")
    return tuple(args), kwargs or {}


def is_own(tensor: torch.Tensor) -> bool:
    """True if a tensor is all of its storage."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def without_data(call: Call) -> Call:
    """The same call on meta tensors that share storages as its tensors do."""
    leaves, spec = trees.tree_flatten(call)
    bases: dict[int, torch.Tensor] = {}
    held = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    seen: dict[int, torch.Tensor] = {}
    flat: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            flat.append(leaf)
            continue
        if id(leaf) not in seen:
            storage = leaf.untyped_storage()
            size = storage.nbytes() // leaf.element_size()
            base = bases.setdefault(id(storage), torch.empty(size, dtype=leaf.dtype, device="meta"))
            if base.dtype is not leaf.dtype:  # two dtypes in one storage: they count as two
                base = torch.empty(size, dtype=leaf.dtype, device="meta")
            view = base.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
            seen[id(leaf)] = view.detach().requires_grad_(leaf.requires_grad)
        flat.append(seen[id(leaf)])
    del held
    args, kwargs = trees.tree_unflatten(flat, spec)
    return args, kwargs
