"""Models with several outputs, and losses made of some of them, as people write them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard as fsdp2

import fxshard
from tests.end_to_end.training_cases import Net, batch, loss_of

Backward = Callable[[dict[str, Tensor], float], None]  # of what a model returns, and a factor


class Several(Net):
    """Two losses, logits, hidden states, and a value whose derivative is infinite here."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return {
            "loss": loss_of(logits),
            "aux": self.extra(hidden).square().mean(),
            "logits": logits,
            "hidden": hidden,
            "risky": (hidden - hidden.detach()).sqrt().sum(),
        }


def backward_of(*names: str) -> Backward:
    """One backward of a sum of outputs."""

    def run(out: dict[str, Tensor], factor: float) -> None:
        torch.stack([out[name].square().mean() * factor for name in names]).sum().backward()

    return run


def in_turn(*names: str) -> Backward:
    """A backward of each output, on one forward."""

    def run(out: dict[str, Tensor], factor: float) -> None:
        for left, name in zip(range(len(names))[::-1], names, strict=True):
            (out[name].square().mean() * factor).backward(retain_graph=left > 0)

    return run


USES: dict[str, Backward] = {
    "the loss": backward_of("loss"),
    "the other loss": backward_of("aux"),
    "both losses": backward_of("loss", "aux"),
    "a loss and logits": backward_of("loss", "logits"),
    "logits": backward_of("logits"),
    "hidden states": backward_of("hidden"),
    "all": backward_of("loss", "aux", "logits", "hidden"),
    "losses in turn": in_turn("loss", "aux"),
    "logits, then a loss": in_turn("logits", "loss"),
    "one loss twice": in_turn("loss", "loss"),
}


def made(how: str, build: Callable[[], Any] = Several, **options: Any) -> Any:
    """ "eager", "fsdp2", "compile" (on ranks), "fully_shard", or "in_process"."""
    torch.manual_seed(0)
    model = build()
    if how in ("fsdp2", "fully_shard"):
        shard = fsdp2 if how == "fsdp2" else fxshard.fully_shard
        for block in model.blocks:
            shard(block, **options)
        return shard(model, **options)
    if how == "eager":
        return model
    return fxshard.compile(
        model, units=["blocks.*"], **({"world_size": 2} if how == "in_process" else {}), **options
    )


def joined(model: Any, use: Backward, world_size: int, step: int = 0) -> None:
    """The gradients of eager PyTorch: the mean of those of all ranks' batches."""
    for rank in range(world_size):
        use(model(batch(rank, step)), 1 / world_size)
