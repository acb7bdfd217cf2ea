"""What forward reads and changes besides parameters is as in eager: buffers, tensors, arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from fxshard.capture import aliasing
from fxshard.errors import CaptureError, VerifyError
from fxshard.memory.category import Category
from tests import fsdp2
from tests.capture.capture_cases import assert_same_output
from tests.eager import Net, assert_trains_like_eager, batch, pair
from tests.zoo import MODELS


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.scale = torch.arange(6.0)  # a tensor, but no buffer

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale + torch.tensor([1.0, 2, 3, 4, 5, 6])).sum()


def test_a_tensor_that_is_no_buffer() -> None:
    assert_trains_like_eager(Holds, batch())


POSITIONS = torch.arange(6.0)


class Masked(nn.Module):
    """Multiplies by views of tensors that are no parameters and no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.scale = torch.linspace(0, 1, 48).reshape(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).tanh().chunk(2, dim=-1)
        return (a * self.scale[: x.shape[0], :3] + b * POSITIONS[1:4] + self.scale[0, 3:]).sum()


@pytest.mark.parametrize("dynamic", [None, {"batch": [("x", 0)]}])
def test_views_of_tensors_that_are_not_registered(dynamic: Any) -> None:
    assert_trains_like_eager(Masked, batch())
    plan = fxshard.plan(Masked(), kwargs={"x": batch()}, world_size=2, dynamic=dynamic)
    held = [range_ for range_ in plan.memory.ledger().ranges if range_.category is Category.BUFFER]
    assert sorted(range_.bytes for range_ in held) == [4 * 6, 4 * 48]
    assert fxshard.validate(Masked(), (batch(),), world_size=2).max_abs_difference == 0


