"""The last way to capture a call: let Dynamo read Python's bytecode, and trace the graph it finds.

It knows Python that runs through the tracer only as values, such as NumPy on tensors. Its graph is
called in place of the model; the joint trace of it is the same as of any other module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, fx, nn

from fxshard import compat
from fxshard.errors import CaptureError

Source = tuple[Literal["state", "input", "constant"], Any]  # FQN, flat leaf, the value itself


@dataclasses.dataclass(frozen=True)
class Graph:
    """Dynamo's graph of one call, and how it stands for the model.

    Attributes:
        module: the graph.
        sources: per placeholder, where its value comes from.
        outputs: per flat leaf of what the model returns: the number of the graph's output, or the
            leaf itself, if it is no tensor.
        out_spec: tree of what the model returns.
        replaced: name of each buffer that forward replaces -> number of the graph's output.
    """

    module: fx.GraphModule
    sources: tuple[Source, ...]
    outputs: tuple[tuple[Literal["computed", "constant"], Any], ...]
    out_spec: compat.TreeSpec
    replaced: dict[str, int]

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``model(*args, **kwargs)`` returns, by way of the graph."""
        leaves, _ = compat.tree_flatten((args, kwargs))
        state = _state(model)
        held: dict[str, Any] = {"state": state, "input": leaves}
        given = [held[kind][which] if kind in held else which for kind, which in self.sources]
        computed = fx.Interpreter(self.module).run(*given)
        for name, number in self.replaced.items():
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._buffers[key] = computed[number]
        out = [computed[which] if kind == "computed" else which for kind, which in self.outputs]
        return compat.tree_unflatten(out, self.out_spec)


def _state(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def read(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], env: Any) -> Graph:
    """Dynamo's graph of ``model(*args, **kwargs)``, whose tensors are fake, of the ShapeEnv `env`.

    Raises:
        CaptureError: the call makes several graphs, or returns or keeps what is in none of them.
    """
    before = _state(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    leaves, _ = compat.tree_flatten((args, kwargs))
    where: dict[int, Source] = {id(leaf): ("input", i) for i, leaf in enumerate(leaves)}
    where |= {id(tensor): ("state", name) for name, tensor in reversed(before.items())}
    ran: list[tuple[fx.GraphModule, tuple[Any, ...], Sequence[Any]]] = []

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Any:
        def run(*given: Any) -> Any:
            with env.ignore_fresh_unbacked_symbols():  # nobody takes those of this run
                computed = module(*given)
            ran.append((module, given, computed))
            return computed

        return run

    out = compat.dynamo(model, args, kwargs, backend)
    if len(ran) != 1:
        raise CaptureError(f"Dynamo made {len(ran)} graphs of the call, where one is needed.")
    ((module, given, computed),) = ran
    for node in module.graph.nodes:  # Dynamo names modules by the way to them from its frame
        stack = node.meta.get("nn_module_stack") or {}
        for key, (path, cls) in stack.items():
            stack[key] = path.removeprefix("L['model']").removeprefix("."), cls
    numbers = {id(value): number for number, value in enumerate(computed)}
    found, out_spec = compat.tree_flatten(out)
    outputs: list[tuple[Literal["computed", "constant"], Any]] = []
    for leaf in found:
        if isinstance(leaf, Tensor) and id(leaf) not in numbers:
            raise CaptureError("the model returns a tensor that is not in Dynamo's graph.")
        is_computed = id(leaf) in numbers and isinstance(leaf, (Tensor, *compat.SYMBOLIC))
        outputs.append(("computed", numbers[id(leaf)]) if is_computed else ("constant", leaf))
    replaced = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer is not buffers.get(name):
            if id(buffer) not in numbers:
                raise CaptureError(f"buffer {name!r} is replaced by what is not in Dynamo's graph.")
            replaced[name] = numbers[id(buffer)]
    for name in replaced:
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._buffers[key] = buffers[name]
    sources = tuple(where.get(id(value), ("constant", value)) for value in given)
    return Graph(module, sources, tuple(outputs), out_spec, replaced)
