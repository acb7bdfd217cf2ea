"""fxshard: fully sharded data parallelism as a compiler."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxshard.api import compile, plan, shard, tune, validate
    from fxshard.dynamo.graphs import reports
    from fxshard.plans.plan import Plan
    from fxshard.runtime.checkpoint import load_checkpoint, save_checkpoint
    from fxshard.runtime.module import FxshardModule, register_fsdp_forward_method

__all__ = [
    "FxshardModule",
    "Plan",
    "compile",
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
    "FxshardModule": "runtime.module",
    "Plan": "plans.plan",
    "compile": "api",
    "load_checkpoint": "runtime.checkpoint",
    "plan": "api",
    "register_fsdp_forward_method": "runtime.module",
    "reports": "dynamo.graphs",
    "save_checkpoint": "runtime.checkpoint",
    "shard": "api",
    "tune": "api",
    "validate": "api",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: torch takes seconds, which ``fxshard --help`` has no use for."""
    import importlib
    import importlib.util

    if name not in _HOMES:
        if name.startswith("__") or importlib.util.find_spec(f"fxshard.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"fxshard.{name}")
    from fxshard.host import collector

    with collector.paused():  # torch brings thousands of modules along: half of the time goes there
        importlib.import_module("fxshard.api")
        found = getattr(importlib.import_module(f"fxshard.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
