"""A model that a function of the user's parallelises on a mesh of several dimensions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fxshard.errors import ConfigError

Dims = dict[str, int]  # ranks by name of a dimension, the outermost first
Parallelize = Callable[[nn.Module, DeviceMesh], Any]
Context = Callable[[nn.Module, DeviceMesh], AbstractContextManager[Any]]


def parallelised(
    model: nn.Module,
    parallelize: Parallelize,
    mesh: DeviceMesh,
    copy: str = "a copy of the model on the meta device",
) -> nn.Module:
    """What `parallelize` makes of `model`, which it may change in place.

    Args:
        copy: what `model` is, for errors.

    Raises:
        ConfigError: it fails, returns something else than a model, or calls fully_shard.
    """
    try:
        found = parallelize(model, mesh)
    except Exception as error:
        raise failed("parallelize", error, copy, mesh) from error
    if found is not None and not isinstance(found, nn.Module):
        raise ConfigError(
            f"parallelize(model, mesh) returned a {type(found).__name__}: expected the model, or "
            f"None if it was changed in place."
        )
    model = model if found is None else found
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "parallelize(model, mesh) has called fully_shard: fxshard shards over data-parallel "
            "ranks itself. Give the part of it that applies parallelize_module alone."
        )
    return model


def failed(name: str, error: Exception, given: str, mesh: DeviceMesh) -> ConfigError:
    """What to raise where a function of the user's, called with `given` and a mesh, has raised."""
    first = (str(error).splitlines() or [""])[0]
    shape = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return ConfigError(
        f"{name}(model, mesh) raised {type(error).__name__}: {first}\nIt was called with {given}, "
        f"and a DeviceMesh of {shape}."
    )
