"""Checkpoints of parameters that are sharded along any dimension; what is refused of placements."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fxshard
from fxshard.errors import RankMismatchError
from tests import fsdp2
from tests.fsdp2 import full, units_of
from tests.ranks import told
from tests.runtime.placement_cases import EVEN, FUNCTIONS, UNEVEN, columns, compiled
from tests.runtime.test_module import load, save
from tests.zoo import Case

Values = dict[str, Tensor]


def made(kind: str, case: Case, fn: str | None, seed: int) -> tuple[nn.Module, Any]:
    placement = FUNCTIONS.get(fn or "")
    model = compiled(case, placement) if kind == "fxshard" else None
    torch.manual_seed(seed)
    fresh = case.build()
    if model is not None:
        model.load_state_dict(fresh.state_dict())
        return model, fsdp2.adamw(model.parameters())
    for unit in units_of(fresh, case):
        fully_shard(unit, shard_placement_fn=placement)
    fully_shard(fresh, shard_placement_fn=placement)
    return fresh, fsdp2.adamw(fresh.parameters())


def train(model: nn.Module, optimizer: Any, case: Case, rank: int, steps: range) -> None:
    for step in steps:
        case.loss(model(*case.batch(rank, step)[0])).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: Any) -> Values:
    found = {f"model.{key}": full(value) for key, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{k}": full(v) for k, v in optimizer.state[param].items()}
    return found


def trained_and_saved(
    rank: int, world_size: int, kind: str, name: str, fn: str, path: str
) -> tuple[Values, Values]:
    """What is saved, and what two more steps make of it."""
    case = (EVEN if name.startswith("even") else UNEVEN)[name.partition(" ")[2]]
    model, optimizer = made(kind, case, fn, 0)
    train(model, optimizer, case, rank, range(2))
    if kind == "fxshard" and path.endswith("own"):
        fxshard.save_checkpoint(path, model, optimizer)
    else:
        save(model, optimizer, path)
    saved = values(model, optimizer)
    train(model, optimizer, case, rank, range(2, 4))
    return saved, values(model, optimizer)


def loaded(
    rank: int, world_size: int, kind: str, name: str, fn: str | None, path: str
) -> tuple[Values, Values]:
    case = (EVEN if name.startswith("even") else UNEVEN)[name.partition(" ")[2]]
    model, optimizer = made(kind, case, fn, 1)
    if kind == "fxshard" and path.endswith("own"):
        fxshard.load_checkpoint(path, model, optimizer)
    else:
        load(model, optimizer, path)
    found = values(model, optimizer)
    train(model, optimizer, case, rank, range(2, 4))
    return found, values(model, optimizer)


def assert_same(ours: Values, theirs: Values) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


@pytest.mark.parametrize(("name", "how"), [("uneven mixed", "dcp"), ("uneven conv", "own")])
def test_checkpoints_are_loaded_on_other_ranks_and_placements(
    ranks: Any, tmp_path: Path, name: str, how: str
) -> None:
    path = str(tmp_path / how)
    saved, after = ranks(2).run(trained_and_saved, "fxshard", name, "columns", path)[0]
    same = ranks(2).run(loaded, "fxshard", name, "columns", path)[0]
    assert_same(same[0], saved)
    assert_same(same[1], after)
    for world, fn in ((4, "columns"), (2, "largest"), (4, None)):
        assert_same(ranks(world).run(loaded, "fxshard", name, fn, path)[0][0], saved)


@pytest.mark.parametrize("name", ["even mixed"])
def test_checkpoints_are_exchanged_with_fsdp2(ranks: Any, tmp_path: Path, name: str) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    mine = ranks(2).run(trained_and_saved, "fxshard", name, "largest", ours)[0]
    other = ranks(2).run(trained_and_saved, "fsdp2", name, "largest", theirs)[0]
    assert_same(mine[0], other[0])
    for kind, path in (("fxshard", theirs), ("fsdp2", ours)):
        found = ranks(2).run(loaded, kind, name, "largest", path)[0]
        assert_same(found[0], mine[0])
        assert_same(found[1], mine[1])


def test_a_state_dict_of_columns_is_read_without_ranks(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "dcp")
    saved, _ = ranks(4).run(trained_and_saved, "fxshard", "uneven mixed", "columns", path)[0]
    plain = UNEVEN["mixed"].build()
    state = {"model": get_model_state_dict(plain)}
    dcp.load(state, checkpoint_id=path)
    for key, value in state["model"].items():
        assert torch.equal(value, saved[f"model.{key}"]), key


# -- what stays as it is while a model is copied, moved and converted ------------------------------


def converted(rank: int, world_size: int) -> dict[str, Any]:
    case = UNEVEN["mixed"]
    model = compiled(case, columns)
    found = {"plain": {n: full(p) for n, p in model.named_parameters()}}
    twin = copy.deepcopy(model)
    found["copy"] = {n: full(p) for n, p in twin.named_parameters()}
    wide = copy.deepcopy(model).double()
    found["double"] = {n: full(p).float() for n, p in wide.named_parameters()}
    case.loss(wide(*case.batch(rank, 0)[0])).backward()
    case.loss(model(*case.batch(rank, 0)[0])).backward()
    both = zip(model.parameters(), wide.parameters(), strict=True)
    found["gradients"] = [(full(a.grad), full(b.grad).float()) for a, b in both]
    model.zero_grad()
    again = pickle.loads(pickle.dumps(twin))
    found["pickled"] = {n: full(p) for n, p in again.named_parameters()}
    return found


def test_copies_and_other_dtypes_keep_what_each_rank_has(ranks: Any) -> None:
    for found in ranks(4).run(converted):
        for what in ("copy", "double", "pickled"):
            for name, value in found["plain"].items():
                assert torch.equal(found[what][name], value), (what, name)
        for ours, wide in found["gradients"]:
            torch.testing.assert_close(ours, wide, rtol=1e-4, atol=1e-5)


# -- eager reads and torch.compile -----------------------------------------------------------------


def by_shard(rank: int, world_size: int, backend: bool) -> fsdp2.Result:
    """The model as it is written, on shards; and as Dynamo captures it."""
    case = UNEVEN["mixed"]
    torch.manual_seed(0)
    model = fxshard.shard(case.build(), units=case.units, shard_placement_fn=columns)
    run = torch.compile(model, backend="fxshard") if backend else model
    optimizer = fsdp2.adamw(model.parameters())
    losses, grads = [], []
    for step in range(2):
        loss = case.loss(run(*case.batch(rank, step)[0]))
        loss.backward()
        losses.append(loss.item())
        grads.append({n: full(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return fsdp2.Result(losses, grads, {n: full(p) for n, p in model.named_parameters()}, {})


@pytest.mark.parametrize("backend", [False, True], ids=["eager", "compiled"])
def test_sharded_models_read_their_columns(ranks: Any, backend: bool) -> None:
    alone = fsdp2.train_single(UNEVEN["mixed"], 2, 4)
    for found in ranks(4).run(by_shard, backend):
        fsdp2.assert_close(dataclasses.replace(found, losses=alone.losses), alone, rtol=1e-4)


# -- refused ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class ShardPlacementResult:
    """Of torch: a placement, and a mesh of its own."""

    placement: Shard | None
    mesh_info: Any


def refusals(rank: int, world_size: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world_size,))

    def of(fn: Any) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        said = told(lambda: fxshard.fully_shard(model[0], shard_placement_fn=fn))
        other = told(lambda: fxshard.compile(model, shard_placement_fn=fn))
        assert type(model) is nn.Sequential
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        assert said == other.replace("'0.", "'")
        return said

    def of_rank(param: Tensor) -> Shard:
        return Shard(rank if param.dim() > 1 else 0)

    def broken(param: Tensor) -> Shard:
        raise KeyError("no such thing")

    with pytest.raises(RankMismatchError, match="the model"):
        fxshard.compile(nn.Sequential(nn.Linear(4, 4)), shard_placement_fn=of_rank)
    return {
        "mesh": of(lambda p: ShardPlacementResult(Shard(0), mesh)),
        "no mesh": of(lambda p: ShardPlacementResult(Shard(0), None)),
        "too large": of(lambda p: Shard(1)),
        "too small": of(lambda p: Shard(-3)),
        "no placement": of(lambda p: 1),
        "fails": of(broken),
    }


REFUSALS = {
    "mesh": "fxshard takes FSDPMeshInfo(mesh, shard_mesh_dim=0) of a 1-D mesh, or HSDPMeshInfo(",
    "no mesh": "fxshard takes FSDPMeshInfo(mesh, shard_mesh_dim=0) of a 1-D mesh, or HSDPMeshInfo(",
    "too large": "returned Shard(dim=1) for parameter 'bias' [4], which has 1 dimensions",
    "too small": "returned Shard(dim=-3) for parameter 'weight' [4, 4]",
    "no placement": "expected None or torch.distributed.tensor.Shard(dim)",
    "fails": "failed for parameter 'weight' [4, 4] with KeyError: 'no such thing'",
}


def test_what_cannot_be_is_refused_with_what_to_do(ranks: Any) -> None:
    for found in ranks(2).run(refusals):
        assert found.keys() == REFUSALS.keys()
        for case, said in REFUSALS.items():
            assert said in found[case], (case, found[case])


def test_options_that_are_none_are_refused() -> None:
    model, args = nn.Sequential(nn.Linear(4, 4)), (torch.ones(1, 4),)
    for fn, said in {
        "columns": "expected a function of a parameter",
        (lambda: None): "expected a function of a parameter, but of this one too many",
    }.items():
        with pytest.raises(fxshard.ConfigError, match=said):
            fxshard.plan(model, args, world_size=2, shard_placement_fn=fn)
    with pytest.raises(fxshard.UnitError, match=r"'0\.wait', which is no parameter\. Did you"):
        fxshard.plan(model, args, world_size=2, shard_placement_fn={"0.wait": Shard(1)})
