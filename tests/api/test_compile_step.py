"""fxshard.compile_step: a training step as one program is the loop that it replaces, bit by bit.

The reference is FSDP2 in the same loop, and eager PyTorch on the joined batch.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from tests.api.compile_step_cases import (
    BF16,
    MAX_NORM,
    OPTIMIZERS,
    UNITS,
    assert_same,
    batch,
    fsdp2,
    looped,
    loss_fn,
    net,
    stepped,
)

# options of fully_shard, options of fxshard
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "apart": ({}, {"pack_bytes": 0}),
    "bf16": ({"mp_policy": BF16}, {"mixed_precision": BF16}),
    "stays": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
    "recomputed": ({}, {"checkpoint": "full"}),
    "no prefetch": ({}, {"forward_prefetch": 0, "backward_prefetch": 0, "pack_bytes": 0}),
}


def as_the_loop(rank: int, world_size: int, way: str, name: str, max_norm: float | None) -> None:
    theirs, ours = WAYS[way]
    model = fsdp2(**theirs)
    want = looped(model, OPTIMIZERS[name](model.parameters()), max_norm)
    assert [key for key in want if key.startswith("norm")] == (
        [f"norm {i}" for i in range(5)] if max_norm else []
    )
    assert all(want[key] > MAX_NORM for key in want if key.startswith("norm"))
    compiled: Any = fxshard.compile(net(), units=UNITS, **ours)
    assert_same(looped(compiled, OPTIMIZERS[name](compiled.parameters()), max_norm), want)
    plain = net()
    optimizer = OPTIMIZERS[name](plain.parameters())
    step: Any = fxshard.compile_step(
        plain, loss_fn, optimizer, max_norm=max_norm, units=UNITS, **ours
    )
    assert step.model is plain and step.optimizer is optimizer
    assert_same(stepped(step), want)


@pytest.mark.parametrize("max_norm", [MAX_NORM, None])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(4)
def test_five_steps_are_bitwise_those_of_the_loop(
    ranks: Any, way: str, max_norm: float | None
) -> None:
    ranks(2).run(as_the_loop, way, "adamw", max_norm)


@pytest.mark.parametrize("max_norm", [MAX_NORM, None])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sample(4)
def test_five_steps_of_each_optimizer(ranks: Any, name: str, max_norm: float | None) -> None:
    ranks(2).run(as_the_loop, "default", name, max_norm)


def of_fully_shard(rank: int, world_size: int) -> None:
    """A model of `fxshard.fully_shard`, in bf16; the norm alone is asked for."""
    model = fsdp2(mp_policy=BF16)
    want = looped(model, OPTIMIZERS["adamw"](model.parameters()), float("inf"))
    ours: Any = net()
    for layer in ours.layers:
        fxshard.fully_shard(layer, mp_policy=BF16)
    fxshard.fully_shard(ours, mp_policy=BF16)
    optimizer = OPTIMIZERS["adamw"](ours.parameters())
    step = fxshard.compile_step(ours, loss_fn, optimizer, max_norm=float("inf"))
    assert_same(stepped(step), want)


def test_a_model_of_fully_shard_and_a_norm_that_clips_nothing(ranks: Any) -> None:
    ranks(2).run(of_fully_shard)


def of_adamw(**options: Any) -> Any:
    """The clipped step of a new model and its AdamW."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return fxshard.compile_step(
        model, loss_fn, optimizer, max_norm=MAX_NORM, units=UNITS, **options
    )


