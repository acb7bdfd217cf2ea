"""Saving: checkpoints by torch.distributed.checkpoint, and full state dicts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fxshard.capture.modules import join
from fxshard.capture.swapped import STATE
from fxshard.ir.program import nbytes
from fxshard.ir.units import buffer_dtypes
from fxshard.memory.category import Category
from fxshard.memory.ledger import OPTIMIZER, LiveRange, owner_of
from fxshard.memory.lifecycle.init import stand_in
from fxshard.memory.lifecycle.script import LifecyclePhase, Script
from fxshard.memory.lifecycle.tree import MESSAGES, ModuleTree, StateDictEntry
from fxshard.memory.optimizer_step import OptimizerStep


def state_held(tree: ModuleTree, step: OptimizerStep | None) -> list[LiveRange]:
    """The optimizer's state between two steps."""
    if step is None:
        return []
    host = tree.program.offloaded
    return [step.range_of("", n, step.state[n].bytes, host=host) for n in step.held]


def save_checkpoint(tree: ModuleTree, step: OptimizerStep | None) -> LifecyclePhase:
    """`fxshard.save_checkpoint`: what this rank writes is copied, and held until all is written.

    On the CPU only what does not have a storage of its own is copied; parameters lie in that of
    their unit. The tensors of a file are collected while it is written, for another format than
    the one that is used (torch/distributed/checkpoint/filesystem.py, ``_write_files_from_queue``,
    ``tensor_dict``).
    """
    script, items, unknown = _begun("save_checkpoint", tree, step)
    copies: list[LiveRange] = []
    for item, rank in zip(items, written_by(tree, items), strict=True):
        moves = tree.elsewhere and not item.host
        if rank or not item.storage or (item.storage == item.local and not moves):
            continue
        copies.append(_copied("write", tree, script, item))
    script.run("all written")
    script.drop(*copies)
    return script.done(*unknown)


def async_save(tree: ModuleTree, step: OptimizerStep | None) -> LifecyclePhase:
    """`fxshard.async_save` until it returns: all that the rank has is copied to the CPU's memory.

    The copies are there at the end, until the thread has written them; it makes no others, as each
    has a storage of its own. Steps that run meanwhile hold so much more
    (fxshard/runtime/checkpoint/background.py, ``staged``).
    """
    script, items, unknown = _begun("async_save", tree, step)
    for item in items:
        if item.storage:
            _copied("stage", tree, script, item)
    return script.done(*unknown)


def _begun(
    name: str, tree: ModuleTree, step: OptimizerStep | None
) -> tuple[Script, list[StateDictEntry], list[tuple[str, str]]]:
    """The phase as it begins, what it saves, and what of that is not known."""
    script = Script(name, [*tree.held, *state_held(tree, step)])
    items = model_items(tree)
    for item in items:
        detached(tree, script, item)
    unknown = [*MESSAGES]
    if step is not None:
        state, why = optimizer_items(tree, step)
        items += state
        unknown += why
    return script, items, unknown


def _copied(what: str, tree: ModuleTree, script: Script, item: StateDictEntry) -> LiveRange:
    return script.make(
        *(f"{what} {item.name}", f"copy of {item.name}", Category.TEMP, item.local),
        op="aten._to_copy" if tree.elsewhere and not item.host else "aten.clone",
        module=owner_of(item.name),
        host=tree.elsewhere,
    )


def full_state_dict(tree: ModuleTree, step: OptimizerStep | None, *, alone: bool) -> LifecyclePhase:
    """`FxshardModule.full_state_dict`: each parameter is gathered into a padded tensor.

    `alone`: on the CPU, and on rank 0 only, the default. Its result is held by the caller at the
    end. (torch/distributed/_state_dict_utils.py, ``_gather_state_dict``)
    """
    name = "full_state_dict" if alone else "full_state_dict (every rank)"
    script = Script(name, [*tree.held, *state_held(tree, step)])
    items = model_items(tree)
    for item in items:
        detached(tree, script, item)
    for item in items:
        name, owner = item.name, owner_of(item.name)
        held: list[LiveRange] = []
        if item.sharded:
            param = tree.params[name]
            if tree.elsewhere and item.host:
                rows = f"rows of {name}", Category.TEMP, item.local
                held.append(script.make(f"move {name}", *rows, op="aten._to_copy", module=owner))
            if tree.program.grid(param.fqn).shards > 1:
                layout = tree.program.layouts[param.fqn]
                full = name, Category.UNSHARDED_PARAM, layout.padded_bytes
                made = script.make(f"gather {name}", *full, op="all_gather", module=owner)
                script.drop(*held)
                held = [made]
                if layout.dim:  # copied into place
                    joined = name, Category.UNSHARDED_PARAM, item.full
                    made = script.make(f"join {name}", *joined, op="aten.copy_", module=owner)
                    script.drop(*held)
                    held = [made]
        if alone and tree.elsewhere and not (item.host and not item.sharded):
            copy = f"{name} on the CPU", Category.UNSHARDED_PARAM, item.full
            made = script.make(
                f"offload {name}", *copy, op="aten._to_copy", module=owner, host=True
            )
            script.drop(*held)
            held = [made]
        if item.stored:  # a buffer that was cast
            host = alone and tree.elsewhere
            copy = f"{name} as it was", Category.UNSHARDED_PARAM, item.stored
            script.make(f"cast {name}", *copy, op="aten._to_copy", module=owner, host=host)
            script.drop(*held)
    return script.done()


