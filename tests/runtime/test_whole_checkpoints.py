"""What a checkpoint has is loaded, all of it, or refused; the reference is torch's own loading."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing import assert_close

import fxshard
from fxshard.errors import CheckpointError
from tests.fsdp2 import full
from tests.ranks import told

BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
Make = Callable[[nn.Module], Optimizer]


def build(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        model(BATCH).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(model: nn.Module, optimizer: Optimizer | None = None) -> list[Any]:
    """Copies of all that loading writes."""
    values = model.state_dict().values()
    found: list[Any] = [full(v).clone() if isinstance(v, Tensor) else str(v) for v in values]
    if optimizer is not None:
        found += [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        found += [
            {name: full(v).clone() if isinstance(v, Tensor) else v for name, v in state.items()}
            for param in model.parameters()
            if (state := optimizer.state.get(param))
        ]
    return found


def assert_alike(ours: list[Any], theirs: list[Any], **tolerance: float) -> None:
    """Numbers and tensors are close, all else is equal."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            assert_alike(list(one.values()), [other[key] for key in one], **tolerance)
        elif isinstance(one, (Tensor, float)):
            assert_close(one, other, **tolerance)
        else:
            assert one == other


def refused(path: Path, model: nn.Module, optimizer: Optimizer | None, message: str) -> None:
    """By name, and nothing is written."""
    before = contents(model, optimizer)
    with pytest.raises(CheckpointError, match=message):
        fxshard.load_checkpoint(path, model, optimizer)
    assert_alike(contents(model, optimizer), before, rtol=0, atol=0)


# -- options of the optimizer ----------------------------------------------------------------------


def grouped(model: nn.Module) -> Optimizer:
    groups: list[Any] = [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": list(model[1].parameters()), "weight_decay": 0.5},
    ]
    return AdamW(groups, lr=0.01)


def scheduled(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return optimizer


def tagged(model: nn.Module) -> Optimizer:
    optimizer = grouped(model)
    optimizer.param_groups[1] |= {"tag": "slow", "scale": torch.tensor([1.0, 2.0])}
    return optimizer


OTHERS: dict[str, tuple[Make, Make]] = {
    "momentum": (
        lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9),
        lambda m: SGD(m.parameters(), lr=0.02),
    ),
    "no momentum": (
        lambda m: SGD(m.parameters(), lr=0.01),
        lambda m: SGD(m.parameters(), lr=0.02, momentum=0.9),
    ),
    "amsgrad": (
        lambda m: AdamW(m.parameters(), lr=0.1, amsgrad=True),
        lambda m: AdamW(m.parameters(), lr=0.2),
    ),
    "no amsgrad": (
        lambda m: Adam(m.parameters(), lr=0.1),
        lambda m: Adam(m.parameters(), lr=0.2, amsgrad=True),
    ),
    "adagrad": (
        lambda m: Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=1.0),
        lambda m: Adagrad(m.parameters(), lr=0.2),
    ),
    "a tensor to a number": (
        lambda m: AdamW(m.parameters(), lr=torch.tensor(0.1)),
        lambda m: AdamW(m.parameters(), lr=0.2),
    ),
    "a number to a tensor": (
        lambda m: AdamW(m.parameters(), lr=0.1),
        lambda m: AdamW(m.parameters(), lr=torch.tensor(0.2)),
    ),
    "initial_lr": (scheduled, lambda m: SGD(m.parameters(), lr=0.3)),
    "no initial_lr": (lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9), scheduled),
    "no options of the user's": (grouped, tagged),
    "no names": (
        lambda m: SGD(m.parameters(), lr=0.1),
        lambda m: SGD(m.named_parameters(), lr=0.2),
    ),
    "groups": (grouped, grouped),
    "options of the user's": (tagged, grouped),
    "names": (
        lambda m: SGD(m.named_parameters(), lr=0.1, momentum=0.9),
        lambda m: SGD(m.parameters(), lr=0.1),
    ),
}


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("name", OTHERS)
def test_options_and_states_become_what_they_were(name: str, stepped: bool, tmp_path: Path) -> None:
    """As Optimizer.load_state_dict does it, into an optimizer that was made with others."""
    before, now = OTHERS[name]
    source = build()
    saved = before(source)
    train(source, saved)
    fxshard.save_checkpoint(tmp_path, source, saved)
    plain = build()
    theirs = now(plain)
    ours: list[nn.Module] = [build(), fxshard.compile(build(), world_size=2)]
    pairs = [(model, now(model)) for model in ours]
    if stepped:
        for model, optimizer in [(plain, theirs), *pairs]:
            train(model, optimizer, 1)
    plain.load_state_dict(source.state_dict())
    theirs.load_state_dict(saved.state_dict())
    for model, optimizer in pairs:
        fxshard.load_checkpoint(tmp_path, model, optimizer)
        assert_alike(contents(model, optimizer), contents(plain, theirs), rtol=0, atol=0)
    train(plain, theirs)
    for model, optimizer in pairs:
        train(model, optimizer)
        assert_alike(contents(model, optimizer), contents(plain, theirs))


