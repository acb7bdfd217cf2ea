"""torch's test_fsdp_fine_tune.py: units of which all parameters are frozen."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing import assert_close

from tests.oracles import count_collectives
from tests.peers.fsdp1.shared import (
    FULL,
    GRAD_OP,
    HALF,
    NO_SHARD,
    STRATEGIES,
    compiled,
    ddp,
    grads_of,
    losses_alike,
    params_of,
)

LINEARS = 6
POLICY = ModuleWrapPolicy({nn.Linear})
EACH = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
NEEDS_GRAD = pytest.mark.parametrize("needs_grad", [False, True], ids=["data", "input_grad"])


def chain() -> nn.Sequential:
    """(8, 5) -> (8, 5); each second linear layer is frozen, the first one too."""
    torch.manual_seed(42)
    pairs = [(nn.Linear(5, 5), nn.ReLU()) for _ in range(LINEARS)]
    return freeze(nn.Sequential(*itertools.chain(*pairs)), True)


def freeze(model: Any, frozen: bool) -> Any:
    for i in range(0, LINEARS, 2):
        model[2 * i].requires_grad_(not frozen)
    return model


def resharded(rank: int, world_size: int, strategy: Any, needs_grad: bool, unfreezes: bool) -> None:
    """Frozen units are resharded too: the next step gathers them again. A step without gradients
    is in between."""
    model, reference = compiled(chain(), units=POLICY, strategy=strategy), chain()
    torch.manual_seed(1 + rank)
    for step in range(3):
        trained = LINEARS // 2
        if unfreezes and step == 2:
            freeze(model, False), freeze(reference, False)
            trained = LINEARS
        x = torch.randn(8, 5)
        inputs = [x.clone().requires_grad_(needs_grad) for _ in range(2)]
        with count_collectives() as seen, torch.set_grad_enabled(step != 1):
            loss = model(inputs[0]).sum()
        assert seen.count("all_gather") == (0 if strategy is NO_SHARD else LINEARS)
        if step == 1:
            continue
        with count_collectives() as seen:
            loss.backward()
        kind = "all_reduce" if strategy is NO_SHARD else "reduce_scatter"
        assert seen.count(kind) == trained
        reference(inputs[1]).sum().backward()
        for param in reference.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
                param.grad /= world_size
        assert_close(grads_of(model), grads_of(reference))
        assert_close(inputs[0].grad, inputs[1].grad)
        model.zero_grad(), reference.zero_grad()
        assert all(param.requires_grad for param in model.parameters()) == (trained == LINEARS)


@pytest.mark.sample(2)
@EACH
@NEEDS_GRAD
@pytest.mark.parametrize("unfreezes", [False, True], ids=["frozen", "unfrozen"])
def test_frozen_units_are_resharded(
    ranks: Any, strategy: Any, needs_grad: bool, unfreezes: bool
) -> None:
    ranks(2).run(resharded, strategy, needs_grad, unfreezes)


class Traversals(nn.Module):
    """Both layers are called ten times, one of them without gradients as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.layer_0, self.layer_no_grad = nn.Linear(5, 5), nn.Linear(5, 5)
        self.layer_with_grad = nn.Linear(5, 5)
        self.layer_no_grad.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_0(x)
        for _ in range(10):
            x = self.layer_no_grad(self.layer_with_grad(x))
            with torch.no_grad():
                x += self.layer_with_grad(x)
        return x


def traversed(
    rank: int, world_size: int, strategy: Any, needs_grad: bool, forward_prefetch: bool
) -> None:
    options = {"strategy": strategy, "forward_prefetch": forward_prefetch}
    model = compiled(Traversals(), units=POLICY, **options)
    torch.manual_seed(1 + rank)
    losses_alike([ddp(Traversals()), model], torch.randn(8, 5, requires_grad=needs_grad))


@pytest.mark.sample(2)
@EACH
@NEEDS_GRAD
@pytest.mark.parametrize("forward_prefetch", [False, True], ids=["on_demand", "ahead"])
def test_units_that_are_called_many_times(
    ranks: Any, strategy: Any, needs_grad: bool, forward_prefetch: bool
) -> None:
    ranks(2).run(traversed, strategy, needs_grad, forward_prefetch)


def parity(rank: int, world_size: int, strategy: Any) -> None:
    pair = ddp(chain()), compiled(chain(), units=POLICY, strategy=strategy)
    torch.manual_seed(1 + rank)
    losses_alike(pair, torch.randn(8, 5))


@pytest.mark.sample(2)
@EACH
def test_every_second_unit_is_frozen(ranks: Any, strategy: Any) -> None:
    ranks(2).run(parity, strategy)


class IgnoresSecond(nn.Linear):
    def forward(self, x: Tensor, unused: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Unused(nn.Module):
    def __init__(self, freeze: bool) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.layer0, self.layer1_frozen, self.layer2 = (IgnoresSecond(4, 4) for _ in range(3))
        self.layer1_frozen.requires_grad_(not freeze)

    def forward(self, x: Tensor, learnable: Tensor) -> Tensor:
        layers = self.layer0, self.layer1_frozen, self.layer2
        return torch.cat([*(layer(x, learnable) for layer in layers), learnable])


def frozen_or_left_out(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Frozen, or left out of the optimizer: the others are trained alike."""
    pair = [compiled(Unused(freeze), units=[IgnoresSecond], **options) for freeze in (True, False)]
    optimizers = [
        torch.optim.Adam([p for n, p in model.named_parameters() if "frozen" not in n], lr=1e-2)
        for model in pair
    ]
    torch.manual_seed(1 + rank)
    for _ in range(6):
        x = torch.randn(4, 4)
        losses = []
        for model, optimizer in zip(pair, optimizers, strict=True):
            losses.append(model(x, x).sum())
            losses[-1].backward()
            optimizer.step()
            model.zero_grad()
        assert_close(losses[0], losses[1])
    assert_close(params_of(pair[0]), params_of(pair[1]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "stays"])
@pytest.mark.parametrize("policy", [MixedPrecision(), HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    "prefetch",
    [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
    ids=lambda prefetch: prefetch.name,
)
def test_frozen_as_if_left_out_of_the_optimizer(
    ranks: Any, strategy: Any, offload: bool, policy: Any, prefetch: Any
) -> None:
    options = {"strategy": strategy, "mixed_precision": policy, "backward_prefetch": prefetch}
    ranks(2).run(frozen_or_left_out, options | {"offload": CPUOffload(offload)})
