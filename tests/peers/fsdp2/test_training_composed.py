"""test_fully_shard_training.py, further: checkpoints, ties, accumulation, hybrid sharding."""

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
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
from tests.ranks import told

ON_CPU = CPUOffloadPolicy(pin_memory=False)


def nonroot(rank: int, world_size: int) -> None:
    """Through the root, and then through one of its units."""
    model = made(lambda: nn.Sequential(*(MLP(32) for _ in range(3))))
    ref = copy.deepcopy(model)
    shard(model)
    both = [(ref, adam(ref)), (model, adam(model))]
    x, losses = torch.randn(8, 32), []
    for part in (lambda each: each, lambda each: each[0]):
        for each, optim in both:
            losses.append(part(each)(x).sum())
            losses[-1].backward()
            if each is ref:
                average_grads(ref)
            optim.step()
            optim.zero_grad()
    assert_close(losses[1], losses[0])
    assert_close(losses[3], losses[2])
    assert_close(model(x).sum(), ref(x).sum())


def test_a_unit_is_trained_alone_after_the_root(ranks: Any) -> None:
    ranks(2).run(nonroot)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) + self.inner(x))


def twice(rank: int, world_size: int, reshard: Any) -> None:
    model = made(Twice)
    ref = ddp(copy.deepcopy(model))
    shard(model, model.inner, reshard_after_forward=reshard)
    x = torch.randn(32, 4)
    train_alike(ref, model, lambda: (x,))


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_a_unit_runs_twice_in_forward(ranks: Any, reshard: Any) -> None:
    ranks(4 if reshard == 2 else 2).run(twice, reshard)


# -- activation checkpointing ----------------------------------------------------------------------


def checkpointed(rank: int, world_size: int, reshard: bool, how: str) -> None:
    args = Args(layers=3, vocab=1024, length=64, checkpoint=how == "utils")
    model = made(lambda: Transformer(args))
    ref = ddp(copy.deepcopy(model))
    if how == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Block))
    elif how == "composable":
        for layer in model.layers:
            checkpoint(layer)
    shard(model, reshard_after_forward=reshard)
    tokens = model.tokens(3, 64)
    train_alike(ref, model, lambda: (tokens,))


@pytest.mark.parametrize("how", ["utils", "wrapper", "composable"])
@pytest.mark.parametrize("reshard", [True, False])
def test_checkpointed_blocks_train_as_ddp(ranks: Any, reshard: bool, how: str) -> None:
    ranks(2).run(checkpointed, reshard, how)


def preferences(rank: int, world_size: int, reshard: bool, how: str) -> None:
    """Two forwards, and one loss over both."""
    model = made(lambda: Transformer(Args(layers=3, checkpoint=how == "utils")).double())
    ref = copy.deepcopy(model)
    if how == "composable":
        for layer in model.layers:
            checkpoint(layer)
    inner = [(x.attention, x.feed_forward, x) for x in model.layers]
    shard(model, *itertools.chain(*inner), reshard_after_forward=reshard)
    chosen, rejected = model.tokens(2, 8), model.tokens(2, 8)
    for each in (ref, model):
        (each(chosen).sum() - each(rejected).sum()).pow(2).backward()
    average_grads(ref)
    assert_parity(ref, model)


@pytest.mark.parametrize("how", ["utils", "composable"])
@pytest.mark.parametrize("reshard", [True, False])
def test_two_forwards_before_backward(ranks: Any, reshard: bool, how: str) -> None:
    ranks(2).run(preferences, reshard, how)


# -- a head that is called alone -------------------------------------------------------------------


class Chunked(nn.Module):
    """int64 [batch, sequence] -> logits, or what the head would get."""

    def __init__(self, dim: int = 32, vocab: int = 128, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(vocab, dim), nn.Linear(dim, dim, bias=False)
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, skip_head: bool = False) -> Tensor:
        hidden = self.norm(self.body(self.embed(tokens)))
        return hidden if skip_head else self.head(hidden)


def in_chunks(model: Any, tokens: Tensor, count: int = 4) -> tuple[float, list[Tensor]]:
    """The total loss, and the head's gradient after each chunk, whole."""
    hidden = model(tokens, skip_head=True)
    grads, seen, total = [], [], 0.0
    for chunk in hidden.detach().chunk(count, 1):
        part = chunk.contiguous().requires_grad_()
        loss = model.head(part).sum()
        loss.backward()
        total += loss.item()
        grads.append(part.grad)
        grad = model.head.weight.grad
        seen.append(grad.full_tensor() if isinstance(grad, DTensor) else grad.clone())
    hidden.backward(torch.cat(grads, 1))
    return total, seen


