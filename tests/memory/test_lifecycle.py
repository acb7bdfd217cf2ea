"""Phases outside of the step: static ledgers against what torch.profiler sees of the real thing.

The profiler also sees gloo's threads; the calling thread, which allocates all tensors, counts.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile, record_function

import fxshard
from fxshard._torch import process_groups
from fxshard.memory.category import Category
from fxshard.memory.held import held_ranges
from fxshard.memory.lifecycle.phases import lifecycle
from fxshard.memory.lifecycle.script import LifecyclePhase
from fxshard.memory.optimizer import trace_step
from fxshard.runtime import sharding
from fxshard.runtime.checkpoint import saved as what_is_saved
from fxshard.validation.tracker import Tracker
from tests.oracles import uncollected

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
SPAN = "fxshard.lifecycle"


def growth(
    fn: Callable[[], Any], before: Callable[[], Any] | None = None, mark: str = SPAN
) -> tuple[int, int]:
    """Bytes at most alive above those at the start of `fn`, and those at its end.

    Args:
        before: runs first: what `fn` frees must be allocated there to be seen.
        mark: count in the first event of that name only.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        if before:
            before()
        with uncollected(), record_function(SPAN):
            kept = fn()
    events = sorted(prof.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    span = next(event for event in events if event.name() == mark)
    live = peak = 0
    for event in events:
        inside = span.start_ns() <= event.start_ns() <= span.end_ns()
        own = event.start_thread_id() == span.start_thread_id()
        if inside and own and event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            live += event.nbytes()
            peak = max(peak, live)
    del kept
    return peak, live


class Net(nn.Module):
    """Rows that do not divide, a unit of one parameter, buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.first = nn.Linear(12, 10)
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 48, bias=False)
        self.register_buffer("shift", torch.ones(70))
        self.register_buffer("wide", torch.ones(5, 1).expand(5, 30), persistent=False)

    def reset_parameters(self) -> None:
        self.shift.fill_(1)
        self.wide.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.norm(self.first(self.embed(x)))).sum() * self.shift.sum()).cos()


class Tied(nn.Module):
    """A weight under two names, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.inner = nn.Sequential(nn.Linear(32, 9), nn.Sequential(nn.Tanh(), nn.Linear(9, 32)))
        self.inner[0].weight.requires_grad_(False)
        self.head = nn.Linear(32, 50)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x))).sum()


class Busy(nn.Module):
    """Its initialisation makes tensors of its own, and reads a buffer that has data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(13, 9))
        self.bias = nn.Parameter(torch.empty(13))
        self.register_buffer("table", torch.empty(40))
        self.inner = nn.Linear(9, 13)

    def reset_parameters(self) -> None:
        noise = torch.randn(3, 13, 9)
        self.weight.copy_(noise.sum(0))
        self.bias.copy_(noise.sum((0, 2)))
        self.table.copy_(torch.arange(40.0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias).sum() + self.inner(x).sum()


IDS = torch.arange(8)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str] | None]] = {
    "net": (Net, IDS, ["first", "head"]),
    "tied": (Tied, IDS, ["inner.*"]),
    "busy": (Busy, torch.ones(2, 9), None),
}


def built(build: Callable[[], nn.Module], device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return build()


def phases_of(model: nn.Module, x: Tensor, world_size: Any, **options: Any) -> dict[str, Any]:
    plan = fxshard.plan(model, (x,), world_size=world_size, **options)
    return {phase.name: phase for phase in lifecycle_of(plan, model, x)}


def lifecycle_of(plan: fxshard.Plan, model: nn.Module, x: Tensor) -> list[LifecyclePhase]:
    held = held_ranges(model, ((x,), {}), plan.program)
    step = trace_step(plan.program, plan.config.optimizer)
    return lifecycle(plan.program, plan.config, model, held, step)


def above_start(phase: LifecyclePhase) -> tuple[int, int]:
    """Static: device and host together, as both are the CPU here; peak and end."""
    both = phase.ledger.bytes.sum(1)
    return int(both.max() - both[0]), int(both[-1] - both[0])


def columns(param: Tensor) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


OPTIONS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "no_shard": {"strategy": "no_shard"},
    "hybrid_shard": {"strategy": "hybrid_shard"},
    "offload": {"offload": CPUOffloadPolicy()},
    "columns": {"shard_placement_fn": columns},
    "bf16 buffers": {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)},
}


def meshed(world_size: int, strategy: str) -> dict[str, Any]:
    if strategy == "hybrid_shard":
        names = ("replicate", "shard")
        return {"mesh": init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)}
    return {"mesh": init_device_mesh("cpu", (world_size,))}


def sizes(world_size: int, strategy: str) -> Any:
    return (2, world_size // 2) if strategy == "hybrid_shard" else world_size


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["net", "tied"])
def test_init_of_a_model_with_data(name: str, option: str) -> None:
    build, x, units = MODELS[name]
    options = OPTIONS[option] | {"units": units}
    strategy = options.get("strategy", "full_shard")
    want = phases_of(built(build), x, sizes(4, strategy), **options)["init"]
    box: list[Any] = []

    def compile_it() -> None:
        box.append(fxshard.compile(box.pop(), **mesh, **options))

    with process_groups.fake_process_group(0, 4):
        mesh = meshed(4, strategy)
        got = growth(compile_it, before=lambda: box.append(built(build)))
    assert above_start(want) == got


@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("name", MODELS)
def test_init_of_a_meta_model(name: str, world_size: int) -> None:
    """Its initialisations run on fake tensors: their temporaries count."""
    build, x, units = MODELS[name]
    model = built(build, "meta")
    state = torch.get_rng_state()
    want = phases_of(model, x, world_size, units=units)["init"]
    assert torch.equal(state, torch.get_rng_state()) and not want.unknown
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with process_groups.fake_process_group(0, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        got = growth(lambda: fxshard.compile(model, mesh=mesh, units=units))
    assert above_start(want) == got


def to_empty(module: nn.Module) -> None:
    """As users of FSDP1 write it: it exchanges the tensors."""
    module.to_empty(device="cpu", recurse=False)
    for param in module.parameters(recurse=False):
        param.data.normal_(std=0.02)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


def if_meta(module: nn.Module) -> None:
    """As FSDP1's tests write it: it looks for the meta device."""
    if any(param.is_meta for param in module.parameters(recurse=False)):
        to_empty(module)


