"""Eager PyTorch on every rank's batch: the definition of data parallelism, without fxshard.

Each rank has a replica. After each backward, gradients are combined by hand, and every replica's
optimizer takes the same step: what is coupled over the batch (batch norm), drawn at random or
written into a buffer is then each rank's own, and for all else this is eager on the joined batch.
`checkpoint` is left out: it changes no number but those of buffers that a checkpointed module
writes, which eager writes once more when it recomputes, and fxshard does not.

Tolerance
=========
Three runs: in the model's own dtypes; in float64; and in the model's own dtypes from parameters
that are off by one unit in the last place. A tensor may differ from the first by `FACTOR` times the
largest relative difference that the other two show for it in any step, plus `ULPS` units in the
last place of its largest value (gradients under mixed precision: of the coarsest dtype). Gradients
may also differ by one unit in the last place of the model's largest gradient: what is zero but for
rounding is noise of its neighbours. Before a case is called wrong, `MORE` runs of the last kind say
whether eager itself comes to other numbers then: a value at the edge of `clamp` or `relu` that
falls to the other side moves a gradient by more than any rounding. A program whose loss the
float64 run moves by more than `CONDITION` of its value is not drawn: it would prove nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.case import Case
from tests.fuzz.train import Seen, forward_backward, initial, parts, seed_of, states

FACTOR = 6.0
ULPS = 4.0
CONDITION = 0.05
MORE = 16


class Replica:
    """A rank's model in eager, cast as FSDP2 casts under a mixed precision policy.

    Under a ``MixedPrecision``, as FSDP1 does: the root's inputs may be cast where those of other
    units are not, and buffers are.
    """

    def __init__(self, model: nn.Module, case: Case, policy: Any) -> None:
        self.model = model
        self.policy = policy
        self.stored: list[tuple[Tensor, torch.dtype]] = []
        if policy is not None:
            inputs = policy.cast_forward_inputs
            for name in ("", *case.units):
                module = model.get_submodule(name)
                casts = inputs if name else getattr(policy, "cast_root_forward_inputs", inputs)
                if policy.param_dtype is not None and casts:
                    module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
                if getattr(policy, "output_dtype", None) is not None:
                    module.register_forward_hook(self._cast_outputs)
            self.buffers_in(getattr(policy, "buffer_dtype", None))

    def buffers_in(self, dtype: torch.dtype | None) -> None:
        """Cast the floating buffers to a dtype, None for as they are; remembers what they were."""
        floating = [b for b in self.model.buffers() if b.is_floating_point() and dtype]
        self.stored = [(b, b.dtype) for b in floating]
        for b in floating:
            b.data = b.data.to(dtype)

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), self.policy.param_dtype)

    def _cast_outputs(self, module: nn.Module, args: Any, out: Any) -> Any:
        return cast(out, self.policy.output_dtype)

    def __call__(self, **batch: Any) -> Any:
        if self.policy is None or self.policy.param_dtype is None:
            return self.model(**batch)
        cast: dict[int, Tensor] = {}
        params = {
            f"{path}.{name}".lstrip("."): cast.setdefault(
                id(p), p.to(self.policy.param_dtype) if p.is_floating_point() else p
            )
            for path, module in self.model.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        # With names of tied weights, it leaves others in a module that has two names.
        call = torch.func.functional_call
        return call(self.model, params, (), batch, tie_weights=False)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a structure in another dtype."""
    return mapped(lambda t: t.to(dtype), value)


