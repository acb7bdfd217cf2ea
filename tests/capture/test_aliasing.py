"""Tensors of a call that share memory, or have two names: right, or refused by both names."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from fxshard.capture.aliasing import overlapping
from fxshard.errors import CaptureError
from tests.eager import Net, assert_trains_like_eager, batch, pair


class Held(nn.Module):
    """A weight [4] and two buffers, of which one is a view; forward is `function(self, x)`."""

    def __init__(self, function: Callable[..., Any], view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 5.0))
        self.register_buffer("b", torch.ones(4))
        self.register_buffer("part", view(self.b))
        self.register_buffer("third", torch.zeros(4))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def first_two(base: Tensor) -> Tensor:
    return base[:2]


def writes_the_view(m: Any, x: Tensor) -> Tensor:
    m.part.mul_(0.5)
    return x * m.w + m.b


def writes_the_base(m: Any, x: Tensor) -> Tensor:
    m.b.mul_(0.5)
    return x * m.w + m.part.sum()


def replaces_the_base(m: Any, x: Tensor) -> Tensor:
    m.b = m.b * 0.5
    return x * m.w + m.b


WRITES = [
    (writes_the_view, first_two),
    (writes_the_base, first_two),
    (replaces_the_base, first_two),
    (writes_the_view, lambda base: base.view(2, 2)[1]),
    (writes_the_base, lambda base: base.detach()),
]


@pytest.mark.parametrize(("function", "view"), WRITES)
def test_a_written_buffer_that_overlaps_with_another_is_refused(
    function: Callable[..., Any], view: Callable[[Tensor], Tensor]
) -> None:
    model = fxshard.compile(Held(function, view), world_size=2)
    with pytest.raises(CaptureError, match=_WRITTEN):
        model(torch.zeros(1, 4))


_WRITTEN = r"writes buffer '(b|part)' \(at .*test_aliasing.py:\d+ in \w+\), .*'(b|part)'.*clone"


def reads_both(m: Any, x: Tensor) -> Tensor:
    return x * m.w + m.b + m.part.sum()


def writes_one_and_leaves_the_other(m: Any, x: Tensor) -> Tensor:
    m.part.mul_(0.5)
    return x * m.w + m.part.sum()


def copies_one_into_a_third(m: Any, x: Tensor) -> Tensor:
    m.third.copy_(m.b)
    return x * m.w + m.part.sum()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "function", [reads_both, writes_one_and_leaves_the_other, copies_one_into_a_third]
)
def test_buffers_that_overlap_are_right_where_none_is_written_behind_another(
    function: Callable[..., Any], world_size: int
) -> None:
    eager, ours = (Held(function, first_two) for _ in range(2))
    ours = fxshard.compile(ours, world_size=world_size)
    for _ in range(3):
        assert_close(ours(torch.ones(1, 4)), eager(torch.ones(1, 4)))
        assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


def test_halves_of_one_storage_do_not_overlap() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        m.part.mul_(0.5)
        return x * m.w + m.b.sum()

    def build() -> nn.Module:
        model, both = Held(function, first_two), torch.ones(8)
        model.b, model.part = both[:4], both[4:]
        return model

    eager, ours = build(), fxshard.compile(build(), world_size=1)
    for _ in range(2):
        assert_close(ours(torch.ones(1, 4)), eager(torch.ones(1, 4)))
        assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


def adds_to_the_first(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x.add_(1.0)
    return m.a(x) + m.a(y)


def adds_both(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.a(x) + m.b(y)


def overlapping_rows(base: Tensor) -> tuple[Tensor, Tensor]:
    return base[:4], base[2:6]


INPUTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "one tensor twice": lambda x: (x, x),
    "a view of the other": lambda x: (x, x.view_as(x)),
    "rows that overlap": lambda x: overlapping_rows(torch.cat([x, x])),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_overlap_are_right_where_none_is_written(name: str) -> None:
    assert_trains_like_eager(lambda: Net(adds_both), *INPUTS[name](batch()))


@pytest.mark.parametrize("name", INPUTS)
def test_a_written_input_that_overlaps_with_another_is_refused(name: str) -> None:
    """Also where the same shapes had memory of their own in the call before."""
    _, ours = pair(lambda: Net(adds_to_the_first))
    ours(batch(), batch())
    with pytest.raises(CaptureError, match=r"writes args\[\d\].*that of args\[\d\].*clone"):
        ours(*INPUTS[name](batch()))
    x = batch()
    ours(x, batch())
    assert_close(x, batch() + 1.0)


def test_an_input_that_is_a_buffer_is_refused_where_it_is_written() -> None:
    def function(m: Any, x: Tensor, y: Tensor) -> Tensor:
        m.seen.add_(1.0)
        return m.a(x) + y

    _, ours = pair(lambda: Net(function))
    ours(batch(), torch.ones(6))
    with pytest.raises(CaptureError, match=r"writes buffer 'seen'.*that of args\[1\]"):
        ours(batch(), ours.seen)


def test_an_input_that_is_an_ignored_parameter_is_refused_where_it_is_written() -> None:
    def function(m: Any, x: Tensor, y: Tensor) -> Tensor:
        y.add_(1.0)
        return m.a(x) + m.b(x) + y

    torch.manual_seed(0)
    ours: Any = fxshard.compile(Net(function), world_size=2, ignored=["b"])
    with pytest.raises(CaptureError, match=r"writes args\[1\].*that of parameter 'b.bias'"):
        ours(batch(), ours.b.bias.detach())


def test_overlapping_groups() -> None:
    base = torch.zeros(4, 6)
    tensors = [base[0], base[1:3], base[2:], torch.zeros(3), base[1], base[:, 0], base[:0], base[0]]
    assert overlapping(tensors) == ((0, 1, 2, 4, 5, 7),)
    assert overlapping(tensors[:5]) == ((1, 2, 4),)
    assert overlapping([base[0], base[1], torch.zeros(2)]) == ()


# -- one module, buffer or parameter under several names -------------------------------------------


class Ema(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, h: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h * self.w + self.mean


class Shared(nn.Module):
    """Modules with buffers that have two names."""

    def __init__(self, make: Callable[[], nn.Module], calls: str, outputs: int) -> None:
        super().__init__()
        self.a = make()
        self.lin = nn.Linear(4, 4)
        self.b = self.a
        self.calls, self.outputs = calls, outputs

    def forward(self, x: Tensor) -> Any:
        h = self.lin(x)
        for name in self.calls:
            h = self.get_submodule(name)(h)
        return (h, h * 2) if self.outputs == 2 else h


@pytest.mark.parametrize("calls", ["ab", "b", "ba"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("make", [Ema, lambda: nn.BatchNorm1d(4)])
@pytest.mark.sample(6)
def test_a_module_under_two_names(make: Any, calls: str, outputs: int) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    eager = Shared(make, calls, outputs)
    ours = fxshard.compile(copy.deepcopy(eager), world_size=1)
    for training in (True, True, False):
        eager.train(training)
        ours.train(training)
        want, got = eager(x), ours(x)
        assert_close(got, want)
        for out in (want, got):
            (sum(o.sin().sum() for o in out) if outputs == 2 else out.sin().sum()).backward()
        for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
            assert_close(q.grad, p.grad)
        assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))
    with torch.no_grad():
        assert_close(ours(x), eager(x))


def test_one_buffer_that_two_modules_hold() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(Ema(), nn.Linear(4, 4), Ema())
        model[2].mean = model[0].mean
        return model

    x = torch.randn(6, 4)
    torch.manual_seed(0)
    eager = build()
    ours = fxshard.compile(copy.deepcopy(eager), world_size=1)
    for _ in range(2):
        assert_close(ours(x), eager(x))
        assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))
    assert ours[0].mean is ours[2].mean


def test_a_buffer_that_is_replaced_under_one_of_its_names_is_refused() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        m.seen = m.seen + 1
        return m.a(x) + m.other

    def build() -> nn.Module:
        model = Net(function)
        model.register_buffer("other", model.seen)
        return model

    _, ours = pair(build)
    with pytest.raises(CaptureError, match=r"under one of its names only: buffers 'seen' and 'oth"):
        ours(batch())


class Tied(nn.Module):
    """An embedding [40, 16] that is read three times and is the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lin = nn.Embedding(40, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.lin(self.embed(ids) + self.embed(ids.flip(0)) * 0.3)
        return self.head(h).logsumexp(-1).sum() + self.embed(ids + 1).sin().sum()


def test_contributions_to_a_tied_gradient_are_summed_in_eagers_order() -> None:
    eager, ours = pair(Tied, world_size=1)
    ids = torch.randint(0, 39, (4, 7), generator=torch.Generator().manual_seed(0))
    eager(ids).backward()
    ours(ids).backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
