"""The models that FSDP1's suite trains, of the same shapes (torch.testing's `common_fsdp`).

`torch.testing` needs packages that nothing else here does, so they are written anew. Each has
`get_input` (this rank's batch), `get_loss`, and `units`: what FSDP1's tests wrap of it.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy

LAYERS = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})


class Nested(nn.Module):
    """Linear layers, of which some are nested: (4, 8) -> (4, 8)."""

    units: Any = ("module.1", "module.1.0", "module.2")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = self.layers()

    def layers(self) -> nn.Sequential:
        inner = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16))
        return nn.Sequential(nn.Linear(8, 4), inner, nn.Linear(16, 4), nn.Linear(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def get_input(self) -> tuple[Tensor, ...]:
        torch.manual_seed(1 + dist.get_rank())
        return (torch.rand(4, 8),)

    def get_loss(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.sum()


class AlwaysNested(Nested):
    """Every module is a unit."""

    units: Any = always_wrap_policy


class PartlyFrozen(Nested):
    """All but the last layer is frozen, and that layer is in a unit with a frozen one."""

    def layers(self) -> nn.Sequential:
        inner = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16))
        last = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 8))
        made = nn.Sequential(nn.Linear(8, 4), inner, last).requires_grad_(False)
        last[1].requires_grad_(True)
        return made


class Experts(Nested):
    """`module.2` is an expert: another one on each rank, and its gradients are not reduced."""

    units: Any = ("module.1",)

    def layers(self) -> nn.Sequential:
        torch.manual_seed(42 + dist.get_rank())
        expert = nn.Linear(23, 12)
        torch.manual_seed(0)
        shared = nn.Linear(12, 23)
        return nn.Sequential(nn.Linear(8, 12), shared, expert, nn.Linear(12, 8))


class Transformer(nn.Module):
    """The embedding and the output projection share their weight. In eval mode: no dropout."""

    units: Any = LAYERS

    def __init__(self, batch_norm: bool = True, train: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        vocabulary, width = 23, 16
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(
            d_model=width,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=8,
            dropout=0.1,
        )
        self.output_proj = nn.Linear(width, vocabulary)
        self.output_proj.weight = self.embed_tokens.weight
        self.register_buffer("vocab_bias", torch.ones(width))
        self.register_buffer("long_buffer", torch.zeros(width, dtype=torch.long))
        self.bn: nn.Module = nn.BatchNorm1d(2) if batch_norm else nn.Identity()
        self.train(train)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.embed_tokens(source)
        x = x + self.vocab_bias + self.long_buffer.type_as(x)
        return self.output_proj(self.transformer(x, self.bn(self.embed_tokens(target))))

    def get_input(self) -> tuple[Tensor, ...]:
        """Time by batch. (torch's tests give all ranks the same; here they differ.)"""
        rank = dist.get_rank()
        source, target = torch.arange(12) + rank, torch.arange(8) + 2 * rank
        return source.view(6, 2), target.view(4, 2)

    def get_loss(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.cross_entropy(
            output.view(-1, output.size(-1)), inputs[1].view(-1), reduction="sum"
        )
