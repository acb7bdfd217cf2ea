"""What a rank holds outside of the step: while it is set up, loads a checkpoint, and saves one.

Read off the program, the module tree and torch's own code, operator by operator; nothing runs but
the initialisations of a meta model, on fake tensors, and the optimizer's step, as for the report.
Each phase is a `Ledger` of its own. What is between phases: shards, ignored parameters, buffers,
and the optimizer's state once there is one; no batch, no gradients.

The figures are those of rank 0: it owns the first rows, and never fewer than others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard.compat import FakeTensorMode
from fxshard.config import Config
from fxshard.memory.category import CATEGORIES, Category
from fxshard.memory.ledger import BEFORE, OPTIMIZER, Ledger, LiveRange, Moment
from fxshard.memory.optimizer import OptimizerStep, trace_step
from fxshard.memory.recording import Event, Recorder
from fxshard.program import Program, nbytes
from fxshard.units import Param, buffer_dtypes

HALF = len(CATEGORIES)


@dataclasses.dataclass(frozen=True)
class LifecyclePhase:
    """One phase outside of the step, on rank 0.

    Attributes:
        name: what runs, for example "init" or "save_checkpoint".
        ledger: what is alive in it, and when.
        unknown: what else takes memory that cannot be known ahead, as ``(what, why)``; in no
            figure.
    """

    name: str
    ledger: Ledger
    unknown: tuple[tuple[str, str], ...] = ()

    @property
    def start_bytes(self) -> int:
        """Alive on the device when it begins."""
        return int(self.ledger.totals[0])

    @property
    def peak_bytes(self) -> int:
        """The most alive at once on the device."""
        return int(self.ledger.totals.max())

    @property
    def end_bytes(self) -> int:
        """Alive on the device when it is over."""
        return int(self.ledger.totals[-1])

    @property
    def host_peak_bytes(self) -> int:
        """The most alive at once on the CPU while the program computes elsewhere."""
        return int(self._host.max())

    @property
    def host_end_bytes(self) -> int:
        """Alive there when it is over."""
        return int(self._host[-1])

    @property
    def peak_tick(self) -> int:
        """Where the device's peak is, or the host's if the device holds nothing."""
        totals = self.ledger.totals if self.peak_bytes else self._host
        return int(totals.argmax())

    @property
    def peak_node(self) -> str:
        """What runs there."""
        return self.ledger.moments[self.peak_tick // 2].node

    def alive_at_peak(self) -> list[LiveRange]:
        """Largest first; those on the device add up to `peak_bytes`."""
        alive = self.ledger.alive(self.peak_tick)
        return sorted(alive, key=lambda each: (-each.bytes, each.storage))

    def to_dict(self) -> dict[str, Any]:
        """Figures as plain values; bytes."""
        row = self.ledger.bytes[self.peak_tick, :HALF]
        return {
            "name": self.name,
            "start_bytes": self.start_bytes,
            "peak_bytes": self.peak_bytes,
            "end_bytes": self.end_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "host_end_bytes": self.host_end_bytes,
            "peak_node": self.peak_node,
            "peak_by_category": {
                c.value: int(v) for c, v in zip(CATEGORIES, row, strict=True) if v
            },
            "unknown": [{"what": what, "bytes": None, "why": why} for what, why in self.unknown],
        }

    @functools.cached_property
    def _host(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.ledger.bytes[:, HALF:].sum(1)


def lifecycle(
    program: Program,
    config: Config,
    model: nn.Module,
    held: Sequence[LiveRange],
    step: OptimizerStep | None,
) -> list[LifecyclePhase]:
    """The phases outside of the step, in the order in which a training script meets them.

    - ``init``: `fxshard.compile` of `model` as it is: with data on the device, on meta, or both.
      With ``sync_module_states`` also ``init (receives)``, of the ranks that get rank 0's data.
    - ``load_state_dict``: of a whole state dict that lies on the CPU.
    - ``load_checkpoint``: with a new optimizer, if there is one; of a checkpoint that as many ranks
      have saved.
    - ``save_checkpoint``: with the optimizer, if there is one.
    - ``full_state_dict``: on rank 0's CPU (the default), and ``full_state_dict (every rank)``:
      ``cpu_offload=False, rank0_only=False``.

    Args:
        program: what the rank runs.
        config: the options that it was made with.
        model: the model that `program` was traced from, sharded since or not.
        held: from `fxshard.memory.liveness.held_ranges`; its batch is left out.
        step: from `fxshard.memory.optimizer.trace_step`, or None.

    Raises:
        ConfigError: the optimizer's step needs data.
    """
    tree = _Tree(program, config, model, [h for h in held if h.category is not Category.INPUTS])
    on_cuda = config.device == "cuda" or tree.device.type == "cuda"
    new = trace_step(program, config.optimizer, for_cuda=on_cuda, unused=True) if step else None
    phases = [_init(tree)]
    if config.sync_module_states and program.world_size * program.replicas > 1:
        phases.append(_init_receiving(tree))
    return [
        *phases,
        _load_state_dict(tree),
        _load_checkpoint(tree, new),
        _save_checkpoint(tree, step, new),
        _full_state_dict(tree, step, alone=True),
        _full_state_dict(tree, step, alone=False),
    ]


# -- writing ledgers -------------------------------------------------------------------------------


class _Script:
    """Writes the ledger of a phase: one point per operator that allocates."""

    def __init__(self, name: str, held: Iterable[LiveRange] = ()) -> None:
        self.name = name
        self.ledger = Ledger()
        self.ledger.begin(name, -1)
        for each in held:
            self.hold(each)

    def hold(self, made: LiveRange) -> LiveRange:
        """What is there from before."""
        made = dataclasses.replace(made, storage=len(self.ledger.ranges), born=BEFORE)
        self.ledger.ranges.append(made)
        return made

    def run(self, node: str, *made: LiveRange, op: str = "", module: str = "") -> None:
        """A point: an operator has made those."""
        tick = 2 * self.ledger.add([Moment(node, op, module)])
        for each in made:
            each.storage, each.born = len(self.ledger.ranges), tick
            self.ledger.ranges.append(each)

    def drop(self, *ranges: LiveRange) -> None:
        """They are gone behind the last operator."""
        for each in ranges:
            each.died = 2 * len(self.ledger.moments) - 1

    def transient(self, node: str, made: LiveRange) -> None:
        """What an operator makes is dropped at once."""
        self.run(node, made)
        self.drop(made)

    def done(self, *unknown: tuple[str, str]) -> LifecyclePhase:
        """The phase."""
        self.run(f"{self.name} returned")
        return LifecyclePhase(self.name, self.ledger, unknown)


@dataclasses.dataclass
class _Item:
    """An entry of a state dict, as torch.distributed.checkpoint writes it from this rank.

    Attributes:
        name: its key.
        whole: bytes of the whole tensor; 1 of what is no tensor.
        local: bytes that this rank has of it; 0 of what is no tensor.
        storage: bytes of the storage that it is a view of.
        sharded: other ranks have other rows.
        host: it lies on the CPU while the program computes elsewhere.
    """

    name: str
    whole: int
    local: int
    storage: int
    sharded: bool
    host: bool = False


@dataclasses.dataclass
class _Tree:
    """The module tree beside the program.

    Attributes:
        program, config, model: see `lifecycle`.
        held: what the rank holds between phases, but the optimizer's state.
    """

    program: Program
    config: Config
    model: nn.Module
    held: list[LiveRange]

    @functools.cached_property
    def params(self) -> dict[str, Param]:
        """Every sharded parameter by each of its names."""
        return {name: p for p in self.program.params.values() for name in p.aliases}

    @functools.cached_property
    def shards(self) -> dict[str, LiveRange]:
        """What is held of each sharded parameter, by FQN."""
        named = {h.name: h for h in self.held if h.category is Category.SHARDED_PARAM}
        return {fqn: named[fqn] for fqn in self.program.params}

    @functools.cached_property
    def flats(self) -> dict[str, int]:
        """Bytes of the flat storage that each sharded parameter lies in, by FQN."""
        sizes: dict[tuple[int, torch.dtype], int] = {}
        for fqn, param in self.program.params.items():
            key = (param.unit, param.dtype)
            sizes[key] = sizes.get(key, 0) + self.shards[fqn].bytes
        return {fqn: sizes[p.unit, p.dtype] for fqn, p in self.program.params.items()}

    @property
    def device(self) -> torch.device:
        """Where the program computes, and sharded parameters get their data."""
        return torch.device(self.config.device or self.program.device)

    @property
    def elsewhere(self) -> bool:
        """The CPU is not where the program computes."""
        return self.device.type != "cpu"

    def local(self, param: Param) -> int:
        """Bytes of rank 0's rows, without padding."""
        shape = (len(param.rows(0, self.program.world_size)), *param.shape[1:])
        return nbytes(shape, param.dtype)

    def lies_on_host(self, tensor: Tensor) -> bool:
        """A tensor of the given model stays on the CPU while the program computes elsewhere."""
        return self.program.offloaded and self.elsewhere and tensor.device.type == "cpu"


