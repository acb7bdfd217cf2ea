"""What a configuration takes at least, in seconds and bytes, before it is planned.

A stem is a captured program after the first passes only (`fxshard.pipeline.STEM`): those that
decide what is computed and what is saved for backward. It does not depend on sharding. Later passes
add to it, and remove nothing. So in every plan with this trace, checkpoint policy and batch

- the step takes no less than the stem's operators one after the other (`fxshard.cost.operators`);
- between forward and backward its saved values are alive, with this rank's parameters and optimizer
  states; at the end of backward its gradients are, with both. With ``offload_activations=True``
  those values are alive that may not leave, or that the link to the CPU does not carry while
  forward computes.

tests/planner/test_tune.py compares both with plans.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fxshard.capture import shapes
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.config.world_size import grid
from fxshard.cost import leaving, operators
from fxshard.cost.activations import from_parameter
from fxshard.errors import FxshardError
from fxshard.hardware import Hardware
from fxshard.ir import meshes, ops, tags
from fxshard.ir.domain import OPEN, size_at
from fxshard.ir.layout import layouts
from fxshard.ir.program import Program, nbytes
from fxshard.ir.units import Unit
from fxshard.pipeline import STEM, Pass
from fxshard.planner.batches import Batches
from fxshard.planner.result import Trial
from fxshard.planner.search import first_line
from fxshard.plans.plan import Plan

# Options that may differ; others decide what is traced, what is a unit or what the optimizer holds.
FREE = {
    *("strategy", "reshard_after_forward", "world_size", "mixed_precision", "checkpoint"),
    *("forward_prefetch", "backward_prefetch", "max_inflight", "optimizer_in_backward", "offload"),
    *("max_bucket_bytes", "min_bucket_bytes", "pack_bytes", "offload_activations"),
}


def stem_passes(passes: list[Pass]) -> list[Pass]:
    """The value of the option ``passes`` that makes a stem."""
    return [step for step in passes if step.name in STEM]


@dataclasses.dataclass(frozen=True)
class Stem:
    """What all plans of one trace, checkpoint policy and batch have in common.

    Attributes:
        seconds: of all operators of compute, one after the other.
        flop_parts: FLOPs by dtype of the operands, and whether they grow with the batch (in
            proportion to it, or to its square), are the same for all batches, or neither (None).
        saved: per storage that is saved for backward its bytes, and the expression of its bytes in
            the open sizes; None where those are the same for all sizes.
        symbols: of the open sizes, by name.
        sizes: what those are in the stem's own call.
        batched: names of those that are first dimensions of inputs.
        staying: of `saved`, what may not leave with ``offload_activations=True``.
        carried: bytes that leave at most, of the stem's own call.
        reread_bytes: of the unsharded parameters that backward reads, except the root's. Without
            resharding they are held between the phases.
    """

    seconds: float
    flop_parts: Mapping[tuple[torch.dtype, bool | None], float]
    saved: tuple[tuple[int, sympy.Basic | None], ...]
    symbols: Mapping[str, sympy.Symbol]
    sizes: Mapping[str, int]
    batched: frozenset[str]
    staying: tuple[tuple[int, sympy.Basic | None], ...]
    carried: int
    reread_bytes: int

    @classmethod
    def of(cls, program: Program, hardware: Hardware) -> Stem:
        """Of a program after `stem_passes`."""
        computes = [
            node
            for phase in ("forward", "backward")
            for node in program.phase(phase)
            if not from_parameter(node) and not ops.communicates(node)  # those may run meanwhile
        ]
        domain = program.domain
        symbols = {} if domain is None else domain.symbols
        places = {} if domain is None else domain.places
        batched = frozenset(n for n in symbols if any(dim == 0 for _, dim in places[n]))
        batch = {symbols[name] for name in batched}
        parts: dict[tuple[torch.dtype, bool | None], float] = collections.defaultdict(float)
        for node in computes:
            if executed := operators.executed_flops(node):
                parts[operators.operand_dtype(node), _grows(node, batch)] += executed
        first, saved, may_leave = set(program.phase("forward")), _saved(program), _leaving(program)
        forward = sum(operators.node_seconds(n, hardware) for n in computes if n in first)
        return cls(
            sum(operators.node_seconds(node, hardware) for node in computes),
            dict(parts),
            tuple(saved.values()),
            symbols,
            {} if domain is None else {n: size_at(domain.example, places[n][0]) for n in symbols},
            batched,
            tuple(each for storage, each in saved.items() if storage not in may_leave),
            int(forward * hardware.host.beta),
            _reread_bytes(program),
        )

    def flops(self, growth: float) -> dict[torch.dtype, float]:
        """FLOPs by dtype of `growth` times the batch, at least."""
        grown = growth if growth >= 1 else growth**2
        scales = {True: grown, False: float(growth >= 1), None: float(growth == 1)}
        found: dict[torch.dtype, float] = collections.defaultdict(float)
        for (dtype, grows), count in self.flop_parts.items():
            found[dtype] += count * scales[grows]
        return found

    @property
    def saved_now(self) -> int:
        """Bytes that are saved for backward, in the stem's own call."""
        return sum(size for size, _ in self.saved)

    def kept_bytes(self, batch: int | None, hides_copies: bool) -> int:
        """Bytes that are on the device from forward to backward, at least.

        Args:
            batch: another one than that of the stem's own call, or None.
            hides_copies: what the link carries leaves.
        """
        if batch is None:
            stays = sum(size for size, _ in self.staying)
            left = max(self.saved_now - self.carried, stays)
            return left if hides_copies else self.saved_now
        sizes = {**self.sizes, **dict.fromkeys(self.batched, batch)}
        if not self.batched:
            return 0
        return self.saved_bytes(sizes, self.staying if hides_copies else None)

    def saved_bytes(
        self,
        sizes: Mapping[str, int],
        saved: tuple[tuple[int, sympy.Basic | None], ...] | None = None,
    ) -> int:
        """Bytes that are saved for backward, with other sizes of the inputs, by their names.

        Args:
            sizes: of all open ones.
            saved: some of those that are saved; None: all.
        """
        saved = self.saved if saved is None else saved
        values = {self.symbols[name]: sympy.Integer(size) for name, size in sizes.items()}
        counted = collections.Counter(each for _, each in saved if each is not None)
        fixed = sum(size for size, each in saved if each is None)
        return fixed + sum(n * int(each.xreplace(values)) for each, n in counted.items())


