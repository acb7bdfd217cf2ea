"""torch's test_fsdp_checkpoint.py: torch's activation checkpoints around and inside of units."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import CPUOffload
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.peers.fsdp1.shared import NO_SHARD, compiled, ddp, grads_of

UNITS = ["0", "1", "2"]
WRAPPERS: dict[str, Callable[..., Any]] = {
    "recomputed": checkpoint_wrapper,
    "offloaded": offload_wrapper,
}
OFFLOADED = pytest.mark.parametrize("offload", [True, False], ids=["offload", "stays"])
WRAPPED = pytest.mark.parametrize("wrapper", WRAPPERS)


def layers(wrap: Callable[[nn.Module], Any] = lambda layer: layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(wrap(nn.Linear(3, 3)) for _ in range(3)))


def batch(rank: int, width: int = 3) -> Tensor:
    """Reentrant checkpoints need an input that asks for a gradient."""
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(10, width, generator=generator).requires_grad_()


def all_alike(calls: Sequence[Any], models: Sequence[nn.Module], rank: int, steps: int) -> None:
    """Losses, outputs and gradients, which add up, are those of the first."""
    x = batch(rank)
    for _ in range(steps):
        outputs = [call(x) for call in calls]
        for output in outputs:
            output.sum().backward()
            assert_close(output, outputs[0])
        grads = [list(grads_of(model).values()) for model in models]
        for found in grads[1:]:
            assert_close(found, grads[0])


def around_and_inside(rank: int, world_size: int, wrapper: str, offload: bool) -> None:
    wrap, options = WRAPPERS[wrapper], {"units": UNITS, "offload": CPUOffload(offload)}
    models = [
        ddp(layers()),
        compiled(layers(), **options),
        wrap(compiled(layers(), **options)),
        compiled(layers(wrap), **options),
    ]
    all_alike(models, models, rank, 2)


@pytest.mark.sample(2)
@WRAPPED
@OFFLOADED
def test_around_a_model_and_inside_of_its_units(ranks: Any, offload: bool, wrapper: str) -> None:
    ranks(2).run(around_and_inside, wrapper, offload)


def each_by_itself(rank: int, world_size: int, wrapper: str, offload: bool) -> None:
    """Every layer is compiled alone, in a plain model: around all of them, and around each."""
    wrap, options = WRAPPERS[wrapper], {"units": [], "offload": CPUOffload(offload)}
    models = [
        ddp(layers()),
        layers(lambda layer: compiled(layer, **options)),
        wrap(layers(lambda layer: compiled(layer, **options))),
        layers(lambda layer: wrap(compiled(layer, **options))),
        layers(lambda layer: compiled(wrap(layer), **options)),
    ]
    all_alike(models, models, rank, 2)


@pytest.mark.sample(2)
@WRAPPED
@OFFLOADED
def test_layers_that_are_compiled_alone(ranks: Any, offload: bool, wrapper: str) -> None:
    ranks(2).run(each_by_itself, wrapper, offload)


def end_to_end(rank: int, world_size: int, wrapper: str, offload: bool) -> None:
    """Of the whole model: as a wrapper around what is compiled, as what is compiled, by hand."""
    wrap, options = WRAPPERS[wrapper], {"units": [], "offload": CPUOffload(offload)}
    by_hand = compiled(layers(), **options)

    def call(x: Tensor) -> Tensor:
        away = save_on_cpu() if wrap is offload_wrapper else contextlib.nullcontext()
        with away:
            return checkpoint(by_hand, x, use_reentrant=True)

    models = [
        ddp(layers()),
        compiled(layers(), **options),
        wrap(compiled(layers(), **options)),
        compiled(wrap(layers()), **options),
    ]
    all_alike([*models, call], [*models, by_hand], rank, 6)


@pytest.mark.sample(2)
@WRAPPED
@OFFLOADED
def test_of_the_whole_model(ranks: Any, offload: bool, wrapper: str) -> None:
    ranks(2).run(end_to_end, wrapper, offload)


def units_of_a_wrapped_model(rank: int, world_size: int) -> list[list[str]]:
    """The wrapper leaves its name out of those of parameters, not of those of modules."""
    model = compiled(checkpoint_wrapper(layers()), units=[nn.Linear])
    want = ddp(layers())
    for each in (model, want):
        each(batch(rank)).sum().backward()
    assert_close(grads_of(model), grads_of(want))
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    return [[param.fqn for param in unit.params] for unit in model.plan.units]


def test_units_of_a_wrapped_model(ranks: Any) -> None:
    layer = [[f"{i}.weight", f"{i}.bias"] for i in range(3)]
    assert ranks(2).run(units_of_a_wrapped_model) == [[[], *layer]] * 2


class Layers(nn.Module):
    """Four layers, which may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.seq, x, use_reentrant=False) if self.recomputes else self.seq(x)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.s1, self.s2 = nn.Linear(100, 100), Layers(), Layers()
        self.l2 = nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.relu(self.s2(self.s1(self.l1(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l1, self.part1, self.part2 = nn.Linear(100, 100), Part(), Part()
        self.l2 = nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(torch.relu(self.part2(self.part1(self.l1(x)))))


def parts(rank: int, world_size: int) -> None:
    """Two parts of a plain model are compiled, each with checkpoints inside."""
    kept = Model()
    recomputed = copy.deepcopy(kept)
    for module in recomputed.modules():
        if isinstance(module, Layers):
            module.recomputes = True
    for model in (kept, recomputed):
        model.part1 = compiled(model.part1, units=[], strategy=NO_SHARD)
        model.part2 = compiled(model.part2, units=[], strategy=NO_SHARD)
        model(batch(rank, 100)).sum().backward()
    assert_close(grads_of(recomputed), grads_of(kept), rtol=1e-5, atol=1e-8)


def test_parts_of_a_model_with_checkpoints_inside(ranks: Any) -> None:
    ranks(2).run(parts)