def _own(module: nn.Module) -> dict[str, Tensor]:
    both: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _dense(tensor: Tensor) -> int:
    return nbytes(tuple(tensor.shape), tensor.dtype)


# -- init ------------------------------------------------------------------------------------------


def _given(tree: _Tree, phase: str) -> tuple[_Script, dict[int, list[LiveRange]], set[int]]:
    """The script of a phase with what the given model holds.

    Returns:
        the script; by id of a tensor, its ranges if it will be dropped; ids of ignored parameters.
    """
    script = _Script(phase, [h for h in tree.held if h.name in tree.program.constants])
    model, params, seen = tree.model, tree.params, set[int]()
    given: dict[int, list[LiveRange]] = {}
    ignored: set[int] = set()
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_buffer = not isinstance(tensor, nn.Parameter)
        if not is_buffer and fqn not in params:
            ignored.add(id(tensor))
        if tensor.is_meta:
            continue
        size = _dense(tensor)
        if not isinstance(tensor, DTensor):
            storage = tensor.untyped_storage()
            if storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            size = storage.nbytes()
        category = Category.BUFFER if is_buffer else Category.UNSHARDED_PARAM
        if id(tensor) in ignored:
            category = Category.SHARDED_PARAM
        host = tree.lies_on_host(tensor)
        range_ = LiveRange(0, fqn, "", fqn.rpartition(".")[0], category, size, host)
        given[id(tensor)] = [script.hold(range_)]
    return script, given, ignored


