"""Stages of a pipeline on gloo ranks: a small transformer-like model, its split, its training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard.codegen.emit import TracedExecutor
from fxshard.memory.category import Category
from fxshard.validation.tracker import Tracker, WatchedWorld

VOCABULARY, WIDTH, ROWS, LENGTH = 11, 6, 2, 3
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
STEPS = 3
SINGLE = ("ScheduleGPipe", "Schedule1F1B")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Net(nn.Module):
    """A model, or a part of it: what a part lacks is None, as torchtitan's parts have it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(blocks)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, h: Tensor) -> Tensor:
        h = h if self.embed is None else self.embed(h)
        for block in self.blocks.values():
            h = block(h)
        return h if self.head is None else self.head(h)


def net(blocks: int = 4) -> Net:
    torch.manual_seed(0)
    return Net(blocks)


def part(model: Net, index: int, count: int) -> Net:
    """Stage `index` of `count`: a copy of `model` without what the others have."""
    made = copy.deepcopy(model)
    each = len(made.blocks) // count
    for name in list(made.blocks):
        if int(name) // each != index:
            del made.blocks[name]
    if index:
        made.embed = None
    if index < count - 1:
        made.head = None
    return made


def batch(dp_rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * step + dp_rank)
    size = (micro * ROWS, LENGTH + 1)
    tokens = torch.randint(VOCABULARY, size, generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Counted(TorchDispatchMode):
    """Counts collectives of c10d; those of a pipeline are sends and receives, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        for kind in ("allgather", "reduce_scatter", "allreduce"):
            if name.startswith("c10d.") and kind in name:
                self.seen[kind] += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Trained:
    """What a rank saw: full tensors, by FQN of the whole model."""

    losses: list[list[float]]
    grads: list[dict[str, Tensor]]
    params: dict[str, Tensor]
    counts: dict[str, int]


def stages_of(rank: int, pp: int, per_rank: int, schedule: str) -> list[int]:
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + i * pp for i in range(per_rank)]


Policy = fsdp.MixedPrecisionPolicy


def by_fsdp2(module: Net, mesh: Any, reshard: bool | None, policy: Policy) -> nn.Module:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": policy}
    for block in module.blocks.values():
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(module, **options)


def by_fully_shard(module: Net, mesh: Any, reshard: bool | None, policy: Policy) -> nn.Module:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": policy}
    for block in module.blocks.values():
        fxshard.fully_shard(block, **options)
    made: nn.Module = fxshard.fully_shard(module, **options, pipeline_stage=True)
    return made


def by_compile(module: Net, mesh: Any, reshard: bool | None, policy: Policy) -> nn.Module:
    return fxshard.compile(
        module,
        mesh=mesh,
        units=["blocks.*"],
        reshard_after_forward=reshard,
        mixed_precision=policy,
        pipeline_stage=True,
    )


WAYS: dict[str, Callable[..., nn.Module]] = {
    "fsdp2": by_fsdp2,
    "fully_shard": by_fully_shard,
    "compile": by_compile,
}


def train(
    rank: int,
    world_size: int,
    way: str,
    schedule: str,
    pp: int,
    micro: int,
    reshard: bool | None = False,
    policy: Policy = Policy(),  # noqa: B008
) -> Trained:
    """Three steps of a schedule on the stages of this rank."""
    mesh = init_device_mesh("cpu", (pp, world_size // pp), mesh_dim_names=("pp", "dp"))
    dp_rank = mesh.get_local_rank("dp")
    per_rank = 1 if schedule in SINGLE else 2
    count, model, device = pp * per_rank, net(), torch.device("cpu")
    stages = []
    for index in stages_of(mesh.get_local_rank("pp"), pp, per_rank, schedule):
        module = WAYS[way](part(model, index, count), mesh["dp"], reshard, policy)
        stages.append(PipelineStage(module, index, count, device, group=mesh.get_group("pp")))
    kind = getattr(pipelining, schedule)
    runs = kind(stages[0] if schedule in SINGLE else stages, micro, loss_fn=loss_of)
    named = {fqn: p for stage in stages for fqn, p in stage.submod.named_parameters()}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    losses, grads, counted = [], [], Counted()
    for step in range(STEPS):
        with counted if step == STEPS - 1 else contextlib.nullcontext():
            losses.append(run_step(runs, stages, *batch(dp_rank, step, micro)))
        grads.append({fqn: full(p.grad) for fqn, p in named.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, grads, {n: full(p) for n, p in named.items()}, dict(counted.seen))


def run_step(
    runs: Any, stages: list[PipelineStage], tokens: Tensor, targets: Tensor
) -> list[float]:
    seen: list[Tensor] = []
    has_last = any(stage.is_last for stage in stages)
    args = (tokens,) if any(stage.is_first for stage in stages) else ()
    if has_last:
        runs.step(*args, target=targets, losses=seen)
    else:
        runs.step(*args)
    return [loss.item() for loss in seen]


def full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def eager(dp: int, micro: int) -> Trained:
    """Plain PyTorch on the joined batch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], []
    for step in range(STEPS):
        pairs = [batch(r, step, micro) for r in range(dp)]
        tokens, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
        loss_of(model(tokens), targets).backward()
        losses.append(
            [
                loss_of(model(t), y).item()
                for tokens, targets in pairs
                for t, y in zip(tokens.chunk(micro), targets.chunk(micro), strict=True)
            ]
        )
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, grads, {n: p.detach() for n, p in model.named_parameters()}, {})


# -- memory ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Measure:
    """A stage's steady step: per phase the largest difference of bytes, and both peaks."""

    differences: list[tuple[str, int, int]]
    planned_peak: int
    measured_peak: int


