"""Shards, gradients and optimizer states on the CPU, copied in and out by rows of the schedule."""

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxshard
from fxshard.ir import ops, tags
from fxshard.memory.category import Category
from tests import fsdp2
from tests.fsdp2 import Result
from tests.graphs import APART
from tests.zoo import MODELS

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "bf16": {"mixed_precision": BF16},
    "shard_grad_op": {"strategy": "shard_grad_op"},
}


def train(name: str, **options: Any) -> Result:
    case = MODELS[name]
    torch.manual_seed(0)
    model = fxshard.compile(
        case.build(), units=case.units, offload=CPUOffloadPolicy(pin_memory=False), **options
    )
    return fsdp2.run_steps(model, case, 5)


def both(rank: int, world_size: int, name: str) -> None:
    for option, options in OPTIONS.items():
        theirs: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        if option == "bf16":
            theirs["mp_policy"] = BF16
        if option == "shard_grad_op":
            theirs["reshard_after_forward"] = False
        fsdp2.assert_bitwise(train(name, **options), fsdp2.train(MODELS[name], 5, **theirs))


LLAMA = pytest.param("llama", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["mlp13", pytest.param("tied", marks=pytest.mark.slow), LLAMA])
def test_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    ranks(2).run(both, name)


def plan(name: str, world_size: int, **options: Any) -> fxshard.Plan:
    case = MODELS[name]
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    return fxshard.plan(
        case.build(),
        args,
        kwargs,
        world_size=world_size,
        units=case.units,
        offload=CPUOffload(offload_params=True),
        optimizer=adamw,
        **options,
    )


@pytest.mark.parametrize(("layout", "copy"), [({}, ops.pack), (APART, ops.cast)])
def test_copies_are_rows_on_streams_of_their_own(layout: dict[str, Any], copy: Any) -> None:
    planned = plan("transformer", 2, mixed_precision=BF16, **layout)
    program = planned.program
    gathers = program.graph.find_nodes(op="call_function", target=ops.all_gather)
    for gather in gathers:
        made = tags.source(tags.operands(gather)[0])
        load = tags.source(tags.operands(made)[0])
        assert (made.target, load.target) == (copy, ops.load)
        assert tags.get(load).stream == "load"
        assert tags.get(load).records in tags.get(made).waits
        assert all(tags.get(shard).role == "shard" for shard in tags.operands(load))
    reduces = program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    stores = program.graph.find_nodes(op="call_function", target=ops.store)
    assert len(stores) == len(reduces) == len(program.units)
    assert {tags.get(store).stream for store in stores} == {"store"}
    text = planned.dump()
    assert " load " in text and " store " in text


def padded(name: str, world_size: int) -> int:
    """Bytes of one rank's shards, by hand."""
    return sum(
        math.ceil(p.shape[0] / world_size) * math.prod(p.shape[1:]) * 4
        for p in MODELS[name].build().parameters()
    )


def test_host_columns_by_hand() -> None:
    """Between steps nothing but the batch and buffers is on the device."""
    report = plan("mlp13", 2).memory
    assert report.snapshot("", "Before Pre-Forward") == {c: 0 for c in Category} | {
        Category.INPUTS: 4 * 5 * 4
    }
    shards = padded("mlp13", 2)
    rows = sum(
        math.ceil(p.shape[0] / 2) * math.prod(p.shape[1:]) * 4
        for p in MODELS["mlp13"].build().parameters()
    )
    steps = 4 * len(list(MODELS["mlp13"].build().parameters()))
    host = report.host_cells()
    state = next(state for module, state in host if state.value == "Before Pre-Forward")
    assert host["", state] == {c: 0 for c in Category} | {
        Category.SHARDED_PARAM: shards,
        Category.OPT_STATE: 2 * rows + steps,  # two moments, and Adam's step per parameter
    }
    assert report.host_peak_bytes >= 2 * shards + 2 * rows
    assert "CPU" in report.table(depth=1)
    assert report.to_dict()["host_peak_bytes"] == report.host_peak_bytes


@pytest.mark.parametrize("name", ["mlp13", LLAMA])
@pytest.mark.parametrize("world_size", [2, 7])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.sample(3)
def test_bytes(options: dict[str, Any], world_size: int, name: str) -> None:
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    torch.manual_seed(0)
    result = fxshard.validate(
        case.build(),
        args,
        kwargs,
        world_size=world_size,
        units=case.units,
        offload=CPUOffloadPolicy(),
        optimizer=torch.optim.AdamW,
        **options,
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


class Copies(TorchDispatchMode):
    """Storages of the shards that operators other than copies read."""

    def __init__(self, shards: set[int]) -> None:
        super().__init__()
        self.shards, self.readers = shards, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
        live = [t.untyped_storage() for t in tensors if t.untyped_storage().nbytes()]
        if any(storage.data_ptr() in self.shards for storage in live):
            self.readers.add(str(func))
        return func(*args, **(kwargs or {}))


def shards_are_only_copied(rank: int, world_size: int) -> None:
    case = MODELS["mlp13"]
    args, kwargs = case.batch(rank, 0)
    model = fxshard.compile(case.build(), units=case.units, offload=CPUOffloadPolicy())
    shards = [shard for slot in model._fxshard.slots.values() for shard in slot.shards]
    assert all(shard.device.type == "cpu" for shard in shards)
    model(*args, **kwargs).sum().backward()
    with Copies({shard.untyped_storage().data_ptr() for shard in shards}) as seen:
        model(*args, **kwargs).sum().backward()
    assert seen.readers <= {"aten.copy_.default", "aten.empty_like.default"}, seen.readers


def test_no_kernel_of_the_model_reads_a_shard(ranks: Any) -> None:
    ranks(2).run(shards_are_only_copied)


def test_no_offload_policy_means_none() -> None:
    case = MODELS["mlp13"]
    args, kwargs = case.batch(0, 0)
    for offload in (None, OffloadPolicy(), CPUOffload(offload_params=False)):
        plan = fxshard.plan(
            case.build(), args, kwargs, world_size=2, units=case.units, offload=offload
        )
        assert not plan.program.graph.find_nodes(op="call_function", target=ops.load)
        assert plan.memory.host_peak_bytes == 0


def test_in_process_equals_eager() -> None:
    case = MODELS["mlp13"]
    torch.manual_seed(0)
    eager = fsdp2.run_steps(case.build(), case, 3)
    torch.manual_seed(0)
    model = fxshard.compile(
        case.build(), units=case.units, world_size=3, offload=CPUOffloadPolicy()
    )
    fsdp2.assert_close(fsdp2.run_steps(model, case, 3), eager, rtol=1e-6)


def test_one_rank_loads_parameters_of_several_dtypes_as_they_are() -> None:
    eager = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(3, 4).bfloat16())

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = copy.deepcopy(eager)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x) + self.layers[1](x.bfloat16())

    x = torch.randn(2, 3)
    ours = fxshard.compile(Both(), world_size=1, offload=CPUOffloadPolicy())
    out = ours(x)
    out.sum().backward()
    torch.testing.assert_close(out, eager[0](x) + eager[1](x.bfloat16()), rtol=0, atol=0)
    assert {p.grad.dtype for p in ours.parameters()} == {torch.float32, torch.bfloat16}
