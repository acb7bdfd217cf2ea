"""The options: what each means and may be. `Config` has their defaults, and checks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.optim import Optimizer

from fxshard._torch.fsdp1 import HYBRID_SHARD_ZERO2
from fxshard.config.precision import Precision
from fxshard.hardware import Hardware

Strategy: TypeAlias = Literal[
    "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"
]
Prefetched: TypeAlias = Literal["pre", "post"]

# torch's name of each strategy (torch/distributed/fsdp/api.py) -> ours.
TORCH_STRATEGIES: dict[ShardingStrategy, Strategy] = {
    ShardingStrategy.FULL_SHARD: "full_shard",
    ShardingStrategy.SHARD_GRAD_OP: "shard_grad_op",
    ShardingStrategy.NO_SHARD: "no_shard",
    ShardingStrategy.HYBRID_SHARD: "hybrid_shard",
    HYBRID_SHARD_ZERO2: "hybrid_shard_zero2",
}
STRATEGIES = tuple(TORCH_STRATEGIES.values())
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")  # those that take two dimensions of ranks
KEEPING = ("shard_grad_op", "hybrid_shard_zero2")  # those that leave units unsharded after forward
BACKENDS = ("eager", "inductor")
PREFETCHES = ("pre", "post")
REDUCE_OPS = ("avg", "sum", "max", "min")
DEVICES = (None, "cuda")
FLAGS = (
    *("full_precision_in_eval", "sync_module_states", "optimizer_in_backward"),
    *("ranks_may_differ", "pipeline_stage", "async_tensor_parallel"),
)


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
    """In eval mode, `mixed_precision` has no effect. Buffers that had a ``buffer_dtype`` in
    training are cast back for calls in eval mode, and so are rounded (as by FSDP1).
    """

    forward_prefetch: int | Prefetched | None
    """How many units ahead an unshard is launched in forward; "pre" and FSDP1's True are 1, None,
    False and "post" are 0.
    """

    backward_prefetch: int | Prefetched | BackwardPrefetch | None
    """The same in backward, where units that stayed unsharded count too: while they compute, the
    next one is gathered. "pre" is 1; "post" launches after the compute of the unit before and
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
    most that on the device of a rank, and the step is fastest on `hardware`: the rest is recomputed
    or, on accelerators, offloaded (see `offload_activations`, `fxshard.cost.activations`); or a
    policy as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it, ``(ctx, op,
    *args, **kwargs) -> CheckpointPolicy``. Or a dict from module classes or FQN globs to such
    values, without bytes: what its keys name is checkpointed.
    """

    offload: OffloadPolicy | CPUOffload | None
    """None, torch's `CPUOffloadPolicy` or `CPUOffload`: shards, sharded gradients and optimizer
    states live on the CPU.
    """

    offload_activations: bool | int | str | Sequence[UnitName] | None
    """Saved activations that are copied to pinned memory of the CPU after their last use in
    forward, and back before backward needs them, on streams of their own (see
    `fxshard.passes.offload_activations` and docs/offload-activations.md). None: none, unless bytes
    of `checkpoint` choose some, on accelerators. False: none. True: of each unit as many as are
    copied while others compute, by the times of `hardware`; with bytes of `checkpoint`, those that
    make the step fastest, beside what is recomputed. Bytes, or text such as "8GiB": at most so many
    of a call, those that forward makes first; each size of a batch then gets a program of its own.
    Or a list of module classes or FQN globs: what their backwards read. Beside `checkpoint`, those
    are the inputs of what is checkpointed.
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
    too. None: those that turn out to differ between calls, from the third on (two sizes have two
    programs of fixed sizes); False: none; or names for dimensions,
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
    """A linear head and its cross entropy, in the model, are computed on some of the rows (tokens)
    at a time: that many, or, True, as many as a rule says. Forward computes their gradients too, so
    that neither the logits nor their gradient exist in full (see `fxshard.passes.chunk_loss` and
    docs/chunk-loss.md). A model whose logits are returned or read elsewhere is refused. Each size
    of a batch gets a program of its own.
    """

    ranks_may_differ: bool
    """The batches of ranks may take different ways through the model (a modality that one rank's
    batch lacks, an expert without tokens, a skipped layer). In each call ranks tell each other what
    they need before the first collective, and each takes part in what any of them needs; a gradient
    that a rank does not have counts as zeros. Without it such calls are refused.
    """

    async_tensor_parallel: bool
    """Cut the all-gathers and reduce-scatters of sequence parallelism, with the matrix products
    beside them, along the batch, so that one part is multiplied while the next one is sent: where
    that takes less time on `hardware` (see `fxshard.passes.async_tensor_parallel`). Sums have the
    same terms; a kernel for fewer rows may round otherwise. See docs/tensor-parallel.md.
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
    chosen so that the step fits at the least estimated time on `hardware` (see
    `fxshard.planner.budget`), or the model is refused with the table of what was tried.
    """

    hardware: str | Hardware
    """The GPUs by whose estimated times `memory_budget`, bytes of `checkpoint`,
    `offload_activations`, `async_tensor_parallel` and `tune` choose: "a100", "h100", "h200",
    "b200", or a `fxshard.hardware.Hardware` with figures of your own (docs/cost.md). Nothing else
    depends on it, and neither the GPU that is there nor that of a `fxshard.dry_run` changes it.
    """

    passes: Sequence[Any] | Callable[[list[Any]], Sequence[Any]] | None
    """A pipeline in place of the default one, or a function that makes it of the default list,
    ``lambda passes: [*passes, Mine()]`` (see `fxshard.pipeline`).
    """
