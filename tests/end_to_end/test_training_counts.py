"""Collectives and bytes of a step, of frozen parameters too, are those that are counted by hand."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import fxshard
from fxshard._torch import process_groups
from fxshard.memory.category import Category
from tests.end_to_end.training_cases import (
    Net,
    batch,
    biases_frozen,
    first_units_frozen,
    lora,
    loss_of,
    trainable,
    unit_frozen,
)
from tests.end_to_end.training_loops import made
from tests.oracles import Collective, count_collectives

# Bytes, for 2 ranks. A block has 6 + 6 (norm), 36 + 6 (linear) numbers; the root 30 + 6 (inlet) and
# 24 + 4 (head: 3 rows are padded to 4). With adapters a block has 12 + 12 numbers more.
# Backward reads norms (weight and bias) and matrices that have something trainable below them.
BLOCK, ROOT = 4 * 54, 4 * 64
COUNTS: dict[Callable[[], nn.Module], dict[str, list[int]]] = {
    Net: {
        "forward": [BLOCK, BLOCK, BLOCK, ROOT],
        "backward": [4 * 48, 4 * 48, 4 * 48, 4 * 24],
        "reduced": [BLOCK, BLOCK, BLOCK, ROOT],
    },
    unit_frozen: {
        "forward": [BLOCK, BLOCK, BLOCK, ROOT],
        "backward": [4 * 48, 4 * 48, 4 * 48, 4 * 24],
        "reduced": [BLOCK, BLOCK, 4 * 28],
    },
    first_units_frozen: {
        "forward": [BLOCK, BLOCK, BLOCK, ROOT],
        "backward": [4 * 48, 4 * 24],
        "reduced": [BLOCK, 4 * 28],
    },
    biases_frozen: {
        "forward": [BLOCK, BLOCK, BLOCK, ROOT],
        "backward": [4 * 48, 4 * 48, 4 * 48, 4 * 24],
        "reduced": [4 * 42, 4 * 42, 4 * 42, 4 * 54],
    },
    lora: {
        "forward": [BLOCK + 4 * 24] * 3 + [ROOT],
        "backward": [4 * 12, 4 * 72, 4 * 72, 4 * 24],  # nothing is trainable below block 0's `a`
        "reduced": [4 * 24, 4 * 24, 4 * 24],
    },
}
# Alive at most, of gradients: one block, for what is reduced is a copy; and of the root what is
# made before the blocks and waits for the inlet (the head's, not padded yet). Of what is sent: the
# copy of a unit, and beside the root's the head, padded to be copied into it.
UNSHARDED_GRADS = {
    Net: 4 * 21 + BLOCK,
    unit_frozen: BLOCK,
    first_units_frozen: BLOCK,
    biases_frozen: 4 * 18 + 4 * 42,
    lora: 4 * 24,
}
SENT = {
    Net: ROOT + 4 * 28,
    unit_frozen: 2 * 4 * 28,
    first_units_frozen: 2 * 4 * 28,
    biases_frozen: 4 * 54 + 4 * 24,
    lora: 4 * 24,
}
FROZEN = [build for build in COUNTS if build is not Net]


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def sizes(calls: Iterable[Collective], kind: str) -> list[int]:
    return sorted(call.nbytes for call in calls if call.kind == kind)


@pytest.mark.parametrize("build", COUNTS)
def test_collectives_of_frozen_parameters(build: Callable[[], nn.Module]) -> None:
    with process_groups.fake_process_group(0, 2):
        model = fxshard.compile(built(build), units=["blocks.*"])
        with count_collectives() as forward:
            loss = loss_of(model(batch(0)))
        with count_collectives() as backward:
            loss.backward()
    want = COUNTS[build]
    assert sizes(forward.calls, "all_gather") == sorted(want["forward"])
    assert sizes(backward.calls, "all_gather") == sorted(want["backward"])
    assert sizes(backward.calls, "reduce_scatter") == sorted(want["reduced"])
    assert forward.count() == len(want["forward"])
    assert backward.count() == len(want["backward"]) + len(want["reduced"])
    for param in model.parameters():
        assert (param.grad is not None) == param.requires_grad


@pytest.mark.parametrize("build", COUNTS)
@pytest.mark.sample(2)
def test_memory_of_frozen_parameters(build: Callable[[], nn.Module]) -> None:
    model = built(build)
    options: Any = {"world_size": 2, "units": ["blocks.*"], "optimizer": AdamW}
    report = fxshard.plan(model, (batch(0),), **options).memory
    forward, backward, optimizer, _ = report.phases()
    sharded = sum(COUNTS[build]["reduced"]) // 2
    count = len(trainable(model))
    column = list(Category).index
    assert backward.after[-1, column(Category.SHARDED_GRAD)] == sharded
    assert backward.during[:, column(Category.SHARDED_GRAD)].max() == sharded
    assert optimizer.after[-1, column(Category.OPT_STATE)] == 2 * unpadded(model) + 4 * count
    assert not forward.during[:, column(Category.UNSHARDED_GRAD)].any()
    assert backward.during[:, column(Category.UNSHARDED_GRAD)].max() == UNSHARDED_GRADS[build]
    assert backward.during[:, column(Category.REDUCE_SCATTER)].max() == SENT[build]


def unpadded(model: nn.Module) -> int:
    """Bytes of rank 0's rows of what is trained: it has the upper ceil(n / 2)."""
    return sum(4 * len(p[: math.ceil(len(p) / 2)].flatten()) for p in trainable(model))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("build", FROZEN)
@pytest.mark.sample(4)
def test_validate_frozen_parameters(build: Callable[[], nn.Module], world_size: int) -> None:
    options: Any = {"world_size": world_size, "units": ["blocks.*"], "optimizer": AdamW}
    result = fxshard.validate(built(build), (batch(0),), **options)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def test_a_flag_changed_between_steps_changes_what_is_reduced() -> None:
    with process_groups.fake_process_group(0, 2):
        model = fxshard.compile(built(Net), units=["blocks.*"])
        reduced = []
        for flag in (True, False, True):
            model.blocks[1].requires_grad_(flag)
            loss = loss_of(model(batch(0)))
            with count_collectives() as seen_now:
                loss.backward()
            reduced.append(sizes(seen_now.calls, "reduce_scatter"))
    assert reduced == [[BLOCK] * 3 + [ROOT], [BLOCK] * 2 + [ROOT], [BLOCK] * 3 + [ROOT]]


def accumulates(rank: int, world_size: int) -> list[list[int]]:
    found = []
    for how in ("ranks", "fsdp2"):
        model = made("gradient_accumulation", how)
        with count_collectives() as seen_now:
            for micro in range(3):
                loss_of(model(batch(rank, micro))).backward()
        found.append(sizes(seen_now.calls, "reduce_scatter"))
    return found


def test_accumulation_reduces_every_unit_in_every_backward(ranks: Any) -> None:
    for ours, theirs in ranks(2).run(accumulates):
        assert len(theirs) == 3 * 4
        assert ours == [BLOCK] * 9 + [ROOT] * 3
