"""Transforms of torch.func over parts of a sharded model, and over its parameters; what
`functional_call`, `full_tensor` and `torch.autograd.grad` do with these. On ranks whose batches
differ: as eager PyTorch, or refused by name."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method as theirs
from torch.distributed.tensor import DTensor, Partial
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.testing import assert_close

import fxshard
from tests.end_to_end.losses_cases import made
from tests.end_to_end.training_cases import Block, Net, grads_of, state_of
from tests.end_to_end.training_cases import batch as inputs_of
from tests.fsdp2 import full
from tests.ranks import told

HOW = ["fully_shard", "compile"]


class Valued(Block):
    def value(self, x: Tensor) -> Tensor:
        return self(x) * 2

    def read(self, x: Tensor) -> Tensor:
        return x @ self.linear.weight.T + self.linear.bias * self.norm.weight[0]


class Model(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Valued() for _ in range(2))


def model_of(how: str) -> Any:
    model = made(how, Model)
    register = {"fsdp2": theirs, "fully_shard": fxshard.register_fsdp_forward_method}.get(how)
    if register is not None:
        register(model.blocks[0], "value")
        model(inputs_of(0))  # FSDP2 finds its root at the first forward
    return model


def batch(rank: int) -> Tensor:
    """f32[3, 6], as blocks take it."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))


def weight_of(model: Any) -> Any:
    return model.blocks[0].linear.weight


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


# -- derivatives of inputs -------------------------------------------------------------------------

PARTS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "a block": lambda model: model.blocks[0],
    "its method": lambda model: model.blocks[0].value,
    "what reads": lambda model: model.blocks[0].read,
    "a layer": lambda model: model.blocks[0].linear,
    "of the root": lambda model: model.head,
    "a parameter": lambda model: lambda x: F.linear(x, weight_of(model)),
    "its norm": lambda model: lambda x: x * weight_of(model).norm(),
}
TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda f, x: grad(lambda x: loss(f(x)))(x),
    "vjp": lambda f, x: vjp(f, x)[1](f(x).detach().cos())[0],
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda x: loss(f(x).sin()))(x),
    "vmap": lambda f, x: vmap(lambda row: f(row[None])[0])(x),
    "of each row": lambda f, x: vmap(grad(lambda row: loss(f(row[None]))))(x),
    "twice": lambda f, x: grad(lambda x: loss(grad(lambda x: loss(f(x)))(x)))(x),
    "forward over reverse": lambda f, x: jvp(grad(lambda x: loss(f(x))), (x,), (x.cos(),))[1],
    "functionalize": lambda f, x: functionalize(f)(x),
    "as another argument": lambda f, x: grad(lambda _, x: loss(f(x)), argnums=1)(x, x),
}


def derives(rank: int, world_size: int, how: str) -> None:
    model, plain = model_of(how), model_of("eager")
    for part, f in PARTS.items():
        for name, transform in TRANSFORMS.items():
            what = f"{name} of {part}"
            found = transform(f(model), batch(rank))
            assert_close(found, transform(f(plain), batch(rank)), msg=what)
            loss(found).backward()  # of the parameters: joined
            both = [loss(transform(f(plain), batch(each))) for each in range(world_size)]
            torch.stack(both).mean().backward()
            assert_close(grads_of(model), grads_of(plain), msg=what)
            model.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("how", HOW)
def test_inputs_of_parts(ranks: Any, how: str) -> None:
    ranks(2).run(derives, how)


def some_in_a_transform(rank: int, world_size: int) -> None:
    """Ranks gather the same, whatever they derive with."""
    model, plain = model_of("fully_shard"), model_of("eager")

    def value(model: Any, x: Tensor) -> Tensor:
        if rank == 0:
            return grad(lambda x: loss(model.blocks[0](x)))(x)  # type: ignore[no-any-return]
        return torch.autograd.grad(loss(model.blocks[0](x)), x)[0]

    assert_close(
        value(model, batch(rank).requires_grad_()), value(plain, batch(rank).requires_grad_())
    )


