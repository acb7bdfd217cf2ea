"""Functions that take functions in a dry run: torch.func's transforms, and flex_attention."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxshard
from fxshard.memory.category import Category
from fxshard.memory.ledger import LiveRange
from tests.dryrun.measure import Points, without_collector
from tests.dryrun.parallel_cases import MeasureOfParts
from tests.dryrun.test_truth import differences

B, H, S, D = 2, 4, 256, 64
ROWS, OUT = 4 * B * H * S, 2 * B * H * S * D  # bytes: fp32 by query, and bf16 as the query
Ended = Callable[[], None]


# -- torch.func ------------------------------------------------------------------------------------


def gradients_by_sample(ended: Ended) -> None:
    """Each sample's gradient is clipped on its own, as for differential privacy."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    params = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(model, values, (x,))
        return F.mse_loss(out, y)

    by_sample = torch.vmap(torch.func.grad(loss), (None, 0, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        values = {name: param.detach() for name, param in params.items()}
        for name, grad in by_sample(values, x, y).items():
            norms = grad.flatten(1).norm(dim=1).clamp(min=1)
            params[name].grad = (grad / norms.view(-1, *[1] * (grad.dim() - 1))).mean(0)
        del x, y, values, grad, norms, name
        optimizer.step()
        optimizer.zero_grad()
        ended()


def derivatives(ended: Ended) -> None:
    """A penalty on the Jacobian, and a directional derivative."""
    layer = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(3, 6)
        jacobian = torch.vmap(torch.func.jacrev(layer))(x)
        _, along = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
        (jacobian.square().sum() + along.sum()).backward()
        del x, jacobian, along
        optimizer.step()
        optimizer.zero_grad()
        ended()


@pytest.mark.parametrize("script", [gradients_by_sample, derivatives], ids=lambda f: f.__name__)
def test_every_operator_boundary(script: Callable[[Ended], None]) -> None:
    starts: list[int] = []

    def ended() -> None:
        measure.close()
        starts.append(len(measure.points))

    with without_collector(), MeasureOfParts() as measure:
        script(ended)
    with fxshard.dry_run(world_size=1, device="cpu") as run:
        script(run.step)
    real = measure.points[starts[0] : starts[1]]
    dry = [each for each in points(run.memory.steady) if each[0].startswith("aten.")]
    assert len(dry) > 15
    assert dry == real, differences(dry, real)


def points(ledger: Any) -> Points:
    ran = [i for i, moment in enumerate(ledger.moments) if "." in moment.op]
    ends = [*ran[1:], len(ledger.moments)]
    totals = [int(ledger.totals[2 * end - 1]) for end in ends]
    return [(ledger.moments[i].op, total) for i, total in zip(ran, totals, strict=True)]


# -- flex_attention --------------------------------------------------------------------------------


def attention(how: Callable[..., Any], *, compiled_mask: bool = False) -> fxshard.DryRun:
    """bf16[B, H, S, D] with a causal mask of documents, forward and backward."""
    mask_of = torch.compile(create_block_mask) if compiled_mask else create_block_mask
    with fxshard.dry_run(world_size=1, device="h100") as run:
        layer = nn.Linear(D, 3 * D, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16)
        documents = torch.zeros(S, dtype=torch.int32, device="cuda")
        mask = mask_of(
            lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]),
            *(None, None, S, S),
            device=x.device,
        )
        q, k, v = (part.contiguous() for part in layer(x).chunk(3, -1))
        del x
        out = how(q, k, v, block_mask=mask)
        out.backward(torch.ones_like(out))
        del q, k, v, out
        run.step()
    return run


def born(run: fxshard.DryRun, phase: str) -> Iterator[LiveRange]:
    """What compiled code has allocated in a phase, of more than a few rows."""
    ledger = run.memory.first
    spans = [range(p.begin, p.end + 1) for p in ledger.phases if p.name.endswith(phase)]
    for each in ledger.ranges:
        compiled = each.op == "aten.empty_strided.default" and each.bytes >= ROWS
        if compiled and any(each.born in span for span in spans):
            yield each


@pytest.mark.parametrize("options", [None, {"max_autotune": True}], ids=["default", "measured"])
def test_compiled_flex_attention_by_hand(options: Any) -> None:
    """Kernels of its own: output and logarithms of sums are saved; rows of sums in backward.

    Which of them is the fastest is measured on the GPU, but all take the same memory.
    """
    run = attention(torch.compile(flex_attention, options=options))
    made = sorted(each.bytes for each in born(run, "loss"))
    assert made == [ROWS, ROWS, OUT], "of these rows, maxima are dropped at once"
    made = sorted(each.bytes for each in born(run, "backward"))
    assert made == [ROWS, OUT, OUT, OUT]
    assert all(f"{__file__}:" in each.line for each in born(run, "loss"))


def test_the_mask_may_be_compiled() -> None:
    run = attention(torch.compile(flex_attention), compiled_mask=True)
    assert [each.bytes for each in born(run, "backward")].count(OUT) == 3


def test_flex_attention_in_eager_makes_all_scores() -> None:
    with pytest.warns(UserWarning, match="materializes the full scores"):
        run = attention(flex_attention)
    scores = 4 * B * H * S * S
    assert [each.bytes for each in run.memory.first.ranges].count(scores) > 4
    kept = [r for r in run.memory.first.alive(run.memory.first.peak_tick) if r.bytes == scores]
    assert len(kept) > 1 and {each.category for each in kept} <= {
        Category.ACTIVATION,
        Category.TEMP,
    }


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_branch_that_depends_on_values_is_refused(device: str) -> None:
    with fxshard.dry_run(world_size=1, device=device):
        x = torch.randn(3, device="cpu" if device == "cpu" else "cuda")
        with pytest.raises(fxshard.CaptureError, match=r"test_transforms\.py:\d+"):
            torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
