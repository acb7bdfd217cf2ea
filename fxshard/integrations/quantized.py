"""Frozen quantised weights, sharded and gathered as they are packed: for QLoRA and its kin.

A quantised weight is a tensor subclass around several tensors (integers, scales, zero points), or a
parameter that carries them. `packed` makes each of those a frozen parameter of its own, which is
sharded, gathered and planned as any other; where the weight is read, it is put together again, in
the program. So what is sent is what the quantisation has left, and operators are its own.
(docs/adr/0035)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from fxshard._torch import modes
from fxshard.errors import ConfigError
from fxshard.ir.extensions import has_extension

# What frozen numbers are sent as: no precision casts integers, and no backend sends 16-bit ones.
_CODES = {1: torch.uint8, 4: torch.int32, 8: torch.int64}


_INSTEAD = (
    "Merge adapters into a plain model: save them, and load them into the base that is not packed "
    "(PeftModel.from_pretrained)."
)


def packed(model: nn.Module) -> nn.Module:
    """Take the quantised weights of a model apart, so that it can be sharded.

    Call it after the adapters are in place, and before `fxshard.compile` or `fxshard.fully_shard`::

        model = get_peft_model(quantised, LoraConfig(...))
        model = fxshard.compile(packed(model))

    Weights of torchao (``quantize_``) and of other wrapper subclasses, and layers of bitsandbytes
    (`Linear4bit`, `Linear8bitLt`). The parameter ``layer.weight`` is in the model as
    ``layer.parametrizations.weight.original0``, ``1``, ... (`torch.nn.utils.parametrize`), whose
    floating numbers are stored as integers of their bits; ``layer.weight`` reads as before, and
    cannot be assigned.

    Args:
        model: changed in place; every quantised weight of it is frozen.

    Returns:
        `model`.

    Raises:
        ConfigError: a quantised weight is trained, shared by several layers, not quantised yet, or
            of a layer that reads it in another way.
    """
    found = list(_quantised(model))
    _check(model, found)
    for fqn, module, name, param in found:
        apart = _Subclass(param.data) if not _is_of_bitsandbytes(param) else _of_layer(module)
        parametrize.register_parametrization(module, name, apart, unsafe=True)
        around: Any = _around(model, fqn)
        if getattr(around, "base_layer", None) is module and hasattr(around, "merge"):
            around.merge = functools.partial(_refuse_merge, f"{fqn}.{name}")
    return model


_Found = tuple[str, Any, str, Any]  # FQN of a module, it, and name and value of a parameter of it


def _quantised(model: nn.Module) -> Iterator[_Found]:
    """The parameters that are more than their data.

    But those that are trained and say themselves what is gathered, as torchao's float8 weights.
    """
    for fqn, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None or (param.requires_grad and has_extension(param.data)):
                continue
            if modes.is_wrapper(type(param.data)) or _is_of_bitsandbytes(param):
                yield fqn, module, name, param


def _check(model: nn.Module, found: Sequence[_Found]) -> None:
    """Raise ConfigError if one of them cannot be packed; nothing is changed yet."""
    seen: dict[int, str] = {}
    for fqn, module, name, param in found:
        where = f"{fqn}.{name}".lstrip(".")
        if isinstance(param, DTensor):
            raise ConfigError(f"{where!r} is sharded already. Pack the model before it is sharded.")
        if id(param) in seen:
            raise ConfigError(
                f"{seen[id(param)]!r} and {where!r} are one quantised weight. Packed, each layer "
                f"has its own: give one of them a copy, or leave such layers unquantised."
            )
        seen[id(param)] = where
        if param.requires_grad:
            raise ConfigError(
                f"{where!r}, a {type(param).__name__}, is trained, and packed weights are frozen. "
                f"Freeze it (requires_grad_(False)), or quantise after training."
            )
        if _is_of_bitsandbytes(param):
            _check_layer(_around(model, fqn), fqn, module, param)


def _around(model: nn.Module, fqn: str) -> nn.Module:
    return model.get_submodule(fqn.rpartition(".")[0])


def _refuse_merge(where: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        f"an adapter is merged into {where!r}, which is packed and frozen. {_INSTEAD}"
    )


# -- what a weight is made of ------------------------------------------------------------------


class _Apart(nn.Module):
    """Takes a weight apart and puts it together: a parametrization of it by several tensors."""

    def right_inverse(self, weight: Tensor) -> list[Tensor]:
        """Integers of the same bits as the tensors that `weight` is made of."""
        if hasattr(self, "parts"):
            raise ConfigError(f"a packed weight is assigned, which is frozen. {_INSTEAD}")
        parts = self._taken(weight)
        self.parts = [(tuple(part.shape), part.dtype) for part in parts]
        return [_code(part) for part in parts]

    def forward(self, *codes: Tensor) -> Any:
        """The weight, of codes of all ranks' rows."""
        pairs = zip(codes, self.parts, strict=True)
        return self._made([_decoded(code, shape, dtype) for code, (shape, dtype) in pairs])

    def _taken(self, weight: Any) -> list[Tensor]:
        raise NotImplementedError

    def _made(self, parts: list[Tensor]) -> Any:
        raise NotImplementedError


