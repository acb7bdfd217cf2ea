"""What several of the tests beside it need (test_capture, test_modes, test_variables)."""

import dataclasses
import enum
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from fxshard.ir import tags
from fxshard.ir.program import Program
from tests.eager import Net
from tests.zoo import MODELS


def where(program: Program, phase: tags.Phase, target: Any) -> list[str]:
    """Modules of the operators `target` of a phase, in order."""
    return [tags.get(n).module for n in program.phase(phase) if n.target is target]


@dataclasses.dataclass
class Output:
    y: Any
    rest: Any = None
    count: int = 3


class Computes(nn.Module):
    """What it computes of a linear layer's result is given."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.linear(x))


def eager_and_ours(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """A model, and an equal one that is compiled for two ranks in this process."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made[0], fxshard.compile(made[1], world_size=2)


Pair = namedtuple("Pair", "first second")


class Mode(enum.Enum):
    FAST = 1


def model_output(net: Net, x: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    y = net.a(x)
    return BaseModelOutput(last_hidden_state=y, hidden_states=(y, x))


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda net, x: (net.a(x), net.b(x)), lambda o: (o[0] * o[1]).sum()),
    "loss and logits": (
        lambda net, x: ((y := net.a(x)).sum(), y, y.detach()),
        lambda o: o[0],
    ),
    "dict": (
        lambda net, x: {"y": net.a(x), "no": None, "int": 3, "str": "s", "float": 1.5, "yes": True},
        lambda o: o["y"].sum(),
    ),
    "nested": (
        lambda net, x: {"all": [net.a(x), (net.b(x), None)], "empty": {}, "mode": Mode.FAST},
        lambda o: o["all"][0].sum() + o["all"][1][0].sum(),
    ),
    "dataclass": (
        lambda net, x: Output(net.a(x), Output({"x": x})),
        lambda o: o.y.sum() * o.count,
    ),
    "namedtuple": (lambda net, x: Pair(net.a(x), x), lambda o: o.first.sum()),
    "torch.Size": (lambda net, x: (net.a(x), x.shape, {"of": x.size()}), lambda o: o[0].sum()),
    "torch.return_types": (lambda net, x: net.a(x).max(-1), lambda o: o.values.sum()),
    "ModelOutput": (model_output, lambda o: o.last_hidden_state.sum()),
    "views of one tensor": (
        lambda net, x: net.a(x).chunk(2, -1),
        lambda o: (o[0] * o[1]).sum(),
    ),
    "one of two views": (lambda net, x: net.a(x).chunk(2, -1), lambda o: o[0].sum()),
    "a tensor and its view": (
        lambda net, x: ((y := net.a(x)), y.view(-1)),
        lambda o: o[0].sum() + o[1].square().sum(),
    ),
    "expanded": (lambda net, x: net.a(x).sum().expand(3), lambda o: o.sum()),
    "one tensor twice": (lambda net, x: [net.a(x)] * 2, lambda o: (o[0] * o[1]).sum()),
    "an input": (lambda net, x: (x, x.t(), net.a(x)), lambda o: (o[2] * o[0][:, :1]).sum()),
    "a parameter": (
        lambda net, x: (net.a.weight, net.a.weight.t(), net.a(x)),
        lambda o: o[0].square().sum() + o[1].sum() + o[2].sum(),
    ),
    "a buffer": (lambda net, x: (net.seen, net.a(x)), lambda o: (o[0] * o[1]).sum()),
    "integers": (
        lambda net, x: (net.a(x).argmax(-1), net.a(x) > 0, net.a(x)),
        lambda o: o[2].sum(),
    ),
    "complex": (lambda net, x: torch.fft.fft(net.a(x)), lambda o: o.abs().sum()),
}


def assert_same_output(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        assert_close(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad or not torch.is_grad_enabled()
        return
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        assert_same_output(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_output(mine, other)
    elif dataclasses.is_dataclass(theirs):
        assert_same_output(vars(ours), vars(theirs))
    else:
        assert ours == theirs


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build()
