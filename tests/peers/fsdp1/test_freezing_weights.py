"""torch's test_fsdp_freezing_weights.py: a frozen trunk under a head that is trained."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.peers.fsdp1.shared import compiled, ddp, params_of, plain


class Model(nn.Module):
    """(2, 3, 12, 12) -> (2, 10)."""

    units: Any = ("trunk", "head")

    def __init__(self, no_grad: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = self.parts()
        self.no_grad = no_grad

    def parts(self) -> tuple[nn.Module, nn.Module]:
        conv = nn.Conv2d(3, 16, kernel_size=3)
        trunk = nn.Sequential(
            conv, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten()
        )
        return trunk, nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad() if self.no_grad else contextlib.nullcontext():
            x = self.trunk(x)
        return self.head(x)


class NestedTrunk(Model):
    units: Any = ("trunk.0", "trunk.1", "trunk", "head")

    def parts(self) -> tuple[nn.Module, nn.Module]:
        def block(width: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(width, 16, kernel_size=3), nn.ReLU(inplace=True))

        head = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(16, 10))
        return nn.Sequential(block(3), block(16)), head


def trained(rank: int, model: Any, freezes: bool) -> dict[str, Tensor]:
    """With `freezes` the trunk's gradients are set to None before each step."""
    torch.manual_seed(rank)
    batch, target = torch.randn(2, 3, 12, 12), torch.tensor([0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = F.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        if freezes:
            for param in plain(model).trunk.parameters():
                param.grad = None
        optimizer.step()
    return params_of(model)


def frozen(
    rank: int,
    world_size: int,
    kind: type[Model],
    by_flag: bool,
    after: bool,
    no_grad: bool,
    forward_prefetch: bool,
) -> None:
    reference, model = kind(no_grad), kind(no_grad)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if by_flag:
        reference.trunk.requires_grad_(False)
        if not after:
            model.trunk.requires_grad_(False)
    model = compiled(model, forward_prefetch=forward_prefetch)
    if by_flag and after:
        model.trunk.requires_grad_(False)
    want = trained(rank, ddp(reference, find_unused_parameters=no_grad), not by_flag)
    got = trained(rank, model, not by_flag)
    assert_close(got, want)
    for name, param in model.named_parameters():
        assert param.requires_grad == (not by_flag or name.startswith("head"))
        assert torch.equal(got[name], before[name]) == name.startswith("trunk"), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Model, NestedTrunk])
@pytest.mark.parametrize("by_flag", [True, False], ids=["requires_grad", "grad_to_none"])
@pytest.mark.parametrize("after", [True, False], ids=["frozen_after", "frozen_before"])
@pytest.mark.parametrize("no_grad", [True, False], ids=["no_grad", "grad"])
@pytest.mark.parametrize("forward_prefetch", [True, False], ids=["ahead", "on_demand"])
def test_frozen_trunk(
    ranks: Any,
    kind: type[Model],
    by_flag: bool,
    after: bool,
    no_grad: bool,
    forward_prefetch: bool,
) -> None:
    ranks(2).run(frozen, kind, by_flag, after, no_grad, forward_prefetch)
