"""Gradients of tied parameters are summed in eager's order: bitwise those of DDP and FSDP2."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fxshard
from tests.fsdp2 import full

STEPS, VOCAB, WIDTH = 3, 37, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Tied(nn.Module):
    """Like GPT-2 with token types: the embedding is read as such twice, and is the head.

    `also`: what else reads it: in the middle of the model, in the loss; or the blocks are one.
    """

    def __init__(self, also: str) -> None:
        super().__init__()
        self.also = also
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        if also == "one block":
            self.blocks = nn.ModuleList([self.blocks[0]] * 3)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])) + self.tokens(types)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.also == "the middle" and number == 1:
                x = x + F.linear(self.head(x).softmax(-1), self.tokens.weight.t())
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())
        return loss + self.tokens.weight.square().mean() if self.also == "the loss" else loss


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    both = torch.randint(VOCAB, (2, 4, 8), generator=generator)
    return both[0], both[1]


def in_units(model: Any, fully_shard: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def trained(rank: int, world_size: int, also: str) -> None:
    """Of every step all gradients, and all parameters after it."""
    torch.manual_seed(0)
    plain = Tied(also)
    copies: list[Any] = [copy.deepcopy(plain) for _ in range(4)]
    ddp = DistributedDataParallel(copies[0])
    if also == "one block":  # FSDP2 shards a module once
        theirs = fsdp.fully_shard(copies[1])
        ours = fxshard.fully_shard(copies[2])
    else:
        theirs = in_units(copies[1], fsdp.fully_shard)
        ours = in_units(copies[2], fxshard.fully_shard)
    compiled = fxshard.compile(copies[3], units=["blocks.*"])
    models = {"DDP": ddp.module, "FSDP2": theirs, "fully_shard": ours, "compile": compiled}
    calls = models | {"DDP": ddp}
    optimizers = {k: torch.optim.AdamW(m.parameters(), lr=1e-2) for k, m in models.items()}
    for step in range(STEPS):
        for call in calls.values():
            call(*batch(rank, step)).backward()
        for fqn, param in models["DDP"].named_parameters():
            want = param.grad
            for name, model in models.items():
                got = full(model.get_parameter(fqn).grad)
                assert torch.equal(got, want), (name, step, fqn, (got - want).abs().max())
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    for fqn, param in models["DDP"].named_parameters():
        for name, model in models.items():
            assert torch.equal(full(model.get_parameter(fqn)), param), (name, fqn)


@pytest.mark.parametrize("also", ["nothing", "the middle", "the loss", "one block"])
@pytest.mark.sample(2)
def test_as_ddp_and_fsdp2_bitwise(ranks: Any, also: str) -> None:
    ranks(2).run(trained, also)