@pytest.mark.parametrize("init", [to_empty, if_meta])
def test_init_of_a_model_that_is_partly_meta(init: Any) -> None:
    def half_meta() -> nn.Module:
        model = built(Net)
        model.first.to("meta")
        model.norm.weight = nn.Parameter(torch.empty(10, device="meta"))
        return model

    options: dict[str, Any] = {"param_init_fn": init, "units": ["first"]}
    want = phases_of(half_meta(), IDS, 2, **options)["init"]
    box: list[Any] = []
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        got = growth(
            lambda: box.append(fxshard.compile(box.pop(), mesh=mesh, **options)),
            before=lambda: box.append(half_meta()),
        )
    assert above_start(want) == got


def test_an_initialisation_that_needs_data_is_unknown() -> None:
    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.data.fill_(1.0 if param.mean().item() > 0 else 2.0)

    phase = phases_of(built(Busy, "meta"), torch.ones(2, 9), 2, param_init_fn=init)["init"]
    assert [what for what, _ in phase.unknown] == [
        "temporaries of param_init_fn of module '(root)'",
        "temporaries of param_init_fn of module 'inner'",
    ]
    assert all("without data" in why for _, why in phase.unknown)


def test_init_counted_by_hand() -> None:
    """Linear(6, 5) over 2 ranks: f32[5,6] and f32[5], 140 bytes; chunks of 3 rows, 84 bytes."""
    model = nn.Sequential(nn.Linear(6, 5))
    real = phases_of(model, torch.ones(1, 6), 2)["init"]
    assert (real.start_bytes, real.peak_bytes, real.end_bytes) == (140, 140 + 84 + 4, 84)
    meta = phases_of(built(lambda: nn.Sequential(nn.Linear(6, 5)), "meta"), torch.ones(1, 6), 2)
    init = meta["init"]
    assert (init.start_bytes, init.peak_bytes, init.end_bytes) == (0, 84 + 140, 84)
    alive = {(each.name, each.category, each.bytes) for each in init.alive_at_peak()}
    assert alive == {
        ("0.weight", Category.SHARDED_PARAM, 72),
        ("0.bias", Category.SHARDED_PARAM, 12),
        ("0.weight", Category.UNSHARDED_PARAM, 120),
        ("0.bias", Category.UNSHARDED_PARAM, 20),
    }