def flop_seconds(by_dtype: Mapping[torch.dtype, float], hardware: Hardware) -> float:
    """What FLOPs take at the achievable rate of their dtypes."""
    return sum(n / (hardware.rate(d) * hardware.achievable) for d, n in by_dtype.items())


def _leaving(program: Program) -> set[int]:
    """Storages that may be on the CPU from forward to backward."""
    forward, backward = (leaving.Runs(program.phase(p)) for p in ("forward", "backward"))
    first: dict[int, int] = {}
    for place, node in enumerate(backward.nodes):
        for storage in tags.read_ids(node):
            first.setdefault(storage, backward.of(place))
    return {
        storage
        for storage, moved in leaving.movable(program).items()
        if storage in first and not leaving.stays((forward.of(moved.last), first[storage]), forward)
    }


def _saved(program: Program) -> dict[int, tuple[int, sympy.Basic | None]]:
    """Bytes of each storage that forward makes and backward reads, except views of parameters."""
    found: dict[int, tuple[int, sympy.Basic | None]] = {}
    held = {
        storage
        for node in program.graph.find_nodes(op="placeholder")
        for storage in tags.storage_ids(node)
    }
    for node in program.phase("forward"):
        held |= tags.storage_ids(node) if tags.get(node).offload else set()  # on the CPU
    for node in program.phase("forward"):
        if from_parameter(node) or not tags.backward_users(node):
            continue
        place = node.meta.get(OPEN)
        for storage in tags.storages(node):
            if id(storage) not in held:
                expression = getattr(place, "nbytes", None)
                is_open = expression is not None and expression.free_symbols
                found[id(storage)] = storage.nbytes(), expression if is_open else None
    return found


def _grows(node: fx.Node, batch: set[sympy.Symbol]) -> bool | None:
    """True if sizes of an operator's tensors are products of the batch; None if they are sums.

    What is in proportion to ``batch + 1`` is not to the batch, and counts in no other batch.
    """
    found = False
    for each in (node, *node.all_input_nodes):
        for _, opened in shapes.open_tensors(each):
            for size in () if opened is None else opened.size:
                if batch & size.free_symbols:
                    if any(not factor.is_Atom for factor in sympy.Mul.make_args(size)):
                        return None
                    found = True
    return found


def _reread_bytes(program: Program) -> int:
    total = 0
    for node in program.graph.find_nodes(op="placeholder"):
        param = program.params.get(tags.get(node).fqn or "")
        if tags.get(node).role != "param" or param is None or not param.unit:
            continue
        todo, reread = [node], False
        while todo and not reread:
            read = todo.pop()
            reread = bool(tags.backward_users(read))
            todo += [user for user in read.users if from_parameter(user)]
        total += nbytes(tuple(node.meta["val"].shape), node.meta["val"].dtype) * reread
    return total


