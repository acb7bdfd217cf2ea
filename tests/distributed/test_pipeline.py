"""Stages of torch.distributed.pipelining, against FSDP2 in the same schedule and eager PyTorch."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fxshard
from fxshard.errors import ConfigError, StepError
from tests.distributed.pipeline_cases import (
    LENGTH,
    ROWS,
    WIDTH,
    Block,
    Trained,
    eager,
    full,
    measure,
    train,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SCHEDULES = (
    *("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"),
    *("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
)


def require_alike(found: list[Trained], theirs: list[Trained], bitwise: bool = True) -> None:
    """The ranks have the numbers of other runs; of a joined one, which has all parameters."""
    for mine, other in zip(found, theirs, strict=True):
        assert len(mine.grads) == len(other.grads)
        pairs = [(mine.params, other.params), *zip(mine.grads, other.grads, strict=True)]
        for here, there in pairs:
            assert here and here.keys() <= there.keys()
            for fqn, tensor in here.items():
                if bitwise:
                    assert torch.equal(tensor, there[fqn]), fqn
                else:
                    near = 5e-6 * float(there[fqn].abs().max())
                    torch.testing.assert_close(tensor, there[fqn], rtol=0, atol=near)


@pytest.mark.parametrize(
    ("way", "schedule"),
    [("compile", "Schedule1F1B"), ("fully_shard", "ScheduleInterleavedZeroBubble")],
)
def test_numbers_and_collectives_are_fsdp2s(ranks: Any, way: str, schedule: str) -> None:
    theirs, mine = (ranks(4).run(train, each, schedule, 2, 4) for each in ("fsdp2", way))
    joined = eager(2, 4)
    require_alike(mine, theirs)
    require_alike(mine, [joined] * 4, bitwise=False)
    for found, other in zip(mine, theirs, strict=True):
        assert found.counts == other.counts and found.losses == other.losses
        assert (
            not found.losses[0]
            or found.losses[0] == pytest.approx(joined.losses[0][:4])
            or (found.losses[0] == pytest.approx(joined.losses[0][4:]))
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compile", "fully_shard"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(ranks: Any, way: str, schedule: str) -> None:
    theirs = ranks(4).run(train, "fsdp2", schedule, 2, 4)
    mine = ranks(4).run(train, way, schedule, 2, 4)
    require_alike(mine, theirs)
    require_alike(mine, [eager(2, 4)] * 4, bitwise=False)
    assert [found.counts for found in mine] == [found.counts for found in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_units_that_are_sharded_between_forward_and_backward(ranks: Any, schedule: str) -> None:
    """FSDP2 is wrong here under zero-bubble schedules: gradients of parameters are lost."""
    mine = ranks(4).run(train, "compile", schedule, 2, 4, True)
    require_alike(mine, [eager(2, 4)] * 4, bitwise=False)
    assert {found.counts["reduce_scatter"] for found in mine} <= {2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compile", "fully_shard"])
def test_mixed_precision(ranks: Any, way: str) -> None:
    runs = [ranks(4).run(train, w, "Schedule1F1B", 2, 4, False, BF16) for w in ("fsdp2", way)]
    theirs, mine = runs
    require_alike(mine, theirs)
    assert [found.losses for found in mine] == [found.losses for found in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_alone(ranks: Any, schedule: str) -> None:
    mine = ranks(2).run(train, "compile", schedule, 2, 4)
    require_alike(mine, [eager(1, 4)] * 2, bitwise=False)
    assert all(not found.counts for found in mine)


# -- memory ---------------------------------------------------------------------------------------


def require_measured(ranks: Any, pp: int, world: int, *args: Any) -> None:
    """On the first rank of each stage, which holds the most: 0 bytes in every phase."""
    found = ranks(world).run(measure, pp, *args)
    dp = world // pp
    for stage in range(pp):
        first, *others = found[stage * dp : (stage + 1) * dp]
        assert [each for each in first.differences if each[2]] == []
        assert first.planned_peak == first.measured_peak
        assert all(other.measured_peak <= first.planned_peak for other in others)


def test_the_bytes_of_stages_are_known(ranks: Any) -> None:
    require_measured(ranks, 2, 4, 3, {"reshard_after_forward": False})


MEASURED: list[tuple[int, int, int, dict[str, Any], bool]] = [
    (2, 4, 4, {"reshard_after_forward": True}, True),
    (2, 4, 2, {"reshard_after_forward": False}, False),
    (2, 4, 2, {"reshard_after_forward": False, "checkpoint": "full"}, True),
    (2, 4, 4, {"mixed_precision": BF16, "reshard_after_forward": False}, False),
    (4, 4, 6, {}, True),
    (2, 2, 5, {"checkpoint": "full"}, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "world", "micro", "options", "returned"), MEASURED)
def test_the_bytes_of_other_stages(
    ranks: Any, pp: int, world: int, micro: int, options: dict[str, Any], returned: bool
) -> None:
    require_measured(ranks, pp, world, micro, options, returned)


# -- a stage by itself, called as schedules call it ------------------------------------------------


def meshes(world_size: int) -> DeviceMesh:
    """A pipeline of one stage, on all ranks."""
    return init_device_mesh("cpu", (1, world_size), mesh_dim_names=("pp", "dp"))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def rows(rank: int, number: int) -> Tensor:
    made = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=made)


def joined(world_size: int, numbers: list[int]) -> dict[str, Tensor]:
    """The gradients of eager PyTorch on the batches of all ranks."""
    model = blocks()
    for number in numbers:
        (
            model(torch.cat([rows(r, number) for r in range(world_size)])).sum() / world_size
        ).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def end(module: nn.Module, mesh: DeviceMesh) -> None:
    """What schedules do after the last micro-batch."""
    group = mesh.get_group("pp")
    PipelineStage(module, 0, 1, torch.device("cpu"), group=group).perform_reduce_grad(1)


def require_grads(module: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, param in module.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(full(param.grad), expected[name])
        param.grad = None


def by_hand(rank: int, world_size: int, reshard: bool) -> None:
    mesh = meshes(world_size)
    options: dict[str, Any] = {"units": ["0"], "reshard_after_forward": reshard}
    module: Any = fxshard.compile(blocks(), mesh=mesh["dp"], pipeline_stage=True, **options)
    assert isinstance(module, FSDPModule)

    # Shapes are learned by gradients of inputs alone: nothing is added.
    x = rows(rank, 7).requires_grad_()
    torch.autograd.grad(module(x).sum(), x)
    assert not module._fxshard.accumulated
    with pytest.raises(StepError, match="none of whose micro-batches had a backward"):
        end(module, mesh)

    # Forwards ahead of backwards; a zero-bubble schedule's two parts of a backward.
    inputs = [rows(rank, i).requires_grad_() for i in range(3)]
    outs = [module(x) for x in inputs[:2]]
    outs[0].sum().backward()
    outs.append(module(inputs[2]))
    module.reshard()
    for out, x in zip(outs[1:], inputs[1:], strict=True):
        module.unshard(async_op=True).wait()
        torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert all(param.grad is None for param in module.parameters())
    end(module, mesh)
    require_grads(module, joined(world_size, [0, 1, 2]))

    # Accumulation over schedules.
    with module.no_sync():
        module(rows(rank, 3)).sum().backward()
        end(module, mesh)
    module(rows(rank, 4)).sum().backward()
    end(module, mesh)
    require_grads(module, joined(world_size, [3, 4]))

    # Copies are stages too.
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        made(rows(rank, 5)).sum().backward()
        end(made, mesh)
        require_grads(made, joined(world_size, [5]))

    # A hook sees the reduced gradient, once.
    seen: list[Tensor] = []
    param = module[0].up.weight
    hook = param.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad)))
    for number in (5, 6):
        module(rows(rank, number)).sum().backward()
    end(module, mesh)
    hook.remove()
    torch.testing.assert_close(seen, [joined(world_size, [5, 6])["0.up.weight"]])

    # What cannot be had.
    with pytest.raises(ConfigError, match="pipeline's stage: the schedule ends with all"):
        module.set_requires_all_reduce(False)
    with pytest.raises(ConfigError, match="register_comm_hook with pipeline_stage=True"):
        module.register_comm_hook(None, lambda *_: None)
    if not reshard:
        out = module(rows(rank, 0))
        with torch.no_grad():
            module[0].up.weight.add_(1.0)
        module(rows(rank, 1))
        with pytest.raises(StepError, match="was changed between a forward of a pipeline's stage"):
            out.sum().backward()


@pytest.mark.parametrize("reshard", [False, True])
def test_a_stage_by_itself(ranks: Any, reshard: bool) -> None:
    ranks(2).run(by_hand, reshard)


def in_replicas(rank: int, world_size: int, offload: bool) -> None:
    """Two replicas of two ranks."""
    names = ("pp", "replicate", "shard")
    mesh = init_device_mesh("cpu", (1, 2, world_size // 2), mesh_dim_names=names)
    module = fxshard.compile(
        blocks(),
        mesh=mesh["replicate", "shard"],
        strategy="hybrid_shard_zero2",
        pipeline_stage=True,
        offload=CPUOffloadPolicy(pin_memory=False) if offload else None,
    )
    for number in range(2):
        module(rows(rank, number)).sum().backward()
    end(module, mesh)
    require_grads(module, joined(world_size, [0, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_a_hybrid_stage(ranks: Any, offload: bool) -> None:
    ranks(4).run(in_replicas, offload)


def others(rank: int, world_size: int) -> None:
    """Frozen, ignored and unused parameters; evaluation."""
    mesh = meshes(world_size)

    def made() -> nn.Sequential:
        model = blocks()
        model.append(nn.Linear(WIDTH, 1))
        model[0].up.requires_grad_(False)
        model[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
        return model

    module = fxshard.compile(made(), mesh=mesh["dp"], pipeline_stage=True, ignored=["2"])
    alone, own = made(), made()
    for number in range(2):
        module(rows(rank, number)).sum().backward()
        own(rows(rank, number)).sum().backward()
        every = torch.cat([rows(r, number) for r in range(world_size)])
        (alone(every).sum() / world_size).backward()
    with torch.no_grad():
        torch.testing.assert_close(module(rows(rank, 0)), alone(rows(rank, 0)))
    end(module, mesh)
    of_this_rank = dict(own.named_parameters())
    for (name, param), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
        expected = of_this_rank[name].grad if name.startswith("2.") else theirs.grad
        found = None if param.grad is None else full(param.grad)
        torch.testing.assert_close(found, expected, msg=name)


def test_parameters_of_other_kinds(ranks: Any) -> None:
    ranks(2).run(others)


def without_the_option(rank: int, world_size: int) -> None:
    """`fully_shard` refuses schedules by name; what `compile` returns reduces each micro-batch."""
    mesh = meshes(world_size)
    for way in ("fully_shard", "compile"):
        if way == "fully_shard":
            module = fxshard.fully_shard(blocks(), mesh=mesh["dp"])
        else:
            module = fxshard.compile(blocks(), mesh=mesh["dp"])
        stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, _: out.sum(), scale_grads=False)
        both = torch.cat([rows(rank, 0), rows(rank, 1)])
        if way == "fully_shard":
            with pytest.raises(RuntimeError) as raised:
                schedule.step(both, target=both)
            assert "shard their stages with pipeline_stage=True" in str(raised.value.__cause__)
        else:
            schedule.step(both, target=both)
            require_grads(module, joined(world_size, [0, 1]))


def test_stages_without_the_option(ranks: Any) -> None:
    ranks(2).run(without_the_option)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"optimizer": torch.optim.SGD, "optimizer_in_backward": True},
            "no backward of a stage has all gradients of a step",
        ),
        ({"ranks_may_differ": True}, "ranks agree on what a call reduces"),
        ({"max_inflight": 1}, "what stays unsharded for a whole schedule"),
        ({"no_sync": True, "micro_batches": 2}, "no micro-batch of a stage is reduced"),
        ({"in_flight": 0}, "in_flight=0: expected how many micro-batches"),
        ({"in_flight": 2, "pipeline_stage": False}, "in a loop each backward follows its forward"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fxshard.plan(blocks(), (rows(0, 0),), world_size=2, **{"pipeline_stage": True, **options})


def test_where_stages_are_refused() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: fxshard.compile(blocks(), world_size=2, pipeline_stage=True),
        lambda: fxshard.shard(blocks(), world_size=2, pipeline_stage=True),
        lambda: fxshard.validate(blocks(), (rows(0, 0),), world_size=2, pipeline_stage=True),
        lambda: fxshard.plan(
            blocks(),
            (rows(0, 0),),
            world_size=2,
            pipeline_stage=True,
            dynamic={"batch": [("input", 0)]},
        ).memory.formula(),
    ]
    for call, text in zip(
        calls,
        (
            "needs a process group",
            "a stage runs one program per micro-batch",
            "a stage runs in a schedule, beside others",
            "plan once for each",
        ),
        strict=True,
    ):
        with pytest.raises(ConfigError, match=text):
            call()


def test_the_report_of_a_stage(tmp_path: Path) -> None:
    """Forwards ahead cost what a call keeps; views show the phases in the schedule's order."""
    x = torch.zeros(ROWS, LENGTH, WIDTH, requires_grad=True)

    def planned(in_flight: int) -> fxshard.MemoryReport:
        return fxshard.plan(
            blocks(),
            (x,),
            world_size=2,
            pipeline_stage=True,
            reshard_after_forward=False,
            micro_batches=8,
            in_flight=in_flight,
        ).memory

    one, two, three = (planned(k) for k in (1, 2, 3))
    kept = three.peak_bytes - two.peak_bytes
    assert kept == sum(each.bytes for each in one.kept_for_backward())
    names = [(phase.phase, phase.micro_batch) for phase in two.phases()][:6]
    assert names == [
        *(("forward", 0), ("forward", 1), ("backward", 0)),
        *(("forward", 2), ("backward", 1), ("forward", 3)),
    ]
    assert two.phases()[-2].phase == "reduction"
    assert "8 micro-batches" in two.table() and two.to_dict()
    two.to_html(tmp_path / "page.html")
