"""`fxshard.compile`: what the sharded model is made from, and what is dropped on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard._torch.storages import storage_id
from fxshard.capture.modules import join, own_tensors, put_back
from fxshard.ir.program import nbytes
from fxshard.ir.units import Param, buffer_dtypes
from fxshard.memory.category import Category
from fxshard.memory.ledger import LiveRange, owner_of
from fxshard.memory.lifecycle.script import LifecyclePhase, Script
from fxshard.memory.lifecycle.tree import Filled, ModuleTree, dense
from fxshard.memory.recording import OperatorEvent, Recorder


def _given(tree: ModuleTree, phase: str) -> tuple[Script, dict[int, list[LiveRange]], set[int]]:
    """The script of a phase with what the given model holds.

    Returns:
        the script; by id of a tensor, its ranges if it will be dropped; ids of ignored parameters.
    """
    script = Script(phase, [h for h in tree.held if h.name in tree.program.constants])
    model, params, seen = tree.model, tree.params, set[int]()
    given: dict[int, list[LiveRange]] = {}
    ignored: set[int] = set()
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_buffer = not isinstance(tensor, nn.Parameter)
        if not is_buffer and fqn not in params:
            ignored.add(id(tensor))
        if tensor.is_meta:
            continue
        size = dense(tensor)
        if not isinstance(tensor, DTensor):
            storage = tensor.untyped_storage()
            if storage_id(storage) in seen:
                continue
            seen.add(storage_id(storage))
            size = storage.nbytes()
        category = Category.BUFFER if is_buffer else Category.UNSHARDED_PARAM
        if id(tensor) in ignored:
            category = Category.SHARDED_PARAM
        host = tree.lies_on_host(tensor)
        range_ = LiveRange(0, fqn, "", owner_of(fqn), category, size, host)
        given[id(tensor)] = [script.hold(range_)]
    return script, given, ignored


def _make_shards(tree: ModuleTree, script: Script) -> None:
    """All flat storages come first (fxshard/runtime/sharding.py, ``_flat_shards``)."""
    for unit in tree.program.units:
        for dtype in dict.fromkeys(param.dtype for param in unit.params):
            made = [
                dataclasses.replace(tree.shards[p.fqn], op="aten.zeros")
                for p in unit.params
                if p.dtype is dtype
            ]
            script.run(f"shards of {unit.name}", *made, op="aten.zeros", module=unit.fqn)


def _expose(
    tree: ModuleTree, script: Script, given: dict[int, list[LiveRange]], ignored: set[int]
) -> None:
    """The module tree gets its shards, buffers get their dtype; what was there before goes.

    Until then a failure could still put it back (`fxshard.runtime.module.unchanged_on_error`).
    """
    for param in tree.program.params.values():
        stand_in(tree, script, param)
    script.run("the model is sharded")
    old = _cast_buffers(tree, script, given)
    for tensor in tree.model.parameters():
        if id(tensor) in given and id(tensor) not in ignored:
            old += given[id(tensor)]
    script.drop(*old)


def stand_in(tree: ModuleTree, script: Script, param: Param) -> None:
    """One element that a DTensor is made of, before it gets its rows (`dtensors.stand_in`)."""
    shard, name = tree.shards[param.fqn], f"stand-in for {param.fqn}"
    one = LiveRange(0, name, "", shard.module, Category.TEMP, param.dtype.itemsize, shard.host)
    script.run(name, one)
    script.drop(one)


def _cast_buffers(
    tree: ModuleTree, script: Script, given: dict[int, list[LiveRange]]
) -> list[LiveRange]:
    """To the dtype of their unit's policy, and with offload to where the program computes.

    Returns the old ones, which go later (fxshard/runtime/store/parameters.py, ``_cast_buffers``).
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
        cast = f"cast {name}", name, Category.BUFFER, size
        script.make(*cast, op="aten._to_copy", module=owner_of(name))
        old += before
    return old


def init(tree: ModuleTree) -> LifecyclePhase:
    """`fxshard.compile` on rank 0 (fxshard/runtime/sharding.py, fxshard/runtime/initialise.py)."""
    script, given, ignored = _given(tree, "init")
    _make_shards(tree, script)
    seen = set(ignored)
    unknown: list[tuple[str, str]] = []
    sync = tree.config.sync_module_states and tree.program.world_size * tree.program.replicas > 1
    for path, module in tree.model.named_modules():
        own = {n: t for n, t in own_tensors(module).items() if id(t) not in seen}
        seen |= set(map(id, own.values()))
        made: dict[str, LiveRange] = {}
        if any(tensor.is_meta for tensor in own.values()):
            made, failed = _fill(tree, script, path, module, own)
            unknown += failed
        before: list[LiveRange] = []
        for name, tensor in own.items():
            if sync and not tensor.is_contiguous() and not isinstance(tensor, DTensor):
                sent = f"{join(path, name)} to send"
                one = LiveRange(0, sent, "", path, Category.TEMP, dense(tensor))
                script.run("broadcast", one)
                script.drop(one)
            script.drop(*before)
            before = [made[name]] if name in made else []
            if name in module._buffers and before:
                given[id(tensor)], before = before, []
        script.drop(*before)
    _expose(tree, script, given, ignored)
    return script.done(*unknown, *(_AGREEMENT if sync else ()))


_AGREEMENT = (
    (
        "messages between ranks",
        "pickled descriptions of the model, in buffers of torch.distributed: their size is that of "
        "names and shapes",
    ),
)


