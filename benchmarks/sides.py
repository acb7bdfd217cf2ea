"""The ways to run a step that are compared, each made from the same model with the same weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy

import fxshard
from benchmarks.models import Model
from fxshard.config.options import BACKENDS

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is the same on all sides that are compared.

    Attributes:
        bf16: compute in bf16, reduce gradients in fp32.
        checkpoint: of each block's forward only its inputs are saved.
        schedule: options of `fxshard.compile` that only it has.
    """

    bf16: bool = False
    checkpoint: bool = False
    schedule: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """For tables, without the schedule."""
        parts = ["bf16" if self.bf16 else "fp32"] + ["checkpointed"] * self.checkpoint
        return ", ".join(parts)


def plain(recipe: Model, model: nn.Module, setting: Setting) -> nn.Module:
    """The model as it is: every rank holds all of it and nothing is communicated."""
    if setting.checkpoint:
        for block in recipe.block_modules(model):
            checkpointed(model, block)
    return model


def fsdp2(recipe: Model, model: nn.Module, setting: Setting) -> nn.Module:
    """``fully_shard`` on each block and on the root, its defaults.

    Checkpointed blocks are wrapped before (``checkpoint_wrapper``, as torchtitan does it).
    """
    options: dict[str, Any] = {"mp_policy": BF16} if setting.bf16 else {}
    for block in recipe.block_modules(model):
        fully_shard(checkpointed(model, block) if setting.checkpoint else block, **options)
    fully_shard(model, **options)
    return model


def fsdp2_compiled(recipe: Model, model: nn.Module, setting: Setting) -> nn.Module:
    """The same with each block under ``torch.compile`` (as torchtitan does it)."""
    for block in recipe.block_modules(model):
        block.compile(fullgraph=True)
    return fsdp2(recipe, model, setting)


def fsdp1(recipe: Model, model: nn.Module, setting: Setting) -> nn.Module:
    """``FullyShardedDataParallel`` with the blocks wrapped, its defaults; fp32."""
    blocks = set(recipe.block_modules(model))
    policy = CustomPolicy(lambda module: module in blocks)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )


def ours(recipe: Model, model: nn.Module, setting: Setting, **more: Any) -> nn.Module:
    """``fxshard.compile`` with the same units."""
    said: dict[str, Any] = {**more, **setting.schedule}
    if setting.bf16:
        said["mixed_precision"] = BF16
    if setting.checkpoint:
        said["checkpoint"] = "full"
    return fxshard.compile(model, units=[recipe.blocks], **said)


def checkpointed(model: nn.Module, block: nn.Module, **options: Any) -> nn.Module:
    """Put a wrapper that checkpoints in the place of `block`."""
    (fqn,) = (fqn for fqn, module in model.named_modules() if module is block)
    parent, _, name = fqn.rpartition(".")
    wrapped = checkpoint_wrapper(block, **options)
    setattr(model.get_submodule(parent), name, wrapped)
    return wrapped


SIDES: dict[str, Callable[[Model, nn.Module, Setting], nn.Module]] = {
    "plain": plain,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdp2-compiled": fsdp2_compiled,
    "fxshard": ours,
    "fxshard-selective": functools.partial(ours, checkpoint="selective"),
    "fxshard-full": functools.partial(ours, checkpoint="full"),
    "fxshard-inductor": functools.partial(ours, backend="inductor"),
}
TITLES = {
    "plain": "one process, not sharded",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "fsdp2-compiled": "FSDP2, blocks compiled",
    "fxshard": "fxshard",
    "fxshard-selective": "fxshard, selective",
    "fxshard-full": "fxshard, checkpointed",
    "fxshard-inductor": "fxshard, inductor",
}


def available() -> list[str]:
    """The sides that this checkout has."""
    return [name for name in SIDES if name != "fxshard-inductor" or "inductor" in BACKENDS]


class Training:
    """A side's model, its optimizer and its batch.

    The optimizer is the same on all sides: AdamW with ``foreach=True``.
    """

    def __init__(
        self,
        recipe: Model,
        side: str,
        setting: Setting | None = None,
        *,
        model: nn.Module | None = None,
        shard: Callable[[Model, nn.Module, Setting], nn.Module] | None = None,
    ) -> None:
        """Args:
        model: made by ``recipe.build()``; None: make it, all sides with the same weights.
        shard: the side; None: that of `SIDES`.
        """
        torch.manual_seed(0)
        self.recipe, self.side = recipe, side
        shard = shard or SIDES[side]
        self.model = shard(recipe, model or recipe.build(), setting or Setting())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.batch = recipe.batch()

    def phases(self) -> list[tuple[str, Callable[[], Any]]]:
        """A step of the user's loop, phase by phase; run each once and in order."""
        args, kwargs = self.recipe.call(self.batch)
        targets = self.batch[1]
        loss: list[Tensor] = []

        def forward() -> None:
            loss.append(self.recipe.loss(self.model(*args, **kwargs), targets))

        return [
            ("forward", forward),
            ("backward", lambda: loss.pop().backward()),
            ("optimizer", self._update),
        ]

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """One step."""
        for _, run in self.phases():
            run()
