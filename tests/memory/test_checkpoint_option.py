"""``checkpoint=``: numerics against eager, bytes and work against the model's own checkpointing."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxshard
from fxshard.errors import ConfigError, UnitError
from fxshard.ir import dump, tags
from fxshard.ir.program import Program
from tests.zoo import MODELS

aten = torch.ops.aten
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
KEPT = (aten.mm.default, aten.addmm.default)


def keeps_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what matrix products return."""
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = ["full", "selective", keeps_products, {"layers.0": "full", "layers.1": "selective"}]


class Block(nn.Module):
    """x + W2 dropout(gelu(W1 x)), f32[*, 8]; checkpointed by torch if it is told to be."""

    def __init__(self, own: Any = None) -> None:
        super().__init__()
        self.own = own
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.5)
        return x + self.down(y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.own is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=False, **self.own)


class Stack(nn.Module):
    def __init__(self, own: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(own) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients of one step, with dropout drawn from seed 1."""
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective", "callable", "dict"])
def test_bitwise_with_eager(policy: Any) -> None:
    """Dropout draws the same numbers again."""
    torch.manual_seed(0)
    eager, x = Stack(), torch.randn(4, 8)
    torch.manual_seed(0)
    ours = fxshard.compile(Stack(), world_size=1, checkpoint=policy)
    for mine, theirs in zip(trained(ours, x), trained(eager, x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective", "callable", "dict"])
def test_bytes_are_exact(policy: Any) -> None:
    result = fxshard.validate(
        *(Stack(), (torch.randn(4, 8),)), world_size=2, checkpoint=policy, optimizer=adamw
    )
    assert result.max_abs_difference == 0, result.table(only_different=True)


@pytest.mark.parametrize(
    ("policy", "own"),
    [
        ("full", {}),
        (
            keeps_products,
            {"context_fn": functools.partial(create_selective_checkpoint_contexts, keeps_products)},
        ),
    ],
    ids=["full", "policy"],
)
def test_the_bytes_are_those_of_torchs_checkpoint(policy: Any, own: dict[str, Any]) -> None:
    """The same blocks checkpointed by ``torch.utils.checkpoint``, as eager and FSDP2 honour it."""
    x = torch.randn(512, 8)  # beside which the generator's state, 5,056 bytes, is small
    ours = fxshard.plan(Stack(), (x,), world_size=4, checkpoint=policy).memory
    theirs = fxshard.plan(Stack(own), (x,), world_size=4).memory
    plain = fxshard.plan(Stack(), (x,), world_size=4).memory
    assert (ours.ledger().totals == theirs.ledger().totals).all()
    assert ours.peak_bytes < plain.peak_bytes


def products(program: Program, phase: tags.Phase) -> int:
    return sum(node.target in KEPT for node in program.phase(phase))


def test_what_is_recomputed_is_counted() -> None:
    """Each block has 2 products forward and 4 backward (input and weight each); head 1 and 2."""
    x = torch.randn(4, 8)
    plans = {
        policy: fxshard.plan(Stack(), (x,), world_size=4, checkpoint=policy).program
        for policy in (None, "full", "selective")
    }
    # The first block's input needs no gradient.
    plain = products(plans[None], "backward")
    assert plain == 4 * 3 + 2 - 1
    # Its last product is not needed in backward: one of two is recomputed per block.
    assert products(plans["full"], "backward") == plain + 3
    assert products(plans["selective"], "backward") == plain
    assert all(products(each, "forward") == 2 * 3 + 1 for each in plans.values())


def test_collectives_are_those_without() -> None:
    """A block's parameters are gathered once for recomputation and backward together."""
    x = torch.randn(4, 8)

    def gathers(**options: Any) -> list[str]:
        rows = dump.rows(fxshard.plan(Stack(), (x,), world_size=4, **options).program)
        return [row.units[0] for row in rows if row.operation == "unshard"]

    assert gathers(checkpoint="full") == gathers()


def test_the_models_own_checkpoints_stay() -> None:
    """With both, the model's own regions are kept as they are."""
    x = torch.randn(4, 8)
    own = fxshard.plan(Stack({}), (x,), world_size=2)
    both = fxshard.plan(Stack({}), (x,), world_size=2, checkpoint="full")
    assert (own.memory.ledger().totals == both.memory.ledger().totals).all()


@pytest.mark.parametrize("name", ["llama", "convnet", "tied"])
@pytest.mark.sample(2)
def test_models_of_the_zoo(name: str) -> None:
    """Bitwise with the plan without; batch norm writes its statistics once."""
    case = MODELS[name]
    results = []
    for policy in (None, "full"):
        torch.manual_seed(0)
        model = fxshard.compile(case.build(), world_size=1, units=case.units, checkpoint=policy)
        args, kwargs = case.batch(0, 0)
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        params = [p.grad for p in model.parameters()]
        results.append([loss.detach(), *params, *(b.clone() for b in model.buffers())])
    for with_it, without in zip(*results, strict=True):
        assert (with_it is None and without is None) or torch.equal(with_it, without)


@pytest.mark.parametrize(
    ("checkpoint", "error", "message"),
    [
        ("some", ConfigError, "'full', 'selective', a policy"),
        ({"layers.0": 3}, ConfigError, "checkpoint=3"),
        ({"no.such": "full"}, UnitError, "no.such"),
    ],
)
def test_bad_values_are_refused(checkpoint: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fxshard.plan(Stack(), (torch.randn(4, 8),), world_size=2, checkpoint=checkpoint)


def test_a_model_of_one_unit_has_nothing_to_checkpoint() -> None:
    with pytest.raises(ConfigError, match="the root unit only"):
        fxshard.plan(nn.Linear(4, 4), (torch.ones(2, 4),), world_size=2, checkpoint="full")
