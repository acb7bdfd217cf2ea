"""benchmarks/gpu/: run.sh's CPU mode to the end, what only a GPU runs on stand-ins for it, and the
emulated network by its own accounts."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.figures import RESULTS
from benchmarks.gpu import case, emulated_network, memory, numerics, predicted, streams
from benchmarks.gpu.emulated import EmulatedGroup, Link, emulated_world
from benchmarks.gpu.models import ON_CPU, ON_GPU
from fxshard._torch import process_groups

ROOT = Path(__file__).parents[2]
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


def run_here(command: list[str], **_: Any) -> Any:
    """In the place of `subprocess.run`: a case in this process, which has imported all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command[2:])
        case.main()
    return SimpleNamespace(returncode=0, stdout="")


def test_cpu_mode_runs_to_the_end_and_is_exact_to_the_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_thread: None,
) -> None:
    monkeypatch.setattr(subprocess, "run", run_here)
    assert memory.main(["--cpu", "--jobs", "1", "--out", str(tmp_path)]) == 0
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
    assert "to the byte: 2; captures equal: 3" in capsys.readouterr().out


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


# -- the emulated network --------------------------------------------------------------------------


def test_seconds_of_a_ring_by_hand() -> None:
    link = Link(alpha=0.5, beta=100.0)
    # 3 steps of half a second and 200 bytes at 100 bytes per second.
    assert link.seconds("all_gather", 800, 4) == 3 * (0.5 + 2.0)
    assert link.seconds("reduce_scatter", 800, 4) == 7.5
    assert link.seconds("all_reduce", 800, 4) == 15.0
    assert link.seconds("all_gather", 800, 1) == 0.0
    assert emulated_network.FREE.seconds("all_gather", 1 << 40, 64) == 0.0


def collectives() -> list[Tensor]:
    """What one of each collective leaves behind on rank 0 of 4."""
    given = torch.arange(8.0).view(4, 2)
    gathered, other = torch.empty(16, 2), torch.empty(4, 3)
    scattered, second = torch.empty(1, 2), torch.empty(2)
    reduced, told = given.clone(), given.clone()
    group: Any = dist.group.WORLD
    dist.all_gather_into_tensor(gathered, given)
    group.allgather_into_tensor_coalesced([other], [torch.ones(1, 3)]).wait()
    dist.reduce_scatter_tensor(scattered, given, op=dist.ReduceOp.AVG)
    options = dist.ReduceScatterOptions()
    group.reduce_scatter_tensor_coalesced([second], [given.view(-1)], options).wait()
    dist.all_reduce(reduced)
    dist.broadcast(told, 0)
    each = [torch.empty(4, 2) for _ in range(4)]
    dist.all_gather(each, given)
    dist.barrier()
    return [gathered, other, scattered, second, reduced, told, *each]


def test_emulated_collectives_give_what_the_fake_group_gives() -> None:
    """As if the other ranks held what this one holds; sums are those of one rank."""
    given = torch.arange(8.0).view(4, 2)
    expected = [given.repeat(4, 1), torch.ones(4, 3), given[:1], given[0], given, given]
    expected += [given] * 4
    with process_groups.fake_process_group(0, 4):
        fake = collectives()
    for i in (0, 1, *range(4, 10)):  # torch 2.11 leaves the results of reduce-scatters as they are
        assert torch.equal(fake[i], expected[i])
    with emulated_world(4, Link(1e-6, 1e9)) as groups:
        assert dist.get_backend() == "fake"  # so that nobody asks ranks that are not there
        found = collectives()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    (group,) = groups
    kinds = [each.kind for each in group.sent]
    assert kinds == [
        "all_gather", "all_gather", "reduce_scatter", "reduce_scatter", "all_reduce", "broadcast",
        "all_gather", "broadcast",
    ]  # fmt: skip
    assert [each.bytes for each in group.sent] == [128, 48, 32, 32, 32, 32, 128, 0]
    with process_groups.fake_process_group(0, 2):  # torch's own is back
        assert not isinstance(dist.group.WORLD, EmulatedGroup)


def test_the_emulation_never_gives_a_result_early_and_its_link_does_one_thing_at_a_time() -> None:
    with emulated_world(4, Link(0.002, 1e9)) as groups:
        group: Any = dist.group.WORLD
        works = [
            group.allgather_into_tensor_coalesced([torch.empty(4, 2)], [torch.ones(1, 2)])
            for _ in range(3)
        ]
        for work in works:
            work.wait()
        sent = groups[0].sent
    for each in sent:
        assert each.modelled == Link(0.002, 1e9).seconds("all_gather", 32, 4) > 0.006
        assert each.done - each.began >= each.modelled
    for one, following in itertools.pairwise(sent):
        assert following.began >= one.began + one.modelled


@pytest.mark.parametrize("checkpoint", [None, pytest.param("full", marks=pytest.mark.slow)])
def test_both_sides_send_the_same_bytes_on_the_emulated_network(checkpoint: str | None) -> None:
    case = ("llama-tiny", 8, checkpoint)
    found = {side: emulated_network.measure(case, side, "cpu", 2) for side in ("fsdp2", "fxshard")}
    with torch.device("meta"):
        model = ON_CPU["llama-tiny"].model()
    everything = 4 * _size(model)
    root = everything - sum(4 * _size(layer) for layer in model.get_submodule("layers").children())
    assert len(list(model.get_submodule("layers").children())) == 3
    for each in found.values():
        assert each["parameters"] == _size(model)
        assert len(each["seconds"]) == len(each["seconds_on_a_free_link"]) == 2
        assert each["link_seconds"] > 0
    # FSDP2 gathers layers twice and the root, which it keeps, once; all is reduced once.
    assert found["fsdp2"]["collective_bytes"] == 3 * everything - root
    assert found["fsdp2"]["collectives"] == 2 * 3 + 1 + 4
    # In backward fxshard gathers what backward reads: no embedding, no norm's weight but as factor.
    assert 2 * everything < found["fxshard"]["collective_bytes"] <= 3 * everything
    assert found["fxshard"]["collectives"] <= 3 * 4