class Resident:
    """Least bytes of parameters, gradients and optimizer states on a rank."""

    def __init__(self, plan: Plan) -> None:
        """Args: `plan`: of the model, with any sharding; its optimizer is recorded."""
        program, step = plan.program, plan.step_after_backward()
        self._units = _on_one_mesh(program.units)
        self._trained = {result.name for result in program.results if result.kind == "grad"}
        self._trained |= program.accumulated
        state = step.between_steps().bytes if step else {}
        self._state = {
            fqn: state.get(fqn, 0) // elements
            for fqn, layout in program.layouts.items()
            if (elements := math.prod(layout.local_shape()))
        }

    def of(
        self, config: Config, world_size: int | tuple[int, int], saved: int, reread: int = 0
    ) -> int:
        """Least bytes on the device at once.

        Args:
            config, world_size: of the plan.
            saved: bytes saved for backward.
            reread: see `Stem`.
        """
        sharded = grid(world_size, config)[1] > 1 and config.max_bucket_bytes is None
        if config.keeps_unsharded and config.reshard_after_forward is None and sharded:
            saved += reread
        if config.offload is not None:
            return saved
        held, states, grads = self._sums(_most_shards(config, world_size))
        narrow = any(Precision.of(p).keep_low_precision_grads for p in config.precisions.values())
        grads = 0 if config.optimizer_in_backward or narrow else grads
        return held + states + max(saved, grads)

    def optimizer_seconds(
        self, config: Config, world_size: int | tuple[int, int], hardware: Hardware
    ) -> float:
        """What an optimizer's step takes at least (see `fxshard.cost.timeline`)."""
        if config.offload is not None or config.optimizer is None:
            return 0.0
        _, states, grads = self._sums(_most_shards(config, world_size))
        return (3 * grads + 2 * states) / hardware.memory_bandwidth

    @functools.lru_cache(maxsize=64)  # noqa: B019 - lives as long as a search
    def _sums(self, world: int) -> tuple[int, int, int]:
        held = states = grads = 0
        for fqn, layout in layouts(self._units, world).items():
            held += layout.local_bytes
            states += math.prod(layout.local_shape()) * self._state.get(fqn, 0)
            grads += layout.local_bytes if fqn in self._trained else 0
        return held, states, grads


def _most_shards(config: Config, world_size: int | tuple[int, int]) -> int:
    """Over how many ranks a parameter is sharded at most, on whichever mesh it is."""
    replicas, shards = grid(world_size, config)
    several = isinstance(config.strategy, Mapping) or meshes.named(config)
    return replicas * shards if several else shards


def _on_one_mesh(units: Iterable[Unit]) -> tuple[Unit, ...]:
    return tuple(
        dataclasses.replace(u, params=tuple(dataclasses.replace(p, mesh="") for p in u.params))
        for u in units
    )


