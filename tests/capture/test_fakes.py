"""Fake values against the kernels themselves: dtypes, strides and the bytes of storages."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture import fakes, strides
from fxshard.capture.strides import KernelFakeMode
from tests.eager import assert_trains_like_eager

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32


def described(result: Any) -> list[Any]:
    """dtype, sizes, strides, offset and bytes of each tensor."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [
        (t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
        for t in results
    ]


def assert_as_the_kernel(target: Any, *args: Any) -> None:
    """What the rule makes of torch's fake value of ``target(*args)`` is what the kernel gives."""
    mode = FakeTensorMode()
    fake = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
    with mode:
        value = fakes.RULES[target](fake, target(*fake))
    assert described(value) == described(target(*args))


@pytest.mark.parametrize(
    ("input", "params"), [(FP32, FP32), (BF16, FP32), (BF16, BF16), (BF16, None)]
)
def test_statistics_of_norms(input: Any, params: Any) -> None:
    x, rows = torch.randn(4, 8, 5, 5, dtype=input), torch.randn(4, 3, 8, dtype=input)
    weight, bias = (None if params is None else torch.ones(8, dtype=params) for _ in range(2))
    numbers = True, 0.1, 1e-5
    assert_as_the_kernel(aten._native_batch_norm_legit.no_stats, x, weight, bias, *numbers)
    assert_as_the_kernel(aten.native_batch_norm.default, x, weight, bias, None, None, *numbers)
    assert_as_the_kernel(aten.native_group_norm.default, x, weight, bias, 4, 8, 25, 2, 1e-5)
    assert_as_the_kernel(aten.native_layer_norm.default, rows, [8], weight, bias, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, BF16, FP32, torch.float64])
def test_norms_of_weights(dtype: torch.dtype) -> None:
    v, g = torch.randn(4, 7).to(dtype), torch.ones(4, 1, dtype=dtype)
    assert_as_the_kernel(aten._weight_norm_interface.default, v, g)
    assert_as_the_kernel(aten._weight_norm_interface.default, v, torch.ones(1, 7, dtype=dtype), 1)


@pytest.mark.parametrize(("input", "params"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_norms_that_hold_statistics(input: Any, params: Any) -> None:
    x = torch.randn(4, 8, 5, 5, dtype=input)
    weight, bias, mean, var = (torch.ones(8, dtype=params) for _ in range(4))
    held = (x, weight, bias, mean, var)
    assert_as_the_kernel(aten._native_batch_norm_legit_functional.default, *held, True, 0.1, 1e-5)
    assert_as_the_kernel(aten._native_batch_norm_legit_no_training.default, *held, 0.1, 1e-5)
    _, *stats = aten.native_group_norm.default(x, weight, bias, 4, 8, 25, 2, 1e-5)
    sizes = (weight, 4, 8, 25, 2, [True, True, True])
    assert_as_the_kernel(aten.native_group_norm_backward.default, x, x, *stats, *sizes)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x,
    "row": lambda x: x[1],
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 1:],
    "every second": lambda x: x[:, ::2],
    "transposed": lambda x: x.t()[1:],
    "expanded": lambda x: x[:1].expand(4, 6),
}


@pytest.mark.parametrize("view", VIEWS)
def test_changed_copies_of_views_have_all_of_the_storage(view: str) -> None:
    x = VIEWS[view](torch.zeros(4, 6))
    assert_as_the_kernel(aten.copy.default, x, torch.ones(x.shape))
    assert_as_the_kernel(aten.select_scatter.default, x, torch.ones(x.select(0, 0).shape), 0, 0)
    assert_as_the_kernel(aten.slice_scatter.default, x, torch.ones(x[:2].shape), 0, 0, 2)
    assert_as_the_kernel(aten.as_strided_scatter.default, x, torch.ones(2), [2], [1])
    if x.dim() > 1:
        diagonal = torch.ones(x.diagonal().shape)
        assert_as_the_kernel(aten.diagonal_scatter.default, x, diagonal)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_losses_lie_in_the_storage_of_what_they_sum_up(reduction: int, dtype: Any) -> None:
    x, y = torch.rand(3, 5, dtype=dtype), torch.rand(1, 5, dtype=dtype)
    assert_as_the_kernel(aten.mse_loss.default, x, y, reduction)
    assert_as_the_kernel(aten.smooth_l1_loss.default, x, y, reduction, 1.0)
    assert_as_the_kernel(aten.soft_margin_loss.default, x, y, reduction)
    assert_as_the_kernel(aten.binary_cross_entropy.default, x, x, None, reduction)


