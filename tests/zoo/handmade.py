"""Hand-written models for the table of architectures: one way of writing PyTorch each.

All take the one batch of their row in `tests/zoo/architectures.py`; what is odd about a model is in
its docstring. One file because it is one list, in which each model stands for itself.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.zoo import MODELS
from tests.zoo.models import Block, Block13

aten = torch.ops.aten
SAVED_OPERATORS = [aten.mm.default, aten.addmm.default, aten.convolution.default]


def save_matmuls() -> Any:
    """The contexts of a selective checkpoint: what matmuls and convolutions give is saved."""
    return create_selective_checkpoint_contexts(SAVED_OPERATORS)


class Stack(nn.Module):
    """f32 (batch, 8) -> logits (batch, 3): an inlet, layers made by `layer(width)`, and a head."""

    def __init__(self, layer: Any, depth: int = 2, width: int = 16) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mlp(width: int) -> nn.Module:
    """width -> 2 * width -> width, with dropout."""
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
    )


# -- recurrent -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """int64 tokens (batch, seq) -> logits (batch, seq, vocab), by residual GRU layers."""

    def __init__(self, vocab: int = 32, dim: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(RecurrentLayer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class RecurrentLayer(nn.Module):
    """x + gru(x), (batch, seq, dim) -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


class OneRnn(nn.Module):
    """A whole ``nn.RNNBase`` on floats (batch, seq, 8), which need no gradient, and a head."""

    def __init__(self, kind: type[nn.RNNBase], **config: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 12, **config)
        self.head = nn.Linear(12 * (2 if self.rnn.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


# -- graphs, images, signals -----------------------------------------------------------------------


class MessagePassing(nn.Module):
    """x + what the neighbours send, summed by index_add and averaged by scatter_reduce."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.send, self.take = nn.Linear(width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.send(x)[source]
        summed = torch.zeros_like(x).index_add(0, target, messages)
        where = target[:, None].expand_as(messages)
        largest = torch.zeros_like(x).scatter_reduce(0, where, messages, "amax")
        return x + torch.relu(self.take(torch.cat([summed, largest], -1)))


class GraphNet(nn.Module):
    """Nodes f32 (count, 8) and edges int64 (2, count of edges) -> logits (count, 3)."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, width)
        self.layers = nn.ModuleList(MessagePassing(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


class UNet(nn.Module):
    """Group norm, strided and transposed convolutions, pooling: a U-Net's way down and up.

    Images (batch, 3, 8, 8) -> the same.
    """

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(3, channels, 3, padding=1)
        self.down = DownBlock(channels)
        self.up = UpBlock(channels)
        self.outlet = nn.Conv2d(2 * channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        return self.outlet(torch.cat([x, self.up(self.down(x))], dim=1))


class DownBlock(nn.Module):
    """(batch, channels, h, w) -> (batch, 2 * channels, h / 4, w / 4)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.silu(self.norm(self.conv(x))), 2)


class UpBlock(nn.Module):
    """(batch, 2 * channels, h, w) -> (batch, channels, 4 * h, 4 * w)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(F.interpolate(self.conv(x), scale_factor=2)))


class Spectral(nn.Module):
    """x + the inverse of a filtered Fourier transform; the filter is a complex parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(width // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * self.filter * torch.view_as_complex(self.phase)
        return x + torch.fft.irfft(spectrum, n=x.shape[-1])


class Experts(nn.Module):
    """Every token goes through its two best of `count` experts, all of them batched in one matmul.

    (batch, seq, dim) -> the same, and the balancing loss.
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count, bias=False)
        self.up = nn.Parameter(0.1 * torch.randn(count, dim, 2 * dim))
        self.down = nn.Parameter(0.1 * torch.randn(count, 2 * dim, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        best, which = chances.topk(2)
        weights = torch.zeros_like(chances).scatter(-1, which, best)
        hidden = F.silu(torch.einsum("bsd,edh->besh", x, self.up))
        out = torch.einsum("besh,ehd->besd", hidden, self.down)
        balance = (chances.mean((0, 1)) * (weights > 0).float().mean((0, 1))).sum()
        return torch.einsum("bse,besd->bsd", weights, out), balance


class ExpertBlock(nn.Module):
    """A transformer block and experts after it; adds to the balancing loss."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block = Block(dim, 2, 0.0)
        self.norm = nn.LayerNorm(dim)
        self.experts = Experts(dim, 4)

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block(x)
        y, more = self.experts(self.norm(x))
        return x + y, balance + more


class MixtureOfExperts(nn.Module):
    """int64 tokens (batch, seq) -> logits (batch, seq, vocab) and the balancing loss (1,).

    Not a scalar: that fxshard takes for the loss, and differentiates nothing else.
    """

    def __init__(self, vocab: int = 32, dim: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(ExpertBlock(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(x)
        balance = x.new_zeros(1)
        for layer in self.layers:
            x, balance = layer(x, balance)
        return self.head(x), balance


# -- parametrizations and odd parameters -----------------------------------------------------------


def weight_normed(width: int) -> nn.Module:
    """A linear layer whose weight is made of a direction and a length."""
    return weight_norm(nn.Linear(width, width))


def spectral_normed(width: int) -> nn.Module:
    """Power iteration writes into buffers in every training forward."""
    return spectral_norm(nn.Linear(width, width))


def orthogonal_weight(width: int) -> nn.Module:
    """The weight is a matrix exponential."""
    return orthogonal(nn.Linear(width, width))


class Scaled(nn.Module):
    """A parameter without a dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


class Empty(nn.Module):
    """A parameter without an element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.nothing = nn.Parameter(torch.empty(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(torch.cat([x, self.nothing])))


class Transposed(nn.Module):
    """A parameter whose rows do not lie one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).t())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class SeveralDtypes(nn.Module):
    """Layers in bf16, fp32 and fp64, one after the other, and a counter in int64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.low = nn.Linear(width, width).bfloat16()
        self.middle = nn.Linear(width, width)
        self.high = nn.Linear(width, width).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.middle(self.low(x.bfloat16()).float())
        return x + self.high(y.double()).to(x.dtype)


class Teacher(nn.Module):
    """A trainable parameter that is only used under no_grad: its gradient is None in eager."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - target


class Lora(nn.Module):
    """A frozen linear layer and a trained low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def lora() -> nn.Module:
    """The tiny Llama: frozen, with LoRA at its queries and values."""
    model = MODELS["llama"].build().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Lora(layer.self_attn.v_proj)
    return model


class SparseEmbedding(nn.Module):
    """int64 tokens (batch, seq) -> logits (batch, seq, 3); the table's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


# -- autograd, hooks, autocast, checkpoints --------------------------------------------------------


class ClippedIdentity(torch.autograd.Function):
    """The identity, whose gradient is clamped: what no differentiation of forward would give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.clamp(-0.01, 0.01) * (x > 0)


class Clipped(nn.Module):
    """A linear layer after a custom autograd function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return ClippedIdentity.apply(self.linear(x))


def hooked(width: int) -> nn.Module:
    """A layer whose input, output and both gradients are changed by hooks."""
    layer = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
    layer.register_forward_hook(lambda _, args, out: out + args[0])
    layer.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2.0,))
    layer.register_full_backward_hook(lambda _, grads, __: (grads[0] * 0.25,))
    return layer


class TensorHook(nn.Module):
    """A hook on a value between two operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 3.0)
        return torch.tanh(y)


class Autocast(nn.Module):
    """bf16 by autocast inside of forward, and fp32 within by an autocast that is off."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.softmax(self.low(x), -1)
            with torch.autocast("cpu", enabled=False):
                z = self.high(y.float())
        return x + z


class Checkpointed(nn.Module):
    """A block under ``torch.utils.checkpoint`` with the keywords given."""

    def __init__(self, width: int, **how: Any) -> None:
        super().__init__()
        self.block, self.how = mlp(width), how

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.block, x, **self.how)