def test_ranks_in_different_transforms(ranks: Any) -> None:
    ranks(2).run(some_in_a_transform)


# Parameters among the arguments that are not differentiated.
CONSTANT: dict[str, Callable[[Any, Tensor], Any]] = {
    "weight": lambda m, x: jacrev(lambda w, x: F.linear(x, w), argnums=1)(weight_of(m), x),
    "forwards": lambda m, x: jacfwd(lambda w, x: F.linear(x, w), argnums=1)(weight_of(m), x),
    "keyword": lambda m, x: grad(lambda x, w: loss(F.linear(x, w)))(x, w=weight_of(m)),
    "not batched": lambda m, x: vmap(F.linear, (0, None))(x, weight_of(m)),
    "whole": lambda m, x: jacrev(lambda x: F.linear(x, whole(weight_of(m))))(x),
    "functional_call": lambda m, x: grad(
        lambda p, x: loss(functional_call(m.blocks[0], p, (x,))), argnums=1
    )(dict(m.blocks[0].named_parameters()), x),
}


def constants(rank: int, world_size: int, how: str) -> None:
    model, plain = model_of(how), model_of("eager")
    for name, derivative in CONSTANT.items():
        want = derivative(plain, batch(rank))
        assert_close(derivative(model, batch(rank)), want, msg=name)


@pytest.mark.parametrize("how", HOW)
def test_parameters_that_are_constants_of_a_transform(ranks: Any, how: str) -> None:
    ranks(2).run(constants, how)


# -- derivatives of parameters ---------------------------------------------------------------------

OF_PARAMETERS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda f, p: grad(f)(p),
    "grad_and_value": lambda f, p: grad_and_value(f)(p),
    "vjp": lambda f, p: vjp(f, p),
    "jvp": lambda f, p: jvp(f, (p,), (p,)),
    "jacrev": lambda f, p: jacrev(f)(p),
    "jacfwd": lambda f, p: jacfwd(f)(p),
    "hessian": lambda f, p: hessian(f)(p),
    "vmap": lambda f, p: vmap(f)(p),
    "functionalize": lambda f, p: functionalize(f)(p),
    "per sample": lambda f, p: vmap(grad(lambda p, _: f(p)), (None, 0))(p, torch.ones(2)),
}


def of_parameters(rank: int, world_size: int, how: str) -> list[str]:
    model, plain = model_of(how), model_of("eager")
    block, x = model.blocks[0], batch(rank)
    own = dict(block.named_parameters())
    weight = weight_of(model)
    told_of = []
    for transform in OF_PARAMETERS.values():
        for f, params in (
            (lambda p: loss(functional_call(block, p, (x,))), own),
            (
                lambda p: loss(functional_call(block, p, (x,))),
                {n: p.detach() for n, p in own.items()},
            ),
            (lambda w: loss(F.linear(x, w)), weight),
            (lambda w: loss(F.linear(x, whole(w))), weight),
            (lambda w: loss(block(x)) * w.sum(), weight),  # torch's DTensor: of this rank's loss
        ):
            told_of.append(told(functools.partial(transform, f, params)))
    for call in (
        lambda: linearize(lambda w: loss(F.linear(x, w)), weight),
        lambda: linearize(block, x),
        lambda: linearize(lambda x: F.linear(x, whole(weight)), x),
    ):
        assert "called while make_fx" in told(call)
    loss(model(inputs_of(rank))).backward()  # still usable
    torch.stack([loss(plain(inputs_of(each))) for each in range(world_size)]).mean().backward()
    assert_close(grads_of(model), grads_of(plain))
    return told_of


@pytest.mark.parametrize("how", HOW)
def test_derivatives_of_parameters_are_refused(ranks: Any, how: str) -> None:
    first, second = ranks(2).run(of_parameters, how)
    assert first == second
    for said in first:
        assert said.startswith("StepError: a transform of torch.func ")
        assert "parameter 'blocks.0." in said and "loss.backward()" in said