@pytest.mark.parametrize("kernel", [(3, 1), (2, 2)])
def test_summed_columns_lie_in_a_storage_of_the_size_of_the_input(kernel: tuple[int, int]) -> None:
    columns = torch.randn(2, 3 * kernel[0] * kernel[1], 4 * (9 - kernel[1]))
    size = (3 + kernel[0], 8)
    assert_as_the_kernel(aten.col2im.default, columns, size, kernel, [1, 1], [0, 0], [1, 1])
    wide = torch.randn(1, 4, 4)
    assert_as_the_kernel(aten.col2im.default, wide, [8, 8], [2, 2], [1, 1], [0, 0], [6, 6])


def layouts(shape: tuple[int, int, int], dtype: Any = FP32) -> list[Tensor]:
    """Numbers between 0.2 and 0.7 of `shape`, whose dimensions lie in other orders in memory.

    Of the last one all rows of the second dimension are the same.
    """
    found = []
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        there = torch.rand([shape[i] for i in order]) * 0.5 + 0.2
        found.append(there.permute([order.index(i) for i in range(3)]).to(dtype))
    return [*found, found[0][:, :1].expand(shape)]


ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten._log_softmax_backward_data.default: (1, FP32),
    aten.div.Tensor_mode: ("floor",),
    aten.elu_backward.default: (1.0, 1.0, 1.0, False),
    aten.hardtanh_backward.default: (-1.0, 1.0),
    aten.huber_loss_backward.default: (0, 1.0),
    aten.mse_loss_backward.default: (0,),
    aten.native_dropout_backward.default: (2.0,),
    aten.pow.Scalar: (2,),
    aten.rrelu_with_noise_backward.default: (0.2, 0.8, True, False),
    aten.smooth_l1_loss_backward.default: (0, 1.0),
    aten.softplus_backward.default: (1.0, 20.0),
    aten.threshold_backward.default: (0.4,),
}


TAKES_NUMBERS = (aten.div.Tensor_mode, aten.floor_divide.default)  # as tensors


@pytest.mark.parametrize("op", strides.RULES, ids=str)
@pytest.mark.sample(7)
def test_strides_of_fakes_are_those_of_kernels(op: Any) -> None:
    needed = [a for a in op._schema.arguments if not a.has_default_value()]
    count, differs = sum(str(a.type) == "Tensor" for a in needed), False
    for tensors in itertools.product([*layouts((2, 3, 4)), torch.tensor(0.5)], repeat=count):
        if not all(tensor.dim() for tensor in tensors) and op not in TAKES_NUMBERS:
            continue
        given, rest = iter(tensors), iter(ARGUMENTS.get(op, ()))
        args: list[Any] = [next(given if str(a.type) == "Tensor" else rest) for a in needed]
        named = {a.name: args.pop() for a in needed if a.kwarg_only}
        if op is aten.native_dropout_backward.default:
            args[1] = args[1] > 0.4
        expected = described(op(*args, **named))
        seen = []
        for mode in (FakeTensorMode(), KernelFakeMode()):
            fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            with mode:
                seen.append(described(op(*fake, **named)))
        assert seen[1] == expected
        differs |= seen[0] != expected
    assert differs, "torch's fake kernel is right now: the rule can go"


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 4), (5, 3, 4, 2), (1, 3, 4, 2), (5, 3, 1, 4)])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.sample(3)
def test_batch_norms_lie_as_their_kernels_make_them(shape: tuple[int, ...], train: bool) -> None:
    dims = range(len(shape))
    orders = [tuple(dims), tuple(reversed(dims)), (0, *dims[2:], 1), (0, *dims[:1:-1], 1)]
    if len(shape) == 4:
        orders += [(0, 3, 1, 2), (2, 0, 3, 1)]
    inputs = [torch.rand([shape[i] for i in o]).permute(*map(o.index, dims)) for o in orders]
    mode, ones = KernelFakeMode(), torch.ones(shape[1])
    backward = aten.native_batch_norm_backward.default
    for x in inputs:
        for op in (aten.native_batch_norm, aten._native_batch_norm_legit_functional):
            args = (x, ones, ones, ones, ones, train, 0.1, 1e-5)
            assert faked(mode, op, args)[0].stride() == op(*args)[0].stride(), (op, x.stride())
        for grad in inputs:
            args = (grad, x, *[ones] * 5, train, 1e-5, [True, True, True])
            strides = faked(mode, backward, args)[0].stride()
            assert strides == backward(*args)[0].stride(), (x.stride(), grad.stride())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_grouped_products_have_padded_rows(dtype: Any) -> None:
    columns = 20  # 24 where eight of bf16 are aligned
    rows, weights = torch.ones(8, 16, dtype=dtype), torch.ones(4, columns, 16, dtype=dtype).mT
    ends = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    for args in (
        (rows, weights, ends),
        (torch.ones(16, 8, dtype=dtype), rows, ends),
        (torch.ones(4, 8, 16, dtype=dtype), weights),
        (torch.ones(4, 8, 16, dtype=dtype), torch.ones(16, 8, dtype=dtype), ends),
    ):
        made = aten._grouped_mm.default(*args)
        found = faked(KernelFakeMode(), aten._grouped_mm.default, args)
        assert described(found) == described(made)
    with pytest.raises(RuntimeError, match="do not match"):
        faked(KernelFakeMode(), aten._grouped_mm.default, (weights, rows, ends))


