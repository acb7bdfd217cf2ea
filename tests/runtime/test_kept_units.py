"""`set_reshard_after_backward(False)`: units stay unsharded for the next forward."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError, StepError
from tests.oracles import count_collectives
from tests.ranks import RankError
from tests.runtime.test_unit_methods import assert_same, batch, both, eager, grads, net, step


def microbatches(rank: int, world_size: int) -> None:
    """Three micro-batches without sync: the collectives and gradients of FSDP2, and of eager."""
    for reshard in (False, True):
        counts = []
        for model in both():
            model.set_reshard_after_forward(reshard)
            model.set_reshard_after_backward(False)
            seen = []
            for number in range(3):
                model.set_requires_gradient_sync(number == 2)
                forward, backward = step(model, rank, number)
                seen.append((forward.count("all_gather"), backward.count("all_gather")))
            counts.append(seen)
            for module in (model, *model.blocks):
                module.reshard()  # until then FSDP2's model has parameters without gradients
            assert_same(grads(model), eager(world_size, 3))
        assert counts[0] == counts[1]
        assert [forward for forward, _ in counts[1]] == [4, 0, 0]


def test_micro_batches_gather_once(ranks: Any) -> None:
    ranks(2).run(microbatches)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Of the matrices alone: it writes into shards by a way of its own."""
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sees_changes(rank: int, world_size: int, optimizer: Any) -> None:
    """After a step of the optimizer what was kept is old, and gathered again; then it is not."""
    reference = net()
    _, model = both()
    model.set_reshard_after_backward(False)
    mine, theirs = optimizer(model), optimizer(reference)
    for number in range(3):
        joined = torch.cat([batch(r, number) for r in range(world_size)])
        expected = reference(joined)
        expected.backward()
        with count_collectives() as seen:
            loss = model(batch(rank, number))
        assert seen.count("all_gather") == 4
        loss.backward()
        for each in (mine, theirs):
            each.step()
            each.zero_grad()
    with torch.no_grad(), count_collectives() as seen:
        model(batch(rank, 9))
    assert seen.count("all_gather") == 4  # the last step changed the shards
    assert_same(
        {n: p.full_tensor() for n, p in model.named_parameters()},
        {n: p.detach() for n, p in reference.named_parameters()},
    )


