"""No race in what runs, with any option and after any exception; waits left out are all found."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)

import fxshard
from fxshard._torch import process_groups
from tests.distributed.tensor_parallel_cases import VOCABULARY, Llama, of_sequences
from tests.distributed.test_exceptions import pointed
from tests.happens_before import Machine, Stream, Watch
from tests.runtime.placement_cases import columns
from tests.zoo import MODELS, Case

HALF = {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
OFFLOAD = {"offload": CPUOffloadPolicy(pin_memory=False)}
APART = {"pack_bytes": 0}
ACTIVATIONS = {"offload_activations": "1GiB"}
HYBRID = {"mesh": (2, 2), "strategy": "hybrid_shard"}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "half": HALF,
    "half_apart": HALF | APART,
    "prefetch_2": HALF | APART | {"forward_prefetch": 2, "backward_prefetch": 2},
    "no_prefetch": APART | {"forward_prefetch": 0, "backward_prefetch": 0},
    "offload": HALF | OFFLOAD,
    "offload_apart": APART | OFFLOAD,
    "hybrid": HALF | APART | HYBRID,
    "hybrid_offload": HALF | OFFLOAD | HYBRID,
    "reshard_2_of_4": APART | {"mesh": (4,), "reshard_after_forward": 2},
    "columns": APART | {"mesh": (4,), "reshard_after_forward": 2, "shard_placement_fn": columns},
    "kept": HALF | {"reshard_after_forward": False},
    "root_kept": HALF | {"reshard_after_forward": {"": False}},
    "no_shard": {"strategy": "no_shard"},
    "recomputed": HALF | {"checkpoint": "full"},
    "activations": APART | ACTIVATIONS,
    "activations_recomputed": HALF | ACTIVATIONS | OFFLOAD | {"checkpoint": "full"},
}
QUICK = ("half_apart", "activations")
FAST = [
    *("half_apart", "prefetch_2", "offload", "hybrid", "columns", "recomputed", "activations"),
    "root_kept",
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


LAYERS = Case(
    "layers",
    build=Layers,
    batch=lambda rank, step: ((torch.ones(3, 8),), {}),
    loss=lambda output: output.square().mean(),
    units=["layers.*"],
)


@dataclasses.dataclass
class Watched:
    """A model on a machine of streams."""

    model: Any
    case: Case
    machine: Machine
    watch: Watch
    optimizer: torch.optim.Optimizer
    forward: Callable[..., Tensor] = lambda model, *args, **kwargs: model(*args, **kwargs)

    def step(self) -> None:
        args, kwargs = self.case.batch(0, 0)
        self.case.loss(self.forward(self.model, *args, **kwargs)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def races(self, steps: int = 2) -> int:
        """Races of some steps."""
        self.watch.races.clear()
        with self.watch:
            for _ in range(steps):
                self.step()
        return sum(self.watch.races.values())


@contextmanager
def watched(case: Case, options: dict[str, Any]) -> Iterator[Watched]:
    """On one rank of a fake group, whose collectives are issued as on CUDA."""
    options = dict(options)
    shape = options.pop("mesh", (2,))
    names = options.pop("names", ("replicate", "shard")[-len(shape) :])
    world_size = torch.Size(shape).numel()
    with process_groups.fake_process_group(0, world_size):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        made = case.build()
        if "tp" in names:
            of_sequences(made, mesh["tp"])
        model: Any = fxshard.compile(made, mesh=mesh, units=case.units, **options)
        machine = Machine()
        watch = Watch(machine)
        world = model._fxshard.world
        free, store = world.free, world.store

        def freed(tensors: list[Tensor]) -> None:
            watch.freed(tensors)
            free(tensors)

        def stored(tensors: list[Tensor], pair: int) -> list[Tensor]:
            with watch.pinned():
                return store(tensors, pair)

        world.cuda, world.free, world.store = machine, freed, stored
        found = Watched(model, case, machine, watch, torch.optim.AdamW(model.parameters()))
        found.step()  # traced, and the optimizer's state made
        yield found


@pytest.mark.parametrize("setting", FAST)
@pytest.mark.sample(3)
def test_no_race(setting: str) -> None:
    with watched(LAYERS, SETTINGS[setting]) as found:
        assert found.races() == 0, found.watch.races
        assert found.watch.operators > 100
        assert len(found.machine.streams) > 1


@pytest.mark.parametrize("setting", ["half", *FAST])
@pytest.mark.sample(4)
def test_no_race_where_torch_fills_what_is_made_empty(setting: str) -> None:
    """``torch.use_deterministic_algorithms`` writes NaN, on the stream that makes the tensor."""
    with watched(LAYERS, SETTINGS[setting]) as found:
        torch.use_deterministic_algorithms(True)
        try:
            assert found.races() == 0, found.watch.races
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.utils.deterministic.fill_uninitialized_memory


LLAMA = Case(
    "llama",
    build=Llama,
    batch=lambda rank, step: ((torch.arange(16).view(2, 8) % VOCABULARY,), {}),
    loss=lambda output: output.square().mean(),
    units=["layers.*"],
)
PARALLEL: dict[str, Any] = {"mesh": (2, 2), "names": ("dp", "tp")}


@pytest.mark.parametrize(
    ("setting", "stalls"), [("activations", 0), ("offload", 1), ("activations_recomputed", 1)]
)
def test_the_host_waits_once_per_step_at_most(setting: str, stalls: int) -> None:
    """Where backward ends, for the gradients that the CPU is to read."""
    with watched(LAYERS, SETTINGS[setting]) as found:
        seen: list[Stream] = []
        for stream in found.machine.streams:
            stream.synchronize = lambda stream=stream: seen.append(stream)  # type: ignore[method-assign]
        found.step()
        assert len(seen) == stalls


@pytest.mark.parametrize("setting", ["default", "recomputed", "activations"])
def test_no_race_of_tensor_parallelism(setting: str) -> None:
    with watched(LLAMA, SETTINGS[setting] | PARALLEL) as found:
        assert found.races() == 0, found.watch.races
        streams = found.model._fxshard.world._streams
        assert "tp" in streams and "unshard" in streams


def test_events_of_tensor_parallelism_left_out_are_races() -> None:
    """The detector sees the streams of the model's own collectives."""
    with watched(LLAMA, PARALLEL) as found:
        world = found.model._fxshard.world
        wait = world.wait_event

        def only_of_others(stream: str, event: str) -> None:
            if stream != "tp" and event[0] not in "gdm":
                wait(stream, event)

        world.wait_event = only_of_others
        assert found.races(1) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for name in MODELS
        for setting, options in SETTINGS.items()
        # torch has no batch norm on CPU of a bf16 activation and weight with fp32 statistics
        if name != "convnet" or "mixed_precision" not in options
    ],
)
def test_no_race_in_the_zoo(name: str, setting: str) -> None:
    with watched(MODELS[name], SETTINGS[setting]) as found:
        assert found.races() == 0, found.watch.races


