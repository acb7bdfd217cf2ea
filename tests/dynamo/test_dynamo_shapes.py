"""Shapes and modes, inputs and results, options, checkpoints, reports."""

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxshard
from fxshard.errors import CaptureError, ConfigError, StepError
from tests.dynamo.dynamo_cases import (
    WIDTH,
    Checkpointed,
    Mlp,
    assert_same_gradients,
    assert_same_step,
    compiled,
    pair,
    programs,
)

# -- shapes and modes ------------------------------------------------------------------------------


def test_five_lengths_are_one_graph_of_dynamo_and_a_bounded_number_of_programs() -> None:
    plain, model = pair(Mlp)
    run = compiled(model)
    counters.clear()
    for _ in range(2):
        for length in (3, 4, 6, 9, 12):
            x = torch.randn(length, WIDTH)
            torch._dynamo.mark_dynamic(x, 0)
            assert_same_step(plain, model, run, x)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(programs(model)) == 3, "two lengths, and all others"


class Sizes(Mlp):
    """Sizes, and numbers made of them, in forward and among the results."""

    def forward(self, x: Tensor) -> Any:
        rows = x.shape[0]
        h = super().forward(x.view(rows // 2, 2, WIDTH)).reshape(rows, WIDTH)
        return h * rows + torch.arange(rows).unsqueeze(1), rows // 2


def test_sizes_as_inputs_and_results_of_a_graph() -> None:
    plain, model = pair(Sizes)
    run = compiled(model, dynamic=True)
    for length in (4, 6, 10):
        x = torch.randn(length, WIDTH)
        (expected, halves), (got, number) = plain(x), run(x)
        assert number == halves == length // 2
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_more_programs_than_allowed_are_refused() -> None:
    _, model = pair(Mlp, dynamic=False, max_variants=2)
    run = compiled(model, dynamic=True)
    run(torch.randn(3, WIDTH))
    run(torch.randn(4, WIDTH))
    with pytest.raises(CaptureError, match=r"is \[5, 8\], was .* as many as max_variants=2"):
        run(torch.randn(5, WIDTH))
    run(torch.randn(4, WIDTH))


def test_many_models_are_compiled_in_one_process() -> None:
    """Each class counts for itself, as it does without fxshard."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            cls: Any = type(f"Mlp{number}", (Mlp,), {})
            plain, model = pair(cls)
            assert_same_step(plain, model, compiled(model), torch.randn(3, WIDTH))


class Dropping(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


def test_training_evaluation_no_grad_and_inference() -> None:
    plain, model = pair(Dropping)
    run, x = compiled(model), torch.randn(3, WIDTH)

    def same() -> Tensor:
        torch.manual_seed(3)
        expected = plain(x)
        torch.manual_seed(3)
        got: Tensor = run(x)
        assert torch.equal(got, expected)
        return got

    trained = same()
    plain.eval(), model.eval()
    assert not torch.equal(same(), trained)
    with torch.no_grad():
        assert not same().requires_grad
    with torch.inference_mode():
        assert same().is_inference()
        assert torch.equal(model(x), plain(x))
    plain.train(), model.train()
    assert torch.equal(same(), trained)
    assert [p.signature.training for p in programs(model)] == [True, True, False, False]


def test_freezing_and_autocast() -> None:
    plain, model = pair(Mlp)
    run, x = compiled(model), torch.randn(3, WIDTH)
    assert_same_step(plain, model, run, x)
    for each in (plain, model):
        each.zero_grad()
        each.blocks[0].requires_grad_(False)
    assert_same_step(plain, model, run, x)
    assert model.blocks[0][0].weight.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(plain, model, run, x)


# -- inputs and results ----------------------------------------------------------------------------


class Results(Mlp):
    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        found = {"h": h, "sum": h.sum(), "none": None, "size": x.shape[0], "x": x}
        return found | {"view": x.view(-1), "weight": self.norm.weight}


def test_results_of_every_kind() -> None:
    plain, model = pair(Results)
    x = torch.randn(3, WIDTH, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, got = plain(x), compiled(model)(y)
    assert got["x"] is y and got["none"] is None and got["size"] == 3
    for found in (expected, got):  # a scalar result is not taken for the only loss
        (found["sum"] + found["h"].square().sum() + found["view"].sum()).backward(retain_graph=True)
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_gradients(model, plain, atol=1e-5)
    assert torch.equal(got["weight"], plain.norm.weight)


class Writing(Mlp):
    """Writes into buffers and inputs, and into an activation that crosses a break."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        self.seen = self.seen * 0.5 + x.mean(0).detach()
        h = self.batch_norm(super().forward(x))
        torch._dynamo.graph_break()
        h.mul_(2)
        h.add_(self.norm.bias)
        torch._dynamo.graph_break()
        return self.norm(h) + cache.sum() + self.seen


def test_what_a_graph_writes_into_is_written() -> None:
    plain, model = pair(Writing)
    run = compiled(model, fullgraph=False)
    theirs, ours = torch.zeros(3), torch.zeros(3)
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        expected, got = plain(x, theirs), run(x, ours)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
        assert torch.equal(theirs, ours)
        for each, result in ((plain, expected), (model, got)):
            each.zero_grad()
            result.square().mean().backward()
        assert_same_gradients(model, plain)
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, msg=name)


class SharedMemory(Mlp):
    """Behind a break, writes into tensors that share memory with others."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        rows, copies = h.view(-1), x.clone()
        first = copies[0]
        torch._dynamo.graph_break()
        first.mul_(3)
        h.mul_(2)  # so `rows` is twice as large too
        return (rows * rows).view(h.shape) + self.norm(copies)


def test_what_is_written_into_shared_memory_is_seen_through_all_views() -> None:
    plain, model = pair(SharedMemory)
    run = compiled(model, fullgraph=False)
    for _ in range(2):
        assert_same_step(plain, model, run, torch.randn(3, WIDTH), atol=1e-5)


class SavesItsResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


@pytest.mark.parametrize("how", ["shard", "compile"])
def test_a_result_that_backward_reads_must_stay_as_it_is(how: str) -> None:
    plain, x = SavesItsResult(), torch.randn(3, WIDTH)
    y = plain(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    if how == "shard":
        run = compiled(fxshard.shard(SavesItsResult(), world_size=2))
    else:
        run = fxshard.compile(SavesItsResult(), world_size=2)
    y = run(x)
    y.mul_(2)
    for _ in range(2):  # a refused backward leaves all as it was
        with pytest.raises(StepError, match=r"an output of SavesItsResult, of shape \[3, 8\]"):
            y.sum().backward(retain_graph=True)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grad * x * weight, (grad * x * x).sum(0)


class Odd(nn.Module):
    """Parameters in every place that modules keep them in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.listed = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.listed[1].abs().max()
        h = Squared.apply(self.normed(self.layer(x)), self.listed[0]) * scale
        return h + self.listed[1] + sum(p.norm() for p in self.parameters())


def test_parameters_in_odd_places() -> None:
    plain, model = pair(Odd)
    x = torch.randn(3, 2, WIDTH)
    assert_same_step(plain, model, compiled(model), x, atol=1e-5)
    assert_same_step(plain, model, model, x, atol=1e-5)


def test_ignored_parameters_are_not_sharded() -> None:
    plain, model = pair(Mlp, ignored=["norm"])
    assert_same_step(plain, model, compiled(model), torch.randn(3, WIDTH))
    (program,) = programs(model)
    assert set(program.ignored) == {"norm.weight", "norm.bias"}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def recurrent(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Recurrent()
    torch.manual_seed(0)
    model = fxshard.shard(Recurrent())
    x = torch.randn(4, 2, WIDTH)  # the same on all ranks
    for run in (model, compiled(model, fullgraph=False)):
        assert_same_step(plain, model, run, x)


def test_recurrent_modules_which_dynamo_leaves_out(ranks: Any) -> None:
    ranks(2).run(recurrent)


def test_a_compiled_function_around_the_model() -> None:
    plain, model = pair(Mlp, units=["blocks.*"])
    x = torch.randn(3, WIDTH)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    torch.compile(loss, backend="fxshard", fullgraph=True)(x).backward()
    plain(x).square().mean().backward()
    assert_same_gradients(model, plain)
    (program,) = programs(model)
    assert [call.module for call in program.calls][:3] == ["", "blocks.0", "blocks.0.0"]


# -- options, checkpoints, reports -----------------------------------------------------------------


def test_checkpoint_regions_save_what_they_save_in_fxshard_compile() -> None:
    x = torch.randn(64, WIDTH)
    found = {}
    for make in (Mlp, Checkpointed):
        torch._dynamo.reset()
        plain, model = pair(make)
        run = compiled(model)
        assert_same_step(plain, model, run, x)
        torch.manual_seed(0)
        whole = fxshard.compile(make(), world_size=2, args=(x,))
        assert fxshard.reports(model).peak_bytes == whole.memory.peak_bytes
        model.zero_grad()
        run(x).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        found[make] = fxshard.reports(model).saved_bytes, gradients
    assert found[Checkpointed][0] < found[Mlp][0]
    for ours, theirs in zip(found[Checkpointed][1], found[Mlp][1], strict=True):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]


def test_options_of_a_graph() -> None:
    x = torch.randn(64, WIDTH)
    saved = {}
    for name, options in {
        "none": {},
        "checkpoint": {"checkpoint": "full"},
        "unsharded": {"reshard_after_forward": False},
        "one bucket": {"min_bucket_bytes": "1MiB"},
    }.items():
        torch._dynamo.reset()
        plain, model = pair(Mlp, units=["blocks.*"])
        assert_same_step(plain, model, compiled(model, options=options), x)
        saved[name] = fxshard.reports(model).saved_bytes
        (program,) = programs(model)
        assert len(program.moving) == (1 if name == "one bucket" else 3)
    assert saved["checkpoint"] < saved["none"] < saved["unsharded"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonsense": 1}, r"unknown option 'nonsense'\. Options are: backend, reshard_after"),
        ({"strategy": "no_shard"}, r"cannot be changed when it is compiled: option 'strategy'"),
        ({"reduce_op": "max"}, r"reductions by max cannot be added"),
        ({"reshard_after_forward": 2}, r"makes process groups: give it to fxshard\.shard"),
    ],
)
def test_options_that_a_graph_cannot_have(options: dict[str, Any], message: str) -> None:
    _, model = pair(Mlp)
    with pytest.raises(ConfigError, match=message):
        compiled(model, options=options)(torch.randn(3, WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "1GiB"}, "no example call is planned"),
        ({"optimizer": torch.optim.SGD, "optimizer_in_backward": True}, "stepped twice"),
        ({"full_precision_in_eval": True}, "Dynamo decides dtypes"),
        ({"reduce_op": "min"}, "reductions by min cannot be added"),
    ],
)
def test_options_that_pieces_of_a_model_cannot_have(options: Any, message: str) -> None:
    model = Mlp()
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=message):
        fxshard.shard(model, world_size=2, **options)
    assert all(param is before[name] for name, param in model.named_parameters())


