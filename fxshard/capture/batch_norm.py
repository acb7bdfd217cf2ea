"""Batch norms whose statistics are the mean of all batches (``momentum=None``).

`torch.optim.swa_utils.update_bn` sets that. Torch then makes a Python number of how many batches
there were, which no program can read; here it stays a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxshard._torch.modules import BATCH_NORM


@contextlib.contextmanager
def counted_in_tensors(model: nn.Module) -> Iterator[None]:
    """For the time of the block no such batch norm of a model makes a number of a tensor."""
    norms = (each for each in model.modules() if isinstance(each, BATCH_NORM))
    if all(getattr(each, "momentum", 0.1) is not None for each in norms):  # or what stands for one
        yield
        return
    original = BATCH_NORM.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        averages = self.momentum is None and self.training and self.track_running_stats
        if not averages or self.num_batches_tracked is None:
            return original(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        own = [each.clone() for each in statistics]  # of this batch; backward reads them too
        mean, var = own
        found = functional.batch_norm(
            input, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
        )
        share = self.num_batches_tracked.to(own[0].dtype).reciprocal()
        for each, new in zip(statistics, own, strict=True):
            each.copy_(torch.lerp(each, new, share))
        return found

    BATCH_NORM.forward = forward  # type: ignore
    try:
        yield
    finally:
        BATCH_NORM.forward = original  # type: ignore
