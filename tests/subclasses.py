"""Parameters of tensor subclasses that take part in their all-gather, as users write them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten

# Results of these operators stay of the subclass: what FSDP2 cuts, pads and copies shards with.
KEEP = (
    *(aten.detach.default, aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor),
    *(aten.copy_.default, aten.view.default, aten.as_strided.default, aten._to_copy.default),
    *(aten.split.Tensor, aten.clone.default, aten.new_empty.default, aten.alias.default),
)


def rewrite(out: Tensor, made: Tensor) -> None:
    """What FSDP2 asks of a second call: new numbers, of which autograd is to know nothing."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(made)


class Wrapped(Tensor):
    """Around one tensor; operators see that. What is sent is said by the classes below."""

    data_inside: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self.data_inside = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["data_inside"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.data_inside})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(x: Any) -> Any:
            return x.data_inside if isinstance(x, Wrapped) else x

        args, kwargs = pytree.tree_map(unwrapped, (args, kwargs or {}))
        made = func(*args, **kwargs)
        if func not in KEEP:
            return made
        return pytree.tree_map_only(Tensor, lambda x: cls(x), made)


class Narrow(Wrapped):
    """Sends bf16, and computes in the parameter's dtype again."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.data_inside.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        (sent,) = all_gather_outputs
        if out is not None:
            rewrite(out, sent)
            return None
        made = sent.to(param_dtype)
        return made, (made,)


class Bf16(Narrow):
    """Sends bf16, and computes in it."""

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        return None if out is not None else (all_gather_outputs[0], (all_gather_outputs[0],))


class Int8(Wrapped):
    """Sends int8 numbers and an fp32 scale per row."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        rows = self.data_inside.flatten(1)
        scale = rows.abs().amax(1, keepdim=True) / 127
        numbers = torch.round(self.data_inside / scale.view(-1, *[1] * (self.dim() - 1)))
        return (numbers.to(torch.int8), scale), tuple(outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        numbers, scale = all_gather_outputs
        assert tuple(numbers.shape) == metadata
        made = (numbers.to(torch.float32) * scale).to(param_dtype)
        if out is not None:
            rewrite(out, made)
            return None
        return made, (made,)


class Quantized(Tensor):
    """Numbers of int8 and a scale per row, which operators see multiplied."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), dtype=dtype, device=numbers.device
        )

    def __init__(self, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Quantized(inner["numbers"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.as_strided.default, aten.alias.default):
            first = args[0]
            return cls(func(first.numbers, *args[1:]), first.scale, first.dtype)

        def multiplied(x: Any) -> Any:
            return (x.numbers.to(x.dtype) * x.scale.to(x.dtype)) if isinstance(x, cls) else x

        args, kwargs = pytree.tree_map(multiplied, (args, kwargs or {}))
        return func(*args, **kwargs)


class Multiplied(Int8):
    """What arrives is the unsharded parameter, of a subclass of its own."""

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        if out is not None:  # it is made of what has arrived again
            return None
        return Quantized(*all_gather_outputs, param_dtype), all_gather_outputs


class Float8(Wrapped):
    """Sends float8 numbers; the scale of all ranks' rows goes beside them, as metadata."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        largest = self.data_inside.abs().max()
        if mesh is not None:
            largest = funcol.all_reduce(largest, "max", mesh.get_group())
            if isinstance(largest, funcol.AsyncCollectiveTensor):
                largest = largest.wait()
        scale = 448 / largest
        return ((self.data_inside * scale).to(torch.float8_e4m3fn),), scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        made = all_gather_outputs[0].to(param_dtype) / metadata
        if out is not None:
            rewrite(out, made)
            return None
        return made, (made,)


def wrapped(model: nn.Module, kind: Callable[[Tensor], Any], *names: str) -> nn.Module:
    """`model` with the weights of its linear layers in a subclass; or of `names` alone."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (not names or name in names):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model
