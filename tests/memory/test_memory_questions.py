"""The 17 answers of docs/memory-questions.md: the page is what its code prints, and each answer is
what a measured run, eager PyTorch, FSDP2 or a count by hand says.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxshard
from benchmarks.memory_questions import PAGE, answered
from fxshard._torch import process_groups
from fxshard.errors import DoesNotFitError
from fxshard.memory.category import Category, State
from fxshard.memory.report import MemoryReport
from fxshard.plans.plan import Plan
from tests import oracles

aten = torch.ops.aten
BF16 = torch.bfloat16
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)

# The page's model: dim 64, vocab 256, three blocks; a batch of 4 x 32 tokens on 8 ranks.
ROWS, DIM, VOCAB, DEPTH, BATCH = 4 * 32, 64, 256, 3, 4 * 32 * 8
BIASES = 3 * DIM + DIM + 4 * DIM + DIM  # of a block's linears; backward reads none of them
BLOCK = 2 * DIM + (3 + 1 + 4 + 4) * DIM**2 + BIASES
ROOT = 2 * VOCAB * DIM + VOCAB
SHARDS = 4 * (DEPTH * BLOCK + ROOT) // 8
PARAMETERS = 10 * DEPTH + 3
HIDDEN = 4 * ROWS * DIM  # bytes of one f32[batch, seq, dim]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def page() -> tuple[str, dict[str, Any]]:
    return answered(PAGE.read_text("utf-8"))


@pytest.fixture
def names(page: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return page[1]


@pytest.fixture
def plan(names: dict[str, Any]) -> Plan:
    return names["plan"]


@pytest.fixture
def measured(names: dict[str, Any]) -> Callable[..., int]:
    """The peak of forward and backward in a run of the page's model; the report agrees with it."""

    def peak(tokens: Tensor | None = None, **changes: Any) -> int:
        options = {"world_size": 8, "optimizer": adamw, "pack_bytes": 0, **changes}
        batch = names["tokens"] if tokens is None else tokens
        result = fxshard.validate(names["model"], (batch,), **options)
        assert result.max_abs_difference == 0, result.table(only_different=True)
        return result.measured_peak_bytes

    return peak


def zeros(batch: int, seq: int) -> Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64)


def block_of(module: str) -> str:
    """ "blocks.1" of "blocks.1.norm", "embed" of "embed", "" of "head": who a block's reader is."""
    return ".".join(module.split(".")[:2])


class StoragesMade(TorchDispatchMode):
    """Every storage that operators make while it is on: weak reference -> (block, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = [""]
        self.made: dict[weakref.ref[Any], tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {
            id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in filter(is_tensor, tree_leaves(result)):
            storage = leaf.untyped_storage()
            if id(storage) not in old:
                self.made.setdefault(weakref.ref(storage), (self.stack[-1], storage.nbytes()))
        return result


def is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


def left_by_forward(model: nn.Module, tokens: Tensor) -> Counter[str]:
    """Bytes that a forward in eager PyTorch leaves alive, by the block whose operators made them.

    Its output is among them.
    """
    mode = StoragesMade()
    handles = []
    for name, module in model.named_modules():
        if name.startswith("blocks.") or name == "embed":
            block = block_of(name)
            handles.append(
                module.register_forward_pre_hook(lambda *_, b=block: mode.stack.append(b))
            )
            handles.append(module.register_forward_hook(lambda *_: mode.stack.pop() and None))
    with mode:
        loss = model(tokens)
    for handle in handles:
        handle.remove()
    found: Counter[str] = Counter()
    for storage, (block, size) in mode.made.items():
        if storage() is not None:
            found[block] += size
    del loss
    return found


@contextlib.contextmanager
def checkpointed(
    model: nn.Module, policy: Callable[..., CheckpointPolicy] | None
) -> Iterator[None]:
    """torch.utils.checkpoint around each block."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if policy is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, type(block).forward, block, **options)
    yield
    for block in model.blocks:
        del block.forward


def kept_by(report: MemoryReport) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in report.kept_for_backward():
        found[block_of(each.module) if each.module != "head" else ""] += each.bytes
    return found


def test_the_page_is_what_its_code_prints(page: tuple[str, dict[str, Any]]) -> None:
    text = PAGE.read_text("utf-8")
    assert page[0] == text, "run `python -m benchmarks.memory_questions`"
    assert text.count("\n### ") == text.count("\n*Checked*: ") == 17
    assert max(map(len, text.splitlines())) <= 100


def test_1_expected_peak(plan: Plan, measured: Callable[..., int]) -> None:
    assert plan.memory.peak_bytes == measured()


def test_2_wrapping(plan: Plan, measured: Callable[..., int]) -> None:
    wanted = {"": 4 * (DEPTH * BLOCK + ROOT), "blocks.*": 4 * BLOCK, "blocks.* head": 4 * BLOCK}
    for globs, unsharded in wanted.items():
        other = plan.replan(units=globs.split()).memory
        rows = [row for row in other.unsharded() if row.what == "parameters"]
        assert max(row.bytes for row in rows) == unsharded
    assert plan.replan(units=[]).memory.peak_bytes == measured(units=[])