def _make_shards(tree: _Tree, script: _Script) -> None:
    """All flat storages come first (fxshard/sharding.py, ``_flat_shards``)."""
    for unit in tree.program.units:
        for dtype in dict.fromkeys(param.dtype for param in unit.params):
            made = [
                dataclasses.replace(tree.shards[p.fqn], op="aten.zeros")
                for p in unit.params
                if p.dtype is dtype
            ]
            script.run(f"shards of {unit.name}", *made, op="aten.zeros", module=unit.fqn)


def _expose(
    tree: _Tree, script: _Script, given: dict[int, list[LiveRange]], ignored: set[int]
) -> None:
    """The module tree gets its shards, the whole parameters go; buffers get their dtype."""
    for fqn, param in tree.program.params.items():
        _stand_in(tree, script, fqn, param)
    script.run("the model is sharded")
    for tensor in tree.model.parameters():
        if id(tensor) in given and id(tensor) not in ignored:
            script.drop(*given[id(tensor)])
    _cast_buffers(tree, script, given)


def _stand_in(tree: _Tree, script: _Script, fqn: str, param: Param) -> None:
    """One element that a DTensor is made of, before it gets its rows (`compat.stand_in`)."""
    shard = tree.shards[fqn]
    one = LiveRange(
        0, f"stand-in for {fqn}", "", shard.module, Category.TEMP, param.dtype.itemsize, shard.host
    )
    script.transient(one.name, one)


