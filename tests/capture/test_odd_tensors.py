"""Parameters, buffers and arguments that are more than plain dense tensors: refused by name."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.masked import masked_tensor
from torch.nested import nested_tensor
from torch.testing._internal.two_tensor import TwoTensor

import fxshard
from fxshard.errors import CaptureError, UnitError
from tests.eager import Net, assert_trains_like_eager, batch, pair


class Gain(nn.Parameter):
    """A subclass of Parameter that changes no operator."""


class Loud(nn.Parameter):
    """One that does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def two(*shape: int) -> TwoTensor:
    return TwoTensor(torch.randn(shape), torch.randn(shape))


def with_parameter(tensor: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = tensor
    return model


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_buffer("scale", tensor)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a subclass": (
        lambda: with_parameter(nn.Parameter(two(4, 4))),
        r"parameter '1\.weight' is a TwoTensor, a subclass .*fully_shard",
    ),
    "a subclass of Parameter": (
        lambda: with_parameter(Loud(torch.randn(4, 4))),
        r"parameter '1\.weight' is a Loud",
    ),
    "a buffer": (lambda: with_buffer(two(4)), r"buffer '1\.scale' is a TwoTensor"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(4)),
        r"parameter '0\.weight' is lazy and has no shape yet\. Call the plain model once",
    ),
    "sparse": (
        lambda: with_buffer(torch.eye(4).to_sparse()),
        r"buffer '1\.scale' is sparse \(torch\.sparse_coo\)",
    ),
    "quantized": (
        lambda: with_buffer(torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)),
        r"buffer '1\.scale' is quantized \(torch\.qint8\)",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("verb", ["compile", "shard", "plan"])
def test_what_is_no_plain_tensor_is_refused(name: str, verb: str) -> None:
    build, message = REFUSED[name]
    model = build()
    before = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with pytest.raises(UnitError, match=message):
        if verb == "plan":
            fxshard.plan(model, (torch.randn(2, 4),), world_size=2)
        else:
            getattr(fxshard, verb)(model, world_size=2)
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} == before


def test_what_is_no_plain_tensor_is_refused_where_it_is_ignored() -> None:
    model = with_parameter(nn.Parameter(two(4, 4)))
    with pytest.raises(UnitError, match=r"'1\.weight' is a TwoTensor"):
        fxshard.compile(model, world_size=2, ignored=["1"])


def test_a_subclass_of_parameter_that_changes_no_operator_is_a_parameter() -> None:
    model = with_parameter(Gain(torch.randn(4, 4)))
    batch = torch.randn(2, 4)
    expected = model(batch)
    assert torch.equal(fxshard.compile(model, world_size=2)(batch), expected)


RAGGED = [torch.ones(2, 4), torch.ones(3, 4)]
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "a TwoTensor, a subclass": lambda: two(2, 4),
    "a NestedTensor, a subclass": lambda: nested_tensor(RAGGED, layout=torch.jagged),
    "nested": lambda: nested_tensor(RAGGED),
    "a MaskedTensor, a subclass": lambda: masked_tensor(torch.ones(2, 4), torch.ones(2, 4) > 0),
    "sparse (torch.sparse_csr)": lambda: torch.eye(4).to_sparse_csr(),
    "quantized (torch.qint8)": lambda: torch.quantize_per_tensor(
        torch.ones(2, 4), 0.1, 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("verb", ["compile", "plan"])
def test_arguments_that_are_no_plain_tensors_are_refused(kind: str, verb: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), ARGUMENTS[kind]()
    with pytest.raises(CaptureError, match=re.escape(f"argument kwargs['input'] is {kind}")):
        if verb == "plan":
            fxshard.plan(model, kwargs={"input": x}, world_size=2)
        else:
            fxshard.compile(model, world_size=2)(input=x)


# -- memory ----------------------------------------------------------------------------------------


def same_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def overlapping() -> nn.Module:
    flat = torch.randn(10)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:6]), nn.Parameter(flat[5:])
    return model


def buffer_of_a_parameter() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_buffer("first", model[0].weight.data[1])
    return model


def parameter_as_buffer() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_buffer("tied", model[0].weight)
    return model


def frozen_parameter_as_buffer() -> nn.Module:
    return parameter_as_buffer().requires_grad_(False)


SHARING = {
    "one storage": (same_data, "parameter '0.weight' and parameter '1.weight'"),
    "overlapping": (overlapping, "parameter 'a' and parameter 'b'"),
    "a buffer": (buffer_of_a_parameter, "parameter '0.weight' and buffer '1.first'"),
    "as a buffer too": (parameter_as_buffer, "buffer '1.tied' and parameter '0.weight'"),
    "frozen": (frozen_parameter_as_buffer, "buffer '1.tied' and parameter '0.weight'"),
}


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_share_memory_are_refused(name: str, device: str) -> None:
    build, names = SHARING[name]
    with torch.device(device):
        model = build()
    with pytest.raises(UnitError, match=f"{names} lie in the same memory.*clone"):
        fxshard.compile(model, world_size=2)


class Sines(nn.Module):
    """Buffers that are parts of one tensor, and one of them under two names."""

    def __init__(self, overlap: bool) -> None:
        super().__init__()
        both = torch.randn(8)
        self.lin = nn.Linear(4, 4)
        self.register_buffer("cos", both[:4])
        self.register_buffer("sin", both.view(2, 4) if overlap else both[4:])
        self.register_buffer("again", self.cos)

    def forward(self, x: Tensor) -> Tensor:
        self.cos.mul_(2)
        return self.lin(x) * self.sin.sum() + self.again