def faked(mode: FakeTensorMode, op: Any, args: tuple[Any, ...]) -> Any:
    fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
    with mode:
        return op(*fakes)


LOSS_GRADIENTS = {
    aten.mse_loss_backward.default: (0,),
    aten.huber_loss_backward.default: (0, 1.0),
    aten.smooth_l1_loss_backward.default: (0, 1.0),
    aten.soft_margin_loss_backward.default: (0,),
}


@pytest.mark.parametrize("dtypes", list(itertools.product((FP32, BF16), repeat=3)))
@pytest.mark.parametrize("op", LOSS_GRADIENTS, ids=str)
def test_gradients_of_losses_have_the_dtype_that_kernels_give(op: Any, dtypes: Any) -> None:
    args = (*(torch.rand(2, 3).to(dtype) for dtype in dtypes), *LOSS_GRADIENTS[op])
    try:
        expected = op(*args)
    except RuntimeError:
        return  # the kernel takes one dtype alone
    assert described(faked(KernelFakeMode(), op, args)) == described(expected)


class Transposes(nn.Module):
    """A view in backward that exists of the real gradient, and not of torch's fake one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.softplus(self.linear(x).view(2, 4, 6))
        return (y.transpose(1, 2) * torch.arange(4.0)).sum()


def test_views_in_backward_exist() -> None:
    assert_trains_like_eager(Transposes, torch.randn(8, 6))


class Assigns(nn.Module):
    """Writes into parts of tensors, and ends in a mean squared error; f32[4, 6] -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = torch.zeros(4, 6)
        z[1:] = y[0]  # broadcast
        z[:, 2:] = torch.arange(4)  # in another dtype
        z[0, 1:3] = y[1, :2]
        w = torch.tanh(z).clone()
        w[:, 0].copy_(y[:, 0])
        w.diagonal().copy_(y[0, :4])
        return F.mse_loss(w, z)


