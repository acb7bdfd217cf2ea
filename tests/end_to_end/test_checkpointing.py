"""The model's own activation checkpoints, beside eager PyTorch: numbers, bytes, random numbers."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fxshard
from fxshard.capture import rng
from fxshard.errors import CaptureError
from fxshard.ir import tags
from fxshard.ir.outline import saved_values
from fxshard.memory.category import Category
from fxshard.plans.plan import Plan
from tests import fsdp2
from tests.distributed.test_parity import train
from tests.eager import assert_trains_like_eager, pair
from tests.fsdp2 import Result
from tests.zoo import Case, cross_entropy, float_batch, labelled_token_batch, models, output_loss

aten = torch.ops.aten
STEPS = 3
# Eager says it of a checkpoint in a reentrant checkpoint; transformers, that it has a new name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
]


class Block(nn.Module):
    """x + down(dropout(tanh(gelu(up(x))))), f32[4, 8] -> the same by way of f32[4, 16]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(F.gelu(self.up(x)))
        y = F.dropout(y, self.dropout) if self.dropout else y
        return x + self.down(y)


def called(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def one_by_one(blocks: nn.ModuleList, x: Tensor, call: Callable[..., Tensor] = called) -> Tensor:
    for block in blocks:
        x = call(block, x)
    return x


def nested(blocks: nn.ModuleList, x: Tensor, *, reentrant: bool = False) -> Tensor:
    inner = partial(one_by_one, call=partial(checkpoint, use_reentrant=reentrant))
    return checkpoint(inner, blocks, x, use_reentrant=reentrant)


def sequential(blocks: nn.ModuleList, x: Tensor, *, reentrant: bool = False) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=reentrant)


def each(**options: Any) -> Callable[..., Tensor]:
    return partial(one_by_one, call=partial(checkpoint, **options))


def save_addmm() -> Any:
    return create_selective_checkpoint_contexts([aten.addmm.default])