WIDE = MixedPrecision(buffer_dtype=torch.float64)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_that_overlap_are_not_cast(device: str) -> None:
    with torch.device(device):
        model = Sines(overlap=True)
    with pytest.raises(UnitError, match=r"'cos' and 'sin'.*buffer_dtype.*clone"):
        fxshard.compile(model, world_size=2, mixed_precision=WIDE)
    with pytest.raises(UnitError, match="buffer_dtype"):
        fxshard.plan(Sines(overlap=True), (torch.ones(2, 4),), world_size=2, mixed_precision=WIDE)


def test_buffers_of_one_tensor_are_cast_to_memory_of_their_own() -> None:
    found = fxshard.validate(
        Sines(overlap=False),
        (torch.ones(2, 4),),
        world_size=2,
        numerics=True,
        mixed_precision=WIDE,
    )
    assert found.holds, found.table(only_different=True)


def test_an_ignored_parameter_that_is_a_buffer_too_is_refused() -> None:
    with pytest.raises(UnitError, match=r"buffer '1\.tied' and parameter '0\.weight' lie in"):
        fxshard.compile(parameter_as_buffer(), world_size=2, ignored=["0"])


# -- buffers that need a gradient ------------------------------------------------------------------

LEARNED = r"buffer 'seen' requires a gradient.*nn\.Parameter.*detach it \(module\.seen = "


def scales(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.a(x) * net.seen


def test_a_buffer_that_needs_a_gradient_is_refused() -> None:
    leaf, computed, parameter = Net(scales), Net(scales), Net(scales)
    leaf.seen.requires_grad_()
    computed.seen = computed.a(batch()).mean(0)
    parameter._buffers["seen"] = nn.Parameter(torch.ones(6))  # as register_buffer would have it
    for model in (leaf, computed, parameter):
        with pytest.raises(UnitError, match=LEARNED):
            fxshard.compile(model, world_size=2)
        with pytest.raises(UnitError, match=LEARNED):
            fxshard.plan(model, (batch(),), world_size=2)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_buffer_that_needs_a_gradient_behind_compile_is_refused(calls: int) -> None:
    _, ours = pair(lambda: Net(scales))
    for _ in range(calls):
        ours(batch()).sum().backward()
    ours.seen.requires_grad_()
    with pytest.raises(CaptureError, match=LEARNED):
        ours(batch())
    with torch.no_grad():
        ours(batch())


def test_a_frozen_parameter_may_be_a_buffer() -> None:
    def build() -> nn.Module:
        model = Net(scales)
        frozen = nn.Parameter(torch.full((6,), 2.0), requires_grad=False)
        model._buffers["seen"] = frozen  # as register_buffer would have it
        return model

    assert_trains_like_eager(build, batch())


def test_parameters_of_one_storage_that_do_not_overlap() -> None:
    """As cuDNN lays out those of recurrent modules."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(2, 4, 4)
            self.a, self.b = nn.Parameter(flat[0]), nn.Parameter(flat[1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.a) @ self.b

    model, batch = Halves(), torch.randn(3, 4)
    expected = model(batch)
    expected.sum().backward()
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    sharded = fxshard.compile(model, world_size=2)
    made = sharded(batch)
    made.sum().backward()
    assert torch.equal(made, expected)
    for param, grad in zip(sharded.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_ignored_parameters_stay_in_the_memory_that_they_share() -> None:
    model, batch = same_data(), torch.randn(3, 4)
    expected = model(batch)
    sharded = fxshard.compile(model, world_size=2, ignored=["*.weight"])
    assert torch.equal(sharded(batch), expected)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


# -- parameters that forward finds elsewhere than in its modules -----------------------------------


class Hidden(nn.Module):
    """Reads a parameter through `where` besides."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        weight = self.layer.weight
        self.other: Any = {
            "a list": lambda: [weight],
            "a closure": lambda: lambda: weight,
            "an attribute": lambda: weight.data.t(),
            "a tensor of its own": lambda: torch.randn(4, 4, requires_grad=True),
        }[where]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.other
        other = other() if callable(other) else other[0] if isinstance(other, list) else other
        return self.layer(x) @ other


@pytest.mark.parametrize("where", ["a list", "a closure", "an attribute"])
@pytest.mark.parametrize("when", ["before", "after", "plan", "dynamo"])
def test_a_parameter_that_forward_finds_elsewhere_is_refused(where: str, when: str) -> None:
    """Found while tracing, before the model is sharded or after."""
    model, batch = Hidden(where), torch.randn(2, 4)
    message = r"forward reads parameter 'layer\.weight', or a view of it, from elsewhere"
    with pytest.raises(CaptureError, match=message):
        if when == "before":
            fxshard.compile(model, world_size=2, args=(batch,))
        elif when == "after":
            fxshard.compile(model, world_size=2)(batch)
        elif when == "dynamo":
            torch.compile(fxshard.shard(model, world_size=2), backend="fxshard")(batch)
        else:
            fxshard.plan(model, (batch,), world_size=2)


def test_a_tensor_that_would_get_no_gradient_is_refused() -> None:
    model = Hidden("a tensor of its own")
    with pytest.raises(CaptureError, match=r"\[4, 4\] that requires a gradient.*nn\.Parameter"):
        fxshard.compile(model, world_size=2)(torch.randn(2, 4))
