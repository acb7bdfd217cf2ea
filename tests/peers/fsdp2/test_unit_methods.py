"""Several files: methods of `FSDPModule` on units, and several modules as one unit."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn import functional as F
from torch.testing import assert_close

import fxshard
from tests.oracles import Collectives, count_collectives
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
from tests.peers.fsdp2.test_comm import Widths, traced_step
from tests.peers.fsdp2.test_training_composed import Chunked, Tied, hybrid_mesh, in_chunks
from tests.ranks import told

# -- prefetching -----------------------------------------------------------------------------------


def ahead(layers: Any, count: int, backward: bool) -> None:
    """Each layer launches the next ones: in forward those behind it, in backward those before."""
    layers = list(layers)[::-1] if backward else list(layers)
    for index, layer in enumerate(layers[: len(layers) - count]):
        wanted = layers[index + 1 : index + 1 + count]
        if backward:
            layer.set_modules_to_backward_prefetch(wanted)
        else:
            layer.set_modules_to_forward_prefetch(wanted)


def prefetching(rank: int, world_size: int) -> None:
    model = made(lambda: Transformer(Args(layers=8)))
    ref = ddp(copy.deepcopy(model))
    shard(model)
    for backward in (False, True):
        ahead(model.layers, 2, backward)
    tokens = model.tokens(2, 8)
    train_alike(ref, model, lambda: (tokens,))


def test_layers_gathered_two_ahead_train_as_ddp(ranks: Any) -> None:
    ranks(2).run(prefetching)


class Wider(Widths):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(MLP(8, multiplier=5, bias=False))


def said(calls: Collectives) -> list[str]:
    names = {8 * 4: "root"} | {i * 2 * 64 * 4: str(i - 2) for i in (2, 3, 4, 5)}
    short = {"all_gather": "+", "reduce_scatter": "-"}
    return [short[call.kind] + names[call.nbytes] for call in calls.calls]


def ordered(rank: int, world_size: int, count: int) -> None:
    """The order of the launches, when layers say what is gathered ahead of backward."""
    model = made(Wider)
    shard(model, reshard_after_forward=True)
    ahead(model.layers, count, True)
    for _ in range(2):
        loss = model(torch.ones(2, 8)).sum()
        with count_collectives() as backward:
            loss.backward()
        model.zero_grad()
    gathers = [each for each in said(backward) if each[0] == "+"]
    assert gathers == ["+root", "+3", "+2", "+1", "+0"]
    # what is launched before the gradients of layer 3 are reduced
    assert said(backward).index("-3") == 2 + count


@pytest.mark.parametrize("count", [1, 2])
def test_units_say_what_backward_gathers_ahead(ranks: Any, count: int) -> None:
    ranks(2).run(ordered, count)


def misled(rank: int, world_size: int) -> None:
    """A unit gathers ahead what backward does not need any more."""
    model = made(lambda: MLP(16))
    ref = copy.deepcopy(model)
    shard(model)
    model.in_proj.set_modules_to_backward_prefetch([model.out_proj])
    x = torch.randn(2, 16)
    train_alike(ref, model, lambda: (x,), 3, after=average_grads)


def test_a_unit_gathers_ahead_what_is_not_needed(ranks: Any) -> None:
    ranks(2).run(misled)


# -- several modules as one unit -------------------------------------------------------------------


def grouped(rank: int, world_size: int, reshard: bool, how: str, tied: bool) -> None:
    args = Args(layers=3, vocab=64, tied=tied, checkpoint=how == "utils")
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
    tokens = torch.randint(64, (3, 16))
    train_alike(ref, model, lambda: (tokens,), parity=how != "wrapper")
    for mine, theirs in zip(model.parameters(), ref.parameters(), strict=True):
        assert_close(mine.full_tensor(), theirs.detach())


@pytest.mark.sample(6)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", ["plain", "utils", "wrapper", "composable"])
@pytest.mark.parametrize("reshard", [True, False])
def test_modules_that_are_one_unit_train_as_ddp(
    ranks: Any, reshard: bool, how: str, tied: bool
) -> None:
    ranks(2).run(grouped, reshard, how, tied)


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


def chunks(rank: int, world_size: int, reshard: bool, tied: bool) -> None:
    model = made(lambda: Chunked(tied=tied).double())
    ref = copy.deepcopy(model)
    with_norm(model, tied, reshard_after_forward=reshard)
    both = [(ref, adam(ref)), (model, adam(model))]
    tokens = torch.randint(128, (2, 16))
    for _ in range(5):
        results = [in_chunks(each, tokens) for each, _ in both]
        assert_close(results[1][0], results[0][0])
        average_grads(ref)
        assert_parity(ref, model)
        for before, now in itertools.pairwise(results[1][1]):
            assert (now - before).norm() > 0
        for _, optim in both:
            optim.step()
            optim.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_head_of_a_larger_unit_is_called_by_chunks(ranks: Any, reshard: bool, tied: bool) -> None:
    ranks(2).run(chunks, reshard, tied)


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


@pytest.mark.parametrize("reshard", [True, False])
def test_chunks_of_a_head_under_accumulation(ranks: Any, reshard: bool) -> None:
    ranks(2).run(accumulated_chunks, reshard)


# -- accumulation by units -------------------------------------------------------------------------


def by_units(rank: int, world_size: int, mode: str, hybrid: bool, reshard: Any) -> None:
    """Reductions are left out for some units, or, of a hybrid strategy, the all-reduce alone."""
    mlps, micro = 3, 3
    model = made(lambda: nn.Sequential(nn.Linear(32, 32), *(MLP(32) for _ in range(mlps))))
    ref = copy.deepcopy(model)
    mesh = hybrid_mesh(world_size) if hybrid else None
    shard(model, *model[1:], mesh=mesh, reshard_after_forward=reshard)
    both = [(ref, adam(ref)), (model, adam(model))]

    def last(is_last: bool) -> None:
        if mode == "shards":
            model.set_requires_all_reduce(is_last)
        elif mode == "some":
            for mlp in model[1:3]:
                mlp.set_requires_gradient_sync(is_last)
        else:
            model.set_requires_gradient_sync(is_last, recurse=False)

    for step in range(5):
        with count_collectives() as seen:
            for index in range(micro):
                last(index == micro - 1)
                x = torch.randn(2, 32)
                losses = [each(x).sum() for each, _ in both]
                sum(losses).backward()
                assert_close(losses[1], losses[0])
        early = {"shards": mlps + 1, "some": mlps - 2 + 1, "root": mlps}[mode] * (micro - 1)
        assert seen.count("reduce_scatter") == mlps + 1 + early
        expected = mlps + 1 + (0 if mode == "shards" else early)
        assert seen.count("all_reduce") == (expected if hybrid else 0)
        average_grads(ref)
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 1)


BY_UNITS = [("shards", True), ("some", False), ("some", True), ("root", False), ("root", True)]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("mode", "hybrid"), BY_UNITS)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_some_reductions_are_left_out(ranks: Any, mode: str, hybrid: bool, reshard: Any) -> None:
    ranks(4 if hybrid or reshard == 2 else 2).run(by_units, mode, hybrid, reshard)


def pipelined(rank: int, world_size: int, ahead: bool) -> None:
    """One forward, one backward; all is gathered ahead of the first."""
    model = made(Transformer)
    ref = copy.deepcopy(model)
    shard(model, reshard_after_forward=False)
    both = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (ref, model)]
    batches = [model.tokens(2, 16) for _ in range(3)]
    if ahead:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)
    for index, tokens in enumerate(batches):
        model.set_requires_gradient_sync(index == 2)
        model.set_is_last_backward(index == 2)
        losses = []
        for each, _ in both:
            losses.append(each(tokens).sum())
            losses[-1].backward()
        assert_close(losses[1], losses[0])
    average_grads(ref)
    for _, optim in both:
        optim.step()
    assert_parity(ref, model)


@pytest.mark.parametrize("ahead", [False, True])
def test_microbatches_of_a_pipeline(ranks: Any, ahead: bool) -> None:
    ranks(2).run(pipelined, ahead)


# -- division --------------------------------------------------------------------------------------


def root_divides(rank: int, world_size: int, factor: float, shape: tuple[int, ...]) -> None:
    """A factor of the root is that of its own parameters."""
    model = made(lambda: Transformer(Args(tied=False)))
    ref = copy.deepcopy(model)
    names = ("outer", "inner")[: len(shape)]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    shard(model, mesh=mesh, reshard_after_forward=False)
    model.set_gradient_divide_factor(factor)
    of_blocks = {param for layer in ref.layers for param in layer.parameters()}

    def divide(ref: Any) -> None:
        for param in ref.parameters():
            param.grad /= world_size if param in of_blocks else factor
            dist.all_reduce(param.grad)

    tokens = model.tokens(2, 16)
    train_alike(
        ref,
        model,
        lambda: (tokens,),
        after=divide,
        optimizer=lambda each: torch.optim.AdamW(each.parameters(), lr=1e-2),
    )


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("factor", [8, 4])
def test_a_factor_of_the_root_alone(ranks: Any, factor: float, shape: Any) -> None:
    ranks(4).run(root_divides, factor, shape)


# -- what has no effect, and what is refused -------------------------------------------------------


def buffers(rank: int, world_size: int) -> dict[str, str]:
    """How many reductions are in flight changes no number; counts are checked."""
    model = made(lambda: Transformer(Args(tied=False)))
    ref = copy.deepcopy(model)
    shard(model)
    model.set_reduce_scatter_max_input_buffers(2)
    model.layers[0].set_reduce_scatter_max_input_buffers(3, recurse=False)
    tokens = model.tokens(2, 16)
    train_alike(ref, model, lambda: (tokens,), 3, after=average_grads)
    wrong: list[Any] = [0, 2.5, True]
    return {
        str(count): told(lambda count=count: model.set_reduce_scatter_max_input_buffers(count))
        for count in wrong
    }


def test_buffers_of_reductions(ranks: Any) -> None:
    for found in ranks(2).run(buffers):
        for said in found.values():
            assert said.startswith("ConfigError: max_input_buffers"), said


def kept(rank: int, world_size: int) -> dict[str, str]:
    """What stays unsharded behind backward, and hooks of a unit."""
    model = made(Transformer)
    shard(model, reshard_after_forward=False)
    forward, backward = traced_step(model)
    assert forward.count("all_gather") == 3 and backward.count("all_gather") == 0
    return {
        "after backward": told(lambda: model.layers[0].set_reshard_after_backward(False)),
        "hook": told(lambda: model.layers[0].set_all_reduce_hook(lambda output: None)),
        "gather": told(lambda: model.layers[0].set_custom_all_gather(None)),
    }


KEPT = {
    "after backward": "a forward gathers again what the backward before it freed",
    "hook": "use register_comm_hook(state, hook)",
    "gather": "leave it out",
}


def test_what_units_refuse(ranks: Any) -> None:
    for found in ranks(2).run(kept):
        for case, said in KEPT.items():
            assert said in found[case], (case, found[case])
