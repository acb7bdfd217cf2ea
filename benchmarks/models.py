"""The models whose steps are timed and whose first step is awaited: random weights, from configs.

Three sizes of Llama's shape (width : tokens : depth as in small real models), an encoder, a conv
net. A step of them takes about 0.05, 0.2 and 1 s on one core; the models are Hugging Face's and
torch's own modules, and the loss is in the user's loop.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.gpu.models import Bottleneck
from fxshard.integrations.transformers import without_logits

Batch = tuple[Tensor, Tensor]  # inputs, targets


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its batch and its loss.

    Attributes:
        name, title: how it is called on the command line, and in tables.
        build: makes it, with weights drawn from the generator.
        batch: makes inputs and targets.
        loss: of the model's output and the targets.
        labels: the model is given its targets (``labels=``, as Hugging Face's Trainer does it), and
            computes the loss itself; else the loop does.
        blocks: FQN glob of the modules that are units of their own, and are compiled alone.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    blocks: str
    labels: bool = False

    def call(self, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Arguments of the model's forward."""
        inputs, targets = batch
        return (inputs,), ({"labels": targets} if self.labels else {})

    def block_modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules that `blocks` names, in order."""
        pattern = self.blocks.split(".")
        return [
            module
            for fqn, module in model.named_modules()
            if len(names := fqn.split(".")) == len(pattern)
            and all(map(fnmatch.fnmatchcase, names, pattern))
        ]


def llama(
    name: str, *, dim: int, depth: int, vocab: int, batch: int, seq: int, labels: bool = False
) -> Model:
    """Hugging Face's Llama: heads of 32 or 64, half of them for keys, 8/3 dim in the MLP."""
    width = 32 if dim < 512 else 64

    def build() -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=vocab,
            hidden_size=dim,
            intermediate_size=-(-8 * dim // 3 // 32) * 32,
            num_hidden_layers=depth,
            num_attention_heads=dim // width,
            num_key_value_heads=dim // width // 2,
            max_position_embeddings=seq,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
        return without_logits(model) if labels else model

    def make() -> Batch:
        tokens = torch.randint(0, vocab, (batch, seq + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(output: Any, targets: Tensor) -> Tensor:
        if labels:
            found: Tensor = output.loss
            return found
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    title = f"Llama, {dim} wide, {depth} layers, {batch} x {seq} tokens"
    return Model(name, title, build, make, loss, "model.layers.*", labels)


def encoder(name: str, *, dim: int, depth: int, vocab: int, batch: int, seq: int) -> Model:
    """Hugging Face's BERT with a classifier of 10 classes, without dropout."""

    def build() -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=vocab,
            hidden_size=dim,
            intermediate_size=4 * dim,
            num_hidden_layers=depth,
            num_attention_heads=dim // 64,
            max_position_embeddings=seq,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=10,
        )
        return transformers.BertForSequenceClassification(config)

    def make() -> Batch:
        return torch.randint(0, vocab, (batch, seq)), torch.randint(0, 10, (batch,))

    def loss(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, targets)

    title = f"BERT, {dim} wide, {depth} layers, {batch} x {seq} tokens"
    return Model(name, title, build, make, loss, "bert.encoder.layer.*")


class ConvNet(nn.Module):
    """Bottlenecks with batch norm; f32 [batch, 3, side, side] -> logits [batch, classes]."""

    def __init__(self, channels: int, inner: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.layers = nn.ModuleList(Bottleneck(channels, inner) for _ in range(depth))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def convnet(name: str, *, channels: int, inner: int, depth: int, batch: int, side: int) -> Model:
    """Residual bottlenecks and a classifier of 10 classes."""

    def make() -> Batch:
        return torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))

    title = f"conv net, {channels} channels, {depth} blocks, {batch} images of {side} x {side}"
    return Model(
        name,
        title,
        lambda: ConvNet(channels, inner, depth, 10),
        make,
        F.cross_entropy,
        "layers.*",
    )


def vision(name: str, *, dim: int, depth: int, batch: int, side: int) -> Model:
    """Hugging Face's vision transformer: patches of 8 x 8, a classifier of 10 classes."""

    def build() -> nn.Module:
        config = transformers.ViTConfig(
            hidden_size=dim,
            intermediate_size=4 * dim,
            num_hidden_layers=depth,
            num_attention_heads=dim // 64,
            image_size=side,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=10,
        )
        return transformers.ViTForImageClassification(config)

    def make() -> Batch:
        return torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))

    def loss(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, targets)

    title = f"ViT, {dim} wide, {depth} layers, {batch} images of {side} x {side}"
    return Model(name, title, build, make, loss, "vit.layers.*")


class Experts(nn.Module):
    """A block of attention and a mixture of experts, all of which see all tokens.

    f32 [batch, seq, dim] -> the same. The two best of the router's scores are the weights, so that
    no size depends on the data.
    """

    def __init__(self, dim: int, inner: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, inner) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, dim) / inner**0.5)
        self.heads = dim // 64

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, 64).unbind(2)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        y = self.norm2(x).flatten(0, 1)
        best, chosen = self.router(y).softmax(-1).topk(2)
        weights = torch.zeros_like(y[:, : self.up.shape[0]]).scatter(1, chosen, best)
        each = F.silu(torch.einsum("td,edh->eth", y, self.up))
        made = torch.einsum("eth,ehd,te->td", each, self.down, weights)
        return x + made.view(batch, seq, dim)


class Mixture(nn.Module):
    """Tokens [batch, seq] -> logits f32 [batch, seq, vocab]."""

    def __init__(self, vocab: int, dim: int, inner: int, experts: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Experts(dim, inner, experts) for _ in range(depth))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def mixture(name: str, *, dim: int, depth: int, vocab: int, batch: int, seq: int) -> Model:
    """Four experts, half of the usual MLP each."""

    def make() -> Batch:
        tokens = torch.randint(0, vocab, (batch, seq + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    title = f"mixture of 4 experts, {dim} wide, {depth} layers, {batch} x {seq} tokens"
    return Model(
        name, title, lambda: Mixture(vocab, dim, 2 * dim, 4, depth), make, loss, "layers.*"
    )


MODELS = {
    model.name: model
    for model in (
        llama("tiny", dim=128, depth=4, vocab=512, batch=2, seq=128),
        llama("small", dim=256, depth=6, vocab=1024, batch=2, seq=192),
        llama("medium", dim=512, depth=8, vocab=2048, batch=2, seq=256),
        encoder("encoder", dim=256, depth=6, vocab=2048, batch=4, seq=96),
        convnet("convnet", channels=128, inner=64, depth=6, batch=8, side=64),
    )
}
# Units of more than the option `pack_bytes`, so that parameters have buffers of their own.
FRONT = {
    model.name: model
    for model in (
        llama("llama", dim=256, depth=6, vocab=4096, batch=2, seq=192, labels=True),
        llama("long", dim=256, depth=4, vocab=1024, batch=1, seq=1024, labels=True),
        mixture("mixture", dim=256, depth=4, vocab=1024, batch=2, seq=192),
        vision("vision", dim=256, depth=6, batch=8, side=64),
        encoder("encoder", dim=256, depth=6, vocab=2048, batch=4, seq=96),
    )
}
# For tests of the scripts themselves.
SMOKE = llama("smoke", dim=64, depth=2, vocab=128, batch=1, seq=16)
EVERY = {**MODELS, SMOKE.name: SMOKE}
