"""The state of an optimizer that has not stepped: empty, and asking for it steps nothing."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import CheckpointError
from tests.fsdp2 import full
from tests.ranks import told

BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[Tensor]:
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return [full(param).detach() for param in model.parameters()]


def asked_first(rank: int, world_size: int, name: str, grads: bool) -> list[Tensor]:
    """What three steps give after each method that tells the state of an optimizer."""
    ranks = world_size if dist.is_initialized() else 1
    batch = BATCH.chunk(ranks)[rank]
    options: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
    model = fxshard.compile(build(), **options)
    optimizer = OPTIMIZERS[name](model.parameters())
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    if grads:
        model(batch).pow(2).mean().backward()
    whole = model.full_optim_state_dict(optimizer, rank0_only=False)
    for state in (whole, model.optim_state_dict(optimizer)):
        assert state["state"] == {}
        assert state["param_groups"][0]["params"] == [n for n, _ in model.named_parameters()]
        assert state["param_groups"][0]["lr"] == 0.1
    assert not optimizer.state and not steps
    assert grads == all(param.grad is not None for param in model.parameters())
    model.optim_state_dict_to_load(optimizer, whole, load_directly=True)
    assert not optimizer.state and not steps
    return train(model, optimizer, batch)


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sample(3)
def test_asking_for_the_state_does_not_step(ranks: Any, name: str, grads: bool) -> None:
    eager = build()
    expected = train(eager, OPTIMIZERS[name](eager.parameters()), BATCH)
    found = [asked_first(0, 1, name, grads), *ranks(2).run(asked_first, name, grads)]
    for params in found:
        for param, wanted in zip(params, expected, strict=True):
            assert_close(param, wanted)


def through_a_checkpoint(rank: int, world_size: int, name: str, path: str, steps: int) -> Any:
    """Save after `steps` steps that leave a parameter without gradient, load, and go on."""
    ranks = world_size if dist.is_initialized() else 1
    batch = BATCH.chunk(ranks)[rank]
    options: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
    model = fxshard.compile(build(), **options)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(steps):
        model(batch).pow(2).mean().backward()
        model[0].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict())
    fxshard.save_checkpoint(path, model, optimizer)
    assert_close(optimizer.state_dict(), before)
    train(model, optimizer, batch)  # whose states are loaded over
    fxshard.load_checkpoint(path, model, optimizer)
    assert_close(optimizer.state_dict(), before)
    again = fxshard.compile(build(), **options)
    fresh = OPTIMIZERS[name](again.parameters())
    again(batch).sum().backward()  # a gradient is in the way of how torch makes states
    kept = [param.grad for param in again.parameters()]
    fxshard.load_checkpoint(path, again, fresh)
    assert all(p.grad is grad for p, grad in zip(again.parameters(), kept, strict=True))
    assert_close(fresh.state_dict(), before)
    return train(again, fresh, batch)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sample(3)
def test_a_checkpoint_has_the_states_that_are_there(
    ranks: Any, name: str, steps: int, tmp_path: Path
) -> None:
    eager = build()
    optimizer = OPTIMIZERS[name](eager.parameters())
    for _ in range(steps):
        eager(BATCH).pow(2).mean().backward()
        eager[0].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    expected = train(eager, optimizer, BATCH)
    alone = through_a_checkpoint(0, 1, name, str(tmp_path / "alone"), steps)
    for params in [
        alone,
        *ranks(2).run(through_a_checkpoint, name, str(tmp_path / "ranks"), steps),
    ]:
        for param, wanted in zip(params, expected, strict=True):
            assert_close(param, wanted)


@pytest.mark.parametrize("wrapper", ["checkpoints", "torch.compile", "both"])
def test_names_of_wrappers_are_in_no_checkpoint(wrapper: str, tmp_path: Path) -> None:
    """A plain model's state loads into one whose modules are wrapped, and back, all of it."""

    def wrapped() -> nn.Module:
        model = build()
        if wrapper != "torch.compile":
            model[0] = checkpoint_wrapper(model[0])
        return model if wrapper == "checkpoints" else torch.compile(model, backend="eager")

    makes = (build, wrapped)
    for i, (saves, loads) in enumerate(itertools.product(makes, makes)):
        model, other = saves(), loads()
        optimizers = [OPTIMIZERS["adam"](m.parameters()) for m in (model, other)]
        train(model, optimizers[0], BATCH)
        fxshard.save_checkpoint(tmp_path / str(i), model, optimizers[0])
        fxshard.load_checkpoint(tmp_path / str(i), other, optimizers[1])
        states = [optimizer.state_dict()["state"] for optimizer in optimizers]
        assert len(states[1]) == 4
        assert_close(states[1], states[0])


