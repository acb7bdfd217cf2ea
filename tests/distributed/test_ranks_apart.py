"""A collective method of the model on some ranks only: an error on all that names it, no abort."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close

import fxshard
from tests.fsdp2 import full
from tests.ranks import told

BATCH = torch.randn(2, 8)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 2))


def summon(model: Any, optimizer: Any, path: str) -> None:
    with model.summon_full_params():
        pass


METHODS: dict[str, Callable[[Any, Any, str], Any]] = {
    "full_state_dict": lambda model, optimizer, path: model.full_state_dict(),
    "full_optim_state_dict": lambda model, optimizer, path: model.full_optim_state_dict(optimizer),
    "clip_grad_norm_": lambda model, optimizer, path: model.clip_grad_norm_(1.0),
    "summon_full_params": summon,
    "save_checkpoint": lambda model, *state: fxshard.save_checkpoint(state[-1], model, *state[:-1]),
    "load_checkpoint": lambda model, *state: fxshard.load_checkpoint(state[-1], model, *state[:-1]),
}


def apart(rank: int, world_size: int, path: str, mine: str, theirs: str) -> str:
    """What each rank is told, when rank 0 does one thing and rank 1 another, after a step."""
    model = fxshard.compile(build())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(BATCH).sum().backward()
    optimizer.step()
    does = (mine, theirs)[rank]
    if does == "forward":
        return told(lambda: model(BATCH).sum().backward())
    return told(lambda: METHODS[does](model, optimizer, path))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample(2)
def test_a_method_on_one_rank_while_the_other_calls_the_model(
    hasty: Any, name: str, first: bool, tmp_path: Path
) -> None:
    pair = (name, "forward") if first else ("forward", name)
    found = hasty(2).run(apart, str(tmp_path), *pair)
    called, went_on = found if first else reversed(found)
    alone = 0 if first else 1
    assert called.startswith("RankMismatchError") and f"rank {alone} would do" in called, called
    assert name in called and "a call of the model" in called
    assert went_on.startswith("RankMismatchError"), went_on
    assert f"rank {alone} waits for all ranks to agree on what they do to the model" in went_on


OPTIONS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "no_shard": {"strategy": "no_shard"},  # its forward has no collectives
    "kept": {"reshard_after_forward": False},
}


def skips_backward(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    """Rank 0 alone leaves out the backward of the second step: ``if loss.isnan(): continue``."""
    model = fxshard.compile(build(), **options)

    def step(number: int) -> None:
        loss = model(BATCH).sum()
        if rank or number != 1:
            loss.backward()

    return [told(lambda number=number: step(number)) for number in range(3)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sample(2)
def test_a_rank_that_leaves_out_a_backward_alone(hasty: Any, name: str) -> None:
    """Its next gathers would meet what the others reduce."""
    first, second = hasty(2).run(skips_backward, OPTIONS[name])
    assert first[:2] == ["no error"] * 2 and second[0] == "no error"
    asks = "a call of the model before the backward of the last one"
    assert first[2].startswith("RankMismatchError: rank 0 would do something else"), first
    assert f"they have 'a call of the model, or a backward', it has '{asks}'" in first[2]
    assert second[1].startswith("RankMismatchError: a collective failed on rank 1"), second
    assert "rank 0 waits for all ranks to agree on what they do to the model" in second[1]


def skips_behind_others(rank: int, world_size: int, how: str, options: dict[str, Any]) -> list[str]:
    """Rank 0 leaves out a backward that is not that of the call before."""
    model = fxshard.compile(build(), **options)

    def step(number: int) -> None:
        losses = [model(BATCH).sum() for _ in range(2 if how == "two" else 1)]
        if how == "eval":
            with torch.no_grad():
                model(BATCH)
        for i, loss in enumerate(losses):
            if rank or number != 1 or i < len(losses) - 1:
                loss.backward()

    return [told(lambda number=number: step(number)) for number in range(3)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("how", ["eval", "two"])
@pytest.mark.sample(2)
def test_a_rank_that_leaves_out_an_earlier_backward_alone(hasty: Any, how: str, name: str) -> None:
    first, second = hasty(2).run(skips_behind_others, how, OPTIONS[name])
    assert first[:2] == ["no error"] * 2 and second[0] == "no error"
    assert first[2].startswith("RankMismatchError: rank 0 would do something else"), first
    assert second[1].startswith("RankMismatchError: a collective failed on rank 1"), second


def dropped(rank: int, world_size: int) -> list[int]:
    """How many backwards are waited for after each of some calls with gradients."""
    model = fxshard.compile(build())
    counts = []
    for number in range(4):
        loss = None  # that of the call before goes
        loss = model(BATCH).sum()
        if number == 1:
            kept = loss
        counts.append(len(model._fxshard.world._due))
    kept.backward()
    loss.backward()
    model(BATCH).sum().backward()
    return [*counts, len(model._fxshard.world._due)]


def test_forwards_that_all_ranks_drop_are_forgotten(ranks: Any) -> None:
    """A call waits for all ranks only while a backward of an earlier one may come."""
    first, second = ranks(2).run(dropped)
    assert first == second == [1, 1, 2, 2, 0]


def refuses_alone(rank: int, world_size: int, how: str) -> list[str]:
    options: dict[str, Any] = {}
    if how == "hook":
        options = {"optimizer": partial(torch.optim.SGD, lr=0.1), "optimizer_in_backward": True}
    model = fxshard.compile(build(), **options)

    def step() -> None:
        model(BATCH).sum().backward()

    found = [told(step)]
    if rank and how == "hook":
        next(model.parameters()).register_hook(lambda grad: grad)
    elif rank:
        found.append(told(lambda: model(BATCH.to_sparse())))
        return found
    return [*found, told(step)]


@pytest.mark.parametrize(("how", "said"), [("hook", "StepError"), ("input", "CaptureError")])
def test_what_one_rank_refuses_is_told(hasty: Any, how: str, said: str) -> None:
    first, second = hasty(2).run(refuses_alone, how)
    assert first[0] == second[0] == "no error"
    assert first[1].startswith("RankMismatchError"), first
    assert second[1].startswith("RankMismatchError"), second
    assert "refused" in second[1] and said in second[1]


def calls_before_backwards(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    """Two calls and their backwards, one that is dropped, and one without gradients between."""
    model = fxshard.compile(build(), **options)
    batches = torch.randn(3, world_size, 2, 8, generator=torch.Generator().manual_seed(0))
    first, second, dropped = (model(batch[rank]).sum() for batch in batches)
    with torch.no_grad():
        model(BATCH)
    (first + 2 * second).backward()
    del dropped
    model(batches[2, rank]).sum().backward()
    return [full(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIONS)
def test_calls_in_front_of_backwards_on_all_ranks(ranks: Any, name: str) -> None:
    found = ranks(2).run(calls_before_backwards, OPTIONS[name])
    eager = build()
    x = torch.randn(3, 2, 2, 8, generator=torch.Generator().manual_seed(0))
    for weight, batch in zip((1, 2, 1), x, strict=True):
        (weight * eager(batch.flatten(0, 1)).sum() / 2).backward()
    for grads in found:
        assert_close(grads, [p.grad for p in eager.parameters()])


def test_two_methods(hasty: Any, tmp_path: Path) -> None:
    for said in hasty(2).run(apart, str(tmp_path), "full_state_dict", "clip_grad_norm_"):
        assert said.startswith("RankMismatchError: ranks differ in what they do to the model")
        assert "'full_state_dict'" in said and "'clip_grad_norm_'" in said


def test_methods_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    for name in METHODS:
        assert ranks(2).run(apart, str(tmp_path), name, name) == ["no error"] * 2


class Critic(nn.Module):
    """With another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def value(self, x: Tensor) -> Tensor:
        return self.a(x).sum()


