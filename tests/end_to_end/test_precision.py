"""What each option of precision does: beside FSDP2 on gloo ranks, beside eager, counted by hand."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard._torch import modules
from tests.end_to_end.precision_cases import (
    BF16,
    FP32,
    LOW,
    MANY,
    NOT_CAST,
    OFFSETS,
    POLICIES,
    SLOW,
    WHOLE,
    Recipe,
    beside,
)
from tests.end_to_end.test_checkpointing import CASES as CHECKPOINTED
from tests.zoo import MODELS, models

SHALLOW = dataclasses.replace(MODELS["transformer"], build=partial(models.Transformer, depth=2))
ON_4 = {"mlp13": MODELS["mlp13"], "transformer": SHALLOW}

# -- a policy for the whole model ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] if name in MANY else []) for name in WHOLE]
)
@pytest.mark.sample(2)
def test_bitwise_with_fsdp2_on_2_ranks(ranks: Any, name: str) -> None:
    ranks(2).run(beside, WHOLE[name])


class Mixed(nn.Module):
    """f32[4, 3] -> f32[]. Reads one parameter twice beside fp32, and one that it casts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.gain + self.offset.float()).exp() * self.gain).sum()


@pytest.mark.parametrize("wide", [True, False])
def test_gradients_are_reduced_as_wide_as_operators_make_them(
    monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    """As of torch 2.15, with any torch; eager's own ``grad_dtype`` is the reference."""
    monkeypatch.setattr(modules, "REDUCES_AS_STORED", wide)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    eager, ours = Mixed().bfloat16(), Mixed()
    for param in eager.parameters() if wide else ():
        param.grad_dtype = None
    policy = dataclasses.replace(LOW, cast_forward_inputs=False)
    compiled = fxshard.compile(ours, world_size=1, mixed_precision=policy)
    for model in (eager, compiled):
        model(x).backward()
    for name, param in compiled.named_parameters():
        expected = eager.get_parameter(name).grad
        assert expected.dtype is (FP32 if wide and name == "gain" else BF16)
        assert param.grad.dtype is FP32 and torch.equal(param.grad, expected.float()), name
    graph = fxshard.plan(Mixed(), (x,), world_size=2, mixed_precision=policy).program.graph
    casts = graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert all(node.users for node in casts)


def frozen(build: Callable[[], nn.Module]) -> nn.Module:
    """Every other parameter, and so whole units' worth of biases, needs no gradient."""
    model = build()
    for param in list(model.parameters())[::2]:
        param.requires_grad_(False)
    return model


MODES: dict[str, Recipe] = {
    "inputs as they are": Recipe(OFFSETS, NOT_CAST),
    "root's inputs only": Recipe(MODELS["mlp13"], NOT_CAST, {"": LOW}),
    "checkpoint": Recipe(CHECKPOINTED["checkpoint"], LOW),
    "reentrant": Recipe(CHECKPOINTED["reentrant"], POLICIES["fp16"]),
    "frozen": Recipe(
        dataclasses.replace(
            MODELS["transformer"], build=partial(frozen, MODELS["transformer"].build)
        ),
        LOW,
    ),
    "shard_grad_op": Recipe(MODELS["transformer"], LOW, strategy="shard_grad_op"),
    "shard_grad_op, fp16 all through": Recipe(
        MODELS["mlp13"], POLICIES["fp16 all through"], strategy="shard_grad_op"
    ),
    "no_shard": Recipe(MODELS["transformer"], LOW, strategy="no_shard", mesh=(2, 1)),
    "no_shard, all through": Recipe(
        MODELS["mlp13"], POLICIES["bf16 all through"], strategy="no_shard", mesh=(2, 1)
    ),
    "no_shard, fp16 all through": Recipe(
        MODELS["mlp13"], POLICIES["fp16 all through"], strategy="no_shard", mesh=(2, 1)
    ),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.sample(3)
def test_modes_are_bitwise_with_fsdp2(ranks: Any, name: str) -> None:
    ranks(2).run(beside, MODES[name])


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        ("bf16", "hybrid_shard"),
        ("fp16 all through", "hybrid_shard_zero2"),
        pytest.param("bf16", "hybrid_shard_zero2", marks=SLOW),
        pytest.param("fp16 all through", "hybrid_shard", marks=SLOW),
    ],
)
@pytest.mark.parametrize("name", ["mlp13", pytest.param("transformer", marks=SLOW)])
def test_hybrid_is_bitwise_with_fsdp2_on_4_ranks(
    ranks: Any, name: str, policy: str, strategy: str
) -> None:
    recipe = Recipe(ON_4[name], POLICIES[policy], strategy=strategy, mesh=(2, 2))
    ranks(4).run(beside, recipe)
