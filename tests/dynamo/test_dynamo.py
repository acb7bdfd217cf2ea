"""fxshard.shard: eager use, and torch.compile(backend="fxshard"), against FSDP2 and eager."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._dynamo_utils import _annotate_modules_for_dynamo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxshard
from fxshard.errors import StepError, UnitError
from fxshard.runtime import reading
from tests import fsdp2
from tests.dynamo.dynamo_cases import (
    WIDTH,
    Broken,
    Checkpointed,
    Mlp,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    pair,
)
from tests.fsdp2 import Result
from tests.verify.verify_cases import ALWAYS
from tests.zoo import MODELS

STEPS = 5


class Calling(nn.Module):
    """For `fsdp2.run_steps`: calls one thing, and shows the parameters of another."""

    def __init__(self, run: Any, model: nn.Module) -> None:
        super().__init__()
        self.run, self.model = run, [model]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Any:
        return self.model[0].parameters()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model[0].named_parameters()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.model[0].named_buffers()


# -- the numbers -----------------------------------------------------------------------------------


def five_steps(rank: int, world_size: int, name: str) -> tuple[Result, Result, Result, list[int]]:
    """FSDP2, fxshard.compile, torch.compile; and peaks of the latter two's reports."""
    torch._dynamo.reset()
    case = MODELS[name]
    theirs = fsdp2.train(case, STEPS)
    torch.manual_seed(0)
    whole = fxshard.compile(case.build(), units=case.units)
    ours = fsdp2.run_steps(whole, case, STEPS)
    torch.manual_seed(0)
    model = fxshard.shard(case.build(), units=case.units)
    dynamos = fsdp2.run_steps(Calling(compiled(model), model), case, STEPS)
    reports = fxshard.reports(model)
    assert len(reports) == 1
    (captured,) = model._fxshard_runtime.captured
    assert captured.program.facts >= ALWAYS
    peaks = [whole.memory.peak_bytes, reports.peak_bytes, reports[0].peak_bytes]
    return theirs, ours, dynamos, peaks


@pytest.mark.parametrize(
    "name", ["mlp13", *(pytest.param(n, marks=pytest.mark.slow) for n in ("transformer", "llama"))]
)
def test_five_steps_bitwise_with_fsdp2_and_fxshard_compile(ranks: Any, name: str) -> None:
    for theirs, ours, dynamos, peaks in ranks(2).run(five_steps, name):
        fsdp2.assert_bitwise(dynamos, theirs)
        fsdp2.assert_bitwise(dynamos, ours)
        whole, summed, one = peaks
        assert summed == one
        if name != "llama":  # which returns logits too: whether they get a gradient ...
            assert one == whole  # ... fxshard.compile asks the model's scalar outputs, Dynamo's no


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "convnet", "dropout"])
def test_all_of_the_zoo_is_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    for theirs, ours, dynamos, _ in ranks(2).run(five_steps, name):
        fsdp2.assert_bitwise(dynamos, theirs)
        fsdp2.assert_bitwise(dynamos, ours)


def mixed_steps(rank: int, world_size: int, policy: Any) -> tuple[Result, Result, Result]:
    torch._dynamo.reset()
    case = MODELS["transformer"]
    theirs = fsdp2.train(case, 2, mp_policy=policy)
    results = []
    for run in (compiled, lambda model: model):
        torch.manual_seed(0)
        model = fxshard.shard(case.build(), units=case.units, mixed_precision=policy)
        results.append(fsdp2.run_steps(Calling(run(model), model), case, 2))
    return theirs, results[0], results[1]


@pytest.mark.slow
def test_mixed_precision_is_bitwise_with_fsdp2(ranks: Any) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for theirs, dynamos, eager in ranks(2).run(mixed_steps, policy):
        fsdp2.assert_bitwise(dynamos, theirs)
        fsdp2.assert_close(eager, theirs, rtol=1e-6)


# -- state -----------------------------------------------------------------------------------------


def state_works(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Mlp()
    torch.manual_seed(0)
    model = fxshard.shard(Mlp(), units=["blocks.*"])
    model.compile(backend="fxshard", fullgraph=True)

    def assert_equal_states() -> None:
        expected = plain.state_dict()
        assert list(model.state_dict()) == list(expected)
        for name, value in model.state_dict().items():
            assert isinstance(value, DTensor)
            assert torch.equal(value.full_tensor(), expected[name]), name

    assert_equal_states()
    assert model.norm.weight is dict(model.named_parameters())["norm.weight"]
    assert isinstance(model.norm.weight, nn.Parameter)
    model(batch_of(rank, 0, WIDTH))

    # initialisation reaches the shards
    before = fsdp2.full(model.blocks[0][0].weight)
    torch.manual_seed(5 + rank)
    model.blocks[0][0].reset_parameters()
    assert not torch.equal(fsdp2.full(model.blocks[0][0].weight), before)
    nn.init.constant_(model.norm.bias, 3.0)
    assert torch.equal(fsdp2.full(model.norm.bias), torch.full((WIDTH,), 3.0))

    # plain tensors, DTensors, torch.distributed.checkpoint
    model.load_state_dict(plain.state_dict())
    assert_equal_states()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    for assign in (False, True):
        nn.init.zeros_(model.norm.weight)
        model.load_state_dict(own, assign=assign)
        assert_equal_states()
        x = batch_of(rank, 0, WIDTH)
        torch.testing.assert_close(model(x), plain(x))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    nn.init.zeros_(model.norm.weight)
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    assert_equal_states()

    # optimizers, clipping
    ours, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    for step in range(3):
        batches = [batch_of(r, step, WIDTH) for r in range(world_size)]
        torch.stack([plain(x).sum() for x in batches]).mean().backward()
        model(batches[rank]).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(fsdp2.full(norm), expected)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name])
    set_optimizer_state_dict(model, ours, get_optimizer_state_dict(model, ours))

    # a copy is independent
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(batches[rank]), plain(batches[rank]))
    other(batches[rank]).sum().backward()
    assert model.norm.weight.grad is None and other.norm.weight.grad is not None
    assert other.blocks[0][0].weight is not model.blocks[0][0].weight

    # torch.utils.checkpoint in eager, and a step between forward and backward
    torch.manual_seed(0)
    plain = Mlp()
    torch.manual_seed(0)
    eager = fxshard.shard(Checkpointed(), units=["blocks.*"])
    torch.stack([plain(x).sum() for x in batches]).mean().backward()
    eager(batches[rank]).sum().backward()
    assert_same_gradients(eager, plain)
    loss = eager(batches[rank]).sum()
    nn.init.zeros_(eager.norm.weight)
    with pytest.raises(StepError, match=r"'norm\.weight' was changed in place between"):
        loss.backward()
    runtime = reading.runtime_of(eager)
    del loss
    gc.collect()  # the error held frames
    assert runtime is not None and not runtime.forwards.alive


