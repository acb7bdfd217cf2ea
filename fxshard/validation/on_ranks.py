"""Steps on real gloo ranks, each on its own batch, compared with eager PyTorch in one process.

Note: what eager is
===================
The loss of a step is the mean of the ranks' losses, so its gradient is the mean of the ranks'
gradients. That equals eager PyTorch on the joined batch if the loss is a mean over samples and
every rank has as many (`reduce_op` and the divide factors of the configuration replace the mean).
In eager each rank's batch runs through a model with its own buffers: what a layer computes over the
samples of a batch (BatchNorm's statistics, a balancing loss) is computed over the rank's samples,
as in FSDP and DDP. A joined batch would give other values there.

First the gradients of a step are compared with eager's. Then eager's optimizer steps with the
gradients of the ranks, and the parameters are compared. The next eager step begins with these
parameters. So rounding errors are not carried from step to step, where an optimizer that divides by
the size of a gradient would amplify them.

Note: on a mesh of several dimensions
=====================================
Each rank calls the user's `parallelize` on a copy of the model; eager has the model as it was. The
ranks of one place in data parallelism have one batch and one seed. Each of them is compared with
eager: its outputs, loss and buffers, where a DTensor is put together and a plain tensor is to be
full. Gradients and parameters are put together on each rank, over all dimensions of the mesh. Those
of rank 0 are compared, and those of others that are not bitwise the same: a parameter that tensor
parallelism copies may differ between its copies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fxshard._torch import trees
from fxshard._torch.dtensors import dtensor_like
from fxshard.capture import precision
from fxshard.capture.held import copied
from fxshard.codegen.given_optimizer import make_optimizer
from fxshard.codegen.optimizer import OnShards
from fxshard.config.checked import Config
from fxshard.config.world_size import grid
from fxshard.errors import ConfigError
from fxshard.ir.program import Program
from fxshard.ir.units import Param, Unit
from fxshard.memory.report import MemoryReport
from fxshard.plans.workload import Call, Workload
from fxshard.runtime.module import sharded
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.sharding import Sharding
from fxshard.validation import processes
from fxshard.validation.compare import Validation, compare
from fxshard.validation.numerics import (
    SEED,
    Difference,
    Numerics,
    Seen,
    agreeing,
    as_left,
    as_root,
    buffers_of,
    cast_for_reduction,
    cast_state,
    coarsest_dtype,
    difference,
    forward_backward,
    judged,
    like,
    micro_batches,
    own,
    plain,
    widened,
)
from fxshard.validation.parallel import Parallel, position
from fxshard.validation.rehearsal import on_this_rank, split_steps, tracked
from fxshard.validation.tracker import Measured


@dataclasses.dataclass
class TensorPart:
    """What one rank holds of a tensor.

    Attributes:
        tensor: its rows; all of them where it is not sharded.
        shard: its number among the ranks that share the tensor; None if each has all of it.
        replica: the number of their group.
        dim: that the tensor is cut along.
    """

    tensor: Tensor
    shard: int | None
    replica: int
    dim: int = 0


@dataclasses.dataclass
class Left:
    """The results of one step on a rank.

    Attributes:
        own: outputs, loss, input gradients and buffers, of the rank's batch.
        grads, params: by FQN, before and after the optimizer's step.
    """

    own: Seen
    grads: dict[str, TensorPart]
    params: dict[str, TensorPart]


def beside_ranks(
    work: Workload,
    program: Program,
    report: MemoryReport,
    steps: int,
    parallel: Parallel | None = None,
) -> Validation:
    """Run `steps` steps on as many gloo ranks as `work` asks for, and compare everything.

    Args:
        work: what to run, on a plain model with real parameters, which is not changed.
        program: of the last micro-batch.
        report: the predicted memory of rank 0.
        steps: how many.
        parallel: the ranks are those of a mesh, on which each parallelises the model.

    Returns:
        Bytes of rank 0, peaks of all ranks, and `Validation.numerics` of every tensor.

    Raises:
        ConfigError: the model, the batch or an option cannot be sent to another process.
        RankDiedError: a rank died, failed or hung; names it.
    """
    calls = batches(work, math.prod(grid(work.world_size, work.config)))
    ranks = len(calls) if parallel is None else parallel.ranks
    found: list[RankResult] = processes.run(run_rank, packed(work, calls, steps, parallel), ranks)
    result = compare(report, split_steps(found[0].measured, steps, work.micro_batches))
    result.peaks, result.batches = tuple(_peak(each.measured) for each in found), len(calls)
    lefts = [each.lefts for each in found]
    places = _places([left[0].params for left in lefts])
    if parallel is not None:
        places = _places_of_whole(lefts)
    with torch.random.fork_rng():
        eager = _Eager(work, program, calls, places, [each.position for each in found])
        result.numerics = _beside_eager(eager, lefts)
    return result


def batches(work: Workload, ranks: int) -> list[Call]:
    """A batch for each rank: the given one for rank 0, others like it for the others.

    Floating-point tensors get noise of a tenth of their deviation, and integer tensors are permuted
    (so that ids stay ids); all else is unchanged. Integer tensors that the model does not take in
    another order, such as offsets, are not permuted.
    """
    found = [own(work.call)]
    leaves = trees.tree_flatten(work.call)[0]
    integers = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and _is_of_integers(x)]
    for rank in range(1, ranks):
        generator = torch.Generator().manual_seed(rank)
        made = _varied(work.call, generator, integers)
        if not _runs(work, made):
            alone = [i for i in integers if _runs(work, _varied(work.call, generator, [i]))]
            made = _varied(work.call, generator, alone)
            made = made if _runs(work, made) else _varied(work.call, generator, [])
        found.append(made)
    return found


def _varied(call: Call, generator: torch.Generator, integers: Collection[int]) -> Call:
    """Another batch; only those integer tensors change whose leaf numbers are in `integers`."""

    def vary(i: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.numel():
            return leaf
        if leaf.is_floating_point():
            noise = torch.randn(leaf.shape, generator=generator).to(leaf)
            scale = leaf.detach().double().std(correction=0).to(leaf)
            made = leaf.detach() + noise * torch.where(scale > 0, scale, 1) / 10
        elif i in integers:
            flat = leaf.reshape(-1)
            made = flat[torch.randperm(len(flat), generator=generator).to(leaf.device)]
            made = (flat.roll(1) if torch.equal(made, flat) else made).reshape(leaf.shape)
        else:
            return leaf
        same = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return like(leaf, same.copy_(made))

    leaves, spec = trees.tree_flatten(own(call))
    args, kwargs = trees.tree_unflatten([vary(i, leaf) for i, leaf in enumerate(leaves)], spec)
    return args, kwargs


def _is_of_integers(tensor: Tensor) -> bool:
    kinds = tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool
    return not any(kinds)


def _runs(work: Workload, call: Call) -> bool:
    """True if the model runs on this batch."""
    model = copied(work.module)
    args, kwargs = own(call)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            model(*args, **kwargs)
    except Exception:  # an id out of range, decreasing offsets: the model may raise anything
        return False
    return True


def packed(
    work: Workload, calls: list[Call], steps: int, parallel: Parallel | None = None
) -> bytes:
    """What is sent to a rank, pickled.

    Raises:
        ConfigError: a part cannot be pickled; the text names it.
    """
    try:
        return pickle.dumps((work, calls, steps, parallel))
    except Exception as error:
        parts = {"the model": work.module, "the batch": calls, "loss": work.loss}
        if parallel is not None:
            parts |= {"parallelize": parallel.parallelize, "context": parallel.context}
        parts |= {f"option {name}": value for name, value in vars(work.config).items()}
        named = next((name for name, part in parts.items() if not _pickles(part)), "the workload")
        raise ConfigError(
            f"{named} cannot be sent to the processes of the ranks ({error}). Define its classes "
            f"and functions by name in a module (functools.partial in place of a lambda); or give "
            f"ranks='fake', which starts none."
        ) from error


def _pickles(part: Any) -> bool:
    try:
        pickle.dumps(part)
    except Exception:
        return False
    return True


def _peak(phases: list[Measured]) -> int:
    """The most that was alive in forward and backward, in bytes."""
    both = (phase for phase in phases if phase.phase in ("forward", "backward"))
    return max(max(sum(p.start), int(p.during.sum(1).max(initial=0))) for p in both)


# -- in a rank -------------------------------------------------------------------------------------


@dataclasses.dataclass
class RankResult:
    """What a rank sends back.

    Attributes:
        position: the number of its batch.
        lefts: the results of each step.
        measured: by the tracker, in a second run.
    """

    position: int
    lefts: list[Left]
    measured: list[Measured]


def run_rank(rank: int, job: tuple[Workload, list[Call], int, Parallel | None]) -> RankResult:
    """The results of one rank."""
    work, calls, steps, parallel = job
    if parallel is None:
        number, sharding, run = rank, on_this_rank(work), work
    else:
        sharding, run = parallel.here(work)
        number = position(sharding)
    run = dataclasses.replace(run, call=calls[number])
    lefts = _steps(run, sharding, number, steps, part if parallel is None else _whole)
    work = dataclasses.replace(work, call=calls[number])
    return RankResult(number, lefts, tracked(work, steps, parallel))


class _RankRuntime(Runtime):
    """Keeps the gradients that ``optimizer_in_backward`` steps with."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.stepped: dict[str, Tensor] = {}

    def step_parameters(
        self, fqns: list[str], grads: list[list[Tensor]], scales: Sequence[Tensor] = ()
    ) -> OnShards:
        for fqn, shard in zip(fqns, grads[0], strict=True):
            param: Tensor = self.slots[fqn].tensor
            held = part(param)
            rows = shard.narrow(held.dim, 0, held.tensor.shape[held.dim]).clone()
            self.stepped[fqn] = dtensor_like(rows, param) if isinstance(param, DTensor) else rows
        return super().step_parameters(fqns, grads, scales)


