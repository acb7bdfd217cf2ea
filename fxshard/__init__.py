"""fxshard: fully sharded data parallelism as a compiler."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxshard.api import (
        compile,
        compile_step,
        fsdp2_memory,
        fully_shard,
        plan,
        shard,
        tune,
        validate,
    )
    from fxshard.config.options import Options
    from fxshard.dryrun.fsdp2 import Fsdp2Memory
    from fxshard.dryrun.run import DryRun, dry_run, is_dry_run
    from fxshard.dynamo.graphs import reports
    from fxshard.errors import (
        CaptureError,
        CheckpointError,
        ConfigError,
        DoesNotFitError,
        FxshardError,
        OutOfRangeError,
        PassError,
        RankDiedError,
        RankMismatchError,
        StepError,
        TextError,
        TooLittleError,
        UnitError,
        UnknownSizeError,
        VerifyError,
    )
    from fxshard.memory.report import MemoryReport
    from fxshard.pipeline import Pass, Pipeline, default_passes
    from fxshard.planner.result import Tuning
    from fxshard.plans.plan import Plan
    from fxshard.runtime.checkpoint.verbs import async_save, load_checkpoint, save_checkpoint
    from fxshard.runtime.full_matrices import full_matrix_updates
    from fxshard.runtime.module import FxshardModule, register_fsdp_forward_method
    from fxshard.runtime.whole_step import CompiledStep
    from fxshard.validation.compare import Validation

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CompiledStep",
    "ConfigError",
    "DoesNotFitError",
    "DryRun",
    "Fsdp2Memory",
    "FxshardError",
    "FxshardModule",
    "MemoryReport",
    "Options",
    "OutOfRangeError",
    "Pass",
    "PassError",
    "Pipeline",
    "Plan",
    "RankDiedError",
    "RankMismatchError",
    "StepError",
    "TextError",
    "TooLittleError",
    "Tuning",
    "UnitError",
    "UnknownSizeError",
    "Validation",
    "VerifyError",
    "async_save",
    "compile",
    "compile_step",
    "default_passes",
    "dry_run",
    "fsdp2_memory",
    "full_matrix_updates",
    "fully_shard",
    "is_dry_run",
    "load_checkpoint",
    "plan",
    "register_fsdp_forward_method",
    "reports",
    "save_checkpoint",
    "shard",
    "tune",
    "validate",
]
_HOMES = {
    "CompiledStep": "runtime.whole_step",
    "DryRun": "dryrun.run",
    "Fsdp2Memory": "dryrun.fsdp2",
    "FxshardModule": "runtime.module",
    "MemoryReport": "memory.report",
    "Options": "config.options",
    "Pass": "pipeline",
    "Pipeline": "pipeline",
    "Plan": "plans.plan",
    "Tuning": "planner.result",
    "Validation": "validation.compare",
    "async_save": "runtime.checkpoint.verbs",
    "compile": "api",
    "compile_step": "api",
    "default_passes": "pipeline",
    "dry_run": "dryrun.run",
    "fsdp2_memory": "api",
    "full_matrix_updates": "runtime.full_matrices",
    "fully_shard": "api",
    "is_dry_run": "dryrun.run",
    "load_checkpoint": "runtime.checkpoint.verbs",
    "plan": "api",
    "register_fsdp_forward_method": "runtime.module",
    "reports": "dynamo.graphs",
    "save_checkpoint": "runtime.checkpoint.verbs",
    "shard": "api",
    "tune": "api",
    "validate": "api",
    **{name: "errors" for name in __all__ if name.endswith("Error")},
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: torch takes seconds, which ``fxshard --help`` has no use for."""
    import importlib
    import importlib.util

    if name not in _HOMES:
        if name.startswith("__") or importlib.util.find_spec(f"fxshard.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"fxshard.{name}")
    if _HOMES[name] == "errors":  # without torch
        found = getattr(importlib.import_module("fxshard.errors"), name)
    else:
        from fxshard.host import collector

        with collector.paused():  # torch brings thousands of modules: half of the time goes there
            importlib.import_module("fxshard.api")
            found = getattr(importlib.import_module(f"fxshard.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
