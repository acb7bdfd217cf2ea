"""Functional collectives of code outside of the program, such as a loss that reads a DTensor.

What gloo holds of them is given back when they have been waited for, and not when gloo's thread
gets to it (see `fxshard.runtime.world.aliases`): one run would measure other bytes than the next.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fxshard._torch import collectives, process_groups
from fxshard._torch.trees import tree_flatten, tree_map_tensors
from fxshard.ir import layout
from fxshard.runtime.world.aliases import Aliases


class EagerCollectives:
    """Runs functional collectives, and knows what those in flight have."""

    def __init__(self) -> None:
        self._held: dict[int, Aliases] = {}  # by id of the storage that a collective writes

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``, of any operator."""
        if func is collectives.WAIT:
            result = func(*args, **kwargs)
            if (held := self._held.pop(id(args[0].untyped_storage()), None)) is not None:
                held.drop()
            return result
        if func not in collectives.LAUNCHES or dist.get_backend(_group(args)) != "gloo":
            return func(*args, **kwargs)
        held = Aliases()
        if func in collectives.SENDING:
            args = tree_map_tensors(held.of, args)
        made = self._launched(held, func, args, kwargs)
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, Tensor):
                self._held[id(tensor.untyped_storage())] = held
        return made

    @staticmethod
    def _launched(held: Aliases, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not collectives.GATHER:
            return tree_map_tensors(held.instead, func(*args, **kwargs))
        # gloo gathers into parts of the result in any case; these are known.
        sent, size, _ = args
        sent = held.of(sent.view(1)) if not sent.dim() else sent
        made = sent.new_empty(layout.gathered(sent.shape, size))
        parts = (layout.part_of(made, rank, size) for rank in range(size))
        work = _group(args).allgather([list(map(held.of, parts))], [sent])
        collectives.register_work(made, work)
        return made


def _group(args: tuple[Any, ...]) -> Any:
    """That of a functional collective, which takes it, or its name, last."""
    return process_groups.called(args[-1]) if isinstance(args[-1], str) else args[-1]
