"""Several optimizers as one: Muon for matrices and AdamW for the rest, in the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class Several(Optimizer):
    """Optimizers that step one after the other.

    ``param_groups`` are those of all of them, and ``state`` is one for all: learning rate
    schedulers, ``state_dict`` and torch.distributed.checkpoint see one optimizer.

    Attributes:
        members: the optimizers, in order.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        """Raises ValueError if two of them hold one parameter."""
        groups = [group for member in members for group in member.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.members: list[Optimizer] = list(members)
        self.param_groups = groups
        for member in members:
            self.state.update(member.state)
        self._share()

    @property
    def name(self) -> str:
        """Classes of the members: ``Muon, AdamW``."""
        return ", ".join(type(member).__name__ for member in self.members)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, while it is made; then a member has to be named."""
        if "members" in self.__dict__:
            raise ValueError("give the group to one of .members before they are put together.")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        for member in self.members:
            member.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles."""
        return super().__getstate__() | {"members": self.members}

    def _share(self) -> None:
        """Let members have the groups and the state of now, which may be loaded ones."""
        groups = iter(self.param_groups)
        for member in self.members:
            member.state = self.state
            member.param_groups = [next(groups) for _ in member.param_groups]


def name_of(optimizer: Optimizer) -> str:
    """Its class, or the classes of its members."""
    return optimizer.name if isinstance(optimizer, Several) else type(optimizer).__name__
