"""What user code writes into parameters outside of forward: what one process gets, or refused."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import StepError
from tests.fsdp2 import full
from tests.ranks import told

ROWS = torch.tensor([0, 2])
MASK = torch.eye(5, 4, dtype=torch.bool)
VALUES = torch.arange(20.0).view(5, 4)


def seeded(init: Callable[..., Any], *args: Any) -> Callable[[Tensor], Any]:
    def write(p: Tensor) -> None:
        torch.manual_seed(3)
        init(p, *args)

    return write


def assign(p: Any, where: Any, value: Any) -> None:
    p[where] = value


def add(p: Tensor, value: Tensor) -> None:
    p += value


def noise(p: Tensor) -> None:
    torch.manual_seed(3)
    p.add_(torch.randn_like(p) * 0.1).mul_(torch.bernoulli(p.abs().clamp(max=1)))


def data(p: Tensor) -> None:
    p.data = VALUES + 1


def sorted_into(p: Tensor) -> None:
    torch.sort(VALUES, dim=0, descending=True, out=(p, torch.empty(0, dtype=torch.long)))


# Every one of them as eager PyTorch does it.
RIGHT: dict[str, Callable[[Any], Any]] = {
    "row": lambda p: assign(p, 0, 5.0),
    "last row": lambda p: assign(p, -1, 5.0),
    "row of values": lambda p: assign(p, 3, VALUES[1]),
    "a row of its own": lambda p: assign(p, 0, p[4]),
    "rows": lambda p: assign(p, slice(1, 3), 7.0),
    "column": lambda p: assign(p, (slice(None), 1), 7.0),
    "its own mask": lambda p: assign(p, p > 0, 0.0),
    "mask": lambda p: assign(p, MASK, 0.0),
    "indices": lambda p: assign(p, ROWS, 1.0),
    "all": lambda p: assign(p, slice(None), VALUES),
    "row of data": lambda p: assign(p.data, 0, 0.0),
    "row of the transposed": lambda p: assign(p.t(), 0, 0.0),
    "index_fill_": lambda p: p.index_fill_(0, ROWS, 9.0),
    "index_copy_": lambda p: p.index_copy_(0, ROWS, VALUES[:2]),
    "scatter_": lambda p: p.scatter_(0, ROWS[None], VALUES[:1, 2:]),
    "scatter_add_": lambda p: p.scatter_add_(0, torch.zeros(5, 4, dtype=torch.long), VALUES),
    "put_": lambda p: p.put_(torch.arange(19, -1, -1).view(5, 4), VALUES),
    "addr_": lambda p: p.addr_(torch.ones(5), VALUES[1]),
    "tril_": lambda p: p.tril_(),
    "renorm_": lambda p: p.renorm_(2, 1, 0.1),
    "an operator's overload": lambda p: torch.ops.aten.add_.Tensor(p, VALUES),
    "div_ by the largest": lambda p: p.div_(p.abs().amax(dim=0, keepdim=True)),
    "rows in another order": lambda p: p.copy_(p[torch.tensor([4, 2, 0, 1, 3])]),
    "masked_fill_": lambda p: p.masked_fill_(MASK, 9.0),
    "fill_diagonal_": lambda p: p.fill_diagonal_(3.0),
    "copy_": lambda p: p.copy_(VALUES),
    "copy_ of one row": lambda p: p.copy_(VALUES[0]),
    "data.copy_": lambda p: p.data.copy_(VALUES),
    "detach().copy_": lambda p: p.detach().copy_(VALUES),
    "add_ of one row": lambda p: p.add_(VALUES[0]),
    "+=": lambda p: add(p, VALUES[0]),
    "**=": lambda p: operator.ipow(p, 2),
    "//=": lambda p: operator.ifloordiv(p, VALUES + 1),
    "%= of a row": lambda p: operator.imod(p, VALUES[1]),
    "mul_": lambda p: p.mul_(2),
    "lerp_": lambda p: p.lerp_(VALUES, 0.5),
    "t().copy_": lambda p: p.t().copy_(VALUES.t()),
    "T.copy_": lambda p: p.T.copy_(VALUES.t()),
    "foreach": lambda p: torch._foreach_mul_([p], [2.0]),
    "data = ...": data,
    "out": lambda p: torch.add(VALUES, VALUES, out=p),
    "out of itself": lambda p: torch.mul(p, 2, out=p),
    "out of a clamp": lambda p: torch.clamp(p, min=0, out=p),
    "out of a product": lambda p: torch.matmul(torch.ones(5, 5), p, out=p.clone()),
    "out into itself": lambda p: torch.matmul(p.clone(), torch.ones(4, 4), out=p),
    "out of nothing": lambda p: torch.eye(5, 4, out=p),
    "one of two outs": sorted_into,
    "eye_": nn.init.eye_,
    "constant_": lambda p: nn.init.constant_(p, 2.0),
    "normal_": seeded(nn.init.normal_),
    "uniform_": seeded(nn.init.uniform_),
    "trunc_normal_": seeded(nn.init.trunc_normal_),
    "kaiming_uniform_": seeded(nn.init.kaiming_uniform_),
    "xavier_normal_": seeded(nn.init.xavier_normal_),
    "orthogonal_": seeded(nn.init.orthogonal_),
    "sparse_": seeded(nn.init.sparse_, 0.5),
    "a method": seeded(lambda p: p.normal_(0.5, 2.0)),
    "bernoulli_": seeded(lambda p: p.bernoulli_(0.3)),
    "exponential_": seeded(lambda p: p.data.exponential_()),
    "dropout": seeded(lambda p: p.copy_(nn.functional.dropout(p, 0.5))),
    "a generator": lambda p: p.normal_(generator=torch.Generator().manual_seed(5)),
    "noise": noise,
}

# What one process would write into the parameter through a view.
THROUGH_VIEWS: dict[str, Callable[[Any], Any]] = {
    "row": lambda p: p[0].zero_(),
    "row of a list": lambda p: next(iter(p)).zero_(),
    "row of data": lambda p: p.data[0].zero_(),
    "another row of data": lambda p: p.data[3].fill_(2),
    "row of what is detached": lambda p: p.detach()[0].zero_(),
    "rows": lambda p: p[1:3].mul_(2),
    "view of uneven rows": lambda p: p.view(-1).mul_(2),
    "view": lambda p: p.view(-1)[:3].zero_(),
    "view_as": lambda p: p.view_as(torch.empty(20)).zero_(),
    "diagonal": lambda p: p.diagonal().zero_(),
    "unfold": lambda p: p.unfold(0, 2, 1).zero_(),
    "chunk": lambda p: p.chunk(2)[1].zero_(),
    "unbind": lambda p: p.unbind(0)[2].zero_(),
    "narrow": lambda p: p.narrow(0, 1, 2).zero_(),
    "a view of a row": lambda p: p[0].view(2, 2).t().copy_(torch.ones(2, 2)),
    "item of a row": lambda p: assign(p[0], 1, 3.0),
    "row += 1": lambda p: add(p[0], torch.ones(4)),
    "row as out": lambda p: torch.ones(4, out=p[0]),
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))


def weight(model: Any) -> Any:
    return model[0].weight


def written(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Also: the next call sees it, the neighbour in memory is as it was, ranks draw on alike."""
    ours: Any = fxshard.compile(build(), **options)
    for name, write in RIGHT.items():
        eager = build()
        with torch.no_grad():
            for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
                mine.copy_(theirs)
            write(weight(eager))
            after = torch.get_rng_state()
            write(weight(ours))
        assert torch.equal(torch.get_rng_state(), after), name
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            assert_close(full(mine.detach()), theirs.detach(), rtol=0, atol=0, msg=name)
            assert mine.requires_grad == theirs.requires_grad, name
            mine.requires_grad_(True)
        assert_close(ours(torch.ones(2, 4)), eager(torch.ones(2, 4)), msg=name)


