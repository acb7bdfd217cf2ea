"""FSDP2's methods on each module that `fxshard.fully_shard` was given: effects on ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError, StepError
from tests.fsdp2 import full
from tests.oracles import Collectives, count_collectives

WIDTH, ROWS = 5, 4  # which two ranks do not divide; rows of a rank's batch


class Block(nn.Module):
    """float32 [batch, width] -> the same; each has another number of parameters."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(6 + 2 * i) for i in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).square().mean()


def net(blocks: int = 3) -> Any:
    torch.manual_seed(0)
    return Net(blocks)


def both(blocks: int = 3, **options: Any) -> tuple[Any, Any]:
    """The same model, sharded by FSDP2 and by fxshard."""
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        model = net(blocks)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        found.append(model)
    return found[0], found[1]


def batch(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def step(model: Any, rank: int, number: int = 0) -> tuple[Collectives, Collectives]:
    """The collectives of a forward, and of its backward."""
    with count_collectives() as forward:
        loss = model(batch(rank, number))
    with count_collectives() as backward:
        loss.backward()
    return forward, backward


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    named = model.named_parameters()
    return {n: None if p.grad is None else full(p.grad) for n, p in named}


def eager(world_size: int, steps: int, blocks: int = 3) -> dict[str, Tensor | None]:
    """Gradients of one process, summed over steps on the joined batches."""
    model = net(blocks)
    for number in range(steps):
        model(torch.cat([batch(rank, number) for rank in range(world_size)])).backward()
    return grads(model)


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        assert (grad is None) == (other[name] is None), name
        if grad is not None:
            assert_close(grad, other[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def sizes(seen: Collectives, kind: str) -> list[int]:
    return [call.nbytes for call in seen.calls if call.kind == kind]


# -- which classes and names there are -------------------------------------------------------------


def classes(rank: int, world_size: int) -> None:
    _, model = both()
    for module in (model, *model.blocks):
        assert isinstance(module, fsdp.FSDPModule) and type(module).__name__.startswith("Fxshard")
    assert isinstance(model.blocks[0], Block) and not isinstance(model.inlet, fsdp.FSDPModule)
    assert not isinstance(model.blocks[0], fxshard.FxshardModule)
    for module in (model, model.blocks[0]):
        for name, theirs in vars(fsdp.FSDPModule).items():
            found = getattr(type(module), name)
            if callable(theirs) and not name.startswith("_set"):
                assert found is not theirs, name  # nothing of torch's FSDP2 runs
    with pytest.raises(ConfigError, match="set_custom_all_gather is not in fxshard"):
        model.blocks[0].set_custom_all_gather(None)
    with pytest.raises(ConfigError, match="has no state of torch's FSDP2"):
        model._set_unshard_async_op(True)
    with pytest.raises(ConfigError, match="sharded already"):
        fxshard.fully_shard(model.blocks[1])
    for module in (
        model,
        model.blocks[0],
    ):  # what is as asked for anyway, and what is not to be had
        module.set_reshard_after_backward(True)
        module.set_reduce_scatter_unused_params(False)
        module.set_reduce_scatter_max_input_buffers(2)
        module.set_post_optim_event(None)
        for refused, said in {
            "set_reshard_after_backward(1)": "expected True or False",
            "set_reduce_scatter_unused_params(True)": "ranks_may_differ=True",
            "set_reduce_scatter_max_input_buffers(0)": "expected an integer >= 1",
            "set_custom_reduce_scatter(print)": "register_comm_hook",
            "set_symm_mem_for_comm()": "leave it out",
        }.items():
            with pytest.raises(ConfigError, match=said):
                eval(f"module.{refused}", {"module": module, "print": print})
    with pytest.raises(ConfigError, match="call it on the model"):
        model.blocks[0].reset_iter_state()
    model.set_requires_gradient_sync(False)
    step(model, rank)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    step(model, rank)
    assert_same(grads(model), eager(world_size, 1))


def test_each_module_is_an_fsdp_module_of_which_nothing_of_torch_runs(ranks: Any) -> None:
    ranks(2).run(classes)


NEWER = {  # FSDP2's names of torch 2.15 and later ones, and a part of what to do instead
    "set_keep_unsharded_storage": "leave it out",
    "set_manual_backward_finalization": "leave it out, and finalize_backward too",
    "finalize_backward": "leave it out",
    "synchronize_gradients": r"outside of no_sync\(\)",
    "get_pending_gradients": r"into \.grad",
    "set_all_gather_layout": "leave it out",
    "set_reduce_scatter_input_fn": "leave it out",
}


class Finalizing(nn.Linear):
    def finalize_backward(self) -> int:
        return 3


def newer(rank: int, world_size: int) -> None:
    """Of a model of `compile` too, as what torch 2.13 has; a model's own name stays its own."""
    _, sharded = both()
    compiled: Any = fxshard.compile(net())
    for model in (sharded, sharded.blocks[0], compiled):
        for name, instead in NEWER.items():
            with pytest.raises(ConfigError, match=f"{name} is not in fxshard: .*{instead}"):
                getattr(model, name)(True)
    with pytest.raises(ConfigError, match=r"set_custom_reduce_scatter is not in fxshard: use reg"):
        compiled.set_custom_reduce_scatter(print)
    assert fxshard.compile(Finalizing(2, 2)).finalize_backward() == 3  # type: ignore[operator]


def test_names_of_newer_torches_are_refused_with_what_to_do(ranks: Any) -> None:
    ranks(2).run(newer)


# -- resharding, per module ------------------------------------------------------------------------


def reshards(rank: int, world_size: int) -> None:
    """The same sequence of calls on both; settings that come back find their programs."""
    theirs, ours = both()
    expected = eager(world_size, 1)
    turns: list[Callable[[Any], None]] = [
        lambda model: None,
        lambda model: model.blocks[1].set_reshard_after_forward(False),
        lambda model: model.set_reshard_after_forward(True, recurse=False),
        lambda model: model.set_reshard_after_forward(False),
        lambda model: model.blocks[2].set_reshard_after_forward(True),
        lambda model: model.set_reshard_after_forward(True),
    ]
    for turn in turns:
        found = []
        for model in (theirs, ours):
            turn(model)
            model.zero_grad()
            forward, backward = step(model, rank)
            assert forward.count("all_gather") == 4
            found.append(backward.count("all_gather"))
            assert_same(grads(model), expected)
        assert found[0] == found[1], turn
    programs = len(ours._fxshard.variants)
    assert programs == len(turns)
    for _ in range(3):  # nothing is traced twice
        for turn in (turns[3], turns[5]):
            turn(ours)
            step(ours, rank)
    assert len(ours._fxshard.variants) == programs
    assert [unit.reshard for unit in ours.plan.units] == [True, True, True, True]


def test_set_reshard_after_forward_of_one_module(ranks: Any) -> None:
    ranks(2).run(reshards)


def few_programs(rank: int, world_size: int) -> None:
    """Settings without end are no error: the programs of the oldest are dropped."""
    model = net()
    for block in model.blocks:
        fxshard.fully_shard(block)
    fxshard.fully_shard(model)
    runtime = model._fxshard
    runtime.config = runtime.config.changed({"max_variants": 2})
    for factor in (1.0, 2.0, 4.0, 8.0):
        model.blocks[0].set_gradient_divide_factor(factor)
        model.zero_grad()
        step(model, rank)
        weight = grads(model)["blocks.0.up.weight"]
        once = eager(world_size, 1)["blocks.0.up.weight"]
        assert weight is not None and once is not None
        assert_close(weight * factor, once * world_size)
        assert len(runtime.variants) <= 2


def test_the_number_of_programs_is_bounded(ranks: Any) -> None:
    ranks(2).run(few_programs)


# -- gradients -------------------------------------------------------------------------------------


def accumulates(rank: int, world_size: int) -> None:
    """One block does not reduce for two micro-batches; the others do each time."""
    theirs, ours = both()
    for model in (theirs, ours):
        counts = []
        for number in range(3):
            model.blocks[1].set_requires_gradient_sync(number == 2)
            _, backward = step(model, rank, number)
            counts.append(backward.count("reduce_scatter"))
            assert (grads(model)["blocks.1.up.weight"] is None) == (number < 2)
        assert counts == [3, 3, 4]
        assert_same(grads(model), eager(world_size, 3))
    assert_same(grads(ours), grads(theirs))
    for recurse in (False, True):
        for model in (theirs, ours):
            model.zero_grad()
            model.set_requires_gradient_sync(False, recurse=recurse)
            _, backward = step(model, rank)
            assert backward.count("reduce_scatter") == (0 if recurse else 3)
            model.set_requires_gradient_sync(True)
            _, backward = step(model, rank, 1)
            assert backward.count("reduce_scatter") == 4
            assert_same(grads(model), eager(world_size, 2))
    loss = ours(batch(rank))
    ours.blocks[0].set_requires_gradient_sync(False)
    with pytest.raises(StepError, match="between a forward and its backward"):
        loss.backward()


def test_set_requires_gradient_sync_of_one_module(ranks: Any) -> None:
    ranks(2).run(accumulates)


def hybrid(rank: int, world_size: int) -> None:
    """All-reduces are left out, of all units and of one, and partial sums are added up."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    theirs, ours = both(mesh=mesh)
    turns: list[list[Callable[[Any], None]]] = [
        [
            lambda model: model.set_requires_all_reduce(False),
            lambda model: model.set_requires_all_reduce(False),
            lambda model: model.set_requires_all_reduce(True),
        ],
        [
            lambda model: model.blocks[1].set_requires_all_reduce(False),
            lambda model: model.set_requires_gradient_sync(False),
            lambda model: model.set_requires_gradient_sync(True),
        ],
        [
            lambda model: model.set_requires_all_reduce(False, recurse=False),
            lambda model: model.set_requires_all_reduce(True, recurse=False),
        ],
    ]
    counts = [
        [(4, 0), (4, 0), (4, 4)],
        [(4, 3), (0, 0), (4, 4)],
        [(4, 3), (4, 4)],
    ]
    for which, sequence in enumerate(turns):
        for model in (theirs, ours):
            model.zero_grad()
            for number, turn in enumerate(sequence):
                turn(model)
                _, seen = step(model, rank, number)
                found = seen.count("reduce_scatter"), seen.count("all_reduce")
                assert found == counts[which][number], (which, number, model is ours)
            assert_same(grads(model), eager(world_size, len(sequence)))
        assert_same(grads(ours), grads(theirs))
    assert not ours._fxshard.partial and not ours._fxshard.accumulated
    ours.set_requires_all_reduce(False)
    step(ours, rank)
    assert ours._fxshard.partial
    ours.zero_grad()
    assert not ours._fxshard.partial


def test_set_requires_all_reduce(ranks: Any) -> None:
    ranks(4).run(hybrid)


def without_replicas(rank: int, world_size: int) -> None:
    for model in both():
        model.set_requires_all_reduce(False)
        step(model, rank)
        assert_same(grads(model), eager(world_size, 1))


def test_set_requires_all_reduce_without_replicas_has_no_effect(ranks: Any) -> None:
    ranks(2).run(without_replicas)


def divides(rank: int, world_size: int) -> None:
    """Of one unit, as in FSDP2: the factor of the root is the root unit's alone."""
    theirs, ours = both()
    for model in (theirs, ours):
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing inside
        model.set_gradient_divide_factor(8.0)
        model.blocks[1].set_reduce_scatter_divide_factor(1.0)
        step(model, rank)
    found, expected = grads(ours), eager(world_size, 1)
    assert_same(found, grads(theirs))
    for name, grad in found.items():
        factor = {"blocks.1": 1.0, "blocks.0": 2.0, "blocks.2": 2.0}.get(name[:8], 8.0)
        assert grad is not None and expected[name] is not None
        assert_close(grad, expected[name] * world_size / factor, rtol=1e-5, atol=1e-6)
    ours.blocks[1].set_gradient_divide_factor(None)
    ours.set_gradient_divide_factor(None)
    ours.zero_grad()
    step(ours, rank)
    assert_same(grads(ours), expected)
    with pytest.raises(ConfigError, match="> 0"):
        ours.blocks[0].set_gradient_divide_factor(0)


def test_divide_factors_of_modules(ranks: Any) -> None:
    ranks(2).run(divides)


# -- the order of all-gathers ----------------------------------------------------------------------


def prefetches(rank: int, world_size: int) -> None:
    theirs, ours = both(blocks=5)
    for model in (theirs, ours):
        for module in (model, *model.blocks):
            module.set_reshard_after_forward(True, recurse=False)
        plain = [sizes(seen, "all_gather") for seen in step(model, rank)]
        assert [len(set(each)) for each in plain] == [6, 6]  # each unit has a size of its own
        names = [dict(zip(plain[0], "r01234", strict=True))]
        names += [dict(zip(plain[1], "r43210", strict=True))]
        blocks = model.blocks
        blocks[0].set_modules_to_forward_prefetch([blocks[3], blocks[1]])
        blocks[1].set_modules_to_forward_prefetch([blocks[2]])
        blocks[4].set_modules_to_backward_prefetch([blocks[1], blocks[3]])
        model.zero_grad()
        found = step(model, rank)
        orders = [
            "".join(known[nbytes] for nbytes in sizes(seen, "all_gather"))
            for known, seen in zip(names, found, strict=True)
        ]
        assert orders == ["r03124", "r41320"], model is ours
        assert_same(grads(model), eager(world_size, 1, blocks=5))
        blocks[0].set_modules_to_forward_prefetch([])
        blocks[1].set_modules_to_forward_prefetch([])
        blocks[4].set_modules_to_backward_prefetch([])
    with pytest.raises(ConfigError, match="no unit of the same model"):
        ours.blocks[0].set_modules_to_forward_prefetch([ours.inlet])


def test_explicit_prefetching_sets_the_order_of_all_gathers(ranks: Any) -> None:
    ranks(2).run(prefetches)


class Table(nn.Module):
    """int64 [batch, 4] -> float32: backward needs no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens)).square().mean()


def no_unshard(rank: int, world_size: int) -> None:
    """FSDP2 leaves the all-gather of the embedding out when told to; fxshard always does."""
    tokens = torch.arange(4) + rank
    found = []
    for fully_shard in (fsdp.fully_shard, fxshard.fully_shard):
        for told in (True, False):
            torch.manual_seed(0)
            model: Any = Table()
            for part in (model.table, model.out):
                fully_shard(part)
            fully_shard(model)
            model.table.set_unshard_in_backward(told)
            model.set_is_last_backward(True)
            loss = model(tokens)
            with count_collectives() as backward:
                loss.backward()
            found.append((backward.count("all_gather"), grads(model)))
    assert [count for count, _ in found] == [2, 1, 1, 1]
    for _, mine in found[1:]:
        assert_same(mine, found[0][1])


def test_backward_unshards_only_what_it_reads(ranks: Any) -> None:
    ranks(2).run(no_unshard)


def not_last(rank: int, world_size: int) -> None:
    """After a backward that is not the last one, `.grad` is complete all the same."""
    for model in both():
        for number in range(2):
            model.set_is_last_backward(number == 1)
            step(model, rank, number)
        assert_same(grads(model), eager(world_size, 2))


def test_set_is_last_backward(ranks: Any) -> None:
    ranks(2).run(not_last)


# -- between phases --------------------------------------------------------------------------------


def unshards(rank: int, world_size: int) -> None:
    """Of one module: one all-gather for its unit, which the call of the module then uses."""
    theirs, ours = both()
    alone = net()
    for model in (theirs, ours):
        for module in model.blocks:
            assert isinstance(module.up.weight, DTensor)
        if model is theirs:
            model(batch(rank))  # FSDP2 finds its root at the first forward
        with count_collectives() as seen:
            handle = model.blocks[1].unshard(async_op=True)
            handle.wait()
        assert seen.count("all_gather") == len(seen.calls) == 1
        assert not isinstance(model.blocks[1].up.weight, DTensor)
        assert isinstance(model.blocks[0].up.weight, DTensor)
        assert torch.equal(model.blocks[1].up.weight, alone.blocks[1].up.weight)
        model.blocks[1].reshard()
        assert isinstance(model.blocks[1].up.weight, DTensor)
        model.blocks[1].unshard()
        with count_collectives() as seen:
            out = model.blocks[1](batch(rank))
        assert seen.count("all_gather") == 0, model is ours
        assert_close(out, alone.blocks[1](batch(rank)))
    with ours.blocks[2].unshard():
        assert not isinstance(ours.blocks[2].up.weight, DTensor)
    assert isinstance(ours.blocks[2].up.weight, DTensor)
    ours.blocks[0].unshard()
    ours.zero_grad()
    step(ours, rank)  # a call of the model ends it
    assert isinstance(ours.blocks[0].up.weight, DTensor)
    assert_same(grads(ours), eager(world_size, 1))
    ours.blocks[0].unshard()
    with torch.no_grad():
        ours.blocks[0].up.weight.zero_()
    with pytest.raises(StepError, match=r"'blocks\.0\.up\.weight' was written"):
        ours.blocks[0].reshard()
    assert_close(full(ours.blocks[0].up.weight), alone.blocks[0].up.weight.detach())


def test_unshard_and_reshard_of_one_module(ranks: Any) -> None:
    ranks(2).run(unshards)


def stepped_meanwhile(rank: int, world_size: int) -> None:
    """What an optimizer has stepped since `unshard` is gathered again."""
    _, model = both()
    alone = net()
    step(model, rank)
    for name, param in alone.named_parameters():
        param.grad = eager(world_size, 1)[name]
    model.blocks[0].unshard()
    model.blocks[0].reshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[0].unshard()
    optimizer.step()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_close(model.blocks[0](batch(rank)), alone.blocks[0](batch(rank)), rtol=1e-5, atol=1e-6)


def test_a_step_between_unshard_and_a_call_is_seen(ranks: Any) -> None:
    ranks(2).run(stepped_meanwhile)