def test_what_is_refused_of_a_sharded_model() -> None:
    _, model = pair(Mlp)
    x = torch.randn(3, WIDTH)
    with pytest.raises(ConfigError, match="has no modes"):
        compiled(model, mode="reduce-overhead")(x)
    with pytest.raises(ConfigError, match=r"sharded already, by fxshard\.shard"):
        fxshard.shard(model, world_size=2)
    with pytest.raises(ConfigError, match=r"sharded already, by fxshard\.shard"):
        fxshard.compile(model, world_size=2)
    with pytest.raises(ConfigError, match=r"takes the nn\.Module itself"):
        fxshard.shard(torch.fx.symbolic_trace(nn.Linear(2, 2)), world_size=2)
    with pytest.raises(ConfigError, match="nothing is captured yet"):
        fxshard.reports(model)
    with pytest.raises(ConfigError, match=r"the Mlp was not sharded by fxshard\.shard"):
        fxshard.reports(Mlp())
    with pytest.raises(StepError, match="compiled by another backend"):
        torch.compile(model, backend="eager")(x)
    torch._dynamo.reset()
    _, other = pair(Mlp)
    with pytest.raises(CaptureError, match="parameters of 2 models"):
        torch.compile(lambda x: other(model(x)), backend="fxshard")(x)