def chunks(rank: int, world_size: int, reshard: bool | int, recomputes: bool) -> None:
    model = made(lambda: Chunked().double())
    ref = copy.deepcopy(model)
    if recomputes:
        checkpoint(model.body)
    shard(model, reshard_after_forward=reshard)
    both = [(ref, adam(ref)), (model, adam(model))]
    tokens = torch.randint(128, (2, 16))
    for step in range(10):
        results = [in_chunks(each, tokens) for each, _ in both]
        assert_close(results[1][0], results[0][0])
        average_grads(ref)
        assert_parity(ref, model)
        whole = results[0][1][-1]
        dist.all_reduce(whole)
        assert_close(results[1][1][-1], whole / world_size)
        for before, now in itertools.pairwise(results[1][1]):
            assert (now - before).norm() > 0
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.parametrize(
    ("reshard", "recomputes"), [(True, False), (False, False), (1, False), (True, True)]
)
def test_a_head_is_called_by_chunks(ranks: Any, reshard: bool | int, recomputes: bool) -> None:
    ranks(2).run(chunks, reshard, recomputes)


class Between(nn.Module):
    """An fp32 tensor between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).float())


def casts(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model = made(Between)
    fxshard.fully_shard([model.a, model.b], mp_policy=policy)
    fxshard.fully_shard(model, mp_policy=policy)
    out = model(torch.randn(2, 32))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_inputs_of_each_module_of_a_list_are_cast(ranks: Any) -> None:
    ranks(2).run(casts)


def two_partial_forwards(rank: int, world_size: int) -> None:
    model = made(Chunked)
    ref = copy.deepcopy(model)
    fxshard.fully_shard([model.norm, model.head])
    fxshard.fully_shard(model)
    batches = torch.randint(128, (2, 2, 16))
    for each in (ref, model):
        sum(each(tokens, skip_head=True).sum() for tokens in batches).backward()
    average_grads(ref)
    assert_parity(ref, model)
    assert model.head.weight.grad is None


def test_two_forwards_without_the_head(ranks: Any) -> None:
    ranks(2).run(two_partial_forwards)


class Raiser(nn.Module):
    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped, self.armed = wrapped, False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise RuntimeError("boom")
        return self.wrapped(x)


def raising(rank: int, world_size: int) -> None:
    model = made(Chunked)
    model.body = Raiser(model.body)
    ref = copy.deepcopy(model)
    fxshard.fully_shard([model.norm, model.head])
    fxshard.fully_shard(model)
    tokens = torch.randint(128, (2, 16))
    model.body.armed = True
    with pytest.raises(RuntimeError, match="boom"):
        model(tokens, skip_head=True)
    model.body.armed = False
    for each in (ref, model):
        each(tokens).sum().backward()
    average_grads(ref)
    assert_parity(ref, model)


def test_after_an_exception_the_next_step_is_right(ranks: Any) -> None:
    ranks(2).run(raising)


# -- tied parameters -------------------------------------------------------------------------------


def tied(rank: int, world_size: int, reshard: bool, how: str) -> None:
    model = made(lambda: Transformer(Args(layers=3, checkpoint=how == "utils")))
    ref = ddp(copy.deepcopy(model))
    if how == "composable":
        for layer in model.layers:
            checkpoint(layer)
    shard(model, reshard_after_forward=reshard)
    train_alike(ref, model, lambda: (model.tokens(2, 16),))


@pytest.mark.parametrize("how", ["plain", "composable"])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tied_parameters_train_as_ddp(ranks: Any, count: int, reshard: bool, how: str) -> None:
    ranks(count).run(tied, reshard, how)


class Tied(nn.Module):
    def __init__(self, vocab: int = 17, dim: int = 16) -> None:
        super().__init__()
        self.tok_embeddings, self.output = (
            nn.Embedding(vocab, dim),
            nn.Linear(dim, vocab, bias=False),
        )
        self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.tok_embeddings(ids))


def apart(rank: int, world_size: int) -> str:
    model = Tied()
    fxshard.fully_shard(model.tok_embeddings)
    return told(lambda: fxshard.fully_shard(model.output))


def test_tied_parameters_of_two_calls_are_refused(ranks: Any) -> None:
    for said in ranks(2).run(apart):
        assert "was tied to" in said and "no module that holds one of the two" in said, said


def one_by_one(rank: int, world_size: int) -> None:
    """Blocks that are made, sharded and collected one after the other share no id by accident."""
    model = nn.Sequential()
    gc.freeze()  # what earlier tests have left is not what is to be collected
    for _ in range(8):
        block = made(lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16, bias=False)))
        model.append(block)
        fxshard.fully_shard(block)
        gc.collect()
    gc.unfreeze()
    fxshard.fully_shard(model)
    model(torch.randn(2, 4, 16)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_blocks_that_are_made_and_sharded_one_by_one(ranks: Any) -> None:
    ranks(2).run(one_by_one)


# -- accumulation ----------------------------------------------------------------------------------


def hybrid_mesh(world_size: int) -> Any:
    return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))


def accumulated(rank: int, world_size: int, hybrid: bool, reshard: Any, offload: bool) -> None:
    mlps, micro = 3, 3
    model = made(lambda: nn.Sequential(nn.Linear(32, 32), *(MLP(32) for _ in range(mlps))))
    ref = copy.deepcopy(model)
    shard(
        model,
        *model[1:],
        mesh=hybrid_mesh(world_size) if hybrid else None,
        reshard_after_forward=reshard,
        offload_policy=ON_CPU if offload else OffloadPolicy(),
    )
    both = [(ref, adam(ref)), (model, adam(model))]
    for step in range(5):
        with count_collectives() as seen:
            for index in range(micro):
                model.set_requires_gradient_sync(index == micro - 1)
                x = torch.randn(2, 32)
                losses = [each(x).sum() for each, _ in both]
                sum(losses).backward()
                assert_close(losses[1], losses[0])
        assert seen.count("reduce_scatter") == mlps + 1
        assert seen.count("all_reduce") == (mlps + 1) * hybrid
        # FSDP2 gathers the first layer's weight again, which its backward does not read
        in_backward = 0 if reshard is False else mlps
        assert seen.count("all_gather") == (mlps + 1 + in_backward) * micro
        average_grads(ref)
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 1)


ACCUMULATED = [
    (hybrid, reshard, offload)
    for hybrid, reshard, offload in itertools.product(
        [False, True], [True, False, 2], [False, True]
    )
    if reshard is True or not offload
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("hybrid", "reshard", "offload"), ACCUMULATED)
def test_gradients_accumulate_unreduced(
    ranks: Any, hybrid: bool, reshard: Any, offload: bool
) -> None:
    ranks(4).run(accumulated, hybrid, reshard, offload)


# -- hybrid sharding -------------------------------------------------------------------------------


def hybrid(rank: int, world_size: int, reshard: bool, dim: int, last: bool, how: str) -> None:
    model = made(
        lambda: nn.Sequential(
            nn.LayerNorm(dim, bias=False),
            MLP(dim, multiplier=3),
            MLP(dim),
            MLP(dim, multiplier=3),
        )
    )
    ref = ddp(copy.deepcopy(model))
    if how == "checkpoint":
        for part in model:
            checkpoint(part)
    shard(
        model,
        mesh=hybrid_mesh(world_size),
        reshard_after_forward=reshard,
        offload_policy=ON_CPU,
    )
    both = [(ref, adam(ref)), (model, adam(model))]
    assert_parity(ref, model)
    for step in range(5):
        for index in range(3):
            if last:
                model.set_requires_gradient_sync(index == 2)
            x, losses = torch.randn(8, dim), []
            for each, _ in both:
                losses.append(each(x).sum())
                losses[-1].backward()
            assert_close(losses[1], losses[0])
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
        assert_parity(ref, model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["plain", "checkpoint"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dim", [3, 16, 17])
@pytest.mark.parametrize("reshard", [False, True])
def test_hybrid_sharding_trains_as_ddp(
    ranks: Any, reshard: bool, dim: int, last: bool, how: str
) -> None:
    ranks(4).run(hybrid, reshard, dim, last, how)


# -- other methods than forward --------------------------------------------------------------------


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_proj = nn.Conv2d(3, 64, kernel_size=4, stride=4)

    def forward_features(self, images: Tensor) -> Tensor:
        return self.patch_proj(images).flatten(2).transpose(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_features(images).sum(1)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit, self.projector = Vision(), nn.Linear(64, 16)

    def forward(self, images: Tensor) -> Tensor:
        return self.projector(self.vit.forward_features(images))


def other_method(rank: int, world_size: int) -> None:
    model = made(Projected)
    ref = copy.deepcopy(model)
    shard(model)
    fxshard.register_fsdp_forward_method(model.vit, "forward_features")
    images = torch.randn(4, 3, 16, 16)
    train_alike(ref, model, lambda: (images,), 1, after=average_grads)


def test_forward_calls_another_method_of_a_unit(ranks: Any) -> None:
    ranks(2).run(other_method)
