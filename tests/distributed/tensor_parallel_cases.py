"""Models with plans of tensor parallelism, trained by FSDP2 and by fxshard on real ranks."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fxshard

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 4, 8, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Llama(nn.Module):
    """Tokens -> logits."""

    def __init__(self, vocabulary: int = VOCABULARY, layers: int = 2) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Mlp(nn.Module):
    """Of two equal pairs of layers; a norm and the output are no part of the plan."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
        self.layers = nn.ModuleList(pairs)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.layers:
            x = x + pair(x)
        return self.head(self.norm(x))


def of_an_mlp(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def of_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """What a rank has of activations is full between layers."""
    block = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {f"layers.*.{name}": style for name, style in block.items()}
    parallelize_module(model, mesh, outer | plan)


def of_sequences(model: nn.Module, mesh: DeviceMesh, *, logits: bool = False) -> None:
    """What a rank has of activations is a part of the sequence; of logits, maybe of the classes."""
    full = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    block = {
        "norm_1": SequenceParallel(),
        "norm_2": SequenceParallel(),
        "attention": full,
        "feed_forward": full,
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    head = ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1) if logits else Replicate(),
        use_local_output=not logits,
    )
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": head,
    }
    plan = {f"layers.*.{name}": style for name, style in block.items()}
    parallelize_module(model, mesh, outer | plan)


def of_sequences_and_logits(model: nn.Module, mesh: DeviceMesh) -> None:
    of_sequences(model, mesh, logits=True)


class WithLogits(nn.Module):
    """A model of transformers, called as the others are."""

    def __init__(self, tied: bool = False) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # ranks without it start sooner

        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": VOCABULARY}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
        config = LlamaConfig(**sizes, **heads, num_hidden_layers=2, tie_word_embeddings=tied)
        self.model = LlamaForCausalLM(config)
        self.layers = self.model.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def of_transformers(model: Any, mesh: DeviceMesh) -> None:
    block = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    outer = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {f"model.layers.*.{name}": style for name, style in block.items()}
    parallelize_module(model.model, mesh, outer | plan)


def of_outputs(model: nn.Module, mesh: DeviceMesh) -> None:
    """Modules whose outputs are brought from part to part."""
    of_tensors(model, mesh)
    cut = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    again = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    parallelize_module(model, mesh, {"embed": cut, "layers.0": again})


@dataclass(frozen=True)
class Job:
    """What is trained how.

    Attributes:
        plan: of tensor parallelism.
        how: "compile" or "fully_shard"; or "fsdp2", the reference.
        model: makes it.
        shape: of the mesh: data parallel (two dimensions: hybrid), then tensor parallel.
        options: of `fxshard.compile`.
        precision: of all units.
        micro_batches: per step; all but the last without reductions.
        max_norm: gradients are clipped.
        steps: of AdamW.
    """

    plan: Callable[[nn.Module, DeviceMesh], None] = of_tensors
    how: str = "compile"
    model: Callable[[], nn.Module] = Llama
    shape: tuple[int, ...] = (2, 2)
    options: dict[str, Any] = field(default_factory=dict)
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    micro_batches: int = 1
    max_norm: float | None = None
    steps: int = 3

    @property
    def mesh(self) -> DeviceMesh:
        names = ("dp", "tp") if len(self.shape) == 2 else ("replicas", "shards", "tp")
        return init_device_mesh("cpu", self.shape, mesh_dim_names=names)

    def parallel(self) -> tuple[nn.Module, DeviceMesh]:
        """The model after its plan, and the mesh."""
        torch.manual_seed(0)
        model, mesh = self.model(), self.mesh
        self.plan(model, mesh["tp"])
        return model, mesh

    def sharded(self) -> Any:
        model, mesh = self.parallel()
        names: Any = mesh.mesh_dim_names
        if self.how == "compile":
            more = {"strategy": "hybrid_shard"} if len(names) == 3 else {}
            more |= {"mixed_precision": self.precision}
            return fxshard.compile(model, mesh=mesh, **more, **self.options)
        shard = fsdp2 if self.how == "fsdp2" else fxshard.fully_shard
        for each in model.layers:
            shard(each, mesh=mesh[names[:-1]], mp_policy=self.precision)
        return shard(model, mesh=mesh[names[:-1]], mp_policy=self.precision)

    def batch(self, rank: int, number: int) -> Tensor:
        """Of the ranks that differ in the last dimension of the mesh alone, it is the same."""
        drawn = torch.Generator().manual_seed(1000 * number + rank // self.shape[-1])
        if self.model is Mlp:
            return torch.randn(4, 6, generator=drawn)
        return torch.randint(0, VOCABULARY, (2, LENGTH), generator=drawn)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch)
        if self.model is Mlp:
            return logits.square().mean()
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.roll(-1).flatten())

    def around_loss(self) -> contextlib.AbstractContextManager[Any]:
        return loss_parallel() if self.plan is of_sequences_and_logits else contextlib.nullcontext()