def test_the_cpu_of_a_gpu_counted_by_hand() -> None:
    """The same layer planned for CUDA: rows of rank 0 are 72 + 12 bytes, gathered 144 + 24."""
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.ones(1, 6)
    plan = fxshard.plan(model, (x,), world_size=2, device="cuda")
    phases = {phase.name: phase for phase in lifecycle_of(plan, model, x)}

    def figures(name: str) -> tuple[int, ...]:
        phase = phases[name]
        host = (phase.host_peak_bytes, phase.host_end_bytes)
        return (phase.start_bytes, phase.peak_bytes, phase.end_bytes, *host)

    assert figures("init") == (140, 140 + 84 + 4, 84, 0, 0)
    # The given tensors are moved, and then copied: both are there for the weight.
    assert figures("load_state_dict") == (84, 84 + 72 + 72, 84, 140, 140)
    assert figures("load_checkpoint") == (84, 84 + 4, 84, 72 + 12, 0)
    assert figures("save_checkpoint") == (84, 84 + 4, 84, 72 + 12, 0)
    assert figures("full_state_dict") == (84, 84 + 144, 84, 140, 140)
    assert figures("full_state_dict (every rank)") == (84, 84 + 168, 84 + 168, 0, 0)


def test_offload_from_a_gpu_counted_by_hand() -> None:
    """Shards lie on the CPU: a checkpoint is written from there, a gather begins with a copy."""
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.ones(1, 6)
    offload = {"device": "cuda", "offload": CPUOffloadPolicy()}
    plan = fxshard.plan(model, (x,), world_size=2, **offload)
    phases = {phase.name: phase for phase in lifecycle_of(plan, model, x)}
    save, full = phases["save_checkpoint"], phases["full_state_dict"]
    # weight and bias are views of one storage of 84 bytes: both are copied
    assert (save.peak_bytes, save.host_peak_bytes, save.host_end_bytes) == (0, 84 + 84, 84)
    assert (full.peak_bytes, full.end_bytes) == (72 + 144, 0)
    assert (full.host_peak_bytes, full.host_end_bytes) == (84 + 140, 84 + 140)


STATES = ["full_shard", "no_shard", "hybrid_shard", "offload", "columns", "bf16 buffers"]


@pytest.mark.parametrize("option", STATES)
@pytest.mark.parametrize("name", ["net", "tied"])
def test_state_dicts(name: str, option: str) -> None:
    """Whole ones, loaded and gathered."""
    build, x, units = MODELS[name]
    options = OPTIONS[option] | {"units": units}
    strategy = options.get("strategy", "full_shard")
    want = phases_of(built(build), x, sizes(4, strategy), **options)
    whole = built(build).state_dict()
    with process_groups.fake_process_group(0, 4):
        ours = fxshard.compile(built(build), **meshed(4, strategy), **options)
        assert above_start(want["load_state_dict"]) == growth(lambda: ours.load_state_dict(whole))
        for alone in (True, False):
            phase = want["full_state_dict" if alone else "full_state_dict (every rank)"]
            got = growth(lambda alone=alone: ours.full_state_dict(alone, alone))
            assert above_start(phase) == got


def test_a_sharded_model_has_the_phases_of_the_plain_one() -> None:
    """`FxshardModule.plan`: its model holds DTensors."""
    build, x, units = MODELS["tied"]
    want = phases_of(built(build), x, 4, units=units)
    with process_groups.fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        ours = fxshard.compile(built(build), mesh=mesh, units=units, args=(x,))
        got = {phase.name: phase for phase in lifecycle_of(ours.plan, ours, x)}
    for name, phase in want.items():
        figures = (phase.start_bytes, phase.peak_bytes, phase.end_bytes)
        other = got[name]
        assert figures == (other.start_bytes, other.peak_bytes, other.end_bytes), name


@pytest.mark.parametrize("name", MODELS)
def test_what_is_alive_adds_up(name: str) -> None:
    build, x, units = MODELS[name]
    for phase in phases_of(built(build), x, 3, units=units, optimizer=adamw).values():
        assert sum(e.bytes for e in phase.alive_at_peak() if not e.host) == phase.peak_bytes
        assert phase.host_peak_bytes == phase.host_end_bytes == 0
        told = phase.to_dict()
        assert told["peak_bytes"] == phase.peak_bytes and told["peak_node"] == phase.peak_node
        assert sum(told["peak_by_category"].values()) == phase.peak_bytes


