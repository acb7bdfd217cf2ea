"""``fxshard dryrun``: a script of the user's own, as it is, to the end of its first steps."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fxshard
from fxshard.cli.main import main
from fxshard.dryrun.script import run_script
from fxshard.errors import CaptureError, ConfigError
from fxshard.memory.category import Category

FSDP2 = """
import argparse, math, os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 64), nn.Linear(64, 512))
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model)
    model.to_empty(device=device)
    for layer in model:
        layer.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(512, (64, 33))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=2, pin_memory=True, timeout=60)
    done = 0
    while done < args.steps:
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device)
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            if not torch.isfinite(loss):
                raise RuntimeError("loss is not finite")
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            print(f"step {done}: perplexity {math.exp(loss.item()):.3f}, norm {norm.item():.3f}")
            if done == args.steps:
                break
    dist.destroy_process_group()
    print("trained", dist.get_world_size())

if __name__ == "__main__":
    main()
"""

TRAINER = """
import sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2,
)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(256, (64, 32))]
wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=2, max_steps=10, bf16=True, report_to=[],
    gradient_accumulation_steps=2, fsdp=True, fsdp_config=wrapped, logging_steps=1,
    max_grad_norm=1.0,
)
Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=data).train()
"""


def written(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def test_an_fsdp2_script_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(tmp_path, FSDP2)
    before = list(sys.argv), list(sys.path), dict(os.environ)
    assert main(["dryrun", script, "--world-size", "4", "--budget", "79GiB"]) == 0
    assert (list(sys.argv), list(sys.path), dict(os.environ)) == before
    told = capsys.readouterr().out
    assert "step 2: perplexity unknown, norm unknown" in told and "step 3" not in told
    assert "2 steps on rank 0 of 4" in told and "reserved on the device" in told
    assert "Peak Backward" in told and "fits 79.00 GiB" in told
    # the script ends by itself, and its own arguments stand after the dashes
    page = str(tmp_path / "page.html")
    asked = ["--world-size", "4", "--rank", "3", "--steps", "9", "--budget", "1KiB", "--html", page]
    assert main(["dryrun", *asked, script, "--", "--steps", "1"]) == 1
    told, refused = capsys.readouterr()
    assert "trained 4" in told and "1 step on rank 3 of 4" in told and "1.00 KiB given" in refused
    assert "<html" in Path(page).read_text()


def test_the_steps_are_those_that_a_loop_marks_itself(tmp_path: Path) -> None:
    ended = "optimizer.zero_grad()\n            RUN.step()"
    marked = FSDP2.replace("optimizer.zero_grad()", ended)
    with fxshard.dry_run(world_size=4) as run:
        space = {"RUN": run, "__name__": "__main__"}
        os.environ["LOCAL_RANK"], argv = "0", sys.argv
        sys.argv = ["train.py", "--steps", "2"]
        try:
            exec(compile(marked, "train.py", "exec"), space)
        finally:
            del os.environ["LOCAL_RANK"]
            sys.argv = argv
    found = run_script(written(tmp_path, FSDP2), world_size=4).memory
    assert found.peak_bytes == run.memory.peak_bytes
    assert found.first_step_peak_bytes == run.memory.first_step_peak_bytes
    assert found.rows() == run.memory.rows()


def test_a_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 micro-batches a step; parameters and their states of 1 of 4 ranks, counted by hand."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    run = run_script(written(tmp_path, TRAINER), [str(tmp_path)], world_size=4)
    report = run.memory
    assert {p.micro_batch for p in report.phases()} >= {0, 1} and report.optimizer == "AdamW"
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    parameters = 4 * (2 * layer + 2 * 256 * 64 + 64)
    assert report.peak_by_category[Category.SHARDED_PARAM] == parameters // 4
    states = report.peak_by_category[Category.OPT_STATE]
    assert 2 * parameters // 4 <= states < 2 * parameters // 4 + 512  # and the count of steps


class Pair:
    """Two models with an optimizer each, in a dry run that marks its steps."""

    def __init__(self) -> None:
        self.models = [nn.Linear(64, 64, device="cuda") for _ in range(2)]
        self.optimizers = [torch.optim.SGD(m.parameters(), momentum=0.9) for m in self.models]

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.models[number](torch.zeros(4, 64, device="cuda")).sum().backward()
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()


def test_optimizers_that_take_turns_are_one_step() -> None:
    with fxshard.dry_run(world_size=1, steps=2) as run:
        pair = Pair()
        for _ in range(10):
            pair.step(0, 1)
    assert run.steps == 2
    assert {p.micro_batch for p in run.memory.phases() if "forward" in p.phase} == {0, 1}


def test_a_step_that_follows_nothing_is_marked_at_the_end() -> None:
    with fxshard.dry_run(world_size=1, steps=5) as run:
        Pair().step(0, 1)
    assert run.steps == 1


def test_a_loop_may_mark_its_steps_and_be_ended() -> None:
    began = 0
    with fxshard.dry_run(world_size=1, steps=2) as run:
        pair = Pair()
        for _ in range(10):
            began += 1
            pair.step(0, 1)
            run.step()
    assert (run.steps, began) == (2, 3)  # the third ends where its first forward begins
    assert {p.micro_batch for p in run.memory.phases() if "forward" in p.phase} == {0, 1}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("print('nothing')", "without a step of an optimizer"),
        ("import sys; sys.exit(3)", "with exit code 3 without a step"),
    ],
)
def test_a_script_without_a_step(
    tmp_path: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dryrun", written(tmp_path, text)]) == 2
    assert told in capsys.readouterr().err
    assert main(["dryrun", str(tmp_path / "none.py")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["dryrun", "train.py", "--json"]) == 2
    assert "name a file" in capsys.readouterr().err


def test_what_the_script_raises_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_script(written(tmp_path, "1 / 0"), world_size=2)
    assert not torch.distributed.is_initialized() and not torch.cuda.is_available()


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, FSDP2)
    monkeypatch.chdir(tmp_path)
    try:
        assert run_script("train", module=True, world_size=2, steps=1).steps == 1
    finally:
        sys.modules.pop("train", None)


@pytest.mark.parametrize("steps", [0, True, 1.5])
def test_bad_steps(steps: object) -> None:
    with pytest.raises(ConfigError, match="steps"), fxshard.dry_run(world_size=1, steps=steps):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_programs_of_fxshard_are_refused(device: str) -> None:
    earlier = fxshard.compile(nn.Linear(4, 4), world_size=1)
    x = torch.zeros(2, 4)
    assert earlier(x).shape == (2, 4)
    with fxshard.dry_run(world_size=1, device=device):
        for model in (earlier, fxshard.compile(nn.Linear(4, 4), world_size=1)):
            with pytest.raises(CaptureError, match=r"test_script.py:\d+ in .*fxshard.plan"):
                model(torch.zeros(2, 4))
    assert earlier(x).shape == (2, 4)