reentrant = partial(Checkpointed, use_reentrant=True)
non_reentrant = partial(Checkpointed, use_reentrant=False)
selective = partial(Checkpointed, use_reentrant=False, context_fn=save_matmuls)


class CheckpointSequential(nn.Module):
    """``checkpoint_sequential`` over four layers in two segments."""

    def __init__(self, width: int, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.use_reentrant)


class NestedCheckpoint(nn.Module):
    """A checkpoint within a checkpoint."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = Checkpointed(width, use_reentrant=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.inner(self.outer(y)), x, use_reentrant=False)


# -- state, control flow, interfaces ---------------------------------------------------------------


class Running(nn.Module):
    """A running mean, written in place, one that is replaced, and a counter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("largest", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.largest = torch.maximum(self.largest, x.detach().amax(0))
        return self.linear(x - self.mean) / (1 + self.largest)


class ByShape(nn.Module):
    """Python control flow that depends on the shape of the input, and on the layer's number."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for i, layer in enumerate(self.layers):
            if i % 2 or x.shape[0] > 100:
                continue
            x = layer(x) / len(self.layers)
        while x.shape[0] % 4:
            x = torch.cat([x, x[-1:]])
        return self.head(x)


@dataclass
class Scores:
    """What `NestedOutput` returns within an `Answer`."""

    logits: Tensor
    names: tuple[str, ...]


@dataclass
class Answer:
    """What `NestedOutput` returns."""

    loss: Tensor
    scores: Scores
    hidden: list[Tensor]


class NestedOutput(nn.Module):
    """Returns dataclasses within dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Answer:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return Answer(x.square().mean(), Scores(x, ("a", "b")), hidden)


class Keywords(nn.Module):
    """All tensors are keyword-only, one of them in a dict, one optional."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(
        self, *, x: Tensor, more: dict[str, Tensor], mask: Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Any]:
        x = x + more["bias"]
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return {"logits": x, "scale": scale}


class Twice(nn.Module):
    """Calls the same blocks twice, and has two heads; f32 (batch, 13) -> a dict of two tensors."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block13() for _ in range(depth))
        self.heads = nn.ModuleDict({"near": nn.Linear(13, 3), "far": nn.Linear(13, 5)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        near = self.heads["near"](x)
        for block in self.blocks:
            x = block(torch.tanh(x))
        return {"near": near, "far": self.heads["far"](x)}


# -- what no trace can hold ------------------------------------------------------------------------


class Branches(nn.Module):
    """Which layer runs depends on a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.a(x)
        return self.b(x)


class Items(nn.Module):
    """How often the layer runs depends on a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max().item()) % 3 + 1):
            x = self.linear(x)
        return x


class Selects(nn.Module):
    """How large a value is depends on values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x.sum(-1) > 0]
        return x + self.linear(kept).sum(0)


class ThroughNumpy(nn.Module):
    """Leaves PyTorch and comes back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        ranks = numpy.argsort(x.detach().numpy(), axis=-1)
        return self.linear(x) * torch.from_numpy(ranks)


class NumpyNoise(nn.Module):
    """Draws noise by numpy's generator: a trace would repeat what it saw for ever."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        keep = numpy.random.rand(x.shape[-1]) > 0.1
        return self.linear(x) * torch.from_numpy(keep)
