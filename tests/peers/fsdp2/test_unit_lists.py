"""Several files: several modules as one unit, which `fully_shard` is given as a list."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn import functional as F
from torch.testing import assert_close

import fxshard
from tests.oracles import count_collectives
from tests.peers.fsdp2.common import (
    MLP,
    Args,
    Block,
    Transformer,
    adam,
    assert_parity,
    average_grads,
    ddp,
    made,
    shard,
    train_alike,
)
from tests.peers.fsdp2.test_training_composed import Chunked, Tied, in_chunks

# -- several modules as one unit -------------------------------------------------------------------


def grouped(rank: int, world_size: int, reshard: bool, how: str, tied: bool) -> None:
    args = Args(layers=3, vocab=1024, length=64, tied=tied, checkpoint=how == "utils")
    model = made(lambda: Transformer(args))
    ref = ddp(copy.deepcopy(model))
    if how == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Block))
    elif how == "composable":
        for layer in model.layers:
            checkpoint(layer)
    layers = list(model.layers)
    if tied:
        units: list[Any] = [[model.tok_embeddings, model.output], *layers]
    else:
        embeddings = [model.tok_embeddings, model.pos_embeddings]
        units = [layers[0], layers[1:], embeddings, [model.norm, model.output]]
    for unit in [*units, model]:
        fxshard.fully_shard(unit, reshard_after_forward=reshard)
    if not tied:
        model.tok_embeddings.set_unshard_in_backward(False)
    tokens = model.tokens(3, 64)
    train_alike(ref, model, lambda: (tokens,))


@pytest.mark.sample(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", ["plain", "utils", "wrapper", "composable"])
@pytest.mark.parametrize("reshard", [True, False])
def test_modules_that_are_one_unit_train_as_ddp(
    ranks: Any, reshard: bool, how: str, tied: bool
) -> None:
    ranks(2).run(grouped, reshard, how, tied)


def gathered_lists(rank: int, world_size: int) -> None:
    """Units of two layers, of the embeddings, and of the norm with the head, in their order."""
    model = made(lambda: Transformer(Args(layers=5, tied=False, checkpoint=True)))
    ref = copy.deepcopy(model)
    layers, ends = list(model.layers), [model.norm, model.output]
    embeddings = [model.tok_embeddings, model.pos_embeddings]
    for unit in (layers[0], layers[1:3], layers[3:5], embeddings):
        fxshard.fully_shard(unit)
    fxshard.fully_shard(ends, reshard_after_forward=False)
    fxshard.fully_shard(model)

    def size(*parts: nn.Module) -> int:
        return sum(param.numel() for part in parts for param in part.parameters()) * 4

    block = size(layers[0])  # of parameters whose rows two ranks divide
    expected = [size(*embeddings), block, 2 * block, 2 * block, size(*ends)]
    tokens = model.tokens(2, 16)
    with count_collectives() as forward:
        loss = model(tokens).sum()
    assert [call.nbytes for call in forward.calls] == expected
    loss.backward()
    model.zero_grad()
    train_alike(ref, model, lambda: (tokens,), 3, after=average_grads)


def test_lists_of_modules_are_gathered_in_their_order(ranks: Any) -> None:
    ranks(2).run(gathered_lists)


def units_of_lists(rank: int, world_size: int) -> None:
    model: Any = nn.Sequential(*(MLP(8, buffer=True) for _ in range(5)))
    fxshard.fully_shard([model[0], model[1], model[2]])
    fxshard.fully_shard(model)
    model(torch.randn(2, 8)).sum().backward()
    held = [{param.fqn for param in unit.params} for unit in model.plan.units]
    names = {fqn for fqn, _ in model.named_parameters()}
    assert held == [{n for n in names if n[0] in "34"}, {n for n in names if n[0] in "012"}]


def test_a_list_of_modules_is_one_unit(ranks: Any) -> None:
    ranks(2).run(units_of_lists)


def no_root(rank: int, world_size: int) -> None:
    """FSDP2 refuses a list as a root; here each call of a module of it runs alone, and is right."""
    model: Any = made(lambda: nn.Sequential(MLP(8), MLP(8)))
    ref = copy.deepcopy(model)
    fxshard.fully_shard([model[0], model[1]])
    x = torch.randn(2, 8)
    train_alike(ref, model, lambda: (x,), 3, after=average_grads)


def test_a_list_of_modules_without_a_root(ranks: Any) -> None:
    ranks(2).run(no_root)


def policies(rank: int, world_size: int) -> None:
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert all(isinstance(each, FSDPModule) for each in (model[0], model[1], model))
    model(torch.randn(8, 16)).sum().backward()


def test_units_are_fsdp_modules(ranks: Any) -> None:
    ranks(2).run(policies)


def sliced(rank: int, world_size: int) -> None:
    """A slice of a unit is a plain module, which gathers what it reads."""
    model = made(lambda: nn.Sequential(nn.Sequential(*(MLP(8) for _ in range(3))), nn.Linear(8, 8)))
    x = torch.randn(2, 8)
    expected = model[0][:2](x)
    shard(model, model[0])
    part = model[0][:2]
    assert type(part) is nn.Sequential
    assert_close(part(x), expected)


def test_a_slice_of_a_unit_is_plain(ranks: Any) -> None:
    ranks(2).run(sliced)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.lin = nn.Linear(1, 1), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.lin(x))


def unused(rank: int, world_size: int) -> None:
    model = made(lambda: nn.Sequential(Unused(), Unused(), nn.Linear(16, 16)))
    ref = copy.deepcopy(model)
    for part in model[:2]:
        fxshard.fully_shard([part.unused, part.lin], reshard_after_forward=True)
    fxshard.fully_shard(model)
    x = torch.randn(2, 16)
    train_alike(ref, model, lambda: (x,), 3, after=average_grads)
    assert model[0].unused.weight.grad is None


def test_a_module_of_a_unit_that_forward_leaves_out(ranks: Any) -> None:
    ranks(2).run(unused)


def uneven(rank: int, world_size: int, reshard: bool) -> None:
    """Tied modules are one unit, and no rank's rows are left out of training."""
    model = made(lambda: Tied(vocab=world_size * 4 + 1))
    ref = copy.deepcopy(model)
    fxshard.fully_shard([model.tok_embeddings, model.output], reshard_after_forward=reshard)
    fxshard.fully_shard(model, reshard_after_forward=reshard)
    model.tok_embeddings.unshard()
    first = model.tok_embeddings.weight.detach().clone()
    model.tok_embeddings.reshard()

    def run(each: Any, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(each(ids).flatten(0, 1), ids.flatten())

    both = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (ref, model)]
    for _ in range(10):
        ids = torch.randint(world_size * 4 + 1, (2, 8))
        losses = [run(each, ids) for each, _ in both]
        sum(losses).backward()
        average_grads(ref)
        assert_close(losses[1], losses[0])
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad()
    model.tok_embeddings.unshard()
    assert (model.tok_embeddings.weight != first).any(1).all()
    model.tok_embeddings.reshard()


