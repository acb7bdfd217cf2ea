"""test_fully_shard_extensions.py: its hybrid half is in `test_training.units`, with a 2-D mesh."""

from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.peers.fsdp2.test_training import LATE, units


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", LATE, ids=lambda late: "+".join(late) or "on time")
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_hybrid_units_train_as_ddp(ranks: Any, reshard: Any, late: Any) -> None:
    ranks(4).run(units, {"reshard_after_forward": reshard, "hybrid": True}, late)


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", LATE, ids=lambda late: "+".join(late) or "on time")
@pytest.mark.parametrize("pinned", [True, False])
def test_hybrid_units_on_the_cpu_train_as_ddp(ranks: Any, pinned: bool, late: Any) -> None:
    """Memory is pinned only where there is an accelerator; without one it is the same as not."""
    offload = CPUOffloadPolicy(pin_memory=pinned)
    ranks(4).run(units, {"offload_policy": offload, "hybrid": True}, late)
