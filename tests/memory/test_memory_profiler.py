"""The third measure: `torch.profiler`, which sees inside kernels, and is torch's own.

The report's peak with its rows for kernels is the profiler's peak, and each row is what the
profiler sees one operator take and give back.
"""

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxshard
from fxshard._torch import process_groups, trees
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.codegen.emit import Executor, TracedExecutor
from fxshard.config.checked import Config
from fxshard.config.world_size import grid
from fxshard.ir.splitting import configured_units
from fxshard.memory import kernels
from fxshard.runtime.module import sharded
from fxshard.runtime.sharding import Sharding
from fxshard.runtime.world.mesh import mesh_of, world_over
from fxshard.validation.tracker import Tracker, WatchedWorld
from tests import oracles
from tests.zoo import MODELS, built
from tests.zoo.more import MATRIX, checkpointed

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
# oneDNN's convolutions take memory that only oneDNN knows.
OPEN = {"convnet", "vit", "unet"}
LONG = {"t5", "mixtral", "qwen3_moe", "gemma3"}
KNOWN = [
    pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
    for name in MATRIX
    if name not in OPEN
]


def step_of(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    world_size: int,
    make_executor: Any = Executor,
    **options: Any,
) -> Any:
    """One training step (without optimizer) of rank 0 on a fake group, as a callable."""
    config = Config.from_options(options)
    units = configured_units(model, config)
    world = world_over(mesh_of(model, config, grid(world_size, config)), config, units)
    compiled = sharded(Sharding(model, units, world, config), make_executor)

    def step() -> None:
        leaves, _ = trees.tree_flatten(compiled(*args, **kwargs))
        (variant,) = compiled._fxshard.variants.values()
        roots = [leaves[i] for i in variant.program.signature.tangents]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        for param in compiled.parameters():
            param.grad = None

    step()
    return step


def rows_of(report: Any) -> collections.Counter[tuple[str, int | None]]:
    """How often each ``(operator, bytes)`` is among the rows for CPU kernels."""
    rows = (row for row in report.kernel_temporaries if row.backend == "cpu")
    return collections.Counter((row.op.split(".")[1], row.bytes) for row in rows)


def assert_as_profiled(
    model: nn.Module, args: Any, kwargs: Any, *, world_size: int = 8, **options: Any
) -> None:
    """Peak, and operator by operator; where rows are open, all other operators."""
    report = fxshard.plan(model, args, kwargs, world_size=world_size, **options).memory
    held = report.phases()[0].start
    rows = rows_of(report)
    open_rows = {op for op, size in rows if size is None}
    with process_groups.fake_process_group(0, world_size):
        step = step_of(model, args, kwargs, world_size, **options)
        seen = collections.Counter(oracles.profiler_temporaries(step))
        peak = oracles.profiler_peak_bytes(step, before=step)
    known = {row: count for row, count in rows.items() if row[0] not in open_rows}
    assert {row: count for row, count in seen.items() if row[0] not in open_rows} == known
    if open_rows:
        assert report.peak_with_kernels_bytes is None
    else:
        assert report.peak_with_kernels_bytes == sum(held) + peak


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.sample(3)
def test_peak_and_rows_are_the_profilers(name: str) -> None:
    model, args, kwargs = built(MATRIX[name])
    assert_as_profiled(model, args, kwargs, units=MATRIX[name].units)


@pytest.mark.parametrize("name", sorted(OPEN))
@pytest.mark.sample(2)
def test_where_a_kernel_is_open_all_others_are_known(name: str) -> None:
    model, args, kwargs = built(MATRIX[name])
    assert_as_profiled(model, args, kwargs, units=MATRIX[name].units)


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("mlp13", 7, {}),
        ("twice", 8, {"strategy": "shard_grad_op"}),
        ("mlp13", 2, {"strategy": "no_shard"}),
        ("twice", 4, {"reshard_after_forward": 2}),
        ("tied", 3, {"backward_prefetch": 0, "forward_prefetch": 2}),
    ],
)
def test_under_other_settings(name: str, world_size: int, options: dict[str, Any]) -> None:
    model, args, kwargs = built(MATRIX[name])
    options = {"units": MATRIX[name].units, **options}
    assert_as_profiled(model, args, kwargs, world_size=world_size, **options)


