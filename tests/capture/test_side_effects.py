"""What forward changes besides its results: right in every call, or refused with what to do."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from fxshard.errors import CaptureError
from tests.eager import Net, assert_trains_like_eager, batch, pair


class Notes(Net):
    """A `Net` that holds what Python programs count in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.steps, self.flag, self.scale = 0, False, 1.0
        self.counts: dict[str, int] = {}
        self.history: list[int] = []
        self.generator = torch.Generator()


def refusal(function: Callable[..., Any], *args: Any) -> str:
    """What is said where `function` is compiled; it must leave the model as it was."""
    model = Notes(function)
    before = copy.deepcopy(vars(model))
    state = torch.get_rng_state()
    with pytest.raises(CaptureError) as failure:
        fxshard.compile(model, world_size=2)(batch(), *args)
    for name in ("steps", "flag", "counts", "history"):
        assert getattr(model, name) == before[name]
    assert torch.equal(torch.get_rng_state(), state)
    return str(failure.value)


# -- attributes ------------------------------------------------------------------------------------


def counts_and_scales(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.a(x) * m.steps


def counts_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.counts["n"] = m.counts.get("n", 0) + 1
    return m.a(x)


def warms_up(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.a(x) if m.steps < 1000 else m.b(x)


def decays(m: Any, x: Tensor) -> Tensor:
    m.scale *= 0.5
    return m.a(x) * m.scale


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (counts_and_scales, "self.steps of Notes"),
        (counts_in_a_dict, "self.counts['n'] of Notes"),
        (warms_up, "self.steps of Notes"),
        (decays, "self.scale of Notes"),
    ],
)
def test_a_counter_of_forward_is_refused_by_name(function: Callable[..., Any], named: str) -> None:
    said = refusal(function)
    assert f"forward counts in {named}" in said
    assert "register_buffer" in said


def toggles(m: Any, x: Tensor) -> Tensor:
    m.flag = not m.flag
    return m.a(x) * (2 if m.flag else 1)


def remembers(m: Any, x: Tensor) -> Tensor:
    m.history.append(1)
    return m.a(x) * len(m.history)


def alternates(m: Any, x: Tensor) -> Tensor:
    m.flag = not m.flag
    return m.a(x) if m.flag else m.b(x)


def adds_a_literal(m: Any, x: Tensor) -> Tensor:
    m.history.append(1)
    return m.a(x) + torch.tensor(float(len(m.history)))


@pytest.mark.parametrize("function", [toggles, remembers, alternates, adds_a_literal])
def test_a_forward_that_does_otherwise_in_each_run_is_refused(
    function: Callable[..., Any],
) -> None:
    said = refusal(function)
    assert "does otherwise when it is run again" in said
    assert f"in {function.__name__}: " in said


def caches_a_size(m: Any, x: Tensor) -> Tensor:
    if m.steps < x.shape[0]:
        m.steps = x.shape[0]
    m.flag = True
    return m.a(x) * m.steps


def swaps_modules(m: Any, x: Tensor) -> Tensor:
    m.a, m.b = m.b, m.a
    return m.a(x.relu()) + 2 * m.b(x)


def rotates(m: Any, x: Tensor) -> Tensor:
    last = m.layers.pop(-1)
    m.layers.insert(0, last)
    return last(x.relu()) + sum(layer(x) for layer in m.layers)


def swaps_parameters(m: Any, x: Tensor) -> Tensor:
    """No tracer's tensor may be assigned as a parameter: Dynamo reads this."""
    m.a.weight, m.b.weight = m.b.weight, m.a.weight
    return m.a(x.relu()) + 2 * m.b(x)


def replaces_a_parameter(m: Any, x: Tensor) -> Tensor:
    y = m.a(x.relu()) + 2 * m.b(x)
    m.a.weight = m.b.weight
    return y


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (swaps_modules, "self.a of Rotated, self.b of Rotated"),
        (rotates, "self.0 of ModuleList"),
        (swaps_parameters, "self.weight of Linear"),
        (replaces_a_parameter, "self.weight of Linear"),
    ],
)
def test_modules_and_parameters_stay_where_they_are(
    function: Callable[..., Any], named: str
) -> None:
    """Of the same names each run computed the same, with other parameters in eager PyTorch."""
    model = Rotated(function)
    before = [*model.named_modules()]
    with pytest.raises(CaptureError) as failure:
        fxshard.compile(model, world_size=2)(batch())
    assert f"another module or parameter in the place of {named}" in str(failure.value)
    assert [*model.named_modules()] == before and type(model) is not Rotated


