"""Where a capture for CUDA differs from one for the CPU, on a machine without a GPU.

Tensors stay fake CPU ones; the operators that PyTorch runs on CUDA are put in place of the CPU's
while the model is traced, so nothing has to be corrected afterwards. docs/cuda.md lists what
differs; what lies inside kernels is in memory/cuda/kernels.py.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxshard._torch import export, fake_tensors, modes, trees
from fxshard._torch.export import OpOverload
from fxshard.capture import rng
from fxshard.capture.cuda import autocast
from fxshard.capture.strides import KernelFakeMode
from fxshard.errors import CaptureError
from fxshard.ir import tags
from fxshard.ir.program import Program

aten: Any = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
LOWEST = {SDPBackend.CUDNN_ATTENTION: -65504.0}  # of a mask; elsewhere minus infinity


@dataclasses.dataclass(frozen=True)
class Target:
    """The GPU that is planned for.

    Attributes:
        capability: its compute capability.
        cudnn: version of cuDNN, as ``torch.backends.cudnn.version()`` gives it.
        multiprocessors: how many it has.
    """

    capability: tuple[int, int]
    cudnn: int
    multiprocessors: int


# H100 and H200, with the cuDNN that the wheels of torch 2.11 bring (9.19.0).
TARGET = Target((9, 0), 91900, 132)


@contextlib.contextmanager
def substituted(target: Target = TARGET) -> Iterator[None]:
    """While the block runs, fake CPU tensors are computed with as on CUDA, in the whole process.

    Raises:
        CaptureError: the block is inside a ``torch.autocast`` that is off, as one for "cuda" is
            that was made without a GPU.
    """
    on = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    if modes.inside_autocast() and not on:
        raise CaptureError(
            "plan(device='cuda') is called inside a torch.autocast that is off: without a GPU, "
            "torch.autocast('cuda') turns itself off. Put it inside the model's forward, or call "
            "plan inside torch.autocast('cpu', dtype=...), which stands for CUDA's here; or take "
            "it away if it is meant to be off."
        )
    knows_grouped_efficient()  # asked before any mode is active
    kernels: dict[tuple[str, str], Callable[..., Any] | None] = {
        ("scaled_dot_product_attention", "AutogradCPU"): functools.partial(_attention, target),
        # With a kernel of its own it keeps its own formula of autograd, and is not decomposed.
        ("_fused_rms_norm", "CPU"): _never_run,
    }
    for name in RECURRENT:
        kernels[(name, "AutogradCPU")] = functools.partial(_refuse_recurrent, name)
    with (
        torch.inference_mode(False),  # which would pass the autograd keys by
        export.aten_kernels(kernels),
        autocast.on_cpu_tensors(),
    ):
        yield


def _never_run(*args: Any) -> Any:
    raise CaptureError("a CUDA kernel was called with values while a model was captured for CUDA")


# -- attention -----------------------------------------------------------------------------------


def _attention(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` as on CUDA (native/transformers/attention.cpp).

    Flash gets head dims padded to a multiple of 8, mem-efficient a mask whose rows start at
    multiples of 8; boolean masks become numbers to add.
    """
    call = _AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    backend = attention_backend(call, target)
    mask = _additive(attn_mask, query.dtype, LOWEST.get(backend, -math.inf))
    if backend == SDPBackend.CUDNN_ATTENTION:
        return aten._scaled_dot_product_cudnn_attention(
            *(query, key, value, mask, call.trains, dropout_p, is_causal, False), scale=scale
        )[0]
    if backend == SDPBackend.FLASH_ATTENTION:
        dim = query.shape[-1]
        padded = [F.pad(t, (0, -t.shape[-1] % 8)) if dim % 8 else t for t in (query, key, value)]
        out = aten._scaled_dot_product_flash_attention(
            *(*padded, dropout_p, is_causal, False),
            scale=1 / math.sqrt(dim) if scale is None else scale,
        )[0]
        return out[..., :dim] if dim % 8 else out
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            *(query, key, value, mask, call.trains, dropout_p, is_causal), scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        *(query, key, value, mask, dropout_p, is_causal, None), scale=scale, enable_gqa=enable_gqa
    )[0]


def _additive(mask: Tensor | None, dtype: torch.dtype, lowest: float) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask.logical_not(), lowest, torch.scalar_tensor(0.0, dtype=dtype))


