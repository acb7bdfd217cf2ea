"""torch's test_fsdp_hybrid_shard.py: sharded inside of groups, replicated between them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.testing import assert_close

import fxshard
from fxshard.errors import UnitError
from tests.fsdp2 import full
from tests.oracles import count_collectives
from tests.peers.fsdp1.models import Transformer
from tests.peers.fsdp1.shared import compiled, loss_of, params_of, same
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


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(shard, replicate) of 4 ranks: 0 and 1 shard, 0 and 2 replicate."""
    made = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    rank = dist.get_rank()
    mine = [group for ranks, group in made.items() if rank in ranks]
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


def counted(
    rank: int, world_size: int, strategy: Any, by_mesh: bool
) -> tuple[list[str], list[str]]:
    """All ranks shard; each replicates with itself alone."""
    given: dict[str, Any] = {"mesh": init_device_mesh("cpu", (1, world_size))}
    if not by_mesh:
        alone = [dist.new_group([each]) for each in range(world_size)][rank]
        given = {"process_group": (dist.group.WORLD, alone)}
    model = compiled(Transformer(), strategy=strategy, **given)
    loss_of(model).backward()
    with count_collectives() as forward:
        loss = loss_of(model)
    with count_collectives() as backward:
        loss.backward()
    return forward.kinds(), backward.kinds()


BY_MESH = pytest.mark.parametrize("by_mesh", [True, False], ids=["mesh", "groups"])


@EACH
@BY_MESH
def test_collectives(ranks: Any, strategy: Any, by_mesh: bool) -> None:
    """Each of the 5 units is reduce-scattered; one replica needs no all-reduce."""
    for forward, backward in ranks(2).run(counted, strategy, by_mesh):
        assert forward.count("all_gather") == 5
        assert backward.count("reduce_scatter") == 5
        assert backward.count("all_gather") == (0 if strategy is HYBRID[1] else 5)
        assert backward.count("all_reduce") == 0


def parity(rank: int, world_size: int, strategy: Any) -> None:
    """Beside full sharding over all 4 ranks."""
    mesh = init_device_mesh("cpu", (2, 2))
    pair = compiled(Transformer()), compiled(Transformer(), strategy=strategy, mesh=mesh)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4) for model in pair]
    for _ in range(5):
        losses = []
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(loss_of(model))
            losses[-1].backward()
            optimizer.step()
        assert_close(losses[1], losses[0])


@EACH
def test_as_full_shard(ranks: Any, strategy: Any) -> None:
    ranks(4).run(parity, strategy)


def mixed(rank: int, world_size: int, strategy: Any) -> tuple[list[str], list[str]]:
    """The layers are sharded in pairs of ranks, what is around them over all four."""
    layers = dict.fromkeys(("transformer.*.layers.*",), strategy)
    mesh = init_device_mesh("cpu", (2, 2))
    given: dict[str, Any] = {"strategy": {"": ShardingStrategy.FULL_SHARD, **layers}, "mesh": mesh}
    model, plain = compiled(Transformer(), **given), compiled(Transformer())
    for each in (model, plain):
        loss_of(each).backward()
    with count_collectives() as forward:
        loss = loss_of(model)
    with count_collectives() as backward:
        loss.backward()
    loss_of(plain).backward()
    for name, param in plain.named_parameters():
        assert_close(full(model.get_parameter(name).grad), full(param.grad), msg=name)
    return forward.kinds(), backward.kinds()


@pytest.mark.sample(1)
@EACH
def test_hybrid_layers_in_a_model_that_is_fully_sharded(ranks: Any, strategy: Any) -> None:
    for forward, backward in ranks(4).run(mixed, strategy):
        assert forward.count("all_gather") == 5
        assert backward.count("all_gather") == (1 if strategy is HYBRID[1] else 5)
        assert backward.count("reduce_scatter") == 5
        assert backward.count("all_reduce") == 4


def test_options_of_a_policy_that_are_refused() -> None:
    """As FSDP1's policy gives them: with what to do instead."""
    options = {"mixed_precision": None, "sharding_strategy": ShardingStrategy.NO_SHARD}
    policy = CustomPolicy(lambda module: options if isinstance(module, nn.Linear) else False)
    with pytest.raises(UnitError, match=r"options of its own.*differ by strategy=, reshard_after"):
        fxshard.plan(Model(), (torch.ones(2, 10),), world_size=4, units=policy)
