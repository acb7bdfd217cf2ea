"""Models, batches and comparisons that several of the tests beside it need (test_training)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.fsdp2 import full


class Block(nn.Module):
    """(batch, 6) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """(batch, 5) -> (batch, 3); 5 and 3 do not divide by 2. `finish` makes the output."""

    def __init__(self, finish: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.finish = finish

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        y = self.head(x)
        return self.finish(self, x, y, *args, **kwargs) if self.finish else y


def batch(rank: int, step: int = 0) -> Tensor:
    """f32[4, 5]."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(y: Tensor) -> Tensor:
    """Cross entropy; smooth, and never zero."""
    return F.cross_entropy(y.float(), torch.arange(len(y)) % y.shape[1])


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def unit_frozen() -> nn.Module:
    model = Net()
    model.inlet.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


def first_units_frozen() -> nn.Module:
    model = Net()
    for module in (model.inlet, model.blocks[0], model.blocks[1]):
        module.requires_grad_(False)
    return model


def biases_frozen() -> nn.Module:
    model = Net()
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name)
    return model


class LoraLinear(nn.Module):
    """A frozen linear layer and a trainable one of rank 2 beside it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.a, self.b = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


def lora() -> nn.Module:
    """Adapters in every block; everything else is frozen."""
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.add_module("linear", LoraLinear(6))
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Spare(Net):
    """One block is never called, one parameter of a called block never read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].spare = nn.Parameter(torch.ones(4))
        self.spare = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[0](self.inlet(x))))


class Whole(nn.Module):
    """(batch, 5) -> (batch, 3), linear in each parameter: with small whole numbers everywhere,
    every sum is exact, in whatever order it is taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_((param * 4).round())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x) * x.sign().detach()
        return self.head(x)


def whole_batch(rank: int, step: int) -> Tensor:
    return (batch(rank, step) * 2).round()


def assert_same(ours: Any, theirs: Any, where: str = "", rtol: float = 0, atol: float = 0) -> None:
    """Equal trees of containers, tensors and plain values; without tolerances, bit by bit."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where} {key}", rtol, atol)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where} {i}", rtol, atol)
    elif not isinstance(theirs, Tensor):
        assert ours == theirs, where
    elif rtol:
        assert_close(
            ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), where
        views = [t.contiguous().unsqueeze(-1).view(torch.uint8) for t in (ours, theirs)]
        assert torch.equal(*views), f"{where}: not bitwise equal"
