"""Several files: methods of `FSDPModule` on units, and several modules as one unit."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from tests.oracles import Collectives, count_collectives
from tests.peers.fsdp1.shared import losses_alike
from tests.peers.fsdp2.common import (
    MLP,
    Args,
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
from tests.peers.fsdp2.test_training_composed import ON_CPU, hybrid_mesh
from tests.ranks import told

# -- prefetching -----------------------------------------------------------------------------------


def ahead(layers: Any, count: int, backward: bool) -> None:
    """Each layer launches the next ones: in forward those after it, in backward those before."""
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
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__(recomputes)
        self.layers.append(MLP(8, multiplier=5, bias=False))


def wider(how: str) -> Any:
    """On each rank the same; layers are recomputed in one of the ways that there are, or not."""
    model = made(lambda: Wider(how == "utils"))
    if how == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, MLP))
    elif how == "composable":
        for layer in model.layers:
            checkpoint(layer)
    return shard(model, reshard_after_forward=True)


def said(calls: Collectives) -> list[str]:
    names = {8 * 4: "root"} | {i * 2 * 64 * 4: str(i - 2) for i in (2, 3, 4, 5)}
    short = {"all_gather": "+", "reduce_scatter": "-"}
    return [short[call.kind] + names[call.nbytes] for call in calls.calls]


def ordered(rank: int, world_size: int, count: int, how: str) -> None:
    """The order of the launches, when layers say what is gathered ahead of backward."""
    model = wider(how)
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


HOW = ["plain", "utils", "composable", "wrapper"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [1, 2])
def test_units_say_what_backward_gathers_ahead(ranks: Any, count: int, how: str) -> None:
    """What a checkpoint recomputes is gathered once, for that and for the backward of it."""
    ranks(2).run(ordered, count, how)


class Launches(TorchDispatchMode):
    """The sizes of all-gathers, in bytes, and of the second factors of products, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append(tuple(args[1].shape))
        with count_collectives() as calls:
            made = func(*args, **(kwargs or {}))
        self.seen += [call.nbytes for call in calls.calls]
        return made


