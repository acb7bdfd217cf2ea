"""Exceptions in the middle of a phase: nothing is left behind, and nobody waits for ever.

An error is raised after every operator and row of forward and backward, by the points that
`TracedExecutor` calls.
"""

import copy
import dataclasses
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.testing import assert_close

import fxshard
from fxshard.codegen.emit import TracedExecutor
from fxshard.errors import RankMismatchError, StepError
from fxshard.runtime.world import peers
from fxshard.runtime.world.c10d import C10dWorld
from tests.fsdp2 import full
from tests.ranks import Ranks, told

ERRORS = (torch.OutOfMemoryError, KeyboardInterrupt, ValueError)
UNITS = ["first", "last"]


class Small(nn.Module):
    """Draws random numbers, and writes buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu())).square().mean()


def batch(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


class Points:
    """A probe that raises `error` at point `number` of `phase`."""

    def __init__(self) -> None:
        self.phase, self.seen = "", 0
        self.where: tuple[str, int] | None = None
        self.error: type[BaseException] = ValueError
        self.counts: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        self.phase, self.seen = phase, 0

    def at(self) -> None:
        self.seen += 1
        self.counts[self.phase] = self.seen
        if self.where == (self.phase, self.seen):
            self.where = None
            raise self.error("injected")

    def stepping(self, grads: list[list[Tensor]], step: Callable[[], Optimizer]) -> Optimizer:
        return step()


def pointed(model: Any) -> Points:
    """Let the programs of `model` go through points."""
    points = Points()
    for kind, variant in model._fxshard.variants.items():
        executor = TracedExecutor(variant.program, model._fxshard.world, points)
        executor.bind_step(model._fxshard.step_parameters)
        model._fxshard.variants[kind] = dataclasses.replace(variant, executor=executor)
    return points


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    return fxshard.compile(Small(), units=UNITS, **options)


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def grads(model: Any) -> dict[str, Tensor]:
    return {name: local(p.grad).clone() for name, p in model.named_parameters()}


def buffers(model: Any) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def step(model: Any, x: Tensor, seed: int) -> None:
    torch.manual_seed(seed)
    model(x).backward()


def numbers(count: int, stride: int) -> Iterator[int]:
    """Every `stride`-th point, and the last."""
    yield from range(1, count, stride)
    yield count


# -- on all ranks alike ---------------------------------------------------------------------------


def alike(
    rank: int, world_size: int, phase: str, options: dict[str, Any], stride: int = 1
) -> dict[str, Tensor]:
    """Fails at every point; between two failures a step is right to the bit. Returns gradients."""
    model, x = made(**options), batch(rank)
    model(x)
    points = pointed(model)
    start = buffers(model)
    step(model, x, rank)
    want, after = grads(model), buffers(model)
    shards = {name: local(p).clone() for name, p in model.named_parameters()}
    for number in numbers(points.counts[phase], stride):
        model.load_state_dict(start, strict=False)
        marks = {p: torch.ones_like(p) for p in model.parameters()}
        for p, mark in marks.items():
            p.grad = mark
        error = ERRORS[number % len(ERRORS)]
        points.where, points.error = (phase, number), error
        torch.manual_seed(rank)
        if phase == "backward":
            loss = model(x)
        before = torch.get_rng_state()
        with pytest.raises(error) as caught:
            loss.backward() if phase == "backward" else model(x)
        assert not getattr(caught.value, "__notes__", [])
        assert torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is mark and local(mark).eq(1).all() for p, mark in marks.items())
        assert same({name: local(p) for name, p in model.named_parameters()}, shards)
        written = buffers(model)
        if phase == "forward" and not same(written, start) and not same(written, after):
            with pytest.raises(StepError, match=r"had written buffer 'norm.* Load the last"):
                model(x)
        else:
            assert phase == "forward" or same(written, after)
        model.load_state_dict(start, strict=False)
        model.zero_grad()
        step(model, x, rank)
        assert same(grads(model), want) and same(buffers(model), after), (phase, number)
    return {name: full(p.grad) for name, p in model.named_parameters()}


def half_written(rank: int, world_size: int) -> None:
    """A copy of a model that is refused is so too, until what it holds has been loaded."""
    model, x = made(), batch(rank)
    model(x)
    points, start = pointed(model), buffers(model)
    model(x)  # counts
    halves = {"strict": False, "assign": True}
    for number in range(points.counts["forward"], 0, -1):  # it writes its buffers last
        points.where, points.error = ("forward", number), ERRORS[0]
        with pytest.raises(ERRORS[0]):
            model(x)
        if (refused := told(lambda: model(x))) == "no error":
            continue
        twin = copy.deepcopy(model)
        assert "had written buffer 'norm" in refused and told(lambda twin=twin: twin(x)) == refused
        for each in (model, twin):
            each.load_state_dict({name: t.clone() for name, t in start.items()}, **halves)
            each(x)
        return
    raise AssertionError("no point between two writes")


def test_halves_are_refused_until_they_are_loaded(ranks: Any) -> None:
    ranks(2).run(half_written)


def eager() -> dict[str, Tensor]:
    """What two ranks with a batch each should have."""
    sums: dict[str, Tensor] = {}
    for rank in range(2):
        torch.manual_seed(0)
        model = Small()
        step(model, batch(rank), rank)
        for name, p in model.named_parameters():
            assert p.grad is not None
            sums[name] = sums.get(name, torch.zeros_like(p)) + p.grad / 2
    return sums


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "no_prefetch": {"forward_prefetch": 0, "backward_prefetch": 0, "pack_bytes": 0},
    "kept_recomputed": {"reshard_after_forward": False, "checkpoint": "full"},
    "no_shard": {"strategy": "no_shard"},
}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_all_ranks_fail_alike_and_go_on(ranks: Any, phase: str) -> None:
    want = eager()
    for found in ranks(2).run(alike, phase, {}, 5):
        assert_close(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_wherever_all_ranks_fail_they_go_on(ranks: Any, phase: str, name: str) -> None:
    want = eager()
    for found in ranks(2).run(alike, phase, OPTIONS[name]):
        assert_close(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_in_one_process(phase: str) -> None:
    alike(0, 1, phase, {"world_size": 2}, stride=5)


# -- on one rank ----------------------------------------------------------------------------------


def joined(path: Path, rank: int, world_size: int) -> C10dWorld:
    """A process group of its own, and a world in it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=20),
    )
    return C10dWorld(init_device_mesh("cpu", (world_size,)))