def _cast_buffers(tree: _Tree, script: _Script, given: dict[int, list[LiveRange]]) -> None:
    """To the dtype of their unit's policy, and with offload to where the program computes.

    The old ones go when all are cast (fxshard/module.py, ``_cast_buffers``).
    """
    buffers = dict(tree.model.named_buffers())
    dtypes = buffer_dtypes(tree.program.units, buffers)
    old: list[LiveRange] = []
    for name, buffer in buffers.items():
        before = given.get(id(buffer), [])
        moved = any(each.host for each in before)
        if name not in dtypes and not moved:
            continue
        size = nbytes(tuple(buffer.shape), dtypes.get(name, buffer.dtype))
        owner = name.rpartition(".")[0]
        cast = LiveRange(0, name, "aten._to_copy", owner, Category.BUFFER, size)
        script.run(f"cast {name}", cast, op=cast.op, module=owner)
        old += before
    script.drop(*old)


def _init(tree: _Tree) -> LifecyclePhase:
    """`fxshard.compile` on rank 0 (fxshard/sharding.py, fxshard/materialise.py)."""
    script, given, ignored = _given(tree, "init")
    _make_shards(tree, script)
    seen = set(ignored)
    unknown: list[tuple[str, str]] = []
    sync = tree.config.sync_module_states and tree.program.world_size * tree.program.replicas > 1
    for path, module in tree.model.named_modules():
        own = {n: t for n, t in _own(module).items() if id(t) not in seen}
        seen |= set(map(id, own.values()))
        made: dict[str, LiveRange] = {}
        if any(tensor.is_meta for tensor in own.values()):
            made, failed = _fill(tree, script, path, module, own)
            unknown += failed
        before: LiveRange | None = None
        for name, tensor in own.items():
            if sync and not tensor.is_contiguous() and not isinstance(tensor, DTensor):
                sent = LiveRange(
                    0, f"{_join(path, name)} to send", "", path, Category.TEMP, _dense(tensor)
                )
                script.transient("broadcast", sent)
            if before is not None:
                script.drop(before)
            before = made.get(name)
            if name in module._buffers and before is not None:
                given[id(tensor)] = [before]
                before = None
        if before is not None:
            script.drop(before)
    _expose(tree, script, given, ignored)
    return script.done(*unknown, *(_AGREEMENT if sync else ()))


_AGREEMENT = (
    (
        "messages between ranks",
        "pickled descriptions of the model, in buffers of torch.distributed: their size is that of "
        "names and shapes",
    ),
)


def _init_receiving(tree: _Tree) -> LifecyclePhase:
    """The same on a rank that gets rank 0's data: room for one parameter, and new buffers."""
    script, given, ignored = _given(tree, "init (receives)")
    _make_shards(tree, script)
    sizes = [_dense(p) for p in tree.model.parameters() if id(p) not in ignored]
    room = LiveRange(0, "room for a parameter", "", "", Category.TEMP, max(sizes, default=0))
    script.run("room", room, op="aten.empty")
    copies: list[LiveRange] = []
    for fqn, buffer in tree.model.named_buffers():
        owner = fqn.rpartition(".")[0]
        made = LiveRange(0, fqn, "aten.empty", owner, Category.BUFFER, _dense(buffer))
        script.run(f"receive {fqn}", made, op="aten.empty", module=owner)
        if buffer.is_meta or not buffer.is_contiguous():
            copies += given.get(id(buffer), [])
            given[id(buffer)] = [made]
        else:
            copies.append(made)
    script.drop(room)
    _expose(tree, script, given, ignored)
    script.drop(*copies)
    return script.done(*_AGREEMENT)


