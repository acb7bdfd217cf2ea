"""Numerics: one step of the compiled program compared with the same step in eager PyTorch.

Note: what the words mean
=========================
bitwise  the two tensors have the same shape, dtype and bits.
close    they differ as two right programs may that round in another order. Either no element
         differs by more than `RTOL` of the tensor's largest value: torch.testing.assert_close's
         relative tolerance (torch/testing/_comparison.py) for the coarsest dtype that the program
         computes with, taken of the tensor and not of the element, and without assert_close's
         absolute 1e-5, which would pass any small gradient. Or the difference is at most `FACTOR`
         times eager's own error, which a run of the model in fp64 shows; torch's own accuracy
         check decides so (torch/_dynamo/utils.py, `same`). That run is made only if something is
         further off than the tolerance (a gradient that is 0 but for rounding is, of a key's bias
         for one), and counts only if all that eager computed agrees with it to half of the digits:
         a model that draws other random numbers in fp64 shows nothing.
wrong    anything else: another shape or dtype, a NaN or an infinity on one side only, a gradient
         that one side does not have, an integer that differs.

"close" proves nothing right: a fault that changes only what is below the tolerance stays unseen,
and in bf16 that is 1.6% of a tensor's largest value.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard._torch import trees
from fxshard.capture import precision
from fxshard.capture.held import copied
from fxshard.codegen.optimizer import OnShards
from fxshard.config.precision import Precision
from fxshard.config.world_size import grid
from fxshard.ir import meshes
from fxshard.ir.program import Program
from fxshard.ir.splitting import configured_units
from fxshard.ir.units import Param, Unit, buffer_dtypes
from fxshard.plans.workload import Call, Workload
from fxshard.runtime.module import FxshardModule, sharded
from fxshard.runtime.runtime import Runtime
from fxshard.runtime.sharding import Sharding
from fxshard.runtime.world.in_process import InProcessWorld

VERDICTS = ("bitwise", "close", "wrong")
RTOL = {
    torch.float64: 1e-7,
    torch.float32: 1.3e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 1.6e-2,
    torch.complex128: 1e-7,
    torch.complex64: 1.3e-6,
}
FACTOR = 8.0
SEED = 0  # of the first micro-batch; the next one is the second's

Key = tuple[str, str]  # kind and name of a tensor
Seen = dict[Key, Tensor]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One tensor of the compiled program compared with eager's.

    Attributes:
        kind: "output", "loss", "gradient", "input gradient", "buffer", "input" (one that forward
            writes into) or "parameter" (after the optimizer's step).
        name: FQN of a parameter or buffer; path of an output or input in what the model takes or
            returns. With several micro-batches, ranks or steps, the number is appended.
        verdict: "bitwise", "close" or "wrong"; the module's docstring defines them.
        max_abs: largest difference of an element; inf where one side has none, or no number.
        max_rel: that over eager's largest finite absolute value.
        shape: eager's (ours, if eager has none).
        dtype: likewise.
        note: the reason, where the figures do not show it.
    """

    kind: str
    name: str
    verdict: str
    max_abs: float
    max_rel: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Every tensor of a step compared with eager's.

    Attributes:
        rows: one per tensor that the step left on either side.
    """

    rows: tuple[Difference, ...]

    @property
    def verdict(self) -> str:
        """The worst of all rows."""
        return max((row.verdict for row in self.rows), key=VERDICTS.index, default="bitwise")

    def of(self, *verdicts: str) -> tuple[Difference, ...]:
        """The rows with one of `verdicts`."""
        return tuple(row for row in self.rows if row.verdict in verdicts)

    def table(self, *, only_different: bool = False, top: int | None = None) -> str:
        """Rows of verdict, kind, name, shape, dtype and largest differences; the worst first.

        Args:
            only_different: leave out what is bitwise equal.
            top: how many of what is left; None: all.
        """
        left = [row for row in self.rows if not (only_different and row.verdict == "bitwise")]
        left.sort(key=lambda row: (VERDICTS.index(row.verdict), row.max_rel), reverse=True)
        rows = [
            (
                row.verdict,
                row.kind,
                row.name,
                list(row.shape),
                str(row.dtype).removeprefix("torch."),
                f"{row.max_abs:.1e}" if row.max_abs else "0",
                f"{row.max_rel:.1e}" if row.max_rel else "0",
                row.note,
            )
            for row in left[:top]
        ]
        headers = ("verdict", "kind", "name", "shape", "dtype", "max abs", "max rel", "")
        return tabulate(rows, headers, "simple", disable_numparse=True)

    def to_list(self) -> list[dict[str, Any]]:
        """Every row for JSON, which has no infinity: None."""
        return [
            {
                **dataclasses.asdict(row),
                "dtype": str(row.dtype).removeprefix("torch."),
                "max_abs": row.max_abs if math.isfinite(row.max_abs) else None,
                "max_rel": row.max_rel if math.isfinite(row.max_rel) else None,
            }
            for row in self.rows
        ]

    def summary(self) -> str:
        """One sentence; names what is wrong."""
        count = len(self.rows)
        if self.verdict == "bitwise":
            return f"Numbers: all {count} tensors are bitwise equal to eager PyTorch's."
        wrong, close = self.of("wrong"), self.of("close")
        largest = max((row.max_rel for row in close), default=0.0)
        near = f"{len(close)} close (within {largest:.1e} of their largest value)"
        text = f"Numbers: of {count} tensors, {count - len(wrong) - len(close)} bitwise equal to "
        text += f"eager PyTorch's, {near}, {len(wrong)} wrong"
        if not wrong:
            return f"{text}."
        named = ", ".join(f"{row.kind} {row.name}" for row in wrong[:5])
        return f"{text}: {named}{', ...' if len(wrong) > 5 else ''}."


def beside_eager(work: Workload) -> Numerics:
    """Run one step compiled, all ranks inside this process, and one in eager PyTorch.

    Both start from copies of the model and of the batch, which every rank gets, and from the same
    state of torch's random number generators, which is restored at the end. Gradients start at the
    scalar outputs, or at `Workload.loss`, or, without either, are ones at every output. With
    ``mixed_precision`` eager runs on parameters, buffers and inputs cast as FSDP2 casts them (its
    docs, `MixedPrecisionPolicy`), and its gradients are cast as they are reduced. Gradients that
    ``optimizer_in_backward`` does not leave are taken as they are stepped.

    Args:
        work: what to run, on a model with real parameters, which is left as it is; of its config,
            what ``memory_budget`` has chosen.
    """
    with torch.random.fork_rng():
        ours, program = _compiled(work)
        eager = _eager(copied(work.module), work, program, program.units)
        keys = list(dict.fromkeys([*eager, *ours]))
        coarsest = coarsest_dtype(program)
        rows = [difference(key, ours.get(key), eager.get(key), coarsest) for key in keys]
        if any(row.verdict == "wrong" and math.isfinite(row.max_abs) for row in rows):
            exact = _exact(work, program, eager, coarsest)
            rows = [judged(row, eager, exact) for row in rows]
    return Numerics(tuple(rows))


# -- two tensors -----------------------------------------------------------------------------------


def difference(
    key: Key, ours: Tensor | None, eager: Tensor | None, computed_in: torch.dtype = torch.float64
) -> Difference:
    """Judge one pair by `RTOL`; None where a side has no such tensor.

    Args:
        key: kind and name.
        ours, eager: the tensors.
        computed_in: the tolerance is at least that of this dtype.
    """
    one = eager if eager is not None else ours
    assert one is not None
    shape, dtype = tuple(one.shape), one.dtype

    def found(verdict: str, largest: float, relative: float, note: str = "") -> Difference:
        return Difference(*key, verdict, largest, relative, shape, dtype, note)

    if ours is None or eager is None:
        missing = "the compiled program" if ours is None else "eager"
        return found("wrong", math.inf, math.inf, f"{missing} has none")
    if (ours.shape, ours.dtype) != (eager.shape, eager.dtype):
        what = f"compiled: {list(ours.shape)} {str(ours.dtype).removeprefix('torch.')}"
        return found("wrong", math.inf, math.inf, what)
    if torch.equal(_bits(ours), _bits(eager)):
        return found("bitwise", 0.0, 0.0)
    largest, scale = largest_difference(ours, eager), largest_value(eager)
    relative = 0.0 if largest == 0 else largest / scale if scale else math.inf
    note = "NaN or infinity on one side" if math.isinf(largest) else ""
    rtol = max(RTOL.get(dtype, 0.0), RTOL[computed_in]) if dtype in RTOL else 0.0
    close = largest <= rtol * scale
    return found("close" if close else "wrong", largest, relative, note)


def coarsest_dtype(program: Program) -> torch.dtype:
    """Of all values in the graph, the dtype with the largest tolerance."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    return max(dtypes & RTOL.keys(), key=RTOL.__getitem__, default=torch.float64)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of an element; NaNs are equal, and so are infinities of one sign."""
    x, y = _real(a), _real(b)
    same = (x == y) | (x.isnan() & y.isnan())
    apart = torch.where(same, 0.0, (x - y).abs())
    return float(apart.nan_to_num(math.inf, posinf=math.inf).max()) if apart.numel() else 0.0


