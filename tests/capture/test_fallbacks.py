"""Models that the direct trace refuses: what the other ways get, and what is said if none does."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.capture import trace
from fxshard.errors import CaptureError, UnknownSizeError
from fxshard.ir import tags
from fxshard.ir.program import Program
from fxshard.ir.splitting import find_units

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """f32 (rows, 4) -> a scalar, by `run`; two linear layers and a counter."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.run(self, x)


def chosen_rows(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    return net.b(y[(x[:, 0] > 0).nonzero().squeeze(-1)]).sum() + y.mean()


def masked(net: Net, x: Tensor) -> Tensor:
    return net.a(x)[x > 0].pow(2).sum() + net.b(x).sum()


def scaled_by_a_number(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(x)).sum() * x.sum().item()


def through_a_list(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(x)).sum() * x.tolist()[1][2]


def through_numpy(net: Net, x: Tensor) -> Tensor:
    weights = np.abs(x.detach().numpy()).max(axis=1)
    return (net.b(net.a(x)) * torch.from_numpy(weights)[:, None]).sum()


def narrowed(net: Net, x: Tensor) -> Tensor:
    start = (x[:, 0] > 0).sum().clamp(max=3)
    return net.b(net.a(x).narrow(0, start, 3)).sum()


def curved(net: Net, x: Tensor) -> Tensor:
    """Its second derivatives begin with zeros that have no memory."""
    return torch.func.hessian(lambda y: net.b(net.a(y).sin()).pow(2).sum())(x[0]).sum()


def padded(net: Net, x: Tensor) -> Tensor:
    rows = int((x[:, 0] > 0).sum())
    kept = torch.cat([net.a(x)[:rows], torch.zeros(x.shape[0] - rows, 4)])
    return net.b(kept).sum()


def hands_through(net: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return through_numpy(net, x), x, net.a.weight


def checkpointed(net: Net, x: Tensor) -> Tensor:
    weights = torch.from_numpy(np.abs(x.detach().numpy()))
    inner = checkpoint(lambda y: net.b(net.a(y).sin().exp()), x * weights, use_reentrant=False)
    return inner.sum()


def draws_by_python(net: Net, x: Tensor) -> Tensor:
    return through_numpy(net, x) * random.randint(1, 100)


def draws_by_numpy(net: Net, x: Tensor) -> Tensor:
    return through_numpy(net, x) * torch.from_numpy(np.random.rand(1))


def branches(net: Net, x: Tensor) -> Tensor:
    if x.sum() > 0:  # the line that is named
        return net.a(x).sum()
    return net.b(x).sum()


def loops(net: Net, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().sum())):
        x = x + 1
    return net.b(net.a(x)).sum()


def counts_in_python(net: Net, x: Tensor) -> Tensor:
    rows = int((x[:, 0] > 0).sum())
    return net.b(net.a(x)[:rows]).sum()


def own_mistake(net: Net, x: Tensor) -> Tensor:
    raise KeyError("no such table")


def batches(count: int = 4) -> list[Tensor]:
    """Each with another number of positive rows and items."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(6, 4, generator=generator) for _ in range(count)]
    assert len({int((x[:, 0] > 0).sum()) for x in found}) > 1
    return found


def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that are tried from here on, in order."""
    tried: list[str] = []
    original = trace._captured

    def captured(*args: Any) -> Any:
        tried.append(args[-1])
        return original(*args)

    monkeypatch.setattr(trace, "_captured", captured)
    return tried


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (chosen_rows, [trace.DIRECT, trace.OPEN]),
        (masked, [trace.DIRECT, trace.OPEN]),
        (scaled_by_a_number, [trace.DIRECT, trace.OPEN]),
        (through_a_list, [trace.DIRECT, trace.OPEN]),
        (through_numpy, [trace.DIRECT, trace.DYNAMO]),
        (narrowed, [trace.DIRECT, trace.OPEN]),
        (curved, [trace.DIRECT]),
        (counts_in_python, [trace.DIRECT, trace.OPEN, trace.DYNAMO]),
        (padded, [trace.DIRECT, trace.OPEN, trace.DYNAMO]),
        (checkpointed, [trace.DIRECT, trace.DYNAMO]),
    ],
)
@pytest.mark.sample(5)
def test_another_way_is_bitwise_eager_in_one_program(
    run: Forward, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    eager = Net(run)
    tried = ways(monkeypatch)
    ours = fxshard.compile(copy.deepcopy(eager), world_size=2)
    for x in batches():
        losses = [model(x) for model in (eager, ours)]
        assert torch.equal(*(loss.detach() for loss in losses))
        for model, loss in zip((eager, ours), losses, strict=True):
            model.zero_grad()
            loss.backward()
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours.calls, torch.tensor(4.0)), "a buffer is replaced once per call"
    assert tried == expected and len(ours._fxshard.variants) == 1


def test_what_the_model_hands_through_stays_what_it_is() -> None:
    model, x = Net(hands_through), batches()[0]
    expected = Net(through_numpy)
    expected.load_state_dict(model.state_dict())
    loss, same, weight = fxshard.compile(model, world_size=2)(x)
    assert torch.equal(loss, expected(x)) and torch.equal(same, x)
    assert torch.equal(weight, expected.a.weight)