def of_copies(rank: int, world_size: int, how: str) -> None:
    """What the refusals say instead."""
    model, plain = model_of(how), model_of("eager")
    block, x = model.blocks[0], batch(rank)
    copies = {name: p.detach().full_tensor() for name, p in block.named_parameters()}
    found = grad(lambda p: loss(functional_call(block, p, (x,))))(copies)
    wanted = dict(plain.blocks[0].named_parameters())
    want = grad(lambda p: loss(functional_call(plain.blocks[0], p, (x,))))(wanted)
    assert_close(found, {name: each.detach() for name, each in want.items()})
    reduced = torch.autograd.grad(loss(block(x)), list(block.parameters()))
    both = [loss(plain.blocks[0](batch(each))) for each in range(world_size)]
    joined = torch.autograd.grad(torch.stack(both).mean(), list(plain.blocks[0].parameters()))
    assert_close([full(each) for each in reduced], list(joined))


@pytest.mark.parametrize("how", HOW)
def test_what_to_do_instead(ranks: Any, how: str) -> None:
    ranks(2).run(of_copies, how)


def copies_that_need_gradients(rank: int, world_size: int, how: str) -> list[str]:
    model, x = model_of(how), batch(rank)
    weight = weight_of(model)
    copy = weight.detach().requires_grad_()
    jacobian = torch.autograd.functional.jacobian
    return [
        told(lambda: F.linear(x, copy)),
        told(lambda: jacobian(lambda w: loss(F.linear(x, w)), weight)),
    ]


@pytest.mark.parametrize("how", HOW)
def test_copies_that_need_gradients_are_refused(ranks: Any, how: str) -> None:
    for said in (
        each for told_of in ranks(2).run(copies_that_need_gradients, how) for each in told_of
    ):
        assert "a copy of parameter 'blocks.0.linear.weight' that requires a gradient" in said


# -- functional_call -------------------------------------------------------------------------------


def others(part: Any, kind: str) -> dict[str, Any]:
    """Parameters of twice the values."""
    made_of = {name: param.detach() * 2 for name, param in part.named_parameters()}
    if kind == "parameters":
        return {name: nn.Parameter(each) for name, each in made_of.items()}
    return {name: each.requires_grad_(kind == "trained") for name, each in made_of.items()}


def with_others(rank: int, world_size: int, how: str, kind: str) -> None:
    """They are those of one call: the model's own have their values after it."""
    model, plain = model_of(how), model_of("eager")
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for part, inputs in (
        (lambda m: m, inputs_of),
        (lambda m: m.blocks[0], batch),
        (lambda m: m.head, batch),
    ):
        given, plainly = others(part(model), kind), others(part(plain), kind)
        found = loss(functional_call(part(model), given, (inputs(rank),)))
        each = [loss(functional_call(part(plain), plainly, (inputs(r),))) for r in range(2)]
        assert_close(found, each[rank])
        if kind != "frozen":
            found.backward()
            torch.stack(each).mean().backward()
            assert_close(
                {name: full(param.grad) for name, param in given.items()},
                {name: param.grad for name, param in plainly.items()},
            )
        assert all(param.grad is None for param in model.parameters())
        assert_close(state_of(model), state_of(plain))
        loss(model(inputs_of(rank))).backward()
        torch.stack([loss(plain(inputs_of(r))) for r in range(2)]).mean().backward()
        functional_call(part(model), given, (inputs(rank),))  # between a backward and its step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(state_of(model), state_of(plain))


@pytest.mark.parametrize("kind", ["frozen", "trained", "parameters"])
@pytest.mark.parametrize("how", HOW)
def test_functional_call_with_others(ranks: Any, how: str, kind: str) -> None:
    ranks(2).run(with_others, how, kind)


def exchanged(model: nn.Module, params: dict[str, Any]) -> None:
    for name, param in params.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, param)


