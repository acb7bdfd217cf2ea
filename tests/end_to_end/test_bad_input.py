"""What is wrong, where, and what to do: every refusal says it, and leaves the model as it was."""

import builtins
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxshard
from fxshard._torch import process_groups
from fxshard.config.environment import environment
from fxshard.errors import CaptureError, ConfigError, FxshardError, UnitError
from fxshard.passes.canonicalize import Canonicalize
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


def tune(model: nn.Module, **options: Any) -> Any:
    wanted = {"world_size": 2, "hardware": "h100", "plans": 1}
    return fxshard.tune(model, (batch(),), **wanted | options)


def said(value: Any) -> str:
    """For names of tests: those of all workers are the same, addresses are not."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


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
    ({"offload": "cpu"}, r"offload='cpu': expected torch\.distributed\.fsdp\.CPUOffloadPolicy"),
    ({"ignored": "head"}, r"ignored='head': expected a list .*; write ignored=\['head'\]"),
    ({"param_init_fn": 3}, r"param_init_fn=3: expected a function of a module"),
    ({"strategy": ["full_shard"]}, r"strategy=\['full_shard'\] is not supported"),
    ({"backend": "aot"}, r"backend='aot' is not supported; legal: eager, inductor\."),
    ({"forward_prefetch": -1}, r"forward_prefetch=-1: expected an integer >= 0"),
    ({"backward_prefetch": "1"}, r"backward_prefetch='1': expected an integer >= 0"),
    ({"backward_prefetch": True}, r"backward_prefetch=True: expected an integer >= 0"),
    ({"units": "blocks.*"}, r"units='blocks\.\*': expected a list .* units=\['blocks\.\*'\]"),
    ({"optimizer": "adam"}, r"optimizer='adam': expected a callable .*torch\.optim\.AdamW\(params"),
    ({"passes": 3}, r"passes=3: expected a list of passes.*default_passes"),
    ({"passes": ["fuse"]}, r"passes=\['fuse'\]: expected a list of passes"),
    ({"passes": []}, r"passes=\[\]: expected a list of passes"),
    ({"passes": ""}, r"passes='': expected a list of passes"),
    ({"passes": [Canonicalize]}, r"passes=\[.*Canonicalize'>\]: expected .*instances of classes"),
    ({"passes": int}, r"passes=<class 'int'>: expected a list of passes"),
    ({"passes": lambda: []}, r"passes=.*: expected a function of the default list, but of this"),
    ({"units": nn.Linear}, r"units=Linear: expected a list of .*; write units=\[Linear\]"),
    ({"units": nn.Linear(2, 2)}, r"units=<Linear>: expected a list .*; write units=\[<Linear>\]"),
    ({"ignored": nn.Linear(2, 2)}, r"ignored=<Linear>: expected a list of modules, parameters"),
    ({"ignored": 5}, r"ignored=5: expected a list of modules, parameters and FQN globs, such as"),
    ({"ignored": {"head": 1}}, r"ignored=\{'head': 1\}: expected a list of modules"),
    ({"full_precision_in_eval": "no"}, r"full_precision_in_eval='no': expected True or False"),
    ({"sync_module_states": "false"}, r"sync_module_states='false': expected True or False"),
    ({"sync_module_states": None}, r"sync_module_states=None: expected True or False"),
    ({"optimizer_in_backward": []}, r"optimizer_in_backward=\[\]: expected True or False"),
    ({"gradient_divide_factor": math.inf}, r"gradient_divide_factor=inf: expected a number > 0"),
    ({"gradient_divide_factor": math.nan}, r"gradient_divide_factor=nan: expected a number > 0"),
    ({"gradient_divide_factor": True}, r"gradient_divide_factor=True: expected a number > 0"),
    ({"gradient_predivide_factor": "2"}, r"gradient_predivide_factor='2': expected a number > 0"),
    ({"param_init_fn": lambda: None}, r"param_init_fn=.*: expected a function of a module, but"),
    ({"dynamic": {"b": []}}, r"dynamic=\{'b': \[\]\}: expected None, False, or names"),
    ({"dynamic": {"": [("x", 0)]}}, r"dynamic=\{'': .*: expected None, False, or names"),
    ({"dynamic": {"b": [("x", 0.5)]}}, r"dynamic=.*0\.5.*: expected None, False, or names"),
    ({"dynamic": {"b": [("x", True)]}}, r"dynamic=.*True.*: expected None, False, or names"),
    ({"mixed_precision": MixedPrecisionPolicy(param_dtype="bf16")}, r"param_dtype='bf16': "),
    (
        {"mixed_precision": MixedPrecisionPolicy(reduce_dtype=torch.int32)},
        r"reduce_dtype=torch\.int32: expected a floating",
    ),
]


@ACTIONS
@pytest.mark.parametrize(("options", "message"), VALUES, ids=[said(v[0]) for v in VALUES])
def test_an_illegal_value(
    action: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    refused(ConfigError, message, action, models.Mlp13(), **options)


def test_an_optimizer_option_that_makes_no_optimizer() -> None:
    report = plan(models.Mlp13(), optimizer=lambda params: None)
    with pytest.raises(ConfigError, match=r"optimizer=.*expected a callable .*AdamW"):
        _ = report.memory


CALLS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (plan, {"micro_batches": True}, r"micro_batches=True: expected how many a step has"),
    (plan, {"micro_batches": 1.0}, r"micro_batches=1\.0: expected how many a step has"),
    (plan, {"no_sync": "no"}, r"no_sync='no': expected True or False"),
    (plan, {"loss": 3}, r"loss=3: expected a function of what the model returns"),
    (plan, {"observe": 3}, r"observe=3: expected a function of a pass's name and text before and"),
    (plan, {"observe": print, "loss": lambda: 0}, r"loss=.*: expected a function of what"),
    (plan, {"observe": lambda name: None}, r"observe=.*but of this one too many positional"),
    (plan, {"kwargs": {3: 3}}, r"kwargs has the key 3: expected names of arguments"),
    (plan, {"dynamic": {"b": [("y", 0)]}}, r"dynamic\['b'\] names 'y', but the call has .*takes x"),
    (plan, {"dynamic": {"b": [("x", 7)]}}, r"dynamic\['b'\] names dimension 7 of 'x'"),
    (validate, {"numerics": "no"}, r"numerics='no': expected True or False"),
    (validate, {"micro_batches": True}, r"micro_batches=True: expected how many a step has"),
    (validate, {"ranks": None}, r"ranks=None: expected 'fake' or 'processes'"),
    (compile, {"args": torch.ones(2)}, r"args is a Tensor .*Write args=\(x,\)"),
    (compile, {"args": ""}, r"args is a str .*Write args=\(x,\)"),
    (compile, {"mesh": 3}, r"mesh=3: expected a torch\.distributed\.device_mesh\.DeviceMesh"),
    (compile, {"process_group": "g"}, r"process_group='g': expected what .*new_group returns"),
    (compile, {"process_group": (1, 2, 3)}, r"process_group=\(1, 2, 3\): expected what .*a pair"),
    (compile, {"passes": lambda p: 1 / 0}, r"passes=.* failed with ZeroDivisionError: division by"),
    (plan, {"passes": lambda p: 1 / 0}, r"passes=.* failed with ZeroDivisionError: division by"),
    (plan, {"passes": lambda p: []}, r"passes=.* returned \[\]: expected a list of passes"),
    (plan, {"passes": lambda p: ""}, r"passes=.* returned '': expected a list of passes"),
    (tune, {"progress": "no"}, r"progress='no': expected True or False"),
    (tune, {"no_sync": "no"}, r"no_sync='no': expected True or False"),
    (tune, {"batches": b"x"}, r"batches=b'x': expected a list of whole numbers"),
    (tune, {"batches": 3}, r"batches=3: expected a list of whole numbers"),
]


@pytest.mark.parametrize(
    ("action", "options", "message"), CALLS, ids=[f"{c[0].__name__} {said(c[1])}" for c in CALLS]
)
def test_an_illegal_argument(
    action: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    model = models.Mlp13()
    if action is compile and "passes" in options:
        options = {"args": (batch(),), **options}
    refused(FxshardError, message, action, model, **options)


def test_what_a_plan_is_asked() -> None:
    made = plan(models.Mlp13(), dynamic={"b": [("x", 0)]})
    ask: list[tuple[Callable[[], Any], str]] = [
        (lambda: made.dump(phase="nope"), r"phase='nope': expected 'forward', 'backward', or None"),
        (lambda: made.dump(fold="no"), r"fold='no': expected True or False"),
        (lambda: made.dump(hardware=3), r"hardware=3: expected one of a100"),
        (lambda: made.replan(args=3), r"args is a int .*Write args=\(x,\) for model\(x\)"),
        (lambda: made.replan(kwargs=3), r"kwargs a int: expected a tuple and a dict"),
        (lambda: made.replan(module=models.Mlp13()), r"unknown option 'module'"),
        (lambda: made.replan(world_size="2"), r"world_size='2': expected a whole number"),
        (lambda: made.replan(micro_batches=0), r"micro_batches=0: expected how many"),
        (lambda: made.replan(no_sync="no"), r"no_sync='no': expected True or False"),
        (lambda: made.replan(loss=3), r"loss=3: expected a function of what the model returns"),
        (lambda: made.at(b="4"), r"b='4': a size is an integer"),
        (lambda: made.at(nope=4), r"no size 'nope': this plan has 'b', 'world'"),
        (lambda: made.solve(3, "1GiB"), r"solve\(3\): this plan knows max_b, min_world"),
        (lambda: made.solve("max_b", math.nan), r"nan is no size"),
        (lambda: made.largest_batch("no"), r"'no' is no size"),
        (lambda: made.largest_batch("1GiB", multiple_of=0), r"multiple_of=0: expected an integer"),
        (lambda: made.longest_sequence("1GiB", dim="x"), r"dim='x': expected"),
        (lambda: made.estimate("h100", ranks_per_node="x"), r"ranks_per_node='x': expected"),
        (lambda: made.estimate(3), r"hardware=3: expected one of"),
        (lambda: made.memory.table(depth="x"), r"depth='x': expected"),
        (lambda: made.memory.table(units="nope"), r"units='nope'; legal: B, KiB"),
        (lambda: made.memory.explain_peak("x"), r"top='x': expected"),
        (lambda: made.memory.explain_peak(what_ifs="no"), r"what_ifs='no': expected True or False"),
        (lambda: made.memory.assert_fits(math.inf), r"inf is no size"),
    ]
    for number, (asked, message) in enumerate(ask):
        with pytest.raises(ConfigError, match=message):
            asked()
            pytest.fail(f"{number}: {message}")


def test_a_plan_without_a_schedule() -> None:
    """Passes may be fewer, for who reads the graph; what needs a schedule says so."""
    made = plan(models.Mlp13(), passes=[Canonicalize()])
    assert made.program.graph.nodes
    for ask in (lambda: made.memory, lambda: made.code, made.dump, lambda: made.estimate("h100")):
        with pytest.raises(ConfigError, match=r"without a schedule.*Put 'outline-regions' at the"):
            ask()


def test_collections_that_are_read_once() -> None:
    """A set or a generator says what a list of the same says; None ignores nothing."""
    model = models.Mlp13()
    head = list(model.head.parameters())
    said = [plan(model, ignored=each).certificate for each in (head, set(head), iter(head))]
    assert len(set(said)) == 1
    assert plan(model, ignored=None).certificate == plan(model).certificate != said[0]
    listed = [type(model.blocks[0])]
    said = [plan(model, units=each).certificate for each in (listed, set(listed), iter(listed))]
    assert len(set(said)) == 1


def test_a_units_function_that_fails() -> None:
    message = r"units=.* failed with ZeroDivisionError: .*called as units\(fqn, module\)"
    refused(UnitError, message, plan, models.Mlp13(), units=lambda fqn, module: 1 / 0)


UNITS = [
    (["blocks.7"], r"units: pattern 'blocks\.7' matches no module of Mlp13\. Its modules begin: "),
    (["blocks.*", "nope"], r"pattern 'nope' matches no module.*inlet, blocks, blocks\.0"),
    ([nn.LSTM], r"units: class LSTM matches no module of Mlp13"),
    ([3], r"units holds 3: expected a module class or an FQN glob"),
    (3, r"units=3: expected None, a list of classes or FQN globs, a callable"),
]


@ACTIONS
@pytest.mark.parametrize(("units", "message"), UNITS, ids=[said(u[0]) for u in UNITS])
def test_units_that_match_nothing(action: Callable[..., Any], units: Any, message: str) -> None:
    refused(UnitError, message, action, models.Mlp13(), units=units)


def test_illegal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_DEBUG", "loud")
    with pytest.raises(ConfigError, match=r"FXSHARD_DEBUG='loud': expected 0, 1, 2, 3 or 4"):
        environment()
    monkeypatch.setenv("FXSHARD_DEBUG", "0")
    monkeypatch.setenv("FXSHARD_DEBUG", "")  # as unset
    environment()
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
    with process_groups.fake_process_group(0, 2):
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
    with process_groups.fake_process_group(0, 2):
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
    with process_groups.fake_process_group(0, 2):
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
    ("args", "kwargs"), [(batch(), None), ({"x": batch()}, None), ((), [batch()])], ids=said
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


OF_VALUES: list[tuple[Callable[..., Any], str]] = [
    (
        lambda net, x: F.gaussian_nll_loss(net.a(x), torch.ones(4, 6), net.a(x).exp()),
        r"test_bad_input\.py\", line \d+, in <lambda>\n +lambda net, x: F\.gaussian_nll_loss"
        r"[^\n]*\n(It is called .*\. )?Write out what it computes: 0\.5",
    ),
    (
        lambda net, x: F.one_hot(net.a(x).argmax(1)).sum() + net.a(x).sum(),
        r"F\.one_hot[^\n]*\n(It is called .*\. )?Give one_hot the number of classes: num_classes=",
    ),
    (
        lambda net, x: net.a(x) if torch.allclose(x, x) else x,
        r"torch\.allclose[^\n]*\nMake it a tensor operation \(torch\.where, masking\)",
    ),
]


@pytest.mark.parametrize(("function", "message"), OF_VALUES, ids=["nll", "one_hot", "allclose"])
def test_what_torch_asks_of_values(function: Callable[..., Any], message: str) -> None:
    """The line of the user, though torch is what looks, and what to write there."""
    model = Net(function)
    with pytest.raises(CaptureError, match=message):
        plan(model)
    if "allclose" not in message:
        with pytest.raises(ConfigError, match=message):
            wanted = {"loss": lambda out: function(model, out[:, :5]), "world_size": 2}
            _ = fxshard.plan(nn.Linear(5, 6), (batch(),), **wanted).memory


WITHOUT_FILE = """
import torch
from torch import nn
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.register_buffer("one", torch.zeros(5))
        self.register_buffer("other", self.one[:2])
    def forward(self, x):
        {line}
        return self.fc(x).sum() + self.one.sum() + self.other.sum()
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("self.one.add_(1)", r"writes buffer 'one' \(at <typed>:11 in forward\)"),
        ("self.fc.weight.data.add_(1)", r"'fc\.weight' is changed in place .*, at <typed>:11 in"),
        ("torch.ones(1).uniform_(generator=torch.Generator())", r"Generator, at <typed>:11 in"),
        ("x = x if self.fc(x).sum() > 0 else -x", r'at\n  File "<typed>", line 11, in forward'),
    ],
)
def test_the_line_of_code_that_has_no_file(line: str, message: str) -> None:
    """What is typed or ``exec``ed has lines too; who asks for the trace is none of them."""
    space: dict[str, Any] = {"__name__": __name__}
    exec(builtins.compile(WITHOUT_FILE.format(line=line), "<typed>", "exec"), space)
    with pytest.raises(CaptureError, match=message):
        plan(space["Module"]())


def test_a_graph_has_no_line_of_who_asks_for_the_trace() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.fc.weight.data.add_(1)
            return self.fc(x).sum()

    graph = torch.fx.symbolic_trace(Writes())
    message = r"'fc\.weight' is changed in place during forward, by aten\.add_?\.Tensor"
    with pytest.raises(CaptureError, match=message):
        plan(graph)


def test_a_bad_call_does_not_spoil_the_compiled_model() -> None:
    eager, ours = pair(lambda: Net(lambda net, x: net.a(x).sum()))
    with pytest.raises(CaptureError):
        ours(torch.randn(4, 7))
    ours(batch()).backward()
    eager(batch()).backward()
    assert torch.allclose(ours.a.weight.grad, eager.a.weight.grad)
