"""FxshardModule in the hands of a training loop: modes, state, optimizers, gradients, misuse."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

import fxshard
from fxshard.errors import StepError
from tests.eager import Net, assert_trains_like_eager, batch, pair
from tests.fsdp2 import full, units_of
from tests.runtime.everywhere import EVERYWHERE, run
from tests.zoo import MODELS, Case, models


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build()


def compiled(name: str, **options: Any) -> Any:
    options |= {} if dist.is_initialized() else {"world_size": 2}
    return fxshard.compile(built(name), units=MODELS[name].units, **options)


def call(case: Case, model: nn.Module, step: int = 0) -> Tensor:
    """The loss of a batch that all ranks share: then they train what one process trains."""
    args, kwargs = case.batch(0, step)
    return case.loss(model(*args, **kwargs))


def assert_same_state(ours: nn.Module, theirs: nn.Module, **tolerances: float) -> None:
    """Parameters, gradients and buffers."""
    for (name, mine), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert_close(full(mine), other.detach(), **tolerances)
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None and other.grad is not None:
            assert_close(full(mine.grad), other.grad, **tolerances)
    assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), **tolerances)


# -- modes ----------------------------------------------------------------------------------------


def modes(rank: int, world_size: int, name: str) -> None:
    case, eager, ours = MODELS[name], built(name), compiled(name)

    def both(seed: int) -> tuple[Tensor, Tensor]:
        losses = []
        for model in (ours, eager):
            torch.manual_seed(seed)
            losses.append(call(case, model))
        assert_close(losses[0], losses[1])
        assert losses[0].requires_grad == losses[1].requires_grad == torch.is_grad_enabled()
        return losses[0], losses[1]

    for loss in both(0):
        loss.backward()
    assert_same_state(ours, eager)
    for model in (ours, eager):
        model.eval()
    for loss in both(1):  # evaluation with gradients is legal
        loss.backward()
    assert_same_state(ours, eager)
    with torch.no_grad():
        first, second = both(2)[0], both(3)[0]
        assert first == second  # no dropout, no batch statistics
    for model in (ours, eager):
        model.train()
    with torch.no_grad():
        both(4)
    for loss in both(5):
        loss.backward()
    assert_same_state(ours, eager)


@EVERYWHERE
@pytest.mark.parametrize("name", [pytest.param("dropout", marks=pytest.mark.slow), "convnet"])
def test_train_eval_and_no_grad(ranks: Any, where: str, name: str) -> None:
    run(ranks, where, modes, name)


def other_shapes(rank: int, world_size: int) -> None:
    case, eager, ours = MODELS["mlp13"], built("mlp13"), compiled("mlp13")
    for size in (2, 3, 1, 2):
        x = torch.linspace(-1, 1, size * 5).view(size, 5)
        losses = [case.loss(model(x)) for model in (ours, eager)]
        assert_close(*losses)
        for loss in losses:
            loss.backward()
    assert_same_state(ours, eager)
    assert len(ours._fxshard.variants) == 3


@EVERYWHERE
def test_another_batch_shape_is_traced_again(ranks: Any, where: str) -> None:
    run(ranks, where, other_shapes)


def traces_now(rank: int, world_size: int) -> None:
    case = MODELS["transformer"]
    args, kwargs = case.batch(0, 0)
    ours = compiled("transformer", args=args, kwargs=kwargs)
    (variant,) = ours._fxshard.variants.values()
    assert ours.plan.program is variant.program
    call(case, ours, step=1).backward()
    assert len(ours._fxshard.variants) == 1


@EVERYWHERE
def test_with_an_example_call_it_traces_at_once(ranks: Any, where: str) -> None:
    run(ranks, where, traces_now)


# -- steps ----------------------------------------------------------------------------------------


def zero_grad(rank: int, world_size: int, set_to_none: bool) -> None:
    case, eager, ours = MODELS["mlp13"], built("mlp13"), compiled("mlp13")
    for model in (ours, eager):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            call(case, model, step).backward()
            with torch.no_grad():
                call(case, model, step)  # an evaluation in between changes nothing
            optimizer.step()
    assert_same_state(ours, eager, rtol=1e-6, atol=1e-6)


@EVERYWHERE
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.sample(2)
def test_zero_grad(ranks: Any, where: str, set_to_none: bool) -> None:
    run(ranks, where, zero_grad, set_to_none)


def accumulation(rank: int, world_size: int, order: str) -> None:
    case, eager, ours = MODELS["mlp13"], built("mlp13"), compiled("mlp13")
    for model in (ours, eager):
        if order == "in turn":
            for step in (0, 1):
                call(case, model, step).backward()
            continue
        losses = [call(case, model, step) for step in (0, 1)]
        if order == "one backward":
            (losses[0] + losses[1]).backward()
        else:
            for loss in losses if order == "interleaved" else losses[::-1]:
                loss.backward()
    assert_same_state(ours, eager)


@EVERYWHERE
@pytest.mark.parametrize("order", ["in turn", "interleaved", "reversed", "one backward"])
@pytest.mark.sample(3)
def test_two_micro_batches(ranks: Any, where: str, order: str) -> None:
    run(ranks, where, accumulation, order)


def clipping(rank: int, world_size: int, name: str) -> None:
    case, eager, ours = MODELS[name], built(name), compiled(name)
    norms = []
    for model in (ours, eager):
        call(case, model).backward()
        norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
    assert_close(*norms)
    assert norms[0] > 0.01
    assert_same_state(ours, eager)


def test_clip_grad_norm(ranks: Any) -> None:
    for name in ("mlp13", "tied"):
        ranks(2).run(clipping, name)


def changes(rank: int, world_size: int) -> None:
    """What backward reads has to be what forward read; eager refuses the same."""
    case, ours = MODELS["mlp13"], compiled("mlp13")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    losses = [call(case, ours), call(case, ours)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(StepError, match=r"blocks\..*was changed in place.*before optimizer\.step"):
        losses[1].backward()
    (x,), _ = case.batch(0, 0)
    loss = case.loss(ours(x))
    x.zero_()
    with pytest.raises(StepError, match=r"args\[0\].*was changed in place.*change a copy"):
        loss.backward()
    call(case, ours).backward()


@EVERYWHERE
def test_changes_between_forward_and_backward(ranks: Any, where: str) -> None:
    run(ranks, where, changes)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, tokens: F.cross_entropy(logits.transpose(1, 2), tokens),
        lambda logits, tokens: logits.permute(2, 1, 0).contiguous().square().mean(),
        lambda logits, tokens: logits[:, ::2, 1:].square().mean(),
        lambda logits, tokens: logits.sum(),
        lambda logits, tokens: logits.double().square().mean(),
    ],
    ids=["transposed", "permuted", "sliced", "expanded", "cast"],
)
@pytest.mark.sample(2)
def test_gradients_may_arrive_in_any_layout(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    eager, ours = pair(MODELS["transformer"].build)
    (tokens,), _ = MODELS["transformer"].batch(0, 0)
    for model in (ours, eager):
        loss(model(tokens), tokens).backward()
    assert_same_state(ours, eager)


def test_misuse_of_backward() -> None:
    case, ours = MODELS["llama"], compiled("llama")
    loss = call(case, ours)
    loss.backward()
    with pytest.raises(StepError, match=r"backward was called twice on one .* retain_graph=True"):
        loss.backward()
    args, kwargs = case.batch(0, 0)
    output = ours(*args, **kwargs)
    output.loss.backward()
    with pytest.raises(StepError, match=r"backward was called twice on one .* retain_graph=True"):
        output.logits.sum().backward()
    call(case, ours).backward()  # still usable


def penalty(net: Any, z: Tensor) -> Tensor:
    """That of WGAN-GP, through the network as a whole."""
    z = z.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net(z).sum(), z, create_graph=True)
    return 10 * (grad.norm(2, 1) - 1).pow(2).mean()


PENALISED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "beside another loss": lambda net, z: net(batch()).mean() + penalty(net, z),
    "alone": penalty,
    "of one forward": lambda net, z: torch.autograd.grad(
        net(z.requires_grad_()).sum(), list(net.parameters()), create_graph=True
    )[0].sum(),
    "backward": lambda net, z: net(z).sum().backward(create_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", PENALISED)
def test_a_graph_of_gradients_is_refused(name: str) -> None:
    _, ours = pair(lambda: Net(lambda net, x: net.a(x).tanh()))
    with pytest.raises(StepError, match=r"create_graph=True through Net.*inside of forward"):
        PENALISED[name](ours, torch.ones(4, 5))
    assert all(p.grad is None for p in ours.parameters())


def test_a_gradient_penalty_inside_of_forward() -> None:
    """What the refusal of one outside points at."""

    def forward(net: Net, x: Tensor, z: Tensor) -> Tensor:
        def critic(x: Tensor) -> Tensor:
            return net.a(x).tanh()

        return critic(x).mean() + penalty(critic, z)

    assert_trains_like_eager(lambda: Net(forward), batch(), torch.ones(4, 5))


def test_an_auxiliary_loss_beside_other_outputs() -> None:
    """A scalar output is taken for the loss, until a loss shows that it is none."""
    assert_trains_like_eager(
        lambda: Net(lambda net, x: (net.a(x), net.b(x).square().mean())),
        batch(),
        loss=lambda out: out[0].logsumexp(-1).sum() + 0.01 * out[1].sum(),
    )


def test_a_failed_backward_leaves_no_gradient() -> None:
    _, ours = pair(lambda: Net(lambda net, x: {"loss": net.a(x).sum(), "y": net.b(x)}))
    out = ours(batch())
    with torch.no_grad():
        ours.b.weight.add_(1)
    with pytest.raises(StepError, match="weight' was changed in place"):
        out["y"].sum().backward()
    assert all(p.grad is None for p in ours.parameters())


# -- parameters as the user sees them -------------------------------------------------------------


def placements(rank: int, world_size: int, name: str) -> None:
    eager, ours, theirs = built(name), compiled(name), built(name)
    fully_shard(theirs)
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in eager.named_modules()]
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in eager.named_parameters()]
    mesh = next(theirs.parameters()).device_mesh
    for (fqn, whole), mine, other in zip(
        eager.named_parameters(), ours.parameters(), theirs.parameters(), strict=True
    ):
        assert isinstance(mine, nn.Parameter) and isinstance(mine, DTensor)
        assert isinstance(other, DTensor)
        assert mine.shape == whole.shape and mine.stride() == whole.stride(), fqn
        assert mine.placements == (Shard(0),) and mine.device_mesh == mesh
        assert torch.equal(mine.to_local(), other.to_local()), fqn
        assert torch.equal(mine.full_tensor(), whole)


def test_parameters_are_dtensors_as_fsdp2_makes_them(ranks: Any) -> None:
    for name in ("transformer", "tied", "convnet"):
        ranks(2).run(placements, name)


@pytest.mark.parametrize("world_size", [3, 4])
def test_uneven_and_empty_shards(ranks: Any, world_size: int) -> None:
    ranks(world_size).run(placements, "mlp13")
    rows = ranks(world_size).run(local_rows)
    assert [each["blocks.0.linear.weight"] for each in rows] == {
        3: [5, 5, 3],
        4: [4, 4, 4, 1],
    }[world_size]
    assert [each["blocks.0.gain"] for each in rows] == [1] + [0] * (world_size - 1)


def local_rows(rank: int, world_size: int) -> dict[str, int]:
    return {fqn: len(p.to_local()) for fqn, p in compiled("mlp13").named_parameters()}


def tied_stays_tied(rank: int, world_size: int) -> None:
    ours = compiled("tied")
    assert ours.lm_head.weight is ours.embed.weight
    call(MODELS["tied"], ours).backward()
    assert ours.lm_head.weight.grad is ours.embed.weight.grad is not None
    ours.lm_head.weight = nn.Parameter(ours.embed.weight.detach().clone())
    with pytest.raises(StepError, match=r"'embed\.weight' is not tied to .*lm_head.* any more"):
        call(MODELS["tied"], ours)


@EVERYWHERE
def test_tied_parameters_stay_one_object(ranks: Any, where: str) -> None:
    run(ranks, where, tied_stays_tied)


def assigned(rank: int, world_size: int) -> None:
    """The values that the user gives a parameter count, whichever way he gives them."""
    case, other = MODELS["mlp13"], built("mlp13")
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
    want = call(case, other)
    in_place = compiled("mlp13")
    with torch.no_grad():
        for param in in_place.parameters():
            param.mul_(1.5)
    assert_close(call(case, in_place), want)
    for assign in (False, True):
        ours = compiled("mlp13")
        call(case, ours)
        ours.load_state_dict(in_place.state_dict(), assign=assign)
        assert_close(call(case, ours), want)
        optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
        call(case, ours).backward()
        optimizer.step()  # on the parameters that are there now
        assert (call(case, ours) - want).abs() > 1e-3
    ours.blocks.double()  # a part of the tree alone; of all, see tests/runtime/test_state.py
    with pytest.raises(StepError, match=r"blocks\.0\..*float64.*float32.*before fxshard\.compile"):
        call(case, ours)


@EVERYWHERE
def test_values_assigned_to_parameters(ranks: Any, where: str) -> None:
    run(ranks, where, assigned)


# -- state ----------------------------------------------------------------------------------------


def state_dicts(rank: int, world_size: int, name: str) -> None:
    eager, ours = built(name), compiled(name)
    want, got = eager.state_dict(), ours.state_dict()
    assert list(got) == list(want)
    for key, value in want.items():
        assert torch.equal(full(got[key]), value), key


@EVERYWHERE
def test_state_dict_is_the_original_s(ranks: Any, where: str) -> None:
    for name in MODELS:
        run(ranks, where, state_dicts, name)


def full_state_dicts(rank: int, world_size: int) -> None:
    case, ours = MODELS["mlp13"], compiled("mlp13")
    torch.manual_seed(1)
    other = case.build()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_model_state_dict(ours, other.state_dict(), options=options)
    assert_close(call(case, ours), call(case, other))
    whole = get_model_state_dict(ours, options=options)
    assert rank > 0 or all(torch.equal(whole[k], v) for k, v in other.state_dict().items())


def test_full_state_dicts(ranks: Any) -> None:
    ranks(2).run(full_state_dicts)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(case: Case, model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = call(case, model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(model: nn.Module, optimizer: Any, path: str) -> None:
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
        checkpoint_id=path,
    )


def load(model: nn.Module, optimizer: Any, path: str) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def reference(case: Case) -> nn.Module:
    model = case.build()
    for unit in units_of(model, case):
        fully_shard(unit)
    fully_shard(model)
    return model


def checkpoints(rank: int, world_size: int, name: str, path: str) -> list[float]:
    """fxshard saves, FSDP2 goes on; FSDP2 saves, fxshard goes on."""
    case = MODELS[name]
    ours = compiled(name)
    optimizer = adamw(ours)
    train(case, ours, optimizer, 0, 2)
    save(ours, optimizer, f"{path}/ours")
    want = train(case, ours, optimizer, 2, 4)

    torch.manual_seed(1)  # other values, to be overwritten
    theirs = reference(case)
    optimizer = adamw(theirs)
    load(theirs, optimizer, f"{path}/ours")
    save(theirs, optimizer, f"{path}/theirs")
    assert train(case, theirs, optimizer, 2, 4) == want

    torch.manual_seed(1)
    ours = fxshard.compile(case.build(), units=case.units)
    optimizer = adamw(ours)
    load(ours, optimizer, f"{path}/theirs")
    assert train(case, ours, optimizer, 2, 4) == want
    return want


@pytest.mark.parametrize("name", ["mlp13", pytest.param("tied", marks=pytest.mark.slow)])
def test_checkpoints_go_to_fsdp2_and_back_and_into_one_process(ranks: Any, name: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        want = ranks(2).run(checkpoints, name, path)[0]
        assert Path(path, "ours", ".metadata").exists()
        case = MODELS[name]
        eager, ours = case.build(), fxshard.compile(case.build(), world_size=3)
        for model in (eager, ours):
            optimizer = adamw(model)
            load(model, optimizer, f"{path}/ours")
            assert train(case, model, optimizer, 2, 4) == pytest.approx(want, rel=1e-6)


def test_torch_compile_around_it_changes_nothing() -> None:
    """It has its own graph: dynamo breaks there and calls it as it is."""
    torch.manual_seed(0)
    model = fxshard.compile(models.Mlp13(), world_size=2)
    x = torch.randn(4, 5)
    plain = model(x)
    assert torch.equal(torch.compile(model, backend="eager")(x), plain)
    assert len(model._fxshard.variants) == 1