class Bounds:
    """Bounds of candidates, from one stem per trace, checkpoint policy and batch."""

    def __init__(
        self,
        batches: Batches,
        hardware: Hardware,
        legal: Trial,
        progress: Callable[[str], None],
    ) -> None:
        """Trace the model, with its batch left open.

        Args:
            batches: the workload.
            hardware: for seconds.
            legal: a candidate that can be planned; stems take its sharding, which does not matter.
            progress: called with what is traced.
        """
        self._batches, self._hardware, self._progress = batches, hardware, progress
        self._stems: dict[tuple[str, str, int | None], Stem | FxshardError] = {}
        ranks = ("strategy", "world_size")  # of a strategy only some worlds are legal
        self._sharding = {n: v for n, v in legal.candidate.changes.items() if n in ranks}
        precision = {"mixed_precision": legal.config.mixed_precision}
        self._first = self._stem_plan(precision, batches.opened)
        self._resident = Resident(self._first)
        self._traced = {traced(self._first.config.mixed_precision)}

    def stem_of(self, each: Trial) -> tuple[str, str, int | None]:
        """Equal for candidates that share a stem of their own batch."""
        return self._key(each.config, each.candidate.batch)

    def bound(self, each: Trial) -> None:
        """Set the bounds of a candidate by what was traced already."""
        if not _is_bounded(each):
            return
        if traced(each.config.mixed_precision) in self._traced:
            self._bound_by_open_stem(each)
        else:
            each.least_seconds = self._by_dtype(each)
            each.least_bytes = self._resident.of(each.config, each.world_size, 0)

    def refine(self, each: Trial) -> None:
        """Count all operators at the candidate's own batch."""
        each.refined = True
        if not _is_bounded(each):
            return
        if each.least_bytes == 0 or traced(each.config.mixed_precision) not in self._traced:
            self._bound_by_open_stem(each)
        if each.why:
            return
        stem = self._stem(each.config, each.candidate.batch)
        if isinstance(stem, FxshardError):
            each.why = f"refused: {first_line(stem)}"
            return
        each.least_seconds = max(each.least_seconds, self._per_sample(each, stem.seconds))
        saved = stem.kept_bytes(None, _hides_copies(each.config))
        each.least_bytes = max(each.least_bytes, self._least_bytes(each, stem, saved))

    def _bound_by_open_stem(self, each: Trial) -> None:
        """Its FLOPs, and what it saves at the candidate's batch."""
        batch, opened = each.candidate.batch, self._batches.opened
        stem = self._stem(each.config, opened)
        if isinstance(stem, FxshardError):
            if batch == opened:  # another batch may do
                each.why = f"refused: {first_line(stem)}"
            return
        flops = stem.flops((batch or 1) / (opened or 1))
        each.least_seconds = self._per_sample(each, flop_seconds(flops, self._hardware))
        own = batch == opened
        saved = stem.kept_bytes(None if own else batch or 1, _hides_copies(each.config))
        each.least_bytes = self._least_bytes(each, stem, saved)

    def _by_dtype(self, each: Trial) -> float:
        """FLOPs of a precision that was not traced: those of one that was, in its dtype.

        This assumes that the same operators compute in the dtype of the parameters.
        """
        opened, config = self._batches.opened, self._first.config
        first, there = self._stem(config, opened), self._dtype(config)
        here = self._dtype(each.config)
        if isinstance(first, FxshardError) or there is None or here is None:
            return 0.0
        flops: dict[torch.dtype, float] = collections.defaultdict(float)
        for dtype, count in first.flops((each.candidate.batch or 1) / (opened or 1)).items():
            flops[here if dtype == there else dtype] += count
        return self._per_sample(each, flop_seconds(flops, self._hardware))

    def _dtype(self, config: Config) -> torch.dtype | None:
        """The dtype of matrix products with parameters, if it is one."""
        given = config.mixed_precision
        if isinstance(given, Mapping):
            return None
        chosen = None if given is None else Precision.of(given).param_dtype
        params = self._first.program.params.values()
        return chosen or next((p.dtype for p in params if p.dtype.is_floating_point), None)

    def _per_sample(self, each: Trial, compute: float) -> float:
        """Seconds per sample of a step, from those of a micro-batch's operators."""
        optimizer = self._resident.optimizer_seconds(each.config, each.world_size, self._hardware)
        return (compute * self._batches.workload.micro_batches + optimizer) / each.samples

    def _least_bytes(self, each: Trial, stem: Stem, saved: int) -> int:
        return self._resident.of(each.config, each.world_size, saved, stem.reread_bytes)

    def _stem(self, config: Config, batch: int | None) -> Stem | FxshardError:
        key = self._key(config, batch)
        if key not in self._stems:
            self._progress(f"tracing and bounding checkpoint={config.checkpoint}")
            changes: dict[str, Any] = {"mixed_precision": config.mixed_precision}
            given = self._batches.workload.config.given
            if config.checkpoint is not None or "checkpoint" in given:
                changes["checkpoint"] = config.checkpoint
            if type(config.checkpoint) is int:  # which chooses what is offloaded too
                changes["offload_activations"] = config.offload_activations
            try:
                plan = self._stem_plan(changes, batch)
                self._stems[key] = Stem.of(plan.program, self._hardware)
            except FxshardError as error:
                self._stems[key] = error
            self._traced.add(key[0])
        return self._stems[key]

    def _stem_plan(self, changes: dict[str, Any], batch: int | None) -> Plan:
        return self._batches.plan(batch, {**self._sharding, **changes, "passes": stem_passes})

    def _key(self, config: Config, batch: int | None) -> tuple[str, str, int | None]:
        chosen = repr((config.checkpoint, config.chooses_offloads))
        return traced(config.mixed_precision), chosen, batch


def _is_bounded(each: Trial) -> bool:
    """True if the bounds are about plans with its options."""
    config = each.config
    free = FREE.issuperset(each.candidate.changes) and config.backend == "eager"
    whole = not config.chunk_loss and config.offload_activations in (None, False, True)
    return not each.why and config.passes is None and free and whole


def _hides_copies(config: Config) -> bool:
    """True if activations leave that no stem knows of: as many as the link carries."""
    return config.offload_activations is True and config.chooses_offloads is False


def traced(policy: Any) -> str:
    """The part of a precision that the trace depends on: all but the reduction of gradients."""
    if policy is None or isinstance(policy, Mapping):
        return repr(policy)
    seen = dataclasses.replace(
        Precision.of(policy),
        reduce_dtype=None,
        reduce_as_stored=False,
        keep_low_precision_grads=False,
    )
    return repr(seen)
