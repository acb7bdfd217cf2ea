"""What a snapshot of a program that ran out of memory means: figures that are known by hand."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as torchs_reader

import fxshard
from fxshard.errors import ConfigError
from fxshard.memory.category import Category
from fxshard.memory.cuda.settings import AllocatorSettings
from fxshard.memory.oom.explain import OomExplanation, Planned, explain_oom
from fxshard.memory.oom.moments import AllocatorMoment
from tests.memory.snapshots import (
    ADAMW,
    ENGINE,
    FOREACH,
    GIB,
    INIT,
    LINEAR,
    MAIN,
    MIB,
    Program,
    fragmented,
)


def explained(program: Program, path: Path, **how: Any) -> OomExplanation:
    return explain_oom(program.dump(path / "snapshot.pickle", **how))


def categories(moment: AllocatorMoment) -> dict[str, int]:
    return {name: size for (name,), (size, _) in moment.by("category").items()}


def test_torch_reads_what_these_tests_write() -> None:
    """The format is torch's: its own readers take it, and count the same."""
    data = fragmented().snapshot()
    summary = torchs_reader.segsum(data)
    assert "total_reserved: 16.0GiB" in summary and "total_allocated: 10.0GiB" in summary
    assert "total_free: 6.0GiB" in summary
    trace = torchs_reader.trace(data)
    assert "# 4.0GiB requested, 512.0MiB free in CUDA" in trace
    lines: list[str] = []
    torchs_reader.memory(data, format_flamegraph=lines.append)
    assert "linear.py:134:forward" in lines[0] and "module.py:942:_apply" in lines[0]
    for plot in (torchs_reader.trace_plot, torchs_reader.segment_plot):
        assert "snapshot.pickle" in plot(data)


def test_fragmentation_is_told_to_the_byte(tmp_path: Path) -> None:
    found = explained(fragmented(), tmp_path)
    assert found.request is not None
    assert (found.request.bytes, found.request.device_free) == (4 * GIB, 512 * MIB)
    assert found.request.origin.line == "/job/model.py:40 in forward"
    assert found.request.origin.module == "model.py > nn.linear"
    moment = found.moment
    assert (moment.reserved, moment.free_bytes) == (16 * GIB, 6 * GIB)
    assert [piece.bytes for piece in moment.free] == 3 * [2 * GIB]
    assert categories(moment) == {"Sharded Param": 8 * GIB, "Activation": 2 * GIB}
    assert found.fragmented and found.complete and not found.why_not_replayed
    assert found.model_reserved == 16 * GIB
    fits = {each.name: each.fits for each in found.what_ifs}
    assert fits["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"] is True
    assert fits["PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:8"] is False
    assert fits["activation checkpointing, of what forwards keep for backward"] is False
    text = str(found)
    assert "Fragmentation: 6.50 GiB are free in all, enough for 4.00 GiB" in text
    assert "and the largest that this request may use has 2.00 GiB." in text.replace("\n", " ")
    assert max(map(len, text.splitlines())) <= 100


def test_with_expandable_segments_the_same_program_runs() -> None:
    assert fragmented().failed
    assert not fragmented(AllocatorSettings(expandable_segments=True)).failed


def test_a_full_device_is_not_fragmentation(tmp_path: Path) -> None:
    program = Program(8 * GIB)
    for frames in (INIT, INIT, LINEAR):
        program.alloc(2 * GIB, frames)
    program.alloc(3 * GIB, LINEAR)
    found = explained(program, tmp_path)
    assert not found.fragmented
    assert "all that is free, 2.00 GiB, is 1.00 GiB less than the 3.00 GiB asked for" in str(
        found
    ).replace("\n", " ")
    fits = {each.name.split(":")[-1]: each.fits for each in found.what_ifs}
    assert fits["True"] is False and not any("roundup" in n and f for n, f in fits.items())
    assert any("activation" in each.name and each.fits for each in found.what_ifs)


def test_a_limit_of_the_programs_own_is_not_a_full_device(tmp_path: Path) -> None:
    program = Program(8 * GIB, AllocatorSettings(per_process_memory_fraction=0.5))
    program.alloc(3 * GIB, INIT)
    program.alloc(2 * GIB, LINEAR)
    found = explained(program, tmp_path)
    assert found.request is not None and found.request.limited
    assert "set_per_process_memory_fraction" in str(found)