def ordered_forward(rank: int, world_size: int, how: str) -> None:
    """Layers say what is gathered ahead of forward: one layer, and then two."""
    model = wider(how)
    names = {8 * 4: "+root"} | {i * 2 * 64 * 4: f"+{i - 2}" for i in (2, 3, 4, 5)}
    names |= {(8, 8 * i): str(i - 2) for i in (2, 3, 4, 5)}
    expected = {
        1: ["+root", "+0", "+1", "0", "+2", "1", "+3", "2", "3"],
        2: ["+root", "+0", "+1", "+2", "0", "+3", "1", "2", "3"],
    }
    for count, order in expected.items():
        ahead(model.layers, count, False)
        with Launches() as launches:
            loss = model(torch.ones(2, 8)).sum()
        assert [names[each] for each in launches.seen if each in names] == order
        with count_collectives() as backward:
            loss.backward()
        assert said(backward)[:3] == ["+root", "+3", "+2"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", HOW)
def test_units_say_what_forward_gathers_ahead(ranks: Any, how: str) -> None:
    ranks(2).run(ordered_forward, how)


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


# -- accumulation by units -------------------------------------------------------------------------


def by_units(
    rank: int,
    world_size: int,
    mode: str,
    hybrid: bool,
    scatters: bool,
    reshard: Any,
    offload: bool = False,
    stays: bool = False,
) -> None:
    """Reductions are left out for some units, or, of a hybrid strategy, their all-reduces alone."""
    mlps, micro = 3, 3
    model = made(lambda: nn.Sequential(nn.Linear(32, 32), *(MLP(32) for _ in range(mlps))))
    ref = copy.deepcopy(model)
    mesh = hybrid_mesh(world_size) if hybrid else None
    policy = ON_CPU if offload else OffloadPolicy()
    shard(model, *model[1:], mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    both = [(ref, adam(ref)), (model, adam(model))]

    def last(is_last: bool) -> None:
        for part in model[1:3] if mode == "some" else [model]:
            switch = part.set_requires_all_reduce if scatters else part.set_requires_gradient_sync
            switch(is_last, recurse=mode != "root")

    for step in range(5):
        with count_collectives() as seen:
            for index in range(micro):
                last(index == micro - 1)
                if stays:
                    model.set_reshard_after_backward(index == micro - 1, recurse=mode != "root")
                x = torch.randn(2, 32)
                losses = [each(x).sum() for each, _ in both]
                sum(losses).backward()
                assert_close(losses[1], losses[0])
        reduced = mlps + 1 + {"all": 0, "some": mlps - 2 + 1, "root": mlps}[mode] * (micro - 1)
        assert seen.count("reduce_scatter") == ((mlps + 1) * micro if scatters else reduced)
        assert seen.count("all_reduce") == (reduced if hybrid else 0)
        if stays:  # the first forward gathers, and each backward what was resharded after forward:
            # of the root, which it does not read, to be kept; the last one keeps nothing
            again = (micro - 1) * mlps if mode == "root" else (micro * (mlps + 1) - 1) * reshard
            assert seen.count("all_gather") == mlps + 1 + again
        else:  # as in `test_gradients_accumulate_unreduced`
            in_backward = 0 if reshard is False else mlps
            assert seen.count("all_gather") == (mlps + 1 + in_backward) * micro
        average_grads(ref)
        assert_parity(ref, model)
        for _, optim in both:
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 1)


BY_UNITS = [  # mode, hybrid, scatters; none is left out of all units without a hybrid mesh
    ("all", True, True),
    *itertools.product(["some", "root"], [False], [False]),
    *itertools.product(["some", "root"], [True], [False, True]),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("mode", "hybrid", "scatters"), BY_UNITS)
@pytest.mark.parametrize(
    ("reshard", "offload"), [(True, False), (False, False), (2, False), (True, True)]
)
def test_some_reductions_are_left_out(
    ranks: Any, mode: str, hybrid: bool, scatters: bool, reshard: Any, offload: bool
) -> None:
    ranks(4).run(by_units, mode, hybrid, scatters, reshard, offload)


STAYS = [
    *itertools.product(["all", "root"], [False], [False], [False]),
    *itertools.product(["all", "root"], [True], [False, True], [False]),
    *itertools.product(["some"], [False], [False], [True, False]),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("mode", "hybrid", "scatters", "reshard"), STAYS)
def test_units_that_stay_unsharded(
    ranks: Any, mode: str, hybrid: bool, scatters: bool, reshard: bool
) -> None:
    ranks(4).run(by_units, mode, hybrid, scatters, reshard, False, True)


def pipelined(rank: int, world_size: int, ahead: bool, stays: bool = False) -> None:
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
        model.set_reshard_after_backward(index == 2 or not stays)
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
    ranks(2).run(pipelined, ahead, True)


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


# -- units that forward unshards -------------------------------------------------------------------


class Reduced(nn.Module):
    """What it makes is summed over ranks, outside of autograd, while something else runs."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> Any:
        y = F.relu(x @ self.weight)
        return y, dist.all_reduce(y, async_op=True)


class Three(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(MLP(dim) for _ in range(3))

    def forward(self, ys: list[torch.Tensor]) -> torch.Tensor:
        return sum(mlp(y) for mlp, y in zip(self.mlps, ys, strict=True))


class Around(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduced = nn.ModuleList(Reduced(dim) for _ in range(3))
        self.inner = Three(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ys, works = [], []
        for part, mlp in zip(self.reduced, self.inner.mlps, strict=True):
            y, work = part(x)
            ys.append(y)
            works.append(work)
            if isinstance(mlp, FSDPModule):
                mlp.unshard(async_op=True)
        for work in works:
            work.wait()
        return self.inner(ys)


def unsharded_ahead(rank: int, world_size: int) -> None:
    model = made(lambda: Around(8))
    ref = ddp(copy.deepcopy(model))
    shard(model.inner, *model.inner.mlps, reshard_after_forward=False)
    names = [f"inner.{fqn}" for fqn, _ in model.inner.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    both = [ref, ddp(model, broadcast_buffers=False)]
    losses_alike(both, torch.randn(2, 8))


def test_forward_unshards_units_ahead_of_them(ranks: Any) -> None:
    ranks(2).run(unsharded_ahead)


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


def some_buffers(rank: int, world_size: int, hybrid: bool, reshard: bool, count: int) -> None:
    """In bf16, beside the same model with the default: the numbers are the same."""
    mesh = init_device_mesh("cpu", (2, 2) if hybrid else (4,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    model = made(lambda: Transformer(Args(tied=False)))
    tokens, pair = model.tokens(2, 16), (copy.deepcopy(model), model)
    for each in pair:
        shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    model.set_reduce_scatter_max_input_buffers(count)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in pair]
    for _ in range(3):
        losses = [each(tokens).sum() for each in pair]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        for ours, theirs in zip(*(each.parameters() for each in pair), strict=True):
            assert_close(ours.grad.to_local(), theirs.grad.to_local())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(*(each.parameters() for each in pair), strict=True):
            assert_close(ours.to_local(), theirs.to_local())


@pytest.mark.sample(2)
@pytest.mark.parametrize("hybrid", [False, True], ids=["sharded", "hybrid"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshards", "stays"])
@pytest.mark.parametrize("count", [1, 2])
def test_numbers_of_buffers_change_no_number(
    ranks: Any, count: int, reshard: bool, hybrid: bool
) -> None:
    ranks(4).run(some_buffers, hybrid, reshard, count)


def test_buffers_of_reductions(ranks: Any) -> None:
    for found in ranks(2).run(buffers):
        for said in found.values():
            assert said.startswith("ConfigError: max_input_buffers"), said


def kept(rank: int, world_size: int) -> dict[str, str]:
    """What stays unsharded between forward and backward, and collectives of the user's."""
    model = made(Transformer)
    shard(model, reshard_after_forward=False)
    forward, backward = traced_step(model)
    assert forward.count("all_gather") == 3 and backward.count("all_gather") == 0
    return {
        "reduction": told(lambda: model.layers[0].set_custom_reduce_scatter(None)),
        "gather": told(lambda: model.layers[0].set_custom_all_gather(None)),
    }


KEPT = {
    "reduction": "use register_comm_hook(state, hook)",
    "gather": "leave it out",
}


def test_what_units_refuse(ranks: Any) -> None:
    for found in ranks(2).run(kept):
        for case, said in KEPT.items():
            assert said in found[case], (case, found[case])


# -- hooks after reductions ------------------------------------------------------------------------


def hook_all(model: nn.Module, hook: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)


def averaged_between(rank: int, world_size: int) -> Any:
    """Sharded over pairs of ranks, and averaged over the ranks that hold the same shard."""
    inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, ref = made(Transformer), made(Transformer)
    shard(model, mesh=inner["shard"])
    calls = []

    def hook(output: Tensor) -> None:
        calls.append(output.numel())
        dist.all_reduce(output, dist.ReduceOp.AVG, group=inner["replicate"].get_group())

    hook_all(model, hook)
    replicated = ddp(ref)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, ref)]
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        tokens = model.tokens(2, 16)
        losses = [each(tokens).sum() for each in (model, replicated)]
        sum(losses).backward()
        assert_close(*losses)
        for mine, theirs in zip(model.parameters(), ref.parameters(), strict=True):
            assert_close(mine.grad.full_tensor(), theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(calls) == 3 * len(model.plan.units)


def test_a_hook_after_reductions_averages_over_other_ranks(ranks: Any) -> None:
    ranks(4).run(averaged_between)


def hooked(rank: int, world_size: int, dtype: Any) -> None:
    """The hook gets what FSDP2 gives it, and may change it; twice with sums in between."""
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    found = []
    for way in ("fsdp2", "fully_shard", "compile"):
        model: Any = made(lambda: nn.Sequential(MLP(8), MLP(8)))
        if way == "compile":
            fxshard.compile(model, units=["*"], mixed_precision=policy)
        else:
            for unit in (*model, model):
                (fsdp if way == "fsdp2" else fxshard).fully_shard(unit, mp_policy=policy)
        seen: list[Tensor] = []

        def tripled(output: Tensor, seen: list[Tensor] = seen) -> None:
            seen.append(output.clone())
            output.mul_(3)

        if way == "compile":
            model.set_all_reduce_hook(tripled)
        else:
            hook_all(model, tripled)
        for step in range(3):
            model.set_requires_gradient_sync(step > 0)
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 8)).square().sum().backward()
        found.append((seen, [param.grad.to_local() for param in model.parameters()]))
    theirs, *others = found
    for ours in others:
        assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_a_hook_gets_what_fsdp2_gives_it(ranks: Any, dtype: Any) -> None:
    ranks(2).run(hooked, dtype)


