"""Formulas of memory against plans of calls that are traced on their own, to the byte."""

import functools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.export import Dim

import fxshard
from fxshard.errors import ConfigError, OutOfRangeError
from fxshard.memory import symbolic
from fxshard.memory.category import Category, State
from fxshard.memory.report import MemoryReport
from tests.zoo.transformers_rows import hf

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SMALL = {"vocab_size": 96, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCH_SEQ = {
    name: [("input_ids", dim), ("labels", dim)] for dim, name in enumerate(("batch", "seq"))
}
OF_X = {"batch": [("x", 0)], "seq": [("x", 1)]}


class Convolutions(nn.Module):
    """f32 (batch, 3, side, side) -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.norm(self.first(x)))))
        out: Tensor = self.out(x.mean((2, 3)))
        return out.sum()


class Mlps(nn.Module):
    """f32 (batch, seq, 24) -> f32 (batch, seq, 7); 7 and 10 rows are padded on most worlds."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 10), nn.GELU(), nn.Linear(10, 24))
            for _ in range(depth)
        )
        self.out = nn.Linear(24, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.out(x)
        return logits


class Positioned(Mlps):
    """The same on at most 16 positions."""

    def __init__(self) -> None:
        super().__init__(1)
        self.positions = nn.Parameter(torch.zeros(16, 24))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions[: x.shape[1]])


