"""What scripts for FSDP do and no script for fxshard has to: the effects that make it so, on ranks.

Rows of docs/coming-from-fsdp.md name these tests.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError
from tests.fsdp2 import full
from tests.oracles import count_collectives

ROWS, WIDTH, UNITS = 3, 5, 3  # rows of a rank's batch; a width that two ranks do not divide


def net() -> Any:
    """float32 [batch, WIDTH] -> the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH), nn.LayerNorm(WIDTH))


def compiled() -> Any:
    return fxshard.compile(net(), units=["0", "2"])


def shard(model: Any) -> Any:
    for layer in (model[0], model[2]):
        fxshard.fully_shard(layer)
    return fxshard.fully_shard(model)


def batch(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def joined(world_size: int, step: int = 0) -> Tensor:
    return torch.cat([batch(rank, step) for rank in range(world_size)])


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.arange(WIDTH)).square().mean()


def assert_same_grads(model: nn.Module, alone: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert_close(full(mine.grad), theirs.grad, rtol=1e-5, atol=1e-6)


# -- one root --------------------------------------------------------------------------------------


def roots(rank: int, world_size: int) -> None:
    def found(model: nn.Module) -> list[nn.Module]:
        return [each for each in model.modules() if isinstance(each, fxshard.FxshardModule)]

    model = compiled()
    assert found(model) == [model]
    model = net()
    fxshard.fully_shard(model[0])
    assert found(model) == [model[0]]
    fxshard.fully_shard(model)
    assert found(model) == [model]


def test_one_module_is_the_root(ranks: Any) -> None:
    """`isinstance` knows it; a block is one until the model around it is given."""
    ranks(2).run(roots)


# -- states ----------------------------------------------------------------------------------------


def modes(rank: int, world_size: int) -> None:
    """Each method gives its own kind, whatever was called before; `load_state_dict` takes both."""
    model, alone = compiled(), net()
    want = alone.state_dict()
    for _ in range(2):
        with count_collectives() as seen:
            sharded = model.state_dict()
        assert seen.count() == 0 and all(isinstance(value, DTensor) for value in sharded.values())
        whole = model.full_state_dict(rank0_only=False)
        for name, value in want.items():
            assert type(whole[name]) is Tensor and torch.equal(whole[name], value)
            assert torch.equal(full(sharded[name]), value)
        kept = {name: value.detach().clone() for name, value in sharded.items()}
        for state in (whole, kept):
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            model.load_state_dict(state)
            assert_close(model(batch(rank)), alone(batch(rank)))
    # torch's own functions look for FSDP1's class, and find none, as in a model of FSDP2.
    kind, owns = StateDictType.FULL_STATE_DICT, FullyShardedDataParallel
    with warnings.catch_warnings(), owns.summon_full_params(model):
        warnings.simplefilter("ignore", FutureWarning)
        owns.set_state_dict_type(model, kind)
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        assert all(isinstance(param, DTensor) for param in model.parameters())
        with pytest.raises(KeyError), owns.state_dict_type(model, kind):
            pass
    with pytest.raises(AttributeError):
        owns.clip_grad_norm_(model, 1.0)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        owns.optim_state_dict(model, torch.optim.SGD(model.parameters()))


def test_methods_of_states_are_no_modes(ranks: Any) -> None:
    ranks(2).run(modes)


def local_parts(rank: int, world_size: int) -> None:
    """DTensors whose local tensor is this rank's rows, of parameters and of optimizer states."""
    for model in (compiled(), shard(net())):
        optimizer = torch.optim.Adam(model.parameters())
        loss_of(model(batch(rank))).backward()
        optimizer.step()
        wholes = model.full_optim_state_dict(optimizer, rank0_only=False)["state"]
        pairs = [(model.state_dict(), model.full_state_dict(rank0_only=False))]
        for name, state in model.optim_state_dict(optimizer)["state"].items():
            own = {key: value for key, value in state.items() if value.dim()}
            assert own.keys() == {"exp_avg", "exp_avg_sq"}
            pairs.append((own, wholes[name]))
        for sharded, whole in pairs:
            for name, value in sharded.items():
                assert isinstance(value, DTensor)
                rows = whole[name].chunk(world_size)
                assert torch.equal(value.to_local(), rows[rank])


def test_entries_of_sharded_states_are_dtensors_of_a_rank_s_rows(ranks: Any) -> None:
    ranks(2).run(local_parts)


def offloaded_states(rank: int, world_size: int) -> None:
    """torch's own function makes copies on the CPU of this rank's rows, and sends nothing."""
    model = compiled()
    with count_collectives() as seen:
        state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert seen.count() == 0
    for name, value in model.state_dict().items():
        mine = state[name]
        assert isinstance(mine, DTensor) and mine.placements == value.placements
        assert mine.to_local().device.type == "cpu"
        assert torch.equal(mine.to_local(), value.to_local())


def test_sharded_states_on_the_cpu(ranks: Any) -> None:
    ranks(2).run(offloaded_states)


# -- reductions ------------------------------------------------------------------------------------


def slow(world: Any) -> None:
    """This rank launches each of its reductions late."""
    reduce = world.reduce_scatter

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return reduce(*args, **kwargs)

    world.reduce_scatter = late


def ends(rank: int, world_size: int) -> None:
    """One rank is late: `.grad` of the others is complete all the same when backward returns."""
    model, alone = shard(net()), net()
    if rank == 1:
        slow(model._fxshard.world)
    for step in range(3):
        loss = loss_of(model(batch(rank, step)))
        with count_collectives() as seen:
            loss.backward()
        assert seen.count("reduce_scatter") == UNITS
        loss_of(alone(joined(world_size, step))).backward()
        assert_same_grads(model, alone)
    for each in (model, alone):
        each.zero_grad()
    for step in range(3):  # reduced once, after several backwards
        model.set_requires_gradient_sync(step == 2)
        loss = loss_of(model(batch(rank, step)))
        with count_collectives() as seen:
            loss.backward()
        assert seen.count("reduce_scatter") == (UNITS if step == 2 else 0)
        loss_of(alone(joined(world_size, step))).backward()
    assert_same_grads(model, alone)


def test_each_backward_ends_its_own_reductions(ranks: Any) -> None:
    ranks(2).run(ends)


def sums(rank: int, world_size: int) -> None:
    """What ranks are asked to compute is a sum; `.grad` is the mean."""
    model, alone = shard(net()), net()
    loss_of(alone(joined(world_size))).backward()
    found: list[str] = []
    world = model._fxshard.world
    reduce = world.reduce_scatter

    def watched(grads: Any, pair: int, group: str = "shard", op: str = "avg") -> Any:
        found.append(op)
        return reduce(grads, pair, group, op)

    world.reduce_scatter = watched
    for enable in (False, True, False):
        found.clear()
        model.zero_grad()
        for unit in (model, model[0], model[2]):
            unit.set_force_sum_reduction_for_comms(enable)
        loss_of(model(batch(rank))).backward()
        assert found == ["sum" if enable else "avg"] * UNITS
        assert_same_grads(model, alone)


def test_gradients_are_summed_and_divided_afterwards(ranks: Any) -> None:
    ranks(2).run(sums)


def unused(rank: int, world_size: int) -> None:
    """A unit that no rank's forward calls: no collective for it, and no gradient."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    torch.manual_seed(0)
    model: Any = Skips()
    for part in (model.used, model.unused):
        fxshard.fully_shard(part)
    fxshard.fully_shard(model)
    loss = loss_of(model(batch(rank)))
    with count_collectives() as seen:
        loss.backward()
    assert seen.count("reduce_scatter") == 1
    assert model.used.weight.grad is not None and model.unused.weight.grad is None
    for module in (model, model.unused):
        module.set_reduce_scatter_unused_params(False)
        with pytest.raises(ConfigError, match="ranks_may_differ=True instead"):
            module.set_reduce_scatter_unused_params(True)


def test_a_parameter_that_no_rank_uses_has_no_gradient(ranks: Any) -> None:
    ranks(2).run(unused)


# -- stages of a pipeline --------------------------------------------------------------------------


def stages(rank: int, world_size: int) -> None:
    """Two models, each sharded alone, whose micro-batches overlap: as one model in one process."""
    both: list[Callable[..., Any]] = [shard(net()), compiled()]
    alone = nn.Sequential(net(), net())
    outs: list[Tensor] = []
    for step in range(3):  # all forwards, then all backwards, the last one first
        outs.append(both[1](both[0](batch(rank, step))))
        loss_of(alone(joined(world_size, step))).backward()
    for out in reversed(outs):
        loss_of(out).backward()
    for stage, theirs in zip(both, alone, strict=True):
        assert isinstance(stage, nn.Module)
        assert_same_grads(stage, theirs)


def test_stages_of_a_pipeline_share_nothing(ranks: Any) -> None:
    ranks(2).run(stages)


# -- what is NCCL's, or an accelerator's -----------------------------------------------------------


def refused(rank: int, world_size: int) -> None:
    model, alone = shard(net()), net()
    calls: list[Callable[[Any], Any]] = [
        lambda module: module.set_allocate_memory_from_process_group_for_comm(True),
        lambda module: module.set_symm_mem_for_comm(),
    ]
    for module in (model, model[0]):
        for call in calls:
            with pytest.raises(ConfigError, match="it changes no number: leave it out"):
                call(module)
    loss_of(model(batch(rank))).backward()
    loss_of(alone(joined(world_size))).backward()
    assert_same_grads(model, alone)


def test_memory_of_nccl_is_refused_by_name(ranks: Any) -> None:
    ranks(2).run(refused)


def pins(rank: int, world_size: int) -> list[bool]:
    assert dist.is_initialized() and not torch.accelerator.is_available()
    model = fxshard.compile(net(), units=["0", "2"], offload=CPUOffloadPolicy(pin_memory=True))
    loss_of(model(batch(rank))).backward()
    found: list[Any] = [param for param in model.parameters()]
    found += [param.grad for param in found]
    return [tensor.to_local().is_pinned() for tensor in found]


def test_without_an_accelerator_nothing_is_pinned(ranks: Any) -> None:
    for found in ranks(2).run(pins):
        assert found and not any(found)
