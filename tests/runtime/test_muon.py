"""torch.optim.Muon over the shards of a model: bitwise torch's own, two all-to-alls a step."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

import fxshard
from fxshard.errors import RankMismatchError
from tests.fsdp2 import full
from tests.ranks import told
from tests.runtime.muon_cases import (
    OPTIONS,
    assert_same,
    batch,
    built,
    compiled,
    counted,
    matrices_and_rest,
    set_gradients,
    values,
)

EXCHANGE = "c10d.alltoall_base_"


def like_one_process(rank: int, world_size: int, name: str) -> None:
    """Three steps with a learning rate that changes, of what the user made, and of the option's."""
    for by_option in (False, True):
        model = compiled(name, optimizer=matrices_and_rest)
        ours = matrices_and_rest(model.named_parameters())
        if by_option:
            ours = [model.optimizer]
        plain = built()
        theirs = matrices_and_rest(plain.named_parameters())
        schedules = [LambdaLR(each, lambda step: 0.5**step) for each in (*ours, *theirs)]
        for step in range(3):
            model(batch(rank, step)).backward()
            set_gradients(plain, model)
            for each in theirs:
                each.step()
            found = [counted(each.step) for each in ours]
            assert found == ([{EXCHANGE: 2}] if by_option else [{EXCHANGE: 2}, {}])
            for schedule in schedules:
                schedule.step()
            assert_same(values(model, ours), values(plain, theirs))
            for each in (*ours, *theirs):
                each.zero_grad()


@pytest.mark.parametrize("ranks_of", [2, 3])
def test_three_steps_are_bitwise_those_of_one_process(ranks: Any, ranks_of: int) -> None:
    """Given the gradients that the ranks have; matrices of fewer rows than ranks among them."""
    ranks(ranks_of).run(like_one_process, "uneven")


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "uneven"])
@pytest.mark.sample(2)
def test_cut_otherwise_they_are_too(ranks: Any, name: str) -> None:
    ranks(3).run(like_one_process, name)


def like_the_joined_batch(rank: int, world_size: int) -> float:
    model, plain = compiled(), built()
    ours = matrices_and_rest(model.named_parameters())
    theirs = matrices_and_rest(plain.named_parameters())
    for step in range(3):
        model(batch(rank, step)).backward()
        plain(torch.cat([batch(r, step) for r in range(world_size)])).backward()
        for each in (*ours, *theirs):
            each.step()
            each.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((full(mine.detach()) - other).abs().max()) for mine, other in pairs)


def test_they_are_those_of_the_joined_batch_within_rounding(ranks: Any) -> None:
    """An element of bf16 has 8 bits, and the learning rate is 0.1."""
    assert max(ranks(2).run(like_the_joined_batch)) < 3 * 0.1 * 2**-7


def in_a_hybrid_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = compiled(strategy="hybrid_shard", mesh=mesh), built()
    ours = matrices_and_rest(model.named_parameters())
    theirs = matrices_and_rest(plain.named_parameters())
    for step in range(2):
        model(batch(rank, step)).backward()
        set_gradients(plain, model)
        assert counted(ours[0].step) == {EXCHANGE: 2}
        for each in (ours[1], *theirs):
            each.step()
        assert_same(values(model, ours), values(plain, theirs))
    seen: list[Any] = [None] * world_size
    dist.all_gather_object(seen, [p.to_local() for p in model.parameters()])
    assert_same(seen[rank], seen[(rank + 2) % 4])  # the other replica


@pytest.mark.slow
def test_replicas_of_a_hybrid_mesh_step_alike(ranks: Any) -> None:
    ranks(4).run(in_a_hybrid_mesh)


def on_one_rank_and_replicated(rank: int, world_size: int) -> None:
    for options in ({}, {"strategy": "no_shard"}):
        model, plain = compiled(**options), built()
        ours, theirs = (matrices_and_rest(m.named_parameters()) for m in (model, plain))
        model(batch(rank, 0)).backward()
        set_gradients(plain, model)
        sent = {} if world_size == 1 or options else {EXCHANGE: 2}
        assert counted(ours[0].step) == sent
        for each in (ours[1], *theirs):
            each.step()
        assert_same(values(model, ours), values(plain, theirs))


@pytest.mark.parametrize("ranks_of", [1, 2])
def test_full_parameters_are_stepped_where_they_are(ranks: Any, ranks_of: int) -> None:
    ranks(ranks_of).run(on_one_rank_and_replicated)


