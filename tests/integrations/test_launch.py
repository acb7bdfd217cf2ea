"""Scripts that `accelerate launch` and torchrun start, with the config of the documentation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from-trainer.md"

SCRIPT = """
import json, sys
import torch
import fxshard
import fxshard.integrations.accelerate
from tests.integrations.trainer_cases import trainer

fxshard.integrations.accelerate.enable()
made = trainer("llama", sys.argv[1], **json.loads(sys.argv[2]))
made.train()
assert isinstance(made.model, fxshard.FxshardModule) and made.args.world_size == 2
made.save_model()
if made.args.process_index == 0:
    log = [each["loss"] for each in made.state.log_history if "loss" in each]
    print("LOG", json.dumps([log, made.accelerator.mixed_precision]))
"""


def run(command: list[str], folder: Path, options: dict[str, object]) -> list[object]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *command, str(script), str(folder / "out"), json.dumps(options)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("LOG ")]
    found: list[object] = json.loads(line.removeprefix("LOG "))
    return found


@pytest.mark.slow
def test_scripts_of_this_page(tmp_path: Path) -> None:
    """FSDP2 is turned on by the config of `accelerate launch`, or by TrainingArguments alone."""
    (config,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "fsdp2.yaml").write_text(config)
    launch = ["accelerate.commands.launch", "--config_file", "fsdp2.yaml"]
    launched = run(launch, tmp_path, {"fsdp": None, "fsdp_config": None})
    assert launched[1] == "bf16"
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2"]
    assert run(torchrun, tmp_path, {"bf16": True}) == launched
