"""Outputs that are in no loss: gradients are None where eager's are, on all ranks alike."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import fxshard
from tests.fsdp2 import full

BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two outputs: `shared` reaches both, `first` and `second` one each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))
        self.left_alone = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.shared(x))
        return self.first(h), self.second(h) * self.left_alone


def build() -> Two:
    torch.manual_seed(0)
    return Two()


def loss_of(outputs: tuple[Tensor, ...], used: str) -> Tensor:
    """Over the outputs whose letters are in `used`."""
    both = [y for y, letter in zip(outputs, "ab", strict=True) if letter in used]
    return sum((y.pow(2).mean() for y in both), torch.tensor(0.0))


Uses = list[list[str]]  # of each step, of each rank: which outputs are in the loss


def eager(uses: Uses, batches: list[Tensor], no_sync: bool = False) -> list[Tensor | None]:
    """Gradients of the last step and parameters after it, of the mean over ranks."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    grads: list[Tensor | None] = []
    for i, by_rank in enumerate(uses):
        losses = [loss_of(model(x), u) for x, u in zip(batches, by_rank, strict=True)]
        (sum(losses, torch.tensor(0.0)) / len(batches)).backward()
        if no_sync and i + 1 < len(uses):
            continue
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*grads, *(p.detach() for p in model.parameters())]


OPTIONS: dict[str, dict[str, Any]] = {
    "units": {"units": ["shared", "first", "second"]},
    "root": {"units": []},
    "ignored": {"ignored": ["left_alone"]},
    "grad op": {"units": ["first", "second"], "strategy": "shard_grad_op"},
    "no shard": {"strategy": "no_shard"},
}


def trained(rank: int, world_size: int, options: Any, uses: Uses, no_sync: bool) -> list[Any]:
    in_process = not dist.is_initialized()
    own = {"world_size": 2} if in_process else {}
    model = fxshard.compile(build(), **options, **own)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = BATCH if in_process else BATCH.chunk(world_size)[rank]
    grads: list[Tensor | None] = []
    for i, by_rank in enumerate(uses):
        waits = no_sync and i + 1 < len(uses)
        model.set_requires_gradient_sync(not waits)
        loss_of(model(batch), by_rank[rank]).backward()
        if waits:
            continue
        grads = [None if p.grad is None else full(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*grads, *(full(p).detach() for p in model.parameters())]


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine is None) == (wanted is None)
        if wanted is not None:
            assert_close(mine, wanted)


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.sample(5)
def test_in_one_process(name: str, no_sync: bool) -> None:
    for steps in (["a"], ["ab", "a"], ["b", "a"], ["a", "a"]):
        uses = [[use] for use in steps]
        expected = eager(uses, [BATCH], no_sync)
        assert_alike(trained(0, 1, OPTIONS[name], uses, no_sync), expected)


# Both ranks use the same outputs; one uses fewer; each uses another; one step after another.
ALIKE: dict[str, Uses] = {
    "none of the second": [["a", "a"]],
    "in the first step only": [["ab", "ab"], ["a", "a"]],
    "rank 0 only": [["ab", "a"]],
    "rank 1 only": [["a", "a"], ["a", "b"]],
    "one each": [["a", "b"], ["b", "b"], ["a", "a"]],
}


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.sample(5)
def test_on_two_ranks(ranks: Any, case: str, no_sync: bool) -> None:
    """A gradient is None where no rank's loss has reached it, as on the joined batch."""
    options = {"units": ["shared", "first", "second"]}
    expected = eager(ALIKE[case], list(BATCH.chunk(2)), no_sync)
    for found in ranks(2).run(trained, options, ALIKE[case], no_sync):
        assert_alike(found, expected)


def on_a_part_of_the_ranks(rank: int, world_size: int, uses: Uses) -> list[Any]:
    """A mesh of two dimensions over half of the ranks has no group of all of them."""
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "rest")
    )["replicate", "shard"]
    options = {"mesh": mesh, "strategy": "hybrid_shard"}
    found = trained(rank, world_size, options, uses, no_sync=False)
    return [None if t is None else t.clone() for t in found]


@pytest.mark.parametrize("last", ["aaaa", "aaab", "baaa"])
@pytest.mark.sample(2)
def test_on_a_mesh_of_two_dimensions(ranks: Any, last: str) -> None:
    uses: Uses = [["ab"] * 4, list(last)]
    expected = eager(uses, list(BATCH.chunk(4)))
    for found in ranks(4).run(on_a_part_of_the_ranks, uses):
        assert_alike(found, expected)