def scaled(rank: int, world_size: int) -> None:
    """AdamW's foreach form; learning rates that are tensors; a GradScaler around both."""
    model, plain = compiled(), built()
    ours, theirs = (
        [
            Muon([p for p in m.parameters() if p.dim() == 2], lr=torch.tensor(0.1)),  # type: ignore[arg-type]
            AdamW([p for p in m.parameters() if p.dim() != 2], foreach=True),
        ]
        for m in (model, plain)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        scaler.scale(model(batch(rank, step))).backward()
        for each in ours:
            scaler.unscale_(each)
        set_gradients(plain, model)
        for mine, other in zip(ours, theirs, strict=True):
            scaler.step(mine)
            other.step()
            mine.zero_grad()
        scaler.update()
        assert_same(values(model, ours), values(plain, theirs))


def test_scalers_foreach_and_learning_rates_that_are_tensors(ranks: Any) -> None:
    ranks(2).run(scaled)


def in_bf16(rank: int, world_size: int) -> None:
    """torch's kernels round the last elements of a tensor otherwise: a rank's are others."""
    model, plain = fxshard.compile(built().to(torch.bfloat16)), built().to(torch.bfloat16)
    ours, theirs = (Muon([p for p in m.parameters() if p.dim() == 2]) for m in (model, plain))
    model(batch(rank, 0).to(torch.bfloat16)).backward()
    set_gradients(plain, model)
    ours.step()
    theirs.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine.detach()), other.detach(), rtol=2**-7, atol=0)
        if mine in ours.state:
            momenta = ours.state[mine]["momentum_buffer"], theirs.state[other]["momentum_buffer"]
            assert torch.equal(full(momenta[0]), momenta[1])


def test_in_bf16_an_element_differs_by_its_last_bit(ranks: Any) -> None:
    ranks(2).run(in_bf16)


def test_in_one_process_it_is_torchs() -> None:
    model, plain = compiled(world_size=2), built()
    ours, theirs = (matrices_and_rest(m.named_parameters()) for m in (model, plain))
    model(batch(0, 0)).backward()
    set_gradients(plain, model)
    for each in (*ours, *theirs):
        each.step()
    assert_same(values(model, ours), values(plain, theirs))


def with_blocks_alone(rank: int, world_size: int) -> None:
    """Each block is a root of its own, and a closure computes the gradients."""
    model, plain = built(), built()
    for block in (model.tall, model.wide, model.short, model.last):
        fxshard.fully_shard(block)
    ours, theirs = (Muon([p for p in m.parameters() if p.dim() == 2]) for m in (model, plain))

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(batch(rank, 0))
        loss.backward()
        set_gradients(plain, model)
        return loss

    assert float(ours.step(closure)) > 0  # type: ignore[arg-type]
    theirs.step()
    assert_same(values(model, [ours]), values(plain, [theirs]))


def test_fully_shard_on_blocks_and_closures(ranks: Any) -> None:
    ranks(2).run(with_blocks_alone)


# -- states ----------------------------------------------------------------------------------------


def saved(rank: int, world_size: int, path: str) -> list[torch.Tensor]:
    model = compiled(optimizer=matrices_and_rest)
    for step in range(2):
        model(batch(0, step)).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    dcp.save({"optim": get_optimizer_state_dict(model, model.optimizer)}, checkpoint_id=path)
    fxshard.save_checkpoint(f"{path}/ours", model, model.optimizer)
    return [value.detach() for value in values(model, [model.optimizer])]


def loaded(rank: int, world_size: int, path: str) -> list[torch.Tensor]:
    model = compiled(optimizer=matrices_and_rest)
    fxshard.load_checkpoint(f"{path}/ours", model, model.optimizer)
    found = [value.detach().clone() for value in values(model, [model.optimizer])]
    other = compiled(optimizer=matrices_and_rest)  # the same by torch's own functions
    state = get_optimizer_state_dict(other, other.optimizer)
    dcp.load({"optim": state}, checkpoint_id=path)
    set_optimizer_state_dict(other, other.optimizer, state)
    other.load_state_dict(model.state_dict())
    assert_same(values(other, [other.optimizer]), found)
    for each in (model, other):  # and both go on
        each(batch(0, 2)).backward()
        each.optimizer.step()
    assert_same(values(model, [model.optimizer]), values(other, [other.optimizer]))
    momentum = model.optimizer.state[model.tall.weight]["momentum_buffer"]
    assert isinstance(momentum, DTensor) and momentum.placements == model.tall.weight.placements
    return found