class Mixed(nn.Module):
    """Norms with fp32 parameters of bf16 inputs; f32[2, 8, 4, 4] -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)
        self.batch, self.group, self.layer = (
            nn.BatchNorm2d(8),
            nn.GroupNorm(2, 8),
            nn.LayerNorm(4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).bfloat16()
        for norm in (self.batch, self.group, self.layer):
            x = x + F.silu(norm(x))
        return F.smooth_l1_loss(x.float(), torch.ones(x.shape))


@pytest.mark.parametrize(
    ("build", "shape"), [(Assigns, (4, 6)), (Mixed, (2, 8, 4, 4))], ids=["assigns", "mixed"]
)
def test_static_equals_measured(build: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    result = fxshard.validate(build(), (torch.randn(shape),), world_size=2)
    assert result.max_abs_difference == 0, result.table(only_different=True)


TARGET, CHANCES = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(0.1, 0.9, 32).view(4, 8)
ONE_OF, SIGNS, WEIGHT = torch.arange(4), TARGET.sign(), torch.ones(8)
SOME_OF = torch.tensor([[1, 2, -1, 0, 0, 0, 0, 0]] * 4)
WINDOWS = [target for target, rule in fakes.RULES.items() if rule is fakes.window]


@pytest.mark.parametrize("target", WINDOWS, ids=str)
def test_a_periodic_window_has_an_element_more(target: Any) -> None:
    more = len(target._schema.arguments) - 5  # dtype, layout, device and pin_memory come last
    for length, periodic in itertools.product((0, 1, 2, 5), (True, False)):
        assert_as_the_kernel(target, length, *[periodic, 0.5, 0.5][:more])


def test_windows_are_as_measured() -> None:
    class Spectrum(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            window = torch.hann_window(4)
            spectrum = torch.stft(
                super().forward(x).flatten(), 4, window=window, return_complex=True
            )
            return spectrum.abs().sum() + (x * torch.kaiser_window(x.shape[1])).sum()

    result = fxshard.validate(Spectrum(4, 4), (torch.randn(2, 4),), world_size=2)
    assert result.max_abs_difference == 0, result.table(only_different=True)


# Called with f32[4, 8], and with reduction="mean" or "sum".
LOSSES: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy": lambda x, **how: F.binary_cross_entropy(x.sigmoid(), CHANCES, **how),
    "binary_cross_entropy, weights": lambda x, **how: F.binary_cross_entropy(
        x.sigmoid(), CHANCES, weight=CHANCES, **how
    ),
    "binary_cross_entropy_with_logits": lambda x, **how: F.binary_cross_entropy_with_logits(
        x, CHANCES, pos_weight=WEIGHT, **how
    ),
    "cosine_embedding": lambda x, **how: F.cosine_embedding_loss(x, TARGET, SIGNS[:, 0], **how),
    "cross_entropy": lambda x, **how: F.cross_entropy(x, ONE_OF, **how),
    "cross_entropy, smooth": lambda x, **how: F.cross_entropy(
        x, ONE_OF, weight=WEIGHT, label_smoothing=0.1, **how
    ),
    "cross_entropy of chances": lambda x, **how: F.cross_entropy(x, CHANCES, **how),
    "hinge_embedding": lambda x, **how: F.hinge_embedding_loss(x, SIGNS, **how),
    "huber": lambda x, **how: F.huber_loss(x, TARGET, **how),
    "kl_div": lambda x, **how: F.kl_div(x.log_softmax(-1), CHANCES, **how),
    "l1": lambda x, **how: F.l1_loss(x, TARGET, **how),
    "margin_ranking": lambda x, **how: F.margin_ranking_loss(x, TARGET, SIGNS, **how),
    "mse": lambda x, **how: F.mse_loss(x, TARGET, **how),
    "mse, expanded": lambda x, **how: F.mse_loss(x, TARGET[:1].expand(4, -1), **how),
    "mse, weights": lambda x, **how: F.mse_loss(x, TARGET, weight=CHANCES, **how),
    "multi_margin": lambda x, **how: F.multi_margin_loss(x, ONE_OF, **how),
    "multilabel_margin": lambda x, **how: F.multilabel_margin_loss(x, SOME_OF, **how),
    "multilabel_soft_margin": lambda x, **how: F.multilabel_soft_margin_loss(x, CHANCES, **how),
    "nll": lambda x, **how: F.nll_loss(x.log_softmax(-1), ONE_OF, **how),
    "poisson_nll": lambda x, **how: F.poisson_nll_loss(x, CHANCES, **how),
    "smooth_l1": lambda x, **how: F.smooth_l1_loss(x, TARGET, **how),
    "soft_margin": lambda x, **how: F.soft_margin_loss(x, SIGNS, **how),
    "triplet_margin": lambda x, **how: F.triplet_margin_loss(x, TARGET, CHANCES, **how),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sample(16)
def test_losses_behind_the_model_are_as_measured(name: str, reduction: str) -> None:
    loss = functools.partial(LOSSES[name], reduction=reduction)
    result = fxshard.validate(nn.Linear(8, 8), (torch.randn(4, 8),), world_size=2, loss=loss)
    assert result.max_abs_difference == 0, result.table(only_different=True)


BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, WEIGHT, WEIGHT, training=True).sum(),
    "layer_norm": lambda x: F.layer_norm(x, (8,), WEIGHT, WEIGHT).sum(),
    "group_norm": lambda x: F.group_norm(x, 2, WEIGHT, WEIGHT).sum(),
    "fold": lambda x: F.fold(x.float().reshape(1, 8, 4), (3, 3), (2, 2)).pow(2).sum(),
    "mse in bf16": lambda x: F.mse_loss(x, TARGET.bfloat16()),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_kernels_make_in_a_loss_is_as_measured(name: str) -> None:
    model = nn.Linear(8, 8, dtype=BF16)
    rows = torch.randn(4, 8, dtype=BF16)
    result = fxshard.validate(model, (rows,), world_size=2, loss=BEHIND[name])
    assert result.max_abs_difference == 0, result.table(only_different=True)


def told_of(op: Any, *args: Any) -> tuple[list[Any], list[Any]]:
    """dtype, sizes and bytes of each result, None where there is none: of the kernel, of a fake."""
    mode = KernelFakeMode()
    with mode:
        made = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))

    def told(results: Any) -> list[Any]:
        return [
            t if t is None else (t.dtype, t.numel(), t.untyped_storage().nbytes()) for t in results
        ]

    return told(op(*args)), told(made)


def backwards(dtype: Any) -> dict[Any, tuple[Any, ...]]:
    """Kernels that are told which results are wanted: what they take in front of that."""
    x, weight = torch.randn(2, 4, 3, 3, dtype=dtype), torch.ones(4, dtype=dtype)
    rows = torch.ones(3, dtype=dtype)
    _, *of_groups = aten.native_group_norm(x, weight, weight, 2, 4, 9, 2, 1e-5)
    _, *of_layers = aten.native_layer_norm(x, [3], rows, rows, 1e-5)
    return {
        aten.native_batch_norm_backward: (x, x, weight, None, None, weight, weight, True, 1e-5),
        aten.native_group_norm_backward: (x, x, *of_groups, weight, 2, 4, 9, 2),
        aten.native_layer_norm_backward: (x, x, [3], *of_layers, rows, rows),
        aten.grid_sampler_2d_backward: (x, x, torch.rand(2, 3, 3, 2, dtype=dtype), 0, 0, False),
    }


@pytest.mark.parametrize("op", backwards(FP32), ids=str)
@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_masks_of_backward_kernels(op: Any, dtype: Any) -> None:
    args = backwards(dtype)[op]
    wanted = len(op.default._schema.returns)
    for mask in itertools.product([True, False], repeat=wanted):
        kernel, fake = told_of(op.default, *args, list(mask))
        assert fake == kernel, mask


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2])
@pytest.mark.sample(12)
def test_masks_of_convolutions(dims: int, kernel: int, dtype: Any, threads: int) -> None:
    """oneDNN gives the gradient of the weight with that of the bias, whatever the mask says."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = torch.randn(2, 4, *[4] * dims, dtype=dtype)
    weight = torch.randn(4, 4, *[kernel] * dims, dtype=dtype)
    steps, none = [1] * dims, [0] * dims
    for is_transposed, mask in itertools.product(
        [False, True], itertools.product([True, False], repeat=3)
    ):
        how = (steps, none, steps, is_transposed, none, 1)
        grad = aten.convolution(x, weight, None, *how)
        kernels, fake = told_of(
            *(aten.convolution_backward.default, grad, x, weight, [4], *how, list(mask))
        )
        assert fake == kernels, mask
    torch.set_num_threads(before)


