"""What a configuration takes at least, in seconds and bytes, before it is planned.

A stem is a captured program behind the first passes alone (`fxshard.pipeline.STEM`): those that
decide what is computed and what is saved for backward, whatever is sharded how. Later passes add to
it, and take nothing away. So of every plan with this trace, checkpoint policy and batch

- the step takes no less than the stem's operators one behind the other (`fxshard.cost.operators`);
- between forward and backward its saved values are alive, with this rank's parameters and optimizer
  states; at the end of backward its gradients are, with both.

tests/planner/test_tune.py holds both against plans.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import sympy
import torch
from torch import fx

from fxshard.capture import shapes
from fxshard.config import Config, Precision, grid
from fxshard.cost import operators
from fxshard.cost.activations import from_parameter
from fxshard.cost.hardware import Hardware
from fxshard.ir import tags
from fxshard.ir.domain import OPEN
from fxshard.ir.layout import layouts
from fxshard.ir.program import Program, nbytes
from fxshard.pipeline import STEM, Pass
from fxshard.plans.plan import Plan

# Options that may differ; others decide what is traced, what is a unit or what the optimizer holds.
FREE = {
    *("strategy", "reshard_after_forward", "world_size", "mixed_precision", "checkpoint"),
    *("forward_prefetch", "backward_prefetch", "max_inflight", "optimizer_in_backward", "offload"),
    *("max_bucket_bytes", "min_bucket_bytes", "pack_bytes"),
}


def stem_passes(passes: list[Pass]) -> list[Pass]:
    """The value of the option ``passes`` that makes a stem."""
    return [step for step in passes if step.name in STEM]


@dataclasses.dataclass(frozen=True)
class Stem:
    """What all plans of one trace, checkpoint policy and batch have in common.

    Attributes:
        seconds: of all operators of compute, one behind the other.
        flops_by_dtype: FLOPs by dtype of the operands.
        growing: those of operators whose FLOPs are in proportion to the batch, or to its square.
        fixed: those of operators that are the same for all batches.
        saved: per storage that is saved for backward its bytes, and the expression of its bytes in
            the open sizes; None where those are the same for all sizes.
        symbols: of the open sizes, by name.
        reread_bytes: of the unsharded parameters that backward reads, the root's aside: who does
            not reshard them holds them in between.
    """

    seconds: float
    flops_by_dtype: Mapping[torch.dtype, float]
    growing: Mapping[torch.dtype, float]
    fixed: Mapping[torch.dtype, float]
    saved: tuple[tuple[int, sympy.Basic | None], ...]
    symbols: Mapping[str, sympy.Symbol]
    reread_bytes: int

    @classmethod
    def of(cls, program: Program, hardware: Hardware) -> Stem:
        """Of a program behind `stem_passes`."""
        computes = [
            node
            for phase in ("forward", "backward")
            for node in program.phase(phase)
            if not from_parameter(node)
        ]
        batch = _batch_symbols(program)
        by_dtype: dict[torch.dtype, float] = collections.defaultdict(float)
        parts: dict[bool | None, dict[torch.dtype, float]] = {
            grows: collections.defaultdict(float) for grows in (True, False, None)
        }
        for node in computes:
            executed = operators.executed_flops(node)
            if executed:
                dtype = operators.operand_dtype(node)
                by_dtype[dtype] += executed
                parts[_grows(node, batch)][dtype] += executed
        return cls(
            sum(operators.node_seconds(node, hardware) for node in computes),
            dict(by_dtype),
            dict(parts[True]),
            dict(parts[False]),
            tuple(_saved(program)),
            program.domain.symbols if program.domain is not None else {},
            _reread_bytes(program),
        )

    def flops(self, growth: float) -> dict[torch.dtype, float]:
        """FLOPs by dtype of `growth` times the batch, at least."""
        if growth == 1:
            return dict(self.flops_by_dtype)
        if growth < 1:
            return {dtype: n * growth**2 for dtype, n in self.growing.items()}
        both = self.growing.keys() | self.fixed.keys()
        return {d: self.growing.get(d, 0.0) * growth + self.fixed.get(d, 0.0) for d in both}

    def saved_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes that are saved for backward, with other sizes of the inputs, by their names."""
        values = {self.symbols[name]: sympy.Integer(size) for name, size in sizes.items()}
        counted = collections.Counter(each for _, each in self.saved if each is not None)
        fixed = sum(size for size, each in self.saved if each is None)
        return fixed + sum(n * int(each.xreplace(values)) for each, n in counted.items())


