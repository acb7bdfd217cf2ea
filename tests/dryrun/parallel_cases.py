"""Training scripts of torch's own parallelisms, run for real on gloo ranks and dry."""

import contextlib
import dataclasses
from collections.abc import Callable
from traceback import extract_stack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

import fxshard
from tests.dryrun.measure import Measure, Points, without_collector
from tests.dryrun.truth_cases import under_mode

FAKE = torch._C._TorchDispatchModeKey.FAKE
STEPS = 2
DIM, TOKENS, VOCABULARY = 16, 8, 32


class Block(nn.Module):
    """Norm, up, down, and what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("scale", torch.ones(DIM))  # DDP broadcasts it before each forward
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclasses.dataclass(frozen=True)
class Job:
    """What a script does besides."""

    kind: str
    device: str = "cpu"
    micro_batches: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    clip: bool = False
    to_none: bool = True
    autocast: bool = False
    scaler: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


def ddp(job: Job, model: nn.Module) -> nn.Module:
    options = dict(job.options)
    hook = options.pop("hook", None)
    parallel = DistributedDataParallel(model, **options)
    if hook:
        parallel.register_comm_hook(None, hook)
    return parallel


def tensor_parallel(job: Job, model: nn.Module) -> nn.Module:
    return _tensor_parallel(job, model, init_device_mesh(job.device, (dist.get_world_size(),)))


def _tensor_parallel(job: Job, model: Any, mesh: DeviceMesh) -> nn.Module:
    options = dict(job.options)
    sequence, by_loss = options.get("sequence", False), options.get("loss_parallel", False)
    inside = Shard(1) if sequence else Replicate()
    norm = {"norm": SequenceParallel()} if sequence else {}
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=inside),
        "head": ColwiseParallel(
            input_layouts=inside,
            output_layouts=Shard(-1) if by_loss else Replicate(),
            use_local_output=not by_loss,
        ),
    }
    parallelize_module(model, mesh, plan | norm)
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "up": ColwiseParallel(input_layouts=inside),
                "down": RowwiseParallel(output_layouts=inside),
            }
            | norm,
        )
    return model


def _fully_shard(job: Job, model: Any, mesh: DeviceMesh) -> nn.Module:
    half = job.options.get("half", False)
    policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if half else ()))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


class SentInHalf(torch.Tensor):
    """A weight that FSDP2 gathers in fp16, by its extension point, and computes with in fp32."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> "SentInHalf":
        return torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, dtype=inside.dtype, device=inside.device
        )

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, _: None, size: Any, stride: Any) -> "SentInHalf":
        return SentInHalf(tensors["inside"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each.inside, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor], None]:
        return (self.inside.to(torch.float16),), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: Any, *, out: torch.Tensor | None = None
    ) -> Any:
        if out is not None:
            out.data.copy_(gathered[0])
            return None
        made = gathered[0].to(torch.float32)
        return made, (made,)


def extended(job: Job, model: Any) -> nn.Module:
    for block in model.blocks:
        block.up.weight = nn.Parameter(SentInHalf(block.up.weight.detach()))
    return _fully_shard(job, model, init_device_mesh(job.device, (dist.get_world_size(),)))


def hybrid(job: Job, model: nn.Module) -> nn.Module:
    replicas = job.options.get("replicas", 2)
    mesh = init_device_mesh(
        job.device,
        (replicas, dist.get_world_size() // replicas),
        mesh_dim_names=("replicate", "shard"),
    )
    return _fully_shard(job, model, mesh)


def two_dimensional(job: Job, model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(
        job.device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")
    )
    _tensor_parallel(job, model, mesh["tp"])
    return _fully_shard(job, model, mesh["dp"])


def fsdp1(job: Job, model: Any) -> nn.Module:
    options = dict(job.options)
    if options.pop("half", False):
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    if "replicas" in options:
        shape = (options.pop("replicas"), dist.get_world_size() // 2)
        names = ("replicate", "shard")
        options["device_mesh"] = init_device_mesh(job.device, shape, mesh_dim_names=names)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device(job.device, 0 if job.device == "cuda" else None),
        **options,
    )


KINDS: dict[str, Callable[[Job, nn.Module], nn.Module]] = {
    "ddp": ddp,
    "extended": extended,
    "fsdp1": fsdp1,
    "tp": tensor_parallel,
    "hsdp": hybrid,
    "2d": two_dimensional,
}


def _last_only(model: nn.Module, last: bool) -> Any:
    """Only the last micro-batch reduces gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif not last and hasattr(model, "no_sync"):
        return model.no_sync()
    return contextlib.nullcontext()


def _loss_of(job: Job) -> Any:
    return loss_parallel() if job.options.get("loss_parallel") else contextlib.nullcontext()


def zero(params: Any, lr: float) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.AdamW, lr=lr)


def zero_with_views(params: Any, lr: float) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(
        params, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, lr=lr
    )


def train(job: Job, ended: Callable[[], None] = lambda: None) -> Any:
    """Two steps of AdamW; all but the last micro-batch reduce nothing. Returns what lives on."""
    torch.manual_seed(0)
    model = KINDS[job.kind](job, Model().to(job.device))
    optimizer = job.optimizer(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(job.device, enabled=job.scaler)
    ended()
    for _ in range(STEPS):
        for number in range(job.micro_batches):
            tokens = torch.randint(VOCABULARY, (2, TOKENS), device=job.device)
            cast = torch.autocast(job.device, torch.bfloat16, enabled=job.autocast)
            with _last_only(model, number == job.micro_batches - 1), _loss_of(job):
                with cast:
                    logits = model(tokens)
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                scaler.scale(loss).backward()
            del tokens, logits, loss
        if job.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=job.to_none)
        ended()
    return model, optimizer, scaler


class MeasureOfParts(Measure):
    """Wrappers of tensors have no memory of their own, nor has what works out shapes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        of_mesh = any(f.filename.endswith("device_mesh.py") for f in extract_stack(limit=9))
        if of_mesh or "_wrap_tensor" in str(func) or torch._C._get_dispatch_mode(FAKE) is not None:
            return func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, tree: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        super()._see([x for x in leaves if not is_traceable_wrapper_subclass(x)])


def _is_composite(func: Any) -> bool:
    """True for ``to`` and its kin, below autograd: what they are made of is seen."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CPU")


def measured(rank: int, world_size: int, job: Job) -> Points:
    """The script for real, in every rank."""
    before: list[int] = []

    def ended() -> None:
        measure.close()
        before.append(len(measure.points))

    with without_collector(), MeasureOfParts(of_ddp=KINDS[job.kind] is ddp) as measure:
        train(job, ended)
    points = measure.points[before[0] :]
    return [(under_mode(op), total) for op, total in points if _is_operator(op)]


def predicted(world_size: int, job: Job) -> Points:
    """The script dry, in one process without a process group."""
    with fxshard.dry_run(world_size=world_size, device="cpu") as run:
        kept = train(job, run.step)
    found: Points = []
    for ledger in (run.memory.first, run.memory.steady):
        ran = [i for i, moment in enumerate(ledger.moments) if _is_operator(moment.op)]
        for point, following in zip(ran, [*ran[1:], len(ledger.moments)], strict=True):
            total = int(ledger.totals[2 * following - 1])
            found.append((under_mode(ledger.moments[point].op), total))
    del kept
    return found


def _is_operator(name: str) -> bool:
    """Without what asks for a number: that of a scaler's tensor is known in a dry run."""
    return "." in name and not name.startswith(("fxshard.", "aten._local_scalar_dense"))
