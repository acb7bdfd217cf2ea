"""Refuses optimizers that would silently train nothing, or train wrongly.

`fxshard.compile` replaces the parameters of a model by sharded ones: an optimizer made before that
finds no gradients. Adafactor scales its steps by norms that it reads as Python numbers, and
DTensors give those of one rank. A state that was saved of plain parameters becomes a sharded one.

Where `fxshard.fully_shard` was called on blocks and never on the model, parameters outside of the
blocks are plain ones, and nothing reduces their gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxshard._torch import data_parallel, dtensors
from fxshard.errors import StepError
from fxshard.ir.tensor_parallel import PLACE as PLACE

T = TypeVar("T")

_MARK = "_fxshard_replaced"
_count = 0
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # the states that they load are sharded


class StrongReference(Generic[T]):
    """Called, it gives a runtime, as a weak reference does; it keeps the runtime alive.

    Parameters have one: whoever keeps a submodule or a parameter of a model computes with it as if
    the model were there, on every rank.
    """

    def __init__(self, runtime: T) -> None:
        self._runtime = runtime

    def __call__(self) -> T:
        return self._runtime

    def __deepcopy__(self, memo: object) -> StrongReference[T]:
        return self


class Weak(weakref.ref[T]):
    """A weak reference to a runtime, beside the world that it ran in.

    What is made of parameters has one, such as gradients: Python's garbage collector does not look
    from a parameter into its gradient, so that a model would never go. When it goes differs
    between ranks, and what they do then must not.
    """

    __slots__ = ("world",)
    world: Any

    def __new__(cls, runtime: T) -> Weak[T]:
        made = super().__new__(cls, runtime)
        made.world = runtime.world  # type: ignore[attr-defined]
        return made

    def __deepcopy__(self, memo: object) -> Weak[T]:
        return self


def place_of(tensor: Any) -> tuple[Weak[Any] | None, str]:
    """What `PLACE` of something made of a sharded parameter is: its runtime, and its FQN.

    Args:
        tensor: the parameter, or what was made of it; (None, "") for any other.
    """
    reference, fqn = getattr(tensor, PLACE, (None, ""))
    return Weak(reference()) if isinstance(reference, StrongReference) else reference, fqn


def gather_as(tensor: Any, like: Any) -> Any:
    """Let a DTensor gather itself where code computes with it, if `like` does; in place.

    Args:
        tensor: a new parameter, or a gradient.
        like: the parameter that it replaces, or is the gradient of.
    """
    if hasattr(like, PLACE):
        tensor.__class__ = type(like)
        replaces = isinstance(tensor, nn.Parameter)
        setattr(tensor, PLACE, getattr(like, PLACE) if replaces else place_of(like))
    return tensor


def mark(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse from now on every step of an optimizer that holds one of `parameters` (by FQN)."""
    global _count
    if parameters and not _count:
        register_optimizer_step_pre_hook(_before_step)
    for fqn, parameter in parameters.items():
        setattr(parameter, _MARK, fqn)
        _count += 1


def was(parameter: nn.Parameter) -> str | None:
    """The FQN of `parameter` when another replaced it; None if it is in its place (again)."""
    found: str | None = getattr(parameter, _MARK, None)
    return None if found is None or _is_back(parameter) else found


def _is_back(parameter: nn.Parameter) -> bool:
    """True if a sharded model holds `parameter` again, as after ``functional_call``."""
    reference, fqn = getattr(parameter, PLACE, (None, ""))
    runtime = reference() if reference is not None else None
    slot = runtime.slots.get(fqn) if runtime is not None else None
    return slot is not None and slot.holds(parameter)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Runs before each step of any optimizer; returns other arguments for it, or None."""
    _refuse(optimizer)
    return _with_common_loss(optimizer, args, kwargs) if isinstance(optimizer, LBFGS) else None


def _with_common_loss(optimizer: LBFGS, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a step, with a closure that must return the same on all ranks.

    LBFGS looks at its loss for how far to go, and for when to stop. Each rank would go as far as
    the loss of its own batch says, with its rows alone.
    """
    places = [getattr(p, PLACE) for p in optimizer.param_groups[0]["params"] if hasattr(p, PLACE)]
    runtime = places[0][0]() if places else None
    given = {**dict(zip(("self", "closure"), args, strict=False)), **kwargs}
    closure = given.get("closure")
    if runtime is None or closure is None:
        return None

    def asked() -> Any:
        loss = closure()
        what = "the loss that the closure of LBFGS returns (return what is the same on all: after "
        what += "backward, dist.all_reduce(loss, dist.ReduceOp.AVG))"
        runtime.world.agree([repr(float(loss))], what)
        return loss

    return args[:1], {"closure": asked}


