"""benchmarks/gpu/run.sh: its CPU mode to the end, and what only a GPU runs on stand-ins for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import case, memory
from benchmarks.gpu.models import ON_CPU

ROOT = Path(__file__).parents[1]
RUN = ROOT / "benchmarks" / "gpu" / "run.sh"
CONVOLUTIONS = ["aten.convolution", "aten.convolution_backward"]  # of oneDNN, which tells no size


def run(python: str, *arguments: str) -> Any:
    return subprocess.run(
        ["bash", str(RUN), *arguments],
        env={**os.environ, "PYTHON": python},
        cwd=ROOT / "tests",  # the folder that it is called from does not matter
        capture_output=True,
        text=True,
    )


def test_cpu_mode_runs_to_the_end_and_is_exact_to_the_byte(tmp_path: Path) -> None:
    done = run(sys.executable, "--cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("*-cpu.json")
    found = json.loads(written.read_text())
    rows = {(row["model"], row["world_size"]): row for row in found["cases"]}
    assert tuple(rows) == memory.CPU_CASES
    assert found["torch"] == torch.__version__ and found["gpu"] is None
    for (model, _), row in rows.items():
        assert row["status"] == "ok"
        assert row["start"]["static"] == row["start"]["measured"]
        assert row["capture"] == {
            "equal": True,
            "differences": [],
            "bytes_equal": True,
            "peak_planned": row["capture"]["peak_traced"],
            "peak_traced": row["capture"]["peak_traced"],
        }
        wrong = {each["phase"] for each in row["phases"] if each["difference"]}
        if model == "convnet-tiny":
            assert row["unknown_kernels_cpu"] == CONVOLUTIONS
            assert wrong == {"forward", "backward"}
            assert all(each["difference"] <= 0 for each in row["phases"])
        else:
            assert wrong == set() and row["exact"] and row["unknown_kernels_cpu"] == []
        steps = [(r["step"], r["phase"]) for r in row["replay"]]
        phases = ("forward", "backward", "optimizer", "zero_grad")
        assert steps == [(step, phase) for step in (1, 2, 3) for phase in phases]
        assert steps == [(r["step"], r["phase"]) for r in row["phases"]]
        for each in row["replay"]:
            assert 0 < each["requested"] <= each["allocated"] <= each["reserved"]
        assert f"| {model}" in written.with_suffix(".md").read_text()
    assert [memory.missed(row) for row in rows.values()] == [False, False, True]
    assert "to the byte: 2; captures equal: 3" in done.stdout


def test_a_python_without_torch_is_told_what_it_lacks(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = run(str(bare), "--cpu")
    assert done.returncode == 1
    assert "has no torch, numpy, rich, sympy, tabulate" in done.stderr


def test_a_case_that_fails_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "CPU_CASES", (("no-such-model", 8),))
    assert memory.main(["--cpu", "--out", str(tmp_path)]) == 2
    (written,) = tmp_path.glob("*.json")
    (row,) = json.loads(written.read_text())["cases"]
    assert row["status"] == "failed"
    assert "KeyError: 'no-such-model'" in row["why"]
    said = capsys.readouterr().out
    assert "0 of 1 cases ran" in said and "KeyError" in said


def test_no_case_is_begun_without_time_left(tmp_path: Path) -> None:
    session = memory.Session(True, tmp_path, deadline=0.0)
    assert session.run("gpt-tiny", 8)["status"] == "not run"


def test_the_largest_models_have_8_billion_parameters_and_both_world_sizes() -> None:
    assert memory.GPU_CASES[0] == ("gpt-0.1b", 8)
    assert memory.GPU_CASES[-2:] == (("llama-8b", 8), ("llama-8b", 64))
    with torch.device("meta"):
        sizes = {name: _size(recipe.model()) for name, recipe in case.ON_GPU.items()}
    assert sizes["gpt-0.1b"] == 124_439_808  # GPT-2
    assert sizes["llama-1b"] == 1_235_814_400  # as published for Llama 3.2 and 3
    assert sizes["llama-8b"] == 8_030_261_248
    assert {world for _, world in memory.GPU_CASES} == {8, 64}


def _size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# -- what only a GPU runs -------------------------------------------------------------------------


def event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0}


def test_the_highest_point_of_a_trace() -> None:
    trace = [
        event("segment_alloc", 0, 1 << 21),
        event("alloc", 0, 100),
        event("alloc", 512, 50),
        event("free_requested", 512, 50),
        event("free_completed", 512, 50),
        event("alloc", 512, 70),  # 170, at an address that was used before
        event("free_completed", 0, 100),
        event("alloc", 0, 90),  # 160
        event("free_completed", 4096, 8),  # from before the trace
    ]
    assert case.highest(trace) == (170, {100: 1, 70: 1})


def test_a_gpu_s_figures_are_held_against_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.cuda's counters at fixed values, and the rank on the CPU."""
    seen = {"requested": 66 << 20, "allocated": 68 << 20, "reserved": 65 << 20}
    stats = {"requested_bytes.all.peak": seen["requested"], "num_alloc_retries": 0}
    trace = [event("alloc", 0, 333)]
    calls: list[str] = []
    stand_ins = {
        "set_device": None,
        "mem_get_info": (100 << 30, 100 << 30),
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 37_888,
        "memory_reserved": 2 << 20,
        "reset_peak_memory_stats": None,
        "memory_stats": stats,
        "max_memory_allocated": seen["allocated"],
        "max_memory_reserved": seen["reserved"],
        "memory._record_memory_history": None,
        "memory._snapshot": {"device_traces": [trace]},
    }
    for name, value in stand_ins.items():
        answer = _answer(calls, name, value)
        monkeypatch.setattr(f"torch.cuda.{name}", answer)
    recipe = ON_CPU["gpt-tiny"]
    plan = case.planned(recipe, 8, device="cuda")
    replay = plan.memory.device_memory()
    found = case.on_gpu(recipe, 8, plan, replay, torch.device("cpu"))
    assert found["status"] == "ok"
    assert calls.count("reset_peak_memory_stats") == calls.count("max_memory_reserved") == 12
    assert found["start"]["static"] == found["start"]["held"]
    for row, phase in zip(found["phases"], replay.phases, strict=True):
        assert (row["step"], row["phase"]) == (phase.step, phase.phase)
        assert row["measured"] == seen
        assert row["error"]["allocated"] == round(phase.allocated / (68 << 20) - 1, 6)
    # The first forward has one cuBLAS workspace of 32 MiB, all later phases have two.
    assert found["within"] == {"allocated": False, "reserved": False}
    assert memory.missed(found)
    # What a CPU computes is not what is planned for CUDA.
    assert not found["capture"]["equal"] and not found["capture"]["bytes_equal"]
    planned = [line for line in found["capture"]["differences"] if line.startswith("planned")]
    assert any("_scaled_dot_product_efficient_attention" in line for line in planned)
    assert found["blocks"]["traced_peak"] == 333
    assert {"bytes": 333, "blocks": -1} not in found["blocks"]["static_minus_traced"][:1]
    text = memory.page(
        {"gpu": "stand-in", "date": "today"}, [{"model": "m", "world_size": 8, **found,
        **case.replayed(replay), "parameters": 1, "checkpoint": None, "attention": "default"}], "-"
    )  # fmt: skip
    assert "allocated, planned" in text and "Blocks at the peak" in text


def _answer(calls: list[str], name: str, value: Any) -> Any:
    def answer(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return value

    return answer


def test_what_does_not_fit_is_said_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    replay: Any = SimpleNamespace(reserved=1001)
    found = case.on_gpu(ON_CPU["gpt-tiny"], 8, None, replay, torch.device("cpu"))
    assert found["status"] == "does not fit"
    assert found["why"] == "1001 bytes would be reserved, 1000 are free"