def largest_value(tensor: Tensor) -> float:
    """The largest finite absolute value; 0.0 if there is none."""
    values = _real(tensor).abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


def _real(tensor: Tensor) -> Tensor:
    """The tensor in fp64; a complex number becomes two real ones."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def judged(row: Difference, eager: Seen, exact: Seen | None) -> Difference:
    """`row`; close if it differs from eager no more than eager differs from the exact value."""
    key = (row.kind, row.name)
    if row.verdict != "wrong" or exact is None or key not in exact or math.isinf(row.max_abs):
        return row
    error, scale = largest_difference(eager[key], exact[key]), largest_value(eager[key])
    note = f"eager is {error:.1e} from fp64"
    # Half of the value is no rounding error, unless eager's value is nothing but rounding error.
    allowed = FACTOR * error if error >= scale / 2 else min(FACTOR * error, scale / 2)
    verdict = "close" if row.max_abs <= allowed else "wrong"
    return dataclasses.replace(row, verdict=verdict, note=note)


# -- the compiled step -----------------------------------------------------------------------------


class _InProcessRuntime(Runtime):
    """Keeps the gradients that ``optimizer_in_backward`` steps with."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.stepped: Seen = {}

    def step_parameters(
        self, fqns: list[str], grads: list[list[Tensor]], scales: Sequence[Tensor] = ()
    ) -> OnShards:
        for fqn, *shards in zip(fqns, *grads, strict=True):
            param = self.slots[fqn].param
            rows = torch.cat(shards[: len(self.slots[fqn].shards)], param.shard_dim)
            rows = rows.narrow(param.shard_dim, 0, param.shape[param.shard_dim])
            self.stepped["gradient", fqn] = rows.clone()
        return super().step_parameters(fqns, grads, scales)