def registered(rank: int, world_size: int, apart: bool) -> str:
    """Rank 1 runs a registered method, with gradients; rank 0 the model, or that method too."""
    model: Any = fxshard.compile(Critic())
    fxshard.register_fsdp_forward_method(model, "value")
    model(BATCH).sum().backward()
    return told(lambda: (model.value if rank or not apart else model)(BATCH).sum().backward())


def test_a_registered_method_on_one_rank_while_the_other_calls_the_model(hasty: Any) -> None:
    went_on, called = hasty(2).run(registered, True)
    assert called.startswith("RankMismatchError: rank 1 would do something else"), called
    assert "a method that runs on unsharded parameters" in called
    assert "a call of the model" in called
    assert went_on.startswith("RankMismatchError"), went_on
    assert hasty(2).run(registered, False) == ["no error"] * 2


def gone(rank: int, world_size: int, made_by: str) -> list[str]:
    """What a rank that has left the process group is told, reading parameters with and without
    gradients, and reducing gradients.
    """
    model: Any = getattr(fxshard, made_by)(build())
    model(BATCH).sum().backward()
    early = model[0](torch.ones(1, 8)).sum() if made_by == "compile" else model(BATCH).sum()
    runtime = model._fxshard if made_by == "compile" else model._fxshard_runtime
    runtime.world._leave("was told to")
    said = [told(early.backward)]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            said.append(told(lambda: model[0](torch.ones(1, 8))))
            said.append(told(lambda: model[0].bias + torch.ones(64)))
            said.append(told(lambda: model(BATCH)))
    return said


