"""Accelerate, and what trains through it: transformers' Trainer and TRL. FSDP2 there is fxshard.

Accelerate asks for `fully_shard` in one function, each time that it shards a model. While that
function runs, fxshard's stands in the place of torch's; all around it (wrap policies, clipping,
checkpoints, exports) is Accelerate's own code.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

import torch.distributed.fsdp
from torch import nn

from fxshard._torch.fully_sharded import Change, replaced
from fxshard.api import fully_shard
from fxshard.capture.swapped import users_class
from fxshard.errors import ConfigError
from fxshard.runtime.module import FxshardModule, register_fsdp_forward_method
from fxshard.runtime.unit_modules import UnitModule

_ENABLED = contextlib.ExitStack()


def enable() -> None:
    """Let fxshard shard what Accelerate shards by FSDP2, in this process, from now on.

    Call it before the first ``Accelerator`` or ``Trainer`` is made. FSDP2 is turned on as for
    torch's: ``TrainingArguments(fsdp=True)``, the argument ``fsdp_plugin`` of ``Accelerator``, or
    the config of ``accelerate launch``. CPU ranks count too, which Accelerate by itself takes for
    DDP. A second call does nothing.

    Raises:
        ImportError: accelerate is not installed.
        ConfigError: an ``Accelerator`` has been made already. The next one raises it for what
            is not FSDP2, and for what fxshard cannot have beside it.
    """
    from accelerate import accelerator, state

    if is_enabled():
        return
    if _is_made(state.AcceleratorState):
        raise ConfigError(
            "fxshard.integrations.accelerate.enable(): an Accelerator has been made in this "
            "process already. Call enable() before it (and before transformers' Trainer)."
        )
    changes: list[Change] = [
        (accelerator, "fsdp2_prepare_model", _sharding(accelerator.fsdp2_prepare_model)),
        (state.AcceleratorState, "__init__", _checked(state.AcceleratorState.__init__)),
        (torch.distributed.fsdp, *_registering(torch.distributed.fsdp)),
    ]
    _ENABLED.enter_context(replaced(changes))


def disable() -> None:
    """Undo `enable`. What is sharded already stays fxshard's."""
    _ENABLED.close()


def is_enabled() -> bool:
    """Whether fxshard shards what Accelerate shards by FSDP2."""
    from accelerate import accelerator

    return hasattr(accelerator.fsdp2_prepare_model, "__wrapped__")


def _sharding(prepare: Any) -> Any:
    @functools.wraps(prepare)
    def run(accelerator: Any, model: nn.Module) -> Any:
        with replaced([(torch.distributed.fsdp, "fully_shard", fully_shard)]):
            prepared: nn.Module = prepare(accelerator, model)
        _note_as_saved(prepared)
        return prepared

    return run


def _note_as_saved(model: Any) -> None:
    """Set in the config what ``save_pretrained`` of transformers sets in it.

    Programs depend on what a config says: after the first checkpoint all would be traced again.
    """
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        model.config.architectures = [users_class(model).__name__]
        model.config.dtype = str(model.dtype).removeprefix("torch.")


def _registering(fsdp: Any) -> tuple[str, Any]:
    """Trainer registers ``generate`` by torch's function, which looks for torch's state."""
    name = "register_fsdp_forward_method"
    plain = getattr(fsdp, name)

    @functools.wraps(plain)
    def run(module: nn.Module, method_name: str) -> None:
        ours = isinstance(module, (FxshardModule, UnitModule))
        (register_fsdp_forward_method if ours else plain)(module, method_name)

    return name, run


def _is_made(states: Any) -> bool:
    """Whether there is an `AcceleratorState`: before, it may hold what `PartialState` does."""
    return "dynamo_plugin" in states._shared_state


def _checked(init: Any) -> Any:
    """The first `AcceleratorState` decides what all that follow are."""

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        first = not _is_made(type(self))
        init(self, *args, **kwargs)
        if not first:
            return
        try:
            _take_cpu_ranks(self, kwargs.get("fsdp_plugin"))
            _check(self)
        except ConfigError:
            self._reset_state()
            raise

    return run


def _take_cpu_ranks(state: Any, plugin: Any) -> None:
    """What `AcceleratorState` does for FSDP on GPUs, for CPU ranks."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if plugin is None or state.distributed_type is not DistributedType.MULTI_CPU:
        return
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _check(state: Any) -> None:
    """Raises ConfigError if several processes are to train by something else than fxshard."""
    from accelerate.utils import DistributedType, DynamoBackend

    kind = state.distributed_type
    where = "fxshard.integrations.accelerate is enabled, and"
    if kind is DistributedType.NO:
        if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ConfigError(
                f"{where} {processes} processes (WORLD_SIZE) train, each by itself. On the CPU: "
                f"Accelerator(cpu=True), TrainingArguments(use_cpu=True), ACCELERATE_USE_CPU=true."
            )
        return  # one process: nothing is to be sharded
    if kind is not DistributedType.FSDP:
        raise ConfigError(
            f"{where} Accelerate is to train by {kind.value}. Turn FSDP2 on: "
            f"TrainingArguments(fsdp=True), Accelerator(fsdp_plugin="
            f"FullyShardedDataParallelPlugin(fsdp_version=2)), or distributed_type: FSDP and "
            f"fsdp_version: 2 in the config of accelerate launch; or do not enable fxshard. For a "
            f"model that from_pretrained(distributed_config=...) shards, enable "
            f"fxshard.integrations.transformers in place of it."
        )
    if not state.is_fsdp2:
        raise ConfigError(
            f"{where} fsdp_version is 1. Set it to 2: fsdp_config={{'version': 2}} of "
            f"TrainingArguments, FullyShardedDataParallelPlugin(fsdp_version=2), or "
            f"fsdp_version: 2 in the config of accelerate launch."
        )
    if state.fsdp_plugin.activation_checkpointing_offload:
        raise ConfigError(
            f"{where} activation_checkpointing_offload is on: fxshard plans no copies of saved "
            f"activations to the host here. Leave it out; activation_checkpointing alone works."
        )
    if state.mixed_precision == "fp8":
        raise ConfigError(
            f"{where} mixed_precision is 'fp8'. Use 'bf16', or convert the model yourself before "
            f"it is prepared (torchao.float8.convert_to_float8_training)."
        )
    if state.dynamo_plugin.backend is not DynamoBackend.NO:
        raise ConfigError(
            f"{where} torch.compile is on ({state.dynamo_plugin.backend.value}). fxshard compiles "
            f"the model itself: leave torch_compile, dynamo_plugin or dynamo_backend out."
        )
    sizes = state.parallelism_config
    if sizes is not None and sizes.non_data_parallel_size > 1:
        raise ConfigError(
            f"{where} tp_size={sizes.tp_size}, cp_size={sizes.cp_size}, sp_size={sizes.sp_size}: "
            f"only dp_shard_size and dp_replicate_size can be larger than 1."
        )