def test_groups_in_another_order(tmp_path: Path) -> None:
    """Are known by their parameters; so is one of none, wherever it stands."""

    def turned(model: nn.Module) -> Optimizer:
        first, second = (list(layer.parameters()) for layer in model)
        groups: list[Any] = [{"params": [], "lr": 0.7}, {"params": second}, {"params": first}]
        return AdamW(groups, lr=0.9)

    source = build()
    saved = grouped(source)
    saved.add_param_group({"params": [], "lr": 0.3})
    train(source, saved)
    fxshard.save_checkpoint(tmp_path, source, saved)
    model = build()
    optimizer = turned(model)
    fxshard.load_checkpoint(tmp_path, model, optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 0.01, 0.1]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.01, 0.5, 0.01]
    train(source, saved)
    train(model, optimizer)
    assert_close(list(model.parameters()), list(source.parameters()))


REGROUPED: dict[str, Make] = {
    "of all": lambda m: AdamW(m.parameters(), lr=0.5),
    "of some": lambda m: AdamW(m[0].parameters(), lr=0.5),
    "divided otherwise": lambda m: AdamW(
        [{"params": [m[0].weight]}, {"params": [m[0].bias, *m[1].parameters()]}], lr=0.5
    ),
    "of three": lambda m: AdamW(
        [{"params": list(m[0].parameters())}, {"params": [m[1].weight]}, {"params": [m[1].bias]}]
    ),
}


@pytest.mark.parametrize("name", REGROUPED)
def test_other_groups_are_refused(name: str, tmp_path: Path) -> None:
    """So they are by torch, which goes by their sizes."""
    source = build()
    saved = grouped(source)
    train(source, saved)
    fxshard.save_checkpoint(tmp_path, source, saved)
    model = build()
    optimizer = REGROUPED[name](model)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(saved.state_dict())
    message = r"other parameter groups, of \[2, 2\] parameters where this one has"
    refused(tmp_path, model, optimizer, message)
    saves = tmp_path / "other way"
    train(model, optimizer)
    fxshard.save_checkpoint(saves, model, optimizer)
    refused(saves, source, saved, r"where this one has \[2, 2\]: make the optimizer with")


# -- more than there is a place for ----------------------------------------------------------------


def test_a_larger_model_is_refused(tmp_path: Path) -> None:
    """So it is by load_state_dict."""
    source, model = build(3), build(2)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(source.state_dict())
    fxshard.save_checkpoint(tmp_path, source, AdamW(source.parameters()))
    message = r"have no place for: model\.2\.bias, model\.2\.weight$"
    for into in (model, fxshard.compile(build(2), world_size=2)):
        refused(tmp_path, into, None, message)
        refused(tmp_path, into, AdamW(into.parameters()), "other parameter groups")
    refused(tmp_path, build(4), None, r"Missing key.*model\.3")
    source.register_buffer("extra", torch.ones(1))
    fxshard.save_checkpoint(tmp_path, source)
    refused(tmp_path, build(3), None, r"have no place for: model\.extra$")
    other = build(3)
    other.register_buffer("own", torch.ones(1), persistent=False)  # in no state dict
    other.register_buffer("extra", torch.zeros(1))
    fxshard.load_checkpoint(tmp_path, other)
    assert other.extra == 1


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    source = build()
    saved = AdamW(source.parameters())
    fxshard.save_checkpoint(tmp_path / "without", source)
    train(source, saved)
    fxshard.save_checkpoint(tmp_path, source, saved)
    for optimizer in (SGD(source.parameters()), SGD(source.parameters(), momentum=0.9)):
        message = (
            "has no dampening, momentum, nesterov, which an SGD needs, but has amsgrad, betas,"
        )
        refused(tmp_path, source, optimizer, message)
    refused(tmp_path / "without", source, saved, "saved without an optimizer: load it without")
    fxshard.load_checkpoint(tmp_path, source)  # the model alone may be asked for