def is_tanh(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is aten.tanh.default


def save_tanh() -> Any:
    return create_selective_checkpoint_contexts(is_tanh)


RUNS: dict[str, Callable[..., Tensor]] = {
    "plain": one_by_one,
    "checkpoint": each(use_reentrant=False),
    "reentrant": each(use_reentrant=True),
    "sequential": sequential,
    "sequential, reentrant": partial(sequential, reentrant=True),
    "nested": nested,
    "nested, reentrant": partial(nested, reentrant=True),
    "addmm saved": each(use_reentrant=False, context_fn=save_addmm),
    "tanh saved": each(use_reentrant=False, context_fn=save_tanh),
}


class Stack(nn.Module):
    """An inlet, blocks, a head; f32[4, 8] -> f32[4, 3]. `RUNS[run]` calls the blocks."""

    def __init__(self, run: str, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.head = nn.Linear(8, 3)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(RUNS[self.run](self.blocks, self.inlet(x)))


def llama(reentrant: bool | None) -> nn.Module:
    """The tiny llama, checkpointed by transformers; None: not at all."""
    model = models.llama(depth=2)
    if reentrant is not None:
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def stack_case(run: str) -> Case:
    return Case(
        run,
        build=partial(Stack, run, dropout=0.3),
        batch=partial(float_batch, shape=(4, 8)),
        loss=cross_entropy,
        units=["blocks.*"],
        dropout=True,
    )


def llama_case(reentrant: bool) -> Case:
    return Case(
        "reentrant llama" if reentrant else "llama",
        build=partial(llama, reentrant),
        batch=partial(labelled_token_batch, vocab=128),
        loss=output_loss,
        units=["model.layers.*"],
    )


CASES = {
    case.name: case
    for case in (*map(stack_case, RUNS), llama_case(reentrant=False), llama_case(reentrant=True))
}


def batch() -> Tensor:
    return float_batch(0, 0, shape=(4, 8))[0][0]


def planned(case: str | nn.Module, **options: Any) -> Plan:
    if isinstance(case, nn.Module):
        return fxshard.plan(case, (batch(),), world_size=2, **options)
    args, kwargs = CASES[case].batch(0, 0)
    units = CASES[case].units
    return fxshard.plan(CASES[case].build(), args, kwargs, world_size=2, units=units, **options)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.sample(4)
def test_trains_like_eager(run: str, dropout: float) -> None:
    assert_trains_like_eager(lambda: Stack(run, dropout=dropout), batch())


@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_transformers_checkpoints_train_like_eager(reentrant: bool) -> None:
    _, kwargs = labelled_token_batch(0, 0, vocab=128)
    assert_trains_like_eager(lambda: llama(reentrant), loss=output_loss, **kwargs)


def ranks_beside_fsdp2(rank: int, world_size: int, name: str) -> tuple[Result, Result]:
    return fsdp2.train(CASES[name], STEPS), train(CASES[name], STEPS)


@pytest.mark.parametrize(
    "name", ["checkpoint", "reentrant", "addmm saved", "llama", "reentrant llama"]
)
@pytest.mark.sample(2)
def test_bitwise_with_fsdp2_on_2_ranks(ranks: Any, name: str) -> None:
    for theirs, ours in ranks(2).run(ranks_beside_fsdp2, name):
        fsdp2.assert_bitwise(ours, theirs)


class Free(nn.Module):
    """Calls `function` with itself: two linear layers 8 -> 8, a batch norm, a buffer."""

    def __init__(self, function: Callable[..., Tensor], checkpointed: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.ones(8))
        self.function, self.checkpointed = function, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpointed:
            return self.function(self, x)
        return checkpoint(self.function, self, x, use_reentrant=False)


def test_reentrant_without_an_input_that_needs_a_gradient_has_none_inside() -> None:
    def forward(net: Free, x: Tensor) -> Tensor:
        inside = checkpoint(lambda x: torch.tanh(net.a(x)), x, use_reentrant=True)
        return net.b(inside).sum()

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        assert_trains_like_eager(lambda: Free(forward, checkpointed=False), batch())
    _, ours = pair(lambda: Free(forward, checkpointed=False))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        ours(batch()).backward()
    assert ours.a.weight.grad is None and ours.b.weight.grad is not None


def counts(net: Free, x: Tensor) -> Tensor:
    net.seen.add_(1)
    return net.b(torch.tanh(net.a(x) * net.seen)).sum()


def norms(net: Free, x: Tensor) -> Tensor:
    return net.b(torch.tanh(net.norm(net.a(x)))).sum()


@pytest.mark.parametrize("function", [counts, norms])
def test_buffers_are_written_once_and_recomputed_from_their_old_values(
    function: Callable[..., Tensor],
) -> None:
    """Eager writes them in backward once more, and recomputes with what it wrote in forward."""
    torch.manual_seed(0)
    eager = Free(function, checkpointed=False)
    ours = fxshard.compile(Free(function), world_size=2)
    ours.load_state_dict(eager.state_dict())
    for step in range(2):
        for model in (eager, ours):
            model.zero_grad()
            torch.manual_seed(step)
            model(batch()).backward()
        for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=name)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.parametrize("direct", [False, True])
def test_a_checkpoint_that_is_given_a_view_of_a_buffer_recomputes_from_its_old_value(
    direct: bool,
) -> None:
    """Only recomputation reads the view: no operator of backward does. (Or one does, too.)"""

    def forward(net: Free, x: Tensor) -> Tensor:
        view = net.seen.view(1, 8)
        y = checkpoint(lambda h, v: torch.sin(h + v), net.a(x), view, use_reentrant=False)
        if direct:
            y = y * view
        net.seen = net.seen + 1
        return net.b(y).sum()

    assert_trains_like_eager(lambda: Free(forward, checkpointed=False), batch())


def test_the_generator_ends_where_it_ends_in_eager() -> None:
    ends = []
    for model in pair(lambda: Stack("checkpoint", dropout=0.5)):
        torch.manual_seed(1)
        loss = model(batch()).sum()
        torch.rand(3)  # the caller draws between forward and backward
        loss.backward()
        ends.append(torch.rand(5))
    assert torch.equal(*ends)


def test_without_gradients_a_checkpoint_changes_nothing() -> None:
    eager, ours = pair(lambda: Stack("checkpoint", dropout=0.5))
    with torch.no_grad():
        for model in (eager, ours):
            torch.manual_seed(1)
            model.out = model(batch())
    torch.testing.assert_close(ours.out, eager.out)


def test_contexts_that_fxshard_cannot_repeat_are_refused() -> None:
    class Watched(contextlib.nullcontext[None]):
        pass

    def contexts() -> Any:
        return contextlib.ExitStack(), Watched()

    def forward(net: Free, x: Tensor) -> Tensor:
        return checkpoint(net.a, x, use_reentrant=False, context_fn=contexts).sum()

    with pytest.raises(CaptureError, match=r"ExitStack.*create_selective_checkpoint_contexts"):
        planned(Free(forward, checkpointed=False))


# -- memory ---------------------------------------------------------------------------------------

# Bytes of float32 values in `Stack`, 4 rows each, and of the state of the CPU's generator.
NARROW, WIDE, MASK, OUTPUT, STATE = 4 * 8 * 4, 4 * 16 * 4, 4 * 16, 4 * 3 * 4, 5056
BLOCK_INPUTS_AND_OUTPUTS = 4 * NARROW + OUTPUT  # what three blocks, the head and the caller read
SAVED = {  # run -> bytes without dropout, more with it; three blocks
    # gelu reads what `up` gave, tanh its own result; dropout reads its mask, `down` its result
    "plain": (BLOCK_INPUTS_AND_OUTPUTS + 3 * 2 * WIDE, 3 * (WIDE + MASK)),
    "checkpoint": (BLOCK_INPUTS_AND_OUTPUTS, 3 * STATE),
    "reentrant": (BLOCK_INPUTS_AND_OUTPUTS, 3 * STATE),
    # two segments: the first block, and the other two, which are not checkpointed
    "sequential": (BLOCK_INPUTS_AND_OUTPUTS + 2 * 2 * WIDE, STATE + 2 * (WIDE + MASK)),
    # one checkpoint around all blocks: between them nothing is saved, and one state does
    "nested": (2 * NARROW + OUTPUT, STATE),
    "nested, reentrant": (2 * NARROW + OUTPUT, STATE),
    "addmm saved": (BLOCK_INPUTS_AND_OUTPUTS + 3 * WIDE, 3 * STATE),
    "tanh saved": (BLOCK_INPUTS_AND_OUTPUTS + 3 * WIDE, 3 * STATE),
}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("run", SAVED)
@pytest.mark.sample(4)
def test_saved_bytes_are_what_a_hand_counts(run: str, dropout: float) -> None:
    plan = planned(Stack(run, dropout=dropout))
    bytes_, more = SAVED[run]
    snapshot = plan.memory.snapshot("", "Before Pre-Backward")
    assert snapshot is not None
    assert snapshot[Category.ACTIVATION] == bytes_ + (more if dropout else 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_static_equals_measured(name: str) -> None:
    case = CASES[name]
    args, kwargs = case.batch(0, 0)
    result = fxshard.validate(case.build(), args, kwargs, world_size=2, units=case.units)
    assert result.max_abs_difference == 0, result.table(only_different=True)


def operators(plan: Plan, target: Any) -> list[Any]:
    return [node for node in plan.program.phase("backward") if node.target is target]


@pytest.mark.parametrize(
    ("run", "again"),
    [
        ("plain", 0),
        ("checkpoint", 3),  # `up` of each block; what `down` gives, nobody reads in backward
        ("reentrant", 3),
        ("sequential", 1),
        ("nested", 5),  # `down` too, of all blocks but the last
        ("addmm saved", 0),
        ("tanh saved", 3),  # gelu reads what `up` gives
    ],
)
def test_backward_recomputes_matmuls(run: str, again: int) -> None:
    plan = planned(Stack(run))
    assert len(operators(plan, aten.mm.default)) == 3 * 4 + 2 + 1  # gradients: blocks, head, inlet
    assert len(operators(plan, aten.addmm.default)) == again


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_a_transformers_layer_only_its_input_is_saved(reentrant: bool) -> None:
    plan = planned("reentrant llama" if reentrant else "llama")
    inside = [n for n in saved_values(plan.program) if tags.get(n).checkpoint is not None]
    # layer 0 gives the input of 1, and layer 1 that of the norm
    assert [tuple(node.meta["val"].shape) for node in inside] == [(2, 8, 32)] * 2
    # gradients: 7 linear layers in 2 layers, and the head; again: all linear layers but `down`
    assert len(operators(plan, aten.mm.default)) == 2 * (2 * 7 + 1) + 2 * 6


# -- random numbers -------------------------------------------------------------------------------


def test_a_random_operator_is_recomputed_between_two_states() -> None:
    program = planned(Stack("checkpoint", depth=1, dropout=0.5)).program
    around = [n for phase in ("forward", "backward") for n in program.phase(phase)]
    assert [n.name for n in around if tags.is_random(n)] == [
        "native_dropout_state",
        "native_dropout",
        "native_dropout_now",
        "set_rng_state",
        "native_dropout_recomputed",
        "set_rng_state_1",
    ]


def test_one_state_does_for_random_operators_that_follow_each_other() -> None:
    def twice(net: Free, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.dropout(net.a(x)))).sum()

    program = planned(Free(twice)).program
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(rng.get_rng_state) == targets.count(rng.set_rng_state) == 2
    assert targets.count(aten.native_dropout.default) == 4
    assert_trains_like_eager(lambda: Free(twice), batch())


def test_a_state_for_each_where_another_draws_between_them() -> None:
    def between(net: Free, x: Tensor) -> Tensor:
        noise = torch.rand_like  # of no gradient: backward has no use for what it drew
        y = torch.tanh(F.dropout(net.a(x)))
        scale = noise(net.seen).sum().detach()
        return F.dropout(torch.tanh(y)).sum() + scale

    program = planned(Free(between)).program
    targets = [node.target for node in program.phase("backward")]
    assert targets.count(rng.set_rng_state) == 3
    assert_trains_like_eager(lambda: Free(between), batch())


def test_identical_checkpointed_blocks_share_regions() -> None:
    few, many = (planned(Stack("checkpoint", depth, dropout=0.5)) for depth in (3, 8))
    assert few.program.schedule and many.program.schedule
    assert len(few.program.schedule.regions) == len(many.program.schedule.regions)