class _Subclass(_Apart):
    """A wrapper subclass, by what its class says of itself (``__tensor_flatten__``)."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.kind = type(weight)
        self.names, self.context = weight.__tensor_flatten__()
        self.shape, self.strides = weight.shape, weight.stride()
        inner = [getattr(weight, name) for name in self.names]
        nested = [_Subclass(t) if modes.is_wrapper(type(t)) else None for t in inner]
        self.nested = dict(zip(self.names, nested, strict=True))

    def _taken(self, weight: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for name, nested in self.nested.items():
            inner = getattr(weight, name)
            found += nested._taken(inner) if nested else [inner]
        return found

    def _count(self) -> int:
        return sum(nested._count() if nested else 1 for nested in self.nested.values())

    def _made(self, parts: list[Tensor]) -> Any:
        held = {}
        for name, nested in self.nested.items():
            own = nested._count() if nested else 1
            held[name] = nested._made(parts[:own]) if nested else parts[0]
            parts = parts[own:]
        return self.kind.__tensor_unflatten__(held, self.context, self.shape, self.strides)


class _FourBits(_Apart):
    """The weight of a `bitsandbytes.nn.Linear4bit`, and its quantisation state."""

    def _taken(self, weight: Any) -> list[Tensor]:
        state = weight.quant_state
        self.kind, inner = type(state), state.state2
        self.known = {"shape": state.shape, "quant_type": state.quant_type} | _blocks(state)
        self.second = _blocks(inner) if inner else {}
        more = [state.offset, inner.absmax, inner.code] if inner else []
        # quant_storage may be a floating dtype, and stands for bytes
        return [weight.data.view(torch.uint8), state.absmax, state.code, *more]

    def _made(self, parts: list[Tensor]) -> Any:
        data, absmax, code, *more = parts
        second = {}
        if more:
            inner = self.kind(more[1], code=more[2], **self.second)
            second = {"offset": more[0], "state2": inner}
        weight: Any = data.view_as(data)
        weight.quant_state = self.kind(absmax, code=code, **self.known, **second)
        return weight


def _blocks(state: Any) -> dict[str, Any]:
    return {"blocksize": state.blocksize, "dtype": state.dtype}


class _EightBits(_Apart):
    """The weight of a `bitsandbytes.nn.Linear8bitLt`, and its scales."""

    def _taken(self, weight: Any) -> list[Tensor]:
        return [weight.data, weight.SCB]

    def _made(self, parts: list[Tensor]) -> Any:
        data, scales = parts
        weight: Any = data.view_as(data)
        weight.CB, weight.SCB = data, scales
        return weight


def _code(part: Tensor) -> Tensor:
    """Integers of the bits of a tensor, which has at least one dimension then."""
    part = part.detach().reshape(part.shape or (1,)).contiguous()
    if part.dtype.itemsize == 2:  # exact
        part = part.to(torch.float32 if part.is_floating_point() else torch.int32)
    return part.view(_CODES[part.dtype.itemsize]) if part.is_floating_point() else part


def _decoded(code: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `_code` made `code` of."""
    if dtype.is_floating_point:
        code = code.view(torch.float32 if dtype.itemsize == 2 else dtype)
    return code.to(dtype).reshape(shape)