def layer_by_layer(model: Any, x: Tensor) -> Tensor:
    """Outside of a program: each layer reads its parameters."""
    for layer in model.layers:
        x = layer(x)
    return model.head(x)


@pytest.mark.parametrize("setting", ["default", "half", "offload", "hybrid", "no_shard"])
@pytest.mark.sample(3)
def test_no_race_in_eager_reads(setting: str) -> None:
    with watched(LAYERS, SETTINGS[setting]) as found:
        found.forward = layer_by_layer
        assert found.races() == 0, found.watch.races
        assert len(found.machine.streams) > 1


def test_every_wait_of_eager_reads_that_is_left_out_is_found() -> None:
    with watched(LAYERS, SETTINGS["hybrid"]) as found:
        found.forward = layer_by_layer
        streams = {"unshard", "reduce", "all-reduce"}
        assert {stream for stream, _ in waits(found)} == {"compute", *streams}
        assert missed(found) == []


def waits(found: Watched) -> list[tuple[str, str]]:
    """Stream and event of every wait of a step, in order."""
    seen: list[tuple[str, str]] = []
    world, wait = found.model._fxshard.world, found.model._fxshard.world.wait_event

    def noted(stream: str, event: str) -> None:
        seen.append((stream, event))
        wait(stream, event)

    world.wait_event = noted
    found.step()
    world.wait_event = wait
    return list(dict.fromkeys(seen))