def _refuse(optimizer: Optimizer) -> None:
    """Raise StepError if the optimizer holds a replaced parameter; checked once per optimizer."""
    if optimizer not in _known and _is_of_torch(optimizer):
        _known.add(optimizer)
        _take_rows(optimizer)
        optimizer.register_load_state_dict_post_hook(_take_rows)
    if _checked.get(optimizer) == _count:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (fqn := was(parameter)) is not None:
                raise StepError(
                    f"this {type(optimizer).__name__} holds parameter {fqn!r} as it was before it "
                    f"was sharded or replaced: stepping it trains nothing. Make optimizers after "
                    f"fxshard.compile (or fxshard.shard), of model.parameters()."
                )
            if isinstance(optimizer, Adafactor) and hasattr(parameter, PLACE):
                raise StepError(
                    "torch.optim.Adafactor scales each step by norms of a full parameter and of "
                    "its update, and a rank has some of the rows: DTensor gives the norms of "
                    "those. Use an optimizer that steps element by element, such as AdamW."
                )
    _require_covered(optimizer)
    _checked[optimizer] = _count


def _is_of_torch(optimizer: Optimizer) -> bool:
    """True for an optimizer of torch.optim, or one made of it: it has a state like its parameters.
    Others may hold all rows on each rank.
    """
    kinds = (kind for kind in type(optimizer).__mro__ if kind is not Optimizer)
    return any(kind.__module__.startswith("torch.optim.") for kind in kinds)


def _take_rows(optimizer: Optimizer) -> None:
    """Of a state that was saved of plain parameters, keep this rank's rows: as ``load_state_dict``
    takes it, all ranks have all of it.
    """
    parameter: Any
    for parameter, state in optimizer.state.items():
        ours = isinstance(parameter, DTensor) and hasattr(parameter, PLACE)
        if not ours or not isinstance(state, dict):
            continue
        for name, value in state.items():
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                continue
            if value.dim() and value.shape == parameter.shape:
                rows = dtensors.local_part(dtensors.sharded_like(value, parameter)).clone()
                state[name] = dtensors.dtensor_like(rows, parameter)


def _require_covered(optimizer: Optimizer) -> None:
    """Raise StepError if it has parameters that are sharded, and others that nobody reduces."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    places = {param: getattr(param, PLACE) for param in held if hasattr(param, PLACE)}
    runtimes = [runtime for runtime in {ref() for ref, _ in places.values()} if runtime]
    ignored = {id(param) for runtime in runtimes for param in runtime.ignored_params()}
    plain = [p for p in held if p.requires_grad and not isinstance(p, DTensor)]
    outside = [p for p in plain if p not in places and id(p) not in ignored]
    if not outside or not any(runtime.unit_calls for runtime in runtimes):
        return
    by_ddp = data_parallel.reduced()
    if outside := [param for param in outside if id(param) not in by_ddp]:
        raise StepError(
            f"this {type(optimizer).__name__} holds parameters that fully_shard has sharded, such "
            f"as {next(iter(places.values()))[1]!r}, and one of shape {list(outside[0].shape)} "
            f"that no call covers: its gradient is this rank's own. Call fully_shard on the model "
            f"too, after its blocks. If you reduce that gradient yourself, name the parameter in "
            f"ignored_params, or step it by an optimizer of its own."
        )
