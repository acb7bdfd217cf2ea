"""Tensors without data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorConfig,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
)
from torch.utils._python_dispatch import _disable_current_modes

from fxshard._torch.modes import outside_modes

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "convolves_with_onednn",
    "fake_empty",
    "fake_of",
    "fake_over",
    "fake_storage",
    "fake_view",
    "is_fake",
    "suggest_memory_format",
    "swaps_of_fakes",
    "values_as_text",
]


def _fake(mode: FakeTensorMode, plain: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``FakeTensor(mode, plain, device)``, of a plain meta tensor that needs no gradient.

    The constructor spends most of its time on its arguments and on attributes that are the same for
    all new fakes; where that is so, it is asked once, and its answer is taken over. A device
    without its index is normalised each time: which one is meant may change.
    (torch/_subclasses/fake_tensor.py, ``FakeTensor.__new__``)
    """
    indexed = device.type == "cpu" or (device.index is not None and device.type != "meta")
    if not indexed or FakeTensorConfig.debug:
        return FakeTensor(mode, plain, device)
    attributes = _attributes(device).copy()
    attributes["fake_mode"] = mode
    fake = torch.Tensor._make_subclass(
        FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__ = attributes
    return fake


@functools.cache
def _attributes(device: torch.device) -> dict[str, Any]:
    """The attributes of a new fake tensor on `device`, of no mode."""
    fake = FakeTensor(FakeTensorMode(), torch.empty((0,), device=_META), device)
    fake.__dict__["fake_mode"] = None
    return fake.__dict__


_META = torch.device("meta")


def fake_empty(
    mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What ``torch.empty`` makes under `mode`, without its dispatch: that takes ten times as long.

    Call it outside of `mode`.
    """
    return _fake(mode, torch.empty(shape, dtype=dtype, device=_META), device)


def convolves_with_onednn(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether the CPU runs this convolution, of fake tensors, by oneDNN.

    Which kernel it takes depends on dtype, sizes, threads and processor
    (ATen/native/Convolution.cpp, ``use_mkldnn``): torch is asked, with tensors that nobody fills.
    """
    kinds: Any = getattr(torch._C, "_ConvBackend")  # noqa: B009, the stubs call it otherwise
    with _disable_current_modes():
        chosen = torch._C._select_conv_backend(
            *(
                torch.empty_strided(_examples(t.shape), _examples(t.stride()), dtype=t.dtype)
                for t in (input, weight)
            ),
            bias=None,
            bias_sizes=bias_sizes,
            stride=stride,
            padding=padding,
            dilation=dilation,
            transposed=transposed,
            output_padding=output_padding,
            groups=groups,
        )
    # the transposed kind is between the two, and has no name here
    return bool(kinds.Mkldnn.value <= chosen.value <= kinds.MkldnnEmpty.value)


def _examples(sizes: Sequence[Any]) -> list[int]:
    """What open sizes are in the example call; asking for their values would close them."""
    return [n.node.hint if isinstance(n, torch.SymInt) else n for n in sizes]


def fake_view(
    mode: FakeTensorMode, base: torch.Tensor, view: Callable[[torch.Tensor], Any]
) -> torch.Tensor:
    """``view(base)`` of a fake tensor under `mode`, without its dispatch, outside of `mode`."""
    plain = torch.empty((0,), dtype=base.dtype, device=_META)
    plain.set_(base.untyped_storage(), base.storage_offset(), base.size(), base.stride())
    return _fake(mode, view(plain), base.device)


def fake_over(
    mode: FakeTensorMode, like: torch.Tensor, storage: torch.UntypedStorage
) -> torch.Tensor:
    """A fake tensor in `storage` with offset, sizes and strides of `like`, outside of `mode`."""
    plain = torch.empty((0,), dtype=like.dtype, device=_META)
    plain.set_(storage, like.storage_offset(), like.size(), like.stride())
    return _fake(mode, plain, like.device)


def fake_storage(nbytes: int | torch.SymInt) -> torch.UntypedStorage:
    """A storage without memory, for `fake_of`.

    Made directly, one of an open size would take its number, and close it.
    """
    if isinstance(nbytes, torch.SymInt):
        return torch.empty((nbytes,), dtype=torch.uint8, device=_META).untyped_storage()
    return torch.UntypedStorage(nbytes, device=_META)


def fake_of(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor in `storage`, which is one of `fake_storage`.

    Without the dispatch of `mode`; call it outside of it.
    """
    plain = torch.empty((0,), dtype=dtype, device=_META)
    plain.set_(storage, offset, shape, stride)
    return _fake(mode, plain, device)


def values_as_text(tensor: torch.Tensor) -> str:
    """The values of a real tensor, also under a fake mode."""
    with outside_modes():
        return str(tensor.tolist())


def swaps_of_fakes() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``torch.utils.swap_tensors``, which ``Module.to`` exchanges fake parameters with.

    Torch refuses to swap what something refers to, weakly too, and refers so to some fakes itself.
    They get other data, as ``Module.to`` gives to tensors that are not fake. Those that come from
    meta cannot, and are swapped, once torch's table of which fake stands for which tensor of meta
    has forgotten them. (torch/utils/__init__.py; `MetaConverter.tensor_memo`)
    """
    plain = torch.utils.swap_tensors

    def swap(first: torch.Tensor, second: torch.Tensor) -> None:
        if not is_fake(first):
            return plain(first, second)
        try:
            first.data = second.detach()
        except RuntimeError:
            for each in (first, second):
                if isinstance(each, FakeTensor):  # a DTensor is in no table itself
                    _forgotten(each)
            plain(first, second)

    return swap


def _forgotten(fake: FakeTensor) -> None:
    """It stands for no tensor of meta any more, which it was made of."""
    memo = fake.fake_mode.fake_tensor_converter.meta_converter.tensor_memo
    for key in [key for key, each in memo.items() if each is fake]:
        del memo[key]
