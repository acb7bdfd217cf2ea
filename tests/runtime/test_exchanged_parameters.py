"""``layer.weight = nn.Parameter(...)`` in a sharded model, on gloo ranks.

A DTensor that is like the parameter takes its place. All else is refused, by whatever reads it: the
model, a module called by itself, a unit of `fully_shard`. So are modules that change places.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

import fxshard
from tests.fsdp2 import full
from tests.ranks import told


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def by_units(model: Any) -> Any:
    for module in (*model, model):
        fxshard.fully_shard(module)
    return model


MAKERS: dict[str, Callable[[Any], Any]] = {
    "compile": fxshard.compile,
    "shard": fxshard.shard,
    "fully_shard": by_units,
}
READERS: dict[str, Callable[[Any], nn.Module]] = {
    "the model": lambda model: model,
    "a module": lambda model: model[0],
}


def of_rows(like: Any, rows: Tensor, mesh: DeviceMesh, dim: int = 0) -> nn.Parameter:
    made = DTensor.from_local(
        rows, mesh, [Shard(dim)], run_check=False, shape=(4, 4), stride=(4, 1)
    )
    return nn.Parameter(made, like.requires_grad)


def reversed_ranks() -> DeviceMesh:
    return DeviceMesh("cpu", [1, 0])


OTHERS: dict[str, tuple[Callable[[Any], nn.Parameter], str]] = {
    "plain": (lambda like: nn.Parameter(torch.ones(4, 4)), "a plain tensor of shape [4, 4]"),
    "the rows": (lambda like: nn.Parameter(torch.ones(2, 4)), "a plain tensor of shape [2, 4]"),
    "own rows": (
        lambda like: nn.Parameter(like.to_local().detach()),
        "a plain tensor of shape [2, 4]",
    ),
    "columns": (
        lambda like: of_rows(like, torch.ones(4, 2), like.device_mesh, 1),
        "it is [Shard(dim=1)] over ranks [0, 1]",
    ),
    "other ranks": (
        lambda like: of_rows(like, torch.ones(2, 4), reversed_ranks()),
        "it is [Shard(dim=0)] over ranks [1, 0]",
    ),
    "other dtype": (
        lambda like: of_rows(like, torch.ones(2, 4, dtype=torch.float64), like.device_mesh),
        "its local part is [2, 4] torch.float64",
    ),
}


def exchanged(rank: int, size: int, how: str, other: str, reader: str, called: bool) -> str:
    model: Any = MAKERS[how](net())
    x = torch.full((2, 4), float(rank))
    if called:
        model(x)
    model[0].weight = OTHERS[other][0](model[0].weight)
    return told(lambda: READERS[reader](model)(x))


@pytest.mark.parametrize("called", [True, False], ids=["after a call", "before"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", MAKERS)
def test_others_are_refused(ranks: Any, how: str, reader: str, called: bool) -> None:
    for other, (_, said) in OTHERS.items():
        for error in ranks(2).run(exchanged, how, other, reader, called):
            assert error.startswith("StepError: parameter '0.weight' is another kind"), other
            assert said in error, error


def alike(rank: int, size: int, how: str, reader: str, called: bool) -> None:
    """Two steps after it was exchanged, against eager PyTorch on the joined batch."""
    eager, model = net(), MAKERS[how](net())
    inputs = torch.randn(2 * size, 4)
    x = inputs[2 * rank : 2 * rank + 2]
    if called:
        model(x)
    stale = torch.optim.SGD(model.parameters(), lr=0.5)
    eager[0].weight = nn.Parameter(torch.arange(16.0).view(4, 4))
    rows = torch.arange(16.0).view(4, 4)[2 * rank : 2 * rank + 2].clone()
    model[0].weight = of_rows(model[0].weight, rows, model[0].weight.device_mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (eager, model)]
    for _ in range(2):
        READERS[reader](eager)(inputs).square().mean().backward()
        READERS[reader](model)(x).square().mean().backward()
        for one, other in zip(eager[0].parameters(), model[0].parameters(), strict=True):
            assert_close(full(other.grad), one.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(full(model[0].weight), eager[0].weight)
    assert "holds parameter '0.weight' as it was before" in told(stale.step)


@pytest.mark.parametrize("called", [True, False], ids=["after a call", "before"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", MAKERS)
def test_one_that_is_alike_takes_its_place(ranks: Any, how: str, reader: str, called: bool) -> None:
    ranks(2).run(alike, how, reader, called)


def on_one_rank(rank: int, size: int, how: str) -> str:
    model: Any = MAKERS[how](net())
    x = torch.ones(2, 4)
    model(x)
    if rank == 0:
        model[0].weight = OTHERS["other dtype"][0](model[0].weight)
    said = told(lambda: model[0](x)) if rank == 0 else "did not call"
    dist.barrier()
    return said


@pytest.mark.parametrize("how", ["compile", "shard"])  # ranks agree on a call of a unit first
def test_nothing_is_sent_before_the_refusal(ranks: Any, how: str) -> None:
    """Rank 1 does not call the module: whatever rank 0 sends would wait for it."""
    said, _ = ranks(2).run(on_one_rank, how)
    assert said.startswith("StepError: parameter '0.weight' is another kind")


# -- modules ----------------------------------------------------------------------------------


def other_places(rank: int, size: int, how: str, called: bool) -> str:
    model: Any = MAKERS[how](net())
    x = torch.ones(2, 4)
    if called:
        model(x)
    model[0], model[1] = model[1], model[0]
    return told(lambda: model(x))


@pytest.mark.parametrize("called", [True, False], ids=["after a call", "before"])
@pytest.mark.parametrize("how", ["compile", "fully_shard"])
def test_modules_that_change_places_are_refused(ranks: Any, how: str, called: bool) -> None:
    """Of equal shapes: programs know parameters by name, and would give each those of the other."""
    for said in ranks(2).run(other_places, how, called):
        assert "modules changed places" in said


# -- while a unit is unsharded ----------------------------------------------------------------


def loaded_while_unsharded(rank: int, size: int, assign: bool, into: str) -> str:
    """Of a unit: the model takes the values; of a part alone it is refused."""
    eager, model = net(), by_units(net())
    x = torch.ones(2, 4)
    model(x)
    state = {name: 2 * value for name, value in eager.state_dict().items()}
    eager.load_state_dict(state)
    model[0].unshard()
    if into == "the model":
        model.load_state_dict(state, assign=assign)
        assert_close(model[0](x), eager[0](x))
        assert_close(model(x), eager(x))
        return "no error"
    part = {name[2:]: value for name, value in state.items() if name.startswith("0.")}
    model[0].load_state_dict(part, assign=assign)
    return told(lambda: model(x))


@pytest.mark.parametrize("assign", [True, False])
def test_a_state_loaded_while_a_unit_is_unsharded(ranks: Any, assign: bool) -> None:
    assert set(ranks(2).run(loaded_while_unsharded, assign, "the model")) == {"no error"}
    for said in ranks(2).run(loaded_while_unsharded, assign, "a part"):
        assert "between unshard() and reshard() of its module, and that is lost" in said


def put_back(rank: int, size: int, how: str) -> None:
    """As averages of weights are evaluated: other values by ``param.data = ...``, and back."""
    for share in (lambda p: p.data, lambda p: p.detach(), lambda p: p.detach().t().t()):
        found = []
        for model in (net(), MAKERS[how](net())):
            x = torch.full((2, 4), 1.0)
            model(x)
            before = {p: share(p) if p.dim() > 1 else p.data for p in model.parameters()}
            for p in before:
                p.data = 2 * p.data
            doubled = model(x).detach()
            for p, values in before.items():
                p.data = values
            with torch.no_grad():
                found.append([doubled, model(x), model[0](x), *map(full, before)])
        assert_close(*found)


def other_ways(rank: int, size: int, how: str) -> None:
    """What shares the memory that a parameter leaves keeps its values, in other ways too."""
    found = []
    for model in (net(), MAKERS[how](net())):
        first, second = model[0].weight, model[1].weight
        before = [first.data, second.data, model.state_dict()["0.bias"]]
        first.data, second.data = second.data, first.data
        first.detach().data = torch.zeros_like(first)  # changes nothing
        model.load_state_dict({n: 3 * t for n, t in model.state_dict().items()}, assign=True)
        model[1].weight = nn.Parameter(2 * model[1].weight.detach())
        with torch.no_grad():
            found.append([*map(full, before), model(torch.full((2, 4), 1.0))])
    assert_close(*found)


@pytest.mark.parametrize("run", [put_back, other_ways])
@pytest.mark.parametrize("how", MAKERS)
def test_values_before_are_kept_for_who_shares_their_memory(
    ranks: Any, how: str, run: Callable[..., None]
) -> None:
    ranks(2).run(run, how)


@pytest.mark.parametrize("run", [put_back, other_ways])
def test_values_before_are_kept_in_one_process(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., None]
) -> None:
    monkeypatch.setitem(MAKERS, "here", lambda model: fxshard.compile(model, world_size=2))
    run(0, 1, "here")


def before_backward(rank: int, size: int, how: str) -> str:
    model: Any = MAKERS[how](net())
    loss = model(torch.ones(2, 4)).square().sum()
    for param in model.parameters():
        param.data = 2 * param.data
    return told(loss.backward)


@pytest.mark.parametrize("how", MAKERS)
def test_other_values_before_backward_are_refused(ranks: Any, how: str) -> None:
    for error in ranks(2).run(before_backward, how):
        assert "was changed in place between a forward and its backward" in error
        assert ("It may have been another parameter" in error) is (how != "shard")


# -- what forward has read, and backward reads again -----------------------------------------------


class Reads(nn.Module):
    """Its gradients depend on a buffer, and on a parameter that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.ignored = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", filled(2.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.ignored(self.linear(x) * self.scale)
        return made.sum(1)


