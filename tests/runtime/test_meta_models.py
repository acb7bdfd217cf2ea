"""`fully_shard` of a meta model: it stays on the meta device until it is filled, as under FSDP2."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from tests.fsdp2 import full
from tests.oracles import profiler_peak_bytes
from tests.ranks import told
from tests.runtime.init_cases import Stack, assert_equal, on_meta, seeded, values

WIDTH, DEPTH = 256, 8
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def big() -> nn.Module:
    return Stack(width=WIDTH, depth=DEPTH)


def tied() -> nn.Module:
    return Stack(tied=True)


def in_units(model: Any, fully_shard: Callable[..., Any] = fxshard.fully_shard) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def require_trains_as_eager(model: Any, build: Callable[[], nn.Module], rank: int) -> None:
    """Two steps on batches that differ by rank, beside one process on the joined batch."""
    alone = build()
    alone.load_state_dict({name: value.clone() for name, value in values(model).items()})
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone))
    for step in range(2):
        model(tokens(rank, step)).square().mean().backward()
        both = [alone(tokens(r, step)).square().mean() for r in range(2)]
        torch.stack(both).mean().backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for fqn, param in alone.named_parameters():
        assert_close(full(model.get_parameter(fqn)), param.detach(), rtol=1e-4, atol=1e-5)


# -- it stays on the meta device -------------------------------------------------------------------


def stays(rank: int, world_size: int) -> list[str]:
    ours, theirs = in_units(on_meta(tied)), in_units(on_meta(tied), fsdp.fully_shard)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(one, DTensor) and one.is_meta and other.is_meta
        assert (one.shape, one.placements) == (other.shape, other.placements)
    assert [b.is_meta for b in ours.buffers()] == [b.is_meta for b in theirs.buffers()]
    with pytest.raises(RuntimeError, match="on meta device"):
        theirs(tokens(rank, 0))
    found = [
        told(lambda: ours(tokens(rank, 0))),
        told(lambda: ours.layers[0](torch.ones(2, 13))),
        told(lambda: ours.full_state_dict()),
        told(lambda: fxshard.save_checkpoint("/nowhere", ours)),
        told(lambda: ours.summon_full_params().__enter__()),
    ]
    ours.to(torch.bfloat16)
    assert {(p.dtype, p.is_meta) for p in ours.parameters()} == {(torch.bfloat16, True)}
    return found


def test_it_stays_on_meta_and_a_forward_says_what_to_fill(ranks: Any) -> None:
    for found in ranks(2).run(stays):
        for said in found:
            assert said.startswith("StepError: 'embed.weight', 'layers.0.norm.weight', ")
            assert "model.to_empty(device=...)" in said and "set_model_state_dict" in said


class Mixed(nn.Module):
    """A parameter and a buffer that no `reset_parameters` of a submodule fills."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(7))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale.sum() + self.table.sum()


def forgotten(rank: int, world_size: int) -> list[str]:
    model: Any = fxshard.fully_shard(on_meta(Mixed))
    model.to_empty(device="cpu")
    model.inner.reset_parameters()
    found = [told(lambda: model(torch.ones(2, 5)))]
    nn.init.ones_(model.scale)
    found.append(told(lambda: model(torch.ones(2, 5))))
    model.table.copy_(torch.arange(4.0))
    found.append(told(lambda: model(torch.ones(2, 5))))
    left: Any = fxshard.compile(on_meta(Mixed), param_init_fn=lambda module: None)
    found.append(told(lambda: left(torch.ones(2, 5))))
    return found


def test_what_was_never_filled_after_to_empty_is_refused_by_name(ranks: Any) -> None:
    for found in ranks(2).run(forgotten):
        assert found[0].startswith("StepError: 'scale', 'table': on the meta device when")
        assert found[1].startswith("StepError: 'table': on the meta device when")
        assert found[2] == "no error"
        assert found[3].startswith("StepError: 'scale', 'inner.weight', 'inner.bias' and 1 more")


# -- filled ----------------------------------------------------------------------------------------


def initialised(rank: int, world_size: int) -> None:
    """By `to_empty` and the modules' own initialisation, with an optimizer made before."""
    model = in_units(on_meta(tied))
    before = list(model.parameters())
    model.to_empty(device="cpu")
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert model.head.weight is model.embed.weight
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, value in values(seeded(tied)).items():
        assert value.shape == full(model.state_dict()[name]).shape
    require_trains_as_eager(model, tied, rank)


def test_to_empty_and_the_models_own_initialisation(ranks: Any) -> None:
    ranks(2).run(initialised)


def broadcast(rank: int, world_size: int) -> float:
    """Rank 0 has the state, the others have nothing; the optimizer is made afterwards."""
    want = values(seeded(big))
    state = dict(seeded(big).state_dict()) if rank == 0 else {}
    made: list[Any] = []

    def load() -> None:
        model = in_units(on_meta(big))
        set_model_state_dict(model, state, options=BROADCAST)
        made.append(model)

    peak = profiler_peak_bytes(load)
    (model,) = made
    assert_equal(values(model), want)
    require_trains_as_eager(model, big, rank)
    return peak / sum(value.nbytes for value in want.values())


def checkpointed(rank: int, world_size: int, path: str, how: str) -> float:
    want = values(seeded(big))
    saved = in_units(seeded(big))
    if how == "fxshard":
        fxshard.save_checkpoint(path, saved)
    else:
        dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=path)
    del saved
    made: list[Any] = []

    def load() -> None:
        model = in_units(on_meta(big))
        made.append(model)
        if how == "fxshard":
            fxshard.load_checkpoint(path, model)
            return
        if how == "to_empty":
            model.to_empty(device="cpu")
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
        if how == "assigned":
            model.load_state_dict(state["model"], assign=True)
        elif how == "copied":
            set_model_state_dict(model, state["model"])

    peak = profiler_peak_bytes(load)
    (model,) = made
    assert_equal(values(model), want)
    require_trains_as_eager(model, big, rank)
    return peak / sum(value.nbytes for value in want.values())


def test_rank_0s_state_goes_into_a_meta_model_shard_by_shard(ranks: Any) -> None:
    peak, _ = ranks(2).run(broadcast)  # gloo's thread frees what other ranks receive as it pleases
    assert peak < 0.75, peak  # of the model; half of it are the shards


@pytest.mark.parametrize(
    ("how", "most"), [("to_empty", 0.75), ("assigned", 0.75), ("copied", 1.1), ("fxshard", 0.75)]
)
@pytest.mark.sample(2)
def test_a_checkpoint_goes_into_a_meta_model_shard_by_shard(
    ranks: Any, how: str, most: float
) -> None:
    with tempfile.TemporaryDirectory() as path:
        for peak in ranks(2).run(checkpointed, path, how):
            assert peak < most, peak
