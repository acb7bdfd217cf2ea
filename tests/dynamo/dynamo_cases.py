"""What several of the tests beside it need (test_dynamo)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.runtime import reading
from tests import fsdp2

WIDTH = 8


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    """Blocks of linear, tanh, linear, added to what goes in; then a layer norm."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


class BrokenBlock(nn.Module):
    """A block with something inside that Dynamo cannot trace."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if self.kind == "print":
            print("in a block")
        elif self.kind == "break":
            torch._dynamo.graph_break()
        elif self.kind == "data":
            h = h * 2 if h.sum() > 0 else h - 1
        elif self.kind == "try":  # Dynamo gives up the frame: all of it runs as it is
            try:
                torch._dynamo.graph_break()
                h = h * self.scale.repeat(2)
            finally:
                pass
        return x + self.b(h) * self.scale


class Broken(nn.Module):
    def __init__(self, kind: str, depth: int = 2) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(BrokenBlock(kind) for _ in range(depth))
        self.out = nn.Linear(WIDTH, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """The plain model, and an equal one that is sharded over 2 ranks inside this process."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    return plain, fxshard.shard(make(), world_size=2, **options)


def compiled(model: nn.Module, fullgraph: bool = True, **options: Any) -> Any:
    return torch.compile(model, backend="fxshard", fullgraph=fullgraph, **options)


def assert_same_step(plain: Any, sharded: Any, run: Any, *args: Any, atol: float = 1e-6) -> None:
    """Output and gradients of `run`, a way to call `sharded`, are those of `plain`."""
    expected, got = plain(*args), run(*args)
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)
    plain.zero_grad()
    sharded.zero_grad()
    expected.square().mean().backward()
    got.square().mean().backward()
    assert_same_gradients(sharded, plain, atol)


def assert_same_gradients(sharded: nn.Module, plain: nn.Module, atol: float = 1e-6) -> None:
    expected = dict(plain.named_parameters())
    assert [name for name, _ in sharded.named_parameters()] == list(expected)
    for name, param in sharded.named_parameters():
        other = expected[name].grad
        assert (param.grad is None) == (other is None), name
        if param.grad is not None and other is not None:
            torch.testing.assert_close(fsdp2.full(param.grad), other, atol=atol, rtol=0, msg=name)


def batch_of(rank: int, step: int, width: int = 4) -> Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(10 * step + rank))


def programs(model: nn.Module) -> list[Any]:
    runtime = reading.runtime_of(model)
    assert runtime is not None
    return [plan.program for plan in runtime.captured]