def to_double(value: Any) -> Any:
    """The same, as leaves of their own."""
    return mapped(lambda t: t.detach().double().requires_grad_(t.requires_grad), value)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A structure with what `function` makes of its floating tensors, as FSDP2 goes through it.

    (torch/distributed/utils.py, ``_apply_to_tensors``)
    """
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: mapped(function, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, v) for v in value)
    if dataclasses.is_dataclass(value):
        return type(value)(*(mapped(function, v) for v in vars(value).values()))  # type: ignore[operator]
    return value


def run(case: Case, exact: bool = False, nudge: int | None = None) -> list[Seen]:
    """What every rank sees. In one process all ranks see the batch of rank 0: one is run.

    The nudge 0 makes each parameter larger, every other one larger or smaller at random.
    """
    space = case.program.space()
    space["checkpoint"] = uncheckpointed
    source = initial(space)
    options = case.evaluated(space)
    ignored = set(options.get("ignored", ()))
    policy = options.get("mixed_precision")
    reduce_dtype = None
    if policy is not None and not exact:
        reduce_dtype = policy.reduce_dtype or policy.param_dtype
    if exact:
        space = case.program.space(exact=True)
        space["checkpoint"] = uncheckpointed
        torch.manual_seed(0)
        twin = space["Model"]().double()
        with torch.no_grad():
            for ours, theirs in zip(both(twin), both(source), strict=True):
                ours.copy_(theirs)
        source, policy = twin, None
    signs = None if nudge is None else torch.Generator().manual_seed(nudge)
    if signs is not None:
        with torch.no_grad():
            for p in source.parameters():
                if p.is_floating_point():
                    p.mul_(1 + (up_or_down(p, signs) if nudge else 1) * eps_of(p.dtype))
    count = case.ranks if case.processes else 1
    replicas = [Replica(copy.deepcopy(source), case, policy) for _ in range(count)]
    optimizers = [eval(case.optimizer, space)(list(r.model.parameters())) for r in replicas]
    seen: list[Seen] = [{} for _ in replicas]
    for step in range(case.steps):
        reduced: list[dict[str, Tensor]] = [{} for _ in replicas]
        pending: list[dict[str, Tensor]] = [{} for _ in replicas]
        for micro in range(case.micro_batches):
            for rank, replica in enumerate(replicas):
                torch.manual_seed(seed_of(rank, step, micro))
                batch = space["batch"](rank, step * case.micro_batches + micro)
                if exact:
                    batch = to_double(batch)
                seen[rank] |= forward_backward(replica, batch, space["loss_of"], f"{step}.{micro}")
                for name, p in replica.model.named_parameters():
                    if p.grad is not None:
                        add(pending[rank], name, p.grad)
                    p.grad = None
            if case.no_sync and micro < case.micro_batches - 1:
                continue
            found = combined(case, options, pending, ignored, reduce_dtype, signs)
            for rank, grads in enumerate(found):
                for name, grad in grads.items():
                    add(reduced[rank], name, grad)
            pending = [{} for _ in replicas]
            if case.in_backward:
                apply(replicas, optimizers, reduced)
                reduced = [{} for _ in replicas]
        if not case.in_backward:
            for rank, replica in enumerate(replicas):
                for name, _ in replica.model.named_parameters():
                    grad = reduced[rank].get(name)
                    seen[rank][f"gradient {step} {name}"] = None if grad is None else grad.clone()
                if case.whole:
                    norms = [grad.norm() for grad in reduced[rank].values()]
                    seen[rank][f"norm {step}"] = torch.stack(norms).norm()
            apply(replicas, optimizers, reduced)
    for rank, replica in enumerate(replicas):
        seen[rank] |= states(replica.model)
        if case.evaluates:
            replica.model.eval()
            batch = space["batch"](rank, 99)
            torch.manual_seed(seed_of(rank, case.steps, 0))
            if options.get("full_precision_in_eval"):
                replica.policy = None
                for buffer, dtype in replica.stored:
                    buffer.data = buffer.data.to(dtype)
                for module in replica.model.modules():
                    module._forward_pre_hooks.clear()
                    module._forward_hooks.clear()
            with torch.no_grad():
                out = replica(**(to_double(batch) if exact else batch))
            seen[rank] |= dict(parts(out, "evaluated"))
            for key, value in states(replica.model).items():
                if key.startswith("buffer"):
                    seen[rank][f"{key} evaluated"] = value
    if case.whole:  # there is nothing between forward and backward
        gone = ("output", "input gradient", "gradient")
        seen = [{k: v for k, v in each.items() if not k.startswith(gone)} for each in seen]
    return seen


def uncheckpointed(function: Any, *args: Any, use_reentrant: bool) -> Any:
    """A reentrant one without an argument that needs a gradient computes none, as in eager."""
    given = (t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor))
    with torch.set_grad_enabled(
        torch.is_grad_enabled() and (not use_reentrant or any(t.requires_grad for t in given))
    ):
        return function(*args)


def both(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    grads[name] = grads[name] + grad if name in grads else grad.clone()


def apply(replicas: list[Replica], optimizers: list[Any], grads: list[dict[str, Tensor]]) -> None:
    """Every replica's optimizer steps on its gradients."""
    for replica, optimizer, own in zip(replicas, optimizers, grads, strict=True):
        for name, p in replica.model.named_parameters():
            p.grad = own.get(name)
        optimizer.step()
        optimizer.zero_grad()