def test_overlap_of_spans_by_hand() -> None:
    assert streams.union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert streams.overlap([(0, 4), (5, 7)], [(3, 6), (6, 10)]) == 1 + 2
    assert streams.overlap([(0, 4)], [(4, 8)]) == 0
    found = streams.figures({"7": [(0, 4), (2, 6)], "20": [(5, 9)], "24": [(8, 10)]}, "7")
    assert found["busy_ms"] == {"7": 6e-6, "20": 4e-6, "24": 2e-6}
    assert found["others_busy_ms"] == 5e-6 and found["overlapped_ms"] == 1e-6
    assert found["share_overlapped"] == 0.2


def test_what_is_exposed_by_hand() -> None:
    assert streams.alone_of([(0, 4), (6, 9)], [(1, 2), (3, 7)]) == [(0, 1), (2, 3), (7, 9)]
    assert streams.alone_of([(1, 2)], [(0, 4)]) == [] and streams.alone_of([(1, 2)], []) == [(1, 2)]


@pytest.mark.parametrize("case", ["fp32", "nccl"])
def test_numbers_of_an_emulated_rank_are_those_of_eager_pytorch(case: str) -> None:
    row = numerics.ran(case, "cpu")
    assert row["right"] and row["worst"] == 0.0 and row["bitwise"] == row["tensors"] > 20


def test_a_number_that_is_wrong_is_told() -> None:
    right = {"loss 0.0": torch.ones(()), "w": torch.ones(3)} | {
        f"loss {step}.0": torch.ones(()) for step in range(numerics.STEPS)
    }
    assert numerics.difference(right, right)["worst"] == 0.0
    nan = numerics.difference(right | {"w": torch.tensor([1.0, float("nan"), 1.0])}, right)
    assert nan["at"] == "w" and not nan["worst"] <= 1.0
    less = numerics.difference({k: v for k, v in right.items() if k != "w"}, right)
    assert less["worst"] == float("inf")


def test_streams_of_a_gpu_are_told_apart_by_the_profilers_events() -> None:
    class Kernel(SimpleNamespace):
        def device_type(self) -> Any:
            return self.device

        def device_resource_id(self) -> int:
            return int(self.stream)

        def start_ns(self) -> int:
            return int(self.start)

        def end_ns(self) -> int:
            return int(self.end)

        def duration_ns(self) -> int:
            return int(self.end - self.start)

    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        Kernel(device=cuda, stream=7, start=0, end=5),
        Kernel(device=cuda, stream=20, start=3, end=9),
        Kernel(device=cuda, stream=7, start=6, end=6),
        Kernel(device=cpu, stream=1, start=0, end=9),
    ]
    assert streams.by_stream(events) == {7: [(0, 5)], 20: [(3, 9)]}


def test_gathers_overlap_compute_in_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found = streams.measure("llama-tiny", 8, None, "cpu", str(trace))
    assert found["overlapped_ms"] > 0
    assert json.loads(trace.read_text())["traceEvents"]


def measured_on_a_gpu(model: str, world: int) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / "2026-11-27-nvidia-h200.json").read_text())
    rows = [r for r in found["cases"] if (r["model"], r["world_size"]) == (model, world)]
    return list(rows[0]["phases"])


def test_a_plan_is_what_a_gpu_measured() -> None:
    """Requested bytes, in each phase of three steps; torch 2.11 measured them on an H200."""
    plan = case.planned(ON_GPU["llama-1b"], 8, "cuda")
    phases = plan.memory.device_memory(capability=(9, 0)).phases
    measured = measured_on_a_gpu("llama-1b", 8)
    assert [p.requested for p in phases] == [m["measured"]["requested"] for m in measured]
    for phase, each in zip(phases, measured, strict=True):
        assert phase.allocated == pytest.approx(each["measured"]["allocated"], rel=1e-3)
        assert phase.reserved == pytest.approx(each["measured"]["reserved"], rel=1e-3)


@pytest.mark.slow
def test_a_dry_run_of_fsdp2_is_what_a_gpu_measured(tmp_path: Path) -> None:
    out = tmp_path / "predicted.json"
    assert predicted.main(["--models", "llama-1b", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["cases"]
    assert len(rows) == 4 and all(row["difference"] == 0 for row in rows)


@pytest.mark.slow
def test_run_sh_runs_all_scripts_on_a_cpu(tmp_path: Path) -> None:
    done = run(sys.executable, "--cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*-cpu.json"))) == 1
    network = json.loads((tmp_path / "emulated_network_cpu.json").read_text())
    assert network["label"].startswith("emulated") and len(network["cases"]) == 2
    assert all(row["emulated"] for row in network["cases"])
    assert json.loads((tmp_path / "streams_cpu.json").read_text())["overlapped_ms"] > 0
    numbers = json.loads((tmp_path / "numerics_cpu.json").read_text())["cases"]
    assert len(numbers) == len(numerics.CASES) + 1 and all(row["right"] for row in numbers)