def test_3_best_batch(names: dict[str, Any], measured: Callable[..., int]) -> None:
    limit = names["largest"]
    assert measured(zeros(limit.size, 32)) <= 4 * 2**20 < measured(zeros(limit.size + 1, 32))
    assert limit.plan.workload.call[0][0].shape == (limit.size, 32)


def test_4_longest_sequence(names: dict[str, Any], measured: Callable[..., int]) -> None:
    limit = names["longest"]
    assert measured(zeros(4, limit.size)) <= 4 * 2**20 < measured(zeros(4, limit.size + 1))


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_5_world_size(names: dict[str, Any], world_size: int) -> None:
    report = names["plan"].replan(world_size=world_size).memory
    with process_groups.fake_process_group(0, world_size):
        model = names["Net"]()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        shards = sum(4 * p.to_local().numel() for p in model.parameters())
    held = report.snapshot("", "Before Pre-Forward")
    assert held[Category.SHARDED_PARAM] == shards
    assert held[Category.OPT_STATE] == 2 * shards + 4 * PARAMETERS  # two moments, `step` each
    assert sum(held.values()) == 3 * shards + 4 * PARAMETERS + BATCH


def test_6_optimizer_on_the_cpu(plan: Plan, measured: Callable[..., int]) -> None:
    offloaded = plan.replan(offload=CPUOffloadPolicy()).memory
    assert offloaded.peak_bytes == measured(offload=CPUOffloadPolicy())
    behind = offloaded.host_cells()["", State.AFTER_POST_BACKWARD]
    assert sum(behind.values()) == 4 * SHARDS + 4 * PARAMETERS  # and the gradients
    assert offloaded.peak_by_category[Category.OPT_STATE] == 0


def test_7_which_checkpoint_policy(plan: Plan, measured: Callable[..., int]) -> None:
    for policy in ("selective", "full"):
        assert plan.replan(checkpoint=policy).memory.peak_bytes == measured(checkpoint=policy)
    # Backward reads the results of: norm, qkv, attention, out (for up: x + out), up, gelu.
    full = plan.replan(checkpoint="full").memory.recomputed()
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert full == {
        "aten.addmm": 3 * DEPTH,
        **{name: DEPTH for name in ("aten.native_layer_norm", attention, "aten.gelu")},
        "aten.add.Tensor": DEPTH,
    }
    assert plan.memory.recomputed() == {}


def test_8_policies_compared(names: dict[str, Any]) -> None:
    plan, model, tokens = names["plan"], names["model"], names["tokens"]
    with checkpointed(model, names["save_attention"]):
        eager = left_by_forward(model, tokens)
    assert kept_by(plan.replan(checkpoint=names["save_attention"]).memory) == eager

    def heavy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is aten.addmm.default or "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    with checkpointed(model, heavy):
        eager = left_by_forward(model, tokens)
    unread = {f"blocks.{i}": HIDDEN for i in range(DEPTH)}  # the result of each block's `down`
    assert kept_by(plan.replan(checkpoint="selective").memory) + Counter(unread) == eager


def test_9_policies_per_unit(plan: Plan, measured: Callable[..., int]) -> None:
    policies = {"blocks.0": "full", "blocks.1": "selective"}
    mixed = plan.replan(checkpoint=policies).memory
    kept = kept_by(mixed)
    assert kept["blocks.0"] == HIDDEN  # what it returns
    log_sums = 4 * ROWS * 4  # of attention, f32[batch, heads, seq]
    assert kept["blocks.1"] == HIDDEN * (1 + 3 + 1 + 1 + 4) + log_sums  # qkv, attention, out, up
    norms = 2 * 4 * ROWS  # mean and deviation of each row
    more = 2 * HIDDEN + 4 * HIDDEN + norms  # norm, x + out, gelu; `out` is not kept
    assert kept["blocks.2"] == kept["blocks.1"] + more - HIDDEN
    assert mixed.peak_bytes == measured(checkpoint=policies)


def test_10_reduction_in_fp32(names: dict[str, Any], measured: Callable[..., int]) -> None:
    peaks = []
    for dtype, copies in ((BF16, 0), (torch.float32, 4 * BLOCK)):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=dtype)
        report = names["small"].replan(mixed_precision=policy).memory
        cells = report.cells().values()
        assert max(cell[Category.REDUCE_SCATTER] for cell in cells) == copies
        peaks.append(measured(names["tokens"][:1], mixed_precision=policy))
        assert report.peak_bytes == peaks[-1]
    assert peaks[0] < peaks[1]


def test_11_custom_mixed_precision(names: dict[str, Any], measured: Callable[..., int]) -> None:
    policies = names["exact_head"]
    report = names["plan"].replan(mixed_precision=policies).memory
    assert report.peak_bytes == measured(mixed_precision=policies)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.sample(1)
