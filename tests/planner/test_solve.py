"""What fits a budget, against a search that plans every size from scratch."""

import functools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.cli import main
from fxshard.errors import ConfigError, DoesNotFitError
from fxshard.planner import limits
from tests.cli import test_cli
from tests.memory.test_formula import ADAMW, OF_X, Convolutions, Mlps, Positioned, floats, squares

OPTIONS: dict[str, Any] = {"optimizer": ADAMW}


@functools.cache
def peak(batch: int, seq: int, world: int) -> int:
    """The larger of the peaks of the first and of a later step, planned from scratch."""
    plan = fxshard.plan(Mlps(1), kwargs=floats(batch, seq), world_size=world, **OPTIONS)
    return max(plan.memory.peak_bytes, plan.memory.first_step_peak_bytes)


def open_plan() -> fxshard.Plan:
    return fxshard.plan(Mlps(1), kwargs=floats(5, 14), world_size=4, dynamic=OF_X, **OPTIONS)


opened = functools.cache(open_plan)  # for all that ask: its formulas are computed once


def test_max_batch_is_the_last_that_fits() -> None:
    budget = peak(9, 14, 4)  # fits to the byte
    for limit, expected in ((budget, 9), (budget - 1, 8), (budget + 1, 9)):
        found = opened().solve("max_batch", limit)
        assert (found.size, found.beyond) == (expected, expected + 1)
        assert found.peak_bytes == peak(expected, 14, 4) <= limit
        assert found.beyond_peak_bytes == peak(expected + 1, 14, 4) > limit
        assert len(found.tried) == 2  # the formula has found it: two plans prove it


def test_other_sizes_may_be_fixed_to_others() -> None:
    budget = peak(3, 70, 7)
    found = opened().solve("max_seq", budget, batch=3, world=7)
    assert found.size == 70 and found.fixed == {"batch": 3, "world": 7}
    assert found.plan.memory.peak_bytes == peak(3, 70, 7)
    assert "max_seq = 70 with batch=3, world=7" in str(found)
    assert "71 does not fit" in str(found)
    found = opened().solve("max_batch", budget, seq=20, multiple_of=4)
    fits = [batch for batch in range(4, 40, 4) if peak(batch, 20, 4) <= budget]
    assert found.size == fits[-1] and found.beyond == fits[-1] + 4


def test_min_world_is_the_first_that_fits() -> None:
    peaks = {world: peak(5, 14, world) for world in range(1, 8)}
    for budget in (peaks[3], peaks[5] - 1):
        found = opened().solve("min_world", budget)
        assert peaks[found.size] <= budget < peaks[found.beyond]
        assert found.beyond == found.size - 1
    found = opened().solve("min_world", peaks[1])
    assert (found.size, found.beyond, found.why_not) == (1, 0, "")


def test_min_world_looks_past_ranks_whose_padding_costs_more() -> None:
    peaks = {world: peak(5, 14, world) for world in (*range(1, 9), 25)}
    budget = peaks[8]
    assert all(found > budget for world, found in peaks.items() if world != 8)
    for world in (5, 25):
        plan = opened().replan(world_size=world)
        found = plan.solve("min_world", budget)
        assert (found.size, found.beyond, found.peak_bytes) == (8, 7, budget)


def test_no_search_ends_below_the_inputs_at_the_sizes_that_are_fixed() -> None:
    plan = fxshard.plan(Mlps(1), kwargs=floats(5, 280), world_size=4, dynamic=OF_X, **OPTIONS)
    budget = peak(900, 2, 4)  # inputs of 280 would fill it with a batch of 36
    found = plan.solve("max_batch", budget, seq=2)
    assert (found.size, found.peak_bytes, len(found.tried)) == (900, budget, 2)


def test_the_upper_end_of_a_search_doubles_while_it_fits() -> None:
    def planned(size: int) -> Any:
        def assert_fits(budget: int) -> None:
            if 100 * size > budget:
                raise DoesNotFitError(f"{100 * size} needed")

        return SimpleNamespace(
            memory=SimpleNamespace(
                peak_bytes=100 * size, first_step_peak_bytes=0, assert_fits=assert_fits
            )
        )

    search = limits.Sizes(planned, "batch", 98765, 1, 1, likely=lambda size: size < 3)
    assert search.largest(4) == 987  # as if there were hardly any room
    tried = {size: each.peak_bytes for size, each in search.candidates.items()}
    assert tried[987] == 98700 and tried[988] == 98800 and len(tried) < 20


def test_the_proof_is_traced_on_its_own(traces: list[Any]) -> None:
    plan = open_plan()
    plan.memory.formula()
    traces.clear()
    found = plan.solve("max_batch", "300KiB")
    seen = [(args[2]["x"].shape[0], kwargs.get("symbols")) for args, kwargs in traces]
    assert sorted(seen) == [(found.size, None), (found.beyond, None)]


