"""fxshard.tune over ranks that have parts of one sequence, alone and beside tensor parallelism."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

import fxshard
from fxshard.errors import ConfigError
from fxshard.hardware import PRESETS
from fxshard.planner.result import Tuning
from tests.distributed.tensor_parallel_cases import Llama, of_tensors

NODE = dataclasses.replace(PRESETS["h100"], name="node of 2", ranks_per_node=2)
SPACE: dict[str, list[Any]] = {
    "strategy": ["full_shard"],
    "checkpoint": [None],
    "forward_prefetch": [1],
    "mixed_precision": [None],
    "offload": [None],
    "offload_activations": [None],
}
BOTH = {**SPACE, "tp": [1, 2], "cp": [1, 2]}


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    of_tensors(model, mesh["tp"])


def loss(logits: Tensor) -> Tensor:
    return logits.square().mean()


class Case:
    """A model, its tokens, and the context that cuts them."""

    def __init__(self, length: int = 16, batch: int = 2) -> None:
        self.tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
        with torch.device("meta"):
            self.model = Llama()

    def context(self, model: nn.Module, mesh: DeviceMesh) -> AbstractContextManager[None]:
        return context_parallel(mesh["cp"], buffers=[self.tokens], buffer_seq_dims=[1])

    def tuned(self, **options: Any) -> Tuning:
        given = {
            "mesh": "auto",
            "world_size": 4,
            "context": self.context,
            "hardware": NODE,
            "batches": [self.tokens.shape[0]],
            "space": SPACE,
            "plans": None,
            "optimizer": torch.optim.SGD,
            "loss": loss,
        }
        found = fxshard.tune(self.model, (self.tokens,), **given | options)
        assert not dist.is_initialized()
        return found

    def planned(self, mesh: dict[str, int], **options: Any) -> fxshard.Plan:
        if "tp" in mesh:
            options["parallelize"] = parallelize
        if "cp" in mesh:
            options["context"] = self.context
        return fxshard.plan(self.model, (self.tokens,), mesh=mesh, loss=loss, **options)


def test_every_shape_is_as_it_is_alone() -> None:
    case, strategies = Case(), {"strategy": ["full_shard", "no_shard"]}
    found = case.tuned(parallelize=parallelize, space={**BOTH, **strategies})
    shapes = [(trial.mesh.get("tp", 1), trial.mesh.get("cp", 1)) for trial in found.trials]
    assert {*shapes} == {(1, 1), (2, 1), (1, 2), (2, 2)} and len(shapes) == 8
    times = {}
    for trial in found.trials:
        assert trial.fits, trial.why
        more = {} if len(trial.mesh) > 1 else {"dynamic": {"batch": [("tokens", 0)]}}
        plan = case.planned(trial.mesh, **more, **trial.options)
        peak = max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes)
        assert peak == trial.peak_bytes
        assert plan.estimate(NODE).step_seconds == trial.step_time
        assert trial.together == trial.shape.tp * trial.shape.cp
        times[trial.number] = plan.estimate(NODE).step_seconds * trial.together
    assert min(times, key=times.__getitem__) == 1 == found.best.number
    assert found.best.plan is not None and case.tokens.shape == (2, 16)
    assert "tp=2, cp=2, full_shard" in str(found)


def test_a_long_sequence_that_one_rank_cannot_hold_is_cut() -> None:
    case = Case(length=512, batch=1)
    roomy = case.tuned(budget="1GiB")
    peaks = {trial.together: trial.peak_bytes for trial in roomy.trials}
    assert peaks.keys() == {1, 2}  # within a node
    assert roomy.best.mesh == {"dp_shard": 4}  # nothing goes round
    tight = case.tuned(budget=(peaks[1] + peaks[2]) // 2)
    assert tight.best.mesh == {"dp_shard": 2, "cp": 2}
    (other,) = (trial for trial in tight.trials if trial.together == 1)
    assert other.why.startswith("does not fit")


def test_other_batches_are_cut_too() -> None:
    case, larger = Case(), Case(batch=4)
    found = case.tuned(batches=[2, 4], space={**SPACE, "cp": [2]})
    peaks = {trial.batch: trial.peak_bytes for trial in found.trials}
    for each in (case, larger):
        memory = each.planned({"dp_shard": 2, "cp": 2}, **found.best.options).memory
        assert peaks[each.tokens.shape[0]] == max(memory.peak_bytes, memory.first_step_peak_bytes)


def test_a_sequence_that_does_not_divide_is_a_row() -> None:
    found = Case().tuned(world_size=6, space={**SPACE, "cp": [1, 3]})
    (row,) = (trial for trial in found.trials if trial.together == 3)
    assert row.why.startswith("refused: ") and "16" in row.why and "cp=3" in row.why
    assert row.mesh == {"dp_shard": 2, "cp": 3}
    assert found.best.mesh == {"dp_shard": 6}


def test_shapes_that_do_not_divide_the_ranks_are_rows_where_they_are_asked_for() -> None:
    space = {**SPACE, "tp": [1, 2], "cp": [1, 4]}
    found = Case().tuned(parallelize=parallelize, space=space)
    (row,) = (trial for trial in found.trials if trial.together == 8)
    assert row.why == "refused: tp=2 x cp=4 ranks do not divide world_size=4"
    pairs = {
        trial.shape.ranks for trial in Case().tuned(world_size=2, parallelize=parallelize).trials
    }
    assert pairs == {1, 2}


def test_a_context_of_other_things_is_around_every_shape() -> None:
    """It cuts nothing, so that ranks of "cp" would compute the same."""
    names = []

    @contextlib.contextmanager
    def context(model: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        names.append(mesh.mesh_dim_names)
        yield

    found = Case().tuned(parallelize=parallelize, context=context)
    whys = {tuple(trial.mesh): trial.why for trial in found.trials}
    assert all("cuts no tensor" in why for dims, why in whys.items() if "cp" in dims)
    assert whys.keys() > {("dp_shard",), ("dp_shard", "tp")}
    assert ("dp_shard", "tp") in names and ("dp_shard",) not in names


def test_a_context_that_fails_is_a_row_of_its_shape() -> None:
    def context(model: nn.Module, mesh: DeviceMesh) -> AbstractContextManager[None]:
        raise KeyError("another")

    found = Case().tuned(context=context)
    (row,) = (trial for trial in found.trials if trial.together == 2)
    assert row.why.startswith("refused: context(model, mesh) raised KeyError: 'another'")
    assert found.best.mesh == {"dp_shard": 4}


@pytest.mark.parametrize(
    ("dims", "strategy", "mesh"),
    [
        ({"dp": 2, "cp": 2}, "full_shard", {"dp_shard": 2, "cp": 2}),
        ({"dp": 1, "cp": 2, "tp": 2}, "full_shard", {"dp_shard": 1, "cp": 2, "tp": 2}),
        (
            {"copies": 2, "dp": 1, "cp": 2},
            "hybrid_shard",
            {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
        ),
    ],
)
def test_a_mesh_that_is_given(dims: dict[str, int], strategy: str, mesh: dict[str, int]) -> None:
    case, more = Case(), {"parallelize": parallelize} if "tp" in dims else {}
    options = {"space": SPACE | {"strategy": [strategy]}, "strategy": strategy, **more}
    found = case.tuned(mesh=dims, world_size=None, **options)
    assert found.best.mesh == mesh
    memory = case.planned(mesh, **found.best.options).memory
    assert found.best.peak_bytes == max(memory.peak_bytes, memory.first_step_peak_bytes)


def test_replicas_are_of_whole_sequences() -> None:
    """Ranks that have parts of one sequence share parameters."""
    space = {**SPACE, "strategy": ["hybrid_shard"], "world_size": [(4, 1), (2, 2)], "cp": [2]}
    found = Case().tuned(space=space)
    assert found.best.mesh == {"dp_replicate": 2, "dp_shard": 1, "cp": 2}
    (other,) = (trial for trial in found.trials if not trial.fits)
    assert other.why == "refused: 1 ranks that share parameters are no multiple of cp=2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": None}, "needs parallelize=.*or context="),
        ({"space": {**SPACE, "tp": [2]}}, r"space\['tp'\]=\[2\] needs parallelize="),
        (
            {"context": None, "parallelize": parallelize, "space": {**SPACE, "cp": [1, 2]}},
            r"space\['cp'\]=\[1, 2\] needs context=",
        ),
        ({"space": {**SPACE, "cp": [3]}}, "that divide world_size=4"),
        ({"space": {**SPACE, "ep": [2]}}, r"space\['ep'\]"),
        ({"world_size": 3, "space": {**SPACE, "cp": [3]}}, "sequence of 16 is not cut"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Case().tuned(**options)