def stepped(rank: int, world_size: int, uses: Uses) -> list[Tensor]:
    adam: Callable[..., Any] = lambda params: torch.optim.Adam(params, lr=0.1)  # noqa: E731
    model = fxshard.compile(build(), units=["first"], optimizer=adam, optimizer_in_backward=True)
    for by_rank in uses:
        loss_of(model(BATCH.chunk(world_size)[rank]), by_rank[rank]).backward()
    return [full(p).detach() for p in model.parameters()]


@pytest.mark.parametrize("last", [["a", "a"], ["a", "ab"]])
def test_what_no_loss_reaches_is_not_stepped_in_backward(ranks: Any, last: list[str]) -> None:
    uses: Uses = [["ab", "ab"], last]
    expected = eager(uses, list(BATCH.chunk(2)))[-len(list(build().parameters())) :]
    for found in ranks(2).run(stepped, uses):
        assert_alike(found, expected)


def test_gradients_of_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), torch.sin(y)

    model = fxshard.compile(Sum(), world_size=2)
    x, y = (BATCH.clone().requires_grad_() for _ in range(2))
    model(x, y)[0].sum().backward()
    assert x.grad is not None and y.grad is None
    x, y = (BATCH.clone().requires_grad_() for _ in range(2))
    model.zero_grad()
    model(x, y)[1].sum().backward()
    assert x.grad is None and y.grad is not None
    assert all(param.grad is None for param in model.parameters())


def test_a_gradient_that_is_a_constant_is_there_as_in_eager() -> None:
    class Sign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * torch.sign(self.a), x * self.b

    model = fxshard.compile(Sign(), world_size=2)
    model(BATCH)[0].sum().backward()
    grad, other = (param.grad for param in model.parameters())
    assert grad is not None and not grad.any() and other is None


def test_copies_after_such_a_backward() -> None:
    model = fxshard.compile(build(), world_size=2)
    model(BATCH)[0].sum().backward()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        made(BATCH)[1].sum().backward()
        assert {n for n, p in made.named_parameters() if p.grad is None} == {
            "first.weight",
            "first.bias",
        }


def compiled(rank: int, world_size: int) -> list[Any]:
    model = torch.compile(fxshard.shard(build()), backend="fxshard")
    model(BATCH.chunk(world_size)[rank])[0].pow(2).mean().backward()
    return [None if p.grad is None else full(p.grad) for p in model.parameters()]


def test_graphs_of_dynamo(ranks: Any) -> None:
    expected = eager([["a", "a"]], list(BATCH.chunk(2)))
    for found in ranks(2).run(compiled):
        assert_alike(found, expected[: len(found)])


BYTES: dict[str, dict[str, Any]] = OPTIONS | {
    "in backward": {"optimizer_in_backward": True, "units": ["first", "second"]},
    "no_sync": {"micro_batches": 2, "no_sync": True},
    "two batches": {"micro_batches": 2},
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.sample(8)
def test_a_plan_knows_what_its_loss_reaches(name: str, optimizer: Any, world_size: int) -> None:
    """No ``.grad``, step or state of the other parameters: measured and planned, 0 bytes apart."""
    options = BYTES[name] | {"optimizer": optimizer, "world_size": world_size}
    every = fxshard.validate(build(), (BATCH,), loss=lambda out: loss_of(out, "ab"), **options)
    some = fxshard.validate(build(), (BATCH,), loss=lambda out: loss_of(out, "a"), **options)
    assert some.max_abs_difference == every.max_abs_difference == 0


class Constants(nn.Module):
    """Gradients that are computed from no gradient of an output: zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.empty(0))
        self.steps = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, torch.cat((self.empty, (y * torch.sign(self.steps)).flatten()))


@pytest.mark.parametrize("used", ["a", "b", "ab"])
def test_a_constant_gradient_is_none_where_its_output_is_in_no_loss(used: str) -> None:
    torch.manual_seed(0)
    plain = Constants()
    ours = fxshard.compile(copy.deepcopy(plain), world_size=2)
    for model in (plain, ours):
        loss_of(model(BATCH), used).backward()
    assert_alike([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
