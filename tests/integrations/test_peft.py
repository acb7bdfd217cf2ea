"""PEFT's adapters on ranks: beside one process on the joined batch, and beside FSDP2."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from transformers import LlamaForCausalLM

import fxshard
from fxshard.memory.category import Category
from tests.fsdp2 import full
from tests.integrations.peft_cases import WAYS, adapted, fill_adapters, logits, tokens, trained
from tests.ranks import told
from tests.tiny import llama

near = functools.partial(assert_close, rtol=1e-4, atol=1e-5)

CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.2},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "biases": {"bias": "all", "use_rslora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
}


# -- training ------------------------------------------------------------------------------------


def everywhere(rank: int, world_size: int, options: dict[str, Any], dtype: torch.dtype) -> Any:
    found = {
        way: trained(shard(adapted(llama().to(dtype), **options)), [rank])
        for way, shard in WAYS.items()
    }
    return found | {"alone": trained(adapted(llama().to(dtype), **options), range(world_size))}


def check_training(found: list[Any], options: dict[str, Any]) -> None:
    for rank in found:
        for way in ("compile", "fully_shard"):
            assert_close(rank[way], rank["fsdp2"], rtol=0, atol=0)
    if "lora_dropout" in options:  # one process draws other numbers than two
        return
    for step, (loss, grads, params) in enumerate(found[0]["alone"]):
        assert grads and set(grads) == set(params)
        mean = sum(rank["compile"][step][0] for rank in found) / len(found)
        assert_close(mean, loss, rtol=1e-4, atol=0)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
        for name, grad in grads.items():
            atol = max(tolerance[grad.dtype], tolerance[torch.bfloat16] * (step > 0))
            _, own, after = found[0]["compile"][step]
            assert_close(own[name], grad, rtol=0.02, atol=atol)
            assert_close(after[name], params[name], rtol=0.02, atol=atol)


def test_dora_on_a_frozen_bf16_base_trains_as_fsdp2_and_as_one_process(ranks: Any) -> None:
    options = {"use_dora": True, "modules_to_save": ["lm_head"]}
    found = ranks(2).run(everywhere, options, torch.bfloat16)
    check_training(found, options)
    dtypes = {param.dtype for param in found[0]["compile"][0][2].values()}
    assert dtypes == {torch.float32, torch.bfloat16}  # of adapters, and of the head that is saved


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_adapters_train_as_fsdp2_and_as_one_process(
    ranks: Any, case: str, dtype: torch.dtype
) -> None:
    check_training(ranks(2).run(everywhere, CASES[case], dtype), CASES[case])


# -- several adapters, and none ------------------------------------------------------------------


def two_adapters() -> Any:
    model = adapted(llama())
    model.add_adapter("b", LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    fill_adapters(model)
    return model


def switched(rank: int, world_size: int, way: str, sets: list[Any]) -> int:
    eager, ours = two_adapters(), WAYS[way](two_adapters())
    for chosen in sets:
        for model in (eager, ours):
            model.base_model.set_adapter(chosen)
        mine, wanted = trained(ours, [rank], steps=1), trained(eager, range(world_size), steps=1)
        near(mine[0][1:], wanted[0][1:])  # gradients of the chosen ones alone
    near(logits(ours), logits(eager))
    programs = len(ours._fxshard.variants)
    with eager.disable_adapter(), ours.disable_adapter():
        near(logits(ours), logits(eager))
    near(logits(ours), logits(eager))
    for model in (eager, ours):
        model.add_weighted_adapter(["default", "b"], [0.5, 0.5], "c", combination_type="cat")
    assert "put into the model after fxshard.compile" in told(lambda: logits(ours))
    return programs


def test_adapters_are_switched_disabled_and_not_added_later(ranks: Any) -> None:
    """A program per set, and one to evaluate the last."""
    assert set(ranks(2).run(switched, "compile", ["default", "b", "default"])) == {3}


@pytest.mark.slow
def test_several_adapters_are_active_at_once(ranks: Any) -> None:
    assert set(ranks(2).run(switched, "fully_shard", ["b", ["default", "b"], "b"])) == {3}


# -- merging ---------------------------------------------------------------------------------------


def merged(rank: int, world_size: int, folder: str, way: str, use_dora: bool) -> None:
    eager, ours = (adapted(llama(), use_dora=use_dora) for _ in range(2))
    ours = WAYS[way](ours)
    trained(eager, range(world_size), steps=1)
    trained(ours, [rank], steps=1)
    wanted = logits(eager)
    if not use_dora:  # there and back, on shards
        ours.merge_adapter()
        near(logits(ours), wanted)
        state = ours.full_state_dict(rank0_only=False)
        ours.unmerge_adapter()
        near(logits(ours), wanted)
        eager.merge_adapter()
        near(state, {name: value.detach() for name, value in eager.state_dict().items()})
        eager.unmerge_adapter()
    with ours.summon_full_params(writeback=False):
        plain = ours.merge_and_unload()
        if rank == 0:
            plain.save_pretrained(folder)
            near(logits(plain), wanted)
    if rank == 0:
        back = LlamaForCausalLM.from_pretrained(folder)
        near(logits(back), wanted)
        near(back.state_dict(), eager.merge_and_unload().state_dict())


@pytest.mark.parametrize(
    ("way", "use_dora"),
    [
        ("fully_shard", True),
        ("compile", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("compile", True), ("fully_shard", False)]
        ),
    ],
)
def test_adapters_are_merged_and_saved_as_a_plain_model(
    ranks: Any, tmp_path: Path, way: str, use_dora: bool
) -> None:
    ranks(2).run(merged, str(tmp_path), way, use_dora)


# -- states of adapters ----------------------------------------------------------------------------


def saved(rank: int, world_size: int, folder: str, way: str) -> None:
    eager, ours = (adapted(llama(), modules_to_save=["lm_head"]) for _ in range(2))
    ours = WAYS[way](ours)
    trained(eager, range(world_size), steps=1)
    trained(ours, [rank], steps=1)
    wanted = {name: value.detach() for name, value in get_peft_model_state_dict(eager).items()}
    mine = get_peft_model_state_dict(ours)
    assert all(isinstance(value, DTensor) for value in mine.values())
    near({name: full(value) for name, value in mine.items()}, wanted)
    whole = ours.full_state_dict(rank0_only=False)
    near(get_peft_model_state_dict(ours, state_dict=whole), wanted)
    own = f"{folder}/{rank}"
    ours.save_pretrained(own)  # collective; each rank could write
    near(logits(PeftModel.from_pretrained(llama(), own)), logits(eager))
    # into another sharded model, which then trains on
    again = WAYS[way](adapted(llama(), modules_to_save=["lm_head"]))
    set_peft_model_state_dict(again, {name: value.clone() for name, value in wanted.items()})
    near(trained(again, [rank])[-1][2], trained(eager, range(world_size))[-1][2])


@pytest.mark.parametrize("way", ["compile", pytest.param("fully_shard", marks=pytest.mark.slow)])
def test_adapters_alone_are_saved_and_loaded(ranks: Any, tmp_path: Path, way: str) -> None:
    ranks(2).run(saved, str(tmp_path), way)


# -- memory ----------------------------------------------------------------------------------------


def test_the_report_says_what_adapters_save() -> None:
    """Gradients, and two states of AdamW, are of what is trained alone."""
    ids = tokens(0, 0)
    given = {"kwargs": {"input_ids": ids, "labels": ids}, "world_size": 2}
    found = {}
    for name, model in (("all", llama(layers=2)), ("lora", adapted(llama(layers=2)))):
        plan = fxshard.plan(model, optimizer=torch.optim.AdamW, **given)
        held = plan.memory.snapshot("", "After Post-Backward")
        shards = sum(
            -(-len(param) // 2) * param[0].numel() * 4
            for param in model.parameters()
            if param.requires_grad
        )
        assert held[Category.SHARDED_GRAD] == shards
        found[name] = (held[Category.SHARDED_GRAD], held[Category.OPT_STATE])
    steps = 4  # bytes of AdamW's third state, a number
    trained = len([p for p in model.parameters() if p.requires_grad])
    assert found["lora"][1] == 2 * found["lora"][0] + steps * trained
    assert found["lora"][0] * 4 < found["all"][0]
