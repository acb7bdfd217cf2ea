"""examples/: each is run as a user runs it, and what it says is checked."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from fxshard.cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
slow = pytest.mark.slow


def run(directory: Path, name: str, *args: Any, ranks: int = 2) -> str:
    """What the example prints, run in `directory`; on one rank without torchrun."""
    launcher = (*TORCHRUN, str(ranks)) if ranks > 1 else ()
    settings = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",  # where a rank was that aborts
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *map(str, args)],
        cwd=directory,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def imported(name: str) -> ModuleType:
    """The example as a module; its `main` does not run."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures(pattern: str, said: str) -> list[float]:
    return [float(figure.replace(",", "")) for figure in re.findall(pattern, said)]


def losses(said: str) -> list[float]:
    return figures(r"step +\d+  loss (\S+)", said)


def of_ranks(said: str) -> dict[str, str]:
    """What each rank said of itself."""
    return dict(re.findall(r"^rank (\d): (.*)$", said, re.MULTILINE))


def assert_ranks_agree(said: str, ranks: int = 2) -> None:
    found = of_ranks(said)
    assert set(found) == {str(rank) for rank in range(ranks)}
    assert len(set(found.values())) == 1, found


def test_each_example_is_listed_and_says_how_to_run_it() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.glob("*.py"):
        assert f"[{file.name}]({file.name})" in listed
        docstring = imported(file.stem).__doc__
        assert docstring is not None and f"examples/{file.name}" in docstring


# -- a language model ------------------------------------------------------------------------------


@slow
def test_language_model(tmp_path: Path) -> None:
    said = run(tmp_path, "finetune_llm.py", "--out", "out")
    (before,) = figures(r"before step 1: (\S+)", said)
    assert_ranks_agree(said)
    (after,) = set(figures(r"rank \d: validation loss (\S+)", said))
    assert before == pytest.approx(math.log(256), rel=0.1) and after < 3  # of text it never saw
    assert losses(said)[-1] < losses(said)[0]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    example = imported("finetune_llm")
    assert example.evaluate(plain, example.corpus()[1]) == pytest.approx(after, rel=1e-6)
    assert figures(r"plain transformers: validation loss (\S+)", said) == [
        pytest.approx(after, rel=1e-6)
    ]


@slow
def test_language_model_resumes_where_it_was(tmp_path: Path) -> None:
    """Weights, optimizer, learning rate and data: every later line is the same, to the digit."""
    options = ("--steps", 8, "--log-every", 1, "--save-every", 3)
    whole = run(tmp_path, "finetune_llm.py", *options, "--out", "whole")
    first = run(tmp_path, "finetune_llm.py", *options, "--out", "parts", "--stop-after", 5)
    rest = run(tmp_path, "finetune_llm.py", *options, "--out", "parts", "--resume")
    steps = [line for line in whole.splitlines() if line.startswith("step ")]
    assert [line for line in first.splitlines() if line.startswith("step ")] == steps[:5]
    assert "resumed after step 5\n" in rest
    assert [line for line in rest.splitlines() if line.startswith("step ")] == steps[5:]
    assert of_ranks(rest) == of_ranks(whole) != of_ranks(first)


@slow
def test_language_model_in_one_process(tmp_path: Path) -> None:
    said = run(tmp_path, "finetune_llm.py", "--steps", 12, "--log-every", 4, ranks=1)
    assert losses(said)[-1] < losses(said)[0]
    (ours,) = figures(r"rank 0: validation loss (\S+)", said)
    assert figures(r"plain transformers: validation loss (\S+)", said) == [
        pytest.approx(ours, rel=1e-6)
    ]


# -- torch's own FSDP2 -----------------------------------------------------------------------------

SMALL = ("--layers", "2", "--width", "64", "--batch", "2", "--seq", "64", "--steps", "3")


def test_fsdp2_script_dry(capsys: pytest.CaptureFixture[str]) -> None:
    script = str(EXAMPLES / "train_fsdp2.py")
    peaks = []
    for more in ((), ("--checkpoint",)):
        assert (
            main(["dryrun", script, "--steps", "2", "--budget", "79GiB", "--", *SMALL, *more]) == 0
        )
        said = capsys.readouterr().out
        assert "step 1: loss unknown" in said and "fits 79.00 GiB" in said
        peaks += figures(r"Peak .* \((\S+) bytes\)", said)
    assert peaks[1] < peaks[0]