def _steps(
    work: Workload,
    sharding: Sharding,
    number: int,
    steps: int,
    held: Callable[[Tensor], TensorPart],
) -> list[Left]:
    """Train the model of this rank, whose batch has a number; `held` takes a parameter's rows."""
    config = work.config
    model = sharded(sharding, kind=_RankRuntime)
    runtime = model._fxshard
    assert isinstance(runtime, _RankRuntime)
    optimizer = None
    if config.optimizer_in_backward:
        optimizer = model.optimizer  # steps what it has left: ignored parameters
    elif config.optimizer is not None:
        optimizer = _optimizer(config, dict(model.named_parameters()))
    found: list[Left] = []
    for step in range(steps):
        seen, _ = micro_batches(model, work, functools.partial(_seed, number, step))
        params = dict(model.named_parameters())
        grads = {n: p.grad for n, p in params.items() if p.grad is not None} | runtime.stepped
        kept = {name: held(grad) for name, grad in grads.items()}
        if optimizer is not None:
            optimizer.step()
        for param in params.values():
            param.grad = None
        left = {name: held(param) for name, param in params.items()}
        found.append(Left(seen | buffers_of(model), kept, left))
        runtime.stepped = {}
    return found


def _optimizer(config: Config, params: dict[str, Any]) -> torch.optim.Optimizer:
    return make_optimizer(config.optimizer, list(params.values()), list(params))