@pytest.mark.parametrize("selective", [False, True])
def test_with_checkpoints(selective: bool) -> None:
    case = MATRIX["dropout"]
    torch.manual_seed(0)
    args, kwargs = case.batch(0, 0)
    assert_as_profiled(checkpointed(case, selective=selective), args, kwargs, units=case.units)


@pytest.mark.parametrize("name", ["gru", "moe", "bert", "mlp13"])
@pytest.mark.sample(2)
def test_below_fp32(name: str) -> None:
    """oneDNN multiplies all but the smallest matrices (those of mlp13) in memory of its own."""
    model, args, kwargs = built(MATRIX[name])
    args, kwargs = torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (args, kwargs)
    )
    assert_as_profiled(model.bfloat16(), args, kwargs, units=MATRIX[name].units)


def test_unknown_kernels_are_named_and_leave_the_sum_open() -> None:
    model, args, kwargs = built(MODELS["convnet"])
    report = fxshard.plan(model, args, kwargs, world_size=2).memory
    assert report.peak_with_kernels_bytes is None
    unknown = {row.op for row in report.kernel_temporaries if row.bytes is None}
    assert unknown == {"aten.convolution", "aten.convolution_backward"}


def test_gloo_buffers_are_rows_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    report = fxshard.plan(model, (torch.ones(1, 6),), world_size=2).memory
    rows = [row for row in report.kernel_temporaries if row.backend == "gloo"]
    # weight f32[4,6] = 96 bytes, shards of 48: gathered once in forward only (a first layer's
    # backward needs no weight), reduced once.
    assert [(row.op, row.bytes) for row in rows] == [
        ("all_gather", 96),
        ("reduce_scatter", 96),
    ]


def test_analysis_changes_no_live_byte() -> None:
    """The profiler sees the same memory with the tracker and without it."""
    model, args, kwargs = built(MODELS["tied"])
    units = MODELS["tied"].units
    with process_groups.fake_process_group(0, 4):
        step = step_of(model, args, kwargs, 4, units=units)
        plain = oracles.profiler_peak_bytes(step, before=step)
    tracker = Tracker()

    def make(program: Any, world: Any) -> Executor:
        return TracedExecutor(program, WatchedWorld(world, tracker), tracker)

    model, args, kwargs = built(MODELS["tied"])
    with process_groups.fake_process_group(0, 4), tracker:
        step = step_of(model, args, kwargs, 4, make, units=units)
        tracked = oracles.profiler_peak_bytes(step, before=step)
    assert tracked == plain


# -- operator by operator -------------------------------------------------------------------------


def row_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The bytes that the report would name for ``target(*args, **kwargs)``."""
    if target in kernels.UNKNOWN:
        return None
    mode, graph = FakeTensorMode(), fx.Graph()
    fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
    nodes = [graph.placeholder("x") if isinstance(a, Tensor) else a for a in args]
    for node, value in zip(nodes, fake, strict=True):
        if isinstance(value, Tensor):
            node.meta["val"] = value
    node = graph.call_function(target, tuple(nodes), kwargs)
    with mode:
        node.meta["val"] = target(*fake, **kwargs)
    formula = kernels.FORMULAS.get(target)
    return formula(node, torch.get_num_threads())[0] if formula else 0


def assert_row(target: Any, *args: Any, **kwargs: Any) -> None:
    """The row of one operator is what the profiler sees it take, or is open."""
    results: list[Any] = []
    seen = oracles.profiler_temporaries(lambda: results.append(target(*args, **kwargs)))
    row = row_of(target, args, kwargs)
    if row is not None:
        assert [size for _, size in seen] == [row] * (row > 0), (target, args, kwargs)


DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``[2, 8, 4]``: contiguous, in fp32, transposed; and int64 ``[2, 8, 2]``, 0 to 3."""
    x = torch.randn(2, 8, 4)
    turned = torch.randn(4, 8, 2, dtype=dtype).transpose(0, 2)
    return x.to(dtype), x, turned, torch.arange(32).reshape(2, 8, 2) % 4