def _compiled(work: Workload) -> tuple[Seen, Program]:
    """What the step leaves, and the program that ran last."""
    replicas, shards = grid(work.world_size, work.config)
    module = copied(work.module)
    units = configured_units(module, work.config)
    others = meshes.grids(work.config, meshes.of_units(units), replicas, shards)
    world = InProcessWorld(shards, replicas, others)
    model = sharded(Sharding(module, units, world, work.config), kind=_InProcessRuntime)
    runtime = model._fxshard
    assert isinstance(runtime, _InProcessRuntime)
    seen, program = micro_batches(model, work, lambda i: SEED + i)
    for fqn, param in model.named_parameters():
        if param.grad is not None:
            seen["gradient", fqn] = plain(param.grad)
    return seen | runtime.stepped | buffers_of(model), program


def micro_batches(
    model: FxshardModule, work: Workload, seed: Callable[[int], int]
) -> tuple[Seen, Program]:
    """What forward and backward of each micro-batch leave, and the program that ran last.

    Args:
        model: the compiled model.
        work: its call, and how often it is made.
        seed: of random numbers, by number of the micro-batch.
    """
    seen: Seen = {}
    for i in range(work.micro_batches):
        waits = work.no_sync and i < work.micro_batches - 1
        call = own(work.call)
        with work.around(), model.no_sync() if waits else contextlib.nullcontext():
            program = model._fxshard.variant(*call).program
            torch.manual_seed(seed(i))
            seen |= forward_backward(model, call, work, program, i)
    return seen, program