def init_receiving(tree: ModuleTree) -> LifecyclePhase:
    """The same on a rank that gets rank 0's data: room for one parameter, and new buffers."""
    script, given, ignored = _given(tree, "init (receives)")
    _make_shards(tree, script)
    sizes = [dense(p) for p in tree.model.parameters() if id(p) not in ignored]
    room = LiveRange(0, "room for a parameter", "", "", Category.TEMP, max(sizes, default=0))
    script.run("room", room, op="aten.empty")
    copies: list[LiveRange] = []
    for fqn, buffer in tree.model.named_buffers():
        received = f"receive {fqn}", fqn, Category.BUFFER, dense(buffer)
        made = script.make(*received, op="aten.empty", module=owner_of(fqn))
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
    tree: ModuleTree, script: Script, path: str, module: nn.Module, own: dict[str, Tensor]
) -> tuple[dict[str, LiveRange], list[tuple[str, str]]]:
    """Fill the meta tensors of one module: what of it stays, by name, and what is unknown.

    All its own tensors are there for its initialisation, those with data as copies. What that
    allocates is recorded, on fake tensors.
    """
    copies: dict[int, LiveRange] = {}
    for name, tensor in own_tensors(module).items():
        if id(tensor) not in copies:
            category = Category.BUFFER if name in module._buffers else Category.UNSHARDED_PARAM
            op = "aten.empty_like" if tensor.is_meta else "aten.clone"
            fqn = join(path, name)
            copies[id(tensor)] = script.make(
                f"{op} {fqn}", fqn, category, dense(tensor), op=op, module=path
            )
    empty = [name for name, tensor in own.items() if tensor.is_meta]
    kept = {name: copies[id(own[name])] for name in empty}
    ranges: dict[int, LiveRange] = {}
    unknown: list[tuple[str, str]] = []
    try:
        filled = _filled(tree, module, empty)
    except Exception as error:  # whatever the user's function raises without data
        function = "param_init_fn" if tree.config.param_init_fn else "reset_parameters"
        where = f"{function} of module {path or '(root)'!r}"
        unknown = [(f"temporaries of {where}", f"it fails without data: {error}")]
    else:
        slots = {**module._parameters, **module._buffers}
        ranges |= {number: copies[id(slots[name])] for name, number in filled.given}

        def temporary(op: str, number: int, size: int) -> LiveRange:
            return LiveRange(0, f"temporary of {op}", op, path, Category.TEMP, size)

        script.replay(filled.events, temporary, ranges, path)
        kept = {name: ranges[number] for name, number in filled.left if number in ranges}
    stay = set(map(id, kept.values()))
    made = {id(each): each for each in (*copies.values(), *ranges.values())}
    script.drop(*(each for each in made.values() if each.died is None and id(each) not in stay))
    return kept, unknown


def _filled(tree: ModuleTree, module: nn.Module, empty: Sequence[str]) -> Filled:
    """What an initialisation on fake tensors does: recorded, or known of a module of its kind."""
    init = tree.config.param_init_fn
    key = _kind(module, init)
    if key is not None and key in tree.filled:
        return tree.filled[key]
    reset = getattr(module, "reset_parameters", lambda: None)
    filled = _recorded(tree, module, empty, functools.partial(init, module) if init else reset)
    if key is not None:
        tree.filled[key] = filled
    return filled


def _recorded(
    tree: ModuleTree, module: nn.Module, empty: Sequence[str], call: Callable[[], Any]
) -> Filled:
    device = tree.device if torch.accelerator.is_available() else torch.device("cpu")
    recorder = Recorder()
    given: list[tuple[str, int]] = []
    with put_back(module), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes: dict[int, Tensor] = {}
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        real = [(slots, dict(slots)) for slots in both]
        for slots in both:
            for name, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
                    number = recorder.know(fake.untyped_storage())
                    if number is not None:
                        given.append((name, number))
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, tensor.requires_grad)
                    fakes[id(tensor)] = fake
                slots[name] = fakes[id(tensor)]
        with recorder, _swapped_as_set():
            call()
            # Operators that write have an underscore: aten.normal_.default.
            if tree.config.param_init_fn and not any("_." in e.op for e in recorder.events):
                # It looks for the meta device, and is called again.
                for slots, tensors in real:
                    slots.update({n: t for n, t in tensors.items() if t is None or t.is_meta})
                call()
        events = recorder.events
        recorder.events = [OperatorEvent("end", [], [])]
        left = {name: own_tensors(module).get(name) for name in empty}
        numbers = {
            name: recorder.numbers.get(id(tensor.untyped_storage()))
            for name, tensor in left.items()
            if tensor is not None
        }
        del left
    return Filled(events, tuple(given), tuple((n, i) for n, i in numbers.items() if i is not None))


def _kind(module: nn.Module, init: Any) -> Any:
    """Equal for modules that are filled by the same operators; None where that is not known.

    What has no ``reset_parameters`` runs none; torch's own modules look at their tensors and their
    plain attributes. A user's function may look at anything.
    """
    ready = getattr(module, "reset_parameters", None)
    own = ready is None or (
        type(module).__module__.startswith("torch.nn.modules.")
        and "reset_parameters" not in module.__dict__
        and not module._modules
    )
    if init is not None or not own:
        return None
    plain = [(n, v) for n, v in module.__dict__.items() if not isinstance(v, (dict, set))]
    if ready is not None and not all(_is_plain(v) for _, v in plain):
        return None
    numbers: dict[int, int] = {}
    tensors = tuple(
        (name, t if t is None else (numbers.setdefault(id(t), len(numbers)), *_shaped(t)))
        for slots in (module._parameters, module._buffers)
        for name, t in slots.items()
    )
    return type(module), ready is None or tuple(plain), tensors


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, (int, float, str, type(None), torch.device, torch.dtype))


def _shaped(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.is_meta


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