# -- bitsandbytes ----------------------------------------------------------------------------------


def _is_of_bitsandbytes(param: Any) -> bool:
    return type(param).__module__.partition(".")[0] == "bitsandbytes"


def _check_layer(around: Any, fqn: str, module: Any, param: Any) -> None:
    """Raise ConfigError if the weight of a layer cannot be packed.

    Args:
        around: the module that holds the layer, which may be one of PEFT.
    """
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    what = f"{fqn!r} is a {type(module).__name__} of bitsandbytes"
    if len(getattr(around, "lora_magnitude_vector", ())):
        raise ConfigError(
            f"{what} under DoRA, which reads the weight itself, and would take its packed bytes "
            f"for numbers. Use LoRA (use_dora=False), or a base that torchao quantises."
        )
    kinds = bitsandbytes.nn.Linear8bitLt, bitsandbytes.nn.Linear4bit
    eight = isinstance(module, kinds[0])
    if not isinstance(module, kinds) or type(module).forward is not kinds[not eight].forward:
        raise ConfigError(
            f"{what}, which fxshard does not know. Known are Linear4bit and Linear8bitLt; leave "
            f"other layers unquantised (llm_int8_skip_modules)."
        )
    done = param.dtype is torch.int8 if eight else param.bnb_quantized
    if not done:
        raise ConfigError(f"{what} that is not quantised yet. Move it first: model.to('cpu').")
    if not eight and getattr(param.quant_state, "packing_format_for_cpu", False):
        raise ConfigError(
            f"{what} that a forward in evaluation mode has packed for this processor. Pack the "
            f"model before it runs."
        )


def _of_layer(module: Any) -> _Apart:
    """How the weight of a layer is taken apart.

    The layer gets a class of ours, and loses what it has of the weight: its own forward keeps
    state, which a program has not.
    """
    four, eight = _layers()
    if hasattr(module.weight, "quant_state"):
        module.__class__, module.quant_state = four, None
        return _FourBits()
    if module.weight.SCB is None:  # it has run
        module.weight.SCB = module.state.SCB
    module.__class__ = eight
    module.state.CB = module.state.SCB = None
    return _EightBits()


class _PlainState(nn.Module):
    """A layer whose state dict has what the layer holds: of its weight the parts, once."""

    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict


@functools.cache
def _layers() -> tuple[type, type]:
    bitsandbytes: Any = importlib.import_module("bitsandbytes")

    class Linear4bit(_PlainState, bitsandbytes.nn.Linear4bit):  # type: ignore[misc]
        """Computes in the dtype of its input, as the original does for fp32 and bf16."""

        def forward(self: Any, x: Tensor) -> Tensor:
            weight = self.weight
            known = x.dtype in (torch.float32, torch.bfloat16) or self.compute_dtype is None
            inner = x if known else x.to(self.compute_dtype)
            bias = None if self.bias is None else self.bias.to(inner.dtype)
            found = bitsandbytes.matmul_4bit(
                inner, weight, bias=bias, quant_state=weight.quant_state
            )
            return found.to(x.dtype)

    class Linear8bitLt(_PlainState, bitsandbytes.nn.Linear8bitLt):  # type: ignore[misc]
        def forward(self: Any, x: Tensor) -> Tensor:
            weight = self.weight
            state = bitsandbytes.MatmulLtState()
            state.CB, state.SCB = weight.CB, weight.SCB
            state.has_fp16_weights, state.is_training = False, self.training
            state.threshold = self.state.threshold
            bias = None if self.bias is None else self.bias.to(x.dtype)
            found: Tensor = bitsandbytes.matmul(x, weight, bias=bias, state=state)
            return found

    return Linear4bit, Linear8bitLt
