"""What is wrong, where, and what to do: every refusal says it, and leaves the model as it was."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, fully_shard

import fxshard
from fxshard._torch import compat
from fxshard.config import environment
from fxshard.errors import CaptureError, ConfigError, FxshardError, UnitError
from tests.eager import Net, batch, pair
from tests.zoo import models


def refused(
    error: type[FxshardError],
    message: str,
    action: Callable[..., Any],
    model: nn.Module,
    **options: Any,
) -> None:
    """`action(model, **options)` raises with `message`, and the model keeps its very parameters."""
    before = dict(model.named_parameters())
    with pytest.raises(error, match=message) as failure:
        action(model, **options)
    assert isinstance(failure.value, FxshardError)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is param for name, param in before.items())


def plan(model: nn.Module, **options: Any) -> Any:
    return fxshard.plan(model, (batch(),), **{"world_size": 2} | options)


def compile(model: nn.Module, **options: Any) -> Any:
    return fxshard.compile(model, **{"world_size": 2} | options)


def validate(model: nn.Module, **options: Any) -> Any:
    return fxshard.validate(model, (batch(),), **{"world_size": 2} | options)


ACTIONS = pytest.mark.parametrize("action", [plan, compile, validate], ids=lambda f: f.__name__)


# -- options --------------------------------------------------------------------------------------


@ACTIONS
def test_an_unknown_option(action: Callable[..., Any]) -> None:
    message = r"unknown option 'forward_prefech'\. Did you mean 'forward_prefetch'\? Options are: "
    refused(
        ConfigError,
        message + "strategy, units, .*passes",
        action,
        models.Mlp13(),
        forward_prefech=2,
    )
    message = r"unknown option 'zzz'\. Options are: strategy, units"
    refused(ConfigError, message, action, models.Mlp13(), zzz=1)


VALUES = [
    (
        {"strategy": "zero3"},
        r"strategy='zero3' is not supported; legal: full_shard, shard_grad_op, no_shard, "
        r"hybrid_shard, hybrid_shard_zero2\.",
    ),
    ({"strategy": "hybrid_shard"}, r"world_size=2: strategy 'hybrid_shard' has two dimensions"),
    ({"reduce_op": "mean"}, r"reduce_op='mean' is not supported; legal: avg, sum, max, min\."),
    ({"gradient_divide_factor": 0}, r"gradient_divide_factor=0: expected a number > 0"),
    (
        {"gradient_divide_factor": 2.0, "reduce_op": "sum"},
        r"gradient_divide_factor=2\.0 has no meaning with reduce_op='sum'",
    ),
    ({"reshard_after_forward": 1.5}, r"reshard_after_forward=1\.5: expected True, False, or the"),
    ({"reshard_after_forward": 4}, r"reshard_after_forward=4 of unit .*: 2 ranks cannot be cut"),
    (
        {"reshard_after_forward": True, "strategy": "no_shard"},
        r"reshard_after_forward has no meaning with strategy='no_shard'",
    ),
    ({"reshard_after_forward": {"head": False}}, r"reshard_after_forward names 'head', which is"),
    ({"mixed_precision": torch.bfloat16}, r"mixed_precision=torch\.bfloat16: expected .*Policy"),
    (
        {
            "mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16),
            "full_precision_in_eval": True,
        },
        r"full_precision_in_eval=True with a buffer_dtype",
    ),
    ({"offload": "cpu"}, r"offload='cpu': expected torch\.distributed\.fsdp\.CPUOffloadPolicy"),
    ({"ignored": "head"}, r"ignored='head': expected a list; write ignored=\['head'\]"),
    ({"param_init_fn": 3}, r"param_init_fn=3 cannot be called"),
    ({"strategy": ["full_shard"]}, r"strategy=\['full_shard'\] is not supported"),
    ({"backend": "aot"}, r"backend='aot' is not supported; legal: eager, inductor\."),
    ({"forward_prefetch": -1}, r"forward_prefetch=-1: expected an integer >= 0"),
    ({"backward_prefetch": "1"}, r"backward_prefetch='1': expected an integer >= 0"),
    ({"backward_prefetch": True}, r"backward_prefetch=True: expected an integer >= 0"),
    ({"units": "blocks.*"}, r"units='blocks\.\*': expected a list; write units=\['blocks\.\*'\]"),
    ({"optimizer": "adam"}, r"optimizer='adam': expected a callable .*torch\.optim\.AdamW\(params"),
    ({"passes": 3}, r"passes=3: expected a list of passes.*default_passes"),
    ({"passes": ["fuse"]}, r"passes=\['fuse'\]: expected a list of passes"),
]


@ACTIONS
@pytest.mark.parametrize(("options", "message"), VALUES, ids=[str(v[0]) for v in VALUES])
def test_an_illegal_value(
    action: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    refused(ConfigError, message, action, models.Mlp13(), **options)


def test_an_optimizer_option_that_makes_no_optimizer() -> None:
    report = plan(models.Mlp13(), optimizer=lambda params: None)
    with pytest.raises(ConfigError, match=r"optimizer=.*expected a callable .*AdamW"):
        _ = report.memory


UNITS = [
    (["blocks.7"], r"units: pattern 'blocks\.7' matches no module of Mlp13\. Its modules begin: "),
    (["blocks.*", "nope"], r"pattern 'nope' matches no module.*inlet, blocks, blocks\.0"),
    ([nn.LSTM], r"units: class LSTM matches no module of Mlp13"),
    ([3], r"units holds 3: expected a module class or an FQN glob"),
    (3, r"units=3: expected None, a list of classes or FQN globs, a callable"),
]


@ACTIONS
@pytest.mark.parametrize(("units", "message"), UNITS, ids=[str(u[0]) for u in UNITS])
def test_units_that_match_nothing(action: Callable[..., Any], units: Any, message: str) -> None:
    refused(UnitError, message, action, models.Mlp13(), units=units)


def test_illegal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_DEBUG", "loud")
    with pytest.raises(ConfigError, match=r"FXSHARD_DEBUG='loud': expected 0, 1, 2, 3 or 4"):
        environment()
    monkeypatch.setenv("FXSHARD_DEBUG", "0")
    monkeypatch.setenv("FXSHARD_FLAT_CAPTURE", "yes")
    with pytest.raises(ConfigError, match="FXSHARD_FLAT_CAPTURE='yes': expected 0 or 1"):
        environment()


# -- worlds ---------------------------------------------------------------------------------------


@ACTIONS
@pytest.mark.parametrize("size", [0, -1, "2", 2.0, True])
def test_a_world_size_that_is_no_number_of_ranks(action: Callable[..., Any], size: Any) -> None:
    message = re.escape(f"world_size={size!r}: expected a whole number of ranks >= 1")
    refused(ConfigError, message, action, models.Mlp13(), world_size=size)


def test_no_world_at_all() -> None:
    assert not dist.is_initialized()
    message = r"no process group is initialised and no world_size given\. Start with torchrun"
    refused(ConfigError, message, compile, models.Mlp13(), world_size=None)


def test_a_mesh_without_a_process_group() -> None:
    with compat.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        group = mesh.get_group()
    message = r"a mesh or process_group was given, but no process group is initialised: call "
    message += r"torch\.distributed\.init_process_group first"
    refused(ConfigError, message, compile, models.Mlp13(), mesh=mesh)
    refused(ConfigError, message, compile, models.Mlp13(), process_group=group)


@pytest.mark.parametrize("ranks", ["fake", "processes"])
@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True, None], ids=repr)
def test_validate_of_no_number_of_steps(steps: Any, ranks: str) -> None:
    """Of no steps nothing would be compared, and everything would hold."""
    message = f"steps={steps!r}: expected how many steps to run, an integer >= 1"
    refused(ConfigError, message, validate, models.Mlp13(), steps=steps, ranks=ranks)


def test_validate_inside_a_process_group() -> None:
    with compat.fake_process_group(0, 2):
        message = "validate needs a fake process group of its own.*in another process"
        refused(ConfigError, message, validate, models.Mlp13())


# -- models ---------------------------------------------------------------------------------------


@ACTIONS
@pytest.mark.parametrize(
    "model",
    [None, nn.Linear, lambda x: x, "llama"],
    ids=lambda model: getattr(model, "__name__", str(model)),
)
def test_something_that_is_no_module(action: Callable[..., Any], model: Any) -> None:
    message = (
        r"expected an nn\.Module, a torch\.fx\.GraphModule or a torch\.export\.ExportedProgram"
    )
    with pytest.raises(CaptureError, match=rf"{message}, got {type(model).__name__}"):
        action(model)


@ACTIONS
def test_a_scalar_parameter(action: Callable[..., Any]) -> None:
    model = models.Mlp13()
    model.blocks[1].gain = nn.Parameter(torch.tensor(1.0))
    message = r"parameter 'blocks\.1\.gain' is a scalar.*no dim 0.*nn\.Parameter\(x\.reshape\(1\)\)"
    refused(UnitError, message, action, model)


@ACTIONS
def test_a_parameter_that_is_not_contiguous(action: Callable[..., Any]) -> None:
    model = models.Mlp13()
    model.inlet.weight = nn.Parameter(torch.randn(5, 13).t())
    message = r"parameter 'inlet\.weight' is not contiguous \(shape \[13, 5\], strides \[1, 13\]\)"
    refused(UnitError, rf"{message}.*nn\.Parameter\(x\.contiguous\(\)\)", action, model)


def test_meta_parameters_where_data_is_needed() -> None:
    with torch.device("meta"):
        model = models.Mlp13()
    plan(model)
    message = r"parameter 'blocks\.0\.gain' is on the meta device.*\(Block13\).*param_init_fn"
    refused(UnitError, message, compile, model)
    message = r"parameter 'inlet\.weight' is on the meta device.*Give it a small model with real"
    refused(ConfigError, message, validate, model)


def test_one_meta_parameter_among_real_ones() -> None:
    """All or nothing: the parameters before it are not sharded either."""
    model = models.Mlp13()
    model.blocks[1].bias = nn.Parameter(torch.empty(13, device="meta"))
    refused(UnitError, r"parameter 'blocks\.1\.bias' is on the meta device", compile, model)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_a_hook(hook: str) -> None:
    model = models.Mlp13()
    getattr(model.head.weight, hook)(lambda grad: None)
    message = r"parameter 'head\.weight' has a hook.*on the parameter of the model that .* returns"
    refused(UnitError, message, compile, model)


def test_a_model_that_fsdp2_has_sharded() -> None:
    with compat.fake_process_group(0, 2):
        model = models.Mlp13()
        fully_shard(model)
        message = r"parameter 'inlet\.weight' is a DTensor already.*before fully_shard"
        refused(UnitError, message, compile, model)


@ACTIONS
def test_a_model_that_fxshard_has_sharded(action: Callable[..., Any]) -> None:
    _, model = pair(models.Mlp13)
    message = r"the model is sharded already.*Give the plain model.*\.plan and \.memory"
    refused(ConfigError, message, action, model)


# -- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"), [(batch(), None), ({"x": batch()}, None), ((), [batch()])], ids=str
)
def test_an_example_call_that_is_none(args: Any, kwargs: Any) -> None:
    message = r"expected a tuple and a dict, for model\(\*args, \*\*kwargs\)\. Write args=\(x,\)"
    for action in (fxshard.plan, fxshard.validate):
        with pytest.raises(ConfigError, match=message):
            action(models.Mlp13(), args, kwargs, world_size=2)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), r"Mlp13 cannot be called as model\(\): missing a required argument: 'x'"),
        (
            (torch.randn(4, 7),),
            r"Mlp13 cannot be traced \(RuntimeError: a and b must have same reduction dim",
        ),
    ],
    ids=["too few", "wrong shape"],
)
def test_a_call_that_the_model_refuses(args: Any, said: str) -> None:
    model = models.Mlp13()
    before = list(model.parameters())
    with pytest.raises(CaptureError, match=said):
        fxshard.plan(model, args, world_size=2)
    with pytest.raises(CaptureError, match=said):
        fxshard.compile(model, world_size=2, args=args)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_a_bad_call_does_not_spoil_the_compiled_model() -> None:
    eager, ours = pair(lambda: Net(lambda net, x: net.a(x).sum()))
    with pytest.raises(CaptureError):
        ours(torch.randn(4, 7))
    ours(batch()).backward()
    eager(batch()).backward()
    assert torch.allclose(ours.a.weight.grad, eager.a.weight.grad)
