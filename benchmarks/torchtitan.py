"""torchtitan's own trainer in a dry run: what a rank of Llama 3 8B takes on 8 H100s.

    git clone https://github.com/pytorch/torchtitan    # and what its requirements.txt names
    python -m benchmarks.torchtitan PATH_OF_THE_CLONE [options of torchtitan.train]

The tokenizer and the text are those of torchtitan's tests: nothing is downloaded. Without a GPU,
about half a minute.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from fxshard.cli.main import main as fxshard

MODEL = ("--module", "llama3", "--config", "llama3_8b")
# CUDA graphs are not followed; torch 2.13 has not all that torchtitan's default backend asks for.
SETTINGS = ("--training.disable_cuda_graphs", "--parallelism.spmd_backend", "partial_dtensor")
ON_H100 = ("--world-size", "8", "--device", "h100", "--memory-units", "GiB", "--depth", "1")


def use_files_of_tests(registry: Any) -> None:
    """Let the configuration of Llama 3 8B name the files that torchtitan's tests have."""
    plain, small = registry.llama3_8b, registry.llama3_debugmodel()

    def llama3_8b() -> Any:
        made = plain()
        made.hf_assets_path = small.hf_assets_path
        made.dataloader, made.validator = small.dataloader, small.validator
        made.profiler.enable_profiling = made.metrics.enable_tensorboard = False
        return made

    registry.llama3_8b = llama3_8b


def main(checkout: str, *options: str) -> int:
    """Print what ``fxshard dryrun -m torchtitan.train`` prints."""
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    if not hasattr(dist, "set_timeout"):  # newer than 2.13, and nothing that memory depends on
        dist.set_timeout = lambda *args: None  # type: ignore[attr-defined]
    use_files_of_tests(importlib.import_module("torchtitan.models.llama3.config_registry"))
    script = ("dryrun", "-m", "torchtitan.train", *ON_H100, "--", *MODEL, *SETTINGS, *options)
    print(f"torch {torch.__version__}", "fxshard", *script)
    return fxshard(list(script))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