@pytest.mark.parametrize("expandable", [False, True])
def test_what_happened_after_the_failure_is_undone(expandable: bool, tmp_path: Path) -> None:
    """A snapshot taken in `except`: frames have unwound, caches were given back, work went on."""
    settings = AllocatorSettings(expandable_segments=expandable)
    program = Program(8 * GIB, settings)
    params, saved = program.alloc(2 * GIB, INIT), program.alloc(5 * GIB + 600, LINEAR)
    program.alloc(3 * GIB, LINEAR)
    at_failure = explained(program, tmp_path).moment
    program.free(saved)
    program.alloc(7 * GIB, LINEAR)  # fails, and gives the free segment back
    later = explained(program, tmp_path)
    assert later.failures == 2 and categories(later.moment) == {"Sharded Param": 2 * GIB}
    del program.trace[-1]  # the second failure is forgotten
    program.free(params)
    program.alloc(6 * GIB, MAIN)
    found = explained(program, tmp_path)
    assert found.moment.by("category", "line") == at_failure.by("category", "line")
    assert found.moment.reserved == at_failure.reserved
    assert found.moment.free == at_failure.free
    assert found.moment.rounding_bytes == at_failure.rounding_bytes == 424


def test_a_ring_buffer_that_is_too_short_claims_nothing(tmp_path: Path) -> None:
    """What was there before the recording is laid out afresh: whether it fits, nobody knows."""
    found = explained(fragmented(), tmp_path, last=8)
    assert not found.complete and found.moment.free_bytes == 6 * GIB
    assert "record from the start" in found.why_not_replayed
    assert {each.fits for each in found.what_ifs} == {None}
    assert categories(found.moment) == {"Sharded Param": 8 * GIB, "Activation": 2 * GIB}
    assert "What would have fitted is not known" in str(found)


def test_without_a_failure_the_highest_point_and_the_end_are_told(tmp_path: Path) -> None:
    program = Program()
    program.alloc(GIB, INIT)
    saved = program.alloc(3 * GIB, LINEAR)
    program.free(saved)
    program.alloc(MIB, MAIN)
    found = explained(program, tmp_path)
    assert found.request is None
    assert [moment.name for moment in found.moments] == ["highest point", "end"]
    highest, end = found.moments
    assert categories(highest) == {"Sharded Param": GIB, "Activation": 3 * GIB}
    assert categories(end) == {"Sharded Param": GIB, "unknown": MIB}
    assert "where the most is in use, after event 4" in str(found)


def test_without_history_there_are_segments_only(tmp_path: Path) -> None:
    program = Program()
    program.alloc(GIB, INIT)
    data = program.snapshot()
    for block in data["segments"][0]["blocks"]:
        block["frames"] = []
    whole: list[Any] = [data | {"device_traces": [[]]}, data["segments"]]
    del data["device_traces"], data["allocator_settings"]
    for told in (data, *whole):
        (tmp_path / "s.pickle").write_bytes(pickle.dumps(told))
        found = explain_oom(tmp_path / "s.pickle")
        assert [moment.name for moment in found.moments] == ["end"]
        assert categories(found.moment) == {"unknown": GIB}
        assert "_record_memory_history" in str(found)


def test_categories_that_only_time_tells(tmp_path: Path) -> None:
    program = Program()
    program.alloc(4 * MIB, INIT)
    gradient, freed = program.alloc(4 * MIB, ENGINE), program.alloc(2 * MIB, ENGINE)
    found = explained(program, tmp_path).moment
    assert categories(found) == {"Sharded Param": 4 * MIB, "Grad or Temp": 6 * MIB}
    program.free(freed, ENGINE)
    program.alloc(8 * MIB, ADAMW)
    momentum, temporary = program.alloc(3 * MIB, FOREACH), program.alloc(5 * MIB, FOREACH)
    found = explained(program, tmp_path).moments[-1]
    assert categories(found) == {
        "Sharded Param": 4 * MIB,
        "Unsharded Grad": 4 * MIB,
        "OptState": 8 * MIB,
        "Temp": 8 * MIB,
    }
    program.free(temporary)
    program.free(gradient)
    program.alloc(MIB, LINEAR)
    found = explained(program, tmp_path).moments[-1]
    assert categories(found) == {
        "Sharded Param": 4 * MIB,
        "OptState": 11 * MIB,
        "Activation": MIB,
    }
    assert momentum in {each.address for each in found.held}
    assert all(each.origin.why for each in found.held)


def test_gradients_that_a_forward_still_holds_are_named(tmp_path: Path) -> None:
    program = Program(8 * GIB)
    program.alloc(2 * GIB, INIT)
    program.alloc(2 * GIB, ENGINE)
    program.alloc(2 * GIB, LINEAR)
    program.alloc(3 * GIB, LINEAR)
    found = explained(program, tmp_path)
    stale = next(each for each in found.what_ifs if "zero_grad" in each.name)
    assert stale.fits is True and stale.saves_bytes == 2 * GIB