def _aligned(mask: Tensor) -> Tensor:
    """``preprocess_mask``: padded to rows that start at multiples of 8, then cut again."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return F.pad(mask, (0, 8 - columns % 8))[..., :columns]


@dataclasses.dataclass(frozen=True)
class _AttentionCall:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """True if the log-sum-exp is wanted for backward."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.all)


def attention_backend(call: _AttentionCall, target: Target) -> SDPBackend:
    """The backend that CUDA's ``scaled_dot_product_attention`` takes.

    ``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cuda.enable_*_sdp`` are obeyed.
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, ``select_sdp_backend``)

    Raises:
        CaptureError: those leave no backend that takes the call.
    """
    fits = {
        SDPBackend.CUDNN_ATTENTION: _cudnn_takes,
        SDPBackend.FLASH_ATTENTION: _flash_takes,
        SDPBackend.EFFICIENT_ATTENTION: _efficient_takes,
        SDPBackend.MATH: lambda call, target: torch.backends.cuda.math_sdp_enabled(),
    }
    for backend in _order(target):
        if backend in fits and fits[backend](call, target):
            return backend
    shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in call.all)
    raise CaptureError(
        f"no kernel of scaled_dot_product_attention that is enabled takes this call on CUDA: "
        f"{shapes}, mask={call.mask is not None}, dropout={call.dropout}, causal={call.causal}. "
        f"Enable another in torch.nn.attention.sdpa_kernel."
    )


def _order(target: Target) -> list[SDPBackend]:
    """CuDNN is first where it is new and the GPU is Hopper or Blackwell; the user may set another.

    (``check_prefer_cudnn_attention`` in sdp_utils.cpp; it reads the environment too)
    """
    given = [SDPBackend(backend) for backend in export.attention_order()]
    default = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    last = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    prefers = not last and target.cudnn > 91500 and target.capability[0] in (9, 10)
    if given[:3] == default and prefers:
        return [SDPBackend.CUDNN_ATTENTION, *default]
    return given


def _dense(call: _AttentionCall, *, same_kv_heads: bool, grouped: bool = True) -> bool:
    """What every fused kernel asks for (native/transformers/sdp_utils_cpp.h)."""
    q, k, v = call.all
    if any(t.dim() != 4 for t in call.all) or not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    if q.shape[2] == 0 or k.shape[2] == 0:
        return False
    if call.mask is not None and call.mask.stride(-1) != 1:
        return False
    heads = [t.shape[1] for t in call.all]
    if not (call.grouped and grouped):
        return heads[0] == heads[1] == heads[2]
    if same_kv_heads:
        return heads[1] == heads[2] and heads[0] % heads[1] == 0
    return heads[0] % heads[1] == 0 and heads[0] % heads[2] == 0


def _rows_contiguous(call: _AttentionCall) -> bool:
    return all(t.stride(-1) == 1 for t in call.all)


def _half(call: _AttentionCall) -> bool:
    return call.query.dtype in HALF and all(t.dtype == call.query.dtype for t in call.all)


def _cudnn_takes(call: _AttentionCall, target: Target) -> bool:
    deterministic = torch.are_deterministic_algorithms_enabled()
    if not torch.backends.cuda.cudnn_sdp_enabled() or target.capability < (8, 0):
        return False
    if deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not _half(call) or not _dense(call, same_kv_heads=False) or (call.dropout * 16) % 1:
        return False
    if not (_rows_contiguous(call) or call.query.shape[-1] == 1) or not _mask_fits_cudnn(call):
        return False
    q, k, v = call.all
    dims = q.shape[-1], v.shape[-1]
    wide = dims == (192, 128) and target.capability[0] in (9, 10) and target.cudnn >= 91100
    return (
        (wide or max(dims) <= 128)
        and all(dim % 8 == 0 for dim in dims)
        and max(q.shape[:2]) <= 65535
        and k.shape[2] != 1
        and not (call.dropout and q.shape[2] == 1)
    )


def _mask_fits_cudnn(call: _AttentionCall) -> bool:
    """``check_attn_mask_shape`` in sdp_utils_cpp.h."""
    if call.mask is None:
        return True
    shape = (*call.query.shape[:3], call.key.shape[2])
    if call.mask.requires_grad or call.mask.dim() not in (2, 4):
        return False
    pairs = zip(reversed(call.mask.shape), reversed(shape), strict=False)
    return all(size in (1, want) for size, want in pairs)


def _flash_takes(call: _AttentionCall, target: Target) -> bool:
    q, k, v = call.all
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and target.capability >= (8, 0)
        and call.mask is None
        and _half(call)
        and _dense(call, same_kv_heads=True)
        and (_rows_contiguous(call) or q.shape[-1] == 1)
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and not (call.causal and q.shape[2] != k.shape[2])
    )


