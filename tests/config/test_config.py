"""What the user has given and what not, however one Config is made of another."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.config.checked import Config
from fxshard.errors import ConfigError
from fxshard.ir.unit_options import checkpointed_modules
from fxshard.pipeline import default_passes


def fill(module: nn.Module) -> None:
    """An option of that name takes it."""


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


# Every option with another value than its default.
OTHER: dict[str, Any] = {
    "strategy": "shard_grad_op",
    "shard_placement_fn": lambda param: None,
    "units": ["*"],
    "ignored": ["0"],
    "reshard_after_forward": False,
    "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "full_precision_in_eval": True,
    "forward_prefetch": 2,
    "backward_prefetch": "post",
    "max_inflight": 3,
    "max_bucket_bytes": "1MiB",
    "min_bucket_bytes": 100,
    "pack_bytes": 0,
    "checkpoint": "full",
    "offload": CPUOffloadPolicy(),
    "offload_activations": "8GiB",
    "reduce_op": "sum",
    "gradient_divide_factor": 3.0,
    "gradient_predivide_factor": 2.0,
    "param_init_fn": fill,
    "sync_module_states": True,
    "backend": "eager",
    "optimizer": sgd,
    "optimizer_in_backward": True,
    "ranks_may_differ": True,
    "pipeline_stage": True,
    "max_variants": 3,
    "dynamic": False,
    "data_sizes": {"layers.*": 4},
    "chunk_loss": 64,
    "async_tensor_parallel": True,
    "device": "cuda",
    "memory_budget": "80GiB",
    "hardware": "a100",
    "passes": default_passes(Config())[:3],
}
# What an option cannot be without.
WITH: dict[str, dict[str, Any]] = {
    "dynamic": {"backend": "eager"},
    "optimizer_in_backward": {"optimizer": sgd},
}
WAYS: dict[str, Callable[[Config, dict[str, Any]], Config]] = {
    "replace": lambda config, changes: dataclasses.replace(config, **changes),
    "changed": lambda config, changes: config.changed(changes),
    "replaced twice": lambda c, changes: dataclasses.replace(dataclasses.replace(c), **changes),
    "copied": lambda c, changes: dataclasses.replace(copy.deepcopy(c), **changes),
    "pickled": lambda c, changes: dataclasses.replace(pickle.loads(pickle.dumps(c)), **changes),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", [{}, {"checkpoint": None}, {"pack_bytes": "1MiB", "ignored": ()}])
def test_changing_an_option_changes_nothing_that_was_not_given(
    way: str, given: dict[str, Any]
) -> None:
    config = Config.from_options({"backend": "inductor", **given})
    assert config.given == {"backend", *given}
    for name, value in OTHER.items():
        changes = {name: value, **WITH.get(name, {})}
        made = WAYS[way](config, changes)
        assert made.given == {"backend", *given, *changes}
        for other in set(config.names()) - changes.keys():
            assert getattr(made, other) == getattr(config, other)


def test_every_option_is_tried() -> None:
    assert set(OTHER) == set(Config.names())


@pytest.mark.parametrize("name", OTHER)
def test_saying_a_default_is_saying_it(name: str) -> None:
    """`changed` tells what was not given from what was given as it is."""
    for given in ({}, {"backend": "inductor"}):
        config = Config.from_options(given)
        told = config.changed({name: getattr(config, name)})
        assert told.given == {*given, name}
        assert told.changed({}).given == told.given == dataclasses.replace(told).given


def test_what_is_given_is_no_option() -> None:
    assert "given" not in Config.names()
    with pytest.raises(ConfigError, match="unknown option 'given'"):
        Config.from_options({"given": frozenset()})


SETTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: None,
    "set_gradient_divide_factor": lambda model: model.set_gradient_divide_factor(3.0),
    "set_reshard_after_forward": lambda model: model.set_reshard_after_forward(False),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize(("given", "policy"), [({}, "selective"), ({"checkpoint": None}, None)])
def test_setters_leave_checkpoints_as_they_are(
    setter: str, given: dict[str, Any], policy: str | None
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = fxshard.compile(model, world_size=2, units=["0", "1"], backend="inductor", **given)
    model = SETTERS[setter](model) or model
    runtime = model._fxshard
    found = checkpointed_modules(nn.Sequential(*model), runtime.config, runtime.units)
    assert found == ({} if policy is None else dict.fromkeys(["0", "1"], policy))
