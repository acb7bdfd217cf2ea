"""benchmarks/memory_vs_fsdp2.py: its rules against counts by hand, its page against its figures."""

import collections
import csv
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import memory_vs_fsdp2 as script
from benchmarks.memory_vs_fsdp2 import ESTIMATES, PAGE, RESULTS, ROWS, Result, case_rows, gaps, run
from benchmarks.vs_fsdp2 import models
from benchmarks.vs_fsdp2.causes import CAUSES, Comparison, explain
from benchmarks.vs_fsdp2.models import CASES, WIDE, Case
from benchmarks.vs_fsdp2.peaks import adam_bytes, estimates, measured_peak, zero3_bytes
from benchmarks.vs_fsdp2.things import Row, Thing
from benchmarks.vs_fsdp2.tracked import fully_sharded
from fxshard._torch import process_groups

# Dense(vocab=64, dim=32): all dimensions divide by 8 ranks, so nothing is padded.
LAYER = 4 * (2 * 32 + 3 * 32 * 32 + 32 * 32 + 32 + 2 * 32 + 4 * 32 * 32 + 128 + 4 * 32 * 32 + 32)
ROOT = 4 * (64 * 32 + 2 * 32 + 64 * 32)
LAST_BIAS, HEAD = 4 * 32, 4 * 64 * 32  # the last parameter of a layer, and of the root


@pytest.fixture(scope="module")
def dense() -> Iterator[Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run(CASES["dense"])
    torch.set_num_threads(threads)


def row_of(result: Result, unit: str, state: str) -> Comparison:
    (row,) = (row for row in result.rows if (row.unit, row.state) == (unit, state))
    return row


def parts(row: Comparison) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for part in row.parts:
        found[part.cause] += part.bytes
    return dict(found)


def test_every_difference_is_the_sum_of_its_causes(dense: Result) -> None:
    assert gaps(dense) == []
    assert {row.unit for row in dense.rows} == {"", "layers.0", "layers.1", "layers.2"}
    assert len(dense.rows) == 4 * 10
    for row in dense.rows:
        theirs, ours = sum(row.theirs.values()), sum(row.ours.values())
        assert theirs - ours == sum(part.bytes for part in row.parts), (row.unit, row.state)
        assert {part.cause for part in row.parts} <= CAUSES.keys()


def test_causes_by_hand(dense: Result) -> None:
    forward = parts(row_of(dense, "layers.2", "Before Post-Forward"))
    assert forward == {"second copy": LAYER, "free at last use": LAYER}
    assert parts(row_of(dense, "", "After Post-Forward")) == {"root kept": ROOT}
    assert parts(row_of(dense, "layers.0", "Before Pre-Forward"))["early gather"] == -LAYER
    for unit, size in (("layers.2", LAST_BIAS), ("layers.1", LAST_BIAS), ("", HEAD)):
        row = parts(row_of(dense, unit, "After Post-Backward"))
        assert row["tracker's loop variable"] == size, unit
        assert ("reduce input kept" in row) == (unit == "")
    assert parts(row_of(dense, "", "After Post-Backward"))["reduce input kept"] == ROOT
    assert parts(row_of(dense, "layers.0", "Before Post-Backward"))["reduce input kept"] == LAYER
    backward = parts(row_of(dense, "layers.2", "After Pre-Backward"))
    biases = 4 * (32 + 4 * 32 + 32)  # of the linears; a layer norm's backward takes its bias
    assert backward["unread in backward"] == 2 * biases  # of this layer, and of the one in flight


def test_a_byte_too_many_has_no_cause() -> None:
    shards = Thing("shard", "", 64, "Sharded Param")
    theirs, ours = Row((shards, Thing("values", "", 8, "Activation", saved=True))), Row((shards,))
    row = explain("", "Before Pre-Forward", theirs, ours, set())
    assert row.difference == 8
    assert row.parts == () and row.unexplained == (("values", "", 8),)
    changed = Row((dataclasses.replace(shards, bytes=65),))
    row = explain("", "Before Pre-Forward", changed, Row((shards,)), set())
    assert row.unexplained == (("shard", "", 1),)


def test_peaks_are_the_profilers(dense: Result) -> None:
    assert dense.tracker == dense.peaks["fsdp2"]
    assert dense.plan == dense.peaks["fxshard"] < dense.packed < dense.peaks["fsdp2"]


def test_the_loop_variable_is_the_trackers() -> None:
    """Without the tracker the unit's last gradient dies in FSDP2's post-backward."""
    dead = []
    with process_groups.fake_process_group(0, 8):
        model, _, step = fully_sharded(CASES["dense"])
        step()
        for module in (model, *model.get_submodule("layers").children()):
            group = module._get_fsdp_state()._fsdp_param_group
            group.post_backward = functools.partial(_watched, group, group.post_backward, dead)
        step()
    assert dead == [True] * 4


def _watched(group: Any, original: Callable[[], None], dead: list[bool]) -> None:
    grad = group.fsdp_params[-1]._unsharded_param.grad
    if grad is None:  # the root's final callback asks every unit again
        return original()
    storage = weakref.ref(grad.untyped_storage())
    del grad
    original()
    dead.append(storage() is None)


def test_generator_states_are_what_the_tracker_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of checkpointed layers: without these states the profiler sees what the tracker does."""
    without = functools.partial(models.checkpoint, preserve_rng_state=False)
    recorded = json.loads(RESULTS.read_text())["models"]["checkpointed"]
    states = 2 * torch.get_rng_state().nbytes
    assert recorded["measured_peaks"]["fsdp2"] - recorded["tracker_peak"] == states
    monkeypatch.setattr(models, "checkpoint", without)
    with process_groups.fake_process_group(0, 8):
        assert measured_peak(*fully_sharded(CASES["checkpointed"])) == recorded["tracker_peak"]


def test_estimators_by_hand() -> None:
    three = Case("three", "three parameters", functools.partial(nn.Linear, 2, 1), "")
    assert estimates(three) == {
        "DeepSpeed": 4 * 3 + 6,  # 18 * 3 / 8 = 6.75 bytes, cut
        "accelerate": 4 * 12,
    }
    assert zero3_bytes(3, 2, 1) == 4 * 2 + 18 * 3
    assert adam_bytes(12, mixed=True) == 24


def test_the_page_is_this_scripts(dense: Result) -> None:
    text = PAGE.read_text()
    assert "| " + " | ".join(script.PEAK_HEADERS) + " |" in text
    with ESTIMATES.open(newline="") as file:
        errors = [row["its plan: error"] for row in csv.DictReader(file)]
    assert errors == ["+0.0%"] * (len(CASES) + 1) and "of its own step: +0.0%" in text
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {case.title for case in CASES.values()}
    own = [row for row in rows if row["model"] == dense.case.title]
    again = [{k: str(v) for k, v in row.items()} for row in case_rows(dense)]
    assert own == again, "run `python -m benchmarks.memory_vs_fsdp2` again"
    recorded = json.loads(RESULTS.read_text())
    assert list(recorded["models"]) == [*CASES, WIDE.name]
    assert recorded["date"] in text and recorded["torch"] in text
    for model in recorded["models"].values():
        for row in model["rows"]:
            assert row["difference"] == sum(size for _, _, size in row["causes"])
            assert {cause for cause, _, _ in row["causes"]} <= CAUSES.keys()