class Rotated(Net):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.layers = nn.ModuleList(copy.deepcopy(self.a) for _ in range(3))


def counts_where_dynamo_reads(m: Any, x: Tensor) -> Tensor:
    m.a.weight = m.a.weight
    m.steps += 1
    return m.a(x) * m.steps


def toggles_where_dynamo_reads(m: Any, x: Tensor) -> Tensor:
    m.a.weight = m.a.weight
    m.flag = not m.flag
    return m.a(x) if m.flag else m.b(x)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (counts_where_dynamo_reads, "forward counts in self.steps of Notes"),
        (toggles_where_dynamo_reads, "forward does otherwise when it is run again"),
    ],
)
def test_what_dynamo_reads_does_the_same_in_each_run(
    function: Callable[..., Any], said: str
) -> None:
    assert said in refusal(function)


def picked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of as many rows as the data says: the sizes are symbols."""
    return lambda m, x: function(m, x[(x > 0).any(1)])


class Opened(Notes):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize("function", [toggles, remembers])
@pytest.mark.parametrize("found", ["in data", "by name"])
def test_runs_of_open_sizes_are_compared_too(function: Callable[..., Any], found: str) -> None:
    model = Opened(picked(function) if found == "in data" else function)
    options: Any = {"dynamic": {"rows": [("x", 0)]}} if found == "by name" else {}
    with pytest.raises(CaptureError, match="forward does otherwise when it is run again"):
        fxshard.compile(model, world_size=2, **options)(batch())


def test_a_module_without_tensors_may_be_made_in_forward() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        if not hasattr(m, "act"):
            m.act = nn.GELU()
        return m.act(m.a(x))

    assert_trains_like_eager(lambda: Net(function), batch())


def test_what_forward_assigns_alike_in_each_run_is_no_counter() -> None:
    assert_trains_like_eager(lambda: Notes(caches_a_size), batch())


# -- containers of the caller ----------------------------------------------------------------------


@dataclasses.dataclass
class Cache:
    seen: Any


def appends(m: Any, x: Tensor, held: Any) -> Tensor:
    held.append(m.a(x))
    return m.b(x)


def inserts(m: Any, x: Tensor, held: Any) -> Tensor:
    held["new"] = m.a(x)
    return m.b(x)


def pops(m: Any, x: Tensor, held: Any) -> Tensor:
    return m.b(x) + held.pop().sum()


def replaces(m: Any, x: Tensor, held: Any) -> Tensor:
    held[0] = held[0] * 2
    return m.b(x) + held[0].sum()


def assigns_a_field(m: Any, x: Tensor, held: Any) -> Tensor:
    held.seen = m.a(x)
    return m.b(x)


@pytest.mark.parametrize(
    ("function", "held", "where"),
    [
        (appends, [], "args[1][0]"),
        (appends, [torch.ones(2)], "args[1][1]"),
        (inserts, {"old": torch.ones(2)}, "args[1]['new']"),
        (pops, [torch.ones(2), torch.ones(3)], "args[1][1]"),
        (replaces, [torch.ones(2)], "args[1][0]"),
        (assigns_a_field, Cache(torch.ones(2)), "args[1].seen"),
    ],
)
def test_a_container_of_the_caller_that_forward_changes_is_refused(
    function: Callable[..., Any], held: Any, where: str
) -> None:
    said = refusal(function, held)
    assert f"changes a container that it was given ({where})" in said
    assert "change a copy" in said


def test_a_container_that_forward_copies_first_may_change() -> None:
    def function(m: Any, x: Tensor, held: list[Tensor]) -> Tensor:
        held = [*held, m.a(x)]
        return m.b(x) + held.pop() + held[0].sum()

    assert_trains_like_eager(lambda: Net(function), batch(), [torch.ones(2)])


# -- seeds -----------------------------------------------------------------------------------------


def forks(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noise = torch.rand(6)
    return m.a(x) * noise


def restores(m: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand(6)
    torch.set_rng_state(state)
    return m.a(x) * noise


def seeds(seed: Callable[[], Any]) -> Callable[..., Any]:
    def function(m: Any, x: Tensor) -> Tensor:
        seed()
        return m.a(x) * torch.rand(6)

    return function


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (seeds(lambda: torch.manual_seed(3)), "manual_seed"),
        (seeds(lambda: torch.random.manual_seed(3)), "manual_seed"),
        (seeds(lambda: torch.default_generator.manual_seed(3)), "manual_seed"),
        (seeds(torch.seed), "seed"),
        (seeds(torch.initial_seed), "initial_seed"),
        (forks, "set_state"),
        (restores, "set_state"),
    ],
)
def test_seeding_inside_of_forward_is_refused(function: Callable[..., Any], named: str) -> None:
    said = refusal(function)
    assert f"calls {named} on a random number generator of torch" in said
    assert "Seed in front of the call" in said


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x) * torch.rand(6, generator=m.generator),
        lambda m, x: m.a(x) * torch.empty(6).uniform_(generator=m.generator),
        lambda m, x: m.a(x)[torch.randperm(4, generator=m.generator)],
        lambda m, x: m.a(x) * torch.rand(6, generator=torch.default_generator),
    ],
)
def test_a_generator_of_the_user_is_refused(function: Callable[..., Any]) -> None:
    said = refusal(function)
    assert "draws from a torch.Generator" in said
    assert f"{__file__}:" in said


# -- in-place operators on views -------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda y: y.t(),
    "transpose": lambda y: y.mT,
    "select": lambda y: y[0],
    "slice": lambda y: y[:, 1:3],
    "narrow": lambda y: y.narrow(0, 1, 2),
    "diagonal": lambda y: y.diagonal(),
    "as_strided": lambda y: torch.as_strided(y, (2, 2), (4, 1), 1),
    "unsqueeze": lambda y: y.unsqueeze(0),
    "view": lambda y: y.view(2, -1),
    "permute": lambda y: y.unsqueeze(0).permute(2, 0, 1),
    "unfold": lambda y: y.unfold(0, 2, 2),
    "flatten": lambda y: y.flatten(),
    "a chain": lambda y: y.t()[1:].unsqueeze(1).transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("returned", ["the view", "the base", "a view of the base"])
@pytest.mark.sample(14)
def test_a_view_that_is_written_in_place(view: str, returned: str) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = m.a(x) + m.b(x)
        z = VIEWS[view](y)
        z.add_(1.0)
        z.mul_(3.0)
        return {"the view": z, "the base": y, "a view of the base": y.t()}[returned]

    eager, ours = pair(lambda: Net(function), world_size=1)
    want, got = eager(batch()), ours(batch())
    assert_close(got, want)
    for out in (want, got):
        out.sin().sum().backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert_close(q.grad, p.grad)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x).unfold(1, 3, 1),
        lambda m, x: m.a(x).flatten().unfold(0, 4, 2),
        lambda m, x: torch.as_strided(m.a(x), (3, 3), (1, 1), 0),
        lambda m, x: m.a(x).expand(2, 4, 6),
        lambda m, x: m.a(x)[:, None].expand(4, 3, 6).transpose(0, 1),
    ],
)
def test_gradients_of_an_output_whose_elements_share_places(function: Callable[..., Any]) -> None:
    """Each element has a gradient of its own."""

    def loss(out: Tensor) -> Tensor:
        return (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape)).sum()

    def build() -> nn.Module:
        model = Net(function)
        model.b.requires_grad_(requires_grad=False)
        return model

    assert_trains_like_eager(build, batch(), loss=loss)


# -- losses that torch decomposes wrongly ----------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "target",
    [[3, 1, -1, 0, 2, 5], [0, 5, 2, 1, 3, 4], [-1, 0, 1, 2, 3, 4]],
)
def test_multilabel_margin_loss(target: list[int], reduction: str) -> None:
    labels = torch.tensor([target] * 4)

    def function(m: Any, x: Tensor) -> Tensor:
        loss = nn.functional.multilabel_margin_loss(m.a(x), labels, reduction=reduction)
        return loss + m.b(x).square().mean()

    assert_trains_like_eager(lambda: Net(function), batch())