def test_phases_follow_each_other() -> None:
    """What one leaves the next one finds; but for a batch, the step too."""
    build, x, units = MODELS["net"]
    plan = fxshard.plan(built(build), (x,), world_size=4, units=units, optimizer=adamw)
    phases = {phase.name: phase for phase in lifecycle_of(plan, built(build), x)}
    assert phases["init"].end_bytes == phases["load_checkpoint"].start_bytes
    state = plan.memory.snapshot("", "Before Pre-Forward")
    first = plan.memory.snapshot("", "Before Pre-Forward", first_step=True)
    assert state is not None and first is not None
    batch = state[Category.INPUTS]
    assert phases["init"].end_bytes == sum(first.values()) - batch
    assert phases["load_checkpoint"].end_bytes == sum(state.values()) - batch
    assert phases["save_checkpoint"].start_bytes == sum(state.values()) - batch


# -- checkpoints on gloo ranks ---------------------------------------------------------------------


def checkpointed(
    rank: int, world_size: int, name: str, path: str, optimizer: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Growth while the data is written, and while it is read."""
    build, x, units = MODELS[name]
    ours = fxshard.compile(built(build), units=units)
    made = adamw(ours.parameters()) if optimizer else None
    if made:
        ours(x).backward()
        made.step()
        made.zero_grad()
    found = []
    for owner, method, action in (
        (filesystem.FileSystemWriter, "write_data", fxshard.save_checkpoint),
        (filesystem.FileSystemReader, "read_data", fxshard.load_checkpoint),
    ):
        plain = getattr(owner, method)

        def marked(*args: Any, method: str = method, plain: Any = plain) -> Any:
            with record_function(method):
                return plain(*args)

        setattr(owner, method, marked)
        try:
            found.append(growth(lambda action=action: action(path, ours, made), mark=method))
        finally:
            setattr(owner, method, plain)
    return found[0], found[1]


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("name", ["net", "tied"])
@pytest.mark.sample(2)
def test_checkpoints(name: str, optimizer: bool, ranks: Any) -> None:
    build, x, units = MODELS[name]
    options = {"optimizer": adamw} if optimizer else {}
    want = phases_of(built(build), x, 2, units=units, **options)
    with tempfile.TemporaryDirectory() as path:
        (wrote, read), _ = ranks(2).run(checkpointed, name, path, optimizer)
    assert wrote == above_start(want["save_checkpoint"])
    assert read[0] == read_peak(want["load_checkpoint"])
    for phase in ("save_checkpoint", "load_checkpoint"):
        assert any("plans" in what for what, _ in want[phase].unknown)


def read_peak(phase: LifecyclePhase) -> int:
    """The most that is read from the file and alive at once."""
    read = [each for each in phase.ledger.ranges if each.name.endswith("of the file")]
    ticks = range(2 * len(phase.ledger.moments))
    return max(sum(e.bytes for e in read if e.born <= t < (e.died or math.inf)) for t in ticks)


@pytest.mark.parametrize("optimizer", [adamw, torch.optim.Adadelta])
def test_a_new_optimizer_steps_once_to_load_a_checkpoint(optimizer: Any) -> None:
    """Gradients, state and the temporaries of a step: the peak of loading. Seen by operators."""
    build, x, units = MODELS["tied"]
    want = phases_of(built(build), x, 4, units=units, optimizer=optimizer)
    with process_groups.fake_process_group(0, 4):
        ours = fxshard.compile(built(build), mesh=init_device_mesh("cpu", (4,)), units=units)
        made = optimizer(ours.parameters())
        tracker = Tracker()
        tracker.know(
            (s for slot in ours._fxshard.slots.values() for s in slot.shards), Category.INPUTS
        )
        tracker.know(ours.buffers(), Category.INPUTS)
        with tracker:
            tracker.begin("load")
            kept = get_state_dict(ours, made)
            tracker.at()
    (measured,) = tracker.measured()
    phase = want["load_checkpoint"]
    assert phase.peak_bytes == measured.during.sum(1).max()
    assert phase.end_bytes == measured.after[-1].sum()
    if optimizer is not adamw:
        return
    # In the plan of a checkpoint that is saved later the state is there from the start.
    assert want["save_checkpoint"].start_bytes == phase.end_bytes
    del kept


def test_an_optimizer_with_state_from_the_start_steps_never() -> None:
    build, x, units = MODELS["tied"]
    phase = phases_of(built(build), x, 4, units=units, optimizer=torch.optim.Adagrad)
    load = phase["load_checkpoint"]
    with process_groups.fake_process_group(0, 4):
        ours = fxshard.compile(built(build), mesh=init_device_mesh("cpu", (4,)), units=units)
        peak, state = growth(lambda: torch.optim.Adagrad(ours.parameters()))
        made = torch.optim.Adagrad(ours.parameters())
        assert growth(lambda: get_state_dict(ours, made)) == (4, 0)  # a stand-in
    assert load.start_bytes - phase["init"].end_bytes == state == peak
    assert load.peak_bytes - load.start_bytes == read_peak(load)


class PartlyUsed(nn.Module):
    """One of its parameters gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 5)
        self.unused = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).sum()