def test_options_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    """Where no state tells them apart; torch takes them, and raises KeyError at the next step."""
    source = build()
    fxshard.save_checkpoint(tmp_path, source, SGD(source.parameters()))
    message = r"has no .*betas, .*eps, which an AdamW needs, .*make the optimizer that was saved"
    for model in (build(), fxshard.compile(build(), world_size=2)):
        refused(tmp_path, model, AdamW(model.parameters()), message)


def test_parameters_that_are_frozen_now_get_no_state_as_in_torch(tmp_path: Path) -> None:
    source = build()
    saved = AdamW(source.parameters())
    train(source, saved)
    fxshard.save_checkpoint(tmp_path, source, saved)
    ours, theirs = build(), build()
    optimizers = [AdamW(model.parameters()) for model in (ours, theirs)]
    for model in (ours, theirs):
        model[0].requires_grad_(False)
    fxshard.load_checkpoint(tmp_path, ours, optimizers[0])
    set_torchs(source, saved, theirs, optimizers[1])
    assert_alike(contents(ours, optimizers[0]), contents(theirs, optimizers[1]))
    assert len(optimizers[0].state) == 2


def set_torchs(source: nn.Module, saved: Optimizer, model: nn.Module, into: Optimizer) -> None:
    found = get_state_dict(source, saved)
    set_state_dict(model, into, model_state_dict=found[0], optim_state_dict=found[1])


# -- a refusal leaves everything as it was ---------------------------------------------------------


class Extra(nn.Linear):
    """Has a state of the user's."""

    told: Any = None

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


def test_an_object_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    source = build()
    saved = AdamW(source.parameters())
    train(source, saved)
    saved.param_groups[0]["tag"] = Path("x")
    fxshard.save_checkpoint(tmp_path, source, saved)
    model = build()
    optimizer = AdamW(model.parameters())
    for tag in (False, True):  # the fresh one has such an option too, or has not
        if tag:
            optimizer.param_groups[0]["tag"] = 1
        refused(tmp_path, model, optimizer, r"param_groups\.0\.tag has pathlib.*trusted=True")
    fxshard.load_checkpoint(tmp_path, model, optimizer, trusted=True)
    assert optimizer.param_groups[0]["tag"] == Path("x")
    assert_close(list(model.parameters()), list(source.parameters()), rtol=0, atol=0)
    owner, other = Extra(3, 3), Extra(3, 3)
    owner.told = Path("x")
    fxshard.save_checkpoint(tmp_path / "extra", owner)
    refused(tmp_path / "extra", other, None, r"model\._extra_state has pathlib")
    fxshard.load_checkpoint(tmp_path / "extra", other, trusted=True)
    assert other.told == Path("x")


def test_other_sizes_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    source = build()
    saved = SGD(source.parameters(), lr=0.1, momentum=0.9)
    train(source, saved)
    fxshard.save_checkpoint(tmp_path, source, saved)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    optimizer = SGD(other.parameters(), lr=0.1)
    refused(tmp_path, other, optimizer, "Size mismatch")


# -- saving ----------------------------------------------------------------------------------------


def test_an_extra_that_cannot_be_pickled_leaves_nothing(tmp_path: Path) -> None:
    model = build()
    message = r"nothing was saved: extra cannot be pickled\. Cause: rank 0: .*lambda"
    for path in (tmp_path / "new", tmp_path):
        if path is tmp_path:
            fxshard.save_checkpoint(path, model, extra="first")
        with pytest.raises(CheckpointError, match=message):
            fxshard.save_checkpoint(path, model, extra=lambda: 1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "version-1"]
    assert fxshard.load_checkpoint(tmp_path, model) == "first"


