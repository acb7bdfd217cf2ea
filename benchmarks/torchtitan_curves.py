"""torchtitan's own trainer with fxshard and with torch's FSDP2: are the curves the same?

    git clone --branch v0.2.2 https://github.com/pytorch/torchtitan
    pip install torchdata datasets tokenizers safetensors tensorboard tyro tabulate einops pillow
    python -m benchmarks.torchtitan_curves PATH_OF_THE_CLONE

Runs ``torchtitan.train.Trainer`` on two gloo ranks, four beside tensor parallelism: its
configuration, its models (the debug flavors of Llama 3 and Qwen 3, in bf16), its tokenizer, its
loader of text, its optimizer, metrics and checkpoints. From a seed checkpoint that torchtitan's
trainer made in one process (on a CPU, FSDP2 fills a model from meta with other numbers than one
process would), it trains `STEPS` steps of two micro-batches and saves after half of them; from
there the other of the two goes on. All of it is torchtitan's code as it was cloned, with five
exceptions, for a machine that has no GPU:

- its device is the CPU: ``torch.cpu`` with what it lacks of ``torch.cuda`` (`Cpu`);
- torch's FSDP2 is told to sum gradients (``set_force_sum_reduction_for_comms``): what torchtitan
  makes it do else, gloo cannot; fxshard is told nothing;
- the debug flavor of Qwen 3 does not tie its embedding: FSDP2 of torch 2.13 and fxshard refuse
  what torchtitan does then, which is to shard a shared parameter in two calls;
- Triton, which torchtitan imports for kernels, may be missing: of those that these models call,
  operators of torch do the same (`fxshard.integrations.torchtitan.experts`); `torch.histc` of
  integers is that of the same numbers as floats; the debug flavor with experts is cut to two layers
  of eight experts, which are spread over the two ranks;
- the text is that of this repository's docs, not a part of C4.

Writes benchmarks/results/torchtitan_curves.json. Ranks have batches of their own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.figures import RESULTS, ROOT
from benchmarks.ranks import on_ranks
from fxshard._torch import triton_stub

STEPS = 8
HALF = STEPS // 2
CASES = (
    *("llama3, none", "llama3, selective", "llama3, full", "qwen3, selective"),
    *("qwen3 experts, none", "qwen3 experts, full"),  # spread over the ranks
    "llama3 tensor, none",  # 2 x 2 ranks
)
# Beside data parallelism, of degree 2: the option, and how many ranks there are.
BESIDE = {"experts": ("expert", 2), "tensor": ("tensor", 4)}
OURS = "fxshard.integrations.torchtitan"
NAMES = {"torchtitan": "{}", "fxshard": "fxshard.{}"}  # of a model, as ``--model.name`` says it
Curve = list[tuple[float, float]]  # the mean loss of all ranks and the norm of gradients, by step


class Cpu(ModuleType):
    """``torch.cpu`` with the functions of ``torch.cuda`` that torchtitan calls and it lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any) -> str:
        return platform.machine()

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def imported() -> Any:
    """``torchtitan.train``, on the CPU."""
    counted = torch.histc

    def histc(values: torch.Tensor, **bins: Any) -> torch.Tensor:
        return counted(values.float(), **bins).to(values.dtype)

    torch.histc = histc  # on CPUs it counts no integers
    with (
        mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
        mock.patch("torch._utils._get_device_module", lambda device: Cpu("cpu")),
        triton_stub.importable(),
    ):
        return importlib.import_module("torchtitan.train")


