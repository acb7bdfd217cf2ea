"""transformers' own FSDP2, of models that `from_pretrained` shards as it loads them, is fxshard.

``from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=n))`` calls `fully_shard` on a
meta model, after a plan of the model's, and fills the shards from the files.
"""

from __future__ import annotations

import contextlib

from fxshard._torch.fully_sharded import replaced
from fxshard.api import fully_shard

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
