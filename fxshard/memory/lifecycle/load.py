"""Loading: full state dicts, and checkpoints by torch.distributed.checkpoint."""

from __future__ import annotations

import functools

from torch import nn

from fxshard.capture.modules import join
from fxshard.memory.category import Category
from fxshard.memory.ledger import LiveRange, owner_of
from fxshard.memory.lifecycle.save import (
    detached,
    model_items,
    new_state,
    optimizer_items,
    state_held,
    written_by,
)
from fxshard.memory.lifecycle.script import LifecyclePhase, Script
from fxshard.memory.lifecycle.tree import MESSAGES, ModuleTree, StateDictEntry
from fxshard.memory.optimizer_step import OptimizerStep


def load_state_dict(tree: ModuleTree) -> LifecyclePhase:
    """``load_state_dict`` of full tensors.

    Each module's sharded parameters are replaced by copies of this rank's rows, which live until
    the modules below it are done (torch/nn/modules/module.py, ``load``; `fxshard.runtime.state`).
    """
    script = Script("load_state_dict", tree.held)
    for item in model_items(tree):
        if item.name in tree.params and item.name != tree.params[item.name].fqn:
            continue  # tied: one tensor
        name, owner = f"given {item.name}", owner_of(item.name)
        script.hold(LiveRange(0, name, "", owner, Category.INPUTS, item.full, tree.elsewhere))
    script.drop(*_load_module(tree, script, tree.model, ""))
    return script.done()


def _load_module(tree: ModuleTree, script: Script, module: nn.Module, path: str) -> list[LiveRange]:
    """Load a module and those below it; what is alive still when it is done."""
    alive: list[LiveRange] = []
    for name in module._parameters:
        param = tree.params.get(join(path, name))
        if param is None or module._parameters[name] is None:
            continue
        shard, rows = tree.shards[param.fqn], f"rows of {param.fqn}"
        size = tree.program.layouts[param.fqn].local_bytes
        make = functools.partial(
            script.make, name=rows, category=Category.TEMP, size=size, module=path
        )
        moved = []
        if tree.elsewhere and not shard.host:
            moved.append(make(f"move {rows}", op="aten._to_copy"))
        alive.append(make(rows, op="aten.clone", host=shard.host))
        script.drop(*moved)
    below: list[LiveRange] = []
    for name, child in module._modules.items():
        if child is not None:
            script.drop(*below)
            below = _load_module(tree, script, child, join(path, name))
    return alive + below


def load_checkpoint(
    tree: ModuleTree, step: OptimizerStep | None, new: OptimizerStep | None
) -> LifecyclePhase:
    """`fxshard.load_checkpoint`, of as many ranks as have saved it after a step.

    A step of the optimizer makes state to load into, also that of parameters which had none when
    it was saved; that is dropped at the end. One tensor of the file is read at a time, as it was
    saved, onto the CPU, and copied; it lives until the next one is there
    (torch/distributed/checkpoint/filesystem.py, ``read_data``).
    """
    script = Script("load_checkpoint", tree.held)
    items = model_items(tree)
    for item in items:
        detached(tree, script, item)
    unknown = [*MESSAGES]
    made: list[LiveRange] = []
    if step is not None and new is not None:
        if step.initial:
            for each in state_held(tree, step):
                script.hold(each)
        elif step.has_state:
            made = new_state(script, tree, new)
        state, why = optimizer_items(tree, step)
        items += state
        unknown += why
    files = written_by(tree, items)
    by_file: dict[int, list[StateDictEntry]] = {}
    for item, rank in zip(items, files, strict=True):
        by_file.setdefault(rank, []).append(item)
    before: list[LiveRange] = []
    for item in (item for each in by_file.values() for item in each if item.storage):
        size, name = item.local if item.sharded else item.full, f"{item.name} of the file"
        read = script.make(f"read {item.name}", name, Category.TEMP, size, host=tree.elsewhere)
        script.drop(*before)
        before = [read]
    script.run("all read")
    script.drop(*before)
    saved = {step.state[number].name for number in step.held} if step is not None else set()
    script.drop(*(each for each in made if each.name not in saved))
    return script.done(*unknown)
