"""Contracts of what `fxshard._torch.optimizers` uses of torch."""

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fxshard._torch import (
    optimizers,
)


def test_foreach_copy_casts_in_one_operator() -> None:
    tensors = [torch.randn(2, 3), torch.randn(5)]
    into = [torch.empty_like(t, dtype=torch.bfloat16) for t in tensors]
    with torch.profiler.profile() as seen:
        optimizers.foreach_copy(into, tensors)
    assert all(torch.equal(i, t.bfloat16()) for i, t in zip(into, tensors, strict=True))
    assert [e.count for e in seen.key_averages() if e.key == "aten::_foreach_copy_"] == [1]


def test_torch_steps_an_optimizer_without_state_to_save_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with optimizers.not_stepped(optimizer):
        assert get_optimizer_state_dict(model, optimizer)["state"] == {}
    assert not optimizer.state
    assert get_optimizer_state_dict(model, optimizer)["state"]  # what the context is against
    before = optimizer.state
    with optimizers.not_stepped(optimizer):
        assert optimizer.state is before


def test_hooks_of_optimizers_lie_where_they_are_taken_from() -> None:
    optimizer, ran = torch.optim.SGD(nn.Linear(2, 2).parameters()), []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    both = [
        register_optimizer_step_pre_hook(lambda *_: ran.append("all")),
        register_optimizer_step_post_hook(lambda *_: ran.append("all")),
    ]
    try:
        with optimizers.without_step_hooks(optimizer):
            optimizer.step()
        assert ran == []
        optimizer.step()
        assert sorted(ran) == ["all", "all", "post", "pre"]
    finally:
        for handle in both:
            handle.remove()