@slow
def test_fsdp2_script_for_real(tmp_path: Path) -> None:
    said = run(tmp_path, "train_fsdp2.py", *SMALL)
    found = figures(r"step \d: loss (\S+),", said)
    assert len(found) == 3 and found[0] == pytest.approx(math.log(256), rel=0.1)


# -- vision ----------------------------------------------------------------------------------------


def check_vision(directory: Path, *args: Any, at_least: float) -> None:
    said = run(directory, "train_vision.py", "--out", "model.pt", *args)
    assert losses(said)[0] == pytest.approx(1.0986, rel=0.1)  # ln 3: it knows nothing
    assert losses(said)[-1] < 0.7 * losses(said)[0]
    assert_ranks_agree(said)
    example = imported("train_vision")
    plain, state = example.ResNet(), torch.load(directory / "model.pt")
    assert all(t.dtype is torch.float32 for t in state.values() if t.is_floating_point())
    plain.load_state_dict(state)
    right = example.accuracy(plain)
    assert right >= at_least
    assert f"plain PyTorch: {right:.1%} of new images" in said


@slow
def test_vision(tmp_path: Path) -> None:
    check_vision(tmp_path, "--steps", 30, "--log-every", 10, at_least=0.6)


@slow
def test_vision_in_full(tmp_path: Path) -> None:
    check_vision(tmp_path, at_least=0.9)
    said = run(tmp_path, "train_vision.py", "--steps", 30, "--log-every", 10, ranks=1)
    assert losses(said)[-1] < 0.7 * losses(said)[0]
    assert_ranks_agree(said, 1)