def of_many_ranks(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Bitwise the compiled loop; FSDP2 adds up three numbers in another order."""
    model = fsdp2()
    want = looped(model, OPTIMIZERS["adamw"](model.parameters()), MAX_NORM)
    compiled = fxshard.compile(net(), units=UNITS, **options)
    loop = looped(compiled, OPTIMIZERS["adamw"](compiled.parameters()), MAX_NORM)
    step = of_adamw(**options)
    found = stepped(step)
    assert_same(found, loop)
    for key, value in want.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("options", [{}, {"pack_bytes": 0}], ids=["packed", "apart"])
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.sample(2)
def test_norms_of_more_ranks_add_up_in_the_same_order(
    ranks: Any, world_size: int, options: dict[str, Any]
) -> None:
    ranks(world_size).run(of_many_ranks, options)


def beside_eager(rank: int, world_size: int) -> None:
    """The mean of the ranks' losses is that of the joined batch."""
    eager = net()
    reference = OPTIMIZERS["adamw"](eager.parameters())
    step = of_adamw()
    for number in range(5):
        parts = [batch(each, number) for each in range(world_size)]
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        reference.zero_grad()
        total = loss_fn(eager(joined[0]), joined[1])
        total.backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), MAX_NORM)
        reference.step()
        mine = step(*parts[rank])
        with torch.no_grad():
            mean = mine.clone()
            torch.distributed.all_reduce(mean)
            torch.testing.assert_close(mean / world_size, total.detach())
        torch.testing.assert_close(step.grad_norm, norm)
    for ours, theirs in zip(step.model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def test_steps_are_those_of_eager_on_the_joined_batch(ranks: Any) -> None:
    ranks(2).run(beside_eager)
    ranks(3).run(beside_eager)


def grouped(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Two groups of their own rates, and a schedule."""
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    weights = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    groups: Any = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}]
    made = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    return made, torch.optim.lr_scheduler.ExponentialLR(made, 0.5)


def scheduled(rank: int, world_size: int, before: bool) -> None:
    model = fsdp2()
    optimizer, scheduler = grouped(model)
    want = looped(model, optimizer, MAX_NORM, scheduler=scheduler)
    plain: Any = net()
    if not before:
        plain = fxshard.compile(plain, units=UNITS)
    optimizer, scheduler = grouped(plain)
    options: dict[str, Any] = {"units": UNITS} if before else {}
    step: Any = fxshard.compile_step(plain, loss_fn, optimizer, max_norm=MAX_NORM, **options)
    assert_same(stepped(step, scheduler=scheduler), want)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 32, 3e-3 / 32]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.filterwarnings("error")
def test_groups_and_schedulers_of_an_optimizer_made_before_or_after_sharding(
    ranks: Any, before: bool
) -> None:
    ranks(2).run(scheduled, before)


def goes_on(rank: int, world_size: int, folder: str) -> None:
    """After two steps and a checkpoint, a fresh step continues; so does the plain loop."""
    model = fsdp2()
    want = looped(model, OPTIMIZERS["adamw"](model.parameters()), MAX_NORM, steps=4)

    step = of_adamw()
    for number in range(2):
        step(*batch(rank, number))
    fxshard.save_checkpoint(folder, step.model, step.optimizer)
    state: Any = get_optimizer_state_dict(step.model, step.optimizer)
    assert {"exp_avg", "exp_avg_sq", "step"} == set(state["state"]["first.weight"])
    other = of_adamw()
    fxshard.load_checkpoint(folder, other.model, other.optimizer)
    for each in (step, other):
        for number in (2, 3):
            each(*batch(rank, number))
        for (name, ours), (_, theirs) in zip(
            each.model.named_parameters(), model.named_parameters(), strict=True
        ):
            assert torch.equal(ours.full_tensor(), theirs.full_tensor()), name
            assert torch.equal(ours.full_tensor(), want[f"model.{name}"]), name


def test_checkpoints_hold_the_state_of_the_user_s_optimizer(ranks: Any, tmp_path: Any) -> None:
    ranks(2).run(goes_on, str(tmp_path))


def mixed(rank: int, world_size: int) -> None:
    """Steps, evaluation and the plain loop in turn, on one model and one optimizer."""
    model = fsdp2()
    reference = OPTIMIZERS["adamw"](model.parameters())
    step = of_adamw()
    for number in range(4):
        x, y = batch(rank, number)
        model.zero_grad()
        theirs = loss_fn(model(x), y)
        theirs.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        reference.step()
        assert torch.equal(step(x, y), theirs)
        with torch.no_grad():
            assert torch.equal(step.model(x), model(x))
        model.reshard()  # FSDP2's root stays as it was gathered for a forward without a backward
    x, y = batch(rank, 9)
    loss_fn(step.model(x), y).backward()
    with pytest.raises(fxshard.StepError, match="has a gradient from outside"):
        step(x, y)
    for param in step.model.parameters():
        param.grad = None
    small = x[:2], y[:2]  # a program of its own
    model.zero_grad()
    theirs = loss_fn(model(small[0]), small[1])
    assert torch.equal(step(*small), theirs)


def test_steps_beside_calls_of_the_model(ranks: Any) -> None:
    ranks(2).run(mixed)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(self.net(x), target)


def test_a_model_that_returns_its_loss_and_all_ranks_in_one_process() -> None:
    model, eager = WithLoss(), WithLoss()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    reference = OPTIMIZERS["adamw"](eager.parameters())
    step: Any = fxshard.compile_step(model, None, optimizer, max_norm=MAX_NORM, world_size=2)
    for number in range(5):
        reference.zero_grad()
        loss = eager(*batch(0, number))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), MAX_NORM)
        reference.step()
        torch.testing.assert_close(step(*batch(0, number)), loss.detach())
        torch.testing.assert_close(step.grad_norm, norm)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def hybrid(rank: int, world_size: int, strategy: str) -> None:
    """Norms are summed over the ranks that share parameters, and those alone."""
    mesh = None
    options: dict[str, Any] = {}
    if strategy == "hybrid_shard":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        options = {"mesh": mesh}
    compiled: Any = fxshard.compile(net(), units=UNITS, strategy=strategy, **options)  # type: ignore[arg-type]
    eager = net()
    reference = OPTIMIZERS["adamw"](eager.parameters())
    plain = net()
    step: Any = fxshard.compile_step(
        plain,
        loss_fn,
        OPTIMIZERS["adamw"](plain.parameters()),
        max_norm=MAX_NORM,
        units=UNITS,
        strategy=strategy,  # type: ignore[arg-type]
        **options,
    )
    optimizer = OPTIMIZERS["adamw"](compiled.parameters())
    for number in range(3):
        parts = [batch(each, number) for each in range(world_size)]
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        for model, each, given in ((eager, reference, joined), (compiled, optimizer, parts[rank])):
            each.zero_grad()
            loss = loss_fn(model(given[0]), given[1])
            loss.backward()
            if model is eager:
                norm = nn.utils.clip_grad_norm_(eager.parameters(), MAX_NORM)
            else:
                same = compiled.clip_grad_norm_(MAX_NORM)
            each.step()
        assert torch.equal(step(*parts[rank]), loss.detach())
        assert torch.equal(step.grad_norm, same)
        torch.testing.assert_close(step.grad_norm, norm)
    for ours, theirs, loops in zip(
        step.model.parameters(), eager.parameters(), compiled.parameters(), strict=True
    ):
        torch.testing.assert_close(ours.full_tensor(), theirs)
        assert torch.equal(ours.full_tensor(), loops.full_tensor())


@pytest.mark.parametrize("strategy", ["hybrid_shard", "no_shard"])
def test_other_strategies(ranks: Any, strategy: str) -> None:
    ranks(4 if strategy == "hybrid_shard" else 2).run(hybrid, strategy)


def alone(rank: int, world_size: int) -> None:
    as_the_loop(rank, world_size, "default", "adamw", MAX_NORM)


def test_one_rank(ranks: Any) -> None:
    ranks(1).run(alone)
