"""What a rank holds outside of the step: while it is set up, loads a checkpoint, and saves one.

Read off the program, the module tree and torch's own code, operator by operator; nothing runs but
the initialisations of a meta model, on fake tensors, and the optimizer's step, as for the report.
Each phase is a `Ledger` of its own. What is between phases: shards, ignored parameters, buffers,
and the optimizer's state once there is one; no batch, no gradients.

The figures are those of rank 0: it owns the first rows, and never fewer than others.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fxshard.config.checked import Config
from fxshard.ir.program import Program
from fxshard.memory.category import Category
from fxshard.memory.ledger import LiveRange
from fxshard.memory.lifecycle.init import init, init_receiving
from fxshard.memory.lifecycle.load import load_checkpoint, load_state_dict
from fxshard.memory.lifecycle.save import async_save, full_state_dict, save_checkpoint
from fxshard.memory.lifecycle.script import LifecyclePhase
from fxshard.memory.lifecycle.tree import ModuleTree
from fxshard.memory.optimizer import trace_step, unused
from fxshard.memory.optimizer_step import OptimizerStep


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
    - ``load_state_dict``: of a full state dict that lies on the CPU.
    - ``load_checkpoint``: with a new optimizer, if there is one; of a checkpoint that as many ranks
      have saved.
    - ``save_checkpoint``: with the optimizer, if there is one.
    - ``async_save``: until it returns; what it has more at its end, on the host if the program
      computes elsewhere, is there until the future is done: the steps meanwhile hold it too.
    - ``full_state_dict``: on rank 0's CPU (the default), and ``full_state_dict (every rank)``:
      ``cpu_offload=False, rank0_only=False``.

    Args:
        program: what the rank runs.
        config: the options that it was made with.
        model: the model that `program` was traced from, sharded since or not.
        held: from `fxshard.memory.held.held_ranges`; its batch is left out.
        step: from `fxshard.memory.optimizer.trace_step`, or None.

    Raises:
        ConfigError: the optimizer's step needs data.
    """
    tree = ModuleTree(
        program, config, model, [h for h in held if h.category is not Category.INPUTS]
    )
    new = step
    grown = unused(program) or (step is not None and step.without)
    if step is not None and grown:
        for_cuda = tree.device.type == "cuda"
        new = trace_step(program, config.optimizer, for_cuda=for_cuda, unused=True)
    phases = [init(tree)]
    if config.sync_module_states and program.world_size * program.replicas > 1:
        phases.append(init_receiving(tree))
    return [
        *phases,
        load_state_dict(tree),
        load_checkpoint(tree, step, new),
        save_checkpoint(tree, step),
        async_save(tree, step),
        full_state_dict(tree, step, alone=True),
        full_state_dict(tree, step, alone=False),
    ]