def test_a_state_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    model = Extra(3, 3)
    fxshard.save_checkpoint(tmp_path, model, extra="first")
    model.get_extra_state = raising  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"as it was\. Cause: rank 0.*boom"):
        fxshard.save_checkpoint(tmp_path, model)
    assert sorted(os.listdir(tmp_path)) == ["latest", "version-1"]


def raising(*_: Any) -> Any:
    raise ValueError("boom")


def fails_on_rank_1(rank: int, world_size: int, folder: str) -> list[str]:
    """Of each call that fails on rank 1 alone; then of one that does not."""
    torch.manual_seed(0)
    inner = Extra(4, 4)
    inner.told = 7
    model: Any = fxshard.compile(nn.Sequential(inner))
    said = [told(lambda: fxshard.save_checkpoint(folder, model))]
    for attribute in ("get_extra_state", "set_extra_state"):
        if rank == 1:
            setattr(inner, attribute, raising)
        said += [told(lambda: fxshard.load_checkpoint(folder, model))]
        if attribute == "get_extra_state":
            said += [told(lambda: fxshard.save_checkpoint(folder, model))]
        if rank == 1:
            delattr(inner, attribute)
    said += [told(lambda: fxshard.load_checkpoint(folder, model))]
    return said


def test_all_ranks_hear_of_a_state_that_one_cannot_read(ranks: Any, tmp_path: Path) -> None:
    for first, *failed, last in ranks(2).run(fails_on_rank_1, str(tmp_path)):
        assert first == last == "no error" and len(failed) == 3
        for text in failed:
            assert text.startswith("CheckpointError") and "rank 1: ValueError: boom" in text
    assert sorted(os.listdir(tmp_path)) == ["latest", "version-1"]


def changed_on_ranks(rank: int, world_size: int, path: str) -> list[Any]:
    """A plain process has saved; sharded ranks load into an optimizer of other options."""
    model = fxshard.compile(build())
    optimizer = SGD(model.parameters(), lr=0.5)
    fxshard.load_checkpoint(path, model, optimizer)
    train(model, optimizer)
    larger = fxshard.compile(build(1))
    said = told(lambda: fxshard.load_checkpoint(path, larger))
    return [*contents(model, optimizer), said]


def test_ranks_load_all_that_one_process_has_saved(ranks: Any, tmp_path: Path) -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(model, optimizer)
    fxshard.save_checkpoint(tmp_path, model, optimizer)
    train(model, optimizer)
    for *found, said in ranks(2).run(changed_on_ranks, str(tmp_path)):
        assert_alike(found, contents(model, optimizer))
        assert "have no place for: model.1.bias, model.1.weight" in said


# -- hooks of the user's ---------------------------------------------------------------------------


def hooked(rank: int, world_size: int, path: str) -> list[str]:
    """What hooks on steps hear while a fresh optimizer is loaded into, and of the step after."""
    model = fxshard.compile(build())
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    fxshard.save_checkpoint(path, model, optimizer)
    fresh = AdamW(model.parameters())
    heard: list[str] = []
    fresh.register_step_pre_hook(lambda *_: heard.append("before"))
    fresh.register_step_post_hook(lambda *_: heard.append("after"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: heard.append("before any")),
        register_optimizer_step_post_hook(lambda *_: heard.append("after any")),
    ]
    try:
        fxshard.load_checkpoint(path, model, fresh)
        heard.append("loaded")
        assert_alike(contents(model, fresh), contents(model, optimizer))
        train(model, fresh, steps=1)
    finally:
        for handle in handles:
            handle.remove()
    return heard


def test_hooks_on_steps_hear_of_no_step_while_loading(ranks: Any, tmp_path: Path) -> None:
    expected = ["loaded", "before any", "before", "after", "after any"]
    assert ranks(2).run(hooked, str(tmp_path / "state")) == [expected, expected]
