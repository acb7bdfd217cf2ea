"""torch's test_fsdp_hybrid_shard.py: sharded inside of groups, replicated between them."""

import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.testing import assert_close

import fxshard
from fxshard.errors import UnitError
from tests.fsdp2 import full
from tests.oracles import count_collectives
from tests.peers.fsdp1.models import LAYERS, Transformer
from tests.peers.fsdp1.shared import compiled, ddp, grads_of, loss_of, params_of, same, same_grads
from tests.ranks import told

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
EACH = pytest.mark.parametrize("strategy", HYBRID, ids=lambda strategy: strategy.name)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin1, self.lin2, self.lin3 = (nn.Linear(10, 10) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin3(self.lin2(self.lin1(x)))


def groups(shape: tuple[int, int] = (2, 2)) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(shard, replicate) of this rank; of 2 x 2 ranks, 0 and 1 shard, 0 and 2 replicate."""
    rows = torch.arange(shape[0] * shape[1]).view(shape)
    mine = []
    for each in (rows, rows.T):
        made = {tuple(ranks): dist.new_group(ranks) for ranks in each.tolist()}
        mine.append(next(group for ranks, group in made.items() if dist.get_rank() in ranks))
    return mine[0], mine[1]


def without_groups(rank: int, world_size: int, strategy: Any) -> list[str]:
    one = dist.group.WORLD
    options: list[dict[str, Any]] = [{}, {"process_group": one}]
    return [
        told(lambda each=each: compiled(Model(), units=[], strategy=strategy, **each))
        for each in options
    ]


@EACH
def test_groups_must_be_given(ranks: Any, strategy: Any) -> None:
    for none, one in ranks(2).run(without_groups, strategy):
        assert "needs to know how 2 ranks are arranged: pass a 2-D mesh" in none
        assert "process_group is one group" in one
        assert "takes a pair (shard, replicate)" in one


def saved_and_loaded(rank: int, world_size: int) -> None:
    both = groups()

    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = compiled(Model(), units=[], strategy=HYBRID[0], process_group=both)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    model(torch.randn(2, 10)).sum().backward()
    optimizer.step()
    other, loaded = made()
    other.load_state_dict(model.state_dict())
    state = model.optim_state_dict(optimizer)
    other.optim_state_dict_to_load(loaded, state, load_directly=True)
    same(other, model)
    for values, want in zip(
        loaded.state_dict()["state"].values(),
        optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        for name, value in values.items():
            assert_close(full(value), full(want[name]))


def test_states_saved_and_loaded(ranks: Any) -> None:
    ranks(4).run(saved_and_loaded)


def synced(rank: int, world_size: int) -> None:
    module = Model()
    for layer in (module.lin1, module.lin2, module.lin3):
        nn.init.constant_(layer.weight, rank)
    options = {"strategy": HYBRID[0], "process_group": groups(), "sync_module_states": True}
    model = compiled(module, units=[], **options)
    for name, param in params_of(model).items():
        if name.endswith("weight"):
            assert not param.any()


def test_states_of_rank_0(ranks: Any) -> None:
    ranks(4).run(synced)


GIVEN = pytest.mark.parametrize("given", ["mesh", "groups", "environment"])


def arranged(shape: tuple[int, int], given: str) -> dict[str, Any]:
    if given == "mesh":
        return {"mesh": init_device_mesh("cpu", shape)}
    return {"process_group": groups(shape)} if given == "groups" else {}


def on_machines(shape: tuple[int, int]) -> Any:
    """Where nothing else is given, the ranks of a machine are those that shard."""
    return mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(shape[1]))


def counted(
    rank: int, world_size: int, strategy: Any, mixed: bool, shape: tuple[int, int], given: str
) -> None:
    """Each collective of a step, with its ranks; gradients are those of DDP.

    Units are the layers and what is around them; mixed: the transformer too, and what is around it
    is sharded over all ranks.
    """
    options = arranged(shape, given)

    def units(fqn: str, module: nn.Module) -> bool:
        layer = isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
        return layer or (mixed and fqn == "transformer")

    inside = dict.fromkeys(("transformer", "transformer.*.layers.*"), strategy)
    by_unit = {"": ShardingStrategy.FULL_SHARD} | inside if mixed else strategy
    with on_machines(shape):
        model = compiled(Transformer(), units=units, strategy=by_unit, **options)
    loss_of(model).backward()  # which traces
    model.zero_grad()
    with count_collectives() as forward:
        loss = loss_of(model)
    with count_collectives() as backward:
        loss.backward()

    everywhere = tuple(range(world_size))
    column, row = rank % shape[1], rank // shape[1] * shape[1]
    shards = tuple(range(row, row + shape[1]))
    replicas = tuple(range(column, world_size, shape[1]))
    kept = strategy is HYBRID[1]
    around, inner = (everywhere, 5) if mixed else (shards, 4)
    once = Counter({("all_gather", around): 1}) + Counter({("all_gather", shards): inner})
    reduced = Counter({("reduce_scatter", ranks): n for (_, ranks), n in once.items()})
    if len(replicas) > 1:  # torch's test sees an all-reduce in a group of one
        reduced["all_reduce", replicas] = inner + (not mixed)
    again = once if not kept else Counter({("all_gather", around): 1} if mixed else {})
    assert Counter((call.kind, call.ranks) for call in forward.calls) == once
    assert Counter((call.kind, call.ranks) for call in backward.calls) == again + reduced
    if given == "groups":  # they are the ones that were given
        own = {group.group_name for group in (*options["process_group"], dist.group.WORLD)}
        assert {call.group for call in (*forward.calls, *backward.calls)} <= own

    oracle = ddp(Transformer())
    loss_of(oracle).backward()
    assert all(grad.any() for grad in grads_of(oracle).values())
    same_grads(model, oracle)


MIXED = pytest.mark.parametrize("mixed", [False, True], ids=["all_hybrid", "mixed_hybrid_full"])
SHAPES = pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=["1x2", "2x2"])


@pytest.mark.sample(6)
@EACH
@MIXED
@SHAPES
@GIVEN
def test_collectives(
    ranks: Any, strategy: Any, mixed: bool, shape: tuple[int, int], given: str
) -> None:
    ranks(shape[0] * shape[1]).run(counted, strategy, mixed, shape, given)


def parity(rank: int, world_size: int, strategy: Any, given: str) -> None:
    """Beside torch's full sharding over all 4 ranks."""
    theirs = FullyShardedDataParallel(
        Transformer(), auto_wrap_policy=LAYERS, device_id=torch.device("cpu"), use_orig_params=True
    )
    with on_machines((2, 2)):
        pair = theirs, compiled(Transformer(), strategy=strategy, **arranged((2, 2), given))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4) for model in pair]
    for _ in range(5):
        losses = []
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            inputs = Transformer.get_input(model)
            losses.append(Transformer.get_loss(model, inputs, model(*inputs)))
            losses[-1].backward()
            optimizer.step()
        assert_close(losses[1], losses[0])


@EACH
@GIVEN
def test_as_full_shard(ranks: Any, strategy: Any, given: str) -> None:
    ranks(4).run(parity, strategy, given)


def test_options_of_a_policy_that_are_refused() -> None:
    """As FSDP1's policy gives them: with what to do instead."""
    options = {"mixed_precision": None, "sharding_strategy": ShardingStrategy.NO_SHARD}
    policy = CustomPolicy(lambda module: options if isinstance(module, nn.Linear) else False)
    with pytest.raises(UnitError, match=r"options of its own.*differ by strategy=, reshard_after"):
        fxshard.plan(Model(), (torch.ones(2, 10),), world_size=4, units=policy)
