"""Contracts of what `fxshard._torch.optimizers` uses of torch."""

import importlib
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _foreach_utils

from fxshard._torch import optimizers, process_groups


def test_foreach_copy_casts_in_one_operator() -> None:
    tensors = [torch.randn(2, 3), torch.randn(5)]
    into = [torch.empty_like(t, dtype=torch.bfloat16) for t in tensors]
    with torch.profiler.profile() as seen:
        optimizers.foreach_copy(into, tensors)
    assert all(torch.equal(i, t.bfloat16()) for i, t in zip(into, tensors, strict=True))
    assert [e.count for e in seen.key_averages() if e.key == "aten::_foreach_copy_"] == [1]


def test_torch_takes_tensors_many_at_once_by_their_exact_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(torch.Tensor):
        pass

    optim = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name
    for module in (optim, _foreach_utils):
        kinds = list(module._foreach_supported_types)
        assert DTensor in kinds and Own not in kinds
        monkeypatch.setattr(module, "_foreach_supported_types", kinds)
    monkeypatch.setattr(optimizers, "_stepped_by_foreach", optim._foreach_supported_types)
    monkeypatch.setattr(optimizers, "_clipped_by_foreach", _foreach_utils._foreach_supported_types)
    monkeypatch.setattr(optim, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    own = torch.zeros(2).as_subclass(Own)

    def many() -> tuple[bool, bool]:
        stepped = optim._default_to_fused_or_foreach([own], differentiable=False)[1]
        return stepped, _foreach_utils._has_foreach_support([own], own.device)

    assert many() == (False, False)
    optimizers.allow_foreach(Own)
    assert many() == (True, True)


def test_torch_steps_what_lies_on_one_device_in_one_dtype_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def group(lists: Any, with_indices: bool = False) -> Any:
        found = before(lists, with_indices)
        assert {key: len(held[0]) for key, (held, _) in found.items()} == {
            (torch.device("cpu"), torch.float32): 2,
            (torch.device("cpu"), torch.bfloat16): 1,
        }
        assert sorted(i for _, places in found.values() for i in places) == [0, 1, 2] * with_indices
        asked.append(sorted([len(each) for each in held] for held, _ in found.values()))
        return found

    before, asked = torch.optim.Optimizer._group_tensors_by_device_and_dtype, []  # type: Any, Any
    monkeypatch.setattr(
        torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(group)
    )
    dtypes = torch.float32, torch.bfloat16, torch.float32
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
    for param in params:
        param.grad = torch.ones_like(param)
    torch.optim.Adam(params, foreach=True).step()
    assert asked == [[[1, 1, 1, 1, 0, 1], [2, 2, 2, 2, 0, 2]]]  # without amsgrad's
    group([params], with_indices=True)


def test_optimizers_step_dtensors_beside_plain_ones() -> None:
    optimizers.group_by_mesh()
    with process_groups.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        params = [nn.Parameter(each) for each in (torch.ones(2), sharded, torch.ones(2))]
        for param in params:
            param.grad = torch.ones_like(param)
        torch.optim.AdamW(params, lr=1.0, foreach=True, amsgrad=True).step()
        found = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    assert all(torch.equal(each, found[0]) for each in found)
    assert not torch.equal(found[0], torch.ones(2))


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


def test_the_parts_of_muon_make_its_step() -> None:
    """On the matrix in bf16, which is written into."""
    param, grad = nn.Parameter(torch.randn(5, 3)), torch.randn(5, 3)
    before = param.detach().clone()
    optimizer = torch.optim.Muon([param], lr=0.5, momentum=0.0, weight_decay=0.0)
    param.grad = grad
    optimizer.step()
    group = optimizer.param_groups[0]
    sent = grad.bfloat16()
    update = optimizers.orthogonalized(sent, group)
    assert not torch.equal(sent, grad.bfloat16())
    lr = optimizers.muon_learning_rate(0.5, None, param.shape)
    assert lr == 0.5 * (5 / 3) ** 0.5
    assert torch.equal(param, before.add_(update, alpha=-lr))


def test_a_hook_before_a_step_may_put_another_object_in_the_place_of_the_optimizer() -> None:
    """It asks for groups after its closure, and each group's parameters through ``_init_group``."""
    optimizer, seen = torch.optim.Muon([nn.Parameter(torch.randn(2, 2))]), []

    class InPlace:
        @property
        def param_groups(self) -> list[object]:
            seen.append("groups")
            return []

    def put(given: object, args: tuple[object, ...], kwargs: object) -> object:
        assert given is args[0] is optimizer
        return (InPlace(), *args[1:]), kwargs

    handle = register_optimizer_step_pre_hook(put)  # type: ignore[arg-type]
    try:
        optimizer.step(lambda: seen.append("closure"))  # type: ignore[arg-type]
    finally:
        handle.remove()
    assert seen == ["closure", "groups"]


def test_optimizers_in_backward_step_once_whoever_has_the_hook() -> None:
    """Those that torch gives no hook are stepped by ours; it is added once, and to no other."""
    for hooks in (True, False):
        model = nn.Linear(2, 2, bias=False)
        before = model.weight.detach().clone()
        _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 1.0}, register_hook=hooks)
        for _ in range(2):
            optimizers.step_in_backward(model.weight)
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.weight, before - 1)
        assert model.weight.grad is None
    plain = nn.Linear(2, 2)
    optimizers.step_in_backward(plain.weight)
    plain(torch.ones(1, 2)).sum().backward()
    assert plain.weight.grad is not None
