"""Models that ``fxshard check`` is tried on, in tests and in this project's own CI."""

import os
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = "CHECK_MODELS_WIDTH"  # as an edit of the code would change it


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def encoder() -> Any:
    return of_depth(3)


def short() -> Any:
    return of_depth(2)


def of_depth(depth: int) -> Any:
    width = int(os.environ.get(WIDTH, "64"))
    return Encoder(width, depth), (torch.ones(4, 16, width),), {}
