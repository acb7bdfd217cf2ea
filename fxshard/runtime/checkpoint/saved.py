"""What was saved of a model and an optimizer, and where it goes."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from fxshard._torch import optimizers
from fxshard.runtime.checkpoint.unpickling import restricted
from fxshard.runtime.module import FxshardModule

# How a step is computed, not which state it makes; a device may lack what another one had.
_IMPLEMENTATIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
# What torch's schedulers add to the options of an optimizer.
_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}

_OPTIONS = "optimizer.param_groups."
_STATES = "optimizer.state."


def state_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def state_as_it_is(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """The state to save: no step is taken to make one."""
    if optimizer is None:
        return state_of(model, None)
    with optimizers.not_stepped(optimizer):
        return state_of(model, optimizer)


def require_own(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise ValueError if `optimizer` holds tensors that are no parameters of the model."""
    own = set(map(id, model.parameters()))
    groups = [] if optimizer is None else optimizer.param_groups
    if any(id(param) not in own for group in groups for param in group["params"]):
        raise ValueError(
            "the optimizer holds tensors that are no parameters of the model: make it of "
            "model.parameters(), after whatever replaces them"
        )


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """What a checkpoint has, read before anything is loaded; the last four are of its optimizer.

    Attributes:
        keys: all of it.
        params: the parameters of the optimizer to load into, by the names that checkpoints have.
        states: by the names of those that it has state of, the names of these states.
        groups: the options of each saved group, with ``params``.
        order: per saved group, which group of the optimizer to load into is the same.
    """

    keys: Collection[str]
    params: dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)
    states: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    order: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def read(
        cls,
        reader: FileSystemReader,
        version: Path,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        trusted: bool,
    ) -> Self:
        """Read the metadata and all values that are no tensors.

        Raises:
            ValueError: the optimizer is not like the saved one.
        """
        metadata = reader.read_metadata()
        plain = _plain(metadata, version, trusted=trusted)
        keys = metadata.state_dict_metadata
        if optimizer is None:
            return cls(keys)
        live = _groups(model, optimizer)
        params = {fqn: param for group in live for fqn, param in group.items()}
        states = _states(keys, params)
        groups = _saved_groups(metadata, plain)
        order = _matched([group["params"] for group in groups], live)
        _require_options(optimizer, groups)
        return cls(keys, params, states, groups, order)


def to_load_into(
    model: nn.Module, optimizer: Optimizer | None, saved: SavedCheckpoint
) -> dict[str, Any]:
    """The state whose tensors torch overwrites: what was saved, and nothing else.

    Raises:
        ValueError: more was saved than `model` and `optimizer` have.
    """
    without: tuple[str, ...] = ("optimizer.",)
    if optimizer is None:
        state = state_of(model, None)
    else:
        with _as_saved(optimizer, saved):
            state = state_of(model, optimizer)
        own = state["optimizer"]
        own["state"] = {fqn: own["state"][fqn] for fqn in own["state"] if fqn in saved.states}
        own["param_groups"] = [
            _as_asked(own["param_groups"][at], group)
            for at, group in zip(saved.order, saved.groups, strict=True)
        ]
        frozen = [fqn for fqn in saved.states if not saved.params[fqn].requires_grad]
        without = tuple(f"{_STATES}{fqn}." for fqn in frozen)  # as torch does
    if isinstance(model, FxshardModule):
        state["model"].update(model._fxshard.to_fill())  # no second copy of a model on meta
    _require_all([key for key in saved.keys if not key.startswith(without)], state)
    return state


def put(
    state: dict[str, Any], model: nn.Module, optimizer: Optimizer | None, saved: SavedCheckpoint
) -> None:
    """Give `model` and `optimizer` the state that was loaded."""
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        loaded = copy.deepcopy(state["optimizer"]["param_groups"])
        some = StateDictOptions(strict=False)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=some)
        for at, group in zip(saved.order, loaded, strict=True):  # torch's leave out empty groups
            optimizer.param_groups[at].update({k: group[k] for k in group if k != "params"})


def _groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, nn.Parameter]]:
    """The parameters of `optimizer` by group and by the names that they have in checkpoints.

    Those are torch's: without what wrappers of modules add (torch.compile, DDP, checkpoints).

    Raises:
        ValueError: it holds other tensors, or parameters are parts of other ones (FSDP1 without
            ``use_orig_params``).
    """
    require_own(model, optimizer)
    with optimizers.not_stepped(optimizer):
        state: Any = get_optimizer_state_dict(model, optimizer)
    found: list[dict[str, nn.Parameter]] = []
    for named, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        if len(named["params"]) != len(group["params"]):
            raise ValueError(
                "a parameter of the model is in parts of other ones, as in FSDP1 without "
                "use_orig_params=True: use torch.distributed.checkpoint itself"
            )
        found.append(dict(zip(named["params"], group["params"], strict=True)))
    return found