def combined(
    case: Case,
    options: dict[str, Any],
    grads: list[dict[str, Tensor]],
    ignored: set[str],
    reduce_dtype: torch.dtype | None,
    signs: torch.Generator | None,
) -> list[dict[str, Tensor]]:
    """Each rank's gradients after the reduction; those of ignored parameters are its own.

    What is reduced in low precision may be rounded the other way: with `signs`, it is.
    """
    op = options.get("reduce_op", "avg")
    copies = case.ranks // len(grads)
    found: list[dict[str, Tensor]] = [{} for _ in grads]
    for name in dict.fromkeys(name for own in grads for name in own):
        if name in ignored:
            for own, mine in zip(found, grads, strict=True):
                if name in mine:
                    own[name] = mine[name]
            continue
        some = next(own[name] for own in grads if name in own)
        each = [own.get(name, torch.zeros_like(some)) for own in grads] * copies
        stacked = torch.stack([g.to(reduce_dtype) if reduce_dtype else g for g in each])
        if op in ("max", "min"):
            one = stacked.amax(0) if op == "max" else stacked.amin(0)
        else:
            one = stacked.sum(0)
            if op == "avg":
                one = one / (options.get("gradient_divide_factor") or case.ranks)
        if signs is not None and reduce_dtype:
            one = one * (1 + up_or_down(one, signs) * eps_of(reduce_dtype))
        for own in found:
            own[name] = one.to(some.dtype)
    return found


def up_or_down(like: Tensor, signs: torch.Generator) -> Tensor:
    """1 or -1 for each element."""
    return torch.randint(2, like.shape, generator=signs) * 2 - 1


# -- how far right programs may be apart -----------------------------------------------------------


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def apart(one: Any, other: Any) -> float:
    """Largest difference of two tensors of one shape; inf where only one has a number."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return 0.0 if one is other else math.inf
    if not one.numel():
        return 0.0
    a, b = one.detach().double(), other.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros_like(a), (a - b).abs())
    return float(gap.nan_to_num(nan=math.inf).max())


def largest(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    return float(value.detach().double().nan_to_num(0, 0, 0).abs().max())


@dataclasses.dataclass
class Reference:
    """Attributes:
    seen: per rank, in the model's own dtypes.
    tolerances: per rank, of each tensor.
    """

    seen: list[Seen]
    tolerances: list[dict[str, float]]


def reference(case: Case, nudges: int = 1) -> Reference:
    """Run eager in its own dtypes, in float64 and nudged, and derive the tolerances."""
    with torch.random.fork_rng():
        own = run(case)
        others = [run(case, exact=True), *(run(case, nudge=i) for i in range(nudges))]
    options = dict(case.options)
    coarse = 0.0
    if "bfloat16" in options.get("mixed_precision", ""):
        coarse = eps_of(torch.bfloat16)
    for seen in own:
        for key, value in seen.items():
            if isinstance(value, Tensor) and key.startswith(("output", "gradient", "parameter")):
                coarse = max(coarse, eps_of(value.dtype))
    tolerances = []
    for mine, *theirs in zip(own, *others, strict=True):
        gradient = max((largest(v) for k, v in mine.items() if k.startswith("gradient")), default=0)
        noise: dict[str, float] = {}  # by what it is, over all steps: of its largest value
        for key, value in mine.items():
            if size := largest(value):
                gaps = (finite(apart(value, other.get(key))) for other in theirs)
                noise[of_any_step(key)] = max(noise.get(of_any_step(key), 0), max(gaps) / size)
        allowed = {}
        for key, value in mine.items():
            if isinstance(value, Tensor):
                eps = eps_of(value.dtype)
                if key.startswith("gradient") and "mixed_precision" in options:
                    eps = max(eps, coarse)
                relative = FACTOR * noise.get(of_any_step(key), 0) + ULPS * eps
                allowed[key] = relative * largest(value)
                if "gradient" in key:
                    allowed[key] += eps * gradient
        tolerances.append(allowed)
    return Reference(own, tolerances)


def of_any_step(key: str) -> str:
    """The name of a tensor without its step and micro-batch."""
    return re.sub(r"^(\w+( \w+)?) \d+(\.\d+)?", r"\1", key)


def finite(x: float) -> float:
    return x if math.isfinite(x) else 0.0


def trainable(case: Case) -> bool:
    """True if eager trains the case, and its losses say something."""
    try:
        with torch.random.fork_rng():
            own, exact = run(case), run(case, exact=True)
    except Exception:
        return False
    if not any(k.startswith("parameter") for k in own[0]):
        return False
    for mine, best in zip(own, exact, strict=True):
        for key, value in mine.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                if not bool(value.isfinite().all()):
                    return False
                if key.startswith("loss") and apart(value, best[key]) > CONDITION * (
                    largest(value) + 1e-3
                ):
                    return False
    return True
