"""Goldens of passes are text that ``fxshard opt`` reads, and writes."""

from pathlib import Path

import pytest

from fxshard.cli import main

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("insert_unshard.bf16", []),
        ("insert_reduce.hybrid", []),
        ("bucket.merged", ["--set", "min_bucket_bytes=65", "--set", "pack_bytes=0"]),
        ("prefetch.depth_2", ["--set", "forward_prefetch=2", "--set", "backward_prefetch=2"]),
        ("insert_free.views", []),
        ("outline_regions.layered", []),
    ],
)
def test_goldens_are_read_and_written_by_the_command(
    case: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """``fxshard opt`` of a golden, with its pass, prints what the golden says comes after it."""
    golden = GOLDENS / f"{case}.txt"
    name = case.partition(".")[0].replace("_", "-")
    assert main.main(["opt", str(golden), "--passes", name, *options, "--print-after-all"]) == 0
    out, err = capsys.readouterr()
    said = golden.read_text().partition("# after\n")[2].partition("# schedule\n")[0]
    assert out == said != ""
    assert err.startswith(f"[fxshard] after {name}:\nprogram world_size=")
