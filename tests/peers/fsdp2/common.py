"""What the tests of this folder share: the models that torch's have, oracles, and comparisons.

Tolerances are those of `torch.testing.assert_close`, as in torch's tests.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fxshard

LR = 1e-2


class MLP(nn.Module):
    """f[*, dim] -> f[*, dim]: two linear layers."""

    def __init__(self, dim: int, *, multiplier: int = 4, bias: bool = True, buffer: bool = False):
        super().__init__()
        self.in_proj = nn.Linear(dim, multiplier * dim, bias=bias)
        self.out_proj = nn.Linear(multiplier * dim, dim, bias=bias)
        self.register_buffer("buffer", torch.randn(dim) if buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.out_proj(F.relu(self.in_proj(x))))
        return y if self.buffer is None else y + self.buffer

    def reset_parameters(self) -> None:
        if self.buffer is not None:
            nn.init.normal_(self.buffer)


class DoubleLinear(nn.Module):
    """Two layers beside each other; the second is left out, or gives a second output."""

    def __init__(self, dim: int, second: bool = True) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.second = second

    def forward(self, x: Tensor) -> Any:
        y = self.lin1(x).relu()
        return (y, self.lin2(x).relu()) if self.second else y


@dataclasses.dataclass
class Args:
    """Sizes of a `Transformer`."""

    layers: int = 2
    vocab: int = 8
    length: int = 16
    dim: int = 16
    heads: int = 4
    dropout: float = 0.0
    tied: bool = True
    checkpoint: bool = False


class Attention(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.heads, self.dropout = args.heads, args.dropout
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(args.dim, args.dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(args.dim), Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(args.dim, 4 * args.dim), nn.GELU(), nn.Linear(4 * args.dim, args.dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """int64 tokens [batch, sequence] -> logits f[batch, sequence, vocab]."""

    def __init__(self, args: Args | None = None) -> None:
        super().__init__()
        self.args = args = args or Args()
        self.tok_embeddings = nn.Embedding(args.vocab, args.dim)
        self.pos_embeddings = nn.Embedding(args.length, args.dim)
        self.dropout = nn.Dropout(args.dropout)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab, bias=False)
        if args.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.args.checkpoint else layer(x)
        return self.output(self.norm(x))

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(self.args.vocab, shape)


# -- sharding, and the model to compare with -------------------------------------------------------


def made(build: Callable[[], nn.Module]) -> Any:
    """The same model on all ranks; then each rank draws batches of its own."""
    torch.manual_seed(42)
    model = build()
    torch.manual_seed(43 + dist.get_rank())
    return model


def shard(model: Any, *units: nn.Module, **options: Any) -> Any:
    """`fully_shard` of the units, else of `layers`, else of the children; then of the model."""
    for unit in units or getattr(model, "layers", None) or list(model.children()):
        fxshard.fully_shard(unit, **options)
    return fxshard.fully_shard(model, **options)


def pair(build: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """A copy under DistributedDataParallel, and the model sharded in the usual way."""
    model = made(build)
    return ddp(copy.deepcopy(model)), shard(model, **options)


def ddp(model: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def average_grads(model: nn.Module, group: Any = None) -> None:
    """What data parallelism does to the gradients of a plain model."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR)


# -- comparisons -----------------------------------------------------------------------------------


def assert_parity(ref: Any, model: nn.Module) -> None:
    """The shards of parameters and of gradients are those of the reference's.

    Names may say that a part of the model is recomputed: the reference keeps all.
    """
    ref = getattr(ref, "module", ref)
    named, theirs = list(model.named_parameters()), list(ref.named_parameters())
    names = [fqn.replace("_checkpoint_wrapped_module.", "") for fqn, _ in named]
    assert names == [fqn for fqn, _ in theirs]
    for (fqn, mine), (_, whole) in zip(named, theirs, strict=True):
        assert isinstance(mine, DTensor), fqn
        assert_shard_of(mine, whole, fqn)
        assert (mine.grad is None) == (whole.grad is None), fqn
        if whole.grad is not None:
            assert_shard_of(mine.grad, whole.grad, f"gradient of {fqn}")


def assert_shard_of(mine: Any, whole: Tensor, what: str) -> None:
    placed = mine.device_mesh, mine.placements
    shard = distribute_tensor(whole.detach(), *placed, src_data_rank=None)  # each rank has it all
    assert_close(mine.to_local(), shard.to_local(), msg=lambda said: f"{what}: {said}")


def train_alike(
    ref: Any,
    model: Any,
    inputs: Callable[[], Sequence[Any]],
    steps: int = 10,
    *,
    parity: bool = True,
    before: Callable[[Any, int], None] = lambda model, step: None,
    after: Callable[[Any], None] = lambda model: None,
    optimizer: Callable[[nn.Module], Optimizer] = adam,
) -> None:
    """Losses, and unless `parity` is False gradients and parameters, of each of some steps.

    Args:
        inputs: gives the arguments of a step.
        before: called with each of the two models and the number of the step, ahead of it.
        after: called with the reference after its backward, such as `average_grads`.
    """
    both = [(ref, optimizer(ref)), (model, optimizer(model))]
    if parity:
        assert_parity(ref, model)
    for step in range(steps):
        args, losses = inputs(), []
        for each, _ in both:
            before(each, step)
            torch.manual_seed(100 + step)  # for dropout
            losses.append(each(*args).sum())
            losses[-1].backward()
        after(ref)
        assert_close(losses[1], losses[0])
        if parity:
            assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
        if parity:
            assert_parity(ref, model)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
