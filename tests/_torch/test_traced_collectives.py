"""`fxshard._torch.traced_collectives`: what it relies on in torch."""

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard._torch import traced_collectives
from fxshard._torch.process_groups import fake_process_group


def reduced(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    work = dist.all_reduce(total, op=dist.ReduceOp.MAX, async_op=True)
    assert work.wait() and work.is_completed()
    return total


def test_methods_of_process_groups_become_functional_collectives() -> None:
    before = dist.ProcessGroup.allreduce
    with fake_process_group(0, 2), traced_collectives.traced(ValueError):
        graph = make_fx(reduced, tracing_mode="fake")(torch.ones(3)).graph
        (call,) = [node for node in graph.nodes if traced_collectives.is_collective(node)]
        assert str(call.target) == "_c10d_functional.all_reduce.default" and call.args[1] == "max"
        with pytest.raises(ValueError, match="barrier"):
            dist.barrier()
    assert dist.ProcessGroup.allreduce is before


def test_ranks_of_functional_collectives_are_noted() -> None:
    with fake_process_group(0, 3), traced_collectives.traced(ValueError):
        graph = make_fx(reduced, tracing_mode="fake")(torch.ones(3)).graph
        (call,) = [node for node in graph.nodes if traced_collectives.is_collective(node)]
        assert traced_collectives.ranks_of(call) is None
        traced_collectives.note_ranks(call)
    assert traced_collectives.ranks_of(call) == 3


def test_what_was_waited_for_is_the_tensor_itself() -> None:
    """As `fxshard.capture.fakes` has it, and the fake kernel has not."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    value = torch.ones(3)
    assert wait(value).data_ptr() == value.data_ptr()
