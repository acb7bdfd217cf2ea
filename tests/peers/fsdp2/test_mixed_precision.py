"""test_fully_shard_mixed_precision.py: dtypes of compute, reductions, inputs and outputs."""

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fxshard
from tests.oracles import Collectives, count_collectives
from tests.peers.fsdp2.common import MLP, adam, assert_parity, made, shard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RESHARD = [False, True, 2]


def stack() -> nn.Module:
    return nn.Sequential(*(MLP(16) for _ in range(3)))


def reduced(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean over 2 or 4 ranks, summed in `dtype` by a reduce-scatter.

    Halved before, and the rest divided after it, as FSDP2 does in fp16.
    """
    scattered = grad.to(dtype) / 2
    part = torch.empty_like(scattered.chunk(dist.get_world_size())[0])
    dist.reduce_scatter_tensor(part, scattered)
    whole = torch.empty_like(scattered)
    dist.all_gather_into_tensor(whole, part)
    return (whole / (dist.get_world_size() / 2)).to(FP32)


def assert_reduced_in(seen: Collectives, model: nn.Module, dtype: torch.dtype) -> None:
    """By the bytes of the reductions."""
    expected = sum(param.numel() for param in model.parameters()) * dtype.itemsize
    assert seen.nbytes("reduce_scatter") == expected


def in_low(rank: int, world_size: int, param: Any, reduce: Any, reshard: Any) -> None:
    """Beside a copy in the dtype of compute, whose fp32 original the optimizer steps."""
    model = made(stack)
    ref = copy.deepcopy(model)
    low = copy.deepcopy(ref).to(param)
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    shard(model, mp_policy=policy, reshard_after_forward=reshard)
    optimizers = adam(ref), adam(model)
    x = torch.randn(4, 16, dtype=param)
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = model(x).sum()
        with count_collectives() as seen:
            loss.backward()
        assert_reduced_in(seen, ref, reduce or param)
        theirs = low(x).sum()
        theirs.backward()
        for mine, other in zip(ref.parameters(), low.parameters(), strict=True):
            mine.grad, other.grad = reduced(other.grad, reduce or param), None
        assert_close(loss, theirs)
        for optimizer in optimizers:
            optimizer.step()
        assert_parity(ref, model)
        for mine, other in zip(ref.parameters(), low.parameters(), strict=True):
            other.detach().copy_(mine)


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("param", [BF16, FP16])
def test_compute_in_low_precision(ranks: Any, param: Any, reshard: Any) -> None:
    ranks(4 if reshard == 2 else 2).run(in_low, param, None, reshard)


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize(("param", "reduce"), [(BF16, FP32), (FP32, BF16)])
def test_reductions_in_a_dtype_of_their_own(
    ranks: Any, param: Any, reduce: Any, reshard: Any
) -> None:
    ranks(4 if reshard == 2 else 2).run(in_low, param, reduce, reshard)


class WithIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.whole = nn.Parameter(torch.ones(16, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def frozen_first(rank: int, world_size: int) -> None:
    """All is frozen in the first forward, and trained later; one parameter holds integers."""
    model = made(WithIntegers)
    fxshard.fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    model.requires_grad_(False)
    x = torch.randn(4, 16)
    with torch.no_grad():
        assert model(x).dtype == BF16
    model.layers.requires_grad_(True)
    with count_collectives() as seen:
        model(x).sum().backward()
    assert_reduced_in(seen, model.layers, FP32)
    assert all(param.grad.dtype == FP32 for param in model.layers.parameters())
    assert model.whole.dtype == torch.int64 and model.whole.grad is None


def test_reductions_after_a_frozen_forward(ranks: Any) -> None:
    ranks(2).run(frozen_first)


def accumulated(rank: int, world_size: int, reshard: bool) -> None:
    """Unreduced gradients of bf16 compute are summed in fp32, and sent once.

    Units that stay unsharded after forward stay so until the last backward.
    """
    model = made(stack)
    ref = copy.deepcopy(model)
    low = copy.deepcopy(ref).to(BF16)
    shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32), reshard_after_forward=reshard)
    optimizers = adam(ref), adam(model)
    batches = torch.randn(8, 16, dtype=BF16).chunk(4)
    for step in range(10):
        with count_collectives() as seen:
            for index, x in enumerate(batches):
                model.set_requires_gradient_sync(index == 3)
                model.set_reshard_after_backward(reshard or index == 3)
                losses = [each(x).sum() for each in (low, model)]
                assert losses[1].dtype == BF16
                assert_close(losses[1], losses[0])
                sum(losses).backward()
                for mine, other in zip(ref.parameters(), low.parameters(), strict=True):
                    grad = other.grad.to(FP32)
                    mine.grad = grad if mine.grad is None else mine.grad + grad
                    other.grad = None
        assert_reduced_in(seen, ref, FP32)
        assert seen.count("reduce_scatter") == len(model)
        assert seen.count("all_gather") == len(model) * (2 * len(batches) if reshard else 1)
        assert seen.count() == seen.count("reduce_scatter") + seen.count("all_gather")
        for mine in ref.parameters():
            dist.all_reduce(mine.grad)
            mine.grad /= world_size
        assert_parity(ref, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for mine, other in zip(ref.parameters(), low.parameters(), strict=True):
            other.detach().copy_(mine)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_unreduced_gradients_are_summed_in_the_dtype_of_reductions(
    ranks: Any, count: int, reshard: bool
) -> None:
    ranks(count).run(accumulated, reshard)


# -- structured inputs and outputs -----------------------------------------------------------------


@dataclasses.dataclass
class Two:
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Nested:
    inner: Two
    z: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class To(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        if self.kind is Nested:
            return Nested(Two(x, x.clone()), x.clone())
        return self.kind(x, x.clone())


class Each(nn.Module):
    """One layer for all tensors of a structure."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)

    def forward(self, held: Any) -> Any:
        if isinstance(held, Nested):
            inner = Two(self.layer(held.inner.x), self.layer(held.inner.y))
            return Nested(inner, self.layer(held.z))
        return type(held)(self.layer(held.x), self.layer(held.y))


class Total(nn.Module):
    def forward(self, held: Any) -> Tensor:
        if isinstance(held, Nested):
            return held.inner.x + held.inner.y + held.z
        return held.x + held.y


def structured(rank: int, world_size: int, kind: type, param: Any, reduce: Any) -> None:
    dim, rows = 16, 2
    model = made(lambda: nn.Sequential(To(kind), Each(dim), Each(dim), Total()))
    ref = copy.deepcopy(model)
    low = copy.deepcopy(ref).to(param or FP32)
    shard(model, mp_policy=MixedPrecisionPolicy(param, reduce))
    optimizers = adam(ref), adam(model)
    torch.manual_seed(1)
    for step in range(10):
        whole = torch.rand(world_size * rows, dim)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = model(whole[rank * rows :][:rows]).sum()
        loss.backward()
        theirs = low(whole.to(param or FP32)).sum()
        theirs.backward()
        for mine, other in zip(ref.parameters(), low.parameters(), strict=True):
            mine.grad, other.grad = other.grad.to(FP32) / world_size, None
        total = loss.detach().float()
        dist.all_reduce(total)
        assert_close(total, theirs.detach().float(), **({} if param is None else BF16_CLOSE))
        for optimizer in optimizers:
            optimizer.step()
        if param is None:
            assert_parity(ref, model)
        for mine, other in zip(ref.parameters(), low.parameters(), strict=True):
            other.detach().copy_(mine)


BF16_CLOSE = {"rtol": 1.6e-2, "atol": 1e-5}  # of assert_close for bf16


@pytest.mark.parametrize("dtypes", [(None, None), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("kind", [Two, Nested, Named])
def test_structured_activations(ranks: Any, kind: type, dtypes: Any) -> None:
    ranks(2).run(structured, kind, *dtypes)


# -- casts of inputs and outputs -------------------------------------------------------------------


class Expects(nn.Module):
    """A layer that asserts the dtype of its input while it is traced, and may cast it itself."""

    def __init__(self, dtype: torch.dtype, cast: bool) -> None:
        super().__init__()
        self.layer, self.dtype, self.cast = nn.Linear(100, 100), dtype, cast

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.dtype
        return self.layer(x.to(self.layer.weight.dtype) if self.cast else x)


class Chain(nn.Module):
    def __init__(self, first: torch.dtype, second: torch.dtype, cast: bool = False) -> None:
        super().__init__()
        self.c1, self.c2 = Expects(first, cast), Expects(second, cast)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == FP32
        return self.c2(self.c1(x))


def one_submodule(rank: int, world_size: int) -> None:
    """fp16 in the second; there, cast by the model; in the first, cast back after it."""
    x = torch.zeros(2, 100)
    cases = [
        (Chain(FP32, FP16), "c2", MixedPrecisionPolicy(FP16)),
        (Chain(FP32, FP32, True), "c2", MixedPrecisionPolicy(FP16, cast_forward_inputs=False)),
        (Chain(FP16, FP32), "c1", MixedPrecisionPolicy(FP16, output_dtype=FP32)),
    ]
    for model, part, policy in cases:
        fxshard.fully_shard(model.get_submodule(part), mp_policy=policy)
        fxshard.fully_shard(model)
        model(x).sum().backward()
        assert all(param.grad.dtype == FP32 for param in model.parameters())


def test_float16_in_one_submodule(ranks: Any) -> None:
    ranks(2).run(one_submodule)


class Second(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(100, 100), dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == FP16 and y.dtype == self.dtype
        return self.layer(x) + y.mean()


class Outside(nn.Module):
    """Its second part gets a tensor that was made in forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(100, 100), Second(dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == FP16
        return self.l2(self.l1(x), torch.ones(2, 100, dtype=FP32))


def outside(rank: int, world_size: int, cast: bool) -> None:
    model: Any = Outside(FP16 if cast else FP32)
    policy = MixedPrecisionPolicy(param_dtype=FP16, cast_forward_inputs=cast)
    fxshard.fully_shard(model.l2, mp_policy=policy)
    fxshard.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=FP16))
    model(torch.zeros(2, 100)).sum().backward()


@pytest.mark.parametrize("cast", [False, True])
def test_inputs_that_are_made_in_forward_are_cast(ranks: Any, cast: bool) -> None:
    ranks(2).run(outside, cast)


class Recomputed(nn.Module):
    def __init__(self, into: torch.dtype, inside: torch.dtype, out: torch.dtype) -> None:
        super().__init__()
        self.linear, self.into, self.out = Expects(inside, False), into, out

    def part(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        assert y.dtype == self.out
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.part, x.to(self.into), use_reentrant=False, early_stop=False)
        return y.float().sum()


def recomputed(rank: int, world_size: int, what: str) -> None:
    """What is cast around a unit is cast again when a checkpoint recomputes it.

    Backward reads the input that was cast, and nothing that comes of the output: no more is
    recomputed.
    """
    if what == "input":
        policy = MixedPrecisionPolicy(BF16, BF16)
        dtypes = (FP32, BF16, BF16)
    else:
        policy = MixedPrecisionPolicy(BF16, BF16, FP32, cast_forward_inputs=False)
        dtypes = (BF16, BF16, FP32)
    model = made(lambda: Recomputed(*dtypes))
    plain = copy.deepcopy(model)
    shard(model, mp_policy=policy)
    x = torch.randn(8, 100)
    loss = model(x)
    loss.backward()
    assert model.memory.recomputed() == ({"aten._to_copy": 1} if what == "input" else {})
    low = plain.linear.layer.to(BF16)
    theirs = low(x.to(BF16)).float().sum()
    theirs.backward()
    assert_close(loss, theirs)
    for mine, other in zip(model.parameters(), low.parameters(), strict=True):
        assert_close(mine.grad.full_tensor(), reduced(other.grad, BF16))


@pytest.mark.parametrize("what", ["input", "output"])
def test_recomputed_parts_are_cast_again(ranks: Any, what: str) -> None:
    ranks(2).run(recomputed, what)


def norms(rank: int, world_size: int, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)

    def runs(
        model: Any, x: Tensor, norm: MixedPrecisionPolicy = policy, casts: bool = False
    ) -> None:
        fxshard.fully_shard(model[1], mp_policy=norm)
        for each in (model[0], model[2], model):
            fxshard.fully_shard(each, mp_policy=policy)
        if casts:  # by hand, what fully_shard has left as it is
            for name in ("running_mean", "running_var"):
                setattr(model[1], name, getattr(model[1], name).to(dtype))
        out = model(x)
        assert out.dtype == dtype
        out.sum().backward()
        assert all(p.grad.full_tensor().isfinite().all() for p in model.parameters())

    flat, image = torch.randn(4, 32), torch.randn(3, 1, 9, 9)

    def images() -> Any:
        return nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3))

    def two_around(norm: nn.Module) -> Any:
        return nn.Sequential(nn.Linear(32, 32), norm, nn.Linear(32, 32))

    runs(made(lambda: two_around(nn.LayerNorm(32))), flat)
    for build, x in ((lambda: two_around(nn.BatchNorm1d(32)), flat), (images, image)):
        with pytest.raises(RuntimeError, match="expected scalar type"):  # eager's, of its buffers
            runs(made(build), x)
    runs(made(images), image, casts=True)
    runs(made(images), image, MixedPrecisionPolicy(output_dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_norms_in_low_precision(ranks: Any, dtype: torch.dtype) -> None:
    ranks(2).run(norms, dtype)


def made_in_bf16(rank: int, world_size: int) -> None:
    """The dtype of reductions stays what the policy says when the model becomes fp32."""
    model = made(lambda: nn.Sequential(*(nn.Linear(32, 32, dtype=BF16) for _ in range(2))))
    shard(model, mp_policy=MixedPrecisionPolicy(BF16, BF16))
    model.to(FP32)
    with count_collectives() as seen:
        model(torch.randn(4, 32)).sum().backward()
    assert_reduced_in(seen, model, BF16)
    assert all(param.grad.dtype == FP32 for param in model.parameters())


def test_the_dtype_of_reductions_stays(ranks: Any) -> None:
    ranks(2).run(made_in_bf16)
