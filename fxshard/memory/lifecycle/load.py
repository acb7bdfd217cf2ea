"""Loading: whole state dicts, and checkpoints by torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses

from torch import nn

from fxshard.capture.modules import join
from fxshard.memory.category import Category
from fxshard.memory.ledger import LiveRange
from fxshard.memory.lifecycle.save import (
    detached,
    model_items,
    new_state,
    optimizer_items,
    state_held,
    written_by,
)
from fxshard.memory.lifecycle.script import LifecyclePhase, Script
from fxshard.memory.lifecycle.tree import MESSAGES, Item, Tree
from fxshard.memory.optimizer import OptimizerStep


def load_state_dict(tree: Tree) -> LifecyclePhase:
    """``load_state_dict`` of whole tensors.

    Each module's sharded parameters are replaced by copies of this rank's rows, which live until
    the modules below it are done (torch/nn/modules/module.py, ``load``; `fxshard.runtime.state`).
    """
    script = Script("load_state_dict", tree.held)
    for item in model_items(tree):
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


def _load_module(tree: Tree, script: Script, module: nn.Module, path: str) -> list[LiveRange]:
    """Load a module and those below it; what is alive still when it is done."""
    alive: list[LiveRange] = []
    for name in module._parameters:
        param = tree.params.get(join(path, name))
        if param is None or module._parameters[name] is None:
            continue
        shard = tree.shards[param.fqn]
        rows = LiveRange(
            0,
            f"rows of {param.fqn}",
            "aten.clone",
            path,
            Category.TEMP,
            tree.program.layouts[param.fqn].local_bytes,
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
            below = _load_module(tree, script, child, join(path, name))
    return alive + below


def load_checkpoint(
    tree: Tree, step: OptimizerStep | None, new: OptimizerStep | None
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
    by_file: dict[int, list[Item]] = {}
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
    saved = {step.names[number][0] for number in step.held} if step is not None else set()
    script.drop(*(each for each in made if each.name not in saved))
    return script.done(*unknown)