def ended(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except BaseException as error:
        return error
    return None


def alone(rank: int, world_size: int, phase: str, folder: Path, stride: int) -> int:
    """Rank 1 fails; all ranks learn who did, and are refused from then on."""
    peers.LOOK_SECONDS, peers.STOP_SECONDS = 0.05, 0.5
    world = joined(folder / "first", rank, world_size)
    model, x = made(mesh=world.mesh), batch(rank)
    start = buffers(model)
    model(x)
    count = None
    done = 0
    tried = iter([0])
    while (number := next(tried, None)) is not None:
        model._fxshard.world = joined(folder / f"{number}", rank, world_size)
        model.load_state_dict(start, strict=False)  # a failure may leave them in parts
        points = pointed(model)
        step(model, x, rank)
        if count is None:
            count = points.counts[phase]
            tried = numbers(count, stride)
            continue
        error = ERRORS[number % len(ERRORS)]
        points.error = error
        if rank == 1:
            points.where = (phase, number)
            found = ended(lambda: step(model, x, rank))
            assert type(found) is error, found
            assert "not all ranks stopped alike" in found.__notes__[0]
        else:
            found = ended(lambda: [step(model, x, rank) for _ in range(2)])
            assert isinstance(found, RankMismatchError), found
            assert f"rank 1 stopped in the middle of {phase} ({error.__name__}" in str(found)
        found = ended(lambda: model(x))
        assert isinstance(found, RankMismatchError), found
        assert "this rank has left the process group" in str(found)
        done += 1
    return done


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stride", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_one_rank_fails_and_all_know(tmp_path: Path, phase: str, stride: int) -> None:
    pool = Ranks(2, timeout_s=60 if stride > 1 else 300)  # its ranks leave their process group
    try:
        done = pool.run(alone, phase, tmp_path, stride)
    finally:
        pool.close()
    assert done[0] == done[1] >= 3


# -- what backward has begun ----------------------------------------------------------------------


def accumulated(rank: int, world_size: int) -> tuple[int, int]:
    """Points after which the sums are as they were, and after which they are refused."""
    model, x = made(), batch(rank)

    def both(fail: tuple[str, int] | None, points: Points | None) -> BaseException | None:
        with model.no_sync():
            step(model, x, rank)
        if points is not None:
            points.where = fail
        return ended(lambda: step(model, x, rank))

    assert both(None, None) is None
    points = pointed(model)
    model.zero_grad()
    assert both(None, points) is None
    want, kept, lost = grads(model), 0, 0
    for number in numbers(points.counts["backward"], 12):
        model.zero_grad()
        assert isinstance(both(("backward", number), points), ValueError)
        again = ended(lambda: step(model, x, rank))
        if isinstance(again, StepError):
            assert "the gradients accumulated under no_sync" in str(again)
            model.zero_grad()
            assert both(None, None) is None
            lost += 1
        else:
            assert again is None
            kept += 1
        assert same(grads(model), want), number
    return kept, lost


def test_accumulated_gradients_are_kept_or_refused(ranks: Any) -> None:
    for kept, lost in ranks(2).run(accumulated):
        assert kept and lost


def stepped(rank: int, world_size: int) -> list[str]:
    model, x = made(optimizer=torch.optim.SGD, optimizer_in_backward=True), batch(rank)
    model(x)
    points = pointed(model)
    step(model, x, rank)
    said = []
    points.where = ("backward", points.counts["backward"])
    assert isinstance(ended(lambda: step(model, x, rank)), ValueError)
    said.append(str(ended(lambda: model(x))))
    model.load_state_dict(model.full_state_dict(rank0_only=False))
    said.append(str(ended(lambda: step(model, x, rank))))
    return said


def test_parameters_half_stepped_are_refused(ranks: Any) -> None:
    for refused, loaded in ranks(2).run(stepped):
        assert "load the last checkpoint" in refused
        assert loaded == "None"
