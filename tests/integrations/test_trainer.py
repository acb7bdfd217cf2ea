"""transformers' Trainer around models that fxshard shards, beside those of torch's FSDP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM

from tests.integrations.accelerating import accelerating
from tests.integrations.trainer_cases import resumed, trained, trainer
from tests.ranks import Ranks, told

Pools = Callable[[int], Ranks]

ALL = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
}


def both(pool: Ranks, name: str, folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """What each rank found with torch's FSDP2 and with fxshard, after comparing it bitwise."""
    answers = [pool.run(trained, by, name, str(folder), options) for by in ("torch", "fxshard")]
    for wanted, got in zip(*answers, strict=True):
        assert got["log"] == wanted["log"]
        assert got["evaluated"] == wanted["evaluated"]
        arrays = zip(*(as_arrays(each["predicted"]) for each in (got, wanted)), strict=True)
        assert all(np.array_equal(mine, theirs) for mine, theirs in arrays)
        assert str(got["best"]).replace("fxshard", "torch") == str(wanted["best"])
    return answers[0], answers[1]


def as_arrays(predicted: Any) -> list[Any]:
    return list(predicted) if isinstance(predicted, tuple) else [predicted]


def test_a_training_with_all_that_the_trainer_does(ranks: Pools, tmp_path: Path) -> None:
    wanted, got = both(ranks(2), "llama", tmp_path, ALL)
    assert [each["step"] for each in got[0]["log"]] == [1, 2, 2, 3, 4, 4, 4]
    assert got[0]["best"] is not None
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["generated"][:, :6].tolist() == theirs["generated"].tolist()
    saved = [AutoModelForCausalLM.from_pretrained(tmp_path / by) for by in ("torch", "fxshard")]
    for theirs, mine in zip(*(each.named_parameters() for each in saved), strict=True):
        assert mine[0] == theirs[0] and torch.equal(mine[1], theirs[1])
    assert saved[1].config.architectures == ["LlamaForCausalLM"]
    assert got[0]["programs"] == 3, "gradients left on ranks, reduced gradients, evaluation"


FSDP = {"version": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "bert": {"fsdp_config": {**FSDP, "transformer_layer_cls_to_wrap": ["BertLayer"]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OTHERS))
def test_other_architectures(ranks: Pools, tmp_path: Path, name: str) -> None:
    options = {**ALL, **OTHERS[name]}
    both(ranks(2), name, tmp_path, options)
    saved = [AutoModel.from_pretrained(tmp_path / by) for by in ("torch", "fxshard")]
    for theirs, mine in zip(*(each.state_dict().items() for each in saved), strict=True):
        assert mine[0] == theirs[0] and torch.equal(mine[1], theirs[1])


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},  # Accelerate has no scaler on the CPU
    "bf16, gradient_checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "activation_checkpointing": {"fsdp_config": {**FSDP, "activation_checkpointing": True}},
    "no reshard": {"fsdp_config": {**FSDP, "reshard_after_forward": False}},
    "cpu_ram_efficient_loading": {"fsdp_config": {**FSDP, "cpu_ram_efficient_loading": True}},
    "a last batch that is smaller": {"per_device_train_batch_size": 3},
    "evaluated at the start": {"eval_on_start": True, "eval_strategy": "epoch"},
    "sgd, no clipping": {"optim": "sgd", "max_grad_norm": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_settings(ranks: Pools, tmp_path: Path, setting: str) -> None:
    both(ranks(2), "deeper_llama", tmp_path, SETTINGS[setting])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resumed_on_other_world_sizes(
    ranks: Pools, tmp_path: Path, kind: str, world_size: int
) -> None:
    """Torch's FSDP2 goes on from the same checkpoint, which fxshard wrote: bitwise as fxshard."""
    options = {
        "fsdp_config": {**FSDP, "state_dict_type": kind},
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        # of sharded ones the Trainer looks for the folder before any rank has made it
        "load_best_model_at_end": kind == "FULL_STATE_DICT",
    }
    whole = ranks(2).run(trained, "fxshard", "deeper_llama", str(tmp_path), options)[0]["log"]
    checkpoint = str(tmp_path / "fxshard" / "checkpoint-2")
    options |= {"per_device_train_batch_size": 4 // world_size}
    log, wanted = (
        ranks(world_size).run(resumed, by, "deeper_llama", checkpoint, options)[0]
        for by in ("fxshard", "torch")
    )
    assert log == wanted
    steps = [each for each in whole if "loss" in each]
    assert_close([each for each in log if "loss" in each], steps)
    assert world_size != 2 or log[:-1] == whole[:-1], "train_loss is of this run's steps"


def refused(rank: int, world_size: int, folder: str) -> str:
    with accelerating(rank, world_size, "fxshard"):
        return told(trainer("t5", Path(folder)).train)


@pytest.mark.slow
def test_shared_parameters_that_accelerate_wraps_apart_are_refused(
    ranks: Pools, tmp_path: Path
) -> None:
    """Torch's FSDP2 refuses the model too: three modules hold one parameter."""
    said = ranks(2).run(refused, str(tmp_path))[0]
    assert said.startswith("UnitError: ") and "give it a list of both" in said
