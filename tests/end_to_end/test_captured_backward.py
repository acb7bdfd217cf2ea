"""Where torch captures a backward, or records what is called: right, or refused by name."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

import fxshard
from fxshard.errors import CaptureError, StepError
from tests.end_to_end.losses_cases import made
from tests.end_to_end.training_cases import Net, assert_same, batch, grads_of, loss_of

KINDS = ["compile", "fully_shard", "shard"]
AGAIN = "compiled_autograd.*Call backward with compiled autograd off.*may be called again"


def step_of(model: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        return loss

    return step


def sharded(how: str, kind: type[Net] = Net) -> Any:
    return fxshard.shard(made("eager", kind)) if how == "shard" else made(how, kind)


def averaged(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients of the plain model as data parallelism has them."""
    grads = grads_of(model)
    for grad in grads.values():
        assert grad is not None
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


def captured_backward(rank: int, world_size: int, how: str) -> None:
    """Refused before anything runs: the same backward then gives eager's gradients."""
    model, eager = sharded(how), made("eager", Net)
    torch._dynamo.reset()
    loss = loss_of(model(batch(rank)))
    by_name = torch.compile(backend="eager")
    for _ in range(2):
        with pytest.raises(StepError, match=AGAIN), compiled_autograd._enable(by_name):
            loss.backward()
    loss.backward()
    loss_of(eager(batch(rank))).backward()
    assert_same(grads_of(model), averaged(eager), rtol=1e-5, atol=1e-6)
    if how != "shard":  # whose forward another backend cannot compile
        with torch._dynamo.config.patch(compiled_autograd=True):
            compiled = torch.compile(step_of(model), backend="eager")
            with pytest.raises(StepError, match=AGAIN):
                compiled(batch(rank))
        torch._dynamo.reset()


@pytest.mark.parametrize("how", KINDS)
def test_compiled_autograd_is_refused(ranks: Any, how: str) -> None:
    ranks(2).run(captured_backward, how)


def compiled_steps(rank: int, world_size: int, how: str) -> None:
    model, eager = sharded(how), made("eager", Net)
    torch._dynamo.reset()
    step = torch.compile(step_of(model), backend="fxshard" if how == "shard" else "aot_eager")
    for number in range(3):
        loss = step(batch(rank, number))
        torch.testing.assert_close(loss, step_of(eager)(batch(rank, number)))
        assert_same(grads_of(model), averaged(eager), rtol=1e-5, atol=1e-6)
        for each in (model, eager):
            each.zero_grad()


@pytest.mark.parametrize("how", KINDS)
def test_a_whole_step_may_be_compiled_around_the_model(ranks: Any, how: str) -> None:
    ranks(2).run(compiled_steps, how)


# -- what records instead of running ---------------------------------------------------------------


def of_fakes(model: nn.Module, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x)


RECORDERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "make_fx": lambda model, x: make_fx(step_of(model))(x),
    "a part": lambda model, x: make_fx(model.head)(torch.ones(2, 6)),
    "fakes": of_fakes,
    "jit": torch.jit.trace,
    "script": lambda model, x: torch.jit.script(model),
}


def recorded(rank: int, world_size: int, how: str) -> None:
    model, eager = sharded(how), made("eager", Net)
    assert dict(inspect.getmembers(eager)).keys() >= {"head"}
    for step in range(2):  # before anything is traced, and after
        for record in RECORDERS.values():
            with pytest.raises(CaptureError, match=r"is sharded, and called while .* records"):
                record(model, batch(rank))
        members = dict(inspect.getmembers(model))
        assert ("plan" in members) is (how != "shard" and step == 1)
        step_of(model)(batch(rank))
    with pytest.raises(CaptureError, match=r"while make_fx or torch.export records"):
        torch.export.export(model, (batch(rank),))
    said = (
        r"while torch.export records" if how == "shard" else r"torch.export takes the plain model"
    )
    with pytest.raises(Exception, match=said):  # Dynamo's own
        torch.export.export(model, (batch(rank),), strict=True)


@pytest.mark.parametrize("how", KINDS)
def test_recorders_are_refused(ranks: Any, how: str) -> None:
    ranks(2).run(recorded, how)


# -- torch.autograd's own tools --------------------------------------------------------------------


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16()


def test_hooks_for_saved_tensors_around_a_call(caplog: pytest.LogCaptureFixture) -> None:
    model, x = made("in_process", Net), batch(0)
    with (
        pytest.raises(CaptureError, match=r"hooks with .*\.rounded around a call of the model: "),
        saved_tensors_hooks(rounded, Tensor.float),
    ):
        model(x)
    for _ in range(2):
        with save_on_cpu():
            loss_of(model(x)).backward()
    assert caplog.text.count("around a call of the model offloads nothing") == 1
    with torch.no_grad(), saved_tensors_hooks(rounded, Tensor.float):
        model(x)  # saves nothing
    plain = made("eager", Net)
    for _ in range(2):
        loss_of(plain(x)).backward()
    assert_same(grads_of(model), grads_of(plain), rtol=1e-5, atol=1e-6)


class Rooted(Net):
    """The last output is zero, where its derivative is infinite; only its rows are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False).head.requires_grad_()
        for param in self.head.parameters():
            param.data[-1] = 0

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = super().forward(x).square().sqrt()
        return y


def anomalies(rank: int, world_size: int, how: str) -> None:
    """A step as without; then one that makes NaN of the rows of rank 1 alone: both raise."""
    model, eager = sharded(how), made("eager", Net)
    with torch.autograd.detect_anomaly():
        step_of(model)(batch(rank))
    step_of(eager)(batch(rank))
    assert_same(grads_of(model), averaged(eager), rtol=1e-5, atol=1e-6)
    rooted = sharded(how, Rooted)
    step_of(rooted)(batch(rank))
    finite = [bool(p.grad.to_local().isfinite().all()) for p in rooted.head.parameters()]
    assert finite == [rank == 0] * 2
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
        step_of(rooted)(batch(rank))


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode(ranks: Any, how: str) -> None:
    ranks(2).run(anomalies, how)
