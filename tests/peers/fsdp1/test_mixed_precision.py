"""torch's test_fsdp_mixed_precision.py: dtypes of parameters, gradients, buffers and inputs."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

from fxshard.runtime.world.c10d import C10dWorld
from tests.fsdp2 import full
from tests.peers.fsdp1.models import Transformer
from tests.peers.fsdp1.shared import FULL, GRAD_OP, HALF, NO_SHARD, STRATEGIES, compiled, loss_of

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
POLICIES = {
    "fp16": HALF,
    "reduce": MixedPrecision(reduce_dtype=F16),
    "param_and_buffer": MixedPrecision(param_dtype=F16, buffer_dtype=F16),
    "none": MixedPrecision(),
    "all_differ": MixedPrecision(param_dtype=F16, buffer_dtype=BF16, reduce_dtype=F32),
}
PREFETCHES = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)


@contextmanager
def reductions() -> Iterator[list[torch.dtype]]:
    """The dtypes in which gradients are reduced."""
    seen: list[torch.dtype] = []

    def watched(launch: Any) -> Any:
        @functools.wraps(launch)
        def note(self: Any, grads: list[Tensor], *args: Any, **options: Any) -> Any:
            seen.extend(grad.dtype for grad in grads)
            return launch(self, grads, *args, **options)

        return note

    with (
        mock.patch.object(C10dWorld, "reduce_scatter", watched(C10dWorld.reduce_scatter)),
        mock.patch.object(C10dWorld, "all_reduce", watched(C10dWorld.all_reduce)),
    ):
        yield seen


class Checks(nn.Module):
    """A linear layer that checks the dtypes it sees while it is traced; its buffer is float64."""

    def __init__(self, dtype: torch.dtype, policy: MixedPrecision, buffer: str = "buffer") -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False).to(dtype)
        self.register_buffer(buffer, torch.randn((1, 2), dtype=F64))
        self.computes_in = policy.param_dtype or dtype
        self.buffers_in = policy.buffer_dtype or F64

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.lin.weight.dtype == self.computes_in
        assert {buffer.dtype for buffer in self.buffers()} == {self.buffers_in}
        return self.lin(x)


def end_to_end(
    rank: int,
    world_size: int,
    policy: MixedPrecision,
    dtype: torch.dtype,
    scale: bool,
    options: dict[str, Any],
) -> None:
    one = compiled(Checks(dtype, policy), units=[], mixed_precision=policy, **options)
    layers = Checks(dtype, policy, "buffer0"), Checks(dtype, policy, "buffer1")
    two = compiled(nn.Sequential(*layers), units=["0"], mixed_precision=policy, **options)
    computes_in, buffers_in = policy.param_dtype or dtype, policy.buffer_dtype or F64

    def check_buffers(model: nn.Module) -> None:
        assert {buffer.dtype for buffer in model.buffers()} == {buffers_in}

    for model, units in ((one, 1), (two, 2)):
        scaler = ShardedGradScaler(device="cpu", enabled=scale)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            with reductions() as seen:
                out = model(torch.randn(3, 10, dtype=dtype))
                check_buffers(model)
                loss = scaler.scale(out.sum())
                assert loss.dtype == computes_in
                loss.backward()
            if world_size > 1:
                assert seen == [policy.reduce_dtype or computes_in] * units
            check_buffers(model)
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert {p.grad.dtype for p in model.parameters()} == {dtype}
            scaler.step(optimizer)
            scaler.update()
            with model.summon_full_params():
                assert {p.dtype for p in model.parameters()} == {dtype}
                check_buffers(model)
            saved = model.state_dict()
            for name, _ in model.named_parameters():
                assert saved[name].dtype == dtype
            check_buffers(model)


GRID = [
    pytest.param(
        policy,
        dtype,
        scale,
        {
            "offload": CPUOffload(offload),
            "backward_prefetch": backward,
            "forward_prefetch": forward,
        },
        id=f"{name}-{dtype}-scaler={scale}-offload={offload}-{backward}-{forward}",
    )
    for (name, policy), offload, dtype, scale, forward, backward in itertools.product(
        POLICIES.items(), (True, False), (F32, F64), (True, False), (False, True), PREFETCHES
    )
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("policy", "dtype", "scale", "options"), GRID)
def test_dtypes_end_to_end(
    ranks: Any, policy: MixedPrecision, dtype: torch.dtype, scale: bool, options: Any
) -> None:
    ranks(2).run(end_to_end, policy, dtype, scale, options)


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_dtypes_that_all_differ(ranks: Any, world_size: int, strategy: Any) -> None:
    options = {
        "strategy": strategy,
        "offload": CPUOffload(True),
        "backward_prefetch": None,
        "forward_prefetch": False,
    }
    ranks(world_size).run(end_to_end, POLICIES["all_differ"], F64, False, options)


def buffers_saved(rank: int, world_size: int, policy: MixedPrecision) -> list[torch.dtype]:
    """As FSDP1 saves them; what is sharded, and written into in place, is as the model has it."""
    model = compiled(Checks(F32, policy), units=[], mixed_precision=policy)
    values, dtype = model.buffer.double(), policy.buffer_dtype or F64
    full = model.full_state_dict(rank0_only=False)
    assert torch.equal(full["buffer"], values)
    model.buffer.zero_()
    model.load_state_dict(full)  # which casts
    assert model.buffer.dtype is dtype and torch.equal(model.buffer.double(), values)
    return [full["buffer"].dtype, model.state_dict()["buffer"].dtype]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_buffers_are_saved_in_their_dtype(ranks: Any, policy: MixedPrecision) -> None:
    assert ranks(2).run(buffers_saved, policy) == [[F64, policy.buffer_dtype or F64]] * 2


# -- embeddings, batch norm ------------------------------------------------------------------------


def embedded(rank: int, world_size: int, policy: MixedPrecision, norms: bool) -> None:
    """Integer inputs are not cast. With `norms`, batch norm is in the policy, as all the rest."""
    if norms:
        policy = dataclasses.replace(policy, _module_classes_to_ignore=())
    model = compiled(Transformer(train=True), units=[], mixed_precision=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        with reductions() as seen:
            loss = loss_of(model)
            loss.backward()
        assert loss.dtype == (policy.param_dtype or F32)
        reduced_in = policy.reduce_dtype or policy.param_dtype or F32
        # else batch norm computes in fp32, as a unit without a policy
        assert set(seen) == ({reduced_in} if norms else {reduced_in, F32})
        optimizer.step()


@pytest.mark.parametrize(
    "policy",
    [
        POLICIES["reduce"],
        POLICIES["param_and_buffer"],
        HALF,
        MixedPrecision(param_dtype=F16, reduce_dtype=F32, buffer_dtype=F16),
    ],
    ids=["reduce", "params_and_buffers", "default", "params_and_reduce_differ"],
)
@pytest.mark.sample(4)
@pytest.mark.parametrize("norms", [True, False], ids=["all", "without_norms"])
def test_embeddings(ranks: Any, policy: MixedPrecision, norms: bool) -> None:
    ranks(2).run(embedded, policy, norms)


class WithNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 40, bias=False)
        self.bn = nn.BatchNorm1d(4)
        self.fc2 = nn.Linear(40, 4, bias=False)
        self.ln = nn.LayerNorm(4)
        self.fc3 = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(torch.reshape(self.fc1(x), (-1, 4, 10)))
        return F.softmax(self.fc3(self.ln(self.fc2(torch.reshape(x, (-1, 40))))), dim=1)


def norms(rank: int, world_size: int, ignored: list[type] | None) -> dict[str, Any]:
    """None: the default, batch norm; of it nothing is said where FSDP1 warns."""
    policy = HALF
    if ignored is not None:
        policy = dataclasses.replace(policy, _module_classes_to_ignore=ignored)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = compiled(WithNorms(), units=lambda fqn, module: False, mixed_precision=policy)
    model(torch.randn(1, 2)).sum().backward()
    assert model.bn.running_mean.dtype == F32
    return {unit.fqn: {param.compute_dtype for param in unit.params} for unit in model.plan.units}


def test_norms_in_fp32(ranks: Any) -> None:
    """They become units of their own; no other module does."""
    both = [_BatchNorm, nn.LayerNorm]
    assert ranks(2).run(norms, both) == [{"": {F16}, "bn": {F32}, "ln": {F32}}] * 2
    assert ranks(2).run(norms, None) == [{"": {F16}, "bn": {F32}}] * 2


class Fixed(nn.Module):
    """A convolution whose kernel is a buffer: a unit without parameters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        kernel = torch.tensor([1.0, 2.0, 2.0, 1.0])
        kernel = kernel / kernel.sum()
        self.register_buffer("kernel", kernel.outer(kernel)[None, None].repeat(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, groups=self.kernel.shape[0], stride=2, padding=1)


def without_root_parameters(rank: int, world_size: int) -> None:
    layers = (nn.Conv2d(3, 8, 3, padding=1), Fixed(8), nn.Conv2d(8, 3, 3, padding=1), Fixed(3))
    model = nn.Sequential(*(nn.Sequential(layer) for layer in layers))
    model = compiled(model, units=ModuleWrapPolicy({nn.Sequential}), mixed_precision=HALF)
    out = model(torch.randn(2, 3, 16, 16))
    assert out.dtype == F16
    out.mean().backward()


def test_buffers_without_root_parameters(ranks: Any) -> None:
    ranks(2).run(without_root_parameters)


# -- gradients -------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin2(self.lin1(x))


def kept_low(rank: int, world_size: int, offload: bool) -> None:
    policy = MixedPrecision(
        param_dtype=F16, reduce_dtype=F16, buffer_dtype=F16, keep_low_precision_grads=True
    )
    options = {"mixed_precision": policy, "offload": CPUOffload(offload)}
    model = compiled(TwoLayers(), units=["lin1"], **options)
    for _ in range(6):
        model(torch.ones(1, 10)).sum().backward()
        assert {param.grad.dtype for param in model.parameters()} == {F16}


@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offload"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_kept_in_fp16(ranks: Any, world_size: int, offload: bool) -> None:
    ranks(world_size).run(kept_low, offload)


def of_inputs(rank: int, world_size: int, strategy: Any) -> None:
    policy = MixedPrecision(param_dtype=F16, reduce_dtype=F32, buffer_dtype=F32)
    linear = nn.Linear(64, 64, bias=False)
    model = compiled(linear, units=[], strategy=strategy, mixed_precision=policy)
    x = torch.randn(32, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == F32


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_gradients_of_inputs(ranks: Any, strategy: Any) -> None:
    ranks(2).run(of_inputs, strategy)


# -- evaluation ------------------------------------------------------------------------------------


class Expects(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.dtype
        return self.a(x)


def root_casts(rank: int, world_size: int, full_in_eval: bool) -> None:
    policy = MixedPrecision(param_dtype=F16, reduce_dtype=F16)
    model = Expects(F32 if full_in_eval else F16)
    options = {"mixed_precision": policy, "full_precision_in_eval": full_in_eval}
    model = compiled(model, units=["a"], **options)
    model.eval()
    model(torch.randn(5, 5)).sum().backward()


FULL_IN_EVAL = pytest.mark.parametrize("full_in_eval", [True, False], ids=["full", "low"])


@FULL_IN_EVAL
def test_inputs_of_the_root_in_eval(ranks: Any, full_in_eval: bool) -> None:
    ranks(2).run(root_casts, full_in_eval)


def evaluated(rank: int, world_size: int, cast: bool, full_in_eval: bool) -> None:
    """In training fp16 with gradients in fp32; in eval as asked, reductions included."""
    policy = MixedPrecision(
        param_dtype=F16, reduce_dtype=F16, buffer_dtype=F16, cast_forward_inputs=cast
    )
    options = {"mixed_precision": policy, "full_precision_in_eval": full_in_eval}
    model = compiled(Transformer(train=True), **options)
    loss = loss_of(model)
    assert loss.dtype == F16
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
    model.eval()
    with reductions() as seen:
        loss = loss_of(model)
        loss.backward()
    assert loss.dtype == (F32 if full_in_eval else F16)
    assert (F16 in seen) != full_in_eval


CAST = pytest.mark.parametrize("cast", [True, False], ids=["cast", "as_given"])


@pytest.mark.sample(4)
@CAST
@FULL_IN_EVAL
def test_precision_in_eval(ranks: Any, cast: bool, full_in_eval: bool) -> None:
    ranks(2).run(evaluated, cast, full_in_eval)


def reduced_in_eval(rank: int, world_size: int, cast: bool, full_in_eval: bool) -> None:
    """Of gradients in fp32, batch norm's too: in fp16 unless eval is in full precision."""
    policy = MixedPrecision(
        param_dtype=F32,
        reduce_dtype=F16,
        buffer_dtype=F32,
        cast_forward_inputs=cast,
        _module_classes_to_ignore=[],
    )
    options = {"mixed_precision": policy, "full_precision_in_eval": full_in_eval}
    model = compiled(Transformer(train=True), **options)
    model.eval()
    with reductions() as seen:
        loss_of(model).backward()
    assert set(seen) == {F32 if full_in_eval else F16}


@pytest.mark.sample(2)
@CAST
@FULL_IN_EVAL
def test_reductions_in_eval(ranks: Any, cast: bool, full_in_eval: bool) -> None:
    ranks(2).run(reduced_in_eval, cast, full_in_eval)


class Scaled(nn.Module):
    """A layer whose outputs are scaled by a buffer in float64, which each call adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10)
        self.register_buffer("scale", torch.tensor([1.0 + 1e-9, 1 / 3], dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 0.1
        return self.lin(x) * self.scale.sum().to(x.dtype)


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), Scaled())


@contextmanager
def seeing_buffers(model: Any, training: bool) -> Iterator[list[set[torch.dtype]]]:
    """In eval: dtypes of buffers, as pre-forward hooks of the two layers see them."""
    seen: list[set[torch.dtype]] = []

    def see(module: nn.Module, args: Any) -> None:
        seen.append({buffer.dtype for buffer in module.buffers()})

    layers = [module for module in model.modules() if isinstance(module, Scaled)]
    handles = [] if training else [layer.register_forward_pre_hook(see) for layer in layers]
    yield seen
    for handle in handles:
        handle.remove()


def buffers_in_eval(
    rank: int, world_size: int, cast: bool, full_in_eval: bool, keeps: bool
) -> None:
    """Beside torch's own: training, twice eval, and training again, one from the other's end."""
    policy = MixedPrecision(
        param_dtype=F16,
        reduce_dtype=F16,
        buffer_dtype=F16,
        cast_forward_inputs=cast,
        keep_low_precision_grads=keeps,
    )
    with mock.patch.dict("os.environ", FSDP_USE_FULL_PREC_IN_EVAL=str(int(full_in_eval))):
        theirs = FullyShardedDataParallel(
            scaled(),
            auto_wrap_policy=ModuleWrapPolicy({Scaled}),
            mixed_precision=policy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    options = {"mixed_precision": policy, "full_precision_in_eval": full_in_eval}
    ours = compiled(scaled(), units=["0"], **options)
    torch.manual_seed(1 + rank)
    for training in (True, False, False, True):
        x = torch.randn(3, 10)
        wanted = F64 if full_in_eval and not training else F16
        outputs = []
        for model in (theirs, ours):
            if keeps:  # torch's own can neither add up two dtypes nor unshard fp16 ones
                model.zero_grad()
            model.train(training)
            with seeing_buffers(model, training) as seen:
                outputs.append(model(x))
            assert training or len(seen) >= 2  # ours run as often as forward is traced
            assert all(dtypes == {wanted} for dtypes in seen)
            outputs[-1].sum().backward()
            assert {buffer.dtype for buffer in model.buffers()} == {wanted}
        assert outputs[0].dtype == (F32 if wanted == F64 else F16)
        assert torch.equal(*outputs)
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(mine, other)
        if keeps:
            both = (ours, theirs)
            dtypes = [{p.grad.dtype for p in m.parameters() if p.grad is not None} for m in both]
            assert dtypes == [{F32 if wanted == F64 else F16}] * 2
        else:
            with FullyShardedDataParallel.summon_full_params(theirs, with_grads=True):
                for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert other.grad.any()
                    assert torch.equal(full(mine.grad), other.grad)
        saved = ours.full_state_dict(rank0_only=False)["0.scale"]
        assert saved.dtype == F64 and torch.equal(saved, ours.get_buffer("0.scale").double())


@pytest.mark.sample(4)
@CAST
@FULL_IN_EVAL
def test_buffers_in_eval(ranks: Any, cast: bool, full_in_eval: bool) -> None:
    ranks(2).run(buffers_in_eval, cast, full_in_eval, False)


@FULL_IN_EVAL
def test_dtypes_of_kept_gradients_in_eval(ranks: Any, full_in_eval: bool) -> None:
    ranks(2).run(buffers_in_eval, True, full_in_eval, True)


def compiled_in_eval(rank: int, world_size: int) -> None:
    """Nothing is rounded until it trains; a backward after that reads what its forward did."""
    options = {"mixed_precision": HALF, "full_precision_in_eval": True}
    plain, model = scaled().eval(), compiled(scaled().eval(), units=["0"], **options)
    torch.manual_seed(1 + rank)
    x = torch.randn(3, 10)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.get_buffer("0.scale"), plain.get_buffer("0.scale"))
    model.train()
    model(x)
    plain.load_state_dict(model.full_state_dict(rank0_only=False))  # which is rounded
    model.eval()
    with model.summon_full_params(), torch.no_grad():
        assert torch.equal(model(x), plain(x))
    model.train()
    loss = model(x).sum()
    assert model.get_buffer("0.scale").dtype == F16
    model.eval()
    with torch.no_grad():
        model(x)
    assert model.get_buffer("0.scale").dtype == F64
    loss.backward()
    plain.half()(x.half()).sum().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert other.grad is not None and other.grad.any()
        expected = other.grad.float()
        dist.all_reduce(expected)
        assert_close(full(param.grad), expected / world_size, rtol=1e-2, atol=1e-3)


def test_buffers_of_a_model_that_is_compiled_in_eval(ranks: Any) -> None:
    ranks(2).run(compiled_in_eval)


class WithAverage(nn.Module):
    """Trains one copy, and evaluates by its moving average."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = self.made()
        self.average = AveragedModel(
            self.made(), multi_avg_fn=get_ema_multi_avg_fn(), use_buffers=True
        )

    def made(self) -> nn.Module:
        return nn.Transformer(
            d_model=16,
            nhead=2,
            num_encoder_layers=1,
            num_decoder_layers=1,
            dim_feedforward=8,
            dropout=0.1,
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        chosen = self.module if self.training else self.average
        return chosen(source, target)


def averaged(rank: int, world_size: int, strategy: Any) -> None:
    policy = MixedPrecision(param_dtype=F16)
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    units = ModuleWrapPolicy({nn.Transformer, *layers})
    model = compiled(WithAverage(), units=units, strategy=strategy, mixed_precision=policy)
    optimizer = torch.optim.Adam(model.module.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    batch = torch.randn(8, 1, 16), torch.randn(16, 1, 16)
    sums = []
    for _ in range(3):
        model.train()
        model(torch.randn(8, 4, 16), torch.randn(16, 4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.summon_full_params():
            model.average.update_parameters(model.module)
        model.eval()
        with torch.no_grad():
            sums.append(model(*batch).float().sum().item())
    assert len(set(sums)) == 3, sums
    assert full(model.average.n_averaged) == 3


@pytest.mark.parametrize("strategy", [GRAD_OP, FULL, NO_SHARD], ids=lambda each: each.name)
def test_moving_average(ranks: Any, strategy: Any) -> None:
    ranks(2).run(averaged, strategy)
