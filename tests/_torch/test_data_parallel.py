"""`data_parallel`: what torch reduces; the reducer on fakes: tests/dryrun/test_parallelisms.py."""

from typing import Any

import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fxshard._torch import data_parallel


def covered(rank: int, world_size: int) -> None:
    model, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    wrapped = DistributedDataParallel(model)
    found = data_parallel.reduced()
    assert id(wrapped.module.weight) in found
    assert found.isdisjoint(map(id, [model.bias, *plain.parameters()]))


def test_which_parameters_ddp_reduces(ranks: Any) -> None:
    ranks(2).run(covered)


def wrapped(rank: int, world_size: int) -> None:
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    replicate(model[0])
    model[1] = DistributedDataParallel(model[1])
    model[2] = FullyShardedDataParallel(model[2], device_id=torch.device("cpu"))
    found = [data_parallel.reduced_by(module) for module in model]
    assert found == ["replicate", "DistributedDataParallel", "FullyShardedDataParallel", ""]


def test_what_reduces_gradients_of_a_module(ranks: Any) -> None:
    ranks(2).run(wrapped)