def filled(value: float, *shape: int) -> torch.Tensor:
    """A tensor that was written in place once, as all of these are."""
    return torch.empty(shape).fill_(value)


def sharded(model: Any, how: str, *, ignored: bool = False) -> None:
    """In place, on ranks or here; `ignored`: all but the module of that name."""
    if how == "fully_shard":
        fxshard.fully_shard(
            model, ignored_params={*model.ignored.parameters()} if ignored else None
        )
    elif how != "eager":
        fxshard.compile(
            model, ignored=["ignored"] if ignored else [], world_size=2 if how == "here" else None
        )


def others_between(rank: int, size: int, how: str) -> None:
    """Others in their places before backward: gradients are those of what forward has read."""
    found = []
    for kind in ("eager", how):
        model: Any = Reads()
        sharded(model, kind, ignored=True)
        read = model.ignored.weight
        loss = model(torch.ones(2, 4))
        model.scale = filled(5.0, 4)
        model.ignored.weight = nn.Parameter(filled(5.0, 4, 4))
        loss.sum().backward()
        grads = {name: full(param.grad) for name, param in model.linear.named_parameters()}
        found.append([grads, read.grad, model.ignored.weight.grad])
    assert_close(*found)


@pytest.mark.parametrize("how", ["compile", "fully_shard"])
def test_backward_reads_what_forward_has_read(ranks: Any, how: str) -> None:
    ranks(2).run(others_between, how)


def test_backward_reads_what_forward_has_read_in_one_process() -> None:
    others_between(0, 1, "here")


def called_with_others(rank: int, size: int, how: str) -> None:
    """The model's own parameters were written in place before; those of the call never."""
    model: Any = Reads()
    wanted = Reads()
    sharded(model, how)
    for each in (model, wanted):
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(3)
    found = []
    for each in (model, wanted):
        given = {n: (2 * p.detach()).requires_grad_() for n, p in each.named_parameters()}
        loss = torch.func.functional_call(each, given, (torch.ones(2, 4),)).sum()
        loss.backward()
        found.append({name: full(tensor.grad) for name, tensor in given.items()})
        assert all(param.grad is None for param in each.parameters())
    assert_close(*found)


@pytest.mark.parametrize("how", ["compile", "fully_shard"])
def test_functional_call_after_writes(ranks: Any, how: str) -> None:
    ranks(2).run(called_with_others, how)


def test_functional_call_after_writes_in_one_process() -> None:
    called_with_others(0, 1, "here")
