"""Storages: which of them are the same memory."""

from __future__ import annotations

import torch


def storage_id(of: torch.Tensor | torch.UntypedStorage) -> int:
    """What storages of the same memory have in common, and no other that is alive.

    Python makes an object of a storage each time it is asked for; it has an address on meta too.
    """
    storage = of.untyped_storage() if isinstance(of, torch.Tensor) else of
    return storage._cdata
