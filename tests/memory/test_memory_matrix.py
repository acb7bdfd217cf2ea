"""Models x settings: the report says what the tracker sees, 0 bytes apart, cell by cell.

`make test-slow` takes every pair of `MATRIX` and `SETTINGS`; `make test` a diagonal of it, in which
each model and each setting comes up.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision

import fxshard
from fxshard.memory.category import State
from tests.eager import assert_trains_like_eager
from tests.zoo import Case
from tests.zoo.more import MATRIX, checkpointed

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")

# Batch norms stay in fp32 by default: on CPU they take bf16 inputs, but no bf16 parameters.
BF16 = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
)


def plain(case: Case) -> nn.Module:
    return case.build()


@dataclass(frozen=True)
class Setting:
    """How a step is run: the options of `fxshard.validate`, and how the model is made."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    world_size: int | tuple[int, int] = 8
    build: Callable[[Case], nn.Module] = plain
    trains: bool = True


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("fp32"),
        Setting("bf16, fp32 reduce", {"mixed_precision": BF16}),
        Setting("checkpoint, full", build=checkpointed),
        Setting("checkpoint, selective", build=partial(checkpointed, selective=True)),
        Setting("shard_grad_op", {"strategy": "shard_grad_op"}),
        Setting("hybrid", {"strategy": "hybrid_shard"}, world_size=(2, 4)),
        Setting("uneven world", world_size=7),
        Setting("accumulation", {"micro_batches": 2}),
        Setting("no_sync", {"micro_batches": 2, "no_sync": True}),
        Setting("no_grad", trains=False),
        Setting("offload", {"offload": CPUOffloadPolicy()}),
    )
}
CUT = [(model, list(SETTINGS)[i % len(SETTINGS)]) for i, model in enumerate(MATRIX)]
# Where the report was once wrong or the program refused.
CUT += [("gpt2", "checkpoint, full"), ("convnet", "bf16, fp32 reduce")]
STATES = {state.value for state in State}
AGAIN = {State.PRE_FORWARD_AC.value, State.POST_FORWARD_AC.value}  # only where a checkpoint is
FORWARD = {name for name in STATES - AGAIN if "Forward" in name}


def assert_exact(name: str, setting: Setting) -> None:
    case = MATRIX[name]
    torch.manual_seed(0)
    model = setting.build(case)
    args, kwargs = case.batch(0, 0)
    options = dict(setting.options)
    if setting.trains:
        options["optimizer"] = partial(torch.optim.AdamW, lr=1e-3)
    with contextlib.nullcontext() if setting.trains else torch.no_grad():
        result = fxshard.validate(
            model, args, kwargs, world_size=setting.world_size, units=case.units, **options
        )
    assert result.max_abs_difference == 0, result.table(only_different=True)
    again = setting.build is not plain  # which counts its calls outside
    states = STATES if again else STATES - AGAIN
    assert {cell.step for cell in result.cells} == {1, 2}
    assert {cell.state for cell in result.cells} >= (states if setting.trains else FORWARD)
    assert result.static_peak_bytes == result.measured_peak_bytes > 0


@pytest.mark.parametrize(("model", "setting"), CUT)
@pytest.mark.sample(3)
def test_static_equals_measured(model: str, setting: str) -> None:
    assert_exact(model, SETTINGS[setting])


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model", MATRIX)
def test_static_equals_measured_on_the_whole_matrix(model: str, setting: str) -> None:
    assert_exact(model, SETTINGS[setting])


def test_views_of_what_is_recomputed_train_like_eager() -> None:
    """Backward reads transposed hidden states that a checkpoint recomputes."""
    case = MATRIX["moe"]
    args, kwargs = case.batch(0, 0)
    assert_trains_like_eager(lambda: checkpointed(case), *args, loss=case.loss, **kwargs)


def test_the_cut_has_every_model_and_every_setting() -> None:
    assert {model for model, _ in CUT} == set(MATRIX)
    assert {setting for _, setting in CUT} == set(SETTINGS)