def _fill(
    tree: _Tree, script: _Script, path: str, module: nn.Module, own: dict[str, Tensor]
) -> tuple[dict[str, LiveRange], list[tuple[str, str]]]:
    """Fill the meta tensors of one module: what of it stays, by name, and what is unknown.

    All its own tensors are there for its initialisation, those with data as copies. What that
    allocates is recorded, on fake tensors.
    """
    copies: dict[int, LiveRange] = {}
    for name, tensor in _own(module).items():
        if id(tensor) not in copies:
            category = Category.BUFFER if name in module._buffers else Category.UNSHARDED_PARAM
            op = "aten.empty_like" if tensor.is_meta else "aten.clone"
            made = LiveRange(0, _join(path, name), op, path, category, _dense(tensor))
            script.run(f"{op} {made.name}", made, op=op, module=path)
            copies[id(tensor)] = made
    empty = [name for name, tensor in own.items() if tensor.is_meta]
    init = tree.config.param_init_fn
    said = "param_init_fn" if init else "reset_parameters"
    call: Callable[[], Any] = functools.partial(init, module) if init else _reset(module)
    alive: list[LiveRange] = list(copies.values())
    found = {name: copies[id(own[name])] for name in empty}
    unknown: list[tuple[str, str]] = []
    try:
        found = _record_fill(tree, script, path, module, empty, copies, call, alive)
    except Exception as error:  # whatever the user's function raises without data
        where = f"{said} of module {path or '(root)'!r}"
        unknown = [(f"temporaries of {where}", f"it fails without data: {error}")]
    script.drop(*(each for each in alive if not any(each is kept for kept in found.values())))
    return found, unknown


def _reset(module: nn.Module) -> Callable[[], Any]:
    return getattr(module, "reset_parameters", lambda: None)


def _record_fill(
    tree: _Tree,
    script: _Script,
    path: str,
    module: nn.Module,
    empty: Sequence[str],
    copies: dict[int, LiveRange],
    call: Callable[[], Any],
    alive: list[LiveRange],
) -> dict[str, LiveRange]:
    """Run an initialisation on fake tensors; what it makes is added to the script and `alive`."""
    device = tree.device if torch.accelerator.is_available() else torch.device("cpu")
    recorder = Recorder()
    ranges: dict[int, LiveRange] = {}
    with _put_back(module), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes: dict[int, Tensor] = {}
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in both:
            for name, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
                    number = recorder.know(fake.untyped_storage())
                    if number is not None:
                        ranges[number] = copies[id(tensor)]
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, tensor.requires_grad)
                    fakes[id(tensor)] = fake
                slots[name] = fakes[id(tensor)]
        with recorder, _swapped_as_set():
            call()
        events = recorder.events
        recorder.events = [Event("end", [], [])]
        left = {name: _own(module).get(name) for name in empty}
        numbers = {
            name: recorder.numbers.get(id(tensor.untyped_storage()))
            for name, tensor in left.items()
            if tensor is not None
        }
        del left
    for event in events:
        made = {
            number: LiveRange(
                0, f"temporary of {event.op}", event.op, path, Category.TEMP, size, False
            )
            for number, size in event.allocated
        }
        ranges |= made
        alive += made.values()
        script.run(event.op, *made.values(), op=event.op, module=path)
        gone = [ranges[number] for number in event.freed if number in ranges]
        script.drop(*gone)
        for each in gone:
            alive[:] = [other for other in alive if other is not each]
    return {name: ranges[number] for name, number in numbers.items() if number in ranges}


@contextlib.contextmanager
def _swapped_as_set() -> Iterator[None]:
    """Conversions of modules let the old data of a parameter go at once, as they do of real ones.

    Of a fake parameter they swap old and new, and hold the old one until the next is converted
    (torch/nn/modules/module.py, ``_apply``).
    """
    plain = torch.utils.swap_tensors

    def swap(kept: Tensor, other: Tensor) -> None:
        plain(kept, other)
        other.data = other.new_empty(0)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = plain


@contextlib.contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Give `module` and all below it their tensors again."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (slots, dict(slots))
        for below in module.modules()
        for slots in (below._parameters, below._buffers)
    ]
    try:
        yield
    finally:
        for slots, tensors in before:
            slots.clear()
            slots.update(tensors)


# -- load ------------------------------------------------------------------------------------------


def _load_state_dict(tree: _Tree) -> LifecyclePhase:
    """``load_state_dict`` of whole tensors.

    Each module's sharded parameters are replaced by copies of this rank's rows, which live until
    the modules below it are done (torch/nn/modules/module.py, ``load``; `fxshard.state`).
    """
    script = _Script("load_state_dict", tree.held)
    for item in _model_items(tree):
        given = LiveRange(
            0,
            f"given {item.name}",
            "",
            item.name.rpartition(".")[0],
            Category.INPUTS,
            item.whole,
            tree.elsewhere,
        )
        if item.name in tree.params and item.name != tree.params[item.name].fqn:
            continue  # tied: one tensor
        script.hold(given)
    script.drop(*_load_module(tree, script, tree.model, ""))
    return script.done()