@dtypes
def test_elementwise_operators(dtype: torch.dtype) -> None:
    x, full, turned, index = tensors(dtype)
    for op in (aten.add, aten.sub, aten.mul, aten.div):
        for one, two in ((x, 2), (x, 2.0), (x, full), (x, turned), (index, 2), (index, 0.5)):
            assert_row(op.Tensor, one, two)
        assert_row(op.Tensor, x, torch.tensor(2.0, dtype=torch.float64))
        assert_row(op.Scalar, x, 2.0)
    for op in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge):
        for number in (0, 0.5):
            assert_row(op.Scalar, x, number)
            assert_row(op.Scalar, index, number)
        assert_row(op.Tensor, x, full)
    for op in (aten.minimum, aten.maximum):
        assert_row(op.default, x, full)
    for op in (aten.remainder, aten.bitwise_and, aten.bitwise_or):
        assert_row(op.Scalar, index, 3)
    assert_row(aten.rsub.Scalar, x, 1.0)
    assert_row(aten.floor_divide.default, index, 2)
    assert_row(aten.div.Tensor_mode, index, 2, rounding_mode="floor")
    assert_row(aten.where.self, x > 0, x, full)


@dtypes
def test_reductions_and_softmax(dtype: torch.dtype) -> None:
    x, _, turned, index = tensors(dtype)
    for value in (x, turned):
        assert_row(aten._softmax.default, value, -1, False)
        assert_row(aten._log_softmax.default, value, 0, False)
        assert_row(aten._softmax_backward_data.default, value, x, -1, dtype)
        assert_row(aten._log_softmax_backward_data.default, value, value, -1, dtype)
        assert_row(aten._safe_softmax.default, value, -1)
        assert_row(aten.mean.dim, value, [0], True)
        assert_row(aten.sum.dim_IntList, value, [0])
        assert_row(aten.sort.default, value, 1)
    assert_row(aten._safe_softmax.default, x, 1)
    assert_row(aten.mean.default, x)
    assert_row(aten.mean.dim, x, [-1], True, dtype=torch.float32)
    assert_row(aten.sum.default, x > 0)
    assert_row(aten.sum.dim_IntList, x, [0], dtype=torch.float32)
    assert_row(aten.cumsum.default, x, 0)
    assert_row(aten.cumsum.default, x, 0, dtype=torch.int32)
    assert_row(aten.sort.stable, index, stable=True, dim=0)
    assert_row(aten.repeat.default, x, [2, 1, 1, 3])