def products(program: Program) -> list[bool]:
    """Per matrix product of backward that forward has too, if it is recomputed."""
    nodes = [n for n in program.phase("backward") if n.target is torch.ops.aten.addmm.default]
    return [tags.get(node).recomputed for node in nodes]


def test_checkpoints_hold_in_a_graph_of_dynamo() -> None:
    x = batches()[0]
    own = fxshard.plan(Net(checkpointed), (x,), world_size=2).program
    assert products(own) == [True], "backward needs what net.a gave, and not what net.b gave"
    model = Net(through_numpy)
    model.a = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    option = fxshard.plan(model, (x,), world_size=2, units=["a"], checkpoint="full").program
    assert [call.module for call in option.calls] == ["", "a", "a.0", "a.1", "a.2", "b"]
    assert products(option) == [True], "of the first layer: the second one's has no reader inside"


@pytest.mark.parametrize(
    ("run", "said"), [(draws_by_python, "random"), (draws_by_numpy, "numpy.random")]
)
def test_numbers_from_outside_of_torch_are_refused_by_dynamo_s_way_too(
    run: Forward, said: str
) -> None:
    state = random.getstate()
    with pytest.raises(CaptureError, match=rf"Tried {trace.DYNAMO} too: .* draws from {said}:"):
        fxshard.plan(Net(run), (batches()[0],), world_size=2)
    assert random.getstate() == state


def test_a_failed_capture_leaves_lists_as_they_were() -> None:
    def keeps(net: Net, x: Tensor) -> Tensor:
        net.seen.append(net.a(x))
        return branches(net, x)

    model = Net(keeps)
    model.seen = []
    with pytest.raises(CaptureError, match="branches"):
        fxshard.plan(model, (batches()[0],), world_size=2)
    assert model.seen == []


def test_sparse_arguments_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"argument args\[0\] is sparse \(torch.sparse_coo"):
        fxshard.plan(Net(masked), (batches()[0].to_sparse(),), world_size=2)


def test_a_graph_of_dynamo_keeps_modules_and_names() -> None:
    model = Net(through_numpy)
    program = fxshard.plan(model, (batches()[0],), world_size=2).program
    assert set(program.params) == dict(model.named_parameters()).keys()
    assert {tags.get(node).module for node in program.phase("forward")} >= {"a", "b"}


def test_bytes_through_dynamo_are_exact() -> None:
    result = fxshard.validate(
        *(Net(through_numpy), (batches()[0],)), world_size=2, optimizer=torch.optim.AdamW
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_sizes_from_data_are_named_where_bytes_are_asked_for() -> None:
    plan = fxshard.plan(Net(chosen_rows), (batches()[0],), world_size=2)
    assert plan.certificate is not None, "what does not need bytes is there"
    for ask in (lambda: plan.memory, lambda: plan.estimate("h100")):
        with pytest.raises(UnknownSizeError, match=r"size of nonzero.*test_fallbacks.py:\d+ in ch"):
            ask()


def test_numbers_are_compared_where_bytes_are_not_known() -> None:
    found = fxshard.validate(Net(chosen_rows), (batches()[0],), world_size=2, numerics=True)
    assert found.numerics is not None and found.numerics.verdict == "bitwise"
    assert not found.cells and "size of nonzero" in found.unknown and "nonzero" in found.summary()
    with pytest.raises(UnknownSizeError, match="size of nonzero"):
        _ = found.max_abs_difference
    with pytest.raises(UnknownSizeError):
        fxshard.validate(Net(chosen_rows), (batches()[0],), world_size=2)


@pytest.mark.parametrize("run", [branches, loops])
def test_all_reasons_are_told_with_the_line(run: Forward) -> None:
    model = Net(run)
    before = [id(value) for value in (*model.parameters(), *model.buffers())]
    with pytest.raises(CaptureError) as failure:
        fxshard.plan(model, (batches()[0],), world_size=2)
    text = str(failure.value)
    line = {branches: "if x.sum() > 0:", loops: "for _ in range(int("}[run]
    assert "Python control flow or a shape depends on the values of a tensor, at" in text
    assert f"in {run.__name__}\n    {line}" in text and "torch.where" in text
    assert f"Tried {trace.OPEN} too: GuardOnDataDependentSymNode" in text
    assert f"Tried {trace.DYNAMO} too: " in text
    assert [id(value) for value in (*model.parameters(), *model.buffers())] == before


def test_a_mistake_of_the_model_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = ways(monkeypatch)
    with pytest.raises(CaptureError, match=r"KeyError: 'no such table'\), at"):
        fxshard.plan(Net(own_mistake), (batches()[0],), world_size=2)
    assert tried == [trace.DIRECT]


def test_lost_gradients_are_refused_on_every_way() -> None:
    def lost(net: Net, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # autograd sees nothing of it
            hidden = net.a(x)
        return net.b(hidden)[x > 0].sum()

    model = Net(lost)
    units = find_units(model)
    with pytest.raises(CaptureError, match=r"parameter 'a\.\w+' reaches the loss"):
        trace.capture(model, (batches()[0],), {}, units=units, world_size=2, training=True)