# -- the eager step --------------------------------------------------------------------------------


def _eager(module: nn.Module, work: Workload, program: Program, units: tuple[Unit, ...]) -> Seen:
    """The step on `module`, a plain copy; backward starts where it does in `program`.

    Gradients are summed as ranks sum them: after the cast for the reduction.
    """
    params = {p.fqn: (p, unit) for unit in units for p in (*unit.params, *unit.ignored)}
    named = dict(module.named_parameters())
    cast_state(module, units)
    seen: Seen = {}
    for i in range(work.micro_batches):
        call = own(work.call)
        torch.manual_seed(SEED + i)
        with precision.casting(module, units):
            seen |= forward_backward(as_root(module, units), call, work, program, i)
        last = i == work.micro_batches - 1
        for fqn, param in named.items():
            grad, param.grad = param.grad, None
            key = "gradient", fqn
            if grad is not None:
                reduced = _as_reduced(plain(grad), *params[fqn], work)
                if not work.no_sync:
                    reduced = as_left(reduced, *params[fqn])
                seen[key] = seen[key] + reduced if key in seen else reduced
            if last and key in seen:
                seen[key] = as_left(seen[key], *params[fqn])
    return seen | buffers_of(module)


def cast_state(module: nn.Module, units: tuple[Unit, ...]) -> None:
    """Parameters and buffers of `module` in the dtypes that their units compute with."""
    for unit in units:
        for param in unit.params:
            tensor = module.get_parameter(param.fqn)
            tensor.data = tensor.data.to(param.compute_dtype)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    cast: dict[int, Tensor] = {}
    for name, dtype in buffer_dtypes(units, buffers).items():
        path, _, key = name.rpartition(".")
        buffer = buffers[name]
        module.get_submodule(path)._buffers[key] = cast.setdefault(id(buffer), buffer.to(dtype))