def curve(clone: str, folder: str, by: str, model: str, options: list[str]) -> Curve:
    """What torchtitan's trainer logs on this rank."""
    sys.path.insert(0, clone)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    train = imported()
    model, _, beside = model.partition(" ")
    experts = beside == "experts"
    flavor = "debugmodel_moe" if experts else "debugmodel"
    said = {
        "job.dump_folder": folder,
        "experimental.custom_import": OURS,
        "model.name": NAMES[by].format(model),
        "model.flavor": flavor,
        "model.hf_assets_path": f"{clone}/tests/assets/tokenizer",
        "training.dataset": "c4_test",
        "training.dataset_path": f"{folder}/text",
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.global_batch_size": 8,
        "training.steps": STEPS,
        "lr_scheduler.warmup_steps": 2,
        "checkpoint.interval": HALF,
        "checkpoint.keep_latest_k": 0,
        "metrics.log_freq": 1,
        "debug.seed": 0,
    }
    if beside and dist.get_world_size() > 1:
        said[f"parallelism.{BESIDE[beside][0]}_parallel_degree"] = 2
    arguments = [text for name, value in said.items() for text in (f"--{name}", str(value))]
    spec = importlib.import_module(f"torchtitan.models.{model}").get_train_spec()
    if hasattr(spec.model_args[flavor], "enable_weight_tying"):
        spec.model_args[flavor].enable_weight_tying = False
    if experts:
        importlib.import_module(f"{OURS}.experts").let_experts_be_traced()  # in a process alone too
        small = replace(spec.model_args[flavor].moe_args, num_experts=8, top_k=2)
        spec.model_args[flavor].moe_args, spec.model_args[flavor].n_layers = small, 2
    config = train.ConfigManager().parse_args([*arguments, "--checkpoint.enable", *options])
    trainer = train.Trainer(config)
    if config.checkpoint.create_seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
        trainer.close()
        return []
    if by == "torchtitan":
        for name, module in trainer.model_parts[0].named_modules():
            alone = "experts" in name and said.get("parallelism.expert_parallel_degree")
            if isinstance(module, FSDPModule) and not alone:  # one rank reduces nothing
                module.set_force_sum_reduction_for_comms(True)
    found: Curve = []

    def log(step: int, mean: float, most: float, norm: float, **others: Any) -> None:
        found.append((float(mean), float(norm)))

    with mock.patch.object(trainer.metrics_processor, "log", log):
        trainer.train()
    trainer.close()
    kind = type(trainer.model_parts[0]).__name__
    assert kind.startswith("Fxshard") == (by == "fxshard"), f"{kind} ran"
    return found


def both(clone: str, folder: Path, model: str, checkpoint: str) -> dict[str, Any]:
    """The curves by torch's FSDP2 and by fxshard; and by each from the other's checkpoint."""
    found: dict[str, Any] = {}

    _, ranks = BESIDE.get(model.partition(" ")[2], ("", 2))

    def run(ranks: int, by: str, saved: str, *options: str) -> Curve:
        how = ["--activation_checkpoint.mode", checkpoint, "--checkpoint.folder", saved]
        how += ["--activation_checkpoint.selective_ac_option", "op"]
        arguments = (clone, str(folder), by, model, [*how, *options])
        curves = on_ranks(ranks, curve, *arguments, timeout=3000)
        assert all(each == curves[0] for each in curves), "what is logged is of all ranks"
        return curves[0]

    run(1, "torchtitan", "seed", "--checkpoint.create_seed_checkpoint")
    for by in NAMES:
        shutil.copytree(folder / "seed", folder / by)
        found[by] = run(ranks, by, by)
    for by, other in (("torchtitan", "fxshard"), ("fxshard", "torchtitan")):
        shutil.rmtree(folder / other / f"step-{STEPS}")  # or it would be there already
        options = ("--checkpoint.load_step", str(HALF))
        found[f"{by}, from {other}'s step {HALF}"] = run(ranks, by, other, *options)
    ends = [each[-(STEPS - HALF) :] for each in found.values()]
    equal = found["torchtitan"] == found["fxshard"] and all(end == ends[0] for end in ends)
    return {**found, "equal": equal}


def write_text(folder: Path) -> None:
    """This repository's docs, a line of JSON each, where torchtitan's loader finds them."""
    folder.mkdir()
    pages = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    lines = [json.dumps({"text": page}) for page in pages]
    folder.joinpath("data.json").write_text("\n".join(lines) + "\n")


def commit(clone: str) -> str:
    """Of a clone; empty if it is none."""
    command = ["git", "-C", clone, "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone")
    parser.add_argument("--cases", nargs="*", default=CASES, help="model, activation checkpointing")
    parser.add_argument("--commit", help="of what is no git clone")
    asked = parser.parse_args()
    clone = str(Path(asked.clone).absolute())
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torchtitan": asked.commit or commit(clone),
        **{name: version(name) for name in ("datasets", "tokenizers", "torchdata")},
        "triton": "a stand-in" if triton_stub.is_missing() else version("triton"),
        "steps": STEPS,
    }
    for case in asked.cases:
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder, "text"))
            with mock.patch.dict(os.environ, HF_HOME=folder, HF_HUB_OFFLINE="1"):
                about[case] = both(clone, Path(folder), *case.split(", "))
        equal = "equal" if about[case]["equal"] else "DIFFERENT"
        print(f"{case}: {equal} {about[case]['fxshard']}", flush=True)
        RESULTS.joinpath("torchtitan_curves.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
