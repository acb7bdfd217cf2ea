"""Tensors that say what they are and hold nothing, and operators on them, each worked out once.

A fake tensor costs a hundred microseconds per operator. The blocks of a deep model run the same
operators on the same shapes again and again: the second time, a table has the answer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fxshard._torch import autograd, fake_tensors, sizes
from fxshard._torch.fake_tensors import FakeTensorMode
from fxshard.capture import strides
from fxshard.capture.repeat.places import Formless

Size = Any  # an int, or a torch.SymInt: open sizes are symbols


@dataclasses.dataclass(frozen=True, eq=False)
class TensorForm:
    """All that an operator may ask of a tensor but its values.

    Attributes:
        shape, stride, offset: of it, in elements; open sizes are symbols.
        dtype, device: of it.
        nbytes: of its storage.
        key: all of that, hashable: forms of equal keys are equal.
    """

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    dtype: torch.dtype
    device: torch.device
    nbytes: Size
    key: tuple[Any, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        numbers = (*self.shape, *self.stride, self.offset, self.nbytes)
        key = (len(self.shape), self.dtype, self.device, *map(_hashable, numbers))
        object.__setattr__(self, "key", key)


def _hashable(size: Size) -> Any:
    return size if type(size) is int else sizes.expression(size)


class Ghost(Tensor):
    """A tensor that has a form only."""

    form: TensorForm

    @staticmethod
    def of(form: TensorForm, requires_grad: bool = False) -> Ghost:
        """The ghost of a form."""
        ghost: Ghost = autograd.wrapper(
            Ghost, form.shape, form.stride, form.offset, form.dtype, form.device, requires_grad
        )
        ghost.form = form
        return ghost

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Outside of a rehearsal: `nn.Parameter` detaches what it is given."""
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].form)
        raise Formless(
            f"{func} reads what forward made in a rehearsal of the capture, and kept outside of "
            f"its modules: in a functools.cache, say. Let it be filled by a call of the model "
            f"before the capture, or hold it in a buffer"
        )

    __torch_function__ = autograd.NO_TORCH_FUNCTION


def ghost_like(
    tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Ghost:
    """The ghost of a tensor that has a storage of its own; of a meta tensor, one on the CPU."""
    dtype = dtype or tensor.dtype
    own = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    shape, stride = tuple(tensor.shape), strides.of_state(tensor)
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    nbytes = (0 if 0 in shape else last + 1) * dtype.itemsize
    form = TensorForm(shape, stride, 0, dtype, device or own, nbytes)
    return Ghost.of(form, tensor.requires_grad)


class Table:
    """What operators make of forms.

    Args:
        mode: works out what is not in the table.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._made: dict[Any, Any] = {}

    def run(self, func: Any, args: Any, kwargs: Any, constants: Any, tensors: list[Tensor]) -> Any:
        """The result of an operator on ghosts.

        Args:
            func, args, kwargs: the call.
            constants: of the call, hashable.
            tensors: its tensors, in order.
        """
        if not all(isinstance(tensor, Ghost) for tensor in tensors):
            return self._worked_out(func, args, kwargs, tensors)[1]  # reads values, perhaps
        forms: list[Any] = [tensor.form for tensor in tensors]  # type: ignore[attr-defined]
        key = (func, constants, tuple(form.key for form in forms))
        if key in self._made:
            return _result(self._made[key], tensors)
        self._made[key], result = self._worked_out(func, args, kwargs, tensors)
        return result

    def _worked_out(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """A recipe for the result, and the result."""
        fakes: dict[int, Tensor] = {}
        for tensor in tensors:
            if isinstance(tensor, Ghost) and id(tensor) not in fakes:
                fakes[id(tensor)] = self._fake(tensor.form)

        def swap(value: Any) -> Any:
            if isinstance(value, Tensor):
                return fakes.get(id(value), value)
            if isinstance(value, (list, tuple)):
                return type(value)([swap(item) for item in value])
            return {k: swap(v) for k, v in value.items()} if isinstance(value, dict) else value

        with self.mode:
            out = func(*swap(args), **swap(kwargs))
        for tensor in tensors:
            if isinstance(tensor, Ghost) and form_of(fakes[id(tensor)]).key != tensor.form.key:
                raise Formless(f"{func} changes the shape of a tensor in place")
        order = [id(fakes.get(id(tensor), tensor)) for tensor in tensors]
        recipe = _recipe(out, order)
        return recipe, _result(recipe, tensors)

    def _fake(self, form: TensorForm) -> Tensor:
        return fake_tensors.fake_of(
            self.mode,
            *(fake_tensors.fake_storage(form.nbytes), form.shape, form.stride, form.offset),
            *(form.dtype, form.device),
        )


def form_of(tensor: Tensor) -> TensorForm:
    """The form of a fake tensor."""
    offset, nbytes = tensor.storage_offset(), tensor.untyped_storage().nbytes()
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return TensorForm(shape, stride, offset, tensor.dtype, tensor.device, nbytes)


def _recipe(out: Any, order: list[int]) -> Any:
    """A result with forms for new tensors, and places among the arguments for those given."""
    if isinstance(out, Tensor):
        return (order.index(id(out)),) if id(out) in order else form_of(out)
    if isinstance(out, (list, tuple)):
        return [type(out), *(_recipe(item, order) for item in out)]
    if isinstance(out, sizes.SYMBOLIC):
        raise Formless("a size depends on data")
    return {"is": out}


def _result(recipe: Any, tensors: list[Tensor]) -> Any:
    if isinstance(recipe, TensorForm):
        return Ghost.of(recipe)
    if isinstance(recipe, tuple):
        return tensors[recipe[0]]
    if isinstance(recipe, list):
        return recipe[0]([_result(item, tensors) for item in recipe[1:]])
    return recipe["is"]
