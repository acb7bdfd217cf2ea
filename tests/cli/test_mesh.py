"""--mesh: a plan on a mesh of several dimensions."""

import json
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.cli import model_source
from tests.cli.test_cli import run
from tests.distributed.tensor_parallel_cases import Mlp, of_an_mlp

MLP = ("report", "--model", "tests.cli.test_mesh:mlp")
BY_MLP = ("--parallelize", "tests.cli.test_mesh:by_mlp")
LLAMA = ("report", "--hf-config", "tiny-llama", "--json")
X = torch.ones(4, 6)


def mlp() -> Any:
    return Mlp(), (X,), {}


def by_mlp(model: Any, mesh: DeviceMesh) -> None:
    of_an_mlp(model, mesh["tp"])


def test_a_function_parallelises_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *MLP, *BY_MLP, "--mesh", "dp=2,tp=2", "--json")
    assert code == 0, err
    plan = fxshard.plan(
        *(Mlp(), (X,)),
        mesh={"dp": 2, "tp": 2},
        parallelize=by_mlp,
        optimizer=model_source.OPTIMIZERS["adamw"],
    )
    assert json.loads(out) == json.loads(json.dumps(plan.memory.to_dict()))


def test_a_model_of_transformers_by_its_own_plan(capsys: pytest.CaptureFixture[str]) -> None:
    bytes_of_shards = []
    for ranks in (("--world-size", "2"), ("--mesh", "dp=2"), ("--mesh", "dp=2,tp=2")):
        code, out, err = run(capsys, *LLAMA, *ranks)
        assert code == 0, err
        bytes_of_shards.append(json.loads(out)["peak_by_category"]["Sharded Param"])
    alone, same, cut = bytes_of_shards
    assert alone == same and cut < 0.7 * alone  # the embedding is not cut


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (BY_MLP, "for which mesh?"),
        (("--mesh", "dp=2,tp=2", "--world-size", "4"), "says how many ranks"),
        (("--mesh", "dp=2,dp=2"), "names dp twice"),
        (("--mesh", "dp=2,tp=2"), "places no parameter on 'dp', 'tp'"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], more: Any, message: str) -> None:
    code, _, err = run(capsys, *MLP, *more)
    assert code == 2 and message in err, err


def test_styles_that_are_not_known_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    path = tmp_path / "config.json"
    sizes = model_source.PRESETS["tiny-llama"] | {"model_type": "qwen3", "head_dim": 16}
    path.write_text(json.dumps(sizes))
    code, _, err = run(capsys, "report", "--hf-config", str(path), "--mesh", "dp=2,tp=2")
    assert code == 2 and "Give --parallelize" in err and "q_norm" in err, err


def test_tune_has_its_own_way(capsys: pytest.CaptureFixture[str]) -> None:
    tune = ("tune", *MLP[1:], "--hardware", "h100", "--mesh", "dp=2,tp=2")
    code, _, err = run(capsys, *tune)
    assert code == 2 and "mesh='auto'" in err


def test_a_rank_of_a_mesh_is_validated(capsys: pytest.CaptureFixture[str]) -> None:
    on_mesh = (*BY_MLP, "--mesh", "dp=2,tp=2", "--ranks", "fake")
    code, out, err = run(capsys, "validate", *MLP[1:], *on_mesh)
    assert code == 0 and "largest difference 0 bytes" in out, err
    code, _, err = run(capsys, "validate", *MLP[1:], *on_mesh, "--numerics")
    assert code == 2 and "Give ranks='processes'" in err
