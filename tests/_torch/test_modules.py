"""Contracts of what `fxshard._torch.modules` uses of torch."""

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.testing._internal.two_tensor import TwoTensor

from fxshard._torch import modes, modules


def test_wrap_policies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    linears = {model[0], model[1][0]}
    policy = ModuleWrapPolicy({nn.Linear})
    assert modules.is_wrap_policy(policy) and set(modules.run_wrap_policy(policy, model)) == linears
    custom = CustomPolicy(lambda module: isinstance(module, nn.ReLU))
    assert modules.is_wrap_policy(custom)
    assert modules.run_wrap_policy(custom, model) == {model[2]: {}}
    assert not modules.is_wrap_policy(lambda name, module: True)


def test_marks_of_parameters_and_buffers() -> None:
    buffer = nn.Buffer(torch.ones(2))
    assert vars(buffer).keys() <= modules.TENSOR_MARKS and isinstance(buffer, nn.Buffer)
    parameter = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    assert vars(parameter).keys() - {"a", "b"} == {"_is_param"} <= modules.TENSOR_MARKS
    assert isinstance(parameter, nn.Parameter)
    del parameter._is_param
    assert not isinstance(parameter, nn.Parameter)


def test_batch_norms_share_a_forward_and_count_their_batches() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        assert kind.forward is modules.BATCH_NORM.forward
    norm = nn.BatchNorm1d(2, momentum=None)
    for _ in range(2):
        norm(torch.randn(3, 2))
    assert norm.num_batches_tracked is not None and norm.num_batches_tracked.item() == 2


def test_every_module_and_torch_have_each_kind_of_hooks() -> None:
    for name in modules.HOOKS:
        assert vars(nn.Module())[name] == {}
        assert isinstance(getattr(torch.nn.modules.module, f"_global{name}"), dict)


def test_recurrent_modules_know_their_weights() -> None:
    module = nn.LSTM(2, 3)
    weights: list[Any] = [getattr(module, name) for name in modules.weight_names(module)]
    assert [id(weight) for weight in weights] == [id(each) for each in module._flat_weights]
    assert len(module._flat_weight_refs) == len(weights)
    modules.forget_weights(module)
    assert module._flat_weight_refs == []
    module.to(torch.float64)  # which would fail on references to other parameters
    assert module(torch.ones(1, 2, dtype=torch.float64))[0].dtype is torch.float64


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_forward_hook", "forward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
    ],
)
def test_hooks_of_a_module_are_seen_and_have_numbers_of_their_own(register: str, kind: str) -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert modules.module_hooks(module) == [] and modules.hook_numbers([module, other]) == ()

    def hook(*_: Any) -> None: ...

    handles = [getattr(each, register)(hook) for each in (module, other)]
    ((found, number, function),) = modules.module_hooks(module)
    assert (found, function) == (kind, hook)
    first = modules.hook_numbers([module, other])
    assert first[0] == number and len(set(first)) == 2
    handles[0].remove()
    assert modules.hook_numbers([module, other]) == first[1:]
    getattr(module, register)(hook)
    assert modules.hook_numbers([module])[0] not in first


def test_tools_of_torch_see_nothing_and_come_back() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    ran: list[nn.Module] = []
    mine = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: ran.append(m))
    hooks = torch.nn.modules.module._global_forward_hooks
    linear = nn.Linear(2, 2)
    with FlopCounterMode(display=False) as counter:
        before = dict(hooks)
        with modes.unobserved():
            linear(torch.ones(1, 2))
        assert dict(hooks) == before
        assert counter.get_total_flops() == 0
        assert [number for _, number, _ in modules.global_hooks()] == [mine.id]
        with modes.unobserved(linear):
            linear(torch.ones(1, 2))
            nn.Sequential(linear, nn.Identity())(torch.ones(1, 2))
        assert dict(hooks) == before
    mine.remove()
    assert [type(module) for module in ran] == [nn.Linear, nn.Identity, nn.Sequential]
    assert modules.global_hooks() == []


def test_what_is_said_of_hooks_is_by_their_numbers() -> None:
    def hook(*given: Any) -> None:
        pass

    module = nn.Linear(2, 2)
    plain = module.register_forward_hook(hook)
    with_kwargs = module.register_forward_hook(hook, with_kwargs=True)
    always = module.register_forward_hook(hook, always_call=True)
    before = module.register_forward_pre_hook(hook, with_kwargs=True)
    assert [modules.how_called(module, h.id) for h in (plain, with_kwargs, always, before)] == [
        (False, False, False, None),
        (True, False, False, None),
        (False, True, False, None),
        (False, False, True, None),
    ]
    module.register_full_backward_hook(hook)
    assert modules.how_called(module, plain.id)[-1] is True
