"""What torch offers beside plain operators: right, or refused with a remedy that fits."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fxshard
from fxshard.errors import CaptureError
from tests.eager import Net, assert_trains_like_eager, batch, pair


def positive(net: Net) -> Tensor:
    """[6, 6], positive definite."""
    weight = net.a.weight
    return weight @ weight.T + net.b.weight @ net.b.weight.T + torch.eye(6)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: torch.linalg.inv(positive(net)) @ net.a(x).T,
        lambda net, x: torch.linalg.solve(positive(net), net.a(x).T),
        lambda net, x: torch.linalg.cholesky(positive(net)) @ net.a(x).T,
    ],
)
def test_linear_algebra_that_checks_its_matrix(function: Callable[..., Tensor]) -> None:
    assert_trains_like_eager(lambda: Net(function), batch())


def test_a_singular_matrix_raises_as_in_eager() -> None:
    def function(net: Net, x: Tensor, matrix: Tensor) -> Tensor:
        return torch.linalg.inv(matrix) @ net.a(x).T + net.b(x).sum()

    _, ours = pair(lambda: Net(function))
    ours(batch(), torch.eye(6))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        ours(batch(), torch.zeros(6, 6))


@pytest.mark.parametrize("mode", [CommDebugMode, lambda: FlopCounterMode(display=False)])
def test_the_first_call_inside_of_a_tool_of_torch(mode: Callable[[], Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6))

    eager, ours = pair(build)
    with mode():
        out = ours(batch())
        out.sum().backward()
    assert_close(out, eager(batch()))


def test_a_tool_sees_what_runs_and_no_trace() -> None:
    _, ours = pair(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6)), world_size=1)
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            ours(batch()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


class Blocks(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2)
        )
        self.wrapped = [wrap(block) for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        for run in self.wrapped:
            x = run(x)
        return x


def test_a_composable_checkpoint_is_a_checkpoint() -> None:
    x = torch.randn(512, 16)
    plans = [
        fxshard.plan(Blocks(wrap), (x,), world_size=2).memory.peak_bytes
        for wrap in (composable, lambda m: lambda x: checkpoint(m, x, use_reentrant=False))
    ]
    assert (
        plans[0]
        == plans[1]
        < fxshard.plan(Blocks(lambda m: m), (x,), world_size=2).memory.peak_bytes
    )


def branches(net: Net, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: net.a(y), lambda y: net.b(y), (x,))


def writes_an_attribute(net: Any, x: Tensor) -> Tensor:
    net.scale.add_(1.0)
    return net.a(x) * net.scale


def writes_an_attribute_by_out(net: Any, x: Tensor) -> Tensor:
    torch.add(net.scale, 1.0, out=net.scale)
    return net.a(x) * net.scale


def counts_paths(net: Net, x: Tensor) -> Tensor:
    labels, lengths = torch.tensor([[1, 2]]), torch.tensor([4])
    scores = net.a(x)[:, None].log_softmax(-1)
    return nn.functional.ctc_loss(scores, labels, lengths, torch.tensor([2]))


def packs(net: Net, x: Tensor) -> Tensor:
    return pack_padded_sequence(net.a(x)[None], torch.tensor([3]), batch_first=True).data


def solves(net: Net, x: Tensor) -> Tensor:
    return torch.linalg.lstsq(net.a(x), net.b(x)).solution


def multiplies_sparse(net: Net, x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), net.a.weight.T) + net.b(x)


def freezes(net: Net, x: Tensor) -> Tensor:
    net.a.weight.requires_grad_(False)
    return net.a(x)


def goes_back(net: Net, x: Tensor) -> Tensor:
    loss = net.a(x).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("function", "said", "remedy"),
    [
        (freezes, "requires_grad flags", "outside of forward, before a call"),
        (goes_back, "Forward calls backward", "torch.autograd.grad("),
        (branches, "higher-order operator cond", "torch.where"),
        (writes_an_attribute, "writes in place (aten.add_", "register_buffer"),
        (writes_an_attribute_by_out, "writes in place (aten.add", "register_buffer"),
        (counts_paths, "the values of a tensor", "compute ctc_loss outside"),
        (solves, "the values of a tensor", "torch.linalg.pinv(a) @ b"),
        (packs, "the values of a tensor", "Feed padded sequences"),
        (multiplies_sparse, "gives a sparse tensor", "dense tensors"),
    ],
)
def test_a_refusal_names_the_line_and_a_remedy_that_fits(
    function: Callable[..., Any], said: str, remedy: str
) -> None:
    model: Any = Net(function)
    model.scale = torch.ones(6)
    with pytest.raises(CaptureError) as failure:
        fxshard.compile(copy.deepcopy(model), world_size=2)(batch())
    text = str(failure.value)
    assert said in text
    assert remedy in text
    assert function.__name__ in text
    assert torch.equal(model.scale, torch.ones(6))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_buffer_that_a_checkpoint_writes_is_told(
    reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def function(net: Net, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            net.seen.mul_(0.5)
            return h * net.seen.detach().clone()

        return checkpoint(inner, net.a(x) + net.b(x), use_reentrant=reentrant)

    eager, ours = pair(lambda: Net(function))
    with caplog.at_level(logging.WARNING, "fxshard"):
        assert_close(ours(batch()), eager(batch()))
    assert "seen is written inside of an activation checkpoint: once" in caplog.text
    assert_close(ours.seen, eager.seen)