def flop_seconds(by_dtype: Mapping[torch.dtype, float], hardware: Hardware) -> float:
    """What FLOPs take at the achievable rate of their dtypes."""
    return sum(n / (hardware.rate(d) * hardware.achievable) for d, n in by_dtype.items())


def _saved(program: Program) -> list[tuple[int, sympy.Basic | None]]:
    """Bytes of each storage that forward makes and backward reads, parameters' views aside."""
    found: dict[int, tuple[int, sympy.Basic | None]] = {}
    held = {
        storage
        for node in program.graph.find_nodes(op="placeholder")
        for storage in tags.storage_ids(node)
    }
    for node in program.phase("forward"):
        if from_parameter(node) or not any(_is_backward(user) for user in node.users):
            continue
        place = node.meta.get(OPEN)
        for storage in tags.storages(node):
            if id(storage) not in held:
                expression = getattr(place, "nbytes", None)
                is_open = expression is not None and expression.free_symbols
                found[id(storage)] = storage.nbytes(), expression if is_open else None
    return list(found.values())


def _batch_symbols(program: Program) -> set[sympy.Symbol]:
    """The open sizes that are first dimensions of inputs."""
    domain = program.domain
    if domain is None:
        return set()
    return {
        symbol
        for name, symbol in domain.symbols.items()
        if any(dim == 0 for _, dim in domain.places[name])
    }


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
            users = todo.pop().users
            reread = any(_is_backward(user) for user in users)
            todo += [user for user in users if from_parameter(user)]
        total += nbytes(param.shape, param.compute_dtype) * reread
    return total


def _is_backward(user: fx.Node) -> bool:
    return user.op == "call_function" and tags.get(user).phase == "backward"


class Resident:
    """Bytes of parameters, gradients and optimizer states on a rank, whatever else is done."""

    def __init__(self, plan: Plan) -> None:
        """Args: `plan`: of the model, with any sharding; its optimizer is recorded."""
        program, step = plan.program, plan.step_behind()
        self._units = program.units
        self._trained = {result.name for result in program.results if result.kind == "grad"}
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
        _, world = grid(world_size, config)
        held, states, grads = self._sums(world)
        narrow = any(Precision.of(p).keep_low_precision_grads for p in config.precisions.values())
        grads = 0 if config.optimizer_in_backward or narrow else grads
        return held + states + max(saved, grads)

    def optimizer_seconds(
        self, config: Config, world_size: int | tuple[int, int], hardware: Hardware
    ) -> float:
        """What an optimizer's step takes at least (see `fxshard.cost.timeline`)."""
        if config.offload is not None or config.optimizer is None:
            return 0.0
        _, states, grads = self._sums(grid(world_size, config)[1])
        return (3 * grads + 2 * states) / hardware.memory_bandwidth

    @functools.lru_cache(maxsize=64)  # noqa: B019 - lives as long as a search
    def _sums(self, world: int) -> tuple[int, int, int]:
        held = states = grads = 0
        for fqn, layout in layouts(self._units, world).items():
            held += layout.local_bytes
            states += math.prod(layout.local_shape()) * self._state.get(fqn, 0)
            grads += layout.local_bytes if fqn in self._trained else 0
        return held, states, grads


def bounded(config: Config, varied: Iterable[str]) -> bool:
    """True if the bounds are about plans with these options.

    Args:
        config: the options.
        varied: names of those in which a plan differs from the one that a stem is made of.
    """
    return config.passes is None and config.backend == "eager" and FREE.issuperset(varied)
