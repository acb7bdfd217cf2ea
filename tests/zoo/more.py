"""More models, for the matrix of memory tests: `MATRIX` is `MODELS` and as many again.

`MODELS` stays small, since many tests take every model of it. Hugging Face models are tiny ones of
their real classes, without a download.
"""

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.zoo import MODELS, Batch, Case, _generator, cross_entropy, float_batch, output_loss
from tests.zoo import labelled_token_batch as labelled
from tests.zoo import token_batch as tokens
from tests.zoo.models import Block, Block13

aten = torch.ops.aten
SAVED_OPERATORS = [aten.mm.default, aten.addmm.default, aten.convolution.default]


def hf(name: str, **config: Any) -> nn.Module:
    """The Hugging Face model of class `name`, in training mode, fp32, without a cache."""
    import transformers  # 2 s, so only for those who build it

    cls = getattr(transformers, name)
    model = cls(cls.config_class(**config))
    for module in model.modules():  # T5 has a copy of its configuration for each of its halves
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model.train()


def save_matmuls() -> Any:
    """The contexts of a selective checkpoint: what matmuls and convolutions give is saved."""
    return create_selective_checkpoint_contexts(SAVED_OPERATORS)


def checkpointed(case: Case, *, selective: bool = False) -> nn.Module:
    """`case`'s model with a checkpoint around each unit: transformers' own, or torch's wrapper."""
    model = case.build()
    more: dict[str, Any] = {"context_fn": save_matmuls} if selective else {}
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, **more}
        )
        return model
    globs = case.units or []
    for path in [p for p, _ in model.named_modules() if any(fnmatchcase(p, g) for g in globs)]:
        if not any(path.count(".") == glob.count(".") for glob in globs):
            continue  # "*" stops at a dot
        parent, _, name = path.rpartition(".")
        block = checkpoint_wrapper(
            model.get_submodule(path), checkpoint_impl=CheckpointImpl.NO_REENTRANT, **more
        )
        setattr(model.get_submodule(parent), name, block)
    return model


def image_batch(rank: int, step: int, *, shape: tuple[int, ...], classes: int) -> Batch:
    """Normal fp32 `pixel_values` and int64 `labels`, as keywords."""
    (pixels,), _ = float_batch(rank, step, shape=shape)
    labels = torch.randint(classes, shape[:1], generator=_generator(rank, step))
    return (), {"pixel_values": pixels, "labels": labels}


def translation_batch(rank: int, step: int, *, vocab: int) -> Batch:
    """Padded int64 tokens with their mask, and shorter labels, as keywords."""
    _, source = labelled(rank, step, vocab=vocab, shape=(2, 8))
    _, target = labelled(rank, step + 1, vocab=vocab, shape=(2, 6))
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    source |= {"attention_mask": mask, "labels": target["labels"]}
    return (), source


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


def twice_loss(output: dict[str, Tensor]) -> Tensor:
    """Both heads."""
    return cross_entropy(output["near"]) + cross_entropy(output["far"])


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
    """A transformer block and experts behind it; adds to the balancing loss."""

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


def moe_loss(output: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy and a little of the balancing loss."""
    return cross_entropy(output[0]) + 0.01 * output[1].sum()


class Norms(nn.Module):
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


DECODER: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def causal(name: str, cls: str, *, dropout: bool = False, **config: Any) -> Case:
    """A causal language model of transformers with `model.layers`."""
    units = config.pop("units", ["model.layers.*"])
    return Case(
        name,
        build=partial(hf, cls, **config),
        batch=partial(labelled, vocab=64),
        loss=output_loss,
        units=units,
        dropout=dropout,
    )


MORE: dict[str, Case] = {
    case.name: case
    for case in (
        causal("qwen3", "Qwen3ForCausalLM", **DECODER, head_dim=8),
        causal(
            "gemma3", "Gemma3ForCausalLM", **DECODER, head_dim=8, sliding_window=4, pad_token_id=0
        ),
        causal(
            "gpt2",
            "GPT2LMHeadModel",
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
            units=["transformer.h.*"],
            dropout=True,
        ),
        causal(
            "mixtral",
            "MixtralForCausalLM",
            **DECODER,
            num_local_experts=4,
            experts_implementation="grouped_mm",
        ),
        causal(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            **DECODER,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            experts_implementation="batched_mm",
        ),
        Case(
            "bert",
            build=partial(
                hf,
                "BertForMaskedLM",
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                max_position_embeddings=32,
            ),
            batch=partial(labelled, vocab=64),
            loss=output_loss,
            units=["bert.encoder.layer.*"],
            dropout=True,
        ),
        Case(
            "t5",
            build=partial(
                hf,
                "T5ForConditionalGeneration",
                vocab_size=64,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            ),
            batch=partial(translation_batch, vocab=64),
            loss=output_loss,
            units=["encoder.block.*", "decoder.block.*"],
            dropout=True,
        ),
        Case(
            "vit",
            build=partial(
                hf,
                "ViTForImageClassification",
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=8,
                patch_size=4,
                num_labels=10,
            ),
            batch=partial(image_batch, shape=(2, 3, 8, 8), classes=10),
            loss=output_loss,
            units=["vit.layers.*"],
        ),
        Case(
            "gru",
            build=Recurrent,
            batch=partial(tokens, vocab=32, shape=(2, 5)),
            loss=cross_entropy,
            units=["layers.*"],
        ),
        Case(
            "lora",
            build=lora,
            batch=partial(labelled, vocab=128),
            loss=output_loss,
            units=["model.layers.*"],
        ),
        Case(
            "twice",
            build=Twice,
            batch=partial(float_batch, shape=(4, 13)),
            loss=twice_loss,
            units=["blocks.*"],
        ),
        Case(
            "moe",
            build=MixtureOfExperts,
            batch=partial(tokens, vocab=32),
            loss=moe_loss,
            units=["layers.*"],
        ),
        Case(
            "unet",
            build=Norms,
            batch=partial(float_batch, shape=(2, 3, 8, 8)),
            loss=cross_entropy,
            units=["down", "up"],
        ),
    )
}
MATRIX: dict[str, Case] = MODELS | MORE
