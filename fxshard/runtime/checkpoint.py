"""Checkpoints of model and optimizer that a crash leaves complete (torch.distributed.checkpoint).

A checkpoint is a directory with complete states in ``version-N`` and a file ``latest`` that names
one of them. A new state is written into ``writing-N``, renamed when all ranks are done, and then
``latest`` is replaced, which the file system does at once or not at all. The old state is removed
after that. So at any moment ``latest`` names a complete state: the old one or the new one.

``digests.json`` of a state has the SHA-256 of its other files. Files that were truncated or altered
since are refused. The digests do not prove who wrote the files, so unpickling is restricted
(`_Reader`).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import hashlib
import io
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from fxshard._torch import optimizers
from fxshard.arguments import check_progress
from fxshard.errors import CheckpointError
from fxshard.host.progress import task
from fxshard.runtime import background
from fxshard.runtime.module import FxshardModule

log: logging.Logger = logging.getLogger("fxshard")
DIGESTS = "digests.json"

T = TypeVar("T")


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> None:
    """Write the state of `model` and `optimizer`; call it on all ranks.

    The state that was there before can be loaded until this one is complete, and is then removed.

    Args:
        path: a directory that all ranks see; made if it is not there.
        model, optimizer: of any kind that torch.distributed.checkpoint knows.
        extra: what else `load_checkpoint` shall return (step, random state, ...); rank 0's is kept.
            Tensors and plain values load by default, all that can be pickled with ``trusted``.
        process_group: the ranks that hold the model (default: all).
        progress: show on standard error what is going on; None: on a terminal, of what takes long
            (docs/env.md: ``FXSHARD_PROGRESS``).

    Raises:
        ConfigError: `progress` is neither None nor a flag.
        CheckpointError: a rank cannot write; the previous state is still there.
        RankMismatchError: some ranks do something else with the model.
    """
    check_progress(progress)
    ranks = _Ranks(process_group)
    new = _New.begun(Path(path), model, optimizer, extra, ranks, "save_checkpoint")
    with new.removed_if_it_fails(ranks), task(f"saving {new.root}", shown=progress) as say:
        say("taking the state")
        state = ranks.each(lambda: _state_as_it_is(model, optimizer), new.failed)
        new.write(state, ranks, say)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> Future[None]:
    """As `save_checkpoint`, but return when the state is copied; a thread writes it meanwhile.

    What is saved is the state at the call: the steps that follow do not change it. Until the
    future is done, this rank holds a copy of what it has of model and optimizer in the CPU's
    memory (phase ``async_save`` of the memory report); `load_checkpoint`, and a process that is
    killed, find the state before. There is one save at a time: another one waits for it, and so
    does `load_checkpoint`. A process that ends waits too, but
    `torch.distributed.destroy_process_group` does not: ask for the result before.

    Args:
        path, model, optimizer, extra, process_group: as for `save_checkpoint`; call it on all
            ranks.

    Returns:
        A future, as `torch.distributed.checkpoint.async_save` returns one. Its ``result()`` waits
        until the checkpoint is complete on all ranks, or raises `CheckpointError`. If nobody asks
        for it, the next call that saves or loads raises that, on all ranks, and does nothing else.

    Raises:
        CheckpointError: as for `save_checkpoint`, or of the asynchronous save before this one.
        RankMismatchError: some ranks do something else with the model.
    """
    ranks = _Ranks(process_group)
    new = _New.begun(Path(path), model, optimizer, extra, ranks, "async_save")
    with new.removed_if_it_fails(ranks):
        beside = _Ranks(background.group_beside(process_group))
        state = ranks.each(lambda: background.staged(_state_as_it_is(model, optimizer)), new.failed)

    def write() -> None:
        try:
            with new.removed_if_it_fails(beside):
                new.write(state, beside, lambda step: None)
        except CheckpointError:
            raise
        except Exception as error:  # of a process group that was destroyed, say
            raise CheckpointError(f"{new.failed}. Cause: {error}") from error

    return background.started(write)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    trusted: bool = False,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> Any:
    """Load what `save_checkpoint` wrote last into `model` and `optimizer`; call it on all ranks.

    The number of ranks may be another than at saving. `optimizer` gets state of the parameters
    that it had state of then (those that had had a gradient) and that are not frozen now, and has
    none of the others. As with `torch.optim.Optimizer.load_state_dict`, its groups must be those
    of then, and their options become what they were. Nothing of `model` and `optimizer` is written
    before all files are known to be as they were saved, and to be all asked for.

    Args:
        path: the directory that `save_checkpoint` wrote to.
        model, optimizer: of the kinds that were saved; written in place.
        trusted: whoever could write to `path` may run code here. By default only tensors and plain
            values are unpickled, as `torch.load` does with ``weights_only=True``; classes that
            `torch.serialization.add_safe_globals` names are too.
        process_group: the ranks that hold the model (default: all).
        progress: as for `save_checkpoint`.

    Returns:
        `extra`, on all ranks, with its tensors on the CPU.

    Raises:
        ConfigError: `progress` is neither None nor a flag.
        CheckpointError: there is none; it is not one of this model and optimizer, or has more
            than they have; a file is not as it was saved; or it has objects that only a
            ``trusted`` checkpoint may have.
        RankMismatchError: some ranks do something else with the model.
    """
    check_progress(progress)
    root = Path(path)
    ranks = _Ranks(process_group)
    _together(model, ranks, "load_checkpoint")
    name, digests = ranks.first(
        lambda: _latest(root), f"no complete checkpoint in {root}. {_CHECK}"
    )
    version = root / name
    reader = FileSystemReader(version) if trusted else _Reader(version)
    unreadable = f"{version} cannot be loaded"
    failed = f"{version} could not be loaded; was it saved with this model and optimizer?"
    with task(f"loading {version}", shown=progress) as say, contextlib.ExitStack() as stack:
        say("checksums")
        ranks.all(lambda: _check_digests(version, digests, ranks), unreadable)
        extra = ranks.each(lambda: _extra(version, trusted=trusted), unreadable)
        saved = ranks.each(
            lambda: _Saved.read(reader, version, model, optimizer, trusted=trusted), failed
        )
        stack.enter_context(_explained(failed))
        if optimizer is not None:
            stack.enter_context(_stated(optimizer, saved))
        state = ranks.each(lambda: _to_load_into(model, optimizer, saved), failed)
        say("reading")
        planner = None if trusted else _Planner()
        load(state, storage_reader=reader, planner=planner, process_group=process_group)
        ranks.all(lambda: _put(state, model, optimizer, saved), failed)
    return extra


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _state_as_it_is(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """The state to save: no step is taken to make one."""
    if optimizer is None:
        return _state(model, None)
    with optimizers.not_stepped(optimizer):
        return _state(model, optimizer)


def _together(model: nn.Module, ranks: _Ranks, what: str) -> None:
    """All ranks are about to do `what`, and no save is going on.

    Raises:
        CheckpointError: that save has failed, and a rank has not been told.
        StepError: a parameter is on a mesh that does not have all ranks.
    """
    if isinstance(model, FxshardModule):
        model._fxshard.require_one_of_each(what)
        model._fxshard.world.together(what)
    waited = f"{what} waited for the asynchronous save before it"
    if told := next(filter(None, ranks.all(background.failure, waited)), ""):
        raise CheckpointError(f"{told}. It was an asynchronous save; {what} has done nothing")


def _require_own(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise ValueError if `optimizer` holds tensors that are no parameters of the model."""
    own = set(map(id, model.parameters()))
    groups = [] if optimizer is None else optimizer.param_groups
    if any(id(param) not in own for group in groups for param in group["params"]):
        raise ValueError(
            "the optimizer holds tensors that are no parameters of the model: make it of "
            "model.parameters(), after whatever replaces them"
        )


