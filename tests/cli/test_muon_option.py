"""``--optimizer muon``."""

import pytest
import torch

from fxshard.cli import main, model_source

LLAMA = ("--hf-config", "tiny-llama", "--seq", "8", "--world-size", "2")


def test_muon_has_the_matrices_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["dump", *LLAMA, "--optimizer", "muon"]) == 0
    owners = capsys.readouterr().out.partition("owner  full matrices")[2]
    assert "model.layers.1.mlp.down_proj.weight" in owners
    assert "lm_head" not in owners and "norm" not in owners


def test_where_there_is_one_kind_alone_it_has_one_optimizer() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    for name, param, kind in (
        ("blocks.0.weight", matrix, torch.optim.Muon),
        ("head.weight", matrix, torch.optim.AdamW),
        ("blocks.0.bias", vector, torch.optim.AdamW),
    ):
        (made,) = model_source.muon([(name, param)])
        assert type(made) is kind