@pytest.mark.parametrize("reshard", [True, False])
def test_tied_modules_as_one_unit_of_uneven_rows(ranks: Any, reshard: bool) -> None:
    ranks(4).run(uneven, reshard)


# -- a head that is one unit with the norm before it -----------------------------------------------


def with_norm(model: Any, tied: bool = False, **options: Any) -> None:
    """The head in one unit with the norm, which is the last that forward runs without the head."""
    parts = [model.embed, model.norm, model.head] if tied else [model.norm, model.head]
    for unit in [model.body, parts] if tied else [model.embed, model.body, parts]:
        fxshard.fully_shard(unit, **options)
    fxshard.fully_shard(model, **options)


def chunks(
    rank: int, world_size: int, reshard: bool | int, tied: bool, recomputes: bool = False
) -> None:
    model = made(lambda: Chunked(tied=tied).double())
    ref = copy.deepcopy(model)
    if recomputes:
        checkpoint(model.body)
    with_norm(model, tied, reshard_after_forward=reshard)
    both = [(ref, adam(ref)), (model, adam(model))]
    tokens = torch.randint(128, (2, 16))
    for step in range(10):
        results = [in_chunks(each, tokens) for each, _ in both]
        assert_close(results[1][0], results[0][0])
        average_grads(ref)
        assert_parity(ref, model)
        for before, now in itertools.pairwise(results[1][1]):
            assert (now - before).norm() > 0
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.parametrize(
    ("reshard", "tied", "recomputes"),
    [
        *itertools.product([True, False], [False, True], [False]),
        (True, False, True),
        (1, False, False),
    ],
)
def test_a_head_of_a_larger_unit_is_called_by_chunks(
    ranks: Any, reshard: bool | int, tied: bool, recomputes: bool
) -> None:
    ranks(2).run(chunks, reshard, tied, recomputes)


