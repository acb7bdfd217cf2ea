"""`data_parallel.reduced`; the reducer on fakes: tests/dryrun/test_parallelisms.py."""

from typing import Any

from torch import nn
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
