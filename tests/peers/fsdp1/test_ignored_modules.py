"""torch's test_fsdp_ignored_modules.py: what is never sharded, and is reduced by nobody."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from tests.peers.fsdp1.models import Transformer
from tests.peers.fsdp1.shared import compiled, loss_of
from tests.ranks import told

BY = pytest.mark.parametrize("by", ["modules", "parameters"])


class Model(nn.Module):
    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer0 = nn.Linear(3, 5)
        more = [nn.Linear(4, 4, bias=False) for _ in range(extra)]
        self.layer1 = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), *more, nn.Linear(4, 4))
        self.layer2, self.layer3 = nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layer0, self.layer1, self.layer2, self.layer3):
            x = torch.relu(layer(x))
        return x

    def get_input(self) -> tuple[Tensor, ...]:
        return (torch.randn(8, 3),)

    def get_loss(self, inputs: Any, output: Tensor) -> Tensor:
        return output.sum()


def given(by: str, *modules: nn.Module) -> list[Any]:
    return [*modules] if by == "modules" else [p for m in modules for p in m.parameters()]


def train(model: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()


def sharded(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if isinstance(param, DTensor)}


def of_a_transformer(rank: int, world_size: int, by: str, wraps: bool) -> None:
    module = Transformer()
    if wraps:
        module.output_proj.weight = nn.Parameter(module.output_proj.weight.detach().clone())
    units: Any = ModuleWrapPolicy({nn.Linear}) if wraps else []
    want = {n for n, _ in module.named_parameters() if not n.startswith("transformer.")}
    model = compiled(module, units=units, ignored=given(by, module.transformer))
    assert sharded(model) == want
    train(model)


@BY
@pytest.mark.parametrize("wraps", [False, True], ids=["root_alone", "linear"])
def test_transformer(ranks: Any, by: str, wraps: bool) -> None:
    ranks(2).run(of_a_transformer, by, wraps)


def nested(rank: int, world_size: int, by: str) -> None:
    """A unit inside of what is ignored is ignored as well."""
    module = Model()
    model = compiled(module, units=["layer1.1"], ignored=given(by, module.layer1))
    assert sharded(model) == {n for n, _ in Model().named_parameters() if "layer1" not in n}
    train(model)


@BY
def test_unit_inside_of_an_ignored_module(ranks: Any, by: str) -> None:
    ranks(2).run(nested, by)


def by_policy(rank: int, world_size: int, function: bool, bias: bool) -> None:
    policy: Any = ModuleWrapPolicy((nn.Sequential,))
    if function:
        policy = functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}
        )
    module = Model()
    out = ["weight", "bias"] if bias else ["weight"]
    ignored = [getattr(module.layer1[1], name) for name in out]
    model = compiled(module, units=policy, ignored=ignored)
    model(*model.get_input())
    root, unit = model.plan.units
    names = {f"layer1.{i}.{what}" for i in range(3) for what in ("weight", "bias")}
    assert {p.fqn for p in unit.params} == names - {f"layer1.1.{name}" for name in out}
    assert {p.fqn for p in root.params} == {
        f"layer{i}.{what}" for i in (0, 2, 3) for what in ("weight", "bias")
    }


@pytest.mark.parametrize("bias", [True, False], ids=["both", "weight"])
@pytest.mark.parametrize("function", [True, False], ids=["function", "policy"])
def test_ignored_parameters_of_a_unit(ranks: Any, function: bool, bias: bool) -> None:
    ranks(2).run(by_policy, function, bias)


def everything(rank: int, world_size: int) -> None:
    """FSDP1 warns when the model itself is ignored; then nothing is sharded."""
    module = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = compiled(module, units=[], ignored=[module])
    assert sharded(model) == set()
    train(model)


def test_all_is_ignored(ranks: Any) -> None:
    ranks(2).run(everything)


def compiled_part(rank: int, world_size: int) -> str:
    module = Model()
    module.layer1 = compiled(module.layer1, units=[])
    return told(lambda: compiled(module, units=[], ignored=[module.layer1]))


def test_compiled_part_is_ignored(ranks: Any) -> None:
    for said in ranks(2).run(compiled_part):
        assert "sharded already: its submodule 'layer1' was given to fxshard.compile" in said


def other_on_each_rank(rank: int, world_size: int, by: str) -> str:
    """One more ignored layer on rank 1: other programs, so other collectives may not match."""
    module = Model(extra=rank + 1)
    options = {"units": ["layer1", "layer3"], "ignored": given(by, *module.layer1[2:-1])}
    return told(lambda: train(compiled(module, **options)))


@BY
def test_ranks_that_ignore_other_modules(hasty: Any, by: str) -> None:
    for said in hasty(2).run_expecting_errors(other_on_each_rank, by):
        assert said.startswith("RankMismatchError: ranks differ in ")


def under_the_root(rank: int, world_size: int, by: str) -> None:
    module = Model()
    ignored = given(by, *module.layer1[1:])
    model = compiled(module, units=["layer1", "layer3"], ignored=ignored)
    assert not isinstance(model.layer1[1].weight, DTensor)
    assert isinstance(model.layer1[0].weight, DTensor)
    train(model)


def outside_of_the_model(rank: int, world_size: int) -> None:
    """One list for parts of a model, each compiled by itself: it says nothing of the others."""
    module = Model()
    ignored = [module.layer1[1], module.layer1[0].weight]
    for part, held in ((module.layer3, set()), (module.layer1, {"0.weight", "1.weight", "1.bias"})):
        every = {name for name, _ in part.named_parameters()}
        model = compiled(part, units=[], ignored=ignored)
        assert sharded(model) == every - held
        model(torch.randn(2, next(part.parameters()).shape[1])).sum().backward()
        assert all(param.grad is not None for param in model.parameters())


def test_ignored_outside_of_the_model(ranks: Any) -> None:
    ranks(2).run(outside_of_the_model)


@BY
def test_ignored_under_a_unit(ranks: Any, by: str) -> None:
    ranks(2).run(under_the_root, by)


def mixed(rank: int, world_size: int) -> set[str]:
    """Modules, parameters and names in one list, which FSDP1 refuses."""
    module = Model()
    ignored = [module.layer1[1], module.layer1[2].weight, "layer0"]
    return sharded(compiled(module, units=[], ignored=ignored))


def test_modules_and_parameters_in_one_list(ranks: Any) -> None:
    want = {f"layer{i}.{what}" for i in ("1.0", "2", "3") for what in ("weight", "bias")}
    assert ranks(1).run(mixed) == [want | {"layer1.2.bias"}]