def measure(
    rank: int,
    world_size: int,
    pp: int,
    micro: int,
    options: dict[str, Any],
    return_outputs: bool = False,
    schedule: str = "Schedule1F1B",
) -> Measure:
    """Two steps of a schedule under the tracker, the first of them unwatched, and the plan."""
    mesh = init_device_mesh("cpu", (pp, world_size // pp), mesh_dim_names=("pp", "dp"))
    index, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    options = {"units": ["blocks.*"], "pipeline_stage": True, **options}
    plain = part(net(2 * pp), index, pp)
    module = fxshard.compile(copy.deepcopy(plain), mesh=mesh["dp"], **options)
    tracker = Tracker()
    module._fxshard.make_executor = lambda program, world: TracedExecutor(
        program, WatchedWorld(world, tracker), tracker
    )
    stage = PipelineStage(module, index, pp, torch.device("cpu"), group=mesh.get_group("pp"))
    runs = getattr(pipelining, schedule)(stage, micro, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    tokens, targets = batch(dp_rank, 0, micro)
    _watch_world(tracker, module._fxshard.world)

    def step() -> None:
        target = {"target": targets} if stage.is_last else {}
        args = (tokens,) if stage.is_first else ()
        runs.step(*args, **target, return_outputs=return_outputs)
        tracker.at()
        tracker.gradients(module.parameters())
        tracker.begin("optimizer")
        optimizer.step()
        tracker.optimizer_state(optimizer)
        tracker.at()
        tracker.begin("zero_grad")
        optimizer.zero_grad()
        tracker.at()

    know = tracker.know
    know(
        (s for slot in module._fxshard.slots.values() for s in slot.shards), Category.SHARDED_PARAM
    )
    know([tokens] * stage.is_first + [targets] * stage.is_last, Category.INPUTS)
    with tracker:
        step()
        received = (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        buffers = [getattr(info, "buffer", None) for infos in received for info in infos]
        buffers = [buffer for buffer in buffers if buffer is not None]
        tracker.mark(buffers, Category.INPUTS)
        del buffers
        _watch(tracker, runs, stage)
        before = len(tracker.measured())
        step()
    report = _planned(plain, stage, mesh, micro, options, return_outputs, schedule)
    found = tracker.measured()[before:]
    phases = report.phases()
    assert [(p.phase) for p in phases] == [m.phase for m in found]
    differences = [
        (p.phase, p.micro_batch, _apart(p, m)) for p, m in zip(phases, found, strict=True)
    ]
    peak = max(max(sum(m.start), int(m.during.sum(1).max(initial=0))) for m in found)
    return Measure(differences, report.peak_bytes, peak)


def _planned(
    plain: Net,
    stage: PipelineStage,
    mesh: Any,
    micro: int,
    options: dict[str, Any],
    return_outputs: bool,
    schedule: str,
) -> Any:
    tokens, targets = batch(0, 0, 1)
    given = tokens
    if not stage.is_first:
        (received,) = stage.args_recv_info[0]
        given = torch.zeros_like(received.buffer, requires_grad=True)
    last = {"loss": lambda logits: loss_of(logits, targets), "keep_outputs": return_outputs}
    ahead = stage.num_stages - stage.stage_index if schedule == "Schedule1F1B" else micro
    return fxshard.plan(
        plain,
        (given,),
        world_size=mesh["dp"].size(),
        micro_batches=micro,
        in_flight=ahead,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        **(last if stage.is_last else {}),
        **options,
    ).memory


def _watch_world(tracker: Tracker, world: Any) -> None:
    """Show the tracker what the world does outside of programs: frees, and what gloo makes."""
    free, wait = world.free, world.wait

    def freed(tensors: list[Tensor]) -> None:
        free(tensors)
        tracker.resized(tensors)

    def waited(*args: Any) -> None:
        tracker.waiting = True
        wait(*args)
        tracker.waiting = False

    world.free, world.wait = freed, waited


def _watch(tracker: Tracker, runs: Any, stage: PipelineStage) -> None:
    """Mark the phases that are the schedule's."""
    backward, reduce = stage.backward_one_chunk, stage.perform_reduce_grad
    compute = runs._compute_loss

    def backward_one_chunk(*args: Any, **kwargs: Any) -> None:
        if stage.is_last:
            tracker.begin("loss backward")
        backward(*args, **kwargs)
        sums = stage.submod._fxshard.accumulated.values()
        tracker.mark((t for each in sums for t in each), Category.UNSHARDED_GRAD)
        tracker.at()

    def perform_reduce_grad(factor: int) -> None:
        tracker.begin("reduction")
        reduce(factor)

    def compute_loss(output: Tensor, *args: Any) -> Tensor:
        tracker.begin("loss")
        output.register_hook(lambda grad: tracker.at())
        value: Tensor = compute(output, *args)
        tracker.at()
        return value

    stage.backward_one_chunk = backward_one_chunk  # type: ignore[method-assign]
    stage.perform_reduce_grad = perform_reduce_grad  # type: ignore[method-assign]
    runs._compute_loss = compute_loss


def _apart(planned: Any, measured: Any) -> int:
    """The largest difference of totals: at each point, or where the two have others, at some."""
    start = abs(sum(planned.start) - sum(measured.start))
    after, found = planned.after.sum(1), measured.after.sum(1)
    if planned.phase in ("forward", "backward"):
        assert len(after) == len(found)
        ends = int(abs(after - found).max(initial=0))
    else:
        ends = abs(int(after[-1]) - int(found[-1]))
    if planned.phase == "zero_grad":
        return max(start, ends)
    tops = (max(sum(p.start), int(p.during.sum(1).max(initial=0))) for p in (planned, measured))
    top, seen = tops
    return max(start, ends, abs(top - seen))
