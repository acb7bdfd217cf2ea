"""CUDA's autocast for tensors that are on the CPU, while a model is captured for a GPU.

``torch.autocast("cuda")`` turns itself off on a machine without a GPU, and that of "cpu" casts
other operators. Inside `on_cpu_tensors` both are one, and cast what CUDA's casts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxshard._torch import export, modes, trees
from fxshard._torch.export import OpOverload
from fxshard._torch.operators import schema_of
from fxshard.errors import CaptureError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What each operator is cast to (torch/include/ATen/autocast_mode.h, the ``AT_FORALL_`` lists, and
# aten/src/ATen/autocast_mode.cpp for cuDNN's, linalg_matrix_sqrth, and what is refused). Which of
# these a version of torch really has is asked of its dispatcher.
LOWER_PRECISION = _names(
    """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention _cudnn_rnn
    """
)
FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
    """
)
FP32_RESULT = _names(  # by their argument ``dtype``, unless the caller gives one
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    prod.dim_Dimname softmax.Dimname log_softmax.Dimname cumprod.dimname cumsum.dimname
    sum.dim_DimnameList
    """
)
FP32_OVERLOAD = {  # by an overload that has such an argument
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}
WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
REFUSED = frozenset({"binary_cross_entropy"})


@contextlib.contextmanager
def on_cpu_tensors() -> Iterator[None]:
    """While the block runs, ``torch.autocast`` of "cuda" and of "cpu" cast CPU tensors as CUDA's.

    Without the cache of casts: it would outlive the fake tensors of a capture.

    Raises:
        CaptureError: inside the block, where an autocast is entered that was made before it, as
            a decorator is: without a GPU it has turned itself off.
    """
    autocast = torch.autocast
    init, enter = autocast.__init__, autocast.__enter__

    def init_here(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, *args, **kwargs)

    def enter_here(self: Any) -> Any:
        if self.device == "cuda":
            raise CaptureError(
                "a torch.autocast('cuda') that was made before the capture is entered in forward. "
                "Without a GPU it turned itself off when it was made. Make it where it is entered: "
                "with torch.autocast('cuda', dtype=...) inside forward, not as a decorator."
            )
        return enter(self)

    with export.aten_kernels(_kernels()):
        autocast.__init__, autocast.__enter__ = init_here, enter_here  # type: ignore[method-assign]
        try:
            yield
        finally:
            autocast.__init__, autocast.__enter__ = init, enter  # type: ignore[method-assign]


def policy(name: str) -> str:
    """The list above that an operator of CUDA's autocast stands in.

    Raises:
        CaptureError: none: this torch casts an operator that fxshard does not know of.
    """
    lists = {
        "lower precision": LOWER_PRECISION,
        "fp32": FP32,
        "fp32 result": FP32_RESULT,
        "fp32 overload": FP32_OVERLOAD,
        "widest": WIDEST,
        "refused": REFUSED,
    }
    for what, names in lists.items():
        if name in names:
            return what
    raise CaptureError(
        f"torch {torch.__version__}: its autocast on CUDA casts aten::{name}, of which fxshard "
        f"does not know to what. Plan for CUDA without torch.autocast: mixed_precision=."
    )


def _kernels() -> dict[tuple[str, str], Callable[..., Any] | None]:
    """Kernels for AutocastCPU: CUDA's, and none for what only the CPU's casts."""
    cuda = export.aten_names("AutocastCUDA")
    kernels: dict[tuple[str, str], Callable[..., Any] | None] = {
        (name, "AutocastCPU"): None for name in export.aten_names("AutocastCPU")
    }
    return kernels | {(name, "AutocastCPU"): _kernel(name) for name in cuda}


def _kernel(name: str) -> Callable[..., Any]:
    op = export.aten_operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        what = policy(name)  # asked here: an operator that is not known matters where it is called
        with modes.without_autocast("cpu"):
            if what == "lower precision":
                args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cpu"))
            elif what == "fp32":
                args, kwargs = _cast((args, kwargs), torch.float32)
            elif what == "widest":
                args, kwargs = _cast((args, kwargs), _widest((args, kwargs)))
            elif what == "fp32 result" and _is_cast(args[0]):
                args, kwargs = _with_dtype(op, args, kwargs)
            elif what == "fp32 overload" and _is_cast(args[0]):
                other = export.aten_operator(FP32_OVERLOAD[name])
                given = list(args) + [a.default_value for a in schema_of(op).arguments[len(args) :]]
                return other(*given, dtype=torch.float32)
            elif what == "refused":
                raise CaptureError(
                    f"aten::{name} cannot be cast by torch.autocast('cuda'), which refuses it. Use "
                    f"torch.nn.functional.binary_cross_entropy_with_logits."
                )
            return op(*args, **kwargs)

    return kernel


def _is_cast(value: Any) -> bool:
    """Autocast leaves doubles, integers and complex numbers alone."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    leaves, spec = trees.tree_flatten(tree)
    return trees.tree_unflatten([x.to(dtype) if _is_cast(x) else x for x in leaves], spec)


def _widest(tree: Any) -> torch.dtype:
    leaves, _ = trees.tree_flatten(tree)
    if any(_is_cast(x) and x.dtype == torch.float32 for x in leaves):
        return torch.float32
    return torch.get_autocast_dtype("cpu")


def _with_dtype(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``dtype=torch.float32``, unless they say another."""
    position = [argument.name for argument in schema_of(op).arguments].index("dtype")
    given = args[position] if position < len(args) else kwargs.get("dtype")
    if given is not None:
        return args, kwargs
    return args[:position], {**kwargs, "dtype": torch.float32}