BAGS = [aten._embedding_bag.default, aten._embedding_bag_forward_only.default]


@pytest.mark.parametrize("op", BAGS, ids=str)
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
def test_what_bags_are_kept_with(op: Any, mode: int, dtype: Any) -> None:
    offsets = torch.tensor([0, 2, 3, 4])
    for count, has_last, padding, of_each in itertools.product(
        [4, 12], [False, True], [-1, 0], [False, True] if mode == 0 else [False]
    ):
        rows, ids = torch.randn(5, 4, dtype=dtype), torch.zeros(count, dtype=torch.long)
        each = torch.ones(count, dtype=dtype) if of_each else None
        kernel, fake = told_of(
            *(op, rows, ids, offsets, False, mode, False, each, has_last, padding)
        )
        assert fake == kernel, (count, has_last, padding, of_each)


IMAGE, ROWS = torch.randn(2, 4, 3, 3), torch.randn(3, 4)
FIRST: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGE),
    "batch norm, eval": (lambda: nn.BatchNorm2d(4).eval(), IMAGE),
    "batch norm, untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), ROWS),
    "batch norm, frozen weight": (lambda: frozen(nn.BatchNorm1d(4), "weight"), ROWS),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
    "after a frozen stem": (
        lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.Tanh()),
        ROWS,
    ),
    "convolution, frozen weight": (lambda: frozen(nn.Conv2d(4, 6, 2), "weight"), IMAGE),
    "transposed, frozen weight": (lambda: frozen(nn.ConvTranspose2d(4, 6, 2), "weight"), IMAGE),
    "bags": (lambda: nn.EmbeddingBag(5, 4, mode="max"), torch.zeros(4, 3, dtype=torch.long)),
    "bags, fp64": (lambda: nn.EmbeddingBag(5, 4).double(), torch.zeros(1, 2, dtype=torch.long)),
}


def frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.sample(5)
def test_first_layers_are_as_measured(name: str) -> None:
    build, x = FIRST[name]
    result = fxshard.validate(build(), (x,), world_size=2)
    assert result.max_abs_difference == 0, result.table(only_different=True)
