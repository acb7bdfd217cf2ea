"""From meta: memory, in bytes counted by hand, checkpoints into meta models, from rank 0."""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard._torch import process_groups
from fxshard.config.checked import Config
from fxshard.errors import FxshardError, RankMismatchError
from fxshard.ir.splitting import find_units
from fxshard.runtime.sharding import Sharding, shard_parameters
from fxshard.runtime.world.c10d import C10dWorld
from fxshard.runtime.world.in_process import InProcessWorld
from tests.oracles import count_collectives, profiler_peak_bytes
from tests.runtime.init_cases import Stack, assert_equal, compiled, on_meta, seeded, values
from tests.zoo import models

# -- from meta: memory, in bytes counted by hand ---------------------------------------------------


WIDTH, DEPTH = 256, 12


LINEAR = 4 * (WIDTH * WIDTH + WIDTH)


LAYER = LINEAR + 4 * 2 * WIDTH  # and a norm


STACK = DEPTH * LAYER + 2 * 4 * 17 * WIDTH + 4 * 17  # and embedding and head


SMALL = 16_000  # a scalar here and there; the flat storages of units round up to whole rows


def big(**options: Any) -> nn.Module:
    return Stack(width=WIDTH, depth=DEPTH, **options)


@pytest.mark.parametrize("world_size", [2, 8])
def test_peak_of_a_meta_start_is_the_shards_and_one_module(world_size: int) -> None:
    assert sum(4 * p.numel() for p in big().parameters()) == STACK
    with process_groups.fake_process_group(0, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        made: list[Any] = []
        model = on_meta(big)
        peak = profiler_peak_bytes(lambda: made.append(fxshard.compile(model, mesh=mesh)))
    counted = STACK // world_size + LINEAR
    assert counted <= peak <= counted + SMALL
    assert peak < STACK * (0.6 if world_size == 2 else 0.25)


def test_peak_in_one_process_is_the_model_and_one_module() -> None:
    made: list[Any] = []
    model = on_meta(big)
    peak = profiler_peak_bytes(lambda: made.append(fxshard.compile(model, world_size=4)))
    assert STACK + LINEAR <= peak <= STACK + LINEAR + 2 * SMALL


# -- checkpoints into meta models ------------------------------------------------------------------


def loads_a_checkpoint(rank: int, world_size: int, path: str) -> None:
    source = seeded(big)
    want = values(source)
    saved = compiled(source)
    dcp.save(get_model_state_dict(saved), checkpoint_id=path)
    del saved, source
    made: list[Any] = []

    def load() -> None:
        ours = compiled(on_meta(big), param_init_fn=lambda module: None)
        state = get_model_state_dict(ours)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(ours, state)
        made.append(ours)

    peak = profiler_peak_bytes(load)
    assert_equal(values(made[0]), want)
    assert peak < 0.75 * STACK, peak / STACK  # half of it are the shards


def test_a_sharded_checkpoint_goes_into_a_meta_model(ranks: Any) -> None:
    with tempfile.TemporaryDirectory() as path:
        ranks(2).run(loads_a_checkpoint, path)


def loads_a_state_dict(rank: int, world_size: int) -> None:
    """A sharded one, by load_state_dict; and rank 0's full one, by torch's state dict API."""
    want = values(seeded(big))
    state = compiled(seeded(big)).state_dict()
    ours = compiled(on_meta(big), param_init_fn=lambda module: None)
    ours.load_state_dict(state)
    assert_equal(values(ours), want)
    made: list[Any] = []
    whole = dict(seeded(big).state_dict()) if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def compile_it() -> None:
        made.append(compiled(on_meta(big), param_init_fn=lambda module: None))

    peak = profiler_peak_bytes(compile_it)
    assert peak < 0.75 * STACK, peak / STACK  # torch's broadcasts may take more, as gloo pleases
    set_model_state_dict(made[0], whole, options=options)
    assert_equal(values(made[0]), want)


def test_a_state_dict_goes_into_a_meta_model(ranks: Any) -> None:
    ranks(2).run(loads_a_state_dict)


# -- from rank 0 -----------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Parameters of two dtypes and buffers of many; one is a view of few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.half = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.register_buffer("flags", torch.rand(6) > 0.5)
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("short", torch.randint(100, (3,), dtype=torch.int16))
        self.register_buffer("wave", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("wide", torch.randn(1, 4).expand(3, 4), persistent=False)
        self.register_buffer("absent", None)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.normal_()


def from_rank_0(
    rank: int, world_size: int, build: Callable[[], nn.Module], others: str
) -> tuple[dict[str, Tensor], list[int]]:
    want = values(seeded(build, seed=0))
    model = seeded(build, seed=rank)
    if rank and others == "meta":
        model = on_meta(build)
    if rank and others == "partly meta":
        list(model.children())[1].to("meta")
    stays = {name: buffer for name, buffer in model.named_buffers() if buffer.is_contiguous()}
    draws = torch.get_rng_state()
    with count_collectives() as seen:
        ours = fxshard.compile(model, sync_module_states=True)
    assert torch.equal(torch.get_rng_state(), draws)  # nothing was initialised
    assert_equal(values(ours), want)
    whole = [*model.parameters(), *model.buffers()]
    assert seen.kinds() == ["broadcast"] * len(whole)
    for name, buffer in stays.items():
        assert buffer.is_meta or ours.get_buffer(name) is buffer
    return values(ours), [call.nbytes for call in seen.calls]


@pytest.mark.parametrize("others", ["other values", "meta", "partly meta"])
@pytest.mark.parametrize("build", [Buffers, models.ConvNet, partial(Stack, tied=True)])
def test_rank_0_gives_its_values_to_all(
    ranks: Any, build: Callable[[], nn.Module], others: str
) -> None:
    (zero, sent), (one, received) = ranks(2).run(from_rank_0, build, others)
    assert_equal(one, zero)
    assert sent == received
    model = build()
    whole = [*model.parameters(), *model.buffers()]
    assert sorted(sent) == sorted(t.numel() * t.element_size() for t in whole)


def test_one_rank_alone(ranks: Any) -> None:
    ranks(1).run(from_rank_0, Buffers, "other values")


def test_on_three_ranks(ranks: Any) -> None:
    results = ranks(3).run(from_rank_0, Buffers, "meta")
    assert all(sent == results[0][1] for _, sent in results)


def on_a_2d_mesh(rank: int, world_size: int) -> None:
    """Replicas are given rank 0's values too, over the other dimension."""
    model = seeded(Buffers, seed=rank) if rank % 2 else on_meta(Buffers)
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    config = Config(sync_module_states=True, param_init_fn=fill_noisily)
    with count_collectives() as seen:
        shard_parameters(Sharding(model, find_units(model), C10dWorld(mesh), config))
    both = [*model.parameters(), *model.buffers()]
    assert seen.kinds() == ["broadcast"] * 2 * len(both)
    torch.manual_seed(0)
    rank_0 = on_meta(Buffers)
    config = Config(param_init_fn=fill_noisily)
    shard_parameters(Sharding(rank_0, find_units(rank_0), InProcessWorld(2), config))
    assert_equal(values(model), values(rank_0))


def fill_noisily(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        with torch.no_grad():
            tensor.copy_(torch.randint(2, tensor.shape))


def test_on_a_2d_mesh(ranks: Any) -> None:
    ranks(4).run(on_a_2d_mesh)


def fills_on_rank_0_only(rank: int, world_size: int) -> None:
    calls: list[str] = []

    def init(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        module.reset_parameters()

    torch.manual_seed(rank)
    ours = fxshard.compile(on_meta(Stack), sync_module_states=True, param_init_fn=init)
    assert len(calls) == (0 if rank else 8)
    assert_equal(values(ours), values(seeded(Stack)))


def test_a_meta_model_is_filled_on_rank_0_only(ranks: Any) -> None:
    ranks(2).run(fills_on_rank_0_only)


def issues_nothing(rank: int, world_size: int) -> None:
    model = seeded(Buffers, seed=rank)
    with count_collectives() as seen:
        fxshard.compile(model)
    assert seen.count() == 0


def test_without_the_option_no_collective_is_issued(ranks: Any) -> None:
    ranks(2).run(issues_nothing)


def test_in_one_process_there_is_nothing_to_give() -> None:
    ours = compiled(seeded(Buffers), sync_module_states=True)
    assert_equal(values(ours), values(seeded(Buffers)))


def peak_from_rank_0(rank: int, world_size: int) -> int:
    model = on_meta(big) if rank else seeded(big)
    made: list[Any] = []
    return profiler_peak_bytes(
        lambda: made.append(fxshard.compile(model, sync_module_states=True)),
    )


def test_peak_from_rank_0_is_the_shards_and_one_parameter(ranks: Any) -> None:
    for peak in ranks(2).run(peak_from_rank_0):
        assert peak <= STACK // 2 + 4 * WIDTH * WIDTH + SMALL


def refuses_alone(rank: int, world_size: int) -> str:
    """What each rank says if one of them cannot go on; the models stay as they were."""
    model = seeded(Stack, seed=rank)
    if rank == 1:
        model.head.weight.register_hook(lambda grad: None)
    before = list(model.parameters())
    data = [param.detach().clone() for param in before]
    with pytest.raises(FxshardError) as failure:
        fxshard.compile(model, sync_module_states=True)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, data, strict=True))
    assert isinstance(failure.value, RankMismatchError)
    return str(failure.value)


def test_a_rank_that_refuses_stops_all_before_the_first_broadcast(ranks: Any) -> None:
    for text in ranks(2).run(refuses_alone):
        assert "rank 1 'parameter 'head.weight' has a hook" in text


def has_another_buffer(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("seen", torch.zeros(4 + rank))
    with pytest.raises(RankMismatchError) as failure:
        fxshard.compile(model, sync_module_states=True)
    return str(failure.value)


def test_buffers_that_do_not_fit(ranks: Any) -> None:
    for text in ranks(2).run(has_another_buffer):
        assert "rank 0 has 'buffer seen [4] torch.float32', rank 1 'buffer seen [5]" in text