@pytest.mark.slow
def test_inductor_inside() -> None:
    plain, model = pair(Mlp, units=["blocks.*"])
    run = compiled(model, options={"backend": "inductor"})
    assert_same_step(plain, model, run, torch.randn(3, WIDTH))
    (program,) = programs(model)
    assert any(region.compiled for region in program.schedule.regions.values())


class TwoHalves(nn.Module):
    """Two graphs. The first saves its input and its tanh, the second its tanh and its sine."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        torch._dynamo.graph_break()
        return self.b(h).tanh().cos()


def test_reports_and_their_sum() -> None:
    rows = 16
    _, model = pair(TwoHalves)
    compiled(model, fullgraph=False)(torch.randn(rows, WIDTH)).sum().backward()
    reports = fxshard.reports(model)
    assert len(reports) == 2
    tensor = rows * WIDTH * 4
    # Forward leaves behind: the tanh, which the second graph takes; there its own tanh, and the
    # cosine, which goes out. The batch was there before.
    assert reports.saved_bytes == tensor + 2 * tensor
    for report in reports:
        assert [p.fqn for unit in report.units for p in unit.params] in (
            ["a.weight", "a.bias"],
            ["b.weight", "b.bias"],
        )
        assert report.peak_bytes < reports.peak_bytes
    assert sum(reports.peak_by_category.values()) == reports.peak_bytes
    assert str(reports).splitlines()[-1].startswith("sum: peak ")
    assert reports.peak_bytes < sum(report.peak_bytes for report in reports)