@pytest.mark.parametrize("world_size", [1, 3])
def test_batch_norm_statistics_are_written_back(world_size: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    assert_trains_like_eager(build, batch(), world_size=world_size)
    case = MODELS["convnet"]
    torch.manual_seed(0)
    eager = fsdp2.run_steps(case.build(), case, 2)
    torch.manual_seed(0)
    ours = fsdp2.run_steps(fxshard.compile(case.build(), world_size=world_size), case, 2)
    fsdp2.assert_close(ours, eager, rtol=1e-6)
    assert ours.buffers["blocks.0.norm.num_batches_tracked"] == 2


def mutated_after_it_was_read(net: Net, x: Tensor) -> Tensor:
    y = net.a(x) * (net.seen + 1)
    net.seen.add_(1)
    return y.square().sum()


def mutated_before_it_is_read(net: Net, x: Tensor) -> Tensor:
    net.seen.add_(1)
    return (net.a(x) * net.seen).square().sum()


def replaced_after_it_was_read(net: Net, x: Tensor) -> Tensor:
    y = net.a(x) * net.seen  # backward reads the old value
    net.seen = net.seen + y.detach().mean(0)
    return y.square().sum()


def replaced_and_both_read(net: Net, x: Tensor) -> Tensor:
    old, net.seen = net.seen, net.seen * 2
    return (net.a(x) * old * net.seen).sum()


@pytest.mark.parametrize(
    "function",
    [
        mutated_after_it_was_read,
        mutated_before_it_is_read,
        replaced_after_it_was_read,
        replaced_and_both_read,
    ],
)
def test_a_buffer_that_forward_changes(function: Callable[..., Tensor]) -> None:
    assert_trains_like_eager(lambda: Net(function), batch())


class ChangesPlaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.register_buffer("old", torch.zeros(6))
        self.register_buffer("new", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.old, self.new = self.new, self.old + 1
        return (self.linear(x) * self.old + self.new).sum()


def test_buffers_that_change_places() -> None:
    assert_trains_like_eager(ChangesPlaces, batch())


def test_a_buffer_in_the_past_of_two_interleaved_forwards() -> None:
    """Each backward sees the buffer as its own forward saw it."""
    eager, ours = pair(lambda: Net(replaced_after_it_was_read))
    for model in (eager, ours):
        losses = [model(batch()), model(batch())]
        for loss in losses:
            loss.backward()
    for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)
    assert_close(ours.seen, eager.seen)


def read_through(view: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Backward reads the old value of a buffer that is replaced, through a view of it."""

    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        z = y * view(net.seen)
        net.seen = net.seen + y.detach().mean(0)
        return z.square().sum()

    return forward


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda b: b.view(1, 6),
    "expand": lambda b: b.expand(4, 6),
    "detach": lambda b: b.detach(),
    "index": lambda b: b[None],
    "view of a view": lambda b: b.view(2, 3).t().t().reshape(6),
    "one of several": lambda b: b.view(1, 6).unbind(0)[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_backward_reads_the_old_value_of_a_buffer_through_a_view(name: str) -> None:
    assert_trains_like_eager(lambda: Net(read_through(VIEWS[name])), batch())


class Queue(nn.Module):
    """MoCo's: keys are compared with those of earlier steps, then pushed."""

    def __init__(self, strided: bool = False) -> None:
        super().__init__()
        self.key = nn.Linear(5, 6)
        keys = torch.randn(6, 16).t() if strided else torch.randn(16, 6)
        self.register_buffer("keys", keys)

    def forward(self, x: Tensor) -> Tensor:
        k = self.key(x)
        y = k @ self.keys.t()
        self.keys = torch.cat([self.keys[4:], k.detach()])
        return y.logsumexp(-1).sum()


@pytest.mark.parametrize("strided", [False, True])
def test_a_queue_in_a_buffer(strided: bool) -> None:
    assert_trains_like_eager(lambda: Queue(strided), batch())


def test_queues_in_blocks_that_are_alike() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queue, self.back = Queue(), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            k = self.queue.key(x)
            y = k @ self.queue.keys.t()
            self.queue.keys = torch.cat([self.queue.keys[4:], k.detach()])
            return x + self.back(y @ self.queue.keys)

    assert_trains_like_eager(lambda: nn.Sequential(*(Block() for _ in range(4))), batch())


def test_states_of_an_lstm_in_buffers() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 6, batch_first=True)
            self.register_buffer("h", torch.zeros(1, 4, 6))
            self.register_buffer("c", torch.zeros(1, 4, 6))

        def forward(self, x: Tensor) -> Tensor:
            y, (h, c) = self.lstm(x[:, None], (self.h, self.c))
            self.h, self.c = h.detach(), c.detach()
            return y.square().sum()

    assert_trains_like_eager(Stateful, batch())


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "proj_size": 3}], ids=["one", "four"]
)
def test_last_states_of_an_lstm_are_returned_as_eager_does(
    options: dict[str, Any], size: int
) -> None:
    lstm = nn.LSTM(5, 6, batch_first=True, **options)
    x = torch.randn(size, 3, 5)
    output, states = lstm(x)
    ours, theirs = fxshard.compile(lstm, world_size=1)(x), (output, *states)
    assert_close((ours[0], *ours[1]), theirs)  # shapes too, which torch 2.11 traces otherwise


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda old: old,
    "a view": lambda old: old[1:3],
    "both": lambda old: (old, old.view(2, 3)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_the_old_value_of_a_replaced_buffer_is_returned(name: str) -> None:
    def forward(net: Net, x: Tensor) -> Any:
        old = net.seen
        net.seen = net.seen + 1
        return net.a(x), RETURNED[name](old)

    eager, ours = pair(lambda: Net(forward))
    for grad in (True, True, False):
        with torch.set_grad_enabled(grad):
            assert_same_output(ours(batch()), eager(batch()))
    assert_close(ours.seen, eager.seen)


class ScaledSum(torch.autograd.Function):
    """(x * scale).sum(), of which the caller never takes but the gradient 1: it is `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return (x * scale).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return scale.view_as(scale), None


def sums_and_replaces(net: Net, x: Tensor) -> Tensor:
    y = ScaledSum.apply(net.a.bias, net.seen)
    net.seen = net.seen + 1
    return y


@pytest.mark.parametrize(
    "function", [sums_and_replaces, lambda net, x: ScaledSum.apply(net.a.bias, net.seen + 1)]
)
def test_a_gradient_that_forward_has_made(function: Callable[..., Tensor]) -> None:
    assert_trains_like_eager(lambda: Net(function), batch())


def test_a_program_that_reads_an_old_value_behind_the_write_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aliasing, "keep_old_value", lambda program, holder: holder)
    for build in (Queue, lambda: Net(read_through(VIEWS["expand"]))):
        with pytest.raises(VerifyError, match=r"reads %\w+, which %copy_\w* has written over"):
            fxshard.plan(build(), (batch(),), world_size=2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda net, x: setattr(net, "seen", net.seen.double()), r"'seen' is replaced .*float64"),
        (lambda net, x: net.register_buffer("late", x[0]), "'late' appears during forward"),
        (lambda net, x: net.a.weight.data.mul_(2), r"'a\.weight' is changed .* at .*py:\d+"),
        (lambda net, x: setattr(net.seen, "data", net.seen * 2), r"'seen' is given other memory"),
        (lambda net, x: setattr(net.a.bias, "data", x[0]), r"'a\.bias' is given other memory"),
    ],
    ids=["another dtype", "new", "parameter", "data of a buffer", "data of a parameter"],
)
def test_state_that_cannot_be_written_back(function: Callable[..., Any], message: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        function(net, x)
        return net.a(x).sum()

    with pytest.raises(CaptureError, match=message):
        fxshard.plan(Net(forward), (batch(),), world_size=2)


def copies_into(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    net.seen.copy_(y.mean(0))
    return y


def averages(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    net.seen.mul_(0.9).add_(y.mean(0))
    return y


def keeps_an_auxiliary_loss(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    net.seen = y.pow(2).mean(0)
    return y


def doubles_its_input(net: Net, x: Tensor) -> Tensor:
    return net.a(x.mul_(2))


def writes_into_its_input(net: Net, x: Tensor) -> Tensor:
    y = net.a(x.clone())
    x.copy_(y[:, :5])
    return y


ATTACHED: list[tuple[Callable[..., Tensor], bool, str]] = [
    (copies_into, False, r"gives buffer 'seen' .* in copies_into:.*Detach it.*return it"),
    (averages, False, r"gives buffer 'seen' .* in averages:.*Detach it"),
    (keeps_an_auxiliary_loss, False, r"'seen' .* in keeps_an_auxiliary_loss:.*Detach it"),
    (doubles_its_input, True, r"gives args\[0\] .* in doubles_its_input:.*Write into a clone"),
    (writes_into_its_input, False, r"gives args\[0\] .* in writes_into_its_input:.*Write into"),
]


@pytest.mark.parametrize(("function", "computed", "message"), ATTACHED)
def test_what_forward_leaves_with_the_caller_may_not_need_a_gradient(
    function: Callable[..., Tensor], computed: bool, message: str
) -> None:
    """In eager a loss computed of it trains the model. Without gradients it is as in eager."""
    eager, ours = pair(lambda: Net(function))
    given = nn.Linear(5, 5)(batch()) if computed else batch()
    with pytest.raises(CaptureError, match=rf"(?s){message}"):
        ours(given)
    theirs, mine = given.detach().clone(), given.detach().clone()
    with torch.no_grad():
        assert_close(ours(mine), eager(theirs))
    assert_close((mine, ours.seen), (theirs, eager.seen))
    for net in (eager, ours):
        net.requires_grad_(False)
    assert_close(ours(mine), eager(theirs))
    assert_close((mine, ours.seen), (theirs, eager.seen))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_an_argument_that_is_a_parameter(frozen: bool, learned: bool) -> None:
    """A learned prompt, or an image that is optimised with a frozen network."""
    found = []
    for model in pair(lambda: Net(lambda net, x: net.a(x).sin()).requires_grad_(not frozen)):
        image = nn.Parameter(batch(), requires_grad=learned)
        out = model(image)
        if out.requires_grad:
            out.sum().backward()
        grads = [image.grad, *(p.grad for p in model.parameters())]
        found.append((out.detach(), out.requires_grad, grads))
    assert_close(found[1], found[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_argument_that_is_a_parameter_of_the_model(world_size: int) -> None:
    function = lambda net, x, w: torch.nn.functional.linear(x, w) * net.b(x)  # noqa: E731
    eager, ours = pair(lambda: Net(function), world_size)
    for model in (eager, ours):
        model(batch(), model.b.weight).sum().backward()
    assert_close(ours.b.weight.grad, eager.b.weight.grad)
    assert fxshard.validate(eager, (batch(), eager.b.weight), world_size=2, numerics=True).holds


def test_an_input_that_forward_changes() -> None:
    eager, ours = pair(lambda: Net(lambda net, x: net.a(x.add_(1)).sum()), world_size=3)
    theirs, mine = batch(), batch()
    assert_close(ours(mine), eager(theirs))
    assert_close(mine, theirs)