def _seed(rank: int, step: int, micro_batch: int) -> int:
    """A seed that differs between ranks, steps and micro-batches."""
    return SEED + 1_000_000 * rank + 1_000 * step + micro_batch


def part(tensor: Tensor) -> TensorPart:
    """What this rank holds of a parameter or gradient."""
    if not isinstance(tensor, DTensor):
        return TensorPart(plain(tensor), None, 0)
    where = tensor.device_mesh.get_coordinate()
    assert where is not None  # a rank of the mesh
    shard, replica, dim = None, 0, 0
    for place, placement in zip(where, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            shard, dim = place, placement.dim
        else:
            replica = place
    return TensorPart(plain(tensor.to_local()), shard, replica, dim)


def _whole(tensor: Tensor) -> TensorPart:
    """All of a parameter or gradient, as this rank sees it; collective over the ranks."""
    return TensorPart(plain(tensor), None, 0)


# -- eager -----------------------------------------------------------------------------------------


def _beside_eager(eager: _Eager, lefts: list[list[Left]]) -> Numerics:
    program, rows = eager.program, list[Difference]()
    steps = len(lefts[0])
    for step in range(steps):
        before = copied(eager.modules)
        expected = eager.run(step)
        grads = [left[step].grads for left in lefts]
        ours = eager.seen("gradient", functools.partial(_joined, grads))
        ours |= _of_ranks([left[step].own for left in lefts])
        found = _compared(ours, expected, program)
        if any(row.verdict == "wrong" and math.isfinite(row.max_abs) for row in found):
            exact = eager.exact(before, step, expected)
            found = [judged(row, expected, exact) for row in found]
        eager.step(grads)
        params = [left[step].params for left in lefts]
        ours = eager.seen("parameter", functools.partial(_joined, params))
        found += _compared(ours, eager.parameters(), program)
        suffix = f" (step {step + 1})" if steps > 1 else ""
        rows += [dataclasses.replace(row, name=f"{row.name}{suffix}") for row in found]
    return Numerics(tuple(rows))


def _compared(ours: Seen, eager: Seen, program: Program) -> list[Difference]:
    coarsest = coarsest_dtype(program)
    keys = dict.fromkeys([*eager, *ours])
    return [difference(key, ours.get(key), eager.get(key), coarsest) for key in keys]


def _of_ranks(seen: Sequence[Seen]) -> Seen:
    """The results of all ranks, with the rank in their names."""
    return {
        (kind, f"{name} (rank {rank})"): tensor
        for rank, each in enumerate(seen)
        for (kind, name), tensor in each.items()
    }


def _places(params: Sequence[dict[str, TensorPart]]) -> dict[str, list[tuple[str, int]]]:
    """Per parameter and copy of it: a suffix for its name, and a rank that holds it."""
    found: dict[str, list[tuple[str, int]]] = {}
    for fqn in params[0]:
        held = [each[fqn] for each in params]
        if held[0].shard is None:
            found[fqn] = [(f" (rank {rank})", rank) for rank in range(len(held))]
            continue
        first = {part.replica: rank for rank, part in reversed([*enumerate(held)])}
        several = len(first) > 1
        found[fqn] = [
            (f" (replica {replica})" if several else "", first[replica])
            for replica in sorted(first)
        ]
    return found


def _places_of_whole(lefts: Sequence[list[Left]]) -> dict[str, list[tuple[str, int]]]:
    """The same where each rank has put its parameters together: rank 0's, and those unlike it."""
    found: dict[str, list[tuple[str, int]]] = {fqn: [("", 0)] for fqn in lefts[0][0].params}
    for (fqn, places), rank in itertools.product(found.items(), range(1, len(lefts))):
        if not all(map(functools.partial(_same, fqn), lefts[0], lefts[rank])):
            places.append((f" (rank {rank})", rank))
    return found


def _same(fqn: str, first: Left, other: Left) -> bool:
    """True if two ranks have bitwise the same of a parameter and its gradient."""
    pairs = [(first.params, other.params), (first.grads, other.grads)]
    return all(_equal(a.get(fqn), b.get(fqn)) for a, b in pairs)


def _equal(first: TensorPart | None, other: TensorPart | None) -> bool:
    if first is None or other is None:
        return first is other
    return difference(("", ""), first.tensor, other.tensor).verdict == "bitwise"


def _joined(parts: Sequence[dict[str, TensorPart]], rank: int, fqn: str) -> Tensor | None:
    """The full tensor of which `rank` holds a part; None if a part is missing."""
    held = [each.get(fqn) for each in parts]
    mine = held[rank]
    if mine is None or mine.shard is None:
        return None if mine is None else mine.tensor
    rows = {p.shard: p.tensor for p in held if p is not None and p.replica == mine.replica}
    shards = sum(p is None or p.replica == mine.replica for p in held)
    if len(rows) < shards:
        return None
    return torch.cat([rows[i] for i in range(shards)], mine.dim)


class _Eager:
    """The same steps in eager PyTorch, the ranks one after the other.

    Attributes:
        modules: per batch; their parameters are copies of `params`, in the dtypes computed with.
        params: per batch, by FQN; what an optimizer steps.
        positions: per rank, the number of its batch.
    """

    def __init__(
        self,
        work: Workload,
        program: Program,
        calls: list[Call],
        places: dict[str, list[tuple[str, int]]],
        positions: list[int],
    ) -> None:
        self.positions = positions
        self.work, self.program, self.calls, self.places = work, program, calls, places
        self.units = program.units
        self.modules = [copied(work.module) for _ in calls]
        self.params: list[dict[str, nn.Parameter]] = [
            {
                fqn: nn.Parameter(param.detach().clone(), param.requires_grad)
                for fqn, param in work.module.named_parameters()
            }
            for _ in calls
        ]
        for module in self.modules:
            cast_state(module, self.units)
        self.optimizers = [
            _optimizer(work.config, params)
            for params in self.params
            if work.config.optimizer is not None
        ]

    def run(self, step: int) -> Seen:
        """Forward and backward of all ranks."""
        return self._run(self.modules, self.calls, self.units, step)

    def exact(self, modules: list[nn.Module], step: int, eager: Seen) -> Seen | None:
        """The same in fp64; None if the model does not run so, or eager's own is not near it."""
        try:
            wide = [module.double() for module in modules]
            calls: list[Call] = [precision.cast_floating(c, torch.float64) for c in self.calls]
            exact = self._run(wide, calls, widened(self.units), step)
        except Exception:  # a model may insist on a dtype in any way; then there is no such run
            return None
        return agreeing(exact, eager, coarsest_dtype(self.program))

    def step(self, grads: Sequence[dict[str, TensorPart]]) -> None:
        """Let the optimizers step with the gradients that the ranks had."""
        for number, params in enumerate(self.params):
            first = self.positions.index(number)
            for fqn, param in params.items():
                grad = _joined(grads, first, fqn)
                fits = grad is not None and grad.shape == param.shape
                param.grad = grad.to(param.dtype) if fits and grad is not None else None
            if self.optimizers:
                self.optimizers[number].step()

    def parameters(self) -> Seen:
        """What the optimizers have left."""

        def left(rank: int, fqn: str) -> Tensor | None:
            param = self.params[self.positions[rank]].get(fqn)
            return None if param is None else plain(param)

        return self.seen("parameter", left)

    def seen(self, kind: str, of: Callable[[int, str], Tensor | None]) -> Seen:
        """By kind and name, what `of` gives for a rank and an FQN, once per copy of a parameter."""
        every = {
            (kind, f"{fqn}{suffix}"): of(rank, fqn)
            for fqn, places in self.places.items()
            for suffix, rank in places
        }
        return {key: tensor for key, tensor in every.items() if tensor is not None}

    def _run(
        self, modules: list[nn.Module], calls: list[Call], units: tuple[Unit, ...], step: int
    ) -> Seen:
        work = self.work
        known = {p.fqn: (p, unit) for unit in units for p in (*unit.params, *unit.ignored)}
        for module, params in zip(modules, self.params, strict=True):
            for fqn, param in module.named_parameters():
                param.data = params[fqn].data.to(known[fqn][0].compute_dtype, copy=True)
        seen: list[Seen] = [{} for _ in calls]
        sums: list[dict[str, Tensor]] = [{} for _ in calls]
        for i in range(work.micro_batches):
            for rank, (module, call) in enumerate(zip(modules, calls, strict=True)):
                torch.manual_seed(_seed(rank, step, i))
                with precision.casting(module, units):
                    run = as_root(module, units)
                    seen[rank] |= forward_backward(run, own(call), work, self.program, i)
            is_last = i == work.micro_batches - 1
            for fqn, pair in known.items():
                grads = [_taken(module.get_parameter(fqn)) for module in modules]
                for rank, grad in enumerate(_reduced(grads, *pair, work, sums, fqn, is_last)):
                    if grad is not None:
                        sums[rank][fqn] = grad
        found = self.seen("gradient", lambda rank, fqn: sums[self.positions[rank]].get(fqn))
        each = [one | buffers_of(module) for one, module in zip(seen, modules, strict=True)]
        return _of_ranks([each[number] for number in self.positions]) | found


def _taken(param: Tensor) -> Tensor | None:
    grad, param.grad = param.grad, None
    return None if grad is None else plain(grad)


def _reduced(
    grads: Sequence[Tensor | None],
    param: Param,
    unit: Unit,
    work: Workload,
    sums: Sequence[dict[str, Tensor]],
    fqn: str,
    is_last: bool,
) -> Sequence[Tensor | None]:
    """The gradient of a parameter on each rank after a micro-batch, summed with earlier ones.

    Args:
        grads: of the micro-batch, per rank.
        sums: of the micro-batches before, per rank and FQN.
    """
    is_ignored = param in unit.ignored
    lowered = [None if g is None else cast_for_reduction(g, unit) for g in grads]
    cast = list(grads) if is_ignored else lowered
    before = [each.get(fqn) for each in sums]
    if is_ignored or work.no_sync:
        cast = [_sum(a, b) for a, b in zip(before, cast, strict=True)]
    if is_ignored or (work.no_sync and not is_last):
        return cast
    given = [grad for grad in cast if grad is not None]
    if not given:
        return before
    made = as_left(_over_ranks(torch.stack(given), len(grads), work.config), param, unit)
    return [made if work.no_sync else _sum(each, made) for each in before]


def _sum(before: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if before is None or grad is None:
        return grad if before is None else before
    return before + grad


def _over_ranks(grads: Tensor, ranks: int, config: Config) -> Tensor:
    """What the ranks' gradients, stacked, become in one reduction."""
    if config.reduce_op == "max":
        return grads.amax(0)
    if config.reduce_op == "min":
        return grads.amin(0)
    if config.reduce_op == "sum":
        return grads.sum(0)
    return grads.sum(0) / (config.gradient_divide_factor or ranks)
