"""Adapters on quantised bases: packed when gathered, and trained as in one process."""

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.testing import assert_close

import fxshard
from fxshard.errors import ConfigError, UnitError
from fxshard.integrations.quantized import packed
from fxshard.verify.certificate import collectives
from tests.integrations.peft_cases import WAYS, adapted, logits, tokens, trained
from tests.ranks import told
from tests.tiny import llama

quantization = pytest.importorskip("torchao.quantization")
bitsandbytes = pytest.importorskip("bitsandbytes")

near = functools.partial(assert_close, rtol=1e-4, atol=1e-5)


def base(dtype: torch.dtype = torch.float32) -> Any:
    return llama(hidden_size=32, intermediate_size=64).to(dtype)


def of_torchao(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    model = base(dtype)
    quantization.quantize_(model, config)
    return model.requires_grad_(False)


def of_bitsandbytes(bits: int, **options: Any) -> Any:
    """As `BitsAndBytesConfig` has it: all linear layers but the head."""
    model = base()
    kinds = {4: bitsandbytes.nn.Linear4bit, 8: bitsandbytes.nn.Linear8bitLt}
    given = {4: {"quant_type": "nf4"}, 8: {"has_fp16_weights": False}}[bits] | options
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                made = kinds[bits](child.in_features, child.out_features, bias=False, **given)
                made.load_state_dict(child.state_dict())
                made.support_avx512bf16_for_cpu = False  # its layout asks for larger blocks
                setattr(parent, name, made.to("cpu"))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model.requires_grad_(False)


BASES: dict[str, Callable[[], Any]] = {
    "int8": lambda: of_torchao(quantization.Int8WeightOnlyConfig()),
    "int8 of bf16": lambda: of_torchao(quantization.Int8WeightOnlyConfig(), torch.bfloat16),
    "int4 in int8": lambda: of_torchao(quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
    "float8": lambda: of_torchao(quantization.Float8WeightOnlyConfig()),
    "nf4": lambda: of_bitsandbytes(4),
    "nf4, scales as they are": lambda: of_bitsandbytes(4, compress_statistics=False),
    "fp4 in bf16": lambda: of_bitsandbytes(4, quant_type="fp4", quant_storage=torch.bfloat16),
    "LLM.int8()": lambda: of_bitsandbytes(8, threshold=6.0),
}
FEW = ("int8", "nf4")


# -- numbers ---------------------------------------------------------------------------------------


def on_ranks(rank: int, world_size: int, kind: str, way: str, folder: str) -> Any:
    eager, ours = adapted(BASES[kind]()), WAYS[way](packed(adapted(BASES[kind]())))
    wanted, found = trained(eager, range(world_size)), trained(ours, [rank])
    near(found[0][1:], wanted[0][1:])
    near(found[-1][2], wanted[-1][2], atol=1e-3)
    assert "is sharded already. Pack the model before" in told(lambda: packed(ours))
    ours.save_pretrained(f"{folder}/{rank}")
    with torch.no_grad():
        near(
            logits(ours.eval()),
            logits(PeftModel.from_pretrained(BASES[kind](), f"{folder}/{rank}").eval()),
        )
    return [step[0] for step in found], [step[0] for step in wanted]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("int8", "fully_shard"),
        ("nf4", "compile"),
        *(pytest.param(k, "compile", marks=pytest.mark.slow) for k in BASES if k != "nf4"),
    ],
)
def test_adapters_on_a_quantised_base_train_as_in_one_process(
    ranks: Any, tmp_path: Path, kind: str, way: str
) -> None:
    found = ranks(2).run(on_ranks, kind, way, str(tmp_path))
    means = [sum(losses) / 2 for losses in zip(*(mine for mine, _ in found), strict=True)]
    near(means, found[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_in_one_process_it_is_bitwise_the_plain_model(kind: str) -> None:
    eager = adapted(BASES[kind]())
    ours = fxshard.compile(packed(adapted(BASES[kind]())), world_size=2)
    assert_close(trained(ours, [0]), trained(eager, [0]), rtol=0, atol=0)
    assert torch.equal(logits(ours.eval()), logits(eager.eval()))


@pytest.mark.slow
def test_weights_of_torchao_for_inference_alone_give_no_gradient_here_either() -> None:
    """Their products with quantised activations have none."""
    made = [adapted(of_torchao(quantization.Int8DynamicActivationInt8WeightConfig())) for _ in "ab"]
    models = [made[0], fxshard.compile(packed(made[1]), world_size=2)]
    assert torch.equal(*map(logits, models))
    for model in models:
        ids = tokens(0, 0)
        with pytest.raises(RuntimeError, match="does not require grad"):
            model(input_ids=ids, labels=ids).loss.backward()


def with_outliers() -> Any:
    model = adapted(BASES["LLM.int8()"]())
    for name, param in model.named_parameters():
        if "layernorm" in name:
            param.data[:4] = 12
    return model.eval()


def test_outliers_of_llm_int8_are_those_of_each_batch() -> None:
    ours = fxshard.compile(packed(with_outliers()), world_size=2)
    with torch.no_grad():
        ours(torch.zeros(2, 6, dtype=torch.int64))  # has others
    assert torch.equal(logits(ours), logits(with_outliers()))


@pytest.mark.parametrize("kind", [*FEW, "LLM.int8()"])
def test_states_have_the_parts_of_each_weight_once(kind: str) -> None:
    """No shard is gathered for them, and a copy has what the model has."""
    ours = fxshard.compile(packed(adapted(BASES[kind]())).eval(), world_size=2)
    wanted = logits(ours)
    state = {name: value.clone() for name, value in ours.full_state_dict().items()}
    assert list(state) == [name for name, _ in ours.named_parameters(remove_duplicate=False)]
    other = copy.deepcopy(ours)
    for param in ours.parameters():
        param.data.zero_()
    ours.load_state_dict(state)
    assert torch.equal(logits(ours), wanted) and torch.equal(logits(other), wanted)


# -- bytes -----------------------------------------------------------------------------------------


def gathered(model: Any, **options: Any) -> tuple[Any, int]:
    """The plan, and the bytes that a rank sends of the layer in forward."""
    ids = tokens(0, 0)
    plan = fxshard.plan(
        model,
        kwargs={"input_ids": ids, "labels": ids},
        world_size=2,
        units=["base_model.model.model.layers.*"],
        **options,
    )
    sent = [line for line in collectives(plan.program) if "unit=1" in line]
    found = [re.search(r"bytes=(\d+)", line) for line in sent if "forward fxshard.all_g" in line]
    return plan, sum(int(each[1]) for each in found if each)


def test_what_is_gathered_is_packed() -> None:
    plain = packed(adapted(base()))  # nothing to do
    weights = 4 * 32 * 32 + 3 * 32 * 64
    _, whole = gathered(plain)
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plan, mixed = gathered(packed(adapted(BASES["int8"]())), mixed_precision=policy)
    kept = [p for unit in plan.units for p in unit.params if not p.dtype.is_floating_point]
    assert kept and all(param.compute_dtype is param.dtype for param in kept)
    for kind, bits in (("int8", 8), ("nf4", 4)):
        _, found = gathered(packed(adapted(BASES[kind]())))
        scales = whole - 4 * weights // 2 + weights // 64 * 8 + 7 * 4096
        assert weights * bits // 16 <= found < weights * bits // 16 + scales
        assert found < whole / 2
    assert mixed < whole / 2


def mean(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.logits.square().mean()
    return found


def test_its_bytes_are_known_beforehand() -> None:
    model = packed(adapted(BASES["int8"]()))
    options = {"world_size": 2, "optimizer": torch.optim.AdamW, "loss": mean}
    found = fxshard.validate(model, (tokens(0, 0),), **options)
    assert found.cells
    assert found.holds, found.table(only_different=True)


# -- refused by name -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "nf4", "LLM.int8()"])
def test_unpacked_weights_are_refused_with_their_type_and_name(kind: str) -> None:
    names = {"int8": "Int8Tensor", "nf4": "Params4bit", "LLM.int8()": "Int8Params"}
    with pytest.raises(UnitError) as told:
        fxshard.compile(adapted(BASES[kind]()), world_size=2)
    for word in (names[kind], "q_proj.base_layer.weight", "quantized.packed(model)"):
        assert word in str(told.value)


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    trained_too = BASES["int8"]()
    trained_too.model.layers[0].mlp.up_proj.weight.requires_grad_()
    with pytest.raises(ConfigError, match=r"up_proj.weight', a Int8Tensor, is trained"):
        packed(trained_too)
    shared = BASES["int8"]()
    layer = shared.model.layers[0].self_attn
    layer.k_proj.weight = layer.q_proj.weight
    with pytest.raises(ConfigError, match=r"q_proj.weight' and .*k_proj.weight' are one"):
        packed(shared)
    new = nn.Sequential(bitsandbytes.nn.Linear4bit(32, 32)).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'0' is a Linear4bit .* not quantised yet"):
        packed(new)
    lookup = bitsandbytes.nn.Embedding4bit(32, 64).to("cpu").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'0' is a Embedding4bit .* does not know"):
        packed(nn.Sequential(lookup))
    dora = BASES["LLM.int8()"]()
    with pytest.raises(ConfigError, match="under DoRA"):
        packed(adapted(dora, use_dora=True))
    half = nn.Sequential(copy.deepcopy(layer.o_proj), bitsandbytes.nn.Linear4bit(32, 32))
    with pytest.raises(ConfigError, match=r"'1' is"):
        packed(half.requires_grad_(False))
    assert type(half[0].weight).__name__ == "Int8Tensor"  # all or nothing


@pytest.mark.parametrize("kind", FEW)
def test_merging_into_packed_weights_is_refused(kind: str) -> None:
    model = packed(adapted(BASES[kind]())).eval()
    before = logits(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with pytest.raises(
        ConfigError, match=r"merged into '.*q_proj.base_layer.weight', which is pac"
    ):
        model.merge_adapter()
    with pytest.raises(ConfigError, match="a packed weight is assigned"):
        layer.base_layer.weight = torch.zeros(32, 32)
    assert torch.equal(logits(model), before)