def changed_early(rank: int, world_size: int) -> None:
    """A parameter that changes between forward and backward, which reads what forward gathered."""
    reference = net()
    _, model = both(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    loss = model(batch(rank))
    for each in (model, reference):
        with torch.no_grad():
            each.blocks[1].up.weight.mul_(2)
    loss.backward()
    with torch.no_grad():
        assert_close(model(batch(rank)), reference(batch(rank)))


def test_a_change_before_backward_is_seen(ranks: Any) -> None:
    ranks(2).run(changed_early)


@pytest.mark.parametrize("optimizer", [sgd, muon])
def test_a_step_of_the_optimizer_is_seen(ranks: Any, optimizer: Any) -> None:
    ranks(2).run(sees_changes, optimizer)


def evaluates(rank: int, world_size: int) -> None:
    """Without gradients, what stays after forward is there for the next one, of either kind."""
    counts = []
    for model in both(reshard_after_forward=False):
        model.set_reshard_after_backward(False)
        seen = []
        for grad in (False, False, True, False):
            with torch.set_grad_enabled(grad), count_collectives() as forward:
                loss = model(batch(rank))
            if grad:
                loss.backward()
            seen.append(forward.count("all_gather"))
        counts.append(seen)
    assert counts[0] == counts[1] == [4, 0, 0, 0]


def test_evaluation_leaves_what_it_has_gathered(ranks: Any) -> None:
    ranks(2).run(evaluates)


def twice(rank: int, world_size: int) -> None:
    """What a retained graph reads is not what the next forward takes, and frees."""
    for reshard in (True, False):
        _, model = both(reshard_after_forward=reshard)
        model.set_reshard_after_backward(False)
        loss = model(batch(rank))
        loss.backward(retain_graph=True)
        with torch.no_grad():
            model(batch(rank, 1))
        loss.backward()
        once = eager(world_size, 1)
        assert_same(grads(model), {n: g * 2 for n, g in once.items() if g is not None})


def test_a_graph_that_is_retained(ranks: Any) -> None:
    ranks(2).run(twice)


def test_in_one_process() -> None:
    model: Any = fxshard.compile(net(), world_size=2, units=["blocks.*"])
    model.set_reshard_after_backward(False)
    reference = net()
    for number in range(3):
        model(batch(0, number)).backward()
        reference(batch(0, number)).backward()
        assert len(model._fxshard.kept) == len(list(model.parameters()))
    assert_same(grads(model), grads(reference))
    model.reshard()
    assert not model._fxshard.kept


def own_optimizer(rank: int, world_size: int) -> None:
    """That of the option `optimizer` steps local rows: what was kept is old after it."""
    model: Any = fxshard.compile(net(), units=["blocks.*"], optimizer=torch.optim.AdamW)
    model.set_reshard_after_backward(False)
    step(model, rank)
    assert model._fxshard.unsharded_now()
    model.optimizer.step()
    assert not model._fxshard.unsharded_now()


def test_a_step_of_our_own_optimizer_is_seen(ranks: Any) -> None:
    ranks(2).run(own_optimizer)


# -- reshard between a forward and its backward ----------------------------------------------------


def in_between(rank: int, world_size: int) -> None:
    """Backward gathers again what `reshard` has freed after forward: per unit once, as in FSDP2."""
    expected = eager(world_size, 1)
    for fqns in ([""], ["blocks.0", "blocks.2"], ["", "blocks.0", "blocks.1", "blocks.2"]):
        counts = []
        for model in both(reshard_after_forward=False):
            loss = model(batch(rank))
            lying = bytes_left(model)
            for fqn in fqns:
                model.get_submodule(fqn).reshard()
            freed = lying - bytes_left(model)
            with count_collectives() as seen:
                loss.backward()
            counts.append((seen.count("all_gather"), seen.count("reduce_scatter")))
            assert_same(grads(model), expected)
        assert counts[0] == counts[1]
        if "" not in fqns:  # backward reads [h, 5] and, of 2 ranks, [5 + 1, h] of a block
            assert freed == sum(4 * 11 * (6 + 2 * int(fqn[-1])) for fqn in fqns)
        assert len(fqns) < 4 or bytes_left(model) == 0 < freed


def bytes_left(model: Any) -> int:
    """Of the unsharded parameters that calls have left for their backwards; 0 of FSDP2's model."""
    if not hasattr(model, "_fxshard"):
        return 0
    calls = [known() for known in model._fxshard.between]
    rows = [t for each in calls if each for t in each._rows.values()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in rows}.values())


def test_reshard_between_a_forward_and_its_backward(ranks: Any) -> None:
    ranks(2).run(in_between)


def stepped_between(rank: int, world_size: int) -> None:
    """What was freed is not gathered from shards that have changed."""
    _, model = both(reshard_after_forward=False)
    loss = model(batch(rank))
    model.blocks[1].reshard()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    with pytest.raises(StepError, match=r"'blocks.1.up.weight' was changed in place between"):
        loss.backward()


def test_what_was_freed_and_changed_is_refused(ranks: Any) -> None:
    ranks(2).run(stepped_between)


def left_alone(rank: int, world_size: int) -> None:
    _, model = both(reshard_after_forward=False)
    loss = model(batch(rank))
    if rank == 0:
        model.reshard()
    loss.backward()


def test_reshard_on_some_ranks_alone_is_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match="RankMismatchError"):
        ranks(2).run(left_alone)


# -- what it does not go together with -------------------------------------------------------------


def refusals(rank: int, world_size: int) -> None:
    for options, said in (
        ({"max_inflight": 2}, "max_inflight"),
        ({"ranks_may_differ": True}, "ranks_may_differ"),
        ({"optimizer_in_backward": True, "optimizer": torch.optim.SGD}, "optimizer_in_backward"),
        ({"reshard_after_forward": {"": 2}}, "a smaller group"),
    ):
        model = fxshard.compile(net(), units=["blocks.*"], **options)
        with pytest.raises(ConfigError, match=f"unit '.*' does not go together with.*{said}"):
            model.set_reshard_after_backward(False)


def test_what_leaves_nothing_to_keep_is_refused(ranks: Any) -> None:
    ranks(2).run(refusals)