def _load_module(tree: _Tree, script: _Script, module: nn.Module, path: str) -> list[LiveRange]:
    """Load a module and those below it; what is alive still when it is done."""
    alive: list[LiveRange] = []
    for name in module._parameters:
        param = tree.params.get(_join(path, name))
        if param is None or module._parameters[name] is None:
            continue
        shard = tree.shards[param.fqn]
        rows = LiveRange(
            0,
            f"rows of {param.fqn}",
            "aten.clone",
            path,
            Category.TEMP,
            tree.local(param),
            shard.host,
        )
        moved = dataclasses.replace(rows, op="aten._to_copy")
        moves = [moved] if tree.elsewhere and not shard.host else []
        for each in moves:
            script.run(f"move {rows.name}", each, op=each.op, module=path)
        script.run(rows.name, rows, op=rows.op, module=path)
        script.drop(*moves)
        alive.append(rows)
    below: list[LiveRange] = []
    for name, child in module._modules.items():
        if child is not None:
            script.drop(*below)
            below = _load_module(tree, script, child, _join(path, name))
    return alive + below


def _new_state(script: _Script, tree: _Tree, new: OptimizerStep) -> list[LiveRange]:
    """A step of a new optimizer on gradients of zeros, which makes its state.

    (torch/distributed/checkpoint/state_dict.py, ``_init_optim_state``)
    """
    host = tree.program.offloaded
    everything = [*tree.program.params.items(), *tree.program.wholes.items()]
    grads: list[LiveRange] = []
    for fqn, param in sorted(everything, key=lambda item: item[1].position):
        if param.requires_grad:
            size = tree.local(param)
            if fqn in tree.program.wholes:
                size = nbytes(param.shape, param.dtype)
            owner = fqn.rpartition(".")[0]
            grad = LiveRange(
                0, f"gradient of {fqn}", "aten.zeros_like", owner, Category.SHARDED_GRAD, size, host
            )
            script.run(f"zeros for {fqn}", grad, op=grad.op, module=owner)
            grads.append(grad)
    ranges: dict[int, LiveRange] = {}
    for event in new.first:
        made = []
        for number, size in event.allocated:
            name, owner = new.names.get(number, (f"temporary of {event.op}", OPTIMIZER))
            category = Category.OPT_STATE if number in new.state else Category.TEMP
            ranges[number] = LiveRange(0, name, event.op, owner, category, size, host)
            made.append(ranges[number])
        script.run(event.op, *made, op=event.op, module=OPTIMIZER)
        script.drop(*(ranges.pop(number) for number in event.freed if number in ranges))
    script.run("zero_grad", module=OPTIMIZER)
    script.drop(*grads)
    script.drop(*(each for number, each in ranges.items() if number not in new.held))
    return [each for number, each in ranges.items() if number in new.held]


def _load_checkpoint(tree: _Tree, new: OptimizerStep | None) -> LifecyclePhase:
    """`fxshard.load_checkpoint`, of as many ranks as have saved it.

    One tensor of the file is read at a time, as it was saved, onto the CPU, and copied; it lives
    until the next one is there (torch/distributed/checkpoint/filesystem.py, ``read_data``).
    """
    script = _Script("load_checkpoint", tree.held)
    items = _model_items(tree)
    for item in items:
        _detached(tree, script, item)
    unknown = [*_MESSAGES]
    if new is not None:
        if new.initial:
            for each in _state_held(tree, new):
                script.hold(each)
        else:
            _new_state(script, tree, new)
        state, why = _optimizer_items(tree, new)
        items += state
        unknown += why
    files = _written_by(tree, items)
    by_file: dict[int, list[_Item]] = {}
    for item, rank in zip(items, files, strict=True):
        by_file.setdefault(rank, []).append(item)
    before: LiveRange | None = None
    for item in (item for each in by_file.values() for item in each if item.storage):
        size = item.local if item.sharded else item.whole
        read = LiveRange(0, f"{item.name} of the file", "", "", Category.TEMP, size, tree.elsewhere)
        script.run(f"read {item.name}", read)
        if before is not None:
            script.drop(before)
        before = read
    script.run("all read")
    if before is not None:
        script.drop(before)
    return script.done(*unknown)


