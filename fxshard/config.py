"""The options of fxshard, validated once, and the environment variables, parsed once."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from fxshard.errors import ConfigError

STRATEGIES = ("full_shard",)
BACKENDS = ("eager",)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of `plan`, `compile` and `validate`. Immutable; unknown names or values are refused.

    Attributes:
        strategy: ``"full_shard"``: parameters, gradients and optimizer states are sharded.
        units: what moves together. None finds repeated blocks in the module tree; a list of
            module classes or FQN globs (``*`` matches one name, ``**`` any number); a callable
            ``(fqn, module) -> bool``; or a ``torch.distributed.fsdp.wrap`` policy.
        forward_prefetch: how many units ahead an unshard is launched in forward.
        backward_prefetch: the same in backward.
        backend: ``"eager"``: compute regions run op by op, bitwise with eager PyTorch.
        optimizer: a callable ``params -> torch.optim.Optimizer``, or an optimizer instance whose
            class and parameter-group options are taken; its real ``step`` is analysed.
        passes: a pipeline in place of the default one (see `fxshard.pipeline`).
    """

    strategy: str = "full_shard"
    units: Sequence[Any] | Callable[..., Any] | None = None
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    backend: str = "eager"
    optimizer: Any = None
    passes: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("backend", self.backend, BACKENDS)
        for name in ("forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r}: expected an integer >= 0 (units ahead).")
        optimizer = self.optimizer
        if not (optimizer is None or callable(optimizer) or isinstance(optimizer, Optimizer)):
            raise ConfigError(
                f"optimizer={optimizer!r}: expected a callable params -> torch.optim.Optimizer, "
                f"such as lambda params: torch.optim.AdamW(params, lr=1e-3)."
            )
        if self.passes is not None and not (
            isinstance(self.passes, Sequence) and all(hasattr(p, "apply") for p in self.passes)
        ):
            raise ConfigError(
                f"passes={self.passes!r}: expected a list of passes. Take "
                f"fxshard.pipeline.default_passes(config) and edit it."
            )
        if isinstance(self.units, str):
            raise ConfigError(
                f"units={self.units!r}: expected a list; write units=[{self.units!r}]."
            )

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Config:
        """Build a Config from keyword options.

        Raises:
            ConfigError: an unknown name (the message lists the legal ones and the nearest).
        """
        legal = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in legal:
                near = difflib.get_close_matches(name, legal, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"unknown option {name!r}.{hint} Options are: {', '.join(legal)}."
                )
        return cls(**options)


@dataclasses.dataclass(frozen=True)
class Environment:
    """What ``FXSHARD_*`` variables say (documented in docs/env.md).

    Attributes:
        debug: 0 quiet; 1 pass list and timing; 2 op-count differences; 3 text differences per
            pass; 4 full dumps.
        dump_dir: where dumps go (None: standard error).
    """

    debug: int = 0
    dump_dir: Path | None = None


def environment() -> Environment:
    """Parse the environment.

    Raises:
        ConfigError: ``FXSHARD_DEBUG`` is not an integer from 0 to 4.
    """
    raw = os.environ.get("FXSHARD_DEBUG", "0")
    if raw not in {"0", "1", "2", "3", "4"}:
        raise ConfigError(f"FXSHARD_DEBUG={raw!r}: expected 0, 1, 2, 3 or 4 (docs/env.md).")
    dump_dir = os.environ.get("FXSHARD_DUMP_DIR")
    return Environment(debug=int(raw), dump_dir=Path(dump_dir) if dump_dir else None)


def _one_of(name: str, value: object, legal: Sequence[str]) -> None:
    if value not in legal:
        raise ConfigError(f"{name}={value!r} is not supported; legal: {', '.join(legal)}.")