class Attention(nn.Module):
    """f32 (batch, seq, 24) -> the same; four heads look back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.qkv, self.out = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, seq, 3, 4, 6).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Language(nn.Module):
    """int64 (batch, seq), twice -> a scalar: what a Llama does, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 24)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(24, 96, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class OverTime(nn.Module):
    """f32 (batch, seq, 8) -> a scalar, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state.sum()


def tokens(batch: int, seq: int) -> dict[str, Any]:
    ids = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def floats(batch: int, seq: int, *, width: int = 24) -> dict[str, Any]:
    return {"x": torch.zeros(batch, seq, width, device="meta")}


def squares(batch: int, seq: int) -> dict[str, Any]:
    return {"x": torch.zeros(batch, 3, seq, seq, device="meta")}


def pictures(batch: int, seq: int) -> dict[str, Any]:
    labels = torch.zeros(batch, dtype=torch.int64, device="meta")
    return {"pixel_values": torch.zeros(batch, 3, 32, 32, device="meta"), "labels": labels}


LM = {**SMALL, "intermediate_size": 40, "num_key_value_heads": 2, "use_cache": False}
EXPERTS = {"num_local_experts": 4, "experts_implementation": "batched_mm"}
GPT2 = {"vocab_size": 96, "n_embd": 24, "n_layer": 2, "n_head": 4, "use_cache": False}
T5 = {"vocab_size": 96, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
VIT = {"image_size": 32, "patch_size": 8}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(24, 9))


# A model, a call of it for a batch and a sequence (or side), and where the call has them.
Made = tuple[Callable[[], nn.Module], Callable[[int, int], dict[str, Any]], dict[str, Any]]
FAMILIES: dict[str, Made] = {
    "language": (Language, tokens, BATCH_SEQ),
    "llama": (partial(hf, "LlamaForCausalLM", **LM), tokens, BATCH_SEQ),
    "mixtral": (partial(hf, "MixtralForCausalLM", **LM, **EXPERTS), tokens, BATCH_SEQ),
    "t5": (
        partial(hf, "T5ForConditionalGeneration", **T5, decoder_start_token_id=0),
        *(tokens, BATCH_SEQ),
    ),
    "vit": (
        partial(hf, "ViTForImageClassification", **SMALL, intermediate_size=40, **VIT),
        *(pictures, {"batch": [("pixel_values", 0), ("labels", 0)]}),
    ),
    "convolutions": (Convolutions, squares, {"batch": [("x", 0)], "seq": [("x", 2), ("x", 3)]}),
    "mlps": (Mlps, floats, OF_X),
    "gpt2": (partial(hf, "GPT2LMHeadModel", **GPT2), tokens, BATCH_SEQ),
    "bert": (partial(hf, "BertForMaskedLM", **SMALL, intermediate_size=40), tokens, BATCH_SEQ),
    "qwen3": (partial(hf, "Qwen3ForCausalLM", **LM, head_dim=6), tokens, BATCH_SEQ),
    "encoder": (
        encoder,
        lambda b, s: {"input": floats(b, s)["x"]},
        {"batch": [("input", 0)], "seq": [("input", 1)]},
    ),
}
WORLDS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 48, 64, 96, 100, 128)
FAST = ("language", "convolutions", "mlps")
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n not in FAST]


def planned(family: str, batch: int, seq: int, world: int, **options: Any) -> fxshard.Plan:
    make, call, _ = FAMILIES[family]
    torch.manual_seed(0)
    options = {"optimizer": ADAMW, **options}
    return fxshard.plan(make(), kwargs=call(batch, seq), world_size=world, **options)


def open_plan(family: str, **options: Any) -> fxshard.Plan:
    """Plans without options are made once: no test changes one."""
    return _planned_once(family) if not options else _open_plan(family, **options)


def _open_plan(family: str, **options: Any) -> fxshard.Plan:
    return planned(family, 5, 14, 4, dynamic=FAMILIES[family][2], **options)


_planned_once = functools.cache(_open_plan)


def lives(report: MemoryReport, first: bool) -> list[tuple[Any, ...]]:
    """What lives, and when: in numbers of moments at which anything is born or dies."""
    ranges = report.ledger(first_step=first).ranges
    ticks = sorted({t for r in ranges for t in (r.born, r.died) if t is not None})
    moment = {None: None} | {tick: number for number, tick in enumerate(ticks)}
    return [(r.category, r.module, r.bytes, r.host, moment[r.born], moment[r.died]) for r in ranges]


def peak_of_blocks(report: MemoryReport, first: bool) -> int:
    """The peak, counted by hand, if each storage takes whole blocks of 512 bytes."""
    ledger = report.ledger(first_step=first)
    change = np.zeros(2 * len(ledger.moments) + 1, dtype=np.int64)
    for each in ledger.ranges:
        whole = 0 if each.host else 512 * math.ceil(each.bytes / 512)
        change[max(each.born, 0)] += whole
        change[len(change) - 1 if each.died is None else each.died] -= whole
    return int(change.cumsum()[:-1].max())


def assert_equal(formulas: MemoryReport, batch: int, seq: int, world: int, alone: Any) -> None:
    """Every figure of the report is that of a plan of such a call, traced on its own."""
    sizes = {"batch": batch, "seq": seq, "world": world}
    sizes = {name: sizes[name] for name in formulas.formulas.range.example}
    ours, theirs = formulas.at(**sizes), alone.memory
    for first in (True, False):
        assert formulas.formula(first_step=first).at(**sizes) == (
            theirs.first_step_peak_bytes if first else theirs.peak_bytes
        ), sizes
        assert ours.rows(first_step=first) == theirs.rows(first_step=first), sizes
        assert ours.owned(first_step=first) == theirs.owned(first_step=first), sizes
        assert lives(ours, first) == lives(theirs, first), sizes
        rounded = formulas.formula(first_step=first, rounded=True).at(**sizes)
        assert rounded == peak_of_blocks(theirs, first), sizes


def random_points(count: int, seed: int) -> list[tuple[int, int, int]]:
    draw = random.Random(seed)
    return [(draw.randint(2, 9), draw.randint(3, 40), draw.choice(WORLDS)) for _ in range(count)]


def assert_equal_at_points(family: str, numbers: Sequence[int], **options: Any) -> None:
    memory = open_plan(family, **options).memory
    points = random_points(max(numbers) + 1, seed=len(family))
    for number in numbers:
        batch, seq, world = points[number]
        assert_equal(memory, batch, seq, world, planned(family, batch, seq, world, **options))


two_points = pytest.mark.parametrize("point", [0, pytest.param(1, marks=pytest.mark.slow)])


@pytest.mark.parametrize("family", [*FAST, *SLOW])
@two_points
@pytest.mark.sample(2)
def test_equal_to_plans_of_their_own(family: str, point: int) -> None:
    assert_equal_at_points(family, [point])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_at_200_random_points(family: str) -> None:
    assert_equal_at_points(family, range(200))


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


def columns(param: Tensor) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


OPTIONS: dict[str, dict[str, Any]] = {
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "no_shard": {"strategy": "no_shard"},
    "bf16, full checkpoints": {"mixed_precision": BF16, "checkpoint": "full"},
    "fp16": {"mixed_precision": FP16},
    "selective checkpoints": {"checkpoint": "selective"},
    "offload": {"offload": CPUOffloadPolicy()},
    "no prefetch, buckets": {"forward_prefetch": 0, "max_bucket_bytes": 1000},
    "nothing packed": {"pack_bytes": 0},
    "columns": {"shard_placement_fn": columns},
    "columns, nothing packed, bf16": {
        "shard_placement_fn": columns,
        "pack_bytes": 0,
        "mixed_precision": BF16,
    },
    "ignored": {"ignored": ["out"]},
    "no optimizer": {"optimizer": None},
    "momentum": {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    "adagrad, foreach": {"optimizer": partial(torch.optim.Adagrad, lr=0.1, foreach=True)},
    "in backward": {"optimizer_in_backward": True},
    "micro-batches": {"micro_batches": 2},
    "micro-batches without sync": {"micro_batches": 2, "no_sync": True},
    "a loss": {"loss": lambda out: out.float().log_softmax(-1).square().mean()},
}


@pytest.mark.parametrize("name", OPTIONS)
@two_points
@pytest.mark.sample(4)
def test_equal_under_every_option(name: str, point: int) -> None:
    assert_equal_at_points("mlps", [point], **OPTIONS[name])


def test_buckets_are_the_same_on_all_worlds() -> None:
    """Padding to 128 rows makes 960 bytes of a parameter 5,120: it is packed as on 4 ranks."""
    memory = open_plan("mlps", pack_bytes=1500).memory
    assert_equal(memory, 3, 9, 128, planned("mlps", 3, 9, 128, pack_bytes=1500))
    packs = [
        sum(
            n.name.startswith("pack_")
            for n in planned("mlps", 3, 9, w, pack_bytes=1500).program.graph.nodes
        )
        for w in (4, 128)
    ]
    assert packs[0] == packs[1] > 0


@pytest.mark.parametrize("fn", [None, columns], ids=["rows", "columns"])
def test_in_a_smaller_group_between_forward_and_backward(fn: Any) -> None:
    options = {"reshard_after_forward": 2, "shard_placement_fn": fn}
    memory = open_plan("mlps", **options).memory
    for world in (2, 4, 6, 16):
        assert_equal(memory, 3, 9, world, planned("mlps", 3, 9, world, **options))


def test_of_a_hybrid_strategy_world_is_the_ranks_that_share_a_parameter() -> None:
    options: dict[str, Any] = {"strategy": "hybrid_shard", "optimizer": ADAMW}
    make, call, sizes = FAMILIES["mlps"]
    plan = fxshard.plan(make(), kwargs=call(5, 14), world_size=(2, 4), dynamic=sizes, **options)
    for world in (1, 3, 8):
        alone = fxshard.plan(make(), kwargs=call(3, 9), world_size=(2, world), **options)
        assert_equal(plan.memory, 3, 9, world, alone)


@pytest.mark.parametrize("point", [(3, 40, 8), (8, 17, 5)])
@pytest.mark.parametrize("family", ["language", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.sample(1)
def test_for_cuda_without_a_gpu(family: str, point: tuple[int, int, int]) -> None:
    memory = open_plan(family, device="cuda").memory
    assert_equal(memory, *point, planned(family, *point, device="cuda"))


@pytest.mark.parametrize(
    "family",
    ["language", "mlps", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "t5"))],
)
def test_every_step_of_the_way(family: str) -> None:
    """The bytes after each operator, in order; open sizes are computed by nodes of their own."""
    ours = open_plan(family)
    sizes = {n.name for n in ours.program.graph.nodes if isinstance(n.meta.get("val"), int)}
    sizes |= {
        row.name
        for row in ours.program.schedule.forward.find_nodes(op="call_module")
        if sizes.issuperset(n.name for n in row.meta["run"])
    }
    there = ours.memory.at(batch=3, seq=23, world=7).timeline()
    found = [(phase, module, size) for phase, node, module, size in there if node not in sizes]
    alone = planned(family, 3, 23, 7).memory.timeline()
    assert len(found) > 300
    assert found == [(phase, module, size) for phase, _, module, size in alone]


def test_every_cell_of_the_table() -> None:
    plan = open_plan("language")
    alone = planned("language", 7, 9, 12).memory
    sizes = {"batch": 7, "seq": 9, "world": 12}
    asked = 0
    for (module, state), snapshot in alone.cells().items():
        if module in ("", "layers.1", "layers.0.out"):
            whole = plan.memory.formula(module=module, state=state)
            assert whole.at(**sizes) == sum(snapshot.values()), (module, state)
            for category in (Category.ACTIVATION, "Unsharded Param", Category.TEMP):
                cell = plan.memory.formula(module=module, state=state, category=category)
                assert cell.at(**sizes) == snapshot[Category(category)], (module, state, category)
                asked += 1
    assert asked > 60
    for category, size in alone.peak_by_category.items():
        assert plan.memory.formula(category=category).at(**sizes) == size
    for module, size in alone.peak_by_module().items():
        assert plan.memory.formula(module=module).at(**sizes) == size
    offloaded = open_plan("mlps", offload=CPUOffloadPolicy()).memory.formula(host=True)
    assert offloaded.at(batch=3, seq=9, world=5) == (
        planned("mlps", 3, 9, 5, offload=CPUOffloadPolicy()).memory.host_peak_bytes
    )


def test_sympy_outside() -> None:
    formula = open_plan("mlps").memory.formula()
    assert isinstance(formula, sympy.Expr)
    batch, seq, world = sorted(formula.free_symbols, key=str)
    assert (batch.name, seq.name, world.name) == ("batch", "seq", "world")
    point = {batch: 6, seq: 31, world: 8}
    alone = planned("mlps", 6, 31, 8).memory.peak_bytes
    assert formula.subs(point) == formula.expression.subs(point) == alone
    assert formula.at(batch=6, seq=31, world=8) == alone
    assert r"\max" in sympy.latex(formula) == formula.latex() and "seq" in formula.latex()


def test_the_text_is_short_and_has_equal_layers_once() -> None:
    def text_of(depth: int) -> list[str]:
        plan = fxshard.plan(Mlps(depth), kwargs=floats(5, 14), world_size=4, dynamic=OF_X)
        return str(plan.memory.formula()).splitlines()

    shallow, deep = text_of(3), text_of(4)
    assert len(deep) == len(shallow) <= 16
    assert any(line.startswith("  4 * ") and "layers.*" in line for line in deep)
    # By hand: each of 3 layers keeps its norm's and its first product's result, (24 + 10) floats
    # per token, of which the second is 10.
    assert any("40*batch*seq" in line for line in shallow)


def test_many_points_at_once() -> None:
    plan = open_plan("mlps")
    draw = np.random.default_rng(0)
    many = {"batch": draw.integers(2, 64, 60), "seq": draw.integers(2, 512, 60)}
    world = draw.choice([1, 2, 5, 7, 8, 24], 60)
    formula = plan.memory.formula()
    found = formula.lambdify()(**many, world=world)
    one_by_one = [
        formula.at(batch=int(b), seq=int(s), world=int(w))
        for b, s, w in zip(many["batch"], many["seq"], world, strict=True)
    ]
    assert found.dtype == np.int64 and found.tolist() == one_by_one


# -- where they hold ------------------------------------------------------------------------------


def test_sizes_outside_raise_with_the_guard_and_what_to_do() -> None:
    options: dict[str, Any] = {"world_size": 4, "optimizer": ADAMW}
    plan = fxshard.plan(Positioned(), kwargs=floats(5, 14), dynamic=OF_X, **options)
    formula = plan.memory.formula()
    with pytest.raises(OutOfRangeError, match=r"seq <= 16 \(asked at .*plan\.at\(batch=5"):
        formula.at(seq=17)
    with pytest.raises(OutOfRangeError, match=r"holds while batch >= 2 .*smaller ones"):
        plan.memory.at(batch=1)
    alone = fxshard.plan(Positioned(), kwargs=floats(1, 14), **options).memory.peak_bytes
    assert plan.at(batch=1).memory.peak_bytes == alone  # what the error says to do
    with pytest.raises(OutOfRangeError, match="batch=1, seq=9"):
        formula.lambdify()(batch=np.array([4, 1]), seq=np.array([8, 9]))
    with pytest.raises(OutOfRangeError, match="world=0: a size is at least 1"):
        formula.at(world=0)
    with pytest.raises(
        ConfigError, match="no size 'length': this plan has 'batch', 'seq', 'world'"
    ):
        formula.at(length=3)
    with pytest.raises(ConfigError, match="no size 'length'"):
        plan.at(length=3)


def test_a_loop_over_time_fixes_its_size_and_says_where() -> None:
    plan = fxshard.plan(OverTime(), kwargs=floats(4, 3, width=8), world_size=2, dynamic=OF_X)
    assert plan.memory.formulas.range.open == ("batch",)
    with pytest.raises(OutOfRangeError, match=r"Eq\(seq, 3\) \(asked at .*test_formula.py:\d+"):
        plan.memory.at(seq=7)
    alone = fxshard.plan(OverTime(), kwargs=floats(9, 3, width=8), world_size=2)
    assert plan.memory.at(batch=9).peak_bytes == alone.memory.peak_bytes


def test_names_may_be_dims_of_torch_export() -> None:
    batch, seq = Dim("batch", min=2, max=64), Dim("seq")
    as_export = {"x": {0: batch, 1: seq}}
    for dynamic in (as_export, {batch: [("x", 0)], seq: [("x", 1)]}):
        plan = fxshard.plan(Mlps(), kwargs=floats(5, 14), world_size=4, dynamic=dynamic)
        assert plan.memory.formula().at(batch=64, seq=33) > plan.memory.formula().at(batch=63)
        with pytest.raises(OutOfRangeError, match=r"batch <= 64\)? \(the bounds of its Dim\)"):
            plan.memory.formula().at(batch=65)
    with pytest.raises(ConfigError, match="so formulas call the number of ranks"):
        fxshard.plan(Mlps(), kwargs=floats(5, 14), world_size=4, dynamic={"world": [("x", 0)]})


def test_a_loss_that_holds_labels_fixes_their_batch() -> None:
    labels = torch.zeros(5 * 14, dtype=torch.int64)
    plan = open_plan("mlps", loss=lambda out: F.cross_entropy(out.flatten(0, 1), labels))
    with pytest.raises(OutOfRangeError, match="batch"):
        plan.memory.at(batch=6)
    alone = planned("mlps", 5, 14, 7, loss=lambda o: F.cross_entropy(o.flatten(0, 1), labels))
    assert plan.memory.at(world=7).peak_bytes == alone.memory.peak_bytes


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.sample(2)
def test_a_loss_that_lies_in_what_it_sums_up(reduction: str, keep: bool) -> None:
    def loss(out: Tensor) -> Tensor:
        return F.mse_loss(out, torch.zeros_like(out), reduction=reduction)

    plan = open_plan("mlps", loss=loss, keep_outputs=keep)
    for batch, seq, world in ((9, 22, 3), (4, 40, 4)):
        alone = planned("mlps", batch, seq, world, loss=loss, keep_outputs=keep)
        assert_equal(plan.memory, batch, seq, world, alone)


def test_only_the_world_is_open_without_names() -> None:
    plan = planned("mlps", 5, 14, 4)
    assert {s.name for s in plan.memory.formula().free_symbols} == {"world"}
    assert plan.memory.formula().at(world=5) == planned("mlps", 5, 14, 5).memory.peak_bytes
    with pytest.raises(ConfigError, match=r"no size 'batch'.*dynamic=\{'batch'"):
        plan.memory.formula().at(batch=3)


def test_what_depends_on_sizes_itself_has_no_formula() -> None:
    with pytest.raises(ConfigError, match="what is kept within a number of bytes"):
        open_plan("mlps", checkpoint="40KiB").memory.formula()
    plan = open_plan("mlps")
    with pytest.raises(ConfigError, match="computes nothing in a state"):
        plan.memory.formula(module="layers.1", state=State.PRE_FORWARD_AC)
    with pytest.raises(ConfigError, match="no category 'Activations'"):
        plan.memory.formula(category="Activations")
    with pytest.raises(ConfigError, match="nothing is owned by module 'nowhere'"):
        plan.memory.formula(module="nowhere")


def test_other_figures_of_a_report_elsewhere_are_planned() -> None:
    plan = open_plan("mlps")
    there = plan.memory.at(batch=3, seq=9, world=5)
    alone = planned("mlps", 3, 9, 5).memory
    both = [[(k.op, k.bytes, k.why) for k in r.kernel_temporaries] for r in (there, alone)]
    assert both[0] == both[1]
    assert [p.peak_bytes for p in there.lifecycle] == [p.peak_bytes for p in alone.lifecycle]
    assert there.peak_at.phase == alone.peak_at.phase


# -- arithmetic -----------------------------------------------------------------------------------


def test_expressions_are_evaluated_exactly() -> None:
    a, b = symbolic.symbol("a"), symbolic.symbol("b")
    draw = random.Random(1)
    expressions = [
        3 * a * b**2 + 7,
        a * sympy.ceiling(97 / b),
        sympy.floor((a - 1) / 2) ** 2 + sympy.Mod(a, 3),
        sympy.Max(a, b) - sympy.Min(a, 5),
        a * (a + 1) / 2,
    ]
    for expression in expressions:
        points = [(draw.randint(1, 10**6), draw.randint(1, 10**4)) for _ in range(20)]
        arrays = {"a": np.array([p[0] for p in points]), "b": np.array([p[1] for p in points])}
        found = symbolic.evaluate(expression, arrays)
        expected = [int(expression.subs({a: p[0], b: p[1]})) for p in points]
        assert np.asarray(found).tolist() == expected, expression


# -- plots ----------------------------------------------------------------------------------------


def test_curves_and_their_plot(tmp_path: Path) -> None:
    plan = open_plan("mlps")
    batch, world = plan.memory.curves(batch=[2, 5, 9], world=[1, 4, 7])
    assert batch.bytes == tuple(planned("mlps", b, 14, 4).memory.peak_bytes for b in (2, 5, 9))
    assert world.bytes == tuple(planned("mlps", 5, 14, w).memory.peak_bytes for w in (1, 4, 7))
    drawn = {curve.name: curve for curve in plan.memory.curves()}
    assert drawn["batch"].at == tuple(range(2, 21)) and drawn["seq"].at[0] == 2
    assert drawn["world"].at == (1, 2, 4, 8, 16, 32, 64)
    plan.memory.plot(tmp_path / "peak.png", budget="200KiB", batch=range(2, 30))
    assert (tmp_path / "peak.png").read_bytes().startswith(b"\x89PNG")
    plan.memory.to_html(tmp_path / "page.html", curves=[batch, world], budget=200_000)
    assert '"drawn"' in (tmp_path / "page.html").read_text()
    with pytest.raises(ConfigError, match="no size 'length'"):
        plan.memory.curves(length=[1, 2])
    with pytest.raises(OutOfRangeError, match="batch >= 2"):
        plan.memory.curves(batch=[1, 2])


def test_a_batch_that_is_a_part_of_a_larger_tensor_stays() -> None:
    x = torch.zeros(100, 14, 24)[:5]
    plan = fxshard.plan(Mlps(), kwargs={"x": x}, world_size=4, dynamic=OF_X)
    with pytest.raises(OutOfRangeError, match=r"part of a larger tensor.*pass a clone"):
        plan.memory.at(batch=9)
    assert plan.memory.at(world=7).peak_bytes == (
        fxshard.plan(Mlps(), kwargs={"x": x}, world_size=7).memory.peak_bytes
    )


def test_sizes_that_are_none() -> None:
    plan = open_plan("mlps")
    formula = plan.memory.formula()
    for wrong in (2.5, "7", True, [[2, 3]]):
        with pytest.raises(ConfigError, match="a size is an int"):
            formula.at(seq=wrong)  # type: ignore[arg-type]
    for wrong in (2.5, "7", True, 0, -3):
        with pytest.raises(ConfigError, match="a size is an integer, at least 1"):
            plan.at(seq=wrong)  # type: ignore[arg-type]
    assert formula.lambdify()(batch=np.array([], dtype=np.int64)).tolist() == []
    assert formula.at(seq=np.int64(9)) == formula.at(seq=9)  # type: ignore[arg-type]
    with pytest.raises(OutOfRangeError, match="no one has that memory"):
        formula.at(batch=2**31, seq=2**31)
    symbols, sizes = sorted(formula.free_symbols, key=str), (2**20, 2**20, 8)
    exact = formula.expression.xreplace(dict(zip(symbols, map(sympy.Integer, sizes), strict=True)))
    assert formula.at(batch=2**20, seq=2**20, world=8) == exact