_MESSAGES = (
    (
        "plans of torch.distributed.checkpoint",
        "pickled, in buffers of torch.distributed, before the data and behind it: their size is "
        "that of names and shapes",
    ),
    (
        "buffers of Python's and of the operating system's files",
        "they are not allocated by torch",
    ),
)


# -- save ------------------------------------------------------------------------------------------


def _state_held(tree: _Tree, step: OptimizerStep | None) -> list[LiveRange]:
    """The optimizer's state between two steps."""
    if step is None:
        return []
    return [
        LiveRange(
            0, *_named(step, number), Category.OPT_STATE, step.state[number], tree.program.offloaded
        )
        for number in step.held
    ]


def _named(step: OptimizerStep, number: int) -> tuple[str, str, str]:
    name, owner = step.names[number]
    return name, "", owner


def _save_checkpoint(
    tree: _Tree, step: OptimizerStep | None, new: OptimizerStep | None
) -> LifecyclePhase:
    """`fxshard.save_checkpoint`: what this rank writes is copied, and held until all is written.

    On the CPU only what does not have a storage of its own is copied; parameters lie in that of
    their unit. The tensors of a file are collected while it is written, for another format than
    the one that is used (torch/distributed/checkpoint/filesystem.py, ``_write_files_from_queue``,
    ``tensor_dict``).
    """
    script = _Script("save_checkpoint", [*tree.held, *_state_held(tree, step)])
    items = _model_items(tree)
    for item in items:
        _detached(tree, script, item)
    unknown = [*_MESSAGES]
    if step is not None:
        if new is not None and not step.has_state:
            _new_state(script, tree, new)  # each time: it finds no state and no gradients
        state, why = _optimizer_items(tree, step)
        items += state
        unknown += why
    copies: list[LiveRange] = []
    for item, rank in zip(items, _written_by(tree, items), strict=True):
        moves = tree.elsewhere and not item.host
        if rank or not item.storage or (item.storage == item.local and not moves):
            continue
        copy = LiveRange(
            0,
            f"copy of {item.name}",
            "aten._to_copy" if moves else "aten.clone",
            item.name.rpartition(".")[0],
            Category.TEMP,
            item.local,
            tree.elsewhere,
        )
        script.run(f"write {item.name}", copy, op=copy.op, module=copy.module)
        copies.append(copy)
    script.run("all written")
    script.drop(*copies)
    return script.done(*unknown)


def _full_state_dict(tree: _Tree, step: OptimizerStep | None, *, alone: bool) -> LifecyclePhase:
    """`ShardedModule.full_state_dict`: each parameter is gathered into a padded tensor.

    `alone`: on the CPU, and on rank 0 only, the default. Its result is held by the caller at the
    end. (torch/distributed/_state_dict_utils.py, ``_gather_state_dict``)
    """
    name = "full_state_dict" if alone else "full_state_dict (every rank)"
    script = _Script(name, [*tree.held, *_state_held(tree, step)])
    items = _model_items(tree)
    for item in items:
        _detached(tree, script, item)
    world = tree.program.world_size
    gathered: dict[str, LiveRange] = {}
    for item in items:
        owner = item.name.rpartition(".")[0]
        whole: list[LiveRange] = []
        if item.sharded:
            param = tree.params[item.name]
            if tree.elsewhere and item.host:
                moved = LiveRange(
                    0, f"rows of {item.name}", "aten._to_copy", owner, Category.TEMP, item.local
                )
                whole.append(moved)
                script.run(f"move {item.name}", moved, op=moved.op, module=owner)
            if world > 1:
                size = world * nbytes(param.chunk(world), param.dtype)
                full = LiveRange(0, item.name, "all_gather", owner, Category.UNSHARDED_PARAM, size)
                script.run(f"gather {item.name}", full, op=full.op, module=owner)
                script.drop(*whole)
                whole = [full]
        if alone and tree.elsewhere and not (item.host and not item.sharded):
            copy = LiveRange(
                0,
                f"{item.name} on the CPU",
                "aten._to_copy",
                owner,
                Category.UNSHARDED_PARAM,
                item.whole,
                True,
            )
            script.run(f"offload {item.name}", copy, op=copy.op, module=owner)
            script.drop(*whole)
        for each in whole:
            gathered[item.name] = each
    return script.done()


