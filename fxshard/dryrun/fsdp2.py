"""The memory of a step of torch's own FSDP2, in one call: its usual recipe in a dry run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fxshard._torch.checkpointing import checkpoint_wrapper
from fxshard._torch.trees import tree_iter, tree_map_tensors
from fxshard.arguments import check_called, check_count
from fxshard.capture.held import on_meta
from fxshard.dryrun.gpus import DEFAULT
from fxshard.dryrun.peaks import peaks_table
from fxshard.dryrun.run import DryRun, dry_run
from fxshard.errors import ConfigError
from fxshard.ir.splitting import find_units
from fxshard.memory.cuda.reserved import DeviceMemory
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.report import MemoryReport

STEPS = 3  # the second is the steady one; what is reserved grows in both

aten: Any = torch.ops.aten
# What torchtitan's per-op checkpointing saves, besides every second product of matrices.
PER_OP: tuple[Any, ...] = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is sharded, trained and followed; see `fsdp2_memory`."""

    world_size: int
    device: str = DEFAULT
    rank: int = 0
    units: Any = None
    mixed_precision: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool | int | None = None
    checkpoint: str | Collection[Any] | None = None
    compile: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] | None = torch.optim.AdamW
    loss: Callable[[Any], Tensor] | None = None
    offload: bool = False
    micro_batches: int = 1
    max_norm: float | None = None
    keep_outputs: bool = True

    def check(self) -> None:
        """Raises ConfigError for what has no meaning."""
        check_count("micro_batches", self.micro_batches)
        if self.loss is not None:
            check_called("loss", self.loss, "what the model returns")
        policies = (None, "full", "selective")
        if isinstance(self.checkpoint, str | None) and self.checkpoint not in policies:
            raise ConfigError(
                f"checkpoint={self.checkpoint!r}: expected None, 'full', 'selective' (attention "
                f"and every second product of matrices are saved) or the operators to save."
            )


@dataclasses.dataclass(frozen=True)
class Fsdp2Memory:
    """The memory of a step of FSDP2.

    Attributes:
        run: the dry run.
        plan: of fxshard's own plan of the same model, or None.
    """

    run: DryRun
    plan: MemoryReport | None = None

    @property
    def memory(self) -> MemoryReport:
        """Bytes of modules, states and categories, as `fxshard.Plan.memory`."""
        return self.run.memory

    def device_memory(
        self,
        settings: AllocatorSettings | str | None = None,
        *,
        capacity: int | str | None = None,
    ) -> DeviceMemory:
        """What CUDA's caching allocator makes of it.

        Args:
            settings, capacity: see `DryRun.device_memory`.

        Returns:
            `requested`, `allocated`, `active` and `reserved` peaks in bytes; by phase and stream.

        Raises:
            ConfigError: it is for the CPU, or settings that torch would refuse.
        """
        return self.run.device_memory(settings, capacity=capacity)

    def table(self) -> str:
        """Peaks, and with a plan both sides of each row of the report, in bytes.

        Returns:
            Lines of text.
        """
        sides = {"FSDP2": self.memory} | ({"fxshard": self.plan} if self.plan else {})
        peaks = peaks_table(sides)
        if self.plan is None:
            return peaks
        rows = tabulate(list(_rows(self.memory, self.plan)), headers=_HEADERS, intfmt=",")
        return f"{peaks}\n\n{rows}"


_HEADERS = ("module", "state", "FSDP2", "fxshard", "difference")


def _rows(ours: MemoryReport, plan: MemoryReport) -> Iterator[tuple[str, str, int, int, int]]:
    """Rows that both reports have, where the module is a unit of both."""
    found, planned = ours.rows(), plan.rows()
    units = {unit.fqn for unit in ours.units} & {unit.fqn for unit in plan.units}
    for where, snapshot in found.items():
        if where.module in units and where in planned:
            a, b = sum(snapshot.values()), sum(planned[where].values())
            yield where.module or "(root)", where.state.value, a, b, b - a


def run_fsdp2(model: nn.Module, args: tuple[Any, ...], kwargs: Any, recipe: Recipe) -> DryRun:
    """Shard a copy of `model` by torch's `fully_shard` and train it for `STEPS` in a dry run.

    Raises:
        ConfigError: a recipe that has no meaning.
        UnitError: a pattern of `units` matches no module.
        CaptureError: something depends on values.
    """
    recipe.check()
    units = [unit.fqns for unit in find_units(model, recipe.units) if unit.fqn]
    model = on_meta(model).train()
    with dry_run(world_size=recipe.world_size, device=recipe.device, rank=recipe.rank) as run:
        model = _sharded(model, units, recipe, run.device)
        optimizer = recipe.optimizer(model.parameters()) if recipe.optimizer else None
        for _ in range(STEPS):
            for _ in range(recipe.micro_batches):
                _micro_batch(model, args, kwargs, recipe, run.device)
            if recipe.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            run.step()
    return run


def _sharded(model: nn.Module, units: list[tuple[str, ...]], recipe: Recipe, device: str) -> Any:
    """Checkpointed, compiled, sharded and on the device, as torchtitan does it, in this order."""
    how: dict[str, Any] = {}
    if recipe.mixed_precision is not None:
        how["mp_policy"] = recipe.mixed_precision
    if recipe.offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    reshard = recipe.reshard_after_forward
    for fqns in sorted(units, key=lambda fqns: -max(fqn.count(".") for fqn in fqns)):
        members: list[Any] = []
        for fqn in fqns:
            path, _, name = fqn.rpartition(".")
            parent = model.get_submodule(path)
            members.append(_checkpointed(getattr(parent, name), recipe.checkpoint))
            if recipe.compile:
                members[-1].compile()
            setattr(parent, name, members[-1])
        fully_shard(members, reshard_after_forward=True if reshard is None else reshard, **how)
    fully_shard(model, reshard_after_forward=recipe.reshard_after_forward, **how)
    return model.to_empty(device="cpu" if recipe.offload else device)


def _checkpointed(module: nn.Module, policy: str | Collection[Any] | None) -> nn.Module:
    if policy is None:
        return module
    if policy == "full":
        return checkpoint_wrapper(module)
    saved, alternate = (PER_OP, True) if policy == "selective" else (tuple(policy), False)

    def contexts() -> Any:
        products: dict[bool, int] = collections.defaultdict(int)

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = op in saved
            if alternate and op is aten.mm.default:
                products[context.is_recompute] += 1
                keep = products[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return checkpoint_wrapper(module, context_fn=contexts)


def _micro_batch(model: Any, args: Any, kwargs: Any, recipe: Recipe, device: str) -> None:
    args, kwargs = tree_map_tensors(lambda tensor: _given(tensor, device), (args, kwargs or {}))
    output = model(*args, **kwargs)
    losses = _losses(output, recipe.loss)
    if not recipe.keep_outputs:
        del output
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])


def _given(tensor: Tensor, device: str) -> Tensor:
    """A tensor of the batch on the device."""
    if tensor.device.type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return tensor.to(device)


def _losses(output: Any, loss: Callable[[Any], Tensor] | None) -> list[Tensor]:
    """Where backward starts: the loss, or scalars of the output, or all of it."""
    if loss is not None:
        return [loss(output)]
    if isinstance(getattr(output, "loss", None), Tensor):
        return [output.loss]
    tensors = [t for t in tree_iter(output) if isinstance(t, Tensor) and t.requires_grad]
    return [t for t in tensors if t.dim() == 0] or tensors