def come_back(rank: int, world_size: int, how: str) -> None:
    found = []
    for model in (model_of(how), model_of("eager")):
        own = dict(model.named_parameters())
        exchanged(model, others(model, "parameters"))
        doubled = loss(model(inputs_of(rank))).detach()
        exchanged(model, own)
        found.append([doubled, loss(model(inputs_of(rank))).detach(), state_of(model)])
    assert_close(*found)


@pytest.mark.parametrize("how", HOW)
def test_parameters_that_come_back_have_their_values(ranks: Any, how: str) -> None:
    ranks(2).run(come_back, how)


def test_parameters_that_come_back_in_one_process() -> None:
    come_back(0, 2, "in_process")


def in_between(rank: int, world_size: int, how: str) -> str:
    model = fxshard.shard(made("eager", Model)) if how == "shard" else model_of(how)
    out = functional_call(model, others(model, "trained"), (inputs_of(rank),))
    model(inputs_of(rank))  # takes the model's own back, and backward reads those that were given
    return told(lambda: loss(out).backward())


@pytest.mark.parametrize("how", [*HOW, "shard"])
def test_a_call_between_a_functional_call_and_its_backward_is_refused(ranks: Any, how: str) -> None:
    for said in ranks(2).run(in_between, how):
        assert "was changed in place between a forward and its backward" in said


# -- what else autograd is asked for ---------------------------------------------------------------


def asked(rank: int, world_size: int, how: str) -> None:
    """Functions of torch.autograd get a sharded parameter beside a tensor that is no scalar."""
    model, plain = model_of(how), model_of("eager")
    want = [plain.blocks[0](batch(each)).square().sum() / world_size for each in range(world_size)]
    (wanted,) = torch.autograd.grad(torch.stack(want).sum(), weight_of(plain))
    out = model.blocks[0](batch(rank))
    (found,) = torch.autograd.grad(out, weight_of(model), 2 * out.detach())
    assert_close(full(found), wanted)
    for backward in (
        lambda out: out.backward(2 * out.detach(), inputs=[weight_of(model)]),
        lambda out: torch.autograd.backward([out], [2 * out.detach()], inputs=[weight_of(model)]),
    ):
        backward(model.blocks[0](batch(rank)))
        assert_close(full(weight_of(model).grad), wanted)
        assert sum(param.grad is not None for param in model.parameters()) == 1
        model.zero_grad()


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_outputs_that_are_no_scalars(ranks: Any, how: str) -> None:
    ranks(2).run(asked, how)


def scalars(rank: int, world_size: int, how: str) -> None:
    """A number of this rank's batch times what is computed of shards: DTensor adds it up."""
    found = []
    for model in (model_of(how), model_of("eager")):
        weight, own = weight_of(model), loss(batch(rank))
        with torch.no_grad():
            found.append([whole(own * weight.sum()), whole(own + weight.sum())])
    assert_close(*found)


@pytest.mark.parametrize("how", HOW)
def test_a_number_of_this_ranks_batch(ranks: Any, how: str) -> None:
    ranks(2).run(scalars, how)


def full_tensors(rank: int, world_size: int, how: str) -> None:
    """The gradient of `full_tensor()` is FSDP2's: this rank's rows of its own, unless it says."""
    average = [Partial("avg")]
    for placements in (None, average):
        found = []
        for model in (model_of("fsdp2"), model_of(how)):
            weight = weight_of(model)
            loss(F.linear(batch(rank), weight.full_tensor(grad_placements=placements))).backward()
            found.append(weight.grad)
        assert torch.equal(found[0].to_local(), found[1].to_local())
    plain = model_of("eager")
    torch.stack([loss(F.linear(batch(r), weight_of(plain))) for r in range(2)]).mean().backward()
    assert_close(full(found[1]), weight_of(plain).grad)  # of the average
    model = model_of(how)
    loss(F.linear(batch(rank), weight_of(model))).backward()  # as of a parameter that is read
    assert_close(full(weight_of(model).grad), weight_of(plain).grad)


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_full_tensors_are_those_of_fsdp2(ranks: Any, how: str) -> None:
    ranks(2).run(full_tensors, how)
