"""fxshard.tune over shapes of the mesh: the best of all, and every shape's plan as it is alone."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
from fxshard.errors import ConfigError, DoesNotFitError
from fxshard.hardware import PRESETS
from fxshard.planner.result import Tuning

NODE = dataclasses.replace(PRESETS["h100"], name="node of 2", ranks_per_node=2)
SPACE: dict[str, list[Any]] = {
    "strategy": ["full_shard"],
    "checkpoint": [None, "full"],
    "forward_prefetch": [1],
    "mixed_precision": [None],
    "offload": [None],
    "offload_activations": [None],
}


class Layers(nn.Module):
    """f32 (batch, 8) -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(2))
        self.layers = nn.ModuleList(pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum()


def of_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    of_layers(model, mesh["tp"])


def tuned(**options: Any) -> Tuning:
    given = {
        "mesh": "auto",
        "world_size": 4,
        "parallelize": parallelize,
        "hardware": NODE,
        "batches": [2],
        "space": SPACE,
        "plans": None,
        "optimizer": torch.optim.SGD,
    }
    with torch.device("meta"):
        return fxshard.tune(Layers(), (torch.zeros(2, 8),), **given | options)


def test_every_shape_is_as_it_is_alone() -> None:
    found = tuned()
    assert not dist.is_initialized()
    assert {trial.together for trial in found.trials} == {1, 2}  # tp within a node
    assert all(trial.why for trial in found.trials)
    with torch.device("meta"):
        model, x = Layers(), torch.zeros(2, 8)
    times = {}
    for trial in (trial for trial in found.trials if trial.fits):
        more: dict[str, Any] = {"parallelize": parallelize}
        if "tp" not in trial.mesh:
            more = {"dynamic": {"batch": [("x", 0)]}}  # as tune traces it
        plan = fxshard.plan(model, (x,), mesh=trial.mesh, **more, **trial.options)
        peak = max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes)
        assert peak == trial.peak_bytes
        assert plan.estimate(NODE).step_seconds == trial.step_time
        times[trial.number] = trial.step_time * trial.mesh.get("tp", 1)
    assert found.best.number == 1 and min(times, key=times.__getitem__) == 1
    assert found.best.plan is not None
    table = str(found)
    assert "GPU ms / sample" in table and "tp=2, full_shard" in table


def test_what_one_gpu_cannot_hold_is_split() -> None:
    """A model of 1 rank of data parallelism fits only where tensor parallelism cuts it."""
    options = {"world_size": 2, "space": {**SPACE, "strategy": ["no_shard"], "checkpoint": [None]}}
    alone = tuned(**options, budget="1GiB")
    peaks = {trial.together: trial.peak_bytes for trial in alone.trials}
    budget = (peaks[1] + peaks[2]) // 2
    found = tuned(**options, budget=budget)
    assert found.best.mesh == {"dp_shard": 1, "tp": 2}
    (other,) = (trial for trial in found.trials if trial.together == 1)
    assert other.why.startswith("does not fit")
    with pytest.raises(DoesNotFitError, match="tp=2"):
        tuned(**options, budget=peaks[2] - 1)


def test_a_shape_that_the_model_refuses_is_a_row() -> None:
    def refusing(model: nn.Module, mesh: DeviceMesh) -> None:
        raise ValueError("7 heads")

    found = tuned(parallelize=refusing)
    (row,) = (trial for trial in found.trials if trial.together == 2)
    assert row.why.startswith("refused: parallelize(model, mesh) raised ValueError: 7 heads")
    assert found.best.mesh == {"dp_shard": 4}


def test_a_mesh_that_is_given() -> None:
    depth = 0

    @contextlib.contextmanager
    def context(model: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        nonlocal depth
        depth += 1
        assert depth == 1  # `loss_parallel` cannot be in itself
        yield
        depth -= 1

    found = tuned(mesh={"dp": 2, "tp": 2}, world_size=None, context=context)
    assert {trial.together for trial in found.trials} == {2}
    assert found.best.mesh == {"dp_shard": 2, "tp": 2}


def test_sizes_that_are_asked_for() -> None:
    found = tuned(space={**SPACE, "tp": [4]})
    assert {trial.together for trial in found.trials} == {4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallelize": None}, "needs parallelize"),
        ({"world_size": None}, "give the number of GPUs"),
        ({"world_size": (2, 2)}, "give the number of GPUs"),
        ({"space": {"tp": [3]}}, "that divide world_size=4"),
        (
            {
                "mesh": {"dp": 2, "model": 2},
                "world_size": None,
                "parallelize": lambda model, mesh: of_layers(model, mesh["model"]),
            },
            "Call the dimension",
        ),
        ({"strategy": "hybrid_shard", "space": {"checkpoint": [None]}}, "is searched"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned(**options)