def accumulated_chunks(rank: int, world_size: int, reshard: bool) -> None:
    model = made(lambda: Chunked().double())
    ref = copy.deepcopy(model)
    with_norm(model, reshard_after_forward=reshard)
    batches = [torch.randint(128, (2, 16)) for _ in range(3)]
    for index, tokens in enumerate(batches):
        model.set_requires_gradient_sync(index == 2)
        model.set_is_last_backward(index == 2)
        for each in (ref, model):
            hidden = each(tokens, skip_head=True)
            grads = []
            for chunk in hidden.detach().chunk(2, 1):
                part = chunk.contiguous().requires_grad_()
                each.head(part).sum().backward()
                grads.append(part.grad)
            hidden.backward(torch.cat(grads, 1))
    average_grads(ref)
    assert_parity(ref, model)


def toggled_chunks(rank: int, world_size: int, reshard: bool, tied: bool) -> None:
    """A loss by chunks: the head is gathered for the first one, and freed after the last."""
    model = made(lambda: Chunked(tied=tied).double())
    ref = copy.deepcopy(model)
    with_norm(model, tied, reshard_after_forward=reshard)
    both = [(ref, adam(ref)), (model, adam(model))]
    tokens = torch.randint(128, (2, 16))
    for step in range(5):
        for each, _ in both:
            hidden = each(tokens, skip_head=True)
            gathers, grads = [], []
            toggle(each, False)
            for chunk in hidden.detach().chunk(4, 1):
                part = chunk.contiguous().requires_grad_()
                with count_collectives() as seen:
                    each.head(part).sum().backward()
                gathers.append(seen.count("all_gather"))
                grads.append(part.grad)
            toggle(each, True)
            assert gathers == [int(each is model), 0, 0, 0]
            hidden.backward(torch.cat(grads, 1))
        average_grads(ref)
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)


def toggle(model: Any, on: bool) -> None:
    if isinstance(model.head, FSDPModule):
        model.head.set_reshard_after_forward(on)
        model.head.set_reshard_after_backward(on)
        if on:
            model.head.reshard()
            assert not model._fxshard._lying


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_what_stays_unsharded_of_a_larger_unit(ranks: Any, reshard: bool, tied: bool) -> None:
    ranks(2).run(toggled_chunks, reshard, tied)


@pytest.mark.parametrize("reshard", [True, False])
def test_chunks_of_a_head_under_accumulation(ranks: Any, reshard: bool) -> None:
    ranks(2).run(accumulated_chunks, reshard)


def cast_chunks(rank: int, world_size: int, reshard: bool, tied: bool, everywhere: bool) -> None:
    """Outputs in bf16, of the inner units alone or of the root too; a unit each is the same.

    Of tied parameters, which are in one unit in any case, dtypes alone are compared."""
    options = {"reshard_after_forward": reshard}
    inner = MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16)
    root = inner if everywhere else MixedPrecisionPolicy(torch.float32)
    models = []
    for together in (True,) if tied else (True, False):
        model = made(lambda: Chunked(tied=tied))
        parts = [model.norm, model.head]
        if not tied:
            fxshard.fully_shard(model.embed, mp_policy=root, **options)
        fxshard.fully_shard(model.body, mp_policy=root, **options)
        for part in [[model.embed, *parts] if tied else parts] if together else parts:
            fxshard.fully_shard(part, mp_policy=inner, **options)
        fxshard.fully_shard(model, mp_policy=root, **options)
        models.append((model, adam(model)))
    torch.manual_seed(3)
    tokens = torch.randint(128, (2, 16))
    for step in range(10):
        found = [cast_chunk_by_chunk(model, tokens) for model, _ in models]
        for _, optim in models:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
        found = [
            (*each, [param.to_local() for param in model.parameters()])
            for each, (model, _) in zip(found, models, strict=True)
        ]
        for other in found[1:]:
            assert_close(found[0], other)


def cast_chunk_by_chunk(model: Any, tokens: torch.Tensor) -> tuple[Any, ...]:
    """The total loss, the head's gradient after the last chunk, and all gradients."""
    hidden = model(tokens, skip_head=True)
    grads, heads, total = [], [], 0.0
    for chunk in hidden.detach().float().chunk(4, 1):
        part = chunk.contiguous().requires_grad_()
        out = model.head(part)
        assert hidden.dtype == out.dtype == torch.bfloat16
        loss = out.sum()
        loss.backward()
        total += loss.item()
        grads.append(part.grad)
        heads.append(model.head.weight.grad.full_tensor())
    for before, now in itertools.pairwise(heads):
        assert (now - before).norm() > 0
    hidden.backward(torch.cat(grads, 1).to(hidden.dtype))
    return total, heads[-1], [param.grad.to_local().clone() for param in model.parameters()]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_outputs_of_a_head_of_a_larger_unit_are_cast(
    ranks: Any, reshard: bool, tied: bool, everywhere: bool
) -> None:
    ranks(2).run(cast_chunks, reshard, tied, everywhere)
