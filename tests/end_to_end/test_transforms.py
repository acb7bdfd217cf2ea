"""Forward-mode AD and the transforms of torch.func: as FSDP2, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.errors import ConfigError, StepError
from tests.end_to_end.losses_cases import made
from tests.end_to_end.training_cases import Net, assert_same, batch, grads_of


def forward_mode(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent


DERIVATIVES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "forward mode": forward_mode,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),))[1],
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x),
    "vmap": lambda model, x: torch.func.vmap(lambda row: model(row[None])[0])(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).square().sum())(x),
    "jacobian": torch.autograd.functional.jacobian,
}


def derives(rank: int, world_size: int, how: str) -> None:
    ours = fxshard.shard(made("eager", Net)) if how == "shard" else made(how, Net)
    eager, fsdp2 = made("eager", Net), made("fsdp2", Net)
    for derivative in DERIVATIVES.values():
        want = derivative(eager, batch(rank))
        assert_same([derivative(ours, batch(rank))], [want], rtol=1e-5, atol=1e-6)
        assert_same([derivative(fsdp2, batch(rank))], [want], rtol=1e-5, atol=1e-6)
        assert all(param.grad is None for param in ours.parameters())
    for model in (ours, fsdp2):  # a step goes on as before
        model(batch(rank)).square().mean().backward()
    assert_same(grads_of(ours), grads_of(fsdp2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["compile", "fully_shard", "shard"])
def test_derivatives_of_inputs(ranks: Any, how: str) -> None:
    ranks(2).run(derives, how)


def test_what_would_train_parameters_is_refused() -> None:
    model, x = made("in_process", Net), batch(0)
    with pytest.raises(StepError, match=r"gradient of parameter '.*reduced by nobody"):
        torch.func.jvp(model, (x,), (x.cos(),))[1].sum().backward()
    assert all(param.grad is None for param in model.parameters())
    params = {name: param.detach() for name, param in model.named_parameters()}
    with pytest.raises(StepError, match=r"other parameters than its own.*functional_call"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(params)
    model(x).sum().backward()  # still usable


def test_batches_of_gradients_are_refused() -> None:
    model, x = made("in_process", Net), batch(0).requires_grad_()
    y = model(x)
    eye = torch.eye(y.numel()).view(-1, *y.shape)
    with pytest.raises(StepError, match="is_grads_batched=True"):
        torch.autograd.grad(y, x, eye, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in eye]
    plain = made("eager", Net)
    want = torch.autograd.functional.jacobian(plain, x.detach()).view(-1, *x.shape)
    torch.testing.assert_close(torch.stack(rows), want)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
@pytest.mark.parametrize("verb", [fxshard.compile, fxshard.shard, fxshard.plan])
def test_nothing_is_sharded_inside(verb: Any, transform: Any) -> None:
    model = Net()
    given = {"args": (batch(0),)} if verb is fxshard.plan else {}

    def inside(x: Tensor) -> Tensor:
        verb(model, world_size=2, **given)
        return x.sum()

    with pytest.raises(ConfigError, match=r"transform of torch.func.*Compile the model before it"):
        transform(inside)(batch(0))
    assert type(model) is Net
    verb(model, world_size=2, **given)


def test_mixed_precision_is_refused() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fxshard.compile(Net(), world_size=2, mixed_precision=policy)
    with pytest.raises(StepError, match=r"without the dtypes of mixed_precision"):
        torch.func.vmap(model)(batch(0))