def detached(tree: ModuleTree, script: Script, item: StateDictEntry) -> None:
    """An entry of ``state_dict``: a view, but see `fxshard.runtime.state`, ``_make_savable``."""
    if item.sharded and tree.program.layouts[tree.params[item.name].fqn].offset:
        stand_in(tree, script, tree.params[item.name])


def model_items(tree: ModuleTree) -> list[StateDictEntry]:
    """The entries of the model's state dict, in its order (tied parameters under each name)."""
    items: list[StateDictEntry] = []

    def walk(module: nn.Module, path: str) -> None:
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            fqn = join(path, name)
            if fqn in tree.params:
                param = tree.params[fqn]
                host = tree.program.offloaded and tree.elsewhere
                local = tree.program.layouts[param.fqn].local_bytes
                full = nbytes(param.shape, param.dtype)
                shards = tree.program.grid(param.fqn).shards
                sizes = full, local, tree.flats[param.fqn]
                items.append(StateDictEntry(fqn, *sizes, True, host, shards=shards))
            else:
                items.append(_plain(tree, fqn, tensor))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                items.append(_plain(tree, join(path, name), buffer))
        for name, child in module._modules.items():
            if child is not None:
                walk(child, join(path, name))

    walk(tree.model, "")
    return items


def _plain(tree: ModuleTree, fqn: str, tensor: Tensor) -> StateDictEntry:
    """A buffer, or an ignored parameter."""
    units = tree.program.units
    dtype = buffer_dtypes(units, {fqn: tensor}).get(fqn, tensor.dtype)
    size = nbytes(tuple(tensor.shape), dtype)
    same = dtype is tensor.dtype and not tensor.is_meta
    storage = tensor.untyped_storage().nbytes() if same else size
    sharded: Any = vars(tree.model).get(STATE)  # the runtime, which knows what it has cast
    had = sharded.stored_dtypes.get(fqn, dtype) if sharded else tensor.dtype
    stored = nbytes(tuple(tensor.shape), had) if had is not dtype else 0
    return StateDictEntry(fqn, size, size, storage, False, stored=stored)


def optimizer_items(
    tree: ModuleTree, step: OptimizerStep
) -> tuple[list[StateDictEntry], list[tuple[str, str]]]:
    """The tensors of the optimizer's state, parameter by parameter; and what is unknown."""
    items: list[StateDictEntry] = []
    unknown: list[tuple[str, str]] = []
    host = tree.program.offloaded and tree.elsewhere
    for number in step.held:
        size, key, fqn, shape = state = step.state[number]
        param = tree.program.params.get(fqn)
        layout = tree.program.layouts.get(fqn)
        if param is not None and layout and shape and shape == layout.local_shape():
            full = layout.full_bytes(size)
            shards = tree.program.grid(param.fqn).shards
            items.append(
                StateDictEntry(f"{fqn}.{key}", full, size, size, True, host, shards=shards)
            )
        else:
            items.append(StateDictEntry(f"{fqn}.{key}", size, size, size, False, host or not shape))
            if shape and param is not None:
                why = (
                    "its shape is not its parameter's: how it is sharded is the optimizer's choice"
                )
                unknown.append((f"state {state.name}", why))
    return items, unknown


def written_by(tree: ModuleTree, items: Sequence[StateDictEntry]) -> list[int]:
    """The rank that writes each item, of those that hold the same.

    The one with the least to write so far; rank 0's items are dealt out first, so that only they
    matter (torch/distributed/checkpoint/_dedup_save_plans.py).
    """
    planned = [0] * max(grid.ranks for grid in tree.program.grids.values())
    found: list[int] = []
    for item in items:
        rank = min(range(0, len(planned), item.shards), key=planned.__getitem__)
        planned[rank] += item.full or 1
        found.append(rank)
    return found


def new_state(script: Script, tree: ModuleTree, new: OptimizerStep) -> list[LiveRange]:
    """A step of a new optimizer on gradients of zeros, which makes its state.

    (torch/distributed/checkpoint/state_dict.py, ``_init_optim_state``)
    """
    host = tree.program.offloaded
    everything = [*tree.program.params.items(), *tree.program.ignored.items()]
    grads: list[LiveRange] = []
    for fqn, param in sorted(everything, key=lambda item: item[1].position):
        if param.requires_grad:
            size = tree.program.layouts[fqn].local_bytes
            zeros = f"gradient of {fqn}", Category.SHARDED_GRAD, size
            where: Any = {"op": "aten.zeros_like", "module": owner_of(fqn), "host": host}
            grads.append(script.make(f"zeros for {fqn}", *zeros, **where))
    ranges: dict[int, LiveRange] = {}
    script.replay(new.first, functools.partial(new.range_of, host=host), ranges, OPTIMIZER)
    script.run("zero_grad", module=OPTIMIZER)
    script.drop(*grads)
    script.drop(*(each for number, each in ranges.items() if number not in new.held))
    return [each for number, each in ranges.items() if number in new.held]