def _efficient_takes(call: _AttentionCall, target: Target) -> bool:
    q, k, v = call.all
    dtypes = (*HALF, torch.float32) if target.capability >= (8, 0) else (torch.half, torch.float32)
    unit = 8 if q.dtype in HALF else 4  # ``minimum_gemm_alignment`` on sm80 and newer
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and q.dtype in dtypes
        and all(t.dtype == q.dtype for t in call.all)
        and _dense(call, same_kv_heads=True, grouped=knows_grouped_efficient())
        and _rows_contiguous(call)
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] % unit == 0
        and v.shape[-1] % unit == 0
    )


@functools.cache
def knows_grouped_efficient() -> bool:
    """True if this torch's mem-efficient attention takes fewer heads of keys than of queries.

    ``can_use_mem_efficient_attention`` says so in newer versions, and their meta kernel of the
    backward gives gradients with the heads of the keys (torch/_meta_registrations.py).
    """
    q, kv = torch.empty(1, 2, 8, 8, device="meta"), torch.empty(1, 1, 8, 8, device="meta")
    state = (torch.empty(1, 2, 32, device="meta"), *2 * (torch.empty((), device="meta"),))
    grads = aten._scaled_dot_product_efficient_attention_backward(
        *(q, q, kv, kv, None, q, *state, 0.0, [True, True, True, False])
    )
    return bool(grads[1].shape == kv.shape)


# -- results that have another dtype or size on CUDA ----------------------------------------------

META = torch.device("meta")

# Their fake kernels ask whether the device is the CPU; on any other they give what CUDA gives
# (torch/_refs/__init__.py, torch/_decomp/decompositions.py, torch/_meta_registrations.py).
AS_ON_META: tuple[OpOverload, ...] = (
    aten.native_layer_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten._embedding_bag.default,
)

# Compiled code calls these; torch has no fake form of them, and would compute. Beside each, what
# has its shapes.
SHAPES_OF: dict[OpOverload, OpOverload] = {aten._scaled_mm.out: aten.mm.default}


class CudaFakeMode(KernelFakeMode):
    """Fake tensors that are on the CPU and get the results that those on CUDA get."""

    on_cpu = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is rng.get_rng_state:
            with self:
                return torch.empty(rng.ACCELERATOR_STATE_BYTES, dtype=torch.uint8)
        if func in SHAPES_OF:
            out: torch.Tensor = (kwargs or {})["out"]
            with self:
                shape = SHAPES_OF[func](*args[:2]).shape
            if out.shape != shape:
                raise RuntimeError(f"{func}: out is {out.shape}, not {shape}")
            return out
        if func not in AS_ON_META:
            return super().__torch_dispatch__(func, types, args, kwargs)
        leaves, spec = trees.tree_flatten((args, kwargs or {}))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        if device == META:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            args, kwargs = trees.tree_unflatten([_like(leaf, META) for leaf in leaves], spec)
            results, form = trees.tree_flatten(func(*args, **kwargs))
            return trees.tree_unflatten([_like(x, device) for x in results], form)


def decides(mode: fake_tensors.FakeTensorMode, op: Any) -> bool:
    """True if results of `op` that are fakes of `mode` are CUDA's, where the CPU's are others."""
    return isinstance(mode, CudaFakeMode) and op in AS_ON_META


def _like(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


# -- what cannot be planned for ------------------------------------------------------------------

RECURRENT = tuple(
    f"{name}.{overload}"
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
)


def _refuse_recurrent(name: str, *args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        f"aten::{name} runs as cuDNN's on CUDA, whose backward has no meta kernel in PyTorch and "
        f"whose reserve only cuDNN can size: its memory cannot be planned without a GPU. Plan it "
        f"without device='cuda', for the operators of the CPU, or on the GPU."
    )


# -- comparison with a capture on a GPU ------------------------------------------------------------

Signature = tuple[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]]


def capture_signature(program: Program) -> collections.Counter[Signature]:
    """What a program computes, to compare plans for CUDA made with and without a GPU.

    Returns:
        How many operators there are of each name and of each list of result shapes and dtypes;
        getitems are not counted.
    """
    return collections.Counter(
        (
            str(node.target),
            tuple((tuple(t.shape), t.dtype) for t in tags.tensors(node.meta.get("val"))),
        )
        for node in program.graph.nodes
        if isinstance(node.target, OpOverload)
    )