def test_state_is_that_of_the_plain_model_on_2_ranks(ranks: Any) -> None:
    ranks(2).run(state_works)


def marks(rank: int, world_size: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of fxshard, and of torch: FSDP1 for ignored modules, FSDP2 for ignored parameters.

    FSDP1 runs on an accelerator only; what its constructor calls to mark modules runs here.
    """

    def of(model: nn.Module) -> dict[str, Any]:
        names = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
        return {
            path: tuple(getattr(module, name, None) for name in names)
            for path, module in model.named_modules()
        }

    found = [(of(fxshard.shard(Mlp())), of(fully_shard(Mlp())))]
    theirs = Mlp()
    _annotate_modules_for_dynamo(theirs, set(theirs.blocks[0].modules()), use_orig_params=True)
    found.append((of(fxshard.shard(Mlp(), ignored=["blocks.0"])), of(theirs)))
    theirs = Mlp()
    fully_shard(theirs, ignored_params=set(theirs.blocks[1][0].parameters()))
    found.append((of(fxshard.shard(Mlp(), ignored=["blocks.1.0.*"])), of(theirs)))
    return found


def test_modules_are_marked_for_dynamo_as_torchs_fsdp_marks_them(ranks: Any) -> None:
    for found in ranks(2).run(marks):
        for ours, theirs in found:
            assert ours == theirs
        assert found[0][0]["norm"] == (True, True)
        assert found[1][0]["blocks.0.0"] == (None, None)


def test_copies_and_names() -> None:
    plain, model = pair(Mlp)
    run = compiled(model)
    assert_same_step(plain, model, run, torch.randn(3, WIDTH))
    assert repr(model) == repr(plain)
    assert type(model).__qualname__ == "Mlp" and isinstance(model, Mlp)
    other = copy.deepcopy(model)
    nn.init.ones_(other.norm.bias)
    assert_same_step(plain, model, run, torch.randn(3, WIDTH))
    nn.init.ones_(plain.norm.bias)
    assert_same_step(plain, other, other, torch.randn(3, WIDTH))
    assert_same_step(plain, other, compiled(other), torch.randn(3, WIDTH))
    with pytest.raises(StepError, match="Copy the whole model"):
        copy.deepcopy(model.norm)
    with pytest.raises(StepError, match=r"Save model\.state_dict\(\)"):
        pickle.dumps(model)


def test_conversions_reach_what_dynamo_sees() -> None:
    plain, model = pair(Mlp)
    plain, model = plain.double(), model.double()
    assert model.norm.weight.dtype is torch.float64
    assert_same_step(plain, model, compiled(model), torch.randn(3, WIDTH).double())


def sharded_with_tensor_parallelism(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Mlp()
    parallelize_module(model.blocks[0], mesh["tp"], {"0": ColwiseParallel()})
    before = dict(model.named_parameters())
    with pytest.raises(UnitError) as refused:
        fxshard.shard(model, mesh=mesh["dp"])
    assert all(param is before[name] for name, param in model.named_parameters())
    assert type(model) is Mlp and type(model.norm) is nn.LayerNorm
    return str(refused.value)


def test_tensor_parallelism_is_refused_by_name(ranks: Any) -> None:
    for message in ranks(2).run(sharded_with_tensor_parallelism):
        assert "'blocks.0.0.weight' is a DTensor already" in message
        assert "Use fxshard.compile or fxshard.fully_shard after parallelize_module" in message


def strategies(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in (
        {"strategy": "hybrid_shard", "mesh": mesh},
        {"strategy": "no_shard"},
        {"strategy": "shard_grad_op"},
    ):
        for is_compiled in (True, False):
            torch._dynamo.reset()
            torch.manual_seed(0)
            plain = Broken("break")
            torch.manual_seed(0)
            model = fxshard.shard(Broken("break"), units=["blocks.*"], **options)  # type: ignore
            run = compiled(model, fullgraph=False) if is_compiled else model
            batches = [batch_of(r, 0) for r in range(world_size)]
            torch.stack([plain(x).sum() for x in batches]).mean().backward()
            run(batches[rank]).sum().backward()
            assert_same_gradients(model, plain, atol=1e-5)


@pytest.mark.slow
def test_strategies_on_4_ranks(ranks: Any) -> None:
    ranks(4).run(strategies)
