"""The demo: a small one from end to end, and how it fails."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo import claims
from examples.demo.__main__ import arguments
from examples.demo.corpus import read_corpus
from examples.demo.main import RanksFailedError, conclude, train_on_ranks
from examples.demo.recipe import Settings
from fxshard.config.checked import Config
from fxshard.errors import ConfigError
from fxshard.pipeline import default_passes

SMALL = "--steps 4 --compared 2 --layers 2 --hidden 32 --seq 32 --batch 2 --lr 1e-2 --target 7.5"
KEYS = """world_size parameters static_peak_bytes measured_peak_bytes max_abs_difference_bytes
    val_bits_per_byte_first val_bits_per_byte_last fsdp2_max_abs_difference all_gathers_per_step
    reduce_scatters_per_step torch_version"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """Where the small demo left its results, what it printed, and its summary."""
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--out", str(out), *SMALL.split()],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout, json.loads((out / "summary.json").read_text())


def test_summary(demo: tuple[Path, str, dict[str, Any]]) -> None:
    _, _, summary = demo
    assert set(KEYS.split()) <= set(summary)
    assert summary["world_size"] == 2
    assert summary["parameters"] == 2 * 256 * 32 + 32 + 2 * (3 * 32**2 + 3 * 32 * 96 + 2 * 32)
    assert summary["static_peak_bytes"] == summary["measured_peak_bytes"] > 0
    assert summary["max_abs_difference_bytes"] == 0
    assert summary["fsdp2_max_abs_difference"] == 0.0
    assert summary["all_gathers_per_step"] == 2 * 3  # root and two layers, forward and backward
    assert summary["reduce_scatters_per_step"] == 3
    assert summary["val_bits_per_byte_last"] < summary["val_bits_per_byte_first"]
    assert summary["torch_version"] == torch.__version__


def test_what_it_prints(demo: tuple[Path, str, dict[str, Any]]) -> None:
    _, said, summary = demo
    assert "LlamaDecoderLayer" in said and "unshard" in said
    assert f"({summary['static_peak_bytes']:,} bytes) in " in said  # the sentence on the peak
    assert "largest difference 0 bytes" in said
    assert "one plain process" in said
    assert "NO " not in said and said.count("\nyes ") == len(claims.CLAIMS)


def test_what_it_leaves(demo: tuple[Path, str, dict[str, Any]]) -> None:
    out, _, _ = demo
    before, passes = sorted((out / "passes").glob("*")), default_passes(Config())
    (at,) = [i for i, step in enumerate(passes) if step.name == "annotate-streams"]
    assert len(before) == 2 * len(passes)
    after = out / "passes" / f"{at:02}_annotate-streams.after.txt"
    assert after.read_text().startswith("program ")
    assert "unshard" in (out / "schedule.txt").read_text()
    assert "model.layers.1.mlp.up_proj" in (out / "memory.txt").read_text()
    assert "After zero_grad" in (out / "validation.txt").read_text()
    assert list((out / "checkpoint").glob("*.distcp"))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("max_abs_difference_bytes", 8, "differ by 8 bytes"),
        ("measured_peak_bytes", 1, "and 1 bytes"),
        ("fsdp2_max_abs_difference", 1e-9, "FSDP2's by 1e-09"),
        ("fsdp2_max_abs_difference", float("nan"), "FSDP2's by nan"),
        ("eager_max_relative_difference", 0.1, "one plain process by 1.0e-01"),
        ("val_bits_per_byte_last", 9.0, "to 9.000 bits per byte"),
        ("val_bits_per_byte_reloaded", 1.0, "1.0000000 against"),
        ("all_gathers_per_step", 5, "5 all-gathers"),
        ("collectives_per_step", 10, "received 10 collectives"),
        ("ranks_certificate", "", "same certificate"),
    ],
)
def test_a_claim_that_does_not_hold(
    demo: tuple[Path, str, dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    key: str,
    value: Any,
    sentence: str,
) -> None:
    out, _, summary = demo
    assert conclude(summary, out) == 0
    wrong = copy.deepcopy(summary) | {key: value}
    capsys.readouterr()
    assert conclude(wrong, out) == 1
    said = capsys.readouterr()
    assert sentence in said.err and "does not hold" in said.err
    assert "\nNO " in said.out


def test_a_rank_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(out=str(tmp_path), ranks=1)  # not saved: the rank does not find it
    with pytest.raises(RanksFailedError, match="torchrun ended with 1"):
        train_on_ranks(settings)
    said = capsys.readouterr().out
    assert "Root Cause" in said and "FileNotFoundError" in said


def test_corpus_is_split_by_file_and_batches_repeat() -> None:
    corpus = read_corpus()
    settings = Settings(seq=64, batch=3, ranks=2)
    assert corpus.validation_files < corpus.train_files / 8
    assert len(corpus.train) > 5 * len(corpus.validation) > 0
    mine, again, other, later = (
        corpus.training_batch(settings, rank, step)["input_ids"]
        for rank, step in ((0, 1), (0, 1), (1, 1), (0, 2))
    )
    assert mine.shape == (3, 64) and mine.equal(again)
    assert not mine.equal(other) and not mine.equal(later)
    batches = corpus.validation_batches(settings)
    assert len(batches) == 8 and all(b["input_ids"].shape == (3, 64) for b in batches)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--hidden 30", "multiple of 16"),
        ("--lr nan", "lr=nan"),
        ("--lr -1", "lr=-1.0"),
        ("--target nan", "target=nan"),
        ("--seed -1", "seed=-1"),
    ],
)
def test_what_it_is_told_is_checked(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments(given.split())