def as_root(module: nn.Module, units: tuple[Unit, ...]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = precision.root_inputs(units, (args, kwargs))
        return precision.root_output(units, module(*args, **kwargs))

    return run


def cast_for_reduction(grad: Tensor, unit: Unit) -> Tensor:
    """`grad` in the dtype of the unit's reductions, or as it is: a complex one stays complex."""
    dtype = unit.precision.reduce_dtype
    return grad if dtype is None or not grad.is_floating_point() else grad.to(dtype)


def _as_reduced(grad: Tensor, param: Param, unit: Unit, work: Workload) -> Tensor:
    """What the ranks' equal gradients become in one reduction."""
    if param in unit.ignored:
        return grad
    config, ranks = work.config, math.prod(grid(work.world_size, work.config))
    grad = cast_for_reduction(grad, unit)
    if config.reduce_op == "sum":
        return grad * ranks
    if config.gradient_divide_factor is not None:
        return grad * (ranks / config.gradient_divide_factor)
    return grad


def as_left(grad: Tensor, param: Param, unit: Unit) -> Tensor:
    """A gradient in the dtype of ``.grad``."""
    return grad if unit.precision.keep_low_precision_grads else grad.to(param.dtype)


# -- what both do ----------------------------------------------------------------------------------


def forward_backward(
    model: Callable[..., Any], call: Call, work: Workload, program: Program, number: int
) -> Seen:
    """Run one micro-batch; returns outputs, loss, input gradients and inputs that were written."""
    args, kwargs = call
    signature = program.signature
    seen: Seen = {}
    suffix = f" (micro-batch {number + 1})" if work.micro_batches > 1 else ""
    given, _ = trees.tree_flatten(call)
    inputs = {
        f"{name}{suffix}": (leaf, leaf.detach().clone())
        for name, leaf in zip(signature.input_names, given, strict=True)
        if isinstance(leaf, Tensor)
    }
    out = model(*args, **kwargs)
    leaves, _ = trees.tree_flatten(out)
    names = [*signature.output_names, *(f"[{i}]" for i in range(len(leaves)))]
    roots = [leaves[i] for i in signature.tangents if i < len(leaves)]
    for name, leaf in zip(names, leaves, strict=False):
        is_loss = work.loss is None and any(leaf is r and leaf.dim() == 0 for r in roots)
        if isinstance(leaf, (Tensor, bool, int, float, complex)):
            kind = "loss" if is_loss else "output"
            seen[kind, f"{name}{suffix}"] = plain(torch.as_tensor(leaf))
    if work.loss is not None:
        value = work.loss(out)
        seen["loss", f"loss{suffix}"] = plain(value)
        if value.requires_grad:
            value.backward()
    elif roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    for name, (leaf, before) in inputs.items():
        if leaf.grad is not None:
            seen["input gradient", name] = plain(leaf.grad)
        if not torch.equal(_bits(leaf.detach()), _bits(before)):
            seen["input", name] = plain(leaf)
    return seen


def own(call: Call) -> Call:
    """A copy of the batch; its tensors share storages as the caller's do."""
    leaves, spec = trees.tree_flatten(call)
    tensors = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)}
    copies = copy.deepcopy(tensors)
    flat = [like(leaf, copies[id(leaf)]) if id(leaf) in copies else leaf for leaf in leaves]
    args, kwargs = trees.tree_unflatten(flat, spec)
    return args, kwargs


def like(leaf: Tensor, made: Tensor) -> Tensor:
    """`made`, a new tensor, as an nn.Parameter if `leaf` is one, with its ``requires_grad``."""
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(made, leaf.requires_grad)
    return made.requires_grad_(leaf.requires_grad)


def buffers_of(module: nn.Module) -> Seen:
    return {("buffer", name): plain(buffer) for name, buffer in module.named_buffers()}


def plain(tensor: Tensor) -> Tensor:
    """A dense copy; of a DTensor all of it, which its ranks put together."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).clone()


# -- the exact step --------------------------------------------------------------------------------


def _exact(work: Workload, program: Program, eager: Seen, computed_in: torch.dtype) -> Seen | None:
    """The eager step in fp64; None if the model does not run so, or eager's own is not near it."""
    work = dataclasses.replace(work, call=precision.cast_floating(work.call, torch.float64))
    try:
        module = copied(work.module).double()
        exact = _eager(module, work, program, widened(program.units))
    except Exception:  # a model may insist on a dtype in any way; then there is no such run
        return None
    return agreeing(exact, eager, computed_in)


def agreeing(exact: Seen, eager: Seen, computed_in: torch.dtype) -> Seen | None:
    """`exact`, if all that eager computed agrees with it to half of the digits of a dtype."""
    largest: dict[str, float] = {}
    for (kind, _), tensor in exact.items():
        largest[kind] = max(largest.get(kind, 0.0), largest_value(tensor))
    half = math.sqrt(torch.finfo(computed_in).eps)
    for key, tensor in eager.items():
        if not tensor.dtype.is_floating_point:
            continue
        if key not in exact or exact[key].shape != tensor.shape:
            return None
        if largest_difference(tensor, exact[key]) > half * largest[key[0]]:
            return None
    return exact


def widened(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The units, with everything in fp64."""
    return tuple(
        dataclasses.replace(unit, params=tuple(map(_wide, unit.params)), precision=Precision())
        for unit in units
    )


def _wide(param: Param) -> Param:
    wide = torch.float64 if param.dtype.is_floating_point else param.dtype
    return dataclasses.replace(param, dtype=wide, compute_dtype=wide)
