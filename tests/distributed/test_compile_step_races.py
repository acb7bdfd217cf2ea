"""fxshard.compile_step on streams: no race, no wait for nothing, and no value that the host reads.

Collectives are issued as on CUDA, on a machine of streams (`tests.happens_before`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard._torch import process_groups
from tests.distributed.test_happens_before import APART, HALF, HYBRID, LAYERS, Watched, missed
from tests.happens_before import Machine, Watch

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "half_apart": HALF | APART,
    "no_prefetch": APART | {"forward_prefetch": 0, "backward_prefetch": 0},
    "prefetch_2": HALF | APART | {"forward_prefetch": 2, "backward_prefetch": 2},
    "hybrid": HALF | APART | HYBRID,
    "kept": HALF | {"reshard_after_forward": False},
    "recomputed": HALF | {"checkpoint": "full"},
    "no_shard": {"strategy": "no_shard"},
    "activations": APART | {"offload_activations": "1GiB"},
}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


class Steps(Watched):
    """One program: what `Watched.step` does by a loop."""

    def step(self) -> None:
        """Run it."""
        self.optimizer(torch.ones(3, 8), torch.ones(3, 4))  # type: ignore[operator]


@contextmanager
def watched(options: dict[str, Any], max_norm: float | None) -> Iterator[Steps]:
    options = dict(options)
    shape = options.pop("mesh", (2,))
    names = ("replicate", "shard")[-len(shape) :]
    with process_groups.fake_process_group(0, torch.Size(shape).numel()):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        model = LAYERS.build()
        step: Any = fxshard.compile_step(
            model,
            loss_fn,
            AdamW(model.parameters()),
            max_norm=max_norm,
            mesh=mesh,
            units=LAYERS.units,
            **options,
        )
        machine = Machine()
        watch = Watch(machine)
        world = step.model._fxshard.world
        free, store = world.free, world.store

        def freed(tensors: list[Tensor]) -> None:
            watch.freed(tensors)
            free(tensors)

        def stored(tensors: list[Tensor], pair: int) -> list[Tensor]:
            with watch.pinned():
                made: list[Tensor] = store(tensors, pair)
                return made

        world.cuda, world.free, world.store = machine, freed, stored
        found = Steps(step.model, LAYERS, machine, watch, step)
        found.step()
        yield found


@pytest.mark.parametrize("max_norm", [1.0, None])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sample(6)
def test_no_race(setting: str, max_norm: float | None) -> None:
    with watched(SETTINGS[setting], max_norm) as found:
        assert found.races() == 0, found.watch.races
        assert found.watch.operators > 100
        assert len(found.machine.streams) > 1


@pytest.mark.parametrize("max_norm", [1.0, None])
@pytest.mark.parametrize("setting", ["half_apart", "activations"])
def test_every_wait_that_is_left_out_is_found(setting: str, max_norm: float | None) -> None:
    """So that none is there for nothing, that for the norm too."""
    with watched(SETTINGS[setting], max_norm) as found:
        assert missed(found) == []
        assert found.races() == 0


class NoReads(TorchDispatchMode):
    """Refuses what reads a value of a tensor for Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        assert func is not torch.ops.aten.is_nonzero.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_no_value_is_read(max_norm: float | None) -> None:
    """In the step and around it. (Adam's count of steps is on the CPU, unless it is capturable.)"""
    with process_groups.fake_process_group(0, 2):
        model = LAYERS.build()
        step = fxshard.compile_step(
            model,
            loss_fn,
            SGD(model.parameters(), lr=0.1, momentum=0.9),
            max_norm=max_norm,
            mesh=init_device_mesh("cpu", (2,)),
            units=LAYERS.units,
        )
        batch = torch.ones(3, 8), torch.ones(3, 4)
        step(*batch)
        with NoReads():
            step(*batch)
