"""Models of torch's `context_parallel`, trained by FSDP2 and by fxshard on real ranks."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

import fxshard
from tests.distributed.tensor_parallel_cases import HEADS, VOCABULARY, WIDTH, FeedForward, full

LENGTH = 16

aten: Any = torch.ops.aten
CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.feed_forward = FeedForward()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q, k, v = (
            each(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_2(x))


class Llama(nn.Module):
    """Tokens -> logits; positions are a buffer as long as the sequence."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer(
            "positions", torch.linspace(-1, 1, LENGTH)[:, None].expand(-1, WIDTH).clone()
        )
        self.layers = nn.ModuleList(Block(causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Job:
    """What is trained how.

    Attributes:
        how: "compile" or "fully_shard"; or "fsdp2", the reference.
        shape: of the mesh: data parallel (two dimensions: hybrid), then contexts.
        options: of `fxshard.compile`.
        causal: of attention.
        rotate: how keys and values go round, see torch's `set_rotate_method`.
        steps: of AdamW.
    """

    how: str = "compile"
    shape: tuple[int, ...] = (2, 2)
    options: dict[str, Any] = field(default_factory=dict)
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    causal: bool = True
    rotate: str = "allgather"
    steps: int = 5

    @property
    def mesh(self) -> DeviceMesh:
        names = ("dp", "cp") if len(self.shape) == 2 else ("replicas", "shards", "cp")
        return init_device_mesh("cpu", self.shape, mesh_dim_names=names)

    def model(self) -> Llama:
        torch.manual_seed(0)
        return Llama(self.causal)

    def sharded(self, mesh: DeviceMesh) -> Any:
        model: Any = self.model()
        if self.how == "compile":
            more = {"strategy": "hybrid_shard"} if mesh.ndim == 3 else {}
            more |= {"mixed_precision": self.precision}
            return fxshard.compile(model, mesh=mesh, **more, **self.options)
        *replicas, shards, cp = mesh.mesh_dim_names or ()
        mesh[shards, cp]._flatten(f"{shards}_{cp}")
        over = mesh[(*replicas, f"{shards}_{cp}")]
        shard: Any = fsdp2 if self.how == "fsdp2" else fxshard.fully_shard
        for each in model.layers:
            shard(each, mesh=over, mp_policy=self.precision)
        return shard(model, mesh=over, mp_policy=self.precision)

    def batch(self, rank: int, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and what comes after each, of the whole sequence.

        Of the ranks that differ in the last dimension of the mesh alone, they are the same.
        """
        drawn = torch.Generator().manual_seed(1000 * number + rank // self.shape[-1])
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=drawn)
        return tokens, tokens.roll(-1, 1)

    @contextlib.contextmanager
    def around(self, mesh: DeviceMesh, model: Any, *batch: Tensor) -> Iterator[None]:
        """Inside, each of the ranks has its part of the sequence, of the positions too."""
        buffers = [model.positions, *batch] if model is not None else list(batch)
        options = torchs._cp_options
        before = dict(vars(options))
        torchs.set_rotate_method(self.rotate)
        options.enable_load_balance = self.causal  # torch refuses others
        try:
            parts = context_parallel(
                mesh["cp"],
                buffers=buffers,
                buffer_seq_dims=[*([0] * (model is not None)), *([1] * len(batch))],
            )
            with parts, torchs_own() if self.how == "fsdp2" else contextlib.nullcontext():
                yield
        finally:
            vars(options).update(before)


def loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def trained(job: Job, rank: int) -> dict[str, Tensor]:
    """Everything that `job` leaves, by name."""
    mesh = job.mesh
    model = job.sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(job.steps):
        tokens, wanted = job.batch(rank, step)
        with job.around(mesh, model, tokens, wanted):
            value = loss(model(tokens), wanted)
            value.backward()
        found[f"{step} loss"] = value.detach().clone()
        for name, param in model.named_parameters():
            found[f"{step} gradient of {name}"] = full(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        found[name] = full(param)
        for key, value in optimizer.state[param].items():
            found[f"{key} of {name}"] = full(value)
    with torch.no_grad():
        found["outside"] = full(model(job.batch(rank, 0)[0]))
    return found


def alone(job: Job) -> dict[str, Tensor]:
    """Eager PyTorch in one process, on the joined batch of whole sequences."""
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Tensor] = {}
    every = range(0, torch.Size(job.shape).numel(), job.shape[-1])
    for step in range(job.steps):
        batches = [job.batch(rank, step) for rank in every]
        tokens, wanted = (torch.cat(each) for each in zip(*batches, strict=True))
        loss(model(tokens), wanted).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            found[f"{step} gradient of {name}"] = param.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: param.detach().clone() for name, param in model.named_parameters()}
    return found


# -- torch's own on CPUs ---------------------------------------------------------------------------


@contextlib.contextmanager
def torchs_own() -> Iterator[None]:
    """torch's ring attention around the kernels of CPUs, which it has for those of GPUs alone."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    handlers.update({CPU: _forward, CPU_BACKWARD: _backward})
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)


def _forward(op: Any, args: Any, kwargs: Any) -> Any:
    mesh, (q, k, v) = args[0].device_mesh, (each.to_local() for each in args[:3])
    dropout, causal = [*args[3:], *(0.0, False)[len(args) - 3 :]]
    out = torchs._templated_ring_attention(
        mesh.get_group(),
        2,
        op,
        query=q,
        key=k,
        value=v,
        is_causal=causal,
        dropout_p=dropout,
        **kwargs,
    )
    return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in out)


def _backward(op: Any, args: Any, kwargs: Any) -> Any:
    mesh, (grad, q, k, v, out, lse) = args[0].device_mesh, (each.to_local() for each in args[:6])
    found = torchs._templated_ring_attention_backward(
        *(mesh.get_group(), 2, op),
        grad_out=grad,
        grad_out_name="grad_out",
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=lse,
        dropout_p=args[6],
        is_causal=args[7],
        **kwargs,
    )
    return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in found)