def test_beyond_where_the_formula_holds_sizes_are_planned() -> None:
    positioned = fxshard.plan(
        Positioned(), kwargs=floats(5, 14), world_size=4, dynamic=OF_X, **OPTIONS
    )
    found = positioned.solve("max_seq", "1GiB")
    assert (found.size, found.beyond) == (16, 17)
    assert found.beyond_peak_bytes is None and "cannot be traced" in found.why_not
    # Convolutions of 16 images and more are another program (batch < 16).
    plan = fxshard.plan(
        Convolutions(),
        kwargs=squares(5, 14),
        world_size=4,
        dynamic={"batch": [("x", 0)]},
    )
    budget = fxshard.plan(Convolutions(), kwargs=squares(31, 14), world_size=4).memory.peak_bytes
    assert plan.solve("max_batch", budget).size == 31


def test_what_cannot_be_answered_says_why() -> None:
    plan = opened()
    with pytest.raises(DoesNotFitError, match="not even a batch of 1 fits"):
        plan.solve("max_batch", 1000)
    with pytest.raises(DoesNotFitError, match=r"no number of ranks is enough"):
        plan.solve("min_world", 1000)
    with pytest.raises(ConfigError, match="this plan knows max_batch, max_seq, min_world"):
        plan.solve("max_length", "1GiB")
    with pytest.raises(ConfigError, match="no size 'length'"):
        plan.solve("max_batch", "1GiB", length=3)
    for step in (0, 2.0, True):
        with pytest.raises(ConfigError, match=f"multiple_of={step}: expected an integer >= 1"):
            plan.solve("max_batch", "1GiB", multiple_of=step)
    for seq in (3.0, "3", 0, True):
        with pytest.raises(ConfigError, match=f"seq={seq!r}: a size is an integer, at least 1"):
            plan.solve("max_batch", "1GiB", seq=seq)
    with pytest.raises(ConfigError, match=r"'max_batch', batch=3\): leave out what is asked for"):
        plan.solve("max_batch", "1GiB", batch=3)
    with pytest.raises(ConfigError, match="this plan knows max_batch"):
        plan.solve(3, "1GiB")
    for budget in (-5, 0, "0GiB"):
        with pytest.raises(ConfigError, match=f"a budget of {budget!r}: expected at least 1 byte"):
            plan.solve("max_batch", budget)
    for budget in (1.5e9, None, "1.2.3GiB", "80GX", True):
        with pytest.raises(ConfigError, match="is no size; write bytes, '80GiB'"):
            plan.solve("max_batch", budget)


def of_a_function(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return test_cli.tokens(), {"ids": torch.zeros(batch, 64, dtype=torch.int64)}


def of_a_config(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    from fxshard.cli.model_source import PRESETS

    values = {k: v for k, v in PRESETS["tiny-llama"].items() if k != "model_type"}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, use_cache=False))
    tokens = torch.zeros(batch, 64, dtype=torch.int64, device="meta")
    return llama, {"input_ids": tokens, "labels": tokens.clone()}


LLAMA = (("--hf-config", "tiny-llama"), of_a_config, 4 * 2**20)


@pytest.mark.parametrize(
    ("model", "made", "budget"),
    [
        (("--model", "tests.cli.test_cli:tokens"), of_a_function, 200 * 2**10),
        pytest.param(*LLAMA, marks=pytest.mark.slow),
    ],
    ids=["tokens", "tiny-llama"],
)
def test_on_the_command_line(
    model: tuple[str, str], made: Any, budget: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*model, "--budget", str(budget)]
    assert main.main(["solve", "max_batch", *asked, "--at", "seq=64", "--at", "world=16"]) == 0
    out = capsys.readouterr().out
    size = int(out.split()[2])
    assert out.startswith(f"max_batch = {size} with seq=64, world=16: needs ")
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    for batch, fits in ((size, True), (size + 1, False)):
        module, call = made(batch)
        memory = fxshard.plan(module, kwargs=call, world_size=16, optimizer=optimizer).memory
        assert (max(memory.peak_bytes, memory.first_step_peak_bytes) <= budget) == fits
    assert main.main(["solve", "max_x", *asked]) == 2
    assert "this plan knows max_batch, max_seq, min_world" in capsys.readouterr().err
    named = ["--dynamic", "rows=" + ",".join(f"{name}:0" for name in call)]
    assert main.main(["solve", "max_rows", *asked, *named, "--seq", "64"]) == 0
    assert capsys.readouterr().out.startswith("max_rows = ")