def test_memory_that_waits_for_other_streams(tmp_path: Path) -> None:
    program = Program(8 * GIB)
    program.alloc(2 * GIB, INIT)
    side = program.alloc(4 * GIB, LINEAR, stream=7)
    entry = {"action": "free_requested", "addr": side, "size": 4 * GIB, "stream": 7, "frames": []}
    program.trace.append(entry)
    data = program.snapshot()
    data["segments"][1]["blocks"][0]["state"] = "active_pending_free"
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data))
    end = explain_oom(tmp_path / "s.pickle").moments[-1]
    assert end.waiting_bytes == 4 * GIB and end.by("category")["Activation",] == (4 * GIB, 1)
    assert "4.00 GiB    freed, and waiting for other streams" in str(
        explain_oom(tmp_path / "s.pickle")
    )
    program.trace.append(entry | {"action": "free_completed"})
    data["device_traces"][0] = program.trace
    data["segments"][1]["blocks"][0]["state"] = "inactive"
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data))
    highest, end = explain_oom(tmp_path / "s.pickle").moments
    assert (highest.waiting_bytes, end.free_bytes) == (0, 4 * GIB)


def test_of_several_devices_the_one_that_ran_out(tmp_path: Path) -> None:
    large, failed = Program(), fragmented()
    large.alloc(40 * GIB, INIT)
    data, other = large.snapshot(), failed.snapshot()
    for segment in other["segments"]:
        segment["device"] = 1
    data["segments"] += other["segments"]
    data["device_traces"] += other["device_traces"]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(data))
    found = explain_oom(path)
    assert (found.device, found.devices) == (1, (0, 1)) and found.fragmented
    assert "Other devices in the snapshot: 0 (--device)" in str(found)
    assert explain_oom(path, device=0).moment.reserved == 40 * GIB
    with pytest.raises(ConfigError, match=r"device 2: .* nothing about it, but about 0, 1"):
        explain_oom(path, device=2)


def test_private_pools_and_unknown_settings_are_not_replayed(tmp_path: Path) -> None:
    data = fragmented().snapshot()
    data["segments"][0]["segment_pool_id"] = (0, 1)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    path = tmp_path / "s.pickle"
    for told, why in (
        (data, "memory pools of the program's own"),
        (fragmented().snapshot() | {"allocator_settings": settings}, "only the native allocator"),
    ):
        path.write_bytes(pickle.dumps(told))
        found = explain_oom(path)
        assert why in found.why_not_replayed and found.model_reserved is None
        assert found.moment.free_bytes == 6 * GIB


def test_the_settings_that_the_snapshot_names_are_replayed(tmp_path: Path) -> None:
    data = fragmented().snapshot()
    text = "garbage_collection_threshold:0.8,max_split_size_mb:32768"
    data["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = text
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data))
    found = explain_oom(tmp_path / "s.pickle")
    assert found.settings_text == text and found.model_reserved == 16 * GIB


# -- snapshots of plans ----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


@pytest.fixture(scope="module")
def plan() -> fxshard.Plan:
    model = nn.Sequential(Block(), Block(), Block())
    return fxshard.plan(model, (torch.ones(8, 64),), world_size=4, optimizer=torch.optim.AdamW)


def test_a_snapshot_of_a_plan_has_the_figures_of_its_report(
    plan: fxshard.Plan, tmp_path: Path
) -> None:
    report = plan.memory
    report.to_memory_viz(tmp_path / "plan.pickle")
    found = explain_oom(tmp_path / "plan.pickle", plan=Planned.of(report))
    assert found.moment.requested_bytes == report.peak_bytes
    alone = {c.value: n for c, n in report.peak_by_category.items() if n}
    names = {c.value for c in (Category.SHARDED_PARAM, Category.OPT_STATE, Category.INPUTS)}
    told = categories(found.moment)
    assert {name: told[name] for name in names} == {name: alone[name] for name in names}
    # What becomes another thing in its life has the names of both.
    assert sum(told.values()) == sum(alone.values())
    modules = {module for (module,) in found.moment.by("module")}
    assert {"0.linear", "1.linear", "2.linear"} <= modules
    text = str(found)
    assert "Beside the plan" in text and "What would change the plan" in text
    assert found.plan is not None and found.plan.what_ifs


def test_a_report_from_json_is_put_beside(plan: fxshard.Plan, tmp_path: Path) -> None:
    planned = Planned.from_dict(plan.memory.to_dict())
    assert planned == Planned.of(plan.memory, what_ifs=False)
    found = explain_oom(fragmented().dump(tmp_path / "s.pickle"), plan=planned)
    assert "more here" in str(found)
    change: Callable[[dict[str, Any]], Any]
    for change in (
        lambda d: d.update(schema="other"),
        lambda d: d.update(peak_bytes="1"),
        lambda d: d.update(peak_by_category={"Nothing": 1}),
    ):
        told = plan.memory.to_dict()
        change(told)
        with pytest.raises(ConfigError, match="no report"):
            Planned.from_dict(told)
