"""Saved activations on the CPU from forward to backward: numbers, bytes, and what stays."""

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.errors import ConfigError, UnitError
from fxshard.ir import ops, tags
from fxshard.memory.category import Category
from fxshard.passes.offload_activations import OffloadActivations
from tests import fsdp2
from tests.zoo import MODELS

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
EVERYTHING = {"offload_activations": "1GiB"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": HALF},
    "checkpoints": {"checkpoint": "full"},
    "selective": {"checkpoint": "selective"},
    "kept": {"reshard_after_forward": False},
    "all_on_cpu": {"offload": CPUOffloadPolicy(pin_memory=False)},
    "far_ahead": {"forward_prefetch": 2, "backward_prefetch": "post"},
    "may_differ": {"ranks_may_differ": True},
}


def count(plan: fxshard.Plan, target: Any) -> int:
    return len(plan.program.graph.find_nodes(op="call_function", target=target))


def both(rank: int, world_size: int, name: str, option: str) -> None:
    """Batches of ranks differ; FSDP2 saves its activations on the CPU too."""
    theirs: dict[str, Any] = {}
    if option == "bf16":
        theirs["mp_policy"] = HALF
    case = MODELS[name]
    torch.manual_seed(0)
    model = fxshard.compile(case.build(), units=case.units, **EVERYTHING, **OPTIONS[option])
    ours = fsdp2.run_steps(model, case, 3)
    assert count(model.plan, ops.offload) == count(model.plan, ops.reload) > 0
    with save_on_cpu():
        fsdp2.assert_bitwise(ours, fsdp2.train(case, 3, **theirs))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["transformer", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.sample(2)
def test_bitwise_with_fsdp2(ranks: Any, name: str, option: str) -> None:
    ranks(2).run(both, name, option)


def joined(rank: int, world_size: int) -> None:
    case = MODELS["mlp13"]
    torch.manual_seed(0)
    ours = fsdp2.run_steps(fxshard.compile(case.build(), units=case.units, **EVERYTHING), case, 3)
    theirs = fsdp2.train_single(case, 3, world_size)
    for mine, its in zip(ours.grads, theirs.grads, strict=True):
        torch.testing.assert_close(mine, its)
    torch.testing.assert_close(ours.params, theirs.params)


def accumulated(rank: int, world_size: int) -> None:
    """Micro-batches, of which the last is reduced."""
    torch.manual_seed(0)
    eager = Layers()
    model: Any = fxshard.compile(copy.deepcopy(eager), units=["layers.*"], **EVERYTHING)
    for number in range(3):
        batches = [torch.randn(4, 8, generator=seeded(r, number)) for r in range(world_size)]
        with model.no_sync() if number < 2 else contextlib.nullcontext():
            model(batches[rank]).square().mean().backward()
        eager(torch.cat(batches)).square().mean().backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(fsdp2.full(mine.grad), its.grad)
    assert on_cpu(model.plan)


def seeded(rank: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(10 * number + rank)


def test_accumulation(ranks: Any) -> None:
    ranks(2).run(accumulated)


def test_eager_on_the_joined_batch(ranks: Any) -> None:
    ranks(2).run(joined)


def test_in_process_equals_eager() -> None:
    case = MODELS["transformer"]
    torch.manual_seed(0)
    eager = fsdp2.run_steps(case.build(), case, 2)
    torch.manual_seed(0)
    model = fxshard.compile(case.build(), units=case.units, world_size=3, **EVERYTHING)
    fsdp2.assert_close(fsdp2.run_steps(model, case, 2), eager, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["convnet", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "convnet")],
)
def test_bitwise_as_without(name: str) -> None:
    """Channels last, batch norm, dropout, tied weights."""
    case, found = MODELS[name], []
    for options in ({}, EVERYTHING):
        torch.manual_seed(0)
        made: dict[str, Any] = {"units": case.units, "world_size": 2, **options}
        model = fxshard.compile(case.build(), **made)
        found.append(fsdp2.run_steps(model, case, 2))
    assert on_cpu(model.plan)
    fsdp2.assert_bitwise(*found)


# -- bytes -----------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "micro_batches": {"micro_batches": 2, "no_sync": True},
    "hybrid": {"strategy": "hybrid_shard", "world_size": (2, 2)},
    "groups": {"world_size": 4, "reshard_after_forward": 2},
    "steps": {"optimizer_in_backward": True, "offload": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("name", ["transformer", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sample(4)
def test_bytes(setting: str, name: str) -> None:
    case = MODELS[name]
    args, kwargs = case.batch(0, 0)
    torch.manual_seed(0)
    options = {"world_size": 2, "optimizer": torch.optim.AdamW} | SETTINGS[setting]
    result = fxshard.validate(case.build(), args, kwargs, units=case.units, **EVERYTHING, **options)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_bytes_on_ranks() -> None:
    case = MODELS["transformer"]
    args, kwargs = case.batch(0, 0)
    torch.manual_seed(0)
    result = fxshard.validate(
        case.build(), args, kwargs, world_size=2, units=case.units, ranks="processes", **EVERYTHING
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.ones(64, 8)
ROWS = 64 * 4  # bytes of a column of a batch


def planned(model: nn.Module | None = None, x: Tensor = X, **options: Any) -> fxshard.Plan:
    options = {"units": ["layers.*"], "world_size": 2} | options
    return fxshard.plan(model or Layers(), (x,), **options)


def on_cpu(plan: fxshard.Plan) -> list[str]:
    """Names of the tensors that leave."""
    launches = plan.program.graph.find_nodes(op="call_function", target=ops.offload)
    return [tensor.name for launch in launches for tensor in tags.operands(launch)]


def test_saved_bytes_by_hand() -> None:
    """Of a block the tanh leaves, and the input, unless it is the batch; those of the last block
    stay, which backward begins with.
    """
    without, plan = planned(), planned(**EVERYTHING)
    saved = 3 * 32 * ROWS + 2 * 8 * ROWS
    assert plan.memory.host_peak_bytes == saved
    forward, backward = plan.memory.phases()[:2]
    assert sum(backward.start) - sum(forward.start) == (32 + 8 + 2 * 8) * ROWS  # the last, y, dy
    before = without.memory.phases()[1]
    assert sum(before.start) - sum(backward.start) == saved
    host = backward.host.start
    assert sum(host) == host[Category.ACTIVATION.column] == saved
    assert plan.memory.peak_bytes <= without.memory.peak_bytes - 32 * ROWS
    assert "CPU" in plan.memory.table(depth=1)


def test_the_schedule_shows_what_leaves_and_what_is_freed() -> None:
    rows = [line.split() for line in planned(**EVERYTHING).dump().splitlines()]
    mine = [r for r in rows if "layers.1" in r and {"offload", "reload", "transfer"} & {*r}]
    forward, backward = ["offload", "wait"], ["reload", "wait"]
    assert [row[:2] for row in mine] == [
        *(["forward", each] for each in forward),
        *(["backward", each] for each in backward),
    ]
    assert mine[1][-2] == f"{40 * ROWS / 2**20:.3f}"  # freed


def test_with_checkpoints_the_inputs_of_blocks_leave() -> None:
    plan = planned(checkpoint="full", **EVERYTHING)
    assert plan.memory.host_peak_bytes == 2 * 8 * ROWS


def test_at_most_so_many_bytes_those_that_are_made_first() -> None:
    for size, left in ((32 * ROWS, 32), (40 * ROWS - 1, 32), (72 * ROWS, 72)):
        plan = planned(offload_activations=size)
        assert plan.memory.host_peak_bytes == left * ROWS
    assert planned(offload_activations=1).memory.host_peak_bytes == 0


@pytest.mark.parametrize(
    ("named", "left"), [(["layers.1"], 40), (["layers.2", "layers.1.*"], 80), ([Block], 112)]
)
def test_what_the_backward_of_modules_reads(named: list[Any], left: int) -> None:
    assert planned(offload_activations=named).memory.host_peak_bytes == left * ROWS


class Narrow(Block):
    """Much work on few bytes, and little work on many."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(4096, 4096, bias=False) for _ in range(2))


def test_as_much_as_the_link_carries() -> None:
    """A copy of 64 MiB takes 1 ms; so do two matrix products of it, forward; but not of 1 MiB."""

    def left(rows: int) -> int:
        with torch.device("meta"):
            model, x = Layers(4), torch.empty(rows, 4096)
            model.layers = nn.ModuleList(Narrow() for _ in range(4))
        return planned(model, x, offload_activations=True).memory.host_peak_bytes

    whole = 4 * 4096 * 4096  # bytes of an activation
    assert left(4096) >= 3 * whole
    assert left(16) == 0


# -- what stays ------------------------------------------------------------------------------------


class Many(nn.Module):
    """Views, an output that is saved, what is written, an expanded tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        returned = self.layers[0](x).exp()
        both = (returned * 2).view(-1, 2, 4).transpose(0, 1)
        y = both.sin() * both.cos()  # one storage, twice, through a view
        y = self.layers[1](y.transpose(0, 1).reshape(-1, 8)).tanh()
        self.total += y.detach().sum(0)
        wide = y[:1].expand(64, 8)
        y = self.layers[2](y * wide + y.relu())
        return y, returned


def run(model: Any, x: Tensor) -> list[Tensor]:
    y, returned = model(x)
    (y.square().mean() + returned.mean()).backward()
    found = [y, returned, model.total]
    return [*found, *(fsdp2.full(p.grad) for p in model.parameters() if p.grad is not None)]


def test_views_outputs_and_buffers() -> None:
    torch.manual_seed(0)
    x, eager = torch.randn(64, 8), Many()
    torch.manual_seed(1)
    model = fxshard.compile(Many(), world_size=2, units=["layers.*"], **EVERYTHING)
    model.load_state_dict(eager.state_dict())
    for mine, its in zip(run(model, x), run(eager, x), strict=True):
        torch.testing.assert_close(mine, its)
    names = on_cpu(model.plan)
    program = model.plan.program
    outputs = set().union(*map(tags.storage_ids, program.values))
    launches = program.graph.find_nodes(op="call_function", target=ops.offload)
    left = [tensor for launch in launches for tensor in tags.operands(launch)]
    storages = [storage for tensor in left for storage in tags.storage_ids(tensor)]
    assert len(names) >= 3
    assert len(storages) == len(set(storages)) and not outputs & set(storages)
    result = fxshard.validate(Many(), (x,), world_size=2, units=["layers.*"], **EVERYTHING)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_a_graph_that_is_retained_brings_them_back_again() -> None:
    torch.manual_seed(0)
    eager = Layers()
    model = fxshard.compile(Layers(), world_size=2, units=["layers.*"], **EVERYTHING)
    model.load_state_dict(eager.state_dict())
    for each in (eager, model):
        loss = each(X).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(fsdp2.full(mine.grad), its.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_further_ahead(ahead: int) -> None:
    def passes(default: list[Any]) -> list[Any]:
        mine = OffloadActivations(2**30, ahead)
        return [mine if step.name == mine.name else step for step in default]

    options: dict[str, Any] = {"units": ["layers.*"], "passes": passes, **EVERYTHING}
    result = fxshard.validate(Layers(), (X,), world_size=2, **options)
    assert result.max_abs_difference == 0, result.table(only_different=True)
    torch.manual_seed(0)
    eager = Layers()
    model = fxshard.compile(copy.deepcopy(eager), world_size=2, **options)
    for each in (eager, model):
        each(X).square().mean().backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(fsdp2.full(mine.grad), its.grad)  # type: ignore[arg-type]


class Two(Layers):
    """Two outputs, of which a loss may take one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        half = self.layers[1](self.layers[0](x))
        return half.sqrt().nan_to_num(), self.layers[3](self.layers[2](half))


@pytest.mark.parametrize("taken", [0, 1])
def test_a_loss_of_one_output(taken: int) -> None:
    torch.manual_seed(0)
    eager = Two()
    options: dict[str, Any] = {"units": ["layers.*"], "world_size": 2, **EVERYTHING}
    model = fxshard.compile(copy.deepcopy(eager), **options)
    for each in (eager, model):
        sum(out.sum() for out in each(X)).backward()
        each.zero_grad()
        each(X)[taken].square().mean().backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        if its.grad is not None:
            torch.testing.assert_close(fsdp2.full(mine.grad), its.grad)  # type: ignore[arg-type]


def test_open_sizes() -> None:
    """One program for all sizes; its bytes are formulas."""
    torch.manual_seed(0)
    eager = Layers()
    named: dict[str, Any] = {"dynamic": {"rows": [("x", 0)]}, "offload_activations": ["layers.*"]}
    model = fxshard.compile(Layers(), world_size=2, units=["layers.*"], **named)
    model.load_state_dict(eager.state_dict())
    for rows in (64, 6, 17):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(model(x), eager(x))
        model(x).sum().backward()
        eager(x).sum().backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(fsdp2.full(mine.grad), its.grad)  # type: ignore[arg-type]
    assert len(model._fxshard.variants) == 1 and on_cpu(model.plan)
    formula = planned(**named).memory.formula()
    for rows in (64, 100, 6):
        told = planned(x=torch.ones(rows, 8), offload_activations=["layers.*"])
        assert formula.at(rows=rows) == told.memory.peak_bytes


def test_at_most_so_many_bytes_at_each_size() -> None:
    model = fxshard.compile(
        Layers(), world_size=2, units=["layers.*"], offload_activations=40 * ROWS
    )
    for rows in (64, 32, 128, 96, 80):
        model(torch.ones(rows, 8)).sum().backward()
        assert model.plan.memory.host_peak_bytes <= 40 * ROWS
    plans = [planned(x=torch.ones(rows, 8), offload_activations=40 * ROWS) for rows in (32, 128)]
    assert [plan.memory.host_peak_bytes for plan in plans] == [40 * ROWS, 0]


def test_inference_saves_nothing() -> None:
    with torch.no_grad():
        assert not on_cpu(planned(**EVERYTHING))


def test_on_cuda_copies_are_pinned_and_on_streams() -> None:
    """Planned without a GPU: what would run."""
    plan = planned(device="cuda", **EVERYTHING)
    code = plan.code
    assert "world.offload([" in code and "world.reload([" in code
    assert "world.wait_event('store', " in code and "world.record_event('load', " in code
    assert "synchronize" not in code


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload_activations": "layers.*"}, r"Write \['layers.\*'\]"),
        ({"offload_activations": 0}, "bytes are >= 1; False offloads none"),
        ({"offload_activations": 2.5}, "expected True, bytes such as '8GiB'"),
        ({"offload_activations": []}, "expected True, bytes such as '8GiB'"),
        ({"offload_activations": "1GiB", "dynamic": {"n": [("x", 0)]}}, "Name modules instead"),
        ({"offload_activations": True, "pipeline_stage": True}, "Leave one of the two out"),
    ],
)
def test_refusals(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(**options)


def test_a_name_of_nothing() -> None:
    with pytest.raises(UnitError, match=r"^offload_activations: pattern .* matches no module"):
        planned(offload_activations=["blocks.*"])


@pytest.mark.parametrize("off", [None, False])
def test_off(off: Sequence[str] | bool | None) -> None:
    assert not on_cpu(planned(offload_activations=off))
