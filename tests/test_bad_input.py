"""Bad input: the error says what, where and what to do, and the model stays as it was."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxshard
from fxshard import compat
from fxshard.errors import ConfigError, FxshardError, UnitError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


X = torch.ones(2, 4)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.fixture
def fake_group() -> Iterator[None]:
    with compat.fake_process_group(0, 4):
        yield


def refused(
    call: Callable[[nn.Module], Any], module: nn.Module, error: type[Exception], *words: str
) -> None:
    """`call` raises `error` with all `words` in its text, and `module` is what it was."""
    params = {name: id(p) for name, p in module.named_parameters()}
    values = [p.detach().clone() for p in module.parameters()]
    keys = [set(m.__dict__) for m in module.modules()]
    with pytest.raises(error) as caught:
        call(module)
    assert isinstance(caught.value, FxshardError)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert {name: id(p) for name, p in module.named_parameters()} == params
    assert keys == [set(m.__dict__) for m in module.modules()]
    for before, param in zip(values, module.parameters(), strict=True):
        assert before.is_meta or torch.equal(before, param)


@pytest.mark.parametrize("verb", ["plan", "compile", "validate"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stratgy": "full_shard"}, ["stratgy", "Did you mean 'strategy'", "backend"]),
        ({"strategy": "zero9"}, ["strategy='zero9'", "full_shard"]),
        ({"backend": "inductr"}, ["backend='inductr'", "eager"]),
        ({"forward_prefetch": -1}, ["forward_prefetch=-1", ">= 0"]),
        ({"backward_prefetch": True}, ["backward_prefetch=True", ">= 0"]),
        ({"units": "layers.*"}, ["units=['layers.*']"]),
    ],
)
def test_options(verb: str, options: dict[str, Any], words: list[str]) -> None:
    def call(module: nn.Module) -> Any:
        if verb == "compile":
            return fxshard.compile(module, world_size=2, **options)
        return getattr(fxshard, verb)(module, (X,), world_size=2, **options)

    refused(call, model(), ConfigError, *words)


@pytest.mark.parametrize("units", [["blocks.*"], [nn.Conv2d], ["0", "9"]])
def test_units_that_match_nothing(units: list[Any]) -> None:
    refused(
        lambda m: fxshard.compile(m, world_size=2, units=units),
        model(),
        UnitError,
        "matches no module of Sequential",
        "0, 1, 2",
    )


def test_units_of_no_known_kind() -> None:
    refused(lambda m: fxshard.plan(m, (X,), world_size=2, units=3), model(), UnitError, "units=3")
    refused(lambda m: fxshard.plan(m, (X,), world_size=2, units=[3]), model(), UnitError, "3")


def test_parameters_that_have_no_rows() -> None:
    refused(lambda m: fxshard.compile(m, world_size=2), Scalar(), UnitError, "'gain'", "reshape(1)")
    refused(
        lambda m: fxshard.compile(m, world_size=2),
        Transposed(),
        UnitError,
        "'weight'",
        "contiguous()",
    )


def test_meta_parameters_can_be_planned_but_not_run() -> None:
    with torch.device("meta"):
        module = model()
    assert fxshard.plan(module, (X,), world_size=2).memory.peak_bytes > 0
    refused(
        lambda m: fxshard.compile(m, world_size=2), module, UnitError, "'0.weight'", "real device"
    )
    refused(
        lambda m: fxshard.validate(m, (X,), world_size=2), module, ConfigError, "0.weight", "meta"
    )


def test_a_model_that_is_sharded_already(fake_group: None) -> None:
    module = model()
    fully_shard(module)
    with pytest.raises(UnitError, match=r"DTensor already.*plain model"):
        fxshard.compile(module)
    again = fxshard.compile(model())
    with pytest.raises(UnitError, match="DTensor already"):
        fxshard.compile(again)


@pytest.mark.parametrize("world_size", [0, -2, "2", 2.0, True])
def test_world_sizes_that_are_none(world_size: Any) -> None:
    for call in (
        lambda m: fxshard.compile(m, world_size=world_size),
        lambda m: fxshard.plan(m, (X,), world_size=world_size),
        lambda m: fxshard.validate(m, (X,), world_size=world_size),
    ):
        refused(call, model(), ConfigError, f"world_size={world_size!r}", ">= 1")


def test_no_world_is_known() -> None:
    assert not dist.is_initialized()
    refused(fxshard.compile, model(), ConfigError, "torchrun", "world_size=N")


def test_groups_that_are_not_there_or_too_many(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    group = dist.group.WORLD
    refused(
        lambda m: fxshard.compile(m, mesh=mesh, process_group=group),
        model(),
        ConfigError,
        "give one",
    )
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    refused(lambda m: fxshard.compile(m, mesh=flat), model(), ConfigError, "2 dimensions", "shard")
    refused(lambda m: fxshard.compile(m, world_size=3), model(), ConfigError, "3", "4 ranks")
    with pytest.raises(ValueError, match="world_size=3"):
        fxshard.compile(model(), world_size=3)


def test_a_mesh_without_its_process_group() -> None:
    with compat.fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (4,))
    refused(lambda m: fxshard.compile(m, mesh=mesh), model(), ConfigError, "init_process_group")


def test_validate_inside_a_process_group(fake_group: None) -> None:
    refused(
        lambda m: fxshard.validate(m, (X,), world_size=4),
        model(),
        ConfigError,
        "before init_process_group",
    )


@pytest.mark.parametrize("thing", [None, 3, torch.ones(2), nn.Linear])
def test_what_is_no_model(thing: Any) -> None:
    for call in (
        lambda: fxshard.plan(thing, (X,), world_size=2),
        lambda: fxshard.compile(thing, world_size=2),
    ):
        with pytest.raises(FxshardError, match=r"expected an nn\.Module"):
            call()


def test_optimizers_that_are_none() -> None:
    for optimizer in ("adamw", lambda params: None, 3):
        plan = fxshard.plan(model(), (X,), world_size=2, optimizer=optimizer)
        with pytest.raises(ConfigError, match=r"optimizer=.*torch\.optim\.Optimizer"):
            plan.memory  # noqa: B018 - computed on demand