def but(skipped: tuple[str, str], wait: Callable[[str, str], None]) -> Callable[[str, str], None]:
    return lambda stream, event: None if (stream, event) == skipped else wait(stream, event)


@pytest.mark.parametrize(
    "setting",
    [
        "half_apart",
        "activations",
        *(pytest.param(s, marks=pytest.mark.slow) for s in SETTINGS if s not in QUICK),
    ],
)
def test_every_wait_that_is_left_out_is_found(setting: str) -> None:
    """So that none is there for nothing, too."""
    with watched(LAYERS, SETTINGS[setting]) as found:
        assert missed(found) == []
        assert found.races() == 0


def missed(found: Watched) -> list[tuple[str, str]]:
    """Waits without which no race is found."""
    wait = found.model._fxshard.world.wait_event
    left = []
    for stream in found.machine.streams:
        stream.synchronize = lambda: None
    for skipped in waits(found):
        found.model._fxshard.world.wait_event = but(skipped, wait)
        if not found.races(steps=2):
            left.append(skipped)
        found.model._fxshard.world.wait_event = wait
        for stream in found.machine.streams:
            Stream.synchronize(stream)
    return left


def after_exceptions(found: Watched, stride: int) -> int:
    """Races of what the caller runs after an exception, raised at many points."""
    points = pointed(found.model)
    found.step()
    races = 0
    for phase, count in dict(points.counts).items():
        for number in range(1, count, stride):
            points.where = (phase, number)
            found.watch.races.clear()
            with found.watch:
                try:
                    found.step()
                except ValueError:
                    torch.ones(64, 64) @ torch.ones(64, 64)
                found.optimizer.zero_grad()
                found.step()
            races += sum(found.watch.races.values())
    return races


@pytest.mark.parametrize("setting", ["half_apart", "offload"])
def test_no_race_after_an_exception(setting: str) -> None:
    with watched(LAYERS, SETTINGS[setting]) as found:
        assert after_exceptions(found, 37) == 0, found.watch.races


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_race_after_an_exception_anywhere(setting: str) -> None:
    with watched(LAYERS, SETTINGS[setting]) as found:
        assert after_exceptions(found, 1) == 0, found.watch.races


def test_streams_that_are_not_joined_after_an_exception_race(monkeypatch: Any) -> None:
    with watched(LAYERS, SETTINGS["half_apart"]) as found:
        monkeypatch.setattr(
            found.model._fxshard.world, "_let_go", list
        )  # nothing in flight, nothing joined
        assert after_exceptions(found, 19) > 0


# -- FSDP2 under the same eyes --------------------------------------------------------------------


def races_of_fsdp2(monkeypatch: Any) -> int:
    """Races of torch's own FSDP2, whose streams and events are a `Machine`'s."""
    machine = Machine()
    watch = Watch(machine)
    for module in (_fsdp_param_group, _fsdp_collectives, _fsdp_state):
        monkeypatch.setattr(module, "_get_device_handle", lambda device: machine)

    def freed(tensor: Tensor) -> None:
        watch.freed([tensor])
        tensor.untyped_storage().resize_(0)

    monkeypatch.setattr(_fsdp_param, "free_storage", freed)
    with process_groups.fake_process_group(0, 2):
        mesh, torch_s = init_device_mesh("cpu", (2,)), LAYERS.build()
        for module in [*torch_s.layers, torch_s]:  # type: ignore[misc]
            fully_shard(module, mesh=mesh, mp_policy=HALF["mixed_precision"])
        optimizer = torch.optim.AdamW(torch_s.parameters())
        found = Watched(torch_s, LAYERS, machine, watch, optimizer)
        found.step()
        assert len(machine.streams) > 3
        return found.races()


def test_fsdp2_has_no_race(monkeypatch: Any) -> None:
    assert races_of_fsdp2(monkeypatch) == 0


def test_fsdp2_without_its_waits_races(monkeypatch: Any) -> None:
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
    monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: None)
    assert races_of_fsdp2(monkeypatch) > 0