def _detached(tree: _Tree, script: _Script, item: _Item) -> None:
    """An entry of ``state_dict``: a view, but see `fxshard.state`, ``_make_savable``."""
    if item.sharded and _offset(tree, tree.params[item.name]):
        _stand_in(tree, script, tree.params[item.name].fqn, tree.params[item.name])


def _offset(tree: _Tree, param: Param) -> bool:
    """True if others come before it in its flat storage."""
    first = next(
        p
        for p in tree.program.params.values()
        if (p.unit, p.dtype) == (param.unit, param.dtype) and tree.shards[p.fqn].bytes
    )
    return first.fqn != param.fqn


def _model_items(tree: _Tree) -> list[_Item]:
    """The entries of the model's state dict, in its order (tied parameters under each name)."""
    items: list[_Item] = []

    def walk(module: nn.Module, path: str) -> None:
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            fqn = _join(path, name)
            if fqn in tree.params:
                param = tree.params[fqn]
                host = tree.program.offloaded and tree.elsewhere
                local = tree.local(param)
                whole = nbytes(param.shape, param.dtype)
                items.append(_Item(fqn, whole, local, tree.flats[param.fqn], True, host))
            else:
                items.append(_plain(tree, fqn, tensor))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                items.append(_plain(tree, _join(path, name), buffer))
        for name, child in module._modules.items():
            if child is not None:
                walk(child, _join(path, name))

    walk(tree.model, "")
    return items


def _plain(tree: _Tree, fqn: str, tensor: Tensor) -> _Item:
    """A buffer, or an ignored parameter."""
    units = tree.program.units
    dtype = buffer_dtypes(units, {fqn: tensor}).get(fqn, tensor.dtype)
    size = nbytes(tuple(tensor.shape), dtype)
    same = dtype is tensor.dtype and not tensor.is_meta
    return _Item(fqn, size, size, tensor.untyped_storage().nbytes() if same else size, False)


def _optimizer_items(tree: _Tree, step: OptimizerStep) -> tuple[list[_Item], list[tuple[str, str]]]:
    """The tensors of the optimizer's state, parameter by parameter; and what is unknown."""
    items: list[_Item] = []
    unknown: list[tuple[str, str]] = []
    host = tree.program.offloaded and tree.elsewhere
    for number in step.held:
        name, _ = step.names[number]
        key, _, fqn = name.partition(" of ")
        size, shape = step.state[number], step.shapes[number]
        param = tree.program.params.get(fqn)
        rows = len(param.rows(0, tree.program.world_size)) if param else 0
        if param is not None and shape == (rows, *param.shape[1:]) and shape:
            whole = size // max(1, math.prod(shape)) * math.prod(param.shape)
            items.append(_Item(f"{fqn}.{key}", whole, size, size, True, host))
        else:
            items.append(_Item(f"{fqn}.{key}", size, size, size, False, host or not shape))
            if shape and param is not None:
                why = (
                    "its shape is not its parameter's: how it is sharded is the optimizer's choice"
                )
                unknown.append((f"state {name}", why))
    return items, unknown


def _written_by(tree: _Tree, items: Sequence[_Item]) -> list[int]:
    """The rank that writes each item, of those that hold the same.

    The one with the least to write so far; rank 0's items are dealt out first, so that only they
    matter (torch/distributed/checkpoint/_dedup_save_plans.py).
    """
    shards, replicas = tree.program.world_size, tree.program.replicas
    planned = [0] * (shards * replicas)
    found: list[int] = []
    for item in items:
        step = shards if item.sharded else 1
        rank = min(range(0, len(planned), step), key=planned.__getitem__)
        planned[rank] += item.whole or 1
        found.append(rank)
    return found
