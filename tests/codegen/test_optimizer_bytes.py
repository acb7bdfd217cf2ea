"""Bytes, states, hooks, misuse."""

import copy
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

import fxshard
from fxshard.errors import ConfigError, StepError
from fxshard.memory.category import Category
from tests.codegen.optimizer_in_program_cases import (
    BF16,
    EACH,
    OPTIMIZERS,
    UNEVEN,
    Make,
    Uneven,
    assert_same,
    built,
    fsdp2,
    make,
    planned,
    train,
)
from tests.fsdp2 import full
from tests.runtime import test_checkpoints as checkpoints
from tests.zoo import MODELS

# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
def test_bytes_are_exact(name: str) -> None:
    args, kwargs = UNEVEN.batch(0, 0)
    result = fxshard.validate(
        *(built(UNEVEN), args, kwargs),
        **{"world_size": 2, "units": UNEVEN.units, "optimizer": OPTIMIZERS[name]},
        optimizer_in_backward=True,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)
    assert result.measured_peak_bytes == result.static_peak_bytes


SETTINGS: dict[str, dict[str, Any]] = {
    "one rank": {"world_size": 1},
    "no_shard": {"strategy": "no_shard"},
    "hybrid": {"strategy": "hybrid_shard", "world_size": (2, 2)},
    "stays": {"strategy": "shard_grad_op"},
    "bf16": {"mixed_precision": BF16},
    "offload": {"offload": CPUOffloadPolicy(pin_memory=False)},
    "accumulated": {"micro_batches": 2, "no_sync": True},
    "ignored": {"ignored": ["head"]},
    "checkpointed": {"checkpoint": "full"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_bytes_are_exact_under(setting: str) -> None:
    args, kwargs = UNEVEN.batch(0, 0)
    given = {"world_size": 2, "units": UNEVEN.units, "optimizer": OPTIMIZERS["adamw"]}
    result = fxshard.validate(
        *(built(UNEVEN), args, kwargs),
        **{**given, **SETTINGS[setting]},
        optimizer_in_backward=True,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_other_models_are_exact(name: str) -> None:
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    result = fxshard.validate(
        *(built(case), args, kwargs),
        **{"world_size": 2, "units": case.units, "optimizer": OPTIMIZERS["adamw"]},
        optimizer_in_backward=True,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


DEPTH, WIDTH = 8, 32


def deep(depth: int = DEPTH, **options: Any) -> Any:
    """Layers without bias, each a unit, on two rows: parameters outweigh all else."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    given = {"world_size": 2, "units": ["*"], "optimizer": OPTIMIZERS["sgd"]}
    return fxshard.plan(model, (torch.zeros(2, WIDTH),), **{**given, **options}).memory


def most(report: Any, category: Category) -> int:
    column = list(Category).index(category)
    return int(report.ledger().bytes[:, column].max())


def test_by_hand_the_gradients_of_one_unit_are_alive() -> None:
    """Of all units, if the step is after backward: so much more does a layer cost then."""
    shard, activation = WIDTH * WIDTH * 4 // 2, 2 * WIDTH * 4
    behind = {depth: deep(depth) for depth in (8, 16)}
    inside = {depth: deep(depth, optimizer_in_backward=True) for depth in (8, 16)}
    for depth in (8, 16):
        assert most(behind[depth], Category.SHARDED_GRAD) == depth * shard
        assert most(inside[depth], Category.SHARDED_GRAD) == shard
        assert inside[depth].peak_by_category[Category.SHARDED_GRAD] == shard
    # After, the peak is at the end of backward: shards and gradients. Inside, at its beginning:
    # shards and what forward has saved.
    assert behind[16].peak_bytes - behind[8].peak_bytes == 8 * (shard + shard)
    assert inside[16].peak_bytes - inside[8].peak_bytes == 8 * (shard + activation)


def test_by_hand_states_and_temporaries_of_adamw() -> None:
    """The kernels of a step make two temporaries, of the size of the one parameter stepped."""
    shard = WIDTH * WIDTH * 4 // 2
    report = deep(optimizer_in_backward=True, optimizer=OPTIMIZERS["adamw"])
    held = [r for r in report.ledger().alive(0) if r.category is Category.OPT_STATE]
    assert sum(r.bytes for r in held) == DEPTH * (2 * shard + 4)
    phase = next(p for p in report.phases() if p.phase == "backward")
    column = list(Category).index(Category.TEMP)
    steps = [i for i, (name, _) in enumerate(phase.labels) if name.startswith("step")]
    assert len(steps) == DEPTH
    for i in steps:
        assert phase.during[i][column] - phase.after[i][column] == 2 * shard
    first = next(p for p in report.phases(first_step=True) if p.phase == "backward")
    column = list(Category).index(Category.OPT_STATE)
    made = [int(first.after[i][column] - first.after[i - 1][column]) for i in steps]
    assert made == DEPTH * [2 * shard + 4]


# -- states ----------------------------------------------------------------------------------------


KINDS = ("in_backward", "on_shards")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [StateDictOptions(), StateDictOptions(full_state_dict=True)],
    ids=["sharded", "full, and through the plain model"],
)
def test_state_dicts_of_distributed_checkpoint(
    ranks: Any, kind: str, options: StateDictOptions
) -> None:
    ranks(2).run(checkpoints.exchanged, "mlp13", options, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_checkpoint(ranks: Any, tmp_path: Path, kind: str) -> None:
    ranks(2).run(checkpoints.kept, kind, str(tmp_path / "ranks"))


@pytest.mark.slow
def test_checkpoints_from_2_to_4_to_1_and_into_fsdp2(ranks: Any, tmp_path: Path) -> None:
    two, four, one = (str(tmp_path / each) for each in ("two", "four", "one"))
    save, load = checkpoints.saved_and_trained_on, checkpoints.loaded
    want = ranks(2).run(save, "in_backward", "mlp13", two)[0]
    for kind in ("in_backward", "on_shards", "fsdp2", "fxshard"):
        found = ranks(2).run(load, kind, "mlp13", two)[0]
        assert_same(found[0], want[0])
        assert found[1] == want[1]  # training goes on bit by bit
        assert_same(found[2], want[2])
    assert_same(ranks(4).run(load, "in_backward", "mlp13", two, four)[0][0], want[0])
    assert_same(ranks(1).run(load, "in_backward", "mlp13", four, one)[0][0], want[0])
    assert_same(load(0, 1, "plain", "mlp13", one)[0], want[0])
    assert_same(load(0, 1, "in_backward", "mlp13", one)[0], want[0])


def plain_dicts(rank: int, world_size: int) -> None:
    """torch's own state_dict: into FSDP2's optimizer and back, and from full tensors."""
    ours: Any = fxshard.compile(
        built(UNEVEN), units=UNEVEN.units, optimizer=OPTIMIZERS["adamw"], optimizer_in_backward=True
    )
    train(ours, ours.optimizer, UNEVEN, 2)
    theirs = fsdp2(UNEVEN)
    theirs.load_state_dict(ours.state_dict())
    optimizer = OPTIMIZERS["adamw"](theirs.parameters())
    optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    assert train(theirs, optimizer, UNEVEN, 3) == train(ours, ours.optimizer, UNEVEN, 3)
    assert_same(checkpoints.values(ours, ours.optimizer), checkpoints.values(theirs, optimizer))
    fresh: Any = fxshard.compile(
        Uneven(), units=UNEVEN.units, optimizer=OPTIMIZERS["adamw"], optimizer_in_backward=True
    )
    fresh.load_state_dict(theirs.state_dict())
    state = optimizer.state_dict()
    whole = {
        number: {key: full(value) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    fresh.optimizer.load_state_dict({"state": whole, "param_groups": state["param_groups"]})
    for param, entry in fresh.optimizer.state.items():
        assert isinstance(entry["exp_avg"], DTensor) and entry["exp_avg"].shape == param.shape
    assert train(theirs, optimizer, UNEVEN, 2) == train(fresh, fresh.optimizer, UNEVEN, 2)
    assert_same(checkpoints.values(fresh, fresh.optimizer), checkpoints.values(theirs, optimizer))


def test_torchs_state_dict(ranks: Any) -> None:
    ranks(2).run(plain_dicts)


def test_what_the_user_changes_in_the_state_counts() -> None:
    """Values in place, entries, all of it; groups and learning rates."""
    given = {"world_size": 2, "optimizer": OPTIMIZERS["sgd momentum"]}
    model, eager = Uneven(), Uneven()
    eager.load_state_dict(model.state_dict())
    compiled: Any = fxshard.compile(model, **given, optimizer_in_backward=True)
    pairs = ((compiled, compiled.optimizer), (eager, given["optimizer"](eager.parameters())))

    def change(number: int) -> None:
        for module, optimizer in pairs:
            param = next(module.parameters())
            if number == 0:
                optimizer.state[param]["momentum_buffer"].mul_(3)
            elif number == 1:
                optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
            elif number == 2:
                optimizer.state.clear()
            elif number == 3:
                optimizer.param_groups[0]["lr"] = 0.5
            elif number == 4:
                del optimizer.state[param]

    for number in range(6):
        losses = [train(module, optimizer, UNEVEN, 1) for module, optimizer in pairs]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        change(number)
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_copies_and_pickles() -> None:
    model = built(UNEVEN)
    compiled: Any = fxshard.compile(
        model, world_size=2, optimizer=OPTIMIZERS["adamw"], optimizer_in_backward=True
    )
    train(compiled, compiled.optimizer, UNEVEN, 2)
    alone = copy.deepcopy(compiled.optimizer)
    assert type(alone) is AdamW and len(alone.state) == 4
    again = pickle.loads(pickle.dumps(compiled.optimizer))
    assert type(again) is AdamW and len(again.state) == 4
    twin = copy.deepcopy(compiled)  # as torch copies a model: without its optimizer's state
    assert twin.optimizer is not compiled.optimizer and not twin.optimizer.state
    before = [param.detach().clone() for param in compiled.parameters()]
    train(twin, twin.optimizer, UNEVEN, 1)
    assert all(map(torch.equal, before, compiled.parameters()))
    assert not any(map(torch.equal, before, twin.parameters()))


# -- hooks, misuse ---------------------------------------------------------------------------------


def compiled_alone(**options: Any) -> Any:
    given = {"world_size": 2, "optimizer": OPTIMIZERS["adamw"], "optimizer_in_backward": True}
    return fxshard.compile(Uneven(), **{**given, **options})


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    args, _ = UNEVEN.batch(0, step)
    return UNEVEN.loss(model(*args))


def test_a_loop_that_steps_does_not_step_twice() -> None:
    model = compiled_alone()
    loss_of(model).backward()
    before = [param.detach().clone() for param in model.parameters()]
    calls: list[int] = []
    model.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    model.optimizer.step()
    model.optimizer.zero_grad()
    assert all(map(torch.equal, before, model.parameters())) and calls == [1]
    assert model.optimizer.step(lambda: 7) == 7


def test_a_closure_steps_once() -> None:
    model = compiled_alone(optimizer_in_backward=False)

    def closure() -> Tensor:
        model.optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    losses = [model.optimizer.step(closure).item() for _ in range(2)]
    assert losses[0] != losses[1]


def test_the_norm_of_all_gradients_is_never_known() -> None:
    model = compiled_alone()
    loss_of(model).backward()
    with pytest.raises(StepError, match="the norm of all is never known"):
        model.clip_grad_norm_(1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_refused(fused: bool) -> None:
    model = compiled_alone(optimizer=make(AdamW, lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(StepError, match="gradients that are still scaled"):
        scaler.step(model.optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_works_after_backward(fused: bool) -> None:
    options = {"optimizer": make(AdamW, lr=1e-2, fused=fused)}
    model, eager = compiled_alone(**options, optimizer_in_backward=False), Uneven()
    eager.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    found = []
    for module, optimizer in (
        (model, model.optimizer),
        (eager, options["optimizer"](eager.parameters())),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            loss = loss_of(module, step) * (float("inf") if step == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([param.detach() for param in module.parameters()] + [scaler.get_scale()])
    torch.testing.assert_close(found[0], found[1])


def test_two_forwards_before_the_first_backward_are_refused() -> None:
    model = compiled_alone()
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    with pytest.raises(StepError, match="changed in place between a forward and its backward"):
        second.backward()


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused(hook: str) -> None:
    model = compiled_alone()
    handle = getattr(model.get_parameter("head.bias"), hook)(lambda tensor: None)
    with pytest.raises(StepError, match=r"'head.bias' has a hook on its gradient"):
        loss_of(model)
    handle.remove()
    loss_of(model).backward()


class Own(SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (make(torch.optim.LBFGS), "LBFGS cannot step this rank's rows alone"),
        (make(torch.optim.Adafactor), "Adafactor cannot step this rank's rows alone"),
        (make(torch.optim.SparseAdam), "SparseAdam cannot step this rank's rows alone"),
        (make(Own, lr=0.1), "Own cannot step this rank's rows alone"),
        (make(Adam, differentiable=True), "differentiable=True"),
    ],
)
def test_what_needs_full_parameters_is_refused(optimizer: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled_alone(optimizer=optimizer)
    with pytest.raises(ConfigError, match=message):
        planned(optimizer=optimizer).memory.peak_bytes  # noqa: B018
    with pytest.raises(ConfigError, match=message):
        compiled_alone(optimizer=optimizer, optimizer_in_backward=False).optimizer  # noqa: B018


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="needs an optimizer"):
        compiled_alone(optimizer=None)
    with pytest.raises(ConfigError, match="the first micro-batch would step already"):
        planned(micro_batches=2)
    with pytest.raises(AttributeError):
        compiled_alone(optimizer=None, optimizer_in_backward=False).optimizer  # noqa: B018


def test_a_parameter_in_no_group_is_named() -> None:
    model = compiled_alone(optimizer=lambda params: SGD(list(params)[:2], lr=0.1))
    with pytest.raises(StepError, match="is in no group"):
        loss_of(model).backward()


def _two_groups(named_parameters: Iterable[tuple[str, Any]]) -> Optimizer:
    named = list(named_parameters)
    inner = [param for name, param in named if name.startswith("inner")]
    head = [param for name, param in named if name.startswith("head")]
    groups = [{"params": inner, "lr": 0.1}, {"params": head, "lr": 0.01, "weight_decay": 0.1}]
    return SGD(groups, lr=0.1, momentum=0.9)


def _moved(optimizer: Optimizer) -> None:
    inner, head = (group["params"] for group in optimizer.param_groups)
    head.append(inner.pop(0))


CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "moved": _moved,
    "reversed": lambda optimizer: optimizer.param_groups.reverse(),
    "in another order": lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
    "exchanged": lambda optimizer: optimizer.param_groups.__setitem__(
        slice(None), [{**g, "lr": g["lr"] / 2} for g in reversed(optimizer.param_groups)]
    ),
    "a group gone": lambda optimizer: optimizer.param_groups.pop(0),
    "a parameter gone": lambda optimizer: optimizer.param_groups[1]["params"].pop(0),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_the_user_changes_count(change: str, in_backward: bool) -> None:
    eager = Uneven()
    model: Any = compiled_alone(optimizer=_two_groups, optimizer_in_backward=in_backward)
    model.load_state_dict(eager.state_dict())
    optimizers = {eager: _two_groups(eager.named_parameters()), model: model.optimizer}
    for module, optimizer in optimizers.items():
        train(module, optimizer, UNEVEN, 2)
        CHANGES[change](optimizer)
    if in_backward and "gone" in change:  # the program steps what nothing says how to step
        before = {name: full(param).clone() for name, param in model.named_parameters()}
        with pytest.raises(StepError, match="is in no group"):
            loss_of(model).backward()
        gone = "inner.weight" if change == "a group gone" else "head.weight"
        assert torch.equal(before[gone], full(model.get_parameter(gone)))
        return
    for module, optimizer in optimizers.items():
        train(module, optimizer, UNEVEN, 2)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs)