def full(tensor: Tensor) -> Tensor:
    """All of it, a copy."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def placed(tensor: Any) -> tuple[Any, ...]:
    """How FSDP2 would show where it is."""
    mesh: DeviceMesh = tensor.device_mesh
    return tensor.placements, mesh.mesh_dim_names, tuple(mesh.shape), tensor.to_local().shape


def trained(job: Job, rank: int, model: Any = None) -> dict[str, Any]:
    """Everything that `job` leaves, by name: full tensors, and placements."""
    model = job.sharded() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {}
    for step in range(job.steps):
        for number in range(job.micro_batches):
            last = number == job.micro_batches - 1
            model.set_requires_gradient_sync(last)
            with job.around_loss():
                loss = job.loss(model, job.batch(rank, step * job.micro_batches + number))
                loss.backward()
            found[f"{step}.{number} loss"] = full(loss)
        for name, param in model.named_parameters():
            found[f"{step} gradient of {name}"] = full(param.grad)
            found[f"{step} places of the gradient of {name}"] = placed(param.grad)
        if job.max_norm is not None:
            found[f"{step} norm"] = clipped(model, job.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        found[name], found[f"places of {name}"] = full(param), placed(param)
        for key, value in optimizer.state[param].items():
            found[f"{key} of {name}"] = full(value)
    model.eval()
    with torch.no_grad():
        found["evaluated"] = full(model(job.batch(rank, 0)))
    return found


def clipped(model: Any, max_norm: float) -> Tensor:
    """The norm of all gradients, which are scaled by torch; that of fxshard is the same."""
    if hasattr(model, "clip_grad_norm_"):
        norm = torch.nn.utils.get_total_norm([full(param.grad) for param in model.parameters()])
        torch.testing.assert_close(model.clip_grad_norm_(float("inf")), norm)
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return full(found)


def differing(job: Job, rank: int) -> dict[str, float]:
    """By name, what differs from FSDP2 with the same tensor parallelism, and by how much.

    Placements that differ are infinitely far apart.
    """
    plain = Job(**{**vars(job), "how": "fsdp2", "options": {}})
    ours, theirs = trained(job, rank), trained(plain, rank)
    assert ours.keys() == theirs.keys()
    found = {}
    for name, value in ours.items():
        other = theirs[name]
        if not isinstance(value, Tensor):
            apart = 0.0 if value == other else float("inf")
        else:
            apart = (value.double() - other.double()).abs().max().item() if value.numel() else 0.0
        if apart:
            found[name] = apart
    return found


# -- states ----------------------------------------------------------------------------------------


def stepped(model: Any, job: Job, rank: int, steps: int = 1) -> torch.optim.Optimizer:
    """The optimizer after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        job.loss(model, job.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All of a model and its optimizer, by name: full tensors."""
    found = {name: full(param) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{key} of {name}"] = full(value)
    return found
