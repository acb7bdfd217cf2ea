"""Eager use, and graph breaks."""

import logging
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxshard
from fxshard.errors import RankMismatchError
from fxshard.ir.program import Fact
from tests.dynamo.dynamo_cases import (
    WIDTH,
    Broken,
    Mlp,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    pair,
    programs,
)
from tests.oracles import count_collectives

# -- eager use, and graph breaks -------------------------------------------------------------------


# All-gathers in forward and backward, and reduce-scatters, of a step of `Broken`, counted by hand.
# A compiled stretch: one per unit. An eager read: one per parameter, and one more in backward for
# each weight that the gradient of an activation needs. In front of the blocks `inlet` reads 2,
# after them `out` reads 2; the gradient of the batch is not asked for.
COUNTS = {
    "none": (3, 3, 3),  # one graph: the root unit and two blocks
    "print": (2 + 2 * 2 + 2, 2 * 2 + 1, 2 + 2 * 2 + 2),  # two graphs per block
    "break": (2 + 2 * 2 + 2, 2 * 2 + 1, 2 + 2 * 2 + 2),
    "data": (2 + 2 * 2 + 2, 2 * 2 + 1, 2 + 2 * 2 + 2),
    # a block's frame runs as it is: a.weight, a.bias, b.weight, b.bias, scale, of which
    # backward needs all but the biases
    "eager": (2 + 2 * 5 + 2, 2 * 3 + 1, 2 + 2 * 5 + 2),
}


def broken_steps(rank: int, world_size: int, kinds: list[str]) -> list[str]:
    """What is wrong with two steps of `Broken` in each kind; compared with eager, counted."""
    wrong = []
    for kind in kinds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = Broken(kind)
        torch.manual_seed(0)
        model = fxshard.shard(Broken(kind), units=["blocks.*"])
        if kind != "eager":
            model.compile(backend="fxshard", fullgraph=kind == "none")
        shapes = {tuple(p.shape) for p in plain.parameters() if p.dim() > 1}
        shapes |= {shape[::-1] for shape in shapes}
        for step in range(2):
            batches = [batch_of(r, step) for r in range(world_size)]
            expected = torch.stack([plain(x).square().mean() for x in batches])
            plain.zero_grad()
            expected.mean().backward()
            model.zero_grad()
            saved: list[tuple[int, ...]] = []

            def keep(tensor: Tensor, saved: list[tuple[int, ...]] = saved) -> Tensor:
                saved.append(tuple(tensor.shape))
                return tensor

            with count_collectives() as seen:
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    loss = model(batches[rank]).square().mean()
                forward = seen.count("all_gather")
                loss.backward()
            if not torch.allclose(loss, expected[rank], atol=1e-6):
                wrong.append(f"{kind} {step}: loss {loss} and not {expected[rank]}")
            try:
                assert_same_gradients(model, plain)
            except AssertionError as error:
                wrong.append(f"{kind} {step}: gradient of {error}")
            counts = (forward, seen.count("all_gather") - forward, seen.count("reduce_scatter"))
            if step and kind in COUNTS and counts != COUNTS[kind]:
                wrong.append(f"{kind} {step}: {counts} collectives and not {COUNTS[kind]}")
            if step and seen.count() != sum(counts):
                wrong.append(f"{kind} {step}: other collectives {seen.kinds()}")
            if shapes & set(saved):
                wrong.append(f"{kind} {step}: unsharded parameters saved: {saved}")
            if int(model.calls) != step + 1:
                wrong.append(f"{kind} {step}: buffer {model.calls}")
        for program in programs(model):
            if Fact.NO_PARAM_SAVED not in program.facts:
                wrong.append(f"{kind}: nobody looked for saved parameters")
    return wrong


def test_eager_use_and_graph_breaks_are_right_and_sharded(ranks: Any) -> None:
    kinds = ["none", "eager", "print", "data", "try"]
    for wrong in ranks(2).run(broken_steps, kinds):
        assert wrong == []


def test_layers_share_the_graphs_of_a_block() -> None:
    _, model = pair(lambda: Broken("break"), units=["blocks.*"])
    counters.clear()
    compiled(model, fullgraph=False)(batch_of(0, 0)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2
    found = programs(model)
    assert [list(program.params) for program in found] == [
        [f"blocks.{i}.{name}" for name in names]
        for i in range(2)
        for names in (["a.weight", "a.bias"], ["scale", "b.weight", "b.bias"])
    ]
    for i, program in enumerate(found):  # each operator is in the module that it ran in
        modules = {call.module for call in program.calls}
        inside = f"blocks.{i // 2}"
        assert modules == {"", inside, f"{inside}.{'b' if i % 2 else 'a'}"}


class Holding(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        view, cast = self.blocks[0][0].weight.t(), self.norm.bias.double()
        torch._dynamo.graph_break()
        return super().forward(x) @ view + cast


def test_a_whole_parameter_across_a_break_is_named(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = pair(Holding)
    with caplog.at_level(logging.WARNING, "fxshard"):
        assert_same_step(plain, model, compiled(model, fullgraph=False), torch.randn(3, WIDTH))
    said = [r.getMessage() for r in caplog.records if "returns the unsharded" in r.getMessage()]
    assert len(said) == 2
    assert "'norm.bias'" in said[0] + said[1] and "'blocks.0.0.weight'" in said[0] + said[1]


class HandsOver(nn.Module):
    """Reads a parameter in a stretch that runs as it is, and gives it to one that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaling() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # a break in a loop: Dynamo gives up this frame
            torch._dynamo.graph_break()
            x = block(x, self.scale)
        return x


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


def handed_over(rank: int, world_size: int) -> list[str]:
    torch._dynamo.reset()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxshard").addHandler(handler)
    try:
        torch.manual_seed(0)
        plain = HandsOver()
        torch.manual_seed(0)
        model = fxshard.shard(HandsOver())
        x = torch.randn(3, WIDTH)  # the same on all ranks
        assert_same_step(plain, model, compiled(model, fullgraph=False), x)
    finally:
        logging.getLogger("fxshard").removeHandler(handler)
    return [line for line in said if "before a graph break" in line]


def test_a_parameter_that_eager_code_gives_to_a_graph_is_named(ranks: Any) -> None:
    for said in ranks(2).run(handed_over):
        assert said and all("'scale'" in line for line in said)


def test_quiet_without_a_whole_parameter_across_a_break(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, model = pair(lambda: Broken("print"))
    with caplog.at_level(logging.WARNING, "fxshard"):
        compiled(model, fullgraph=False)(batch_of(0, 0)).sum().backward()
    assert [
        r.getMessage() for r in caplog.records if "returns the unsharded" in r.getMessage()
    ] == []


class Routed(nn.Module):
    """The data decide which of two equal layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.near(x)
        return self.far(x)


def routed(rank: int, world_size: int) -> list[str]:
    torch._dynamo.reset()
    run = compiled(fxshard.shard(Routed()), fullgraph=False)
    x, found = torch.ones(3, WIDTH), []
    for sign in (1, -1, 1, 1 if rank else -1, 1):
        try:
            run(sign * x).sum().backward()
            found.append("")
        except RankMismatchError as error:
            found.append(str(error))
    return found


def test_ranks_that_take_other_branches_are_told_in_the_next_call(hasty: Any) -> None:
    """Both branches are known to all, and gather as many bytes: the numbers would mix."""
    for rank, told in enumerate(hasty(2).run(routed)):
        assert told[:4] == [""] * 4
        assert f"in the last call rank {1 - rank} ran another program" in told[4]
        assert "near.weight" in told[4] and "far.weight" in told[4]