@pytest.mark.parametrize("made_by", ["compile", "shard"])
def test_a_rank_that_has_left_reads_nothing(hasty: Any, made_by: str) -> None:
    for said in hasty(2).run(gone, made_by):
        for text in said:
            assert text.startswith("RankMismatchError: this rank has left the process group"), said


# -- what all ranks must have alike ----------------------------------------------------------------


def clip_some(rank: int, world_size: int, norm_type: float) -> tuple[str, str]:
    """What each rank is told of gradients that rank 1 lacks one of; then with all of them."""
    model: Any = fxshard.compile(build())
    model(BATCH + rank).sum().backward()
    kept = model[1].weight.grad
    if rank == 1:
        model[1].weight.grad = None
    first = told(lambda: model.clip_grad_norm_(1.0, norm_type))
    model[1].weight.grad = kept
    return first, told(lambda: model.clip_grad_norm_(1.0, norm_type))


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.sample(1)
def test_gradients_of_other_parameters_are_not_clipped(hasty: Any, norm_type: float) -> None:
    for first, second in hasty(2).run(clip_some, norm_type):
        assert first.startswith("RankMismatchError: ranks differ in what they do"), first
        assert "rank 0 has 'a gradient of 1.weight', rank 1 'a gradient of 1.bias'" in first
        assert second == "no error"


def hybrid_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def agree_in_groups(rank: int, world_size: int, odd: list[int]) -> list[str]:
    """What ranks of a mesh that no process group spans are told, where some are odd; then none."""
    model: Any = fxshard.compile(build(), strategy="hybrid_shard", mesh=hybrid_mesh())
    world = model._fxshard.world
    world._everyone = [peers for name, peers in world.peers.items() if "reshard" not in name]
    assert [peers.size for peers in world._everyone] == [2, 2]
    agree = partial(world.agree, [f"{rank in odd}"], "whether they are odd")
    return [told(agree), told(partial(world.agree, ["alike"], "this"))]


@pytest.mark.parametrize("odd", [[3], [0], [2, 3], [1, 3], [0, 3], []], ids=str)
@pytest.mark.sample(2)
def test_all_groups_agree_or_none(hasty: Any, odd: list[int]) -> None:
    for first, second in hasty(4).run(agree_in_groups, odd):
        assert (
            first.startswith("RankMismatchError: ranks differ in") if odd else first == "no error"
        )
        assert second == "no error"


def evaluate_unevenly(rank: int, world_size: int, times: list[int]) -> list[str]:
    """What ranks are told that call the model in other numbers, between steps of all."""
    model: Any = fxshard.compile(build(), strategy="hybrid_shard", mesh=hybrid_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []

    def step() -> None:
        model(BATCH + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate() -> None:
        with torch.no_grad():
            model(BATCH + rank)

    said += [told(step), told(evaluate), told(step)]
    said += [told(evaluate) for _ in range(times[rank])]
    return [*said, told(step), told(step), told(step)]


@pytest.mark.parametrize("times", [[1, 1, 2, 2], [2, 1, 2, 1], [1, 1, 1, 2]], ids=str)
@pytest.mark.sample(2)
def test_replicas_that_evaluate_unevenly_are_refused(hasty: Any, times: list[int]) -> None:
    for said in hasty(4).run(evaluate_unevenly, times):
        assert said[:3] == ["no error"] * 3
        assert any("Error" in each for each in said[3:]), said