@pytest.mark.parametrize("options", [{}, {"strategy": "no_shard"}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.sample(2)
def test_what_is_written_is_what_one_process_writes(
    ranks: Any, world_size: int, options: dict[str, Any]
) -> None:
    ranks(world_size).run(written, options)


def through_views(rank: int, world_size: int) -> None:
    ours: Any = fxshard.compile(build())
    for name, write in THROUGH_VIEWS.items():
        with torch.no_grad():
            said = told(lambda write=write: write(weight(ours)))
        assert said.startswith("StepError"), (name, said)
        assert "writes into a part of parameter '0.weight' that is a copy here" in said, name
        assert "summon_full_params" in said
        assert_close(full(weight(ours).detach()), weight(build()).detach(), rtol=0, atol=0)
    with torch.no_grad(), pytest.raises(ValueError, match="read-only"):
        weight(ours).numpy()[0] = 1
    with torch.no_grad():
        (weight(ours) * 2).numpy()[0] = 1  # it is the user's own


def test_writes_through_views_of_copies_are_refused(ranks: Any) -> None:
    ranks(2).run(through_views)


def read(rank: int, world_size: int) -> None:
    """Views are as good to read as before, and what is computed of them may be written."""
    ours: Any = fxshard.compile(build())
    mine, theirs, column = weight(ours), weight(build()), torch.ones(4, 1)
    with torch.no_grad():
        for view in (
            lambda p: p[0] + column[:, 0],
            lambda p: p.diagonal() * 2 + column[:, 0],
            lambda p: p[1:3] @ column,
            lambda p: (p[0] * 2).zero_() + column[:, 0],
            lambda p: p[0].add(1).fill_(2) + column[:, 0],
            lambda p: p.T[0] + torch.ones(5),
        ):
            assert_close(full(view(mine)), view(theirs).detach())
    assert_close(column.t() @ mine.T, column.t() @ theirs.T)
    (column.t() @ mine.T).square().sum().backward()
    (column.t() @ theirs.T).square().sum().backward()
    assert_close(full(mine.grad), theirs.grad)


def test_views_are_read_as_before(ranks: Any) -> None:
    ranks(2).run(read)


def through_views_with_gradients(rank: int, world_size: int) -> None:
    """The view is made while gradients are enabled, and written later."""
    ours: Any = fxshard.compile(build())
    mine, theirs = weight(ours), weight(build())
    for index in (0, slice(1, 3), (slice(None), 1)):
        view, same = mine[index], theirs[index]
        for derived in (view, view.detach(), view.data, view.view(-1)[1:]):
            for write in (
                lambda v: v.zero_(),
                lambda v: v.add_(1),
                lambda v: v.copy_(torch.ones_like(v)),
                lambda v: assign(v, 0, 5.0),
                lambda v: nn.init.normal_(v),
                lambda v: torch.ones(v.shape, out=v),
                lambda v: torch._foreach_zero_([v]),
                lambda v: add(v, torch.ones(1)),
                lambda v: operator.ipow(v, 2),
                lambda v: operator.ifloordiv(v, 2),
                lambda v: operator.imod(v, torch.ones(1)),
            ):
                with torch.no_grad():
                    said = told(lambda write=write, derived=derived: write(derived))
                text = "writes into a part of parameter '0.weight' that is a copy here"
                assert text in said, (said, index)
        with pytest.raises(ValueError, match="read-only"):
            view.detach().numpy()[0] = 1
        assert_close(view * torch.ones(1), same * torch.ones(1))  # it may be read
        target = torch.zeros(same.shape)
        with torch.no_grad():
            assert_close(target.copy_(view), same.detach())
            assert_close((view * 2).zero_(), target * 0)  # what is computed is the user's
        mine.grad = theirs.grad = None
        (view * torch.ones(1)).square().sum().backward()
        (same * torch.ones(1)).square().sum().backward()
        assert_close(full(mine.grad), theirs.grad)
    assert type(pickle.loads(pickle.dumps(view.detach()))) is Tensor
    assert_close(full(mine.detach()), theirs.detach(), rtol=0, atol=0)


def test_writes_through_views_made_with_gradients_are_refused(ranks: Any) -> None:
    ranks(2).run(through_views_with_gradients)


DRAWN: dict[str, Callable[[Any], Any]] = {
    "zeros_like": lambda p: torch.zeros_like(p).normal_(),
    "empty_like": lambda p: torch.empty_like(p).uniform_(),
    "new_zeros": lambda p: p.new_zeros(5, 4).normal_(),
    "randn_like": torch.randn_like,
    "randint_like": lambda p: torch.randint_like(p, 10),
    "randn_like of a copy": lambda p: torch.randn_like(p.detach().clone()),
    "init of zeros": lambda p: nn.init.trunc_normal_(torch.zeros_like(p)),
    "a copy": lambda p: p.detach().clone().exponential_(),
    "a deepcopy": lambda p: copy.deepcopy(p).detach().normal_(),
    "computed": lambda p: torch.randn_like(torch.ones_like(p).clone() * 2),
    "bernoulli": lambda p: torch.bernoulli(torch.full_like(p, 0.5)),
    "normal": lambda p: torch.normal(p.detach(), 1.0),
    "multinomial": lambda p: torch.multinomial(torch.ones_like(p), 2),
    "dropout": lambda p: nn.functional.dropout(p, 0.5),
    "dropout of ones": lambda p: nn.functional.dropout(torch.ones_like(p), 0.5),
    "alpha_dropout": lambda p: nn.functional.alpha_dropout(torch.ones_like(p), 0.5, True),
    "rrelu": lambda p: torch.rrelu(-torch.ones_like(p), training=True),
    "noise for the gradient": lambda p: torch.randn_like(p.grad),
    "noisy gradient": lambda p: p.grad.add(torch.zeros_like(p.grad).normal_(), alpha=0.1),
    "a sum": lambda p: torch.randn_like(p.detach().sum(0)),
    "a generator": lambda p: torch.zeros_like(p).normal_(
        generator=torch.Generator().manual_seed(1)
    ),
    "dropout of a generator": lambda p: torch.bernoulli(
        p.abs().clamp(max=1), generator=torch.Generator().manual_seed(1)
    ),
}


def drawn(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Of what is made of parameters; and each number once: what is drawn next is as in eager."""
    models: list[Any] = [fxshard.compile(build(), **options), build()]
    for model in models:
        model(torch.ones(2, 4)).sum().backward()
    for name, draw in DRAWN.items():
        for grad in (False, True):
            found, after = [], []
            for model in models:
                torch.manual_seed(3)
                with torch.set_grad_enabled(grad):
                    found.append(full(draw(weight(model)).detach()))
                after.append(torch.get_rng_state())
            assert_close(*found, rtol=1e-6, atol=1e-6, msg=name)
            assert torch.equal(*after), name
    optimizer = torch.optim.Adam(models[0].parameters())
    optimizer.step()
    torch.manual_seed(3)
    state = torch.randn_like(optimizer.state[weight(models[0])]["exp_avg"])
    assert type(state) is DTensor
    torch.manual_seed(3)
    assert_close(full(state), torch.randn(5, 4))
    said = told(lambda: weight(models[0]).detach().sum(0).normal_())
    assert "no_shard" in str(options) or "Draw into a tensor of its own" in said, said


@pytest.mark.parametrize("options", [{}, {"strategy": "no_shard"}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.sample(2)
def test_what_is_drawn_is_what_one_process_draws(
    ranks: Any, world_size: int, options: dict[str, Any]
) -> None:
    ranks(world_size).run(drawn, options)


def drawn_elsewhere(rank: int, world_size: int) -> None:
    """DTensors on meshes of the user's own are left to torch."""
    fxshard.compile(build())
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("one", "other"))
    other = distribute_tensor(torch.zeros(4, 4), mesh["other"], [Shard(0)])
    torch.manual_seed(3)
    other.normal_()
    torch.manual_seed(3)
    assert_close(other.to_local(), torch.randn(2, 4))
    own = torch.zeros_like(weight(fxshard.compile(build())))
    torch.manual_seed(3)
    own.normal_()  # ours are not
    torch.manual_seed(3)
    assert_close(full(own), torch.randn(5, 4))


def test_dtensors_of_the_users_own_draw_as_before(ranks: Any) -> None:
    ranks(2).run(drawn_elsewhere)


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum().item(),
    "float": lambda p: float(p.sum()),
    "int": lambda p: int((p * 100).sum()),
    "norm": lambda p: p.norm().item(),
    "linalg norm": lambda p: torch.linalg.vector_norm(p).item(),
    "mean": lambda p: p.mean().item(),
    "max": lambda p: p.max().item(),
    "min": lambda p: p.min().tolist(),
    "count": lambda p: torch.count_nonzero(p > 0).item(),
    "any": lambda p: [bool((p > limit).any()) for limit in torch.linspace(-0.5, 0.5, 20)],
    "all": lambda p: [bool((p > limit).all()) for limit in torch.linspace(-0.5, 0.5, 20)],
    "if": lambda p: "large" if p.abs().sum() > 5 else "small",
    "text": lambda p: f"{p.sum():.3f}",
    "element": lambda p: p[4, 1].item(),
    "argmax": lambda p: int(p.argmax()),
    "isfinite": lambda p: torch.isfinite(p).all().item(),
    "data": lambda p: p.data.sum().item(),
}


def numbers(rank: int, world_size: int) -> None:
    models: list[Any] = [fxshard.compile(build()), build()]
    mine, theirs = map(weight, models)
    for name, number in NUMBERS.items():
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                got, expected = number(mine), number(theirs)
            if isinstance(expected, float):
                assert_close(got, expected, msg=name)
            else:
                assert got == expected, (name, got, expected)


def test_numbers_of_parameters_are_those_of_all_ranks(ranks: Any) -> None:
    ranks(2).run(numbers)


def numbers_of_gradients(rank: int, world_size: int) -> None:
    """Which stay DTensors; of several, as logging code asks for them, and of optimizer states."""
    models: list[Any] = [fxshard.compile(build()), build()]
    found: list[list[Any]] = [[], []]
    unknown = ("element", "min", "text")  # of matrices; what DTensor refuses: tolist(), f"{x:.3f}"
    for model, said in zip(models, found, strict=True):
        x = torch.arange(16.0).view(4, 4).sin()
        part = x.chunk(world_size)[rank] if model is models[0] else x
        model(part).square().mean().backward()
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        states = [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]
        for tensor in [*(p.grad for p in model.parameters()), *states]:
            said += [number(tensor) for name, number in NUMBERS.items() if name not in unknown]
    for mine, theirs in zip(*found, strict=True):
        if isinstance(theirs, float):
            assert_close(mine, theirs)
        else:
            assert mine == theirs
    assert "RankMismatchError" not in told(lambda: models[0](torch.ones(2, 4)))


def test_numbers_of_gradients_are_those_of_all_ranks(ranks: Any) -> None:
    ranks(2).run(numbers_of_gradients)


def number_alone(rank: int, world_size: int) -> str:
    ours: Any = fxshard.compile(build())
    ours(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        return told(lambda: weight(ours).grad.norm().item())
    return told(lambda: ours(torch.ones(2, 4)).sum().backward())


def test_a_number_on_one_rank_alone(hasty: Any) -> None:
    asked, called = hasty(2).run(number_alone)
    assert asked.startswith("RankMismatchError: rank 0 would do something else"), asked
    assert "a read of all rows of a sharded tensor" in asked
    assert called.startswith("RankMismatchError"), called


def refused(rank: int, world_size: int) -> None:
    ours, x = fxshard.compile(build()), torch.ones(2, 4)
    p: Any = weight(ours)
    before = full(p.detach()).clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        p[0] = 1.0
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        p.mul_(2)
    with pytest.raises(RuntimeError, match=r"out=.* don't support automatic differentiation"):
        torch.add(VALUES, VALUES, out=p)
    with pytest.raises(StepError, match=r"param\.data = a tensor of shape \[2, 2\]"):
        p.data = torch.ones(2, 2)
    with pytest.raises(StepError, match=r"param\.data = .*torch\.float64"):
        p.data = VALUES.double()
    loss = ours(x).sum()
    with torch.no_grad():
        with pytest.raises(StepError, match="is not summed over the ranks yet"):
            p.sum(0).add_(torch.ones(4))
        with pytest.raises(StepError, match="changes more of a sharded parameter"):
            torch.ones(7, 3, out=p)
    assert_close(full(p.detach()), before, rtol=0, atol=0)
    loss.backward()
    loss = ours(x).square().sum()
    ours[1].weight.data = torch.ones(4, 5)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()


def test_what_cannot_be_written_is_refused(ranks: Any) -> None:
    ranks(2).run(refused)


@torch.library.custom_op("tests::double_in_place", mutates_args=("x",))
def double_in_place(x: Tensor) -> None:
    x.mul_(2)


class Clamping(nn.Module):
    """It writes into its parameter when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.1)
        return x @ self.weight.T


LOST: dict[str, Callable[[Any], Any]] = {
    "embedding": lambda m: F.embedding(ROWS, m.table.weight, max_norm=0.1),
    "a module's embedding": lambda m: m.table(ROWS),
    "a bag": lambda m: F.embedding_bag(ROWS[None], m.table.weight, max_norm=0.1),
    "a custom operator": lambda m: double_in_place(m.table.weight.detach()),
    "a block by itself": lambda m: m.block(torch.ones(2, 4)),
    "broadcast": lambda m: dist.broadcast(m.table.weight.data, 0),
    "all_reduce": lambda m: dist.all_reduce(m.table.weight.detach()),
    "of what is computed of it": lambda m: dist.all_reduce(m.table.weight.detach().norm()),
    "of several": lambda m: dist.all_reduce_coalesced([m.table.weight.data, m.block.weight.data]),
    "from_dlpack": lambda m: torch.from_dlpack(m.table.weight.detach()),
}


def lost(rank: int, world_size: int) -> None:
    """Every one writes into a copy, or into memory that a DTensor has not."""
    torch.manual_seed(0)
    model: Any = nn.Module()
    model.table, model.block = nn.Embedding(5, 4, max_norm=0.1), Clamping()
    fxshard.fully_shard(model.block)
    fxshard.fully_shard(model)
    before = [full(p.detach()).clone() for p in model.parameters()]
    for name, write in LOST.items():
        for enabled in (False, True):
            with torch.set_grad_enabled(enabled), pytest.raises(StepError) as raised:
                write(model)
            assert "lost" in str(raised.value), name
    for p, was in zip(model.parameters(), before, strict=True):
        assert_close(full(p.detach()), was, rtol=0, atol=0)


def test_what_would_be_written_into_a_copy_is_refused(ranks: Any) -> None:
    ranks(2).run(lost)


def pickled(rank: int, world_size: int) -> None:
    """Also of parameters that lie after others in memory, which torch takes for plain tensors."""
    ours: Any = fxshard.compile(build())
    for p in ours.parameters():
        for made in (p.detach(), p.data):
            again = pickle.loads(pickle.dumps(made))
            assert type(again) is DTensor and again.placements == p.placements
            assert_close(full(again), full(p.detach()), rtol=0, atol=0)


def test_parts_of_packed_memory_are_pickled(ranks: Any) -> None:
    ranks(2).run(pickled)


def kept(rank: int, world_size: int) -> None:
    """Copies of parameters, and of what state dicts hold of them, stay DTensors."""
    ours: Any = fxshard.compile(build())
    state = copy.deepcopy(ours.state_dict())
    assert all(type(value) is DTensor for value in state.values())
    twin = copy.deepcopy(weight(ours))
    assert isinstance(twin, DTensor) and isinstance(twin, nn.Parameter) and twin.requires_grad
    assert_close(full(twin.detach()), weight(build()).detach())
    with torch.no_grad():
        weight(ours).zero_()
    ours.load_state_dict(state)
    assert_close(full(weight(ours).detach()), weight(build()).detach())


def test_copies_of_parameters_are_dtensors(ranks: Any) -> None:
    ranks(2).run(kept)


def write_alone(rank: int, world_size: int) -> str:
    """Rank 0 writes what needs all ranks; rank 1 calls the model."""
    ours = fxshard.compile(build())
    ours(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        if rank == 0:
            return told(lambda: assign(weight(ours), 0, 1.0))
    return told(lambda: ours(torch.ones(2, 4)).sum().backward())


def test_a_write_on_one_rank_alone(hasty: Any) -> None:
    wrote, called = hasty(2).run(write_alone)
    assert wrote.startswith("RankMismatchError: rank 0 would do something else"), wrote
    assert "__setitem__, which writes into a parameter" in wrote
    assert called.startswith("RankMismatchError"), called