def _plain(metadata: Metadata, version: Path, *, trusted: bool) -> dict[str, Any]:
    """The values of a state that are no tensors, by key; of a trusted one, the groups' options.

    They are read before anything is loaded, as one may be what only a trusted state may have.
    """
    found: dict[str, Any] = {}
    for index, info in metadata.storage_data.items():
        kind = metadata.state_dict_metadata.get(index.fqn)
        needed = not trusted or index.fqn.startswith(_OPTIONS)
        if needed and isinstance(kind, BytesStorageMetadata):
            with open(version / info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            with restricted(index.fqn):
                found[index.fqn] = torch.load(data, "cpu", weights_only=not trusted)
    return found


def _saved_groups(metadata: Metadata, plain: dict[str, Any]) -> list[dict[str, Any]]:
    """The options of each group of a state, with ``params``; tensors are there to be loaded into.

    Raises:
        ValueError: it was saved without an optimizer.
    """
    found: dict[int, dict[str, Any]] = {}
    for key, kind in metadata.state_dict_metadata.items():
        number, _, option = key.removeprefix(_OPTIONS).partition(".")
        if key.startswith(_OPTIONS) and number.isdecimal():
            group = found.setdefault(int(number), {})
            if isinstance(kind, TensorStorageMetadata) and "." not in option:
                group[option] = torch.zeros(kind.size, dtype=kind.properties.dtype)
            elif key in plain and "." not in option:
                group[option] = plain[key]
    if not found:
        raise ValueError("it was saved without an optimizer: load it without one")
    return [found[number] for number in sorted(found)]


def _matched(saved: list[list[str]], live: list[dict[str, nn.Parameter]]) -> list[int]:
    """Per group of a state: which of the optimizer's has the same parameters.

    Raises:
        ValueError: none has.
    """
    left = dict(enumerate(live))
    found = []
    for params in saved:
        same = [at for at, group in left.items() if group.keys() == set(params)]
        if not same:
            break
        found.append(same[0])
        del left[same[0]]
    if left or len(found) < len(saved):
        sizes = [[len(group) for group in groups] for groups in (saved, live)]
        raise ValueError(
            f"its optimizer has other parameter groups, of {sizes[0]} parameters where this one "
            f"has {sizes[1]}: make the optimizer with the groups that were saved"
        )
    return found


def _require_options(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if the groups were saved of another kind of optimizer.

    Options that are missing may be of a newer torch. If there are unknown options too, the
    optimizer was of another class.
    """
    own = {*optimizer.defaults, *_IMPLEMENTATIONS, *_SCHEDULERS}
    own |= {option for group in optimizer.param_groups for option in group}
    for group in groups:
        lacking = sorted(optimizer.defaults.keys() - group.keys() - _IMPLEMENTATIONS)
        others = sorted(group.keys() - own)
        if lacking and others:
            raise ValueError(
                f"its optimizer has no {', '.join(lacking)}, which an {type(optimizer).__name__} "
                f"needs, but has {', '.join(others)}: make the optimizer that was saved"
            )


def _as_asked(own: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A group to load a saved one into: with its options, and no others, as torch loads it.

    Options that only the live group has (``initial_lr`` of a scheduler) are not loaded.
    """
    return {option: own[option] for option in own if option in saved} | saved


def _require_all(keys: Sequence[str], state: dict[str, Any]) -> None:
    """Raise ValueError if a checkpoint has keys that the state to load into has not."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state)  # flattens it
    if left := sorted(key for key in keys if key not in planner.state_dict):
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        raise ValueError(
            f"it has what this model and optimizer have no place for: {', '.join(left[:8])}{more}"
        )


def _states(keys: Iterable[str], names: Collection[str]) -> dict[str, set[str]]:
    """Per parameter that has optimizer state in a checkpoint, the names of what it has.

    Raises:
        ValueError: the checkpoint has state of other parameters only.
    """
    of_states = [key.removeprefix(_STATES) for key in keys if key.startswith(_STATES)]
    found: dict[str, set[str]] = {}
    for key in of_states:
        fqn = key
        while fqn and fqn not in names:  # names of states may have dots too
            fqn = fqn.rpartition(".")[0]
        if fqn:
            name = key.removeprefix(f"{fqn}.").partition(".")[0]
            found.setdefault(fqn, set()).add(name)
    if of_states and not found:
        raise ValueError(f"its optimizer has state of other parameters: {of_states[0]!r}")
    return found


@contextlib.contextmanager
def _as_saved(optimizer: Optimizer, saved: SavedCheckpoint) -> Iterator[None]:
    """`optimizer` has the options that were saved, for the step which makes state to load into."""
    live = [optimizer.param_groups[at] for at in saved.order]
    before = [dict(group) for group in live]
    for own, group in zip(live, saved.groups, strict=True):
        kept = _IMPLEMENTATIONS | {k for k, v in group.items() if isinstance(v, Tensor)}
        own.update({k: v for k, v in group.items() if k in own and k not in kept})
    try:
        yield
    finally:
        for own, options in zip(live, before, strict=True):
            own.update(options)


@contextlib.contextmanager
def stated(optimizer: Optimizer, saved: SavedCheckpoint) -> Iterator[None]:
    """`optimizer` has state of the saved parameters and of no others; as before if that fails.

    torch makes state to load into by a step on gradients of zeros, if there is no state and no
    gradient. The user's step hooks are not called for that step.
    """
    before = optimizer.state
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = {saved.params[fqn]: names for fqn, names in saved.states.items()}
    states = {param: names for param, names in states.items() if param.requires_grad}
    grads = {param: param.grad for param in params}
    same = all(
        param in before and set(map(str, before[param])) == names for param, names in states.items()
    )
    try:
        with (
            optimizers.without_step_hooks(optimizer),
            contextlib.nullcontext() if states else optimizers.not_stepped(optimizer),
        ):
            if not same:
                optimizer.state = collections.defaultdict(dict)
            for param in params:
                param.grad = None
            yield
        for param in params:
            if param not in states:
                optimizer.state.pop(param, None)
    except BaseException:
        optimizer.state = before
        raise
    finally:
        for param, grad in grads.items():
            param.grad = grad
