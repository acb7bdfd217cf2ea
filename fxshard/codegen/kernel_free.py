"""Code that Inductor generated, run on fake tensors without its kernels: what it does with memory.

A generated module allocates, launches kernels and drops what it no longer needs in plain Python
statements. Here are the names that these statements refer to; one that is not here is an error
where it is read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Empty = Callable[[Any, Any, torch.dtype, str], Tensor]


class Kernel:
    """Stands in for a kernel: it can be called and launched, and does nothing."""

    def __init__(self, name: str, ran: Callable[[str], None]) -> None:
        self._name, self._ran = name, ran

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._ran(self._name)

    run = __call__


class Torch:
    """Stands in for ``torch``: what is given in its place, and everything else."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def namespace(
    module: ast.Module,
    name: str,
    empty: Empty,
    ran: Callable[[str], None],
    names: Mapping[str, Any],
) -> dict[str, Any]:
    """What the statements of the module run in, with ``call`` in it.

    Args:
        name: for tracebacks.
        empty: makes a tensor of sizes, strides, a dtype and a device.
        ran: called with the name of each kernel that is launched.
        names: what the caller adds: ``torch``, ``device``, ``aten``, ``extern_kernels``, constants.
    """
    known: dict[str, Any] = {
        "__name__": name,
        "inf": float("inf"),
        "nan": float("nan"),
        "empty_strided": lambda size, stride, *, dtype, device: empty(size, stride, dtype, device),
        "empty_strided_cpu": lambda size, stride, dtype: empty(size, stride, dtype, "cpu"),
        "empty_strided_cuda": lambda size, stride, dtype: empty(size, stride, dtype, "cuda"),
        "reinterpret_tensor": reinterpret,
        "assert_size_stride": _nothing,
        "assert_size_stride_grouped": _nothing,  # since torch 2.15
        "assert_alignment": _nothing,
        "get_raw_stream": _nothing,
        **names,
    }
    body: list[ast.stmt] = []
    for statement in module.body:
        if is_runner(statement):
            body.append(statement)
        elif isinstance(statement, ast.Assign) and "async_compile." in ast.unparse(statement.value):
            for target in statement.targets:
                known[ast.unparse(target)] = Kernel(ast.unparse(target), ran)
    exec(compile(ast.Module(body, []), name, "exec"), known)
    return known


def is_runner(statement: ast.stmt) -> bool:
    """What ``call`` is made of: the class that has it, and what is assigned from it."""
    if isinstance(statement, ast.ClassDef):
        return statement.name == "Runner"
    if isinstance(statement, ast.FunctionDef):
        return statement.name == "call"
    names = {ast.unparse(t) for t in getattr(statement, "targets", ())}
    return bool(names & {"runner", "call"})


def reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    """The storage of `tensor`, looked at with other sizes and strides, `offset` further on."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _nothing(*args: Any) -> None:
    return None