@dtypes
@pytest.mark.parametrize("threads", [1, 2])
def test_norms(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    x, _, turned, _ = tensors(dtype)
    for parameters in (torch.ones(4, dtype=dtype), torch.ones(4)):
        assert_row(aten.native_layer_norm.default, turned, [4], parameters, parameters, 1e-5)
        _, *stats = aten.native_layer_norm.default(x, [4], parameters, parameters, 1e-5)
        for grad, mask in (
            (x, [True] * 3),
            (turned, [True, True, False]),
            (x, [True] + [False] * 2),
        ):
            rest = ([4], *stats, parameters, parameters, mask)
            assert_row(aten.native_layer_norm_backward.default, grad, x, *rest)
    image = torch.randn(4, 8, 4, 4, dtype=dtype)
    for weight in (torch.ones(8, dtype=dtype), torch.ones(8)):
        held = (image, *[weight.clone() for _ in range(4)])
        assert_row(aten._native_batch_norm_legit_functional.default, *held, True, 0.1, 1e-5)
        assert_row(aten._native_batch_norm_legit_no_training.default, *held, 0.1, 1e-5)
        made = aten._native_batch_norm_legit_functional.default(*held, True, 0.1, 1e-5)
        for mask in ([True, True, True], [False, True, True]):
            rest = (weight, weight, weight, made[1], made[2], True, 1e-5, mask)
            assert_row(aten.native_batch_norm_backward.default, image, image, *rest)
        sizes = (4, 8, 16, 2)
        assert_row(aten.native_group_norm.default, image, weight, weight, *sizes, 1e-5)
        _, *stats = aten.native_group_norm.default(image, weight, weight, *sizes, 1e-5)
        rest = (*stats, weight, *sizes, [True, True, True])
        assert_row(aten.native_group_norm_backward.default, image, image, *rest)


@dtypes
def test_operators_with_indices(dtype: torch.dtype) -> None:
    x, full, _, index = tensors(dtype)
    table = torch.randn(4, 8, dtype=dtype)
    for which in (index, index[:1].expand(2, 8, 2), index.transpose(0, 1), index[0, :, 0]):
        assert_row(aten.embedding.default, table, which)
        grad = torch.randn(*which.shape, 8, dtype=dtype)
        assert_row(aten.embedding_dense_backward.default, grad, which, 4, -1, False)
        grad = torch.randn(8, *which.shape, dtype=dtype).movedim(0, -1)
        assert_row(aten.embedding_dense_backward.default, grad, which, 4, -1, False)
    for which in (index[0, :, 0], index[0, 0]):
        assert_row(aten.index_select.default, x, 1, which)
    assert_row(aten.gather.default, x, -1, index)
    assert_row(aten.scatter.value, x, -1, index, 1.0)
    assert_row(aten.scatter.src, x, -1, index, x[..., :2].contiguous())
    assert_row(aten.scatter_add.default, x, -1, index, x[..., :2].contiguous())
    assert_row(aten.histc.default, full, 7, 0, 3)
    assert_row(aten.histc.default, full.transpose(0, 2), 4, 0, 3)


@dtypes
def test_matrix_products_and_dropout(dtype: torch.dtype) -> None:
    x, _, turned, _ = tensors(dtype)
    for rows, inner in ((16, 8), (16, 16), (16, 17), (40, 40)):
        one, two = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, 16, dtype=dtype)
        assert_row(aten.mm.default, one, two)
        assert_row(aten.addmm.default, torch.randn(16, dtype=dtype), one, two)
        assert_row(aten.bmm.default, one[None], two[None])
        assert_row(aten.baddbmm.default, one[None] @ two[None], one[None], two[None])
    for value in (x, turned):
        assert_row(aten.native_dropout.default, value, 0.1, True)
        assert_row(aten.native_dropout_backward.default, value, value > 0, 1.1)


@dtypes
def test_operators_without_a_row_take_nothing(dtype: torch.dtype) -> None:
    x, _, turned, _ = tensors(dtype)
    matrix = torch.randn(16, 8, dtype=dtype)
    for op in (aten.gelu, aten.silu, aten.relu, aten.tanh, aten.rsqrt, aten.exp, aten.clone):
        assert_row(op.default, turned)
    for op in (aten.gelu_backward, aten.silu_backward, aten.tanh_backward):
        assert_row(op.default, turned, turned)
    assert_row(aten.threshold_backward.default, x, x, 0)
    assert_row(aten.pow.Tensor_Scalar, x, 2)
    assert_row(aten.masked_fill.Scalar, x, x > 0, 0.0)
    assert_row(aten.topk.default, x, 2)
    assert_row(aten.amax.default, x, [0])
    assert_row(aten.tril.default, matrix)
    assert_row(aten._to_copy.default, x, dtype=torch.float64)
    assert_row(aten.nll_loss_forward.default, matrix, torch.arange(16) % 8, None, 1, -100)
    assert_row(aten.constant_pad_nd.default, x, [1, 1])


@pytest.mark.parametrize("rows", [8, 200, 800])
@pytest.mark.parametrize("transposed", [False, True])
def test_attention_blocks(rows: int, transposed: bool) -> None:
    """The block sizes of CPU attention change with the sequence length."""
    q = torch.randn(1, 2, rows, 16)
    assert_row(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
    grad = q if transposed else torch.randn(1, rows, 2, 16).transpose(1, 2)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert_row(backward, grad, q, q, q, out, sums, 0.0, False)