OPTIMIZERS = {
    "adamw": adamw,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "adagrad": torch.optim.Adagrad,
}


def anew(rank: int, world_size: int, optimizer: str, path: str) -> tuple[int, int, int]:
    """Peaks while a state dict is made to save from and to load into; then the state's bytes."""

    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = fxshard.compile(PartlyUsed(), units=["used"])
        return model, OPTIMIZERS[optimizer](model.parameters())

    def marked(*args: Any) -> Any:
        with record_function("_state"):
            return plain(*args)

    ours, made = build()
    ours(torch.ones(2, 6)).backward()
    made.step()
    made.zero_grad()
    plain, what_is_saved.state_of = what_is_saved.state_of, marked
    try:
        saved, _ = growth(lambda: fxshard.save_checkpoint(path, ours, made), mark="_state")
        ours, made = build()
        loaded, _ = growth(lambda: fxshard.load_checkpoint(path, ours, made), mark="_state")
    finally:
        what_is_saved.state_of = plain
    state = {t.untyped_storage() for each in made.state.values() for t in local(each.values())}
    return saved, loaded, sum(storage.nbytes() for storage in state)


def local(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield value.to_local() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_of_a_new_optimizer(optimizer: str, ranks: Any, tmp_path: Any) -> None:
    """Without state nothing steps; state of parameters that have had none is dropped again."""
    options: dict[str, Any] = {"units": ["used"], "optimizer": OPTIMIZERS[optimizer]}
    want = phases_of(PartlyUsed(), torch.ones(2, 6), 2, **options)
    save, load = want["save_checkpoint"], want["load_checkpoint"]
    (saved, loaded, state), _ = ranks(2).run(anew, optimizer, str(tmp_path))
    assert saved == peak_before(save, "write")
    if optimizer != "adamw":  # whose step has temporaries in its kernels
        assert loaded == peak_before(load, "read")
    assert state == load.end_bytes - want["init"].end_bytes
    assert save.start_bytes == load.end_bytes


def peak_before(phase: LifecyclePhase, word: str) -> int:
    """Static: above the start, up to the first moment of that name."""
    names = [moment.node for moment in phase.ledger.moments]
    first = next(i for i, name in enumerate(names) if name.startswith(word))
    both = phase.ledger.bytes.sum(1)
    return int(both[: 2 * first - 1].max() - both[0])


# -- the ranks that receive ------------------------------------------------------------------------


def receives(rank: int, world_size: int, name: str, device: str) -> tuple[int, int]:
    """Growth while the data is taken: when gloo's thread drops what it received last is open."""
    build, _, units = MODELS[name]
    home, owners_of = sharding._home, sharding.owners_of
    filling = record_function("filling")

    def begins(*args: Any) -> Any:
        filling.__enter__()
        return home(*args)

    def ends(*args: Any) -> Any:
        filling.__exit__(None, None, None)
        return owners_of(*args)

    sharding._home, sharding.owners_of = begins, ends
    box: list[Any] = []
    try:
        return growth(
            lambda: box.append(fxshard.compile(box.pop(), units=units, sync_module_states=True)),
            before=lambda: box.append(built(build, device if rank else "cpu")),
            mark="filling",
        )
    finally:
        sharding._home, sharding.owners_of = home, owners_of


def while_filled(phase: LifecyclePhase) -> int:
    """Static: the peak before parameters are exchanged."""
    nodes = [moment.node for moment in phase.ledger.moments]
    first = next(i for i, node in enumerate(nodes) if node.startswith("stand-in"))
    return int(phase.ledger.totals[: 2 * first].max() - phase.start_bytes)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_init_from_rank_0(device: str, ranks: Any) -> None:
    build, x, units = MODELS["net"]
    (sender, _), (receiver, _) = ranks(2).run(receives, "net", device)
    options: dict[str, Any] = {"units": units, "sync_module_states": True}
    assert sender == while_filled(phases_of(built(build), x, 2, **options)["init"])
    want = phases_of(built(build, device), x, 2, **options)["init (receives)"]
    assert receiver == while_filled(want)
    assert any("messages" in what for what, _ in want.unknown)