def some_hooked(rank: int, world_size: int) -> dict[str, str]:
    some, copied, early = (made(lambda: nn.Sequential(MLP(8), MLP(8))) for _ in range(3))
    shard(some)
    some[0].set_all_reduce_hook(print)
    shard(copied, mesh=init_device_mesh("cpu", (2, 1)))
    fxshard.fully_shard(early[0]).set_all_reduce_hook(print)
    return {
        "one": told(lambda: some(torch.randn(2, 8))),
        "hybrid": told(lambda: copied[0].set_all_reduce_hook(print)),
        "stream": told(lambda: some[1].set_all_reduce_hook(print, stream=0)),
        "early": told(lambda: fxshard.fully_shard(early)),
        "none": told(lambda: some[1].set_all_reduce_hook(None)),
    }


HOOKS = {
    "one": "'0' has a hook, and '1' has none",
    "hybrid": "After all-reduces use parameter.register_post_accumulate_grad_hook",
    "stream": "stream cannot be set",
    "early": "'0' of this Sequential has a hook for its reductions. Set hooks after",
    "none": "None cannot be called",
}


def test_hooks_that_are_refused(ranks: Any) -> None:
    for found in ranks(2).run(some_hooked):
        for name, said in found.items():
            assert HOOKS[name] in said, (name, said)