def test_states_are_saved_on_2_ranks_and_loaded_on_3(ranks: Any, tmp_path: Path) -> None:
    want = ranks(2).run(saved, str(tmp_path))[0]
    for found in ranks(3).run(loaded, str(tmp_path)):
        assert_same(found, want)


def from_one_process(rank: int, world_size: int) -> None:
    """torch's state_dict of a plain model: each rank takes its rows of the momentum."""
    model, plain = compiled(), built()
    ours, theirs = (Muon([p for p in m.parameters() if p.dim() == 2]) for m in (model, plain))
    for step in range(2):
        model(batch(rank, step)).backward()
        set_gradients(plain, model)
        theirs.step()
        if step == 0:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                mine.data.copy_(fxshard_rows(other, mine))
        else:
            ours.step()
        ours.zero_grad()
    weights = [m.tall.weight for m in (model, plain)]
    assert torch.equal(full(weights[0].detach()), weights[1])


def fxshard_rows(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.detach(), like.device_mesh, like.placements)


def test_a_state_of_one_process_is_taken(ranks: Any) -> None:
    ranks(2).run(from_one_process)


# -- what is refused -------------------------------------------------------------------------------


def test_muon_in_backward_is_refused() -> None:
    for optimizer in (lambda params: Muon(params), matrices_and_rest):
        with pytest.raises(fxshard.ConfigError, match="Muon's update needs all rows of a matrix"):
            fxshard.compile(
                torch.nn.Linear(4, 4, bias=optimizer is matrices_and_rest),
                world_size=2,
                optimizer=optimizer,
                optimizer_in_backward=True,
            )


def momentum_in_bf16(rank: int, world_size: int) -> str:
    model = fxshard.compile(built().to(torch.bfloat16))
    optimizer = Muon([model.tall.weight], nesterov=False)
    model(batch(rank, 0).to(torch.bfloat16)).backward()
    return told(optimizer.step)


def one_rank_without_a_gradient(rank: int, world_size: int) -> str:
    model = compiled()
    optimizer = Muon([p for p in model.parameters() if p.dim() == 2])
    model(batch(rank, 0)).backward()
    if rank == 1:
        model.wide.weight.grad = None
    return told(optimizer.step)


def test_what_torch_spoils_and_ranks_that_differ_are_refused(ranks: Any) -> None:
    for found in ranks(2).run(momentum_in_bf16):
        assert "'tall.weight'" in found and "Give nesterov=True" in found
    for found in ranks(2).run(one_rank_without_a_gradient):
        assert found.startswith(RankMismatchError.__name__) and "wide.weight" in found


def test_torch_itself_spoils_that_momentum() -> None:
    param = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16))
    optimizer = Muon([param], nesterov=False)
    param.grad = torch.full_like(param, 8.0)
    optimizer.step()
    assert float(optimizer.state[param]["momentum_buffer"].norm()) == pytest.approx(1, rel=0.01)


def under_fsdp2(rank: int, world_size: int) -> Any:
    model = fully_shard(built())
    optimizer = Muon([p for p in model.parameters() if p.dim() == 2])
    model(batch(rank, 0)).backward()
    try:
        return sum(counted(optimizer.step).values())
    except RuntimeError as error:
        return str(error)


def test_fsdp2_refuses_it_or_sends_more(ranks: Any) -> None:
    for found in ranks(2).run(under_fsdp2):
        assert found > 8 if isinstance(found, int) else "require placement changes" in found


def test_several_optimizers_are_one() -> None:
    model = compiled(world_size=2, optimizer=matrices_and_rest)
    muon, adamw = model.optimizer.members
    assert isinstance(muon, Muon) and isinstance(adamw, AdamW)
    assert model.optimizer.param_groups == muon.param_groups + adamw.param_groups
    with pytest.raises(ValueError, match=r"one of \.members"):
        model.optimizer.add_param_group({"params": []})
    twice = [AdamW(model.parameters()), AdamW(model.parameters())]
    with pytest.raises(fxshard.ConfigError, match="more than one parameter group"):
        fxshard.plan(built(), (batch(0, 0),), world_size=2, optimizer=lambda _: twice).dump()