def test_12_hsdp(plan: Plan, measured: Callable[..., int], replicas: int) -> None:
    options = {"strategy": "hybrid_shard", "world_size": (replicas, 8 // replicas)}
    peak = plan.replan(**options).memory.peak_bytes
    assert peak == measured(**options)
    # Parameters and two moments, `replicas` times as large; no gradient is sharded at the peak.
    assert plan.memory.peak_by_category[Category.SHARDED_GRAD] == 0
    assert peak - plan.memory.peak_bytes == (replicas - 1) * 3 * SHARDS


@pytest.mark.parametrize("ranks", [4, 2])
@pytest.mark.sample(1)
def test_13_smaller_mesh(plan: Plan, measured: Callable[..., int], ranks: int) -> None:
    report = plan.replan(reshard_after_forward=ranks).memory
    assert report.peak_bytes == measured(reshard_after_forward=ranks)
    read = DEPTH * (BLOCK - BIASES) + VOCAB * DIM  # not biases, not the embedding
    held = report.snapshot("", "After Post-Forward")
    assert held[Category.SHARDED_PARAM] == SHARDS + 4 * read // ranks


def test_14_no_reshard_safely(plan: Plan, measured: Callable[..., int]) -> None:
    report = plan.replan(reshard_after_forward=False).memory
    peak = measured(reshard_after_forward=False)
    report.assert_fits(peak)
    with pytest.raises(DoesNotFitError, match="1 B too much"):
        report.assert_fits(peak - 1)


def test_15_most_activation_memory(names: dict[str, Any]) -> None:
    report = names["plan"].memory
    eager = left_by_forward(names["model"], names["tokens"])
    assert kept_by(report) == eager
    at_peak = report.peak_by_module("Activation", depth=2)
    for block in ("blocks.0", "blocks.1", "embed"):  # the peak is in the backward of blocks.2
        assert at_peak[block] == eager[block]
    assert sum(at_peak.values()) == report.peak_by_category[Category.ACTIVATION]
    assert sum(report.peak_by_module().values()) == report.peak_bytes
    with pytest.raises(fxshard.errors.ConfigError, match="Unsharded Param"):
        report.peak_by_module("Activations")


def test_16_unsharded_memory(names: dict[str, Any]) -> None:
    rows = [row for row in names["plan"].memory.unsharded() if row.what == "parameters"]
    with process_groups.fake_process_group(0, 8):
        model = names["Net"]()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        with oracles.count_collectives() as seen:
            model(names["tokens"])
    gathered = [call.nbytes for call in seen.calls if call.kind == "all_gather"]
    forward = [row for row in rows if row.since[1] == "forward"]
    assert [row.bytes for row in forward] == gathered == [4 * ROOT, *DEPTH * [4 * BLOCK]]
    blocks = [f"blocks.{i}" for i in range(DEPTH)]
    assert [row.unit for row in forward] == ["(root)", *blocks]
    backward = [(row.unit, row.bytes) for row in rows if row.since[1] == "backward"]
    head = ("(root)", 4 * VOCAB * DIM)
    assert backward == [head, *((name, 4 * (BLOCK - BIASES)) for name in blocks[::-1])]
    assert all(row.until is not None for row in rows)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 2, "no_sync": True, "checkpoint": "selective"},
        {"offload": CPUOffloadPolicy()},
        {"optimizer_in_backward": True},
        {"strategy": "no_shard"},
    ],
)
def test_answers_add_up_to_the_report(plan: Plan, options: dict[str, Any]) -> None:
    report = plan.replan(**options).memory
    parts = report.peak_by_category
    communicated = (Category.ALL_GATHER, Category.REDUCE_SCATTER)
    whole = (*communicated, Category.UNSHARDED_PARAM, Category.UNSHARDED_GRAD)
    assert sum(row.peak_bytes for row in report.unsharded()) == sum(parts[c] for c in whole)
    for number in range(report.micro_batches):
        held = report.snapshot("", "After Post-Forward", micro_batch=number)
        kept = report.kept_for_backward(number)
        assert sum(each.bytes for each in kept) == held[Category.ACTIVATION]
        assert not [each for each in kept if each.why == "held to the end"]
    with pytest.raises(fxshard.errors.ConfigError, match="micro_batch=2"):
        report.kept_for_backward(2)


def test_17_checkpoints_that_keep(names: dict[str, Any]) -> None:
    model = names["model"]
    report = names["plan"].replan(checkpoint="full").memory
    with checkpointed(model, None):
        eager = left_by_forward(model, names["tokens"])
    assert kept_by(report) == eager
    inside = {each.name: each for each in report.kept_for_backward() if each.checkpointed}
    assert [each.module for each in inside.values()] == [f"blocks.{i}" for i in range(DEPTH)]
    readers = ["blocks.1, blocks.1.norm", "blocks.2, blocks.2.norm", "head"]
    whys = [f"backward of {modules} reads it" for modules in readers]
    assert [each.why for each in inside.values()] == whys
    held = report.snapshot("", "After Post-Forward")
    assert sum(each.bytes for each in report.kept_for_backward()) == held[Category.ACTIVATION]
