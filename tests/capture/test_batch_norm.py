"""Batch norms with momentum=None, the mean of all batches, beside eager PyTorch."""

import copy

import torch
from torch import nn
from torch.testing import assert_close

import fxshard


def test_statistics_are_the_mean_of_all_batches() -> None:
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6, momentum=None, affine=False)
    eager = nn.Sequential(nn.Linear(5, 6), norms[0], nn.Tanh(), norms[1], nn.Linear(6, 3))
    ours = fxshard.compile(copy.deepcopy(eager), world_size=2)
    for step in range(4):
        if step == 3:  # as update_bn leaves it: another program
            for model in (eager, ours):
                model[1].momentum = 0.1
        x = torch.randn(4, 5)
        for model in (eager, ours):
            model(x).square().sum().backward()
        for mine, wanted in zip(ours.parameters(), eager.parameters(), strict=True):
            assert_close(mine.grad, wanted.grad, rtol=1e-4, atol=1e-5)
        assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))
    assert int(ours[1].num_batches_tracked) == 4
    assert len(ours._fxshard.variants) == 2
    assert_close(ours.eval()(x), eager.eval()(x))