def test_the_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = build()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, BATCH)
    fxshard.save_checkpoint(tmp_path, model, optimizer)
    other = nn.ModuleDict({"other": nn.Linear(3, 5)})
    with pytest.raises(CheckpointError, match=r"state of other parameters: '0\.weight"):
        fxshard.load_checkpoint(tmp_path, other, OPTIMIZERS["adam"](other.parameters()))


@pytest.mark.parametrize("verb", ["save", "load"])
def test_an_optimizer_of_another_model_is_refused(verb: str, tmp_path: Path) -> None:
    model = build()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, BATCH)
    fxshard.save_checkpoint(tmp_path, model, optimizer)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    other = OPTIMIZERS["adam"](build().parameters())
    action: Any = {"save": fxshard.save_checkpoint, "load": fxshard.load_checkpoint}[verb]
    with pytest.raises(CheckpointError, match="tensors that are no parameters of the model"):
        action(tmp_path, model, other)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


def test_a_state_without_all_parameters() -> None:
    """One has had no gradient yet: there is no state of it, and none is made."""
    model = fxshard.compile(build(), world_size=2)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    model(BATCH).sum().backward()
    next(iter(model.parameters())).grad = None
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    names = [name for name, _ in model.named_parameters()]
    assert list(model.full_optim_state_dict(optimizer)["state"]) == names[1:]
    assert_close(optimizer.state_dict(), before)
    again = OPTIMIZERS["adam"](model.parameters())
    model.optim_state_dict_to_load(again, model.optim_state_dict(optimizer), load_directly=True)
    assert_close(again.state_dict(), before)


def of_another_model_on_rank_1(rank: int, world_size: int, folder: str) -> list[str]:
    model = fxshard.compile(build())
    own, other = (OPTIMIZERS["adam"](m.parameters()) for m in (model, build()))
    train(model, own, BATCH)
    fxshard.save_checkpoint(folder, model, own)
    given = other if rank else own
    return [
        told(lambda: fxshard.save_checkpoint(folder, model, given)),
        told(lambda: fxshard.load_checkpoint(folder, model, given)),
        told(lambda: fxshard.load_checkpoint(folder, model, own)),
    ]


def test_an_optimizer_of_another_model_on_one_rank_is_refused_on_all(
    ranks: Any, tmp_path: Path
) -> None:
    for saved, loaded, after in ranks(2).run(of_another_model_on_rank_1, str(tmp_path)):
        for text in (saved, loaded):
            assert text.startswith("CheckpointError")
            assert "rank 1: ValueError: the optimizer holds tensors that are no" in text
        assert after == "no error"


class InFull(torch.optim.Optimizer):
    """Momentum of all rows on each rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state, grad = self.state[param], full(param.grad)
            state["mean"] = state.get("mean", torch.zeros_like(grad)) * 0.9 + grad
            param.copy_(full(param.detach()) - 0.1 * state["mean"])


MAKERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "of its own": lambda params: InFull(params, {}),
}


def of_one_process(rank: int, world_size: int, name: str) -> None:
    """Load the full state of a plain model's optimizer as it is, and go on; once more later."""
    plain = build()
    before = MAKERS[name](plain.parameters())
    train(plain, before, BATCH)
    state = copy.deepcopy(before.state_dict())
    model = fxshard.compile(copy.deepcopy(plain))
    optimizer = MAKERS[name](model.parameters())
    batch = BATCH.chunk(world_size)[rank]
    for _ in range(2):
        for each in (before, optimizer, optimizer):
            each.load_state_dict(copy.deepcopy(state))
        assert_close(train(model, optimizer, batch), train(plain, before, BATCH))
    held = optimizer.state[model.get_parameter("0.weight")]
    kinds = {isinstance(value, DTensor) for value in held.values() if value.dim()}
    assert kinds == {name != "of its own"}


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_plain_parameters(ranks: Any, name: str) -> None:
    ranks(2).run(of_one_process, name)
