"""transformers' own FSDP2, of models that `from_pretrained` shards as it loads them, is fxshard.

``from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=n))`` calls `fully_shard` on a
meta model, after a plan of the model's, and fills the shards from the files.

`without_logits` lets a model return the loss without the logits, for the option ``chunk_loss``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, TypeVar

from torch import nn

from fxshard._torch.fully_sharded import replaced
from fxshard.api import fully_shard

M = TypeVar("M", bound=nn.Module)

_ENABLED = contextlib.ExitStack()


def enable() -> None:
    """Let fxshard shard what transformers shards as it loads, in this process, from now on.

    Such a model trains in a loop, or in a ``Trainer`` without ``fsdp=True``. For a ``Trainer`` that
    shards the model itself see `fxshard.integrations.accelerate`; one of the two is enough. A
    second call does nothing.

    Raises:
        ImportError: transformers is not installed, or does not shard what it loads.
    """
    from transformers.distributed import fsdp

    if vars(fsdp)["fully_shard"] is not fully_shard:
        _ENABLED.enter_context(replaced([(fsdp, "fully_shard", fully_shard)]))


def disable() -> None:
    """Undo `enable`. What is sharded already stays fxshard's."""
    _ENABLED.close()


def without_logits(model: M) -> M:
    """Let a model return no logits where it trains on labels, so that ``chunk_loss`` may apply.

    In eval mode, and without labels, it returns what it did. Its class becomes a subclass of it;
    parameters and their names stay.

    Args:
        model: of transformers, such as ``LlamaForCausalLM``; before it is sharded.

    Returns:
        The same object.
    """
    cls = type(model)

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = cls.forward(self, *args, **kwargs)
        if not self.training or getattr(output, "loss", None) is None:
            return output
        return type(output)(**{name: v for name, v in output.items() if name != "logits"})

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return model
