"""Models with adapters of PEFT, and how they are trained: on ranks, and in one process."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import fsdp

import fxshard
from tests.fsdp2 import full

LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def adapted(base: nn.Module, **options: Any) -> Any:
    """A base with LoRA, whose second matrices are no zeros: their gradients would say little."""
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(**(LORA | options)))
    fill_adapters(model)
    return model


def fill_adapters(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            param.data.copy_(0.2 * torch.randn(param.shape, generator=generator))


def tokens(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 32, (2, 6), generator=generator)


def by_layers(fully_shard: Callable[..., Any]) -> Callable[..., Any]:
    """As users shard a model of PEFT: each layer of the base, then all of it."""

    def shard(model: Any, **options: Any) -> Any:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    return shard


WAYS: dict[str, Callable[..., Any]] = {
    "compile": fxshard.compile,
    "fully_shard": by_layers(fxshard.fully_shard),
    "fsdp2": by_layers(fsdp.fully_shard),
}


def trained(model: Any, ranks: Iterable[int], steps: int = 2) -> list[Any]:
    """Of each step on the batches of `ranks`: loss, gradients, and the parameters after it."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    found: list[Any] = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        ids = torch.cat([tokens(rank, step) for rank in ranks])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        named = dict(model.named_parameters())
        grads = {name: full(p.grad) for name, p in named.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        params = {name: full(p) for name, p in named.items() if p.requires_grad}
        found.append((loss.item(), grads, params))
    return found


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens(5, 5)).logits
    return found