# -- what was saved of an optimizer, and where it goes ---------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Saved:
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


def _to_load_into(model: nn.Module, optimizer: Optimizer | None, saved: _Saved) -> dict[str, Any]:
    """The state whose tensors torch overwrites: what was saved, and nothing else.

    Raises:
        ValueError: more was saved than `model` and `optimizer` have.
    """
    without: tuple[str, ...] = ("optimizer.",)
    if optimizer is None:
        state = _state(model, None)
    else:
        with _as_saved(optimizer, saved):
            state = _state(model, optimizer)
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


def _put(
    state: dict[str, Any], model: nn.Module, optimizer: Optimizer | None, saved: _Saved
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
    _require_own(model, optimizer)
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
            with _restricted(index.fqn):
                found[index.fqn] = torch.load(data, "cpu", weights_only=not trusted)
    return found


_OPTIONS = "optimizer.param_groups."


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


# What torch's schedulers add to the options of an optimizer.
_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


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


_STATES = "optimizer.state."


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


# How a step is computed, not which state it makes; a device may lack what another one had.
_IMPLEMENTATIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


@contextlib.contextmanager
def _as_saved(optimizer: Optimizer, saved: _Saved) -> Iterator[None]:
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
def _stated(optimizer: Optimizer, saved: _Saved) -> Iterator[None]:
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


# -- files -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _New:
    """A state that is being written to the checkpoint in `root`."""

    root: Path
    number: int

    @property
    def writing(self) -> Path:
        return self.root / f"writing-{self.number}"

    @property
    def failed(self) -> str:
        return f"{self.writing} could not be written, and the state before is as it was"

    @classmethod
    def begun(
        cls,
        root: Path,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Any,
        ranks: _Ranks,
        what: str,
    ) -> Self:
        """All ranks can save, and rank 0 has written `extra`."""
        _together(model, ranks, what)
        packed = io.BytesIO()
        if isinstance(model, FxshardModule):
            model._fxshard.require_filled()
        ranks.all(lambda: _require_own(model, optimizer), "nothing was saved")
        ranks.first(lambda: torch.save(extra, packed), "nothing was saved: extra cannot be pickled")
        number = ranks.first(
            lambda: _begun(root, packed.getvalue()),
            f"a checkpoint cannot be written to {root}. {_CHECK}",
        )
        return cls(root, number)

    def write(self, state: dict[str, Any], ranks: _Ranks, say: Callable[[str], None]) -> None:
        """Write what this rank has to, and make it the latest state when all ranks have."""
        say("writing")
        with _explained(self.failed):
            save(state, storage_writer=_Writer(self.writing), process_group=ranks.group)
        say("checksums")

        def digests_of_mine() -> dict[str, str]:
            ranks.require_group()  # else torch's save has taken this rank for the only one
            return _digests(self.writing, ranks.rank)

        digests = ranks.all(digests_of_mine, self.failed)
        ranks.first(lambda: _publish(self.root, self.number, digests), self.failed)
        if ranks.rank == 0:
            try:
                _remove_before(self.root, self.number)
            except OSError as error:
                log.warning("fxshard: a state before in %s cannot be removed: %s", self.root, error)

    @contextlib.contextmanager
    def removed_if_it_fails(self, ranks: _Ranks) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            if ranks.rank == 0:  # it may be what fills the disk
                shutil.rmtree(self.writing, ignore_errors=True)
            raise


def _version(entry: Path) -> re.Match[str] | None:
    """Of a complete or half-written state: group 2 is its number."""
    return re.fullmatch(r"(version|writing)-(\d+)(\.latest)?", entry.name)


def _begun(root: Path, extra: bytes) -> int:
    """Make the directory of a new state, with `extra` in it; returns its number."""
    root.mkdir(parents=True, exist_ok=True)
    found = [(entry, match) for entry in root.iterdir() if (match := _version(entry))]
    number = 1 + max((int(match[2]) for _, match in found), default=0)
    for entry, match in found:
        if match[1] == "writing":  # of a process that died while it saved
            _remove(entry)
    made = root / f"writing-{number}"
    made.mkdir()
    try:
        (made / "extra.pt").write_bytes(extra)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return number


def _publish(root: Path, number: int, digests: list[dict[str, str]]) -> None:
    """Make a state that all ranks have written the latest one.

    Args:
        digests: by rank, those of the files that it wrote.
    """
    writing = root / f"writing-{number}"
    listed = {file: digest for part in digests for file, digest in part.items()}
    (writing / DIGESTS).write_text(json.dumps(listed))
    pointer = writing.with_suffix(".latest")
    pointer.write_text(f"version-{number}")
    for written in (writing / DIGESTS, writing / "extra.pt", writing, pointer):
        _sync(written)
    writing.rename(root / f"version-{number}")
    _sync(root)
    pointer.replace(root / "latest")


def _remove_before(root: Path, number: int) -> None:
    """Remove the states before this one, once the disk has its name."""
    _sync(root)
    for entry in root.iterdir():
        if (found := _version(entry)) and int(found[2]) < number:
            _remove(entry)


def _latest(root: Path) -> tuple[str, dict[str, str]]:
    """The name of the complete state, and the digests of its files.

    Raises:
        ValueError: the files are not those that were saved.
    """
    name = (root / "latest").read_text()
    if not re.fullmatch(r"version-\d+", name):
        raise ValueError(f"'latest' names {name[:80]!r}, which is no state")
    digests = json.loads((root / name / DIGESTS).read_text())
    found = {file.name for file in (root / name).iterdir()} - {DIGESTS}
    if not isinstance(digests, dict) or digests.keys() != found:
        raise ValueError(f"{DIGESTS} lists other files than {sorted(found)}")
    return name, digests


def _digests(writing: Path, rank: int) -> dict[str, str]:
    """Of the files that `rank` wrote."""
    mine = (file for file in writing.iterdir() if _writer(file) == rank)
    return {file.name: _digest(file) for file in mine}


def _check_digests(version: Path, digests: dict[str, str], ranks: _Ranks) -> None:
    """Check this rank's share of the files: each reads as many.

    Raises:
        ValueError: one is not as it was saved.
    """
    for file in sorted(digests)[ranks.rank :: ranks.size]:
        if _digest(version / file) != digests[file]:
            raise ValueError(f"{file} is not as it was saved")


def _extra(version: Path, *, trusted: bool) -> Any:
    with _restricted("extra"):
        return torch.load(version / "extra.pt", "cpu", weights_only=not trusted)


def _writer(file: Path) -> int:
    """The rank that wrote a file of a state: torch's begin with its number, all others are 0's."""
    found = re.match(r"__(\d+)_", file.name)
    return int(found[1]) if found else 0


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _sync(path: Path) -> None:
    """Have the file system write a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Writer(FileSystemWriter):
    """Torch's writer; its errors are those of the disk."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _cause(error) from error


def _cause(error: BaseException) -> BaseException:
    """The OSError that torch's zip writer replaced by an error of its own, if there is one."""
    first = error
    while not isinstance(first, OSError) and first.__context__ is not None:
        first = first.__context__
    return first if isinstance(first, OSError) else error


# -- unpickling, restricted ------------------------------------------------------------------------

_METADATA = {  # what torch.distributed.checkpoint describes a checkpoint with, besides dtypes
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # since Python 3.13
}


class _Unpickler(pickle.Unpickler):
    """Of metadata: knows the classes in it, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is no description of tensors")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Torch's reader; metadata can neither call anything nor name files outside the checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with _restricted("metadata"), open(Path(self.path, ".metadata"), "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"metadata names {info.relative_path!r}, a file elsewhere")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Torch's planner; it refuses values that are neither tensors nor plain."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with _restricted(read_item.dest_index.fqn):
            torch.load(io.BytesIO(value.getvalue()), weights_only=True)
        super().load_bytes(read_item, value)


@contextlib.contextmanager
def _restricted(what: str) -> Iterator[None]:
    """Replace torch's UnpicklingError, whose text is about an argument of `torch.load`."""
    try:
        yield
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise pickle.UnpicklingError(
            f"{what} has {found[1] if found else 'something'}, and only tensors and plain values "
            f"are loaded from a checkpoint that anybody may have written. If nobody but you can "
            f"have: load_checkpoint(..., trusted=True)"
        ) from error


# -- ranks -----------------------------------------------------------------------------------------

_DESTROYED = (
    "the process group was destroyed meanwhile: ask the future of async_save for its result before "
    "torch.distributed.destroy_process_group()"
)
_CHECK = "Check that the path is right, and a directory that all ranks see and may write to"


@contextlib.contextmanager
def _explained(complaint: str) -> Iterator[None]:
    """Turn torch's errors into CheckpointError.

    torch raises a CheckpointException, which is no `Exception`, on all ranks if one of them fails,
    and a RuntimeError if a rank is gone.
    """
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        raise CheckpointError(f"{complaint}. Cause: {error}") from error


class _Ranks:
    """The ranks of a process group, which go on together or fail together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def all(self, action: Callable[[], T], complaint: str) -> list[T]:
        """What `action` returns, by rank.

        Raises:
            CheckpointError: `complaint` and the causes, on all ranks if it fails on one.
        """
        answer: tuple[Any, str] = (None, "")
        cause = None
        try:
            answer = action(), ""
        except Exception as error:
            cause = _cause(error)
            answer = None, f"{type(cause).__name__}: {cause}"
        answers: list[Any] = [answer]
        if not self.alone:
            answers = [None] * self.size
            with _explained(complaint):
                dist.all_gather_object(answers, answer, self.group)
            if None in answers:  # this rank is in the group no more
                raise CheckpointError(f"{complaint}. Cause: {_DESTROYED}")
        failed = [f"rank {rank}: {cause}" for rank, (_, cause) in enumerate(answers) if cause]
        if failed:
            raise CheckpointError(f"{complaint}. Cause: {'; '.join(failed)}") from cause
        return [found for found, _ in answers]

    def require_group(self) -> None:
        """Raise ValueError if the group was destroyed since."""
        if not self.alone and not background.is_alive(self.group or dist.group.WORLD):
            raise ValueError(_DESTROYED)

    def each(self, action: Callable[[], T], complaint: str) -> T:
        """What `action` returns on this rank, which stays here; all raise if it fails on one."""
        found: list[T] = []
        self.all(lambda: found.append(action()), complaint)
        return found[0]

    def first(self, action: Callable[[], T], complaint: str) -> T:
        """What `action` returns on rank 0, on all ranks; all raise if it fails there."""
        found: list[Any] = self.all(action if self.rank == 0 else lambda: None, complaint)
        first: T = found[0]
        return first