# -- LoRA ------------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("ranks", [2, 1])
def test_lora(tmp_path: Path, ranks: int) -> None:
    said = run(tmp_path, "finetune_lora.py", "--steps", 20, "--out", "lora.pt", ranks=ranks)
    assert losses(said)[0] > 5 and losses(said)[-1] < 4.5
    assert_ranks_agree(said, ranks)
    example = imported("finetune_lora")
    model = example.build()
    shards = sum(-(-p.shape[0] // 2) * p[0].numel() for p in model.parameters())
    adapters = torch.load(tmp_path / "lora.pt")
    trained = sum(p.shape[0] // 2 * p.shape[1] for p in adapters.values())  # all rows are even
    assert len(adapters) == 4 * 7 * 2  # layers, linear layers of each, down and up
    assert figures(r"gradients +(\S+) B", said) == [4 * shards, 4 * trained]
    states = figures(r"optimizer states +(\S+) B", said)
    tensors = [len(list(model.parameters())), len(adapters)]
    expected = zip((shards, trained), tensors, strict=True)
    assert states == [2 * 4 * n + 4 * steps for n, steps in expected]  # AdamW: two, and a count
    torch.manual_seed(0)
    plain = example.merged(example.build(), adapters)
    loss = plain(**example.sample(example.corpus(), seed=0)).loss.item()
    (ours,) = {float(text.split()[1]) for text in of_ranks(said).values()}
    assert loss == pytest.approx(ours, rel=1e-6)
    assert figures(r"adapters added in: loss (\S+)", said) == [pytest.approx(loss, rel=1e-6)]


# -- a plan ----------------------------------------------------------------------------------------


def parameters(layers: int) -> int:
    """Of the Llama shape: embedding and head, per layer q, o, k, v, three of the MLP, two norms."""
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    return 2 * 128_256 * 4096 + 4096 + layers * layer


@slow
def test_plan(tmp_path: Path) -> None:
    shape = ("--layers", 2, "--sequence", 1024, "--ranks", 8, "--budget", "16GiB")
    said = run(tmp_path, "plan_large_model.py", *shape, ranks=1)
    assert said.startswith(f"{parameters(2) / 1e9:.2f} billion parameters, 8 ranks, 1024 tokens")
    peaks = figures(r"Yes: (\S+) GiB at the peak", said)
    shards = 4 * 4 * parameters(2) / 8 / 2**30  # fp32: parameters, gradients, two states
    assert len(peaks) == 2 and 16 >= peaks[0] >= peaks[1] > shards
    assert re.search(r"batch of (4|8): needs .* of 16\.00 GiB; (8|12) (needs|does not fit)", said)
    assert re.search(r"ms a step on h100", said)
    said = run(tmp_path, "plan_large_model.py", *shape[:-1], "2GiB", ranks=1)
    assert re.findall(r"^(Yes|No)\b", said, re.MULTILINE) == ["No", "No", "No"]
    assert "No: not even a batch of 4 fits" in said


@slow
def test_plan_in_full(tmp_path: Path) -> None:
    said = run(tmp_path, "plan_large_model.py", ranks=1)
    assert f"{parameters(32) / 1e9:.2f} billion parameters, 64 ranks" in said
    assert said.count("Yes: ") == 2 and "nll_loss_backward" in said


# -- a pass ----------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_custom_pass(tmp_path: Path, ranks: int) -> None:
    check_custom_pass(run(tmp_path, "custom_pass.py", ranks=ranks), ranks)


def test_custom_pass_here(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported what takes most of its time."""
    imported("custom_pass").main()
    check_custom_pass(capsys.readouterr().out, ranks=1)


def check_custom_pass(said: str, ranks: int) -> None:
    without, with_ = figures(r"with(?:out)? +the pass: (\S+) B", said)
    assert without - with_ == 4 * 256 * 256 * 4  # layers x batch x width x bytes of fp32
    assert len(re.findall(r"^\+ +%gelu(_\d)?_recomputed :", said, re.MULTILINE)) == 4
    assert_ranks_agree(said, ranks)
    assert of_ranks(said)["0"] == "loss and 24 gradients are the same bits: True"
    if ranks == 1:
        assert "largest difference 0 bytes" in said
        assert "all 25 tensors are bitwise equal to eager PyTorch's" in said


@pytest.mark.slow
def test_torch_compile(tmp_path: Path) -> None:
    said = run(tmp_path, "torch_compile.py")
    assert losses(said)[-1] < 0.5 * losses(said)[0]
    apart = figures(r"relative: (\S+)", said)
    assert len(apart) == 2 and max(apart) <= 1e-5
    assert len(re.findall(r"^graph \d: forward and backward", said, re.M)) == 2
    assert "sum: peak" in said


# -- other parallelisms ----------------------------------------------------------------------------


@slow
def test_pipeline(tmp_path: Path) -> None:
    said = run(tmp_path, "train_pipeline.py", ranks=4)
    planned = re.findall(r"stage (\d), (\d) in flight: +([\d,]+) B", said)
    peaks = {(int(s), int(k)): int(n.replace(",", "")) for s, k, n in planned}
    assert peaks[0, 2] < peaks[0, 4] and peaks[1, 1] < peaks[1, 4]
    first, *_, last = losses(said)
    assert first > 5 and last < 3


@slow
def test_train_context_parallel(tmp_path: Path) -> None:
    said = run(tmp_path, "train_context_parallel.py", ranks=4)
    found = losses(said)
    assert len(found) == 4 and found[-1] < found[0] / 3
    assert "all-gather 1 tensor   blocks.0  cp" in said and "(dp_cp=4)" in said


@slow
def test_train_tensor_parallel(tmp_path: Path) -> None:
    said = run(tmp_path, "train_tensor_parallel.py", ranks=4)
    found = losses(said)
    assert len(found) == 4 and found[-1] < found[0] / 3
    assert "this rank has (64, 64)" in said and "(tp: 1 all-gather)" in said


@slow
def test_validate_tensor_parallel(tmp_path: Path) -> None:
    said = run(tmp_path, "validate_tensor_parallel.py", ranks=1)
    assert said.count("largest difference 0 bytes") == 2 and ", 0 wrong." in said
    assert re.search(r"^wrong +gradient +llama\S+down_proj", said, re.MULTILINE)
